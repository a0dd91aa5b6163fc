"""The directory of keys: which stores, keys and optimizers there are. On the scheduler.

The lowest live rank decides (rank 0 unless it is gone): its ``init`` gives a key its shape,
dtype and placement, its ``set_optimizer`` the optimizer. The same calls of other ranks wait
for it and are compared with it, in whatever order the ranks make them. What all ranks do
together (``delete``, loading) the deciding rank carries out once all have asked for it.
Pure but for answering; runs on the scheduler's I/O thread. Next: ``together.py`` and
``dist.py``, which asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import KeyTypeError, OptimizerMismatch, UnknownTypeError, ValueMismatchError
from kvstore.keys import Key, KeySpec
from kvstore.placement import chunk_ranges, num_chunks, place
from kvstore.protocol import (
    CLOSING,
    MAX_CHUNKS,
    Declared,
    DirectoryCall,
    KeyEntry,
    pack,
    pack_entries,
    unpack,
    unpack_specs,
)
from kvstore.sparse.table import DIRECT_BYTES
from kvstore.together import Meetings
from pslite import Config
from pslite.customer import Incoming
from pslite.errors import ProtocolError, PSError, UsageError, rebuild
from pslite.ids import rank_of

#: What a message has besides a key's values, at most.
_HEADER_BYTES = 65_536


@dataclass(slots=True)
class _Waiting:
    """A rank's ``init`` that waits for the deciding rank's."""

    incoming: Incoming
    rank: int
    specs: list[Declared]
    whole: bool
    """Whether the rank's optimizer wants keys that are not cut."""


@dataclass(slots=True)
class _OptimizerCall:
    """One ``set_optimizer`` of the deciding rank; an error where the servers refused it."""

    optimizer: list[Any]
    error: BaseException | None


@dataclass(slots=True)
class _Store:
    """One store of the job, as the directory knows it."""

    kind: str
    entries: dict[Key, KeyEntry] = field(default_factory=dict)
    ready: set[Key] = field(default_factory=set)
    """Keys whose first values are on the servers."""
    generations: dict[Key, int] = field(default_factory=dict)
    """How often each key has been initialised, also those that are deleted."""
    waiting: list[_Waiting] = field(default_factory=list)
    whole: bool = False
    """Whether the deciding rank's last ``init`` asked for keys that are not cut."""
    optimizers: list[_OptimizerCall] = field(default_factory=list)
    comparing: list[tuple[Incoming, int, list[Any]]] = field(default_factory=list)
    """(request, number of the call, optimizer) of other ranks' ``set_optimizer``."""
    shifts: dict[int, int] = field(default_factory=dict)
    """What makes the numbers of a rank's calls those of the deciding rank's."""
    refused: set[int] = field(default_factory=set)
    """Ranks whose last call was another one than the deciding rank's."""
    meetings: Meetings = field(default_factory=Meetings)
    num_calls_before: int = 0
    """How many ``optimizers`` there were when the last rank came to a meeting."""

    def shift(self, rank: int, by: int) -> None:
        """A rank has left out calls, or made one that does not count."""
        self.shifts[rank] = self.shifts.get(rank, 0) + by

    @property
    def optimizer(self) -> list[list[Any]]:
        """The present optimizer, as a list of none or one."""
        return [call.optimizer for call in self.optimizers if call.error is None][-1:]


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
        """``find_shares`` is asked once, for the first keys; None: equal shares."""
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
        """Take one request; the answer may come later."""
        call = self._calls.get(incoming.head)
        if call is None:
            raise ProtocolError(f"the directory knows no call {incoming.head}")
        call(incoming)

    def departed(self) -> None:
        """A worker is gone; the next rank may have to decide now."""
        live = list(self._live_ranks())
        decider = min(live, default=0)
        for store in self._stores.values():
            store.meetings.departed(live)
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
        number, kind, whole, table = unpack(incoming.body, int, str, bool, list)
        store = self._stores.setdefault(number, _Store(kind))
        if store.kind != kind:
            raise UnknownTypeError(
                f"store {number} of this job is {store.kind!r} on another worker and {kind!r} on "
                f"worker {rank_of(incoming.sender)}; create the same stores in the same order"
            )
        entry = _Waiting(incoming, rank_of(incoming.sender), unpack_specs(table), whole)
        self._take_declaration(number, store, entry)

    def _take_declaration(self, number: int, store: _Store, waiting: _Waiting) -> None:
        decides = waiting.rank == min(self._live_ranks(), default=0)
        keys = [each.key for each in waiting.specs]
        if decides:
            store.whole = waiting.whole
        try:
            _check_same(store, waiting.specs)
            # For every rank: one whose values are too large must not wait for rank 0's in vain.
            self._check_sizes(store, waiting.specs, whole=store.whole or waiting.whole)
        except PSError as error:
            waiting.incoming.fail(error)
            if decides:
                _refuse(store, [key for key in keys if key not in store.entries], error)
            return
        if decides and any(key not in store.ready for key in keys):
            entries = self._decide(store, waiting.specs, waiting.whole)
            waiting.incoming.respond(pack(True, pack_entries(entries)))
        elif all(key in store.ready for key in keys):
            entries = [store.entries[key] for key in keys]
            waiting.incoming.respond(pack(False, pack_entries(entries)))
        else:
            store.waiting.append(waiting)

    def _decide(self, store: _Store, specs: Sequence[Declared], whole: bool) -> list[KeyEntry]:
        """Place the new keys of a call of the deciding rank; known ones stay where they are."""
        new = []
        sizes: list[int] = []
        for declared in specs:
            key, spec, is_row_sparse = declared
            if key in store.entries:
                continue
            chunk_bytes = max(self._chunk_bytes, spec.nbytes) if whole else self._chunk_bytes
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
            generation = store.generations[key] = store.generations.get(key, 0) + 1
            store.entries[key] = KeyEntry(
                key, spec, self._next_part, chunk_bytes, placed, generation, is_row_sparse
            )
            self._next_part += count
        return [store.entries[each.key] for each in specs]

    def _num_stripes(self, spec: KeySpec, chunk_bytes: int) -> int:
        """The parts of a row-sparse key: one on each server, or a single one for a small key."""
        if spec.nbytes <= chunk_bytes:
            return 1
        return max(min(len(self._loads), spec.shape[0]), 1)

    def _wanted_shares(self) -> Sequence[float]:
        """What each server should hold of all bytes: the same for all keys of the job."""
        if self._shares is None:
            self._shares = self._find_shares() or [1.0] * len(self._loads)
        return self._shares

    def _check_sizes(self, store: _Store, specs: Sequence[Declared], *, whole: bool) -> None:
        """Whether new keys of these sizes can travel at all."""
        for key, spec, is_row_sparse in specs:
            if key in store.entries or is_row_sparse:
                continue
            # States of halves are float32 and travel whole, too, into checkpoints.
            widest_bytes = spec.num_elements * max(spec.dtype.itemsize, 4)
            if whole and widest_bytes + _HEADER_BYTES > self._max_message_bytes:
                raise ValueMismatchError(
                    f"key {key!r} has {spec.nbytes} bytes, and the optimizer needs it whole in "
                    f"one message, of which PS_MAX_MESSAGE_BYTES allows {self._max_message_bytes}: "
                    "raise that on all nodes, or use an optimizer that can do with parts"
                )
            chunk_bytes = max(self._chunk_bytes, spec.nbytes) if whole else self._chunk_bytes
            if num_chunks(spec.num_elements, spec.dtype.itemsize, chunk_bytes) > MAX_CHUNKS:
                raise ValueMismatchError(f"key {key!r} has more than {MAX_CHUNKS} parts")

    def _initialised(self, incoming: Incoming) -> None:
        """The deciding rank's values are on the servers, or could not be put there."""
        number, keys, kind, text = unpack(incoming.body, int, list, str, str)
        store = self._store(number)
        if kind:
            self._delete(store, keys)
            for key in keys:
                store.generations[key] = store.generations.get(key, 1) - 1
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
            if entry is None or (entry.is_row_sparse and len(entry.servers) > 1):
                continue  # what lies evenly on all servers does not count
            for nbytes, server in zip(entry.part_bytes(), entry.servers, strict=True):
                self._loads[server] -= min(nbytes, DIRECT_BYTES) if entry.is_row_sparse else nbytes

    def _store(self, number: int) -> _Store:
        store = self._stores.get(number)
        if store is None:
            raise UsageError(f"the directory knows no store {number}")
        return store

    # -- what all ranks do together ----------------------------------------------------

    def _together(self, incoming: Incoming) -> None:
        number, kind, call, name = unpack(incoming.body, int, str, int, str)
        store = self._stores.setdefault(number, _Store(kind))
        store.num_calls_before = len(store.optimizers)
        store.meetings.arrive(call, name, incoming, list(self._live_ranks()))

    def _done_together(self, incoming: Incoming) -> None:
        """The deciding rank has done it; the keys that it has deleted are gone."""
        number, call, deleted, kind, text = unpack(incoming.body, int, int, list, str, str)
        store = self._store(number)
        error = rebuild(kind, text) if kind else None
        if error is None:
            self._delete(store, deleted)
            store.shifts.clear()  # all ranks go on with the number in the news
        else:  # calls that only the deciding rank has made
            for rank in set(self._live_ranks()) - {rank_of(incoming.sender)}:
                store.shift(rank, len(store.optimizers) - store.num_calls_before)
        news = pack(pack_entries(self._ready_entries(store)), len(store.optimizers))
        what = store.meetings.done(call, news, error)
        if what == CLOSING and error is None:
            del self._stores[number]
            for waiting in [entry.incoming for entry in store.waiting]:
                waiting.fail(UsageError("the store was closed before its keys were made"))
            for waiting, _, _ in store.comparing:
                waiting.fail(UsageError("worker 0 has closed the store without this optimizer"))
        incoming.respond(news)

    @staticmethod
    def _ready_entries(store: _Store) -> list[KeyEntry]:
        return [entry for key, entry in store.entries.items() if key in store.ready]

    # -- optimizers --------------------------------------------------------------------

    def _optimizer_is_set(self, incoming: Incoming) -> None:
        """The deciding rank's call has reached all servers, or come to nothing."""
        number, kind, optimizer, error_kind, text = unpack(incoming.body, int, str, list, str, str)
        store = self._stores.setdefault(number, _Store(kind))
        error = rebuild(error_kind, text) if error_kind else None
        store.optimizers.append(_OptimizerCall(optimizer, error))
        incoming.respond()
        comparing, store.comparing = store.comparing, []
        for waiting, call, theirs in comparing:
            self._compare(store, waiting, call, theirs)

    def _same_optimizer(self, incoming: Incoming) -> None:
        number, kind, call, optimizer = unpack(incoming.body, int, str, int, list)
        store = self._stores.setdefault(number, _Store(kind))
        call = max(call + store.shifts.get(rank_of(incoming.sender), 0), 1)
        self._compare(store, incoming, call, optimizer)

    def _compare(self, store: _Store, incoming: Incoming, call: int, theirs: list[Any]) -> None:
        rank = rank_of(incoming.sender)
        # A rank that has left out a call (``if kv.rank == 0:``) may mean a later one.
        candidates = store.optimizers[call - 1 :]
        for meant, ours in enumerate(candidates, call):
            if ours.optimizer == theirs:
                store.shift(rank, meant - call)
                store.refused.discard(rank)
                incoming.respond() if ours.error is None else incoming.fail(ours.error)
                return
        done = [ours for ours in candidates if ours.error is None]
        if not done or rank in store.refused:
            # Not there yet: what failed was a call of the deciding rank alone, and a rank that
            # was refused means that call again, or the next.
            if rank in store.refused:
                store.refused.discard(rank)
                store.shift(rank, len(store.optimizers) + 1 - call)
                call = len(store.optimizers) + 1
            store.comparing.append((incoming, call, theirs))
            return
        store.shift(rank, -1)
        store.refused.add(rank)
        incoming.fail(
            OptimizerMismatch(
                f"worker {rank} sets {_optimizer_text(theirs)}, but worker "
                f"{min(self._live_ranks(), default=0)}, whose call counts, has set "
                f"{_optimizer_text(done[0].optimizer)}"
            )
        )

    def _optimizer_of(self, incoming: Incoming) -> None:
        (number,) = unpack(incoming.body, int)
        store = self._stores.get(number)
        incoming.respond(pack(store.optimizer if store is not None else []))


def _optimizer_text(data: Sequence[Any]) -> str:
    """An optimizer's plain form (``optimizer/plain.py``) for people; never raises."""
    name = data[0] if data else "nothing"
    numbers = data[1] if len(data) > 1 and type(data[1]) is dict else {}
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in numbers.items())})"


def _refuse(store: _Store, keys: Sequence[Key], error: PSError) -> None:
    """These keys came to nothing, also for those who wait for them."""
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
                    f"a store's keys are all int or all str: another worker has {first!r}, "
                    f"this call names {key!r}"
                )
        elif known.spec != spec:
            raise ValueMismatchError(
                f"key {key!r} holds shape {known.spec.shape} of {known.spec.dtype}, "
                f"this worker's value has shape {spec.shape} of {spec.dtype}"
            )
        elif known.is_row_sparse != is_row_sparse:
            kinds = ("row-sparse", "dense") if known.is_row_sparse else ("dense", "row-sparse")
            raise ValueMismatchError(
                f"key {key!r} is {kinds[0]}, this worker's value is {kinds[1]}; init it with the "
                "same kind of value on all workers"
            )
