"""Whose messages a node takes in, before its roster is there and afterwards. Pure.

Before: what members will turn out to have sent waits here, so much and no more; the rest is not
accepted, so its senders come back to it. Afterwards: who is not in the roster is not heard, and
who is says only what is for its role to say.
Used on the I/O thread by ``postoffice.py``, which asks before a message is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pslite.ids import Role
from pslite.node.data import MESSAGES as DATA_MESSAGES
from pslite.node.links import Delivery
from pslite.van.base import size_of
from pslite.wire.messages import (
    Answer,
    BarrierEnter,
    BarrierLeave,
    BarrierWaits,
    Deadlock,
    Exchange,
    LongWait,
    Message,
    PartsFailed,
    PipeOffer,
    Register,
    Request,
    Response,
    Roster,
    RoundWaits,
    SegmentOffer,
    SegmentTaken,
    StaleEpoch,
    StatusQuestion,
    StatusReport,
    StatusSurvey,
    Waiting,
)

#: What only nodes of the roster may send, besides what ``control`` handles.
FROM_MEMBERS: frozenset[type[Message]] = frozenset(
    {Request, Response, SegmentOffer, SegmentTaken, PipeOffer, *DATA_MESSAGES}
)
_SCHEDULER, _SERVER, _WORKER = (role.value for role in (Role.SCHEDULER, Role.SERVER, Role.WORKER))
#: Who may send a message (``docs/wire.md``, section 7); those that are not here, anybody.
SENDERS: dict[type[Message], frozenset[str]] = {
    Register: frozenset({_SERVER, _WORKER}),
    Roster: frozenset({_SCHEDULER}),
    Waiting: frozenset({_SCHEDULER}),
    BarrierEnter: frozenset({_SERVER, _WORKER}),
    BarrierLeave: frozenset({_SCHEDULER}),
    BarrierWaits: frozenset({_SCHEDULER}),
    Exchange: frozenset({_WORKER}),
    Answer: frozenset({_SERVER}),
    PartsFailed: frozenset({_SERVER}),
    StaleEpoch: frozenset({_SERVER}),
    RoundWaits: frozenset({_SERVER}),
    SegmentOffer: frozenset({_SERVER, _WORKER}),
    SegmentTaken: frozenset({_SERVER, _WORKER}),
    StatusQuestion: frozenset({_SCHEDULER}),
    StatusReport: frozenset({_SERVER, _WORKER}),
    StatusSurvey: frozenset({_SCHEDULER}),
    LongWait: frozenset({_WORKER}),
    Deadlock: frozenset({_SCHEDULER}),
}
MAX_EARLY = 16_384
MAX_EARLY_BYTES = 256 << 20

# Reasons, as ``Links`` counts them.
EARLY = "no room before the roster"
UNLISTED = "from a node that the roster does not list"
OUT_OF_ROLE = "from a node whose role does not send it"


class Admission:
    """Decides who is heard, and keeps what came too early."""

    def __init__(self, *, takes_registrations: bool) -> None:
        self._takes_registrations = takes_registrations
        self._early: list[Delivery] = []
        self._early_bytes = 0
        #: The roles of the roster's nodes, by their names in the van.
        self._listed: Mapping[str, str] | None = None

    def objection(self, peer: str, message: Message, frames: Sequence[Any]) -> str | None:
        """Return why a message of ``peer`` is not taken in now; None where it is."""
        if self._listed is not None:
            # Who registers too late is told so by the scheduler, and observers are answered.
            is_answered = self._takes_registrations and type(message) in (Register, StatusQuestion)
            if is_answered:
                return None
            return self._misplaced(peer, message)
        if type(message) not in FROM_MEMBERS:
            return None
        nbytes = self._early_bytes + sum(map(size_of, frames))
        has_room = len(self._early) < MAX_EARLY and nbytes <= MAX_EARLY_BYTES
        return None if has_room else EARLY

    def keep(self, delivery: Delivery) -> None:
        """Keep a message whose sender has got the roster earlier than this node."""
        if self._listed is None:
            self._early.append(delivery)
            self._early_bytes += sum(map(size_of, delivery.frames))

    def complete(self, listed: Mapping[str, str]) -> list[Delivery]:
        """Take in the roster, peers by role; return what has waited for it."""
        early, self._early, self._early_bytes = self._early, [], 0
        self._listed = listed
        return [each for each in early if self._misplaced(each.peer, each.message) is None]

    def _misplaced(self, peer: str, message: Message) -> str | None:
        role = None if self._listed is None else self._listed.get(peer)
        if role is None:
            return UNLISTED
        senders = SENDERS.get(type(message))
        return None if senders is None or role in senders else OUT_OF_ROLE
