"""Calls that need not go out at once, joined into few messages: why a loop over keys is quick.

A script that calls ``push`` and ``pull`` key by key, into arrays that are read later, would
send two messages a key. Instead its calls come together in a ``Batch``, and what came together
goes out together: a key that was pushed and then pulled becomes one exchange, and small keys
share messages, those of the highest priority first. Order is kept: a call that would overtake
an earlier one of the same key goes into a later ``Mix``. How calls travel depends on their
``Shape`` only, so it is worked out once for a loop that is run again and again; and batches end
where they did the last time, unless somebody waits. Pure but for completing futures. Next:
``joined.py``, which makes messages of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvstore.keys import Key
from kvstore.plan import Bytes
from pslite import Future
from pslite.future import complete_all

#: A batch is full with so many calls: a loop over many small keys has sent the first ones
#: before it has come to the last.
_MAX_CALLS = 128

Shape = tuple[tuple[Key, ...], bool, bool, int]
"""What decides how a call travels: its keys, whether it pushes and pulls them, its priority."""


class Call(Future[None]):
    """One call: its keys, and for each what is pushed and where the value goes.

    It is the future of its own end. One is made for each key of a loop, so it is made of little.
    """

    __slots__ = ("error_so_far", "left", "shape", "sources", "targets")

    def __init__(
        self,
        keys: tuple[Key, ...],
        sources: Sequence[Bytes] | None,
        targets: Sequence[Bytes] | None,
        priority: int = 0,
    ) -> None:
        super().__init__()
        self.shape: Shape = (keys, sources is not None, targets is not None, priority)
        self.sources: Sequence[Bytes] = () if sources is None else sources
        """Copies that belong to the call; parallel to its keys."""
        self.targets: Sequence[Bytes] = () if targets is None else targets
        #: Messages that carry something of it and are not done. On the I/O thread, as the next.
        self.left = 0
        self.error_so_far: BaseException | None = None

    def let_go(self) -> None:
        """It is over: what still refers to it keeps no values, and no arrays of the caller."""
        self.sources = self.targets = ()

    @property
    def what(self) -> str:
        return answer_for(self.shape[0])

    def describer(self) -> Callable[[], str]:
        return partial(answer_for, self.shape[0])


def answer_for(keys: Sequence[Key]) -> str:
    """What a call for these keys waits for, in words."""
    shown = ", ".join(repr(key) for key in keys[:3]) + (", ..." if len(keys) > 3 else "")
    return f"the servers' answer for {shown}"


def note_arrived(calls: Iterable[Call]) -> None:
    """A message that carried something of each of these is done. On the I/O thread."""
    whole = []
    for call in calls:
        call.left -= 1
        if call.left:
            continue
        call.let_go()
        if call.error_so_far is not None:
            call.set_error(call.error_so_far)
        else:
            whole.append(call)
    complete_all(whole)


class Batch:
    """Calls that wait to go out together; ``hurry`` sends them.

    What they push is copied into ``staging``, one value behind another, as long as it fits.
    """

    __slots__ = (
        "_filled_bytes",
        "_hurry",
        "_limit_bytes",
        "_pulled_bytes",
        "_pushed_bytes",
        "_staging",
        "calls",
        "is_taken",
    )

    def __init__(
        self, limit_bytes: int, hurry: Callable[[], None], staging: Bytes | None = None
    ) -> None:
        self.calls: list[Call] = []
        self.is_taken = False
        self._limit_bytes = limit_bytes
        self._staging = staging
        self._filled_bytes = self._pushed_bytes = self._pulled_bytes = 0
        self._hurry = hurry

    @property
    def staging(self) -> Bytes | None:
        """All that is pushed, without a gap; None where values have copies of their own.

        There is a gap where an interrupt kept a call from being added after it was staged.
        """
        return self._staging if self._filled_bytes == self._pushed_bytes else None

    def stage(self, sources: Sequence[Bytes], nbytes: int) -> list[Bytes] | None:
        """Copies of a call's values, ``nbytes`` in all; None when there is no room for them."""
        staging, start = self._staging, self._filled_bytes
        if staging is None or start + nbytes > len(staging):
            self._staging = None
            return None
        copies = []
        for source in sources:
            stop = start + len(source)
            copy = staging[start:stop]
            copy[:] = source
            copies.append(copy)
            start = stop
        self._filled_bytes = start
        return copies

    def add(self, call: Call, nbytes: int) -> None:
        """One more; ``nbytes`` is the size of its values."""
        call.hurry = self._hurry
        self.calls.append(call)
        _, pushes, pulls, _ = call.shape
        if pushes:
            self._pushed_bytes += nbytes
        if pulls:
            self._pulled_bytes += nbytes

    def pull_last(
        self, keys: tuple[Key, ...], targets: Sequence[Bytes], priority: int, nbytes: int
    ) -> Call | None:
        """Let the last call, a push of just these keys, pull them as well; None if it is not one.

        That is what a loop over keys does, and one call costs half as much as two.
        """
        call = self.calls[-1]
        if call.shape != (keys, True, False, priority):
            return None
        call.targets = targets  # first: an interrupt in between must not leave a pull to nowhere
        call.shape = (keys, True, True, priority)
        self._pulled_bytes += nbytes
        return call

    def has_room(self, nbytes: int, *, pushes: bool) -> bool:
        """Whether a call should join these. A pull always joins the push before it."""
        if not pushes and self.calls and self.calls[-1].shape[1]:
            return True
        before = self._pushed_bytes if pushes else self._pulled_bytes
        return before + nbytes <= self._limit_bytes and len(self.calls) < _MAX_CALLS


class Mix(NamedTuple):
    """Keys to which the same happens at the same time, those of the highest priority first."""

    keys: tuple[Key, ...]
    calls: tuple[tuple[int, ...], ...]
    """The calls of each key, by their position among all."""
    priorities: tuple[int, ...]
    sources: tuple[tuple[int, int], ...]
    """For each key, which call has its value, and where among its keys; empty for a pull."""
    targets: tuple[tuple[int, int], ...]


def mixes_of(shapes: Sequence[Shape]) -> list[Mix]:
    """How calls of these shapes go out: as few mixes as their order allows, one after the other."""
    mixes: list[Mix] = []
    step: dict[Key, _Entry] = {}
    for number, (keys, pushes, pulls, priority) in enumerate(shapes):
        if not _fits(keys, step, pushes=pushes):
            mixes += _kinds_of(step)
            step = {}
        for index, key in enumerate(keys):
            entry = step.get(key)
            if entry is None:
                entry = step[key] = _Entry(priority)
            entry.calls.append(number)
            entry.priority = max(entry.priority, priority)
            if pushes:
                entry.source = (number, index)
            if pulls:
                entry.target = (number, index)
    return mixes + _kinds_of(step)


@dataclass(slots=True)
class _Entry:
    """What happens to one key in a step: a push, a pull, or a push and then a pull."""

    priority: int
    calls: list[int] = field(default_factory=list)
    source: tuple[int, int] | None = None
    target: tuple[int, int] | None = None


def _fits(keys: Sequence[Key], step: dict[Key, _Entry], *, pushes: bool) -> bool:
    """Whether a call may join a step: a pull may follow a push of the key, nothing else."""
    for key in keys:
        entry = step.get(key)
        if entry is not None and (pushes or entry.target is not None):
            return False
    return True


def _kinds_of(step: dict[Key, _Entry]) -> list[Mix]:
    """The step's keys by what happens to them."""
    kinds: dict[tuple[bool, bool], list[Key]] = {}
    for key in sorted(step, key=lambda key: -step[key].priority):
        entry = step[key]
        kinds.setdefault((entry.source is not None, entry.target is not None), []).append(key)
    return [_mix(keys, [step[key] for key in keys]) for keys in kinds.values()]


def _mix(keys: Sequence[Key], entries: Sequence[_Entry]) -> Mix:
    return Mix(
        tuple(keys),
        tuple(tuple(entry.calls) for entry in entries),
        tuple(entry.priority for entry in entries),
        tuple(entry.source for entry in entries if entry.source is not None),
        tuple(entry.target for entry in entries if entry.target is not None),
    )
