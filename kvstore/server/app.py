"""The stores of a server: the data plane's app, and the answers to ``StoreCall``.

The plane (``pslite/plane``) decides which contributions make a round. ``dense.py`` and ``rows.py``
keep the parts and answer requests about them; this module handles whole stores, and finds which of
the two has a part. Requests arrive on the I/O thread. Read next: ``dense.py``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.serialize import from_plain, to_plain
from kvstore.protocol.commands import run_command
from kvstore.protocol.placement import message_bytes, most_group_bytes
from kvstore.protocol.requests import StoreCall, pack, unpack
from kvstore.server.dense import DenseStores
from kvstore.server.lanes import LaneNumbers, Lanes
from kvstore.server.memory import Part, StoreState
from kvstore.server.part_table import joined, neighbours
from kvstore.server.row_part import RowPart
from kvstore.server.rows import RowStores, taken
from kvstore.server.sparse import KeyPart, answer_cut
from kvstore.sparse.payload import ROWS_FORM
from pslite import Incoming, Postoffice
from pslite.errors import ProtocolError, UsageError
from pslite.ids import Role, node_id, rank_of, role_of
from pslite.plane import Formed, Job, Outcome, Piece, ServerPlane, StateRecord

#: Requests that one worker makes for all: the lowest live rank, which the directory chooses.
ONCE_FOR_ALL = frozenset(
    {
        StoreCall.INIT,
        StoreCall.SET_OPTIMIZER,
        StoreCall.DELETE,
        StoreCall.WRITE,
        StoreCall.CLOSE,
        StoreCall.INIT_ROWS,
        StoreCall.BEGIN_ROWS,
        StoreCall.WRITE_ROWS,
        StoreCall.END_ROWS,
        StoreCall.SET_COMPRESSION,
        StoreCall.CREATE_TABLE,
        StoreCall.TABLE_OPTIMIZER,
        StoreCall.RELAY_INIT,
    }
)
#: Requests that change what a server has, so that its standby repeats them -> whether no round may
#: be applied meanwhile.
REPEATED = {
    **dict.fromkeys(ONCE_FOR_ALL - {StoreCall.CREATE_TABLE, StoreCall.TABLE_OPTIMIZER}, True),
    StoreCall.KEEP_STEP: False,
}
#: The goodbye of a lower rank may reach a server this much later than the scheduler.
GOODBYE_S = 5.0
_LOOK_EVERY_S = 0.25


class OneForAll:
    """A filter that accepts ``ONCE_FOR_ALL`` requests from the lowest rank only.

    One worker sends them for all, so one that another sends is a mistake or malicious; it is not
    accepted. ``handle`` passes accepted requests to the app. Runs on the I/O thread.
    """

    def __init__(self, node: Postoffice, handle: Callable[[Incoming], None]) -> None:
        self._node = node
        self._handle = handle

    def handle(self, incoming: Incoming) -> None:
        """Pass a request on; one for all waits until its sender is the lowest rank."""
        if incoming.head in ONCE_FOR_ALL and self._first() < rank_of(incoming.sender):
            self._wait(incoming, GOODBYE_S)
        else:
            self._handle(incoming)

    def _first(self) -> int:
        # If all workers have left, the sender was the last one, or one of the last.
        return min(self._node.membership.live(Role.WORKER), default=sys.maxsize)

    def _wait(self, incoming: Incoming, patience_s: float) -> None:
        def look() -> None:
            try:
                self._look(incoming, patience_s - _LOOK_EVERY_S)
            except BaseException as error:  # an app's error must not end the I/O thread
                incoming.fail(error)

        self._node.io_queue.call_later(_LOOK_EVERY_S, look)

    def _look(self, incoming: Incoming, patience_s: float) -> None:
        first, rank = self._first(), rank_of(incoming.sender)
        if first >= rank:
            self._handle(incoming)
        elif patience_s > 0 and self._node.error is None:
            self._wait(incoming, patience_s)
        else:
            call = StoreCall(incoming.head).name
            raise UsageError(
                f"{call} came from worker {rank}, expected worker {first}, the lowest rank in "
                "the job; make the same calls on all workers"
            )


class ServerStores:
    """The stores of one server. Implements ``pslite.plane.ServerApp``."""

    def __init__(self, node: Postoffice, import_errors: Sequence[str] = ()) -> None:
        config = node.config
        self._node = node
        self._import_errors = import_errors
        self._stores: dict[int, StoreState] = {}
        self._num_rounds = 0
        #: Worker -> the step that another process would have to repeat (``dist/kept_steps.py``).
        self._kept_steps: dict[int, tuple[bytes, list[bytes]]] = {}
        self._plane = ServerPlane(
            self,
            window=config.round_window,
            message_bytes=message_bytes(config, by_tcp=True),
            stall_report_s=config.report_after_s,
            keeps_previous=config.rejoin_timeout_s > 0,
        )
        lanes = self._lanes = Lanes(node.pool.submit)
        # Small parts share a lane up to the size of one large message (``stores/dist/plan.py``), so
        # that keys that were created one by one are updated together. A message for parts of two
        # lanes is handled part by part.
        numbers = LaneNumbers(most_group_bytes(config))
        self._dense = DenseStores(node, self._plane, self._store, numbers, lanes)
        node.traffic.relay = self._dense.relay
        self._rows = RowStores(self._plane, self._store, self._optimizer_of, numbers.own, lanes)
        # Frequent calls that only concern dense parts go straight to them.
        parts = self._parts = self._dense.parts
        self.check, self.read, self.read_again = parts.check, parts.read, parts.read_again
        node.traffic.serve(self._plane, self._carry_out)
        node.traffic.add_owner(self)
        self._calls: dict[int, Callable[[Incoming], None]] = {
            StoreCall.SET_OPTIMIZER: self._set_optimizer,
            StoreCall.OPTIMIZER: self._optimizer,
            StoreCall.DELETE: self._delete,
            StoreCall.STATS: self._stats,
            StoreCall.COMMAND: self._command,
            StoreCall.CLOSE: self._close,
            StoreCall.KEEP_STEP: self._keep_step,
            StoreCall.KEPT_STEP: self._kept_step,
            **self._dense.calls,
            **self._rows.calls,
            StoreCall.SET_COMPRESSION: self._set_compression,
        }

    def name_of(self, part: int) -> str | None:
        """Return the key or table of a part, for reports.

        ``pslite/node/data.py`` uses it.
        """
        found = self._parts.get(part) or self._rows.get(part)
        return None if found is None else found.title

    def send_joined(self) -> None:
        """Do nothing: a server never holds messages back."""

    # -- rounds ------------------------------------------------------------------------

    def apply(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Apply complete rounds. On the pool thread of the parts' lane; never raises."""
        if len(jobs) > 1:
            return self._apply_several(jobs)
        (job,) = jobs
        # Only a statistic: if threads race and lose a count, it does no harm.
        self._num_rounds += len(job.parts)
        if job.is_formed:
            return [self._rows.apply(job, self._parts.get(job.parts[0]))]
        return [self._parts.apply(job)]

    def _apply_several(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Apply several jobs; neighbours among them as one."""
        outcomes: list[Outcome] = []
        for group in neighbours(jobs):
            (outcome,) = self.apply([joined(group)])
            stop = 0
            for job in group:
                start, stop = stop, stop + len(job.parts)
                outcomes.append(None if outcome is None else outcome[start:stop])
        return outcomes

    def summed(self, jobs: Sequence[Job]) -> list[Job]:
        """Replace contributions by their sums where these are shorter."""
        return [job if job.is_formed else self._parts.summed(job) for job in jobs]

    def copy_state(self) -> list[StateRecord] | None:
        """Return the state of all stores as requests for a new standby."""
        records: list[StateRecord] = []
        for number, store in self._stores.items():
            is_synchronous = store.ranks is not None
            if store.optimizer is not None:
                body = pack(number, is_synchronous, False, to_plain(store.optimizer))
                records.append(StateRecord(0, StoreCall.SET_OPTIMIZER, body, ()))
            if store.compression.rules:
                body = pack(number, is_synchronous, False, store.compression.plain(), [])
                records.append(StateRecord(0, StoreCall.SET_COMPRESSION, body, ()))
            records += self._dense.copies(number, store)
            rows = self._rows.copies(number, store)
            if rows is None:
                return None
            records += rows
        for rank, (body, frames) in self._kept_steps.items():
            sender = node_id(Role.WORKER, rank)
            records.append(StateRecord(sender, StoreCall.KEEP_STEP, body, frames))
        return records

    def take(self, part: int, form: int, piece: Piece, *, is_push: bool) -> Formed:
        """Check a push or a request of rows and return it; see ``row_part.py``."""
        found = self._rows.get(part) or self._parts.get(part)
        if form != ROWS_FORM or found is None:
            raise UsageError(f"this server does not have part {part} in form {form}")
        if is_push and isinstance(found, Part) and found.rule.chain is not None:
            raise UsageError(
                f"{found.title} has gradient compression, which does not take row-sparse pushes; "
                "push a dense value"
            )
        rows: Formed = taken(found, piece, is_push=is_push)
        return rows

    def answer(self, part: int, wanted: Any, *, before_last: bool) -> Any:
        """Return copies of the requested rows, since updates may change the originals."""
        most_bytes, allocate = self._node.config.max_message_bytes, self._node.buffer
        rows = self._rows.get(part)
        if rows is not None:
            return rows.answer(wanted, allocate, most_bytes, before_last=before_last)
        dense = self._parts.get(part)
        if dense is None:
            raise UsageError("the key was deleted")
        return answer_cut(dense, wanted, allocate, most_bytes, before_last=before_last)

    # -- requests ----------------------------------------------------------------------

    def handle(self, incoming: Incoming) -> None:
        """Handle a request (``StoreCall``). On the I/O thread."""
        is_from_server = role_of(incoming.sender) is Role.SERVER
        if is_from_server != (incoming.head == StoreCall.RELAY_ENDS):
            raise ProtocolError("servers send RELAY_ENDS and no other call, and only they do")
        if incoming.head in (StoreCall.COPY_PARTS, StoreCall.COPY_STATE, StoreCall.COPY_ROWS):
            raise ProtocolError(f"only a server sends {StoreCall(incoming.head).name}")
        if incoming.head in REPEATED:
            alone = REPEATED[StoreCall(incoming.head)]
            self._node.traffic.replicate(incoming, self._carry_out, alone=alone)
        elif incoming.head == StoreCall.CREATE_TABLE and self._node.traffic.primary is not None:
            # No standby repeats a table, in which rows appear by pulls, too.
            self._node.control.say_whether_to_return(False)
            self._node.traffic.primary.when_alone(partial(self._carry_out, incoming))
        else:
            self._carry_out(incoming)

    def _carry_out(self, incoming: Incoming) -> None:
        call = self._calls.get(incoming.head)
        if call is None:
            raise ProtocolError(f"unknown call {incoming.head}")
        call(incoming)

    def _store(self, number: int, synchronous: bool) -> StoreState:
        found = self._stores.get(number)
        if found is None:
            config = self._node.config
            ranks = tuple(range(config.num_workers)) if synchronous else None
            found = self._stores[number] = StoreState(ranks, config.rejoin_timeout_s > 0)
            found.contributors = self._dense.relay.contributors() if synchronous else None
        return found

    def _delete(self, incoming: Incoming) -> None:
        """Forget parts; another rank may have deleted some of them already."""
        _, parts = unpack(incoming.body, int, list)
        self._forget(parts)
        incoming.respond()

    def _close(self, incoming: Incoming) -> None:
        """Forget a store and its parts: all workers have closed it."""
        number, parts = unpack(incoming.body, int, list)
        store = self._stores.pop(number, None)
        rows = [part.number for part in self._rows if part.store is store]
        self._forget([*parts, *rows, *self._dense.relay.end(number)])
        incoming.respond()

    def _forget(self, parts: Sequence[Any]) -> None:
        for number_of_part in parts:
            part = self._parts.remove(number_of_part) or self._rows.remove(number_of_part)
            self._dense.relay.forget(number_of_part)
            if part is None:
                continue
            if isinstance(part, (Part, KeyPart)):
                part.store.lost_part(part.entry)
            gone = UsageError(f"the {part.title} was {part.ending}")
            self._node.traffic.carry_out(self._plane.close_part(number_of_part, gone))

    def _set_compression(self, incoming: Incoming) -> None:
        """Set the compression; from now on, nothing of the store is relayed."""
        number, _, only_check, *_ = unpack(incoming.body, int, bool, bool, list, list)
        self._dense.set_compression(incoming)
        if not only_check:
            self._forget(self._dense.relay.end(number))

    def _set_optimizer(self, incoming: Incoming) -> None:
        number, synchronous, only_check, plain = unpack(incoming.body, int, bool, bool, list)
        wanted = self._optimizer_of(plain)
        store = self._store(number, synchronous)
        cut_keys = store.cut_keys.get(wanted.scope)
        if cut_keys:
            names = ", ".join(repr(key) for key in list(cut_keys)[:5])
            raise UsageError(
                f"the optimizer {wanted.name} needs whole {wanted.scope}s, but init split "
                f"{names} into parts; call set_optimizer before init"
            )
        if only_check or store.optimizer == wanted:
            incoming.respond()
            return
        store.optimizer = wanted
        if self._node.traffic.primary is None:
            incoming.respond()
            return
        # Now and not at the next round or READ: a standby, which is not read, has the same states.
        mine = [part for part in (*self._parts, *self._rows) if part.store is store]
        self._lanes.run(incoming, mine, _take_states_over, incoming.respond)

    def _optimizer_of(self, plain: list[Any]) -> Optimizer:
        try:
            return from_plain(plain)
        except UsageError as error:
            node_id = 0 if self._node.info is None else self._node.info.node_id
            lines = [f"{self._node.membership.title(node_id)}: {error}", *self._import_errors]
            raise type(error)("\n".join(lines)) from None

    def _optimizer(self, incoming: Incoming) -> None:
        (number,) = unpack(incoming.body, int)
        store = self._stores.get(number)
        optimizer = None if store is None else store.optimizer
        incoming.respond(pack([] if optimizer is None else [to_plain(optimizer)]))

    # -- steps that another process may have to repeat ---------------------------------

    def _keep_step(self, incoming: Incoming) -> None:
        """Keep what a worker's step begins with; only another process of it reads this."""
        frames = [bytes(frame) for frame in incoming.frames]
        self._kept_steps[rank_of(incoming.sender)] = incoming.body, frames
        incoming.respond()

    def _kept_step(self, incoming: Incoming) -> None:
        body, frames = self._kept_steps.get(rank_of(incoming.sender), (b"", []))
        incoming.respond(body, frames)

    # -- statistics and commands -------------------------------------------------------

    def _stats(self, incoming: Incoming) -> None:
        own = [part for part in self._parts if part.lane >= 0]
        arenas = {part.arena for part in own}
        relayed = {part.arena for part in self._parts if part.lane < 0}
        row_sizes = [part.nbytes() for part in self._rows]
        primary = self._node.traffic.primary
        incoming.respond(
            pack(
                {
                    "parts": len(own) + len(self._rows),
                    "value_bytes": sum(arena.weight.nbytes for arena in arenas)
                    + sum(values for values, _ in row_sizes),
                    "state_bytes": sum(arena.state_bytes for arena in arenas)
                    + sum(states for _, states in row_sizes),
                    "relayed_bytes": sum(arena.weight.nbytes for arena in relayed),
                    "rounds": self._num_rounds,
                    **self._compression_stats(),
                    "waiting_contributions": self._plane.num_waiting,
                    "has_standby": primary is not None and primary.is_in_sync,
                }
            )
        )

    def _compression_stats(self) -> dict[str, Any]:
        """Return the compression statistics of each store, by its number."""
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
            except BaseException as error:  # SystemExit of a command must not end the pool's thread
                incoming.fail(error)

        self._node.pool.submit(0, run)


def _take_states_over(part: Part | RowPart) -> None:
    """Convert the states of a part for its store's optimizer. On the lane's thread."""
    with contextlib.suppress(Exception):  # the next round raises it
        if isinstance(part, Part):
            part.state(part.store.optimizer)
        elif isinstance(part, KeyPart):
            part.table.set_optimizer(part.store.optimizer)
