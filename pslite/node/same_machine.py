"""``Nearby``: shared memory and pipes between nodes of one machine.

What is offered and what is taken. ``memory/`` has the memory itself, ``van/zmq/pipes.py`` the
pipes. On the I/O thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from pslite.ids import SCHEDULER_ID, NodeInfo, Role
from pslite.memory.sharing import PATIENCE_S
from pslite.node.office import Office
from pslite.van.base import PipeTicket
from pslite.wire.messages import Message, PipeOffer, SegmentOffer, SegmentTaken

#: What nodes of one machine say to each other about it.
MESSAGES = (SegmentOffer, SegmentTaken, PipeOffer)


class Nearby:
    """The shared memory and pipes of one node."""

    def __init__(self, office: Office) -> None:
        self._office = office
        #: The nodes on this machine by their ids, if memory may be shared at all.
        self._here: dict[int, NodeInfo] = {}
        #: Those of them that this one may exchange values with.
        self.near: frozenset[int] = frozenset()
        #: Whether all nodes that this one exchanges values with can share its memory.
        self.is_on_one_machine = False

    def begin(self, info: NodeInfo, roster: Sequence[NodeInfo]) -> None:
        """Find out who is on this machine; ``info`` is this node's entry."""
        if self._office.config.shm:
            self._here = {each.node_id: each for each in roster if each.machine == info.machine}
            self.near = frozenset(self._here) - {SCHEDULER_ID}
            self.is_on_one_machine = len(self.near) == len(roster) - 1

    def spread(self, connections: int) -> None:
        """Use this many TCP connections to each server that is not on this machine."""
        office = self._office
        for node in office.membership.neighbours():
            if node.role == Role.SERVER.value and node.node_id not in self.near:
                office.van.spread(node.uid, connections)

    def shares_with(self, node: int) -> bool:
        """Return whether a node reads this one's buffers where they lie. From any thread."""
        return self._office.sharing.reaches(self._office.membership.uids.get(node, ""))

    def may_share_with(self, node: int) -> bool:
        """Return whether to send to a node from this one's buffers. From any thread.

        Before the first such copy it is unknown whether the node will read it where it lies.
        """
        office = self._office
        return node in self.near and office.sharing.may_reach(office.membership.uids[node])

    def arrived(self, peer: str, node: int, message: Message) -> None:
        """Handle one of ``MESSAGES``, from a node of the roster."""
        if isinstance(message, SegmentOffer):
            self._segment_offered(peer, node, message)
        elif isinstance(message, SegmentTaken):
            self._segment_taken(peer, message)
        elif isinstance(message, PipeOffer):
            self._pipe_offered(peer, node, message)

    def offer_segments(self) -> None:
        """Offer the peers here the memory that values are sent from, new one too."""
        office, now = self._office, self._office.clock()
        for node in office.membership.neighbours():
            if node.node_id in self.near:
                for offer in office.sharing.offers(node.uid, now):
                    office.send(node.node_id, offer)
                    # A step at that time: from then on values do not wait for the answer.
                    office.errands.timers.add(now + PATIENCE_S, lambda: None)

    def _segment_offered(self, peer: str, node: int, offer: SegmentOffer) -> None:
        office, info = self._office, self._here.get(node)
        if info is None:
            reason = "it is on another machine" if office.config.shm else ""
            answer = SegmentTaken(offer.segment, False, reason)
        else:
            answer = office.sharing.map(peer, info.pid, offer)
        office.send(node, answer)

    def _segment_taken(self, peer: str, answer: SegmentTaken) -> None:
        office = self._office
        office.sharing.taken(peer, answer)
        if not answer.taken and answer.reason:
            whom = office.membership.peer_title(peer)
            text = f"cannot share memory with {whom}, so values travel by TCP, which is slower"
            office.log.warn_seldom(f"no shared memory with {peer}", f"{text} ({answer.reason})")

    def offer_pipes(self) -> None:
        """Begin to exchange small messages with them by pipes."""
        office = self._office
        for node in office.membership.neighbours():
            if node.node_id in self._here:
                ticket = office.van.offer_pipe(node.uid)
                if ticket is not None:
                    office.send(node.node_id, PipeOffer(*ticket))

    def _pipe_offered(self, peer: str, node: int, offer: PipeOffer) -> None:
        info = self._here.get(node)
        if info is not None:
            self._office.van.take_pipe(peer, info.pid, PipeTicket(offer.fd, offer.inode))
