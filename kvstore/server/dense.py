"""The dense parts of a server, and the requests about them.

``rows.py`` does the same for keys and tables with rows. Requests arrive on the I/O thread, rounds
on the pool thread of their lane. All work on an arena's memory is done on that pool thread, so that
no value is read or written while it is updated. Read next: ``part_table.py`` for the rounds,
``memory.py`` for the memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from kvstore.arrays.cpu.sums import Flat
from kvstore.compression import Compression, Rule
from kvstore.compression.config import UNCHANGED
from kvstore.protocol.placement import most_group_bytes
from kvstore.protocol.requests import (
    PartEntry,
    StoreCall,
    bytes_of,
    pack,
    pack_parts,
    unpack,
    unpack_parts,
)
from kvstore.server.lanes import LaneNumbers, Lanes
from kvstore.server.malloc import LateReturn
from kvstore.server.memory import Arena, Part, StoreState
from kvstore.server.part_table import PartTable
from kvstore.server.relay import Relay
from pslite import Incoming, Postoffice
from pslite.errors import UsageError, unexpected
from pslite.ids import Role, node_id
from pslite.plane import Piece, ServerPlane, StateRecord, cut

_ALIGNMENT = 64
"""A cache line: where arenas begin, except in the middle of a key."""


class DenseStores:
    """The dense parts of one server."""

    def __init__(
        self,
        node: Postoffice,
        plane: ServerPlane,
        store_of: Callable[[int, bool], StoreState],
        numbers: LaneNumbers,
        lanes: Lanes,
    ) -> None:
        self.parts = PartTable(node.buffer)
        self._node = node
        self._allocate = node.buffer
        self._plane = plane
        self._store_of = store_of
        self.relay = Relay(node, plane, self.parts)
        self._numbers = numbers
        self._relay_lanes = LaneNumbers(most_group_bytes(node.config))
        self._lanes = lanes
        self._late_return = LateReturn(node.clock, node.io_queue.look_after_each_step)
        self.calls: dict[int, Callable[[Incoming], None]] = {
            StoreCall.INIT: self._init,
            StoreCall.RELAY_INIT: self._init_relayed,
            StoreCall.RELAY_ENDS: self.relay.ended,
            StoreCall.READ: self._read_parts,
            StoreCall.WRITE: self._write_parts,
            StoreCall.COPY_PARTS: self._take_counts,
            StoreCall.COPY_STATE: self._take_state,
        }

    # -- requests ----------------------------------------------------------------------

    def _init(self, incoming: Incoming) -> None:
        """Create parts with the values in the frames, one after the other."""
        number, synchronous, table, rules, cuts = unpack(incoming.body, int, bool, list, list, list)
        entries = unpack_parts(table)
        if len(rules) != len(entries):
            raise unexpected(f"rules for {len(entries)} parts", rules)
        store = self._store_of(number, synchronous)
        chosen = [store.compression.rule(number) for number in rules]
        self._create(incoming, store, entries, cuts, chosen, self._numbers.shared)

    def _init_relayed(self, incoming: Incoming) -> None:
        """Create parts whose owner is another server; see ``relay.py``."""
        number, owner, table, cuts = unpack(incoming.body, int, int, list, list)
        entries = unpack_parts(table)
        if owner not in self._node.membership.relays.owners(self.relay.own_rank):
            raise UsageError(
                f"this server does not relay to server {owner}; relays follow from the roster "
                "(KVSTORE_HIERARCHICAL), and all nodes must run the same version"
            )
        store, rules = self.relay.store(number), [UNCHANGED] * len(entries)
        lane = self._relay_lanes.shared
        new = [entry.part for entry in entries if entry.part not in self.parts]
        for part in new:
            self.relay.add(part, node_id(Role.SERVER, owner))
        try:
            self._create(incoming, store, entries, cuts, rules, lambda nbytes: -1 - lane(nbytes))
        except Exception:
            for part in new:
                self.relay.forget(part)
            raise

    def _create(
        self,
        incoming: Incoming,
        store: StoreState,
        entries: Sequence[PartEntry],
        cuts: Sequence[Any],
        chosen: Sequence[Rule],
        lane_for: Callable[[int], int],
    ) -> None:
        if not all(type(cut) is int and cut > 0 for cut in cuts) or sum(cuts) != len(entries):
            raise unexpected(f"numbers of parts of which the sum is {len(entries)}", cuts)
        sizes = [entry.num_elements * entry.dtype.itemsize for entry in entries]
        pieces = cut(sizes, incoming.frames)
        store.check_cuts(entries)
        # If a rank left half-way, the rank that replaces it finds some parts here; they stay.
        new = [index for index, entry in enumerate(entries) if entry.part not in self.parts]
        groups = list(_arenas(entries, new, set(itertools.accumulate(cuts))))
        memories = self._in_a_row([[entries[index] for index in group] for group in groups])
        for group, memory in zip(groups, memories, strict=True):
            values = [bytes_of(pieces[index]) for index in group]
            mine = [entries[index] for index in group]
            arena = Arena(store, lane_for(len(memory)), mine, values, memory)
            for index, part in zip(group, arena.parts, strict=True):
                part.set_rule(chosen[index])
                self.parts.add(part)
                self._plane.open_part(
                    part.entry.part,
                    part.pull_bytes,
                    store.ranks_for(part.entry.dtype),
                    arena.lane,
                    part.push_bytes,
                    is_checked=part.rule.chain is not None,
                )
                store.has_part(part.entry)
        incoming.respond()
        # The memory of these messages is free now: later values of processes on this machine
        # come through shared memory.
        self._late_return.ask()

    def _in_a_row(self, groups: Sequence[Sequence[PartEntry]]) -> list[Flat]:
        """Return memory for groups of parts, in which each key lies in one piece."""
        if not groups:
            return []
        starts, stop = [], 0
        last = groups[0][0]
        for group in groups:
            if (group[0].key, group[0].dtype) != (last.key, last.dtype):
                stop = -(-stop // _ALIGNMENT) * _ALIGNMENT
            starts.append(stop)
            stop += sum(entry.num_elements for entry in group) * group[0].dtype.itemsize
            last = group[-1]
        whole = self._allocate(stop)
        return [whole[start:end] for start, end in zip(starts, [*starts[1:], stop], strict=True)]

    def set_compression(self, incoming: Incoming) -> None:
        """Set the compression; all workers have called it, and nothing is in flight."""
        number, synchronous, only_check, plain, rows = unpack(
            incoming.body, int, bool, bool, list, list
        )
        store = self._store_of(number, synchronous)
        compression = Compression.from_plain(plain)
        chosen = {}
        for row in rows:
            if type(row) is not list or len(row) != 2 or type(row[0]) is not int:
                raise unexpected("a part and the number of its rule", row)
            chosen[row[0]] = compression.rule(row[1])
        mine = [part for part in self.parts if part.store is store and part.entry.part in chosen]
        for part in mine:
            if not self._plane.is_quiet(part.entry.part):
                raise UsageError(
                    f"key {part.entry.key!r} was pushed or pulled during "
                    "set_gradient_compression; wait until that call returns"
                )
        if not only_check:
            store.compression = compression
            store.contributors = None  # from now on, each worker sends its own encoded values
            for part in mine:
                part.set_rule(chosen[part.entry.part])
                self._plane.resize_part(
                    part.entry.part,
                    part.pull_bytes,
                    part.push_bytes,
                    is_checked=part.rule.chain is not None,
                    ranks=store.ranks,
                )
            self.parts.forget_lists()
        incoming.respond()

    # -- values and states, for files --------------------------------------------------

    def _read_parts(self, incoming: Incoming) -> None:
        """Answer with copies of the parts' values and states.

        Each part has one frame for its values, then one for each state.
        """
        (numbers,) = unpack(incoming.body, list)
        parts = self._found(numbers)
        copies: dict[int, tuple[int, list[bytes]]] = {}

        def copy(part: Part) -> None:
            arrays = [part.weight, *part.state(part.arena.store.optimizer)]
            copies[part.entry.part] = (part.count, [array.tobytes() for array in arrays])

        def answer() -> None:
            found = [copies[part.entry.part] for part in parts]
            frames = [frame for _, row in found for frame in row]
            incoming.respond(pack([count for count, _ in found]), frames)

        self._lanes.run(incoming, parts, copy, answer)

    def _write_parts(self, incoming: Incoming) -> None:
        """Set states and counts (and values, if sent) from the frames of ``_read_parts``."""
        numbers, counts, has_values = unpack(incoming.body, list, list, bool)
        parts = self._found(numbers)
        if len(counts) != len(parts) or not all(type(n) is int and n >= 0 for n in counts):
            raise unexpected(f"update counts of {len(parts)} parts", counts)
        rest = iter(incoming.frames)
        rows = [list(itertools.islice(rest, has_values + part.num_states)) for part in parts]
        if rows:
            rows[-1] += rest
        found = {
            part.entry.part: (count, row)
            for part, count, row in zip(parts, counts, rows, strict=True)
        }

        def write(part: Part) -> None:
            part.write(*found[part.entry.part], has_values=has_values)

        self._lanes.run(incoming, parts, write, incoming.respond)

    # -- a new standby -----------------------------------------------------------------

    def copies(self, number: int, store: StoreState) -> Iterator[StateRecord]:
        """Yield requests that give a new standby the parts of a store; see ``take_copy``."""
        arenas: dict[Arena, list[Part]] = {}
        for part in self.parts:
            if part.store is store:
                arenas.setdefault(part.arena, []).append(part)
        for arena, parts in arenas.items():
            numbers = [part.entry.part for part in parts]
            states = arena.state(store.optimizer)  # they may begin the counts anew
            rules = [store.compression.number_of(part.rule) for part in parts]
            entries = pack_parts([part.entry for part in parts])
            body = pack(number, store.ranks is not None, entries, rules, [len(parts)])
            yield StateRecord(0, StoreCall.INIT, body, [self._copied(arena.weight, parts)])
            # As long as nothing has changed, the values before are those that INIT brings.
            previous = arena.previous if arena.changes else None
            arrays = [*enumerate(states), (-1, previous)]
            for index, array in arrays:
                if array is not None:
                    copied = [self._copied(array, parts)]
                    yield StateRecord(0, StoreCall.COPY_STATE, pack(numbers, index), copied)
            rounds = [list(map(list, self._plane.copies.counts(part))) for part in numbers]
            body = pack(numbers, [part.count for part in parts], rounds)
            yield StateRecord(0, StoreCall.COPY_PARTS, body, ())

    def _copied(self, array: Flat, parts: Sequence[Part]) -> Any:
        """Return copies of some parts' shares of an array, one after the other."""
        size = array.itemsize
        copy = self._allocate(size * sum(part.stop - part.start for part in parts))
        start = 0
        for part in parts:
            stop = start + size * (part.stop - part.start)
            copy[start:stop] = array[part.start : part.stop].view(np.uint8)
            start = stop
        return copy.data

    def _take_counts(self, incoming: Incoming) -> None:
        """Set the numbers of updates and of rounds of new parts."""
        numbers, counts, rounds = unpack(incoming.body, list, list, list)
        for part, count, applied in zip(self._found(numbers), counts, rounds, strict=True):
            part.arena.state(part.store.optimizer)  # it may begin the counts anew
            part.count = count
            self._plane.copies.resume(part.entry.part, [(rank, number) for rank, number in applied])
        incoming.respond()

    def _take_state(self, incoming: Incoming) -> None:
        """Set one array of new parts: a state, or the values before the last round (-1)."""
        numbers, index = unpack(incoming.body, list, int)
        parts = self._found(numbers)
        arena = parts[0].arena
        array = arena.previous if index < 0 else arena.state(arena.store.optimizer)[index]
        if array is None or array.nbytes != len(incoming.frames[0]):
            raise unexpected("an array of the size of the parts", len(incoming.frames[0]))
        arena.changes += 1
        array.view(np.uint8)[:] = bytes_of(Piece(incoming.frames[0], 0, array.nbytes))
        incoming.respond()

    def _found(self, numbers: Sequence[Any]) -> list[Part]:
        parts = []
        for number in numbers:
            part = self.parts.get(number) if type(number) is int else None
            if part is None:
                raise UsageError(f"this server does not have part {number!r}")
            parts.append(part)
        return parts


def _arenas(
    entries: Sequence[PartEntry], indices: Sequence[int], cuts: Collection[int]
) -> Iterator[list[int]]:
    """Yield the indices in groups of one dtype, which also end at the cuts."""
    group: list[int] = []
    for index in indices:
        if group and (entries[group[-1]].dtype != entries[index].dtype or index in cuts):
            yield group
            group = []
        group.append(index)
    if group:
        yield group
