"""``TableSettings``: the constant settings of a table, and its memory limit.

This module also converts settings and lineages to plain data for messages: names and numbers, never
code. Pure; any thread may call. Read next: ``shard.py``, and ``kvstore/server/tables.py``, which
reads messages.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.arrays import initializer
from kvstore.arrays.dtypes import accumulation_dtype, dtype_of, dtype_text, is_bfloat16
from kvstore.errors import ArgumentTypeError, ArgumentValueError, NotSupportedError
from kvstore.optimizer.base import Optimizer, create
from kvstore.optimizer.states import state_names
from kvstore.sparse.tables.admission import WAITING_BYTES
from kvstore.sparse.tables.ages import AGE_BYTES
from kvstore.sparse.tables.hash_index import MOST_PLACES, PLACE_BYTES
from kvstore.sparse.tables.initial_rows import Init, check_range, checked_init
from kvstore.sparse.tables.lineage import Lineage, Lines, lines_from_plain, lines_to_plain
from pslite.errors import ProtocolError, check_unicode, unexpected

MOST_DIM = 2**24
"""A row of this many float64 numbers has 128 MiB, and must fit in a message."""

MOST_PULLS = 2**31 - 1
"""The largest ``admit_after``."""

_DTYPES = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))

WAITING = 1 << 20
"""How many ids may wait for admission in a table without a capacity."""

OVERHEAD_BYTES = PLACE_BYTES + AGE_BYTES + 4 + 4
"""Bytes of a row besides its numbers: index, stamp, export number, and its entry in the list of
free places (the last two are int32)."""


@dataclass(frozen=True)
class TableSettings:
    """The arguments of ``KVStore.create_table``, checked."""

    name: str
    dim: int
    dtype: np.dtype[Any]
    init: Init
    capacity: int | None
    ttl: int | None
    admit_after: int
    seed: int

    def capacity_of(self, share: int, num_shares: int) -> int | None:
        """Return how many rows this share may hold; None for no limit."""
        if self.capacity is None:
            return None
        return self.capacity // num_shares + (share < self.capacity % num_shares)

    def num_waiting(self, capacity: int | None) -> int:
        """Return how many ids may wait for admission in a share of this capacity."""
        if self.admit_after == 1:
            return 0
        return WAITING if capacity is None else capacity

    def row_bytes(self, optimizer: Optimizer | None) -> int:
        """Return the size of a row in bytes, including the optimizer's states for it."""
        num_states = 0 if optimizer is None else len(state_names(optimizer, self.dtype))
        state_bytes = num_states * accumulation_dtype(self.dtype).itemsize
        return self.dim * (self.dtype.itemsize + state_bytes) + OVERHEAD_BYTES

    def limit_bytes(self, optimizer: Optimizer | None, capacity: int | None) -> int | None:
        """Return the most bytes that a share of this capacity uses; None: no limit."""
        if capacity is None:
            return None
        waiting_bytes = self.num_waiting(capacity) * WAITING_BYTES
        return capacity * self.row_bytes(optimizer) + waiting_bytes


def checked_settings(
    name: object,
    dim: object,
    *,
    init: object,
    capacity: object,
    ttl: object,
    admit_after: object,
    dtype: Any,
    seed: object,
    num_shares: int = 1,
) -> TableSettings:
    """Check the arguments of ``create_table``, and return them as settings.

    Raises ``ArgumentTypeError`` and ``ArgumentValueError``.
    """
    if not isinstance(name, str) or not name:
        raise ArgumentTypeError(f"the name of a table must be a non-empty str, got {name!r}")
    kind = _checked_dtype(dtype)
    settings = TableSettings(
        check_unicode("the name of a table", name, ArgumentValueError),
        _natural("dim", dim, 1, MOST_DIM),
        kind,
        checked_init(init),
        None if capacity is None else _natural("capacity", capacity, 1),
        None if ttl is None else _natural("ttl", ttl, 1),
        _natural("admit_after", admit_after, 1, MOST_PULLS),
        _natural("seed", seed, None),
    )
    check_range(settings.init, kind)
    if settings.capacity is not None and not num_shares <= settings.capacity <= MOST_PLACES:
        raise ArgumentValueError(
            f"capacity must be from {num_shares} (the number of servers) to {MOST_PLACES}, got "
            f"{settings.capacity}"
        )
    return settings


def _checked_dtype(dtype: Any) -> np.dtype[Any]:
    """Check a dtype: float16, bfloat16, float32 or float64; return it in native order."""
    try:
        if dtype is None:  # NumPy would use float64
            raise TypeError
        kind: np.dtype[Any] = np.dtype(dtype).newbyteorder("=")
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"the dtype of a table must be a float dtype, got {dtype!r}"
        ) from None
    if not is_bfloat16(kind) and kind not in _DTYPES:
        raise ArgumentTypeError(
            f"the dtype of a table must be float16, bfloat16, float32 or float64, got {kind}"
        )
    return kind


def checked_table_optimizer(optimizer: object, dtype: np.dtype[Any]) -> Optimizer | None:
    """Check an optimizer, or create it from its name; None for no optimizer.

    Raises ``ArgumentTypeError`` for any other object, ``NotSupportedError`` for an optimizer that
    would change rows without a gradient.
    """
    if optimizer is None:
        return None
    if isinstance(optimizer, str):
        optimizer = create(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            "the optimizer of a table must be one of kvstore.optimizer, its name, or None, got "
            f"{type(optimizer).__name__}"
        )
    optimizer.check_dtype(dtype)
    shown = optimizer.name or type(optimizer).__name__
    if optimizer.scope == "key":
        raise NotSupportedError(
            f"{shown} needs all rows at once, but a table has only the rows that were used; use "
            "another optimizer, such as adagrad"
        )
    if optimizer.lazy_update is False:
        raise NotSupportedError(
            f"a table updates only the pushed rows; use {shown} with lazy_update=True"
        )
    return optimizer


def _natural(what: str, number: object, least: int | None, most: int = 2**64 - 1) -> int:
    try:
        if isinstance(number, (bool, np.bool_)):
            raise TypeError
        value = operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentTypeError(f"{what} of a table must be an int, got {number!r}") from None
    if not -(2**63) <= value < 2**64:
        raise ArgumentValueError(f"{what} of a table must fit in 64 bits, got {value}")
    if least is not None and value < least:
        raise ArgumentValueError(f"{what} of a table must be at least {least}, got {value}")
    if value > most:
        raise ArgumentValueError(f"{what} of a table must be at most {most}, got {value}")
    return value


_INITS = {
    "uniform": initializer.Uniform,
    "normal": initializer.Normal,
    "constant": initializer.Constant,
}


def settings_to_plain(settings: TableSettings) -> list[Any]:
    """Return the settings as numbers, texts and None; equal settings give equal data."""
    return [
        settings.name,
        settings.dim,
        dtype_text(settings.dtype),
        *_init_to_plain(settings.init),
        settings.capacity,
        settings.ttl,
        settings.admit_after,
        settings.seed,
    ]


def settings_from_plain(data: list[Any], num_shares: int) -> TableSettings:
    """Parse the output of ``settings_to_plain``. Raises ``ProtocolError``."""
    if len(data) != 9:
        raise unexpected("the settings of a table, a list of 9 fields", data)
    name, dim, dtype, kind, number, capacity, ttl, admit_after, seed = data
    if type(kind) is not str or kind not in _INITS or type(number) is not float:
        kinds = ", ".join(_INITS)
        raise unexpected(f"initial rows of a table, one of {kinds} and a number", [kind, number])
    try:
        return checked_settings(
            name,
            dim,
            init=_INITS[kind](number),
            capacity=capacity,
            ttl=ttl,
            admit_after=admit_after,
            dtype=dtype_of(dtype),
            seed=seed,
            num_shares=num_shares,
        )
    except (ArgumentTypeError, ArgumentValueError) as error:
        raise unexpected("valid settings of a table", str(error)) from error


def lineage_to_plain(lineage: Lineage) -> list[Any]:
    """Return the lineage's own id, and its lines as pairs of an id and a mark."""
    return [lineage.own, lines_to_plain(lineage.loaded)]


def lineage_from_plain(data: list[Any]) -> Lineage:
    """Parse the output of ``lineage_to_plain``. Raises ``ProtocolError``."""
    if len(data) != 2 or type(data[0]) is not str or not data[0]:
        raise unexpected("the lineage of a table, an id and a list of pairs", data)
    return Lineage(checked_lines(data[1]), data[0])


def checked_lines(data: object) -> Lines:
    """Parse the output of ``lines_to_plain`` in a message. Raises ``ProtocolError``."""
    try:
        return lines_from_plain(data)
    except ValueError as error:
        raise ProtocolError(
            f"expected a list of saves that a table has loaded: {error}; run the same version of "
            "kvstore on all nodes"
        ) from error


def _init_to_plain(init: Init) -> tuple[str, float]:
    if isinstance(init, initializer.Uniform):
        return "uniform", float(init.scale)
    if isinstance(init, initializer.Normal):
        return "normal", float(init.sigma)
    return "constant", float(init.value)
