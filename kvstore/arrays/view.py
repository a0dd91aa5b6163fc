"""What is common to libraries whose arrays NumPy or CuPy can look at in place.

``ViewAdapter`` answers everything from one method, ``view``; ``torch.py``, ``jax.py`` and
``buffer.py`` say how their arrays are looked at and what of it is special. Any thread may
call; an adapter has no state.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from kvstore.arrays import Array, NativeArray, adapter_for, adapter_on
from kvstore.context import Context


class ViewAdapter(abc.ABC):
    """Implements :class:`kvstore.arrays.Adapter`, see there for each promise, by ``view``."""

    @abc.abstractmethod
    def view(self, array: Array) -> NativeArray:
        """The array as NumPy's or CuPy's."""

    def shape(self, array: Array) -> tuple[int, ...]:
        view = self.view(array)
        return adapter_for(view).shape(view)

    def dtype(self, array: Array) -> np.dtype[Any]:
        view = self.view(array)
        return adapter_for(view).dtype(view)

    def memory(self, array: Array) -> np.ndarray[Any, Any] | None:
        view = self.view(array)
        return adapter_for(view).memory(view)

    def device_memory(self, array: Array) -> NativeArray | None:
        view = self.view(array)
        return adapter_for(view).device_memory(view)

    def written(self, array: Array) -> None:  # noqa: B027  (most libraries keep no count)
        pass

    def context(self, array: Array) -> Context:
        view = self.view(array)
        return adapter_for(view).context(view)

    def on(self, context: Context) -> AbstractContextManager[None]:
        return adapter_on(context).on(context)

    def why_read_only(self, array: Array) -> str | None:
        view = self.view(array)
        return adapter_for(view).why_read_only(view)

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        view = self.view(array)
        return adapter_for(view).to_host(view)

    def from_host(self, host: np.ndarray[Any, Any], out: Array) -> None:
        view = self.view(out)
        adapter_for(view).from_host(host, view)
        self.written(out)

    def assign(self, value: Array, out: Array) -> None:
        view = self.view(out)
        adapter_for(view).assign(value, view)
        self.written(out)

    def to_context(self, array: Array, context: Context) -> NativeArray:
        return adapter_on(context).to_context(array, context)

    def copy(self, array: Array) -> NativeArray:
        view = self.view(array)
        return adapter_for(view).copy(view)

    def sum_in_order(
        self, arrays: Sequence[Array], context: Context, dtype: np.dtype[Any]
    ) -> NativeArray:
        return adapter_on(context).sum_in_order(arrays, context, dtype)
