"""``Seats``: which process has which place, and which takes a lost one's. Pure.

A seat is a role and a rank. Plans, parts and node ids name seats, so they stay valid when another
process takes one. The processes of a seat are numbered by attempts, from 0. This is the scheduler's
table; ``node/seating.py`` tells it what happens and carries out what it returns.

**Workers.** A worker without a process is waited for, unless ``wait_s`` is 0.

=================  ===================================  ==========================================
state              event                                then
=================  ===================================  ==========================================
TAKEN, WELCOMING   its process is lost, may return      VACANT, or WELCOMING a process that waits
TAKEN, WELCOMING   its process is lost otherwise        the job ends
TAKEN, WELCOMING   another process asks for the seat    that process waits, at most ``wait_s``
TAKEN              its process leaves                   the seat is removed
WELCOMING          all members know its process         TAKEN
VACANT             a process asks for the seat          WELCOMING this process
VACANT             its process is reported lost again   VACANT, since the same time as before
VACANT             none has asked within ``wait_s``     the job ends
=================  ===================================  ==========================================

A process may return if one of its seat has said so (``MayReturn``): that has begun a step that
another process can repeat. If processes of a seat are lost ``MOST_LOSSES`` times before one of them
says it again, the job ends, since that step cannot succeed.

**Servers.** A server may have a standby, which has repeated all that it did (``replication.py``).
If the server is lost, its standby takes the seat at once: WELCOMING, and then TAKEN. Without a
standby that is ready, a loss ends the job. A standby that comes later is a spare, until the server
has none.

===============  ==================================  =============================================
standby          event                               then
===============  ==================================  =============================================
none             there is a spare, the seat TAKEN    filling: the server sends the spare its state
filling          it has the state                    ready
ready            the server is lost                  none: it takes the seat
none, filling    the server is lost                  the job ends
filling, ready   it is lost, or is let go            none
any              the server lets it go for good      none; spares are not used, or refused
===============  ==================================  =============================================

A scheduler that goes on in place of a lost one finds the same states (``resume``). The wait for a
process in a vacant seat begins anew.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from pslite.ids import NodeInfo, Role, role_of
from pslite.protocol.charter import SeatRow

MOST_LOSSES = 3
"""With this many losses of a seat in one step, the job ends."""


class Standing(enum.Enum):
    """The state of a seat."""

    TAKEN = enum.auto()
    VACANT = enum.auto()
    WELCOMING = enum.auto()


@dataclass(slots=True)
class _Seat:
    node: NodeInfo
    """Its process, or the last one."""
    attempt: int = 0
    standing: Standing = Standing.TAKEN
    may_return: bool = False
    num_losses: int = 0
    """How many of its processes were lost since one said whether it may return."""
    vacant_since: float = 0.0
    reason: str = ""
    """Why its last process was lost."""
    standby: NodeInfo | None = None
    """The process that would take the seat of a server."""
    filling: NodeInfo | None = None
    """The process that is to be its standby, and is given its state."""
    takes_none: bool = False
    """Whether its process does something that no other one repeats."""


@dataclass(frozen=True, slots=True)
class Succession:
    """A process takes a seat."""

    node: NodeInfo
    """Its entry, with the rank of the seat."""
    attempt: int
    before: NodeInfo | None
    """The entry of the lost process; None if it was lost before this scheduler began."""
    reason: str
    """Why that was lost."""


class Seats:
    """The seats of one job, once it is complete."""

    def __init__(self, wait_s: float) -> None:
        #: How long a vacant seat waits for a process; 0: a loss ends the job.
        self.wait_s = wait_s
        self._seats: dict[int, _Seat] = {}
        self._num_workers = 0
        #: The processes that ask for a seat, by uid, with the time, in the order of arrival.
        self._asking: dict[str, tuple[NodeInfo, float]] = {}
        #: The processes that would stand by for a server without a standby, by uid.
        self._spares: dict[str, NodeInfo] = {}

    def begin(self, roster: Sequence[NodeInfo], standbys: Sequence[NodeInfo] = ()) -> None:
        """Give the seats of workers, and of servers with standbys, to the first processes."""
        seats = {node.node_id: _Seat(node) for node in roster}
        for standby in standbys:
            seats[standby.node_id].standby = standby
        self._seats = {
            node_id: seat
            for node_id, seat in seats.items()
            if seat.standby is not None or seat.node.role == Role.WORKER.value
        }
        self._num_workers = sum(1 for node in roster if node.role == Role.WORKER.value)

    def rows(self) -> tuple[SeatRow, ...]:
        """Return the seats, for ``resume``."""
        return tuple(
            SeatRow(
                node_id,
                seat.node,
                seat.attempt,
                seat.standing.name,
                seat.may_return,
                seat.num_losses,
                seat.reason,
                seat.standby,
                seat.filling,
                seat.takes_none,
            )
            for node_id, seat in self._seats.items()
        )

    def resume(self, rows: Sequence[SeatRow], num_workers: int, now: float) -> None:
        """Go on with the seats of a lost scheduler."""
        self._num_workers = num_workers
        self._seats = {
            row.node_id: _Seat(
                row.node,
                row.attempt,
                Standing[row.standing],
                row.may_return,
                row.num_losses,
                now,
                row.reason,
                row.standby,
                row.filling,
                row.takes_none,
            )
            for row in rows
        }

    def welcoming(self) -> list[Succession]:
        """Return the processes that the members are being told of."""
        return [
            Succession(seat.node, seat.attempt, None, seat.reason)
            for seat in self._seats.values()
            if seat.standing is Standing.WELCOMING
        ]

    def may_return(self, node_id: int, *, yes: bool) -> None:
        """Note a worker's word on whether another process could go on in its place.

        No is its last word: a yes that comes after it was said before.
        """
        seat = self._seats.get(node_id)
        if seat is not None and not seat.takes_none:
            seat.may_return, seat.num_losses, seat.takes_none = yes, 0, not yes

    def standbys(self) -> list[NodeInfo]:
        """Return the processes that stand by, or that would."""
        seats = self._seats.values()
        of_seats = [seat.standby or seat.filling for seat in seats]
        return [*(node for node in of_seats if node is not None), *self._spares.values()]

    def standby_of(self, node_id: int) -> NodeInfo | None:
        """Return the process that stands by for a server, or is being filled."""
        seat = self._seats.get(node_id)
        return None if seat is None else seat.standby or seat.filling

    def has_ready_standby(self, node_id: int) -> bool:
        """Return whether a process could take a server's place at once."""
        seat = self._seats.get(node_id)
        return seat is not None and seat.standby is not None

    def spares(self) -> list[NodeInfo]:
        """Return the processes that would stand by for a server that has a standby."""
        return list(self._spares.values())

    def dismiss(self, node_id: int, *, for_good: bool = False) -> NodeInfo | None:
        """Let a server have no standby any more; return the one that it had.

        With ``for_good``, it gets no other one.
        """
        seat = self._seats.get(node_id)
        if seat is None:
            return None
        standby = seat.standby or seat.filling
        seat.standby = seat.filling = None
        seat.takes_none = seat.takes_none or for_good
        return standby

    def takes_standby(self, node_id: int) -> bool:
        """Return whether this is a server that may have a standby."""
        seat = self._seats.get(node_id)
        return seat is not None and seat.node.role == Role.SERVER.value and not seat.takes_none

    def offer(self, node: NodeInfo) -> str | None:
        """Note that a process would stand by; return why it is not needed, or None."""
        if not self.takes_standby(node.node_id):
            return f"server {node.rank} takes no standby"
        self._spares[node.uid] = node
        return None

    def withdraw_offer(self, uid: str) -> bool:
        """Forget a process that would stand by; return whether it did."""
        return self._spares.pop(uid, None) is not None

    def pairs(self) -> list[tuple[NodeInfo, NodeInfo]]:
        """Give servers without a standby one that is to be filled: (server, standby)."""
        found = []
        for uid, node in list(self._spares.items()):
            seat = self._seats.get(node.node_id)
            if seat is None or seat.standing is not Standing.TAKEN or seat.takes_none:
                continue
            if seat.standby is None and seat.filling is None:
                seat.filling = self._spares.pop(uid)
                found.append((seat.node, seat.filling))
        return found

    def filled(self, node_id: int, uid: str) -> NodeInfo | None:
        """Note that a server's new standby has its state; return it if that is news."""
        seat = self._seats.get(node_id)
        if seat is None or seat.filling is None or seat.filling.uid != uid:
            return None
        seat.standby, seat.filling = seat.filling, None
        return seat.standby

    def left(self, node_id: int) -> None:
        """Remove the seat of a worker that has said goodbye, or whose loss ends the job."""
        self._seats.pop(node_id, None)

    def lost(self, node_id: int, reason: str, now: float) -> bool:
        """Handle a loss; return whether the seat now waits for another process."""
        seat = self._seats.get(node_id)
        if seat is None or seat.standing is Standing.VACANT:
            return seat is not None
        seat.num_losses += 1
        if seat.node.role == Role.SERVER.value:
            may_be_followed = seat.standby is not None
        else:
            is_hopeless = seat.num_losses >= MOST_LOSSES
            may_be_followed = self.wait_s > 0 and seat.may_return and not is_hopeless
        if not may_be_followed:
            return False
        seat.standing, seat.vacant_since, seat.reason = Standing.VACANT, now, reason
        return True

    def verdict(self, node_id: int, reason: str) -> str:
        """Return the reason for the end of the job, with why no process takes the seat."""
        why = self._why_not_replaced(node_id)
        return f"{reason}; {why}" if why else reason

    def _why_not_replaced(self, node_id: int) -> str:
        seat, is_server = self._seats.get(node_id), role_of(node_id) is Role.SERVER
        if seat is None:
            return "it had no standby" if self.wait_s and is_server else ""
        if seat.takes_none:
            if is_server:
                return "it could not have a standby any more"
            return "no process can go on in its place (its log says why)"
        if seat.filling is not None:
            return "its new standby did not have its state yet"
        if is_server:
            return "" if seat.standby else "it had no standby any more"
        if seat.num_losses >= MOST_LOSSES:
            return f"it was lost {seat.num_losses} times in the same step"
        if self.wait_s and not seat.may_return:
            return "it had not begun a step that another process can repeat"
        return ""

    def ask(self, node: NodeInfo, now: float) -> str | None:
        """Note that a process asks for a seat; return why it cannot have one, or None."""
        if node.role == Role.SERVER.value and any(map(self.takes_standby, self._seats)):
            return (
                "this job is complete, and a lost server's place goes to its standby; a process "
                "that is to stand by needs PS_STANDS_BY=1"
            )
        if not self.wait_s or node.role != Role.WORKER.value:
            return "this job is complete and does not accept further nodes"
        if node.rank >= self._num_workers:
            return f"this job has {self._num_workers} workers, so none has the rank {node.rank}"
        ranks = [seat.node.rank for seat in self._workers()]
        if not ranks or (node.rank >= 0 and node.rank not in ranks):
            which = "all workers have" if node.rank < 0 else f"worker {node.rank} has"
            return f"{which} left this job, so no process can take the place"
        self._asking[node.uid] = (node, now)
        return None

    def withdraw(self, uid: str) -> bool:
        """Forget a process that asks for a seat; return whether it did."""
        return self._asking.pop(uid, None) is not None

    def asking(self) -> list[tuple[NodeInfo, float, str]]:
        """Return the waiting processes, since when, and for whom."""
        return [(node, since, self._awaited(node)) for node, since in self._asking.values()]

    def _workers(self) -> list[_Seat]:
        return [seat for seat in self._seats.values() if seat.node.role == Role.WORKER.value]

    def _awaited(self, node: NodeInfo) -> str:
        for seat in self._workers():
            if seat.node.rank == node.rank:
                return f"the end of {seat.node.title}, whose place this process asks for"
        return "a worker to be lost, whose place this process could take"

    def take(self) -> list[Succession]:
        """Give vacant seats to standbys, and to the processes that ask for them.

        The latter get them in the order in which they came.
        """
        taken = []
        for seat in self._seats.values():
            if seat.standing is Standing.VACANT and seat.standby is not None:
                standby, seat.standby = seat.standby, None
                taken.append(self._give(seat, standby))
        for uid, (node, _) in list(self._asking.items()):
            for seat in self._workers():
                is_right = node.rank in (-1, seat.node.rank)
                if seat.standing is Standing.VACANT and is_right:
                    del self._asking[uid]
                    taken.append(self._give(seat, node))
                    break
        return taken

    @staticmethod
    def _give(seat: _Seat, node: NodeInfo) -> Succession:
        before, seat.node = seat.node, node._replace(rank=seat.node.rank)
        seat.attempt += 1
        seat.standing = Standing.WELCOMING
        return Succession(seat.node, seat.attempt, before, seat.reason)

    def welcomed(self, node_id: int, attempt: int) -> bool:
        """Note that all members know a process; return whether it has the seat now."""
        if not self.is_welcoming(node_id, attempt):
            return False
        self._seats[node_id].standing = Standing.TAKEN
        return True

    def is_welcoming(self, node_id: int, attempt: int) -> bool:
        """Return whether the members are being told of this process."""
        seat = self._seats.get(node_id)
        return seat is not None and (seat.standing, seat.attempt) == (Standing.WELCOMING, attempt)

    def attempt(self, node_id: int) -> int:
        """Return the number of a seat's process."""
        seat = self._seats.get(node_id)
        return 0 if seat is None else seat.attempt

    def since_loss_s(self, node_id: int, now: float) -> float:
        """Return the time since a seat's last process was lost, or since ``resume``."""
        seat = self._seats.get(node_id)
        return 0.0 if seat is None else now - seat.vacant_since

    def overdue(self, now: float) -> list[tuple[int, str]]:
        """Return the seats that have been vacant for too long, with reasons."""
        return [
            (
                node_id,
                f"{seat.reason}; no process has taken its place within {self.wait_s:g} s "
                "(PS_REJOIN_TIMEOUT)",
            )
            for node_id, seat in self._seats.items()
            if seat.standing is Standing.VACANT and now - seat.vacant_since >= self.wait_s
        ]

    def in_vain(self, now: float) -> list[tuple[str, str]]:
        """Return and forget the processes that have asked for too long: (uid, why not)."""
        late = [
            (uid, node) for uid, (node, since) in self._asking.items() if now - since >= self.wait_s
        ]
        for uid, _ in late:
            del self._asking[uid]
        return [
            (
                uid,
                f"no seat became free within {self.wait_s:g} s (PS_REJOIN_TIMEOUT): this process "
                f"waited for {self._awaited(node)}",
            )
            for uid, node in late
        ]
