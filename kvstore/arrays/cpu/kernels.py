"""Calls into the compiled kernels (``_kernels``): sums, updates and codecs.

The kernels are optional: without them NumPy computes the same bits. Each function returns whether
it did the work. If it did not, nothing was written, and ``sums.py`` or ``compression/codec.py``
uses NumPy. The kernels support only float16, bfloat16, float32 and float64, the optimizers
registered with ``formula_of``, the codecs of ``CODED``, and arrays without strides. They are not
used if the module is missing or KVSTORE_NATIVE is 0.
Contributions and arrays to fill may be at any address.

One call does one whole run of elements, however long, without the interpreter's lock: block by
block it adds contributions left to right, updates, and writes the arrays to fill, so that a
number passes through the cache once. Every operation is one of the NumPy formula, rounded to the
same type, in the same order; there is no fused multiply-add. Any thread may call. Read next:
``native/rules.h`` for the formulas, ``docs/decisions/0011-optional-kernels.md`` for the reasons.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kvstore.arrays.dtypes import accumulation_dtype, is_bfloat16
from pslite import Config

Array = np.ndarray[Any, Any]
Row = Sequence[Array]

INTERFACE = 5
"""A module with another number was built from another version of the sources, and is not used."""

# The numbers of native/kernels.h.
_ASSIGN, SGD, MOMENTUM, ADAM, TORCH_MOMENTUM = range(5)
_FLOAT32, _FLOAT64, _FLOAT16, _BFLOAT16 = range(4)

_KINDS = {np.dtype("f4"): _FLOAT32, np.dtype("f8"): _FLOAT64, np.dtype("f2"): _FLOAT16}
"""The dtypes but for bfloat16, which is not one of NumPy's."""

_WIDE = (np.dtype("f4"), np.dtype("f8"))

_NARROW = (_FLOAT16, _BFLOAT16)
_COMBINED = {
    *((kind, kind) for kind in range(4)),
    *((kind, _FLOAT32) for kind in _NARROW),
    *((_FLOAT32, kind) for kind in _NARROW),
}
"""The supported pairs of contribution kind and weight kind."""

CODED = frozenset({1, 2, 5} if sys.byteorder == "little" else {1, 2})
"""The codes of 2bit, 1bit and int8 (``compression/header.py``), whose scales lie as in payloads."""

_SHORT = 32768
"""Shorter sums are left to NumPy, which is faster there: it checks less in each call and uses wider
instructions (``benchmarks/kernels.py``)."""

_LEAST_LIMIT = 1e-30
"""A smaller limit for gradients may become 0 in float32; NumPy's loops then differ in the sign."""


class Formula(NamedTuple):
    """The parameters of one update; a rule ignores those that it does not have."""

    rule: int
    rescale: float = 1.0
    limit: float = 0.0
    """The limit for the elements of a gradient; 0 means no limit."""
    decay: float = 0.0
    rate: float = 0.0
    momentum: float = 0.0
    beta1: float = 0.0
    beta2: float = 0.0
    epsilon: float = 0.0
    late_decay: float = 0.0
    """Times the weight, added to the step."""


_SUM = Formula(_ASSIGN)
_Numbers = TypeVar("_Numbers", bound=Callable[[Any, int], Formula | None])

_formulas: dict[type, Callable[[Any, int], Formula | None]] = {}


def formula_of(cls: type) -> Callable[[_Numbers], _Numbers]:
    """Decorate a function that returns an optimizer's numbers for the kernels.

    The kernels call the function with an optimizer of exactly this class (a subclass may do
    something else) and the number of the update. If it returns None, NumPy does the update.
    """

    def note(function: _Numbers) -> _Numbers:
        _formulas[cls] = function
        return function

    return note


@cache
def native() -> ModuleType | None:
    """Return the compiled module; None if it is missing, outdated or turned off.

    The module is looked up once, at the first use.
    """
    return None if why_missing() else importlib.import_module("kvstore.arrays.cpu._kernels")


def why_missing() -> str:
    """Return why the compiled module is not used and what to do; "" if it is used."""
    if not Config.read("native"):
        return "KVSTORE_NATIVE=0 switches the compiled kernels off; unset it to use them"
    remedy = (
        "install a C compiler, then run pip install --force-reinstall --no-deps . in the checkout"
    )
    try:
        from kvstore.arrays.cpu import _kernels
    except ImportError as error:
        return (
            f"the compiled kernels are missing ({error}), so NumPy is used instead, which is "
            f"slower: {remedy}"
        )
    if _kernels.INTERFACE != INTERFACE:
        return (
            f"the compiled kernels have version {_kernels.INTERFACE}, expected {INTERFACE}, so "
            f"NumPy is used instead, which is slower: {remedy}"
        )
    return ""


def instructions() -> str:
    """Return what computes sums: ``"avx2"``, ``"plain"`` (any CPU) or ``"numpy"``."""
    module = native()
    return "numpy" if module is None else str(module.INSTRUCTIONS[0])


def add_up(contributions: Row, total: Array) -> bool:
    """Set ``total`` to ((c0 + c1) + c2) + ..., rounded once; return whether it did.

    All arrays are the caller's and have the same shape, with any number of dimensions.
    Contributions share one dtype and are only read. Those of 16 bits are added in float32.
    ``total`` may be one of the first two contributions and must not overlap any other. It works
    like ``add_up`` of ``sums.py``. It refuses short sums without rounding, since NumPy is faster
    there.
    """
    if total.size < _SHORT and contributions[0].dtype == total.dtype in _WIDE:
        return False
    return apply(total, (contributions,), None, (), 0)


def apply(
    weight: Array,
    rows: Sequence[Row],
    optimizer: object | None,
    state: Sequence[Array],
    count: int,
    outs: Sequence[Row] = (),
) -> bool:
    """Apply a round to neighbouring keys; return whether it did.

    Each row has the contributions to one key. ``weight`` holds the elements of all keys, one key
    after the other. The arrays of ``state`` are as long, and for 16-bit weights the last one is the
    master. If there are ``outs``, one row for each key, the new values are written there too.
    Raises ``ValueError`` for lengths that do not fit.

    ``weight``, ``state`` and ``outs`` are the caller's and are changed in place. They must not
    overlap each other or a contribution; only a contribution that is exactly its key's out may.
    Contributions share one dtype, and are only read, before the call returns.
    """
    module = native()
    if module is None:
        return False
    if optimizer is None:
        state = ()
    formula = _SUM if optimizer is None else _formula(optimizer, count)
    kinds = _kinds(rows[0][0].dtype, weight.dtype)
    if formula is None or kinds is None or any(array.dtype != kinds.state for array in state):
        return False
    if any(out.dtype != weight.dtype for row in outs for out in row):
        return False
    done: bool = module.run(formula, kinds.weight, kinds.values, weight, state, rows, outs)
    return done


def merge_ids(several: Sequence[Array]) -> tuple[Array, list[Array]] | None:
    """Return the sorted distinct ids of sorted arrays, and each array's indices there.

    Returns None if the kernels cannot do it.
    """
    module = native()
    if module is None or not all(ids.flags.c_contiguous for ids in several):
        return None
    merged = np.empty(sum(map(len, several)), np.int64)
    places = [np.empty(len(ids), np.int64) for ids in several]
    return merged[: module.merge_ids(merged, places, several)], places


def take_rows(table: Array, places: Array, out: Array) -> bool:
    """Set ``out`` to the rows ``places`` (int64) of ``table``; return whether it did.

    Both have one dtype; ``out`` must not overlap the table. Raises ``ValueError`` for places
    outside the table.
    """
    module = native()
    row_bytes = table.shape[1] * table.itemsize
    if module is None or not row_bytes:
        return False
    return bool(module.take_rows(table, places, out, row_bytes))


def update_rows(
    weight: Array,
    state: Sequence[Array],
    places: Array,
    values: Sequence[Array],
    at: Sequence[Array],
    optimizer: object,
    count: int,
    span: tuple[int, int],
) -> bool:
    """Update rows of a table with a sum of rows; return whether it did.

    ``weight`` and ``state`` are 2-D, else as in ``apply``. ``places`` are the distinct rows
    (int64) to update; row i of the sum is for ``places[i]``. Each array of ``values`` is 2-D and
    has the rows ``at`` (sorted, int64) of the sum. The sum of a row that some arrays lack begins
    with 0.0, as in the sum of the dense arrays. Only the rows ``span``, [start, stop), of the sum
    are used. Raises ``ValueError`` for arguments that do not fit; then nothing was written.
    """
    module, formula = native(), _formula(optimizer, count)
    if module is None or formula is None or not weight.shape[1]:
        return False
    kinds = _kinds(values[0].dtype, weight.dtype)
    if kinds is None or any(array.dtype != kinds.state for array in state):
        return False
    width = weight.shape[1]
    done: bool = module.update_rows(
        formula, kinds.weight, kinds.values, width, weight, state, places, values, at, *span
    )
    return done


def encode(
    codec: int,
    number: float,
    dtype: np.dtype[Any],
    source: Array | None,
    residual: Array | None,
    payload: Array,
    start: int,
    stop: int,
) -> bool:
    """Encode elements [start, stop) with a codec; return whether it did.

    ``codec`` is a code of ``CODED``, ``number`` the one parameter that its rule depends on.
    ``source`` has the key's dtype, ``residual`` its accumulation dtype. One of them may be None.
    Both are whole arrays, and ``payload`` is whole too. Raises ``ValueError`` for lengths that do
    not fit.
    """
    module = native()
    if module is None or codec not in CODED:
        return False
    kind = _kind(dtype)
    if kind is None:
        return False
    if source is None and kind in _NARROW:
        kind = _FLOAT32
    done: bool = module.encode(codec, kind, source, residual, payload, number, start, stop)
    return done


def decode(
    codec: int, number: float, payload: Array, out: Array, start: int, stop: int, *, add: bool
) -> bool:
    """Decode elements [start, stop) with a codec; return whether it did.

    ``out`` is float32 or float64. ``out`` and ``payload`` are whole; ``payload`` was checked and is
    only read.
    """
    module = native()
    if module is None or codec not in CODED:
        return False
    kind = _kind(out.dtype)
    if kind not in (_FLOAT32, _FLOAT64):
        return False
    done: bool = module.decode(codec, kind, payload, out, number, start, stop, add)
    return done


def _formula(optimizer: object, count: int) -> Formula | None:
    """Return the numbers of an update; None if the kernels do not support it."""
    numbers = _formulas.get(type(optimizer))
    formula = None if numbers is None else numbers(optimizer, count)
    return None if formula is None or 0.0 < formula.limit < _LEAST_LIMIT else formula


class _Kinds(NamedTuple):
    """The kinds of contributions and weights, and the dtype that states must have."""

    values: int
    weight: int
    state: np.dtype[Any]


@cache
def _kinds(values: np.dtype[Any], weight: np.dtype[Any]) -> _Kinds | None:
    """Return the kinds of values and a weight; None if no kernel combines them."""
    pair = _kind(values), _kind(weight)
    return _Kinds(*pair, accumulation_dtype(weight)) if pair in _COMBINED else None


def _kind(dtype: np.dtype[Any]) -> int | None:
    return _BFLOAT16 if is_bfloat16(dtype) else _KINDS.get(dtype)
