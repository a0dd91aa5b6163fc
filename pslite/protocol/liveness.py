"""Who is lost and who is stalled: two different things. Pure; time comes in as an argument.

Lost: the transport says that the connection is gone and it does not come back within
``lost_after_s``, or never came about within ``reach_s``, or the process is known to be dead
(same machine, process id gone).
libzmq answers its heartbeats from its own thread, so a busy interpreter keeps its connection.

Stalled: connected, but no sign of life from the node's own code for ``stall_report_s``. That
is reported with the node's name, again each such period, and is fatal only after
``fatal_after_s`` where that is set (PS_HEARTBEAT_TIMEOUT).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lost:
    """The peer is gone for good."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Stalled:
    """The peer is connected and silent."""

    peer: str
    silent_s: float


@dataclass(slots=True)
class _Peer:
    heard_at: float
    reported_at: float
    gone_since: float | None = None
    #: Since when a first connection is waited for.
    unreached_since: float | None = None


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
        self._peers: dict[str, _Peer] = {}

    def watch(self, peer: str, now: float, *, connected: bool = True) -> None:
        """Start to watch a peer (no effect when it is watched already)."""
        unreached_since = None if connected else now
        self._peers.setdefault(peer, _Peer(now, now, unreached_since=unreached_since))

    def forget(self, peer: str) -> None:
        """Stop watching: it said goodbye, or it has been declared lost."""
        self._peers.pop(peer, None)

    def heard(self, peer: str, now: float) -> None:
        """A message of the peer's own code arrived."""
        entry = self._peers.get(peer)
        if entry is not None:
            entry.heard_at = entry.reported_at = now
            entry.gone_since = entry.unreached_since = None

    def silent_s(self, peer: str, now: float) -> float:
        """How long nothing of the peer's own code has arrived; 0 for one that is not watched."""
        entry = self._peers.get(peer)
        return 0.0 if entry is None else max(0.0, now - entry.heard_at)

    def excuse(self, now: float) -> None:
        """Nobody's silence counts so far: this node was not listening."""
        for entry in self._peers.values():
            entry.heard_at = entry.reported_at = now

    def connected(self, peer: str) -> None:
        """The transport has a connection again."""
        entry = self._peers.get(peer)
        if entry is not None:
            entry.gone_since = entry.unreached_since = None

    def disconnected(self, peer: str, now: float) -> None:
        """The transport's connection is gone."""
        entry = self._peers.get(peer)
        if entry is not None and entry.gone_since is None:
            entry.gone_since = now

    def died(self, peer: str, what: str) -> list[Lost]:
        """The peer's process is known to be dead."""
        return [Lost(peer, what)] if self._peers.pop(peer, None) is not None else []

    def suspects(self) -> list[str]:
        """Watched peers without a connection, whose processes are worth a look."""
        return [
            peer
            for peer, entry in self._peers.items()
            if entry.gone_since is not None or entry.unreached_since is not None
        ]

    def tick(self, now: float) -> list[Lost | Stalled]:
        """What time alone has decided since the last call."""
        verdicts: list[Lost | Stalled] = []
        for peer, entry in list(self._peers.items()):
            verdict = self._judge(peer, entry, now)
            if isinstance(verdict, Lost):
                del self._peers[peer]
            if verdict is not None:
                verdicts.append(verdict)
        return verdicts

    def _judge(self, peer: str, entry: _Peer, now: float) -> Lost | Stalled | None:
        if entry.gone_since is not None:
            gone_s = now - entry.gone_since
            if gone_s >= self._lost_after_s:
                return Lost(peer, f"its connection has been gone for {gone_s:.1f} s")
            return None
        if entry.unreached_since is not None and now - entry.unreached_since >= self._reach_s:
            return Lost(peer, f"no connection with it came about within {self._reach_s:g} s")
        silent_s = now - entry.heard_at
        if 0 < self._fatal_after_s <= silent_s:
            return Lost(peer, f"connected, but no sign of life for {silent_s:.0f} s")
        if now - entry.reported_at >= self._stall_report_s:
            entry.reported_at = now
            return Stalled(peer, silent_s)
        return None
