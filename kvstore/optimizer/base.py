"""The base class of optimizers, and the registry of their names.

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
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np

from kvstore.arrays.cpu.sums import Flat
from kvstore.arrays.dtypes import accumulation_dtype, is_float
from kvstore.arrays.keys import Key
from kvstore.errors import (
    ArgumentTypeError,
    NotSupportedError,
    OptimizerParameterError,
    UnknownOptimizerError,
)
from kvstore.errors.hints import did_you_mean
from kvstore.optimizer.arithmetic import add_decay, clip, rescale
from kvstore.optimizer.parameters import (
    Multipliers,
    Number,
    build,
    check_known,
    convert_fields,
    parameter_names,
    positions,
    register_in,
)
from kvstore.optimizer.schedule import ScaledScheduler, Schedule
from kvstore.optimizer.scripted import (
    OptimizerKind,
    ScriptedOptimizer,
    create_scripted,
    register_scripted,
)

__all__ = ["ClippedOptimizer", "Number", "Optimizer", "State", "create", "register"]

State = Sequence[Flat]
"""What an optimizer keeps of some elements: an array for each of ``state_names``."""

_Self = TypeVar("_Self", bound="Optimizer")


class ImmutableOptimizerError(NotSupportedError, dataclasses.FrozenInstanceError):
    """A script tried to set an attribute of an optimizer; optimizers are immutable."""


@dataclasses.dataclass(frozen=True, repr=False)
class Optimizer(metaclass=OptimizerKind):
    """The base class of optimizers: frozen dataclasses of parameters.

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
    it does not have (else they are updated with a gradient of zero), with None for what MXNet
    does (``is_lazy``); ``multi_precision``, MXNet's name for float32 masters, which 16-bit weights
    always have: with False they are refused. Whether a ``base_lr`` of the schedule becomes the
    ``learning_rate`` or gives way to it say ``rate_counts`` and ``Schedule.gives_way``.

    A subclass written MXNet's way, with ``update(index, weight, grad, state)``, is not one of
    these: ``scripted.py``.
    """

    scope: ClassVar[str] = "element"
    """``"element"``: each element is updated by itself. ``"row"``: each row is, which is everything
    behind a key's first axis (``for_rows``). ``"key"``: needs the whole key (norms)."""

    name: ClassVar[str] = ""
    """The registered name: the class's, lower-cased."""

    positional: ClassVar[tuple[str, ...]]
    """Parameters that may be given by position. Where a class does not say: its own fields."""

    rate_counts: ClassVar[str] = "given"
    """When the learning rate takes the place of a schedule's ``base_lr``: ``"given"``, where it
    was given; ``"always"``, the class's default too; ``"never"``. Each is so in MXNet 1.9.1."""

    lazy_stypes: ClassVar[tuple[str, ...]] = ()
    """Kinds of keys (``"default"``, ``"row_sparse"``) on which updates by rows are lazy, unless
    ``lazy_update`` says something else: those on which MXNet 1.9.1's are."""

    states: ClassVar[tuple[str, ...]] = ()
    """The names of what is kept, where they do not depend on the parameters (``state_names``)."""

    lr_scheduler: Schedule | None = dataclasses.field(default=None, kw_only=True)
    lr_mult: Multipliers = dataclasses.field(default=(), kw_only=True)
    wd_mult: Multipliers = dataclasses.field(default=(), kw_only=True)
    lazy_update: bool | None = dataclasses.field(default=None, kw_only=True)
    multi_precision: bool = dataclasses.field(default=True, kw_only=True)

    _factors: dict[Key, tuple[float, float]] = dataclasses.field(
        default_factory=dict, init=False, compare=False, kw_only=True
    )
    """For each key with multipliers: that of the rate and that of the decay."""

    _variants: dict[Any, Optimizer] = dataclasses.field(
        default_factory=dict, init=False, compare=False, kw_only=True
    )
    """What ``for_key`` and ``for_rows`` have made; keys of equal multipliers share one."""

    @staticmethod
    def register(klass: Any) -> Any:
        """MXNet's name of ``kvstore.optimizer.register``."""
        return register(klass)

    @staticmethod
    def create_optimizer(name: str, **params: Any) -> Any:
        """MXNet's name of ``kvstore.optimizer.create``."""
        return create(name, **params)

    def __new__(cls: type[_Self], *args: Any, **params: Any) -> _Self:
        # Before __init__, whose own error for an unknown name would say nothing of what is known.
        check_known(cls, params)
        made = super().__new__(cls)
        is_given = "learning_rate" in (*params, *positions(cls)[: len(args)])
        object.__setattr__(made, "_is_rate_given", is_given)
        return made

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.scope not in ("element", "row", "key"):
            raise ArgumentTypeError(
                f"the scope of {cls.__name__} must be 'element', 'row' or 'key', got {cls.scope!r}"
            )
        if "__repr__" not in vars(cls):
            cls.__repr__ = Optimizer.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.params().items())
        return f"{type(self).__name__}({shown})"

    def __post_init__(self) -> None:
        convert_fields(self)
        if self.lazy_update is None and set(self.lazy_stypes) == {"default", "row_sparse"}:
            object.__setattr__(self, "lazy_update", True)
        for needed, argument, is_given in (
            ("learning_rate", "lr_scheduler", self.lr_scheduler is not None),
            ("learning_rate", "lr_mult", bool(self.lr_mult)),
            ("wd", "wd_mult", bool(self.wd_mult)),
        ):
            if is_given and needed not in parameter_names(type(self)):
                raise OptimizerParameterError(
                    f"{type(self).__name__} does not have a {needed}, so it cannot use "
                    f"{argument}; remove {argument}"
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
            counts = self.rate_counts == "always"
            counts = counts or (self.rate_counts == "given" and self._values()["_is_rate_given"])
            if not (counts and schedule.gives_way):
                object.__setattr__(self, "learning_rate", schedule.base_lr)
            schedule = dataclasses.replace(schedule, base_lr=None)
            object.__setattr__(self, "lr_scheduler", schedule)
        schedule.check_base(self._base_rate())

    # -- parameters --------------------------------------------------------------------

    def params(self) -> dict[str, Any]:
        """Return the parameters by name; ``create`` makes an equal optimizer.

        Schedule and multipliers are there when they are set, ``lazy_update`` and
        ``multi_precision`` when they are not the default. What travels is ``to_plain``.
        """
        values = {name: getattr(self, name) for name in parameter_names(type(self))}
        for name in ("lr_scheduler", "lr_mult", "wd_mult"):
            if not values[name]:
                del values[name]
        if self.lazy_update is (True if len(self.lazy_stypes) == 2 else None):
            del values["lazy_update"]
        if self.multi_precision:
            del values["multi_precision"]
        return values

    def replace(self: _Self, **numbers: Any) -> _Self:
        """Return a copy with other numbers; ``lr`` means ``learning_rate``.

        A new schedule that has a ``base_lr`` brings its learning rate along. Raises
        ``OptimizerParameterError``, which lists what is known.
        """
        if "lr" in numbers:
            if "learning_rate" in numbers:
                raise OptimizerParameterError(
                    "lr is another name of learning_rate, got both; give one"
                )
            numbers["learning_rate"] = numbers.pop("lr")
        check_known(type(self), numbers)
        schedule = numbers.get("lr_scheduler")
        if isinstance(schedule, Schedule) and schedule.base_lr is not None:
            numbers.setdefault("learning_rate", schedule.base_lr)
        return dataclasses.replace(self, **numbers)

    def set_learning_rate(self, lr: float) -> NoReturn:
        """Raise ``NotSupportedError``; use ``replace``. MXNet has this call."""
        raise NotSupportedError(_immutable("set_learning_rate", "lr=..."))

    def set_lr_mult(self, args_lr_mult: Multipliers) -> NoReturn:
        """Raise ``NotSupportedError``; use ``replace``. MXNet has this call."""
        raise NotSupportedError(_immutable("set_lr_mult", "lr_mult={key: factor}"))

    def set_wd_mult(self, args_wd_mult: Multipliers) -> NoReturn:
        """Raise ``NotSupportedError``; use ``replace``. MXNet has this call."""
        raise NotSupportedError(_immutable("set_wd_mult", "wd_mult={key: factor}"))

    def rate(self, count: int) -> float:
        """Return the learning rate of update number ``count``, from 1."""
        base = self._base_rate()
        if self.lr_scheduler is None:
            return base
        return float(self.lr_scheduler.rate(count, base))

    def multipliers(self, key: Key) -> tuple[float, float]:
        """Return the factors of ``key`` for learning rate and weight decay.

        They are 1.0 by default.
        """
        return self._factors.get(key, (1.0, 1.0))

    def for_rows(self, width: int) -> Optimizer:
        """Return the optimizer for rows of ``width`` numbers, else itself.

        One of scope ``"row"`` gives one of the same class and state that knows the width, the same
        object for every call. Its ``update`` gets whole rows, one after the other.
        """
        return self

    def block_length(self, length: int, elements: int) -> int:
        """Return how many of ``length`` elements ``update`` gets at a time.

        ``elements`` suits the caches; the result is a multiple of what ``update`` must see
        at once.
        """
        return max(length, 1) if self.scope == "key" else elements

    def for_key(self, key: Key, width: int | None = None) -> Optimizer:
        """Return the optimizer of one key: itself, unless the key has multipliers.

        With multipliers, one of the same class with both numbers multiplied (the rates of a
        schedule too) and no multipliers left: the same object for every call and for all keys
        of equal multipliers. State belongs to both alike. With ``width``, the numbers in a row of
        the key, what ``for_rows`` gives of it.
        """
        factors = self._factors.get(key)
        if factors is None:
            return self if width is None else self.for_rows(width)
        found = self._variant(factors, lambda: self._scaled(*factors))
        return found if width is None else found.for_rows(width)

    def _variant(self, name: object, make: Callable[[], Optimizer]) -> Optimizer:
        """Return the result of ``make``, the same object for every call of this ``name``."""
        found = self._variants.get(name)
        if found is None:
            # Two threads may get here at once; both leave with the one that was first.
            found = self._variants.setdefault(name, make())
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
            raise OptimizerParameterError(f"{type(self).__name__} does not have a learning_rate")
        return float(base)

    # -- arrays ------------------------------------------------------------------------

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Raise ``ArgumentTypeError`` unless ``dtype`` is a real float.

        And ``NotSupportedError`` for 16-bit ones that are to have no master.
        """
        if not self.multi_precision and accumulation_dtype(dtype) != dtype:
            raise NotSupportedError(
                f"multi_precision=False is not supported: {dtype} weights are always updated "
                "through a float32 master weight, since small updates would be lost to "
                "rounding; remove it, or pass multi_precision=True"
            )
        if not is_float(dtype):
            raise ArgumentTypeError(
                f"the optimizer {self.name or type(self).__name__} needs float weights, got "
                f"{dtype}; keep {dtype} keys in a store without an optimizer"
            )

    def is_lazy(self, stype: str) -> bool:
        """Return whether updates of such a key skip rows without a gradient.

        ``stype`` is the key's, ``"default"`` (dense) or ``"row_sparse"``. Never with norms over
        the whole key.
        """
        if self.scope == "key":
            return False
        return stype in self.lazy_stypes if self.lazy_update is None else self.lazy_update

    def state_names(self) -> tuple[str, ...]:
        """Return the names of the state arrays, in order: ``states`` by default.

        A subclass says what it keeps by one of the two or by a ``create_state`` of its own; then
        the names are ``state0``, ``state1`` and so on.
        """
        if type(self).create_state is Optimizer.create_state:
            return self.states
        made = self.create_state(np.zeros(1, np.float32))
        return tuple(f"state{index}" for index in range(len(made)))

    def create_state(self, weight: Flat) -> tuple[Flat, ...]:
        """Return the arrays that the optimizer keeps for ``weight`` between updates.

        New 1-D arrays, one for each of ``state_names``, zero, as long as ``weight``, on its
        device, owned by the caller, in the accumulation dtype: a float16 weight has float32
        state, since squares of gradients leave float16's range. Stores come here by way of
        ``states.py``, with the float32 master of such a weight.
        """
        dtype = accumulation_dtype(weight.dtype)
        return tuple(np.zeros_like(weight, dtype=dtype) for _ in self.state_names())

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        """Update ``weight`` and ``state`` in place from the summed gradient.

        All arrays are 1-D, of one length, on one device and the caller's. ``weight``, ``grad``
        and ``scratch`` have the accumulation dtype (see ``kvstore/arrays/cpu/sums.py``), in which
        all arithmetic is done: for a float16 key, ``weight`` is its float32 master. ``grad`` and
        ``scratch`` may be overwritten; ``scratch`` holds nothing at entry. ``count`` is the number
        of this update of this part, from 1.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update()")

    def take_over(
        self, previous: Optimizer | None, weight: Flat, state: State, count: int
    ) -> tuple[tuple[Flat, ...], int]:
        """Return state and update count of a part that this optimizer takes over.

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


@dataclasses.dataclass(frozen=True, repr=False)
class ClippedOptimizer(Optimizer):
    """The common parameters: weight decay, gradient rescaling and clipping."""

    wd: float = dataclasses.field(default=0.0, kw_only=True)
    rescale_grad: float = dataclasses.field(default=1.0, kw_only=True)
    clip_gradient: float | None = dataclasses.field(default=None, kw_only=True)

    def _clip(self, grad: Flat) -> None:
        """grad = clip(rescale_grad * grad, clip_gradient), in place."""
        rescale(grad, self.rescale_grad)
        clip(grad, self.clip_gradient)

    def _clip_and_decay(self, grad: Flat, weight: Flat, scratch: Flat) -> None:
        """grad = clip(rescale_grad * grad, clip_gradient) + wd * weight, in place."""
        self._clip(grad)
        add_decay(grad, weight, self.wd, scratch)

    def _decay_and_clip(self, grad: Flat, weight: Flat, scratch: Flat) -> None:
        """grad = clip(rescale_grad * grad + wd * weight, clip_gradient), in place."""
        rescale(grad, self.rescale_grad)
        add_decay(grad, weight, self.wd, scratch)
        clip(grad, self.clip_gradient)


def _immutable(what: str, change: str) -> str:
    change_it = f"call kv.set_optimizer_params({change}) to change the optimizer of a store"
    if "mult" in change:
        change_it = (
            f"call kv.set_optimizer(optimizer.replace({change})) to change the optimizer of a store"
        )
    return (
        f"{what} is not possible: optimizers are immutable, since stores and servers share them; "
        f"{change_it}, and optimizer.replace({change}) returns a changed copy"
    )


def _refuse_to_set(self: Optimizer, name: str, value: object) -> NoReturn:
    shown = "lr=..." if name in ("lr", "learning_rate") else f"{name}=..."
    raise ImmutableOptimizerError(_immutable(f"setting {name}", shown))


def _refuse_to_delete(self: Optimizer, name: str) -> NoReturn:
    raise ImmutableOptimizerError(f"optimizers are immutable; {name} cannot be deleted")


_Class = TypeVar("_Class", bound=type)

_registry: dict[str, type[Optimizer]] = {}


def register(klass: _Class) -> _Class:
    """Class decorator: make an optimizer known under its class name, lower-cased.

    The same class may be registered again (a module that is loaded again); another class of the
    same name raises ``ArgumentTypeError``, as does a class that is not a frozen dataclass itself.
    One that is written MXNet's way (``scripted.py``) takes the place of one of its name.
    """
    if not isinstance(klass, type):
        raise ArgumentTypeError(f"register needs a class, got {klass!r}")
    name = klass.__name__.lower()
    if issubclass(klass, ScriptedOptimizer) and name not in _registry:
        register_scripted(klass)
        return klass
    register_in(_registry, klass, name, "optimizer")
    # In the place of a frozen dataclass's own, whose error says only that it is frozen.
    klass.__setattr__ = _refuse_to_set  # type: ignore[assignment, method-assign]
    klass.__delattr__ = _refuse_to_delete  # type: ignore[assignment, method-assign]
    return klass


def create(name: str, **params: Any) -> Optimizer:
    """Return the optimizer registered as ``name`` (in any case) with params.

    ``"ccsgd"``, which MXNet still has, is ``"sgd"``. Raises ``UnknownOptimizerError`` or
    ``OptimizerParameterError``, which list what is known. Source of the names:
    ``mxnet.optimizer.create``.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"an optimizer's name must be a string, got {name!r}")
    cls = _registry.get("sgd" if name.lower() == "ccsgd" else name.lower())
    scripted = create_scripted(name, params) if cls is None else None
    if scripted is not None:
        return scripted  # type: ignore[return-value]
    if cls is None:
        raise UnknownOptimizerError(
            f"no optimizer is named {name!r}; known: {', '.join(sorted(_registry))}"
            f"{did_you_mean(name.lower(), _registry)}"
        )
    made: Optimizer = build(cls, params)
    return made
