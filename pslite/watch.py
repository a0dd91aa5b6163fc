"""Keeps an eye on a node's peers: signs of life out, losses and stalls in. On the I/O thread.

``protocol/liveness.py`` decides; this file feeds it with what the van and the operating system
say, and tells ``control`` of losses. libzmq's own heartbeats keep connections honest; the
beats sent here come from this node's code and so tell a stalled node from a busy one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pslite.address import machine_id, process_alive
from pslite.config import Config
from pslite.ids import NodeInfo
from pslite.protocol.liveness import Liveness, Lost
from pslite.wire.messages import Beat

if TYPE_CHECKING:
    from pslite.postoffice import Postoffice

#: How often the process of a peer without a connection is looked at.
_SUSPECT_INTERVAL_S = 0.1
#: A node that looks at the clock this late has been held up itself.
_LATE_S = 1.0
#: How often time alone is looked at.
_JUDGE_INTERVAL_S = 1.0


def beat_at(config: Config, now: float) -> float:
    """When the next sign of life is due; never, where PS_HEARTBEAT_INTERVAL is 0."""
    interval_s = config.heartbeat_interval_s
    return now + interval_s if interval_s > 0 else math.inf


class Watch:
    """The peers of one node, as far as they live."""

    def __init__(self, office: Postoffice) -> None:
        config = office.config
        self._office = office
        # Where nobody gives signs of life, silence means nothing.
        has_beats = config.heartbeat_interval_s > 0
        stall_report_s = config.stall_report_s if has_beats else math.inf
        self._liveness = Liveness(
            config.lost_after_s,
            stall_report_s,
            config.heartbeat_timeout_s,
            config.rendezvous_timeout_s,
        )
        #: Whom the van has a connection with, watched or not.
        self._connected: set[str] = set()
        #: The peers that are known, by the van's name.
        self._nodes: dict[str, NodeInfo] = {}
        self._beat_at = 0.0
        self._judge_at = 0.0
        self._suspect_at: float | None = None

    def begin(self, now: float) -> None:
        """The node starts."""
        self._beat_at = beat_at(self._office.config, now)
        self._judge_at = now + _JUDGE_INTERVAL_S

    def add(self, peer: str, now: float, node: NodeInfo | None = None) -> None:
        """A peer whose loss matters from now on; ``node`` as soon as it is known."""
        if node is not None:
            self._nodes[peer] = node
        connected = peer in self._connected
        self._liveness.watch(peer, now, connected=connected)
        if not connected and self._suspect_at is None:
            self._suspect_at = now + _SUSPECT_INTERVAL_S

    def forget(self, peer: str) -> None:
        """Its loss does not matter any more."""
        self._liveness.forget(peer)

    def heard(self, peer: str, now: float) -> None:
        """Something of the peer's own code arrived."""
        self._liveness.heard(peer, now)

    def silent_s(self, peer: str, now: float) -> float:
        """How long nothing of the peer's own code has arrived."""
        return self._liveness.silent_s(peer, now)

    def connected(self, peer: str) -> None:
        """The van has a connection with the peer."""
        self._connected.add(peer)
        self._liveness.connected(peer)

    def is_connected(self, peer: str) -> bool:
        """Whether the van has a connection with the peer."""
        return peer in self._connected

    def disconnected(self, peer: str, now: float) -> None:
        """The van has no connection with the peer any more."""
        self._connected.discard(peer)
        if self._office.control is not None:
            self._office.control.disconnected(peer)
        self._liveness.disconnected(peer, now)
        self._suspect_at = now

    def run(self, now: float) -> None:
        """Do what time asks for."""
        if self._suspect_at is not None and now >= self._suspect_at:
            self._look_at_suspects(now)
        if now >= self._beat_at:
            self._beat_at = beat_at(self._office.config, now)
            self._beat(now)
        if now >= self._judge_at:
            if now - self._judge_at > _LATE_S:
                # This node itself was held up: what its peers sent meanwhile is still to be read.
                self._liveness.excuse(now)
            self._judge_at = now + _JUDGE_INTERVAL_S
            self._judge(now)

    def next_due(self) -> float:
        """When ``run`` has something to do."""
        due = min(self._beat_at, self._judge_at)
        return due if self._suspect_at is None else min(due, self._suspect_at)

    def _beat(self, now: float) -> None:
        office = self._office
        for node in office.membership.neighbours():
            office.links.send(node.uid, Beat(), (), office.membership.epoch, now)

    def _look_at_suspects(self, now: float) -> None:
        """A peer of this machine whose process is gone need not be waited for."""
        suspects = self._liveness.suspects()
        self._suspect_at = now + _SUSPECT_INTERVAL_S if suspects else None
        for peer in suspects:
            node = self._nodes.get(peer)
            if node is not None and node.machine == machine_id() and not process_alive(node.pid):
                for lost in self._liveness.died(peer, "its process is gone"):
                    self._lost(lost, now)
        if suspects:
            self._judge(now)

    def _judge(self, now: float) -> None:
        for verdict in self._liveness.tick(now):
            if isinstance(verdict, Lost):
                self._lost(verdict, now)
            else:
                who = self._office.membership.peer_title(verdict.peer)
                self._office.log.warn(
                    f"{who} is connected but has been silent for {verdict.silent_s:.0f} s"
                )

    def _lost(self, lost: Lost, now: float) -> None:
        if self._office.control is not None:
            self._office.control.lost(lost.peer, lost.reason, now)
