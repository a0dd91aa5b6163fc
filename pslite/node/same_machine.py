"""``LocalPeers``: offers shared memory and pipes to nodes of one machine.

It also handles the offers of other nodes. ``memory/`` has the memory itself, and
``van/zmq/pipes.py`` the pipes. On the I/O thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pslite.ids import SCHEDULER_ID, NodeInfo, Role
from pslite.memory.segment import Bytes, keep_values, written
from pslite.memory.sharing import PATIENCE_S
from pslite.node.links import Delivery
from pslite.node.office import Office
from pslite.van.base import PipeTicket
from pslite.wire.base import Message
from pslite.wire.messages import PipeOffer, SegmentOffer, SegmentTaken

#: The messages by which nodes of one machine agree on shared memory and pipes.
MESSAGES = (SegmentOffer, SegmentTaken, PipeOffer)


class LocalPeers:
    """The shared memory and pipes of one node."""

    def __init__(self, office: Office) -> None:
        self._office = office
        #: The nodes on this machine by their ids; empty if sharing is off (PS_SHM=0).
        self._here: dict[int, NodeInfo] = {}
        #: The standby of this server, or the server of this standby, if it is on this machine.
        self._paired: NodeInfo | None = None
        #: The workers and servers among them.
        self.near: frozenset[int] = frozenset()
        #: Whether all other workers and servers are on this machine.
        self.is_on_one_machine = False
        #: Node id -> hands a message to this node, which is in this process.
        self.beside: dict[int, Callable[[Delivery], None]] = {}

    def begin(self, info: NodeInfo, roster: Sequence[NodeInfo]) -> None:
        """Find the nodes on this machine; ``info`` is this node's entry."""
        if self._office.config.shm:
            self._here = {each.node_id: each for each in roster if each.machine == info.machine}
            self.near = frozenset(self._here) - {SCHEDULER_ID}
            self.is_on_one_machine = len(self.near) == len(roster) - 1

    def pair(self, own: NodeInfo, other: NodeInfo) -> None:
        """Share memory and pipes with this server's standby, or this standby's server."""
        if self._office.config.shm and own.machine == other.machine:
            self._paired = other
            self.offer_segments()
            self.offer_pipes(other)

    def is_paired(self, peer: str) -> bool:
        """Return whether ``pair`` has named this process."""
        return self._paired is not None and self._paired.uid == peer

    def spread(self, connections: int) -> None:
        """Use this many TCP connections to each server on another machine."""
        office = self._office
        for node in office.membership.neighbours():
            if node.role == Role.SERVER.value and node.node_id not in self.near:
                office.van.spread(node.uid, connections)

    def shares_with(self, node: int) -> bool:
        """Return whether a node reads this node's buffers directly. From any thread."""
        return self._office.sharing.reaches(self._office.membership.uids.get(node, ""))

    def may_share_with(self, node: int) -> bool:
        """Return whether to send to a node from shared buffers. From any thread.

        Until the first such message it is unknown whether the node can read them directly.
        """
        office = self._office
        return node in self.near and office.sharing.may_reach(office.membership.uids[node])

    def copy_on_write(self, node: int, address: int, nbytes: int) -> Bytes | None:
        """Map memory of a node on this machine once more, for this process to write to.

        ``address`` is where a received frame begins. None for other memory. From any thread.
        """
        peer = self._office.membership.uids.get(node, "")
        return self._office.sharing.copy_on_write(peer, address, nbytes)

    @staticmethod
    def keep_values(memory: Bytes) -> None:
        """Let memory from ``copy_on_write`` keep its present values."""
        keep_values(memory)

    @staticmethod
    def written(memories: Sequence[Bytes]) -> list[int]:
        """Return which memories from ``copy_on_write`` this process has written to."""
        return written(memories)

    def arrived(self, peer: str, node: int | None, message: Message) -> None:
        """Handle one of ``MESSAGES``, from a node of the roster or the paired process."""
        info = self._paired if self.is_paired(peer) else self._here.get(node or 0)
        if isinstance(message, SegmentOffer):
            self._segment_offered(peer, info, message)
        elif isinstance(message, SegmentTaken):
            self._segment_taken(peer, message)
        elif isinstance(message, PipeOffer):
            self._pipe_offered(peer, info, message)

    def offer_segments(self) -> None:
        """Offer this node's new memory segments to the peers on this machine."""
        office, now = self._office, self._office.clock()
        peers = [node for node in office.membership.neighbours() if node.node_id in self.near]
        for node in (*peers, self._paired) if self._paired else peers:
            for offer in office.sharing.offers(node.uid, now):
                self._send(node.uid, offer)
                # Wakes the loop at that time, because values then stop waiting for the answer.
                office.io_queue.timers.add(now + PATIENCE_S, lambda: None)

    def _send(self, peer: str, message: Message) -> None:
        office = self._office
        office.links.send(peer, message, (), office.membership.epoch, office.clock())

    def _segment_offered(self, peer: str, info: NodeInfo | None, offer: SegmentOffer) -> None:
        office = self._office
        if info is None:
            reason = "it is on another machine" if office.config.shm else ""
            answer = SegmentTaken(offer.segment, False, reason)
        else:
            answer = office.sharing.map(peer, info.pid, offer)
        self._send(peer, answer)

    def _segment_taken(self, peer: str, answer: SegmentTaken) -> None:
        office = self._office
        office.sharing.taken(peer, answer)
        if not answer.taken and answer.reason:
            whom = office.membership.peer_title(peer)
            text = f"cannot share memory with {whom}, so values travel by TCP, which is slower"
            office.log.warn_seldom(f"no shared memory with {peer}", f"{text} ({answer.reason})")

    def offer_pipes(self, to: NodeInfo | None = None) -> None:
        """Offer pipes for small messages to the peers on this machine, or to one of them."""
        office = self._office
        for node in office.membership.neighbours() if to is None else (to,):
            if node.node_id in self._here or node is self._paired:
                ticket = office.van.offer_pipe(node.uid)
                if ticket is not None:
                    self._send(node.uid, PipeOffer(*ticket))

    def _pipe_offered(self, peer: str, info: NodeInfo | None, offer: PipeOffer) -> None:
        if info is not None:
            self._office.van.take_pipe(peer, info.pid, PipeTicket(offer.fd, offer.inode))
