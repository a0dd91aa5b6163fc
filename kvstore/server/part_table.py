"""The parts of a server, by number: find, read and update them.

Requests name the same lists of parts again and again, so the neighbours in a list are computed only
once. Read next: ``memory.py`` for the memory of parts, ``apply.py`` for how a round is applied, and
``dense.py``, which calls this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvstore.arrays.cpu.sums import Flat
from kvstore.optimizer.base import Optimizer
from kvstore.server.apply import PartRun, Stretch, add_run
from kvstore.server.memory import Arena, Part, StoreState
from pslite.errors import UsageError
from pslite.plane import Ints, Job, Outcome

#: At most this many lists of parts are remembered.
_MAX_COMPILED = 1024


class Frame(NamedTuple):
    """Values that are sent as one frame: those of neighbours, or one encoded value."""

    arena: Arena
    start: int
    stop: int
    encoded: Part | None


class PartTable:
    """The parts of a server, with a cache of the neighbours in lists of parts.

    The I/O thread adds and removes parts; pool threads apply rounds to them.
    """

    def __init__(self) -> None:
        self._parts: dict[int, Part] = {}
        #: Parts that are updated together -> their optimizer and their stretches.
        self._compiled: dict[Ints, tuple[Optimizer | None, list[Stretch]]] = {}
        #: Parts that are read together -> the frames of their values.
        self._frames: dict[Ints, list[Frame]] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, number: int) -> bool:
        return number in self._parts

    def __iter__(self) -> Iterator[Part]:
        return iter(list(self._parts.values()))

    def get(self, number: int) -> Part | None:
        """Return a part, if it is there."""
        return self._parts.get(number)

    def add(self, part: Part) -> None:
        """Add a part; its number is never used again."""
        self._parts[part.entry.part] = part

    def remove(self, number: int) -> Part | None:
        """Remove a part; return it, if it was there."""
        # A list that a pool thread has just compiled may stay; it is never used again.
        self.forget_lists()
        return self._parts.pop(number, None)

    def forget_lists(self) -> None:
        """Drop the cached lists: a part, a rule or an optimizer has changed."""
        self._compiled.clear()
        self._frames.clear()

    def frames(self, numbers: Ints) -> list[Frame]:
        """Return the frames of these parts' values, neighbours joined. On the I/O thread."""
        found = self._frames.get(numbers)
        if found is None:
            found = []
            for part in map(self._parts.__getitem__, numbers):
                if part.rule.pull is not None:
                    found.append(Frame(part.arena, part.start, part.stop, part))
                elif found and _continues(part, found[-1]):
                    found[-1] = found[-1]._replace(stop=part.stop)
                else:
                    found.append(Frame(part.arena, part.start, part.stop, None))
            if len(self._frames) >= _MAX_COMPILED:
                self._frames.clear()
            self._frames[numbers] = found
        return found

    def stretches(self, job: Job) -> list[Stretch] | None:
        """Return a job's parts, neighbours joined; None if some were deleted.

        On the lane's pool thread.
        """
        errors: list[BaseException] = []
        found = self._stretches(0, job, {}, lambda _, __, error: errors.append(error))
        return None if errors else found

    def apply(self, jobs: Sequence[Job], outs: Sequence[Flat | None]) -> list[Outcome]:
        """Apply complete rounds in order, and return an outcome for each.

        On the lane's pool thread. If a job has an array in ``outs``, the bytes of its parts'
        new values are copied there.
        """
        outcomes: list[Outcome] = [None] * len(jobs)

        def failed(index: int, parts: range, error: BaseException) -> None:
            errors = list(outcomes[index] or [None] * len(jobs[index].parts))
            errors[parts.start : parts.stop] = [error] * len(parts)
            outcomes[index] = errors

        for run in self._runs(jobs, outs, failed):
            try:
                run.apply()
            except BaseException as error:  # an optimizer may call sys.exit
                for index, parts in run.members:
                    failed(index, parts, error)
        return outcomes

    def _runs(
        self,
        jobs: Sequence[Job],
        outs: Sequence[Flat | None],
        failed: Callable[[int, range, BaseException], None],
    ) -> list[PartRun]:
        """Return the jobs' parts, neighbours joined, and increase their update counts."""
        runs: list[PartRun] = []
        # Read once: the I/O thread may set another optimizer while this runs.
        chosen: dict[StoreState, Optimizer | None] = {}
        for index, job in enumerate(jobs):
            for whole in self._stretches(index, job, chosen, failed):
                arena = whole.arena
                try:
                    arena.state(chosen[arena.store])
                except BaseException as error:
                    failed(index, range(whole.first, whole.first + len(whole.parts)), error)
                    continue
                for stretch in whole.of_one_count():
                    add_run(runs, index, stretch, job.batch.payloads, outs[index])
        return runs

    def _stretches(
        self,
        job_index: int,
        job: Job,
        chosen: dict[StoreState, Optimizer | None],
        failed: Callable[[int, range, BaseException], None],
    ) -> list[Stretch]:
        """Return a job's parts, neighbours joined; add their optimizers to ``chosen``."""
        compiled = self._compiled.get(job.parts)
        if compiled is not None:
            base, stretches = compiled
            store = stretches[0].arena.store
            if chosen.setdefault(store, store.optimizer) is base:
                return stretches
        stretches = []
        offset = 0
        for index, (number, size) in enumerate(zip(job.parts, job.push_sizes, strict=True)):
            part = self._parts.get(number)
            if part is None:  # deleted after its round was complete
                failed(job_index, range(index, index + 1), UsageError("the key was deleted"))
            else:
                store = part.arena.store
                base = chosen.setdefault(store, store.optimizer)
                optimizer = None if base is None else base.for_key(part.entry.key, part.entry.width)
                last = stretches[-1] if stretches else None
                if last is not None and last.is_followed_by(part, optimizer, index):
                    stretches[-1] = last._replace(parts=(*last.parts, part))
                else:
                    stretches.append(Stretch(part.arena, optimizer, (part,), index, offset))
            offset += size
        stores = {stretch.arena.store for stretch in stretches}
        if len(stores) == 1 and sum(len(each.parts) for each in stretches) == len(job.parts):
            if len(self._compiled) >= _MAX_COMPILED:
                self._compiled.clear()
            self._compiled[job.parts] = (chosen[stores.pop()], stretches)
        return stretches


def _continues(part: Part, frame: Frame) -> bool:
    """Return whether a part's value is stored right behind a frame."""
    return frame.encoded is None and frame.arena is part.arena and frame.stop == part.start
