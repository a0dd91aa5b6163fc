"""``WaitingIds``: ids that were not yet requested often enough to get a row.

Counts of the last ids that have none, in a ring: where it is full, the id that has waited longest
is forgotten, and would begin again. An id that is admitted, and finds no room for its row, waits on
as one that is admitted. So the memory is bounded, and every count is exact, which a
count-min sketch is not: that one admits ids too early, all of them when it fills up. Source of the
ring: the queue A1out of Johnson and Shasha, "2Q", VLDB 1994, counting to n here. Pure; one
thread at a time. Read next: ``shard.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.sparse.ids import Ids
from kvstore.sparse.row_memory import grown
from kvstore.sparse.tables.hash_index import PLACE_BYTES, IdIndex

WAITING_BYTES = PLACE_BYTES + 4
"""What an id that waits takes: its part of the index, and an int32 count."""

FIRST_PLACES = 1024
"""What is there at first, of rows and of ids that wait."""

Mask = np.ndarray[Any, np.dtype[np.bool_]]


class WaitingIds:
    """Admits an id when it was touched ``admit_after`` times, 2 or more."""

    def __init__(self, admit_after: int, num_places: int) -> None:
        """Remembers the last ``num_places`` ids, at least one; takes memory as they come."""
        self._admit_after = admit_after
        self.num_places = num_places
        first = step_towards(FIRST_PLACES, num_places)
        self._index = IdIndex(first)
        self._counts = np.zeros(first, np.int32)
        """By place; 0 where no id is."""
        self._next = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        return self._index.nbytes + self._counts.nbytes

    def touch(self, ids: Ids) -> Mask:
        """Count each of different ids, in this order; which of them are admitted.

        These wait on, and are still admitted, until ``remove`` is told that they have rows.
        """
        places = self._index.look_up(ids)
        is_known = places >= 0
        known = places[is_known]
        self._counts[known] = np.minimum(self._counts[known] + 1, self._admit_after)
        is_admitted: Mask = is_known.copy()
        is_admitted[is_known] = self._counts[known] == self._admit_after
        self._append(ids[~is_known])
        return is_admitted

    def remove(self, ids: Ids) -> None:
        """Forget different ids, which have rows now and wait no longer."""
        places = self._index.look_up(ids)
        places = places[places >= 0]
        self._index.remove(places)
        self._counts[places] = 0

    def _append(self, ids: Ids) -> None:
        wanted = self._next + len(ids)
        if wanted >= len(self._counts) and len(self._counts) < self.num_places:
            self._grow(step_towards(max(wanted + 1, 2 * len(self._counts)), self.num_places))
        size = len(self._counts)
        kept = ids[-size:] if len(ids) else ids
        places = (self._next + len(ids) - len(kept) + np.arange(len(kept))) % size
        self._next = (self._next + len(ids)) % size
        self._index.remove(places[self._counts[places] > 0])
        self._index.add(kept, places)
        self._counts[places] = 1

    def _grow(self, num_places: int) -> None:
        """Enlarge the ring, which has not wrapped yet.

        It wraps only at its full length.
        """
        self._index.grow(num_places)
        self._counts = grown(self._counts, num_places)


def step_towards(num_places: int, limit: int) -> int:
    """Return the capacity to allocate for this many: the limit, half of it, ...

    So the last step but one has half of the memory, and what is there is never there twice beyond
    what the limit takes.
    """
    while limit > 1 and (limit + 1) // 2 >= num_places:
        limit = (limit + 1) // 2
    return limit
