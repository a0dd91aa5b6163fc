"""``Ages``: when each row was last touched, and which rows are the oldest.

A row's stamp is one int64. It has the time, which is the number of pushes to the table, and in the
lower 30 bits a count of the touches at that time. So stamps order rows exactly by their last touch,
down to the position in a call, and ``ttl`` reads the time from them. Touching rows is one NumPy
assignment, whatever their number. When the count reaches its maximum, the touches of this time are
numbered again.

**The oldest.** When needed, the oldest eighth of all stamps is selected and sorted: the queue. A
row that is touched later no longer has its stamp in the queue and is skipped. All rows outside the
queue are younger than all rows in it. So eviction is exactly least recently used, and each pass
over the stamps serves for an eighth of the rows. Pure; one thread at a time may use it. Read
next: ``shard.py``.
"""

from __future__ import annotations

import numpy as np

from kvstore.sparse.ids import Ids
from kvstore.sparse.tables.hash_index import Places

NO_ROW = np.iinfo(np.int64).max
"""The stamp of a place without a row."""

AGE_BYTES = 8
_TOUCH_BITS = 30
_MOST_TOUCHES = 2**_TOUCH_BITS - 1
MOST_TIME = 2 ** (62 - _TOUCH_BITS)
_QUEUE_PART = 8


def stamp_at(time: int) -> int:
    """Return the smallest stamp of a time."""
    return max(time, 0) << _TOUCH_BITS


class Ages:
    """The stamps of rows, by place."""

    def __init__(self, num_places: int) -> None:
        self.stamps: Ids = np.full(num_places, NO_ROW, np.int64)
        self.time = 0
        """The number of pushes so far."""
        self._touches = 0
        self._queue: Places = np.empty(0, np.intp)
        self._queue_stamps: Ids = np.empty(0, np.int64)
        self._at = 0

    @property
    def nbytes(self) -> int:
        return self.stamps.nbytes

    def tick(self) -> None:
        """Advance the time by one push."""
        self.set_time(self.time + 1)

    def set_time(self, time: int) -> None:
        """Set the current time and reset the count of touches within it."""
        self.time, self._touches = time, 0

    def resume(self, time: int) -> None:
        """Continue at this time, after the owner has set ``stamps`` directly."""
        self._forget_queue()
        stamps = self.stamps[self.stamps != NO_ROW]
        last = int(stamps.max(initial=stamp_at(time) - 1))
        self.time, self._touches = time, max(last + 1 - stamp_at(time), 0)

    def next_stamps(self, number: int) -> Ids:
        """Return this many new stamps, ascending and above all others."""
        if self._touches + number > _MOST_TOUCHES:
            self._number_anew()
        first = min(self._touches, _MOST_TOUCHES)
        self._touches = min(first + number, _MOST_TOUCHES)
        stamps = np.arange(first, first + number)
        np.minimum(stamps, _MOST_TOUCHES, out=stamps)
        stamps += stamp_at(self.time)
        return stamps

    def _number_anew(self) -> None:
        """Renumber the rows touched at this time from 0, in their order."""
        self._forget_queue()
        base = stamp_at(self.time)
        places = np.flatnonzero((self.stamps >= base) & (self.stamps != NO_ROW))
        order = np.argsort(self.stamps[places], kind="stable")
        self.stamps[places[order]] = base + np.arange(len(places))
        self._touches = len(places)

    def grow(self, num_places: int) -> None:
        """Make room for this many places, which must be more than before."""
        stamps = np.full(num_places, NO_ROW, np.int64)
        stamps[: len(self.stamps)] = self.stamps
        self.stamps = stamps

    def older_than(self, stamp: int) -> Places:
        """Return the places of all rows with a smaller stamp, sorted."""
        return np.flatnonzero(self.stamps < stamp)

    def held(self) -> Places:
        """Return the places of all rows, sorted."""
        return np.flatnonzero(self.stamps != NO_ROW)

    def take_oldest(self, number: int, before: int) -> tuple[Places, Ids]:
        """Remove the oldest rows, and return their places and stamps.

        It removes at most ``number`` rows, and only rows with a smaller stamp than ``before``.
        """
        taken: list[tuple[Places, Ids]] = []
        while number > 0:
            if self._at == len(self._queue) and not self._fill_queue(number, before):
                break
            stamps = self._queue_stamps[self._at : self._at + max(number, 64)]
            length = int(np.searchsorted(stamps, before))
            if not length:
                break
            places = self._queue[self._at : self._at + length]
            due = np.flatnonzero(self.stamps[places] == stamps[:length])[:number]
            self._at += int(due[-1]) + 1 if len(due) == number else length
            taken.append((places[due], stamps[due]))
            self.stamps[places[due]] = NO_ROW
            number -= len(due)
        if not taken:
            return np.empty(0, np.intp), np.empty(0, np.int64)
        return np.concatenate([each[0] for each in taken]), np.concatenate([e[1] for e in taken])

    def forget(self, places: Places) -> None:
        """Remove the rows at these places."""
        self.stamps[places] = NO_ROW

    def clear(self) -> None:
        """Remove all rows."""
        self.stamps.fill(NO_ROW)
        self._forget_queue()

    def _fill_queue(self, number: int, before: int) -> bool:
        num_rows = int(np.count_nonzero(self.stamps < before))
        if not num_rows:
            return False
        length = min(max(number, num_rows // _QUEUE_PART), num_rows)
        last = np.partition(self.stamps, length - 1)[length - 1]
        places = np.flatnonzero(self.stamps <= last)
        stamps = self.stamps[places]
        order = np.argsort(stamps, kind="stable")
        self._queue, self._queue_stamps, self._at = places[order], stamps[order], 0
        return True

    def _forget_queue(self) -> None:
        self._at = len(self._queue)
