"""Row-sparse calls of a distributed store: sum before sending, fill on arrival.

``store.py`` passes the keys that are row-sparse, and those with a row-sparse array to push or fill.
Arguments have been checked (``stores/arguments_sparse.py``); ``sparse_transfer.py`` transfers the
rows. Runs on the caller's thread and may wait for lazy arrays, except ``finish``, which may run on
the I/O thread. Read next: ``sparse_transfer.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvstore.arrays import Array, adapter_for
from kvstore.arrays.keys import Key, KeySpec, width_of
from kvstore.sparse.array import RowSparseArray
from kvstore.sparse.sums import Picked, RowValues, Sum, pick
from kvstore.stores.arguments import KeyTable
from kvstore.stores.arguments_sparse import (
    SparseOuts,
    Wanted,
    contribution_of,
    flat_rows,
    plain_rows,
    row_sparse_of,
)
from kvstore.stores.dist.in_flight import Operation
from kvstore.stores.dist.plan import flat_bytes
from kvstore.stores.dist.sparse_transfer import ReceivedRows, RowDestination, RowExchange
from kvstore.stores.dist.transfer import DenseExchange, noting_versions
from kvstore.stores.lazy import unwrapped
from pslite import Future, Postoffice
from pslite.future import gather


class RowCalls:
    """The row-sparse calls of one store on one worker."""

    def __init__(self, node: Postoffice, exchange: DenseExchange, table: KeyTable) -> None:
        self._exchange = exchange
        self._table = table
        self._buckets = exchange.buckets
        self._rows = RowExchange(node, exchange)
        self.outs = SparseOuts()

    def prepare_push(
        self, groups: Mapping[Key, Sequence[Array]], priority: int
    ) -> Callable[[], Future[Any]]:
        """Copy each key's sum; return a function that pushes the sums, to be called once.

        Errors of arrays and sizes are raised here, so that a call sends everything or nothing.
        """
        without_rows = [key for key in groups if self._is_empty(key)]
        keys = self._buckets.of(tuple(key for key in groups if key not in without_rows))
        pairs = zip(keys.keys, keys.specs, strict=True)
        sums = [_sum_of(groups[key], spec) for key, spec in pairs]
        sends = [self._rows.prepare_push(keys, sums, priority)] if keys.keys else []
        if without_rows:
            nothing = [np.empty(0, np.uint8)] * len(without_rows)
            empty = self._buckets.of(tuple(without_rows))
            sends.append(partial(self._exchange.begin, empty, nothing, None, priority, copy=True))

        def send() -> Future[Any]:
            pushed = [each() for each in sends]
            return pushed[0] if len(pushed) == 1 else gather(pushed)

        return send

    def _is_empty(self, key: Key) -> bool:
        """Return whether a key is dense and has no elements."""
        return not (self._table.is_row_sparse(key) or self._table.spec(key).num_elements)

    def pull(
        self,
        groups: Mapping[Key, Sequence[Array]],
        priority: int,
        versions: dict[int, int],
    ) -> Pulled:
        """Begin to fetch each key's value; the parts' versions go to ``versions``."""
        pulled = Pulled({key: unwrapped(outs) for key, outs in groups.items()})
        sparse = self._buckets.of(tuple(filter(self._table.is_row_sparse, groups)))
        dense = self._buckets.of(tuple(key for key in groups if key not in sparse.keys))
        if sparse.keys:
            operation, pulled.held = self._rows.pull_held(sparse, priority, versions)
            pulled.operations.append(operation)
        if dense.keys:
            pulled.dense = {
                key: np.empty(*spec) for key, spec in zip(dense.keys, dense.specs, strict=True)
            }
            memories = list(map(flat_bytes, pulled.dense.values()))
            operation = self._exchange.begin(
                dense, None, memories, priority, wrap=partial(noting_versions, versions)
            )
            pulled.operations.append(operation)
        return pulled

    def pull_rows(self, wanted: Sequence[Wanted], priority: int) -> PulledRows:
        """Begin to fetch rows; arrays with the same ids share one request."""
        pulled = PulledRows(wanted)
        keys = self._buckets.of(tuple(dict.fromkeys(each.key for each in wanted)))
        pulled.operations.append(self._rows.pull(keys, pulled.landings, priority))
        return pulled


class Pulled:
    """A pull of whole values in flight, for row-sparse keys or arrays."""

    def __init__(self, outs: Mapping[Key, Sequence[Array]]) -> None:
        self._outs = outs
        self.operations: list[Operation] = []
        self.held: list[ReceivedRows] = []
        self.dense: dict[Key, np.ndarray[Any, Any]] = {}

    @property
    def future(self) -> Future[Any]:
        """A future that is done when all values have arrived."""
        return gather(self.operations)

    def finish(self) -> None:
        """Write the received values into the arrays."""
        for held in self.held:
            ids, rows = held.sorted()
            _fill(self._outs[held.entry.key], ids, rows, held.entry.spec)
        for key, value in self.dense.items():
            for out in self._outs[key]:
                if isinstance(out, RowSparseArray):
                    out.assign(np.arange(len(value)), value)
                else:
                    adapter_for(out).assign(value, out)


def _fill(outs: Sequence[Array], ids: Any, rows: RowValues, spec: KeySpec) -> None:
    found = row_sparse_of(ids, rows, spec)
    dense = None
    for out in outs:
        if isinstance(out, RowSparseArray):
            out.assign(found.ids, found.values)
        else:
            dense = found.to_dense() if dense is None else dense
            adapter_for(out).assign(dense, out)


class PulledRows:
    """A ``row_sparse_pull`` in flight.

    Of the arrays with the same ids, the first receives the rows if it is suitable: it has the key's
    dtype and gets each row once, in order of ids.
    """

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self._wanted = wanted
        self.operations: list[Operation] = []
        self.results: list[Any] = [each.out for each in wanted]
        """The array to fill for each request in ``wanted``: the caller's, or a new one."""
        landings: dict[tuple[Key, int], RowDestination] = {}
        self._landing_of: list[RowDestination] = []
        self._is_there: list[bool] = []
        for index, each in enumerate(wanted):
            if each.out is None:
                self.results[index] = RowSparseArray.zeros(*each.spec)
            name = each.key, id(each.unique)
            landing = landings.get(name)
            self._is_there.append(landing is None)
            if landing is None:
                rows = _room(each, self.results[index])
                if rows is None:
                    self._is_there[-1] = False
                    shape = len(each.unique), width_of(each.spec.shape)
                    rows = np.empty(shape, each.spec.dtype)
                landing = landings[name] = RowDestination(each.key, each.unique, rows)
            self._landing_of.append(landing)
        self.landings = list(landings.values())

    def finish(self) -> None:
        """Copy the rows to the arrays that did not receive them directly."""
        for index, each in enumerate(self._wanted):
            if not self._is_there[index]:
                _spread(self._landing_of[index].rows, each, self.results[index])


def _room(wanted: Wanted, out: Array) -> RowValues | None:
    """Return memory of ``out`` for the rows, sorted by id; None if it is not suitable."""
    if isinstance(out, RowSparseArray):
        fits = out.dtype == wanted.spec.dtype
        return flat_rows(out.room_for(wanted.unique)) if fits else None
    if len(wanted.ids) != len(wanted.unique) or wanted.ids is not wanted.unique:
        return None
    return plain_rows(out, wanted.spec)


def _spread(rows: RowValues, wanted: Wanted, out: Array) -> None:
    """Copy rows, one for each different id, to an array that did not receive them."""
    row_shape = wanted.spec.shape[1:]
    if isinstance(out, RowSparseArray):
        out.assign(wanted.unique, rows.reshape(len(rows), *row_shape))
        return
    places = np.searchsorted(wanted.unique, wanted.ids)
    into = plain_rows(out, wanted.spec)
    if into is not None:
        # With mode "raise", NumPy would first copy the rows into its own buffer.
        np.take(rows, places, axis=0, out=into, mode="clip")
    else:
        adapter_for(out).assign(rows[places].reshape(*wanted.shape, *row_shape), out)


def _sum_of(arrays: Sequence[Array], spec: KeySpec) -> Picked:
    """Return the sum of one key's arrays, in its dtype."""
    if len(arrays) == 1 and isinstance(arrays[0], RowSparseArray):
        return pick(arrays[0].ids, flat_rows(arrays[0].values))
    contributions = [contribution_of(array) for array in arrays]
    if len(contributions) == 1:
        return pick(*contributions[0])
    total = Sum(contributions)
    with np.errstate(all="ignore"):
        return pick(total.ids, total.whole().astype(spec.dtype, copy=False))
