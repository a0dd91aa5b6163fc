"""The route of a group's collective calls if its workers are on several machines.

The workers of each machine first combine their values in shared memory. One of them, the *leader*,
exchanges the machine's sum with the other leaders through the servers, and hands the result to its
neighbours. So a machine sends an array once, however many workers it has. Within a machine, values
are combined by rank, and the machines' results in the order of their lowest ranks. The bits may
differ from those of a sum in rank order, but are the same in each run (``docs/decisions/0038``).

Each machine has two rings (``memory/ring.py``). Values go up to the leader on one, and results come
down on the other, so that a call can go up before the last call's result has come down. The parts
of a large array follow each other: while one part is added up, the part before it is on the
network, and the part before that comes down. Every call in order takes its turn on both rings, even
if the servers alone carry it out, so that differing calls are detected. Any thread may call. Read
next: ``server_route.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np

from pslite.collective.arrays import Array, Bytes, flat, layout_of, receivers
from pslite.collective.machines import Machines, arrays_of, empty_row
from pslite.collective.pending_call import CallUnderWay
from pslite.collective.server_route import ServerRoute
from pslite.collective.shared_memory_algorithms import Description, Progress, Stream, Take
from pslite.collective.shared_memory_driver import SharedMemoryDriver
from pslite.collective.shared_memory_route import reducing
from pslite.collective.sums import BFLOAT16, DTYPES, divide
from pslite.collective.wire import pack_collective, pack_layouts, unpack_layouts
from pslite.future import Future, gather
from pslite.protocol.collective import ANY, CallKey, CollectiveCall, GroupKey, LeadersStep

T = TypeVar("T")
_FOREVER = 1 << 62
_CHANGED_BY_MACHINE = ("average", "premul_sum")
"""Operations that change each value before adding up."""


def _take_nothing(start: int, pieces: list[Bytes]) -> None:
    pass


def _ignore(nbytes: int) -> None:
    pass


class _Plan(NamedTuple):
    """What one rank does in a call whose sizes all ranks know."""

    step: CollectiveCall
    """The call among the leaders."""
    sent: list[Bytes]
    """The arrays that the leader sends once they are ready."""
    filled: list[Bytes]
    """The arrays that the answers to the leader fill."""
    begin: int = 0
    """The offset of ``filled`` in the results of all leaders together."""
    up: Callable[[Progress], Future[None]] | None = None
    """Sends the machine's values up to the leader; None: there are none."""
    down: Take = _take_nothing
    """Takes the result from the leader, on the other ranks."""
    finish: Callable[[], None] = lambda: None
    """Puts the leader's own part of the result into its place."""


class MachinesRoute:
    """Makes one rank's calls through its machine's rings and, on leaders, the servers.

    ``up`` and ``down`` are connected to the other ranks of this machine; None if it has none.
    """

    def __init__(
        self,
        servers: ServerRoute,
        group: GroupKey,
        machines: Machines,
        up: SharedMemoryDriver | None,
        down: SharedMemoryDriver | None,
    ) -> None:
        self._servers = servers
        self._machines = machines
        self._up, self._down = up, down
        self._rank = machines.local[machines.place]
        self._size = len(group.ranks)
        self._leaders = tuple(group.ranks[each[0]] for each in machines.members)
        self._is_leader = machines.place == 0
        if down is not None and not self._is_leader:
            down.ring.note_arrival(_FOREVER)  # only leaders wait for arriving data

    def close(self, error: BaseException | None = None) -> None:
        """Release the rings; unfinished calls fail with ``error``."""
        for driver in (self._up, self._down):
            if driver is not None:
                driver.close(error)

    def make(
        self,
        key: CallKey,
        call: CollectiveCall,
        outgoing: Sequence[Array],
        into: Sequence[Array],
        value: T,
    ) -> Future[T]:
        """Make a call whose sizes all ranks know, as ``ServerRoute`` does."""
        plan = _PLANS[call.kind](self, key, call, list(map(flat, outgoing)), list(map(flat, into)))
        if self._up is None or self._down is None:
            under_way, progress = self._step(key, call, plan, _ignore)
            progress(_FOREVER)
            parts = [under_way.future]
        elif self._is_leader:
            parts = self._lead(key, call, plan, self._down)
        else:
            up = plan.up or self._agreeing(key, call)
            steps = self._down.calls.stream(0, None, plan.down)
            parts = [up(_ignore), self._down.begin(key.text(call), steps, None)]

        def finish(_: object) -> T:
            if self._is_leader:
                plan.finish()
            if _is_divided_last(call):
                for array in into:
                    divide(flat(array).view(DTYPES[call.dtype]), self._size)
            return value

        return self._watched(key, call, gather(parts).map(finish))

    def exchange(
        self,
        key: CallKey,
        call: CollectiveCall,
        outgoing: Sequence[Array],
        sources: Sequence[int],
        outs: Sequence[Array] | None,
    ) -> Future[list[Array]]:
        """Make a call with arrays of any size; only all_gather uses the rings."""
        if call.kind == "all_gather":
            return self._watched(key, call, self._all_gather(key, call, outgoing[0], outs))
        if self._up is not None and self._down is not None:
            agreed = self._agreeing(key, call)(_ignore)
            stream = Stream(self._down.ring, np.empty(0, np.uint8)) if self._is_leader else None
            steps = self._down.calls.stream(0, stream, _take_nothing)
            self._down.begin(key.text(call), steps, None).on_done(lambda _: None)
            if stream is not None:
                agreed.on_done(lambda done: stream.end(done.error()))
                agreed.on_error(lambda done: self._servers.give_up(key, done.error()))
        return self._servers.exchange(key, call, outgoing, sources, outs)

    # -- who does what -------------------------------------------------------------------

    def _lead(
        self, key: CallKey, call: CollectiveCall, plan: _Plan, down: SharedMemoryDriver
    ) -> list[Future[None]]:
        """Send the values that come up to the servers, and hand the answers down."""
        result = plan.filled[0] if plan.filled else np.empty(0, np.uint8)
        stream = Stream(down.ring, result)
        end = plan.begin + len(result)

        def answered(upto: int) -> None:  # the last byte waits for the end, as all get one error
            if plan.begin < upto:
                stream.grow(min(upto, end - 1) - plan.begin)

        under_way, progress = self._step(key, call, plan, answered)
        under_way.future.on_done(lambda done: stream.end(done.error()))
        steps = down.calls.stream(0, stream, _take_nothing)
        handed: Future[None] = down.begin(key.text(call), steps, None)
        up = (plan.up or self._agreeing(key, call))(progress if plan.up else _ignore)

        def came(done: Future[None]) -> None:
            error = done.error()
            if error is not None:
                under_way.fail(error)
            else:
                progress(_FOREVER)

        up.on_done(came)
        return [up, under_way.future, handed]

    def _all_gather(
        self, key: CallKey, call: CollectiveCall, array: Array, outs: Sequence[Array] | None
    ) -> Future[list[Array]]:
        """Gather arrays on each leader, then on all leaders, then on all ranks."""
        own = layout_of([array])
        rows: list[Bytes] = []  # on the leader: the machine's row

        def taking(calls: Sequence[Description]) -> Take:
            row, places = empty_row([unpack_layouts(each.note, 1)[0] for each in calls])
            rows.append(row)

            def take(start: int, pieces: list[Bytes]) -> None:
                for piece, place in zip(pieces, places, strict=True):
                    _copying(place)(start, [piece])

            return take if self._is_leader else _take_nothing

        def exchange(_: None) -> Future[Bytes]:
            among = CollectiveCall("all_gather", dtype="uint8", shapes=((ANY,),))
            step = LeadersStep(self._leaders, among)
            count = range(len(self._leaders))
            return self._servers.exchange(key, call, rows, count, None, leaders=step).map(
                np.concatenate
            )

        def finish(whole: Bytes) -> list[Array]:
            layouts, arrays = arrays_of(whole, self._machines.members)
            found = receivers(layouts, range(self._size), 0, [array], outs)
            for place, values in zip(found, arrays, strict=True):
                flat(place)[:] = values
            return found

        description = Description(pack_collective(call), tuple(own.lengths), pack_layouts([own]))
        if self._up is None or self._down is None:
            taking([description])(0, [flat(array)])
            return exchange(None).map(finish)
        steps = self._up.calls.exchange(description, [flat(array)], taking)
        up: Future[None] = self._up.begin(key.text(call), steps, None)
        if not self._is_leader:
            parts: list[Bytes] = []
            collect: Take = lambda _, pieces: parts.append(pieces[0].copy())  # noqa: E731
            down = self._down.calls.stream(0, None, collect)
            came = gather([up, self._down.begin(key.text(call), down, None)])
            return came.map(lambda _: finish(np.concatenate(parts)))
        stream = Stream(self._down.ring, np.empty(0, np.uint8))
        up.on_error(lambda done: self._servers.give_up(key, done.error()))
        whole = up.then(exchange)

        def hand_down(done: Future[Bytes]) -> None:
            error = done.error()
            if error is None:
                stream.data = done.result(0)
            stream.end(error)

        handed = self._down.begin(
            key.text(call), self._down.calls.stream(0, stream, _take_nothing), None
        )
        whole.on_done(hand_down)
        return gather([whole, handed]).map(lambda found: finish(found[0]))

    def _watched(self, key: CallKey, call: CollectiveCall, future: Future[T]) -> Future[T]:
        """Return a call's future, whose text names the ranks that it waits for."""
        wait = self._servers.waits.begin(key.text(call), key)
        future.describe = wait.text
        future.on_done(lambda _: self._servers.waits.end(wait))
        return future

    def _step(
        self, key: CallKey, call: CollectiveCall, plan: _Plan, answered: Progress
    ) -> tuple[CallUnderWay[None], Progress]:
        step = LeadersStep(self._leaders, plan.step)
        return self._servers.step(key, call, step, plan.sent, plan.filled, answered)

    def _agreeing(self, key: CallKey, call: CollectiveCall) -> Callable[[Progress], Future[None]]:
        """Return a function that only compares the calls of this machine's ranks."""
        return self._gathering(key, call, [], 0, lambda _: _take_nothing)

    def _gathering(
        self,
        key: CallKey,
        call: CollectiveCall,
        pieces: Sequence[Bytes],
        nbytes: int,
        taking: Callable[[Progress], Take],
    ) -> Callable[[Progress], Future[None]]:
        """Return a function that lets this machine's ranks read each other's pieces."""

        def begin(progress: Progress) -> Future[None]:
            assert self._up is not None
            description = Description(pack_collective(call), tuple(map(len, pieces)))
            steps = self._up.calls.exchange(description, pieces, lambda _: taking(progress))
            is_quick = self._up.calls.is_quick(nbytes)
            return self._up.begin(key.text(call), steps, None, is_quick=is_quick)

        return begin

    def _reducing(
        self, key: CallKey, call: CollectiveCall, values: Bytes, total: Bytes
    ) -> tuple[Bytes, Callable[[Progress], Future[None]] | None]:
        """Return the leader's buffer for the machine's sum, and a function to compute it."""
        added = call._replace(op="sum") if _is_divided_last(call) else call
        dtype, reduce, up = DTYPES[call.dtype], reducing(added, self._size), self._up
        array = values.view(dtype)
        out = total.view(dtype) if self._is_leader else None
        if up is None:
            if call.op not in _CHANGED_BY_MACHINE or out is None:
                return values, None
            reduce([array], out)
            return total, None

        def begin(progress: Progress) -> Future[None]:
            description = Description(pack_collective(call), (len(values),))
            steps = up.calls.all_reduce(description, array, out, reduce, progress)
            return up.begin(key.text(call), steps, None, is_quick=up.calls.is_quick(len(values)))

        return total, begin

    # -- plans ---------------------------------------------------------------------------

    def _all_reduce(
        self, key: CallKey, call: CollectiveCall, sent: list[Bytes], into: list[Bytes]
    ) -> _Plan:
        total, up = self._reducing(key, call, sent[0], into[0])
        return _Plan(_among_leaders(call), [total], into, up=up, down=_copying(into[0]))

    def _reduce(
        self, key: CallKey, call: CollectiveCall, sent: list[Bytes], into: list[Bytes]
    ) -> _Plan:
        root = self._machines.of(call.root)
        step = _among_leaders(call)._replace(root=root)
        buffer = into[0] if into else np.empty(len(sent[0]) if self._is_leader else 0, np.uint8)
        total, up = self._reducing(key, call, sent[0], buffer)
        filled = [buffer] if self._machines.own == root else []
        return _Plan(step, [total], filled, up=up, down=_copying(*into))

    def _reduce_scatter(
        self, key: CallKey, call: CollectiveCall, sent: list[Bytes], into: list[Bytes]
    ) -> _Plan:
        members, own = self._machines.members, self._machines.own
        lengths = [sum(len(sent[rank]) for rank in ranks) for ranks in members]
        whole = np.concatenate([sent[rank] for ranks in members for rank in ranks])
        total, up = self._reducing(key, call, whole, whole)
        ends = list(accumulate(lengths))
        parts = [total[end - length : end] for end, length in zip(ends, lengths, strict=True)]
        before = sum(len(sent[rank]) for rank in self._machines.local if rank < self._rank)
        itemsize = DTYPES[call.dtype].itemsize
        shapes = tuple((length // itemsize,) for length in lengths)
        step = _among_leaders(call)._replace(shapes=shapes)

        def finish() -> None:
            into[0][:] = parts[own][: len(into[0])]

        begin, down = ends[own] - lengths[own], _copying(*into, begin=before)
        return _Plan(step, parts, [parts[own]], begin, up, down, finish)

    def _broadcast(
        self, key: CallKey, call: CollectiveCall, sent: list[Bytes], into: list[Bytes]
    ) -> _Plan:
        root = self._machines.of(call.root)
        step = call._replace(root=root)
        if root != self._machines.own:
            return _Plan(step, [], into, down=_copying(*into))
        place = self._machines.local.index(call.root)
        array = (sent or into)[0]

        def taking(progress: Progress) -> Take:
            copy = _copying(*into)

            def take(start: int, pieces: list[Bytes]) -> None:
                copy(start, [pieces[place]])
                progress(min(start + len(pieces[place]), len(array)))

            return take

        up = None if self._up is None else self._gathering(key, call, sent, len(array), taking)
        return _Plan(step, [array], [], up=up)

    def _barrier(
        self, key: CallKey, call: CollectiveCall, sent: list[Bytes], into: list[Bytes]
    ) -> _Plan:
        return _Plan(call, [], [])


def _among_leaders(call: CollectiveCall) -> CollectiveCall:
    """Return the call among leaders; machines divide most averages themselves."""
    op = "sum" if call.op in _CHANGED_BY_MACHINE else call.op
    return call._replace(op=op, factor=None)


def _is_divided_last(call: CollectiveCall) -> bool:
    """Return whether ranks divide only the total, so that machines lose no remainders."""
    return call.op == "average" and call.dtype != BFLOAT16 and DTYPES[call.dtype].kind in "iu"


def _copying(*places: Bytes, begin: int = 0) -> Take:
    """Return a function that fills ``places`` from offset ``begin`` of a stream."""

    def take(start: int, pieces: list[Bytes]) -> None:
        for place in places:
            first = max(begin - start, 0)
            at = start + first - begin
            found = pieces[0][first : first + max(len(place) - at, 0)]
            place[at : at + len(found)] = found

    return take


_PLANS = {
    "all_reduce": MachinesRoute._all_reduce,
    "reduce": MachinesRoute._reduce,
    "reduce_scatter": MachinesRoute._reduce_scatter,
    "broadcast": MachinesRoute._broadcast,
    "barrier": MachinesRoute._barrier,
}
