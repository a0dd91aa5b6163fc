"""``Primary``: a server that has a standby (I/O thread).

``protocol/replication.py`` has the rules. A server with a standby adds up the contributions of a
round first, and sends their sum as a record, while it applies it. It answers the workers when both
are done. So the standby costs the network one sum for each round, however many workers there are.
A standby that falls behind slows its server down. If the standby is lost, the server goes on alone;
it fills the next one with its state. Read next: ``standby.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pslite.ids import SCHEDULER_ID, NodeInfo
from pslite.node.customer import Handler, Incoming
from pslite.node.office import Office
from pslite.node.recorded_requests import Answers, Question, plain
from pslite.node.standby import ANSWER, END, Execute, Outcomes, handled, nothing
from pslite.plane import (
    Effect,
    Job,
    Piece,
    Run,
    ServerPlane,
    StateRecord,
    frames_of,
)
from pslite.protocol.replication import Journal, Turns, in_pieces
from pslite.van.base import size_of
from pslite.wire.base import Ints, Message
from pslite.wire.codec import pack_value
from pslite.wire.messages import Response
from pslite.wire.recovery import PayloadPiece, Recorded, RequestRecord, RoundRecord, StandsBy

#: How long to wait before the next try to copy a state that was incomplete.
_AGAIN_S = 0.5
#: The number of the last record while that is not known.
_LAST = 1 << 62
#: A standby may be behind by this many times the bytes that workers may send unaccepted.
_CREDITS = 4


@dataclass(slots=True, eq=False, repr=False)
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
        execute: Execute,
        carry_out: Callable[[Sequence[Effect]], None],
        answers: Answers,
    ) -> None:
        self._office = office
        self._answers = answers
        self._plane = plane
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

    @property
    def is_in_sync(self) -> bool:
        """Whether the standby could take this server's place."""
        return self.standby is not None and not (self._filled_at or self._in_sync_at)

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
            self._filled_at = _LAST
            for record in records:
                self._ask_standby(record)
            for question, (response, frames) in self._answers.all():
                answer = StateRecord(0, ANSWER, pack_value(plain(response)), frames)
                self._ask_standby(answer, question)
            self._ask_standby(StateRecord(0, END, b"", ()))
            self._filled_at = self._in_sync_at = self._journal.last

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

    def _ask_standby(self, r: StateRecord, question: Question = ("", 0)) -> None:
        uid, request_id = question
        self._record(
            lambda number, lengths: RequestRecord(
                number, True, r.sender, uid, 0, 0, request_id, r.head, r.body, lengths
            ),
            list(r.frames),
            nothing,
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
            self.say_whether_in_sync()

    def say_whether_in_sync(self) -> None:
        """Tell the scheduler which process could take this server's place, if one could."""
        if self.standby is not None and self.is_in_sync:
            self._office.send(SCHEDULER_ID, StandsBy((self.standby,), True, 0))

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
                self._send_record(PayloadPiece, piece, nothing)
        self._send_record(lambda n: make(n, lengths), frames, then if waits else nothing)
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
            return self._plane.app.apply(jobs)

        self._execute(run, work, partial(self._applied, applying))

    def _summed(self, jobs: list[Job]) -> list[Job]:
        try:
            return self._plane.app.summed(jobs)
        except Exception:  # no memory for the sums; to apply the jobs finds what else is wrong
            return jobs

    def _send(self, applying: _Applying, jobs: Sequence[Job]) -> None:
        for job in jobs:
            is_last = job is jobs[-1]
            self._send_job(job, partial(self._stored, applying) if is_last else nothing)

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
            self._ask_both(incoming, handle, nothing, is_alone=False)

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
            partial(self._handle, (uid, r.request_id), incoming, handle, ended),
        )

    def _handle(
        self, question: Question, incoming: Incoming, handle: Handler, ended: Callable[[], None]
    ) -> None:
        answer = incoming._respond

        def respond(incoming: Incoming, response: Response, frames: Sequence[Any]) -> None:
            note = partial(self._answers.note, question, response, frames)
            self._office.io_queue.call(note)
            answer(incoming, response, frames)
            ended()

        handled(replace(incoming, _respond=respond), handle)
