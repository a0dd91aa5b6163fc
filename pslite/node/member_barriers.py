"""``MemberBarriers``: the barriers in which a worker or server waits (I/O thread).

The scheduler ends them (``protocol/barrier.py``). Read next: ``member.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from pslite.errors import rebuild
from pslite.future import Future
from pslite.ids import SCHEDULER_ID, group_title
from pslite.node.control import ControlOffice
from pslite.wire.messages import BarrierEnter, BarrierLeave, BarrierWaits
from pslite.wire.recovery import BarriersReached


class MemberBarriers:
    """The open barriers of one node."""

    def __init__(self, office: ControlOffice) -> None:
        self._office = office
        #: (group, round) -> what ends with the barrier, and until when this node waits.
        self._open: dict[tuple[int, int], tuple[Future[None], float]] = {}

    def enter(self, group: int, round_: int, timeout_s: float, future: Future[None]) -> None:
        """Enter a barrier; 0 s means without a limit."""
        office = self._office
        until = office.clock() + timeout_s if timeout_s else math.inf
        self._open[group, round_] = future, until
        office.send(SCHEDULER_ID, BarrierEnter(group, round_, timeout_s))

    def enter_again(self, rounds: Mapping[int, int], now: float) -> None:
        """Tell the next scheduler what this node has reached, and where it waits.

        ``rounds`` is how many barriers of each group it has reached.
        """
        office = self._office
        office.send(SCHEDULER_ID, BarriersReached(tuple(rounds), tuple(rounds.values())))
        for (group, round_), (_, until) in self._open.items():
            left_s = max(until - now, 0.001) if until < math.inf else 0.0
            office.send(SCHEDULER_ID, BarrierEnter(group, round_, left_s))

    def over(self, message: BarrierLeave) -> None:
        """Handle the end of a barrier."""
        future, _ = self._open.pop((message.group, message.round), (None, 0.0))
        if future is None:
            return
        if message.kind:
            future.set_error(rebuild(message.kind, message.error))
        else:
            future.set_result(None)

    def say_who_has_not_come(self, message: BarrierWaits) -> None:
        """Log for whom a barrier waits."""
        missing = ", ".join(self._office.membership.title(node) for node in message.missing)
        self._office.log.warn(
            f"the barrier of {group_title(message.group)} has waited {message.waited_s:.0f} s for "
            f"{missing}"
        )

    def end(self, error: BaseException) -> None:
        """End all of them with an error."""
        waiting, self._open = self._open, {}
        for future, _ in waiting.values():
            future.set_error(error)
