"""Calls that need not go out at once, joined into few messages: why a loop over keys is quick.

A script that calls ``push`` and ``pull`` key by key, into arrays that are read later, would
send two messages a key. Instead its calls wait in a ``Batch`` until the I/O thread takes them
(which it does as soon as it has nothing else to do), and what came together goes out together:
a key that was pushed and then pulled becomes one exchange, and small keys share messages,
those of the highest priority first. Order is kept: a call that would overtake an earlier one
of the same key begins a new ``Step``. Pure but for completing futures. Next: ``exchange.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore.keys import Key
from kvstore.plan import Bytes
from pslite import Future


class Call:
    """One call: its keys, and for each what is pushed and where the value goes."""

    __slots__ = ("_error", "_left", "future", "keys", "priority", "sources", "targets")

    def __init__(
        self,
        keys: tuple[Key, ...],
        sources: Sequence[Bytes] | None,
        targets: Sequence[Bytes] | None,
        priority: int,
        describe: Callable[[], str],
    ) -> None:
        self.keys = keys
        self.sources = sources
        """Copies that belong to the call; parallel to ``keys``."""
        self.targets = targets
        self.priority = priority
        self.future: Future[None] = Future(describe)
        self._left = 0
        self._error: BaseException | None = None

    def expect(self) -> None:
        """One more message carries something of this call. On the I/O thread, as ``arrived``."""
        self._left += 1

    def arrived(self, error: BaseException | None) -> bool:
        """A message that carried something of this call is done; whether it was the last."""
        self._error = self._error or error
        self._left -= 1
        if self._left:
            return False
        if self._error is not None:
            self.future.set_error(self._error)
        else:
            self.future.set_result(None)
        return True


@dataclass(slots=True)
class Entry:
    """What happens to one key in a step."""

    calls: list[Call]
    priority: int
    source: Bytes | None = None
    target: Bytes | None = None


Step = dict[Key, Entry]
"""What may go out at the same time: each key is pushed, pulled, or pushed and then pulled."""


def steps_of(calls: Iterable[Call]) -> list[Step]:
    """The calls in as few steps as their order allows; a step follows the one before."""
    steps: list[Step] = []
    step: Step = {}
    for call in calls:
        if not _fits(call, step):
            steps.append(step)
            step = {}
        for index, key in enumerate(call.keys):
            entry = step.get(key)
            if entry is None:
                entry = step[key] = Entry([], call.priority)
            entry.calls.append(call)
            if call.priority > entry.priority:
                entry.priority = call.priority
            if call.sources is not None:
                entry.source = call.sources[index]
            if call.targets is not None:
                entry.target = call.targets[index]
    if step:
        steps.append(step)
    return steps


def _fits(call: Call, step: Step) -> bool:
    """Whether a call may join a step: a pull may follow a push of the key, nothing else."""
    for key in call.keys:
        entry = step.get(key)
        if entry is not None and (call.sources is not None or entry.target is not None):
            return False
    return True


def kinds_of(step: Step) -> list[list[Key]]:
    """The step's keys by what happens to them, those of the highest priority first."""
    kinds: dict[tuple[bool, bool], list[Key]] = {}
    for key in sorted(step, key=lambda key: -step[key].priority):
        entry = step[key]
        kind = (entry.source is not None, entry.target is not None)
        kinds.setdefault(kind, []).append(key)
    return list(kinds.values())
