"""``ReadyOrder``: one order for calls that each rank makes in its own order.

Rings need calls in the same order on all ranks. So a rank asks a server before a call. The server
answers once all ranks have asked about it. Its answers number the calls, and each rank begins them
in the order of their numbers. This is what Horovod's coordinator does. A call that waits for a rank
delays no other call. If a rank has joined, there are no numbers, and calls use the servers. Any
thread may call; answers arrive on the node's I/O thread. Read next: ``protocol/collective.py``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TypeVar

from pslite.collective.server_route import ServerRoute
from pslite.collective.sums import DTYPES
from pslite.future import Future
from pslite.protocol.collective import CallKey, CollectiveCall

T = TypeVar("T")

_LEAST_BYTES = 1 << 17
"""The servers carry out smaller calls in the time of a question and its answer."""


def is_worth_asking(call: CollectiveCall) -> bool:
    """Return whether a call is large enough, judged by sizes that all ranks know."""
    return sum(map(math.prod, call.shapes)) * DTYPES[call.dtype or "uint8"].itemsize >= _LEAST_BYTES


class ReadyOrder:
    """The order of one group's calls on one of its ranks; calls ``ended`` after each."""

    def __init__(self, servers: ServerRoute, ended: Callable[[CallKey], None]) -> None:
        self._servers = servers
        self.ended = ended
        # Guards the next two. It is held while calls begin, so that they begin in order.
        self._lock = threading.RLock()
        self._next = 1
        #: Number -> the future that begins that call once it is next.
        self._early: dict[int, Future[None]] = {}

    def make(
        self,
        key: CallKey,
        call: CollectiveCall,
        in_order: Callable[[], Future[T]],
        by_servers: Callable[[], Future[T]],
    ) -> Future[T]:
        """Make a call by one of two ways, once all ranks are ready for it."""
        made = self._servers.ready(key, call).then(
            lambda number: self._in_turn(number, in_order) if number else by_servers()
        )
        # Without ``flush``: if Ctrl-C interrupted the caller in a step, that would end the group.
        result: Future[T] = Future(lambda: made.what)

        def end(done: Future[T]) -> None:
            self.ended(key)
            result.describe = done.describer()  # does not keep the value alive
            result._adopt(done)

        made.on_done(end)
        return result

    def _in_turn(self, number: int, begin: Callable[[], Future[T]]) -> Future[T]:
        turn: Future[None] = Future("earlier calls of the group")
        made = turn.then(lambda _: begin())
        with self._lock:
            self._early[number] = turn
            while (first := self._early.pop(self._next, None)) is not None:
                self._next += 1
                first.set_result(None)
        return made
