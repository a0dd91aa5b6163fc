"""``PeerWatch``: sends heartbeats, detects losses and stalls (I/O thread).

``protocol/liveness.py`` decides. This file gives it the events of the van and the operating system,
reports losses to ``control``, and drops the connections of nodes that ``control`` declares gone.
libzmq's own heartbeats detect broken connections. This file's heartbeats come from the node's own
code, so if they are missing, a process has stalled behind a good connection.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from pslite.config import Config
from pslite.errors import ConfigError, NodeLostError
from pslite.ids import NodeInfo, Role
from pslite.node.address import machine_id, process_alive
from pslite.node.data import Traffic
from pslite.node.office import Office
from pslite.protocol.liveness import PROCESS_GONE, Liveness, Lost, ReconnectLoops
from pslite.protocol.membership import Gone
from pslite.van.base import Connected, Denied, Disconnected, TurnedAway, VanEvent
from pslite.wire.messages import Beat

#: How often to check the process of a peer without a connection.
_SUSPECT_INTERVAL_S = 0.1
#: How often to check the processes of all peers on this machine: children of a dead process may
#: keep its connections open.
_PROCESS_INTERVAL_S = 0.5
#: If the node's own timer is this late, the node itself was stopped for a while.
_LATE_S = 1.0
#: How often to check how long peers have been silent or without a connection.
_JUDGE_INTERVAL_S = 1.0


def beat_at(config: Config, now: float) -> float:
    """Return when the next heartbeat is due; with PS_HEARTBEAT_INTERVAL=0: never."""
    interval_s = config.heartbeat_interval_s
    return now + interval_s if interval_s > 0 else math.inf


class PeerWatch:
    """Watches the peers of one node."""

    def __init__(self, office: Office, traffic: Traffic) -> None:
        config = office.config
        self._office = office
        self._traffic = traffic
        # If peers do not send heartbeats, silence does not mean a stall.
        has_beats = config.heartbeat_interval_s > 0
        stall_report_s = config.stall_report_s if has_beats else math.inf
        self._liveness = Liveness(
            config.lost_after_s,
            stall_report_s,
            config.heartbeat_timeout_s,
            config.rendezvous_timeout_s,
        )
        #: Call it with a peer and the time after each message from the peer.
        self.heard = self._liveness.heard
        self.silent_s = self._liveness.silent_s
        self._reconnect_loops = ReconnectLoops()
        #: The peers with a connection, watched or not.
        self._connected: set[str] = set()
        #: The known peers, by their names in the van.
        self._nodes: dict[str, NodeInfo] = {}
        #: When ``_judge_by_time`` is due next.
        self._judge_at = 0.0
        self._beats = office.io_queue.timers.new(self._beat)
        self._judgement = office.io_queue.timers.new(self._judge_by_time)
        self._suspicion = office.io_queue.timers.new(self._look_at_suspects)
        #: How many unknown connections the van has reported as refused.
        self.turned_away = 0
        #: Called after a node is gone.
        self.on_departure: list[Callable[[], None]] = []

    def begin(self, now: float) -> None:
        """Start the timers."""
        self._beats.set(beat_at(self._office.config, now))
        self._judge_at = now
        self._judge_by_time(now)
        self._office.io_queue.timers.every(_PROCESS_INTERVAL_S, self._look_at_processes)

    def add(self, peer: str, now: float, node: NodeInfo | None = None) -> None:
        """Watch a peer from now on; ``node`` is its entry in the roster, if known."""
        if node is not None:
            self._nodes[peer] = node
        connected = peer in self._connected
        self._liveness.watch(peer, now, connected=connected)
        if not connected:
            self._suspicion.set(min(self._suspicion.due, now + _SUSPECT_INTERVAL_S))

    def expect(self, peer: str, now: float) -> None:
        """Note that a peer should be connected from now on: it counts as lost otherwise."""
        if peer not in self._connected:
            self._liveness.disconnected(peer, now)
            self._suspicion.set(now)

    def forget(self, peer: str) -> None:
        """Stop watching a peer."""
        self._nodes.pop(peer, None)
        self._liveness.forget(peer)
        self._reconnect_loops.forget(peer)

    def told(self, event: VanEvent, now: float) -> None:
        """Act on an event of the van about a connection."""
        office = self._office
        if isinstance(event, Disconnected):
            if event.peer in office.membership.node_ids:
                who = office.membership.peer_title(event.peer)
                office.log.info(1, f"connection to {who} is gone")
            self.disconnected(event.peer, now, event.moved_bytes)
            if office.membership.has_gone(event.peer):
                office.van.disconnect(event.peer)
        elif isinstance(event, Connected):
            self._connected.add(event.peer)
            self._liveness.connected(event.peer)
            office.links.reconnected(event.peer, now)
        elif isinstance(event, Denied):
            office.fail(ConfigError(event.reason))
        elif isinstance(event, TurnedAway):
            self.turned_away += event.count
            whom = f"{event.count} connections" if event.count > 1 else "a connection"
            origin = f" from {event.address}" if event.address else ""
            office.log.warn(f"refused {whom}{origin}: {event.reason}")

    def departed(self, gone: Gone) -> None:
        """Drop a node that is gone. Called by ``control``, which has told ``membership``."""
        office = self._office
        error, node = gone.error, gone.node.node_id
        office.customers.pending.depart(node, error)
        self._traffic.departed(node, error, left=gone.left)
        if not gone.left:
            self.forget(gone.node.uid)
            office.links.shut(gone.node.uid)
        elif not self.is_connected(gone.node.uid):
            self.disconnected(gone.node.uid, office.clock())
        for listener in self.on_departure:
            listener()

    def vacated(self, node: NodeInfo, reason: str) -> None:
        """Drop the process of a lost node whose seat waits for another.

        Called by ``control``, which has told ``membership``.
        """
        office = self._office
        error = NodeLostError(f"{node.title} is lost: {reason}", role=node.role, rank=node.rank)
        office.customers.pending.depart(node.node_id, error, for_good=False)
        self.forget(node.uid)
        office.links.shut(node.uid)
        if office.role is not Role.SCHEDULER:  # which tells the process, if it is still there
            office.van.disconnect(node.uid)

    def _ended_after_goodbye(self, peer: str) -> None:
        """Drop a node that has said goodbye and has ended."""
        office = self._office
        node = office.membership.node_ids[peer]
        office.membership.ended.add(node)
        self._traffic.departed(node, office.membership.gone[node].error, left=False)
        self.forget(peer)
        office.links.release(peer)
        office.van.disconnect(peer)  # another process may have its address now

    def is_connected(self, peer: str) -> bool:
        """Return whether the van has a connection to the peer."""
        return peer in self._connected

    def disconnected(self, peer: str, now: float, moved_bytes: int = 0) -> None:
        """Note that a peer's connection, which carried ``moved_bytes``, has ended."""
        self._connected.discard(peer)
        if self._has_done(peer):
            self._ended_after_goodbye(peer)
        self._office.control.disconnected(peer)
        self._liveness.disconnected(peer, now)
        self._suspicion.set(now)
        self._look_at_reconnects(peer, now, moved_bytes)

    def _look_at_reconnects(self, peer: str, now: float, moved_bytes: int) -> None:
        office = self._office
        in_vain = self._reconnect_loops.disconnected(
            peer,
            now,
            progress=office.links.progress(peer),
            unaccepted_bytes=office.links.unaccepted_bytes(peer),
            moved_bytes=moved_bytes,
        )
        if in_vain is None:
            return
        own = office.info.title if office.info is not None else "this node"
        for lost in self._liveness.died(peer, f"on the link from {own}, {in_vain}"):
            self._lost(lost, now)

    def _has_done(self, peer: str) -> bool:
        """Return whether a peer has said goodbye and no longer needs this node."""
        office = self._office
        node = office.membership.node_ids.get(peer)
        if node not in office.membership.told or not office.membership.is_leaving(node):
            return False
        return office.links.everything_accepted((peer,)) and not self._traffic.has_waiting(node)

    def _judge_by_time(self, now: float) -> None:
        if now - self._judge_at > _LATE_S:
            # This node itself was stopped; messages that peers sent meanwhile are still unread.
            self._liveness.forgive(now)
        self._judge_at = now + _JUDGE_INTERVAL_S
        self._judgement.set(self._judge_at)
        self._judge(now)

    def _beat(self, now: float) -> None:
        office = self._office
        self._beats.set(beat_at(office.config, now))
        uids = [node.uid for node in office.membership.listeners()]
        for uid in (*uids, *self._traffic.paired()):
            office.links.send(uid, Beat(), (), office.membership.epoch, now)

    def _look_at_suspects(self, now: float) -> None:
        """Check whether the processes of peers without a connection have ended."""
        suspects = self._liveness.suspects()
        self._suspicion.set(now + _SUSPECT_INTERVAL_S if suspects else math.inf)
        for peer in suspects:
            if self._has_ended(peer):
                for lost in self._liveness.died(peer, PROCESS_GONE):
                    self._lost(lost, now)
            elif self._office.van.is_answered(peer):
                self._liveness.answered(peer, now)
        if suspects:
            self._judge(now)

    def _look_at_processes(self, now: float) -> None:
        """Check all processes on this machine: children may keep a dead one's connections."""
        ended = [peer for peer in self._liveness.watched() if self._has_ended(peer)]
        for peer in ended:
            self._liveness.ended(peer, now)
        if ended:
            self._judge(now)

    def _has_ended(self, peer: str) -> bool:
        """Return whether a peer's process has ended, as far as this node can tell.

        For a process on another machine, that is so if its worker's server does not listen any
        more: no other process there may be left to say so.
        """
        node = self._nodes.get(peer)
        if node is None or node.pid == os.getpid():
            return False
        if node.machine == machine_id():
            return not process_alive(node.pid)
        office = self._office
        return bool(office.membership.worker_of(node)) and office.van.is_refused(peer)

    def _judge(self, now: float) -> None:
        for verdict in self._liveness.tick(now):
            if isinstance(verdict, Lost):
                self._lost(verdict, now)
            elif verdict.peer in self._connected:
                who = self._office.membership.peer_title(verdict.peer)
                self._office.log.warn(
                    f"{who} is connected but has been silent for {verdict.silent_s:.0f} s"
                )

    def _lost(self, lost: Lost, now: float) -> None:
        office = self._office
        node = office.membership.node_ids.get(lost.peer)
        if node is not None and office.membership.is_leaving(node):
            self._ended_after_goodbye(lost.peer)
        else:
            trouble = office.van.trouble(lost.peer)
            reason = f"{lost.reason}: {trouble}" if trouble else lost.reason
            office.control.lost(lost.peer, reason, now)
