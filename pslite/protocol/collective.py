"""Collective calls of groups of workers, as a server matches them. Pure.

Each rank of a group numbers its calls, so calls with one number belong together. A call is one
round of messages, or several if its arrays are cut into chunks. A round is complete when every
rank's message has arrived; then its result is computed. If two ranks make different calls under
one number, a needed rank is gone, or a rank gives up the call, the call ends with the same error
for all ranks, even for ranks that make it later. Ranks may first ask whether all of them make a
call; the answers number such calls. Events go in, effects come out: no arrays, no sockets, no
clock. Read next: ``collective/server.py``, which carries out the effects.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from pslite.errors import MismatchError, ProtocolError, UsageError

T = TypeVar("T")
"""The type that represents one rank's message; effects name the messages to answer."""

MAX_FAILED = 1024
"""The most failed calls to remember, for ranks that make them later."""
MAX_LONG_WAITS = 1024
"""The most calls to remember in which ranks wait but whose messages do not pass this server."""
_MOST_ABSENCES = 8
"""The most ``join`` calls of a rank to remember, because older calls may still be in flight."""
_MOST_SHAPES = 4
_ZERO_CHANGES_NOTHING = frozenset({"sum", "average", "premul_sum", "bor", "bxor"})
ANY = -1
"""A length that may differ among ranks."""


class GroupKey(NamedTuple):
    """A group of workers. Groups with the same name and ranks differ in their number."""

    name: str
    ranks: tuple[int, ...]
    """Ranks in the job, in the group's order."""
    number: int

    @property
    def text(self) -> str:
        """The group in an error or a report."""
        listed = ", ".join(map(str, self.ranks))
        members = f"workers {listed}" if len(self.ranks) < 9 else f"{len(self.ranks)} workers"
        return f"group {self.name!r} of {members}" if self.name else f"the group of {members}"


class CallKey(NamedTuple):
    """The identity of a call: the ``number``-th of this ``name`` in its group.

    Calls that are matched by their order have no name.
    """

    group: GroupKey
    name: str
    number: int

    def text(self, call: CollectiveCall) -> str:
        """Return words that describe a wait in this call."""
        which = f"named {self.name!r}" if self.name else f"number {self.number}"
        return f"{call.text}, the call {which} of {self.group.text}"


class CollectiveCall(NamedTuple):
    """The call that must be identical on all ranks of a group."""

    kind: str
    op: str = ""
    dtype: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    root: int = -1
    factor: float | None = None

    @property
    def text(self) -> str:
        """The call as a script writes it: ``all_reduce(sum, float32, shape (4,))``."""
        parts = [text for text in (self.op, self.dtype) if text]
        shapes = [_shape_text(shape) for shape in self.shapes[:_MOST_SHAPES]]
        if shapes:
            more = [] if len(self.shapes) <= _MOST_SHAPES else ["..."]
            word = "shape" if len(self.shapes) == 1 else "shapes"
            parts.append(f"{word} {' '.join(shapes + more)}")
        if self.root >= 0:
            parts.append(f"root {self.root}")
        if self.factor is not None:
            parts.append(f"factor {self.factor:g}")
        return f"{self.kind}({', '.join(parts)})"


@dataclass(slots=True)
class Compute(Generic[T]):
    """Compute the result of a round, and answer each message with its share."""

    key: CallKey
    call: CollectiveCall
    messages: tuple[T, ...]
    """One message from each sender, in the group's order; joined ranks do not send one."""


@dataclass(slots=True)
class AllReady(Generic[T]):
    """All ranks make a call: answer each of them with its number among such calls."""

    messages: tuple[T, ...]
    number: int
    """From 1 in each group; 0 if a rank has joined and does not make the call."""


@dataclass(slots=True)
class AllJoined(Generic[T]):
    """All ranks have joined: answer each of them with the rank that joined last."""

    messages: tuple[T, ...]
    last: int
    """The rank in the group that joined last."""


@dataclass(slots=True)
class Refuse(Generic[T]):
    """Answer these messages with ``error``."""

    messages: tuple[T, ...]
    error: BaseException


CallEffect = Compute[T] | AllReady[T] | AllJoined[T] | Refuse[T]


@dataclass(slots=True, eq=False, repr=False)
class _OpenCall(Generic[T]):
    """A call that some ranks have made."""

    first: int
    """The rank whose call the other ranks' calls are compared with."""
    call: CollectiveCall
    ranks: tuple[int, ...]
    """The ranks whose messages it needs."""
    step: CollectiveCall
    rounds: dict[int, dict[int, T]] = field(default_factory=dict)
    """Number of the chunk -> rank -> its message."""


class LeadersStep(NamedTuple):
    """The rest of a call after the ranks of each machine have combined their arrays."""

    leaders: tuple[int, ...]
    """The workers that send, one for each machine."""
    call: CollectiveCall
    """The call among them; its root is one of them."""


READY = CollectiveCall("ready")
"""The question that all ranks send, as leaders, before a call: do all of them make it?"""


class Absence(NamedTuple):
    """The calls that a rank leaves out because it has joined.

    After the last time that all ranks had joined, calls are numbered from ``begin``. The rank has
    made its calls up to the ``last`` number of each name; they may still be in flight. Calls after
    this absence begin at ``end``.
    """

    begin: int
    last: Mapping[str, int]
    end: int

    def is_of(self, key: CallKey) -> bool:
        """Return whether the rank does not make this call."""
        return self.last.get(key.name, self.begin) < key.number < self.end


class CallMatcher(Generic[T]):
    """The calls of all groups on one server. Ranks are those in the job."""

    def __init__(self) -> None:
        self._open: dict[CallKey, _OpenCall[T]] = {}
        self._failed: dict[CallKey, BaseException] = {}
        self._gone: dict[int, BaseException] = {}
        #: Call -> the ranks that are known to wait in it.
        self._waiting: dict[CallKey, set[int]] = {}
        #: Group -> the ranks that have joined and wait for the others -> their messages.
        self._joined: dict[GroupKey, dict[int, T]] = {}
        #: (group, rank) -> its latest absences: the calls in which its values count as zeros.
        self._absences: dict[tuple[GroupKey, int], deque[Absence]] = {}
        #: How many calls there were for which all ranks were ready.
        self._num_ready: Counter[GroupKey] = Counter()

    @property
    def num_open(self) -> int:
        """The number of calls that wait for ranks."""
        return len(self._open)

    def arrive(
        self,
        key: CallKey,
        rank: int,
        call: CollectiveCall,
        chunk: int,
        message: T,
        step: LeadersStep | None = None,
    ) -> list[CallEffect[T]]:
        """Note one rank's message to a round of a call, or to the leaders' step of it."""
        ranks, computed = (key.group.ranks, call) if step is None else step
        if rank not in ranks:
            error = ProtocolError(f"worker {rank} is not in the group {ranks}")
            return [Refuse((message,), error)]
        failure = self._failed.get(key)
        if failure is not None:
            return [Refuse((message,), failure)]
        found = self._open.get(key)
        if found is None:
            found = self._open[key] = _OpenCall(rank, call, ranks, computed)
        arrived = found.rounds.setdefault(chunk, {})
        if rank in arrived:
            error = ProtocolError(f"worker {rank} sent chunk {chunk} of {call.text} twice")
            return [Refuse((message,), error)]
        arrived[rank] = message
        if call != found.call:
            return self._fail(key, mismatch(key.group, found.first, found.call, rank, call))
        if (ranks, computed) != (found.ranks, found.step):
            text = f"workers {found.ranks} and {ranks} send the values of one {call.text}"
            return self._fail(key, ProtocolError(text))
        return self._look(key, found, chunk)

    def join(self, group: GroupKey, rank: int, absence: Absence, message: T) -> list[CallEffect[T]]:
        """Count ``rank`` as zeros in the ``all_reduce`` calls that it does not make."""
        if rank not in group.ranks or rank in self._joined.get(group, ()):
            error = ProtocolError(f"worker {rank} cannot join the group {group.ranks}")
            return [Refuse((message,), error)]
        joined = self._joined.setdefault(group, {})
        joined[rank] = message
        known = self._absences.setdefault((group, rank), deque(maxlen=_MOST_ABSENCES))
        known.append(absence)
        effects: list[CallEffect[T]] = []
        for key, found in list(self._open.items()):
            if key.group == group:
                for chunk in list(found.rounds):
                    effects += self._look(key, found, chunk) if key in self._open else []
        if len(joined) == len(group.ranks):
            del self._joined[group]
            return [*effects, AllJoined(tuple(joined.values()), group.ranks.index(rank))]
        errors = [self._gone[each] for each in group.ranks if each in self._gone.keys() - joined]
        if errors:
            del self._joined[group]
            effects.append(Refuse(tuple(joined.values()), errors[0]))
        return effects

    def depart(self, rank: int, error: BaseException) -> list[CallEffect[T]]:
        """End the calls that need ``rank``, which is gone, with ``error``."""
        self._gone[rank] = error
        effects: list[CallEffect[T]] = []
        for group, joined in list(self._joined.items()):
            if rank in group.ranks and rank not in joined:
                del self._joined[group]
                effects.append(Refuse(tuple(joined.values()), error))
        for key, found in list(self._open.items()):
            rounds = found.rounds.values()
            if rank in found.ranks and any(rank not in arrived for arrived in rounds):
                effects += self._fail(key, error)
        return effects

    def missing(self, key: CallKey, rank: int, *, counts_waits: bool) -> list[int]:
        """Return the ranks in the job that a call still waits for; ``rank`` waits in it.

        With ``counts_waits``, the messages of the call do not pass this server. Then a rank counts
        as having made the call once it has asked this question.
        """
        if counts_waits:
            waiting = self._waiting.setdefault(key, set())
            waiting.add(rank)
            while len(self._waiting) > MAX_LONG_WAITS:
                del self._waiting[next(iter(self._waiting))]
            return [each for each in key.group.ranks if each not in waiting]
        found = self._open.get(key)
        rounds = [] if found is None else list(found.rounds.values())
        return [
            each
            for each in key.group.ranks
            if any(each not in arrived for arrived in rounds) and not self._is_absent(key, each)
        ]

    def give_up(self, key: CallKey, error: BaseException) -> list[CallEffect[T]]:
        """End a call that failed at one of its ranks."""
        return [] if key in self._failed else self._fail(key, error)

    def _look(self, key: CallKey, found: _OpenCall[T], chunk: int) -> list[CallEffect[T]]:
        """Compute the round if it is complete; fail the call if it can never complete."""
        arrived, ranks = found.rounds[chunk], found.ranks
        missing = [rank for rank in ranks if rank not in arrived]
        absent = [rank for rank in missing if self._is_absent(key, rank)]
        if absent:
            call = found.call
            if call.kind != "all_reduce" or call.op not in _ZERO_CHANGES_NOTHING:
                return self._fail(key, _not_with_joined(key.group, absent, call))
        missing = [rank for rank in missing if rank not in absent]
        if missing:
            errors = [self._gone[rank] for rank in missing if rank in self._gone]
            return self._fail(key, errors[0]) if errors else []
        del found.rounds[chunk]
        if not found.rounds:
            del self._open[key]
        messages = tuple(arrived[rank] for rank in ranks if rank in arrived)
        if found.step != READY:
            return [Compute(key, found.step, messages)]
        self._num_ready[key.group] += not absent
        return [AllReady(messages, 0 if absent else self._num_ready[key.group])]

    def _is_absent(self, key: CallKey, rank: int) -> bool:
        return any(absence.is_of(key) for absence in self._absences.get((key.group, rank), ()))

    def _fail(self, key: CallKey, error: BaseException) -> list[CallEffect[T]]:
        while len(self._failed) >= MAX_FAILED:
            del self._failed[next(iter(self._failed))]
        self._failed[key] = error
        found = self._open.pop(key, None)
        rounds = () if found is None else found.rounds.values()
        messages = tuple(message for arrived in rounds for message in arrived.values())
        return [Refuse(messages, error)] if messages else []


def waiting_text(ranks: Sequence[int] | None, waited_s: float) -> str:
    """Return a text that names the ranks a call waits for; None: they are not known."""
    if ranks is None:
        whom = "the other ranks"
    elif not ranks:
        whom = "the servers, to which all ranks have come"
    else:
        whom = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return f"waiting for {whom} for {waited_s:.0f} s"


def mismatch(
    group: GroupKey, first: int, call: CollectiveCall, rank: int, other: CollectiveCall
) -> MismatchError:
    """Return the error for two workers of a group whose calls differ."""
    return MismatchError(
        f"the ranks of a group must make the same calls in the same order: {_title(group, first)} "
        f"calls {call.text}; {_title(group, rank)} calls {other.text}"
    )


def _not_with_joined(group: GroupKey, joined: Sequence[int], call: CollectiveCall) -> UsageError:
    names = ", ".join(_title(group, rank) for rank in joined)
    return UsageError(
        f"{names} has joined and counts as zeros in all_reduce of "
        f"{', '.join(sorted(_ZERO_CHANGES_NOTHING))}; {call.text} needs all ranks"
    )


def _title(group: GroupKey, rank: int) -> str:
    index = group.ranks.index(rank)
    return f"rank {index}" if index == rank else f"rank {index} (worker {rank})"


def _shape_text(shape: Sequence[int]) -> str:
    lengths = ["any" if length == ANY else str(length) for length in shape]
    return f"({', '.join(lengths)}{',' if len(lengths) == 1 else ''})"
