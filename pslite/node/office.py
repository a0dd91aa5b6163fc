"""Interfaces through which the parts of a node use it, instead of ``Postoffice``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pslite.config import Config
from pslite.future import Future
from pslite.ids import NodeInfo, Role
from pslite.memory.sharing import Sharing
from pslite.node.customer import Customers
from pslite.node.io_queue import IOQueue
from pslite.node.links import Delivery, Links
from pslite.node.log import Log
from pslite.node.pool import Pool
from pslite.plane import Run
from pslite.protocol.membership import Membership
from pslite.van.base import Van
from pslite.wire.base import Message


class Control(Protocol):
    """The control of a node: joining, barriers, lost nodes."""

    #: The I/O thread calls these with a process that has taken the seat of a lost worker.
    on_seated: list[Callable[[NodeInfo], None]]
    #: On the scheduler: called with a server whose new standby could take its place.
    on_filled: list[Callable[[NodeInfo], None]]

    def begin(self, now: float) -> None:
        """Join (or, on the scheduler, gather) the cluster."""

    def handle(self, delivery: Delivery, now: float) -> None:
        """Handle a message of the control plane."""

    def lost(self, peer: str, reason: str, now: float) -> None:
        """Act on the loss of a watched peer."""

    def disconnected(self, peer: str) -> None:
        """Note that the connection to a peer has ended."""

    def enter_barrier(self, group: int, timeout_s: float, future: Future[None]) -> None:
        """Enter a barrier; complete ``future`` when all nodes of the group have."""

    def barriers(self) -> dict[int, int]:
        """Return how many barriers of each group this node has entered. I/O thread only."""

    def set_barriers(self, counts: dict[int, int]) -> None:
        """Go on after these numbers of barriers, by group. I/O thread only."""

    def repeats(self, step: int, loop: int) -> None:
        """Say which step this process repeats in place of a lost one. I/O thread only."""

    def say_whether_to_return(self, yes: bool) -> None:
        """Tell the scheduler whether another process could go on in this one's place.

        After a no, nothing changes that. From any thread.
        """

    def say_goodbye(self) -> None:
        """Tell the other nodes that this node is done."""

    def fail(self, error: BaseException) -> None:
        """End every wait with ``error``: the node has failed."""

    def end(self) -> None:
        """Note that this node ends by itself, and the others have been told."""


class Office(Protocol):
    """The interface of a node for its parts. I/O thread only."""

    config: Config
    log: Log
    clock: Callable[[], float]
    pool: Pool
    van: Van
    io_queue: IOQueue
    sharing: Sharing
    links: Links
    membership: Membership
    customers: Customers
    control: Control
    #: Completes once this node is no longer needed (servers, scheduler).
    finished: Future[None]
    error: BaseException | None
    #: This node's entry; None until the cluster is complete.
    info: NodeInfo | None

    @property
    def role(self) -> Role:
        """The role of this node in the cluster."""

    def send(self, node: int, message: Message, frames: Sequence[Any] = ()) -> None:
        """Send to a node of the roster; has no effect if the node is gone."""

    def fail(self, error: BaseException) -> None:
        """End every wait of this node with ``error``, including later ones."""


class PartOwner(Protocol):
    """The owner of some parts: a worker's store, or all stores of a server."""

    def name_of(self, part: int) -> str | None:
        """Return the name of a part for people; None if not its owner. On the I/O thread."""

    def send_joined(self) -> None:
        """Submit requests that are held back to be joined. From any thread."""


class Relaying(Protocol):
    """What a server does that relays (``protocol/relays.py``). On the I/O thread."""

    def run(self, run: Run) -> None:
        """Add up rounds of relayed parts, send the sums, and write the answers.

        The lanes of these parts are below 0.
        """

    def departed(self, rank: int, error: BaseException) -> None:
        """Note that a worker is gone."""

    def owner_of(self, part: int) -> int | None:
        """Return the node id of the owner of a relayed part; None for another part."""

    def tick(self) -> None:
        """Tell the owners for which workers open rounds of relayed parts wait."""

    @property
    def is_done(self) -> bool:
        """Whether nothing will be relayed any more, by this server or to it."""

    @property
    def awaited(self) -> list[int]:
        """The ids of the servers that relay to this one and may send more sums."""
