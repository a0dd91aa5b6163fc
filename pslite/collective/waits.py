"""Names the ranks that a collective call waits for, by asking the servers.

A server knows which ranks have sent a chunk. Messages of some calls do not pass it (with several
machines, whose ranks first combine their values in shared memory); for these it knows which ranks
have asked. Any thread may read a wait's text. The questions and answers are handled on the node's
I/O thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pslite.collective.asker import CollectiveAsker
from pslite.collective.wire import WAIT, pack_wait, unpack_ranks
from pslite.node.customer import Reply
from pslite.protocol.collective import CallKey, waiting_text

_LOOK_S = 0.25
"""How long a call waits before the servers are asked; it is less than any usual timeout."""
_LEAST_PAUSE_S = 1.0
"""The shortest pause between two questions about a call. Later pauses are half as long as the
longest wait, because the search for deadlocks needs a second without messages
(``protocol/deadlocks.py``), even if hundreds of ranks wait and ask. For the same reason a rank asks
about all its calls at once."""


class CallWait:
    """A call in flight. It refers to no arrays, because its future keeps it alive."""

    def __init__(
        self, clock: Callable[[], float], text: str, key: CallKey, chunks: set[int] | None
    ) -> None:
        self.key = key
        self.chunks = chunks
        """The chunks without an answer; None: the servers see no message of this call."""
        self.missing: Sequence[int] | None = None
        """The workers that the call waits for; None: not known yet."""
        self.ask_after_s = _LOOK_S
        self._text = text
        self._clock = clock
        self._began = clock()

    @property
    def waited_s(self) -> float:
        return self._clock() - self._began

    def text(self) -> str:
        """The call, and the ranks that it waits for, in words."""
        ranks = self.missing
        if ranks is not None:
            members = self.key.group.ranks
            ranks = [members.index(rank) for rank in ranks if rank in members]
        waiting = waiting_text(ranks, self.waited_s)
        return f"{self._text}: {waiting}" if self._text else waiting


class CallWaits:
    """The calls in flight of one group on this rank."""

    def __init__(self, asker: CollectiveAsker) -> None:
        self._asker = asker
        self._node = asker.node
        self._timer = self._node.io_queue.timers.new(self._look)
        self._lock = threading.Lock()  # guards the next two
        self._open: set[CallWait] = set()
        self._is_looking = False

    def begin(self, text: str, key: CallKey, chunks: set[int] | None = None) -> CallWait:
        """Watch a call until ``end``; ``chunks`` are the chunks without an answer."""
        wait = CallWait(self._node.clock, text, key, chunks)
        with self._lock:
            self._open.add(wait)
            is_first, self._is_looking = not self._is_looking, True
        if is_first:
            self._node.io_queue.call(lambda: self._timer.set(self._node.clock() + _LOOK_S))
        return wait

    def end(self, wait: CallWait) -> None:
        """Stop watching a call."""
        with self._lock:
            self._open.discard(wait)

    def _look(self, now: float) -> None:
        """Ask the servers about calls that have waited for a long time."""
        with self._lock:
            waits = list(self._open)
            self._is_looking = bool(waits) and self._node.error is None
        if not self._is_looking:
            return
        if any(wait.waited_s >= wait.ask_after_s for wait in waits):
            pause_s = max(max(wait.waited_s for wait in waits) / 2, _LEAST_PAUSE_S)
            for wait in waits:
                if wait.waited_s >= _LOOK_S:
                    wait.ask_after_s = wait.waited_s + pause_s
                    self._ask(wait)
        self._timer.set(now + _LOOK_S)

    def _ask(self, wait: CallWait) -> None:
        num_workers = self._node.config.num_workers
        server = self._asker.server_of(wait.key, min(list(wait.chunks or ()), default=0))
        body = pack_wait(wait.key, num_workers, counts_waits=wait.chunks is None)

        def note(replies: dict[int, Reply]) -> None:
            wait.missing = unpack_ranks(replies[server].body, num_workers)

        self._asker.ask(WAIT, body, {server: ()}, note)
