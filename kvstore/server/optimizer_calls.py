"""``OptimizerCalls``: compare the optimizers that the workers of a store set.

The deciding rank's calls take effect. Each call of another rank is compared with the deciding
rank's same call, no matter which comes first. Only the last calls are remembered, since a script
may set a learning rate in every step; the call of a rank that is further behind is not compared.
Pure, except that it sends answers. Part of the directory, on the scheduler's I/O thread.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.errors import OptimizerMismatch
from pslite.errors import UsageError, describe, rebuild
from pslite.node.customer import Incoming

MOST_CALLS = 1000
"""How many calls of the deciding rank are remembered."""


@dataclass(slots=True)
class _Decided:
    """One call of the deciding rank, with the error if the servers refused it."""

    optimizer: list[Any]
    error: BaseException | None


class OptimizerCalls:
    """The optimizer calls of one store; optimizers are in plain form.

    See ``optimizer/serialize.py``.
    """

    def __init__(self) -> None:
        self.num = 0
        """The number of calls that the deciding rank has made."""
        self.current: list[list[Any]] = []
        """The current optimizer in a list, which is empty before the first."""
        self._last: deque[_Decided] = deque(maxlen=MOST_CALLS)
        #: Requests that wait for the deciding rank's call: (request, rank, call, optimizer).
        self._waiting: list[tuple[Incoming, int, int, list[Any]]] = []
        #: Rank -> the difference between its number of a call and the deciding rank's.
        self._shifts: dict[int, int] = {}
        #: Ranks whose last call differed from the deciding rank's.
        self._refused: set[int] = set()
        self._num_before_joint_call = 0
        #: Rank -> the number of its last call that it has decided.
        self._made: dict[int, int] = {}

    def state(self) -> list[Any] | None:
        """Return all as plain data, for ``resume``; None if a request waits."""
        if self._waiting:
            return None
        errors = (None if each.error is None else list(describe(each.error)) for each in self._last)
        last = [[each.optimizer, error] for each, error in zip(self._last, errors, strict=True)]
        tables = [list(map(list, table.items())) for table in (self._shifts, self._made)]
        refused = sorted(self._refused)
        return [self.num, self.current, last, *tables, refused, self._num_before_joint_call]

    def resume(self, state: Sequence[Any]) -> None:
        """Go on from what ``state`` has returned."""
        self.num, self.current, last, shifts, made, refused, self._num_before_joint_call = state
        for optimizer, error in last:
            self._last.append(_Decided(optimizer, error and rebuild(*error)))
        self._shifts, self._made, self._refused = dict(shifts), dict(made), set(refused)

    def num_of(self, rank: int) -> int:
        """Return the number of a rank's last call that has taken effect or failed."""
        return self._made.get(rank, 0)

    def returned(self, rank: int) -> None:
        """Go on with another process of a lost worker, which will ask again."""
        self._waiting = [entry for entry in self._waiting if entry[1] != rank]

    def decided(
        self, optimizer: list[Any], error: BaseException | None, decider: int, call: int
    ) -> None:
        """Handle a call of the deciding rank, which reached all servers or failed."""
        self._made[decider] = call
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
        # If a rank has skipped a call (``if kv.rank == 0:``), this may be a later call.
        candidates = list(itertools.islice(self._last, call - 1 - forgotten, None))
        for meant, ours in enumerate(candidates, call):
            if ours.optimizer == theirs:
                self._shift(rank, meant - call)
                self._refused.discard(rank)
                incoming.respond() if ours.error is None else incoming.fail(ours.error)
                return
        done = [ours for ours in candidates if ours.error is None]
        if not done or rank in self._refused:
            # The matching call has not come yet. The failed ones were made by the deciding rank
            # alone, and a rank that was refused repeats its call or makes the next one.
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
        """Shift a rank's count for calls that it skipped or that had no effect."""
        self._shifts[rank] = self._shifts.get(rank, 0) + by

    def joint_call_begins(self) -> None:
        """Note that a joint call (``joint_calls.py``) begins, which may set an optimizer."""
        self._num_before_joint_call = self.num

    def joint_call_ended(self, *, failed: bool, others: Iterable[int]) -> None:
        """Handle the end of a joint call: all ranks continue counting at ``num``.

        After a failed one, only the counts of ``others`` are shifted: they have not seen its calls.
        """
        if not failed:
            self._shifts.clear()
            return
        for rank in others:
            self._shift(rank, self.num - self._num_before_joint_call)

    def fail_waiting(self, error: UsageError) -> None:
        """Fail all waiting requests: the deciding rank's call will not come."""
        waiting, self._waiting = self._waiting, []
        for incoming, rank, *_ in waiting:
            self._shift(rank, -1)
            incoming.fail(error)


def _text(data: Sequence[Any]) -> str:
    """Return an optimizer's plain form as readable text; never raises."""
    name = data[0] if data else "nothing"
    numbers = data[1] if len(data) > 1 and type(data[1]) is dict else {}
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in numbers.items())})"
