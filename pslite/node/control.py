"""The base class of the controls: joining, lost nodes, leaving. On the I/O thread."""

from __future__ import annotations

import abc
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pslite.errors import DeadlineError
from pslite.ids import SCHEDULER_ID, NodeInfo
from pslite.node.data import Traffic
from pslite.node.message_filter import Admission
from pslite.node.office import Office
from pslite.node.peer_watch import PeerWatch, beat_at
from pslite.node.report import Reporter
from pslite.node.same_machine import LocalPeers
from pslite.protocol.membership import Gone, LossReports
from pslite.wire.messages import Beat, Leave, Members
from pslite.wire.recovery import BarriersReached, MayReturn, StepRepeated

SCHEDULER = "scheduler"
"""The name under which every node connects to the scheduler."""

#: How long, at least, a member's report of a loss is checked before the member itself is removed.
VERDICT_S = 2.0


class ControlOffice(Office, Protocol):
    """The interface of a node for its control: also data, liveness and reports."""

    admission: Admission
    traffic: Traffic
    nearby: LocalPeers
    watch: PeerWatch
    reporter: Reporter

    def join(
        self,
        info: NodeInfo,
        roster: tuple[NodeInfo, ...],
        now: float,
        *,
        epoch: int = 1,
        attempts: Sequence[int] = (),
        standbys: Sequence[NodeInfo] = (),
    ) -> None:
        """Handle the roster: the cluster is complete; ``info`` is this node's entry."""

    def seat(self, node: NodeInfo, attempt: int, now: float) -> NodeInfo | None:
        """Go on with another process in the seat of a lost worker or server."""


class NodeControl(abc.ABC):
    """The part of a node's control (``office.Control``) that all roles share."""

    def __init__(self, office: ControlOffice) -> None:
        self._office = office
        #: Timers until the cluster is complete: give up, log who is missing, send heartbeats.
        self._deadline = office.io_queue.timers.new(
            lambda now: self._give_up(self._too_late(), now)
        )
        self._roster_line = office.io_queue.timers.new(self._say_who_is_missing)
        self._beats = office.io_queue.timers.new(self._beat)
        self._barrier_rounds: Counter[int] = Counter()
        self._loss_reports = LossReports()
        #: Whether another process can never go on in this one's place; and what was said last.
        self._never_returns = False
        self._last_word: bool | None = None
        self.on_seated: list[Callable[[NodeInfo], None]] = []
        self.on_filled: list[Callable[[NodeInfo], None]] = []

    # -- gathering ---------------------------------------------------------------------

    def begin(self, now: float) -> None:
        config = self._office.config
        self._deadline.set(now + config.rendezvous_timeout_s)
        self._roster_line.set(now + config.roster_interval_s)
        self._beats.set(beat_at(config, now))

    @property
    def _listeners(self) -> Iterable[str]:
        """The peers that get heartbeats although they are not in the roster."""
        return (SCHEDULER,)

    def _stop_waiting(self) -> None:
        for timer in (self._deadline, self._roster_line, self._beats):
            timer.set(math.inf)

    def _beat(self, now: float) -> None:
        self._beats.set(beat_at(self._office.config, now))
        for peer in self._listeners:
            self._office.links.send(peer, Beat(), (), 0, now)

    @abc.abstractmethod
    def _say_who_is_missing(self, now: float) -> None: ...

    @abc.abstractmethod
    def _too_late(self) -> DeadlineError:
        """Return the error for a cluster that was not complete in time."""

    @abc.abstractmethod
    def _give_up(self, error: Exception, now: float) -> None:
        """End this node, because the cluster cannot become complete."""

    # -- what another process in this node's place must know ---------------------------

    def barriers(self) -> dict[int, int]:
        return dict(self._barrier_rounds)

    def set_barriers(self, counts: dict[int, int]) -> None:
        self._barrier_rounds = Counter(counts)
        reached = BarriersReached(tuple(counts), tuple(counts.values()))
        self._office.send(SCHEDULER_ID, reached)  # it may have come after the lost process

    def repeats(self, step: int, loop: int) -> None:
        message = StepRepeated(step, loop)
        self._office.log.info(0, f"this process repeats {message.title} of the lost one")
        self._office.send(SCHEDULER_ID, message)

    def say_whether_to_return(self, yes: bool) -> None:
        office = self._office
        if self._never_returns:
            return
        self._never_returns, self._last_word = not yes, yes
        office.io_queue.call(lambda: office.send(SCHEDULER_ID, MayReturn(yes)))

    # -- who is gone -------------------------------------------------------------------

    def _heard_of(self, speaker: int, lost: tuple[int, str], until: float) -> None:
        """Note that a member reports the loss of another member.

        The end of the reporting member may be postponed until ``until``.
        """
        about, reason = lost
        self._loss_reports.note(speaker, about, reason, self._office.membership.title(about), until)
        self._office.io_queue.timers.add(until, self._end_hearsay)

    def _end_hearsay(self) -> None:
        for node, reason in self._loss_reports.ended(self._office.clock()):
            self._depart(node, left=False, reason=reason)

    def _depart(self, node: int, *, left: bool, reason: str) -> None:
        """Note that a node is gone, and act on it if that is new."""
        gone = self._office.membership.depart(node, left=left, reason=reason)
        if gone is not None:
            # After this node has failed, other nodes end only as a consequence.
            is_news = not gone.left and self._office.error is None
            self._office.log.info(0 if is_news else 1, gone.sentence)
            self._gone(gone, is_news=is_news)

    def _said_goodbye(self, node: int) -> None:
        """Note that a node has said goodbye to this node."""
        self._office.membership.told.add(node)
        self._depart(node, left=True, reason="")

    @abc.abstractmethod
    def _gone(self, gone: Gone, *, is_news: bool) -> None:
        """Act on a loss or a goodbye; ``is_news`` is True for the first loss."""

    def say_goodbye(self) -> None:
        for node in self._office.membership.neighbours():
            self._office.send(node.node_id, Leave())

    def end(self) -> None:  # noqa: B027 - not abstract: only the scheduler has something to do
        """Note that this node ends by itself, and the others have been told."""


def ends_itself(message: Members, speaker: int) -> bool:
    """Return whether ``speaker`` says that it ends because of a loss."""
    return (speaker, 0) in zip(message.gone, message.left, strict=True)


def loss_in(message: Members, speaker: int) -> tuple[int, str] | None:
    """Find the first other node that ``speaker`` says is lost, and why."""
    for node, left, reason in zip(message.gone, message.left, message.reasons, strict=True):
        if not left and node != speaker:
            return node, reason
    return None
