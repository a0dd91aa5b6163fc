"""The base class of optimizers, and the registry of their names.

Pure: formulas over arrays that the caller owns; no I/O, no threads, no clock. An optimizer is
an immutable value, so a store, its servers and the caller can share one. The arrays that
change (weight and state) belong to the store. Read next: ``arithmetic.py``, then ``sgd.py``, and
``states.py`` for the states of 16-bit weights.

Formulas use NumPy ufuncs with ``out=`` and ``dtype=``; CuPy arrays execute the same
calls on their device. An optimizer of scope ``"element"`` may use only elementwise operations,
since it gets a key in blocks.

The decorator ``register`` fills the registry when a module that defines an optimizer is
imported. The modules of this package are imported when one of their names is first used
(``MODULES``). Servers must import the module of a custom optimizer too.
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
    find,
    known_names,
    parameter_names,
    positions,
    register_in,
    registry,
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
"""The optimizer state of some elements: an array for each of ``state_names``."""

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

    Two optimizers are equal if their classes and parameters are. Fields are annotated ``float``,
    ``int``, ``bool`` or ``str``, each possibly ``| None``. Values are checked and converted; an
    invalid value raises ``OptimizerParameterError``.

    Every optimizer also takes, by keyword: ``lr_scheduler``, a schedule of the learning rate;
    ``lr_mult`` and ``wd_mult``, mappings of keys to factors for their learning rate and decay
    (stored as sorted pairs); ``lazy_update``, whether rows without a gradient stay unchanged (if
    False, they are updated with a gradient of zero; None: as in MXNet, see ``is_lazy``);
    ``multi_precision``, MXNet's name for float32 masters, which 16-bit weights always have (with
    False, 16-bit weights raise an error). ``rate_counts`` and ``Schedule.gives_way`` decide
    whether ``learning_rate`` or the schedule's ``base_lr`` is used.

    A subclass that defines MXNet's method ``update(index, weight, grad, state)`` gets another
    base class: see ``scripted.py``.
    """

    scope: ClassVar[str] = "element"
    """What ``update`` must get at once: ``"element"``, any elements; ``"row"``, whole rows (a row
    spans all axes of a key but the first; see ``for_rows``); ``"key"``, the whole key (for norms).
    """

    name: ClassVar[str] = ""
    """The registered name: the class's, lower-cased."""

    positional: ClassVar[tuple[str, ...]]
    """Parameters that may be given by position; by default, the fields of the class itself."""

    rate_counts: ClassVar[str] = "given"
    """When the learning rate replaces a schedule's ``base_lr``, as in MXNet 1.9.1: ``"given"``, if
    the user passed one; ``"always"``, even the class's default; ``"never"``."""

    lazy_stypes: ClassVar[tuple[str, ...]] = ()
    """Kinds of keys (``"default"``, ``"row_sparse"``) for which row-sparse updates are lazy if
    ``lazy_update`` is not given, as in MXNet 1.9.1."""

    states: ClassVar[tuple[str, ...]] = ()
    """The names of the state arrays, if they do not depend on parameters (``state_names``)."""

    lr_scheduler: Schedule | None = dataclasses.field(default=None, kw_only=True)
    lr_mult: Multipliers = dataclasses.field(default=(), kw_only=True)
    wd_mult: Multipliers = dataclasses.field(default=(), kw_only=True)
    lazy_update: bool | None = dataclasses.field(default=None, kw_only=True)
    multi_precision: bool = dataclasses.field(default=True, kw_only=True)

    _factors: dict[Key, tuple[float, float]] = dataclasses.field(
        default_factory=dict, init=False, compare=False, kw_only=True
    )
    """For each key with multipliers: the factors of its learning rate and of its decay."""

    _variants: dict[Any, Optimizer] = dataclasses.field(
        default_factory=dict, init=False, compare=False, kw_only=True
    )
    """The cached results of ``for_key`` and ``for_rows``; keys with equal multipliers share one."""

    @staticmethod
    def register(klass: Any) -> Any:
        """Call ``kvstore.optimizer.register``; this is its name in MXNet."""
        return register(klass)

    @staticmethod
    def create_optimizer(name: str, **params: Any) -> Any:
        """Call ``kvstore.optimizer.create``; this is its name in MXNet."""
        return create(name, **params)

    def __new__(cls: type[_Self], *args: Any, **params: Any) -> _Self:
        # Checked here, since the error of __init__ would not list the known names.
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
            counts = counts or (self.rate_counts == "given" and vars(self)["_is_rate_given"])
            if not (counts and schedule.gives_way):
                object.__setattr__(self, "learning_rate", schedule.base_lr)
            schedule = dataclasses.replace(schedule, base_lr=None)
            object.__setattr__(self, "lr_scheduler", schedule)
        schedule.check_base(self._base_rate())

    # -- parameters --------------------------------------------------------------------

    def params(self) -> dict[str, Any]:
        """Return the parameters by name; ``create`` makes an equal optimizer.

        The schedule and multipliers are included if they are set, ``lazy_update`` and
        ``multi_precision`` if they differ from the default. Messages use ``to_plain`` instead.
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

        The ``base_lr`` of a new schedule becomes the learning rate, unless you pass one too. For
        an unknown parameter it raises ``OptimizerParameterError``, which lists the known ones.
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
        """Return the learning rate of update number ``count``, counted from 1."""
        base = self._base_rate()
        if self.lr_scheduler is None:
            return base
        return float(self.lr_scheduler.rate(count, base))

    def multipliers(self, key: Key) -> tuple[float, float]:
        """Return the factors for the learning rate and weight decay of ``key``.

        Both are 1.0 by default.
        """
        return self._factors.get(key, (1.0, 1.0))

    def for_rows(self, width: int) -> Optimizer:
        """Return the optimizer for rows of ``width`` numbers.

        An optimizer of scope ``"row"`` returns one of its class with this width and the same state
        names. Every call with this width returns the same object. Its ``update`` gets whole rows,
        one after the other. Other optimizers return themselves.
        """
        return self

    def block_length(self, length: int, elements: int) -> int:
        """Return how many of ``length`` elements ``update`` gets at a time.

        ``elements`` is how many elements fit the caches. The result is a multiple of what
        ``update`` must get at once (``scope``).
        """
        return max(length, 1) if self.scope == "key" else elements

    def for_key(self, key: Key, width: int | None = None) -> Optimizer:
        """Return the optimizer of one key: itself, unless the key has multipliers.

        For a key with multipliers, it returns an optimizer of the same class and without
        multipliers: the learning rate (of a schedule too) and the decay are already multiplied.
        Every call for keys with equal multipliers returns the same object. The state arrays are
        those of this optimizer. With ``width``, the length of the key's rows, it returns
        ``for_rows(width)`` of that optimizer.
        """
        factors = self._factors.get(key)
        if factors is None:
            return self if width is None else self.for_rows(width)
        found = self._variant(factors, lambda: self._scaled(*factors))
        return found if width is None else found.for_rows(width)

    def _variant(self, name: object, make: Callable[[], Optimizer]) -> Optimizer:
        """Return the result of ``make``; all calls with this ``name`` return one object."""
        found = self._variants.get(name)
        if found is None:
            # If two threads get here at once, both return the object that was stored first.
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
            changes["wd"] = vars(self)["wd"] * wd_mult
        return self.replace(**changes)

    def _base_rate(self) -> float:
        base = vars(self).get("learning_rate")
        if base is None:
            raise OptimizerParameterError(f"{type(self).__name__} does not have a learning_rate")
        return float(base)

    # -- arrays ------------------------------------------------------------------------

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Check that weights of ``dtype`` can be updated: they must be real floats.

        Raises ``ArgumentTypeError`` if they are not, and ``NotSupportedError`` for 16-bit floats
        with ``multi_precision=False``.
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
        """Return whether updates of a key of kind ``stype`` skip rows without a gradient.

        ``stype`` is ``"default"`` (dense) or ``"row_sparse"``. Optimizers of scope ``"key"`` are
        never lazy.
        """
        if self.scope == "key":
            return False
        return stype in self.lazy_stypes if self.lazy_update is None else self.lazy_update

    def state_names(self) -> tuple[str, ...]:
        """Return the names of the state arrays, in order: ``states`` by default.

        A subclass sets ``states``, or overrides this method, or overrides ``create_state``. In the
        last case the names are ``state0``, ``state1`` and so on.
        """
        if type(self).create_state is Optimizer.create_state:
            return self.states
        made = self.create_state(np.zeros(1, np.float32))
        return tuple(f"state{index}" for index in range(len(made)))

    def create_state(self, weight: Flat) -> tuple[Flat, ...]:
        """Return the arrays that the optimizer keeps for ``weight`` between updates.

        These are new 1-D arrays of zeros, one for each of ``state_names``, as long as ``weight``
        and on its device. The caller owns them. Their dtype is the accumulation dtype: a float16
        weight has float32 state, since squares of gradients can exceed float16's range. Stores
        call this method through ``states.py``, with the float32 master of such a weight.
        """
        dtype = accumulation_dtype(weight.dtype)
        return tuple(np.zeros_like(weight, dtype=dtype) for _ in self.state_names())

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        """Update ``weight`` and ``state`` in place from the summed gradient.

        All arrays are 1-D, have the same length, are on one device and belong to the caller.
        ``weight``, ``grad`` and ``scratch`` have the accumulation dtype (see
        ``kvstore/arrays/cpu/sums.py``), and all arithmetic uses it: for a float16 key, ``weight``
        is its float32 master. ``update`` may overwrite ``grad`` and ``scratch``; the contents of
        ``scratch`` are undefined at entry. ``count`` is the number of this update of this part,
        counted from 1.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update()")

    def take_over(
        self, previous: Optimizer | None, weight: Flat, state: State, count: int
    ) -> tuple[tuple[Flat, ...], int]:
        """Return the state and update count for a part that had another optimizer.

        If ``previous`` has the same class, state and count stay, whatever the parameters. State
        arrays that only one of the two has (as with momentum 0) are created or dropped. If
        ``previous`` has another class, or is None, state and count start again.
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
        """Compute grad = clip(rescale_grad * grad, clip_gradient), in place."""
        rescale(grad, self.rescale_grad)
        clip(grad, self.clip_gradient)

    def _clip_and_decay(self, grad: Flat, weight: Flat, scratch: Flat) -> None:
        """Set grad = clip(rescale_grad * grad, clip_gradient) + wd * weight, in place."""
        self._clip(grad)
        add_decay(grad, weight, self.wd, scratch)

    def _decay_and_clip(self, grad: Flat, weight: Flat, scratch: Flat) -> None:
        """Set grad = clip(rescale_grad * grad + wd * weight, clip_gradient), in place."""
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


def register(klass: _Class) -> _Class:
    """Register an optimizer class under its lower-case name; used as a decorator.

    The same class may be registered again (when its module is reloaded). Another class with the
    same name raises ``ArgumentTypeError``, and so does a class that is not itself a frozen
    dataclass. A class with MXNet's methods (``scripted.py``) replaces an earlier such class with
    its name.
    """
    if not isinstance(klass, type):
        raise ArgumentTypeError(f"register needs a class, got {klass!r}")
    name = klass.__name__.lower()
    if issubclass(klass, ScriptedOptimizer) and find(name) is None:
        register_scripted(klass)
        return klass
    find(name)  # so that a name of this package is taken before its module is imported
    register_in(registry, klass, name, "optimizer")
    # A frozen dataclass has its own versions of these, but their error says only "frozen".
    klass.__setattr__ = _refuse_to_set  # type: ignore[assignment, method-assign]
    klass.__delattr__ = _refuse_to_delete  # type: ignore[assignment, method-assign]
    return klass


def create(name: str, **params: Any) -> Optimizer:
    """Create the optimizer registered as ``name`` (case is ignored) with parameters.

    ``"ccsgd"``, an older name in MXNet, means ``"sgd"``. An unknown name raises
    ``UnknownOptimizerError`` and an unknown parameter ``OptimizerParameterError``; both list the
    known names. Source of the names: ``mxnet.optimizer.create``.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"an optimizer's name must be a string, got {name!r}")
    cls = find("sgd" if name.lower() == "ccsgd" else name.lower())
    scripted = create_scripted(name, params) if cls is None else None
    if scripted is not None:
        return scripted  # type: ignore[return-value]
    if cls is None:
        raise UnknownOptimizerError(
            f"no optimizer is named {name!r}; known: {', '.join(known_names())}"
            f"{did_you_mean(name.lower(), known_names())}"
        )
    made: Optimizer = build(cls, params)
    return made
