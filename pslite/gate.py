"""Whose messages a node takes in, before its roster is there and afterwards. Pure.

Before: what members will turn out to have sent waits here, so much and no more; the rest is not
accepted, so its senders come back to it. Afterwards: who is not in the roster is not heard.
Used on the I/O thread by ``postoffice.py``, which asks before a message is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pslite.links import Delivery
from pslite.traffic import MESSAGES as DATA_MESSAGES
from pslite.van.base import size_of
from pslite.wire.messages import (
    Message,
    PipeOffer,
    Register,
    Request,
    Response,
    SegmentOffer,
    SegmentTaken,
    StatusQuestion,
)

#: What only nodes of the roster may send, besides what ``control`` handles.
FROM_MEMBERS: frozenset[type[Message]] = frozenset(
    {Request, Response, SegmentOffer, SegmentTaken, PipeOffer, *DATA_MESSAGES}
)
MAX_EARLY = 16_384
MAX_EARLY_BYTES = 256 << 20

# Reasons, as ``Links`` counts them.
EARLY = "no room before the roster"
UNLISTED = "from a node that the roster does not list"


class Gate:
    """Decides who is heard, and keeps what came too early."""

    def __init__(self, *, takes_registrations: bool) -> None:
        self._takes_registrations = takes_registrations
        self._early: list[Delivery] = []
        self._early_bytes = 0
        self._listed: frozenset[str] | None = None

    def objection(self, peer: str, message: Message, frames: Sequence[Any]) -> str | None:
        """Why a message of ``peer`` is not taken in now; None where it is."""
        if self._listed is not None:
            # Who registers too late is told so by the scheduler, and observers are answered.
            is_answered = self._takes_registrations and type(message) in (Register, StatusQuestion)
            return None if is_answered or peer in self._listed else UNLISTED
        if type(message) not in FROM_MEMBERS:
            return None
        nbytes = self._early_bytes + sum(map(size_of, frames))
        has_room = len(self._early) < MAX_EARLY and nbytes <= MAX_EARLY_BYTES
        return None if has_room else EARLY

    def keep(self, delivery: Delivery) -> None:
        """Its sender has got the roster earlier than this node."""
        if self._listed is None:
            self._early.append(delivery)
            self._early_bytes += sum(map(size_of, delivery.frames))

    def complete(self, listed: frozenset[str]) -> list[Delivery]:
        """The roster is there, and lists these peers; returns what has waited for it."""
        early, self._early, self._early_bytes = self._early, [], 0
        self._listed = listed
        return early
