"""``Primary`` and ``Standby``: a server, and its copy (I/O thread).

``protocol/replication.py`` has the rules. A server with a standby adds up the contributions of a
round first, and sends their sum as a record, while it applies it. It answers the workers when both
are done. So the standby costs the network one sum for each round, however many workers there are.
The standby has not joined the cluster: it knows the scheduler and its server, and no worker knows
it. It joins when it takes the seat of its server, which it has stopped hearing by then. Read next:
``node/seating.py`` for how a seat passes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pslite.errors import ProtocolError
from pslite.ids import SCHEDULER_ID, NodeInfo
from pslite.node.customer import Handler, Incoming
from pslite.node.links import Delivery
from pslite.node.office import Office
from pslite.plane import (
    Effect,
    Job,
    Outcome,
    Piece,
    Run,
    ServerPlane,
    StateRecord,
    frames_of,
    piece_from,
)
from pslite.protocol.replication import Journal, Replay, Turns, from_pieces, in_pieces
from pslite.van.base import size_of
from pslite.wire.base import Ints, Message
from pslite.wire.messages import Request, Response
from pslite.wire.recovery import (
    MayReturn,
    PayloadPiece,
    Recorded,
    RequestRecord,
    RoundRecord,
)

#: The most answers to requests that are remembered, for askers who ask the next process again.
_MOST_ANSWERS = 256
#: How long to wait before the next try to copy a state that was incomplete.
_AGAIN_S = 0.5
#: A standby may be behind by this many times the bytes that workers may send unaccepted.
_CREDITS = 4

Outcomes = Sequence[Outcome]
Execute = Callable[[Run, Callable[[], Outcomes], Callable[[Outcomes], None]], None]
"""Does work for the jobs of a run on their lane; then calls the last function, on this thread."""
Apply = Callable[[Sequence[Job]], Outcomes]
Question = tuple[str, int]
"""The asker's name in the van, and the number of its request."""
Answer = tuple[Response, Sequence[Any]]


@dataclass(slots=True)
class _Applying:
    """A round that is being applied and stored."""

    run: Run
    outcomes: Outcomes | None = None
    is_stored: bool = False


class Primary:
    """The side of a server: it sends records and answers when they are stored."""

    def __init__(
        self,
        office: Office,
        plane: ServerPlane,
        apply: Apply,
        execute: Execute,
        carry_out: Callable[[Sequence[Effect]], None],
    ) -> None:
        self._office = office
        self._plane = plane
        self._apply = apply
        self._execute = execute
        self._carry_out = carry_out
        #: The process that stands by, or is being filled; None if there is none.
        self.standby: NodeInfo | None = None
        self._journal = Journal(0)
        self._turns = Turns()
        #: The process that is to be filled next.
        self._awaited: NodeInfo | None = None
        self._when_alone: list[Callable[[], None]] = []
        #: The last record of the state that fills a new standby. Until it is stored, answers do not
        #: wait for records.
        self._filled_at = 0
        #: The last record for which no answer has waited. Once it is stored, the standby could take
        #: this server's place.
        self._in_sync_at = 0

    def is_standby(self, peer: str) -> bool:
        """Return whether ``peer`` stands by for this server, or will."""
        return any(each is not None and each.uid == peer for each in (self.standby, self._awaited))

    # -- the standby -------------------------------------------------------------------

    def begin(self, standby: NodeInfo) -> None:
        """Begin with a standby, before anything has happened here."""
        self.standby, self._journal = standby, self._new_journal(0)

    def fill(self, standby: NodeInfo) -> None:
        """Give a new standby all that is here, at a moment when no round is applied.

        Training goes on while the state is on its way.
        """
        self.go_on_alone()  # without the one before, if there was one: it is no longer a standby
        self._awaited = standby
        self._turns.add(self._copy, alone=True)

    def _copy(self) -> None:
        try:
            self._copy_now()
        except Exception as error:  # the server itself is well
            self._office.log.warn(f"the state cannot be copied to a standby: {error}")
            self._office.control.say_whether_to_return(False)
        finally:
            self._turns.ended()

    def _copy_now(self) -> None:
        standby = self._awaited
        records = self._plane.app.copy_state() if standby is not None else None
        if standby is None:
            pass  # it was lost, or is no longer wanted
        elif records is None:
            self._office.io_queue.call_later(_AGAIN_S, self._try_again)
        else:
            self._awaited = None
            nbytes = sum(size_of(frame) for record in records for frame in record.frames)
            self.standby, self._journal = standby, self._new_journal(nbytes)
            self._filled_at = self._in_sync_at = len(records) + 1
            for record in (*records, StateRecord(0, 0, b"", ())):
                self._ask_standby(record)

    def _try_again(self) -> None:
        if self._awaited is not None:
            self._turns.add(self._copy, alone=True)

    def when_alone(self, then: Callable[[], None]) -> None:
        """Call ``then`` once this server has no standby."""
        if self.standby is None:
            then()
        else:
            self._when_alone.append(then)

    def _new_journal(self, nbytes: int) -> Journal:
        return Journal(_CREDITS * self._office.config.credit_bytes + nbytes)

    def _ask_standby(self, r: StateRecord) -> None:
        self._record(
            lambda number, lengths: RequestRecord(
                number, True, r.sender, "", 0, 0, 0, r.head, r.body, lengths
            ),
            list(r.frames),
            _nothing,
            is_copy=True,
        )

    def told(self, message: Recorded) -> None:
        """Handle the standby's report."""
        for then in self._journal.told(message.stored, message.done):
            then()
        if self._filled_at and message.stored >= self._filled_at:
            self._filled_at, self._in_sync_at = 0, self._journal.last
        if self._in_sync_at and not self._filled_at and message.stored >= self._in_sync_at:
            self._in_sync_at = 0
            self._office.send(SCHEDULER_ID, MayReturn(True))

    def go_on_alone(self) -> None:
        """Go on without a standby, as the scheduler says."""
        standby = self.standby or self._awaited
        self.standby = self._awaited = None
        if standby is not None:
            self._office.links.shut(standby.uid)
            self._office.van.disconnect(standby.uid)
        self._filled_at = self._in_sync_at = 0
        waiting, self._when_alone = self._when_alone, []
        for then in (*self._journal.end(), *waiting):
            then()

    def _record(
        self,
        make: Callable[[int, Ints], Message],
        frames: list[Any],
        then: Callable[[], None],
        *,
        is_copy: bool = False,
    ) -> None:
        """Send a record; call ``then`` once the standby has it.

        ``make`` is called with its number, and with the bytes of each frame if the first of these
        bytes have gone before it. ``is_copy`` says that the frames change only after the standby
        has done with them.
        """
        if self.standby is None:
            then()
            return
        office, nbytes = self._office, sum(map(size_of, frames))
        waits = not self._filled_at or self._journal.is_crowded
        if not waits and not is_copy:
            frames = list(map(bytes, frames))  # they may change before the standby has them
        lengths: Ints = ()
        if nbytes > office.config.max_message_bytes:
            lengths = tuple(map(size_of, frames))
            *before, frames = in_pieces(frames, office.config.max_message_bytes)
            for piece in before:
                self._send_record(PayloadPiece, piece, _nothing)
        self._send_record(lambda n: make(n, lengths), frames, then if waits else _nothing)
        if not waits:
            then()

    def _send_record(
        self, make: Callable[[int], Message], frames: list[Any], then: Callable[[], None]
    ) -> None:
        office = self._office
        message = make(self._journal.add(frames, sum(map(size_of, frames)), then))
        if self.standby is not None:
            epoch, now = office.membership.epoch, office.clock()
            office.links.send(self.standby.uid, message, frames, epoch, now)

    # -- rounds ------------------------------------------------------------------------

    def run(self, run: Run) -> None:
        """Apply rounds, and let the standby apply them."""
        self._turns.add(partial(self._begin, run))

    def _begin(self, run: Run) -> None:
        applying = _Applying(run)

        def work() -> Outcomes:
            jobs = run.jobs if self.standby is None else self._summed(run.jobs)
            self._office.io_queue.call(partial(self._send, applying, jobs))
            return self._apply(jobs)

        self._execute(run, work, partial(self._applied, applying))

    def _summed(self, jobs: list[Job]) -> list[Job]:
        try:
            return self._plane.app.summed(jobs)
        except Exception:  # no memory for the sums; to apply the jobs finds what else is wrong
            return jobs

    def _send(self, applying: _Applying, jobs: Sequence[Job]) -> None:
        for job in jobs:
            is_last = job is jobs[-1]
            self._send_job(job, partial(self._stored, applying) if is_last else _nothing)

    def _send_job(self, job: Job, then: Callable[[], None]) -> None:
        ranks, rounds = zip(*job.batch.rounds, strict=True)
        forms, frames, counts = [], list[Any](), []
        for payload in job.batch.payloads:
            form, piece = (0, payload) if type(payload) is Piece else payload.source
            mine = frames_of(piece)
            forms.append(form)
            counts.append(len(mine))
            frames += mine
        self._record(
            lambda number, lengths: RoundRecord(
                number,
                job.parts,
                job.push_sizes,
                ranks,
                rounds,
                tuple(forms),
                tuple(counts),
                lengths,
            ),
            frames,
            then,
        )

    def _stored(self, applying: _Applying) -> None:
        applying.is_stored = True
        self._finish(applying)

    def _applied(self, applying: _Applying, outcomes: Outcomes) -> None:
        applying.outcomes = outcomes
        self._finish(applying)

    def _finish(self, applying: _Applying) -> None:
        if applying.is_stored and applying.outcomes is not None:
            self._carry_out(self._plane.finished(applying.run.jobs, applying.outcomes))
            self._turns.ended()

    # -- requests ----------------------------------------------------------------------

    def request(self, incoming: Incoming, handle: Handler, *, alone: bool) -> None:
        """Carry a request out once the standby has it.

        With ``alone``, no round is applied meanwhile, here or there.
        """
        if alone:
            ended = partial(self._office.io_queue.call, self._turns.ended)
            begin = partial(self._ask_both, incoming, handle, ended, is_alone=True)
            self._turns.add(begin, alone=True)
        else:
            self._ask_both(incoming, handle, _nothing, is_alone=False)

    def _ask_both(
        self, incoming: Incoming, handle: Handler, ended: Callable[[], None], *, is_alone: bool
    ) -> None:
        r = incoming.request
        uid = self._office.membership.uids.get(incoming.sender, "")
        self._record(
            lambda number, lengths: RequestRecord(
                number,
                is_alone,
                incoming.sender,
                uid,
                r.app,
                r.customer,
                r.request_id,
                r.head,
                r.body,
                lengths,
            ),
            list(incoming.frames),
            partial(self._handle, incoming, handle, ended),
        )

    @staticmethod
    def _handle(incoming: Incoming, handle: Handler, ended: Callable[[], None]) -> None:
        answer = incoming._respond

        def respond(incoming: Incoming, response: Response, frames: Sequence[Any]) -> None:
            answer(incoming, response, frames)
            ended()

        _handled(replace(incoming, _respond=respond), handle)


class Standby:
    """The side of a standby: it does what the records of its server say."""

    def __init__(
        self,
        office: Office,
        plane: ServerPlane,
        apply: Apply,
        execute: Execute,
        handle: Handler,
    ) -> None:
        """``handle`` carries out the requests of records."""
        self._office = office
        self._plane = plane
        self._apply = apply
        self._execute = execute
        self._handle = handle
        #: Its server; None before the scheduler has named it, and after it was lost.
        self.primary: NodeInfo | None = None
        self._replay: Replay[tuple[Message, Sequence[Any]]] = Replay()
        self._turns = Turns()
        self._answers: dict[Question, Answer] = {}
        #: Pieces of the payload of the next record.
        self._pieces = bytearray()
        self._is_telling = False

    def begin(self, primary: NodeInfo) -> None:
        """Stand by for this server from now on."""
        self.primary = primary
        self._office.links.know(primary.uid)
        self._office.van.connect(primary.uid, primary.address)

    def arrived(self, delivery: Delivery) -> None:
        """Handle a record of this process's server."""
        if self.primary is None or delivery.peer != self.primary.uid:
            return
        message = delivery.message
        if isinstance(message, RoundRecord | RequestRecord | PayloadPiece):
            for record, frames in self._replay.arrived(
                message.number, (message, list(delivery.frames))
            ):
                self._take(record, frames)
            self._tell()

    def _take(self, record: Message, frames: Sequence[Any]) -> None:
        """Handle the next record."""
        if isinstance(record, PayloadPiece):
            self._pieces += b"".join(frames)
            self._replay.has_done(record.number)
        elif isinstance(record, RoundRecord | RequestRecord):
            if record.lengths:
                self._pieces += b"".join(frames)
                frames, self._pieces = from_pieces(self._pieces, record.lengths), bytearray()
            if isinstance(record, RoundRecord):
                self._turns.add(partial(self._repeat_round, record, frames))
            else:
                begin = partial(self._repeat_request, record, frames)
                self._turns.add(begin, alone=record.is_alone)

    def _tell(self) -> None:
        """Tell the server what is stored and done, once for all that has just arrived."""
        if not self._is_telling:
            self._is_telling = True
            self._office.io_queue.call(self._tell_now)

    def _tell_now(self) -> None:
        self._is_telling = False
        if self.primary is not None:
            office, replay = self._office, self._replay
            recorded = Recorded(replay.stored, replay.done)
            office.links.send(self.primary.uid, recorded, (), 0, office.clock())

    def _ended(self, number: int) -> None:
        self._replay.has_done(number)
        self._turns.ended()
        self._tell()

    def _repeat_round(self, record: RoundRecord, frames: Sequence[Any]) -> None:
        pairs = tuple(zip(record.ranks, record.rounds, strict=True))
        try:
            if len(record.forms) != len(record.frames) or sum(record.frames) != len(frames):
                raise ProtocolError(f"a record of {len(record.forms)} payloads lacks frames")
            rest, payloads = iter(frames), []
            for form, count in zip(record.forms, record.frames, strict=True):
                payloads.append((form, piece_from([next(rest) for _ in range(count)])))
            lane, job = self._plane.copies.job_of(record.parts, record.sizes, pairs, payloads)
        except Exception as error:
            self._differs(f"round {record.rounds[:1]} of parts {record.parts[:5]}: {error}")
            return

        def done(outcomes: Outcomes) -> None:
            if any(type(error) is MemoryError for each in outcomes for error in each or ()):
                self._differs("it does not have enough memory for a round")
                return
            self._plane.copies.repeated(job)
            self._ended(record.number)

        self._execute(Run(lane, [job]), partial(self._apply, [job]), done)

    def _repeat_request(self, record: RequestRecord, frames: Sequence[Any]) -> None:
        if not record.head:  # the end of a state that has filled this standby
            self._ended(record.number)
            return
        request = Request(record.app, record.customer, record.request_id, record.head, record.body)

        def respond(incoming: Incoming, response: Response, frames: Sequence[Any]) -> None:
            def note() -> None:
                if len(self._answers) >= _MOST_ANSWERS:
                    del self._answers[next(iter(self._answers))]
                if record.uid:
                    self._answers[record.uid, record.request_id] = response, frames
                elif response.kind:
                    self._differs(f"a piece of its state was refused: {response.error}")
                self._ended(record.number)

            self._office.io_queue.call(note)

        _handled(Incoming(record.sender, request, frames, respond), self._handle)

    def _differs(self, why: str) -> None:
        """End this process: it cannot do what its server has done."""
        primary = self.primary
        title = "a server" if primary is None else primary.title
        self._office.fail(ProtocolError(f"this standby of {title} cannot go on: {why}"))

    # -- in its server's place ---------------------------------------------------------

    def take_over(self, then: Callable[[], None]) -> None:
        """Stop hearing the server; do what its records say, and then call ``then``."""
        if self.primary is not None:
            self._office.links.shut(self.primary.uid)
            self._office.van.disconnect(self.primary.uid)
            self.primary = None
        self._replay.drop_early()
        self._turns.when_idle(then)

    def answer_again(self, incoming: Incoming) -> bool:
        """Answer a request that the lost server has recorded; return whether it has."""
        uid = self._office.membership.uids.get(incoming.sender, "")
        known = self._answers.get((uid, incoming.request.request_id))
        if known is None:
            return False
        incoming._respond(incoming, *known)
        return True


def _handled(incoming: Incoming, handle: Handler) -> None:
    try:
        handle(incoming)
    except BaseException as error:  # an app's error must not end the I/O thread
        incoming.fail(error)


def _nothing() -> None:
    """Do nothing."""
