"""Names of devices for arrays, such as ``cpu(0)`` and ``gpu(1)``.

A ``Context`` is a plain value that threads may share; it does no work on the device. ``gpu(i)`` and
``Context.module`` import CuPy, through ``kvstore/arrays/cupy.py``. Read that file next.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from kvstore.errors import ArgumentTypeError, MissingDependencyError

_DEVICE_TYPES = ("cpu", "gpu")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Context:
    """A device: a type (``"cpu"`` or ``"gpu"``) and a number. Immutable.

    Within ``with mx.gpu(1):``, arrays that this thread (or task) creates without a device are on
    that GPU. ``Context(other)`` returns a context equal to ``other``. NumPy arrays are all on
    ``cpu(0)``; other CPU numbers are accepted, as in MXNet, and mean the same memory.
    Raises ``ArgumentTypeError`` for an unknown type or a number that is not an index.
    """

    device_type: str
    device_id: int

    def __init__(self, device_type: str | Context, device_id: int = 0) -> None:
        if isinstance(device_type, Context):
            device_id = device_type.device_id
            device_type = device_type.device_type
        if device_type not in _DEVICE_TYPES:
            raise ArgumentTypeError(
                f"a device type must be one of {', '.join(_DEVICE_TYPES)}, got {device_type!r}"
            )
        if isinstance(device_id, bool) or not isinstance(device_id, int) or device_id < 0:
            raise ArgumentTypeError(
                f"a device number must be an int of at least 0, got {device_id!r}"
            )
        object.__setattr__(self, "device_type", device_type)
        object.__setattr__(self, "device_id", device_id)

    @property
    def module(self) -> ModuleType:
        """The array library of this device: the module ``numpy`` or ``cupy``.

        Raises ``MissingDependencyError`` when the device is a GPU and CuPy is not installed.
        """
        if self.device_type == "cpu":
            import numpy

            return numpy
        from kvstore.arrays.cupy import load

        return load()

    def __enter__(self) -> Context:
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(self, *_: object) -> None:
        _entered.set(_entered.get()[:-1])

    def __repr__(self) -> str:
        return f"{self.device_type}({self.device_id})"


_entered: ContextVar[tuple[Context, ...]] = ContextVar("entered", default=())


def current_context() -> Context:
    """Return the device of the innermost ``with`` block, or ``cpu(0)``."""
    entered = _entered.get()
    return entered[-1] if entered else Context("cpu", 0)


def cpu(device_id: int = 0) -> Context:
    """Return the context of the host's memory."""
    return Context("cpu", device_id)


def gpu(device_id: int = 0) -> Context:
    """Return the context of the CUDA device with this number.

    Raises ``MissingDependencyError``, which says what to install, when CuPy is missing.
    Whether the device exists is checked only at its first use.
    """
    context = Context("gpu", device_id)
    _ = context.module
    return context


def num_gpus() -> int:
    """Return how many CUDA devices CuPy can use; 0 if CuPy or the driver is missing."""
    from kvstore.arrays.cupy import load

    try:
        runtime = load().cuda.runtime
    except MissingDependencyError:
        return 0
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError:  # no driver, or no device
        return 0


if not TYPE_CHECKING:  # a type checker would accept every name, misspelt ones too

    def __getattr__(name):
        from kvstore.errors.hints import missing

        raise missing(
            "kvstore.context", name, ("Context", "cpu", "current_context", "gpu", "num_gpus")
        )
