"""The data plane's place in a node: messages in, effects out. On the I/O thread.

``plane/`` decides; this file hands it what arrives, sends what it wants sent as far as credits
go, and lets the pool run a server's work. A worker has a ``WorkerPlane``; a server gets its
``ServerPlane`` from the app that it serves.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pslite.errors import NodeLostError, ProtocolError, PSError, UsageError, describe
from pslite.ids import SCHEDULER_ID, Role, node_id, rank_of, role_of
from pslite.node.links import Delivery
from pslite.node.office import Office
from pslite.plane import (
    Effect,
    Ints,
    Job,
    OpenRound,
    Outcome,
    Run,
    Send,
    ServerPlane,
    Transfer,
    WorkerPlane,
)
from pslite.wire.messages import Answer, Exchange, Message, PartsFailed, RoundWaits, StaleEpoch
from pslite.wire.survey import LEAST_WAIT_S, Wait

#: What belongs to the data plane.
MESSAGES: tuple[type[Message], ...] = (Exchange, Answer, PartsFailed, StaleEpoch, RoundWaits)

#: Jobs on so few bytes are done sooner than handed to another thread, which has to wake up.
_QUICK_BYTES = 1 << 18
#: Those of up to this many bytes are, too, if they come one by one, after a pause: in a stream
#: of them, the I/O thread had better go on receiving.
_LONE_BYTES = 1 << 22
_PAUSE_S = 0.0005
#: Unless this many of a lane in a row took longer than this: an optimizer of the user's own may.
_SLOW_S = 0.005
_SLOW_IN_A_ROW = 3
#: It is remembered for at most this many lanes.
_MOST_LANES = 4096
#: How often a server looks for rounds that have been open for long.
_TICK_INTERVAL_S = 1.0


class PartOwner(Protocol):
    """A store of a worker, or the stores of a server, to which some parts belong."""

    def name_of(self, part: int) -> str | None:
        """Return the part in words, or None if it is somebody else's. On the I/O thread."""

    def send_joined(self) -> None:
        """Submit what waits for company. From any thread."""


class Traffic:
    """The data that one node sends and receives."""

    def __init__(self, office: Office) -> None:
        self._office = office
        window = office.config.round_window
        #: On a server and the scheduler, which push and pull nothing, it stays empty.
        self._worker = WorkerPlane(window)
        self._server: ServerPlane | None = None
        self._tick_at = 0.0
        self._tick_interval_s = min(_TICK_INTERVAL_S, office.config.report_after_s / 2)
        #: When a job was last done here, or handed to the pool.
        self._worked_at = 0.0
        #: Lane -> how many of its jobs in a row took long though they were small.
        self._slow_jobs: Counter[int] = Counter()
        #: The stores of this node, in the order of their making.
        self._owners: weakref.WeakKeyDictionary[PartOwner, None] = weakref.WeakKeyDictionary()
        #: When servers last told a worker of rounds that lack others, and what they told.
        self.reports: deque[tuple[float, str]] = deque(maxlen=16)

    def serve(self, plane: ServerPlane) -> None:
        """Take a server's half of the plane; before the node is driven."""
        self._server = plane

    def add_owner(self, owner: PartOwner) -> None:
        """Note that a store uses this node; it is not kept alive. From any thread."""
        self._owners[owner] = None

    def send_joined(self) -> None:
        """Submit what stores hold back so that more may join it. From any thread."""
        for owner in self._owners_now():
            owner.send_joined()

    def _owners_now(self) -> list[PartOwner]:
        return [owner for known in self._owners.keyrefs() if (owner := known()) is not None]

    # -- from the node -----------------------------------------------------------------

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """Start pushes, pulls or both."""
        if self._office.role is not Role.WORKER:
            raise UsageError("only workers push and pull")
        for transfer in transfers:
            self._worker.submit(transfer)

    def arrived(self, delivery: Delivery, node: int) -> None:
        """Handle one of ``MESSAGES``, from a node of the roster."""
        message = delivery.message
        if isinstance(message, Exchange):
            if self._server is None or role_of(node) is not Role.WORKER:
                raise UsageError("only workers exchange data, and only with servers")
            rank = rank_of(node)
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
            self._worker.answered(message, delivery.frames)
        elif isinstance(message, PartsFailed):
            self._worker.refused(message)
        elif isinstance(message, StaleEpoch):
            self._worker.stale(message)
            self._adopt_epoch()
        elif isinstance(message, RoundWaits):
            self._report(message)

    def _refusal(self, message: Exchange, error: BaseException) -> BaseException:
        """Return why a server that has failed takes and gives no values."""
        if not message.parts or not isinstance(error, NodeLostError):
            return error
        text = f"{error}; {self._name_of(message.parts[0])} is no longer read or written"
        return NodeLostError(text, role=error.role, rank=error.rank)

    def send_queued(self, now: float) -> None:
        """Hand the worker's messages to the van, as far as credits go."""
        plane, office = self._worker, self._office
        credit_bytes = office.config.credit_bytes
        for server in plane.queued_servers():
            peer = office.membership.uids.get(server)
            if peer is not None and office.sharing.awaits(peer, now):
                continue
            while peer is not None and office.links.unaccepted_bytes(peer) < credit_bytes:
                send = plane.take(server)
                if send is None:
                    break
                epoch = office.membership.epoch
                office.links.send(peer, send.message, send.frames, epoch, now)

    def forget(self, parts: Iterable[int]) -> None:
        """Forget these parts: a worker will never ask for them again."""
        self._worker.forget(parts)

    @property
    def everything_sent(self) -> bool:
        """Whether nothing is held back any more."""
        return self._worker.everything_sent

    @property
    def everything_answered(self) -> bool:
        """Whether a worker waits for nothing that it has pushed or pulled."""
        return self._worker.idle

    @property
    def is_applying(self) -> bool:
        """Whether a server is at work on what was pushed."""
        return self._server is not None and self._server.is_applying

    @property
    def num_unsent(self) -> int:
        """A worker's messages that wait until peers have accepted others."""
        return self._worker.num_unsent

    def waiting_for(self) -> list[int]:
        """Return the servers that have still to answer a worker."""
        return self._worker.waiting_for()

    def awaits(self, peer: str) -> bool:
        """Return whether a worker waits for an answer of this peer."""
        return self._office.membership.node_ids.get(peer) in self.waiting_for()

    def has_waiting(self, node: int) -> bool:
        """Return whether this worker waits for an answer of this server."""
        is_worker = role_of(node) is Role.WORKER
        return self._server is not None and is_worker and self._server.has_waiting(rank_of(node))

    def tell_failures(self, tell: Callable[[BaseException], None]) -> None:
        """Tell of each push that fails from now on. On the I/O thread."""
        self._worker.tell_failures(tell)

    def run(self, now: float) -> None:
        """Do what time asks for."""
        if self._server is not None and now >= self._tick_at:
            self._tick_at = now + self._tick_interval_s
            self.carry_out(self._server.tick(now))

    def departed(self, node: int, error: BaseException, *, left: bool) -> None:
        """Act on the end of a node; with ``left``, it may still be there for answers."""
        self._worker.depart(node, error)
        if self._server is not None and role_of(node) is Role.WORKER:
            depart = self._server.leave if left else self._server.depart
            self.carry_out(depart(rank_of(node), error))
        if node == SCHEDULER_ID:
            self._adopt_epoch()

    def begin_epoch(self, epoch: int) -> None:
        """Begin a later epoch, which the scheduler has announced."""
        self._office.membership.epoch = epoch
        self._worker.begin_epoch(epoch)
        if self._server is not None:
            self.carry_out(self._server.begin_epoch(epoch))

    def fail(self, error: BaseException) -> None:
        """End all pushes and pulls with ``error``."""
        self._worker.fail(error)

    def close(self) -> None:
        """Release the app, and the memory that it and others hold: the node has ended."""
        self._server = None
        self._worker.close()

    # -- inside ------------------------------------------------------------------------

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Do what a server's plane asks for. On the I/O thread."""
        for effect in effects:
            if isinstance(effect, Send):
                self._send(node_id(Role.WORKER, effect.peer), effect)
            else:
                self._run_jobs(effect)

    def _send(self, worker: int, effect: Send) -> None:
        """Send a server's messages; who waits for one that cannot be sent gets an error."""
        try:
            self._office.send(worker, effect.message, effect.frames)
        except PSError as error:
            answer = effect.message
            if not isinstance(answer, Answer):
                raise
            title = self._office.membership.title(worker)
            text = f"an answer to {title} cannot be sent: {error}"
            self._office.log.warn_seldom(f"unsendable answer to {title}", text)
            failed = PartsFailed(
                answer.pushed, True, answer.parts, answer.rounds, *describe(error), "", -1
            )
            self._office.send(worker, failed)

    def _run_jobs(self, run: Run) -> None:
        plane, office = self._server, self._office
        if plane is None:
            return

        if office.pool.is_idle(run.lane) and self._is_quick(run):
            began = office.clock()
            outcomes = _outcomes(plane, run.jobs)
            self._worked_at = office.clock()
            self._note_speed(run.lane, is_slow=self._worked_at - began > _SLOW_S)
            self.carry_out(plane.finished(run.jobs, outcomes))
            return

        self._worked_at = office.clock()

        def work() -> None:
            outcomes = _outcomes(plane, run.jobs)
            office.errands.call(lambda: self.carry_out(plane.finished(run.jobs, outcomes)))

        office.pool.submit(run.lane, work)

    def _note_speed(self, lane: int, *, is_slow: bool) -> None:
        """Note whether a lane's job was slow; few lanes are remembered."""
        if is_slow:
            if len(self._slow_jobs) >= _MOST_LANES:
                self._slow_jobs.clear()
            self._slow_jobs[lane] += 1
        else:
            self._slow_jobs.pop(lane, None)

    def _is_quick(self, run: Run) -> bool:
        """Return whether to do it here and now."""
        if self._slow_jobs[run.lane] >= _SLOW_IN_A_ROW:
            return False
        nbytes = sum(sum(job.sizes) * len(job.batch.payloads) for job in run.jobs)
        is_lone = nbytes <= _LONE_BYTES and self._office.clock() - self._worked_at > _PAUSE_S
        return nbytes <= _QUICK_BYTES or is_lone

    def _adopt_epoch(self) -> None:
        """Take over the servers' epoch where no scheduler announces epochs."""
        office = self._office
        epoch = self._worker.awaited_epoch
        is_alone = SCHEDULER_ID in office.membership.gone or office.membership.has_said_goodbye
        if is_alone and epoch > office.membership.epoch:
            self.begin_epoch(epoch)

    def _report(self, message: RoundWaits) -> None:
        missing = ", ".join(
            self._office.membership.title(node_id(Role.WORKER, rank)) for rank in message.missing
        )
        what, waited_s = self._name_of(message.part), message.waited_s
        text = f"round {message.round} of {what} has waited {waited_s:.0f} s for {missing}"
        self.reports.append((self._office.clock(), text))
        self._office.log.warn(text)

    def _name_of(self, part: int) -> str:
        names = (owner.name_of(part) for owner in self._owners_now())
        return next(filter(None, names), f"part {part}")

    # -- for the status of a job -------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """A worker's pushes and pulls, or a server's parts, that are not answered yet."""
        of_server = 0 if self._server is None else self._server.num_waiting + self._server.num_pulls
        return self._worker.num_active + of_server

    def open_rounds(self, now: float) -> tuple[int, list[Wait]]:
        """Return how many parts wait for workers, and the waits that have lasted for a while."""
        if self._server is None:
            return 0, []
        open_ = self._server.open_rounds()
        return sum(len(each.parts) for each in open_), self._waits(open_, now)

    def _waits(self, open_: Sequence[OpenRound], now: float) -> list[Wait]:
        """Join the rounds that wait for the same workers into one wait each."""
        together: dict[tuple[int, Ints], list[OpenRound]] = {}
        for each in open_:
            if each.opened_at is not None and now - each.opened_at >= LEAST_WAIT_S:
                together.setdefault((each.round, each.missing), []).append(each)
        waits = []
        for (round_, missing), alike in together.items():
            more = sum(len(each.parts) for each in alike) - 1
            others = f" and {more} other part{'s' if more > 1 else ''}" if more else ""
            what = self._name_of(alike[0].parts[0]) + others
            names = tuple(f"{Role.WORKER.value} {rank}" for rank in missing)
            since = min(each.opened_at for each in alike if each.opened_at is not None)
            waits.append(Wait(what, round_, names, now - since))
        return waits


def _outcomes(plane: ServerPlane, jobs: Sequence[Job]) -> Sequence[Outcome]:
    """Have the app apply jobs, on any thread."""
    try:
        return plane.app.apply(jobs)
    except BaseException as error:  # an app must not raise; its callers must not hang
        return [[error] * len(job.parts) for job in jobs]
