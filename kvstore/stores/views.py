"""``Views``: the arrays that ``KVStore.view`` has returned, by key.

A *view* shows a key's value where the store keeps it. It is valid until this worker's next push of
the key. A ``pushpull`` that has it as ``out`` renews it. Any other push ends it: an array that is
still in use then keeps the old value and is no longer part of this table. Nothing here refers to
the arrays, so that a view ends with its last reference. Pure; the store's rules for threads apply.
Read next: ``dist/views.py`` and ``local/values.py``, which make views.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from kvstore.arrays.keys import Key, KeySpec
from kvstore.errors import NotSupportedError

HostArray = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_LISTS = (list, tuple)


class _Owner:
    """The ``base`` of a view, which keeps its memory; when it dies, nobody uses the view."""

    __slots__ = ("__array_interface__", "__weakref__", "memory")

    def __init__(self, memory: HostArray) -> None:
        self.memory = memory.reshape(-1).view(np.uint8)  # other dtypes than NumPy's own get lost
        self.__array_interface__ = self.memory.__array_interface__


class View:
    """One key's view, while it is in use."""

    __slots__ = ("_owner", "address", "is_live", "spec")

    def __init__(self, owner: _Owner, spec: KeySpec, *, is_live: bool) -> None:
        self._owner = weakref.ref(owner)
        self.address = address_of(owner.memory)
        self.spec = spec
        self.is_live = is_live
        """Whether the store writes new values there, so that nothing must be copied."""

    @property
    def memory(self) -> HostArray | None:
        """The memory, writable, in the key's shape; None if nobody uses the view."""
        owner = self._owner()
        if owner is None:
            return None
        return np.asarray(owner).view(self.spec.dtype).reshape(self.spec.shape)

    def is_memory_of(self, array: HostArray) -> bool:
        """Return whether an array is the whole view, in the key's shape and dtype."""
        return (
            address_of(array) == self.address
            and (array.shape, array.dtype) == (self.spec.shape, self.spec.dtype)
            and array.flags.c_contiguous
            and self._owner() is not None
        )


class Views:
    """The views of one store that are in use."""

    def __init__(self, keep_values: Callable[[Key, HostArray], None]) -> None:
        """``keep_values`` makes the memory of a live view the caller's own, with its values."""
        self._keep_values = keep_values
        self._views: dict[Key, View] = {}

    def __bool__(self) -> bool:
        return bool(self._views)

    def add(self, key: Key, memory: HostArray, *, is_live: bool) -> HostArray:
        """Return a new view of a key: a read-only array over this memory.

        ``memory`` is writable and C-contiguous, of the key's shape and dtype.
        """
        owner = _Owner(memory)
        view = View(owner, KeySpec(memory.shape, memory.dtype), is_live=is_live)
        self._views[key] = view
        shown = view.memory
        assert shown is not None
        return _read_only(shown)

    def array(self, key: Key) -> HostArray | None:
        """Return the view of a key if it is in use, as a read-only array."""
        view = self._views.get(key)
        memory = None if view is None else view.memory
        if memory is None:
            self._views.pop(key, None)
            return None
        return _read_only(memory)

    def is_live(self, key: Key, memory: Bytes) -> bool:
        """Return whether this is the memory of a view in which new values appear by themselves."""
        view = self._views.get(key)
        if view is None or not view.is_live:
            return False
        return address_of(memory) == view.address and view.memory is not None

    def opened(self, key: object, out: Any) -> tuple[Any, Collection[Key]]:
        """Return the ``out`` of a call with views as writable arrays, and the keys of these."""
        if not self._views:
            return out, ()
        if not isinstance(key, _LISTS):
            found = self._opened_one(key, out)
            return (out, ()) if found is None else (found, (key,))  # type: ignore[return-value]
        if not isinstance(out, _LISTS) or len(out) != len(key):
            return out, ()
        arrays, keys = list(out), []
        for index, (item, array) in enumerate(zip(key, out, strict=True)):
            found = self._opened_one(item, array)
            if found is not None:
                arrays[index] = found
                keys.append(item)
        return arrays, keys

    def _opened_one(self, key: Any, out: Any) -> HostArray | None:
        array = out[0] if isinstance(out, _LISTS) and len(out) == 1 else out
        view = self._views.get(key) if isinstance(key, (int, str)) else None
        if view is None or not isinstance(array, np.ndarray) or not view.is_memory_of(array):
            return None
        return view.memory

    def end(self, keys: Iterable[Key] | None = None, kept: Collection[Key] = ()) -> None:
        """End the views of these keys (None: all), except of those in ``kept``.

        An array that is still in use keeps the present value.
        """
        if not self._views:
            return
        for key in list(self._views) if keys is None else keys:
            view = None if key in kept else self._views.pop(key, None)
            memory = None if view is None or not view.is_live else view.memory
            if memory is not None:
                self._keep_values(key, memory)


def address_of(array: HostArray) -> int:
    """Return where an array's memory begins."""
    address: int = array.__array_interface__["data"][0]
    return address


def _read_only(array: HostArray) -> HostArray:
    array.flags.writeable = False
    return array


def check_viewable(keys: Iterable[Key], is_row_sparse: Callable[[Key], bool]) -> None:
    """Raise ``NotSupportedError`` for row-sparse keys, which have no whole value in memory."""
    for key in filter(is_row_sparse, keys):
        raise NotSupportedError(
            f"key {key!r} is row-sparse, so there is no array of its whole value to show; call "
            "row_sparse_pull for some rows, or pull"
        )


def writable(view: HostArray) -> HostArray:
    """Return the memory of a view as a writable array, for libraries that need one.

    What is written there is not stored, and new values may no longer appear in its pages.
    """
    memory = view
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    found: HostArray = memory.view(view.dtype).reshape(view.shape)
    return found
