"""``Charter``: what a restarted scheduler must know of its job. Pure.

The scheduler keeps a journal: its charter whenever that changes, and the requests of apps that it
has begun to carry out. It writes both before others can see what follows from them. A process that
is started in its place reads the journal, and does the same things again
(``node/scheduler_journal.py``). What it does not find there, the members tell it again: their
barriers, their losses, and what they have asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pslite.ids import NodeInfo


class SeatRow(NamedTuple):
    """A seat of ``succession.Seats``."""

    node_id: int
    node: NodeInfo
    attempt: int
    standing: str
    may_return: bool
    num_losses: int
    reason: str
    standby: NodeInfo | None
    filling: NodeInfo | None
    takes_none: bool


class GoneRow(NamedTuple):
    """A node that has left, or was lost for good."""

    node_id: int
    left: bool
    reason: str
    barriers: tuple[tuple[int, int], ...]
    """(group, number) of the barriers that it had reached."""


class FailedBarrier(NamedTuple):
    """A barrier that has failed, and the members that have not heard of it."""

    group: int
    round: int
    kind: str
    error: str
    missing: tuple[int, ...]


class Charter(NamedTuple):
    """The state of a scheduler, without that of its apps."""

    roster: tuple[NodeInfo, ...]
    """Workers and servers."""
    attempts: tuple[int, ...]
    """Parallel to ``roster``."""
    epoch: int
    gone: tuple[GoneRow, ...]
    seats: tuple[SeatRow, ...]
    failed_barriers: tuple[FailedBarrier, ...]

    def plain(self) -> list[Any]:
        """Return lists of plain values."""
        return list(map(_plain, self))


class RecordedRequest(NamedTuple):
    """A request of an app on the scheduler."""

    sender: int
    """The node id of the asker."""
    uid: str
    """The asker's name in the van."""
    app: int
    customer: int
    request_id: int
    head: int
    body: bytes


def charter_from(plain: Sequence[Any]) -> Charter:
    """Return the charter that ``plain`` returned as lists."""
    roster, attempts, epoch, gone, seats, failed = plain
    return Charter(
        tuple(NodeInfo(*row) for row in roster),
        tuple(attempts),
        epoch,
        tuple(GoneRow(node, left, why, tuple(map(tuple, each))) for node, left, why, each in gone),
        tuple(_seat(row) for row in seats),
        tuple(FailedBarrier(g, r, kind, error, tuple(who)) for g, r, kind, error, who in failed),
    )


def _seat(row: Sequence[Any]) -> SeatRow:
    seat = SeatRow(*row)
    standby, filling = (None if each is None else NodeInfo(*each) for each in row[7:9])
    return seat._replace(node=NodeInfo(*seat.node), standby=standby, filling=filling)


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, tuple) else value
