"""``ServerPlane``: the server's half of the data plane. Pure.

It checks each request and passes it to the units of its parts (``unit.py``). The docstring of the
package has the rules. ``worker.py`` is the other half, and ``protocol/rounds.py`` decides which
contributions belong to one round. Read next: ``unit.py`` and ``replies.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pslite.errors import ProtocolError, UsageError
from pslite.plane.interface import (
    Buffer,
    Effect,
    Job,
    Outcome,
    Piece,
    Row,
    Run,
    Send,
    ServerApp,
    cut,
    piece_from,
    piece_of,
)
from pslite.plane.part_copies import PartCopies
from pslite.plane.replies import Replies
from pslite.plane.unit import NO_SIZE, OpenRound, Parts, Unit
from pslite.protocol.rounds import AsyncRounds, SyncRounds
from pslite.wire.messages import Exchange, RoundWaits, StaleEpoch

#: The most requests of later epochs to keep until the scheduler announces these epochs here.
_MAX_EARLY = 65_536


class ServerPlane:
    """A server's half of the plane.

    A *rank* here is also the number of a server that relays (``protocol/relays.py``).
    """

    def __init__(
        self,
        app: ServerApp,
        *,
        window: int,
        message_bytes: int,
        stall_report_s: float,
        keeps_previous: bool = False,
    ) -> None:
        """Make a plane without parts.

        ``keeps_previous`` says whether ``app.read_again`` has the values before a round.
        """
        self.app = app
        self._keeps_previous = keeps_previous
        self._window = window
        #: The answers of the event that is being handled.
        self._replies = Replies(app, message_bytes)
        self._stall_report_s = stall_report_s
        self._parts = Parts()
        #: What a server with a standby, and the standby, ask of the parts.
        self.copies = PartCopies(app, self._parts)
        self._gone: dict[int, BaseException] = {}
        self._early: list[tuple[int, int, Exchange, Sequence[Buffer]]] = []
        #: Rank -> (part, round) of its pushes of an earlier epoch, which it will send again.
        self._stale: dict[int, set[tuple[int, int]]] = {}
        #: Workers that have left while some of their pushes are stale or early -> the error.
        self._leaving: dict[int, BaseException] = {}
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
            push_size: the bytes of a push; by default the same as ``size``.
            is_checked: whether the app checks each push when it arrives (``ServerApp.check``).
        """
        if part in self._parts.units:
            raise UsageError(f"part {part} is already open")
        rounds = AsyncRounds(self._window) if ranks is None else self._rounds(ranks)
        push_sizes = (size if push_size is None else push_size,)
        keeps = self._keeps_previous and ranks is not None
        self._parts.put(Unit((part,), (size,), rounds, lane, push_sizes, is_checked, keeps))

    def is_quiet(self, part: int) -> bool:
        """Return whether a part is open and no push or pull of it is in flight."""
        unit = self._parts.units.get(part)
        return unit is not None and unit.is_quiet

    def priority(self, part: int) -> int:
        """Return how urgently workers need the value of a part."""
        unit = self._parts.units.get(part)
        return 0 if unit is None else unit.priority

    def is_gone(self, rank: int) -> bool:
        """Return whether a worker has left or is lost, and will push no more."""
        return rank in self._gone

    def resize_part(
        self,
        part: int,
        size: int,
        push_size: int,
        *,
        is_checked: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Change the sizes of the values and pushes of a part, which must be quiet.

        ``ranks`` contribute to its rounds from now on; None: as before. ``is_checked`` is as in
        ``open_part``.
        """
        unit = self._parts.single(part)
        if unit is None:
            raise UsageError(f"part {part} is not open")
        if ranks is not None:
            rounds = self._rounds(ranks)
            rounds.resume(unit.rounds.counts())
            unit = replace(unit, rounds=rounds)
        self._parts.put(unit.resized(size, push_size, is_checked=is_checked))

    def _rounds(self, ranks: Sequence[int]) -> SyncRounds:
        rounds = SyncRounds(ranks, self._window)
        for rank in self._gone:
            rounds.abandon(rank)
        return rounds

    def close_part(self, part: int, error: BaseException) -> list[Effect]:
        """Refuse requests for a part from now on; waiting requests get ``error``."""
        unit = self._parts.single(part)
        if unit is not None:
            self._parts.remove(part)
            unit.give_up(error, self._replies)
        return self._effects()

    @property
    def num_waiting(self) -> int:
        """The number of contributions that have arrived and are not applied yet."""
        return sum(len(unit.rounds.waiting()) * len(unit.parts) for unit in self._parts.distinct())

    @property
    def is_applying(self) -> bool:
        """Whether a round of any part is being applied, or will be."""
        return bool(self._leaving) or any(unit.rounds.running for unit in self._parts.distinct())

    @property
    def is_computing(self) -> bool:
        """Whether rounds are applied here; those of lanes below 0 wait for owners."""
        units = self._parts.distinct()
        return bool(self._leaving) or any(u.rounds.running and u.lane >= 0 for u in units)

    def has_waiting(self, rank: int) -> bool:
        """Return whether a worker waits for the answer to a push or a pull."""
        return any(unit.has_waiting(rank) for unit in self._parts.distinct())

    @property
    def num_pulls(self) -> int:
        """The number of parts in pulls that wait."""
        return sum(len(pull.parts) for unit in self._parts.distinct() for pull in unit.pulls)

    def open_rounds(self) -> list[OpenRound]:
        """Return the rounds that have contributions from some workers and lack others."""
        found = (unit.open_round() for unit in self._parts.distinct())
        return [open_round for open_round in found if open_round is not None]

    # -- events ------------------------------------------------------------------------

    def exchange(
        self, rank: int, epoch: int, message: Exchange, frames: Sequence[Buffer]
    ) -> list[Effect]:
        """Handle a worker's push, pull, or both.

        Raises ``ProtocolError`` if the message is malformed. Then it has had no effect, and the
        caller must answer it with ``refuse``.
        """
        if message.push and (epoch < self.epoch or self._stale.get(rank)):
            self._note_stale(rank, message, is_stale=epoch < self.epoch)
        if epoch < self.epoch:
            stale = StaleEpoch(self.epoch, message.push, message.parts, message.rounds)
            return [Send(rank, stale)]
        if epoch > self.epoch:
            if len(self._early) >= _MAX_EARLY:
                raise ProtocolError(
                    f"too many requests for epoch {epoch}, which the scheduler has not announced"
                )
            self._early.append((rank, epoch, message, frames))
            return []
        ready: list[Unit] = []
        if message.form:
            self._take_formed(rank, message, frames, ready)
        elif message.push:
            self._take_push(rank, message, frames, ready)
        else:
            self._take_pulls(rank, message)
        effects = self._effects(ready)
        return effects + self._let_go(rank) if rank in self._leaving else effects

    def _note_stale(self, rank: int, message: Exchange, *, is_stale: bool) -> None:
        """Note which pushes of a worker will arrive again; raise if they are too many."""
        pushes = set(zip(message.parts, message.rounds, strict=True))
        noted = self._stale.get(rank, set())
        noted = noted | pushes if is_stale else noted - pushes
        most = (1 + self._window) * len(self._parts.units)
        if is_stale and len(noted) > most:
            raise ProtocolError(
                f"{len(noted)} pushes of earlier epochs are open, over the limit of {most} "
                f"({1 + self._window} for each part of this server)"
            )
        self._stale[rank] = noted

    def refuse(self, rank: int, message: Exchange, error: BaseException) -> list[Effect]:
        """Answer a message that had no effect with ``error``.

        The round numbers of its pushes become free again, except for pushes that arrived before.
        """
        for part, round_ in zip(message.parts, message.rounds, strict=True):
            unit = self._parts.single(part)
            if not message.push:
                self._replies.fail(rank, False, True, error, (part,), round_)
            elif unit is None:
                self._replies.fail(rank, True, False, error, (part,), round_)
            elif not unit.rounds.knows(rank, round_):
                unit.refuse(rank, round_, error, self._replies)
        return self._effects()

    def finished(self, jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> list[Effect]:
        """End the rounds of jobs that the pool has finished, including failed jobs."""
        ready: list[Unit] = []
        for job, outcome in zip(jobs, outcomes, strict=True):
            parts, batch = job.parts, job.batch
            unit = self._parts.units.get(parts[0])
            if outcome is None and unit is not None and unit.parts == parts:
                unit.finish(batch, None, self._replies)
                ready.append(unit)
                continue
            # The unit was split in the meantime, or must be split now because some parts failed.
            for part, error in zip(parts, outcome or [None] * len(parts), strict=True):
                unit = self._parts.single(part)
                if unit is not None:
                    unit.finish(batch, error, self._replies)
                    ready.append(unit)
        return self._effects(ready)

    def leave(self, rank: int, error: BaseException) -> list[Effect]:
        """Remove a worker that said goodbye, once all its pushes have arrived."""
        self._leaving[rank] = error
        return self._let_go(rank)

    def _let_go(self, rank: int) -> list[Effect]:
        """Remove a worker that has left, unless some of its pushes have yet to arrive."""
        is_early = any(early[0] == rank for early in self._early)
        if is_early or self._stale.get(rank):
            return []
        return self.depart(rank, self._leaving[rank])

    def depart(self, rank: int, error: BaseException) -> list[Effect]:
        """Remove a gone worker; rounds that need its pushes end with ``error``."""
        self._leaving.pop(rank, None)
        self._stale.pop(rank, None)
        self._gone[rank] = error
        for unit in self._parts.distinct():
            for other, round_ in unit.rounds.abandon(rank):
                unit.refuse(other, round_, error, self._replies)
        return self._effects()

    def lasts(self, parts: Iterable[int]) -> dict[int, int]:
        """Return the last rounds of these parts that can still be complete.

        A contributor is gone without which the next ones cannot.
        """
        units = ((part, self._parts.units.get(part)) for part in parts)
        return {part: unit.rounds.last for part, unit in units if unit is not None}

    def end(self, rank: int, error: BaseException, lasts: Mapping[int, int]) -> list[Effect]:
        """Note that a relay contributes to no rounds after these (by part, else 0)."""
        self._gone[rank] = error
        for unit in list(self._parts.distinct()):
            is_one = len({lasts.get(part, 0) for part in unit.parts}) == 1
            for each in (unit,) if is_one else map(self._parts.single, unit.parts):
                if each is None:
                    continue
                after = lasts.get(each.parts[0], 0)
                for other, round_ in each.rounds.abandon(rank, after):
                    each.refuse(other, round_, error, self._replies)
        return self._effects()

    def returned(self, rank: int) -> list[Effect]:
        """Go on with another process in the seat of a lost worker.

        What the first process has pushed stays. What it asked for is forgotten.
        """
        for known in (self._gone, self._leaving, self._stale):
            known.pop(rank, None)
        self._early = [early for early in self._early if early[0] != rank]
        for unit in self._parts.distinct():
            unit.returned(rank)
            for gone, error in self._gone.items():  # other ranks may still block its rounds
                for other, round_ in unit.rounds.abandon(gone):
                    unit.refuse(other, round_, error, self._replies)
        return self._effects()

    def begin_epoch(self, epoch: int) -> list[Effect]:
        """Begin a later epoch, and handle its requests that arrived early."""
        self.epoch = epoch
        early, self._early = self._early, []
        leaving, self._leaving = self._leaving, {}  # until all their requests are handled
        effects: list[Effect] = []
        for rank, their_epoch, message, frames in early:
            try:
                effects += self.exchange(rank, their_epoch, message, frames)
            except ProtocolError as error:  # requests of other workers are not affected
                effects += self.refuse(rank, message, error)
        for rank, reason in leaving.items():
            effects += self.leave(rank, reason)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Tell the workers that wait for long open rounds who is missing."""
        effects: list[Effect] = []
        for unit in self._parts.distinct():
            waits = unit.overdue(now, self._stall_report_s)
            if waits is not None:
                waiting = sorted({rank for rank, _ in unit.waiting()})
                effects += [Send(rank, waits) for rank in waiting]
        return effects

    def pass_on(self, waits: RoundWaits) -> list[Effect]:
        """Tell the workers that wait for a part what its owner waits for."""
        unit = self._parts.units.get(waits.part)
        ranks = {rank for rank, _ in unit.waiting()} if unit is not None else ()
        return [Send(rank, waits) for rank in sorted(ranks)]

    # -- inside ------------------------------------------------------------------------

    def _take_push(
        self,
        rank: int,
        message: Exchange,
        frames: Sequence[Buffer],
        ready: list[Unit],
    ) -> None:
        parts, rounds, sizes = message.parts, message.rounds, message.sizes
        if len(sizes) != len(parts):
            raise ProtocolError(
                f"a push needs a size for each of its {len(parts)} parts, got {len(sizes)}"
            )
        if frames and rounds and rounds.count(rounds[0]) == len(rounds):
            unit = self._parts.whole(parts)
            if unit is not None and unit.push_sizes == sizes:
                piece = piece_from(frames)
                if self._is_fine(unit, piece):
                    unit.priority = message.priority
                    pull, gone = message.pull, self._gone
                    if unit.contribute(rank, rounds[0], piece, pull, gone, self._replies):
                        ready.append(unit)
                    return
        pieces = cut(sizes, frames)
        for part, round_, size, piece in zip(parts, rounds, sizes, pieces, strict=True):
            unit = self._parts.single(part)
            if unit is None:
                self._replies.fail(rank, True, False, _unknown(part), (part,), round_)
            elif unit.nbytes != size:
                text = f"a push of part {part} must have {unit.nbytes} bytes, got {size}"
                if unit.nbytes == NO_SIZE:
                    text = f"part {part} cannot be pushed as a plain value"
                unit.refuse(rank, round_, UsageError(text), self._replies)
            elif (error := self._why_malformed(unit, part, piece)) is not None:
                unit.refuse(rank, round_, error, self._replies)
            else:
                unit.priority = message.priority
                if unit.contribute(rank, round_, piece, message.pull, self._gone, self._replies):
                    ready.append(unit)

    def _is_fine(self, unit: Unit, piece: Piece) -> bool:
        """Return whether a payload has a whole unit, and the app accepts all its parts."""
        if piece.stop != unit.nbytes:
            return False
        if type(piece.frame) is Row and not unit.stops.issuperset(piece.frame.stops):
            return False
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
        ready: list[Unit],
    ) -> None:
        """Handle contributions or pulls in the app's own form, each part alone."""
        is_push = message.push
        if len(message.sizes) != len(message.parts) or (is_push and message.pull):
            raise ProtocolError(
                "an exchange in another form needs a size for each part, and must either push "
                "or pull"
            )
        pieces = cut(message.sizes, frames)
        for part, round_, piece in zip(message.parts, message.rounds, pieces, strict=True):
            unit = self._parts.single(part)
            if unit is None:
                self._replies.fail(rank, is_push, not is_push, _unknown(part), (part,), round_)
                continue
            try:
                formed = self.app.take(part, message.form, piece, is_push=is_push)
            except Exception as error:
                if is_push:
                    unit.refuse(rank, round_, error, self._replies)
                else:
                    self._replies.fail(rank, False, True, error, unit.parts, round_)
                continue
            unit.priority = message.priority
            if not is_push:
                unit.pull(rank, unit.parts, unit.sizes, round_, False, self._replies, formed)
            elif unit.contribute(rank, round_, formed, False, self._gone, self._replies):
                ready.append(unit)

    def _take_pulls(self, rank: int, message: Exchange) -> None:
        """Handle pulls: neighbouring parts of the same unit and round are one pull."""
        parts, rounds = message.parts, message.rounds
        start = 0
        while start < len(parts):
            unit = self._parts.units.get(parts[start])
            if unit is None or unit.nbytes == NO_SIZE:
                error = _unknown(parts[start])
                if unit is not None:
                    error = UsageError(f"part {parts[start]} cannot be pulled as a plain value")
                unknown = parts[start : start + 1]
                self._replies.fail(rank, False, True, error, unknown, rounds[start])
                start += 1
                continue
            stop = start + 1
            while (
                stop < len(parts)
                and rounds[stop] == rounds[start]
                and self._parts.units.get(parts[stop]) is unit
            ):
                stop += 1
            unit.priority = message.priority
            asked = parts[start:stop]
            sizes = tuple(map(self._parts.sizes.__getitem__, asked))
            unit.pull(rank, asked, sizes, rounds[start], False, self._replies)
            start = stop

    def _effects(self, ready: Iterable[Unit] = ()) -> list[Effect]:
        """Return the answers, and the rounds of ``ready`` units that can be applied now."""
        effects: list[Effect] = [*self._replies.take()]
        lanes: dict[int, list[Job]] = {}
        for unit in ready:
            batch = unit.rounds.start()
            if batch is not None:
                lanes.setdefault(unit.lane, []).append(unit.job(batch))
        effects += [Run(lane, jobs) for lane, jobs in lanes.items()]
        return effects


def _unknown(part: int) -> BaseException:
    return UsageError(f"this server does not know part {part}; its key may have been deleted")
