"""A server's stores: memory, sums and updates. ``python -m kvstore.server`` runs a node.

``ServerStores`` is the app of the data plane (``pslite/plane``): the plane says which
contributions make a round, this file adds them up and updates. Small parts that were created
together lie together in one ``_Arena``, so that neighbours which are due at the same time are
worked on, and sent, as one run. All work on an arena happens on the pool thread of its lane,
so nothing here needs a lock. Read next: ``aggregate.py`` for the arithmetic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore import optimizer as optimizers
from kvstore.aggregate import Flat, Workspace, apply_round
from kvstore.directory import Directory
from kvstore.errors import OptimizerNotSet
from kvstore.optimizer.base import Optimizer
from kvstore.protocol import (
    DIRECTORY_APP,
    STORE_APP,
    PartEntry,
    StoreCall,
    pack,
    unpack,
    unpack_parts,
)
from pslite import Config, Incoming, Postoffice, Role, start
from pslite.errors import ProtocolError, PSError
from pslite.plane import Job, Piece, ServerPlane, cut


class _Store:
    """What the parts of one store share."""

    def __init__(self, ranks: tuple[int, ...] | None) -> None:
        self.ranks = ranks
        """Worker ranks that every round needs; None: each push is applied by itself."""
        self.optimizer: Optimizer | None = None


class _Arena:
    """Memory of neighbouring parts of one dtype, and what the optimizer keeps for them."""

    def __init__(self, store: _Store, weight: Flat, lane: int) -> None:
        self.store = store
        self.weight = weight
        self.lane = lane
        self.workspace = Workspace()
        self.parts: list[_Part] = []
        self._optimizer: Optimizer | None = None
        self._state: tuple[Flat, ...] = ()

    def state(self, optimizer: Optimizer | None) -> tuple[Flat, ...]:
        """The state for ``optimizer``, taken over from the one before. On the lane's thread."""
        if optimizer is not self._optimizer and optimizer is not None:
            self._state, kept = optimizer.take_over(self._optimizer, self.weight, self._state, 1)
            if not kept:
                for part in self.parts:
                    part.count = 0
            self._optimizer = optimizer
        return self._state


@dataclass(slots=True)
class _Part:
    """Where one part lies: elements [start, stop) of its arena."""

    arena: _Arena
    start: int
    stop: int
    count: int = 0
    """Updates by the present optimizer."""


@dataclass(slots=True)
class _Run:
    """Neighbouring parts whose contributions are neighbours too: worked on as one array."""

    arena: _Arena
    optimizer: Optimizer | None
    start: int
    stop: int
    count: int
    pieces: list[Piece]
    jobs: int = 1

    def extend(self, part: _Part, optimizer: Optimizer | None, pieces: Sequence[Piece]) -> bool:
        """Add the next part if it continues this run."""
        if (
            part.arena is not self.arena
            or optimizer is not self.optimizer
            or part.start != self.stop
            or part.count != self.count
            or len(pieces) != len(self.pieces)
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


class ServerStores:
    """The stores of one server. Implements ``pslite.plane.ServerApp``."""

    def __init__(self, node: Postoffice) -> None:
        config = node.config
        self._node = node
        self._ranks = tuple(range(config.num_workers))
        self._stores: dict[int, _Store] = {}
        self._parts: dict[int, _Part] = {}
        self._next_lane = 0
        self._plane = ServerPlane(
            self,
            window=config.round_window,
            message_bytes=config.chunk_bytes,
            stall_report_s=config.stall_report_s,
        )
        node.traffic.serve(self._plane)

    # -- rounds ------------------------------------------------------------------------

    def apply(self, jobs: Sequence[Job]) -> list[BaseException | None]:
        """Apply complete rounds. On the pool thread of the parts' lane; never raises."""
        errors: list[BaseException | None] = []
        # Read once: the I/O thread may set another optimizer while this runs.
        chosen = {part.arena.store: part.arena.store.optimizer for part in self._parts_of(jobs)}
        try:
            for part in self._parts_of(jobs):
                part.arena.state(chosen[part.arena.store])
        except Exception as error:
            return [error] * len(jobs)
        for run in self._runs(jobs, chosen):
            try:
                self._apply_run(run)
            except Exception as error:
                errors += [error] * run.jobs
            else:
                errors += [None] * run.jobs
        return errors

    def _parts_of(self, jobs: Sequence[Job]) -> list[_Part]:
        return [self._parts[job.part] for job in jobs]

    def _runs(self, jobs: Sequence[Job], chosen: dict[_Store, Optimizer | None]) -> Iterator[_Run]:
        """The jobs, neighbours joined. Counts rise as the runs are handed out."""
        run: _Run | None = None
        for job in jobs:
            part = self._parts[job.part]
            arena = part.arena
            optimizer = chosen[arena.store]
            pieces = job.batch.payloads
            if run is None or not run.extend(part, optimizer, pieces):
                if run is not None:
                    yield run
                run = _Run(arena, optimizer, part.start, part.stop, part.count, list(pieces))
            part.count += 1
        if run is not None:
            yield run

    def _apply_run(self, run: _Run) -> None:
        arena, optimizer = run.arena, run.optimizer
        if optimizer is None and arena.store.ranks is None:
            raise OptimizerNotSet("dist_async needs an optimizer: call set_optimizer before push")
        if optimizer is not None:
            optimizer.check_dtype(arena.weight.dtype)
        weight = arena.weight[run.start : run.stop]
        contributions = [
            np.frombuffer(piece.frame, np.uint8)[piece.start : piece.stop].view(weight.dtype)
            for piece in run.pieces
        ]
        state = [array[run.start : run.stop] for array in arena.state(optimizer)]
        apply_round(weight, contributions, optimizer, state, run.count + 1, arena.workspace)

    def read(self, parts: Sequence[int]) -> list[Any]:
        """The parts' values in order, neighbours as one frame."""
        frames = []
        index = 0
        while index < len(parts):
            first = last = self._parts[parts[index]]
            index += 1
            while index < len(parts):
                following = self._parts[parts[index]]
                if following.arena is not first.arena or following.start != last.stop:
                    break
                last = following
                index += 1
            values = first.arena.weight[first.start : last.stop]
            # A synchronous value stays as it is until everybody who wants it has it; an
            # asynchronous one may change as soon as this returns.
            if first.arena.store.ranks is None:
                values = values.copy()
            frames.append(values.view(np.uint8).data)
        return frames

    # -- requests ----------------------------------------------------------------------

    def handle(self, incoming: Incoming) -> None:
        """A request of ``StoreCall``. On the I/O thread."""
        if incoming.head == StoreCall.INIT:
            self._init(incoming)
        elif incoming.head == StoreCall.SET_OPTIMIZER:
            self._set_optimizer(incoming)
        else:
            raise ProtocolError(f"a server knows no call {incoming.head}")

    def _init(self, incoming: Incoming) -> None:
        """Create parts with the values in the frames, one after the other."""
        number, synchronous, table = unpack(incoming.body, int, bool, list)
        entries = unpack_parts(table)
        sizes = [entry.num_elements * entry.dtype.itemsize for entry in entries]
        pieces = cut(sizes, incoming.frames)
        ranks = self._ranks if synchronous else None
        store = self._stores.setdefault(number, _Store(ranks))
        # A rank that stands in for one that left half-way finds some parts there; they stay.
        new = [index for index, entry in enumerate(entries) if entry.part not in self._parts]
        for group in _same_dtype(entries, new):
            arena = self._new_arena(store, [entries[i] for i in group], [pieces[i] for i in group])
            for index, part in zip(group, arena.parts, strict=True):
                entry = entries[index]
                self._parts[entry.part] = part
                self._plane.open_part(entry.part, sizes[index], store.ranks, arena.lane)
        incoming.respond()

    def _new_arena(
        self, store: _Store, entries: Sequence[PartEntry], pieces: Sequence[Piece]
    ) -> _Arena:
        dtype = entries[0].dtype
        weight = np.empty(sum(entry.num_elements for entry in entries), dtype)
        arena = _Arena(store, weight, self._next_lane)
        self._next_lane += 1
        start = 0
        raw = weight.view(np.uint8)
        for entry, piece in zip(entries, pieces, strict=True):
            stop = start + entry.num_elements
            values = np.frombuffer(piece.frame, np.uint8)[piece.start : piece.stop]
            raw[start * dtype.itemsize : stop * dtype.itemsize] = values
            arena.parts.append(_Part(arena, start, stop))
            start = stop
        return arena

    def _set_optimizer(self, incoming: Incoming) -> None:
        number, synchronous, spec = unpack(incoming.body, int, bool, list)
        wanted = unpack_optimizer(spec)
        store = self._stores.setdefault(number, _Store(self._ranks if synchronous else None))
        if store.optimizer != wanted:
            store.optimizer = wanted
        incoming.respond()


def _same_dtype(entries: Sequence[PartEntry], indices: Sequence[int]) -> Iterator[list[int]]:
    """The indices, in groups of neighbours of one dtype."""
    group: list[int] = []
    for index in indices:
        if group and entries[group[-1]].dtype != entries[index].dtype:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def pack_optimizer(optimizer: Optimizer) -> list[Any]:
    """An optimizer as plain data: its registered name and its numbers."""
    return [optimizer.name, pack(sorted(optimizer.params().items()))]


def unpack_optimizer(spec: Any) -> Optimizer:
    """The optimizer that ``pack_optimizer`` wrote, from this process's registry."""
    if len(spec) != 2 or type(spec[0]) is not str or type(spec[1]) is not bytes:
        raise ProtocolError("an optimizer's description is malformed")
    (rows,) = unpack(spec[1], list)
    return optimizers.create(spec[0], **dict(rows))


# -- processes ----------------------------------------------------------------------------


def install(node: Postoffice) -> None:
    """Give a scheduler or server node what stores need of it. Before it is driven."""
    if node.role is Role.SERVER:
        node.customers.add(STORE_APP, ServerStores(node).handle)
    elif node.role is Role.SCHEDULER:
        live_ranks: Callable[[], Sequence[int]] = lambda: node.membership.live(Role.WORKER)  # noqa: E731
        directory = Directory(node.config.num_servers, node.config.chunk_bytes, live_ranks)
        node.customers.add(DIRECTORY_APP, directory.handle)
        node.on_departure.append(directory.departed)


def serve(config: Config) -> int:
    """Run a scheduler or a server until its job is over; returns the exit code."""
    # A pool thread that holds the interpreter keeps the I/O thread waiting this long.
    sys.setswitchinterval(0.001)
    node = None
    goodbye = True
    try:
        node = start(config, prepare=install, wait=False)
        node.finished.result()
    except KeyboardInterrupt:
        # Whoever still needs this node has lost it: that it left would blame the next to end.
        goodbye = False
        return 130
    except PSError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        if node is not None:
            node.close(goodbye=goodbye)
    return 0


def main() -> int:
    """``python -m kvstore.server``: a scheduler or a server, by DMLC_ROLE."""
    try:
        config, unknown = Config.from_env()
    except PSError as error:
        print(error, file=sys.stderr)
        return 2
    for sentence in unknown:
        print(f"warning: {sentence}", file=sys.stderr)
    if config.role == Role.WORKER.value:
        print("DMLC_ROLE must be server or scheduler for kvstore.server", file=sys.stderr)
        return 2
    return serve(config)


if __name__ == "__main__":
    sys.exit(main())
