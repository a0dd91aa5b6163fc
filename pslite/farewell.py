"""How a node ends without leaving anything behind. Runs on the thread that closes the node.

A node that is done waits until its peers have accepted what it sent, and a worker for a moment more
until that is answered, so that errors are heard of. It says goodbye, and waits until that is
accepted too. A node that has failed only stays until the others know why.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pslite.postoffice import Postoffice

#: How long a node that has failed stays to tell the others why.
_LAST_WORDS_S = 2.0
#: How long a worker stays for answers to what was accepted. What is wrong is answered at once; a
#: round that waits for other workers is complete without this one.
_ANSWERS_S = 1.0


def take_leave(node: Postoffice) -> None:
    """Bring what is under way to its end, within PS_CLOSE_TIMEOUT."""
    if node.error is not None:
        # The others should hear of the cause before they notice that we are gone.
        wait_until(node, node.links.everything_accepted, time.monotonic() + _LAST_WORDS_S)
        return
    limit = time.monotonic() + node.config.close_timeout_s

    def nothing_under_way() -> bool:
        if node.error is not None:
            return True
        is_sent = node.errands.timers.next_due() is None and node.traffic.everything_sent
        return is_sent and node.links.everything_accepted()

    def everything_answered() -> bool:
        return node.error is not None or node.traffic.everything_answered

    wait_until(node, nothing_under_way, limit)
    wait_until(node, everything_answered, min(limit, time.monotonic() + _ANSWERS_S))
    if node.control is not None:
        control = node.control
        node.errands.call(lambda: control.say_goodbye(node.clock()))
    if not wait_until(node, nothing_under_way, limit):
        owed = ", ".join(node.membership.peer_title(peer) for peer in node.links.owed_by())
        node.log.warn(f"closed though not everything was accepted by {owed}")


def wait_until(node: Postoffice, condition: Callable[[], bool], limit: float) -> bool:
    """Wait until ``condition`` holds on the I/O thread, which looks after each step."""
    met = threading.Event()

    def look() -> bool:
        if condition():
            met.set()
        return met.is_set() or time.monotonic() >= limit

    node.errands.call(lambda: node.errands.look_after_each_step(look))
    return met.wait(max(0.0, limit - time.monotonic()))
