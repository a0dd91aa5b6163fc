"""The ranks on each machine, and the arrays of a machine as one row of bytes.

A machine sends a row in all_gather. It begins with the length of the layouts, then has the layouts
of the arrays (``pack_layouts``), then the arrays. Pure; runs on any thread. Read next:
``machines_route.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pslite.collective.arrays import Bytes
from pslite.collective.wire import ArrayLayout, pack_layouts, unpack_layouts
from pslite.errors import ProtocolError

_LENGTH_BYTES = 8


class Machines(NamedTuple):
    """The ranks of a group on each machine, in the order of their lowest ranks."""

    members: tuple[tuple[int, ...], ...]
    own: int
    """The index of this worker's machine."""
    place: int
    """The index of this worker among its machine's members."""

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks on this machine."""
        return self.members[self.own]

    @property
    def have_neighbours(self) -> bool:
        """Whether any two ranks share a machine."""
        return max(map(len, self.members)) > 1

    def of(self, rank: int) -> int:
        """Return the machine of a rank."""
        return next(at for at, ranks in enumerate(self.members) if rank in ranks)


def empty_row(layouts: Sequence[ArrayLayout]) -> tuple[Bytes, list[Bytes]]:
    """Return a row for one array of each rank of a machine, and the places to fill."""
    head = pack_layouts(layouts)
    lengths = [layout.lengths[0] for layout in layouts]
    row = np.empty(_LENGTH_BYTES + len(head) + sum(lengths), np.uint8)
    start = len(head).to_bytes(_LENGTH_BYTES, "little") + head
    row[: len(start)] = np.frombuffer(start, np.uint8)
    return row, _cut(row[len(start) :], lengths)


def arrays_of(
    rows: Bytes, machines: Sequence[Sequence[int]]
) -> tuple[list[ArrayLayout], list[Bytes]]:
    """Split the rows of all machines into each rank's layout and bytes.

    Raises:
        ProtocolError: the rows are malformed.
    """
    found: dict[int, tuple[ArrayLayout, Bytes]] = {}
    for ranks in machines:
        length = int.from_bytes(rows[:_LENGTH_BYTES].tobytes(), "little")
        head, rest = rows[_LENGTH_BYTES:][:length], rows[_LENGTH_BYTES + length :]
        layouts = unpack_layouts(head.tobytes(), len(ranks))
        lengths = [sum(layout.lengths) for layout in layouts]
        if sum(lengths) > len(rest):
            raise ProtocolError(f"expected {sum(lengths)} bytes of arrays, got {len(rest)}")
        found.update(zip(ranks, zip(layouts, _cut(rest, lengths), strict=True), strict=True))
        rows = rest[sum(lengths) :]
    ordered = [found[rank] for rank in range(len(found))]
    return [layout for layout, _ in ordered], [array for _, array in ordered]


def _cut(row: Bytes, lengths: Sequence[int]) -> list[Bytes]:
    return np.split(row[: sum(lengths)], np.cumsum(lengths)[:-1])
