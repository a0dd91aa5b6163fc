"""Initializers for parameters, such as ``mx.init.Xavier()``.

Each is a callable (name, shape, rng) that returns a new float32 array, as ``FeedForward`` needs
it. The caller passes the generator, so equal seeds give equal values. With any initializer,
parameters whose names end in ``bias``, ``beta`` or ``mean`` begin at 0, and those ending in
``gamma`` or ``var`` at 1. Any thread may call. Read next: ``mxnet/fit/network.py``, whose
``initial_params`` calls initializers.

Source of names, defaults and formulas: ``python/mxnet/initializer.py`` of the original.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ArgumentTypeError, ArgumentValueError, NotSupportedError

__all__ = [
    "Constant",
    "Initializer",
    "MSRAPrelu",
    "Mixed",
    "Normal",
    "One",
    "Orthogonal",
    "Uniform",
    "Xavier",
    "Zero",
    "create",
    "register",
]

Values = NDArray[Any]

_Class = TypeVar("_Class", bound=type)

ZEROS = ("bias", "beta", "mean")
ONES = ("gamma", "var")


class _ByName:
    """The base of initializers; biases, gammas and means get fixed values.

    A subclass overrides ``weight``, or MXNet's ``_init_weight(name, arr)``, which fills an
    ``mx.nd`` array.
    """

    def __call__(self, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Values:
        if name.endswith(ZEROS):
            return np.zeros(shape, np.float32)
        if name.endswith(ONES):
            return np.ones(shape, np.float32)
        return self.weight(name, shape, rng).astype(np.float32)

    def weight(self, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Values:
        """Return initial values for a weight."""
        from kvstore.mxnet import nd

        array = nd.zeros(shape)
        self._init_weight(name, array)
        return array.asnumpy().reshape(shape)

    def _init_weight(self, name: str, arr: Any) -> None:
        raise NotSupportedError(
            f"{type(self).__name__} must override weight(name, shape, rng) or "
            "_init_weight(name, arr)"
        )


Initializer = _ByName
"""MXNet's name for the base class."""


@dataclass(frozen=True)
class Uniform(_ByName):
    """Uniform numbers from [-scale, scale)."""

    scale: float = 0.07

    def weight(self, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Values:
        return rng.uniform(-self.scale, self.scale, shape)


@dataclass(frozen=True)
class Normal(_ByName):
    """Normal numbers of mean 0 and standard deviation ``sigma``."""

    sigma: float = 0.01

    def weight(self, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Values:
        return rng.normal(0.0, self.sigma, shape)


@dataclass(frozen=True)
class Constant(_ByName):
    """The same number for all weights."""

    value: float = 0.0

    def weight(self, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Values:
        return np.full(shape, self.value)


@dataclass(frozen=True)
class Zero(Constant):
    """Zero for all weights."""

    value: float = field(default=0.0, init=False)


@dataclass(frozen=True)
class One(Constant):
    """One for all weights."""

    value: float = field(default=1.0, init=False)


@dataclass(frozen=True)
class Xavier(_ByName):
    """Random numbers from U(-scale, scale) or N(0, scale) (Glorot and Bengio).

    The scale is sqrt(magnitude / factor).

    factor is the number of inputs (``in``) or outputs (``out``) of one unit, or their mean
    (``avg``). A weight has the shape (outputs, inputs, ...); any further lengths multiply both
    numbers. Source: Glorot and Bengio, "Understanding the difficulty of training deep feedforward
    neural networks", 2010.
    """

    rnd_type: str = "uniform"
    factor_type: str = "avg"
    magnitude: float = 3.0

    def __post_init__(self) -> None:
        if self.rnd_type not in ("uniform", "gaussian"):
            raise ArgumentValueError(f"rnd_type must be uniform or gaussian, got {self.rnd_type!r}")
        if self.factor_type not in ("in", "out", "avg"):
            raise ArgumentValueError(
                f"factor_type must be in, out or avg, got {self.factor_type!r}"
            )

    def weight(self, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Values:
        if len(shape) < 2:
            raise ArgumentValueError(
                f"Xavier needs a parameter of shape (outputs, inputs, ...), but {name} has shape "
                f"{shape}; use another initializer for it"
            )
        area = math.prod(shape[2:])
        inputs, outputs = shape[1] * area, shape[0] * area
        factor = {"in": inputs, "out": outputs, "avg": (inputs + outputs) / 2.0}[self.factor_type]
        scale = math.sqrt(self.magnitude / factor)
        if self.rnd_type == "uniform":
            return rng.uniform(-scale, scale, shape)
        return rng.normal(0.0, scale, shape)


def MSRAPrelu(factor_type: str = "avg", slope: float = 0.25) -> Xavier:  # noqa: N802 (a class there)
    """Create a gaussian Xavier for units of slope ``slope`` below 0.

    Source: He et al., arXiv 1502.01852.
    """
    return Xavier("gaussian", factor_type, 2.0 / (1.0 + slope**2))


@dataclass(frozen=True)
class Orthogonal(_ByName):
    """Orthonormal rows (or columns, if fewer) times ``scale`` (arXiv 1312.6120)."""

    scale: float = 1.414
    rand_type: str = "uniform"

    def weight(self, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Values:
        size = (shape[0], math.prod(shape[1:]))
        drawn = rng.uniform(-1, 1, size) if self.rand_type == "uniform" else rng.normal(0, 1, size)
        left, _, right = np.linalg.svd(drawn, full_matrices=False)
        return self.scale * (left if left.shape == size else right).reshape(shape)


@dataclass(frozen=True)
class Mixed:
    """An initializer that uses another one, chosen by the first pattern that matches.

    Patterns match at the start of the name.

    ``patterns`` are regular expressions, such as ``[".*gate_bias", ".*"]``, and ``initializers``
    has one initializer for each. Raises ``ArgumentValueError`` if their numbers differ, or if no
    pattern matches a name.
    """

    patterns: Sequence[str]
    initializers: Sequence[Callable[..., Values]]

    def __post_init__(self) -> None:
        if len(self.patterns) != len(self.initializers):
            raise ArgumentValueError(
                f"Mixed needs one initializer for each pattern, got {len(self.patterns)} "
                f"patterns and {len(self.initializers)} initializers"
            )

    def __call__(self, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Values:
        for pattern, chosen in zip(self.patterns, self.initializers, strict=True):
            if re.match(pattern, name):
                return chosen(name, shape, rng)
        raise ArgumentValueError(
            f"no pattern matches the parameter {name!r} (patterns: {', '.join(self.patterns)}); "
            "add '.*' as the last pattern"
        )


_BY_NAME: dict[str, Callable[..., Any]] = {
    "constant": Constant,
    "msra": MSRAPrelu,
    "msraprelu": MSRAPrelu,
    "normal": Normal,
    "one": One,
    "orthogonal": Orthogonal,
    "uniform": Uniform,
    "xavier": Xavier,
    "zero": Zero,
}


def register(klass: _Class) -> _Class:
    """Register a class of initializers for ``create``, and return the class.

    Its name in ``create`` is the class name in lower case. Raises ``ArgumentTypeError`` for an
    object that is not a class.
    """
    if not isinstance(klass, type):
        raise ArgumentTypeError(f"register needs a subclass of Initializer, got {klass!r}")
    _BY_NAME[klass.__name__.lower()] = klass
    return klass


def create(name: str, **numbers: Any) -> Any:
    """Create the initializer with this name (case is ignored).

    Raises ``ArgumentValueError`` for an unknown name.
    """
    maker = _BY_NAME.get(name.lower())
    if maker is None:
        raise ArgumentValueError(f"no initializer is named {name!r}; known: {', '.join(_BY_NAME)}")
    return maker(**numbers)
