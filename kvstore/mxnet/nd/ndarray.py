"""``NDArray``: an array on a device whose values a store may still be writing.

A thin wrapper over a NumPy array (on a CPU) or a CuPy array (on a GPU). It has no formulas of its
own: NumPy's ufuncs reach it through ``__array_ufunc__`` (NEP 13), and the wrapped array's library
computes them. It never starts work itself and does not know stores; ``arrays/pending.py`` keeps the
calls that it waits for. Any thread may use an array; as with NumPy, callers must not write to it
while another thread uses it. Read next: ``arrays/pending.py``, then ``__init__.py``, the functions
that make arrays.

Differences from the original (``python/mxnet/ndarray/ndarray.py`` of 1.9.1): comparisons return
bool; every slice is a view, also one with a step; dtypes mix by NumPy's rules, so a scalar never
turns a float32 array into a float64 one; errors of arithmetic are raised at once.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.arrays import Array, NativeArray, adapter_for, adapter_on, check_dtype, register
from kvstore.arrays.buffer import ViewAdapter
from kvstore.arrays.context import Context
from kvstore.arrays.pending import Uses
from kvstore.errors import ArgumentTypeError, ValueMismatchError
from kvstore.mxnet.nd.methods import ArrayMethods, DType, checked_context, native_dtype, working_on
from kvstore.sparse.array import RowSparseArray

_NUMBERS = (int, float, complex, np.generic)
_LISTS = (list, tuple, range)


class NDArray(ArrayMethods):
    """An array of one dimension or more; as in MXNet, a scalar has shape ``(1,)``.

    ``NDArray(memory)`` wraps a NumPy or CuPy array without a copy, so both share memory;
    ``nd.array`` copies. A store's ``pull`` into an NDArray returns at once. Any access to the
    values (``asnumpy``, arithmetic, ``print``) waits for them. If the pull failed, the first access
    raises its error, and the values are then partly old and partly new.

    Arithmetic takes NDArrays on the same device, NumPy arrays, lists and numbers, and returns an
    NDArray on that device. NumPy's functions take NDArrays too: its ufuncs (``numpy.exp(a)``)
    return NDArrays, and ``numpy.asarray(a)`` returns a copy on the host.

    Raises ``ArgumentTypeError`` if ``memory`` is not such an array, or if a store cannot hold its
    dtype.
    """

    __slots__ = ()

    def __init__(self, memory: Array, context: Context | None = None) -> None:
        adapter = adapter_for(memory)
        home = adapter.context(memory)
        context = home if context is None else checked_context(context)
        if adapter is not adapter_on(home) or not is_same_device(home, context):
            raise ArgumentTypeError(
                f"an NDArray on {context} needs a NumPy array (cpu) or a CuPy array (gpu) there, "
                f"got {_described(memory)} on {home}; use nd.array(value, ctx) to copy it"
            )
        check_dtype(memory.dtype)
        if context.device_type == "cpu":
            memory = np.asarray(memory)  # a subclass might compute differently
        self._array: Array = memory if memory.ndim else memory.reshape(1)
        self._context = context
        self._uses = Uses()

    @classmethod
    def _of(cls, memory: Array, context: Context, uses: Uses | None = None) -> NDArray:
        """Wrap a result of the context's library; ``uses`` is that of the viewed array."""
        made = cls.__new__(cls)
        if isinstance(memory, np.generic):
            memory = np.asarray(memory)
        made._array = memory if memory.ndim else memory.reshape(1)
        made._context = context
        made._uses = Uses() if uses is None else uses
        return made

    # -- for the stores ------------------------------------------------------------------

    def _memory(self) -> Array:
        """Wait until no call writes to the array, and return the wrapped array to read."""
        if self._uses.writes:
            self._uses.settle(for_writing=False)
        return self._array

    def _memory_to_write(self) -> Array:
        """Return the wrapped array for writing, after pending calls have ended."""
        uses = self._uses
        if uses.writes or uses.reads:
            uses.settle(for_writing=True)
        return self._array

    def _other(self, other: object) -> Array:
        """Return another array's memory for reading; it must be on this array's device."""
        return operand(checked_array(other), self._context)

    # As in MXNet, arrays can be keys of dicts, by identity, although == compares elements.
    __hash__ = object.__hash__

    # -- waiting and reading values --------------------------------------------------------

    def wait_to_read(self) -> None:
        """Wait until the values are written; raise the error of the call that writes them."""
        self._memory()

    def wait_to_write(self) -> None:
        """Wait until no store call uses the array; raise errors as ``wait_to_read`` does."""
        self._memory_to_write()

    def asnumpy(self) -> np.ndarray[Any, Any]:
        """Return the values as a new C-contiguous NumPy array, owned by the caller."""
        host = adapter_on(self._context).to_host(self._memory())
        return host.copy() if self._context.device_type == "cpu" else host

    def asscalar(self) -> Any:
        """Return the only element as a NumPy scalar.

        Raises ``ValueMismatchError`` if there are several.
        """
        if self.size != 1:
            raise ValueMismatchError(
                f"only an array of one element can become a scalar, got shape {self.shape}"
            )
        return self.asnumpy().reshape(-1)[0]

    def item(self) -> Any:
        """Return the only element, as a Python number."""
        return self.asscalar().item()

    def __array__(self, dtype: DType = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """Return a copy on the host, because a store may write here later.

        ``copy=False`` returns the memory itself, or raises ``ValueError`` if it cannot.
        """
        if copy is not False:
            host = self.asnumpy()
            return host if dtype is None else host.astype(dtype, copy=False)
        if self._context.device_type != "cpu":
            raise ValueError(
                f"an array on {self._context} cannot be viewed on the host without a copy"
            )
        return np.asarray(self._memory(), dtype, copy=False)

    def __bool__(self) -> bool:
        if self.size == 0:
            return False
        if self.size > 1:
            raise ValueError(
                "an array of several elements does not have one truth value; compare it first"
            )
        return bool(self.asscalar())

    def __float__(self) -> float:
        return float(self.asscalar())

    def __int__(self) -> int:
        return int(self.asscalar())

    def __index__(self) -> int:
        if self.dtype.kind not in "iu":
            raise TypeError(f"an index must be an integer array, got {self.dtype}")
        return int(self.asscalar())

    def __repr__(self) -> str:
        lengths = "x".join(map(str, self.shape))
        return f"\n{self.asnumpy()}\n<NDArray {lengths} @{self._context}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.asnumpy(), self._context)

    # -- arithmetic ------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Apply NumPy's ufuncs to NDArrays; see NEP 13 for the arguments."""
        out: tuple[Any, ...] = options.pop("out", ())
        where = options.get("where")
        everything = (*inputs, *(each for each in out if each is not None))
        if not all(is_operand(each) for each in everything):
            return NotImplemented
        context = next(each._context for each in everything if isinstance(each, NDArray))
        targets = tuple(_target(each, context) for each in out)
        changed = 1 if method == "at" else 0  # ufunc.at works in its first operand
        operands = [_target(each, context) for each in inputs[:changed]]
        operands += [operand(each, context) for each in inputs[changed:]]
        if targets:
            options["out"] = targets
        if isinstance(where, NDArray):
            options["where"] = operand(where, context)
        with working_on(context):
            results = getattr(ufunc, method)(*operands, **options)
        if results is None:
            return None
        if not isinstance(results, tuple):
            return out[0] if out else self._of(results, context)
        given = out or (None,) * len(results)
        return tuple(
            self._of(result, context) if target is None else target
            for result, target in zip(results, given, strict=True)
        )

    # -- moving and reshaping --------------------------------------------------------------

    def copy(self) -> NDArray:
        """Return a new array of the same values on the same device."""
        return self._of(adapter_on(self._context).copy(self._memory()), self._context)

    def copyto(self, other: Any) -> Any:
        """Copy the values into ``other`` (same shape, cast to its dtype), or to a device.

        ``other`` is an NDArray, a ``RowSparseNDArray`` or a context. Returns it, or the new array.
        Raises ``ValueMismatchError`` for another shape.
        """
        if isinstance(other, Context):
            adapter, memory = adapter_on(other), self._memory()
            is_there = is_same_device(other, self._context)
            moved = adapter.copy(memory) if is_there else adapter.to_context(memory, other)
            return self._of(moved, other)
        if isinstance(other, RowSparseArray):
            return self.tostype(other.stype).copyto(other)
        if checked_array(other).shape != self.shape:
            raise ValueMismatchError(f"cannot copy shape {self.shape} into shape {other.shape}")
        if other is not self:
            other[...] = self
        return other

    def as_in_context(self, context: Context) -> NDArray:
        """Return the array itself if it is on ``context``, else a copy there."""
        return self if checked_context(context) == self._context else self.copyto(context)

    def astype(self, dtype: DType, copy: bool = True) -> NDArray:
        """Return a new array of another dtype; with ``copy=False``, perhaps this array."""
        wanted = native_dtype(dtype)
        if not copy and wanted == self.dtype:
            return self
        with working_on(self._context):
            return self._of(self._memory().astype(wanted, order="C"), self._context)

    # -- elements --------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> NDArray:
        """Return a view for numbers, slices, ``None`` and ``...``, else a copy.

        NDArrays and lists of numbers choose elements along an axis. Floats are truncated to
        integers, because ``nd.array`` makes floats by default. Bool arrays are masks.
        """
        if _is_basic(key):
            return self._of(self._array[_with_ellipsis(key)], self._context, self._uses)
        with working_on(self._context):
            return self._of(self._memory()[_index(key, self._context)], self._context)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set elements; ``value`` is cast and broadcast, and may be on any device."""
        memory = self._memory_to_write()
        if not isinstance(value, _NUMBERS):
            value = _brought(value, self._context)
        index = _with_ellipsis(key) if _is_basic(key) else _index(key, self._context)
        with working_on(self._context):
            memory[index] = value

    def __iter__(self) -> Iterator[NDArray]:
        return (self[position] for position in range(len(self)))


_OPERANDS = (NDArray, np.ndarray, *_LISTS, *_NUMBERS)


def new_array(source: Any, context: Context | None, dtype: DType) -> NDArray:
    """Return a new array on ``context`` from an array, number or nested list.

    Raises ``ArgumentTypeError`` for anything else.
    """
    context, wanted = checked_context(context), native_dtype(dtype)
    if isinstance(source, _LISTS + _NUMBERS):
        source = np.asarray(source)
        check_dtype(source.dtype)
    host = adapter_for(source).to_host(source)
    with np.errstate(all="ignore"):
        copied = host.astype(wanted, order="C", copy=True)
    return NDArray._of(adapter_on(context).to_context(copied, context), context)


def is_same_device(one: Context, other: Context) -> bool:
    """Return whether arrays of both can be used together; all CPUs count as one."""
    return one == other or one.device_type == other.device_type == "cpu"


def checked_array(value: object) -> NDArray:
    """Return ``value``. Raises ``ArgumentTypeError`` unless it is an NDArray."""
    if not isinstance(value, NDArray):
        raise ArgumentTypeError(
            f"expected an NDArray, got {_described(value)}; convert it with nd.array"
        )
    return value


def operand(value: Any, context: Context) -> Any:
    """Return a value that ``context``'s library can use; wait for pending values.

    Raises ``ArgumentTypeError`` for an array on another device.
    """
    if isinstance(value, NDArray):
        _check_device(value._context, context)
        return value._memory()
    if isinstance(value, np.generic):
        return value.item()  # Python's numbers do not change the dtype of a result
    if _is_cupy(value):
        _check_device(adapter_for(value).context(value), context)
        return value
    if context.device_type == "gpu" and not isinstance(value, _NUMBERS):
        return _brought(value, context)
    return value


def is_operand(value: object) -> bool:
    """Return whether arithmetic accepts a value: an array, a list or a number."""
    return (isinstance(value, _OPERANDS) or _is_cupy(value)) and not isinstance(
        value, np.ma.MaskedArray
    )


def _target(value: Any, context: Context) -> Any:
    """Return the memory of an operand for writing."""
    if value is None:
        return None
    if isinstance(value, NDArray):
        _check_device(value._context, context)
        return value._memory_to_write()
    _check_device(adapter_for(value).context(value), context)
    return value


def _check_device(found: Context, wanted: Context) -> None:
    if not is_same_device(found, wanted):
        raise ArgumentTypeError(
            f"cannot mix arrays on {wanted} and {found}; copy one first: "
            f"a.as_in_context(mx.{wanted})"
        )


def _is_cupy(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "cupy"


def _brought(value: Any, context: Context) -> Array:
    """Return an array of the context's library, which may share memory with this one."""
    if isinstance(value, NDArray):
        value = value._memory()
    elif isinstance(value, _LISTS + _NUMBERS):
        value = np.asarray(value)
    if type(value) is np.ndarray and context.device_type == "cpu":
        return value
    return adapter_on(context).to_context(value, context)


def _is_basic(key: Any) -> bool:
    """Return whether a key selects a view, by NumPy's rules."""
    return all(
        part is None
        or part is ...
        or (isinstance(part, int | np.integer | slice) and not isinstance(part, bool))
        for part in (key if isinstance(key, tuple) else (key,))
    )


def _with_ellipsis(key: Any) -> Any:
    """Add an ellipsis, so that a single element is a view too, not a scalar."""
    parts = key if isinstance(key, tuple) else (key,)
    return key if ... in parts else (*parts, ...)


def _index(key: Any, context: Context) -> Any:
    if isinstance(key, tuple):
        return tuple(
            part
            if _is_basic(part)
            else _index([*part] if isinstance(part, tuple) else part, context)
            for part in key
        )
    positions = _brought(key, context)
    return positions if positions.dtype.kind in "biu" else positions.astype(np.int64)


def _described(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _restored(host: np.ndarray[Any, Any], context: Context) -> NDArray:
    return NDArray._of(adapter_on(context).to_context(host, context), context)


class NDArrayAdapter(ViewAdapter):
    """The adapter of NDArray: it returns the wrapped array once it may be accessed.

    A read waits for the calls that still write the values; a write waits for all calls. Shape,
    dtype and device need no wait. A store whose values arrive later takes the wrapped array first
    and uses only that: in a callback on the I/O thread, this adapter would wait for its own thread.
    Any other thread may call.
    """

    def view(self, array: NDArray) -> NativeArray:
        return array._memory()

    def shape(self, array: NDArray) -> tuple[int, ...]:
        return array.shape

    def dtype(self, array: NDArray) -> np.dtype[Any]:
        return array.dtype

    def context(self, array: NDArray) -> Context:
        # Of the memory: CPUs of all numbers share one.
        return adapter_on(array.context).context(array._array)

    def why_read_only(self, array: NDArray) -> str | None:
        return adapter_on(array.context).why_read_only(array._array)

    def memory(self, array: NDArray) -> np.ndarray[Any, Any] | None:
        return adapter_on(array.context).memory(array._memory_to_write())

    def device_memory(self, array: NDArray) -> NativeArray | None:
        return adapter_on(array.context).device_memory(array._memory_to_write())

    def from_host(self, host: np.ndarray[Any, Any], out: NDArray) -> None:
        adapter_on(out.context).from_host(host, out._memory_to_write())

    def assign(self, value: Any, out: NDArray) -> None:
        adapter_on(out.context).assign(value, out._memory_to_write())


register(NDArray, NDArrayAdapter())


if not TYPE_CHECKING:  # a checker would take every name, misspelt ones too

    def __getattr__(name):
        """Look a name up in ``nd``: MXNet calls its array library ``ndarray``, too."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module("kvstore.nd"), name)
