"""Check the arrays of a call on a local store, and apply them to its values.

``store.py`` calls this module for all work on values, and its lock guards everything here. NumPy
arrays of the keys' shapes and dtypes need few checks; all others go through the checks of
``stores/arguments.py``, which raise the errors. A call is checked before it changes anything.
Large models are added and updated on all cores (``blocks.py``). The stored arrays are never
returned to callers and never share a caller's memory, except for views (``stores/views.py``): a key
whose view must keep its value moves to other memory. Read next: ``blocks.py``, and ``device.py``
for keys on GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays import Array, adapter_for, adapter_on
from kvstore.arrays.cpu.sums import Flat, Workspaces
from kvstore.arrays.keys import Generations, Key, Keys, UpdateFunction, Values
from kvstore.errors import NotSupportedError
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import follow, has_master, take_over
from kvstore.sparse.array import RowSparseArray
from kvstore.stores.arguments import KeyTable, normalise_keys, spec_of
from kvstore.stores.arguments_sparse import SparseOuts, Wanted, check_dense_outs
from kvstore.stores.local import sparse as local_rows
from kvstore.stores.local.blocks import Blocks, HostArray, Row
from kvstore.stores.local.compression import LocalCompression
from kvstore.stores.local.memory import HOST, Shelves, StoredKey
from kvstore.stores.views import Views, address_of, apart_from, check_viewable

MOST_LISTS = 1000
"""At most this many lists of keys are remembered; then all are forgotten."""


class KeyArrays(NamedTuple):
    """The keys of a call, each once, with their arrays to push or fill."""

    keys: tuple[Key, ...]
    rows: Sequence[Sequence[Array]]
    blocks: Blocks | None = None
    """The blocks of these keys, if all are on the host and ``plain_rows`` accepts all arrays."""
    sparse: Sequence[tuple[Key, Sequence[Array]]] = ()
    """Further keys with their arrays, if the key or one of the arrays is row-sparse."""


class RowReader:
    """Converts a call's arguments to ``KeyArrays``, without changes to the store."""

    def __init__(self, table: KeyTable, entries: Mapping[Key, StoredKey]) -> None:
        self._table = table
        self._entries = entries
        self._blocks: dict[tuple[Key, ...], Blocks] = {}
        self._outs = SparseOuts()

    def pushed(self, key: Keys, value: Values) -> KeyArrays:
        """Check the values of a push and return them. Raises as ``KeyTable.check_push``."""
        found = self._plain(key, value, are_written=False)
        if found is not None:
            return found
        return self.split(self._table.check_push(key, value))

    def filled(self, key: Keys, out: Values, *, ignores_sparse: bool | None = None) -> KeyArrays:
        """Check the arrays that a call fills and return them.

        Raises as ``KeyTable.check_out``. With ``ignores_sparse``, each ``RowSparseArray`` is left
        out, with one warning for each key; with None it raises ``NotSupportedError``.
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

    def split(self, groups: Mapping[Key, Sequence[Array]]) -> KeyArrays:
        """Return the keys and arrays of a call, with row-sparse ones in a separate list."""
        sparse = {key: arrays for key, arrays in groups.items() if self._is_sparse(key, arrays)}
        dense = {key: arrays for key, arrays in groups.items() if key not in sparse}
        return KeyArrays(tuple(dense), list(dense.values()), None, list(sparse.items()))

    def _is_sparse(self, key: Key, arrays: Sequence[Array]) -> bool:
        if self._entries[key].table is not None:
            return True
        return any(isinstance(array, RowSparseArray) for array in arrays)

    def blocks_of(self, keys: tuple[Key, ...]) -> Blocks:
        """Return the blocks of these keys, all different and on the host."""
        found = self._blocks.get(keys)
        if found is None:
            if len(self._blocks) >= MOST_LISTS:
                self._blocks.clear()
            found = self._blocks[keys] = Blocks([self._entries[key] for key in keys])
        return found

    def forget(self) -> None:
        """Drop the cached blocks: a key was deleted or moved."""
        self._blocks.clear()

    def _plain(self, key: Keys, value: Values, *, are_written: bool) -> KeyArrays | None:
        """Return a call's arrays if they need no further checks, else None."""
        is_list = type(key) in (list, tuple)
        keys: tuple[Any, ...] = tuple(key) if is_list else (key,)  # type: ignore[arg-type]
        # Types are checked, since True and 1.0 are equal to 1 in a dict.
        kinds = set(map(type, keys))
        if kinds != {str} and kinds != {int}:
            return None
        blocks = self._blocks.get(keys)
        if blocks is None:
            if len(set(keys)) < len(keys) or not all(map(self._is_at_home, keys)):
                return None
            blocks = self.blocks_of(keys)
        rows = blocks.plain_rows(value if is_list else [value], are_written=are_written)
        return None if rows is None else KeyArrays(keys, rows, blocks)

    def _is_at_home(self, key: Key) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.home is HOST and entry.table is None


class LocalValues:
    """The keys of one store with their values, on the host."""

    def __init__(self) -> None:
        self.table = KeyTable()
        self.entries: dict[Key, StoredKey] = {}
        self.optimizer: Optimizer | None = None
        self.updater: UpdateFunction | None = None
        """A caller's function in place of an optimizer."""
        self.coding: LocalCompression | None = None
        """The codecs of pushed and pulled values; None without compression."""
        self.counters = dict.fromkeys(("pushes", "pulls", "bytes_pushed", "bytes_pulled"), 0)
        self._rows = RowReader(self.table, self.entries)
        self._generations = Generations()
        self._shelves = Shelves()
        self._workspaces = Workspaces()
        self.views = Views(self._leave_to_view)

    # -- keys --------------------------------------------------------------------------

    def add(self, values: dict[Key, Array]) -> None:
        """Add new keys with copies of these values."""
        specs = {key: spec_of(array) for key, array in values.items()}
        hosts = {
            key: array if isinstance(array, RowSparseArray) else adapter_for(array).to_host(array)
            for key, array in values.items()
        }
        for key, host in hosts.items():
            generation = self._generations.following(key)
            if isinstance(host, RowSparseArray):
                self.entries[key] = local_rows.new_entry(key, host, generation)
            else:
                self.entries[key] = self._shelves.place(key, host, generation)
            self._generations.begin(key)
        row_sparse = [key for key, host in hosts.items() if isinstance(host, RowSparseArray)]
        self.table.add(specs, row_sparse)

    def remove(self, keys: Sequence[Key]) -> None:
        """Delete existing keys."""
        self.views.forget(keys)
        self.table.remove(keys)
        for key in keys:
            self.entries.pop(key, None)
            self._generations.end(key)
        self._rows.forget()
        if self.coding is not None:
            self.coding.forget(keys)

    def free(self) -> None:
        """Free all values; the table of keys stays."""
        self.views.forget()
        self.entries.clear()
        self._rows.forget()
        self._shelves = Shelves()

    # -- optimizer and updater ---------------------------------------------------------

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Set the optimizer of later updates; keep compatible states."""
        updated = [entry for entry in self.entries.values() if entry.state is not None]
        taken = [self._taken_over(entry, optimizer) for entry in updated]
        for entry, (state, count) in zip(updated, taken, strict=True):
            entry.keep_state(state, count)
        self._set_optimizer_of_rows(optimizer)
        self.optimizer = optimizer
        self.updater = None

    def _taken_over(self, entry: StoredKey, optimizer: Optimizer) -> tuple[tuple[Flat, ...], int]:
        with adapter_on(entry.home).on(entry.home):
            return take_over(optimizer, self.optimizer, entry.flat, entry.state or (), entry.count)

    def set_updater(self, updater: UpdateFunction) -> None:
        """Update by a caller's function from now on."""
        self.updater = updater
        self.optimizer = None
        for entry in self.entries.values():
            entry.keep_state(None, 0)
        self._set_optimizer_of_rows(None)

    def _set_optimizer_of_rows(self, optimizer: Optimizer | None) -> None:
        for entry in self.entries.values():
            if entry.table is not None:
                entry.table.set_optimizer(optimizer)

    # -- calls -------------------------------------------------------------------------

    def push(self, key: Keys, value: Values) -> None:
        """Do the work of ``KVStore.push``."""
        coding = self.coding
        pushed = (
            self._rows.pushed(key, value) if coding is None else self._encoded(coding, key, value)
        )
        self.views.end([*pushed.keys, *dict(pushed.sparse)])
        self._merge(pushed)

    def pull(self, key: Keys, out: Values | None, *, ignores_sparse: bool) -> Any:
        """Do the work of ``KVStore.pull``, without versions."""
        if out is not None:
            out, _ = self.views.opened(key, out)
            filled = self._rows.filled(key, out, ignores_sparse=ignores_sparse)
            self._fill(self._without_shown(filled))
            return None
        keys, single = normalise_keys(key)
        for item in keys:
            self.table.spec(item)
        came = self._decoded(keys)
        copies = [_copy(self.entries[item]) for item in keys]
        for item, copy in zip(keys, copies, strict=True):
            if item in came:
                adapter_for(copy).assign(came[item], copy)
        self._count("pulls", keys)
        return copies[0] if single else copies

    def pushpull(self, key: Keys, value: Values, out: Values) -> None:
        """Do the work of ``KVStore.pushpull``; check all arguments before any change."""
        coding = self.coding
        out, renewed = self.views.opened(key, out)
        if coding is None:
            pushed, filled = self._rows.pushed(key, value), self._rows.filled(key, out)
        else:
            filled = self._rows.filled(key, out)
            pushed = self._encoded(coding, key, value)
        self.views.end([*pushed.keys, *dict(pushed.sparse)], renewed)
        if renewed:  # the same call may push their memory
            values = [
                entry.weight
                for entry in map(self.entries.__getitem__, renewed)
                if entry.home is HOST
            ]
            pushed = pushed._replace(rows=apart_from(values, pushed.rows))
        is_plain = pushed.blocks and filled.blocks and self.updater is None and not renewed
        if is_plain and not (coding is not None and coding.encodes_pulls):
            assert filled.blocks is not None
            self._merge(pushed, filled.rows)
            self._count("pulls", filled.keys, filled.blocks)
        else:
            self._merge(pushed)
            # Blocks are for keys on the host; a pushed GPU array may have moved some keys.
            filled = filled if pushed.blocks else filled._replace(blocks=None)
            self._fill(self._without_shown(filled))

    def view(self, keys: Sequence[Key]) -> list[HostArray]:
        """Do the work of ``KVStore.view`` for existing keys, all different."""
        check_viewable(keys, self.table.is_row_sparse)
        for key in keys:
            if self.entries[key].home is not HOST:
                raise NotSupportedError(
                    f"key {key!r} is on {self.entries[key].home}, where its value cannot be shown "
                    "as an array of NumPy; call pull"
                )
        encodes = self.coding is not None and self.coding.encodes_pulls
        shown = {key: found for key in keys if (found := self.views.array(key)) is not None}
        if shown:
            self.pull(list(shown), list(shown.values()), ignores_sparse=False)
        for key in keys:
            entry = self.entries[key]
            if key not in shown:
                is_live = entry.shelf is None and not encodes
                memory = entry.weight if is_live else self.pull(key, None, ignores_sparse=False)
                shown[key] = self.views.add(key, memory, is_live=is_live)
        return [shown[key] for key in keys]

    def _leave_to_view(self, key: Key, memory: HostArray) -> None:
        """Move a key's value to other memory, since a view that ends keeps this memory."""
        entry = self.entries[key]
        if entry.home is HOST:
            entry.set_weight(entry.weight.copy())

    def _without_shown(self, filled: KeyArrays) -> KeyArrays:
        """Leave out the views that show the stored values."""
        if not self.views.by_key:
            return filled
        rows = {
            key: row
            for key, row in zip(filled.keys, filled.rows, strict=True)
            if len(row) > 1 or not _is_weight(row[0], self.entries[key])
        }
        if len(rows) == len(filled.keys):
            return filled
        return KeyArrays(tuple(rows), list(rows.values()), None, filled.sparse)

    def broadcast(self, key: Keys, value: Values, out: Values) -> None:
        """Do the work of ``KVStore.broadcast``."""
        values, filled = self.table.check_broadcast(key, value, out)
        check_dense_outs(filled)
        self.add(values)
        self._fill(self._rows.split(filled))

    def overwrite(self, key: Key, value: Array) -> None:
        """Overwrite a dense key's value, cast to its dtype; its state and count stay."""
        self.views.end([key])
        entry = self.entries[key]
        adapter = adapter_on(entry.home)
        with adapter.on(entry.home):
            adapter.assign(value, entry.weight)
            if entry.state and has_master(entry.spec.dtype):
                if entry.home is HOST:
                    follow(entry.flat, entry.state[-1])
                else:
                    entry.state[-1][...] = entry.flat

    def pull_rows(self, wanted: Sequence[Wanted]) -> list[RowSparseArray | None]:
        """Pull rows of keys; requests without an array return new ones."""
        pulled = [local_rows.pull_rows(self.entries[each.key], each) for each in wanted]
        self.counters["pulls"] += 1
        self.counters["bytes_pulled"] += sum(each.nbytes for each in wanted)
        return pulled

    def _count(self, what: str, keys: Sequence[Key], blocks: Blocks | None = None) -> None:
        nbytes = blocks.nbytes if blocks else sum(self.entries[key].nbytes for key in keys)
        self.counters[what] += 1
        self.counters["bytes_pushed" if what == "pushes" else "bytes_pulled"] += nbytes

    # -- through codecs ----------------------------------------------------------------

    def _encoded(self, coding: LocalCompression, key: Keys, value: Values) -> KeyArrays:
        """Check a call's pushed values; return them after encoding and decoding."""
        groups = self.table.check_push(key, value)
        if self.optimizer is not None:
            for item in groups:
                self.optimizer.check_dtype(self.table.spec(item).dtype)
        return self._rows.pushed(list(groups), coding.passed(groups))

    def _decoded(self, keys: Sequence[Key]) -> dict[Key, Array]:
        """Return the decoded values of the dense keys whose pulls are encoded."""
        if self.coding is None or not self.coding.encodes_pulls:
            return {}
        dense = [key for key in keys if self.entries[key].table is None]
        came = {key: self.coding.pulled(key, self.entries[key].weight) for key in dense}
        return {key: value for key, value in came.items() if value is not None}

    # -- in ----------------------------------------------------------------------------

    def _merge(self, pushed: KeyArrays, outs: Sequence[Row] | None = None) -> None:
        """Add up and update; ``outs``, plain arrays of the keys, get the new values."""
        entries = [self.entries[key] for key in pushed.keys]
        sparse = [self.entries[key] for key, _ in pushed.sparse]
        if self.optimizer is not None:
            for dtype in dict.fromkeys(entry.spec.dtype for entry in (*entries, *sparse)):
                self.optimizer.check_dtype(dtype)
        if pushed.blocks is None:
            self._settle(entries, pushed.rows)
        if self.updater is not None:
            for entry, row in zip(entries, pushed.rows, strict=True):
                self._apply_updater(self.updater, entry, row)
                entry.version += 1
        elif pushed.blocks is None:
            self._apply(entries, pushed.rows)
        else:
            pushed.blocks.apply(pushed.rows, self.optimizer, self._workspaces, outs)
        for entry, (_, arrays) in zip(sparse, pushed.sparse, strict=True):
            self._merge_rows(entry, arrays)
        self._count("pushes", pushed.keys, pushed.blocks)

    def _merge_rows(self, entry: StoredKey, arrays: Sequence[Array]) -> None:
        self.counters["bytes_pushed"] += max(map(local_rows.size_of, arrays))
        if self.updater is not None:
            local_rows.apply_updater(self.updater, entry, arrays)
            return
        workspace = self._workspaces.take()
        local_rows.apply(entry, arrays, self.optimizer, workspace)
        self._workspaces.give(workspace)

    def _settle(self, entries: Sequence[StoredKey], rows: Sequence[Sequence[Array]]) -> None:
        """Choose the device of each key from the arrays of a push."""

    def _apply(self, entries: Sequence[StoredKey], rows: Sequence[Sequence[Array]]) -> None:
        """Merge each key's arrays, of any library, into the key on its device."""
        here, hosts = [], []
        elsewhere: list[tuple[StoredKey, Sequence[Array]]] = []
        for entry, row in zip(entries, rows, strict=True):
            if entry.home is HOST:
                here.append(entry.key)
                hosts.append([adapter_for(array).to_host(array) for array in row])
            else:
                elsewhere.append((entry, row))
        if elsewhere:
            self._apply_elsewhere(elsewhere)
        if here:
            self._rows.blocks_of(tuple(here)).apply(hosts, self.optimizer, self._workspaces)

    def _apply_elsewhere(self, work: Sequence[tuple[StoredKey, Sequence[Array]]]) -> None:
        """Merge arrays into keys that are not on the host, and count the updates."""
        raise NotImplementedError

    def _apply_updater(
        self, updater: UpdateFunction, entry: StoredKey, arrays: Sequence[Array]
    ) -> None:
        """Apply the caller's function to a copy, so that an error changes nothing."""
        adapter = adapter_on(entry.home)
        received = adapter.sum_in_order(arrays, entry.home, entry.spec.dtype)
        local = adapter.copy(entry.weight)
        with adapter.on(entry.home):
            updater(entry.key, received, local)
        entry.set_weight(local)

    # -- out ---------------------------------------------------------------------------

    def _fill(self, filled: KeyArrays) -> None:
        """Write the values into the arrays of a call."""
        came = self._decoded(filled.keys)
        if came:
            self._fill_any([self.entries[key] for key in filled.keys], filled.rows)
            for key, outs in zip(filled.keys, filled.rows, strict=True):
                for out in outs if key in came else ():
                    adapter_for(out).assign(came[key], out)
        elif filled.blocks is None:
            self._fill_any([self.entries[key] for key in filled.keys], filled.rows)
        else:
            filled.blocks.fill(filled.rows)
        for key, outs in filled.sparse:
            local_rows.fill(self.entries[key], outs)
        self._count("pulls", [*filled.keys, *dict(filled.sparse)], filled.blocks)

    def _fill_any(self, entries: Sequence[StoredKey], rows: Sequence[Sequence[Array]]) -> None:
        here: list[Key] = []
        targets: list[list[HostArray]] = []
        written: list[Array] = []
        elsewhere: list[tuple[StoredKey, Sequence[Array]]] = []
        for entry, row in zip(entries, rows, strict=True):
            if entry.home is not HOST:
                elsewhere.append((entry, row))
                continue
            here.append(entry.key)
            targets.append([])
            for out in row:
                target = _memory(out)
                if target is None:
                    adapter_for(out).assign(entry.weight, out)
                else:
                    targets[-1].append(target.reshape(entry.spec.shape))
                    written.append(out)
        if elsewhere:
            self._fill_elsewhere(elsewhere)
        try:
            self._rows.blocks_of(tuple(here)).fill(targets)
        finally:
            for out in written:
                adapter_for(out).written(out)

    def _fill_elsewhere(self, work: Sequence[tuple[StoredKey, Sequence[Array]]]) -> None:
        """Write the values of keys that are not on the host into arrays of any library."""
        for entry, row in work:
            for out in row:
                adapter_for(out).assign(entry.weight, out)


def _is_weight(out: Array, entry: StoredKey) -> bool:
    """Return whether an array is the memory of a key's value."""
    here = isinstance(out, np.ndarray) and entry.home is HOST
    return here and address_of(out) == address_of(entry.weight)


def _memory(out: Array) -> HostArray | None:
    """Return an array's memory as a flat array in its dtype, or None."""
    adapter = adapter_for(out)
    memory = adapter.memory(out)
    return None if memory is None else memory.view(adapter.dtype(out))


def _copy(entry: StoredKey) -> Array:
    if entry.table is not None:
        return local_rows.value_of(entry)
    return adapter_for(entry.weight).copy(entry.weight)
