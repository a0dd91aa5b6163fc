"""``Admission``: which senders' messages a node accepts. Pure.

Before the roster arrives, this node keeps messages of possible members, up to a limit. Further
messages are not accepted, so their senders resend them. After the roster has arrived, it accepts
messages only from nodes of the roster, and only those that their role may send. ``postoffice.py``
asks it on the I/O thread before it accepts a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pslite.node.data import MESSAGES as DATA_MESSAGES
from pslite.node.links import Delivery
from pslite.node.same_machine import MESSAGES as NEARBY_MESSAGES
from pslite.wire.base import Message
from pslite.wire.messages import (
    SENDERS,
    Leave,
    Members,
    Register,
    Request,
    Response,
    StatusQuestion,
)
from pslite.wire.recovery import Seated, StandsBy, Vacant

#: The messages of roster nodes that ``control`` does not handle.
FROM_MEMBERS: frozenset[type[Message]] = frozenset(
    {Request, Response, *NEARBY_MESSAGES, *DATA_MESSAGES}
)
MAX_EARLY = 16_384
MAX_EARLY_BYTES = 256 << 20

# The reasons under which ``Links`` counts dropped messages.
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
        self._listed: dict[str, str] | None = None

    def objection(self, peer: str, message: Message, frames: Sequence[Any]) -> str | None:
        """Return why to drop a message of ``peer`` now; None to accept it."""
        kind = type(message)
        if self._listed is None:
            if kind not in FROM_MEMBERS:
                return None
            nbytes = self._early_bytes + sum(map(len, frames))
            has_room = len(self._early) < MAX_EARLY and nbytes <= MAX_EARLY_BYTES
            return None if has_room else EARLY
        if self._takes_registrations and kind in (Register, StatusQuestion):
            return None  # the scheduler refuses late registrations, and answers observers
        role = self._listed.get(peer)
        if role is None:
            return UNLISTED
        senders = SENDERS.get(kind)
        return None if senders is None or role in senders else OUT_OF_ROLE

    def keep(self, delivery: Delivery) -> None:
        """Keep a message whose sender has received the roster before this node."""
        if self._listed is None:
            self._early.append(delivery)
            self._early_bytes += sum(map(len, delivery.frames))

    def replace(self, peer: str, other: str, role: str) -> None:
        """List another process in place of a lost one."""
        if self._listed is not None:
            self._listed.pop(peer, None)
            self._listed[other] = role

    def add(self, peer: str, role: str) -> None:
        """List one more process."""
        if self._listed is not None:
            self._listed[peer] = role

    def complete(self, listed: Mapping[str, str]) -> list[Delivery]:
        """Set the roster (peer -> role); return the kept messages of its nodes."""
        early, self._early, self._early_bytes = self._early, [], 0
        self._listed = dict(listed)
        return [each for each in early if self.objection(each.peer, each.message, ()) is None]


def needs_roster(message: Message) -> bool:
    """Return whether a message cannot be handled before the roster is there."""
    is_for_server = isinstance(message, StandsBy) and message.for_receiver
    return is_for_server or isinstance(message, Leave | Members | Vacant | Seated)
