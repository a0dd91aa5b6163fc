"""The way of a group's collective calls when all its workers are on one machine.

The first call of such a group has every rank make a ring (``memory/ring.py``) and exchange tickets
through the servers, by calls of a name that users cannot choose. Where all could map the rings of
all, calls in order go by them from then on; else, and for calls with a name, by the servers. All
ranks decide alike, since each knows of all whether they could. Read next:
``shared_memory_driver.py``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from typing import TypeVar

import numpy as np

from pslite.collective.arrays import Array, Bytes, flat, layout_of, piece_for, receivers
from pslite.collective.shared_memory_calls import Description, Reduce, Take
from pslite.collective.shared_memory_driver import SharedMemoryDriver
from pslite.collective.sums import DTYPES, reduce_in_order
from pslite.collective.wire import (
    pack_collective,
    pack_layouts,
    unpack_collective,
    unpack_layouts,
)
from pslite.errors import MismatchError, ProtocolError
from pslite.future import Future
from pslite.ids import Role, node_id
from pslite.memory.ring import Ring, RingTicket, is_ordered
from pslite.memory.segment import Ticket
from pslite.node.postoffice import Postoffice
from pslite.protocol.collective import CallKey, CollectiveCall, GroupKey, mismatch
from pslite.wire.codec import pack_value, unpack_value

T = TypeVar("T")

SLOT_BYTES = 1 << 19
"""Of a chunk: four of them and of their results stay in a processor's cache."""


class SharedMemoryRoute:
    """Makes the calls of one rank by rings."""

    def __init__(self, host: SharedMemoryDriver, rank: int) -> None:
        self.host = host
        self._rank = rank

    def make(
        self,
        key: CallKey,
        call: CollectiveCall,
        outgoing: Sequence[Array],
        into: Sequence[Array],
        value: T,
    ) -> Future[T]:
        """Make a call whose sizes all ranks know, as ``ServerRoute`` does."""
        pieces, places = list(map(flat, outgoing)), list(map(flat, into))
        dtype = DTYPES[call.dtype] if call.dtype else np.dtype(np.uint8)
        if call.kind == "all_reduce":
            array, out = pieces[0].view(dtype), places[0].view(dtype)
            description = Description(pack_collective(call), (array.nbytes,))
            return self.host.all_reduce(
                key.text(call), description, array, out, _reducing(call), value=value
            )
        sizes = tuple(len(piece) for piece in pieces)
        take: Take = _ignore
        if places and call.op:
            take = _reduced_into(places[0].view(dtype), _reducing(call))
        elif places:
            take = _copied_into(places[0], call.root)
        return self.host.exchange(
            key.text(call),
            Description(pack_collective(call), sizes),
            pieces,
            lambda _: take,
            is_each=call.kind == "reduce_scatter",
            nbytes=max((prod(shape) * dtype.itemsize for shape in call.shapes), default=0),
            value=value,
        )

    def exchange(
        self,
        key: CallKey,
        call: CollectiveCall,
        outgoing: Sequence[Array],
        sources: Sequence[int],
        outs: Sequence[Array] | None,
    ) -> Future[list[Array]]:
        """Make a call that moves arrays of any size, and return one from each of ``sources``."""
        index = piece_for(call, self._rank)
        layout = layout_of(outgoing)
        found: list[Array] = []

        def begin(calls: Sequence[Description]) -> Take:
            layouts = [unpack_layouts(each.note, 1)[0] for each in calls]
            found.extend(receivers(layouts, sources, index, outgoing, outs))
            places = list(zip(sources, map(flat, found), strict=True))

            def take(start: int, chunk: list[Bytes]) -> None:
                for source, place in places:
                    part = place[start : start + len(chunk[source])]
                    part[:] = chunk[source][: len(part)]

            return take

        return self.host.exchange(
            key.text(call),
            Description(pack_collective(call), tuple(layout.lengths), pack_layouts([layout])),
            list(map(flat, outgoing)),
            begin,
            is_each=call.kind in ("scatter", "all_to_all"),
            value=found,
        )


def _ignore(start: int, pieces: list[Bytes]) -> None:
    pass


def _copied_into(place: Bytes, root: int) -> Take:
    def take(start: int, pieces: list[Bytes]) -> None:
        part = place[start : start + len(pieces[root])]
        part[:] = pieces[root][: len(part)]

    return take


def _reduced_into(place: Array, reduce: Reduce) -> Take:
    def take(start: int, pieces: list[Bytes]) -> None:
        first = start // place.itemsize
        part = place[first : first + len(pieces[0]) // place.itemsize]
        reduce([piece[: part.nbytes].view(part.dtype) for piece in pieces], part)

    return take


def _reducing(call: CollectiveCall) -> Reduce:
    def reduce(arrays: Sequence[Array], out: Array) -> None:
        reduce_in_order(call.op, call.dtype, call.factor, arrays, out)

    return reduce


def are_on_one_machine(node: Postoffice, ranks: Sequence[int]) -> bool:
    """Return whether all these workers are on this node's machine, as the roster has it."""
    members = [node.membership.node(node_id(Role.WORKER, rank)) for rank in ranks]
    return len({"" if each is None else each.machine for each in members}) == 1


class RingOpening:
    """Opens the rings of a group at its first call, and sends its calls by them.

    Args:
        gather: hands every rank's bytes to all, by the servers, under a name.
    """

    def __init__(
        self,
        node: Postoffice,
        group: GroupKey,
        gather: Callable[[str, bytes], Future[list[bytes]]],
    ) -> None:
        self._node = node
        self._group = group
        self._rank = group.ranks.index(node.rank)
        self._gather = gather
        self._ring: Ring | None = None
        self._route: SharedMemoryRoute | None = None
        # Guards the rest: calls go out in the order in which they were made.
        self._lock = threading.RLock()
        self._opened: Future[SharedMemoryRoute | None] | None = None
        self._is_open = self._is_closed = False
        self._waiting: deque[Callable[[], None]] = deque()

    def call(
        self, text: Callable[[], str], make: Callable[[SharedMemoryRoute | None], Future[T]]
    ) -> Future[T]:
        """Make a call by the rings, or without (None): now, or once it is known which."""
        with self._lock:
            if self._is_open:
                return make(self._route)
            result: Future[T] = Future(
                lambda: text() if self._opened is None else f"{text()}: {self._opened.what}"
            )
            self._waiting.append(lambda: self._forward(result, make))
            if self._opened is None:
                self._opened = self._open()
                self._opened.on_done(self._go_on)
        return result

    def close(self, error: BaseException | None = None) -> None:
        """Let go of the rings; calls that are not over end in ``error``."""
        with self._lock:
            route, ring = self._route, self._ring
            self._is_closed, self._ring = True, None
        if route is not None:
            route.host.close(error)
        elif ring is not None:
            ring.close()

    def _open(self) -> Future[SharedMemoryRoute | None]:
        ticket = b""
        if self._node.config.shm and is_ordered():
            try:
                self._ring = Ring(SLOT_BYTES)
                ticket = _pack_ticket(self._ring.ticket)
            except OSError:  # no memory, or no open files: the servers need neither
                pass
        self._node.finished.on_done(lambda _: self.close(self._node.error))
        tickets = self._gather("tickets", ticket)
        return tickets.then(lambda found: self._gather("mapped", self._map(found))).map(self._end)

    def _map(self, tickets: list[bytes]) -> bytes:
        """Map the others' rings; return whether that worked, as all will know."""
        if self._ring is None or not all(tickets):
            return b"\0"
        try:
            self._ring.connect(self._rank, [_unpack_ticket(ticket) for ticket in tickets])
        except (OSError, ProtocolError):  # another space of process ids, or another user
            return b"\0"
        return b"\1"

    def _end(self, mapped: list[bytes]) -> SharedMemoryRoute | None:
        with self._lock:
            if self._ring is not None and not self._is_closed and all(map(any, mapped)):
                self._route = SharedMemoryRoute(self._host(self._ring), self._rank)
            else:
                self.close()
            return self._route

    def _host(self, ring: Ring) -> SharedMemoryDriver:
        return SharedMemoryDriver(
            ring,
            len(self._group.ranks),
            mismatch=self._mismatch,
            why_over=self._why_over,
            name=self._group.text,
        )

    def _mismatch(self, first: int, call: bytes, rank: int, other: bytes) -> MismatchError:
        ranks = self._group.ranks
        called, differs = unpack_collective(call), unpack_collective(other)
        return mismatch(self._group, ranks[first], called, ranks[rank], differs)

    def _why_over(self, ranks: Sequence[int]) -> BaseException | None:
        """Return why a wait for these ranks of the group cannot end, where that is so."""
        if self._node.error is not None:
            return self._node.error
        gone = self._node.membership.gone
        members = (gone.get(node_id(Role.WORKER, self._group.ranks[rank])) for rank in ranks)
        return next((member.error for member in members if member is not None), None)

    def _go_on(self, opened: Future[SharedMemoryRoute | None]) -> None:
        with self._lock:
            while self._waiting:
                self._waiting.popleft()()
            self._is_open = True

    def _forward(
        self, result: Future[T], make: Callable[[SharedMemoryRoute | None], Future[T]]
    ) -> None:
        try:
            made = make(None if self._opened is None else self._opened.result(0))
        except BaseException as error:
            result.set_error(error)
            return
        result.describe, result.flush = made.describer(), made.flush
        made.on_done(result._adopt)


def _pack_ticket(ticket: RingTicket) -> bytes:
    return pack_value([ticket.pid, *ticket.memory, *ticket[2:]])


def _unpack_ticket(packed: bytes) -> RingTicket:
    fields = unpack_value(packed)
    kinds = [int, int, int, bytes, int, int, int]
    if type(fields) is not list or [type(field) for field in fields] != kinds:
        raise ProtocolError(f"expected the ticket of a ring, got {fields!r:.80}")
    pid, fd, nbytes, nonce, *rest = fields
    return RingTicket(pid, Ticket(fd, nbytes, nonce), *rest)
