"""The free ranges of one stretch of memory: first fit, and neighbours are joined. Pure."""

from __future__ import annotations

from bisect import bisect_left


class FreeList:
    """Hands out ranges of ``size`` bytes and takes them back, in any order."""

    def __init__(self, size: int) -> None:
        #: (start, size) of each free range, rising; none touches the next. Every change is one
        #: operation on the list, so a Ctrl-C in between can lose a range, but not give it twice.
        self._ranges = [(0, size)] if size else []
        self.free_bytes = size

    def take(self, size: int) -> int | None:
        """The start of a free range of ``size`` bytes (at least 1), the lowest; None: no room."""
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
        """This range, which ``take`` gave, is free again."""
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
