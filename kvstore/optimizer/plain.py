"""Optimizers as plain data, for messages and files: names and numbers, never code.

``to_plain`` gives lists, dicts with string keys, strings, numbers and None, which JSON and
msgpack carry; ``from_plain`` makes an equal optimizer from them, out of this process's
registry. It trusts nothing: whatever comes in, the outcome is an optimizer or one of the
errors it names. Imports nothing and evaluates nothing. Pure; any thread may call. Read next:
``fields.py``, which checks the numbers.

An optimizer is ``[name, {parameter: value}]`` with all of its parameters. A schedule among
them is ``[name, {parameter: value}]`` too; a mapping of multipliers is a list of ``[key,
factor]``, so that int keys stay ints.
"""

from __future__ import annotations

from typing import Any

from kvstore.errors import OptimizerParameterError, UnknownOptimizerError
from kvstore.optimizer import base, schedule
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.fields import build, parameter_names
from kvstore.optimizer.schedule import Schedule
from pslite.errors import ProtocolError

MAX_DEPTH = 8
"""How deep schedules may lie within each other."""

MAX_ITEMS = 1 << 20
"""How many parameters, multipliers or steps one list may hold."""

HINT = (
    "if it is one of your own, the module that registers it must be imported in this process "
    "too; servers do so with --server-import MODULE (KVSTORE_SERVER_IMPORT in the environment)"
)


def to_plain(optimizer: Optimizer) -> list[Any]:
    """``[name, {parameter: value}]``, new lists and dicts all through.

    Equal optimizers give equal data, parameters in the same order. Raises
    ``UnknownOptimizerError`` for an optimizer or schedule whose class is not registered.
    """
    if base._registry.get(optimizer.name) is not type(optimizer):
        raise UnknownOptimizerError(
            f"{type(optimizer).__name__} is not registered: put @kvstore.optimizer.register "
            "before the class"
        )
    return _named(optimizer)


def _named(value: Optimizer | Schedule) -> list[Any]:
    names = parameter_names(type(value))
    return [value.name, {name: _plain(getattr(value, name)) for name in names}]


def _plain(value: Any) -> Any:
    if isinstance(value, Schedule):
        if schedule._registry.get(value.name) is not type(value):
            raise UnknownOptimizerError(
                f"{type(value).__name__} is not registered: put @kvstore.lr_scheduler.register "
                "before the class"
            )
        return _named(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def from_plain(data: Any) -> Optimizer:
    """The optimizer that ``to_plain`` wrote. A parameter that is missing has its default.

    Raises:
        ProtocolError: the data is no description of an optimizer at all.
        UnknownOptimizerError: no optimizer is registered here under its name.
        OptimizerParameterError: a parameter or schedule is unknown or does not fit.
    """
    name, params = _split(data, "optimizer")
    cls = base._registry.get(name)
    if cls is None:
        known = ", ".join(sorted(base._registry))
        raise UnknownOptimizerError(f"no optimizer is named {name!r} (known: {known}); {HINT}")
    made: Optimizer = build(cls, {key: _value(key, item, 1) for key, item in params.items()})
    return made


def _schedule(data: list[Any], depth: int) -> Schedule:
    if depth > MAX_DEPTH:
        raise ProtocolError(f"schedules lie more than {MAX_DEPTH} deep within each other")
    name, params = _split(data, "learning-rate schedule")
    cls = schedule._registry.get(name)
    if cls is None:
        known = ", ".join(sorted(schedule._registry))
        raise OptimizerParameterError(
            f"no learning-rate schedule is named {name!r} (known: {known}); {HINT}"
        )
    params = {key: _value(key, item, depth + 1) for key, item in params.items()}
    made: Schedule = build(cls, params)
    return made


def _value(name: str, value: Any, depth: int) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list and len(value) <= MAX_ITEMS:
        if len(value) == 2 and type(value[1]) is dict:
            return _schedule(value, depth)
        if all(type(item) in (int, list) for item in value):
            return value
    raise ProtocolError(f"the parameter {name} is no number, text, schedule or list of them")


def _split(data: Any, what: str) -> tuple[str, dict[str, Any]]:
    if (
        type(data) is list
        and len(data) == 2
        and type(data[0]) is str
        and type(data[1]) is dict
        and len(data[1]) <= MAX_ITEMS
        and all(type(key) is str for key in data[1])
    ):
        return data[0], data[1]
    raise ProtocolError(f"the description of an {what} is not [name, {{parameter: value}}]")
