"""``Unit``: parts of a server in the same state, kept as one to save time. Pure.

The small tensors of a model are sent in one message in every round, so they are always in the same
state. A server keeps that state once, in one ``Unit``, instead of once for each part. The rules
for parts do not change: a request for only some parts of a unit makes the server split it
(``Parts``), and units in the same state may be joined again. ``server.py`` finds the unit of a
request, on the I/O thread. The answers to workers are collected in ``Replies``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any, NamedTuple

from pslite.errors import NodeLostError, ProtocolError, UsageError
from pslite.plane.interface import Formed, Job, Piece, Row, piece_of
from pslite.plane.replies import Replies, Source, Value
from pslite.protocol.rounds import Batch, Rounds, SyncRounds, Verdict
from pslite.wire.base import Ints
from pslite.wire.messages import RoundWaits

NO_SIZE = -1
"""The size of a part without a plain value: its contributions have the app's own form."""


class OpenRound(NamedTuple):
    """A round of some parts that waits for workers."""

    parts: Ints
    round: int
    missing: Ints
    """The ranks of these workers."""
    opened_at: float | None
    """When ``overdue`` first saw the round; None if it has not seen it."""


class WaitingPull(NamedTuple):
    """A pull of some parts of a unit that cannot be answered yet."""

    rank: int
    parts: Ints
    sizes: Ints
    after_round: int
    pushed: bool
    wanted: Formed | None = None
    """The result of ``ServerApp.take`` for a request for one part; None for plain values."""


@dataclass(slots=True, eq=False, repr=False)
class Unit:
    """A server's view of several parts in the same state.

    The payloads are ``Piece`` values.
    """

    parts: Ints
    sizes: Ints
    """The bytes of each part's value."""
    rounds: Rounds
    lane: int
    push_sizes: Ints
    """The bytes of each part in a push."""
    is_checked: bool = False
    """Whether the app checks the pushes of some of the parts (``ServerApp.check``)."""
    keeps_previous: bool = False
    """Whether the app has the values before the last round too."""
    stops: frozenset[int] = field(init=False)
    """Where each part's bytes end in a push of the unit."""
    nbytes: int = field(init=False)
    """The bytes of a push. ``NO_SIZE`` if the part has no plain value; it is then alone."""
    #: (rank, round) of the pushes that also ask for the value.
    wanted: set[tuple[int, int]] = field(default_factory=set)
    #: (rank, round) of pushes of lost processes, to be answered only if they come again.
    orphans: set[tuple[int, int]] = field(default_factory=set)
    #: Pulls that wait until the value may be read.
    pulls: list[WaitingPull] = field(default_factory=list)
    #: Rank -> its refused rounds -> the error; pulls after such a round end with it too.
    refused: dict[int, dict[int, BaseException]] = field(default_factory=dict)
    #: The open round and when ``overdue`` first saw it; and when it was last reported.
    opened_at: tuple[int, float] | None = None
    #: That of the last request: how urgently workers need the values.
    priority: int = 0
    reported_at: float = 0.0
    ended: BaseException | None = None
    """Why the owner of relayed parts takes no more rounds."""

    def __post_init__(self) -> None:
        self.stops = frozenset(accumulate(self.push_sizes))
        self.nbytes = sum(self.push_sizes)

    @property
    def is_quiet(self) -> bool:
        """Whether no push or pull of the unit is in flight."""
        return not (self.rounds.waiting() or self.rounds.running or self.pulls)

    # -- pushes and pulls --------------------------------------------------------------

    def contribute(
        self,
        rank: int,
        round_: int,
        payload: Piece | Formed,
        pull: bool,
        gone: Mapping[int, BaseException],
        replies: Replies,
    ) -> bool:
        """Add a contribution; return whether a round may be complete now.

        ``gone`` maps each gone rank to the error for requests that need it.
        """
        verdict = self.rounds.contribute(rank, round_, payload)
        if verdict is Verdict.TAKEN:
            self.refused.get(rank, {}).pop(round_, None)
            if pull:
                self.wanted.add((rank, round_))
            return True
        if verdict is Verdict.APPLIED:
            # It arrived a second time: answer it, but do not apply it again.
            if pull:
                self.pull(rank, self.parts, self.sizes, round_, True, replies)
            else:
                value = Value(self.parts, self.sizes, round_, self.rounds.version)
                replies.answer(rank, True, Source.NONE, value)
        elif verdict is Verdict.REPEATED:
            # Another process repeats it for a lost worker, and wants the answer.
            self.orphans.discard((rank, round_))
            if pull:
                self.wanted.add((rank, round_))
        elif verdict is Verdict.TOO_FAR:
            error = ProtocolError(
                f"round {round_} of part {self.parts[0]} is too far ahead of the open round"
            )
            self.refuse(rank, round_, error, replies)
        elif verdict is Verdict.HOPELESS:
            why = self.ended or gone[self.rounds.blocked_by or 0]
            self.refuse(rank, round_, why, replies)
        elif verdict is Verdict.UNEXPECTED:
            who = f"worker {rank} itself" if rank >= 0 else f"server {-1 - rank} for its machine"
            unexpected = UsageError(
                f"part {self.parts[0]} expects no push of {who}; its contributors follow from the "
                "roster (KVSTORE_HIERARCHICAL), and all nodes must run the same version"
            )
            self.refuse(rank, round_, unexpected, replies)
        return False

    def pull(
        self,
        rank: int,
        parts: Ints,
        sizes: Ints,
        after_round: int,
        pushed: bool,
        replies: Replies,
        wanted: Formed | None = None,
    ) -> None:
        """Answer a pull of some of the parts, now or as soon as they may be read."""
        refused = [error for r, error in self.refused.get(rank, {}).items() if r <= after_round]
        if refused:
            replies.fail(rank, pushed, True, refused[0], parts, after_round)
        elif self.rounds.readable(rank, after_round):
            source = self._source(rank, after_round) if self.keeps_previous else Source.CURRENT
            is_before = source is Source.BEFORE_LAST
            version = self.rounds.version - is_before
            value = Value(parts, sizes, after_round, version, self.priority)
            if source is Source.NONE:
                error = UsageError(
                    f"the values after round {after_round} are no longer there, in round {version}:"
                    " a process that takes the place of a lost worker cannot repeat this step"
                )
                replies.fail(rank, pushed, True, error, parts, after_round)
            elif wanted is None:
                replies.answer(rank, pushed, source, value)
            else:
                replies.answer_formed(rank, value, wanted, before_last=is_before)
        else:
            self.pulls.append(WaitingPull(rank, parts, sizes, after_round, pushed, wanted))

    def _source(self, rank: int, after_round: int) -> Source:
        """Return which values a worker gets after its push of ``after_round``.

        NONE means that they are gone. The app has the values before the last round.

        If it has made a later push, its process was lost after that, and another one repeats the
        step. It gets what the first process got, and no round may change it on the way.
        """
        if not self.rounds.knows(rank, after_round + 1):
            return Source.CURRENT
        if after_round == self.rounds.version:
            return Source.COPY
        return Source.BEFORE_LAST if after_round == self.rounds.version - 1 else Source.NONE

    def returned(self, rank: int) -> None:
        """Go on with another process of a lost worker, which will ask again."""
        self.pulls = [pull for pull in self.pulls if pull.rank != rank]
        self.wanted = {pair for pair in self.wanted if pair[0] != rank}
        self.orphans |= {pair for pair in self.rounds.waiting() if pair[0] == rank}
        self.rounds.returned(rank, copied)

    def _answer_pulls(self, replies: Replies) -> None:
        waiting, self.pulls = self.pulls, []
        for pull in waiting:
            self.pull(*pull[:5], replies, pull.wanted)

    def refuse(self, rank: int, round_: int, error: BaseException, replies: Replies) -> None:
        """Refuse a contribution, and the pulls that were to follow it."""
        refused = self.refused.setdefault(rank, {})
        if len(refused) <= self.rounds.window:
            refused[round_] = error
        self.wanted.discard((rank, round_))
        if (rank, round_) in self.orphans:
            self.orphans.discard((rank, round_))
        else:
            replies.fail(rank, True, False, error, self.parts, round_)
        self._answer_pulls(replies)

    def job(self, batch: Batch) -> Job:
        """Return the job that applies a complete round."""
        wanted = not self.wanted.isdisjoint(batch.rounds)
        if all(type(payload) is Piece for payload in batch.payloads):
            return Job(self.parts, self.sizes, self.push_sizes, batch, wanted)
        largest = max(
            self.nbytes if type(payload) is Piece else payload.nbytes for payload in batch.payloads
        )
        return Job(self.parts, (largest,), (largest,), batch, wanted, is_formed=True)

    def finish(self, batch: Batch, error: BaseException | None, replies: Replies) -> None:
        """End a round, failed or not, and answer the pulls that waited for it.

        With a ``NodeLostError``, the owner of a relayed part has refused it: it lacks a contributor
        there. So will all later rounds.
        """
        if isinstance(error, NodeLostError) and isinstance(self.rounds, SyncRounds):
            self.ended = error
            for rank, round_ in self.rounds.end():
                self.refuse(rank, round_, error, replies)
            return
        self.rounds.finish()
        version = self.rounds.version
        for rank, round_ in batch.rounds:
            if (rank, round_) in self.orphans:
                self.orphans.discard((rank, round_))
                continue
            wanted = (rank, round_) in self.wanted
            self.wanted.discard((rank, round_))
            if error is not None:
                replies.fail(rank, True, True, error, self.parts, round_)
            else:
                source = Source.CURRENT if wanted else Source.NONE
                if wanted and self.keeps_previous:
                    source = self._source(rank, round_)
                value = Value(self.parts, self.sizes, round_, version, self.priority)
                replies.answer(rank, True, source, value)
        if self.pulls:
            self._answer_pulls(replies)

    def waiting(self) -> list[tuple[int, int]]:
        """Return (rank, round) of the pushes whose senders wait for the answer."""
        return [pair for pair in self.rounds.waiting() if pair not in self.orphans]

    def has_waiting(self, rank: int) -> bool:
        """Return whether a worker waits for the answer to a push or a pull."""
        is_pulling = any(pull.rank == rank for pull in self.pulls)
        return is_pulling or any(other == rank for other, _ in self.waiting())

    def give_up(self, error: BaseException, replies: Replies) -> None:
        """Answer all waiting pushes and pulls of the unit with ``error``."""
        for rank, round_ in self.waiting():
            replies.fail(rank, True, False, error, self.parts, round_)
        for pull in self.pulls:
            replies.fail(pull.rank, pull.pushed, True, error, self.parts, pull.after_round)

    # -- rounds that stay open for long ------------------------------------------------

    def open_round(self) -> OpenRound | None:
        """Return the round that has contributions from some workers and lacks others."""
        open_round = self.rounds.missing()
        if open_round is None:
            return None
        round_, missing = open_round
        is_seen = self.opened_at is not None and self.opened_at[0] == round_
        opened_at = self.opened_at[1] if self.opened_at and is_seen else None
        return OpenRound(self.parts, round_, missing, opened_at)

    def overdue(self, now: float, report_s: float) -> RoundWaits | None:
        """Return a report of who is missing in the open round, every ``report_s``."""
        open_round = self.rounds.missing()
        if open_round is None:
            self.opened_at = None
            return None
        round_, missing = open_round
        if self.opened_at is None or self.opened_at[0] != round_:
            self.opened_at = (round_, now)
            self.reported_at = now
        elif now - self.reported_at >= report_s:
            self.reported_at = now
            return RoundWaits(self.parts[0], round_, missing, now - self.opened_at[1])
        return None

    # -- its shape ---------------------------------------------------------------------

    def resized(self, size: int, push_size: int, *, is_checked: bool) -> Unit:
        """Return a copy of this unit with other sizes; the unit must be quiet."""
        return replace(self, sizes=(size,), push_sizes=(push_size,), is_checked=is_checked)

    def split(self) -> list[Unit]:
        """Return a unit for each part alone, with the same state."""
        stops = list(accumulate(self.push_sizes))
        units = []
        for part, size, push_size, stop in zip(
            self.parts, self.sizes, self.push_sizes, stops, strict=True
        ):
            start = stop - push_size

            def share(_: int, __: int, piece: Piece, start: int = start, stop: int = stop) -> Piece:
                return piece_of(piece, start, stop)

            single = replace(
                self,
                parts=(part,),
                sizes=(size,),
                push_sizes=(push_size,),
                rounds=self.rounds.copy(share),
                wanted=set(self.wanted),
                orphans=set(self.orphans),
                refused={rank: dict(rounds) for rank, rounds in self.refused.items()},
                pulls=[
                    pull._replace(parts=(part,), sizes=(size,))
                    for pull in self.pulls
                    if part in pull.parts
                ],
            )
            units.append(single)
        return units


def joined(units: Sequence[Unit]) -> Unit | None:
    """Join these units in order; None if their states differ or are changing."""
    first = units[0]
    signature = first.rounds.signature()
    for unit in units:
        if unit.rounds.running or unit.pulls or unit.refused or NO_SIZE in unit.sizes:
            return None
        if unit.orphans or unit.ended:
            return None
        if unit.lane != first.lane or type(unit.rounds) is not type(first.rounds):
            return None
        if unit.wanted != first.wanted or unit.rounds.signature() != signature:
            return None
    pieces: dict[tuple[int, int], Piece] = {}
    for rank, round_ in first.rounds.waiting():
        whole = _neighbours([unit.rounds.payload(rank, round_) for unit in units])
        if whole is None:
            return None
        pieces[rank, round_] = whole
    parts = tuple(part for unit in units for part in unit.parts)
    sizes = tuple(size for unit in units for size in unit.sizes)
    push_sizes = tuple(size for unit in units for size in unit.push_sizes)
    rounds = first.rounds.copy(lambda rank, round_, _: pieces[rank, round_])
    is_checked = any(unit.is_checked for unit in units)
    wanted = set(first.wanted)
    keeps = first.keeps_previous
    return Unit(parts, sizes, rounds, first.lane, push_sizes, is_checked, keeps, wanted=wanted)


def copied(payload: Any) -> Any:
    """Copy a payload out of the memory of its sender; forms of the app stay."""
    if type(payload) is not Piece:
        return payload
    whole = bytes(payload.frame) if type(payload.frame) is Row else payload.frame
    return Piece(
        bytes(memoryview(whole)[payload.start : payload.stop]), 0, payload.stop - payload.start
    )


def _neighbours(pieces: Sequence[Any]) -> Piece | None:
    """Join pieces if each begins where the one before ends; else return None."""
    first = last = pieces[0]
    if any(type(piece) is not Piece for piece in pieces):
        return None
    for piece in pieces[1:]:
        if piece.frame is not last.frame or piece.start != last.stop:
            return None
        last = piece
    return Piece(first.frame, first.start, last.stop)


#: A list of parts is kept as one unit after it was pushed more often than this.
_FAMILIAR = 2
#: The most lists whose pushes are counted.
_MAX_LISTS = 256


class Parts:
    """The parts that a server has, each in one unit."""

    def __init__(self) -> None:
        #: Part -> the unit that it belongs to.
        self.units: dict[int, Unit] = {}
        #: Part -> the bytes of its value.
        self.sizes: dict[int, int] = {}
        #: How often each list of parts that is not a unit was pushed: frequent ones are joined.
        self._lists: Counter[Ints] = Counter()

    def put(self, unit: Unit) -> None:
        """Add or replace the unit of a single part."""
        (part,) = unit.parts
        self.units[part] = unit
        (self.sizes[part],) = unit.sizes

    def remove(self, part: int) -> None:
        """Remove a part, which must be alone in its unit."""
        del self.units[part], self.sizes[part]

    def distinct(self) -> Iterable[Unit]:
        """Return the units, each once."""
        return dict.fromkeys(self.units.values())

    def single(self, part: int) -> Unit | None:
        """Return the unit of this part alone, split off if needed; None if unknown."""
        unit = self.units.get(part)
        if unit is None or len(unit.parts) == 1:
            return unit
        for single in unit.split():
            self.units[single.parts[0]] = single
        return self.units[part]

    def whole(self, parts: Ints) -> Unit | None:
        """Return the unit of exactly these parts, joined if they are pushed often."""
        unit = self.units.get(parts[0]) if parts else None
        if unit is None or unit.parts == parts:
            return unit
        if len(self._lists) >= _MAX_LISTS:
            self._lists.clear()
        self._lists[parts] += 1
        if self._lists[parts] <= _FAMILIAR:
            return None
        # The units of the list, each once, in the order of the list.
        units = list(dict.fromkeys(map(self.units.get, parts)))
        there = [unit for unit in units if unit is not None]
        if tuple(chain.from_iterable(unit.parts for unit in there)) != parts:
            return None
        whole = joined(there)
        if whole is not None:
            self.units.update(dict.fromkeys(parts, whole))
            del self._lists[parts]
        return whole
