"""Settings and lineages of tables as plain data, for messages: names and numbers, never code.

Pure; any thread may call. Read next: ``kvstore/table_stores.py``, which reads them.
"""

from __future__ import annotations

from typing import Any

from kvstore import initializer
from kvstore.dtypes import dtype_of, dtype_text
from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.tables.first_values import Init
from kvstore.tables.lineage import Lineage, Lines, lines_from_plain, lines_to_plain
from kvstore.tables.settings import TableSettings, checked_settings
from pslite.errors import ProtocolError

_INITS = {
    "uniform": initializer.Uniform,
    "normal": initializer.Normal,
    "constant": initializer.Constant,
}


def settings_to_plain(settings: TableSettings) -> list[Any]:
    """Numbers, texts and None; equal settings give equal data."""
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
    """What ``settings_to_plain`` wrote. Raises ``ProtocolError``."""
    if len(data) != 9:
        raise ProtocolError("the settings of a table are malformed")
    name, dim, dtype, kind, number, capacity, ttl, admit_after, seed = data
    if type(kind) is not str or kind not in _INITS or type(number) is not float:
        raise ProtocolError("how the rows of a table begin is malformed")
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
        raise ProtocolError(f"the settings of a table are malformed: {error}") from error


def lineage_to_plain(lineage: Lineage) -> list[Any]:
    """Its own id, and pairs of an id and a mark."""
    return [lineage.own, lines_to_plain(lineage.loaded)]


def lineage_from_plain(data: list[Any]) -> Lineage:
    """What ``lineage_to_plain`` wrote. Raises ``ProtocolError``."""
    if len(data) != 2 or type(data[0]) is not str or not data[0]:
        raise ProtocolError("the lineage of a table is malformed")
    return Lineage(checked_lines(data[1]), data[0])


def checked_lines(data: object) -> Lines:
    """What ``lines_to_plain`` wrote, from a message. Raises ``ProtocolError``."""
    try:
        return lines_from_plain(data)
    except ValueError as error:
        raise ProtocolError(f"the lineage of a table is malformed: {error}") from error


def _init_to_plain(init: Init) -> tuple[str, float]:
    if isinstance(init, initializer.Uniform):
        return "uniform", float(init.scale)
    if isinstance(init, initializer.Normal):
        return "normal", float(init.sigma)
    return "constant", float(init.value)
