"""``Heap``: the buffers of a node, shared with peers on the same machine.

A buffer is part of a *segment*: memory that another process of the same machine can map
(``segment.py``). If a frame is in a segment, such a peer gets a descriptor (segment, offset,
length) and reads the sender's memory itself (``sharing.py``). For other peers, and for the layers
above, it is an ordinary frame.

So the sender must not change a buffer until the *receiver is done with it*; the acceptance of the
message is not always enough. For a push, that is the answer. For an answer, it is the acceptance,
because a worker copies values out before it accepts.

A buffer is a flat array of bytes. It becomes free when nothing refers to it: no array, no view, no
message in flight. So code never frees a buffer explicitly, and no buffer is reused too early. Used
memory is kept for later buffers, because fresh memory costs page faults. Any thread may use this
module, and it never waits.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pslite.memory.segment import (
    HEADER_BYTES,
    Segment,
    addresses,
    private_segment,
    shared_segment,
)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_ALIGNMENT = 64
"""A cache line, which is enough for the widest registers of a processor."""
_FIRST_BYTES = 1 << 20
_LARGEST_BYTES = 256 << 20
"""Segments double up to this size; a larger buffer gets its own segment."""


class FreeList:
    """Hands out ranges of ``size`` bytes and takes them back, in any order."""

    def __init__(self, size: int) -> None:
        #: (start, size) of each free range, in order; ranges never touch. Every change is one
        #: operation on the list, so Ctrl-C can lose a range but never return it twice.
        self._ranges = [(0, size)] if size else []
        self.free_bytes = size

    def take(self, size: int) -> int | None:
        """Take the lowest free range of ``size`` bytes; return its start, or None."""
        if size > self.free_bytes:
            return None
        for index, (start, room) in enumerate(self._ranges):
            if room >= size:
                rest = [(start + size, room - size)] if room > size else []
                self._ranges[index : index + 1] = rest
                self.free_bytes -= size
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        """Free a range that ``take`` returned."""
        self.free_bytes += size
        ranges, stop = self._ranges, start + size
        first = last = bisect_left(ranges, (start, 0))
        if first and sum(ranges[first - 1]) == start:
            first -= 1
            start = ranges[first][0]
        if last < len(ranges) and ranges[last][0] == stop:
            stop += ranges[last][1]
            last += 1
        ranges[first:last] = [(start, stop - start)]


class _Block:
    """The owner of a buffer's memory, which NumPy keeps as the ``base`` of the array."""

    __slots__ = ("__array_interface__", "_freed", "_range", "segment")

    def __init__(self, stretch: _Stretch, start: int, nbytes: int, size: int) -> None:
        self._freed = stretch.freed
        self._range = (start, size)
        self.segment = stretch.segment  # keeps the memory mapped
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (stretch.base + start, False),
        }

    def __del__(self) -> None:
        # This may run anywhere, even during an allocation, so it takes no lock and cannot fail.
        self._freed.append(self._range)


class _Row:
    """Neighbouring memory of several owners, which it keeps alive."""

    __slots__ = ("__array_interface__", "_owners")

    def __init__(self, address: int, nbytes: int, owners: Sequence[Bytes]) -> None:
        self._owners = owners
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (address, False),
        }


class _Stretch:
    """A segment with its free ranges."""

    def __init__(self, number: int, segment: Segment) -> None:
        self.number = number
        self.segment = segment
        self.base = segment.address + HEADER_BYTES
        self.free = FreeList(segment.nbytes - HEADER_BYTES)
        self.freed: deque[tuple[int, int]] = deque()

    def take(self, nbytes: int, size: int) -> Bytes | None:
        while self.freed:
            self.free.give_back(*self.freed.popleft())
        start = self.free.take(size)
        return None if start is None else np.asarray(_Block(self, start, nbytes, size))


def _number(stretch: _Stretch) -> int:
    return stretch.number


class Heap:
    """The buffers of one node.

    Args:
        shared: whether peers may map the memory.
        limit_bytes: the most shared memory; further memory is private. 0: no limit.
        announce: called on any thread after a new segment was made to share.
        warn: called once with a sentence if memory cannot be shared.
    """

    def __init__(
        self,
        *,
        shared: bool,
        limit_bytes: int = 0,
        announce: Callable[[], None] = lambda: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._shared = shared
        self._limit_bytes = limit_bytes
        self._announce = announce
        self._warn = warn
        # Guards the free lists and the growth.
        self._lock = threading.Lock()
        self._stretches: list[_Stretch] = []
        #: (addresses, segments by address), replaced as a whole: ``find`` takes no lock.
        self._by_address: tuple[list[int], list[_Stretch]] = ([], [])

    def buffer(self, nbytes: int, *, lasting: bool = False) -> Bytes:
        """Return uninitialized memory, aligned to a cache line.

        It is freed when nothing refers to it. A ``lasting`` buffer comes from the newest segment
        with room, other buffers from the oldest, whose memory was used recently.
        """
        size = max(-(-nbytes // _ALIGNMENT), 1) * _ALIGNMENT
        with self._lock:
            for stretch in reversed(self._stretches) if lasting else self._stretches:
                found = stretch.take(nbytes, size)
                if found is not None:
                    return found
            stretch = self._grow(size)
            found = stretch.take(nbytes, size)
        if stretch.segment.ticket is not None:
            self._announce()
        assert found is not None
        return found

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Find (segment number, offset) of memory that peers can map; None for others."""
        addresses, stretches = self._by_address
        index = bisect_right(addresses, address) - 1
        if index < 0:
            return None
        stretch = stretches[index]
        offset = address - addresses[index]
        if offset + nbytes > stretch.segment.nbytes:
            return None
        return stretch.number, offset

    def rows(self, pieces: Sequence[Bytes]) -> list[Bytes] | None:
        """Join neighbouring pieces; return None if peers cannot map all pieces.

        The result keeps the pieces alive.
        """
        if not pieces or self.find(addresses(pieces[:1])[0], len(pieces[0])) is None:
            return None  # at once: most callers have all their arrays in ordinary memory
        starts = addresses(pieces)
        rows: list[Bytes] = []
        first = 0
        for last, (start, piece) in enumerate(zip(starts, pieces, strict=True), 1):
            stop = start + len(piece)
            if last < len(pieces) and starts[last] == stop:
                continue
            begin = starts[first]
            if self.find(begin, stop - begin) is None:
                return None
            rows.append(np.asarray(_Row(begin, stop - begin, pieces[first:last])))
            first = last
        return rows

    @staticmethod
    def whole_of(buffer: Bytes) -> tuple[int, int, Segment] | None:
        """Return (address, bytes, segment) of the segment with a buffer of any heap.

        The segment keeps the memory mapped. None for other memory.
        """
        owner: object = buffer
        while isinstance(owner, np.ndarray):
            owner = owner.base
        if not isinstance(owner, _Block):
            return None
        return owner.segment.address, owner.segment.nbytes, owner.segment

    def segments(self) -> list[tuple[int, Segment]]:
        """Return the segments that peers may map, as (number, segment)."""
        _, stretches = self._by_address
        return [(stretch.number, stretch.segment) for stretch in sorted(stretches, key=_number)]

    def close(self) -> None:
        """Stop sharing; each segment is freed together with its last buffer."""
        with self._lock:
            self._shared = False
            self._stretches = []
            self._by_address = ([], [])

    @property
    def is_shared(self) -> bool:
        """Whether the heap still tries to share new segments."""
        return self._shared

    @property
    def nbytes(self) -> int:
        """The bytes of all segments."""
        with self._lock:
            return sum(stretch.segment.nbytes for stretch in self._stretches)

    @property
    def used_bytes(self) -> int:
        """The bytes that buffers occupy now."""
        with self._lock:
            return sum(
                stretch.segment.nbytes
                - HEADER_BYTES
                - stretch.free.free_bytes
                - sum(size for _, size in list(stretch.freed))
                for stretch in self._stretches
            )

    # -- inside, with the lock ---------------------------------------------------------

    def _grow(self, size: int) -> _Stretch:
        total = sum(stretch.segment.nbytes for stretch in self._stretches)
        wanted = max(min(max(total, _FIRST_BYTES), _LARGEST_BYTES), size + HEADER_BYTES)
        stretch = _Stretch(len(self._stretches) + 1, self._new_segment(wanted, size))
        self._stretches.append(stretch)
        if stretch.segment.ticket is not None:
            shared = [each for each in self._stretches if each.segment.ticket is not None]
            shared.sort(key=lambda each: each.segment.address)
            self._by_address = ([each.segment.address for each in shared], shared)
        return stretch

    def _new_segment(self, wanted: int, size: int) -> Segment:
        """Make shared memory if the limit and the system allow it, else private memory."""
        if not self._shared:
            return private_segment(wanted)
        if self._limit_bytes:
            left = self._limit_bytes - sum(
                stretch.segment.nbytes
                for stretch in self._stretches
                if stretch.segment.ticket is not None
            )
            if size + HEADER_BYTES > left:
                return private_segment(wanted)
            wanted = min(wanted, left)
        try:
            return shared_segment(wanted)
        except OSError as error:
            self._shared = False
            self._warn(
                f"cannot create shared memory ({error}), so values travel by TCP, which is slower"
            )
            return private_segment(wanted)
