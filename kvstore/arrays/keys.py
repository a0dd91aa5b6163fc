"""The name, shape, dtype and generation (number of inits) of a key.

Stores, servers and files share these types. Pure. ``kvstore/stores/arguments.py`` checks the
arguments of callers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvstore.arrays import Array

Key: TypeAlias = int | str
Keys: TypeAlias = Key | Sequence[Key]
Values: TypeAlias = Array | Sequence[Array] | Sequence[Sequence[Array]]
UpdateFunction: TypeAlias = Callable[[Any, Array, Array], None]
"""The type of ``updater(key, recv, local)`` for ``set_updater``."""

_MOST_DELETED = 1000
"""For how many deleted keys the generation is remembered."""


class KeySpec(NamedTuple):
    """The shape and dtype of a key, which never change."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """In native byte order."""

    @property
    def num_elements(self) -> int:
        """The number of elements: 1 for a scalar, 0 for an empty array."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """The length of a row (all axes but the first), or 1 if that is 0."""
        return max(math.prod(self.shape[1:]), 1)

    @property
    def nbytes(self) -> int:
        """The size of the values in bytes."""
        return self.num_elements * self.dtype.itemsize


def width_of(shape: tuple[int, ...]) -> int:
    """Return how many numbers a row has."""
    return math.prod(shape[1:])


class Generations:
    """The number of initializations of each key, also of recently deleted ones.

    Only the last deleted keys are remembered, since a script may create and delete keys in every
    step. If a forgotten key is initialized again, it gets a higher number than any forgotten key
    had.
    """

    def __init__(self) -> None:
        self._present: dict[Key, int] = {}
        self._deleted: dict[Key, int] = {}
        self._most_forgotten = 0

    def __len__(self) -> int:
        return len(self._present) + len(self._deleted)

    def state(self) -> list[Any]:
        """Return all as plain data, for ``resume``."""
        rows = [list(map(list, known.items())) for known in (self._present, self._deleted)]
        return [*rows, self._most_forgotten]

    def resume(self, state: Sequence[Any]) -> None:
        """Go on from what ``state`` has returned."""
        present, deleted, self._most_forgotten = state
        self._present, self._deleted = dict(present), dict(deleted)

    def following(self, key: Key) -> int:
        """Return the number of the next ``init`` of a key that is not initialized."""
        return self._deleted.get(key, self._most_forgotten) + 1

    def begin(self, key: Key) -> int:
        """Record that ``key`` was initialized; return its generation."""
        number = self._present[key] = self.following(key)
        self._deleted.pop(key, None)
        return number

    def end(self, key: Key) -> None:
        """Record that ``key`` was deleted; does nothing if it is not initialized."""
        number = self._present.pop(key, None)
        if number is None:
            return
        self._deleted[key] = number
        if len(self._deleted) > _MOST_DELETED:
            oldest = next(iter(self._deleted))
            self._most_forgotten = max(self._most_forgotten, self._deleted.pop(oldest))

    def undo(self, key: Key) -> None:
        """Forget the generation that just ended, since its values could not be created."""
        number = self._deleted.pop(key, 0)
        if number > 1:
            self._deleted[key] = number - 1
