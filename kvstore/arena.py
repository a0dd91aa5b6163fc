"""A server's memory: where the parts of keys lie, and rounds applied to neighbours as one.

Small parts that were created together lie together in one ``Arena``, so that neighbours which
are due at the same time are worked on as one array. Everything about an arena happens on the
pool thread of its lane, so nothing here has a lock. Pure: no sockets, no clock. Read next:
``aggregate.py`` for the arithmetic, ``server_stores.py`` for who calls this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvstore.aggregate import Flat, Workspace, apply_round
from kvstore.base import Key
from kvstore.compression import Chain, Compression
from kvstore.cores import Cores
from kvstore.dtypes import accumulation_dtype
from kvstore.errors import OptimizerNotSet, ValueMismatchError
from kvstore.optimizer import states
from kvstore.optimizer.base import Optimizer
from kvstore.protocol import PartEntry, RowPartEntry
from pslite.errors import ProtocolError, UsageError
from pslite.plane import Ints, Job, Outcome, Piece, cuts_of, piece_of

_ALONE = Cores(1)
#: Where encoded contributions are added up.
_SUM_SLOT = 3
#: Lists of parts about which something is remembered.
_MAX_COMPILED = 1024


@dataclass(eq=False, slots=True)
class StoreState:
    """What the parts of one store share."""

    ranks: tuple[int, ...] | None
    """Worker ranks that every round needs; None: each push is applied by itself."""
    optimizer: Optimizer | None = None
    cut_keys: dict[Key, int] = field(default_factory=dict)
    """Keys that have several parts (some of them here), and how many of those are here."""
    compression: Compression = field(default_factory=Compression)

    def has_part(self, entry: PartEntry | RowPartEntry) -> None:
        """A part is here from now on."""
        if not entry.is_whole:
            self.cut_keys[entry.key] = self.cut_keys.get(entry.key, 0) + 1

    def lost_part(self, entry: PartEntry | RowPartEntry) -> None:
        """A part is not here any more."""
        if not entry.is_whole:
            self.cut_keys[entry.key] -= 1
            if not self.cut_keys[entry.key]:
                del self.cut_keys[entry.key]

    def check_whole(self, entries: Sequence[PartEntry | RowPartEntry]) -> None:
        """Raise ``UsageError`` where the optimizer needs whole keys and these are none."""
        cut_keys = [entry.key for entry in entries if not entry.is_whole]
        if cut_keys and self.optimizer is not None and self.optimizer.scope == "key":
            raise UsageError(
                f"the optimizer {self.optimizer.name} needs whole keys, but {cut_keys[0]!r} "
                "is cut in parts: worker 0 has to return from set_optimizer before it calls init"
            )


class Codecs(NamedTuple):
    """How a part's values travel."""

    push: Chain | None = None
    """None: as they are."""
    pull: Chain | None = None


_AS_THEY_ARE = Codecs()


def codecs_of(compression: Compression, rule: object) -> Codecs:
    """What a rule says, by its number; -1 for none. Raises ``ProtocolError`` for no number."""
    if rule == -1:
        return _AS_THEY_ARE
    if type(rule) is not int or not 0 <= rule < len(compression.rules):
        raise ProtocolError("a part's rule of compression is not there")
    return Codecs(compression.rules[rule].chain, compression.rules[rule].pull)


class Arena:
    """Memory of neighbouring parts of one dtype, and what the optimizer keeps for them."""

    def __init__(
        self,
        store: StoreState,
        lane: int,
        entries: Sequence[PartEntry],
        values: Sequence[Flat],
        allocate: Callable[[int], Flat],
    ) -> None:
        """``values`` are the parts' first values as bytes; they are copied.

        ``allocate(nbytes)`` gives the memory of the weights, which workers may read in place.
        """
        dtype = entries[0].dtype
        nbytes = dtype.itemsize * sum(entry.num_elements for entry in entries)
        self.store = store
        self.lane = lane
        self.weight: Flat = allocate(nbytes).view(dtype)
        self.workspace = Workspace()
        self.parts: list[Part] = []
        #: How often anything of it was written; tells whether a copy is still what is here.
        self.changes = 0
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
            self._state, kept = states.take_over(
                optimizer, self._optimizer, self.weight, self._state, 1
            )
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
    codecs: Codecs = _AS_THEY_ARE
    _encoded: tuple[int, Flat] | None = None
    """How often the arena had been written, and the value as it travelled then."""

    def set_codecs(self, codecs: Codecs) -> None:
        """From now on its values travel so."""
        self.codecs = codecs
        self._encoded = None  # by the codec of before

    @property
    def push_bytes(self) -> int:
        """The bytes of a contribution."""
        return self._bytes(self.codecs.push)

    @property
    def pull_bytes(self) -> int:
        """The bytes of its value as it travels."""
        return self._bytes(self.codecs.pull)

    def _bytes(self, chain: Chain | None) -> int:
        num_elements: int = self.stop - self.start
        dtype = self.arena.weight.dtype
        if chain is None:
            return num_elements * int(dtype.itemsize)
        return chain.encoded_bytes(num_elements, dtype)

    def check_push(self, data: Flat) -> None:
        """Raise ``ProtocolError`` for bytes that are no contribution. On any thread.

        So only its sender hears of it; when its round is applied, that would fail for all.
        """
        chain = self.codecs.push
        if chain is None:
            return
        try:
            chain.check_encoded(data, self.stop - self.start, self.arena.weight.dtype)
        except ProtocolError as error:
            raise ProtocolError(f"key {self.entry.key!r}: {error}") from error

    def encoded(self, buffer: Callable[[int], Flat]) -> Flat:
        """Its value as it travels, where it has a codec for that; the same for all who ask."""
        chain = self.codecs.pull
        assert chain is not None
        if self._encoded is None or self._encoded[0] != self.arena.changes:
            memory = buffer(self.pull_bytes)
            chain.encode_into(self.weight, memory, cores=_ALONE)
            self._encoded = self.arena.changes, memory
        return self._encoded[1]

    @property
    def store(self) -> StoreState:
        """What it shares with the other parts of its store."""
        return self.arena.store

    @property
    def lane(self) -> int:
        """The number of the pool thread that works on it."""
        return self.arena.lane

    @property
    def weight(self) -> Flat:
        """Its values, shared."""
        return self.arena.weight[self.start : self.stop]

    def state(self, optimizer: Optimizer | None) -> list[Flat]:
        """Its share of the optimizer's state, shared. On the lane's thread."""
        return [array[self.start : self.stop] for array in self.arena.state(optimizer)]

    @property
    def num_states(self) -> int:
        """How many arrays its store's optimizer keeps. On any thread."""
        optimizer = self.arena.store.optimizer
        return 0 if optimizer is None else len(states.state_names(optimizer, self.entry.dtype))

    def write(self, count: int, frames: Sequence[Any], *, has_values: bool) -> None:
        """Set the count and the bytes of its values, where there are any, and of its states.

        A master is set to the value wherever it would not round to it, and if its frame is empty.
        Raises ``ValueMismatchError`` for other sizes; then nothing has changed. On the lane's
        thread.
        """
        arrays = self.state(self.arena.store.optimizer)
        master = arrays[-1] if arrays and states.has_master(self.entry.dtype) else None
        if has_values:
            arrays.insert(0, self.weight)
        sizes = [array.nbytes for array in arrays]
        lengths = [len(frame) for frame in frames]
        if lengths != sizes and (master is None or lengths != [*sizes[:-1], 0]):
            raise ValueMismatchError(
                f"the values and states for key {self.entry.key!r} do not fit: "
                f"{len(frames)} arrays came, {len(arrays)} are there"
            )
        self.arena.changes += 1
        for array, frame in zip(arrays, frames, strict=True):
            if len(frame):
                array.view(np.uint8)[:] = np.frombuffer(frame, np.uint8)
        if master is not None and not lengths[-1]:
            np.copyto(master, self.weight)
        elif master is not None:
            states.follow(self.weight, master)
        self.count = count


class Frame(NamedTuple):
    """What is sent as one: neighbouring values, or one that is encoded."""

    arena: Arena
    start: int
    stop: int
    encoded: Part | None


class _Stretch(NamedTuple):
    """Neighbouring parts of one arena that one optimizer updates."""

    arena: Arena
    optimizer: Optimizer | None
    parts: tuple[Part, ...]
    first: int
    """Index of the first of them in the list of parts that this was compiled from."""
    offset: int
    """Where their bytes begin in a contribution to all parts of the list."""

    @property
    def nbytes(self) -> int:
        """Of a contribution."""
        if self.chain is not None:
            return self.parts[0].push_bytes
        return (self.parts[-1].stop - self.parts[0].start) * self.arena.weight.itemsize

    @property
    def chain(self) -> Chain | None:
        """By which contributions to it, a single part, are encoded."""
        return self.parts[0].codecs.push

    def of_one_count(self) -> Iterable[_Stretch]:
        """This stretch; part by part where some have seen more updates than others."""
        count = self.parts[0].count
        if all(part.count == count for part in self.parts):
            return (self,)
        offset = self.offset
        pieces = []
        for index, part in enumerate(self.parts):
            pieces.append(_Stretch(self.arena, self.optimizer, (part,), self.first + index, offset))
            offset += pieces[-1].nbytes
        return pieces


@dataclass(slots=True)
class _Run:
    """Neighbouring parts whose contributions are neighbours too: worked on as one array."""

    arena: Arena
    optimizer: Optimizer | None
    start: int
    stop: int
    count: int
    pieces: list[Piece]
    members: list[tuple[int, range]]
    """(index of a job, some of its parts): whom an error concerns."""
    out: Flat | None
    """Bytes to which the new values are copied."""
    chain: Chain | None = None
    """By which the contributions are encoded."""

    def extend(self, stretch: _Stretch, count: int, pieces: Sequence[Piece]) -> bool:
        """Add parts if they continue this run."""
        if (
            stretch.arena is not self.arena
            or stretch.optimizer is not self.optimizer
            or stretch.parts[0].start != self.stop
            or count != self.count
            or len(pieces) != len(self.pieces)
            or self.out is not None
            or self.chain is not None
            or stretch.chain is not None
            or (stretch.optimizer is not None and stretch.optimizer.scope == "key")
        ):
            return False
        for mine, theirs in zip(self.pieces, pieces, strict=True):
            if theirs.frame is not mine.frame or theirs.start != mine.stop:
                return False
        self.stop = stretch.parts[-1].stop
        self.pieces = [
            Piece(mine.frame, mine.start, theirs.stop)
            for mine, theirs in zip(self.pieces, pieces, strict=True)
        ]
        return True

    def apply(self) -> None:
        """Add the contributions up and update."""
        arena, optimizer = self.arena, self.optimizer
        arena.changes += 1
        if optimizer is None and arena.store.ranks is None:
            raise OptimizerNotSet("dist_async needs an optimizer: call set_optimizer before push")
        if optimizer is not None:
            optimizer.check_dtype(arena.weight.dtype)
        weight = arena.weight[self.start : self.stop]
        state = [array[self.start : self.stop] for array in arena.state(None)]
        if self.chain is not None:
            total = self._decoded(self.chain, weight.dtype)
            apply_round(weight, [total], optimizer, state, self.count + 1, arena.workspace)
            return
        itemsize = weight.itemsize
        # Where a worker's values come in several frames, up to the end of each.
        begin = 0
        for end in [*cuts_of(self.pieces), weight.nbytes]:
            some = slice(begin // itemsize, end // itemsize)
            contributions = [
                _flat(piece_of(piece, begin, end)).view(weight.dtype) for piece in self.pieces
            ]
            mine = [array[some] for array in state]
            apply_round(
                weight[some],
                contributions,
                optimizer,
                mine,
                self.count + 1,
                arena.workspace,
                out=None if self.out is None else self.out[begin:end].view(weight.dtype),
            )
            begin = end

    def _decoded(self, chain: Chain, dtype: np.dtype[Any]) -> Flat:
        """The sum of encoded contributions, in rank order, in the dtype of sums.

        Valid until the arena's next. Raises ``ProtocolError`` before anything has changed.
        """
        length = self.stop - self.start
        total = self.arena.workspace.block(_SUM_SLOT, accumulation_dtype(dtype), length)
        for index, piece in enumerate(self.pieces):
            chain.decode_from(_flat(piece), total, add=index > 0, cores=_ALONE)
        return total


def _flat(piece: Piece) -> Flat:
    return np.frombuffer(piece.frame, np.uint8)[piece.start : piece.stop]


class PartTable:
    """The parts of a server, and what was found out once about lists of them.

    The I/O thread adds and removes parts, pool threads apply rounds to them.
    """

    def __init__(self) -> None:
        self._parts: dict[int, Part] = {}
        #: Parts that are updated together -> by which optimizer, and as what.
        self._compiled: dict[Ints, tuple[Optimizer | None, list[_Stretch]]] = {}
        #: Parts that are read together -> what each frame has.
        self._frames: dict[Ints, list[Frame]] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, number: int) -> bool:
        return number in self._parts

    def __iter__(self) -> Iterator[Part]:
        return iter(list(self._parts.values()))

    def get(self, number: int) -> Part | None:
        """A part, if it is there."""
        return self._parts.get(number)

    def add(self, part: Part) -> None:
        """A part is there from now on. Numbers are never used again."""
        self._parts[part.entry.part] = part

    def remove(self, number: int) -> Part | None:
        """A part is gone; returns it, if it was there."""
        # What a pool thread has just compiled may stay, and is never asked for again.
        self.forget_lists()
        return self._parts.pop(number, None)

    def forget_lists(self) -> None:
        """Something has changed that lists of parts were compiled with."""
        self._compiled.clear()
        self._frames.clear()

    def frames(self, numbers: Ints) -> list[Frame]:
        """Where these parts' values lie, neighbours as one. On the I/O thread."""
        found = self._frames.get(numbers)
        if found is None:
            found = []
            for part in map(self._parts.__getitem__, numbers):
                if part.codecs.pull is not None:
                    found.append(Frame(part.arena, part.start, part.stop, part))
                elif found and _continues(part, found[-1]):
                    found[-1] = found[-1]._replace(stop=part.stop)
                else:
                    found.append(Frame(part.arena, part.start, part.stop, None))
            if len(self._frames) >= _MAX_COMPILED:
                self._frames.clear()
            self._frames[numbers] = found
        return found

    def apply(self, jobs: Sequence[Job], outs: Sequence[Flat | None]) -> list[Outcome]:
        """Apply complete rounds, in order; one outcome for each. On the lane's pool thread.

        Where a job has an array of ``outs``, that gets the bytes of its parts' new values.
        """
        outcomes: list[Outcome] = [None] * len(jobs)

        def failed(index: int, parts: range, error: Exception) -> None:
            errors = list(outcomes[index] or [None] * len(jobs[index].parts))
            errors[parts.start : parts.stop] = [error] * len(parts)
            outcomes[index] = errors

        for run in self._runs(jobs, outs, failed):
            try:
                run.apply()
            except Exception as error:
                for index, parts in run.members:
                    failed(index, parts, error)
        return outcomes

    def _runs(
        self,
        jobs: Sequence[Job],
        outs: Sequence[Flat | None],
        failed: Callable[[int, range, Exception], None],
    ) -> list[_Run]:
        """The jobs, neighbours joined; their parts count as updated from here on."""
        runs: list[_Run] = []
        # Read once: the I/O thread may set another optimizer while this runs.
        chosen: dict[StoreState, Optimizer | None] = {}
        for index, job in enumerate(jobs):
            for whole in self._stretches(index, job, chosen, failed):
                arena = whole.arena
                try:
                    arena.state(chosen[arena.store])
                except Exception as error:
                    failed(index, range(whole.first, whole.first + len(whole.parts)), error)
                    continue
                for stretch in whole.of_one_count():
                    _add_run(runs, index, stretch, job.batch.payloads, outs[index])
        return runs

    def _stretches(
        self,
        job_index: int,
        job: Job,
        chosen: dict[StoreState, Optimizer | None],
        failed: Callable[[int, range, Exception], None],
    ) -> list[_Stretch]:
        """The parts of a job, neighbours as one; ``chosen`` is filled for their stores."""
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
                optimizer = None if base is None else base.for_key(part.entry.key)
                last = stretches[-1] if stretches else None
                if last is not None and _follows(part, optimizer, last, index):
                    stretches[-1] = last._replace(parts=(*last.parts, part))
                else:
                    stretches.append(_Stretch(part.arena, optimizer, (part,), index, offset))
            offset += size
        stores = {stretch.arena.store for stretch in stretches}
        if len(stores) == 1 and sum(len(each.parts) for each in stretches) == len(job.parts):
            if len(self._compiled) >= _MAX_COMPILED:
                self._compiled.clear()
            self._compiled[job.parts] = (chosen[stores.pop()], stretches)
        return stretches


def _continues(part: Part, frame: Frame) -> bool:
    """Whether a part's value lies behind what a frame has."""
    return frame.encoded is None and frame.arena is part.arena and frame.stop == part.start


def _follows(part: Part, optimizer: Optimizer | None, last: _Stretch, index: int) -> bool:
    """Whether a part continues a stretch."""
    return (
        part.arena is last.arena
        and part.codecs.push is last.chain is None
        and optimizer is last.optimizer
        and part.start == last.parts[-1].stop
        and index == last.first + len(last.parts)
        and (optimizer is None or optimizer.scope != "key")
    )


def _add_run(
    runs: list[_Run], index: int, stretch: _Stretch, payloads: Sequence[Piece], out: Flat | None
) -> None:
    """One more stretch of a job to be updated."""
    start, nbytes = stretch.offset, stretch.nbytes
    pieces = [piece_of(piece, start, start + nbytes) for piece in payloads]
    count = stretch.parts[0].count
    for part in stretch.parts:
        part.count = count + 1
    member = (index, range(stretch.first, stretch.first + len(stretch.parts)))
    if out is None and runs and runs[-1].extend(stretch, count, pieces):
        runs[-1].members.append(member)
        return
    first, last = stretch.parts[0], stretch.parts[-1]
    mine = None if out is None else out[start : start + nbytes]
    runs.append(
        _Run(
            stretch.arena,
            stretch.optimizer,
            first.start,
            last.stop,
            count,
            pieces,
            [member],
            mine,
            stretch.chain,
        )
    )
