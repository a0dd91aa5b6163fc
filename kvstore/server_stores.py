"""A server's stores: the app of the data plane, and the answers to ``StoreCall``.

The plane (``pslite/plane``) says which contributions make a round; ``parts.py`` adds them up
and updates. Requests arrive on the I/O thread; what touches an arena's memory (``arena.py``) is
handed to the pool thread of its lane, so that no value is read or written while it is updated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.aggregate import Flat
from kvstore.arena import Arena, Part, StoreState, codecs_of
from kvstore.commands import run_command
from kvstore.compression import Compression
from kvstore.freed import return_freed_memory
from kvstore.lanes import Lanes
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.plain import from_plain, to_plain
from kvstore.parts import PartTable
from kvstore.plan import message_bytes, most_group_bytes
from kvstore.protocol import PartEntry, StoreCall, pack, unpack, unpack_parts
from kvstore.row_parts import answer_cut, bytes_of, taken
from kvstore.row_stores import RowStores
from kvstore.sparse.payload import ROWS_FORM
from kvstore.table_stores import TableStores
from kvstore.tables.payload import TABLE_FORM
from pslite import Incoming, Postoffice
from pslite.errors import ProtocolError, UsageError
from pslite.plane import Formed, Ints, Job, Outcome, Piece, ServerPlane, cut

#: Copies that nobody has asked for, such as those of parts that went their own ways.
_MAX_COPIES = 16
#: So long after keys were made, memory that is free goes back to the system.
_TRIM_AFTER_S = 1.0


class _Copy(NamedTuple):
    """Values of some parts, and how often their arenas had been written by then."""

    values: Flat
    changes: Mapping[Arena, int]

    @property
    def is_current(self) -> bool:
        """Whether the parts still have these values."""
        return all(arena.changes == count for arena, count in self.changes.items())


class ServerStores:
    """The stores of one server. Implements ``pslite.plane.ServerApp``."""

    def __init__(self, node: Postoffice, import_errors: Sequence[str] = ()) -> None:
        config = node.config
        self._node = node
        self._import_errors = import_errors
        self._ranks = tuple(range(config.num_workers))
        self._stores: dict[int, StoreState] = {}
        self._parts = PartTable()
        self._lane = self._lane_bytes = 0
        #: Parts -> their values right after an update, until ``read`` asks for them.
        self._copies: dict[Ints, _Copy] = {}
        self._num_rounds = 0
        self._is_trim_due = False
        self._trim_at = 0.0
        self._plane = ServerPlane(
            self,
            window=config.round_window,
            message_bytes=message_bytes(config, by_tcp=True),
            stall_report_s=config.stall_report_s,
        )
        self._lanes = Lanes(node.pool.submit)
        self._rows = RowStores(self._plane, self._store, self._next_lane, self._lanes)
        self._tables = TableStores(
            self._plane, self._store, self._optimizer_of, self._next_lane, self._lanes
        )
        node.traffic.serve(self._plane)
        node.traffic.add_owner(self)
        self._calls: dict[int, Callable[[Incoming], None]] = {
            StoreCall.INIT: self._init,
            StoreCall.SET_OPTIMIZER: self._set_optimizer,
            StoreCall.OPTIMIZER: self._optimizer,
            StoreCall.DELETE: self._delete,
            StoreCall.READ: self._read_parts,
            StoreCall.WRITE: self._write_parts,
            StoreCall.STATS: self._stats,
            StoreCall.COMMAND: self._command,
            StoreCall.CLOSE: self._close,
            StoreCall.SET_COMPRESSION: self._set_compression,
            **self._rows.calls,
            **self._tables.calls,
        }

    def name_of(self, part: int) -> str | None:
        """The key or table that a part belongs to, for reports (``pslite/traffic.py``)."""
        table = self._tables.get(part)
        if table is not None:
            return table.title
        found = self._parts.get(part) or self._rows.get(part)
        return None if found is None else f"key {found.entry.key!r}"

    def send_joined(self) -> None:
        """A server holds nothing back."""

    # -- rounds ------------------------------------------------------------------------

    def apply(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Apply complete rounds. On the pool thread of the parts' lane; never raises."""
        if any(job.is_formed for job in jobs):
            return [self._apply_formed(job) for job in jobs]
        # A statistic: a lost count between threads is no harm.
        self._num_rounds += sum(len(job.parts) for job in jobs)
        copies = [self._room_for_copy(job) for job in jobs]
        outcomes = self._parts.apply(jobs, copies)
        for job, copy, outcome in zip(jobs, copies, outcomes, strict=True):
            if copy is not None and outcome is None:
                if len(self._copies) >= _MAX_COPIES:
                    self._copies.clear()
                arenas = {part.arena for part in map(self._parts.get, job.parts) if part}
                self._copies[job.parts] = _Copy(copy, {each: each.changes for each in arenas})
        return outcomes

    def _apply_formed(self, job: Job) -> Outcome:
        if not job.is_formed:
            return self.apply([job])[0]
        self._num_rounds += 1
        if self._tables.get(job.parts[0]) is not None:
            return self._tables.apply(job)
        return self._rows.apply(job, self._parts.get(job.parts[0]))

    def take(self, part: int, form: int, piece: Piece, *, is_push: bool) -> Formed:
        """Rows, which are pushed or wanted; see ``row_parts.py`` and ``table_parts.py``."""
        table = self._tables.get(part)
        if table is not None and form == TABLE_FORM:
            ids: Formed = table.take(bytes_of(piece), is_push=is_push)
            return ids
        found = self._rows.get(part) or self._parts.get(part)
        if form != ROWS_FORM or found is None:
            raise UsageError(f"part {part} is not known to this server, or not in form {form}")
        if is_push and isinstance(found, Part) and found.codecs.push is not None:
            raise UsageError(f"part {part} is pushed encoded, and not in rows")
        rows: Formed = taken(found, piece, is_push=is_push)
        return rows

    def check(self, part: int, piece: Piece) -> None:
        """An encoded contribution; see ``arena.py``."""
        found = self._parts.get(part)
        if found is not None:
            found.check_push(bytes_of(piece))

    def answer(self, part: int, wanted: Any) -> Any:
        """Rows that are wanted, copied: others may change them as soon as this returns."""
        table = self._tables.get(part)
        if table is not None:
            return table.answer(wanted, self._node.buffer)
        most_bytes = self._node.config.max_message_bytes
        rows = self._rows.get(part)
        if rows is not None:
            return rows.answer(wanted, self._node.buffer, most_bytes)
        dense = self._parts.get(part)
        if dense is None:
            raise UsageError("the key was deleted")
        return answer_cut(dense, wanted, self._node.buffer, most_bytes)

    def _room_for_copy(self, job: Job) -> Flat | None:
        """Where asynchronous values go that are to be sent; others are sent as they lie."""
        part = self._parts.get(job.parts[0])
        if not job.wanted or part is None or part.arena.store.ranks is not None:
            return None
        if part.arena.store.compression.rules:
            return None  # what comes or goes encoded is not copied on the way
        return self._node.buffer(sum(job.sizes))

    def read(self, parts: Sequence[int]) -> list[Any]:
        """The parts' values in order, neighbours as one frame."""
        copied = self._copies.pop(tuple(parts), None)
        if copied is not None and copied.is_current:
            return [copied.values.data]
        frames = []
        for arena, start, stop, part in self._parts.frames(tuple(parts)):
            if part is not None:
                frames.append(part.encoded(self._node.buffer).data)
                continue
            values = arena.weight[start:stop].view(np.uint8)
            # A synchronous value stays as it is until everybody who wants it has it; an
            # asynchronous one may change as soon as this returns.
            if arena.store.ranks is None:
                copy = self._node.buffer(len(values))
                copy[:] = values
                values = copy
            frames.append(values.data)
        return frames

    # -- requests ----------------------------------------------------------------------

    def handle(self, incoming: Incoming) -> None:
        """A request of ``StoreCall``. On the I/O thread."""
        call = self._calls.get(incoming.head)
        if call is None:
            raise ProtocolError(f"a server knows no call {incoming.head}")
        call(incoming)

    def _init(self, incoming: Incoming) -> None:
        """Create parts with the values in the frames, one after the other."""
        number, synchronous, table, rules = unpack(incoming.body, int, bool, list, list)
        entries = unpack_parts(table)
        if len(rules) != len(entries):
            raise ProtocolError("each part needs the number of a rule")
        sizes = [entry.num_elements * entry.dtype.itemsize for entry in entries]
        pieces = cut(sizes, incoming.frames)
        store = self._store(number, synchronous)
        codecs = [codecs_of(store.compression, rule) for rule in rules]
        store.check_whole(entries)
        # A rank that stands in for one that left half-way finds some parts there; they stay.
        new = [index for index, entry in enumerate(entries) if entry.part not in self._parts]
        for group in _same_dtype(entries, new):
            values = [bytes_of(pieces[index]) for index in group]
            mine = [entries[index] for index in group]
            arena = Arena(store, self._lane_of(values), mine, values, self._node.buffer)
            for index, part in zip(group, arena.parts, strict=True):
                part.set_codecs(codecs[index])
                self._parts.add(part)
                self._plane.open_part(
                    part.entry.part,
                    part.pull_bytes,
                    store.ranks,
                    arena.lane,
                    part.push_bytes,
                    is_checked=part.codecs.push is not None,
                )
                store.has_part(part.entry)
        incoming.respond()
        # The values came in messages; between processes of one machine no more come so.
        self._trim_at = self._node.clock() + _TRIM_AFTER_S
        if not self._is_trim_due:
            self._is_trim_due = True
            self._node.errands.look_after_each_step(self._trim)

    def _trim(self) -> bool:
        """Give free memory back, a while after the last keys were made; whether that is done.

        Not by a timer, for a node that ends waits for those.
        """
        if self._node.clock() < self._trim_at:
            return False
        self._is_trim_due = False
        return_freed_memory()
        return True

    def _lane_of(self, values: Sequence[Flat]) -> int:
        """The lane of a new arena; small ones share one, so that they can be updated together."""
        # One large message's worth (``plan.py``): keys that came one by one, and a small model of
        # whose keys a loop makes messages of its own. What lies on two lanes goes on part by part.
        nbytes = sum(map(len, values))
        if self._lane_bytes + nbytes > most_group_bytes(self._node.config):
            self._lane += 1
            self._lane_bytes = 0
        self._lane_bytes += nbytes
        return self._lane

    def _next_lane(self) -> int:
        """A lane of its own; what comes next begins another one."""
        self._lane += 1
        self._lane_bytes = 0
        lane = self._lane
        self._lane += 1
        return lane

    def _store(self, number: int, synchronous: bool) -> StoreState:
        found = self._stores.get(number)
        if found is None:
            ranks = self._ranks if synchronous else None
            found = self._stores[number] = StoreState(ranks)
        return found

    def _delete(self, incoming: Incoming) -> None:
        """Forget parts; those that are gone already are no error (another rank deleted half)."""
        _, parts = unpack(incoming.body, int, list)
        self._forget(parts)
        incoming.respond()

    def _close(self, incoming: Incoming) -> None:
        """Forget a store and its parts: all workers have closed it."""
        number, parts = unpack(incoming.body, int, list)
        store = self._stores.pop(number, None)
        self._forget([*parts, *(part.number for part in self._tables if part.store is store)])
        incoming.respond()

    def _forget(self, parts: Sequence[Any]) -> None:
        self._copies.clear()
        for number_of_part in parts:
            table = self._tables.remove(number_of_part)
            if table is not None:
                closed = UsageError(f"the {table.title} was closed")
                self._node.traffic.carry_out(self._plane.close_part(number_of_part, closed))
                continue
            part = self._parts.remove(number_of_part) or self._rows.remove(number_of_part)
            if part is None:
                continue
            part.store.lost_part(part.entry)
            gone = UsageError(f"the key {part.entry.key!r} was deleted")
            self._node.traffic.carry_out(self._plane.close_part(number_of_part, gone))

    def _set_compression(self, incoming: Incoming) -> None:
        """All workers are here, and nothing is under way."""
        number, synchronous, only_check, plain, rows = unpack(
            incoming.body, int, bool, bool, list, list
        )
        store = self._store(number, synchronous)
        compression = Compression.from_plain(plain)
        codecs = {}
        for row in rows:
            if type(row) is not list or len(row) != 2 or type(row[0]) is not int:
                raise ProtocolError("a part's rule is malformed")
            codecs[row[0]] = codecs_of(compression, row[1])
        mine = [part for part in self._parts if part.store is store and part.entry.part in codecs]
        for part in mine:
            if not self._plane.is_quiet(part.entry.part):
                raise UsageError(
                    f"the key {part.entry.key!r} is pushed or pulled while its compression is set: "
                    "no thread may do that meanwhile"
                )
        if not only_check:
            store.compression = compression
            self._copies.clear()
            for part in mine:
                part.set_codecs(codecs[part.entry.part])
                self._plane.resize_part(
                    part.entry.part,
                    part.pull_bytes,
                    part.push_bytes,
                    is_checked=part.codecs.push is not None,
                )
            self._parts.forget_lists()
        incoming.respond()

    def _set_optimizer(self, incoming: Incoming) -> None:
        number, synchronous, only_check, plain = unpack(incoming.body, int, bool, bool, list)
        wanted = self._optimizer_of(plain)
        store = self._store(number, synchronous)
        if wanted.scope == "key" and store.cut_keys:
            names = ", ".join(repr(key) for key in list(store.cut_keys)[:5])
            raise UsageError(
                f"the optimizer {wanted.name} needs whole keys, but {names} were cut in parts by "
                "init: call set_optimizer before init"
            )
        if not only_check and store.optimizer != wanted:
            store.optimizer = wanted
        incoming.respond()

    def _optimizer_of(self, plain: list[Any]) -> Optimizer:
        try:
            return from_plain(plain)
        except UsageError as error:
            lines = [f"{self._node.membership.title(self._node_id)}: {error}", *self._import_errors]
            raise type(error)("\n".join(lines)) from None

    @property
    def _node_id(self) -> int:
        return self._node.info.node_id if self._node.info is not None else 0

    def _optimizer(self, incoming: Incoming) -> None:
        (number,) = unpack(incoming.body, int)
        store = self._stores.get(number)
        optimizer = None if store is None else store.optimizer
        incoming.respond(pack([] if optimizer is None else [to_plain(optimizer)]))

    # -- values and states, for files --------------------------------------------------

    def _read_parts(self, incoming: Incoming) -> None:
        """Copies of values and states: of each part a frame of values, then one of each state."""
        (numbers,) = unpack(incoming.body, list)
        parts = self._found(numbers)
        copies: dict[int, tuple[int, list[bytes]]] = {}

        def copy(part: Part) -> None:
            arrays = [part.weight, *part.state(part.arena.store.optimizer)]
            copies[part.entry.part] = (part.count, [array.tobytes() for array in arrays])

        def answer() -> None:
            found = [copies[part.entry.part] for part in parts]
            frames = [frame for _, row in found for frame in row]
            incoming.respond(pack([count for count, _ in found]), frames)

        self._lanes.run(incoming, parts, copy, answer)

    def _write_parts(self, incoming: Incoming) -> None:
        """Set states and counts (and values) from what ``_read_parts`` gave: ``Part.write``."""
        numbers, counts, has_values = unpack(incoming.body, list, list, bool)
        parts = self._found(numbers)
        if len(counts) != len(parts) or not all(type(n) is int and n >= 0 for n in counts):
            raise ProtocolError("a count is malformed, or there are too few")
        rest = iter(incoming.frames)
        rows = [list(itertools.islice(rest, has_values + part.num_states)) for part in parts]
        if rows:
            rows[-1] += rest
        found = {
            part.entry.part: (count, row)
            for part, count, row in zip(parts, counts, rows, strict=True)
        }

        def write(part: Part) -> None:
            part.write(*found[part.entry.part], has_values=has_values)

        self._lanes.run(incoming, parts, write, incoming.respond)

    def _found(self, numbers: Sequence[Any]) -> list[Part]:
        parts = []
        for number in numbers:
            part = self._parts.get(number) if type(number) is int else None
            if part is None:
                raise UsageError(f"part {number!r} is not known to this server")
            parts.append(part)
        return parts

    # -- statistics and commands -------------------------------------------------------

    def _stats(self, incoming: Incoming) -> None:
        arenas = {part.arena for part in self._parts}
        incoming.respond(
            pack(
                {
                    "parts": len(self._parts) + len(self._rows) + len(self._tables),
                    "value_bytes": sum(arena.weight.nbytes for arena in arenas)
                    + sum(part.table.nbytes for part in self._rows)
                    + sum(part.share.slots.values.nbytes for part in self._tables),
                    "state_bytes": sum(arena.state_bytes for arena in arenas)
                    + sum(part.table.state_bytes for part in self._rows)
                    + sum(each.nbytes for part in self._tables for each in part.share.slots.states),
                    "rounds": self._num_rounds,
                    **self._compression_stats(),
                    "waiting_contributions": self._plane.num_waiting,
                }
            )
        )

    def _compression_stats(self) -> dict[str, Any]:
        """What was decoded and encoded, by the numbers of the stores that do that."""
        found = {
            str(number): store.compression.statistics.plain()
            for number, store in self._stores.items()
            if store.compression.rules
        }
        return {"compression": found} if found else {}

    def _command(self, incoming: Incoming) -> None:
        head, body = unpack(incoming.body, int, str)

        def run() -> None:
            try:
                incoming.respond(pack(run_command(head, body)))
            except Exception as error:
                incoming.fail(error)

        self._node.pool.submit(0, run)


def _same_dtype(entries: Sequence[PartEntry], indices: Sequence[int]) -> Iterator[list[int]]:
    """The indices, in groups of neighbours of one dtype."""
    group: list[int] = []
    for index in indices:
        if group and entries[group[-1]].dtype != entries[index].dtype:
            yield group
            group = []
        group.append(index)
    if group:
        yield group
