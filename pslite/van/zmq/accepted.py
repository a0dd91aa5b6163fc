"""``AcceptedConnections``: a listener's connections, from libzmq's events.

libzmq names an accepted connection in two ways and never links them: messages arrive under a
routing id, and the monitor reports that a file descriptor was accepted or closed. But each message
also has the descriptor that it came through, and this class uses it to link the two. Three things
make that difficult, and are why it is a class of its own with its own tests:

* The monitor reports that a descriptor is closed *before* the last messages that came through it
  can be read. So an end is reported a moment later (``settle_s``), after the remaining messages
  were read.
* The kernel gives a freed descriptor number to the next connection. So the owner reads all events
  of the monitor before it asks about a message of an unknown routing id. Then the last connection
  of each number is known, and the only open question is which routing id it has.
* Several routing ids may claim one number, because messages of a dead connection can be read
  after those of the living one that inherited its number. The events cannot tell them apart, so
  the owner asks libzmq which of them it can still send to (``doubtful``).

The connecting van makes a routing id for one connection: its uid, a zero byte, and twelve
bytes that grow with every connection of that uid. A connection may have *further* connections that
also carry large messages. In their routing ids, their number, from 1, replaces the zero. They
last only as long as the connection, and have no events of their own. No I/O and no clock; runs on
the owner's thread. Read next: ``listener.py``, which feeds it.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pslite.errors import UsageError
from pslite.van.base import Connected, Disconnected, VanEvent, check_uid

MAX_FURTHER = 15
"""The most further connections that one connection uses; more would only cost memory."""
_ORDER_BYTES = 12
REMEMBERED_ENDS = 1024
"""The most routing ids of ended connections to remember, so that a late message does not look like
a new connection. Late means milliseconds; the number only limits the memory."""


HANDSHAKE_BYTES = 8192
"""More than a node sends before it is accepted, so each may send this, however many there are."""


def over_their_share(received: Mapping[int, int], limit_bytes: int) -> list[int]:
    """Return the unknown connections (descriptor -> bytes) that use too much memory.

    Each may fill an equal share of the limit. A connection that sends no more than a handshake is
    never among them, so strangers that connect in great numbers cannot keep a node out.
    """
    if not received:
        return []
    share = max(limit_bytes // len(received), HANDSHAKE_BYTES)
    return [descriptor for descriptor, nbytes in received.items() if nbytes > share]


class RoutingId(NamedTuple):
    """The contents of a routing id."""

    uid: str
    number: int
    """0 for a first connection; from 1 for the further connections with the same order."""
    order: bytes
    """Greater for a later connection of the same uid."""


def make_routing_id(uid: str, born_ns: int, number: int) -> bytes:
    """Make the routing id of a van's ``number``-th connection."""
    return uid.encode() + b"\0" + struct.pack(">QI", born_ns, number)


def further_routing_id(routing_id: bytes, number: int) -> bytes:
    """Make the routing id of a further connection (1 to ``MAX_FURTHER``)."""
    return routing_id[: -_ORDER_BYTES - 1] + bytes([number]) + routing_id[-_ORDER_BYTES:]


def split_routing_id(routing_id: bytes) -> RoutingId | None:
    """Decode a routing id; return ``None`` if no van made it."""
    head, order = routing_id[:-_ORDER_BYTES], routing_id[-_ORDER_BYTES:]
    if len(head) < 2 or head[-1] > MAX_FURTHER:
        return None
    try:
        return RoutingId(check_uid(head[:-1].decode()), head[-1], order)
    except (UnicodeDecodeError, UsageError):
        return None


@dataclass(slots=True, eq=False, repr=False)
class _Connection:
    """One accepted connection that has not been reported as ended."""

    routing_id: bytes
    descriptor: int
    uid: str
    number: int
    order: bytes
    sent_bytes: int = 0
    moved_bytes: int = 0
    further: list[_Connection] = field(default_factory=list)
    turn: int = 0
    forgotten: bool = False
    ended_at: float = 0.0


class AcceptedConnections:
    """A translator from routing ids and descriptors to connected uids.

    An end is reported ``settle_s`` after the monitor reported it. If further connections continue,
    it may be up to ``overdue_s`` later, because their last messages may still arrive.
    """

    def __init__(self, settle_s: float, overdue_s: float = 0.0) -> None:
        self._settle_s = settle_s
        self._overdue_s = overdue_s
        self._open: set[int] = set()
        self._claimants: dict[int, list[_Connection]] = {}
        self._doubts: dict[int, float] = {}
        self._connections: dict[bytes, _Connection] = {}
        self._current: dict[str, _Connection] = {}
        self._ending: deque[tuple[float, _Connection]] = deque()
        self._ended: dict[bytes, None] = {}
        self.speakers: dict[bytes, str] = {}
        """The known routing ids and their uids; ``heard`` is not needed for their messages."""

    def descriptor_opened(self, descriptor: int) -> None:
        """Note that the monitor has reported an accepted connection."""
        self._open.add(descriptor)

    def descriptor_closed(self, descriptor: int, now: float) -> None:
        """Note that the monitor has reported the end of the connection of ``descriptor``."""
        self._open.discard(descriptor)
        self._doubts.pop(descriptor, None)
        for connection in self._claimants.pop(descriptor, ()):
            self._end_later(connection, now)

    def knows(self, routing_id: bytes) -> bool:
        """Return whether a routing id was heard before and its end is not reported yet."""
        return routing_id in self._connections

    def heard(
        self, routing_id: bytes, descriptor: int, now: float, events: list[VanEvent]
    ) -> str | None:
        """Note a message of a routing id that is not in :attr:`speakers`.

        Appends the resulting events to ``events`` and returns the uid that the message is from, or
        ``None`` if the message must be dropped. Read all events of the monitor first.
        """
        connection = self._connections.get(routing_id)
        if connection is None:
            connection = self._begin(routing_id, descriptor, now)
        if connection is None or connection.forgotten:
            return None
        current = self._current.get(connection.uid)
        if connection.number:
            return self._heard_further(connection, current)
        if current is not None:
            if connection.order < current.order:
                return None
            self.forget(current.uid)
            reason = "the same node opened a newer connection"
            events.append(Disconnected(current.uid, reason))
        self._current[connection.uid] = connection
        self.speakers[routing_id] = connection.uid
        events.append(Connected(connection.uid))
        return connection.uid

    def _heard_further(self, connection: _Connection, first: _Connection | None) -> str | None:
        """Note a message of a further connection; add it to ``first`` if it belongs there."""
        if first is None or connection.order != first.order:
            return None
        first.further.append(connection)
        self.speakers[connection.routing_id] = connection.uid
        return connection.uid

    def routing_id_of(self, uid: str) -> bytes | None:
        """Return the routing id of ``uid``, or ``None`` if it is not connected."""
        connection = self._current.get(uid)
        return None if connection is None else connection.routing_id

    def count_sent(self, routing_id: bytes, nbytes: int) -> None:
        """Count the bytes sent by this connection."""
        connection = self._connections.get(routing_id)
        if connection is not None:
            connection.sent_bytes += nbytes

    def connections_of(self, uid: str) -> list[_Connection]:
        """Return each open connection of ``uid``."""
        first = self._current.get(uid)
        found = [] if first is None else [first, *first.further]
        return [each for each in found if each.descriptor in self._open]

    def next_routing_id_of(self, uid: str) -> bytes | None:
        """Return the routing id for sending to ``uid``; its connections take turns."""
        first = self._current.get(uid)
        if first is None:
            return None
        connections = [first, *first.further]
        first.turn = (first.turn + 1) % len(connections)
        return connections[first.turn].routing_id

    def forget(self, uid: str) -> None:
        """Ignore further messages of the current connection of ``uid``."""
        first = self._current.pop(uid, None)
        if first is not None:
            for connection in (first, *first.further):
                connection.forgotten = True
                del self.speakers[connection.routing_id]

    def heard_descriptors(self) -> list[int]:
        """Return the open connections that have sent messages."""
        return list(self._claimants)

    def moved(self, descriptor: int, moved_bytes: int) -> None:
        """Note how much has passed through this descriptor."""
        for connection in self._claimants.get(descriptor, ()):
            connection.moved_bytes = moved_bytes

    @property
    def num_unheard(self) -> int:
        """The number of open connections without a message yet, which may be anybody's."""
        return len(self._open) - len(self._claimants)

    def unheard_descriptors(self) -> set[int]:
        """Return the open connections that have not sent a message yet."""
        return self._open - self._claimants.keys()

    def next_due(self) -> float:
        """Return when :meth:`doubtful` and :meth:`report_ended` should be called next."""
        ending_at = self._ending[0][0] if self._ending else math.inf
        return min([ending_at, *self._doubts.values()])

    def doubtful(self, now: float) -> list[bytes]:
        """Return routing ids that share a descriptor, so that all but one are dead.

        Read all messages first. Then pass each one to which sending fails to :meth:`found_dead`.
        """
        found: list[bytes] = []
        for descriptor in [at for at, due in self._doubts.items() if due <= now]:
            claimants = self._claimants[descriptor]
            if len(claimants) == 1:
                del self._doubts[descriptor]
            else:  # libzmq may need longer to close a connection: ask again if necessary
                self._doubts[descriptor] = now + self._settle_s
                found += [connection.routing_id for connection in claimants]
        return found

    def found_dead(self, routing_id: bytes, now: float) -> None:
        """End ``routing_id``, one of :meth:`doubtful`, which cannot be sent to."""
        connection = self._connections[routing_id]
        for claimants in self._claimants.values():
            if connection in claimants:
                claimants.remove(connection)
        self._end_later(connection, now)

    def report_ended(self, now: float, events: list[VanEvent]) -> None:
        """Report connections that ended ``settle_s`` ago, after all messages were read."""
        while self._ending and self._ending[0][0] <= now:
            _, connection = self._ending.popleft()
            if self._has_last_words(connection, now):
                self._ending.append((now + self._settle_s, connection))
                continue
            del self._connections[connection.routing_id]
            if not connection.number:
                self._ended[connection.routing_id] = None
                if len(self._ended) > REMEMBERED_ENDS:
                    del self._ended[next(iter(self._ended))]
            current = self._current.get(connection.uid)
            if current is connection:
                self.forget(connection.uid)
                moved = connection.moved_bytes
                events.append(Disconnected(connection.uid, "the connection is gone", moved))
            elif current is not None and connection in current.further:
                current.further.remove(connection)
                del self.speakers[connection.routing_id]

    def _has_last_words(self, connection: _Connection, now: float) -> bool:
        """Return whether its further connections may still deliver messages."""
        is_over = not connection.further or connection.forgotten
        return not is_over and now < connection.ended_at + self._overdue_s

    def _begin(self, routing_id: bytes, descriptor: int, now: float) -> _Connection | None:
        said = split_routing_id(routing_id)
        if said is None or routing_id in self._ended:
            return None
        connection = self._connections[routing_id] = _Connection(routing_id, descriptor, *said)
        if descriptor not in self._open:
            self._end_later(connection, now)
            return connection
        claimants = self._claimants.setdefault(descriptor, [])
        claimants.append(connection)
        if len(claimants) > 1:
            self._doubts[descriptor] = now + self._settle_s
        return connection

    def _end_later(self, connection: _Connection, now: float) -> None:
        connection.ended_at = now
        self._ending.append((now + self._settle_s, connection))
