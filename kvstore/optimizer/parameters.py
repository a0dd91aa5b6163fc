"""Typed parameters: check the fields of optimizers and schedules.

Optimizers and schedules are frozen dataclasses. They are registered under a name, created from
names and numbers, and compared by value. This module holds the code that both use. Pure. Read
next: ``schedule.py`` and ``base.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from kvstore.arrays.keys import Key
from kvstore.errors import ArgumentTypeError, OptimizerParameterError
from kvstore.errors.hints import nearest
from pslite.errors import check_unicode

Number: typing.TypeAlias = float | int | bool | str | None
"""The types of parameters, in code and in messages."""

Multipliers: typing.TypeAlias = Mapping[Key, float] | Sequence[tuple[Key, float]]
"""Factors by key: passed as a mapping, stored as pairs sorted by key."""

ALIASES = {"lr": "learning_rate", "weight_decay": "wd", "mom": "momentum", "eps": "epsilon"}
"""Other names of parameters, for hints in errors. Only ``replace`` accepts one: ``lr``."""

NOT_TAKEN = {
    "begin_num_update": (
        "remove it; each key counts its updates from 1, and load_optimizer_states or "
        "load_checkpoint restores the counts"
    ),
    "param_idx2name": "remove it; lr_mult and wd_mult use the keys of the store",
    "param_dict": "remove it; lr_mult and wd_mult use the keys of the store",
    "sym": "remove it; lr_mult and wd_mult use the keys of the store",
    "use_fused_step": "remove it; there is one implementation of each update",
    "aggregate_num": "remove it; the keys of one call are updated together",
}
"""Parameters of MXNet's optimizers that are not supported here, and what to do instead."""

_INTEGERS = range(-(2**63), 2**63)
"""The integers that are accepted: those of int64, which msgpack can encode."""

_Class = TypeVar("_Class", bound=type)

MODULES = {
    "AdaDelta": "adaptive",
    "AdaGrad": "adaptive",
    "RMSProp": "adaptive",
    "Adam": "adam",
    "AdamW": "adam",
    "Adamax": "adam",
    "Nadam": "adam",
    "FTML": "ftrl",
    "Ftrl": "ftrl",
    "GroupAdaGrad": "contrib",
    "LAMB": "layerwise",
    "LARS": "layerwise",
    "LBSGD": "layerwise",
    "DCASGD": "sgd",
    "NAG": "sgd",
    "SGD": "sgd",
    "SGLD": "sgd",
    "SignSGD": "sgd",
    "Signum": "sgd",
    "Test": "sgd",
    "TorchSGD": "sgd",
}
"""The optimizers of this package -> the module of each, which is imported when it is first used.

To define all of them costs a process 60 ms, and most train with one.
"""

_OWN_NAMES = {name.lower(): name for name in MODULES}

registry: dict[str, type[Any]] = {}
"""The registered optimizers by name."""


def find(name: str) -> type[Any] | None:
    """Return the optimizer class that is registered as ``name``, or None."""
    if name not in registry and name in _OWN_NAMES:
        importlib.import_module(f"kvstore.optimizer.{MODULES[_OWN_NAMES[name]]}")
    return registry.get(name)


def known_names() -> list[str]:
    """Return the names of all optimizers, sorted."""
    return sorted({*_OWN_NAMES, *registry})


def unit(default: float) -> Any:
    """Return a dataclass field for a number in [0, 1)."""
    return _ranged(default, "must lie in [0, 1)", lambda number: 0.0 <= number < 1.0)


def not_negative(default: float) -> Any:
    """Return a dataclass field for a number of at least 0."""
    return _ranged(default, "must not be negative", lambda number: number >= 0)


def positive(default: float) -> Any:
    """Return a dataclass field for a number above 0."""
    return _ranged(default, "must be more than 0", lambda number: number > 0)


def _ranged(default: float, text: str, holds: Callable[[float], bool]) -> Any:
    return dataclasses.field(default=default, metadata={"range": (text, holds)})


def parameter_names(cls: type) -> list[str]:
    """Return the parameter names of a class, its own before those of its bases."""
    bases = enumerate(cls.__mro__)
    depth = {name: index for index, base in bases for name in inspect.get_annotations(base)}
    fields = [field for field in dataclasses.fields(cls) if field.init]
    fields.sort(key=lambda field: depth[field.name] if field.kw_only else 0)
    return [field.name for field in fields]


def positions(cls: type) -> tuple[str, ...]:
    """Return the names of the parameters that may be passed by position, in order."""
    fields = (field.name for field in dataclasses.fields(cls) if field.init and not field.kw_only)
    return tuple(vars(cls).get("positional", fields))


def _take_positions(cls: type[Any]) -> None:
    """Make ``cls`` accept its ``positional`` by position, and all others by name only.

    A dataclass would put the fields of its bases first; MXNet does not.
    """
    names, init = positions(cls), cls.__init__

    @functools.wraps(init)
    def take(self: Any, *args: Any, **params: Any) -> None:
        if len(args) > len(names):
            raise OptimizerParameterError(
                f"{cls.__name__} takes {len(names)} positional arguments ({', '.join(names)}), "
                f"got {len(args)}; pass the others by name"
            )
        by_position = dict(zip(names, args, strict=False))
        twice = ", ".join(name for name in by_position if name in params)
        if twice:
            raise OptimizerParameterError(
                f"{cls.__name__} got {twice} both by position and by name; pass it once"
            )
        init(self, **by_position, **params)

    own = dict(inspect.signature(init).parameters)
    own_first, by_name = own.pop("self"), inspect.Parameter.KEYWORD_ONLY
    ordered = [own.pop(name).replace(kind=own_first.kind) for name in names]
    others = [parameter.replace(kind=by_name) for parameter in own.values()]
    take.__signature__ = inspect.Signature([own_first, *ordered, *others])  # type: ignore[attr-defined]
    cls.__init__ = take


@functools.lru_cache(maxsize=64)
def _hints_of(cls: type[Any]) -> dict[str, Any]:
    """Return the annotations of a class, which take a millisecond to evaluate."""
    return typing.get_type_hints(cls)


def convert_fields(owner: Any) -> None:
    """Check each field of ``owner`` by its annotation; convert it to a plain value."""
    cls: Any = type(owner)
    hints, whose = _hints_of(cls), cls.__name__
    for field in dataclasses.fields(owner):
        if not field.init:
            continue
        value = converted(whose, field.name, getattr(owner, field.name), hints[field.name])
        text, holds = field.metadata.get("range", ("", None))
        if holds is not None and not holds(value):
            raise OptimizerParameterError(f"{field.name} of {whose} {text}, got {value!r}")
        object.__setattr__(owner, field.name, value)


def converted(owner: str, field: str, value: object, hint: Any) -> Any:
    """Convert ``value`` to the annotation ``hint``; raise if it does not fit.

    A plain Python number keeps the weight's dtype in NumPy's arithmetic; a numpy.float64
    would turn float32 blocks into float64 ones.
    """
    if hint == Multipliers:
        return _pairs(owner, field, value)
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = typing.get_args(hint) if is_union else (hint,)
    if value is None and type(None) in kinds:
        return None
    if isinstance(value, bool | np.bool_):
        if bool in kinds:
            return bool(value)
    elif str in kinds and isinstance(value, str):
        return check_unicode(f"{field} of {owner}", str(value), OptimizerParameterError)
    elif int in kinds and isinstance(value, numbers.Integral) and int(value) in _INTEGERS:
        return int(value)
    elif float in kinds and isinstance(value, numbers.Real):
        number = _float(value)
        if number is not None:
            return number
    elif Sequence[int] in kinds and isinstance(value, list | tuple):
        return tuple(converted(owner, field, item, int) for item in value)
    elif any(_is_value_class(kind) and isinstance(value, kind) for kind in kinds):
        return value
    wanted = " or ".join("None" if kind is type(None) else _name(kind) for kind in kinds)
    finite = " (and finite)" if float in kinds else ""
    raise OptimizerParameterError(
        f"{field} of {owner} must be {wanted}{finite}, got {_shown(value)}"
    )


def _is_value_class(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _float(value: numbers.Real) -> float | None:
    try:
        number = float(value)
    except OverflowError:  # an int of more than 308 digits
        return None
    return number if math.isfinite(number) else None


def _name(kind: Any) -> str:
    return "a list of int" if kind == Sequence[int] else str(kind.__name__)


def _pairs(owner: str, field: str, value: object) -> tuple[tuple[Key, float], ...]:
    rows = list(value.items()) if isinstance(value, Mapping) else value
    found: dict[Key, float] = {}
    if not isinstance(rows, list | tuple):
        rows = [None]
    for row in rows:
        if not (isinstance(row, list | tuple) and len(row) == 2):
            raise OptimizerParameterError(
                f"{field} of {owner} must be a dict of keys to numbers, got {_shown(value)}"
            )
        key = converted(owner, f"a key in {field}", row[0], Key)
        if key in found:
            raise OptimizerParameterError(f"{field} of {owner} has the key {key!r} twice")
        found[key] = converted(owner, f"{field}[{key!r}]", row[1], float)
    return tuple(sorted(found.items(), key=lambda row: (isinstance(row[0], str), row[0])))


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python prints no int of more than 4300 digits
        text = f"a {type(value).__name__}"
    return text if len(text) < 200 else f"{text[:200]}..."


def register_in(registry: dict[str, type[Any]], cls: _Class, name: str, what: str) -> _Class:
    """Register ``cls`` as ``name`` and set ``cls.name``.

    The same class may be registered again (when its module is reloaded). Another class with the
    same name raises ``ArgumentTypeError``, and so does a class that is not itself a frozen
    dataclass.
    """
    options = vars(cls).get("__dataclass_params__")
    if options is None or not options.frozen:
        raise ArgumentTypeError(
            f"{cls.__name__} must be a frozen dataclass: put @dataclasses.dataclass(frozen=True) "
            "between @register and the class"
        )
    known = registry.get(name, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ArgumentTypeError(
            f"the {what} name {name!r} is taken by {known.__module__}.{known.__qualname__}; "
            "choose another class name"
        )
    if "positional" in vars(cls):
        _take_positions(cls)
    cls.name = name  # type: ignore[attr-defined]
    registry[name] = cls
    return cls


def build(cls: type[Any], params: Mapping[str, Any]) -> Any:
    """Create ``cls(**params)``.

    Raises ``OptimizerParameterError`` for unknown, missing or invalid parameters.
    """
    check_known(cls, params)
    missing = [
        field.name
        for field in dataclasses.fields(cls)
        if field.init
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in params
    ]
    if missing:
        raise OptimizerParameterError(
            f"{cls.name} needs a value for {', '.join(missing)}; pass it as a keyword argument"
        )
    return cls(**params)


def check_known(cls: type[Any], params: Mapping[str, Any]) -> None:
    """Check that ``cls`` has all these parameters; raise ``OptimizerParameterError``."""
    known = parameter_names(cls)
    unknown = sorted(set(params) - set(known))
    if not unknown:
        return
    owner = cls.name or cls.__name__
    text = f"{owner} has no parameter {', '.join(unknown)}; known: {', '.join(known)}"
    for name in unknown:
        near = ALIASES.get(name) if ALIASES.get(name) in known else nearest(name, known)
        if name in NOT_TAKEN:
            text += f"; {name}: {NOT_TAKEN[name]}"
        elif near is not None:
            text += f"; did you mean {near} for {name}?"
    raise OptimizerParameterError(text)
