"""The route of a group's collective calls if all its workers are on one machine.

Calls in order use rings (``ring_opening.py``); ``ready_order.py`` puts calls with a name into an
order. Read next: ``shared_memory_driver.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeVar

import numpy as np

from pslite.collective.arrays import Array, Bytes, flat, layout_of, piece_for, receivers
from pslite.collective.shared_memory_algorithms import Description, Reduce, Take
from pslite.collective.shared_memory_driver import SharedMemoryDriver
from pslite.collective.sums import DTYPES, reduce_in_order
from pslite.collective.wire import (
    pack_collective,
    pack_layouts,
    unpack_layouts,
)
from pslite.future import Future
from pslite.protocol.collective import CallKey, CollectiveCall

T = TypeVar("T")


class SharedMemoryRoute:
    """Makes the calls of one rank through rings."""

    def __init__(self, host: SharedMemoryDriver, rank: int) -> None:
        self.host = host
        self._rank = rank

    def close(self, error: BaseException | None = None) -> None:
        """Release the ring; unfinished calls fail with ``error``."""
        self.host.close(error)

    def make(
        self,
        key: CallKey,
        call: CollectiveCall,
        outgoing: Sequence[Array],
        into: Sequence[Array],
        value: T,
    ) -> Future[T]:
        """Make a call whose sizes all ranks know, as ``ServerRoute`` does."""
        pieces, places = list(map(flat, outgoing)), list(map(flat, into))
        dtype = DTYPES[call.dtype] if call.dtype else np.dtype(np.uint8)
        if call.kind == "all_reduce":
            array, out = pieces[0].view(dtype), places[0].view(dtype)
            description = Description(pack_collective(call), (array.nbytes,))
            return self.host.all_reduce(
                key.text(call), description, array, out, reducing(call), value=value
            )
        sizes = tuple(len(piece) for piece in pieces)
        take: Take = _ignore
        if places and call.op:
            take = _reduced_into(places[0].view(dtype), reducing(call))
        elif places:
            take = _copied_into(places[0], call.root)
        return self.host.exchange(
            key.text(call),
            Description(pack_collective(call), sizes),
            pieces,
            lambda _: take,
            is_each=call.kind == "reduce_scatter",
            nbytes=max((prod(shape) * dtype.itemsize for shape in call.shapes), default=0),
            value=value,
        )

    def exchange(
        self,
        key: CallKey,
        call: CollectiveCall,
        outgoing: Sequence[Array],
        sources: Sequence[int],
        outs: Sequence[Array] | None,
    ) -> Future[list[Array]]:
        """Make a call with arrays of any size; return one array from each of ``sources``."""
        index = piece_for(call, self._rank)
        layout = layout_of(outgoing)
        found: list[Array] = []

        def begin(calls: Sequence[Description]) -> Take:
            layouts = [unpack_layouts(each.note, 1)[0] for each in calls]
            found.extend(receivers(layouts, sources, index, outgoing, outs))
            places = list(zip(sources, map(flat, found), strict=True))

            def take(start: int, chunk: list[Bytes]) -> None:
                for source, place in places:
                    part = place[start : start + len(chunk[source])]
                    part[:] = chunk[source][: len(part)]

            return take

        return self.host.exchange(
            key.text(call),
            Description(pack_collective(call), tuple(layout.lengths), pack_layouts([layout])),
            list(map(flat, outgoing)),
            begin,
            is_each=call.kind in ("scatter", "all_to_all"),
            value=found,
        )


def _ignore(start: int, pieces: list[Bytes]) -> None:
    pass


def _copied_into(place: Bytes, root: int) -> Take:
    def take(start: int, pieces: list[Bytes]) -> None:
        part = place[start : start + len(pieces[root])]
        part[:] = pieces[root][: len(part)]

    return take


def _reduced_into(place: Array, reduce: Reduce) -> Take:
    def take(start: int, pieces: list[Bytes]) -> None:
        first = start // place.itemsize
        part = place[first : first + len(pieces[0]) // place.itemsize]
        reduce([piece[: part.nbytes].view(part.dtype) for piece in pieces], part)

    return take


def reducing(call: CollectiveCall, num_ranks: int = 0) -> Reduce:
    """Return a function that combines arrays; an average divides by ``num_ranks``."""

    def reduce(arrays: Sequence[Array], out: Array) -> None:
        reduce_in_order(call.op, call.dtype, call.factor, arrays, out, num_ranks)

    return reduce
