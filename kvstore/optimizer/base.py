"""What an optimizer is, and the registry of their names.

Pure: formulas over arrays that the caller owns; no I/O, no threads, no clock. An optimizer is
an immutable value, so that a store, its servers and the caller can share one; the arrays that
change (weight and state) belong to the store. Read next: ``arithmetic.py``, then ``sgd.py``;
``states.py`` for what is kept of a 16-bit weight.

Arithmetic is written as NumPy ufuncs with ``out=`` and ``dtype=``: CuPy arrays carry the same
calls out on their device. Only elementwise operations may be used by an optimizer of scope
``"element"``, since it sees a key in blocks.

The registry is filled by the decorator ``register`` when a module that holds an optimizer is
imported; a custom optimizer must be imported by the servers too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np

from kvstore.aggregate import Flat
from kvstore.dtypes import accumulation_dtype, is_float
from kvstore.errors import (
    ArgumentTypeError,
    NotSupportedError,
    OptimizerParameterError,
    UnknownOptimizerError,
)
from kvstore.optimizer.fields import (
    Key,
    Multipliers,
    Number,
    build,
    check_known,
    convert_fields,
    parameter_names,
    register_in,
)
from kvstore.optimizer.schedule import ScaledScheduler, Schedule
from kvstore.suggest import did_you_mean

__all__ = ["Number", "Optimizer", "create", "register"]

_Self = TypeVar("_Self", bound="Optimizer")


class ImmutableOptimizerError(NotSupportedError, dataclasses.FrozenInstanceError):
    """An attribute of an optimizer was set; the text says what changes one that is in use."""


@dataclasses.dataclass(frozen=True, repr=False)
class Optimizer:
    """Base of all optimizers. Subclasses are frozen dataclasses whose fields are the parameters.

    ::

        @register
        @dataclasses.dataclass(frozen=True)
        class Descent(Optimizer):
            learning_rate: float = 0.1

            def update(self, weight, grad, state, count, scratch):
                np.multiply(grad, self.rate(count), out=grad)
                np.subtract(weight, grad, out=weight, dtype=grad.dtype)

    Two optimizers are equal when class and parameters are. Fields are annotated ``float``,
    ``int``, ``bool`` or ``str``, each possibly ``| None``; values are checked and converted,
    and one that does not fit raises ``OptimizerParameterError``.

    Every optimizer also takes, by keyword: ``lr_scheduler``, a schedule of the learning rate;
    ``lr_mult`` and ``wd_mult``, mappings of keys to factors for their learning rate and decay
    (kept as sorted pairs); ``lazy_update``, whether a row-sparse gradient leaves rows alone that
    it does not have (else they are updated with a gradient of zero); ``multi_precision``, MXNet's
    name for float32 masters, which is always on. A ``base_lr`` of the schedule becomes the
    ``learning_rate`` where that was left at its default, and else gives way to it, as in MXNet.
    """

    scope: ClassVar[str] = "element"
    """``"element"``: each element is updated by itself. ``"key"``: needs the whole key (norms)."""

    name: ClassVar[str] = ""
    """The registered name: the class's, lower-cased."""

    lr_scheduler: Schedule | None = dataclasses.field(default=None, kw_only=True)
    lr_mult: Multipliers = dataclasses.field(default=(), kw_only=True)
    wd_mult: Multipliers = dataclasses.field(default=(), kw_only=True)
    lazy_update: bool = dataclasses.field(default=True, kw_only=True)
    multi_precision: bool = dataclasses.field(default=True, kw_only=True)

    _factors: dict[Key, tuple[float, float]] = dataclasses.field(
        default_factory=dict, init=False, compare=False, kw_only=True
    )
    """For each key with multipliers: that of the rate and that of the decay."""

    _variants: dict[Any, Any] = dataclasses.field(
        default_factory=dict, init=False, compare=False, kw_only=True
    )
    """What ``for_key`` has made; keys of equal multipliers share one."""

    def __new__(cls: type[_Self], *args: Any, **params: Any) -> _Self:
        # Before __init__, whose own error for an unknown name would say nothing of what is known.
        check_known(cls, params)
        return super().__new__(cls)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__repr__" not in vars(cls):
            cls.__repr__ = Optimizer.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.params().items())
        return f"{type(self).__name__}({shown})"

    def __post_init__(self) -> None:
        convert_fields(self)
        if not self.multi_precision:
            raise OptimizerParameterError(
                "multi_precision=False is not possible, leave it out: float16 and bfloat16 weights "
                "always have a float32 master, and those of other dtypes never have one"
            )
        for needed, given in (
            ("learning_rate", self.lr_scheduler is not None or self.lr_mult),
            ("wd", self.wd_mult),
        ):
            if given and needed not in parameter_names(type(self)):
                raise OptimizerParameterError(
                    f"{type(self).__name__} has no {needed}, so it takes no schedule of it "
                    "and no multipliers"
                )
        self._settle_base()
        rates: dict[Key, float] = dict(self.lr_mult)
        decays: dict[Key, float] = dict(self.wd_mult)
        for key in [*rates, *decays]:
            self._factors[key] = rates.get(key, 1.0), decays.get(key, 1.0)

    def _settle_base(self) -> None:
        schedule = self.lr_scheduler
        if schedule is None:
            return
        if schedule.base_lr is not None:
            fields = {field.name: field for field in dataclasses.fields(self)}
            if self._base_rate() == fields["learning_rate"].default:
                object.__setattr__(self, "learning_rate", schedule.base_lr)
            schedule = dataclasses.replace(schedule, base_lr=None)
            object.__setattr__(self, "lr_scheduler", schedule)
        schedule.check_base(self._base_rate())

    # -- parameters --------------------------------------------------------------------

    def params(self) -> dict[str, Any]:
        """The parameters by name; ``create(optimizer.name, **params)`` makes an equal one.

        Schedule and multipliers are there when they are set, ``lazy_update`` when it is off, and
        ``multi_precision``, which is always on, never. What travels is ``to_plain``.
        """
        values = {name: getattr(self, name) for name in parameter_names(type(self))}
        del values["multi_precision"]
        for name in ("lr_scheduler", "lr_mult", "wd_mult"):
            if not values[name]:
                del values[name]
        if self.lazy_update:
            del values["lazy_update"]
        return values

    def replace(self: _Self, **numbers: Any) -> _Self:
        """The same optimizer with other numbers; ``lr`` is short for ``learning_rate``.

        A new schedule that has a ``base_lr`` brings its learning rate along. Raises
        ``OptimizerParameterError``, which lists what is known.
        """
        if "lr" in numbers:
            if "learning_rate" in numbers:
                raise OptimizerParameterError("lr and learning_rate are the same; give one")
            numbers["learning_rate"] = numbers.pop("lr")
        check_known(type(self), numbers)
        schedule = numbers.get("lr_scheduler")
        if isinstance(schedule, Schedule) and schedule.base_lr is not None:
            numbers.setdefault("learning_rate", schedule.base_lr)
        return dataclasses.replace(self, **numbers)

    def set_learning_rate(self, lr: float) -> NoReturn:
        """MXNet's call. Raises ``NotSupportedError``: another value is made with ``replace``."""
        raise NotSupportedError(_immutable("set_learning_rate", "lr=..."))

    def set_lr_mult(self, args_lr_mult: Multipliers) -> NoReturn:
        """MXNet's call. Raises ``NotSupportedError``: another value is made with ``replace``."""
        raise NotSupportedError(_immutable("set_lr_mult", "lr_mult={key: factor}"))

    def set_wd_mult(self, args_wd_mult: Multipliers) -> NoReturn:
        """MXNet's call. Raises ``NotSupportedError``: another value is made with ``replace``."""
        raise NotSupportedError(_immutable("set_wd_mult", "wd_mult={key: factor}"))

    def rate(self, count: int) -> float:
        """The learning rate of update number ``count``, from 1 on."""
        base = self._base_rate()
        if self.lr_scheduler is None:
            return base
        return float(self.lr_scheduler.rate(count, base))

    def multipliers(self, key: Key) -> tuple[float, float]:
        """What ``key`` multiplies learning rate and decay with: 1.0 where nothing is given."""
        return self._factors.get(key, (1.0, 1.0))

    def for_key(self, key: Key) -> Optimizer:
        """The optimizer of one key: itself, unless the key has multipliers.

        With multipliers, one of the same class with both numbers multiplied (the rates of a
        schedule too) and no multipliers left: the same object for every call and for all keys
        of equal multipliers. State belongs to both alike.
        """
        factors = self._factors.get(key)
        if factors is None:
            return self
        variant = self._variants.get(factors)
        if variant is None:
            # Two threads may get here at once; both leave with the one that was first.
            variant = self._variants.setdefault(factors, self._scaled(*factors))
        found: Optimizer = variant
        return found

    def _scaled(self: _Self, lr_mult: float, wd_mult: float) -> _Self:
        changes: dict[str, Any] = {"lr_mult": (), "wd_mult": ()}
        if self.lr_mult:
            base = self._base_rate()
            changes["learning_rate"] = base * lr_mult
            if self.lr_scheduler is not None:
                changes["lr_scheduler"] = ScaledScheduler(self.lr_scheduler, lr_mult, base)
        if self.wd_mult:
            changes["wd"] = self._values()["wd"] * wd_mult
        return self.replace(**changes)

    def _values(self) -> dict[str, Any]:
        return vars(self)

    def _base_rate(self) -> float:
        base = self._values().get("learning_rate")
        if base is None:
            raise OptimizerParameterError(f"{type(self).__name__} has no learning_rate")
        return float(base)

    def _check_unit(self, *names: str) -> None:
        """Raise ``OptimizerParameterError`` unless these lie in [0, 1)."""
        for name in names:
            if not 0.0 <= self._values()[name] < 1.0:
                raise OptimizerParameterError(
                    f"{name} of {type(self).__name__} must lie in [0, 1), "
                    f"got {self._values()[name]!r}"
                )

    def _check_not_negative(self, *names: str) -> None:
        """Raise ``OptimizerParameterError`` if one of these is less than 0."""
        for name in names:
            if self._values()[name] < 0.0:
                raise OptimizerParameterError(
                    f"{name} of {type(self).__name__} must not be negative, "
                    f"got {self._values()[name]!r}"
                )

    # -- arrays ------------------------------------------------------------------------

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raise ``ArgumentTypeError`` unless weights of ``dtype`` can be updated: real floats."""
        if not is_float(dtype):
            raise ArgumentTypeError(
                f"the optimizer {self.name or type(self).__name__} updates float weights, not "
                f"{dtype}; keep such keys in a store without an optimizer"
            )

    def state_names(self) -> tuple[str, ...]:
        """Names of the arrays that ``create_state`` makes, in order: none by default.

        A subclass says what it keeps either here or by a ``create_state`` of its own; then
        the names are ``state0``, ``state1`` and so on.
        """
        if type(self).create_state is Optimizer.create_state:
            return ()
        made = self.create_state(np.zeros(1, np.float32))
        return tuple(f"state{index}" for index in range(len(made)))

    def create_state(self, weight: Flat) -> tuple[Flat, ...]:
        """The arrays that the optimizer keeps for ``weight`` between updates.

        New 1-D arrays, one for each of ``state_names``, zero, as long as ``weight``, on its
        device, owned by the caller, in the accumulation dtype: a float16 weight has float32
        state, since squares of gradients leave float16's range. Stores come here by way of
        ``states.py``, with the float32 master of such a weight.
        """
        dtype = accumulation_dtype(weight.dtype)
        return tuple(np.zeros_like(weight, dtype=dtype) for _ in self.state_names())

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        """Update ``weight`` and ``state`` in place from the summed gradient.

        All arrays are 1-D, of one length, on one device and the caller's. ``weight``, ``grad``
        and ``scratch`` have the accumulation dtype (see ``kvstore/aggregate.py``), in which all
        arithmetic is done: for a float16 key, ``weight`` is its float32 master. ``grad`` and
        ``scratch`` may be overwritten; ``scratch`` holds nothing at entry. ``count`` is the
        number of this update of this part, from 1 on.
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
        if previous is None or type(previous) is not type(self):
            return fresh, 0
        kept = dict(zip(previous.state_names(), state, strict=False))
        names = self.state_names()
        return tuple(kept.get(name, new) for name, new in zip(names, fresh, strict=True)), count


def _immutable(what: str, change: str) -> str:
    change_it = f"kv.set_optimizer_params({change}) changes the one that a store uses"
    if "mult" in change:
        change_it = f"kv.set_optimizer(optimizer.replace({change})) changes the one of a store"
    return (
        f"{what} is not possible, since optimizers are values, which stores and servers share; "
        f"{change_it}, optimizer.replace({change}) makes another"
    )


def _refuse_to_set(self: Optimizer, name: str, value: object) -> NoReturn:
    shown = "lr=..." if name in ("lr", "learning_rate") else f"{name}=..."
    raise ImmutableOptimizerError(_immutable(f"setting {name}", shown))


def _refuse_to_delete(self: Optimizer, name: str) -> NoReturn:
    raise ImmutableOptimizerError(f"optimizers are values; {name} cannot be deleted")


_Class = TypeVar("_Class", bound=type[Optimizer])

_registry: dict[str, type[Optimizer]] = {}


def register(cls: _Class) -> _Class:
    """Class decorator: make an optimizer known under its class name, lower-cased.

    The same class may be registered again (a module that is loaded anew); another class of the
    same name raises ``ArgumentTypeError``, as does a class that is no frozen dataclass itself.
    """
    register_in(_registry, cls, cls.__name__.lower(), "optimizer")
    # In the place of a frozen dataclass's own, whose error says only that it is frozen.
    cls.__setattr__ = _refuse_to_set  # type: ignore[assignment, method-assign]
    cls.__delattr__ = _refuse_to_delete  # type: ignore[assignment, method-assign]
    return cls


def create(name: str, **params: Any) -> Optimizer:
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
            f"{did_you_mean(name.lower(), _registry)}"
        )
    made: Optimizer = build(cls, params)
    return made
