"""``Views``: the arrays that ``KVStore.view`` has returned, by key.

A *view* shows a key's value where the store keeps it. It is valid until this worker's next push of
the key. A ``pushpull`` that has it as ``out`` renews it. Any other push ends it: an array that is
still in use then keeps the old value and is no longer part of this table. Nothing here refers to
the arrays over the store's memory, so that their views end with their last reference. Pure. Any
thread may call, but one that pushes a key while another makes a view of it may end neither the old
nor the new one. Read next: ``dist/views.py`` and ``local/values.py``, which make views.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, MutableSequence, Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from kvstore.arrays.keys import Key, KeySpec
from kvstore.errors import NotSupportedError
from kvstore.stores.arguments import normalise_keys

HostArray = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_LISTS = (list, tuple)


class _Owner:
    """The ``base`` of a live view: keeps its memory, and dies with the last array."""

    __slots__ = ("__array_interface__", "__weakref__", "memory")

    def __init__(self, memory: HostArray) -> None:
        self.memory = memory.reshape(-1).view(np.uint8)  # other dtypes than NumPy's own get lost
        self.__array_interface__ = self.memory.__array_interface__


class View:
    """One key's view.

    A *live* view is over the store's memory, where new values appear without a copy; then it is
    known here whether somebody uses it. Another view has memory of its own.
    """

    __slots__ = ("_owner", "address", "is_live", "own", "shown", "spec")

    def __init__(self, memory: HostArray, *, is_live: bool) -> None:
        self.is_live = is_live
        self.spec = KeySpec(memory.shape, memory.dtype)
        self.address = address_of(memory)
        self.shown: HostArray | None = None
        """The array that the caller has, of a view that is not live."""
        self.own: HostArray | None = None
        """The memory of a view that is not live."""
        self._owner: weakref.ref[_Owner] | None = None
        if not is_live:
            self.own = memory
            self.shown = _read_only(memory.view())

    def begin(self, memory: HostArray) -> HostArray:
        """Return the array of a new view for the caller."""
        if self.shown is not None:
            return self.shown
        owner = _Owner(memory)
        self._owner = weakref.ref(owner)
        return _read_only(self._over(owner))

    @property
    def memory(self) -> HostArray | None:
        """The memory, writable, in the key's shape; None for a live view without an array."""
        if self._owner is None:
            return self.own
        owner = self._owner()
        return None if owner is None else self._over(owner)

    def memory_of(self, out: Any) -> HostArray | None:
        """Return the memory if ``out`` is the whole view, in the key's shape and dtype."""
        array = out[0] if isinstance(out, _LISTS) and len(out) == 1 else out
        if not isinstance(array, np.ndarray) or (array.shape, array.dtype) != self.spec:
            return None
        is_here = address_of(array) == self.address and array.flags.c_contiguous
        return self.memory if is_here else None

    def _over(self, owner: _Owner) -> HostArray:
        return np.asarray(owner).view(self.spec.dtype).reshape(self.spec.shape)


class ShownBytes(np.ndarray[Any, np.dtype[np.uint8]]):
    """The memory of a live view, as the target of a value that arrives."""

    views: Views
    shows: View

    def receive(self, start: int, stop: int, values: Bytes) -> None:
        """Take some bytes of the value, which are here already unless the view has ended."""
        with self.views.lock:
            if not self.shows.is_live:
                self[start:stop] = values


class Views:
    """The views of one store: live ones in use, others until they end."""

    def __init__(self, keep_values: Callable[[Key, HostArray], None]) -> None:
        """``keep_values`` lets the memory of a live view keep its present values."""
        self._keep_values = keep_values
        self.by_key: dict[Key, View] = {}
        self.lock = threading.RLock()
        """Guards the table, and ends a view either before or after a value arrives."""

    def add(self, key: Key, memory: HostArray, *, is_live: bool) -> HostArray:
        """Return the view of a key: the present one, or a new one over this memory.

        ``memory`` is writable and C-contiguous, of the key's shape and dtype.
        """
        with self.lock:
            found = self.array(key)  # another thread may have made one
            if found is not None:
                return found
            view = self.by_key[key] = View(memory, is_live=is_live)
            return view.begin(memory)

    def array(self, key: Key) -> HostArray | None:
        """Return the view of a key if there is one, as a read-only array."""
        with self.lock:
            view = self.by_key.get(key)
            if view is None or view.shown is not None:
                return None if view is None else view.shown
            memory = view.memory
            if memory is None:
                del self.by_key[key]
                return None
            return _read_only(memory)

    def live(self) -> dict[Key, HostArray]:
        """Return the memory of each live view that is in use."""
        with self.lock:
            live = {key: view.memory for key, view in self.by_key.items() if view.is_live}
            return {key: memory for key, memory in live.items() if memory is not None}

    def watch(self, keys: Sequence[Key], targets: MutableSequence[Bytes]) -> None:
        """Replace the targets that are live views, so that nothing is copied to them."""
        for index, view in enumerate(map(self.by_key.get, keys)):
            if view is None or not view.is_live or address_of(targets[index]) != view.address:
                continue
            targets[index] = target = targets[index].view(ShownBytes)
            target.views, target.shows = self, view

    def opened(self, key: object, out: Any) -> tuple[Any, set[Key]]:
        """Return ``out`` with views as writable arrays, and the keys of these.

        Only a view that is the one ``out`` of its key is opened.
        """
        if not self.by_key or out is None:
            return out, set()
        keys, single = normalise_keys(key)
        outs = [out] if single else out
        if not isinstance(outs, _LISTS) or len(outs) != len(keys) or len(set(keys)) < len(keys):
            return out, set()
        arrays, opened = list(outs), set()
        for index, (view, array) in enumerate(zip(map(self.by_key.get, keys), outs, strict=True)):
            if view is None:
                continue
            # Most calls pass the very array that ``view`` has returned for a small value.
            found = view.own if array is view.shown else view.memory_of(array)
            if found is not None:
                arrays[index] = found
                opened.add(keys[index])
        return arrays[0] if single else arrays, opened

    def end(self, keys: Iterable[Key] | None = None, kept: Container[Key] = ()) -> None:
        """End the views of these keys (None: all), except of those in ``kept``.

        An array that is still in use keeps the present value.
        """
        if not self.by_key:
            return
        with self.lock:
            for key in list(self.by_key) if keys is None else keys:
                view = None if key in kept else self.by_key.pop(key, None)
                memory = None if view is None or not view.is_live else view.memory
                if view is not None and memory is not None:
                    self._keep_values(key, memory)
                    view.is_live = False

    def forget(self, keys: Iterable[Key] | None = None) -> None:
        """Drop the views of these keys (None: all), whose memory the store gives up."""
        with self.lock:
            for key in list(self.by_key) if keys is None else keys:
                self.by_key.pop(key, None)


def address_of(array: HostArray) -> int:
    """Return where an array's memory begins."""
    address: int = array.__array_interface__["data"][0]
    return address


def _read_only(array: HostArray) -> HostArray:
    array.flags.writeable = False
    return array


def check_viewable(keys: Iterable[Key], is_row_sparse: Callable[[Key], bool]) -> None:
    """Raise ``NotSupportedError`` for row-sparse keys: they have no whole value."""
    for key in filter(is_row_sparse, keys):
        raise NotSupportedError(
            f"key {key!r} is row-sparse, so there is no array of its whole value to show; call "
            "row_sparse_pull for some rows, or pull"
        )


def apart_from(memories: Iterable[HostArray], rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return rows of arrays, copied where they lie in these memories."""
    ranges = sorted(map(byte_bounds, memories))
    starts = [start for start, _ in ranges]

    def is_inside(array: Any) -> bool:
        if not isinstance(array, np.ndarray) or array.base is None or not array.size:
            return False
        low, high = byte_bounds(array)
        index = bisect_right(starts, high - 1) - 1
        return index >= 0 and ranges[index][1] > low

    return [[array.copy() if is_inside(array) else array for array in row] for row in rows]
