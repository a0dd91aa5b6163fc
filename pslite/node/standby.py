"""``Standby``: a copy of a server (I/O thread).

It does what the records of its server (``primary.py``) say. It has not joined the cluster: it knows
the scheduler and its server, and no worker knows it. It joins when it takes the seat of its server.
By then it no longer takes messages from it. Read next: ``node/seating.py``, how a seat passes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pslite.errors import ProtocolError
from pslite.ids import NodeInfo
from pslite.node.customer import Handler, Incoming
from pslite.node.links import Delivery
from pslite.node.office import Office
from pslite.node.recorded_requests import Answers, response_from
from pslite.plane import (
    Outcome,
    Run,
    ServerPlane,
    piece_from,
)
from pslite.protocol.replication import Replay, Turns, from_pieces
from pslite.wire.base import Message
from pslite.wire.codec import unpack_value
from pslite.wire.messages import Request, Response
from pslite.wire.recovery import PayloadPiece, Recorded, RequestRecord, RoundRecord

#: The heads of records that no app handles: an answer that the server has given, and the end of
#: the state that fills a standby.
ANSWER, END = -1, 0
Outcomes = Sequence[Outcome]
Execute = Callable[[Run, Callable[[], Outcomes], Callable[[Outcomes], None]], None]
"""Does work for the jobs of a run on their lane; then calls the last function, on this thread."""


class Standby:
    """The side of a standby: it does what the records of its server say."""

    def __init__(
        self,
        office: Office,
        plane: ServerPlane,
        execute: Execute,
        handle: Handler,
        answers: Answers,
    ) -> None:
        """``handle`` carries out the requests of records."""
        self._office = office
        self._answers = answers
        self._plane = plane
        self._execute = execute
        self._handle = handle
        #: Its server; None before the scheduler has named it, and after it was lost.
        self.primary: NodeInfo | None = None
        self.has_begun = False
        self._replay: Replay[tuple[Message, Sequence[Any]]] = Replay()
        self._turns = Turns()
        #: Pieces of the payload of the next record.
        self._pieces = bytearray()
        self._is_telling = False

    def begin(self, primary: NodeInfo) -> None:
        """Stand by for this server from now on."""
        self.primary, self.has_begun = primary, True
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

        self._execute(Run(lane, [job]), partial(self._plane.app.apply, [job]), done)

    def _repeat_request(self, record: RequestRecord, frames: Sequence[Any]) -> None:
        if record.head == ANSWER:
            response = response_from(record.request_id, unpack_value(record.body))
            self._answers.note((record.uid, record.request_id), response, frames)
        if record.head in (ANSWER, END):
            self._ended(record.number)
            return
        request = Request(record.app, record.customer, record.request_id, record.head, record.body)

        def respond(incoming: Incoming, response: Response, frames: Sequence[Any]) -> None:
            def note() -> None:
                if record.uid:
                    self._answers.note((record.uid, record.request_id), response, frames)
                elif response.kind:
                    self._differs(f"a piece of its state was refused: {response.error}")
                self._ended(record.number)

            self._office.io_queue.call(note)

        handled(Incoming(record.sender, request, frames, respond), self._handle)

    def _differs(self, why: str) -> None:
        """End this process: it cannot do what its server has done."""
        primary = self.primary
        title = "a server" if primary is None else primary.title
        self._office.fail(ProtocolError(f"this standby of {title} cannot go on: {why}"))

    def let_go(self) -> None:
        """End, and keep nothing for the server, which may have ended, too."""
        if self.primary is not None:
            self._office.links.release(self.primary.uid)
        self._office.finished.set_result(None)

    # -- in its server's place ---------------------------------------------------------

    def take_over(self, then: Callable[[], None]) -> None:
        """Stop hearing the server; do what its records say, and then call ``then``."""
        if self.primary is not None:
            self._office.links.shut(self.primary.uid)
            self._office.van.disconnect(self.primary.uid)
            self.primary = None
        self._replay.drop_early()
        self._turns.when_idle(then)


def handled(incoming: Incoming, handle: Handler) -> None:
    try:
        handle(incoming)
    except BaseException as error:  # an app's error must not end the I/O thread
        incoming.fail(error)


def nothing() -> None:
    """Do nothing."""
