"""A server's memory: where the parts of keys lie, and rounds applied to neighbours as one.

Small parts that were created together lie together in one ``Arena``, so that neighbours which
are due at the same time are worked on as one array. Everything about an arena happens on the
pool thread of its lane, so nothing here has a lock. Pure: no sockets, no clock. Read next:
``aggregate.py`` for the arithmetic, ``server_stores.py`` for who calls this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.aggregate import Flat, Workspace, apply_round
from kvstore.base import Key
from kvstore.errors import OptimizerNotSet
from kvstore.optimizer.base import Optimizer
from kvstore.protocol import PartEntry
from pslite.errors import UsageError
from pslite.plane import Job, Piece


@dataclass(eq=False, slots=True)
class StoreState:
    """What the parts of one store share."""

    ranks: tuple[int, ...] | None
    """Worker ranks that every round needs; None: each push is applied by itself."""
    optimizer: Optimizer | None = None
    cut_keys: dict[Key, int] = field(default_factory=dict)
    """Keys that have several parts (some of them here), and how many of those are here."""


class Arena:
    """Memory of neighbouring parts of one dtype, and what the optimizer keeps for them."""

    def __init__(
        self, store: StoreState, lane: int, entries: Sequence[PartEntry], values: Sequence[Flat]
    ) -> None:
        """``values`` are the parts' first values as bytes; they are copied."""
        dtype = entries[0].dtype
        self.store = store
        self.lane = lane
        self.weight: Flat = np.empty(sum(entry.num_elements for entry in entries), dtype)
        self.workspace = Workspace()
        self.parts: list[Part] = []
        self._optimizer: Optimizer | None = None
        self._state: tuple[Flat, ...] = ()
        raw = self.weight.view(np.uint8)
        start = 0
        for entry, value in zip(entries, values, strict=True):
            stop = start + entry.num_elements
            raw[start * dtype.itemsize : stop * dtype.itemsize] = value
            self.parts.append(Part(self, entry, start, stop))
            start = stop

    def state(self, optimizer: Optimizer | None) -> tuple[Flat, ...]:
        """The state for ``optimizer``, taken over from the one before; None: as it is.

        On the lane's thread.
        """
        if optimizer is not self._optimizer and optimizer is not None:
            self._state, kept = optimizer.take_over(self._optimizer, self.weight, self._state, 1)
            if not kept:
                for part in self.parts:
                    part.count = 0
            self._optimizer = optimizer
        return self._state

    @property
    def state_bytes(self) -> int:
        """The memory of the optimizer's state so far."""
        return sum(array.nbytes for array in self._state)


@dataclass(eq=False, slots=True)
class Part:
    """Where one part lies: elements [start, stop) of its arena."""

    arena: Arena
    entry: PartEntry
    start: int
    stop: int
    count: int = 0
    """Updates by the present optimizer."""

    @property
    def weight(self) -> Flat:
        """Its values, shared."""
        return self.arena.weight[self.start : self.stop]

    def state(self, optimizer: Optimizer | None) -> list[Flat]:
        """Its share of the optimizer's state, shared. On the lane's thread."""
        return [array[self.start : self.stop] for array in self.arena.state(optimizer)]


@dataclass(slots=True)
class _Run:
    """Neighbouring parts whose contributions are neighbours too: worked on as one array."""

    arena: Arena
    optimizer: Optimizer | None
    start: int
    stop: int
    count: int
    pieces: list[Piece]
    jobs: int = 1

    def extend(self, part: Part, optimizer: Optimizer | None, pieces: Sequence[Piece]) -> bool:
        """Add the next part if it continues this run."""
        if (
            part.arena is not self.arena
            or optimizer is not self.optimizer
            or part.start != self.stop
            or part.count != self.count
            or len(pieces) != len(self.pieces)
            or (optimizer is not None and optimizer.scope == "key")
        ):
            return False
        for mine, theirs in zip(self.pieces, pieces, strict=True):
            if theirs.frame is not mine.frame or theirs.start != mine.stop:
                return False
        self.stop = part.stop
        self.jobs += 1
        self.pieces = [
            Piece(mine.frame, mine.start, theirs.stop)
            for mine, theirs in zip(self.pieces, pieces, strict=True)
        ]
        return True

    def apply(self) -> None:
        """Add the contributions up and update."""
        arena, optimizer = self.arena, self.optimizer
        if optimizer is None and arena.store.ranks is None:
            raise OptimizerNotSet("dist_async needs an optimizer: call set_optimizer before push")
        if optimizer is not None:
            optimizer.check_dtype(arena.weight.dtype)
        weight = arena.weight[self.start : self.stop]
        contributions = [
            np.frombuffer(piece.frame, np.uint8)[piece.start : piece.stop].view(weight.dtype)
            for piece in self.pieces
        ]
        state = [array[self.start : self.stop] for array in arena.state(None)]
        apply_round(weight, contributions, optimizer, state, self.count + 1, arena.workspace)


def apply_jobs(
    jobs: Sequence[Job], part_of: Callable[[int], Part | None]
) -> list[BaseException | None]:
    """Apply complete rounds, in order; one outcome for each. On the pool thread of the lane."""
    found = [part_of(job.part) for job in jobs]
    there = [(job, part) for job, part in zip(jobs, found, strict=True) if part is not None]
    outcomes = iter(_apply_parts([job for job, _ in there], [part for _, part in there]))
    # Those that are not there were deleted after their round was complete.
    gone = UsageError("the key was deleted")
    return [gone if part is None else next(outcomes) for part in found]


def _apply_parts(jobs: Sequence[Job], parts: Sequence[Part]) -> list[BaseException | None]:
    errors: list[BaseException | None] = []
    # Read once: the I/O thread may set another optimizer while this runs.
    chosen = {part.arena.store: part.arena.store.optimizer for part in parts}
    try:
        for arena in {part.arena for part in parts}:
            arena.state(chosen[arena.store])
    except Exception as error:
        return [error] * len(jobs)
    for run in _runs(zip(jobs, parts, strict=True), chosen):
        try:
            run.apply()
        except Exception as error:
            errors += [error] * run.jobs
        else:
            errors += [None] * run.jobs
    return errors


def _runs(
    jobs: Iterable[tuple[Job, Part]], chosen: dict[StoreState, Optimizer | None]
) -> Iterator[_Run]:
    """The jobs, neighbours joined. Counts rise as the runs are handed out."""
    run: _Run | None = None
    for job, part in jobs:
        base = chosen[part.arena.store]
        optimizer = None if base is None else base.for_key(part.entry.key)
        pieces = job.batch.payloads
        if run is None or not run.extend(part, optimizer, pieces):
            if run is not None:
                yield run
            run = _Run(part.arena, optimizer, part.start, part.stop, part.count, list(pieces))
        part.count += 1
    if run is not None:
        yield run
