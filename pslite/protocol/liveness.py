"""``Liveness``: the rules by which a peer is lost or stalled. Pure.

A peer is lost in one of three cases: its connection is gone and does not return within
``lost_after_s``; its first connection is not made within ``reach_s``; its process is known to be
dead (same machine, process id gone). In the first case, if bytes arrive on a connection that is
being made, the node waits longer (``AWAITED_S``). Forked children of a dead process may keep its
connections open; then the node waits for its last messages (``ENDED_S``). libzmq answers its
heartbeats from its own thread, so a node with a busy interpreter keeps its connections.

A peer is stalled if it is connected, but its own code has not sent a heartbeat for
``stall_report_s``. This is reported with the node's name, once in each such period. The peer is
lost only after ``fatal_after_s``, if that is set (PS_HEARTBEAT_TIMEOUT).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

AWAITED_S = 30.0
"""The most extra time to wait for a connection if its address answers. The answers may come from
another program, or from a node with another key."""
ENDED_S = 0.5
"""If a peer's process has ended but its connection has not, it is lost after this silence."""
PROCESS_GONE = "its process is gone"


class Lost(NamedTuple):
    """The peer is lost for good."""

    peer: str
    reason: str


class Stalled(NamedTuple):
    """The peer is connected but silent."""

    peer: str
    silent_s: float


@dataclass(slots=True, eq=False, repr=False)
class _PeerState:
    heard_at: float
    reported_at: float
    gone_since: float = math.inf
    #: When its address answered the last time.
    answered_at: float = -math.inf
    #: When the wait for a first connection began.
    unreached_since: float = math.inf
    #: When its process was first seen to have ended while its connection existed.
    ended_since: float = math.inf


@dataclass(slots=True, eq=False, repr=False)
class _VainConnections:
    """Consecutive connections of one peer that broke before a message was complete."""

    progress: int
    since: float
    connections: int = 0
    moved_bytes: int = 0


VAIN_CONNECTIONS = 10
VAIN_S = 30.0


class ReconnectLoops:
    """Detects connections that break again and again before a message is complete.

    Each attempt sends a message from its start. Without this check, such a job would never end and
    never lose a peer, because the connection always returns in time.
    """

    def __init__(self) -> None:
        self._peers: dict[str, _VainConnections] = {}

    def disconnected(
        self, peer: str, now: float, *, progress: int, unaccepted_bytes: int, moved_bytes: int
    ) -> str | None:
        """Note the end of a connection; return a reason to give up after too many.

        ``progress`` counts the messages that got through in either direction. ``unaccepted_bytes``
        is how many bytes wait to be accepted, ``moved_bytes`` how many this connection has carried.
        """
        stretch = self._peers.get(peer)
        if not unaccepted_bytes or stretch is None or stretch.progress != progress:
            self._peers[peer] = _VainConnections(progress, now)
            return None
        stretch.connections += 1
        stretch.moved_bytes += moved_bytes
        took_s = now - stretch.since
        if stretch.connections < VAIN_CONNECTIONS or took_s < VAIN_S:
            return None
        speed = 8e-6 * stretch.moved_bytes / took_s
        return (
            f"{stretch.connections} connections in a row broke before one message was complete: "
            f"{stretch.moved_bytes} bytes moved in {took_s:.0f} s ({speed:.2f} Mbit/s), and "
            f"{unaccepted_bytes} bytes wait. Find out why connections break (a firewall, a "
            "proxy, a faulty cable, an MTU that is too large), or make messages smaller "
            "(PS_CHUNK_BYTES, fewer rows at once)"
        )

    def forget(self, peer: str) -> None:
        """Forget a peer that is lost, or has left."""
        self._peers.pop(peer, None)


class Liveness:
    """Watches a node's peers."""

    def __init__(
        self,
        lost_after_s: float,
        stall_report_s: float,
        fatal_after_s: float,
        reach_s: float = math.inf,
    ) -> None:
        self._lost_after_s = lost_after_s
        self._stall_report_s = stall_report_s
        self._fatal_after_s = fatal_after_s
        self._reach_s = reach_s
        self._peers: dict[str, _PeerState] = {}

    def watch(self, peer: str, now: float, *, connected: bool = True) -> None:
        """Start to watch a peer; has no effect if it is already watched."""
        unreached_since = math.inf if connected else now
        self._peers.setdefault(peer, _PeerState(now, now, unreached_since=unreached_since))

    def forget(self, peer: str) -> None:
        """Stop watching: it said goodbye, or it has been declared lost."""
        self._peers.pop(peer, None)

    def heard(self, peer: str, now: float) -> None:
        """Note that a message of the peer's own code arrived."""
        entry = self._peers.get(peer)
        if entry is not None:
            entry.heard_at = entry.reported_at = now
            entry.gone_since = entry.unreached_since = entry.ended_since = math.inf

    def silent_s(self, peer: str, now: float) -> float:
        """Return how long a watched peer's own code has been silent; 0 if not watched."""
        entry = self._peers.get(peer)
        return 0.0 if entry is None else max(0.0, now - entry.heard_at)

    def forgive(self, now: float) -> None:
        """Ignore all silence so far, because this node itself was stopped."""
        for entry in self._peers.values():
            entry.heard_at = entry.reported_at = now

    def connected(self, peer: str) -> None:
        """Note that the transport has a connection again."""
        entry = self._peers.get(peer)
        if entry is not None:
            entry.gone_since = entry.unreached_since = math.inf

    def disconnected(self, peer: str, now: float) -> None:
        """Note that the transport's connection is gone."""
        entry = self._peers.get(peer)
        if entry is not None:
            entry.gone_since = min(entry.gone_since, now)

    def answered(self, peer: str, now: float) -> None:
        """Note that bytes arrive on a connection that is being made with a peer."""
        entry = self._peers.get(peer)
        if entry is not None:
            entry.answered_at = now

    def died(self, peer: str, what: str) -> list[Lost]:
        """Declare a peer lost, because its process is known to be dead."""
        return [Lost(peer, what)] if self._peers.pop(peer, None) is not None else []

    def ended(self, peer: str, now: float) -> None:
        """Note that the peer's process has ended; its connection may still exist."""
        entry = self._peers.get(peer)
        if entry is not None:
            entry.ended_since = min(entry.ended_since, now)

    def watched(self) -> list[str]:
        """Return all peers that are watched."""
        return list(self._peers)

    def suspects(self) -> list[str]:
        """Return watched peers without a connection, whose processes must be checked."""
        return [
            peer
            for peer, entry in self._peers.items()
            if min(entry.gone_since, entry.unreached_since) < math.inf
        ]

    def tick(self, now: float) -> list[Lost | Stalled]:
        """Return peers that are lost or stalled because time has passed."""
        verdicts: list[Lost | Stalled] = []
        for peer, entry in list(self._peers.items()):
            verdict = self._judge(peer, entry, now)
            if isinstance(verdict, Lost):
                del self._peers[peer]
            if verdict is not None:
                verdicts.append(verdict)
        return verdicts

    def _judge(self, peer: str, entry: _PeerState, now: float) -> Lost | Stalled | None:
        if now - entry.ended_since >= ENDED_S:
            return Lost(peer, PROCESS_GONE)
        if entry.gone_since < math.inf:
            return self._judge_gone(peer, now - entry.gone_since, now - entry.answered_at)
        if now - entry.unreached_since >= self._reach_s:
            return Lost(peer, f"it could not be connected within {self._reach_s:g} s")
        silent_s = now - entry.heard_at
        if 0 < self._fatal_after_s <= silent_s:
            return Lost(peer, f"it is connected, but sent no heartbeat for {silent_s:.0f} s")
        if now - entry.reported_at >= self._stall_report_s:
            entry.reported_at = now
            return Stalled(peer, silent_s)
        return None

    def _judge_gone(self, peer: str, gone_s: float, unanswered_s: float) -> Lost | None:
        if min(gone_s, unanswered_s) < self._lost_after_s and (
            gone_s < self._lost_after_s + AWAITED_S
        ):
            return None
        reason = f"its connection has been gone for {gone_s:.1f} s"
        if unanswered_s < gone_s:
            reason += (
                f". Its address answered until {unanswered_s:.1f} s ago, but no connection was "
                "established: the network loses too many packets, or another program uses the "
                "address"
            )
        return Lost(peer, reason)
