"""``Shutdown``: ends a node in order.

It runs on the I/O thread unless stated otherwise.

A node that is done waits until its peers have accepted its messages, and says goodbye. Then it
stays until the goodbye is accepted and all its pushes and pulls are answered. So it learns if a
push was not applied (``docs/decisions/0025-the-last-push.md``). A worker does not push after
its goodbye, so two workers never wait here for each other's next round. A server stays until it
has applied and answered all pushes. A node that has failed stays only until the others know the
cause.

A node waits as long as there is progress. If peers do not accept messages for PS_CLOSE_TIMEOUT, it
gives up. If only answers to rounds are missing, it gives up after PS_STALL_TIMEOUT, if that is set.
A node that gives up on messages does not say goodbye, and the others see a loss. Read next:
``Postoffice.close``.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pslite.errors import DeadlineError, UsageError
from pslite.future import Future
from pslite.ids import Role
from pslite.node.data import Traffic
from pslite.node.io_queue import IOQueue
from pslite.node.office import Office

T = TypeVar("T")

#: How long a node that has failed stays to tell the others why.
_LAST_WORDS_S = 2.0
#: When a closing node first logs what it waits for, and the interval after that.
FIRST_LINE_S = 5.0
NEXT_LINE_S = 15.0
_STEP_MISSED = (
    "this process took the place of a lost worker, but its script has ended before the step of "
    "that worker; the script must run through the same loops over kv.steps each time"
)
#: How often a closing node checks its state without events.
_LOOK_S = 0.5


class Push(Future[T]):
    """The future of an app's push, with a flag that says its failure will be seen.

    ``is_heard`` is set when code gets the error from the future, or registers a callback.
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
    """Failures of calls that had already returned and that no caller has seen.

    Any thread may use it. Errors with the same text count once, such as those of a refused push
    and of the pull after it.
    """

    def __init__(self) -> None:
        self._errors: dict[str, BaseException] = {}
        self.pushes: set[Push[Any]] = set()
        """The pushes of apps that are not answered yet."""
        self._failed: dict[str, Push[Any]] = {}

    def push(self, describe: Callable[[], str]) -> Push[Any]:
        """Make the future of an app's push, whose failure must be reported."""
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
        """Note an error: a push was not applied, or a message was not accepted."""
        self._errors[str(error)] = error

    def heard(self, error: BaseException) -> None:
        """Forget an error that the caller has seen."""
        self._errors.pop(str(error), None)

    def take(self) -> BaseException | None:
        """Return the first error, for the caller to report; forget the others."""
        failed = [push.error() for push in self._failed.values() if not push.is_heard]
        errors, self._errors = [*self._errors.values(), *failed], {}
        self._failed.clear()
        return errors[0] if errors else None


class CloseTimer:
    """Decides whether a closing node waits longer, and when it logs that. Pure."""

    def __init__(self, now: float) -> None:
        self._began_at = self._moved_at = now
        self._line_at = now + FIRST_LINE_S
        self._left: object = None

    def is_over(self, left: object, now: float, limit_s: float) -> bool:
        """Return whether ``left`` has not changed for ``limit_s``."""
        if left != self._left:
            self._left, self._moved_at = left, now
        return now - self._moved_at >= limit_s

    def waited_s(self, now: float) -> float | None:
        """Return how long the node has waited if it is time to log that; else None."""
        if now < self._line_at:
            return None
        self._line_at = now + NEXT_LINE_S
        return now - self._began_at


class Shutdown:
    """The end of one node; ``look`` is called after each step until it returns True."""

    def __init__(self, node: Office, traffic: Traffic, unheard: Unheard) -> None:
        #: Completes when the node may stop. ``unheard`` has the failures.
        self.done: Future[None] = Future("the peers to accept the sent messages")
        self._node = node
        self._traffic = traffic
        self._unheard = unheard
        self._patience = CloseTimer(node.clock())
        self._last_words_until = math.inf

    def begin(self) -> None:
        """Submit requests that are held back, and check the state after each step."""
        node = self._node
        if self._node.role is Role.WORKER:
            self._traffic.worker.tell_failures(self._unheard.note)
        self._traffic.send_joined()
        node.io_queue.look_after_each_step(self._look)
        self._look_again()

    def _look_again(self) -> None:
        if not self.done.done():
            node = self._node
            node.io_queue.timers.add(node.clock() + _LOOK_S, self._look_again)

    def _look(self) -> bool:
        node = self._node
        if node.error is not None:
            self._say_last_words()
        elif self._is_over():
            if self._traffic.worker.catches_up:
                # Without a goodbye: the others wait for this worker's step.
                self._unheard.note(UsageError(_STEP_MISSED))
                self.done.set_result(None)
            elif not node.membership.has_said_goodbye:
                node.membership.has_said_goodbye = True
                node.control.say_goodbye()
            # Peers must accept the goodbye, unless all have left: then no step would follow.
            if self._is_over():
                self.done.set_result(None)
        else:
            self._wait()
        return self.done.done()

    def _is_over(self) -> bool:
        """Return whether all messages are accepted and, after the goodbye, answered.

        If servers may be replaced, they must be answered before it: the next server does not wait
        for pushes of a worker that has said goodbye.
        """
        node = self._node
        is_accepted = not node.io_queue.commands and self._traffic.everything_sent
        if not is_accepted or not node.links.everything_accepted():
            return False
        if node.role is Role.SERVER:
            return node.pool.num_jobs == 0 and not self._traffic.is_applying
        is_answered = self._traffic.worker.idle and not self._unheard.pushes
        is_early = not (node.membership.has_said_goodbye or node.config.standbys)
        return is_early or is_answered

    def _wait(self) -> None:
        node, now = self._node, self._node.clock()
        unaccepted = node.links.unaccepted()
        left = unaccepted, self._traffic.num_requests, len(self._unheard.pushes)
        # The rounds of other workers may take any time, unless a limit is set.
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
        """Return a text that says what this node waits for."""
        node = self._node
        if unaccepted:
            waits = [
                f"{node.membership.peer_title(peer)} has not accepted {_amount(count, nbytes)}"
                for peer, (count, nbytes) in unaccepted.items()
            ]
            unsent = self._traffic.num_unsent
            waits += [f"{unsent} further messages wait to be sent"] if unsent else []
            return ", ".join(waits)
        relay = self._traffic.relay
        if relay is not None and relay.awaited and not self._traffic.is_computing:
            servers = ", ".join(map(node.membership.title, relay.awaited))
            return f"{servers} may still send sums of the machine's workers"
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
        """Wait a short time until the other nodes have accepted the cause of the failure.

        Do not wait for nodes that are ending too: they know a cause, and may end before they accept
        this one.
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


def wait_until(io_queue: IOQueue, condition: Callable[[], bool], limit: float) -> bool:
    """Wait until ``condition()`` is true; the I/O thread checks it after each step.

    Call it from another thread. ``limit`` is a time of ``time.monotonic``. Returns whether the
    condition is true.
    """
    met = threading.Event()

    def look() -> bool:
        if condition():
            met.set()
        return met.is_set() or time.monotonic() >= limit

    io_queue.call(lambda: io_queue.look_after_each_step(look))
    return met.wait(max(0.0, limit - time.monotonic()))
