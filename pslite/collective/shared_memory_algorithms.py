"""The steps of collective calls through rings of shared memory.

A call is a generator. Each of its steps copies or adds up the values that are ready. Between steps
it yields the counter that all members must reach before the next step (``memory/ring.py``). The
members make the same calls in the same order, so their chunks have the same numbers. The first
chunk of a call carries its description. If the members' calls differ, all of them get an error, and
the next call can use the rings as usual. Sums are in the order of ranks. This module has no thread,
no clock and no wait: ``shared_memory_driver.py`` takes the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from pslite.errors import PSError, UsageError, describe, rebuild
from pslite.memory.ring import ARRIVED, DONE, MAX_DESCRIPTION, REDUCED, SLOTS, STAGED, Bytes, Ring
from pslite.wire.codec import pack_value, unpack_value

Array = np.ndarray[Any, Any]
Reduce = Callable[[Sequence[Array], Array], None]
"""A function that combines the arrays, which are in rank order, into the last argument."""
Steps = Generator["tuple[int, int]", None, None]
"""Yields (counter, count): the next step may run once all members have reached it."""
Take = Callable[[int, "list[Bytes]"], None]
"""A function of a chunk's offset in each member's piece, and of each member's bytes from there."""
Progress = Callable[[int], None]
"""A function that is told how many bytes of a result, from its beginning, are ready."""
Begin = Callable[["list[Description]"], Take]
"""A function of the members' descriptions that returns the function for their pieces."""
Mismatch = Callable[[int, bytes, int, bytes], PSError]
"""Makes the error for two members whose calls differ: (rank, call, other rank, other call)."""

_ALIGNMENT = 64
_MOST_OF_ERROR = 10_000
"""The most characters of an error that a stream carries."""


class Description(NamedTuple):
    """The description of a member's call."""

    call: bytes
    """The same on all members."""
    sizes: tuple[int, ...] = ()
    """The bytes of each piece that this member stages."""
    note: bytes = b""
    """What the others must know about the pieces."""

    def pack(self) -> bytes:
        """Return the description as bytes.

        Raises:
            UsageError: they do not fit into a ring.
        """
        numbers = [len(self.call), len(self.sizes), *self.sizes]
        packed = np.array(numbers, "<i8").tobytes() + self.call + self.note
        if len(packed) > MAX_DESCRIPTION:
            raise UsageError(
                f"the arrays of this call take {len(packed)} bytes to describe; shared memory has "
                f"room for {MAX_DESCRIPTION}: make several calls of fewer arrays"
            )
        return packed

    @staticmethod
    def unpack(data: bytes) -> Description:
        """Decode the bytes of ``pack``."""
        length, count = np.frombuffer(data[:16], "<i8").tolist()
        begin = 16 + 8 * count
        sizes = np.frombuffer(data[16:begin], "<i8")
        return Description(
            data[begin : begin + length], tuple(sizes.tolist()), data[begin + length :]
        )


class Stream:
    """Data that arrives at one member bit by bit, for the others. From any thread."""

    def __init__(self, ring: Ring, data: Bytes) -> None:
        self.data = data
        self._ring = ring
        self._ready = -1
        self._error: BaseException | None = None

    def grow(self, nbytes: int) -> None:
        """Note that the first ``nbytes`` have arrived."""
        self._ready = nbytes
        self._ring.note_arrival()

    def end(self, error: BaseException | None) -> None:
        """Note that all bytes have arrived, or that no more will arrive."""
        self._error = error
        self.grow(len(self.data))

    def head(self, upto: int) -> bytes | None:
        """Return the head of the chunk that ends at ``upto``; None if it is not complete."""
        if self._error is not None:
            role, rank = getattr(self._error, "role", ""), getattr(self._error, "rank", -1)
            kind, text = describe(self._error)
            return pack_value([kind, text[:_MOST_OF_ERROR], role, rank])
        if self._ready < min(upto, len(self.data)):
            return None
        return pack_value([len(self.data)])

    @staticmethod
    def total(head: bytes) -> int:
        """Return the number of bytes; raise the error that ended the stream, if any."""
        fields = unpack_value(head)
        if len(fields) > 1:
            kind, text, role, rank = fields
            raise rebuild(kind, text, role=role, rank=rank)
        return int(fields[0])


class RingCalls:
    """The calls of one member of a group.

    Args:
        ring: connected to the rings of the other members; there is at least one.
        mismatch: makes the error for a call that differs among members.

    All arrays are flat and C-contiguous, and belong to the call until its last step.
    """

    def __init__(self, ring: Ring, size: int, mismatch: Mismatch) -> None:
        self._ring = ring
        self._rank = ring.rank
        self._size = size
        self._mismatch = mismatch
        self._chunk = 0
        #: The first chunk of a call, until all members have described their calls.
        self._undecided: int | None = None

    def is_quick(self, nbytes: int) -> bool:
        """Return whether a piece of ``nbytes`` from each member fits into one chunk."""
        return nbytes <= self._ring.slot_bytes // self._size // _ALIGNMENT * _ALIGNMENT

    def all_reduce(
        self,
        call: Description,
        array: Array,
        out: Array | None,
        reduce: Reduce,
        progress: Progress = lambda nbytes: None,
    ) -> Steps:
        """Combine all members' arrays with ``reduce`` into ``out`` (may be ``array``).

        Members with ``out=None`` get no result. ``progress`` is told how many bytes are done.
        """
        if self.is_quick(array.nbytes):
            return self._reduce_whole(call, array, out, reduce, progress)
        return self._reduce_by_slices(call, array, out, reduce, progress)

    def _reduce_whole(
        self,
        call: Description,
        array: Array,
        out: Array | None,
        reduce: Reduce,
        progress: Progress,
    ) -> Steps:
        """Reduce small arrays: every member adds up whole arrays."""
        nbytes = array.nbytes

        def begin(_: list[Description]) -> Take:
            def take(_: int, pieces: list[Bytes]) -> None:
                if out is not None:
                    reduce([piece[:nbytes].view(array.dtype) for piece in pieces], out)
                    progress(nbytes)

            return take

        return self.exchange(call, [as_bytes(array)], begin)

    def exchange(
        self, call: Description, pieces: Sequence[Bytes], begin: Begin, *, is_each: bool = False
    ) -> Steps:
        """Let every member read a piece from each of the others.

        Args:
            pieces: the pieces that this member stages: none, or one; with ``is_each`` one for each
                member. The description has their sizes.
            begin: if it raises an error, only this member gets it and skips the values.
        """
        ring, rank = self._ring, self._rank
        width = ring.slot_bytes
        if is_each:
            width = ring.slot_bytes // self._size // _ALIGNMENT * _ALIGNMENT
        mine = slice(rank * width, (rank + 1) * width) if is_each else slice(0, width)
        description = call.pack()
        take: Take | None = None
        failure: PSError | None = None
        start, stop = 0, 1
        while start < stop:
            chunk = self._chunk
            yield DONE, chunk - SLOTS + 1
            slot = ring.staged(chunk, rank)
            for index, piece in enumerate(pieces):
                part = piece[start : start + width]
                slot[index * width : index * width + len(part)] = part
            if start == 0:
                ring.describe(chunk, description)
            self._chunk += 1
            ring.announce(STAGED, chunk + 1)
            if start == 0:
                calls = yield from self._agreed(chunk, call, description)
                stop = max([1, *(size for each in calls for size in each.sizes)])
                try:
                    take = begin(calls)
                except PSError as error:
                    failure = error
            else:
                yield STAGED, chunk + 1
            if take is not None:
                take(start, [ring.staged(chunk, each)[mine] for each in range(self._size)])
            self._finish(chunk)
            start += width
        if failure is not None:
            raise failure

    def stream(self, leader: int, stream: Stream | None, take: Take) -> Steps:
        """Let every member read the leader's stream; only the leader knows its length.

        Args:
            stream: on the leader, its data.
            take: on the others, called with the offset and a list of the bytes from there.
        """
        ring, width = self._ring, self._ring.slot_bytes
        start, total = 0, 1
        while start < total:
            chunk = self._chunk
            yield DONE, chunk - SLOTS + 1
            if stream is not None:
                while True:
                    seen = ring.arrived()
                    head = stream.head(start + width)
                    if head is not None:
                        break
                    yield ARRIVED, seen + 1
                part = stream.data[start : start + width]
                ring.staged(chunk, leader)[: len(part)] = part
                ring.describe(chunk, head)
            self._chunk += 1
            ring.announce(STAGED, chunk + 1)
            if stream is None:
                yield STAGED, chunk + 1
            try:
                total = Stream.total(ring.description(chunk, leader))
                if stream is None:
                    take(start, [ring.staged(chunk, leader)[: max(total - start, 0)]])
            finally:
                self._finish(chunk)
            start += width

    def _reduce_by_slices(
        self,
        call: Description,
        array: Array,
        out: Array | None,
        reduce: Reduce,
        progress: Progress,
    ) -> Steps:
        """Reduce large arrays: each member adds up one slice and reads the others'.

        Three chunks are in flight at a time: one is staged, one is added up, one is read.
        """
        ring, rank, size = self._ring, self._rank, self._size
        width = ring.slot_bytes // (size - 1) // _ALIGNMENT * _ALIGNMENT // array.itemsize
        cuts = _cuts(array.size, width, size)
        first = self._chunk
        description = call.pack()
        for step in range(len(cuts) + 2):
            if step < len(cuts):
                chunk = first + step
                yield DONE, chunk - SLOTS + 1
                self._stage_slices(chunk, array, cuts[step])
                if step == 0:
                    ring.describe(chunk, description)
                self._chunk += 1
                ring.announce(STAGED, chunk + 1)
                if step == 0:
                    yield from self._agreed(chunk, call, description)
            if 0 <= step - 1 < len(cuts):
                chunk = first + step - 1
                yield STAGED, chunk + 1
                own = slice(*cuts[step - 1][rank])
                result = ring.result(chunk, rank)[: (own.stop - own.start) * array.itemsize]
                total = result.view(array.dtype)
                reduce(self._contributions(chunk, array, own), total)
                if out is not None:
                    out[own] = total
                ring.announce(REDUCED, chunk + 1)
            if step >= 2:
                chunk = first + step - 2
                yield REDUCED, chunk + 1
                for peer, (start, stop) in enumerate(cuts[step - 2]):
                    if peer != rank and out is not None:
                        found = ring.result(chunk, peer)[: (stop - start) * array.itemsize]
                        out[start:stop] = found.view(array.dtype)
                ring.announce(DONE, chunk + 1)
                if out is not None:
                    progress(cuts[step - 2][-1][1] * array.itemsize)

    def _stage_slices(self, chunk: int, array: Array, cuts: list[tuple[int, int]]) -> None:
        """Write the slices for the other members, one after another."""
        slot, rank = self._ring.staged(chunk, self._rank), self._rank
        width = self._width()
        for peer, (start, stop) in enumerate(cuts):
            if peer != rank:
                place = slot[_place(rank, peer) * width :][: (stop - start) * array.itemsize]
                place.view(array.dtype)[:] = array[start:stop]

    def _contributions(self, chunk: int, array: Array, own: slice) -> list[Array]:
        """Return all members' values of this member's slice, in order of ranks."""
        nbytes = (own.stop - own.start) * array.itemsize
        width = self._width()
        found = []
        for peer in range(self._size):
            if peer == self._rank:
                found.append(array[own])
            else:
                slot = self._ring.staged(chunk, peer)[_place(peer, self._rank) * width :]
                found.append(slot[:nbytes].view(array.dtype))
        return found

    def _width(self) -> int:
        return self._ring.slot_bytes // (self._size - 1) // _ALIGNMENT * _ALIGNMENT

    def _agreed(
        self, chunk: int, call: Description, packed: bytes
    ) -> Generator[tuple[int, int], None, list[Description]]:
        """Return the descriptions of all members; raise if their calls differ."""
        self._undecided = chunk
        try:
            yield STAGED, chunk + 1
            error = self.difference()
            if error is not None:
                raise error
        except PSError:
            self._finish(chunk)
            raise
        finally:
            self._undecided = None
        found = [self._ring.description(chunk, rank) for rank in range(self._size)]
        if all(each == packed for each in found):
            return [call] * self._size
        return [Description.unpack(each) for each in found]

    def difference(self) -> PSError | None:
        """Return an error if the calls of the members that have staged so far differ.

        None if they agree, or if the members have already agreed on the call.
        """
        chunk, ring = self._undecided, self._ring
        if chunk is None:
            return None
        late = ring.lacking(STAGED, chunk + 1)
        found = [
            (rank, Description.unpack(ring.description(chunk, rank)).call)
            for rank in range(self._size)
            if rank not in late
        ]
        for other in found[1:]:
            if other[1] != found[0][1]:
                return self._mismatch(*found[0], *other)
        return None

    def _finish(self, chunk: int) -> None:
        """Stop using a chunk."""
        self._ring.announce(REDUCED, chunk + 1)
        self._ring.announce(DONE, chunk + 1)


def as_bytes(array: Array) -> Bytes:
    """Return a flat, contiguous array as bytes, without a copy."""
    return array.reshape(-1).view(np.uint8)


def _place(owner: int, reader: int) -> int:
    """Return the index of the owner's slice for ``reader``; it has none for itself."""
    return reader if reader < owner else reader - 1


def _cuts(length: int, width: int, size: int) -> list[list[tuple[int, int]]]:
    """Cut elements into chunks, and each chunk into a slice for each member."""
    chunks = []
    for start in range(0, length, width * size):
        here = min(width * size, length - start)
        slice_ = -(-here // size)
        ends = [min(index * slice_, here) for index in range(size + 1)]
        chunks.append([(start + a, start + b) for a, b in pairwise(ends)])
    return chunks
