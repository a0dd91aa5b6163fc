"""What callers of ``kvstore.run`` and ``LocalCluster`` give: checked before anything is started.

Pure. Each function returns the argument in the form in which it is used, or raises an
``ArgumentTypeError`` or ``ArgumentValueError`` that names it as the caller knows it. What the
launcher's own options mean is checked in ``running_job.py``, which is next.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.launch.options import LAUNCHERS, RESERVED_NAMES
from kvstore.suggest import did_you_mean


def as_count(name: str, value: object) -> int:
    """``workers`` or ``servers``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentTypeError(f"{name} must be an int of at least 1, got {value!r}")
    count = int(value)
    if count < 1:
        raise ArgumentValueError(f"{name} must be an int of at least 1, got {count}")
    return count


def as_launcher(launcher: object) -> str:
    if not isinstance(launcher, str) or launcher not in LAUNCHERS:
        raise ArgumentValueError(
            f"launcher must be one of {', '.join(LAUNCHERS)}; got {launcher!r}"
            f"{did_you_mean(launcher, LAUNCHERS)}"
        )
    return launcher


def as_seconds(timeout_s: object) -> float | None:
    """None is no limit; a time that has passed is 0."""
    if timeout_s is None:
        return None
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, Real):
        raise ArgumentTypeError(
            f"timeout_s must be a number of seconds, or None for no limit, got {timeout_s!r}"
        )
    seconds = float(timeout_s)
    if math.isnan(seconds):
        raise ArgumentValueError(f"timeout_s must be a number of seconds, got {timeout_s}")
    return None if seconds == math.inf else max(0.0, seconds)


def as_environment(env: Mapping[str, str] | None) -> dict[str, str]:
    env = {} if env is None else env
    if not isinstance(env, Mapping):
        raise ArgumentTypeError(f"env maps names to texts, got {type(env).__name__}")
    for name, text in env.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise ArgumentTypeError(f"env maps names to texts, got {name!r}: {text!r}")
        if name in RESERVED_NAMES:
            raise ArgumentValueError(f"env cannot set {name}: the launcher sets it itself")
        if not (name.isascii() and name.isidentifier()) or "\0" in text:
            raise ArgumentValueError(f"env cannot hold {name!r}: {text!r} as a variable")
    return dict(env)


def as_words(options: Sequence[str] | str) -> tuple[str, ...]:
    """``options``; a single text would be taken for many letters."""
    if isinstance(options, str):
        raise ArgumentTypeError(f"options is a sequence of texts, as in options=({options!r},)")
    if not isinstance(options, Sequence) or not all(isinstance(word, str) for word in options):
        raise ArgumentTypeError(f"options is a sequence of texts, got {options!r}")
    return tuple(options)


def as_path(name: str, path: object) -> str | None:
    """``share_dir``, ``log_dir`` or ``python``; None is the default."""
    if path is None:
        return None
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise ArgumentTypeError(f"{name} must be a path, got {path!r}")
    return text


def check_call(
    function: Callable[..., Any], args: Iterable[Any], kwargs: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The function and its arguments; returns these as a tuple and a dictionary."""
    if not callable(function):
        raise ArgumentTypeError(f"fn must be a function, got {type(function).__name__}")
    if not isinstance(args, Iterable) or isinstance(args, str | bytes | bytearray | Mapping):
        raise ArgumentTypeError(
            "args must be a sequence of the function's arguments, as in args=(2,); "
            f"got {type(args).__name__}"
        )
    named = {} if kwargs is None else kwargs
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
        raise ArgumentTypeError(
            f"kwargs must map names to values, as in kwargs={{'rate': 0.1}}; got {kwargs!r:.60}"
        )
    return tuple(args), dict(named)
