"""``WaitingIds``: ids that were not yet requested often enough to get a row.

A ring holds the latest ids without a row, and how often each was requested. If the ring is full,
it forgets the id that has waited longest; that id's count starts again. If an admitted id finds
no room for its row, it keeps waiting and stays admitted. So the memory is bounded, and every
count is exact. A count-min sketch would admit ids too early, and all of them once it is full.
Source of the ring: the queue A1out of Johnson and Shasha, "2Q", VLDB 1994; here it counts to n.
Pure; one thread at a time may use it. Read next: ``shard.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.sparse.ids import Ids
from kvstore.sparse.row_memory import grown
from kvstore.sparse.tables.hash_index import PLACE_BYTES, IdIndex

WAITING_BYTES = PLACE_BYTES + 4
"""The size of a waiting id: its share of the index, and an int32 count."""

FIRST_PLACES = 1024
"""The initial number of places, for rows and for waiting ids."""

Mask = np.ndarray[Any, np.dtype[np.bool_]]


class WaitingIds:
    """Counts requests, and admits an id after ``admit_after`` (at least 2) of them."""

    def __init__(self, admit_after: int, num_places: int) -> None:
        """Remember the last ``num_places`` ids (at least 1); allocate memory as needed."""
        self._admit_after = admit_after
        self.num_places = num_places
        first = step_towards(FIRST_PLACES, num_places)
        self._index = IdIndex(first)
        self._counts = np.zeros(first, np.int32)
        """The count of the id at each place; 0 if the place is empty."""
        self._next = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        return self._index.nbytes + self._counts.nbytes

    def touch(self, ids: Ids) -> Mask:
        """Count one request for each of these distinct ids; return which are admitted.

        Admitted ids keep waiting, and stay admitted, until ``remove``.
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
        """Forget these distinct ids, because they have rows now."""
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
    """Return the capacity to allocate for this many: the limit, half of it, and so on.

    So the last growth copies half of the limit, and old and new rows together take no more memory
    than the limit.
    """
    while limit > 1 and (limit + 1) // 2 >= num_places:
        limit = (limit + 1) // 2
    return limit
