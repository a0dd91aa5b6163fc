"""The memory of the keys of a store in one process; small keys share shelves.

For a key of a few hundred numbers, the calls of an update cost more than its arithmetic. So small
keys are stored on shelves, one after the other in the order of ``init``, with their optimizer
states in the same order: ``blocks.py`` updates neighbours as one array. A large key has its own
memory. Nothing here computes; the store's lock guards it. Read next: ``blocks.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.arrays import Array
from kvstore.arrays.context import Context
from kvstore.arrays.cpu.sums import BLOCK_ELEMENTS, Flat
from kvstore.arrays.keys import Key, KeySpec

if TYPE_CHECKING:
    from kvstore.sparse.table import RowTable

HOST = Context("cpu", 0)

SMALL_ELEMENTS = BLOCK_ELEMENTS
"""A key with more elements has its own memory."""

SHELF_ELEMENTS = 8 * BLOCK_ELEMENTS
"""2 MiB of float32; the system only provides memory for the pages that are used."""


class Shelf:
    """Memory for neighbouring keys of one dtype, freed with the last of them."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.values: Flat = np.empty(SHELF_ELEMENTS, dtype)
        self.used = 0
        self._states: dict[tuple[int, np.dtype[Any]], Flat] = {}

    def has_room(self, num_elements: int) -> bool:
        """Return whether a key of this size fits behind the others."""
        return self.used + num_elements <= len(self.values)

    def state(self, index: int, dtype: np.dtype[Any]) -> Flat:
        """Return memory for the ``index``-th optimizer state of all keys on the shelf."""
        found = self._states.get((index, dtype))
        if found is None:
            found = self._states[index, dtype] = np.empty(len(self.values), dtype)
        return found


class StoredKey:
    """One key of a store in one process: its value and optimizer state."""

    def __init__(self, key: Key, spec: KeySpec, weight: Array, generation: int) -> None:
        self.key = key
        self.spec = spec
        self.generation = generation
        self.home = HOST
        """The device of ``weight`` and ``state``."""
        self.weight = weight
        """C-contiguous, of the key's shape and dtype; owned by the store."""
        self.state: tuple[Flat, ...] | None = None
        """Flat arrays, made by the optimizer at the first update; set by ``keep_state``."""
        self.count = 0
        """The number of updates by the optimizer. A row table has its own count."""
        self.version = 0
        """The number of pushes."""
        self.table: RowTable | None = None
        """The rows of a row-sparse key, in place of ``weight`` and ``state``."""
        self.shelf: Shelf | None = None
        """The shelf of a small key on the host, which has its elements ``start`` to ``stop``."""
        self.start = 0
        self.stop = 0
        self.shelved: tuple[np.dtype[Any], ...] | None = ()
        """The dtypes of the states if all of them are on the shelf, or None."""

    @property
    def flat(self) -> Flat:
        """The value as a 1-D array, which shares its memory."""
        flat: Flat = self.weight.reshape(-1)
        return flat

    @property
    def nbytes(self) -> int:
        """The size of the values that the store holds."""
        return self.spec.nbytes if self.table is None else self.table.nbytes

    def set_weight(self, weight: Array) -> None:
        """Set the value; without a shelf the array becomes the store's, else it is copied."""
        if self.shelf is None:
            self.weight = weight
        else:
            self.weight[...] = weight

    def keep_state(self, state: Iterable[Flat] | None, count: int) -> None:
        """Replace the optimizer state and its count; the arrays become the store's."""
        self.count = count
        arrays = None if state is None else tuple(state)
        if arrays is None or self.shelf is None or not all(map(self._fits, arrays)):
            self.state = arrays
            self.shelved = None if arrays else ()
            return
        # Copies, since they may be arrays of this shelf in another order.
        copies = [np.array(array) for array in arrays]
        self.shelved = tuple(array.dtype for array in copies)
        self.state = tuple(
            self.shelf.state(index, dtype)[self.start : self.stop]
            for index, dtype in enumerate(self.shelved)
        )
        for array, copy in zip(self.state, copies, strict=True):
            array[...] = copy

    def move(self, home: Context, weight: Array, state: Iterable[Array] | None) -> None:
        """Move a key to a GPU; the given arrays become the store's."""
        self.home, self.weight, self.shelf = home, weight, None
        self.keep_state(state, self.count)

    def _fits(self, array: Flat) -> bool:
        return type(array) is np.ndarray and array.shape == (self.stop - self.start,)


class Shelves:
    """Places the keys of one store on shelves or in their own memory."""

    def __init__(self) -> None:
        self._open: dict[np.dtype[Any], Shelf] = {}

    def place(self, key: Key, value: np.ndarray[Any, Any], generation: int) -> StoredKey:
        """Return a new key with a copy of this value, a C-contiguous array."""
        spec = KeySpec(value.shape, value.dtype)
        size = spec.num_elements
        if size > SMALL_ELEMENTS:
            return StoredKey(key, spec, value.copy(), generation)
        shelf = self._open.get(spec.dtype)
        if shelf is None or not shelf.has_room(size):
            shelf = self._open[spec.dtype] = Shelf(spec.dtype)
        start, stop = shelf.used, shelf.used + size
        shelf.used = stop
        entry = StoredKey(key, spec, shelf.values[start:stop].reshape(spec.shape), generation)
        entry.weight[...] = value
        entry.shelf, entry.start, entry.stop = shelf, start, stop
        return entry
