"""The messages about lost nodes, their seats and their standbys.

``messages.py`` has the other messages and lists all of them. The rules are in
``protocol/succession.py`` and ``protocol/replication.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pslite.wire.base import Message, Natural, Naturals, Nodes

# -- seats: scheduler <-> members -----------------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class Vacant(Message):
    """The process of a node is lost, and its seat waits for another process.

    From a member it is a report to the scheduler, which decides.
    """

    node: Natural
    """The node id."""
    attempt: Natural
    """How many processes had the seat before the lost one."""
    reason: str


@dataclass(slots=True, eq=False, repr=False)
class Seated(Message):
    """A process has taken the seat of a lost one, which is ignored from now on."""

    node: Nodes
    """One entry, which replaces that of the roster."""
    attempt: Natural
    """How many processes had the seat before this one."""


@dataclass(slots=True, eq=False, repr=False)
class MayReturn(Message):
    """Whether another process could go on in the sender's place if it is lost.

    From a worker: a process that is started again, from the step that the worker has begun. From a
    server only with False: no standby any more, because it does something that none repeats.
    """

    yes: bool


@dataclass(slots=True, eq=False, repr=False)
class StepRepeated(Message):
    """The sender, in the place of a lost worker, begins the step that it repeats."""

    step: Natural
    loop: Natural
    """The number of the step's loop, from 1."""

    @property
    def title(self) -> str:
        """``step 17``, or ``step 3 of loop 2``."""
        return f"step {self.step}" + (f" of loop {self.loop}" if self.loop > 1 else "")


@dataclass(slots=True, eq=False, repr=False)
class BarriersReached(Message):
    """How many barriers of each group the sender has reached, for a new scheduler."""

    PARALLEL: ClassVar[tuple[str, ...]] = ("groups", "rounds")
    groups: Naturals
    rounds: Naturals


# -- standbys: scheduler -> server and standby, server <-> standby --------------------------


@dataclass(slots=True, eq=False, repr=False)
class StandsBy(Message):
    """Who stands by for whom: to a standby its server, to a server its standby.

    Without an entry: the server has no standby any more, or the standby is no longer needed. A
    server tells the scheduler which standby has its state, or without an entry that it has lost it.
    """

    node: Nodes
    """One entry or none."""
    for_receiver: bool
    """Whether that process stands by for the receiver; else the receiver stands by for it."""
    number: Natural
    """Counts the scheduler's messages: a server ignores those before the last one that it has
    handled, and names that one when it has lost its standby."""


@dataclass(slots=True, eq=False, repr=False)
class RoundRecord(Message):
    """A round that a server applies, for its standby, which applies it too.

    The payload frames hold the contributions, or their sum as a single one.
    """

    PARALLEL: ClassVar[tuple[str, ...]] = ("ranks", "rounds")
    number: Natural
    """The number of the record; the standby does what they say in this order."""
    parts: Naturals
    sizes: Naturals
    """Bytes of each part in a contribution."""
    ranks: Naturals
    rounds: Naturals
    """Rank and round of each contribution; parallel."""
    forms: Naturals
    """For each payload the app's own form (``Exchange``), or 0."""
    frames: Naturals
    """For each payload the number of its frames."""
    lengths: Naturals = ()
    """As in ``RequestRecord``."""


@dataclass(slots=True, eq=False, repr=False)
class RequestRecord(Message):
    """A request that a server carries out, for its standby, which does so too."""

    number: Natural
    """As in ``RoundRecord``."""
    is_alone: bool
    """Whether earlier records must be over before it, and later ones begin after it."""
    sender: Natural
    """The node id of the asker."""
    uid: str
    """The asker's name in the van, which tells it from other processes of its seat."""
    app: Natural
    customer: Natural
    request_id: Natural
    head: int
    body: bytes
    lengths: Naturals = ()
    """The bytes of each payload frame, if the payload begins in pieces before this record."""


@dataclass(slots=True, eq=False, repr=False)
class PayloadPiece(Message):
    """A piece of the payload of the next record, which is too large for one message."""

    number: Natural
    """As in ``RoundRecord``."""


@dataclass(slots=True, eq=False, repr=False)
class Recorded(Message):
    """The records that a standby has."""

    stored: Natural
    """It has all records up to this number, so they outlive the server."""
    done: Natural
    """It has done what all records up to this number say, and no longer reads their frames."""
