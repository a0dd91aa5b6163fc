"""``FirstValues``: the initial values of a row, as a function of its id.

A counter-based generator: number j of a row is a hash of (seed, name of the table, id, j). So it
does not depend on earlier ids, on the calls, or on the server. The words of a row are those of a
SplitMix64 that starts at the hash of the id (``ids.py`` names the source). Each word gives two
numbers. All operations are on integers, or on floats with exact IEEE 754 rounding, so the bits are
the same on every machine; NumPy's own ``log`` and ``cos`` would differ between machines. Numbers
are computed in float32, whatever the dtype. Pure; any thread may call. Read next: ``shard.py``.

Normal numbers are the inverse of the normal distribution function at uniform numbers: Wichura,
"Algorithm AS 241", Applied Statistics 37, 1988, PPND7, which is accurate to 7 digits.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np

from kvstore.arrays import initializer
from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.sparse.ids import Ids
from kvstore.sparse.sums import RowValues
from kvstore.sparse.tables.ids import GOLDEN, Words, mix
from kvstore.sparse.update import row_blocks

Init = initializer.Uniform | initializer.Normal | initializer.Constant

Floats = np.ndarray[Any, Any]

_CENTRE = (
    (5.9109374720e1, 1.5929113202e2, 5.0434271938e1, 3.3871327179),
    (6.7187563600e1, 7.8757757664e1, 1.7895169469e1, 1.0),
)
_TAIL = (
    (1.7023821103e-1, 1.3067284816, 2.7568153900, 1.4234372777),
    (1.2021132975e-1, 7.3700164250e-1, 1.0),
)
_LN2 = 0.6931471805599453
_NUMBERS = (int, float, np.integer, np.floating)
_MOST_NORMAL = 6.5
"""All numbers of ``normal`` have a smaller magnitude."""


def checked_init(init: object) -> Init:
    """Return the initializer of rows for an initializer, name or number.

    Raises ``ArgumentTypeError`` for other objects, and ``ArgumentValueError`` for initializers
    that need a whole matrix (Xavier, Orthogonal).
    """
    if isinstance(init, str):
        init = initializer.create(init)
    if isinstance(init, _NUMBERS) and not isinstance(init, bool):
        init = initializer.Constant(init)  # type: ignore[arg-type]
    if isinstance(init, Init):
        return init
    if isinstance(init, (initializer.Xavier, initializer.Orthogonal)):
        raise ArgumentValueError(
            f"a table creates its rows one by one, but {type(init).__name__} needs the whole "
            "matrix; use kvstore.init.Uniform(scale) or Normal(sigma)"
        )
    raise ArgumentTypeError(
        "init of a table must be kvstore.init.Uniform, Normal or Constant, one of their names, "
        f"or a number, got {init!r}"
    )


def check_range(init: Init, dtype: np.dtype[Any]) -> None:
    """Check that all initial values are finite in this dtype.

    Raises ``ArgumentValueError``, or ``ArgumentTypeError`` if a parameter is not a number.
    """
    if isinstance(init, initializer.Uniform):
        number, reach = init.scale, 1.0
    elif isinstance(init, initializer.Normal):
        number, reach = init.sigma, _MOST_NORMAL
    else:
        number, reach = init.value, 1.0
    try:
        if not isinstance(number, _NUMBERS):
            raise TypeError
        most = abs(float(number))
    except TypeError:
        raise ArgumentTypeError(
            f"the parameter of init of a table must be a number, got {init!r}"
        ) from None
    except OverflowError:
        most = math.inf
    with np.errstate(over="ignore"):
        largest = np.float64(most * reach)
        is_made = not isinstance(init, initializer.Constant)  # in float32
        fits = bool(np.isfinite(largest.astype(np.float32))) or not is_made
        is_finite = fits and bool(np.isfinite(largest.astype(dtype)))
    if not is_finite:
        raise ArgumentValueError(
            f"the initial rows of {init!r} are not finite in the table's dtype {dtype}; choose a "
            "smaller number"
        )


class FirstValues:
    """The initial values of the rows of one table."""

    def __init__(self, init: Init, seed: int, name: str) -> None:
        self._init = init
        text = f"{seed} {name}".encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        self._stream = np.uint64(int.from_bytes(digest, "little"))

    def fill(self, ids: Ids, out: RowValues) -> None:
        """Set each row of ``out`` (2-D, any float dtype) to its id's initial values."""
        init = self._init
        if isinstance(init, initializer.Constant):
            out[...] = float(init.value)
            return
        width = out.shape[1]
        for start, stop in row_blocks(len(ids), width):
            numbers = self._numbers(ids[start:stop], width)
            if isinstance(init, initializer.Uniform):
                values = _uniform(numbers) * np.float32(init.scale)
            else:
                values = (normal(numbers) * init.sigma).astype(np.float32)
            out[start:stop] = values

    def make(self, ids: Ids, width: int, dtype: np.dtype[Any]) -> RowValues:
        """Return the initial values of ids as a new array (number of ids, width)."""
        out = np.empty((len(ids), width), dtype)
        self.fill(ids, out)
        return out

    def _numbers(self, ids: Ids, width: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """Return 32 random bits for each element of these rows."""
        starts: Words = mix(ids.view(np.uint64) + self._stream)
        steps = np.arange(1, (width + 1) // 2 + 1, dtype=np.uint64) * GOLDEN
        words = mix(starts[:, None] + steps)
        halves = words.astype("<u8", copy=False).view("<u4")
        return halves[:, :width]


def _uniform(numbers: np.ndarray[Any, Any]) -> Floats:
    """Return float32 in [-1, 1), all multiples of 2**-23."""
    values: Floats = (numbers >> np.uint32(8)).astype(np.float32)
    values *= np.float32(2.0**-23)
    values -= np.float32(1)
    return values


def normal(numbers: np.ndarray[Any, Any]) -> Floats:
    """Turn 32 bits each into float64 of mean 0 and deviation 1, from -6.3 to 6.3."""
    uniform = (numbers + 0.5) * 2.0**-32
    offset = uniform - 0.5
    square = 0.180625 - offset * offset
    values = offset * _ratio(_CENTRE, square)
    is_tail = square < 0
    tail = np.minimum(uniform[is_tail], 1 - uniform[is_tail])
    distance = _ratio(_TAIL, np.sqrt(-_log(tail)) - 1.6)
    values[is_tail] = np.copysign(distance, offset[is_tail])
    return values


def _ratio(polynomials: tuple[tuple[float, ...], tuple[float, ...]], at: Floats) -> Floats:
    above, below = (_polynomial(each, at) for each in polynomials)
    return above / below


def _polynomial(coefficients: tuple[float, ...], at: Floats) -> Floats:
    value = np.full(at.shape, coefficients[0])
    for coefficient in coefficients[1:]:
        value *= at
        value += coefficient
    return value


def _log(values: Floats) -> Floats:
    """Return the natural logarithm to 10 digits, from exact operations only.

    The numbers are positive.
    """
    mantissa, exponent = np.frexp(values)
    ratio = (mantissa - 1) / (mantissa + 1)
    series = tuple(1 / (2 * k + 1) for k in reversed(range(10)))
    fraction = 2 * ratio * _polynomial(series, ratio * ratio)
    logarithm: Floats = fraction + exponent * _LN2
    return logarithm
