"""Learning-rate schedules: immutable values that map an update number to a rate.

Pure. Unlike MXNet's, a schedule does not count updates: the rate depends only on the number of
the update. So the rate is the same after a server restarts, and for a key added later. Names,
parameters and formulas are those of MXNet 1.9.1 (``python/mxnet/lr_scheduler.py``). Read next:
``base.py``, whose ``Optimizer.rate`` calls schedules.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from kvstore.errors import ArgumentTypeError, OptimizerParameterError
from kvstore.errors.hints import did_you_mean
from kvstore.optimizer.parameters import build, convert_fields, register_in

__all__ = [
    "CosineScheduler",
    "FactorScheduler",
    "LRScheduler",
    "MultiFactorScheduler",
    "PolyScheduler",
    "Schedule",
    "create",
    "register",
]

_WARM_UP = ("warmup_steps", "warmup_begin_lr", "warmup_mode")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Base of all schedules. Subclasses are frozen dataclasses and define ``decayed``.

    ::

        @register
        @dataclasses.dataclass(frozen=True)
        class HalvingScheduler(Schedule):
            every: int = 1000

            def decayed(self, count, base_lr):
                return base_lr / 2 ** (count // self.every)

    Before update number ``warmup_steps`` the rate rises in equal steps from
    ``warmup_begin_lr`` towards the base rate (mode ``"linear"``) or stays at
    ``warmup_begin_lr`` (``"constant"``). ``base_lr`` None means the learning rate of the
    optimizer; MXNet uses 0.01. The optimizer's learning rate may replace a ``base_lr`` that you
    give (``gives_way``).
    """

    name: ClassVar[str] = ""
    """The registered name: the class's, lower-cased, without ``scheduler`` at its end."""

    gives_way: ClassVar[bool] = True
    """Whether the optimizer's learning rate may replace ``base_lr``, as in MXNet."""

    positional: ClassVar[tuple[str, ...]]
    """Parameters that may be given by position; by default, the fields of the class itself."""

    base_lr: float | None = dataclasses.field(default=None, kw_only=True)
    warmup_steps: int = dataclasses.field(default=0, kw_only=True)
    warmup_begin_lr: float = dataclasses.field(default=0.0, kw_only=True)
    warmup_mode: str = dataclasses.field(default="linear", kw_only=True)

    def __post_init__(self) -> None:
        convert_fields(self)
        self._require(self.warmup_steps >= 0, "warmup_steps must not be negative")
        self._require(
            self.warmup_mode in ("linear", "constant"),
            f"warmup_mode must be 'linear' or 'constant', got {self.warmup_mode!r}",
        )
        if self.base_lr is not None:
            self.check_base(self.base_lr)

    def rate(self, count: int, base_lr: float) -> float:
        """Return the learning rate of update number ``count``, counted from 1."""
        if count >= self.warmup_steps:
            return self.decayed(count, base_lr)
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        return self.warmup_begin_lr + (base_lr - self.warmup_begin_lr) * count / self.warmup_steps

    def __call__(self, num_update: int) -> float:
        """Return the rate for the schedule's ``base_lr``, or for MXNet's default 0.01."""
        return self.rate(num_update, 0.01 if self.base_lr is None else self.base_lr)

    def decayed(self, count: int, base_lr: float) -> float:
        """Return the rate after the warm-up; it depends only on arguments and fields."""
        raise NotImplementedError(f"{type(self).__name__} must define decayed()")

    def check_base(self, base_lr: float) -> None:
        """Check that a warm-up begins at ``base_lr`` or below.

        Raises ``OptimizerParameterError``.
        """
        self._require(
            self.warmup_steps == 0 or self.warmup_begin_lr <= base_lr,
            f"warmup_begin_lr must not exceed the learning rate {base_lr}, got "
            f"{self.warmup_begin_lr}",
        )

    def _require(self, holds: bool, text: str) -> None:
        if not holds:
            raise OptimizerParameterError(f"{type(self).__name__}: {text}")


LRScheduler = Schedule
"""MXNet's name for the base class."""

_Class = TypeVar("_Class", bound=type[Schedule])

_registry: dict[str, type[Schedule]] = {}


def register(cls: _Class) -> _Class:
    """Register a schedule class under its name; used as a decorator.

    See ``kvstore.optimizer.register``.
    """
    return register_in(_registry, cls, cls.__name__.lower().removesuffix("scheduler"), "schedule")


def create(name: str, **params: Any) -> Schedule:
    """Return the schedule registered under ``name`` (``"factor"``, ``"cosine"``, ...).

    For an unknown name or parameter it raises ``OptimizerParameterError``, which lists the known
    ones.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"a schedule's name must be a string, got {name!r}")
    cls = _registry.get(name.lower())
    if cls is None:
        raise OptimizerParameterError(
            f"no learning-rate schedule is named {name!r}; known: {', '.join(sorted(_registry))}"
            f"{did_you_mean(name.lower(), _registry)}"
        )
    made: Schedule = build(cls, params)
    return made


@register
@dataclasses.dataclass(frozen=True)
class FactorScheduler(Schedule):
    """The rate ``base * factor ** k``, where k = (t - 1) // ``step``, for update t.

    Updates 1 to ``step`` have the base rate, the next ``step`` updates have this rate times
    ``factor``, and so on. The rate is never reduced below ``stop_factor_lr``. Updates of the
    warm-up count too.
    """

    positional: ClassVar[tuple[str, ...]] = (
        "step",
        "factor",
        "stop_factor_lr",
        "base_lr",
        *_WARM_UP,
    )

    step: int
    factor: float = 1.0
    stop_factor_lr: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.step >= 1, f"step must be at least 1, got {self.step}")
        self._require(0.0 <= self.factor <= 1.0, f"factor must lie in [0, 1], got {self.factor}")

    def decayed(self, count: int, base_lr: float) -> float:
        times = max(count - 1, 0) // self.step
        return max(base_lr * self.factor**times, self.stop_factor_lr) if times else base_lr


@register
@dataclasses.dataclass(frozen=True)
class MultiFactorScheduler(Schedule):
    """The rate ``base * factor ** k``; k is how many entries of ``step`` are below t.

    t is the update number. ``step`` is a list of update numbers, each larger than the one before;
    it is stored as a tuple.
    """

    positional: ClassVar[tuple[str, ...]] = ("step", "factor", "base_lr", *_WARM_UP)

    step: Sequence[int]
    factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        rising = all(a < b for a, b in zip(self.step, self.step[1:], strict=False))
        self._require(
            len(self.step) > 0 and self.step[0] >= 1 and rising,
            "step must be an increasing list of update numbers of at least 1, got "
            f"{list(self.step)}",
        )
        self._require(0.0 <= self.factor <= 1.0, f"factor must lie in [0, 1], got {self.factor}")

    def decayed(self, count: int, base_lr: float) -> float:
        return base_lr * self.factor ** sum(step < count for step in self.step)


@dataclasses.dataclass(frozen=True)
class _UntilMaximum(Schedule):
    """A schedule that ends with ``final_lr`` at update number ``max_update``.

    As in MXNet, a ``base_lr`` given to such a schedule takes precedence over the optimizer's rate.
    """

    gives_way: ClassVar[bool] = False

    max_update: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(
            self.max_update > self.warmup_steps and self.max_update >= 1,
            f"max_update must be at least 1 and greater than warmup_steps ({self.warmup_steps}), "
            f"got {self.max_update}",
        )

    def _progress(self, count: int) -> float:
        """Return 0.0 at the end of the warm-up, rising to 1.0 at ``max_update``."""
        done = min(max(count, self.warmup_steps), self.max_update) - self.warmup_steps
        return done / (self.max_update - self.warmup_steps)


@register
@dataclasses.dataclass(frozen=True)
class PolyScheduler(_UntilMaximum):
    """``final_lr + (base - final_lr) * (1 - progress) ** pwr``, then ``final_lr``.

    progress rises from 0 at the end of the warm-up to 1 at ``max_update``.
    """

    positional: ClassVar[tuple[str, ...]] = (
        "max_update",
        "base_lr",
        "pwr",
        "final_lr",
        *_WARM_UP,
    )

    pwr: float = 2.0
    final_lr: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.pwr >= 0.0, f"pwr must not be negative, got {self.pwr}")

    def decayed(self, count: int, base_lr: float) -> float:
        remaining = math.pow(1.0 - self._progress(count), self.pwr)
        return self.final_lr + (base_lr - self.final_lr) * remaining


@register
@dataclasses.dataclass(frozen=True)
class CosineScheduler(_UntilMaximum):
    """The rate ``final_lr + (base - final_lr) * (1 + cos(pi * progress)) / 2``.

    After ``max_update`` it is ``final_lr``.

    progress rises from 0 at the end of the warm-up to 1 at ``max_update``. This is the annealing
    of Loshchilov and Hutter (arXiv 1608.03983), without restarts.
    """

    positional: ClassVar[tuple[str, ...]] = ("max_update", "base_lr", "final_lr", *_WARM_UP)

    final_lr: float = 0.0

    def decayed(self, count: int, base_lr: float) -> float:
        remaining = (1.0 + math.cos(math.pi * self._progress(count))) / 2.0
        return self.final_lr + (base_lr - self.final_lr) * remaining


@register
@dataclasses.dataclass(frozen=True)
class ScaledScheduler(Schedule):
    """The rates of another schedule with base ``start_lr``, times ``factor``.

    The factor applies to the warm-up too.

    Keys with a learning-rate multiplier use it. The multiplier applies to the schedule's rates,
    not to its base, so it multiplies final and smallest rates too (as in MXNet).
    """

    schedule: Schedule
    factor: float
    start_lr: float

    def rate(self, count: int, base_lr: float) -> float:
        return self.factor * self.schedule.rate(count, self.start_lr)
