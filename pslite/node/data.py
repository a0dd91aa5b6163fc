"""``Traffic``: connects the data plane with a node's messages (I/O thread).

``plane/`` decides. This file passes received messages to it, sends its messages as far as credits
allow, and hands a server's work to the pool. A worker has a ``WorkerPlane``; a server gets its
``ServerPlane`` from the app that it serves.
"""

from __future__ import annotations

import heapq
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from pslite.errors import NodeLostError, ProtocolError, PSError, UsageError, told
from pslite.future import Future
from pslite.ids import NodeInfo, Role, node_id
from pslite.node.customer import Handler, Incoming
from pslite.node.links import Delivery
from pslite.node.office import Office, PartOwner, Relaying
from pslite.node.open_rounds import OpenRounds
from pslite.node.primary import Primary
from pslite.node.recorded_requests import Answers
from pslite.node.standby import Outcomes, Standby
from pslite.plane import (
    Effect,
    Job,
    Run,
    Send,
    ServerPlane,
    Transfer,
    WorkerPlane,
)
from pslite.protocol.relays import contributor_of, node_of
from pslite.protocol.send_window import LOOK_S
from pslite.wire.base import Message
from pslite.wire.messages import Answer, Exchange, PartsFailed, RoundWaits, StaleEpoch
from pslite.wire.recovery import PayloadPiece, Recorded, RequestRecord, RoundRecord
from pslite.wire.survey import Wait

#: The messages of the data plane.
MESSAGES: tuple[type[Message], ...] = (Exchange, Answer, PartsFailed, StaleEpoch, RoundWaits)

#: The messages between a server and its standby.
RECORDS = (RoundRecord, RequestRecord, PayloadPiece, Recorded)

#: Jobs of at most this many bytes run on the I/O thread: waking another thread takes longer.
_QUICK_BYTES = 1 << 18
#: Jobs of at most this many bytes also run there if they arrive one by one, each after a pause.
#: If many arrive, the I/O thread must keep receiving.
_LONE_BYTES = 1 << 22
_PAUSE_S = 0.0005
#: But if this many jobs in a row of a lane took longer than this, the pool runs the lane's next
#: jobs. A user's own optimizer may be slow.
_SLOW_S = 0.005
_SLOW_IN_A_ROW = 3
#: Slow jobs are counted for at most this many lanes.
_MOST_LANES = 4096
#: The most answers to requests that are remembered.
_MOST_ANSWERS = 256
#: How often ``tick`` must be called.
TICK_INTERVAL_S = 1.0


T = TypeVar("T")

_numbers = itertools.count()
"""The order of messages of one priority that wait for room."""


class Traffic:
    """The data that one node sends and receives."""

    def __init__(self, office: Office) -> None:
        self._office = office
        window = office.config.round_window
        #: Only workers and servers that relay push and pull.
        self.worker = WorkerPlane(window)
        self._server: ServerPlane | None = None
        #: On a server with a standby: its side. On a standby: its side, also after it has taken
        #: the place of its server.
        self.primary: Primary | None = None
        self.standby: Standby | None = None
        #: On a server that relays.
        self.relay: Relaying | None = None
        #: What this server has answered, or the one whose place it has taken.
        self._answers = Answers(_MOST_ANSWERS)
        #: What all stores of this node share; it is kept as long as the node.
        self.shared: Any = None
        #: Completes when the step that begins has begun.
        self._beginning: Future[None] | None = None
        #: When a job last ended on this thread, or was given to the pool.
        self._worked_at = 0.0
        #: Lane -> how many of its small jobs in a row were slow.
        self._slow_jobs: Counter[int] = Counter()
        #: The stores of this node, in the order in which they were made.
        self._owners: weakref.WeakKeyDictionary[PartOwner, None] = weakref.WeakKeyDictionary()
        self._open = OpenRounds(lambda: office.membership.relays)
        #: Worker's uid -> answers that wait for room on its connection, as heaps of (-priority,
        #: number, node, answer).
        self.unsent: dict[str, list[tuple[int, int, int, Send]]] = {}

    def serve(self, plane: ServerPlane, handle: Handler) -> None:
        """Set a server's half of the plane; call it before the node runs.

        ``handle`` carries out requests that ``replicate`` has passed to a standby.
        """
        self._server = plane
        if self._office.config.standbys:
            self.primary = Primary(self._office, plane, self.execute, self.carry_out, self._answers)
        if self._office.config.stands_by:
            self.standby = Standby(self._office, plane, self.execute, handle, self._answers)

    def begin_with(self, standby: NodeInfo) -> None:
        """Let a standby repeat all that this server does, from its beginning."""
        if self.primary is not None:
            self.primary.begin(standby)

    def paired(self) -> list[str]:
        """Return this server's standby, or the server that this process stands by for."""
        standby = None if self.primary is None else self.primary.standby
        server = None if self.standby is None else self.standby.primary
        return [node.uid for node in (standby, server) if node is not None]

    @property
    def stands_by(self) -> bool:
        """Whether this process has begun to stand by for a server."""
        return self.standby is not None and self.standby.has_begun

    def record_arrived(self, delivery: Delivery) -> None:
        """Handle one of ``RECORDS``, of a server to its standby or back."""
        message, primary = delivery.message, self.primary
        if not isinstance(message, Recorded):
            if self.standby is not None:
                self.standby.arrived(delivery)
        elif primary is not None and primary.is_standby(delivery.peer):
            primary.told(message)

    def replicate(self, incoming: Incoming, handle: Handler, *, alone: bool) -> None:
        """Carry out a request that changes this server's state, here and on its standby.

        With ``alone``, no round is applied meanwhile.
        """
        uid = self._office.membership.uids.get(incoming.sender, "")
        if self._answers.again((uid, incoming.request.request_id), incoming):
            return
        if self.primary is not None:
            self.primary.request(incoming, handle, alone=alone)
        else:
            handle(incoming)

    def add_owner(self, owner: PartOwner) -> None:
        """Add a store that uses this node (a weak reference to it). From any thread."""
        self._owners[owner] = None

    def send_joined(self) -> None:
        """Submit requests that stores hold back to join them. From any thread."""
        for owner in self._owners_now():
            owner.send_joined()

    def _owners_now(self) -> list[PartOwner]:
        return [owner for known in self._owners.keyrefs() if (owner := known()) is not None]

    def begin_step(self, note: Callable[[dict[int, int] | None], Future[Any]]) -> Future[None]:
        """Begin a step that another process could repeat. From any thread of a worker.

        Later pushes and pulls wait until the earlier ones have arrived at the servers, and until
        the future of ``note(counts)`` is done. (With standbys they wait until the earlier ones are
        answered: with a server, what it has not applied is lost.) ``note`` is called on the I/O
        thread with the number of pushes of each part so far (``WorkerPlane.counts``), and has to
        keep them where a loss of this process does not reach. The result completes then. Only one
        step may begin at a time.
        """
        begun: Future[None] = Future("the servers to accept earlier pushes")
        office, plane = self._office, self.worker

        def begin() -> None:
            if office.error is not None:
                begun.set_error(office.error)
                return
            self._beginning = begun
            plane.hold_back()
            if not look():
                office.io_queue.look_after_each_step(look)

        def look() -> bool:
            roster = office.membership.roster
            servers = [node.uid for node in roster if node.role == Role.SERVER.value]
            if office.config.standbys:
                has_arrived = plane.everything_answered_before
            else:
                has_arrived = plane.everything_sent_before
                has_arrived = has_arrived and office.links.everything_accepted(servers)
            if has_arrived and office.error is None:
                note(plane.counts()).on_done(go_on)
            return has_arrived or office.error is not None

        def go_on(noted: Future[Any]) -> None:
            self._beginning = None
            plane.release()
            error = noted.error()
            if error is None:
                begun.set_result(None)
            else:
                begun.set_error(error)

        self.send_joined()
        office.io_queue.call(begin)
        return begun

    # -- from the node -----------------------------------------------------------------

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """Submit pushes, pulls or both."""
        if self._office.membership.role is not Role.WORKER:
            raise UsageError("only workers push and pull")
        for transfer in transfers:
            self.worker.submit(transfer)

    def arrived(self, delivery: Delivery, node: int) -> None:
        """Handle one of ``MESSAGES``, from a node of the roster."""
        message = delivery.message
        if isinstance(message, Exchange):
            rank = self._sender(node)
            if self._server is None or rank is None:
                raise UsageError("only workers and relays exchange data, and only with servers")
            if self._office.error is not None:
                refusal = self._refusal(message, self._office.error)
                self.carry_out(self._server.refuse(rank, message, refusal))
                return
            try:
                effects = self._server.exchange(rank, delivery.epoch, message, delivery.frames)
            except ProtocolError as error:
                self.carry_out(self._server.refuse(rank, message, error))
                raise
            self.carry_out(effects)
        elif isinstance(message, Answer):
            self.worker.answered(message, delivery.frames)
        elif isinstance(message, PartsFailed):
            self.worker.refused(message)
        elif isinstance(message, StaleEpoch):
            self.worker.stale(message)
            self._adopt_epoch()
        elif isinstance(message, RoundWaits):
            self._report(message, node)

    def _refusal(self, message: Exchange, error: BaseException) -> BaseException:
        """Return the error for requests to a server that has failed."""
        if not message.parts or not isinstance(error, NodeLostError):
            return error
        text = f"{error}; this call no longer accesses {self._name_of(message.parts[0])}"
        return NodeLostError(text, role=error.role, rank=error.rank)

    @property
    def everything_sent(self) -> bool:
        """Whether no request and no answer waits to be sent."""
        return self.worker.everything_sent and not self.unsent

    @property
    def num_unsent(self) -> int:
        """The number of messages that wait for room on a connection."""
        return self.worker.num_unsent + sum(map(len, self.unsent.values()))

    def send_queued(self, now: float) -> float:
        """Send what connections have room for, highest priority first.

        Returns when to call this again.
        """
        for uid, queue in list(self.unsent.items()):
            while queue and self._office.links.has_room(uid, now):
                *_, node, effect = heapq.heappop(queue)
                if self._office.membership.uids.get(node) == uid:  # else it was lost
                    self._send(node, effect)
            if not queue:
                del self.unsent[uid]
        plane, office = self.worker, self._office
        for server in list(plane.outbox):
            peer = office.membership.uids.get(server)
            if peer is None or office.sharing.awaits(peer, now):
                continue
            while server in plane.outbox and office.links.has_room(peer, now):
                send = plane.take(server)
                epoch = office.membership.epoch
                office.links.send(peer, send.message, send.frames, epoch, now)
        return now + LOOK_S if plane.outbox or self.unsent else math.inf

    def forget(self, parts: Iterable[int]) -> None:
        """Forget these parts: the worker will not request them again."""
        self.worker.forget(parts)

    @property
    def is_applying(self) -> bool:
        """Whether a server has pushes that are not applied and answered yet."""
        if self._server is None:
            return False
        return self._server.is_applying or (self.relay is not None and not self.relay.is_done)

    @property
    def is_computing(self) -> bool:
        """Whether this server applies pushes; those that it has relayed may wait."""
        return self._server is not None and self._server.is_computing

    def awaits(self, peer: str) -> bool:
        """Return whether this worker waits for an answer from ``peer``."""
        return self._office.membership.node_ids.get(peer) in self.worker.waiting_for()

    def has_waiting(self, node: int) -> bool:
        """Return whether ``node`` waits for an answer from this server."""
        rank = self._sender(node)
        if self._server is None or rank is None:
            return False
        is_queued = self._office.membership.uids.get(node) in self.unsent
        return is_queued or self._server.has_waiting(rank)

    def tick(self, now: float) -> None:
        """Report a server's rounds that have been open for a long time."""
        if self._server is not None:
            self.carry_out(list(map(self._open.named, self._server.tick(now))))
        if self.relay is not None:
            self.relay.tick()

    def departed(self, node: int, error: BaseException, *, left: bool) -> None:
        """Act on the end of a node; with ``left``, it may still wait for answers."""
        self.worker.depart(node, error)
        rank = self._sender(node)
        if self._server is not None and rank is not None:
            depart = self._server.leave if left else self._server.depart
            self.carry_out(depart(rank, error))
            if self.relay is not None:
                self.relay.departed(rank, error)

    def returned(self, node: int) -> None:
        """Go on with another process in the seat of a lost worker or server."""
        rank = contributor_of(node)
        if rank < 0:
            self.worker.reroute(node)
        elif self._server is not None:
            self.carry_out(self._server.returned(rank))

    def begin_epoch(self, epoch: int) -> None:
        """Begin a later epoch, which the scheduler has announced."""
        self._office.membership.epoch = epoch
        self.worker.begin_epoch(epoch)
        if self._server is not None:
            self.carry_out(self._server.begin_epoch(epoch))

    def fail(self, error: BaseException) -> None:
        """Fail all requests of this node, and later ones."""
        self.worker.fail(error)
        if self._beginning is not None:
            self._beginning.set_error(error)

    def close(self) -> None:
        """Release the app and all memory: the node has ended."""
        self._server = self.primary = self.standby = self.relay = None
        self.unsent.clear()
        self.worker.close()

    # -- inside ------------------------------------------------------------------------

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Carry out effects of a server's plane. On the I/O thread."""
        for effect in effects:
            if isinstance(effect, Send):
                node = node_of(effect.peer)
                peer = self._office.membership.uids.get(node)
                if peer is None:
                    continue  # it is gone
                if effect.frames and not self._has_room(peer):
                    self._put_off(peer, node, effect)
                else:
                    self._send(node, effect)
            elif effect.lane < 0 and self.relay is not None:
                self.relay.run(effect)
            elif self.primary is not None:
                self.primary.run(effect)
            elif self._server is not None:
                plane, jobs = self._server, effect.jobs
                work = partial(plane.app.apply, jobs)
                self.execute(effect, work, partial(self._finish, plane, jobs))

    def _has_room(self, peer: str) -> bool:
        """Return whether values can be sent to a peer now."""
        office = self._office
        if office.sharing.reaches(peer):  # it reads the values from this memory
            return True
        return peer not in self.unsent and office.links.has_room(peer, office.clock())

    def _put_off(self, peer: str, node: int, effect: Send) -> None:
        """Queue values until there is room on the connection."""
        entry = (-effect.priority, next(_numbers), node, effect)
        heapq.heappush(self.unsent.setdefault(peer, []), entry)

    def _send(self, node: int, effect: Send) -> None:
        """Send a server's message, or an error if it cannot be sent."""
        try:
            self._office.send(node, effect.message, effect.frames)
        except PSError as error:
            answer = effect.message
            if not isinstance(answer, Answer):
                raise
            title = self._office.membership.title(node)
            text = f"cannot send an answer to {title}: {error}"
            self._office.log.warn_seldom(f"unsendable answer to {title}", text)
            failed = PartsFailed(answer.pushed, True, answer.parts, answer.rounds, *told(error))
            self._office.send(node, failed)

    def _finish(self, plane: ServerPlane, jobs: Sequence[Job], outcomes: Outcomes) -> None:
        self.carry_out(plane.finished(jobs, outcomes))

    def execute(self, run: Run, work: Callable[[], T], done: Callable[[T], None]) -> None:
        """Do ``work`` for a run on its lane; then call ``done``, on this thread."""
        office = self._office
        if self._is_quick(run):
            began = office.clock()
            outcomes = work()
            self._worked_at = office.clock()
            if self._worked_at - began > _SLOW_S:
                if len(self._slow_jobs) >= _MOST_LANES:
                    self._slow_jobs.clear()
                self._slow_jobs[run.lane] += 1
            else:
                self._slow_jobs.pop(run.lane, None)
            done(outcomes)
            return

        self._worked_at = office.clock()

        def in_pool() -> None:
            outcomes = work()
            office.io_queue.call(lambda: done(outcomes))

        office.pool.submit(run.lane, in_pool)

    def _is_quick(self, run: Run) -> bool:
        """Return whether to run the jobs on this thread now."""
        if self._slow_jobs[run.lane] >= _SLOW_IN_A_ROW or not self._office.pool.is_idle(run.lane):
            return False
        nbytes = sum(sum(job.sizes) * len(job.batch.payloads) for job in run.jobs)
        is_lone = nbytes <= _LONE_BYTES and self._office.clock() - self._worked_at > _PAUSE_S
        return nbytes <= _QUICK_BYTES or is_lone

    def _adopt_epoch(self) -> None:
        """Adopt the servers' epoch after this node's goodbye, if it is a new one."""
        office = self._office
        epoch = self.worker.awaited_epoch
        if office.membership.has_said_goodbye and epoch > office.membership.epoch:
            self.begin_epoch(epoch)

    def _report(self, message: RoundWaits, node: int) -> None:
        if self._server is not None:
            if self.relay is not None and self.relay.owner_of(message.part) == node:
                self.carry_out(self._server.pass_on(message))
            elif node in self._office.membership.fellows:
                self._open.learn(contributor_of(node), message)
            return
        title = self._office.membership.title
        missing = ", ".join(title(node_id(Role.WORKER, rank)) for rank in message.missing)
        what, waited_s = self._name_of(message.part), message.waited_s
        text = f"round {message.round} of {what} has waited {waited_s:.0f} s for {missing}"
        self._open.told.append((self._office.clock(), text))
        self._office.log.warn(text)

    def _name_of(self, part: int) -> str:
        names = (owner.name_of(part) for owner in self._owners_now())
        return next(filter(None, names), f"part {part}")

    def _sender(self, node: int) -> int | None:
        """Return the number of a worker, or of a server that relays; None for other nodes."""
        is_sender = (node % 2 and node >= 9) or node in self._office.membership.fellows
        return contributor_of(node) if is_sender else None

    @property
    def reports(self) -> Iterable[tuple[float, str]]:
        """The last reports of servers to this worker about long open rounds: (time, text)."""
        return self._open.told

    # -- for the status of a job -------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """The number of a worker's requests, or a server's parts, without an answer."""
        of_server = 0 if self._server is None else self._server.num_waiting + self._server.num_pulls
        return self.worker.num_active + of_server

    def open_rounds(self, now: float) -> tuple[int, list[Wait]]:
        """Return how many parts wait for workers, and the waits that are long."""
        if self._server is None:
            return 0, []
        open_ = self._server.open_rounds()
        waits = self._open.waits(open_, now, self._name_of)
        return sum(len(each.parts) for each in open_), waits
