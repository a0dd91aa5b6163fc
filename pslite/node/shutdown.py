"""``Shutdown``: the orderly end of a node.

It runs on the I/O thread unless stated otherwise.

A node that is done waits until its peers have accepted what it sent, says goodbye, and stays until
that is accepted and all that it has pushed or pulled is answered: so a push that is not applied is
heard of (``docs/decisions/0025-the-last-push.md``). A worker pushes nothing after its goodbye, so
no two workers wait here for each other's next round. A server stays until all is applied and
answered.
A node that has failed only stays until the others know why.

Waiting has no end while anything moves; peers that accept nothing for PS_CLOSE_TIMEOUT are given
up, and rounds that lack other workers after PS_STALL_TIMEOUT, where that is set. Who gives up what
is not accepted says no goodbye, and the others see a loss. Read next: ``Postoffice.close``.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pslite.errors import DeadlineError
from pslite.future import Future
from pslite.ids import Role
from pslite.node.data import Traffic
from pslite.node.io_queue import Errands
from pslite.node.office import Office

T = TypeVar("T")

#: How long a node that has failed stays to tell the others why.
_LAST_WORDS_S = 2.0
#: When somebody is told what a node that ends waits for, and how often from then on.
FIRST_LINE_S = 5.0
NEXT_LINE_S = 15.0
#: How often a node looks at the clock though nothing happens.
_LOOK_S = 0.5


class Push(Future[T]):
    """The future of an app's push, with a flag whether its failure was reported.

    That is who has got the error from it, or has it call something when it is done.
    """

    __slots__ = ("is_heard",)

    def __init__(self, describe: Callable[[], str] | str) -> None:
        super().__init__(describe)
        self.is_heard = False

    def error(self) -> BaseException | None:
        self.is_heard = self.is_heard or self._error is not None
        return self._error

    def result(self, timeout_s: float | None = None) -> T:
        try:
            return super().result(timeout_s)
        finally:
            self.error()

    def on_done(self, callback: Callable[[Future[T]], None]) -> None:
        self.is_heard = True
        super().on_done(callback)

    def on_error(self, callback: Callable[[Future[T]], None]) -> None:
        self.is_heard = True
        super().on_error(callback)


class Unheard:
    """Failures of calls that had returned and were never reported.

    Any thread may use it.

    What has the same text is the same: a push that was refused, and the pull that counts on it.
    """

    def __init__(self) -> None:
        self._errors: dict[str, BaseException] = {}
        self.pushes: set[Push[Any]] = set()
        """Those of apps that are not answered yet."""
        self._failed: dict[str, Push[Any]] = {}

    def push(self, describe: Callable[[], str]) -> Push[Any]:
        """Make the future of an app's push, whose failure somebody must hear of."""
        push: Push[Any] = Push(describe)
        self.pushes.add(push)
        Future.on_done(push, lambda _: self._answered(push))
        return push

    def _answered(self, push: Push[Any]) -> None:
        self.pushes.discard(push)
        if push._error is not None:
            known = self._failed.get(str(push._error), push)
            self._failed[str(push._error)] = push if known.is_heard else known

    def note(self, error: BaseException) -> None:
        """Note that a push was not applied, or what was sent was not accepted."""
        self._errors[str(error)] = error

    def heard(self, error: BaseException) -> None:
        """Forget an error of which the caller has been told."""
        self._errors.pop(str(error), None)

    def take(self) -> BaseException | None:
        """Return the first of them, which somebody is told now; forget the others."""
        failed = [push.error() for push in self._failed.values() if not push.is_heard]
        errors, self._errors = [*self._errors.values(), *failed], {}
        self._failed.clear()
        return errors[0] if errors else None


class CloseTimer:
    """Whether to go on waiting, and when to say so. Pure."""

    def __init__(self, now: float) -> None:
        self._began_at = self._moved_at = now
        self._line_at = now + FIRST_LINE_S
        self._left: object = None

    def is_over(self, left: object, now: float, limit_s: float) -> bool:
        """Return whether nothing of what is ``left`` has moved for ``limit_s``."""
        if left != self._left:
            self._left, self._moved_at = left, now
        return now - self._moved_at >= limit_s

    def waited_s(self, now: float) -> float | None:
        """Return for how long this waits, when it is time for a line that says so."""
        if now < self._line_at:
            return None
        self._line_at = now + NEXT_LINE_S
        return now - self._began_at


class Shutdown:
    """The end of one node; ``look`` is called after each step until it returns True."""

    def __init__(self, node: Office, traffic: Traffic, unheard: Unheard) -> None:
        #: Completes when the node may stop. What failed is in ``unheard``.
        self.done: Future[None] = Future("the peers to accept the sent messages")
        self._node = node
        self._traffic = traffic
        self._unheard = unheard
        self._patience = CloseTimer(node.clock())
        self._last_words_until = math.inf

    def begin(self) -> None:
        """Let nothing wait for company any more, and look from now on."""
        node = self._node
        self._traffic.worker.tell_failures(self._unheard.note)
        self._traffic.send_joined()
        node.errands.look_after_each_step(self._look)
        self._look_again()

    def _look_again(self) -> None:
        if not self.done.done():
            node = self._node
            node.errands.timers.add(node.clock() + _LOOK_S, self._look_again)

    def _look(self) -> bool:
        node = self._node
        if node.error is not None:
            self._say_last_words()
        elif self._is_over():
            if not node.membership.has_said_goodbye:
                node.membership.has_said_goodbye = True
                node.control.say_goodbye()
            # A goodbye is to be accepted, unless all peers have left: then no step would follow.
            if self._is_over():
                self.done.set_result(None)
        else:
            self._wait()
        return self.done.done()

    def _is_over(self) -> bool:
        """Return whether all is accepted and, after the goodbye, answered."""
        node = self._node
        is_accepted = not node.errands.commands and self._traffic.worker.everything_sent
        if not is_accepted or not node.links.everything_accepted():
            return False
        if node.role is Role.SERVER:
            return node.pool.num_jobs == 0 and not self._traffic.is_applying
        is_answered = self._traffic.worker.idle and not self._unheard.pushes
        return not node.membership.has_said_goodbye or is_answered

    def _wait(self) -> None:
        node, now = self._node, self._node.clock()
        unaccepted = node.links.unaccepted()
        left = unaccepted, self._traffic.num_requests, len(self._unheard.pushes)
        # The rounds of other workers may take as long as they like, unless a limit is set.
        name = "PS_CLOSE_TIMEOUT" if unaccepted else "PS_STALL_TIMEOUT"
        config = node.config
        limit_s = config.close_timeout_s if unaccepted else config.stall_timeout_s or math.inf
        is_over = self._patience.is_over(left, now, limit_s)
        waited_s = self._patience.waited_s(now)
        if not is_over and waited_s is None:
            return
        what = self._describe(unaccepted)
        limit = f"{name}={limit_s:g}"
        if is_over:
            fate = "these messages are lost" if unaccepted else "they may never be applied"
            text = f"closed, but {what}: no progress for {limit_s:g} s ({name}); {fate}"
            self._unheard.note(DeadlineError(text))
            self.done.set_result(None)
        elif unaccepted:
            hint = f"the limit without progress is {limit} s"
            node.log.warn(f"still closing after {waited_s:.0f} s: {what} ({hint})")
        else:
            node.log.warn(f"still closing after {waited_s:.0f} s: {what}")

    def _describe(self, unaccepted: dict[str, tuple[int, int]]) -> str:
        """Return what is waited for, in words."""
        node = self._node
        if unaccepted:
            waits = [
                f"{node.membership.peer_title(peer)} has not accepted {_amount(count, nbytes)}"
                for peer, (count, nbytes) in unaccepted.items()
            ]
            unsent = self._traffic.worker.num_unsent
            waits += [f"{unsent} further messages wait to be sent"] if unsent else []
            return ", ".join(waits)
        if node.role is not Role.WORKER:
            return "pushes are still being applied"
        pushes = list(self._unheard.pushes)
        if pushes:
            return f"{_unanswered(len(pushes), 'push', 'pushes')}: {pushes[0].what}"
        servers = ", ".join(map(node.membership.title, self._traffic.worker.waiting_for()))
        count = self._traffic.num_requests
        return (
            f"{_unanswered(count, f'request to {servers}', f'requests to {servers}')}: the servers "
            "are busy, or wait for pushes of other workers in the same round"
        )

    def _say_last_words(self) -> None:
        """Give the others time to hear of the cause before this node is gone.

        Those that end themselves know one, and may be gone before they accept another.
        """
        node, now = self._node, self._node.clock()
        self._last_words_until = min(self._last_words_until, now + _LAST_WORDS_S)
        ending = {node.membership.uids[each] for each in node.membership.ending}
        if not node.links.unaccepted().keys() - ending or now >= self._last_words_until:
            self.done.set_result(None)


def _unanswered(count: int, one: str, many: str) -> str:
    return (
        f"1 {one} has not been answered" if count == 1 else f"{count} {many} have not been answered"
    )


def _amount(count: int, nbytes: int) -> str:
    messages = f"{count} message" + ("s" if count > 1 else "")
    return f"{messages} ({nbytes / 1e6:.1f} MB)" if nbytes else messages


def wait_until(errands: Errands, condition: Callable[[], bool], limit: float) -> bool:
    """Wait until ``condition`` holds on the I/O thread, which looks after each step.

    From any other thread; ``limit`` is by ``time.monotonic``.
    """
    met = threading.Event()

    def look() -> bool:
        if condition():
            met.set()
        return met.is_set() or time.monotonic() >= limit

    errands.call(lambda: errands.look_after_each_step(look))
    return met.wait(max(0.0, limit - time.monotonic()))
