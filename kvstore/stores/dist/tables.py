"""Growing tables of distributed stores: ``create_table`` of dist_sync, dist_async.

Each server has one share of a table: a part on the data plane, with the ids that ``shares_of``
assigns to it. ``sparse_transfer.py`` transfers the rows like those of row-sparse keys, so rounds,
order and delivery are the same as for all keys. All workers make the calls that change a whole
table (creating, closing, setting its optimizer), in the same order and with the same arguments; the
lowest rank sends the requests to the servers. Of paths, only the file names must be equal: the
lowest rank's path is used, and the directory may differ on other hosts. Public calls may come from
any thread except the node's I/O thread. Read next: ``server/rows.py``, the servers' side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays.keys import Key
from kvstore.errors import ArgumentValueError
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.serialize import to_plain
from kvstore.protocol.requests import StoreCall, unpack
from kvstore.sparse.ids import Ids
from kvstore.sparse.payload import RowPayloadKind, payload_bytes
from kvstore.sparse.sums import Picked, RowValues, sum_repeated
from kvstore.sparse.tables.ids import first_appearances, split
from kvstore.sparse.tables.settings import TableSettings, settings_to_plain
from kvstore.sparse.tables.shard import TableStatistics
from kvstore.stores.dist.control_client import Servers
from kvstore.stores.dist.in_flight import Operation
from kvstore.stores.dist.plan import Bucket
from kvstore.stores.dist.sparse_transfer import RowExchange, RowPlacement, RowTarget, pushed, wanted
from kvstore.stores.dist.table_rows import ServerRows
from kvstore.stores.dist.transfer import DenseExchange
from kvstore.stores.tables import StoreTables, Table
from pslite import Future, Postoffice
from pslite.errors import ClosedError, unexpected
from pslite.future import settled
from pslite.ids import Role, node_id

#: The first number of tables' parts, above all numbers that the directory assigns.
FIRST_PART = 1 << 40
_MOST_CALLS = 1 << 20


class StoreCalls(NamedTuple):
    """The calls of a store (``admin.py``) that its tables use."""

    check: Callable[[], None]
    """Raises the error of an earlier push, or ``ClosedError`` if the store is closed."""
    check_may_wait: Callable[[], None]
    wait: Callable[[Future[Any]], Any]
    wait_for_values: Callable[[Operation], None]
    settle: Callable[[], None]
    meet: Callable[[str, Callable[[int], Sequence[Key]]], tuple[int, Any]]
    """Has the lowest rank act once all ranks have called; also returns the call's number."""
    keep_to_window: Callable[[Bucket], None]
    note_error: Callable[[Future[None]], None]
    is_closed: Callable[[], bool]


class DistTables(StoreTables["DistTable"]):
    """The tables of a store on one worker."""

    def __init__(
        self, node: Postoffice, exchange: DenseExchange, servers: Servers, store: StoreCalls
    ) -> None:
        super().__init__()
        self.node = node
        self.exchange = exchange
        self.servers = servers
        self.store = store
        self.rows = RowExchange(node, exchange)
        self.num_shares = node.config.num_servers

    def create(self, name: object, dim: object, optimizer: object, **options: Any) -> DistTable:
        """Create a table on all servers and return it. Raises the errors of ``_checked``."""
        self.store.check_may_wait()
        options["num_shares"] = self.num_shares
        settings, chosen = self._checked(name, dim, optimizer, **options)
        plain = [] if chosen is None else to_plain(chosen)
        self._check_row_fits(settings)
        self.store.settle()
        shown = settings_to_plain(settings)

        def make(call: int) -> None:
            parts = self.parts_of(call)
            self.store.wait(self.servers.make_table(parts, shown, plain))

        call = self.together(f"create_table({_named(shown, plain)})", make)
        table = self._tables[settings.name] = DistTable(self, settings, chosen, self.parts_of(call))
        self.exchange.tables[table.title] = table.parts
        return table

    def _check_row_fits(self, settings: TableSettings) -> None:
        most_bytes = self.node.config.max_message_bytes
        if payload_bytes(1, 8, settings.dim * settings.dtype.itemsize) > most_bytes:
            raise ArgumentValueError(
                f"a row of {settings.dim} {settings.dtype} numbers does not fit in a message of "
                f"PS_MAX_MESSAGE_BYTES ({most_bytes}) bytes; choose a smaller dim, or raise "
                "PS_MAX_MESSAGE_BYTES on all nodes"
            )

    def parts_of(self, call: int) -> range:
        """Return a table's parts, one for each server.

        ``call`` is the number of the call that created the table.
        """
        first = FIRST_PART + (self.servers.number * _MOST_CALLS + call) * self.num_shares
        return range(first, first + self.num_shares)

    def together(self, name: str, act: Callable[[int], None]) -> int:
        """Have the lowest rank ``act`` with the call's number once all ranks have called.

        Returns that number.
        """

        def carry_out(call: int) -> Sequence[Key]:
            act(call)
            return ()  # no keys are deleted

        return self.store.meet(name, carry_out)[0]

    def forget(self, table: DistTable) -> None:
        super().forget(table)
        self.exchange.remove_table(table.title)


class DistTable(Table):
    """A table whose rows are on the servers."""

    def __init__(
        self,
        owner: DistTables,
        settings: TableSettings,
        optimizer: Optimizer | None,
        parts: range,
    ) -> None:
        self.parts = parts
        title = f"table {settings.name!r}"
        targets = [
            RowTarget(node_id(Role.SERVER, rank), part, 8) for rank, part in enumerate(parts)
        ]
        self._home = RowPlacement(
            title, targets, settings.dim, settings.dtype, lambda ids: split(ids, len(parts))
        )
        self._pages = owner.servers.pages(self._home)
        most_bytes = owner.node.config.max_message_bytes
        super().__init__(settings, optimizer, ServerRows(self._pages, owner.store.wait, most_bytes))
        self._owner = owner
        self._is_closed = False

    @property
    def _keys(self) -> Bucket:
        """The table, as a call names it; rows are never encoded."""
        return Bucket((self.title,), coding=self._owner.exchange.coding)

    # -- properties ----------------------------------------------------------------------

    @property
    def size(self) -> int:
        return self.statistics().rows

    def statistics(self) -> TableStatistics:
        self._check()
        self._settle()
        replies = self._owner.store.wait(self._pages.ask_each(StoreCall.TABLE_STATS))
        return _summed([_statistics_in(reply.body) for reply in replies])

    def __repr__(self) -> str:
        """Return ``<table 'user': rows of 32 float32 on 2 servers>``; never raise."""
        rows = "closed" if self._is_closed else "rows"
        return (
            f"<table {self.name!r}: {rows} of {self.dim} {self.dtype} on {len(self.parts)} servers>"
        )

    # -- rows ----------------------------------------------------------------------------

    @contextmanager
    def _call(self) -> Iterator[None]:
        self._check()
        yield

    def _pull(self, ids: Ids, out: RowValues, *, touches: bool) -> None:
        unique, inverse = _different(ids)
        if not len(unique):
            return
        rows = out if inverse is None else np.empty((len(unique), self.dim), self.dtype)
        kind = RowPayloadKind.WANTED if touches else RowPayloadKind.LOOK
        self._owner.store.wait_for_values(self.begin_pull(unique, rows, kind))
        self._owner.store.check()  # raises if an earlier push failed: the rows lack it
        if inverse is not None:
            np.take(rows, inverse, axis=0, out=out, mode="clip")

    def begin_pull(self, ids: Ids, into: RowValues, kind: RowPayloadKind) -> Operation:
        """Begin to pull the rows of distinct ids into an array. Any thread may call it."""
        most_bytes = self._owner.node.config.max_message_bytes
        items = list(wanted(self._home, ids, into, most_bytes, kind))
        return self._owner.rows.begin(self._keys, items, 0, {})

    def _push(self, ids: Ids, gradients: RowValues) -> None:
        unique, inverse = _different(ids)
        rows = gradients if inverse is None else sum_repeated(inverse, gradients).values
        send = self._prepare_push(unique, rows)
        self._owner.store.keep_to_window(self._keys)
        send().on_error(self._owner.store.note_error)

    def begin_push(self, ids: Ids, rows: RowValues) -> Operation:
        """Begin to push copies of gradients of distinct ids. Any thread may call it."""
        return self._prepare_push(ids, rows)()

    def _prepare_push(self, ids: Ids, rows: RowValues) -> Callable[[], Operation]:
        found = pushed(self._home, Picked(ids, rows))
        items = list(self._owner.rows.fitting(self.title, found))
        return lambda: self._owner.rows.begin(self._keys, items, 0, None)

    def _use(self, optimizer: Optimizer) -> None:
        plain = to_plain(optimizer)
        store = self._owner.store

        def tell(_: int) -> None:
            for only_check in (True, False):
                store.wait(self._pages.ask_each(StoreCall.TABLE_OPTIMIZER, only_check, plain))

        self._together(f"set_optimizer of {self.title} ({plain})", tell)

    def _together(self, name: str, act: Callable[[int], Any]) -> Any:
        self._owner.store.settle()
        return self._owner.together(name, act)

    def close(self) -> None:
        owner = self._owner
        if self._is_closed or owner.store.is_closed():
            return
        owner.store.check_may_wait()
        drop = owner.servers.drop_table
        self._together(f"close of {self.title}", lambda _: owner.store.wait(drop(self.parts)))
        self._is_closed = True
        owner.forget(self)

    # -- inside --------------------------------------------------------------------------

    def _check(self) -> None:
        self._owner.store.check_may_wait()
        if self._is_closed:
            raise ClosedError(f"{self.title} is closed; call create_table again")

    def _settle(self) -> None:
        exchange = self._owner.exchange
        self._owner.store.wait(settled(exchange.unfinished([self.title])))
        self._owner.store.check()


def _different(ids: Ids) -> tuple[Ids, Ids | None]:
    """Return the distinct ids, and each id's index among them (None: all differ)."""
    if not len(ids):
        return ids, None
    unique, inverse = first_appearances(ids)
    return (ids, None) if len(unique) == len(ids) else (unique, inverse)


def _named(settings: Sequence[Any], optimizer: Sequence[Any]) -> str:
    name, dim, dtype, init, number, capacity, ttl, admit_after, seed = settings
    return (
        f"{name!r}, {dim}, init={init}({number}), optimizer={optimizer or None}, "
        f"capacity={capacity}, ttl={ttl}, admit_after={admit_after}, dtype={dtype}, seed={seed}"
    )


def _statistics_in(body: bytes) -> TableStatistics:
    try:
        (fields,) = unpack(body, list)
        return TableStatistics(*fields)
    except TypeError as error:
        number = len(TableStatistics._fields)
        raise unexpected(f"statistics of a table, {number} numbers", fields) from error


def _summed(found: Sequence[TableStatistics]) -> TableStatistics:
    """Return the sum of all shares' statistics; each share counts all pushes."""
    sums: dict[str, Any] = {
        name: sum(getattr(each, name) for each in found)
        for name in TableStatistics._fields
        if name not in ("capacity", "limit_bytes", "pushes")
    }
    for name in ("capacity", "limit_bytes"):
        parts = [getattr(each, name) for each in found]
        sums[name] = None if None in parts else sum(parts)
    return TableStatistics(**sums, pushes=max(each.pushes for each in found))
