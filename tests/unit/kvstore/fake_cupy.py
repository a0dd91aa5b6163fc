"""A stand-in for CuPy in tests: one memory for each device, and no mixing of them.

It holds to what ``kvstore/arrays/cupy.py`` relies on and is stricter where CuPy is lenient:
an operation on an array of another device than the current one is an error, and so is handing
an array to NumPy. The arithmetic is NumPy's. ``install(monkeypatch)`` puts it in CuPy's place.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

_current = [0]
synchronised: list[int] = []
"""The devices whose stream was waited for, in order."""


class WrongDevice(RuntimeError):
    """An operation touched an array of a device that is not the current one."""


class ndarray:  # noqa: N801 (adapter_for goes by this name)
    __module__ = "cupy"

    def __init__(self, values: np.ndarray[Any, Any], device_id: int) -> None:
        self.values = values
        self.device = types.SimpleNamespace(id=device_id)

    dtype = property(lambda self: self.values.dtype)
    shape = property(lambda self: self.values.shape)
    nbytes = property(lambda self: self.values.nbytes)
    flags = property(lambda self: self.values.flags)

    def __array__(self, *args: object, **options: object) -> None:
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        assert method == "__call__"
        plain = [_here(value) for value in inputs]
        (out,) = options.pop("out", (None,))
        if out is None:
            return ndarray(np.asarray(ufunc(*plain, **options)), _current[0])
        ufunc(*plain, out=_here(out), **options)
        return out

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        assert function in (np.zeros_like, np.empty_like)
        return ndarray(function(_here(args[0]), *args[1:], **options), _current[0])

    def reshape(self, *shape: int) -> ndarray:
        return ndarray(self.values.reshape(*shape), self.device.id)

    def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> ndarray:
        if not copy and self.dtype == dtype:
            return self
        return ndarray(_here(self).astype(dtype, order=order), _current[0])

    def copy(self, order: str = "C") -> ndarray:
        return ndarray(_here(self).copy(order), _current[0])

    def __getitem__(self, index: Any) -> ndarray:
        return ndarray(self.values[index], self.device.id)

    def __setitem__(self, index: Any, value: ndarray) -> None:
        np.copyto(_here(self)[index], _here(value), casting="unsafe")


class Device:
    def __init__(self, device_id: int) -> None:
        self.device_id = device_id

    def __enter__(self) -> None:
        _current.append(_current[0])
        _current[0] = self.device_id

    def __exit__(self, *error: object) -> None:
        _current[0] = _current.pop()


class Stream:
    def synchronize(self) -> None:
        synchronised.append(_current[0])


def asarray(value: Any) -> ndarray:
    """Host to current device; device to current device only where contiguous, as in CuPy."""
    if not isinstance(value, ndarray):
        return ndarray(np.array(value), _current[0])
    if value.device.id == _current[0]:
        return value
    assert value.flags.c_contiguous, "CuPy cannot copy non-contiguous arrays between devices"
    return ndarray(value.values.copy(), _current[0])


def ascontiguousarray(value: ndarray) -> ndarray:
    return value if value.flags.c_contiguous else value.copy()


def asnumpy(value: ndarray, order: str = "C") -> np.ndarray[Any, Any]:
    return np.array(_here(value), order=order)  # type: ignore[call-overload,no-any-return]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``import cupy`` give this stand-in until the test ends."""
    module: Any = types.ModuleType("cupy")
    module.ndarray = ndarray
    module.asarray = asarray
    module.ascontiguousarray = ascontiguousarray
    module.asnumpy = asnumpy
    module.cuda = types.SimpleNamespace(Device=Device, get_current_stream=Stream)
    monkeypatch.setitem(sys.modules, "cupy", module)
    _current[:] = [0]
    synchronised.clear()


def on_gpu(values: Any, device_id: int) -> ndarray:
    """An array on a fake device."""
    return ndarray(np.array(values), device_id)


def _here(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        raise TypeError("a NumPy array in a CuPy operation")
    if not isinstance(value, ndarray):
        return value
    if value.device.id != _current[0]:
        raise WrongDevice(f"array on device {value.device.id}, current device {_current[0]}")
    return value.values
