"""Carry out calls that all workers of a store make together, and compare their optimizers.

``Meetings`` is for deleting keys and loading checkpoints. Each rank numbers its calls. A call is
carried out by the deciding rank (the lowest that is there) once every live rank has come to it, and
is over for all when that rank has reported back. Ranks whose calls differ are told so, and all hear
the error of one that cannot take part.

``OptimizerCalls`` is for ``set_optimizer``. The deciding rank's calls count; the same call of
another rank is compared with them, whichever comes first. Only the last calls are remembered, since
a script may set a learning rate in every step: a rank that is further behind is not compared. Pure
but for answering; part of the directory, on the scheduler's I/O thread.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import OptimizerMismatch
from kvstore.protocol.requests import CLOSING, pack
from pslite.errors import UsageError
from pslite.ids import rank_of
from pslite.node.customer import Incoming


@dataclass(slots=True)
class _Meeting:
    """One call: who has come, and who is carrying it out."""

    name: str
    """What it does, in words for the error of a rank that does something else."""
    arrived: dict[int, Incoming] = field(default_factory=dict)
    carried_out_by: int | None = None
    error: BaseException | None = None
    """Ranks do different things, or one cannot take part: those still to come hear of it too."""


class Meetings:
    """The calls of one store that are not over yet."""

    def __init__(self) -> None:
        self._open: dict[int, _Meeting] = {}

    def arrive(
        self,
        call: int,
        name: str,
        incoming: Incoming,
        live: Sequence[int],
        error: BaseException | None = None,
    ) -> None:
        """A rank has come to its ``call``-th call; with ``error`` it cannot take part in it."""
        meeting = self._open.setdefault(call, _Meeting(name))
        rank = rank_of(incoming.sender)
        if meeting.error is None and meeting.name != name:
            meeting.error = UsageError(
                f"worker {rank} calls {name} where worker {min(meeting.arrived)} calls "
                f"{meeting.name}; all workers have to make these calls in the same order"
            )
        meeting.error = meeting.error or error
        meeting.arrived[rank] = incoming
        self._look_at(call, meeting, live)

    def departed(self, live: Sequence[int]) -> None:
        """A rank is gone: stop waiting for it; another may have to decide."""
        for call, meeting in list(self._open.items()):
            if meeting.carried_out_by is not None and meeting.carried_out_by not in live:
                meeting.carried_out_by = None
            self._look_at(call, meeting, live)

    def fail(self, error: UsageError, live: Sequence[int]) -> None:
        """Some of those who are to come never will: also those who do hear of it.

        No worker waits for the end of a store, which its workers may reach still.
        """
        for call, meeting in list(self._open.items()):
            if meeting.carried_out_by is None and meeting.name != CLOSING:
                meeting.error = meeting.error or error
                self._look_at(call, meeting, live)

    def done(self, call: int, news: bytes, error: BaseException | None) -> str:
        """The deciding rank has carried it out, or failed. Returns what it was."""
        meeting = self._open.pop(call, None)
        if meeting is None:
            return ""
        for rank, incoming in meeting.arrived.items():
            if rank == meeting.carried_out_by:
                continue
            if error is not None:
                incoming.fail(error)
            else:
                incoming.respond(pack(False, news))
        return meeting.name

    def _look_at(self, call: int, meeting: _Meeting, live: Sequence[int]) -> None:
        """Let the deciding rank go ahead once all are there, or forget what came to nothing."""
        all_there = bool(live) and meeting.arrived.keys() >= set(live)
        if meeting.error is not None:
            for incoming in meeting.arrived.values():  # without effect where it is not the first
                incoming.fail(meeting.error)
            if all_there:
                del self._open[call]
        elif meeting.carried_out_by is None and all_there:
            meeting.carried_out_by = min(live)
            meeting.arrived[min(live)].respond(pack(True, b""))


MOST_CALLS = 1000
"""How many calls of the deciding rank are remembered."""


@dataclass(slots=True)
class _Decided:
    """One call of the deciding rank; an error where the servers refused it."""

    optimizer: list[Any]
    error: BaseException | None


class OptimizerCalls:
    """Those of one store. An optimizer is in its plain form (``optimizer/serialize.py``)."""

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
        """The deciding rank's next call has reached all servers, or failed there."""
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
        """Another rank's ``call``-th call, which is answered when it can be compared."""
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
        """A rank has left out calls, or made one that does not count."""
        self._shifts[rank] = self._shifts.get(rank, 0) + by

    def meeting_begins(self) -> None:
        """The ranks come together (``collective.py``); the deciding one may set an optimizer."""
        self._num_before_meeting = self.num

    def meeting_ended(self, *, failed: bool, others: Iterable[int]) -> None:
        """All ranks go on with ``num``; after a failure ``others`` have not heard of it."""
        if not failed:
            self._shifts.clear()
            return
        for rank in others:
            self._shift(rank, self.num - self._num_before_meeting)

    def fail_waiting(self, error: UsageError) -> None:
        """The call that some wait for will not come; theirs do not count."""
        waiting, self._waiting = self._waiting, []
        for incoming, rank, *_ in waiting:
            self._shift(rank, -1)
            incoming.fail(error)


def _text(data: Sequence[Any]) -> str:
    """An optimizer's plain form for people; never raises."""
    name = data[0] if data else "nothing"
    numbers = data[1] if len(data) > 1 and type(data[1]) is dict else {}
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in numbers.items())})"
