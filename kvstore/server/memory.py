"""The memory of a server: the values of parts and their optimizer states.

Small parts that were created together are stored together in one ``Arena``, so that neighbours
whose rounds complete at the same time are updated as one array (``part_table.py``). All work on an
arena's memory is done on the pool thread of its lane, so nothing here has a lock. Pure: no
sockets, no clock. Read next: ``part_table.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from kvstore.arrays.cpu.sums import Flat, Workspace
from kvstore.arrays.cpu.threads import Cores
from kvstore.arrays.keys import Key
from kvstore.compression import Chain, Compression, Rule
from kvstore.compression.config import UNCHANGED
from kvstore.errors import ValueMismatchError
from kvstore.optimizer import states
from kvstore.optimizer.base import Optimizer
from kvstore.protocol.placement import may_be_relayed
from kvstore.protocol.requests import PartEntry, RowPartEntry
from pslite.errors import ProtocolError, UsageError

_ALONE = Cores(1)


@dataclass(eq=False, slots=True)
class StoreState:
    """The state that the parts of one store share."""

    ranks: tuple[int, ...] | None
    """Worker ranks that every round needs; None: each push is applied by itself."""
    keeps_previous: bool = False
    """Whether to keep the values before each round (only if every round needs all ranks)."""
    optimizer: Optimizer | None = None
    cut_keys: dict[str, dict[Key, int]] = field(default_factory=lambda: {"row": {}, "key": {}})
    """For each scope: the keys whose parts are too small for optimizers of that scope, and how many
    such parts are here."""
    compression: Compression = field(default_factory=Compression)
    contributors: tuple[int, ...] | None = None
    """In place of ``ranks``, for parts that are relayed on other machines; None: no relay."""

    def ranks_for(self, dtype: np.dtype[Any]) -> tuple[int, ...] | None:
        """Return who contributes to the rounds of a dense part of this type."""
        relayed = self.contributors is not None and may_be_relayed(dtype)
        return self.contributors if relayed else self.ranks

    def has_part(self, entry: PartEntry | RowPartEntry) -> None:
        """Record that a part was added."""
        for scope, cut_keys in self.cut_keys.items():
            if not entry.serves(scope):
                cut_keys[entry.key] = cut_keys.get(entry.key, 0) + 1

    def lost_part(self, entry: PartEntry | RowPartEntry) -> None:
        """Record that a part was removed."""
        for scope, cut_keys in self.cut_keys.items():
            if not entry.serves(scope):
                cut_keys[entry.key] -= 1
                if not cut_keys[entry.key]:
                    del cut_keys[entry.key]

    def check_cuts(self, entries: Sequence[PartEntry | RowPartEntry]) -> None:
        """Raise ``UsageError`` if the optimizer cannot update one of these parts."""
        optimizer = self.optimizer
        if optimizer is None:
            return
        cut_keys = [entry.key for entry in entries if not entry.serves(optimizer.scope)]
        if cut_keys:
            raise UsageError(
                f"the optimizer {optimizer.name} needs whole {optimizer.scope}s, but "
                f"{cut_keys[0]!r} is split into parts; on worker 0, let set_optimizer return "
                "before you call init"
            )


class Arena:
    """The memory of neighbouring parts of one dtype, with optimizer states."""

    def __init__(
        self,
        store: StoreState,
        lane: int,
        entries: Sequence[PartEntry],
        values: Sequence[Flat],
        memory: Flat,
    ) -> None:
        """``values`` are the parts' first values as bytes; they are copied.

        ``memory`` is that of the weights, which workers may read in place. Their views rely on
        it that a part's value never moves.
        """
        dtype = entries[0].dtype
        nbytes = dtype.itemsize * sum(entry.num_elements for entry in entries)
        self.store = store
        self.lane = lane
        self.weight: Flat = memory[:nbytes].view(dtype)
        self.workspace = Workspace()
        self.parts: list[Part] = []
        #: How often its memory was written; a copy with the same number is up to date.
        self.changes = 0
        #: The optimizer that has updated it, and its states.
        self.optimizer: Optimizer | None = None
        self.states: tuple[Flat, ...] = ()
        raw = self.weight.view(np.uint8)
        start = 0
        for entry, value in zip(entries, values, strict=True):
            stop = start + entry.num_elements
            raw[start * dtype.itemsize : stop * dtype.itemsize] = value
            self.parts.append(Part(self, entry, start, stop))
            start = stop
        #: The values before the last round of each part, if the store keeps them.
        self.previous: Flat | None = None
        if store.keeps_previous and store.ranks is not None:
            self.previous = self.weight.copy()

    def state(self, optimizer: Optimizer | None) -> tuple[Flat, ...]:
        """Return the arrays of the state, first converted for a new ``optimizer``.

        With None the state stays unchanged. Runs on the lane's thread.
        """
        if optimizer is not self.optimizer and optimizer is not None:
            self.states, kept = states.take_over(
                optimizer, self.optimizer, self.weight, self.states, 1
            )
            if not kept:
                for part in self.parts:
                    part.count = 0
            self.optimizer = optimizer
        return self.states

    @property
    def state_bytes(self) -> int:
        """The size of the optimizer's state so far."""
        return sum(array.nbytes for array in self.states)


@dataclass(eq=False, slots=True)
class Part:
    """The location of one part: elements [start, stop) of its arena."""

    ending: ClassVar[str] = "deleted"
    """The word for the removal of a key, for errors."""
    arena: Arena
    entry: PartEntry
    start: int
    stop: int
    count: int = 0
    """The number of updates by the current optimizer."""
    rule: Rule = UNCHANGED
    """How its values are encoded when they are sent."""
    _encoded: tuple[int, Flat] | None = None
    """The arena's number of changes when the value was last encoded, and the encoded value."""

    def set_rule(self, rule: Rule) -> None:
        """Set the encoding rule of its values."""
        self.rule = rule
        self._encoded = None  # it was encoded by the earlier codec

    @property
    def push_bytes(self) -> int:
        """The size of a contribution."""
        return self._bytes(self.rule.chain)

    @property
    def pull_bytes(self) -> int:
        """The size of its value as it is sent."""
        return self._bytes(self.rule.pull)

    def _bytes(self, chain: Chain | None) -> int:
        num_elements: int = self.stop - self.start
        dtype = self.arena.weight.dtype
        if chain is None:
            return num_elements * int(dtype.itemsize)
        return chain.encoded_bytes(num_elements, dtype)

    def check_push(self, data: Flat) -> None:
        """Raise ``ProtocolError`` for bytes that are not a valid contribution.

        This way only the sender gets the error; if the round failed later, all workers would get
        it. Any thread may call this.
        """
        chain = self.rule.chain
        if chain is None:
            return
        try:
            chain.check_encoded(data, self.stop - self.start, self.arena.weight.dtype)
        except ProtocolError as error:
            raise ProtocolError(f"key {self.entry.key!r}: {error}") from error

    def encoded(self, buffer: Callable[[int], Flat]) -> Flat:
        """Return its value as it is sent, encoded once for all workers."""
        chain = self.rule.pull
        assert chain is not None
        if self._encoded is None or self._encoded[0] != self.arena.changes:
            memory = buffer(self.pull_bytes)
            chain.encode(self.weight, memory, cores=_ALONE)
            self._encoded = self.arena.changes, memory
        return self._encoded[1]

    @property
    def title(self) -> str:
        """The key, as text for people."""
        return f"key {self.entry.key!r}"

    @property
    def store(self) -> StoreState:
        """The state that all parts of its store share."""
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
        """Return its share of the optimizer's state, shared. On the lane's thread."""
        return [array[self.start : self.stop] for array in self.arena.state(optimizer)]

    @property
    def num_states(self) -> int:
        """How many arrays its store's optimizer keeps for it. Any thread may ask."""
        optimizer = self.arena.store.optimizer
        return 0 if optimizer is None else len(states.state_names(optimizer, self.entry.dtype))

    def write(self, count: int, frames: Sequence[Any], *, has_values: bool) -> None:
        """Set the count, the states, and the values if there are any.

        A master weight that does not round to its value is set to the value. If the frame of the
        master weights is empty, all of them are.
        Raises ``ValueMismatchError`` for other sizes; then nothing has changed. Runs on the lane's
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
                f"the values and states for key {self.entry.key!r} must be {len(arrays)} arrays, "
                f"got {len(frames)}"
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
