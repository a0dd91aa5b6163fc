"""The control calls of distributed stores: keys, optimizers, files, the cluster.

``DistControl`` is the base class of ``DistKVStore`` (``store.py``), which moves the values. The
requests to the servers and the directory are in ``control_client.py``. Public calls may come from
any thread except the node's I/O thread, on which only calls that return futures work.
"""

from __future__ import annotations

import abc
import builtins
import itertools
import math
import pathlib
import types
import weakref
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kvstore.arrays.keys import Key, Keys, KeySpec, UpdateFunction
from kvstore.checkpoint.atomic import checked_path
from kvstore.checkpoint.directory import CheckpointReader, write_checkpoint
from kvstore.checkpoint.optimizer_states import (
    Content,
    HostValue,
    SavedPiece,
    SavedStates,
    write_states,
)
from kvstore.checkpoint.residuals import (
    path_beside_states,
    path_in_checkpoint,
    read_residuals,
    remove_beyond,
    save_residuals,
)
from kvstore.compression import Compression
from kvstore.errors import NotSupportedError, OptimizerNotSet
from kvstore.optimizer.base import Number, Optimizer
from kvstore.optimizer.serialize import check_optimizer
from kvstore.protocol.commands import check_command
from kvstore.protocol.requests import CLOSING, KeyEntry
from kvstore.sparse.array import RowSparseArray
from kvstore.stores.arguments import KeyTable, checked_timeout, normalise_keys, single_key
from kvstore.stores.base import CompressionParams, KeyInfo, KVStore, Path
from kvstore.stores.dist.checkpoint import DistFiles
from kvstore.stores.dist.compression import DistCompression
from kvstore.stores.dist.control_client import Servers
from kvstore.stores.dist.in_flight import InFlight
from kvstore.stores.dist.joint_calls import DistOptimizer, JointCalls
from kvstore.stores.dist.kept_steps import Returning, returning_of
from kvstore.stores.dist.node import Waiter
from kvstore.stores.dist.progress import progress_of
from kvstore.stores.dist.transfer import DenseExchange
from kvstore.stores.steps import StepKeeper
from pslite import WORKER_GROUP, Future, Postoffice
from pslite.errors import ClosedError, PSError
from pslite.future import completed, settled
from pslite.ids import group_members

_SCHEDULERS_WORD_S = 5.0

_store_numbers: weakref.WeakKeyDictionary[Postoffice, Iterator[int]] = weakref.WeakKeyDictionary()
"""Stores of a node are numbered in the order of creation, which is the same on all workers."""


class DistControl(KVStore):
    """A distributed store without the calls that move values."""

    def __init__(self, name: str, node: Postoffice, *, synchronous: bool) -> None:
        self._name = name
        self._node = node
        self._synchronous = synchronous
        number = next(_store_numbers.setdefault(node, itertools.count(1)))
        self._servers = Servers(node, number, synchronous=synchronous)
        self._table = KeyTable()
        self._exchange = DenseExchange(node, self._table, synchronous=synchronous)
        self._waiter = Waiter(node)
        self._progress = progress_of(node)
        #: All unfinished calls of ``init``.
        self._inits = InFlight()
        wait = self._waiter.wait
        returning = returning_of(node)
        self._optimizer = DistOptimizer(self._servers, self._exchange.pushes, wait, returning)
        self._joint_calls = JointCalls(self._servers, wait)
        self._files = DistFiles(self._servers, self._exchange, wait)
        self._late_error: BaseException | None = None
        self._is_closed = False
        returning.add(number, self._joint_calls, self._optimizer)

    # -- what it is --------------------------------------------------------------------

    @property
    def type(self) -> str:
        return self._name

    @property
    def rank(self) -> int:
        return self._node.rank

    @property
    def node(self) -> Postoffice:
        """This process's node, on which other stores can be created (``create_dist``)."""
        return self._node

    @property
    def num_workers(self) -> int:
        return self._node.config.num_workers

    @property
    def _returning(self) -> Returning:
        return returning_of(self._node)

    @property
    def _keeper(self) -> StepKeeper | None:  # type: ignore[override]
        returning = self._returning
        return returning if returning.is_on else None

    @property
    def catches_up(self) -> bool:
        """Whether this process replaces a lost worker and has not come to its step yet."""
        return self._returning.catches_up

    # -- optimizers --------------------------------------------------------------------

    def set_optimizer(self, optimizer: Optimizer) -> None:
        optimizer = check_optimizer(optimizer)
        self._check_may_wait()
        self._wait(self.set_optimizer_async(optimizer))

    def set_optimizer_async(self, optimizer: Optimizer) -> Future[None]:
        """Set the optimizer for later pushes; earlier ones still use the current one."""
        self._check()
        return self._optimizer.set(optimizer)

    def set_optimizer_params(self, **numbers: Number) -> None:
        # Prefer this rank's optimizer to the servers': another rank may be some calls ahead.
        optimizer = self._optimizer.known or self.current_optimizer()
        self.set_optimizer(optimizer.replace(**numbers))

    def current_optimizer(self) -> Optimizer:
        optimizer = self._optimizer_of_servers()
        if optimizer is None:
            raise OptimizerNotSet("no optimizer is set: call set_optimizer first")
        return optimizer

    def _optimizer_of_servers(self) -> Optimizer | None:
        self._check()
        return self._optimizer.in_use()

    def set_updater(self, updater: UpdateFunction) -> None:
        raise NotSupportedError(
            "a dist store does not support set_updater: servers never run code that a worker "
            "sends. Register an optimizer in a module that the servers import "
            "(--server-import), or update on the workers"
        )

    # -- compression -------------------------------------------------------------------

    def set_gradient_compression(self, compression_params: CompressionParams) -> None:
        compression = Compression.of(compression_params)
        self._check_may_wait()
        coding = None
        if compression.rules:
            self._returning.rules_out("its gradients are compressed")
            coding = DistCompression(compression, self._exchange.entries, self.num_workers)
        plain = compression.plain()

        def tell() -> Sequence[Key]:
            entries = list(self._exchange.entries.values())
            self._wait(self._servers.set_compression(plain, entries, coding))
            return ()

        with self._exchange.changing_coding():
            self._settle()
            self._end_views()
            self._together(f"set_gradient_compression({plain})", tell)
            self._exchange.set_coding(coding)

    # -- keys --------------------------------------------------------------------------

    def keys(self) -> list[Key]:
        self._check()
        return self._table.keys()

    def __contains__(self, key: object) -> bool:
        self._check()
        return isinstance(key, Hashable) and key in self._table

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
        self._returning.rules_out("a key was deleted")
        self._settle()
        self._end_views(keys)

        def delete() -> Sequence[Key]:
            self._wait(self._servers.delete([self._exchange.entries[item] for item in keys]))
            return keys

        self._together(f"delete({_named(keys)})", delete)
        self._table.remove(keys)
        self._exchange.remove(keys)

    # -- files -------------------------------------------------------------------------

    def save_checkpoint(self, directory: Path) -> None:
        directory = checked_path(directory)
        self._save(partial(path_in_checkpoint, directory), partial(write_checkpoint, directory))

    def save_optimizer_states(self, fname: Path, dump_optimizer: bool = False) -> None:
        fname = checked_path(fname)
        write = partial(write_states, fname, dump_optimizer=dump_optimizer)
        self._save(partial(path_beside_states, fname), write)

    def _save(
        self,
        residuals_of: Callable[[int], pathlib.Path],
        write: Callable[[Mapping[Key, Content], Optimizer | None, Iterable[SavedPiece]], None],
    ) -> None:
        """Save each worker's residuals; the lowest rank saves the servers' contents."""
        self._check()
        if self._servers.decides:
            remove_beyond(residuals_of, self.num_workers)
        save_residuals(self._exchange.coding, residuals_of(self.rank))
        if not self._servers.decides:
            return
        self._settle()
        optimizer = self._optimizer_of_servers()
        contents, pieces = self._files.held(optimizer)
        write(contents, optimizer, pieces)

    def load_checkpoint(self, directory: Path) -> None:
        directory = checked_path(directory)
        residuals = path_in_checkpoint(directory, self.rank)
        read = partial(CheckpointReader, directory)
        self._load("load_checkpoint", read, residuals, has_values=True)

    def load_optimizer_states(self, fname: Path) -> None:
        fname = checked_path(fname)
        residuals = path_beside_states(fname, self.rank)
        self._load("load_optimizer_states", partial(SavedStates, fname, takes_rows=True), residuals)

    def _load(
        self,
        name: str,
        open_file: Callable[[], SavedStates],
        residuals: pathlib.Path,
        *,
        has_values: bool = False,
    ) -> None:
        """Load each worker's residuals; the lowest rank sends the file to the servers."""

        def load() -> Sequence[Key]:
            with open_file() as saved:
                optimizer = saved.optimizer or self._optimizer_of_servers()
                saved.check(self._files.contents(), optimizer)
                if optimizer is not None:
                    self.set_optimizer(optimizer)
                missing = saved.missing(self._table)
                if missing:
                    specs = {key: saved.specs[key] for key in missing}
                    self._wait(self._init(specs, list(missing.values())))
                self._files.take(saved, optimizer)
            return ()

        self._check_may_wait()
        self._settle()
        if has_values:
            self._end_views()
        read = partial(read_residuals, self._exchange.coding, residuals)
        restore_residuals = self._joint_calls.prepare(name, read)
        entries = self._together(name, load)
        self._add([entry for entry in entries if entry.key not in self._table])
        self._optimizer.adopt()
        restore_residuals()

    # -- the cluster -------------------------------------------------------------------

    def barrier(self, timeout: float | None = None) -> None:
        self._check_may_wait()
        limit_s = checked_timeout(timeout) or self._node.config.stall_timeout_s or math.inf
        # The scheduler ends the barrier for all workers and names the missing ones; the limit here
        # applies only if the scheduler does not answer.
        reached = self._node.barrier(WORKER_GROUP, limit_s)
        self._wait(reached, limit_s + _SCHEDULERS_WORD_S, is_limited=timeout is not None)

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
        store |= self._returning.losses()
        coding = self._exchange.coding
        if coding is not None:
            store["compression"] = coding.compression.statistics.plain()
        return {"store": store, "servers": self._wait(self._servers.stats())}

    def num_dead_node(self, node_id: int = 7, timeout: float = 60) -> int:
        self._check()
        config = self._node.config
        asked = group_members(node_id, config.num_workers, config.num_servers)
        membership = self._node.membership
        lost = {node for node, loss in list(membership.gone.items()) if not loss.left}
        return len(asked & (lost | set(membership.vacant)))

    def send_command_to_servers(self, head: int, body: str = "") -> list[str]:
        check_command(head, body)
        self._check_may_wait()
        answers: list[str] = self._wait(self._servers.command(int(head), body))
        return answers

    def close(self) -> None:
        if self._is_closed:
            return
        try:
            self._hear_of_pushes()
        finally:
            self._leave()

    def __exit__(
        self,
        exception_type: builtins.type[BaseException] | None,
        exception: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        """Close the store; after an exception, do not wait for pushes."""
        if exception is None:
            self.close()
        elif not self._is_closed:
            self._leave()

    def _hear_of_pushes(self) -> None:
        """Wait for the answers to all pushes; raise the error of a failed push."""
        io_queue = self._node.io_queue
        if io_queue.is_forked:
            return
        if io_queue.thread is not None and not io_queue.is_io_thread:
            pushes = self._exchange.pushes.of()
            self._settle()
            for future in pushes:
                error = future.error()
                if error is not None and error is not self._late_error:
                    raise error
        self._check()

    def _leave(self) -> None:
        self._is_closed = True
        self._returning.rules_out("a store was closed", is_told=False)
        call = self._joint_calls.begin()

        def free(news: bytes | None) -> Future[Any]:
            entries = dict(self._exchange.entries)
            self._exchange.remove(list(entries))
            for title in list(self._exchange.tables):
                self._exchange.remove_table(title)
            if news is not None:
                return completed(None)
            freed = self._servers.close(entries.values())
            return freed.then(lambda _: self._servers.report(call, list(entries)))

        # When all workers have closed the store, the servers free its memory. No worker waits.
        with suppress(PSError):
            unfinished = settled([*self._exchange.unfinished(), *self._inits.of()])
            unfinished.then(lambda _: self._servers.meet(call, CLOSING)).then(free)

    # -- inside ------------------------------------------------------------------------

    @abc.abstractmethod
    def _end_views(self, keys: Sequence[Key] | None = None) -> None:
        """End the views of these keys (None: of all)."""

    def _specs(self, keys: Sequence[Key]) -> list[KeySpec]:
        return [self._table.spec(key) for key in keys]

    def _init(self, specs: Mapping[Key, KeySpec], hosts: Sequence[HostValue]) -> Future[None]:
        self._exchange.check()
        # Leave sizes to the directory: if this rank raised here, the others would wait for it.
        scope = self._optimizer.scope
        made = self._servers.init(specs, hosts, self._exchange, scope=scope)
        added = made.map(self._add)
        self._inits.add(("",), added)
        return added

    def _add(self, entries: Sequence[KeyEntry]) -> None:
        self._exchange.add(entries)
        row_sparse = [entry.key for entry in entries if entry.is_row_sparse]
        self._table.add({entry.key: entry.spec for entry in entries}, row_sparse)

    def _settle(self) -> None:
        """Wait until no call of this store is in flight; do not raise their errors."""
        self._wait(settled([*self._exchange.unfinished(), *self._inits.of()]))

    def _together(self, name: str, act: Callable[[], Sequence[Key]]) -> list[KeyEntry]:
        """Wait for all workers, then let the lowest rank ``act``; all ranks get its error.

        ``act`` returns the keys that it has deleted. Returns all keys of the store.
        """
        return self._meet(name, lambda _: act())[1]

    def _meet(self, name: str, act: Callable[[int], Sequence[Key]]) -> tuple[int, list[KeyEntry]]:
        """Do what ``_together`` does; also return the call's number, equal on all workers."""
        call, news = self._joint_calls.make(name, act)
        entries, self._optimizer.num_calls, _ = self._servers.news_of(news)
        return call, entries

    def _learn_keys(self) -> None:
        news = self._wait(self._servers.meet(0, "learn keys"))
        entries = self._servers.news_of(news)[0]
        self._add([entry for entry in entries if entry.key not in self._table])

    def _log_progress(self, text: str) -> None:
        self._node.log.info(0, text)

    def _agree(self, name: str, prepare: Callable[[], Any], act: Callable[[], str]) -> Any:
        prepared = self._joint_calls.prepare(name, prepare)
        _, news = self._joint_calls.make(name, lambda _: (), act)
        return prepared, self._servers.news_of(news)[2]

    def _wait(
        self,
        future: Future[Any],
        timeout_s: float | None = None,
        began_s: float | None = None,
        *,
        is_limited: bool | None = None,
    ) -> Any:
        try:
            return self._waiter.wait(future, timeout_s, began_s, is_limited=is_limited)
        except BaseException as error:
            self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        """Record that the caller gets this error now, so that it is not raised again."""
        self._node.unheard.heard(error)
        if str(self._late_error) == str(error):
            self._late_error = None

    def _check_may_wait(self) -> None:
        self._check()
        self._waiter.check()

    def _check(self) -> None:
        if self._is_closed:
            raise ClosedError(f"this {self._name} store is closed; call kvstore.create again")
        queue = self._node.io_queue
        if queue.is_forked:
            queue.check_process()
        error = self._late_error  # read once: another thread may raise it meanwhile
        if error is not None:
            self._tell(error)
            raise error


def _named(keys: Sequence[Key]) -> str:
    """Return a short text for a list of keys; different lists give different texts."""
    if len(keys) <= 5:
        return repr(list(keys))
    return f"{keys[:5]!r} and {len(keys) - 5} more, checksum {zlib.crc32(repr(keys).encode()):08x}"
