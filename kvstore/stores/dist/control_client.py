"""Requests of a distributed store to the servers and the directory, as futures.

The control side of ``store.py``: keys, optimizers, states, statistics. Pushed and pulled values
go through ``transfer.py`` instead. Calls may come from any thread; steps that follow an answer run
on the node's I/O thread and never wait. ``protocol/requests.py`` defines the bodies of all
requests.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from kvstore.arrays.keys import Key, KeySpec, width_of
from kvstore.checkpoint.optimizer_states import HostValue, SavedPiece
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.serialize import from_plain
from kvstore.optimizer.states import state_dtypes
from kvstore.protocol.placement import may_be_relayed
from kvstore.protocol.requests import (
    DIRECTORY_APP,
    STORE_APP,
    Declared,
    DirectoryCall,
    KeyEntry,
    PartEntry,
    StoreCall,
    pack,
    pack_parts,
    pack_specs,
    unpack,
    unpack_entries,
)
from kvstore.sparse.array import RowSparseArray
from kvstore.stores.dist.compression import DistCompression
from kvstore.stores.dist.plan import (
    Group,
    flat_bytes,
    group_bytes,
    joined_by_keys,
    part_entries,
    plan,
    views,
)
from kvstore.stores.dist.row_pages import RowPages, create_rows
from kvstore.stores.dist.sparse_transfer import RowPlacement
from kvstore.stores.dist.transfer import DenseExchange
from pslite import Future, Postoffice, Role
from pslite.errors import describe, unexpected
from pslite.future import completed, settled
from pslite.future import gather as gather_futures
from pslite.ids import SCHEDULER_ID, node_id, rank_of
from pslite.node.customer import Reply
from pslite.plane import Relays

#: At most this many requests for values and states are in flight at once, to bound the memory.
_READ_AHEAD = 8

Reader = Callable[[Key, int, int], SavedPiece]


class Servers:
    """Sends the requests of one store on one worker to the servers and the directory."""

    def __init__(self, node: Postoffice, number: int, *, synchronous: bool) -> None:
        self._node = node
        self._number = number
        self._synchronous = synchronous
        self._servers = [node_id(Role.SERVER, rank) for rank in range(node.config.num_servers)]
        self.piece_bytes = min(4 * node.config.chunk_bytes, node.config.max_message_bytes)
        """The size of messages about rows."""

    @property
    def number(self) -> int:
        """The number of this store on its node, from 1."""
        return self._number

    @property
    def mode(self) -> str:
        return "sync" if self._synchronous else "async"

    @property
    def decides(self) -> bool:
        """Whether this worker has the lowest live rank."""
        return self._node.rank == min(self._node.membership.live(Role.WORKER), default=0)

    def _ask_directory(self, call: DirectoryCall, body: bytes, waiting_for: str) -> Future[bytes]:
        asked = self._node.request([SCHEDULER_ID], DIRECTORY_APP, call, body)
        answer = asked.map(lambda replies: replies[SCHEDULER_ID].body)
        answer.describe = waiting_for
        return answer

    def _ask_all(self, call: StoreCall, body: bytes) -> Future[list[Reply]]:
        """Send a request to every server; the result is the replies in rank order."""
        asked = self._node.request(self._servers, STORE_APP, call, body)
        return asked.map(lambda replies: [replies[server] for server in self._servers])

    # -- keys --------------------------------------------------------------------------

    def init(
        self,
        specs: Mapping[Key, KeySpec],
        values: Sequence[HostValue],
        exchange: DenseExchange,
        *,
        scope: str,
    ) -> Future[list[KeyEntry]]:
        """Create keys; the future completes when all workers can use them.

        ``values`` are on the host and must stay unchanged until then. ``scope``, one of ``SCOPES``,
        is the unit that parts must keep whole.
        """
        declared_keys = [
            Declared(key, spec, isinstance(value, RowSparseArray))
            for (key, spec), value in zip(specs.items(), values, strict=True)
        ]
        body = pack(self._number, self.mode, scope, pack_specs(declared_keys))

        def declared(body: bytes) -> Future[list[KeyEntry]]:
            decides, rows = unpack(body, bool, bytes)
            entries = unpack_entries(rows)
            if not decides:
                return completed(entries)
            made = self._create_parts(entries, values, exchange)
            return made.map(lambda _: entries)

        names = ", ".join(repr(key) for key in list(specs)[:5])
        waiting_for = f"worker 0 (or the lowest rank that is left) to call init for {names}"
        return self._ask_directory(DirectoryCall.DECLARE, body, waiting_for).then(declared)

    def _create_parts(
        self,
        entries: Sequence[KeyEntry],
        values: Sequence[HostValue],
        exchange: DenseExchange,
    ) -> Future[None]:
        """Put the initial values on the servers, then inform the other ranks."""
        known, coding, relays = exchange.entries, exchange.coding, exchange.relays
        asked: list[Future[Any]] = []
        dense, arrays = [], []
        for entry, value in zip(entries, values, strict=True):
            if entry.key in known:
                continue
            if isinstance(value, RowSparseArray):
                begin, step = (self._number, self._synchronous), self.page_rows(entry)
                asked += create_rows(self._ask_server, begin, entry, value, step)
            else:
                dense.append(entry)
                arrays.append(flat_bytes(value))
        entries = [entry for entry in entries if entry.key not in known]
        # Parts that are created together are neighbours in a server's memory, so group them as
        # later messages will. Parts of one key come in one message, so that its value is stored in
        # one piece, which views need.
        nbytes = sum(entry.spec.nbytes for entry in dense)
        limit = group_bytes(self._node.config, nbytes, by_tcp=False)
        groups = plan(dense, limit, keeps_keys_whole=True)
        for together in joined_by_keys(groups, self._node.config.max_message_bytes):
            cuts = [len(group.parts) for group in together]
            parts = [entry for group in together for entry in part_entries(group, dense)]
            rules = [rule for group in together for rule in _rules(group, dense, coding)]
            body = pack(self._number, self._synchronous, pack_parts(parts), rules, cuts)
            frames = [view.data for group in together for view in views(group, arrays)]
            asked.append(self._ask_group(together[0], StoreCall.INIT, body, frames))
            asked += self._create_relayed(relays, together, parts, frames)

        def tell(kind: str, text: str) -> Future[bytes]:
            body = pack(self._number, [entry.key for entry in entries], kind, text)
            return self._ask_directory(DirectoryCall.INITIALISED, body, "the directory")

        def take_back(error: BaseException) -> Future[bytes]:
            freed = settled([self.delete(entries)])
            return freed.then(lambda _: tell(*describe(error)))

        # The other ranks wait for this call, so they also get its error.
        made = gather_futures(asked).or_else(take_back)
        return made.then(lambda _: tell("", "")).map(lambda _: None)

    def _create_relayed(
        self,
        relays: Relays | None,
        together: Sequence[Group],
        parts: Sequence[PartEntry],
        frames: Sequence[Any],
    ) -> Iterator[Future[Reply]]:
        """Put initial values of an owner's parts on the servers that relay to it."""
        owner = rank_of(together[0].server)
        found = [may_be_relayed(part.dtype) for part in parts]
        if relays is None or not any(found):
            return
        ends = itertools.accumulate(len(group.parts) for group in together)
        kept = [sum(found[:end]) for end in ends]
        cuts = [stop - start for start, stop in itertools.pairwise([0, *kept]) if stop > start]
        mine = list(itertools.compress(parts, found))
        body = pack(self._number, owner, pack_parts(mine), cuts)
        for relay in relays.relays_to(owner):
            server = node_id(Role.SERVER, relay)
            values = list(itertools.compress(frames, found))
            yield self._ask_server(server, StoreCall.RELAY_INIT, body, values)

    def delete(self, entries: Iterable[KeyEntry]) -> Future[None]:
        """Free the parts of these keys on the servers."""
        return self._free(StoreCall.DELETE, entries)

    def close(self, entries: Iterable[KeyEntry]) -> Future[None]:
        """Make the servers forget the store and these keys, which are all of its keys."""
        return self._free(StoreCall.CLOSE, entries)

    def _free(self, call: StoreCall, entries: Iterable[KeyEntry]) -> Future[None]:
        parts = [part for entry in entries for part in entry.parts]
        return self._ask_all(call, pack(self._number, parts)).map(lambda _: None)

    # -- joint calls of all ranks ------------------------------------------------------

    def meet(
        self, call: int, name: str, error: BaseException | None = None
    ) -> Future[bytes | None]:
        """Make a joint call; the result is None if this rank must carry it out.

        That is known once all ranks have called. On the other ranks, the future completes when the
        call has been carried out, with the news for ``news_of``. ``error`` says why this rank
        cannot take part; the call then fails on all ranks with that error.
        """
        kind, text = ("", "") if error is None else describe(error)
        body = pack(self._number, self.mode, call, name, kind, text)
        what = f"all workers to call {name}, and the lowest rank to do it"

        def arrived(body: bytes) -> bytes | None:
            decides, news = unpack(body, bool, bytes)
            return None if decides else news

        return self._ask_directory(DirectoryCall.TOGETHER, body, what).map(arrived)

    def report(
        self,
        call: int,
        deleted: Sequence[Key] = (),
        said: str = "",
        error: BaseException | None = None,
    ) -> Future[bytes]:
        """Report that this rank has carried out a call or failed; the result is the news.

        The news have ``said`` for all ranks.
        """
        kind, text = ("", "") if error is None else describe(error)
        body = pack(self._number, call, list(deleted), said, kind, text)
        return self._ask_directory(DirectoryCall.DONE_TOGETHER, body, "the directory")

    @staticmethod
    def news_of(body: bytes) -> tuple[list[KeyEntry], int, str]:
        """Return all keys, how many times the optimizer was set, and what was said."""
        rows, num_optimizer_calls, said = unpack(body, bytes, int, str)
        return unpack_entries(rows), num_optimizer_calls, said

    # -- compression -------------------------------------------------------------------

    def set_compression(
        self, plain: Sequence[Any], entries: Iterable[KeyEntry], coding: DistCompression | None
    ) -> Future[None]:
        """Set the encoding of these keys on all servers; without ``coding``, remove it.

        ``plain`` has its rules. Nothing may be in flight on any worker; all servers check that
        before one of them changes anything.
        """
        rows = [
            [part, -1 if coding is None else coding.rule_of(entry)]
            for entry in entries
            for part in entry.parts
        ]

        def ask(*, only_check: bool) -> Future[list[Reply]]:
            body = pack(self._number, self._synchronous, only_check, list(plain), rows)
            return self._ask_all(StoreCall.SET_COMPRESSION, body)

        checked = ask(only_check=True)
        return checked.then(lambda _: ask(only_check=False)).map(lambda _: None)

    # -- optimizers --------------------------------------------------------------------

    def set_optimizer(
        self, plain: Sequence[Any], call: int, *, may_be_over: bool = False
    ) -> Future[None]:
        """Set the optimizer if this rank decides, otherwise have the directory compare it.

        ``plain`` is the result of ``to_plain``. All servers check the optimizer before any of them
        changes anything, so either all of them use it or none. With ``may_be_over``, a lost process
        of this rank may have made the call; then it changes nothing.
        """
        if not self.decides:
            body = pack(self._number, self.mode, call, plain)
            waiting_for = "worker 0 to call set_optimizer"
            asked = self._ask_directory(DirectoryCall.SAME_OPTIMIZER, body, waiting_for)
            return asked.map(lambda _: None)

        def tell(kind: str, text: str) -> Future[bytes]:
            body = pack(self._number, self.mode, call, plain, kind, text)
            return self._ask_directory(DirectoryCall.OPTIMIZER_IS_SET, body, "the directory")

        def ask(*, only_check: bool) -> Future[list[Reply]]:
            body = pack(self._number, self._synchronous, only_check, plain)
            return self._ask_all(StoreCall.SET_OPTIMIZER, body)

        def set_it() -> Future[None]:
            asked_all = ask(only_check=True).then(lambda _: ask(only_check=False))
            # The other ranks wait for this call, so they also get its error.
            asked_all = asked_all.or_else(lambda error: tell(*describe(error)))
            return asked_all.then(lambda _: tell("", "")).map(lambda _: None)

        def unless_over(body: bytes) -> Future[None]:
            is_over = unpack(body, list, int)[1] >= call
            return completed(None) if is_over else set_it()

        return self._ask_for_optimizer().then(unless_over) if may_be_over else set_it()

    def declared_optimizer(self) -> Future[Optimizer | None]:
        """Ask the directory for the optimizer that the deciding rank has set."""
        return self._ask_for_optimizer().map(lambda body: _first(unpack(body, list, int)[0]))

    def has_optimizer(self) -> Future[bool]:
        """Ask whether an optimizer is set; this process need not know its class."""
        return self._ask_for_optimizer().map(lambda body: bool(unpack(body, list, int)[0]))

    def _ask_for_optimizer(self) -> Future[bytes]:
        body = pack(self._number)
        return self._ask_directory(DirectoryCall.OPTIMIZER_OF, body, "the directory")

    def optimizers(self) -> Future[list[Optimizer | None]]:
        """Return each server's optimizer, in rank order."""
        asked = self._ask_all(StoreCall.OPTIMIZER, pack(self._number))
        return asked.map(lambda replies: [_one_optimizer(reply.body) for reply in replies])

    # -- values and states, for files --------------------------------------------------

    def read(
        self,
        entries: Sequence[KeyEntry],
        optimizer: Optimizer | None,
        wait: Callable[[Future[Any]], Any],
    ) -> Iterator[SavedPiece]:
        """Read all contents of these keys from the servers, piece by piece."""
        states_of = cache(partial(state_dtypes, optimizer))
        for group, reply in self._asked_in_turn(
            plan(entries, self._node.config.chunk_bytes),
            lambda group: self._ask_group(group, StoreCall.READ, pack(list(group.parts)), ()),
            wait,
        ):
            (counts,) = unpack(reply.body, list)
            specs = [entries[position].spec for position, _, _ in group.slices]
            dtypes = [[spec.dtype, *states_of(spec.dtype)] for spec in specs]
            if len(counts) != len(specs) or sum(map(len, dtypes)) != len(reply.frames):
                expected = f"{len(specs)} counts and {sum(map(len, dtypes))} arrays from a server"
                raise unexpected(expected, (len(counts), len(reply.frames)))
            frames = iter(reply.frames)
            for (position, start, _), row, count in zip(group.slices, dtypes, counts, strict=True):
                values, *states = [np.frombuffer(next(frames), dtype) for dtype in row]
                start //= values.itemsize
                yield SavedPiece(entries[position].key, start, values, states, count)

    def write(
        self,
        entries: Sequence[KeyEntry],
        optimizer: Optimizer | None,
        read: Reader,
        wait: Callable[[Future[Any]], Any],
        relays: Relays | None,
    ) -> None:
        """Send the data that ``read`` returns for these keys: states, counts, any values.

        If a file lacks the master weights, send empty frames; the servers then compute them.
        """
        empty = np.empty(0, np.uint8)
        states_of = cache(partial(state_dtypes, optimizer))

        def write_group(group: Group) -> Future[Any]:
            counts: list[int] = []
            frames: list[Any] = []
            has_values = True
            values: dict[int, Any] = {}
            for position, start, stop in group.slices:
                key, spec = entries[position][:2]
                itemsize = spec.dtype.itemsize
                piece = read(key, start // itemsize, stop // itemsize)
                counts.append(piece.num_updates)
                has_values = piece.values is not None
                if piece.values is not None and may_be_relayed(spec.dtype):
                    values[group.parts[len(counts) - 1]] = flat_bytes(piece.values).data
                arrays = piece.states if piece.values is None else [piece.values, *piece.states]
                missing = len(states_of(spec.dtype)) - len(piece.states)
                frames += [flat_bytes(array).data for array in (*arrays, *[empty] * missing)]
            body = pack(list(group.parts), counts, has_values)
            asked = [self._ask_group(group, StoreCall.WRITE, body, frames)]
            owner = rank_of(group.server)
            for relay in relays.relays_to(owner) if relays is not None and values else ():
                to, body = node_id(Role.SERVER, relay), pack([*values], [0] * len(values), True)
                asked.append(self._ask_server(to, StoreCall.WRITE, body, [*values.values()]))
            return gather_futures(asked)

        groups = plan(entries, self._node.config.chunk_bytes)
        for _ in self._asked_in_turn(groups, write_group, wait):
            pass

    @staticmethod
    def _asked_in_turn(
        groups: Iterable[Group],
        ask: Callable[[Group], Future[Any]],
        wait: Callable[[Future[Any]], Any],
    ) -> Iterator[tuple[Group, Any]]:
        asked: deque[tuple[Group, Future[Any]]] = deque()
        for group in groups:
            asked.append((group, ask(group)))
            if len(asked) >= _READ_AHEAD:
                first, future = asked.popleft()
                yield first, wait(future)
        for first, future in asked:
            yield first, wait(future)

    def _ask_group(
        self, group: Group, call: StoreCall, body: bytes, frames: Sequence[Any]
    ) -> Future[Reply]:
        return self._ask_server(group.server, call, body, frames)

    def _ask_server(
        self, server: int, call: StoreCall, body: bytes, frames: Sequence[Any]
    ) -> Future[Reply]:
        asked = self._node.request([server], STORE_APP, call, body, {server: list(frames)})
        return asked.map(lambda replies: replies[server])

    # -- rows --------------------------------------------------------------------------

    def pages(self, home: RowPlacement) -> RowPages:
        """Return access to the rows of a row-sparse key or of a table."""
        return RowPages(self._ask_server, home)

    def page_rows(self, entry: KeyEntry) -> int:
        """Return how many rows of a row-sparse key fit in one message."""
        row_bytes = width_of(entry.spec.shape) * max(entry.spec.dtype.itemsize, 4)
        return max(self.piece_bytes // max(row_bytes, 8), 1)

    # -- growing tables ----------------------------------------------------------------

    def make_table(
        self, parts: Sequence[int], settings: Sequence[Any], optimizer: Sequence[Any]
    ) -> Future[Any]:
        """Create a table's share on every server, or on none of them.

        ``optimizer`` is a result of ``to_plain``, or empty if the table has no optimizer.
        """
        begin = [self._number, self._synchronous]
        bodies = [
            pack(*begin, part, share, len(parts), list(settings), list(optimizer))
            for share, part in enumerate(parts)
        ]

        asked = zip(self._servers, bodies, strict=True)
        made = gather_futures(
            [self._ask_server(server, StoreCall.CREATE_TABLE, body, ()) for server, body in asked]
        )
        return made.or_else(lambda _: settled([self.drop_table(parts)]))

    def drop_table(self, parts: Sequence[int]) -> Future[Any]:
        """Free the shares of a table."""
        return self._ask_all(StoreCall.DELETE, pack(self._number, list(parts)))

    # -- statistics and commands -------------------------------------------------------

    def stats(self) -> Future[dict[int, dict[str, int]]]:
        """Return the counters of each server, by rank."""
        asked = self._ask_all(StoreCall.STATS, pack())
        return asked.map(
            lambda replies: {
                rank: unpack(reply.body, dict)[0] for rank, reply in enumerate(replies)
            }
        )

    def command(self, head: int, body: str) -> Future[list[str]]:
        """Return each server's answer to a command, in rank order."""
        asked = self._ask_all(StoreCall.COMMAND, pack(head, body))
        return asked.map(lambda replies: [unpack(reply.body, str)[0] for reply in replies])


def _rules(group: Group, entries: Sequence[KeyEntry], coding: DistCompression | None) -> list[int]:
    """Return the number of each part's compression rule; -1 for a part without a rule."""
    if coding is None:
        return [-1] * len(group.parts)
    return [coding.rule_of(entries[piece.position]) for piece in group.slices]


def _one_optimizer(body: bytes) -> Optimizer | None:
    return _first(unpack(body, list)[0])


def _first(plain: Sequence[Any]) -> Optimizer | None:
    """Return the optimizer of a list with none or one, in plain form."""
    return from_plain(plain[0]) if plain else None
