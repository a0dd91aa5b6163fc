"""A server's half of the data plane. Pure; runs on the node's I/O thread.

The rules stand in the package's docstring; ``worker.py`` is the other half, and
``protocol/rounds.py`` decides which contributions belong together. Read next: ``unit.py`` and
``replies.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from pslite.errors import ProtocolError, UsageError
from pslite.plane.interface import (
    Buffer,
    Effect,
    Formed,
    Job,
    Outcome,
    Piece,
    Row,
    Run,
    Send,
    ServerApp,
    cut,
    piece_of,
)
from pslite.plane.replies import Replies, Value
from pslite.plane.unit import NO_SIZE, Unit, WaitingPull, joined
from pslite.protocol.rounds import AsyncRounds, Batch, Rounds, SyncRounds, Verdict
from pslite.wire.messages import (
    Exchange,
    Ints,
    RoundWaits,
    StaleEpoch,
)

#: So often a list of parts has to be pushed before they are kept as one.
_FAMILIAR = 2
#: Lists that are not familiar yet are remembered for so many.
_MAX_LISTS = 256

#: Requests of epochs that this node has not heard of: the scheduler's news is on its way.
_MAX_EARLY = 65_536


class OpenRound(NamedTuple):
    """A round of some parts that waits for workers."""

    parts: Ints
    round: int
    missing: Ints
    """Their ranks."""
    opened_at: float | None
    """When ``tick`` saw it first; None if it has not yet."""


class ServerPlane:
    """A server's half of the plane. ``Send`` effects go to workers' ranks."""

    def __init__(
        self, app: ServerApp, *, window: int, message_bytes: int, stall_report_s: float
    ) -> None:
        self.app = app
        self._window = window
        self._message_bytes = message_bytes
        self._stall_report_s = stall_report_s
        #: Part -> the unit that it belongs to.
        self._units: dict[int, Unit] = {}
        self._sizes: dict[int, int] = {}
        #: How often a list of parts that are no unit was pushed: those that come again are joined.
        self._lists: Counter[Ints] = Counter()
        self._gone: dict[int, BaseException] = {}
        self._early: list[tuple[int, int, Exchange, Sequence[Buffer]]] = []
        self.epoch = 1

    # -- parts -------------------------------------------------------------------------

    def open_part(
        self,
        part: int,
        size: int,
        ranks: Sequence[int] | None,
        lane: int,
        push_size: int | None = None,
        *,
        is_checked: bool = False,
    ) -> None:
        """Accept requests for a part of ``size`` bytes from now on.

        Args:
            size: ``NO_SIZE`` for a part that has no plain value.
            ranks: the worker ranks that every round needs; None applies pushes one by one.
            lane: parts of one lane are applied by the same pool thread.
            push_size: the bytes of what is pushed, where they differ from those of its value.
            is_checked: whether the app looks at each push as it arrives (``ServerApp.check``).
        """
        if part in self._units:
            raise UsageError(f"part {part} is open already")
        rounds: Rounds
        if ranks is None:
            rounds = AsyncRounds(self._window)
        else:
            rounds = SyncRounds(ranks, self._window)
            for rank in self._gone:
                rounds.abandon(rank)
        push_sizes = None if push_size is None else (push_size,)
        self._units[part] = Unit((part,), (size,), rounds, lane, push_sizes, is_checked=is_checked)
        self._sizes[part] = size

    def is_quiet(self, part: int) -> bool:
        """Whether a part is there and no push or pull of it is under way."""
        unit = self._units.get(part)
        return not (unit is None or unit.rounds.waiting() or unit.rounds.running or unit.pulls)

    def resize_part(
        self, part: int, size: int, push_size: int, *, is_checked: bool = False
    ) -> None:
        """Values and pushes of a part, which is quiet, have so many bytes from now on.

        ``is_checked`` is that of ``open_part``.
        """
        unit = self._single(part)
        if unit is None:
            raise UsageError(f"part {part} is not open")
        resized = Unit(
            (part,), (size,), unit.rounds, unit.lane, (push_size,), is_checked=is_checked
        )
        resized.refused = unit.refused
        self._units[part] = resized
        self._sizes[part] = size

    def close_part(self, part: int, error: BaseException) -> list[Effect]:
        """Refuse a part from now on; who waits for it gets ``error``."""
        unit = self._single(part)
        replies = Replies()
        if unit is not None:
            del self._units[part], self._sizes[part]
            for rank, round_ in unit.rounds.waiting():
                replies.fail(rank, True, False, error, unit.parts, round_)
            for pull in unit.pulls:
                replies.fail(pull.rank, pull.pushed, True, error, unit.parts, pull.after_round)
        return self._effects(replies, [])

    @property
    def num_waiting(self) -> int:
        """Contributions that are here and not applied yet."""
        return sum(len(unit.rounds.waiting()) * len(unit.parts) for unit in self._distinct())

    @property
    def num_pulls(self) -> int:
        """Parts whose values somebody waits for."""
        return sum(len(pull.parts) for unit in self._distinct() for pull in unit.pulls)

    def open_rounds(self) -> list[OpenRound]:
        """The rounds that some workers have contributed to and others have not."""
        found = []
        for unit in self._distinct():
            open_round = unit.rounds.missing()
            if open_round is not None:
                round_, missing = open_round
                is_seen = unit.opened_at is not None and unit.opened_at[0] == round_
                opened_at = unit.opened_at[1] if unit.opened_at and is_seen else None
                found.append(OpenRound(unit.parts, round_, missing, opened_at))
        return found

    def _distinct(self) -> Iterable[Unit]:
        return dict.fromkeys(self._units.values())

    def _single(self, part: int) -> Unit | None:
        """The unit of this part alone; None if there is no such part."""
        unit = self._units.get(part)
        if unit is None or len(unit.parts) == 1:
            return unit
        for single in unit.split():
            self._units[single.parts[0]] = single
        return self._units[part]

    def _whole(self, parts: Ints) -> Unit | None:
        """The unit of exactly these parts; made of smaller ones if they are pushed often."""
        unit = self._units.get(parts[0]) if parts else None
        if unit is None or unit.parts == parts:
            return unit
        if len(self._lists) >= _MAX_LISTS:
            self._lists.clear()
        self._lists[parts] += 1
        if self._lists[parts] <= _FAMILIAR:
            return None
        # Units that are wholly in the list, in its order, each once.
        units = list(dict.fromkeys(map(self._units.get, parts)))
        there = [unit for unit in units if unit is not None]
        if tuple(chain.from_iterable(unit.parts for unit in there)) != parts:
            return None
        whole = joined(there)
        if whole is not None:
            self._units.update(dict.fromkeys(parts, whole))
            del self._lists[parts]
        return whole

    # -- events ------------------------------------------------------------------------

    def exchange(
        self, rank: int, epoch: int, message: Exchange, frames: Sequence[Buffer]
    ) -> list[Effect]:
        """A worker pushes, pulls, or both.

        Raises ``ProtocolError`` for what is malformed, of which nothing was taken then:
        ``refuse`` tells its sender.
        """
        if epoch < self.epoch:
            stale = StaleEpoch(self.epoch, message.push, message.parts, message.rounds)
            return [Send(rank, stale)]
        if epoch > self.epoch:
            if len(self._early) >= _MAX_EARLY:
                raise ProtocolError(f"too many requests of epoch {epoch}, which nobody announced")
            self._early.append((rank, epoch, message, frames))
            return []
        replies = Replies()
        ready: list[Unit] = []
        if message.form:
            self._take_formed(rank, message, frames, replies, ready)
        elif message.push:
            self._take_push(rank, message, frames, replies, ready)
        else:
            self._take_pulls(rank, message, replies)
        return self._effects(replies, ready)

    def refuse(self, rank: int, message: Exchange, error: BaseException) -> list[Effect]:
        """Tell the sender of a message of which nothing was taken, so that it does not wait.

        The numbers of its pushes stay free, but for those of contributions that are here.
        """
        replies = Replies()
        for part, round_ in zip(message.parts, message.rounds, strict=True):
            unit = self._single(part)
            if not message.push:
                replies.fail(rank, False, True, error, (part,), round_)
            elif unit is None:
                replies.fail(rank, True, False, error, (part,), round_)
            elif not unit.rounds.knows(rank, round_):
                self._refuse(unit, rank, round_, error, replies)
        return self._effects(replies, [])

    def finished(self, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> list[Effect]:
        """The pool has applied jobs; each one's round is over, also when it raised."""
        replies = Replies()
        ready: list[Unit] = []
        for job, outcome in zip(jobs, outcomes, strict=True):
            parts, batch = job.parts, job.batch
            unit = self._units.get(parts[0])
            if outcome is None and unit is not None and unit.parts == parts:
                self._finish(unit, batch, None, replies)
                ready.append(unit)
                continue
            # They went their own ways meanwhile, or do so now, since some came to nothing.
            for part, error in zip(parts, outcome or [None] * len(parts), strict=True):
                unit = self._single(part)
                if unit is not None:
                    self._finish(unit, batch, error, replies)
                    ready.append(unit)
        return self._effects(replies, ready)

    def _finish(
        self, unit: Unit, batch: Batch, error: BaseException | None, replies: Replies
    ) -> None:
        unit.rounds.finish()
        version = unit.rounds.version
        for rank, round_ in batch.rounds:
            wanted = (rank, round_) in unit.wanted
            unit.wanted.discard((rank, round_))
            if error is not None:
                replies.fail(rank, True, True, error, unit.parts, round_)
            else:
                value = Value(unit.parts, unit.sizes, round_, version)
                replies.answer(rank, True, wanted, value)
        self._answer_pulls(unit, replies)

    def depart(self, rank: int, error: BaseException) -> list[Effect]:
        """A worker is gone; rounds that cannot be complete without it end with ``error``."""
        self._gone[rank] = error
        replies = Replies()
        for unit in self._distinct():
            for other, round_ in unit.rounds.abandon(rank):
                self._refuse(unit, other, round_, error, replies)
        return self._effects(replies, [])

    def begin_epoch(self, epoch: int) -> list[Effect]:
        """The scheduler has announced a later epoch; requests of it may be here already."""
        self.epoch = epoch
        early, self._early = self._early, []
        effects: list[Effect] = []
        for rank, their_epoch, message, frames in early:
            try:
                effects += self.exchange(rank, their_epoch, message, frames)
            except ProtocolError as error:  # the others' are none the worse for it
                effects += self.refuse(rank, message, error)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Tell those who wait for a round that has been open for long whom it waits for."""
        effects: list[Effect] = []
        for unit in self._distinct():
            open_round = unit.rounds.missing()
            if open_round is None:
                unit.opened_at = None
                continue
            round_, missing = open_round
            if unit.opened_at is None or unit.opened_at[0] != round_:
                unit.opened_at = (round_, now)
                unit.reported_at = now
            elif now - unit.reported_at >= self._stall_report_s:
                unit.reported_at = now
                waits = RoundWaits(unit.parts[0], round_, missing, now - unit.opened_at[1])
                waiting = sorted({rank for rank, _ in unit.rounds.waiting()})
                effects += [Send(rank, waits) for rank in waiting]
        return effects

    # -- inside ------------------------------------------------------------------------

    def _take_push(
        self,
        rank: int,
        message: Exchange,
        frames: Sequence[Buffer],
        replies: Replies,
        ready: list[Unit],
    ) -> None:
        parts, rounds, sizes = message.parts, message.rounds, message.sizes
        if len(sizes) != len(parts):
            raise ProtocolError("a push needs a size for each part")
        if frames and _is_uniform(rounds):
            unit = self._whole(parts)
            is_fit = unit is not None and unit.push_sizes == sizes
            piece = _whole_piece(unit, frames) if unit is not None and is_fit else None
            if unit is not None and piece is not None and self._is_fine(unit, piece):
                self._contribute(rank, unit, rounds[0], piece, message.pull, replies, ready)
                return
        pieces = cut(sizes, frames)
        for part, round_, size, piece in zip(parts, rounds, sizes, pieces, strict=True):
            unit = self._single(part)
            if unit is None:
                replies.fail(rank, True, False, _unknown(part), (part,), round_)
            elif unit.nbytes != size:
                text = f"a push of part {part} has {unit.nbytes} bytes, {size} were pushed"
                if unit.nbytes == NO_SIZE:
                    text = f"part {part} has no plain value, as it was pushed"
                self._refuse(unit, rank, round_, UsageError(text), replies)
            elif (error := self._why_malformed(unit, part, piece)) is not None:
                self._refuse(unit, rank, round_, error, replies)
            else:
                self._contribute(rank, unit, round_, piece, message.pull, replies, ready)

    def _is_fine(self, unit: Unit, piece: Piece) -> bool:
        """Whether the app has nothing against any part of a push of a whole unit."""
        if not unit.is_checked:
            return True
        start = 0
        for part, size in zip(unit.parts, unit.push_sizes, strict=True):
            if self._why_malformed(unit, part, piece_of(piece, start, start + size)) is not None:
                return False
            start += size
        return True

    def _why_malformed(self, unit: Unit, part: int, piece: Piece) -> Exception | None:
        if not unit.is_checked:
            return None
        try:
            self.app.check(part, piece)
        except Exception as error:
            return error
        return None

    def _take_formed(
        self,
        rank: int,
        message: Exchange,
        frames: Sequence[Buffer],
        replies: Replies,
        ready: list[Unit],
    ) -> None:
        """Contributions, or pulls, of which the app knows the form. Each part is alone."""
        is_push = message.push
        if len(message.sizes) != len(message.parts) or (is_push and message.pull):
            raise ProtocolError("an exchange in a form has a size for each part, and one purpose")
        pieces = cut(message.sizes, frames)
        for part, round_, piece in zip(message.parts, message.rounds, pieces, strict=True):
            unit = self._single(part)
            if unit is None:
                replies.fail(rank, is_push, not is_push, _unknown(part), (part,), round_)
                continue
            try:
                formed = self.app.take(part, message.form, piece, is_push=is_push)
            except Exception as error:
                if is_push:
                    self._refuse(unit, rank, round_, error, replies)
                else:
                    replies.fail(rank, False, True, error, unit.parts, round_)
                continue
            if is_push:
                self._contribute(rank, unit, round_, formed, False, replies, ready)
            else:
                self._take_pull(rank, unit, unit.parts, unit.sizes, round_, False, replies, formed)

    def _contribute(
        self,
        rank: int,
        unit: Unit,
        round_: int,
        piece: Piece | Formed,
        pull: bool,
        replies: Replies,
        ready: list[Unit],
    ) -> None:
        verdict = unit.rounds.contribute(rank, round_, piece)
        if verdict is Verdict.TAKEN:
            unit.refused.get(rank, {}).pop(round_, None)
            if pull:
                unit.wanted.add((rank, round_))
            ready.append(unit)
        elif verdict is Verdict.APPLIED:
            # It came again: answer, never apply.
            if pull:
                self._take_pull(rank, unit, unit.parts, unit.sizes, round_, True, replies)
            else:
                value = Value(unit.parts, unit.sizes, round_, unit.rounds.version)
                replies.answer(rank, True, False, value)
        elif verdict is Verdict.TOO_FAR:
            error = ProtocolError(f"round {round_} of part {unit.parts[0]} is beyond the window")
            self._refuse(unit, rank, round_, error, replies)
        elif verdict is Verdict.HOPELESS:
            gone = self._gone[unit.rounds.blocked_by or 0]
            self._refuse(unit, rank, round_, gone, replies)

    def _take_pulls(self, rank: int, message: Exchange, replies: Replies) -> None:
        """Each run of parts that belong to one unit is pulled as one."""
        parts, rounds = message.parts, message.rounds
        start = 0
        while start < len(parts):
            unit = self._units.get(parts[start])
            if unit is None or unit.nbytes == NO_SIZE:
                error = _unknown(parts[start])
                if unit is not None:
                    error = UsageError(f"part {parts[start]} has no plain value to pull")
                replies.fail(rank, False, True, error, parts[start : start + 1], rounds[start])
                start += 1
                continue
            stop = start + 1
            while (
                stop < len(parts)
                and rounds[stop] == rounds[start]
                and self._units.get(parts[stop]) is unit
            ):
                stop += 1
            asked = parts[start:stop]
            sizes = tuple(map(self._sizes.__getitem__, asked))
            self._take_pull(rank, unit, asked, sizes, rounds[start], False, replies)
            start = stop

    def _take_pull(
        self,
        rank: int,
        unit: Unit,
        parts: Ints,
        sizes: Ints,
        after_round: int,
        pushed: bool,
        replies: Replies,
        wanted: Formed | None = None,
    ) -> None:
        """A pull of some parts of a unit."""
        refused = [error for r, error in unit.refused.get(rank, {}).items() if r <= after_round]
        if refused:
            replies.fail(rank, pushed, True, refused[0], parts, after_round)
        elif unit.rounds.readable(rank, after_round):
            value = Value(parts, sizes, after_round, unit.rounds.version, wanted)
            if wanted is None:
                replies.answer(rank, pushed, True, value)
            else:
                replies.formed.setdefault(rank, []).append(value)
        else:
            unit.pulls.append(WaitingPull(rank, after_round, pushed, parts, sizes, wanted))

    def _answer_pulls(self, unit: Unit, replies: Replies) -> None:
        waiting, unit.pulls = unit.pulls, []
        for pull in waiting:
            self._take_pull(
                pull.rank,
                unit,
                pull.parts,
                pull.sizes,
                pull.after_round,
                pull.pushed,
                replies,
                pull.wanted,
            )

    def _refuse(
        self, unit: Unit, rank: int, round_: int, error: BaseException, replies: Replies
    ) -> None:
        """A contribution is not taken; nor will pulls that count on it be answered."""
        refused = unit.refused.setdefault(rank, {})
        if len(refused) <= self._window:
            refused[round_] = error
        unit.wanted.discard((rank, round_))
        replies.fail(rank, True, False, error, unit.parts, round_)
        self._answer_pulls(unit, replies)

    def _effects(self, replies: Replies, ready: Iterable[Unit]) -> list[Effect]:
        effects: list[Effect] = [*replies.sends(self.app, self._message_bytes)]
        lanes: dict[int, list[Job]] = {}
        for unit in ready:
            batch = unit.rounds.start()
            if batch is not None:
                wanted = not unit.wanted.isdisjoint(batch.rounds)
                lanes.setdefault(unit.lane, []).append(_job(unit, batch, wanted))
        effects += [Run(lane, jobs) for lane, jobs in lanes.items()]
        return effects


def _job(unit: Unit, batch: Batch, wanted: bool) -> Job:
    """A round of a unit that is complete."""
    if all(type(payload) is Piece for payload in batch.payloads):
        return Job(unit.parts, unit.sizes, unit.push_sizes, batch, wanted)
    largest = max(
        unit.nbytes if type(payload) is Piece else payload.nbytes for payload in batch.payloads
    )
    return Job(unit.parts, (largest,), (largest,), batch, wanted, is_formed=True)


def _is_uniform(rounds: Ints) -> bool:
    return bool(rounds) and rounds.count(rounds[0]) == len(rounds)


def _whole_piece(unit: Unit, frames: Sequence[Buffer]) -> Piece | None:
    """The value of a unit, if these frames are whole parts of it and nothing else."""
    if len(frames) == 1:
        is_whole = memoryview(frames[0]).nbytes == unit.nbytes
        return Piece(frames[0], 0, unit.nbytes) if is_whole else None
    row = Row([memoryview(frame).cast("B") for frame in frames])
    is_whole = len(row) == unit.nbytes and unit.stops.issuperset(row.stops)
    return Piece(row, 0, unit.nbytes) if is_whole else None


def _unknown(part: int) -> BaseException:
    return UsageError(f"part {part} is not known to this server; was its key deleted?")
