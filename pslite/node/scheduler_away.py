"""``SchedulerAway``: a member waits for the next scheduler (I/O thread).

The member has lost the scheduler. Push and pull go on meanwhile. Barriers, requests and decisions
about lost nodes wait. The member registers at the scheduler's address until a process answers. That
may be another one, or the same one if only the connection was lost. ``member.py`` then tells it
what it may not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pslite.errors import NodeLostError
from pslite.ids import SCHEDULER_ID, NodeInfo, Role
from pslite.node.control import SCHEDULER, ControlOffice
from pslite.wire.messages import Register

#: A shorter time without a scheduler is not told.
_LEAST_TOLD_S = 0.05


class SchedulerAway:
    """The wait of one member for the next scheduler."""

    def __init__(self, office: ControlOffice, register: Callable[[], Register]) -> None:
        """``register`` returns the message with which to register again."""
        self._office = office
        self._register = register
        self._since: float | None = None
        self._patience = office.io_queue.timers.new(self._give_up)
        self._line = office.io_queue.timers.new(self._say)
        office.links.on_replaced = self._is_replaced

    @property
    def is_awaited(self) -> bool:
        """Whether this node has no scheduler now."""
        return self._since is not None

    def lost(self, reason: str, now: float) -> None:
        """Begin to wait for the next scheduler, or ask it again."""
        office = self._office
        if self._since is None:
            self._since = now
            office.membership.no_scheduler_time.begins(SCHEDULER_ID, now)
            self._patience.set(now + office.config.rejoin_timeout_s)
            self._line.set(now + office.config.report_after_s)
            self._tell(f"the scheduler is lost: {reason}; waiting for another process in its place")
        office.watch.forget(SCHEDULER)
        office.links.reopen(SCHEDULER)
        office.links.send(SCHEDULER, self._register(), (), 0, now)
        office.watch.add(SCHEDULER, now)

    def _is_replaced(self, peer: str) -> None:
        """Act on a message of another process with the name of a peer."""
        if peer == SCHEDULER and self._office.config.rejoin_timeout_s and not self._office.error:
            self.lost("another process has its place", self._office.clock())

    def found(self, scheduler: NodeInfo | None = None) -> None:
        """Note that a scheduler has answered; a member is told its entry."""
        office = self._office
        if scheduler is not None:
            office.membership.roster = (scheduler, *office.membership.roster[1:])
            office.log.learn((scheduler,))
            office.watch.forget(SCHEDULER)
            office.watch.add(SCHEDULER, office.clock(), scheduler)
        if self._since is not None:
            now = office.clock()
            waited_s = now - self._since
            office.membership.no_scheduler_time.ends(SCHEDULER_ID, now)
            self.end()
            # A node that hears of the loss from the next scheduler does not know how long it took.
            after = f" after {waited_s:.1f} s" if waited_s >= _LEAST_TOLD_S else ""
            self._tell(f"the scheduler is there again{after}")

    def _tell(self, text: str) -> None:
        self._office.log.info(0 if self._office.role is Role.WORKER else 1, text)

    def end(self) -> None:
        """Wait no longer."""
        self._since = None
        self._patience.set(math.inf)
        self._line.set(math.inf)

    def _say(self, now: float) -> None:
        config, since = self._office.config, now if self._since is None else self._since
        self._line.set(now + config.report_after_s)
        where = f"{config.root_uri}:{config.root_port}"
        self._office.log.warn(
            f"no scheduler at {where} for {now - since:.0f} s; push and pull go on (if its process "
            "is only stopped, continue it with kill -CONT)"
        )

    def _give_up(self, now: float) -> None:
        config = self._office.config
        self._office.fail(
            NodeLostError(
                f"the scheduler at {config.root_uri}:{config.root_port} was lost, and no process "
                f"took its place within {config.rejoin_timeout_s:g} s (PS_REJOIN_TIMEOUT)",
                role=Role.SCHEDULER.value,
                rank=0,
            )
        )
