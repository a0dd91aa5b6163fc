"""``Admission``: which senders' messages a node accepts. Pure.

Before: what members will turn out to have sent waits here, so much and no more; the rest is not
accepted, so its senders come back to it. Afterwards: who is not in the roster is not heard, and
who is says only what is for its role to say.
Used on the I/O thread by ``postoffice.py``, which asks before a message is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pslite.node.data import MESSAGES as DATA_MESSAGES
from pslite.node.links import Delivery
from pslite.node.same_machine import MESSAGES as NEARBY_MESSAGES
from pslite.van.base import size_of
from pslite.wire.messages import SENDERS, Message, Register, Request, Response, StatusQuestion

#: What only nodes of the roster may send, besides what ``control`` handles.
FROM_MEMBERS: frozenset[type[Message]] = frozenset(
    {Request, Response, *NEARBY_MESSAGES, *DATA_MESSAGES}
)
MAX_EARLY = 16_384
MAX_EARLY_BYTES = 256 << 20

# Reasons, as ``Links`` counts them.
EARLY = "too many messages before the roster arrived"
UNLISTED = "from a node that the roster does not list"
OUT_OF_ROLE = "from a node whose role does not send it"


class Admission:
    """Accepts or drops messages by sender, and keeps early ones."""

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
