"""The parts of a server, by number: find, read and update them.

Requests name the same lists of parts again and again. Neighbours in a list that one optimizer
updates are a ``Stretch``, which is found once. It adds up and updates its parts as one array, so a
model of many small keys takes a few calls instead of some for each key. Pure: no sockets, no clock.
Read next: ``memory.py`` for the memory of parts, ``arrays/cpu/sums.py`` for the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays.cpu.sums import Flat, apply_round, sum_in_order
from kvstore.arrays.cpu.threads import Cores
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.errors import OptimizerNotSet
from kvstore.optimizer.base import Optimizer
from kvstore.protocol.requests import bytes_of
from kvstore.server.memory import Arena, Part, StoreState
from pslite.errors import UsageError
from pslite.plane import Batch, Ints, Job, Outcome, Piece, piece_of, side_by_side

#: At most this many lists of parts are remembered.
_MAX_LISTS = 1024
#: At most this many unused copies are kept, such as those of parts that are now pulled separately.
_MAX_COPIES = 16
_ALONE = Cores(1)
#: The workspace block in which encoded contributions are added up.
_SUM_SLOT = 3


@dataclass(eq=False, slots=True)
class Stretch:
    """Neighbouring parts of one arena that one optimizer has updated equally often."""

    arena: Arena
    base: Optimizer | None
    """The optimizer of the store."""
    optimizer: Optimizer | None
    """The same for these keys."""
    parts: list[Part]
    first: int
    """Index of the first part in the list of parts."""
    offset: int
    """Where their bytes begin in a contribution to all parts of the list."""
    nbytes: int
    """The size of their contribution."""
    is_ready: bool = False
    """Whether the optimizer can update them, and has its states."""

    def is_followed_by(self, part: Part, optimizer: Optimizer | None, offset: int) -> bool:
        """Return whether a part that begins at ``offset`` of a contribution is next."""
        last = self.parts[-1]
        return (
            offset == self.offset + self.nbytes
            and part.start == last.stop
            and part.arena is self.arena
            and part.count == last.count
            and part.rule.chain is last.rule.chain is None
            and optimizer is self.optimizer
            and (optimizer is None or optimizer.scope != "key")
        )

    def apply(self, payloads: Sequence[Piece], out: Flat | None) -> None:
        """Add up contributions to the list of parts, and update.

        The bytes of the new values are also copied to their place in ``out``. Runs on the lane's
        pool thread.
        """
        arena, optimizer, parts = self.arena, self.optimizer, self.parts
        whole = slice(parts[0].start, parts[-1].stop)
        weight = arena.weight[whole]
        arena.changes += 1
        if arena.previous is not None:
            arena.previous[whole] = weight
        if not self.is_ready:
            self._get_ready()
        count = parts[0].count + 1
        for part in parts:
            part.count = count
        dtype, states = weight.dtype, [array[whole] for array in arena.states]
        if parts[0].rule.chain is not None:
            total = self._decoded(payloads)
            apply_round(weight, [total], optimizer, states, count, arena.workspace)
            return
        # A worker's values may come in several frames: take pieces that end where a frame ends.
        begin = 0
        for start, stop, pieces in side_by_side(payloads, self.offset, self.offset + self.nbytes):
            length = (stop - start) // dtype.itemsize
            some = slice(begin, begin + length)
            begin += length
            apply_round(
                weight[some],
                [np.frombuffer(frame, dtype, length, offset) for frame, offset, _ in pieces],
                optimizer,
                [array[some] for array in states],
                count,
                arena.workspace,
                outs=() if out is None else (out[start:stop].view(dtype),),
            )

    def _get_ready(self) -> None:
        """Let the optimizer take the states over; raise if it cannot update them."""
        arena, base = self.arena, self.base
        arena.state(base)  # it may begin the counts anew
        if base is not None:
            base.check_dtype(arena.weight.dtype)
        elif arena.store.ranks is None:
            raise OptimizerNotSet("dist_async needs an optimizer: call set_optimizer before push")
        self.is_ready = True

    def _decoded(self, payloads: Sequence[Piece]) -> Flat:
        """Return the sum of encoded contributions, in rank order, in the dtype of sums.

        It is valid until the arena's next sum. Raises ``ProtocolError`` before anything changes.
        """
        (part,) = self.parts
        dtype, chain = self.arena.weight.dtype, part.rule.chain
        assert chain is not None
        total = self.arena.workspace.block(
            _SUM_SLOT, accumulation_dtype(dtype), part.stop - part.start
        )
        for index, payload in enumerate(payloads):
            piece = piece_of(payload, self.offset, self.offset + self.nbytes)
            chain.decode(bytes_of(piece), total, dtype=dtype, add=index > 0, cores=_ALONE)
        return total

    def add_up(self, payloads: Sequence[Piece], total: Flat) -> None:
        """Add up contributions to the list of parts, into their place in ``total``."""
        dtype = self.arena.weight.dtype
        for start, stop, pieces in side_by_side(payloads, self.offset, self.offset + self.nbytes):
            contributions = [bytes_of(piece).view(dtype) for piece in pieces]
            sum_in_order(contributions, total[start:stop].view(dtype), self.arena.workspace)


class Frame(NamedTuple):
    """Values that are sent as one frame: those of neighbours, or one encoded value."""

    arena: Arena
    start: int
    stop: int
    encoded: Part | None


class _ReadCopy(NamedTuple):
    """Values of some parts, and their arenas' numbers of changes at that time."""

    values: Flat
    changes: Mapping[Arena, int]

    @property
    def is_current(self) -> bool:
        """Whether the parts still have these values."""
        return all(arena.changes == count for arena, count in self.changes.items())


class PartTable:
    """The parts of a server, with a cache of the neighbours in lists of parts.

    The I/O thread adds, removes and reads parts; pool threads apply rounds to them.
    """

    def __init__(self, allocate: Callable[[int], Flat]) -> None:
        """``allocate(nbytes)`` returns memory for values that are sent."""
        self._allocate = allocate
        self._parts: dict[int, Part] = {}
        #: Parts that are updated together -> their stretches.
        self._stretches: dict[Ints, list[Stretch]] = {}
        #: Parts that are read together -> the frames of their values.
        self._frames: dict[Ints, list[Frame]] = {}
        #: Parts -> their values right after an update, until ``read`` returns them.
        self._copies: dict[Ints, _ReadCopy] = {}

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
        # A list that a pool thread has just found may stay; it is never used again.
        self.forget_lists()
        return self._parts.pop(number, None)

    def forget_lists(self) -> None:
        """Drop what is known of lists: a part has gone, or is encoded in another way."""
        for cache in (self._stretches, self._frames, self._copies):
            cache.clear()

    # -- rounds ------------------------------------------------------------------------

    def check(self, number: int, piece: Piece) -> None:
        """Check an encoded contribution; see ``memory.py``."""
        part = self._parts.get(number)
        if part is not None:
            part.check_push(bytes_of(piece))

    def apply(self, job: Job) -> Outcome:
        """Apply a complete round. On the pool thread of the parts' lane; never raises."""
        copy: Flat | None = None
        try:
            stretches = self._stretches_of(job)
            store = stretches[0].arena.store if job.wanted and stretches else None
            # Encoded values are sent without such a copy.
            if store is not None and store.ranks is None and not store.compression.rules:
                copy = self._allocate(sum(job.sizes))
        except BaseException as error:  # an optimizer may call sys.exit
            return [error] * len(job.parts)
        errors: dict[int, BaseException] = {
            index: UsageError("the key was deleted")  # after its round was complete
            for index, number in enumerate(job.parts)
            if number not in self._parts
        }
        for stretch in stretches:
            try:
                stretch.apply(job.batch.payloads, copy)
            except BaseException as error:
                stop = stretch.first + len(stretch.parts)
                errors.update(dict.fromkeys(range(stretch.first, stop), error))
        if errors:
            return [errors.get(index) for index in range(len(job.parts))]
        if copy is not None:
            if len(self._copies) >= _MAX_COPIES:
                self._copies.clear()
            changes = {stretch.arena: stretch.arena.changes for stretch in stretches}
            self._copies[job.parts] = _ReadCopy(copy, changes)
        return None

    def summed(self, job: Job) -> Job:
        """Return a job with the sum of its contributions, or the job itself.

        That is so for encoded and 16-bit contributions: a sum in their dtype would lose bits.
        """
        batch, stretches = job.batch, self._stretches_of(job)
        is_whole = sum(len(stretch.parts) for stretch in stretches) == len(job.parts)
        if len(batch.payloads) < 2 or not is_whole or not all(map(_can_be_summed, stretches)):
            return job
        total = self._allocate(sum(job.push_sizes))
        for stretch in stretches:
            stretch.add_up(batch.payloads, total)
        return job._replace(batch=Batch(batch.rounds, (Piece(total.data, 0, len(total)),)))

    def _stretches_of(self, job: Job) -> list[Stretch]:
        """Return a job's parts but for deleted ones. On the lane's pool thread."""
        found = self._stretches.get(job.parts)
        if found is None or any(
            each.base is not each.arena.store.optimizer or len({p.count for p in each.parts}) > 1
            for each in found
        ):
            found = self._find_stretches(job)
        return found

    def _find_stretches(self, job: Job) -> list[Stretch]:
        found: list[Stretch] = []
        # Read once: the I/O thread may set another optimizer while this runs.
        chosen: dict[StoreState, Optimizer | None] = {}
        num_parts = offset = 0
        for index, (number, size) in enumerate(zip(job.parts, job.push_sizes, strict=True)):
            part = self._parts.get(number)
            if part is not None:
                base = chosen.setdefault(part.store, part.store.optimizer)
                optimizer = None if base is None else base.for_key(part.entry.key, part.entry.width)
                if found and found[-1].is_followed_by(part, optimizer, offset):
                    found[-1].parts.append(part)
                    found[-1].nbytes += size
                else:
                    found.append(Stretch(part.arena, base, optimizer, [part], index, offset, size))
                num_parts += 1
            offset += size
        # The update counts of parts may be equal once another optimizer has their states.
        are_known = all(stretch.arena.optimizer is stretch.base for stretch in found)
        if are_known and num_parts == len(job.parts):
            if len(self._stretches) >= _MAX_LISTS:
                self._stretches.clear()
            self._stretches[job.parts] = found
        return found

    # -- reading -----------------------------------------------------------------------

    def read(self, parts: Ints) -> list[Any]:
        """Return frames with the parts' values in order; neighbours share a frame."""
        copied = self._copies.pop(parts, None)
        if copied is not None and copied.is_current:
            return [copied.values.data]
        frames = []
        for arena, start, stop, part in self._frames.get(parts) or self._find_frames(parts):
            if part is not None:
                frames.append(part.encoded(self._allocate).data)
                continue
            values = arena.weight[start:stop].view(np.uint8)
            # A synchronous value stays unchanged until all workers that requested it have it; an
            # asynchronous one may change as soon as this returns.
            if arena.store.ranks is None:
                copy = self._allocate(len(values))
                copy[:] = values
                values = copy
            frames.append(values.data)
        return frames

    def read_again(self, parts: Ints, *, before_last: bool) -> list[Any]:
        """Return copies of the parts' values, or of those before their last rounds."""
        frames = []
        for arena, start, stop, part in self._frames.get(parts) or self._find_frames(parts):
            source = arena.weight if arena.previous is None or not before_last else arena.previous
            values = source[start:stop]
            if part is not None and part.rule.pull is not None:
                copy = self._allocate(part.pull_bytes)
                part.rule.pull.encode(values, copy, cores=_ALONE)
            else:
                copy = self._allocate(values.nbytes)
                copy[:] = values.view(np.uint8)
            frames.append(copy.data)
        return frames

    def _find_frames(self, parts: Ints) -> list[Frame]:
        """Find the frames of these parts' values, neighbours joined. On the I/O thread."""
        found: list[Frame] = []
        for part in map(self._parts.__getitem__, parts):
            last = found[-1] if found else None
            if part.rule.pull is not None:
                found.append(Frame(part.arena, part.start, part.stop, part))
            elif last is not None and _continues(part, last):
                found[-1] = last._replace(stop=part.stop)
            else:
                found.append(Frame(part.arena, part.start, part.stop, None))
        if len(self._frames) >= _MAX_LISTS:
            self._frames.clear()
        self._frames[parts] = found
        return found


def neighbours(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """Yield the jobs in groups of those that could be one.

    In these, the contributions of each job begin where those of the job before end.
    """
    group: list[Job] = []
    for job in jobs:
        if group and not _is_behind(job, group[-1]):
            yield group
            group = []
        group.append(job)
    if group:
        yield group


def _is_behind(job: Job, last: Job) -> bool:
    if job.is_formed or last.is_formed or job.wanted != last.wanted:
        return False
    pairs = zip(job.batch.payloads, last.batch.payloads, strict=False)
    return job.batch.rounds == last.batch.rounds and all(
        mine.frame is before.frame and mine.start == before.stop for mine, before in pairs
    )


def joined(jobs: Sequence[Job]) -> Job:
    """Return a group of ``neighbours`` as one job."""
    if len(jobs) == 1:
        return jobs[0]
    parts, sizes, push_sizes = (
        tuple(chain.from_iterable(row)) for row in zip(*(job[:3] for job in jobs), strict=True)
    )
    first, last = jobs[0].batch, jobs[-1].batch
    ends = zip(first.payloads, last.payloads, strict=True)
    payloads = tuple(Piece(begin.frame, begin.start, end.stop) for begin, end in ends)
    return Job(parts, sizes, push_sizes, Batch(first.rounds, payloads), jobs[0].wanted)


def _continues(part: Part, frame: Frame) -> bool:
    """Return whether a part's value is stored right behind a frame."""
    return frame.encoded is None and frame.arena is part.arena and frame.stop == part.start


def _can_be_summed(stretch: Stretch) -> bool:
    """Return whether a sum in the dtype of the contributions has all their bits."""
    dtype = stretch.arena.weight.dtype
    return stretch.parts[0].rule.chain is None and accumulation_dtype(dtype) == dtype
