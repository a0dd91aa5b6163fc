"""What an optimizer is, and the registry of their names.

Pure: formulas over arrays that the caller owns; no I/O, no threads, no clock. An optimizer is
an immutable value, so that a store, its servers and the caller can share one; the arrays that
change (weight and state) belong to the store. Read next: ``sgd.py``.

Arithmetic is written as NumPy ufuncs with ``out=`` and ``dtype=``: CuPy arrays carry the same
calls out on their device. Only elementwise operations may be used by an optimizer of scope
``"element"``, since it sees a key in blocks.

The registry is filled by the decorator ``register`` when a module that holds an optimizer is
imported; a custom optimizer must be imported by the servers too.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from kvstore.aggregate import Flat, accumulation_dtype
from kvstore.errors import ArgumentTypeError, OptimizerParameterError, UnknownOptimizerError

Number: typing.TypeAlias = float | int | bool | str | None
"""What a parameter may be, and so what travels over the wire."""


class Optimizer:
    """Base of all optimizers. Subclasses are frozen dataclasses whose fields are the parameters.

    ::

        @register
        @dataclasses.dataclass(frozen=True)
        class Descent(Optimizer):
            step: float = 0.1

            def update(self, weight, grad, state, count, scratch):
                np.multiply(grad, self.step, out=grad)
                np.subtract(weight, grad, out=weight, dtype=grad.dtype)

    Two optimizers are equal when class and parameters are. Fields are annotated ``float``,
    ``int``, ``bool`` or ``str``, each possibly ``| None``; values are checked and converted,
    and one that does not fit raises ``OptimizerParameterError``.
    """

    scope: ClassVar[str] = "element"
    """``"element"``: each element is updated by itself. ``"key"``: needs the whole key (norms)."""

    name: ClassVar[str] = ""
    """The registered name: the class's, lower-cased."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = _converted(self, field.name, getattr(self, field.name), hints[field.name])
            object.__setattr__(self, field.name, value)

    def params(self) -> dict[str, Number]:
        """The parameters by name; ``create(optimizer.name, **params)`` makes an equal one."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {field.name: getattr(self, field.name) for field in fields}

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raise ``ArgumentTypeError`` unless weights of ``dtype`` can be updated: real floats."""
        if dtype.kind != "f":
            raise ArgumentTypeError(
                f"the optimizer {self.name or type(self).__name__} updates float weights, not "
                f"{dtype}; keep such keys in a store without an optimizer"
            )

    def create_state(self, weight: Flat) -> tuple[Flat, ...]:
        """The arrays that the optimizer keeps for ``weight`` between updates: none by default.

        New 1-D arrays, zero, as long as ``weight``, on its device, owned by the caller, in the
        accumulation dtype: a float16 weight has float32 state, since squares of gradients
        leave float16's range.
        """
        return ()

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        """Update ``weight`` and ``state`` in place from the summed gradient.

        All arrays are 1-D, of one length, on one device and the caller's. ``grad`` and
        ``scratch`` have the accumulation dtype (see ``kvstore/aggregate.py``), in which all
        arithmetic is done, and may be overwritten; ``scratch`` holds nothing at entry.
        ``count`` is the number of this update of this part, from 1 on.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define update()")

    def take_over(
        self, previous: Optimizer | None, weight: Flat, state: Sequence[Flat], count: int
    ) -> tuple[tuple[Flat, ...], int]:
        """State and update count of a part of which this optimizer takes charge.

        From one of the same class both stay, whatever the numbers; arrays that only one of
        the two needs (momentum 0 keeps none) begin at zero or are dropped. From any other,
        state and count start afresh.
        """
        fresh = self.create_state(weight)
        if type(previous) is not type(self):
            return fresh, 0
        return tuple(state[: len(fresh)]) + fresh[len(state) :], count

    def _zeros(self, weight: Flat, number: int) -> tuple[Flat, ...]:
        dtype = accumulation_dtype(weight.dtype)
        return tuple(np.zeros_like(weight, dtype=dtype) for _ in range(number))


_Class = TypeVar("_Class", bound=type[Optimizer])

_registry: dict[str, type[Optimizer]] = {}


def register(cls: _Class) -> _Class:
    """Class decorator: make an optimizer known under its class name, lower-cased.

    The same class may be registered again (a module that is loaded anew); another class of the
    same name raises ``ArgumentTypeError``, as does a class that is no frozen dataclass itself.
    """
    options = vars(cls).get("__dataclass_params__")
    if options is None or not options.frozen:
        raise ArgumentTypeError(
            f"{cls.__name__} must be a frozen dataclass: put @dataclasses.dataclass(frozen=True) "
            "between @register and the class"
        )
    name = cls.__name__.lower()
    known = _registry.get(name, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ArgumentTypeError(
            f"the optimizer name {name!r} is taken by {known.__module__}.{known.__qualname__}; "
            "choose another class name"
        )
    cls.name = name
    _registry[name] = cls
    return cls


def create(name: str, **params: Number) -> Optimizer:
    """The optimizer registered under ``name`` (case does not matter), with these numbers.

    Raises ``UnknownOptimizerError`` or ``OptimizerParameterError``, which list what is known.
    Source of the names: ``mxnet.optimizer.create``.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"an optimizer's name must be a string, got {name!r}")
    cls = _registry.get(name.lower())
    if cls is None:
        raise UnknownOptimizerError(
            f"no optimizer is named {name!r}; known: {', '.join(sorted(_registry))}"
        )
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    unknown = sorted(set(params) - set(known))
    if unknown:
        raise OptimizerParameterError(
            f"{cls.name} has no parameter {', '.join(unknown)}; known: {', '.join(known)}"
        )
    return cls(**params)


def rescale(grad: Flat, factor: float) -> None:
    """grad *= factor, in place."""
    if factor != 1.0:
        np.multiply(grad, factor, out=grad)


def clip(grad: Flat, limit: float | None) -> None:
    """Bring each element into [-limit, limit], in place. None, 0 and less turn it off (MXNet)."""
    if limit is not None and limit > 0:
        np.minimum(grad, limit, out=grad)
        np.maximum(grad, -limit, out=grad)


def add_decay(grad: Flat, weight: Flat, wd: float, scratch: Flat) -> None:
    """grad += wd * weight, in place; overwrites ``scratch``."""
    if wd != 0.0:
        np.multiply(weight, wd, out=scratch, dtype=grad.dtype)
        np.add(grad, scratch, out=grad)


def _converted(optimizer: Optimizer, field: str, value: object, hint: Any) -> Number:
    # Plain Python numbers keep the weight's dtype in NumPy's arithmetic; a numpy.float64
    # would turn float32 blocks into float64 ones.
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if is_union else (hint,)
    if value is None and type(None) in kinds:
        return None
    if str in kinds and isinstance(value, str):
        return value
    if isinstance(value, bool | np.bool_):
        if bool in kinds:
            return bool(value)
    elif int in kinds and isinstance(value, numbers.Integral):
        return int(value)
    elif float in kinds and isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value)
    wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
    raise OptimizerParameterError(
        f"{field} of {type(optimizer).__name__} must be {wanted} (and finite), got {value!r}"
    )
