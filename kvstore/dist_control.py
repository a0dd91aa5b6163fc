"""The control side of the distributed stores: keys, optimizers, files, the cluster.

``DistControl`` is what ``DistKVStore`` (``dist.py``) builds on, which moves the values. What
is asked of servers and directory stands in ``servers.py``. Public calls may come from any
thread but the node's I/O thread, on which only calls that return futures work.
"""

from __future__ import annotations

import itertools
import pathlib
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from kvstore.atomicfile import checked_path
from kvstore.base import CompressionParams, KeyInfo, KVStore, Path, check_optimizer
from kvstore.coding import Coding
from kvstore.commands import check_command
from kvstore.compression import Compression
from kvstore.errors import (
    NotSupportedError,
    OptimizerMismatch,
    OptimizerNotSet,
    UnknownOptimizerError,
)
from kvstore.exchange import Exchange
from kvstore.keys import (
    Key,
    Keys,
    KeySpec,
    KeyTable,
    UpdateFunction,
    normalise_keys,
    single_key,
)
from kvstore.operation import UnderWay
from kvstore.optimizer.base import Number, Optimizer
from kvstore.optimizer.plain import to_plain
from kvstore.progress import progress_of
from kvstore.protocol import CLOSING, KeyEntry
from kvstore.residual_files import path_beside_states, path_in_checkpoint, remove_beyond
from kvstore.saving import (
    Checkpoint,
    Content,
    Piece,
    SavedStates,
    write_checkpoint,
    write_states,
)
from kvstore.servers import HostValue, Servers
from kvstore.sparse.array import RowSparseArray
from kvstore.waiting import Waiter
from pslite import WORKER_GROUP, Future, Postoffice
from pslite.errors import ClosedError, PSError
from pslite.future import completed, settled
from pslite.ids import group_members

_store_numbers: weakref.WeakKeyDictionary[Postoffice, Iterator[int]] = weakref.WeakKeyDictionary()
"""Stores of a node are numbered in the order of creation, which is the same on all workers."""

#: Another worker's ``set_optimizer`` may be on its way to the servers while this one asks.
_READ_BACK_TRIES = 20


class DistControl(KVStore):
    """All of a distributed store but the calls that move values."""

    def __init__(self, name: str, node: Postoffice, *, synchronous: bool) -> None:
        self._name = name
        self._node = node
        self._synchronous = synchronous
        number = next(_store_numbers.setdefault(node, itertools.count(1)))
        self._servers = Servers(node, number, synchronous=synchronous)
        self._exchange = Exchange(node)
        self._waiter = Waiter(node)
        self._progress = progress_of(node)
        #: Calls of ``init`` that are not over, whatever their keys.
        self._inits = UnderWay()
        self._table = KeyTable()
        self._optimizer: Optimizer | None = None
        # Of an asynchronous store: another worker's may be of a class that is unknown here.
        self._has_optimizer = False
        self._optimizer_calls = 0
        self._meetings = 0
        self._late_error: BaseException | None = None
        self._is_closed = False

    # -- what it is --------------------------------------------------------------------

    @property
    def type(self) -> str:
        return self._name

    @property
    def rank(self) -> int:
        return self._node.rank

    @property
    def node(self) -> Postoffice:
        """This process's node, on which other stores may be made (``create_dist``)."""
        return self._node

    @property
    def num_workers(self) -> int:
        return self._node.config.num_workers

    # -- optimizers --------------------------------------------------------------------

    def set_optimizer(self, optimizer: Optimizer) -> None:
        optimizer = check_optimizer(optimizer)
        self._check_may_wait()
        self._wait(self.set_optimizer_async(optimizer))

    def set_optimizer_async(self, optimizer: Optimizer) -> Future[None]:
        """``set_optimizer``; what was pushed before belongs to the optimizer before."""
        self._check()
        plain = to_plain(optimizer)  # a call that raises here is none, so it has no number
        self._optimizer_calls += 1
        call = self._optimizer_calls

        def remember(_: None) -> None:
            self._optimizer = optimizer

        pushed = settled(self._exchange.pushes.of())
        return pushed.then(lambda _: self._servers.set_optimizer(plain, call)).map(remember)

    def set_optimizer_params(self, **numbers: Number) -> None:
        # Not what the servers use now: another rank may be some calls ahead of this one.
        optimizer = self._optimizer or self.current_optimizer()
        self.set_optimizer(optimizer.replace(**numbers))

    def current_optimizer(self) -> Optimizer:
        optimizer = self._optimizer_of_servers()
        if optimizer is None:
            raise OptimizerNotSet("no optimizer is set: call set_optimizer first")
        return optimizer

    def _optimizer_of_servers(self) -> Optimizer | None:
        self._check()
        for _ in range(_READ_BACK_TRIES):
            found = self._wait(self._servers.optimizers())
            if all(optimizer == found[0] for optimizer in found):
                return found[0] if found else None
        raise OptimizerMismatch(f"the servers use different optimizers: {found}")

    def set_updater(self, updater: UpdateFunction) -> None:
        raise NotSupportedError(
            "servers never run code that a worker sends: set_updater is for stores in one "
            "process. Register an optimizer in a module that the servers import "
            "(--server-import), or let the store only add up and update on the workers"
        )

    # -- compression -------------------------------------------------------------------

    def set_gradient_compression(self, compression_params: CompressionParams) -> None:
        compression = Compression.of(compression_params)
        self._check_may_wait()
        coding = None
        if compression.rules:
            coding = Coding(compression, self._exchange.entries, self.num_workers)
        plain = compression.plain()

        def tell() -> Sequence[Key]:
            entries = list(self._exchange.entries.values())
            self._wait(self._servers.set_compression(plain, entries, coding))
            return ()

        with self._exchange.changing_coding():
            self._settle()
            self._together(f"set_gradient_compression({plain})", tell)
            self._exchange.set_coding(coding)

    # -- keys --------------------------------------------------------------------------

    def keys(self) -> list[Key]:
        self._check()
        return self._table.keys()

    def info(self, key: Key) -> KeyInfo:
        self._check()
        key = single_key(key)
        spec = self._table.spec(key)
        entry = self._exchange.entries[key]
        stype = RowSparseArray.stype if entry.is_row_sparse else "default"
        return KeyInfo(*spec, spec.nbytes, len(entry.servers), entry.generation, stype)

    def delete(self, key: Keys) -> None:
        self._check_may_wait()
        keys, _ = normalise_keys(key)
        for item in keys:
            self._table.spec(item)
        self._settle()

        def delete() -> Sequence[Key]:
            self._wait(self._servers.delete([self._exchange.entries[item] for item in keys]))
            return keys

        self._together(f"delete({_named(keys)})", delete)
        self._table.remove(keys)
        self._exchange.remove(keys)

    # -- files -------------------------------------------------------------------------

    def save_checkpoint(self, directory: Path) -> None:
        directory = checked_path(directory)
        self._save_residuals(partial(path_in_checkpoint, directory))
        self._save(
            lambda contents, optimizer, pieces: write_checkpoint(
                directory, contents, optimizer, pieces
            )
        )

    def save_optimizer_states(self, fname: Path, dump_optimizer: bool = False) -> None:
        fname = checked_path(fname)
        self._save_residuals(partial(path_beside_states, fname))
        self._save(
            lambda contents, optimizer, pieces: write_states(
                fname, contents, optimizer, pieces, dump_optimizer=dump_optimizer
            )
        )

    def _save_residuals(self, path_of: Callable[[int], pathlib.Path]) -> None:
        self._check()
        if self._servers.decides:
            remove_beyond(path_of, self.num_workers)
        path = path_of(self.rank)
        coding = self._exchange.coding
        if coding is None:
            path.unlink(missing_ok=True)  # of an earlier save
        else:
            coding.save(path)

    def _load_residuals(self, path: pathlib.Path) -> None:
        coding = self._exchange.coding
        if coding is not None:
            coding.load(path)

    def _save(self, write: Callable[[Any, Optimizer | None, Any], None]) -> None:
        self._check()
        if not self._servers.decides:
            return
        self._settle()
        optimizer = self._optimizer_of_servers()
        dense, row_sparse = self._entries()
        held = [self._servers.rows.held(entry, self._wait) for entry in row_sparse]
        pieces = [self._servers.rows.read(each, optimizer, self._wait) for each in held]
        contents = self._contents() | {each.entry.key: each.content for each in held}
        write(
            contents,
            optimizer,
            itertools.chain(self._servers.read(dense, optimizer, self._wait), *pieces),
        )

    def _entries(self) -> tuple[list[KeyEntry], list[KeyEntry]]:
        """The dense keys, and the row-sparse ones."""
        entries = self._exchange.entries.values()
        dense = [entry for entry in entries if not entry.is_row_sparse]
        return dense, [entry for entry in entries if entry.is_row_sparse]

    def load_checkpoint(self, directory: Path) -> None:
        directory = checked_path(directory)

        def load() -> Sequence[Key]:
            with Checkpoint(directory) as saved:
                optimizer = saved.states.optimizer or self._optimizer_of_servers()
                saved.check(self._contents())
                saved.states.check(self._contents(), optimizer)
                if optimizer is not None:
                    self.set_optimizer(optimizer)
                missing = {k: spec for k, spec in saved.specs.items() if k not in self._table}
                empty = [
                    (RowSparseArray.zeros if saved.is_row_sparse(key) else np.zeros)(*spec)
                    for key, spec in missing.items()
                ]
                self._wait(self._init(missing, empty))

                def read(key: Key, start: int, stop: int) -> Piece:
                    return saved.read(key, start, stop, optimizer)

                self._write(read, saved.states, optimizer)
            return ()

        self._check_may_wait()
        self._settle()
        entries = self._together("load_checkpoint", load)
        self._add([entry for entry in entries if entry.key not in self._table])
        self._adopt_optimizer()
        self._load_residuals(path_in_checkpoint(directory, self.rank))

    def load_optimizer_states(self, fname: Path) -> None:
        fname = checked_path(fname)

        def load() -> Sequence[Key]:
            with SavedStates(fname, takes_rows=True) as saved:
                optimizer = saved.optimizer or self._optimizer_of_servers()
                saved.check(self._contents(), optimizer)
                if optimizer is not None:
                    self.set_optimizer(optimizer)

                def read(key: Key, start: int, stop: int) -> Piece:
                    return Piece(key, start, None, *saved.read(key, start, stop, optimizer))

                self._write(read, saved, optimizer)
            return ()

        self._check_may_wait()
        self._settle()
        self._together("load_optimizer_states", load)
        self._adopt_optimizer()
        self._load_residuals(path_beside_states(fname, self.rank))

    def _write(
        self,
        read: Callable[[Key, int, int], Piece],
        states: SavedStates,
        optimizer: Optimizer | None,
    ) -> None:
        """Have the servers take over what ``read`` gives of every key."""
        dense, row_sparse = self._entries()
        self._servers.write(dense, optimizer, read, self._wait)
        for entry in row_sparse:
            self._servers.rows.write(entry, states.rows_of(entry.key), read, self._wait)

    def _adopt_optimizer(self) -> None:
        """Note the optimizer that the deciding rank may have loaded."""
        self._optimizer = None  # where it cannot be made: asked for when it is needed
        with suppress(UnknownOptimizerError):
            self._optimizer = self._wait(self._servers.declared_optimizer())

    def _contents(self) -> dict[Key, Content]:
        """What there is of each key; of row-sparse ones without their rows."""
        no_rows = np.empty(0, np.int64)
        return {
            key: Content(entry.spec, len(entry.servers), no_rows if entry.is_row_sparse else None)
            for key, entry in self._exchange.entries.items()
        }

    # -- the cluster -------------------------------------------------------------------

    def barrier(self) -> None:
        self._check_may_wait()
        self._wait(self._node.barrier(WORKER_GROUP))

    def placement(self) -> dict[int, dict[Key, int]]:
        self._check()
        placed: dict[int, dict[Key, int]] = {r: {} for r in range(self._node.config.num_servers)}
        for key, entry in self._exchange.entries.items():
            for nbytes, server in zip(entry.part_bytes(), entry.servers, strict=True):
                placed[server][key] = placed[server].get(key, 0) + nbytes
        return placed

    def stats(self) -> dict[str, Any]:
        self._check()
        store: dict[str, Any] = {"keys": len(self._table.keys()), **self._exchange.counters}
        store["unfinished"] = len(self._exchange.unfinished())
        coding = self._exchange.coding
        if coding is not None:
            store["compression"] = coding.compression.statistics.plain()
        return {"store": store, "servers": self._wait(self._servers.stats())}

    def num_dead_node(self, node_id: int = 7, timeout: float = 60) -> int:
        self._check()
        config = self._node.config
        asked = group_members(node_id, config.num_workers, config.num_servers)
        gone = list(self._node.membership.gone.items())
        return sum(1 for node, loss in gone if node in asked and not loss.left)

    def send_command_to_servers(self, head: int, body: str = "") -> list[str]:
        check_command(head, body)
        self._check_may_wait()
        answers: list[str] = self._wait(self._servers.command(int(head), body))
        return answers

    def close(self) -> None:
        if self._is_closed:
            return
        if self._late_error is not None:
            self._node.log.warn(f"a push had failed: {self._late_error}")
        self._is_closed = True
        self._meetings += 1
        call = self._meetings

        def free(news: bytes | None) -> Future[Any]:
            entries = dict(self._exchange.entries)
            self._exchange.remove(list(entries))
            for title in list(self._exchange.tables):
                self._exchange.remove_table(title)
            if news is not None:
                return completed(None)
            freed = self._servers.close(entries.values())
            return freed.then(lambda _: self._servers.report(call, list(entries)))

        # Once all workers have closed it, its memory on the servers is freed. Nobody waits.
        with suppress(PSError):
            unfinished = settled([*self._exchange.unfinished(), *self._inits.of()])
            unfinished.then(lambda _: self._servers.meet(call, CLOSING)).then(free)

    # -- inside ------------------------------------------------------------------------

    def _specs(self, keys: Sequence[Key]) -> list[KeySpec]:
        return [self._table.spec(key) for key in keys]

    def _init(self, specs: Mapping[Key, KeySpec], hosts: Sequence[HostValue]) -> Future[None]:
        self._exchange.check_coding(self._exchange.coding)
        # Sizes are checked by the directory: a rank that raised here would leave others waiting.
        whole = self._optimizer is not None and self._optimizer.scope == "key"
        made = self._servers.init(
            specs, hosts, self._exchange.entries, self._exchange.coding, whole=whole
        )
        added = made.map(self._add)
        self._inits.add(("",), added)
        return added

    def _add(self, entries: Sequence[KeyEntry]) -> None:
        self._exchange.add(entries)
        row_sparse = [entry.key for entry in entries if entry.is_row_sparse]
        self._table.add({entry.key: entry.spec for entry in entries}, row_sparse)

    def _settle(self) -> None:
        """Wait until nothing of this store is under way; errors are left to who waits for them."""
        self._wait(settled([*self._exchange.unfinished(), *self._inits.of()]))

    def _together(self, name: str, act: Callable[[], Sequence[Key]]) -> list[KeyEntry]:
        """Once all workers have come here, have the lowest rank ``act``; all see its error.

        ``act`` returns the keys that are gone. Returns all keys of the store.
        """
        return self._meet(name, lambda _: act())[1]

    def _meet(self, name: str, act: Callable[[int], Sequence[Key]]) -> tuple[int, list[KeyEntry]]:
        """``_together``, with the number of this call, which is the same on all workers."""
        self._meetings += 1
        call = self._meetings
        meeting = self._servers.meet(call, name)
        try:
            news: bytes | None = self._wait(meeting)
        except BaseException as error:
            self._withdraw(call, meeting, error)
            raise
        if news is None:
            try:
                deleted = act(call)
            except BaseException as error:
                self._servers.report(call, error=error)
                raise
            news = self._wait(self._servers.report(call, deleted))
        entries, self._optimizer_calls = self._servers.news_of(news)
        return call, entries

    def _withdraw(self, call: int, meeting: Future[bytes | None], error: BaseException) -> None:
        """This rank does not wait any more; if it turns out to decide, the others hear of that."""

        def answered(done: Future[bytes | None]) -> None:
            if done.error() is None and done.result(0) is None:
                self._servers.report(call, error=error)

        meeting.on_done(answered)

    def _wait(self, future: Future[Any]) -> Any:
        return self._waiter.wait(future)

    def _check_may_wait(self) -> None:
        self._check()
        self._waiter.check()

    def _check(self) -> None:
        if self._is_closed:
            raise ClosedError(f"this {self._name} store is closed; create a new one")
        error = self._late_error  # read once: another thread may raise it meanwhile
        if error is not None:
            self._late_error = None
            raise error


def _named(keys: Sequence[Key]) -> str:
    """A list of keys for people, which differs when the keys do."""
    if len(keys) <= 5:
        return repr(list(keys))
    return f"{keys[:5]!r} and {len(keys) - 5} more, checksum {zlib.crc32(repr(keys).encode()):08x}"
