"""A server's half of the data plane. Pure; runs on the node's I/O thread.

The rules stand in the package's docstring; ``worker.py`` is the other half, and
``protocol/rounds.py`` decides which contributions belong together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from pslite.errors import NodeLostError, ProtocolError, UsageError, describe
from pslite.plane.interface import Buffer, Effect, Job, Run, Send, ServerApp, cut
from pslite.protocol.rounds import AsyncRounds, Rounds, SyncRounds, Verdict
from pslite.wire.messages import (
    Answer,
    Exchange,
    Ints,
    PartsFailed,
    RoundWaits,
    StaleEpoch,
)

#: So many parts at most travel in one answer, each in a frame of its own at worst.
_MAX_PARTS = 4096

#: Requests of epochs that this node has not heard of: the scheduler's news is on its way.
_MAX_EARLY = 65_536

_Entry = TypeVar("_Entry")


class _Part:
    """A server's view of one part."""

    __slots__ = ("lane", "opened_at", "pulls", "refused", "reported_at", "rounds", "size", "wanted")

    def __init__(self, size: int, rounds: Rounds, lane: int) -> None:
        self.size = size
        self.rounds = rounds
        self.lane = lane
        #: (rank, round) of the pushes whose sender wants the value.
        self.wanted: set[tuple[int, int]] = set()
        #: (rank, after_round, pushed) that wait to be readable.
        self.pulls: list[tuple[int, int, bool]] = []
        #: Rank -> its rounds that were refused, and why: pulls that count on one end likewise.
        self.refused: dict[int, dict[int, BaseException]] = {}
        #: When the open round was first seen open by ``tick``, and last reported.
        self.opened_at: tuple[int, float] | None = None
        self.reported_at = 0.0


class _Replies:
    """Collects what one event answers, so that each worker gets few messages."""

    def __init__(self) -> None:
        #: (rank, pushed, with value) -> [(part, round, version)]
        self.answers: dict[tuple[int, bool, bool], list[tuple[int, int, int]]] = {}
        #: (rank, pushed, consumed, id of the error) -> the error and [(part, round)]
        self.failures: dict[
            tuple[int, bool, bool, int], tuple[BaseException, list[tuple[int, int]]]
        ] = {}

    def answer(self, rank: int, pushed: bool, value: bool, entry: tuple[int, int, int]) -> None:
        self.answers.setdefault((rank, pushed, value), []).append(entry)

    def fail(
        self, rank: int, pushed: bool, consumed: bool, error: BaseException, entry: tuple[int, int]
    ) -> None:
        key = (rank, pushed, consumed, id(error))
        self.failures.setdefault(key, (error, []))[1].append(entry)


class ServerPlane:
    """A server's half of the plane. ``Send`` effects go to workers' ranks."""

    def __init__(
        self, app: ServerApp, *, window: int, message_bytes: int, stall_report_s: float
    ) -> None:
        self.app = app
        self._window = window
        self._message_bytes = message_bytes
        self._stall_report_s = stall_report_s
        self._parts: dict[int, _Part] = {}
        self._gone: dict[int, BaseException] = {}
        self._early: list[tuple[int, int, Exchange, Sequence[Buffer]]] = []
        self.epoch = 1

    # -- parts -------------------------------------------------------------------------

    def open_part(self, part: int, size: int, ranks: Sequence[int] | None, lane: int) -> None:
        """Accept requests for a part of ``size`` bytes from now on.

        Args:
            ranks: the worker ranks that every round needs; None applies pushes one by one.
            lane: parts of one lane are applied by the same pool thread.
        """
        if part in self._parts:
            raise UsageError(f"part {part} is open already")
        rounds: Rounds
        if ranks is None:
            rounds = AsyncRounds(self._window)
        else:
            rounds = SyncRounds(ranks, self._window)
            for rank in self._gone:
                rounds.abandon(rank)
        self._parts[part] = _Part(size, rounds, lane)

    def close_part(self, part: int, error: BaseException) -> list[Effect]:
        """Refuse a part from now on; who waits for it gets ``error``."""
        state = self._parts.pop(part, None)
        replies = _Replies()
        if state is not None:
            for rank, round_ in state.rounds.waiting():
                replies.fail(rank, True, False, error, (part, round_))
            for rank, round_, pushed in state.pulls:
                replies.fail(rank, pushed, True, error, (part, round_))
        return self._effects(replies, [])

    @property
    def num_waiting(self) -> int:
        """Contributions that are here and not applied yet."""
        return sum(len(state.rounds.waiting()) for state in self._parts.values())

    # -- events ------------------------------------------------------------------------

    def exchange(
        self, rank: int, epoch: int, message: Exchange, frames: Sequence[Buffer]
    ) -> list[Effect]:
        """A worker pushes, pulls, or both."""
        if epoch < self.epoch:
            stale = StaleEpoch(self.epoch, message.push, message.parts, message.rounds)
            return [Send(rank, stale)]
        if epoch > self.epoch:
            if len(self._early) >= _MAX_EARLY:
                raise ProtocolError(f"too many requests of epoch {epoch}, which nobody announced")
            self._early.append((rank, epoch, message, frames))
            return []
        replies = _Replies()
        ready: list[int] = []
        if message.push:
            self._take_push(rank, message, frames, replies, ready)
        else:
            for part, after_round in zip(message.parts, message.rounds, strict=True):
                self._take_pull(rank, part, after_round, False, replies)
        return self._effects(replies, ready)

    def finished(self, jobs: Sequence[Job], errors: Sequence[BaseException | None]) -> list[Effect]:
        """The pool has applied jobs; each one's round is over, also when it raised."""
        replies = _Replies()
        ready = []
        for (part, batch), error in zip(jobs, errors, strict=True):
            state = self._parts.get(part)
            if state is None:
                continue
            state.rounds.finish()
            version = state.rounds.version
            for rank, round_ in batch.rounds:
                wanted = (rank, round_) in state.wanted
                state.wanted.discard((rank, round_))
                if error is not None:
                    replies.fail(rank, True, True, error, (part, round_))
                else:
                    replies.answer(rank, True, wanted, (part, round_, version))
            self._answer_pulls(part, state, replies)
            ready.append(part)
        return self._effects(replies, ready)

    def depart(self, rank: int, error: BaseException) -> list[Effect]:
        """A worker is gone; rounds that cannot be complete without it end with ``error``."""
        self._gone[rank] = error
        replies = _Replies()
        for part, state in self._parts.items():
            for other, round_ in state.rounds.abandon(rank):
                self._refuse(part, state, other, round_, error, replies)
        return self._effects(replies, [])

    def begin_epoch(self, epoch: int) -> list[Effect]:
        """The scheduler has announced a later epoch; requests of it may be here already."""
        self.epoch = epoch
        early, self._early = self._early, []
        effects: list[Effect] = []
        for rank, their_epoch, message, frames in early:
            effects += self.exchange(rank, their_epoch, message, frames)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Tell those who wait for a round that has been open for long whom it waits for."""
        effects: list[Effect] = []
        for part, state in self._parts.items():
            open_round = state.rounds.missing()
            if open_round is None:
                state.opened_at = None
                continue
            round_, missing = open_round
            if state.opened_at is None or state.opened_at[0] != round_:
                state.opened_at = (round_, now)
                state.reported_at = now
            elif now - state.reported_at >= self._stall_report_s:
                state.reported_at = now
                waits = RoundWaits(part, round_, missing, now - state.opened_at[1])
                waiting = sorted({rank for rank, _ in state.rounds.waiting()})
                effects += [Send(rank, waits) for rank in waiting]
        return effects

    # -- inside ------------------------------------------------------------------------

    def _take_push(
        self,
        rank: int,
        message: Exchange,
        frames: Sequence[Buffer],
        replies: _Replies,
        ready: list[int],
    ) -> None:
        if len(message.sizes) != len(message.parts):
            raise ProtocolError("a push needs a size for each part")
        pieces = cut(message.sizes, frames)
        parts = self._parts
        for part, round_, size, piece in zip(
            message.parts, message.rounds, message.sizes, pieces, strict=True
        ):
            state = parts.get(part)
            if state is None:
                replies.fail(rank, True, False, _unknown(part), (part, round_))
                continue
            if state.size != size:
                misfit = UsageError(f"part {part} has {state.size} bytes, {size} were pushed")
                self._refuse(part, state, rank, round_, misfit, replies)
                continue
            verdict = state.rounds.contribute(rank, round_, piece)
            if verdict is Verdict.TAKEN:
                state.refused.get(rank, {}).pop(round_, None)
                if message.pull:
                    state.wanted.add((rank, round_))
                ready.append(part)
            elif verdict is Verdict.APPLIED:
                self._answer_again(rank, part, state, round_, message.pull, replies)
            elif verdict is Verdict.TOO_FAR:
                error = ProtocolError(f"round {round_} of part {part} is beyond the window")
                self._refuse(part, state, rank, round_, error, replies)
            elif verdict is Verdict.HOPELESS:
                gone = self._gone[state.rounds.blocked_by or 0]
                self._refuse(part, state, rank, round_, gone, replies)

    def _take_pull(
        self, rank: int, part: int, after_round: int, pushed: bool, replies: _Replies
    ) -> None:
        state = self._parts.get(part)
        if state is None:
            replies.fail(rank, pushed, True, _unknown(part), (part, after_round))
            return
        refused = [error for r, error in state.refused.get(rank, {}).items() if r <= after_round]
        if refused:
            replies.fail(rank, pushed, True, refused[0], (part, after_round))
        elif state.rounds.readable(rank, after_round):
            replies.answer(rank, pushed, True, (part, after_round, state.rounds.version))
        else:
            state.pulls.append((rank, after_round, pushed))

    def _answer_again(
        self, rank: int, part: int, state: _Part, round_: int, pull: bool, replies: _Replies
    ) -> None:
        """A contribution that is applied came again: answer, never apply."""
        if pull:
            self._take_pull(rank, part, round_, True, replies)
        else:
            replies.answer(rank, True, False, (part, round_, state.rounds.version))

    def _answer_pulls(self, part: int, state: _Part, replies: _Replies) -> None:
        waiting, state.pulls = state.pulls, []
        for rank, after_round, pushed in waiting:
            self._take_pull(rank, part, after_round, pushed, replies)

    def _refuse(
        self,
        part: int,
        state: _Part,
        rank: int,
        round_: int,
        error: BaseException,
        replies: _Replies,
    ) -> None:
        """A contribution is not taken; nor will pulls that count on it be answered."""
        refused = state.refused.setdefault(rank, {})
        if len(refused) <= self._window:
            refused[round_] = error
        state.wanted.discard((rank, round_))
        replies.fail(rank, True, False, error, (part, round_))
        self._answer_pulls(part, state, replies)

    def _effects(self, replies: _Replies, ready: Iterable[int]) -> list[Effect]:
        effects: list[Effect] = []
        # Failures first: who pulls after a push that failed hears of that before the value.
        for (rank, pushed, consumed, _), (error, failures) in replies.failures.items():
            for some in _in_bounds(failures):
                parts, rounds = zip(*some, strict=True)
                effects.append(Send(rank, _failure(pushed, consumed, parts, rounds, error)))
        for (rank, pushed, value), entries in replies.answers.items():
            effects += self._answers(rank, pushed, value, entries)
        lanes: dict[int, list[Job]] = {}
        for part in ready:
            state = self._parts[part]
            batch = state.rounds.start()
            if batch is not None:
                lanes.setdefault(state.lane, []).append(Job(part, batch))
        effects += [Run(lane, jobs) for lane, jobs in lanes.items()]
        return effects

    def _answers(
        self, rank: int, pushed: bool, value: bool, entries: list[tuple[int, int, int]]
    ) -> list[Effect]:
        """Answers to one worker, cut where a message would grow beyond ``message_bytes``."""
        effects: list[Effect] = []
        if not value:
            for some in _in_bounds(entries):
                parts, rounds, versions = zip(*some, strict=True)
                effects.append(Send(rank, Answer(pushed, parts, rounds, versions, ())))
            return effects
        group: list[tuple[int, int, int]] = []
        nbytes = 0
        for entry in entries:
            size = self._parts[entry[0]].size
            if group and (nbytes + size > self._message_bytes or len(group) == _MAX_PARTS):
                effects.append(self._answer_with_values(rank, pushed, group))
                group, nbytes = [], 0
            group.append(entry)
            nbytes += size
        effects.append(self._answer_with_values(rank, pushed, group))
        return effects

    def _answer_with_values(
        self, rank: int, pushed: bool, entries: list[tuple[int, int, int]]
    ) -> Send:
        parts, rounds, versions = zip(*entries, strict=True)
        sizes = tuple(self._parts[part].size for part in parts)
        frames = self.app.read(parts)
        return Send(rank, Answer(pushed, parts, rounds, versions, sizes), frames)


def _in_bounds(entries: Sequence[_Entry]) -> Iterator[Sequence[_Entry]]:
    """The entries in runs that one message may carry."""
    for start in range(0, len(entries), _MAX_PARTS):
        yield entries[start : start + _MAX_PARTS]


def _unknown(part: int) -> BaseException:
    return UsageError(f"part {part} is not known to this server; was its key deleted?")


def _failure(
    pushed: bool, consumed: bool, parts: Ints, rounds: Ints, error: BaseException
) -> PartsFailed:
    role, rank = (error.role, error.rank) if isinstance(error, NodeLostError) else ("", -1)
    return PartsFailed(pushed, consumed, parts, rounds, *describe(error), role, rank)
