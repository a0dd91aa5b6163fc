"""What codecs can be told: names, kinds and limits of parameters, and the errors about them.

A ``Parameter`` checks one value and gives it its plain form (bool, int, float), which is what
travels and is compared. Numbers may come as text, as MXNet's do ("0.5"). Pure; any thread may
call. Read next: ``choice.py``, which takes a user's dictionary apart.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, SupportsIndex

from kvstore.errors import ArgumentTypeError, ArgumentValueError

_MOST = (1 << 63) - 1
_LEAST_FLOAT32 = 1.401298464324817e-45
_MOST_FLOAT32 = 3.4028234663852886e38


class Parameter(NamedTuple):
    """One parameter of a codec."""

    check: Callable[[str, Any], Any]
    """Called with the parameter's name (for errors) and the value; returns its plain form."""
    default: Any
    """None: unset, the codec has another parameter in its place."""


def flag(name: str, value: Any) -> bool:
    """True or False; also as 0 and 1."""
    if type(value) is bool or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise ArgumentTypeError(f"the compression parameter {name!r} is True or False, got {value!r}")


def finite(name: str, value: Any) -> float:
    """Any number that a float32 can hold."""
    number = _number(name, value)
    if not abs(number) <= _MOST_FLOAT32:
        raise ArgumentValueError(
            f"the compression parameter {name!r} is a finite number, got {value!r}"
        )
    return number


def positive(name: str, value: Any) -> float:
    """A number above 0, also when it is rounded to float32."""
    number = finite(name, value)
    if number < _LEAST_FLOAT32:
        raise ArgumentValueError(
            f"the compression parameter {name!r} is a number greater than 0, got {value!r}: it is "
            "the size of the steps in which gradients are sent"
        )
    return number


def ratio(name: str, value: Any) -> float:
    """A share: above 0, at most 1."""
    number = _number(name, value)
    if not 0.0 < number <= 1.0:
        raise ArgumentValueError(
            f"the compression parameter {name!r} is a number above 0 and at most 1, got {value!r}: "
            "the share of the numbers that are sent (for a count there is 'k')"
        )
    return number


def count(name: str, value: Any) -> int | None:
    """A whole number from 1 on, or None for none."""
    if value is None:
        return None
    return _whole(name, value, 1, _MOST)


def size(name: str, value: Any) -> int:
    """A whole number from 0 on."""
    return _whole(name, value, 0, _MOST)


def block(name: str, value: Any) -> int:
    """How many numbers share a scale."""
    return _whole(name, value, 8, 65536)


def _whole(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            pass
    # NumPy's integers too, but no floats.
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ArgumentTypeError(
            f"the compression parameter {name!r} is a whole number, got {value!r}"
        )
    number = operator.index(value)
    if not least <= number <= most:
        raise ArgumentValueError(
            f"the compression parameter {name!r} is a whole number from {least} to {most}, "
            f"got {number}"
        )
    return number


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError(
            f"the compression parameter {name!r} is a number, got {value!r}"
        ) from None
    if math.isnan(number):
        raise ArgumentValueError(f"the compression parameter {name!r} is a number, got nan")
    return number
