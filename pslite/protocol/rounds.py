"""The rounds of one part: contributions, complete rounds, waiting pulls.

Pure: no socket, thread or clock; payloads are opaque. Two state machines share one interface:

``SyncRounds``: round t is complete when every expected rank has contributed to it. It checks the
set of ranks, not the number of requests, so a repeated message cannot complete a round. It returns
contributions in rank order, so sums repeat to the last bit.

``AsyncRounds``: every contribution is applied by itself: those of one worker in the order of their
numbers, those of different workers in the order of arrival. (Each worker has rounds of its own.)

========  ============================================  ===========================================
a round   event                                         then
========  ============================================  ===========================================
open      a rank contributes                            open, or complete if all ranks have
complete  the round before is applied (``start``)       running
running   it is applied, or has failed (``finish``)     applied; the next one may start
open      a rank is gone without it (``abandon``)       hopeless, as all later ones; all is refused
hopeless  another process of the rank (``returned``)    open
========  ============================================  ===========================================

In both, a contribution is (rank, round): each worker counts its own pushes of the part, from 1. A
repeated contribution is recognized by its number and is not applied again. An early one waits if it
is within the window; otherwise the sender has broken the protocol. A pull has ``after_round``, the
number of its sender's pushes so far, and is answered once these are applied. Read next:
``plane/unit.py``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, NamedTuple

_ENDLESS = 1 << 62


class Verdict(enum.Enum):
    """The verdict on a received contribution."""

    TAKEN = "taken"
    REPEATED = "repeated"
    """Received before, and not applied yet."""
    APPLIED = "applied"
    """Received before, and applied; the sender only needs the answer again."""
    TOO_FAR = "too far"
    """Beyond the window: the sender should have waited."""
    HOPELESS = "hopeless"
    """The round needs a rank that is gone and has not contributed."""
    UNEXPECTED = "unexpected"
    """The sender has no part in these rounds."""


class Batch(NamedTuple):
    """Contributions that are applied together."""

    rounds: tuple[tuple[int, int], ...]
    """(rank, round) of each contribution, in rank order."""
    payloads: tuple[Any, ...]
    """Parallel to ``rounds``."""


class SyncRounds:
    """Synchronous rounds: each needs all expected ranks."""

    def __init__(self, expected: Iterable[int], window: int) -> None:
        self._expected = frozenset(expected)
        #: How many rounds after the open one a rank may contribute to.
        self.window = window
        self._open: dict[int, dict[int, Any]] = {}
        self._running = False
        self._dead_from: int | None = None
        #: The gone rank without which further rounds cannot complete; None if none is gone.
        self.blocked_by: int | None = None
        self.version = 0

    def signature(self) -> object:
        """Return a value that is equal for parts that have seen the same events."""
        contributed = [(round_, sorted(found)) for round_, found in sorted(self._open.items())]
        return (
            self.version,
            self._running,
            self._dead_from,
            self.blocked_by,
            self._expected,
            contributed,
        )

    def copy(self, payload: Callable[[int, int, Any], Any]) -> SyncRounds:
        """Copy the state with other payloads: ``payload(rank, round, old payload)``."""
        copy = SyncRounds(self._expected, self.window)
        copy._open = {
            round_: {rank: payload(rank, round_, found) for rank, found in contributions.items()}
            for round_, contributions in self._open.items()
        }
        copy._running = self._running
        copy._dead_from, copy.blocked_by = self._dead_from, self.blocked_by
        copy.version = self.version
        return copy

    def payload(self, rank: int, round_: int) -> Any:
        """Return what a rank contributed to a round that is not applied yet."""
        return self._open[round_][rank]

    def contribute(self, rank: int, round_: int, payload: Any) -> Verdict:
        """Take one contribution in."""
        if rank not in self._expected:
            return Verdict.UNEXPECTED
        if round_ <= self.version:
            return Verdict.APPLIED
        if round_ > self.version + 1 + self.window:
            return Verdict.TOO_FAR
        contributions = self._open.get(round_, {})
        if rank in contributions:
            return Verdict.REPEATED
        if self._dead_from is not None and round_ >= self._dead_from:
            return Verdict.HOPELESS
        contributions[rank] = payload
        self._open[round_] = contributions
        return Verdict.TAKEN

    def knows(self, rank: int, round_: int) -> bool:
        """Return whether a rank's contribution to a round has arrived or is applied."""
        return round_ <= self.version or rank in self._open.get(round_, ())

    def start(self) -> Batch | None:
        """Start the next complete round and return it; None if there is none to start."""
        if self._running:
            return None
        contributions = self._open.get(self.version + 1)
        if contributions is None or not self._expected <= contributions.keys():
            return None
        self._running = True
        ranks = sorted(contributions)
        return Batch(
            tuple(zip(ranks, repeat(self.version + 1))),
            tuple(map(contributions.__getitem__, ranks)),
        )

    def finish(self) -> None:
        """Note that the running round has been applied, or has failed for good."""
        self._running = False
        self.version += 1
        self._open.pop(self.version, None)

    @property
    def last(self) -> int:
        """The last round that can be complete; a very high number if no rank is gone."""
        return _ENDLESS if self._dead_from is None else self._dead_from - 1

    def end(self) -> list[tuple[int, int]]:
        """Give up the running round and all later ones; return as ``abandon``."""
        self._running = False
        self._dead_from = self.version + 1
        refused = [(rank, round_) for round_, found in sorted(self._open.items()) for rank in found]
        self._open.clear()
        return refused

    def repeated(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Note that a standby has applied this batch, (rank, round) by (rank, round)."""
        self.version = max((round_ for _, round_ in pairs), default=self.version)
        for round_ in [round_ for round_ in self._open if round_ <= self.version]:
            del self._open[round_]

    def counts(self) -> list[tuple[int, int]]:
        """Return (rank, rounds that are applied), for a standby's ``resume``."""
        return [(rank, self.version) for rank in sorted(self._expected)]

    def resume(self, counts: Iterable[tuple[int, int]]) -> None:
        """Go on after these rounds, of which none was seen here."""
        self.repeated(counts)

    @property
    def running(self) -> bool:
        return self._running

    def applied(self, rank: int) -> int:
        """Return how many rounds of this rank have been applied."""
        return self.version

    def readable(self, rank: int, after_round: int) -> bool:
        """Return whether a pull of this rank may be answered now."""
        return not self._running and after_round <= self.version

    def missing(self) -> tuple[int, tuple[int, ...]] | None:
        """Return the open round and the ranks that it waits for; None if not open."""
        contributions = self._open.get(self.version + 1)
        if contributions is None or self._running:
            return None
        return self.version + 1, tuple(sorted(self._expected - contributions.keys()))

    def waiting(self) -> list[tuple[int, int]]:
        """Return (rank, round) of all contributions that are here and not applied."""
        return [
            (rank, round_)
            for round_, contributions in sorted(self._open.items())
            for rank in sorted(contributions)
        ]

    def returned(self, rank: int, renew: Callable[[Any], Any]) -> None:
        """Go on with another process of ``rank``.

        It will repeat its last contributions. Those that are here and not being applied are
        replaced by ``renew(payload)``.
        """
        for round_, contributions in self._open.items():
            is_running = self._running and round_ == self.version + 1
            if rank in contributions and not is_running:
                contributions[rank] = renew(contributions[rank])
        if self.blocked_by == rank:
            self._dead_from = self.blocked_by = None

    def abandon(self, rank: int, after: int = 0) -> list[tuple[int, int]]:
        """Give up the rounds that cannot be complete without ``rank``, which is gone.

        These are the first round without its contribution and all later rounds; its contributions
        up to the round ``after`` may still be on the way. Returns (rank,
        round) of the contributions that are therefore refused; these rounds do not count as
        applied.
        """
        if rank not in self._expected:
            return []
        first = max(self.version, after) + 1
        while rank in self._open.get(first, ()):
            first += 1
        if self._dead_from is None or first < self._dead_from:
            self._dead_from, self.blocked_by = first, rank
        refused: list[tuple[int, int]] = []
        for round_ in sorted(self._open):
            if round_ >= self._dead_from:
                refused.extend((other, round_) for other in sorted(self._open.pop(round_)))
        return refused


class AsyncRounds:
    """Rounds of a part that applies each contribution by itself."""

    def __init__(self, window: int) -> None:
        #: How many contributions of a rank may wait for an earlier one.
        self.window = window
        self._ranks: dict[int, SyncRounds] = {}
        #: The rank of each waiting contribution, in the order of arrival.
        self._order: list[int] = []
        #: The rank whose contribution is being applied.
        self._running: int | None = None
        self.blocked_by: int | None = None
        self.version = 0

    def _of(self, rank: int) -> SyncRounds:
        return self._ranks.get(rank) or SyncRounds((rank,), self.window)

    def signature(self) -> object:
        """Return a value that is equal for parts that have seen the same events."""
        ranks = [(rank, rounds.signature()) for rank, rounds in sorted(self._ranks.items())]
        return self.version, self._running, self._order, ranks

    def copy(self, payload: Callable[[int, int, Any], Any]) -> AsyncRounds:
        """Copy the state with other payloads: ``payload(rank, round, old payload)``."""
        copy = AsyncRounds(self.window)
        copy._ranks = {rank: rounds.copy(payload) for rank, rounds in self._ranks.items()}
        copy._order, copy._running = list(self._order), self._running
        copy.version = self.version
        return copy

    def payload(self, rank: int, round_: int) -> Any:
        """Return what a rank contributed to a round that is not applied yet."""
        return self._ranks[rank].payload(rank, round_)

    def contribute(self, rank: int, round_: int, payload: Any) -> Verdict:
        """Take one contribution in."""
        if rank < 0:  # a relay adds up, and these are applied one by one
            return Verdict.UNEXPECTED
        rounds = self._ranks[rank] = self._of(rank)
        verdict = rounds.contribute(rank, round_, payload)
        if verdict is Verdict.TAKEN:
            self._order.append(rank)
        return verdict

    def knows(self, rank: int, round_: int) -> bool:
        """Return whether this contribution has arrived or is applied."""
        return self._of(rank).knows(rank, round_)

    def start(self) -> Batch | None:
        """Start and return the oldest contribution that is next for its rank, or None."""
        for position, rank in enumerate(self._order if self._running is None else ()):
            batch = self._ranks[rank].start()
            if batch is not None:
                del self._order[position]
                self._running = rank
                return batch
        return None

    def finish(self) -> None:
        """Note that the running contribution has been applied, or has failed for good."""
        if self._running is None:
            raise ValueError("nothing is running")
        self._ranks[self._running].finish()
        self._running = None
        self.version += 1

    def repeated(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Note that a standby has applied this batch, (rank, round) by (rank, round)."""
        for rank, round_ in pairs:
            rounds = self._ranks[rank] = self._of(rank)
            rounds.repeated(((rank, round_),))
            self.version += 1

    def counts(self) -> list[tuple[int, int]]:
        """Return (rank, contributions that are applied), for a standby's ``resume``."""
        return [(rank, rounds.version) for rank, rounds in sorted(self._ranks.items())]

    def resume(self, counts: Iterable[tuple[int, int]]) -> None:
        """Go on after these contributions, of which none was seen here."""
        for rank, count in counts:
            rounds = self._ranks[rank] = self._of(rank)
            rounds.version = count
            self.version += count

    @property
    def running(self) -> bool:
        return self._running is not None

    def applied(self, rank: int) -> int:
        """Return how many contributions of this rank have been applied."""
        return self._of(rank).version

    def readable(self, rank: int, after_round: int) -> bool:
        """Return whether a pull of this rank may be answered now."""
        return self._running is None and after_round <= self.applied(rank)

    def missing(self) -> tuple[int, tuple[int, ...]] | None:
        """Return None, because workers do not wait for each other here."""
        return None

    def waiting(self) -> list[tuple[int, int]]:
        """Return (rank, round) of all contributions that are here and not applied."""
        return [entry for _, rounds in sorted(self._ranks.items()) for entry in rounds.waiting()]

    def returned(self, rank: int, renew: Callable[[Any], Any]) -> None:
        """Go on with another process of ``rank``; see ``SyncRounds.returned``."""
        self._of(rank).returned(rank, renew)

    @property
    def last(self) -> int:
        """As in ``SyncRounds``: each contribution is a round of its own."""
        return _ENDLESS

    def abandon(self, rank: int, after: int = 0) -> list[tuple[int, int]]:
        """Drop a gone worker's contributions that wait for its missing earlier ones."""
        rounds = self._of(rank)
        for _ in rounds.abandon(rank):
            self._order.remove(rank)
        rounds._dead_from = None  # no other worker waits for these rounds
        return []


Rounds = SyncRounds | AsyncRounds
