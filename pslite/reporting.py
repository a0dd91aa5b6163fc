"""What a node says about itself when the scheduler asks. On the I/O thread.

Everything is read from counters and tables that are there anyway, at the moment of the question:
a job that nobody asks about pays nothing. Next: ``surveying.py``, which collects the reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pslite.survey import NodeReport, Wait, to_plain
from pslite.version import __version__
from pslite.wire.codec import pack_value
from pslite.wire.messages import StatusReport

if TYPE_CHECKING:
    from pslite.postoffice import Postoffice


def report_of(office: Postoffice, now: float, waits: Sequence[Wait] = ()) -> NodeReport:
    """The node at this moment; ``waits`` are those that the node's control knows of."""
    counts = office.links.byte_counts().values()
    open_rounds, round_waits = office.traffic.open_rounds(now)
    source = office.progress
    return NodeReport(
        version=__version__,
        uptime_s=max(0.0, now - office.began_at),
        sent_bytes=sum(sent for sent, _ in counts),
        received_bytes=sum(received for _, received in counts),
        shared_bytes=office.links.shared_bytes,
        requests=office.traffic.num_requests + len(office.customers.pending),
        open_rounds=open_rounds,
        pool_jobs=office.pool.num_jobs,
        progress=None if source is None else source.progressed(),
        waits=(*waits, *round_waits, *(source.waits() if source is not None else ())),
    )


def answer_to(office: Postoffice, question: int, now: float) -> StatusReport:
    """The message with a member's report."""
    return StatusReport(question, pack_value(to_plain(report_of(office, now))))
