"""The arrays of a call on a store of one process: checked, in a row for each key.

What training loops pass again and again, NumPy's arrays of the keys' very shapes and dtypes,
is recognised at a glance; everything else goes through the checks of ``keys.py``, which raise
the errors. What can be worked out of a list of keys alone is worked out once (``Blocks``). The
store's lock guards everything here. Read next: ``blocks.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvstore.arrays import Array
from kvstore.blocks import Blocks
from kvstore.keys import Key, Keys, KeyTable, Values
from kvstore.row_calls import SparseOuts, check_dense_outs
from kvstore.shelf import HOST, Entry
from kvstore.sparse.array import RowSparseArray

MOST_LISTS = 1000
"""So many lists of keys are remembered; then all are forgotten."""


class Rows(NamedTuple):
    """The keys of a call, each once, and for each the arrays that are pushed or filled."""

    keys: tuple[Key, ...]
    rows: Sequence[Sequence[Array]]
    blocks: Blocks | None = None
    """Of these keys, if all of them are on the host and all arrays what ``plain_rows`` wants."""
    sparse: Sequence[tuple[Key, Sequence[Array]]] = ()
    """Further keys and their arrays: where the key is row-sparse, or an array is."""


class RowReader:
    """Turns what callers pass into ``Rows``; looks into a store's keys and changes nothing."""

    def __init__(self, table: KeyTable, entries: Mapping[Key, Entry]) -> None:
        self._table = table
        self._entries = entries
        self._blocks: dict[tuple[Key, ...], Blocks] = {}
        self._outs = SparseOuts()

    def pushed(self, key: Keys, value: Values) -> Rows:
        """What a call pushes. Raises what ``KeyTable.check_push`` does."""
        found = self._plain(key, value, are_written=False)
        if found is not None:
            return found
        return self.split(self._table.check_push(key, value))

    def filled(self, key: Keys, out: Values, *, ignores_sparse: bool | None = None) -> Rows:
        """What a call fills. Raises what ``KeyTable.check_out`` does.

        Of ``RowSparseArray`` among the arrays, ``ignores_sparse`` leaves them out, and warns once
        for a key; without a value for it, they raise ``NotSupportedError``.
        """
        found = self._plain(key, out, are_written=True)
        if found is not None:
            return found
        groups = self._table.check_out(key, out)
        if ignores_sparse is None:
            check_dense_outs(groups)
        elif ignores_sparse:
            groups = self._outs.ignored(groups, 5)
        return self.split(groups)

    def split(self, groups: Mapping[Key, Sequence[Array]]) -> Rows:
        """The keys and arrays of a call, those apart that have to do with rows."""
        sparse = {key: arrays for key, arrays in groups.items() if self._is_sparse(key, arrays)}
        dense = {key: arrays for key, arrays in groups.items() if key not in sparse}
        return Rows(tuple(dense), list(dense.values()), None, list(sparse.items()))

    def _is_sparse(self, key: Key, arrays: Sequence[Array]) -> bool:
        if self._entries[key].table is not None:
            return True
        return any(isinstance(array, RowSparseArray) for array in arrays)

    def blocks_of(self, keys: tuple[Key, ...]) -> Blocks:
        """The blocks of different keys, all on the host."""
        found = self._blocks.get(keys)
        if found is None:
            if len(self._blocks) >= MOST_LISTS:
                self._blocks.clear()
            found = self._blocks[keys] = Blocks([self._entries[key] for key in keys])
        return found

    def forget(self) -> None:
        """A key was deleted or has moved. New keys change nothing about the others."""
        self._blocks.clear()

    def _plain(self, key: Keys, value: Values, *, are_written: bool) -> Rows | None:
        """The rows of a call that needs no further check; else None."""
        is_list = type(key) in (list, tuple)
        keys: tuple[Any, ...] = tuple(key) if is_list else (key,)  # type: ignore[arg-type]
        # True and 1.0 would be found in place of 1.
        kinds = set(map(type, keys))
        if kinds != {str} and kinds != {int}:
            return None
        blocks = self._blocks.get(keys)
        if blocks is None:
            if len(set(keys)) < len(keys) or not all(map(self._is_at_home, keys)):
                return None
            blocks = self.blocks_of(keys)
        rows = blocks.plain_rows(value if is_list else [value], are_written=are_written)
        return None if rows is None else Rows(keys, rows, blocks)

    def _is_at_home(self, key: Key) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.home is HOST and entry.table is None
