"""Apply rounds of neighbouring parts as one array.

Parts that are neighbours in an arena and have the same optimizer are a ``Stretch``, which is
computed once for a list of parts. If the contributions of a round are neighbours in memory as well,
within one job or over several, the parts become one ``PartRun``, which adds and updates them
together. So a model of many small keys takes a few NumPy calls instead of one for each key. Runs
on the pool thread of the arena's lane. Pure: no sockets, no clock. Read next:
``arrays/cpu/sums.py`` for the arithmetic, ``part_table.py``, which calls this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.arrays.cpu.sums import Flat, Workspace, apply_round, sum_in_order
from kvstore.arrays.cpu.threads import Cores
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.compression import Chain
from kvstore.errors import OptimizerNotSet
from kvstore.optimizer.base import Optimizer
from kvstore.protocol.requests import bytes_of
from kvstore.server.memory import Arena, Part
from pslite.plane import Piece, cuts_of, piece_of

_ALONE = Cores(1)
#: The workspace block in which encoded contributions are added up.
_SUM_SLOT = 3


class Stretch(NamedTuple):
    """Neighbouring parts of one arena that one optimizer updates."""

    arena: Arena
    optimizer: Optimizer | None
    parts: tuple[Part, ...]
    first: int
    """Index of the first part in the list of parts from which the stretch was compiled."""
    offset: int
    """Where their bytes begin in a contribution to all parts of the list."""

    @property
    def nbytes(self) -> int:
        """The size of a contribution."""
        if self.chain is not None:
            return self.parts[0].push_bytes
        return (self.parts[-1].stop - self.parts[0].start) * self.arena.weight.itemsize

    @property
    def chain(self) -> Chain | None:
        """The codecs of its contributions; only a stretch of a single part has any."""
        return self.parts[0].rule.chain

    def is_followed_by(self, part: Part, optimizer: Optimizer | None, index: int) -> bool:
        """Return whether a part, the ``index``-th of the list, continues the stretch."""
        is_next = index == self.first + len(self.parts)
        return is_next and self.goes_with(part, optimizer, self.parts[-1].stop)

    def goes_with(self, part: Part, optimizer: Optimizer | None, start: int) -> bool:
        """Return whether a part begins at ``start`` and can be updated with this stretch."""
        return (
            part.start == start
            and part.arena is self.arena
            and part.rule.chain is self.chain is None
            and optimizer is self.optimizer
            and (optimizer is None or optimizer.scope != "key")
        )

    def of_one_count(self) -> Iterable[Stretch]:
        """Return the stretch, split into single parts if their update counts differ."""
        count = self.parts[0].count
        if all(part.count == count for part in self.parts):
            return (self,)
        offset = self.offset
        pieces = []
        for index, part in enumerate(self.parts):
            pieces.append(Stretch(self.arena, self.optimizer, (part,), self.first + index, offset))
            offset += pieces[-1].nbytes
        return pieces


@dataclass(slots=True)
class PartRun:
    """Neighbouring parts with neighbouring contributions, as one array."""

    stretch: Stretch
    """The first stretch."""
    stop: int
    """Where the parts end in their arena."""
    count: int
    pieces: list[Piece]
    members: list[tuple[int, range]]
    """Pairs (index of a job, some of its parts): the parts that fail if this run fails."""
    out: Flat | None
    """Bytes to which the new values are copied."""

    def extend(self, stretch: Stretch, count: int, pieces: Sequence[Piece]) -> bool:
        """Add parts if they continue this run."""
        if (
            count != self.count
            or len(pieces) != len(self.pieces)
            or self.out is not None
            or not self.stretch.goes_with(stretch.parts[0], stretch.optimizer, self.stop)
        ):
            return False
        for mine, theirs in zip(self.pieces, pieces, strict=True):
            if theirs.frame is not mine.frame or theirs.start != mine.stop:
                return False
        self.stop = stretch.parts[-1].stop
        self.pieces = [
            Piece(mine.frame, mine.start, theirs.stop)
            for mine, theirs in zip(self.pieces, pieces, strict=True)
        ]
        return True

    def apply(self) -> None:
        """Add the contributions up and update."""
        arena, optimizer, chain = self.stretch.arena, self.stretch.optimizer, self.stretch.chain
        arena.changes += 1
        whole = slice(self.stretch.parts[0].start, self.stop)
        arena.keep_previous(whole)
        if optimizer is None and arena.store.ranks is None:
            raise OptimizerNotSet("dist_async needs an optimizer: call set_optimizer before push")
        if optimizer is not None:
            optimizer.check_dtype(arena.weight.dtype)
        weight, state = arena.weight[whole], [array[whole] for array in arena.state(None)]
        if chain is not None:
            total = self._decoded(chain, weight, arena.workspace)
            apply_round(weight, [total], optimizer, state, self.count + 1, arena.workspace)
            return
        itemsize = weight.itemsize
        # A worker's values may come in several frames: take pieces that end where a frame ends.
        begin = 0
        for end in [*cuts_of(self.pieces), weight.nbytes]:
            some = slice(begin // itemsize, end // itemsize)
            contributions = [
                bytes_of(piece_of(piece, begin, end)).view(weight.dtype) for piece in self.pieces
            ]
            mine = [array[some] for array in state]
            apply_round(
                weight[some],
                contributions,
                optimizer,
                mine,
                self.count + 1,
                arena.workspace,
                outs=() if self.out is None else (self.out[begin:end].view(weight.dtype),),
            )
            begin = end

    def _decoded(self, chain: Chain, weight: Flat, workspace: Workspace) -> Flat:
        """Return the sum of encoded contributions, in rank order, in the dtype of sums.

        It is valid until the arena's next sum. Raises ``ProtocolError`` before anything changes.
        """
        dtype = weight.dtype
        total = workspace.block(_SUM_SLOT, accumulation_dtype(dtype), len(weight))
        for index, piece in enumerate(self.pieces):
            chain.decode(bytes_of(piece), total, dtype=dtype, add=index > 0, cores=_ALONE)
        return total


def can_be_summed(stretch: Stretch) -> bool:
    """Return whether a sum in the dtype of the contributions has all their bits."""
    dtype = stretch.arena.weight.dtype
    return stretch.chain is None and accumulation_dtype(dtype) == dtype


def add_up_stretch(stretch: Stretch, payloads: Sequence[Piece], total: Flat) -> None:
    """Add up the contributions to a stretch; ``total`` is that of the whole job."""
    start, stop = stretch.offset, stretch.offset + stretch.nbytes
    dtype = stretch.arena.weight.dtype
    pieces = [piece_of(piece, start, stop) for piece in payloads]
    begin = 0
    for end in [*cuts_of(pieces), stretch.nbytes]:
        contributions = [bytes_of(piece_of(piece, begin, end)).view(dtype) for piece in pieces]
        out = total[start + begin : start + end].view(dtype)
        sum_in_order(contributions, out, stretch.arena.workspace)
        begin = end


def add_run(
    runs: list[PartRun], index: int, stretch: Stretch, payloads: Sequence[Piece], out: Flat | None
) -> None:
    """Add a stretch of the ``index``-th job to the last run, or begin a new run."""
    start, nbytes = stretch.offset, stretch.nbytes
    pieces = [piece_of(piece, start, start + nbytes) for piece in payloads]
    count = stretch.parts[0].count
    for part in stretch.parts:
        part.count = count + 1
    member = (index, range(stretch.first, stretch.first + len(stretch.parts)))
    if out is None and runs and runs[-1].extend(stretch, count, pieces):
        runs[-1].members.append(member)
        return
    mine = None if out is None else out[start : start + nbytes]
    runs.append(PartRun(stretch, stretch.parts[-1].stop, count, pieces, [member], mine))
