"""``Reporter``: makes a node's status reports for the scheduler (I/O thread).

A report is made from existing counters and tables when the question arrives, so it costs nothing
until someone asks. Read next: ``surveyor.py``, which collects the reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from pslite.ids import Role
from pslite.node.data import Traffic
from pslite.node.office import Office
from pslite.version import __version__
from pslite.wire.messages import StatusReport
from pslite.wire.survey import MAX_EVENTS, Event, NodeReport, ProgressSource, Wait, packed


class Reporter:
    """Makes the reports of one node."""

    def __init__(self, office: Office, traffic: Traffic) -> None:
        self._office = office
        self._traffic = traffic
        self._began_at = office.clock()
        #: When what happened to the nodes of the job, on the scheduler.
        self.last_events: deque[tuple[float, str]] = deque(maxlen=MAX_EVENTS)
        #: Called with each new event.
        self.on_event: Callable[[float, str], None] = lambda at, text: None
        #: Knows the progress of a worker's training; None on other nodes.
        self.progress: ProgressSource | None = None

    def happened(self, text: str) -> None:
        """Log an event, and remember it for the status of the job."""
        event = self._office.clock(), text
        self.last_events.append(event)
        self.on_event(*event)
        self._office.log.info(0, text)

    def events(self, now: float) -> tuple[Event, ...]:
        """Return the last events, the oldest first."""
        return tuple(Event(max(0.0, now - at), text) for at, text in self.last_events)

    def report(self, now: float, waits: Sequence[Wait] = ()) -> NodeReport:
        """Return a report on the node; ``waits`` are the waits that its control knows."""
        office, traffic, source = self._office, self._traffic, self.progress
        counts = office.links.byte_counts().values()
        open_rounds, round_waits = traffic.open_rounds(now)
        stuck: tuple[int, list[str]] | None = None if office.role is Role.WORKER else (0, [])
        if source is not None:
            stuck = source.stuck()
        moved = -1
        if stuck is not None and not self._is_busy():
            peers = office.membership.neighbours()
            moved = stuck[0] + sum(office.links.progress(peer.uid) for peer in peers)
        return NodeReport(
            version=__version__,
            uptime_s=max(0.0, now - self._began_at),
            sent_bytes=sum(sent for sent, _ in counts),
            received_bytes=sum(received for _, received in counts),
            shared_bytes=office.sharing.shared_bytes,
            requests=traffic.num_requests + len(office.customers.pending),
            open_rounds=open_rounds,
            pool_jobs=office.pool.num_jobs,
            progress=None if source is None else source.progressed(),
            waits=(*waits, *round_waits, *(source.waits() if source is not None else ())),
            moved=moved,
            calls=tuple(stuck[1]) if stuck is not None else (),
        )

    def _is_busy(self) -> bool:
        """Return whether this node may act before the next message arrives."""
        office, traffic = self._office, self._traffic
        # Check the pool first: finished work becomes a command before it counts as done.
        return (
            office.pool.num_jobs > 0
            or office.io_queue.has_work
            or traffic.num_unsent > 0
            or traffic.is_computing
            or office.customers.is_at_work
            or office.error is not None
            or not office.links.everything_accepted(
                [peer.uid for peer in office.membership.neighbours()]
            )
        )

    def answer(self, question: int, now: float) -> StatusReport:
        """Return the message with a member's report."""
        return StatusReport(question, packed(self.report(now)))
