"""``IdIndex``: map ids to places, by open addressing in NumPy.

There are two slots for each place. A slot holds a place, and ``ids`` holds the id of each place.
The search for an id begins at the slot given by its hash and continues with the following slots
(linear probing). All ids of a call advance together, one slot at a time, until they reach their
own or an empty slot. Why this is used instead of a library:
``docs/decisions/0021-index-of-ids.md``. Source of the method: Knuth, The Art of
Computer Programming, volume 3, 6.4, algorithm L. Pure; the owner of the index lets one thread
in at a time. Read next: ``shard.py``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from kvstore.sparse.ids import Ids
from kvstore.sparse.row_memory import grown
from kvstore.sparse.tables.ids import spread

Places: TypeAlias = np.ndarray[Any, np.dtype[np.intp]]
"""Row numbers in the arrays of a share; -1 for an id without a row."""

_EMPTY, _REMOVED = -1, -2

_PIECE = 65536

SLOTS_PER_PLACE = 2
MOST_PLACES = 2**31 - 1

PLACE_BYTES = 8 + 4 * SLOTS_PER_PLACE
"""Bytes of the index for each place: an int64 id, and its slots of int32."""


class IdIndex:
    """A map from ids to places below ``num_places``; its owner chooses the places."""

    def __init__(self, num_places: int) -> None:
        self.ids: Ids = np.zeros(num_places, np.int64)
        """The id at each place; arbitrary for unused places."""
        self._slots = _empty_slots(num_places)
        self._num_ids = 0
        self._num_removed = 0

    def __len__(self) -> int:
        return self._num_ids

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self._slots.nbytes

    def look_up(self, ids: Ids) -> Places:
        """Return the place of each id, or -1; ids may be unsorted and repeated."""
        places, _ = self._find(ids)
        return places

    def add(self, ids: Ids, places: Places) -> None:
        """Add distinct new ids at these unused places."""
        if self._num_ids + self._num_removed + len(ids) > 3 * len(self._slots) // 4:
            self._rebuild(len(self.ids))
        self.ids[places] = ids
        self._num_ids += len(ids)
        self._claim(ids, places)

    def remove(self, places: Places) -> None:
        """Remove the ids at these distinct places, all of which are in use."""
        _, slots = self._find(self.ids[places])
        self._slots[slots] = _REMOVED
        # No search continues past a slot that is followed by an empty one.
        following = slots + 1
        following[following == len(self._slots)] = 0
        ends = slots[self._slots[following] == _EMPTY]
        self._slots[ends] = _EMPTY
        self._num_ids -= len(places)
        self._num_removed += len(places) - len(ends)

    def grow(self, num_places: int) -> None:
        """Make room for this many places, which must be more than before."""
        self.ids = grown(self.ids, num_places)
        self._rebuild(num_places)

    def _find(self, ids: Ids) -> tuple[Places, Ids]:
        """Return each id's place (-1 if absent), and its slot (valid if found)."""
        slots = spread(ids, len(self._slots))
        places = self._slots.take(slots).astype(np.intp)
        is_found = self._holds(places, ids)
        left = np.flatnonzero(~is_found & (places != _EMPTY))
        places[~is_found] = -1
        at, wanted = slots[left], ids[left]
        while len(left):
            at += 1
            at[at == len(self._slots)] = 0
            met = self._slots.take(at)
            is_found = self._holds(met, wanted)
            found = left[is_found]
            places[found] = met[is_found]
            slots[found] = at[is_found]
            goes_on = ~is_found & (met != _EMPTY)
            left, at, wanted = left[goes_on], at[goes_on], wanted[goes_on]
        return places, slots

    def _holds(self, places: np.ndarray[Any, Any], ids: Ids) -> np.ndarray[Any, Any]:
        same: np.ndarray[Any, Any] = self.ids.take(places, mode="clip") == ids
        same &= places >= 0
        return same

    def _claim(self, ids: Ids, places: Places) -> None:
        """Write places to free slots; an id that loses its slot to another tries the next."""
        at, mine = spread(ids, len(self._slots)), places.astype(np.int32)
        while len(at):
            before = self._slots.take(at)
            is_free = before < 0
            self._slots[at[is_free]] = mine[is_free]
            is_lost = self._slots.take(at) != mine
            self._num_removed -= int(np.count_nonzero((before == _REMOVED) & ~is_lost))
            at, mine = at[is_lost] + 1, mine[is_lost]
            at[at == len(self._slots)] = 0

    def _rebuild(self, num_places: int) -> None:
        """Rebuild the slots for this many places, in pieces to save memory."""
        held = self._slots[self._slots >= 0]
        if SLOTS_PER_PLACE * num_places == len(self._slots):
            self._slots.fill(_EMPTY)
        else:
            self._slots = _empty_slots(num_places)
        self._num_removed = 0
        for start in range(0, len(held), _PIECE):
            places = held[start : start + _PIECE].astype(np.intp)
            self._claim(self.ids[places], places)


def _empty_slots(num_places: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.full(SLOTS_PER_PLACE * num_places, _EMPTY, np.int32)
