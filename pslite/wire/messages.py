"""Every message that nodes exchange: one dataclass each, nothing else.

Read it as a dialogue: joining, barriers, leaving, then data (rounds of parts), then requests of
apps, then questions of observers. ``docs/wire.md`` numbers the same messages; a test checks that
they agree. ``recovery.py`` has those about lost nodes. This module does no I/O. Read next:
``codec.py``, which turns messages into frames and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pslite.wire.base import Message, Natural, Naturals, Nodes, Texts
from pslite.wire.recovery import (
    BarriersReached,
    MayReturn,
    PayloadPiece,
    Recorded,
    RequestRecord,
    RoundRecord,
    Seated,
    StandsBy,
    StepRepeated,
    Vacant,
)


@dataclass(slots=True, eq=False, repr=False)
class Accepted(Message):
    """A message that carries only the envelope's acknowledgements."""

    RELIABLE: ClassVar[bool] = False


@dataclass(slots=True, eq=False, repr=False)
class Beat(Message):
    """A heartbeat of the sender's own code, every PS_HEARTBEAT_INTERVAL."""

    RELIABLE: ClassVar[bool] = False


# -- joining: node -> scheduler -> node ---------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class Register(Message):
    """A node asks the scheduler to add it to the job."""

    node: Nodes
    """One entry. Its rank is the requested one, or -1 for any."""
    num_workers: Natural
    num_servers: Natural
    package: str
    """Version of the software, which must be the same on all nodes."""
    stands_by: bool = False
    """Whether it is a standby of the server with its rank, and not a server itself."""
    attempt: int = -1
    """If it has joined, and has lost the scheduler: how many processes had its seat before."""


@dataclass(slots=True, eq=False, repr=False)
class Roster(Message):
    """The scheduler's answer once all nodes have registered."""

    PARALLEL: ClassVar[tuple[str, ...]] = ("members", "attempts")
    node_id: Natural
    """The receiver's own id."""
    members: Nodes
    """All nodes, the scheduler first."""
    attempts: Naturals
    """How many processes have had the seat of each node before; parallel to ``members``."""
    standbys: Nodes = ()
    """The standbys of servers, with the ranks of these servers."""
    relays: bool = False
    """Whether servers relay in this job (``protocol/relays.py``)."""


@dataclass(slots=True, eq=False, repr=False)
class Waiting(Message):
    """The present and the missing nodes, for nodes that wait for the roster."""

    RELIABLE: ClassVar[bool] = False
    present: Texts
    missing: Texts
    waited_s: float


@dataclass(slots=True, eq=False, repr=False)
class Refused(Message):
    """The receiver cannot take part; ``error`` is a sentence for its user."""

    kind: str
    """Name of the error's class, for example ``ConfigError`` if the settings are wrong."""
    error: str
    role: str = ""
    """The role (and rank) of the lost node if that is the reason; else empty and -1."""
    rank: int = -1


# -- members: scheduler -> everybody ------------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class Leave(Message):
    """Goodbye: the sender has received all it wants and will send nothing more."""


@dataclass(slots=True, eq=False, repr=False)
class Members(Message):
    """A new epoch: who is gone since the roster, and how."""

    PARALLEL: ClassVar[tuple[str, ...]] = ("gone", "left", "reasons")
    epoch: Natural
    gone: Naturals
    """Node ids."""
    left: Naturals
    """1 if the node said goodbye, 0 if it was lost; parallel to ``gone``."""
    reasons: Texts


# -- barriers: node <-> scheduler ---------------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class BarrierEnter(Message):
    """The sender has reached its ``round``-th barrier of ``group``."""

    group: Natural
    round: Natural
    timeout_s: float
    """How long the sender will wait; 0 means without a limit."""


@dataclass(slots=True, eq=False, repr=False)
class BarrierLeave(Message):
    """All nodes have reached the barrier (``error`` is empty), or it has failed."""

    group: Natural
    round: Natural
    kind: str
    error: str


@dataclass(slots=True, eq=False, repr=False)
class BarrierWaits(Message):
    """A barrier has been open for a long time; names the missing nodes."""

    RELIABLE: ClassVar[bool] = False
    group: Natural
    round: Natural
    missing: Naturals
    """Node ids."""
    waited_s: float


# -- data: rounds of parts, worker <-> server ---------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class Exchange(Message):
    """A worker pushes to parts, pulls from them, or both.

    With ``push``, ``rounds`` are the contributions' round numbers and the payload frames hold
    the parts' bytes one after the other (each frame a whole number of parts). Without it,
    ``rounds`` are the sender's own pushes so far (``after_round``) and there is no payload.

    A ``form`` other than 0 belongs to the app. Then the app makes the contribution from the bytes,
    and a pull has a payload too, which says what the worker wants from each part.
    """

    PARALLEL: ClassVar[tuple[str, ...]] = ("parts", "rounds")
    push: bool
    pull: bool
    parts: Naturals
    rounds: Naturals
    sizes: Naturals
    """Bytes of each part in the payload; empty without one."""
    form: Natural = 0
    """0: the payload is the parts' plain values."""
    priority: int = 0
    """An answer with values of a higher priority is sent first."""


@dataclass(slots=True, eq=False, repr=False)
class Answer(Message):
    """The result of an ``Exchange``: its rounds are applied; it may carry values."""

    PARALLEL: ClassVar[tuple[str, ...]] = ("parts", "rounds", "versions")
    pushed: bool
    """Whether it answers a push; then ``rounds`` are the applied rounds."""
    parts: Naturals
    rounds: Naturals
    """Round of the push (or ``after_round`` of the pull) that is answered."""
    versions: Naturals
    """The number of updates that each part has had."""
    sizes: Naturals
    """Bytes of each part in the payload; empty if no value was requested."""


@dataclass(slots=True, eq=False, repr=False)
class PartsFailed(Message):
    """An ``Exchange`` (some parts of it) failed; ``error`` says why."""

    PARALLEL: ClassVar[tuple[str, ...]] = ("parts", "rounds")
    pushed: bool
    consumed: bool
    """Whether the push used up its round (its update raised); else the number is free again."""
    parts: Naturals
    rounds: Naturals
    kind: str
    error: str
    role: str
    """The role (and rank) of the lost node if that is the reason; else empty and -1."""
    rank: int


@dataclass(slots=True, eq=False, repr=False)
class StaleEpoch(Message):
    """An ``Exchange`` came from an older epoch and was ignored; send it again."""

    PARALLEL: ClassVar[tuple[str, ...]] = ("parts", "rounds")
    epoch: Natural
    pushed: bool
    parts: Naturals
    rounds: Naturals


@dataclass(slots=True, eq=False, repr=False)
class RoundWaits(Message):
    """A round has been open for a long time: these worker ranks have not contributed."""

    RELIABLE: ClassVar[bool] = False
    part: Natural
    round: Natural
    missing: Naturals
    waited_s: float


# -- memory: worker <-> server on one machine ---------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class SegmentOffer(Message):
    """Memory of the sender's process that the receiver may map (``pslite/memory``)."""

    segment: Natural
    """The sender's number for the segment, from 1."""
    fd: Natural
    """The segment's descriptor in the sender's process."""
    nbytes: Natural
    nonce: bytes
    """The first bytes of the segment."""


@dataclass(slots=True, eq=False, repr=False)
class SegmentTaken(Message):
    """Whether the sender has mapped a segment, so that messages may refer to it."""

    segment: Natural
    taken: bool
    reason: str
    """Why not."""


@dataclass(slots=True, eq=False, repr=False)
class PipeOffer(Message):
    """A pipe through which the receiver may send, on the same machine.

    See ``pslite/van/zmq/pipes.py``.
    """

    fd: Natural
    """The descriptor of the writing end in the sender's process."""
    inode: Natural
    """The kernel's number of the pipe."""


# -- apps: any node <-> any node ----------------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class Request(Message):
    """A request to an app of the receiver, with any payload frames."""

    app: Natural
    customer: Natural
    request_id: Natural
    head: int
    body: bytes


@dataclass(slots=True, eq=False, repr=False)
class Response(Message):
    """The one answer to a ``Request``; ``kind`` is empty or names the exception."""

    app: Natural
    customer: Natural
    request_id: Natural
    head: int
    kind: str
    error: str
    role: str
    """The role (and rank) of the lost node if that is the reason; else empty and -1."""
    rank: int
    body: bytes


# -- status: observer -> scheduler -> nodes, and back ---------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class StatusQuestion(Message):
    """Asks for the status: from an observer to the scheduler, from it to every node."""

    RELIABLE: ClassVar[bool] = False
    question: Natural
    """The sender's number for the question; the answer repeats it."""
    package: str
    """Version of the sender's software."""


@dataclass(slots=True, eq=False, repr=False)
class StatusReport(Message):
    """A node's answer to the scheduler."""

    RELIABLE: ClassVar[bool] = False
    question: Natural
    body: bytes
    """A ``NodeReport`` (``pslite/wire/survey.py``)."""


@dataclass(slots=True, eq=False, repr=False)
class StatusSurvey(Message):
    """The scheduler's answer to an observer."""

    RELIABLE: ClassVar[bool] = False
    question: Natural
    body: bytes
    """A ``Survey`` (``pslite/wire/survey.py``)."""


# -- deadlocks: worker -> scheduler, and back -------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class LongWait(Message):
    """A thread of this worker has waited for a long time; sent with each report."""

    RELIABLE: ClassVar[bool] = False


@dataclass(slots=True, eq=False, repr=False)
class Deadlock(Message):
    """All workers wait for each other: end the waits that have lasted long."""

    error: str
    """The text of their ``DeadlockError``."""


ALL_MESSAGES: dict[int, type[Message]] = {
    1: Accepted,
    2: Beat,
    3: Register,
    4: Roster,
    5: Waiting,
    6: Refused,
    7: Leave,
    8: Members,
    9: BarrierEnter,
    10: BarrierLeave,
    11: Exchange,
    12: Answer,
    13: PartsFailed,
    14: StaleEpoch,
    15: RoundWaits,
    16: Request,
    17: Response,
    18: BarrierWaits,
    19: SegmentOffer,
    20: SegmentTaken,
    21: PipeOffer,
    22: StatusQuestion,
    23: StatusReport,
    24: StatusSurvey,
    25: LongWait,
    26: Deadlock,
    27: Vacant,
    28: Seated,
    29: MayReturn,
    30: StandsBy,
    31: RoundRecord,
    32: RequestRecord,
    33: Recorded,
    34: PayloadPiece,
    35: BarriersReached,
    36: StepRepeated,
}
"""The messages by their numbers on the wire."""

_SENT_BY: list[tuple[set[str], tuple[type[Message], ...]]] = [
    ({"scheduler"}, (Roster, Waiting, BarrierLeave, BarrierWaits, Deadlock)),
    ({"scheduler"}, (StatusQuestion, StatusSurvey, Seated)),
    ({"server"}, (Answer, PartsFailed, StaleEpoch, RoundWaits)),
    ({"scheduler", "server"}, (StandsBy,)),
    ({"server"}, (RoundRecord, RequestRecord, Recorded, PayloadPiece)),
    ({"server", "worker"}, (Exchange, MayReturn, BarriersReached)),
    ({"worker"}, (LongWait, StepRepeated)),
    ({"server", "worker"}, (Register, BarrierEnter, SegmentOffer, SegmentTaken, StatusReport)),
]
SENDERS = {kind: frozenset(roles) for roles, kinds in _SENT_BY for kind in kinds}
"""Message -> the roles that may send it (``docs/wire.md``, section 7). All may send the others."""
