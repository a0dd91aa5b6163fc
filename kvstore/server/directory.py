"""The scheduler's directory of stores, keys and optimizers.

The lowest live rank decides (rank 0 unless it is gone). Its ``init`` sets a key's shape, dtype and
placement; its ``set_optimizer`` sets the optimizer. The same calls of other ranks wait for the
deciding rank's call and are compared with it, in whatever order the ranks make them. The deciding
rank carries out a joint call of all ranks (``delete``, loading) once all have made it.
Pure, except that it sends answers; runs on the scheduler's I/O thread. Next: ``joint_calls.py`` and
``stores/dist/store.py``, which sends the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.arrays.keys import Generations, Key, KeySpec
from kvstore.errors import KeyTypeError, UnknownTypeError, ValueMismatchError
from kvstore.protocol.placement import chunk_ranges, num_chunks, place
from kvstore.protocol.requests import (
    CLOSING,
    MAX_CHUNKS,
    SCOPES,
    Declared,
    DirectoryCall,
    KeyEntry,
    pack,
    pack_entries,
    unpack,
    unpack_entries,
    unpack_specs,
)
from kvstore.server.joint_calls import JointCallCoordinator
from kvstore.server.optimizer_calls import OptimizerCalls
from kvstore.sparse.table import DIRECT_BYTES
from pslite import Config
from pslite.errors import DeadlockError, ProtocolError, PSError, UsageError, rebuild
from pslite.ids import rank_of
from pslite.node.customer import Incoming

#: The most bytes that a message has besides a key's values.
_HEADER_BYTES = 65_536


@dataclass(slots=True)
class _Waiting:
    """A rank's ``init`` call that waits for the deciding rank's call."""

    incoming: Incoming
    rank: int
    specs: list[Declared]
    scope: str
    """The unit that the rank's optimizer needs whole: an element, a row or a key."""


@dataclass(slots=True)
class _Store:
    """One store of the job, as the directory knows it."""

    kind: str
    entries: dict[Key, KeyEntry] = field(default_factory=dict)
    ready: set[Key] = field(default_factory=set)
    """Keys whose first values are on the servers."""
    generations: Generations = field(default_factory=Generations)
    waiting: list[_Waiting] = field(default_factory=list)
    scope: str = "element"
    """The unit that the deciding rank's last ``init`` asked to keep whole."""
    optimizers: OptimizerCalls = field(default_factory=OptimizerCalls)
    joint_calls: JointCallCoordinator = field(default_factory=JointCallCoordinator)


_DECISIONS = frozenset(
    {DirectoryCall.INITIALISED, DirectoryCall.OPTIMIZER_IS_SET, DirectoryCall.DONE_TOGETHER}
)
"""Requests that only the deciding rank, the lowest live one, may send."""


class Directory:
    """Answers the requests of ``DirectoryCall``."""

    def __init__(
        self,
        num_servers: int,
        chunk_bytes: int,
        live_ranks: Callable[[], Sequence[int]],
        max_message_bytes: int = Config.max_message_bytes,
        find_shares: Callable[[], Sequence[float] | None] = lambda: None,
    ) -> None:
        """Make an empty directory.

        ``find_shares`` is called once, for the first keys; if it returns None, shares are equal.
        """
        self._loads = [0] * num_servers
        self._chunk_bytes = chunk_bytes
        self._max_message_bytes = max_message_bytes
        self._live_ranks = live_ranks
        self._find_shares = find_shares
        self._shares: Sequence[float] | None = None
        self._stores: dict[int, _Store] = {}
        self._decider = 0
        self._next_part = 1
        self._calls: dict[int, Callable[[Incoming], None]] = {
            DirectoryCall.DECLARE: self._declare,
            DirectoryCall.INITIALISED: self._initialised,
            DirectoryCall.OPTIMIZER_IS_SET: self._optimizer_is_set,
            DirectoryCall.SAME_OPTIMIZER: self._same_optimizer,
            DirectoryCall.OPTIMIZER_OF: self._optimizer_of,
            DirectoryCall.TOGETHER: self._together,
            DirectoryCall.DONE_TOGETHER: self._done_together,
        }

    def handle(self, incoming: Incoming) -> None:
        """Handle one request; its answer may be sent later."""
        call = self._calls.get(incoming.head)
        if call is None:
            raise ProtocolError(f"unknown call {incoming.head} to the directory")
        rank, first = rank_of(incoming.sender), self._deciding_rank()
        if incoming.head in _DECISIONS and rank > first:
            name = DirectoryCall(incoming.head).name
            raise UsageError(
                f"{name} came from worker {rank}, but only worker {first} (the lowest rank) may "
                "send it"
            )
        call(incoming)

    def state(self) -> list[Any] | None:
        """Return all as plain data, for ``resume``; None if a request waits."""
        stores = []
        for number, store in self._stores.items():
            optimizers, joint_calls = store.optimizers.state(), store.joint_calls.state()
            if store.waiting or optimizers is None or joint_calls is None:
                return None
            entries = pack_entries(list(store.entries.values()))
            ready = [key for key in store.entries if key in store.ready]
            of_keys = [entries, ready, store.generations.state()]
            stores.append([number, store.kind, store.scope, *of_keys, optimizers, joint_calls])
        shares = None if self._shares is None else list(self._shares)
        return [self._loads, shares, self._decider, self._next_part, stores]

    def resume(self, state: Sequence[Any]) -> None:
        """Go on from what ``state`` has returned."""
        self._loads, self._shares, self._decider, self._next_part, stores = state
        for number, kind, scope, entries, ready, generations, optimizers, joint_calls in stores:
            store = self._stores[number] = _Store(kind, scope=scope, ready=set(ready))
            store.entries = {entry.key: entry for entry in unpack_entries(entries)}
            store.generations.resume(generations)
            store.optimizers.resume(optimizers)
            store.joint_calls.resume(joint_calls)

    def departed(self) -> None:
        """Handle the loss of a worker; the next rank may have to decide now."""
        live = list(self._live_ranks())
        decider = min(live, default=0)
        for store in self._stores.values():
            store.joint_calls.departed(live)
        if decider == self._decider:
            return
        self._decider = decider
        for number, store in self._stores.items():
            waiting, store.waiting = store.waiting, []
            for entry in waiting:
                self._take_declaration(number, store, entry)
            store.optimizers.fail_waiting(
                UsageError(
                    "the worker with the lowest rank left the job before it called "
                    "set_optimizer; call set_optimizer on the worker that now has the lowest "
                    "rank"
                )
            )

    def returned(self, rank: int) -> None:
        """Go on with another process of a lost worker, which will ask again."""
        for store in self._stores.values():
            store.waiting = [entry for entry in store.waiting if entry.rank != rank]
            store.optimizers.returned(rank)
            store.joint_calls.returned(rank)

    def deadlocked(self, error: DeadlockError) -> None:
        """Fail all waiting requests: the events that they need cannot happen."""
        for store in self._stores.values():
            waiting, store.waiting = store.waiting, []
            for entry in waiting:
                entry.incoming.fail(error)
            store.optimizers.fail_waiting(error)
            store.joint_calls.fail(error, list(self._live_ranks()))

    # -- keys --------------------------------------------------------------------------

    def _declare(self, incoming: Incoming) -> None:
        number, kind, scope, table = unpack(incoming.body, int, str, str, list)
        if scope not in SCOPES:
            raise ProtocolError(f"a scope must be one of {', '.join(SCOPES)}, got {scope!r}")
        store = self._stores.setdefault(number, _Store(kind))
        if store.kind != kind:
            raise UnknownTypeError(
                f"store {number} of this job is {store.kind!r} on another worker and {kind!r} on "
                f"worker {rank_of(incoming.sender)}; create the same stores in the same order"
            )
        entry = _Waiting(incoming, rank_of(incoming.sender), unpack_specs(table), scope)
        self._take_declaration(number, store, entry)

    def _take_declaration(self, number: int, store: _Store, waiting: _Waiting) -> None:
        decides = waiting.rank == self._deciding_rank()
        keys = [each.key for each in waiting.specs]
        if decides:
            store.scope = waiting.scope
        try:
            _check_same(store, waiting.specs)
            # For every rank: a rank whose values are too large must not wait for rank 0's call.
            for scope in dict.fromkeys((store.scope, waiting.scope)):
                self._check_sizes(store, waiting.specs, scope)
        except PSError as error:
            waiting.incoming.fail(error)
            if decides:
                _refuse(store, [key for key in keys if key not in store.entries], error)
            return
        if decides and any(key not in store.ready for key in keys):
            entries = self._decide(store, waiting.specs, waiting.scope)
            waiting.incoming.respond(pack(True, pack_entries(entries)))
        elif all(key in store.ready for key in keys):
            entries = [store.entries[key] for key in keys]
            waiting.incoming.respond(pack(False, pack_entries(entries)))
        else:
            store.waiting.append(waiting)

    def _decide(self, store: _Store, specs: Sequence[Declared], scope: str) -> list[KeyEntry]:
        """Place the new keys of the deciding rank's call; known keys are kept."""
        new = []
        sizes: list[int] = []
        for declared in specs:
            key, spec, is_row_sparse = declared
            if key in store.entries:
                continue
            chunk_bytes = self._chunk_bytes_of(spec, scope)
            if is_row_sparse:
                num_parts = self._num_stripes(spec, chunk_bytes)
                sizes += [min(spec.nbytes, DIRECT_BYTES)] if num_parts == 1 else []
                new.append((declared, self._chunk_bytes, num_parts))
                continue
            chunks = chunk_ranges(spec.num_elements, spec.dtype.itemsize, chunk_bytes)
            new.append((declared, chunk_bytes, len(chunks)))
            sizes += [(stop - start) * spec.dtype.itemsize for start, stop in chunks]
        placed_on = place(sizes, self._loads, self._wanted_shares()) if sizes else []
        servers = iter(placed_on)
        for server, size in zip(placed_on, sizes, strict=True):
            self._loads[server] += size
        for (key, spec, is_row_sparse), chunk_bytes, count in new:
            is_striped = is_row_sparse and count > 1
            placed = tuple(range(count) if is_striped else (next(servers) for _ in range(count)))
            generation = store.generations.begin(key)
            store.entries[key] = KeyEntry(
                key, spec, self._next_part, chunk_bytes, placed, generation, is_row_sparse
            )
            self._next_part += count
        return [store.entries[each.key] for each in specs]

    def _chunk_bytes_of(self, spec: KeySpec, scope: str) -> int:
        """Return the largest part size that cuts no row or key that must stay whole."""
        if scope == "key":
            return max(self._chunk_bytes, spec.nbytes)
        if scope == "row":
            row_bytes = spec.width * spec.dtype.itemsize
            return max(self._chunk_bytes // row_bytes, 1) * row_bytes
        return self._chunk_bytes

    def _num_stripes(self, spec: KeySpec, chunk_bytes: int) -> int:
        """Return a row-sparse key's number of parts: one for each server, or 1 if small."""
        if spec.nbytes <= chunk_bytes:
            return 1
        return max(min(len(self._loads), spec.shape[0]), 1)

    def _wanted_shares(self) -> Sequence[float]:
        """Return each server's share of all bytes, the same for all keys of the job."""
        if self._shares is None:
            self._shares = self._find_shares() or [1.0] * len(self._loads)
        return self._shares

    def _check_sizes(self, store: _Store, specs: Sequence[Declared], scope: str) -> None:
        """Check that new keys of these sizes can be sent."""
        for key, spec, is_row_sparse in specs:
            if key in store.entries or is_row_sparse:
                continue
            chunk_bytes = self._chunk_bytes_of(spec, scope)
            num_elements = min(spec.num_elements, chunk_bytes // spec.dtype.itemsize)
            # States of 16-bit values are float32; they are sent like the values, for checkpoints.
            widest_bytes = num_elements * max(spec.dtype.itemsize, 4) + _HEADER_BYTES
            if scope != "element" and widest_bytes > self._max_message_bytes:
                whole = "it" if scope == "key" else "each of its rows"
                raise ValueMismatchError(
                    f"key {key!r} has {spec.nbytes} bytes, and the optimizer needs {whole} whole "
                    f"in one message, over PS_MAX_MESSAGE_BYTES ({self._max_message_bytes}); "
                    "raise PS_MAX_MESSAGE_BYTES on all nodes, or use an optimizer that can "
                    "update parts"
                )
            if num_chunks(spec.num_elements, spec.dtype.itemsize, chunk_bytes) > MAX_CHUNKS:
                raise ValueMismatchError(
                    f"key {key!r} would have more than {MAX_CHUNKS} parts; raise PS_CHUNK_BYTES"
                )

    def _initialised(self, incoming: Incoming) -> None:
        """Record that the deciding rank has stored the values, or failed to."""
        number, keys, kind, text = unpack(incoming.body, int, list, str, str)
        store = self._store(number)
        if kind:
            self._delete(store, keys)
            for key in keys:
                store.generations.undo(key)
            _refuse(store, keys, rebuild(kind, text))
        else:
            store.ready.update(key for key in keys if key in store.entries)
        incoming.respond()
        waiting, store.waiting = store.waiting, []
        for entry in waiting:
            self._take_declaration(number, store, entry)

    def _delete(self, store: _Store, keys: Sequence[Key]) -> None:
        for key in keys:
            entry = store.entries.pop(key, None)
            store.ready.discard(key)
            store.generations.end(key)
            if entry is None or (entry.is_row_sparse and len(entry.servers) > 1):
                continue  # a key spread evenly over all servers was not added to the loads
            for nbytes, server in zip(entry.part_bytes(), entry.servers, strict=True):
                self._loads[server] -= min(nbytes, DIRECT_BYTES) if entry.is_row_sparse else nbytes

    def _store(self, number: int) -> _Store:
        store = self._stores.get(number)
        if store is None:
            raise UsageError(f"unknown store {number}")
        return store

    # -- what all ranks do together ----------------------------------------------------

    def _together(self, incoming: Incoming) -> None:
        number, mode, call, name, kind, text = unpack(incoming.body, int, str, int, str, str, str)
        store = self._stores.setdefault(number, _Store(mode))
        if store.joint_calls.is_over(call):  # another process repeats it for a lost worker
            incoming.respond(pack(False, _news(store, store.joint_calls.said(call))))
            return
        store.optimizers.joint_call_begins()
        error = rebuild(kind, text) if kind else None
        store.joint_calls.arrive(call, name, incoming, list(self._live_ranks()), error)

    def _done_together(self, incoming: Incoming) -> None:
        """Handle the deciding rank's report; forget the keys that it deleted."""
        number, call, deleted, said, kind, text = unpack(
            incoming.body, int, int, list, str, str, str
        )
        store = self._store(number)
        error = rebuild(kind, text) if kind else None
        if error is None:
            self._delete(store, deleted)
        others = set(self._live_ranks()) - {rank_of(incoming.sender)}
        store.optimizers.joint_call_ended(failed=error is not None, others=others)
        news = _news(store, said)
        what = store.joint_calls.done(call, news, error, said)
        if what == CLOSING and error is None:
            del self._stores[number]
            for waiting in [entry.incoming for entry in store.waiting]:
                waiting.fail(UsageError("the store was closed before its keys were initialized"))
            closed = UsageError("worker 0 closed the store before it called set_optimizer")
            store.optimizers.fail_waiting(closed)
        incoming.respond(news)

    # -- optimizers --------------------------------------------------------------------

    def _optimizer_is_set(self, incoming: Incoming) -> None:
        """Record that the deciding rank's call reached all servers, or failed."""
        number, kind, call, optimizer, error_kind, text = unpack(
            incoming.body, int, str, int, list, str, str
        )
        store = self._stores.setdefault(number, _Store(kind))
        error = rebuild(error_kind, text) if error_kind else None
        store.optimizers.decided(optimizer, error, rank_of(incoming.sender), call)
        incoming.respond()

    def _same_optimizer(self, incoming: Incoming) -> None:
        number, kind, call, optimizer = unpack(incoming.body, int, str, int, list)
        store = self._stores.setdefault(number, _Store(kind))
        rank = rank_of(incoming.sender)
        store.optimizers.made(incoming, rank, call, optimizer, self._deciding_rank())

    def _deciding_rank(self) -> int:
        return min(self._live_ranks(), default=0)

    def _optimizer_of(self, incoming: Incoming) -> None:
        (number,) = unpack(incoming.body, int)
        calls = OptimizerCalls() if number not in self._stores else self._store(number).optimizers
        incoming.respond(pack(calls.current, calls.num_of(rank_of(incoming.sender))))


def _news(store: _Store, said: str = "") -> bytes:
    """Return what all ranks learn at the end of a joint call."""
    ready = [entry for key, entry in store.entries.items() if key in store.ready]
    return pack(pack_entries(ready), store.optimizers.num, said)


def _refuse(store: _Store, keys: Sequence[Key], error: PSError) -> None:
    """Fail all waiting requests that include one of these keys."""
    waiting, store.waiting = store.waiting, []
    for entry in waiting:
        if any(each.key in keys for each in entry.specs):
            entry.incoming.fail(error)
        else:
            store.waiting.append(entry)


def _check_same(store: _Store, specs: Sequence[Declared]) -> None:
    for key, spec, is_row_sparse in specs:
        known = store.entries.get(key)
        if known is None:
            first = next(iter(store.entries), key)
            if isinstance(first, str) != isinstance(key, str):
                raise KeyTypeError(
                    "the keys of a store must be all int or all str: another worker has "
                    f"{first!r}, this call names {key!r}"
                )
        elif known.spec != spec:
            raise ValueMismatchError(
                f"key {key!r} has shape {known.spec.shape} of {known.spec.dtype} on another "
                f"worker, this worker's value has shape {spec.shape} of {spec.dtype}; init it "
                "with the same shape and dtype on all workers"
            )
        elif known.is_row_sparse != is_row_sparse:
            kinds = ("row-sparse", "dense") if known.is_row_sparse else ("dense", "row-sparse")
            raise ValueMismatchError(
                f"key {key!r} is {kinds[0]} on another worker, this worker's value is "
                f"{kinds[1]}; init it with the same kind of value on all workers"
            )
