"""Calls that all workers of a store make together, as one of them makes them.

Every worker numbers its calls of this kind. The directory (``together.py``) has the deciding rank
carry a call out once all have come, and lets the others know what has come of it. On the caller's
thread, which waits; what follows an answer runs on the node's I/O thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvstore.keys import Key
from kvstore.servers import Servers
from pslite import Future


class JointCalls:
    """The calls of one store on one worker."""

    def __init__(self, servers: Servers, wait: Callable[[Future[Any]], Any]) -> None:
        self._servers = servers
        self._wait = wait
        self._count = 0

    def begin(self) -> int:
        """The number of a call that begins now, which is the same on all workers."""
        self._count += 1
        return self._count

    def make(self, name: str, act: Callable[[int], Sequence[Key]]) -> tuple[int, bytes]:
        """Once all workers have come here, have the lowest rank ``act``; all see its error.

        ``act`` gets the number of this call and returns the keys that are gone. Returns the number
        and the news for ``Servers.news_of``.
        """
        call = self.begin()
        meeting = self._servers.meet(call, name)
        try:
            news: bytes | None = self._wait(meeting)
        except BaseException as error:
            self._withdraw(call, meeting, error)
            raise
        if news is None:
            try:
                deleted = act(call)
            except BaseException as error:
                self._servers.report(call, error=error)
                raise
            news = self._wait(self._servers.report(call, deleted))
        return call, news

    def _withdraw(self, call: int, meeting: Future[bytes | None], error: BaseException) -> None:
        """This rank does not wait any more; if it turns out to decide, the others hear of that."""

        def answered(done: Future[bytes | None]) -> None:
            if done.error() is None and done.result(0) is None:
                self._servers.report(call, error=error)

        meeting.on_done(answered)
