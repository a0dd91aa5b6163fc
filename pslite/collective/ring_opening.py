"""Opens the rings of a group's workers, and decides which route its calls take.

At the first call of a group, every rank makes rings (``memory/ring.py``) and exchanges tickets
through the servers, in calls whose names users cannot choose. If every rank could map the rings of
all ranks on its machine, calls in order use the rings from then on; otherwise the servers. All
ranks decide alike, because each learns whether all the others could. A group whose calls come in
any order opens its rings when it is made, because a rank's first large call may be late, or never
come. Read next: ``shared_memory_route.py`` for one machine, ``machines_route.py`` for several.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from pslite.collective.machines import Machines
from pslite.collective.machines_route import MachinesRoute
from pslite.collective.ready_order import ReadyOrder, is_worth_asking
from pslite.collective.server_route import ServerRoute
from pslite.collective.shared_memory_driver import SharedMemoryDriver
from pslite.collective.shared_memory_route import SharedMemoryRoute
from pslite.collective.wire import unpack_collective
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
"""The bytes of a chunk: four chunks and their results stay in a processor's cache."""
_TICKETS, _MAPPED = "\0tickets", "\0mapped"
"""The names of the calls that open the rings. Their number is 0, which no ``join`` covers, so every
rank makes them."""
RingsRoute = SharedMemoryRoute | MachinesRoute
Route = ServerRoute | RingsRoute


def machines_of(node: Postoffice, ranks: Sequence[int]) -> Machines:
    """Return which ranks of a group of workers share a machine, by the roster."""
    found: dict[str, list[int]] = {}
    for index, rank in enumerate(ranks):
        info = node.membership.node(node_id(Role.WORKER, rank))
        found.setdefault("" if info is None else info.machine, []).append(index)
    members = tuple(map(tuple, found.values()))
    this = ranks.index(node.rank)
    own = next(at for at, each in enumerate(members) if this in each)
    return Machines(members, own, members[own].index(this))


class RingOpening:
    """Opens the rings of a group, and makes its calls through them.

    Calls of a group without ``order`` come in the same order on all ranks, and the first one opens
    the rings. In a group with ``order``, calls wait until its rings are open.

    Args:
        machines: the machines of the ranks; at least one has several ranks.
        servers: the route through the servers.
        order: puts the calls of all ranks into one order.
    """

    def __init__(
        self,
        node: Postoffice,
        group: GroupKey,
        machines: Machines,
        servers: ServerRoute,
        order: ReadyOrder | None,
    ) -> None:
        self._node = node
        self._group = group
        self._machines = machines
        self._servers = servers
        self.order = order
        self._rings: list[Ring] = []
        self._route: RingsRoute | None = None
        # Guards the rest, so that calls begin in the order in which they were made.
        self._lock = threading.RLock()
        self._opened: Future[RingsRoute | None] | None = None
        self._is_open = self._is_closed = False
        self._waiting: deque[Callable[[], None]] = deque()
        if order is not None:
            self._begin()

    def takes(self, key: CallKey, call: CollectiveCall) -> bool:
        """Return whether the state of the rings decides the route of a call."""
        return self.order is not None or not key.name

    def call(
        self, key: CallKey, call: CollectiveCall, make: Callable[[Route], Future[T]]
    ) -> Future[T]:
        """Make a call through the rings or the servers, once it is known which."""
        with self._lock:
            if not self._is_open:
                result: Future[T] = Future(
                    lambda: (
                        key.text(call) + ("" if self._opened is None else f": {self._opened.what}")
                    )
                )
                self._waiting.append(lambda: self._forward(result, key, call, make))
                self._begin()
                return result
            if self.order is None:  # with the lock, so that calls stay in order
                return self._make(key, call, make)
        return self._make(key, call, make)

    def _make(
        self, key: CallKey, call: CollectiveCall, make: Callable[[Route], Future[T]]
    ) -> Future[T]:
        route, servers = self._route, self._servers

        def by_rings() -> Future[T]:
            assert route is not None
            try:
                return make(route)
            except BaseException as error:  # this rank's later calls would not match the others'
                route.close(error)
                raise

        if route is None or (self.order is not None and not is_worth_asking(call)):
            return make(servers)
        if self.order is None:
            return by_rings()
        return self.order.make(key, call, by_rings, lambda: make(servers))

    def close(self, error: BaseException | None = None) -> None:
        """Release the rings; unfinished calls fail with ``error``."""
        with self._lock:
            route, rings = self._route, self._rings
            self._is_closed, self._rings = True, []
            if route is None:
                for ring in rings:
                    ring.close()
        if route is not None:
            route.close(error)

    def _begin(self) -> None:
        if self._opened is None:
            self._opened = self._open()
            self._opened.on_done(self._go_on)

    def _open(self) -> Future[RingsRoute | None]:
        ticket, config = b"", self._node.config
        is_one = len(self._machines.members) == 1
        if config.shm and is_ordered() and (is_one or config.sum_on_machines):
            try:
                for _ in range(1 if is_one else 2 if len(self._machines.local) > 1 else 0):
                    self._rings.append(Ring(SLOT_BYTES))
                ticket = pack_value([_fields(ring.ticket) for ring in self._rings])
            except OSError:  # no more memory or open files; the servers need neither
                pass
        self._node.finished.on_done(lambda _: self.close(self._node.error))
        tickets = self._gather(_TICKETS, ticket)
        return tickets.then(lambda found: self._gather(_MAPPED, self._map(found))).map(self._end)

    def _gather(self, name: str, data: bytes) -> Future[list[bytes]]:
        return self._servers.gather_bytes(CallKey(self._group, name, 0), data)

    def _map(self, tickets: list[bytes]) -> bytes:
        """Map this machine's rings; return whether that worked, for all ranks to learn."""
        if not all(tickets):
            return b"\0"
        local = self._machines.local
        with self._lock:  # otherwise a thread that closes the group could close rings meanwhile
            try:
                offered = [_tickets(tickets[rank], len(self._rings)) for rank in local]
                for index, ring in enumerate(self._rings):
                    ring.connect(self._machines.place, [each[index] for each in offered])
            except (OSError, ProtocolError):  # another process-id namespace, or another user
                return b"\0"
            return b"\0" if self._is_closed else b"\1"

    def _end(self, mapped: list[bytes]) -> RingsRoute | None:
        with self._lock:
            if self._is_closed or not all(map(any, mapped)):
                self.close()
                self._servers.stop_meeting()
                return None
            drivers = list(map(self._driver, self._rings))
            if len(self._machines.members) == 1:
                self._route = SharedMemoryRoute(drivers[0], self._machines.place)
            else:
                up, down = drivers or (None, None)
                self._route = MachinesRoute(self._servers, self._group, self._machines, up, down)
            return self._route

    def _driver(self, ring: Ring) -> SharedMemoryDriver:
        return SharedMemoryDriver(
            ring,
            len(self._machines.local),
            mismatch=self._mismatch,
            why_over=self._why_over,
            name=self._group.text,
            ranks=self._machines.local,
        )

    def _mismatch(self, first: int, call: bytes, rank: int, other: bytes) -> MismatchError:
        ranks = [self._group.ranks[rank] for rank in self._machines.local]
        called, differs = unpack_collective(call), unpack_collective(other)
        return mismatch(self._group, ranks[first], called, ranks[rank], differs)

    def _why_over(self, ranks: Sequence[int]) -> BaseException | None:
        """Return why a wait for these ranks of the machine cannot end; None if it can."""
        if self._node.error is not None:
            return self._node.error
        gone = self._node.membership.gone
        workers = (self._group.ranks[self._machines.local[rank]] for rank in ranks)
        members = (gone.get(node_id(Role.WORKER, worker)) for worker in workers)
        return next((member.error for member in members if member is not None), None)

    def _go_on(self, opened: Future[RingsRoute | None]) -> None:
        with self._lock:
            while self._waiting:
                self._waiting.popleft()()
            self._is_open = True

    def _forward(
        self,
        result: Future[T],
        key: CallKey,
        call: CollectiveCall,
        make: Callable[[Route], Future[T]],
    ) -> None:
        try:
            if self._opened is not None:
                self._opened.result(0)
            made = self._make(key, call, make)
        except BaseException as error:
            if self.order is not None:
                self.order.ended(key)
            result.set_error(error)
            return
        result.describe, result.flush = made.describer(), made.flush
        made.on_done(result._adopt)


def _fields(ticket: RingTicket) -> list[object]:
    return [ticket.pid, *ticket.memory, *ticket[2:]]


def _tickets(packed: bytes, count: int) -> list[RingTicket]:
    found = unpack_value(packed)
    kinds = [int, int, int, bytes, int, int, int]
    if type(found) is not list or len(found) != count:
        raise ProtocolError(f"expected the tickets of {count} rings, got {found!r:.80}")
    tickets = []
    for fields in found:
        if type(fields) is not list or [type(field) for field in fields] != kinds:
            raise ProtocolError(f"expected the ticket of a ring, got {fields!r:.80}")
        pid, fd, nbytes, nonce, *rest = fields
        tickets.append(RingTicket(pid, Ticket(fd, nbytes, nonce), *rest))
    return tickets
