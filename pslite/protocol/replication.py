"""How a standby repeats what its server does. Pure.

A server numbers what changes its state (rounds, and requests of its apps) and sends each such
record to its standby. It does not answer before the standby has all records up to this one. So
whatever a worker has seen outlives the loss of either process. The standby does what the records
say, in their order.

===========  =====================================================================================
class        part
===========  =====================================================================================
``Journal``  on the server: which records its standby has, and what waits for that
``Replay``   on the standby: puts arriving records in order
``Turns``    on both: work that goes on side by side, and work that must be alone
===========  =====================================================================================

If the server is lost, the standby takes its seat (``succession.py``) after it has done what its
records say. It drops a record that follows a missing one: no worker has seen its effect. Read
next: ``node/primary.py``. The scheme is primary-backup replication after aggregation, as in Li et
al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014), section 4.3.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Generic, TypeVar

from pslite.errors import ProtocolError

Action = Callable[[], None]
Buffer = bytes | memoryview
R = TypeVar("R")


class Journal:
    """The records that a server has sent to its standby."""

    def __init__(self, most_bytes: int) -> None:
        """``most_bytes`` of records may be stored and not done before further ones wait."""
        self._most_bytes = most_bytes
        #: The number of the last record.
        self.last = 0
        #: Record -> what waits until the standby has it.
        self._waiting: deque[tuple[int, Action]] = deque()
        #: Record -> its frames, which the standby may still read, and their size.
        self._frames: deque[tuple[int, object, int]] = deque()
        self._undone_bytes = 0
        self._stored = 0

    def add(self, frames: object, nbytes: int, then: Action) -> int:
        """Number a record; ``told`` returns ``then`` once the standby has it."""
        self.last += 1
        self._waiting.append((self.last, then))
        self._frames.append((self.last, frames, nbytes))
        self._undone_bytes += nbytes
        return self.last

    def told(self, stored: int, done: int) -> list[Action]:
        """Handle the standby's report; return what waits no longer, in order.

        A standby that falls behind slows its server down: what waits for a record waits longer
        while too many bytes of earlier ones are not done.
        """
        self._stored = max(self._stored, min(stored, self.last))
        while self._frames and self._frames[0][0] <= min(done, self._stored):
            self._undone_bytes -= self._frames.popleft()[2]
        limit = min(self._stored, self._limit()) if self.is_crowded else self._stored
        due = []
        while self._waiting and self._waiting[0][0] <= limit:
            due.append(self._waiting.popleft()[1])
        return due

    def _limit(self) -> int:
        """Return the last record with at most ``most_bytes`` of undone ones before it."""
        before = 0
        for number, _, nbytes in self._frames:
            if before > self._most_bytes:
                return number - 1
            before += nbytes
        return self.last

    @property
    def is_crowded(self) -> bool:
        """Whether more bytes than agreed are not done."""
        return self._undone_bytes > self._most_bytes

    def end(self) -> list[Action]:
        """Return all that waits: there is no standby any more."""
        due = [then for _, then in self._waiting]
        self._waiting.clear()
        self._frames.clear()
        return due


class Replay(Generic[R]):
    """The records that have reached a standby."""

    def __init__(self) -> None:
        #: It has all records up to this one.
        self.stored = 0
        #: It has done what all records up to this one say.
        self.done = 0
        self._early: dict[int, R] = {}
        self._done_early: set[int] = set()

    def arrived(self, number: int, record: R) -> list[R]:
        """Take a record in; return those that are next, in order."""
        if number > self.stored:
            self._early[number] = record
        ready = []
        while self.stored + 1 in self._early:
            self.stored += 1
            ready.append(self._early.pop(self.stored))
        return ready

    def has_done(self, number: int) -> None:
        """Note that what a record says is done."""
        self._done_early.add(number)
        while self.done + 1 in self._done_early:
            self.done += 1
            self._done_early.remove(self.done)

    def drop_early(self) -> None:
        """Forget the records that follow a missing one, which will not come."""
        self._early.clear()


def in_pieces(frames: Sequence[Buffer], most_bytes: int) -> Iterator[list[memoryview]]:
    """Yield the bytes of a payload in pieces, as frames; nothing is copied."""
    piece, room = list[memoryview](), most_bytes
    for frame in frames:
        view = memoryview(frame).cast("B")
        while len(view):
            piece.append(view[:room])
            room, view = room - len(piece[-1]), view[room:]
            if not room:
                yield piece
                piece, room = [], most_bytes
    yield piece


def from_pieces(payload: bytearray, lengths: Sequence[int]) -> list[memoryview]:
    """Return the frames of a payload that came in pieces.

    Raises ``ProtocolError`` if bytes are missing.
    """
    if sum(lengths) != len(payload):
        raise ProtocolError(f"expected a payload of {sum(lengths)} bytes, got {len(payload)}")
    view = memoryview(payload).toreadonly()
    return [view[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]


class Turns:
    """Begins work in the order of its arrival: side by side, or alone."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Action, bool]] = deque()
        self._num_running = 0
        self._is_alone = False
        self._looking = False
        self._when_idle: list[Action] = []

    def add(self, begin: Action, *, alone: bool = False) -> None:
        """Call ``begin`` when its turn comes; call ``ended`` when that work is over.

        Work that is ``alone`` begins after all earlier work is over, and later work after it.
        """
        self._waiting.append((begin, alone))
        self._look()

    def ended(self) -> None:
        """Note that some work is over."""
        self._num_running -= 1
        self._is_alone = False
        self._look()

    def when_idle(self, then: Action) -> None:
        """Call ``then`` once no work is left."""
        self._when_idle.append(then)
        self._look()

    def _look(self) -> None:
        if self._looking:  # ``begin`` may add work, and may be over at once
            return
        self._looking = True
        try:
            while self._waiting and not self._is_alone:
                begin, alone = self._waiting[0]
                if alone and self._num_running:
                    break
                self._waiting.popleft()
                self._num_running += 1
                self._is_alone = alone
                begin()
            while self._when_idle and not (self._waiting or self._num_running):
                self._when_idle.pop(0)()
        finally:
            self._looking = False
