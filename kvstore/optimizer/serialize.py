"""Convert optimizers to plain data for messages and files: never code.

``to_plain`` returns lists, dicts with string keys, strings, numbers and None, which JSON and
msgpack can encode. ``from_plain`` makes an equal optimizer from them, with the classes in this
process's registry. It does not trust its input: for any input it returns an optimizer or raises
one of the errors that it documents. It evaluates nothing, and imports nothing but this package's
optimizers. Pure; any thread may call.
Read next: ``parameters.py``, which checks the numbers.

An optimizer is ``[name, {parameter: value}]`` with all of its parameters. A schedule among
them is ``[name, {parameter: value}]`` too; a mapping of multipliers is a list of ``[key,
factor]``, so that int keys stay ints.

``to_bytes`` encodes the states of an ``Updater``: counts, arrays and numbers, never code.

The bytes are: a first line that names the format, the length of the header in 8 bytes
(little-endian), the header, and the bytes of all arrays, one after the other. The header is plain
data: ``[optimizer or None, [[key, count, state], ...]]``. In it an array is
``["array", dtype, shape]``, a number ``["number", value]``, and a list or tuple
``["list", [...]]`` or ``["tuple", [...]]``. ``from_bytes`` checks everything before it uses it.
Pure. Read next: ``updater.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvstore.errors import (
    ArgumentTypeError,
    CheckpointError,
    OptimizerParameterError,
    UnknownOptimizerError,
)
from kvstore.optimizer import schedule
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.parameters import build, find, known_names, parameter_names
from kvstore.optimizer.schedule import Schedule
from kvstore.optimizer.scripted import check_travels
from pslite.errors import ProtocolError
from pslite.wire.codec import pack_value, unpack_value

MAX_DEPTH = 8
"""How deep schedules may be nested."""

MAX_ITEMS = 1 << 20
"""How many parameters, multipliers or steps one list may hold."""

HINT = (
    "if you defined it, import the module that registers it in this process too; on servers, "
    "use --server-import MODULE (or set KVSTORE_SERVER_IMPORT)"
)


def check_optimizer(optimizer: object) -> Optimizer:
    """Return ``optimizer`` if it is one. Raises ``ArgumentTypeError`` for other types.

    Raises ``NotSupportedError`` for one that is written MXNet's way: it cannot be sent.
    """
    check_travels(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"set_optimizer needs an Optimizer, got {what_was_given(optimizer)}; create one with "
            "kvstore.optimizer.create('sgd', learning_rate=0.1)"
        )
    return optimizer


def what_was_given(value: object) -> str:
    """Describe an argument that is not an optimizer, for an error message."""
    if isinstance(value, type):
        return f"the class {value.__name__} instead of an instance"
    if hasattr(value, "param_groups"):
        return f"{type(value).__name__} of PyTorch, which a store cannot run"
    return type(value).__name__


def to_plain(optimizer: Optimizer) -> list[Any]:
    """Return ``[name, {parameter: value}]``, as new lists and dicts.

    Equal optimizers give equal data, with parameters in the same order. If the class of the
    optimizer or schedule is not registered, it raises ``UnknownOptimizerError``.
    """
    if find(optimizer.name) is not type(optimizer):
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
    """Create an optimizer from ``to_plain``'s output; missing values get defaults.

    Raises:
        ProtocolError: the data does not describe an optimizer.
        UnknownOptimizerError: no optimizer is registered here under its name.
        OptimizerParameterError: a parameter or schedule is unknown or invalid.
    """
    name, params = _split(data, "optimizer")
    cls = find(name)
    if cls is None:
        known = ", ".join(known_names())
        raise UnknownOptimizerError(f"no optimizer is named {name!r} (known: {known}); {HINT}")
    made: Optimizer = build(cls, {key: _value(key, item, 1) for key, item in params.items()})
    return made


def _schedule(data: list[Any], depth: int) -> Schedule:
    if depth > MAX_DEPTH:
        raise ProtocolError(f"schedules may be nested at most {MAX_DEPTH} deep")
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
    raise ProtocolError(
        f"the parameter {name} must be a number, text, a schedule or a list of these"
    )


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


_FORMAT = b"kvstore updater states 1\n"
_LENGTH = 8
_NUMBERS = (bool, int, float, str)
_DTYPES = {
    np.dtype(name).str
    for name in ("?", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
}


def to_bytes(entries: Mapping[Any, tuple[int, Any]], optimizer: list[Any] | None) -> bytes:
    """Encode counts and states by key, and an optimizer as plain data.

    Arrays are NumPy's or have ``asnumpy``. Raises ``ArgumentTypeError`` for a state that holds
    anything but arrays, numbers, text, None, lists and tuples.
    """
    frames: list[bytes] = []
    rows = [[key, count, _layout(key, state, frames)] for key, (count, state) in entries.items()]
    header = pack_value([optimizer, rows])
    return b"".join((_FORMAT, len(header).to_bytes(_LENGTH, "little"), header, *frames))


def from_bytes(data: bytes) -> tuple[dict[Any, tuple[int, Any]], Any]:
    """Return the arguments of ``to_bytes``, with new arrays.

    Raises ``CheckpointError`` if ``data`` is not valid.
    """
    start = len(_FORMAT) + _LENGTH
    if not data.startswith(_FORMAT) or len(data) < start:
        raise CheckpointError(
            "set_states needs bytes from Updater.get_states of this package; it cannot read "
            "states that MXNet pickled"
        )
    stop = start + int.from_bytes(data[len(_FORMAT) : start], "little")
    try:
        header = unpack_value(data[start:stop])
        reader = _Reader(data, stop)
        optimizer, rows = header
        entries = {}
        for key, count, layout in rows:
            if type(key) not in (int, str) or type(count) is not int or count < 0:
                raise ValueError(
                    f"expected a key and an update count from 0, got {key!r:.60} and {count!r:.60}"
                )
            entries[key] = count, reader.state(layout)
        reader.check_end()
    except (ProtocolError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"expected bytes from Updater.get_states: {error}; pass bytes that were saved whole"
        ) from error
    return entries, optimizer


def _layout(key: Any, state: Any, frames: list[bytes]) -> Any:
    if state is None:
        return None
    if type(state) in _NUMBERS:
        return ["number", state]
    if type(state) in (list, tuple):
        return [type(state).__name__, [_layout(key, each, frames) for each in state]]
    array = state.asnumpy() if hasattr(state, "asnumpy") else state
    if not isinstance(array, np.ndarray) or array.dtype.str not in _DTYPES:
        raise ArgumentTypeError(
            f"cannot save the state of key {key!r}: it contains {type(state).__name__}; use "
            "arrays of numbers, numbers, text, None, or lists and tuples of these"
        )
    frames.append(array.tobytes())
    return ["array", array.dtype.str, list(array.shape)]


class _Reader:
    """A reader of the arrays that follow a header, in order."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    def state(self, layout: Any) -> Any:
        if layout is None:
            return None
        kind, *rest = layout
        if kind == "array":
            return self._array(*rest)
        (value,) = rest
        if kind == "number" and type(value) in _NUMBERS:
            return value
        if kind not in ("list", "tuple") or type(value) is not list:
            raise ValueError("unknown kind of state")
        states = [self.state(each) for each in value]
        return states if kind == "list" else tuple(states)

    def _array(self, dtype: Any, shape: Any) -> Any:
        if dtype not in _DTYPES or any(type(size) is not int or size < 0 for size in shape):
            raise ValueError("the dtype or shape of an array is invalid")
        count = 1
        for size in shape:
            count *= size
        start, self._at = self._at, self._at + count * np.dtype(dtype).itemsize
        if self._at > len(self._data):
            raise ValueError("the data end before the last array")
        found = np.frombuffer(self._data[start : self._at], dtype)
        return found.reshape(shape).copy()

    def check_end(self) -> None:
        if self._at != len(self._data):
            raise ValueError("there are extra bytes after the last array")
