"""The directory of keys: which stores, keys and optimizers there are. On the scheduler.

The lowest live rank decides (rank 0 unless it is gone): its ``init`` gives a key its shape,
dtype and placement, its ``set_optimizer`` the optimizer. The same calls of other ranks wait
for it and are compared with it, in whatever order the ranks make them. Pure but for answering;
runs on the scheduler's I/O thread. Next: ``dist.py``, which asks, and ``placement.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.base import Key, KeySpec
from kvstore.errors import KeyTypeError, OptimizerMismatch, UnknownTypeError, ValueMismatchError
from kvstore.placement import chunk_ranges, num_chunks, place
from kvstore.protocol import (
    MAX_CHUNKS,
    DirectoryCall,
    KeyEntry,
    pack,
    pack_entries,
    unpack,
    unpack_specs,
)
from pslite.customer import Incoming
from pslite.errors import ProtocolError, PSError, UsageError
from pslite.ids import rank_of


@dataclass(slots=True)
class _Waiting:
    """A rank's ``init`` that waits for the deciding rank's."""

    incoming: Incoming
    rank: int
    specs: list[tuple[Key, KeySpec]]


@dataclass(slots=True)
class _Store:
    """One store of the job, as the directory knows it."""

    kind: str
    entries: dict[Key, KeyEntry] = field(default_factory=dict)
    ready: set[Key] = field(default_factory=set)
    """Keys whose first values are on the servers."""
    waiting: list[_Waiting] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    """What the deciding rank has set, call by call."""
    comparing: list[tuple[Incoming, int, Any]] = field(default_factory=list)
    """(request, number of the call, optimizer) of other ranks' ``set_optimizer``."""


class Directory:
    """Answers the requests of ``DirectoryCall``."""

    def __init__(
        self, num_servers: int, chunk_bytes: int, live_ranks: Callable[[], Sequence[int]]
    ) -> None:
        self._loads = [0] * num_servers
        self._chunk_bytes = chunk_bytes
        self._live_ranks = live_ranks
        self._stores: dict[int, _Store] = {}
        self._decider = 0
        self._next_part = 1
        self._calls: dict[int, Callable[[Incoming], None]] = {
            DirectoryCall.DECLARE: self._declare,
            DirectoryCall.INITIALISED: self._initialised,
            DirectoryCall.OPTIMIZER_IS_SET: self._optimizer_is_set,
            DirectoryCall.SAME_OPTIMIZER: self._same_optimizer,
            DirectoryCall.OPTIMIZER_OF: self._optimizer_of,
        }

    def handle(self, incoming: Incoming) -> None:
        """Take one request; the answer may come later."""
        call = self._calls.get(incoming.head)
        if call is None:
            raise ProtocolError(f"the directory knows no call {incoming.head}")
        call(incoming)

    def departed(self) -> None:
        """A worker is gone; the next rank may have to decide now."""
        decider = min(self._live_ranks(), default=0)
        if decider == self._decider:
            return
        self._decider = decider
        for number, store in self._stores.items():
            waiting, store.waiting = store.waiting, []
            for entry in waiting:
                self._take_declaration(number, store, entry)
            comparing, store.comparing = store.comparing, []
            for incoming, _, _ in comparing:
                incoming.fail(
                    UsageError(
                        "the worker whose set_optimizer counts has left the job before it "
                        "called it; the lowest rank that is left has to call set_optimizer"
                    )
                )

    # -- keys --------------------------------------------------------------------------

    def _declare(self, incoming: Incoming) -> None:
        number, kind, table = unpack(incoming.body, int, str, list)
        store = self._stores.setdefault(number, _Store(kind))
        if store.kind != kind:
            raise UnknownTypeError(
                f"store {number} of this job is {store.kind!r} on another worker and {kind!r} on "
                f"worker {rank_of(incoming.sender)}; create the same stores in the same order"
            )
        entry = _Waiting(incoming, rank_of(incoming.sender), unpack_specs(table))
        self._take_declaration(number, store, entry)

    def _take_declaration(self, number: int, store: _Store, waiting: _Waiting) -> None:
        try:
            _check_same(store, waiting.specs)
            decides = waiting.rank == min(self._live_ranks(), default=0)
            if decides and any(key not in store.ready for key, _ in waiting.specs):
                entries = self._decide(store, waiting.specs)
                waiting.incoming.respond(pack(True, pack_entries(entries)))
                return
        except PSError as error:
            waiting.incoming.fail(error)
            return
        if all(key in store.ready for key, _ in waiting.specs):
            entries = [store.entries[key] for key, _ in waiting.specs]
            waiting.incoming.respond(pack(False, pack_entries(entries)))
        else:
            store.waiting.append(waiting)

    def _decide(self, store: _Store, specs: Sequence[tuple[Key, KeySpec]]) -> list[KeyEntry]:
        """Place the new keys of a call of the deciding rank; known ones stay where they are."""
        sizes: list[int] = []
        counts = []
        for key, spec in specs:
            if num_chunks(spec.num_elements, spec.dtype.itemsize, self._chunk_bytes) > MAX_CHUNKS:
                raise ValueMismatchError(f"key {key!r} has more than {MAX_CHUNKS} parts")
            chunks = chunk_ranges(spec.num_elements, spec.dtype.itemsize, self._chunk_bytes)
            counts.append(0 if key in store.entries else len(chunks))
            if key not in store.entries:
                sizes += [(stop - start) * spec.dtype.itemsize for start, stop in chunks]
        placed_on = place(sizes, self._loads) if sizes else []
        servers = iter(placed_on)
        for server, size in zip(placed_on, sizes, strict=True):
            self._loads[server] += size
        for (key, spec), count in zip(specs, counts, strict=True):
            if count:
                placed = tuple(next(servers) for _ in range(count))
                store.entries[key] = KeyEntry(key, spec, self._next_part, self._chunk_bytes, placed)
                self._next_part += count
        return [store.entries[key] for key, _ in specs]

    def _initialised(self, incoming: Incoming) -> None:
        number, keys = unpack(incoming.body, int, list)
        store = self._store(number)
        store.ready.update(key for key in keys if key in store.entries)
        incoming.respond()
        waiting, store.waiting = store.waiting, []
        for entry in waiting:
            self._take_declaration(number, store, entry)

    def _store(self, number: int) -> _Store:
        store = self._stores.get(number)
        if store is None:
            raise UsageError(f"the directory knows no store {number}")
        return store

    # -- optimizers --------------------------------------------------------------------

    def _optimizer_is_set(self, incoming: Incoming) -> None:
        """The deciding rank's call has reached all servers."""
        number, kind, optimizer = unpack(incoming.body, int, str, list)
        store = self._stores.setdefault(number, _Store(kind))
        store.optimizers.append(optimizer)
        incoming.respond()
        comparing, store.comparing = store.comparing, []
        for waiting, call, theirs in comparing:
            self._compare(store, waiting, call, theirs)

    def _same_optimizer(self, incoming: Incoming) -> None:
        number, kind, call, optimizer = unpack(incoming.body, int, str, int, list)
        store = self._stores.setdefault(number, _Store(kind))
        self._compare(store, incoming, call, optimizer)

    def _compare(self, store: _Store, incoming: Incoming, call: int, theirs: Any) -> None:
        if call > len(store.optimizers):
            store.comparing.append((incoming, call, theirs))
            return
        ours = store.optimizers[call - 1]
        # A rank that has left out a call (``if kv.rank == 0:``) may mean a later one.
        if theirs in store.optimizers[call - 1 :]:
            incoming.respond()
            return
        incoming.fail(
            OptimizerMismatch(
                f"worker {rank_of(incoming.sender)} sets {_optimizer_text(theirs)}, but worker "
                f"{min(self._live_ranks(), default=0)}, whose call counts, has set "
                f"{_optimizer_text(ours)}"
            )
        )

    def _optimizer_of(self, incoming: Incoming) -> None:
        (number,) = unpack(incoming.body, int)
        store = self._stores.get(number)
        found = store.optimizers[-1:] if store is not None else []
        incoming.respond(pack(found))


def _optimizer_text(data: Any) -> str:
    (rows,) = unpack(data[1], list)
    return f"{data[0]}({', '.join(f'{key}={value!r}' for key, value in rows)})"


def _check_same(store: _Store, specs: Sequence[tuple[Key, KeySpec]]) -> None:
    for key, spec in specs:
        known = store.entries.get(key)
        if known is None:
            first = next(iter(store.entries), key)
            if isinstance(first, str) != isinstance(key, str):
                raise KeyTypeError(
                    f"a store's keys are all int or all str: another worker has {first!r}, "
                    f"this call names {key!r}"
                )
        elif known.spec != spec:
            raise ValueMismatchError(
                f"key {key!r} holds shape {known.spec.shape} of {known.spec.dtype}, "
                f"this worker's value has shape {spec.shape} of {spec.dtype}"
            )
