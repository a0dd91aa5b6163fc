"""The memory of a server: the values of parts, and what is kept beside them.

Small parts that were created together lie together in one ``Arena``, so that neighbours which
are due at the same time are worked on as one array (``apply.py``). Everything about an
arena's memory happens on the pool thread of its lane, so nothing here has a lock. Pure: no
sockets, no clock. Read next: ``part_table.py``, which finds parts and applies rounds to them.
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
from kvstore.protocol.requests import PartEntry, RowPartEntry
from pslite.errors import ProtocolError, UsageError

_ALONE = Cores(1)


@dataclass(eq=False, slots=True)
class StoreState:
    """The state that the parts of one store share."""

    ranks: tuple[int, ...] | None
    """Worker ranks that every round needs; None: each push is applied by itself."""
    optimizer: Optimizer | None = None
    cut_keys: dict[str, dict[Key, int]] = field(default_factory=lambda: {"row": {}, "key": {}})
    """For optimizers of these scopes: keys that are cut in parts which they cannot work on, and
    how many of such parts are here."""
    compression: Compression = field(default_factory=Compression)

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
        """Raise ``UsageError`` where the optimizer cannot work on one of these parts."""
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
        """Return the state for ``optimizer``, converted from the old one, or None.

        None means unchanged.

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
    """The location of one part: elements [start, stop) of its arena."""

    ending: ClassVar[str] = "deleted"
    """What happens to a key that is forgotten."""
    arena: Arena
    entry: PartEntry
    start: int
    stop: int
    count: int = 0
    """Updates by the present optimizer."""
    rule: Rule = UNCHANGED
    """How its values travel."""
    _encoded: tuple[int, Flat] | None = None
    """How often the arena had been written, and the value as it travelled then."""

    def set_rule(self, rule: Rule) -> None:
        """Set the encoding rule for its values from now on."""
        self.rule = rule
        self._encoded = None  # by the codec of before

    @property
    def push_bytes(self) -> int:
        """The bytes of a contribution."""
        return self._bytes(self.rule.chain)

    @property
    def pull_bytes(self) -> int:
        """The bytes of its value as it is sent."""
        return self._bytes(self.rule.pull)

    def _bytes(self, chain: Chain | None) -> int:
        num_elements: int = self.stop - self.start
        dtype = self.arena.weight.dtype
        if chain is None:
            return num_elements * int(dtype.itemsize)
        return chain.encoded_bytes(num_elements, dtype)

    def check_push(self, data: Flat) -> None:
        """Raise ``ProtocolError`` for bytes that are not a contribution. On any thread.

        So only its sender hears of it; when its round is applied, that would fail for all.
        """
        chain = self.rule.chain
        if chain is None:
            return
        try:
            chain.check_encoded(data, self.stop - self.start, self.arena.weight.dtype)
        except ProtocolError as error:
            raise ProtocolError(f"key {self.entry.key!r}: {error}") from error

    def encoded(self, buffer: Callable[[int], Flat]) -> Flat:
        """Return its value as it is sent, encoded once for all who ask."""
        chain = self.rule.pull
        assert chain is not None
        if self._encoded is None or self._encoded[0] != self.arena.changes:
            memory = buffer(self.pull_bytes)
            chain.encode(self.weight, memory, cores=_ALONE)
            self._encoded = self.arena.changes, memory
        return self._encoded[1]

    @property
    def title(self) -> str:
        """The key, for people."""
        return f"key {self.entry.key!r}"

    @property
    def store(self) -> StoreState:
        """The state that it shares with the other parts of its store."""
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
        """How many arrays its store's optimizer keeps. On any thread."""
        optimizer = self.arena.store.optimizer
        return 0 if optimizer is None else len(states.state_names(optimizer, self.entry.dtype))

    def write(self, count: int, frames: Sequence[Any], *, has_values: bool) -> None:
        """Set the count, the states, and the values if there are any.

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
