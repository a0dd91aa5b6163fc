"""``OptimizerCalls``: compare the optimizers that the workers of a store set.

The deciding rank's calls count; the same call of another rank is compared with them, whichever
comes first. Only the last calls are remembered, since a script may set a learning rate in every
step: a rank that is further behind is not compared. Pure but for answering; part of the directory,
on the scheduler's I/O thread.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.errors import OptimizerMismatch
from pslite.errors import UsageError
from pslite.node.customer import Incoming

MOST_CALLS = 1000
"""How many calls of the deciding rank are remembered."""


@dataclass(slots=True)
class _Decided:
    """One call of the deciding rank; an error where the servers refused it."""

    optimizer: list[Any]
    error: BaseException | None


class OptimizerCalls:
    """The optimizer calls of one store; optimizers are in plain form.

    See ``optimizer/serialize.py``.
    """

    def __init__(self) -> None:
        self.num = 0
        """How many calls of the deciding rank there were."""
        self.current: list[list[Any]] = []
        """The present optimizer, as a list of none or one."""
        self._last: deque[_Decided] = deque(maxlen=MOST_CALLS)
        #: (request, rank, number of the call, optimizer): these wait for the deciding rank's call.
        self._waiting: list[tuple[Incoming, int, int, list[Any]]] = []
        #: What makes the numbers of a rank's calls those of the deciding rank's.
        self._shifts: dict[int, int] = {}
        #: Ranks whose last call was another one than the deciding rank's.
        self._refused: set[int] = set()
        self._num_before_meeting = 0

    def decided(self, optimizer: list[Any], error: BaseException | None, decider: int) -> None:
        """Handle the deciding rank's next call, which reached all servers or failed."""
        self.num += 1
        self._last.append(_Decided(optimizer, error))
        if error is None:
            self.current = [optimizer]
        waiting, self._waiting = self._waiting, []
        for incoming, rank, call, theirs in waiting:
            self._compare(incoming, rank, call, theirs, decider)

    def made(
        self, incoming: Incoming, rank: int, call: int, optimizer: list[Any], decider: int
    ) -> None:
        """Handle another rank's ``call``-th call; answer it when it can be compared."""
        self._compare(incoming, rank, max(call + self._shifts.get(rank, 0), 1), optimizer, decider)

    def _compare(
        self, incoming: Incoming, rank: int, call: int, theirs: list[Any], decider: int
    ) -> None:
        forgotten = self.num - len(self._last)
        if call <= forgotten:
            self._refused.discard(rank)
            incoming.respond()
            return
        # A rank that has left out a call (``if kv.rank == 0:``) may mean a later one.
        candidates = list(itertools.islice(self._last, call - 1 - forgotten, None))
        for meant, ours in enumerate(candidates, call):
            if ours.optimizer == theirs:
                self._shift(rank, meant - call)
                self._refused.discard(rank)
                incoming.respond() if ours.error is None else incoming.fail(ours.error)
                return
        done = [ours for ours in candidates if ours.error is None]
        if not done or rank in self._refused:
            # Not there yet: what failed was a call of the deciding rank alone, and a rank that
            # was refused means that call again, or the next.
            if rank in self._refused:
                self._refused.discard(rank)
                self._shift(rank, self.num + 1 - call)
                call = self.num + 1
            self._waiting.append((incoming, rank, call, theirs))
            return
        self._shift(rank, -1)
        self._refused.add(rank)
        incoming.fail(
            OptimizerMismatch(
                f"worker {rank} sets {_text(theirs)}, but worker {decider}, whose call counts, has "
                f"set {_text(done[0].optimizer)}"
            )
        )

    def _shift(self, rank: int, by: int) -> None:
        """Shift a rank's count for calls that it left out or that do not count."""
        self._shifts[rank] = self._shifts.get(rank, 0) + by

    def meeting_begins(self) -> None:
        """Begin a meeting (``meetings.py``); the deciding rank may set an optimizer."""
        self._num_before_meeting = self.num

    def meeting_ended(self, *, failed: bool, others: Iterable[int]) -> None:
        """End a meeting: all ranks continue with ``num``; ``others`` missed a failure."""
        if not failed:
            self._shifts.clear()
            return
        for rank in others:
            self._shift(rank, self.num - self._num_before_meeting)

    def fail_waiting(self, error: UsageError) -> None:
        """Fail the calls that wait: the awaited call will not come."""
        waiting, self._waiting = self._waiting, []
        for incoming, rank, *_ in waiting:
            self._shift(rank, -1)
            incoming.fail(error)


def _text(data: Sequence[Any]) -> str:
    """Return an optimizer's plain form for people; never raises."""
    name = data[0] if data else "nothing"
    numbers = data[1] if len(data) > 1 and type(data[1]) is dict else {}
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in numbers.items())})"
