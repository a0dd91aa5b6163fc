"""The arguments of calls about growing tables: checked, before anything is sent or changed.

Used by the tables of all stores. Arrays are the caller's. Read next: ``local_tables.py`` and
``dist_tables.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection

from kvstore.arrays import Array, adapter_for
from kvstore.errors import DuplicateKeyError, ValueMismatchError
from kvstore.sparse.sums import RowValues
from kvstore.tables.settings import TableSettings


def check_name(names: Collection[str], name: str) -> None:
    """Raise ``DuplicateKeyError`` if a table has this name."""
    if name in names:
        raise DuplicateKeyError(
            f"there is a table {name!r} already; close() it first, or choose another name"
        )


def check_out(settings: TableSettings, out: Array, wanted: tuple[int, ...]) -> None:
    """Raise ``ValueMismatchError`` unless rows of this shape can be written to the array."""
    adapter = adapter_for(out)
    shape = adapter.shape(out)
    if shape != wanted:
        raise ValueMismatchError(
            f"table {settings.name!r}: the rows of these ids have shape {wanted}, the array to "
            f"fill has {shape}"
        )
    why = adapter.why_read_only(out)
    if why is not None:
        raise ValueMismatchError(f"table {settings.name!r}: the array to fill is read-only: {why}")


def checked_gradients(
    settings: TableSettings, shape: tuple[int, ...], gradients: Array
) -> RowValues:
    """Gradients for ids of this shape, as rows on the host. Raises ``ValueMismatchError``."""
    adapter = adapter_for(gradients)
    dtype = adapter.dtype(gradients)
    wanted = (*shape, settings.dim)
    if adapter.shape(gradients) != wanted or dtype != settings.dtype:
        raise ValueMismatchError(
            f"table {settings.name!r}: gradients for ids of shape {shape} have shape {wanted} "
            f"and dtype {settings.dtype}, got {adapter.shape(gradients)} and {dtype}"
        )
    return adapter.to_host(gradients).reshape(-1, settings.dim)


def warn_of_checkpoint(names: Collection[str], stacklevel: int) -> None:
    """Warn that a checkpoint leaves these tables out, if there are any."""
    if names:
        warnings.warn(
            f"a checkpoint has no growing tables ({', '.join(names)}): save them with table.export",
            stacklevel=stacklevel,
        )
