"""What must hold in every simulated run, whatever happens to its processes and connections.

``Invariants`` looks at each message that takes effect, ``left`` and ``assert_at_rest`` at a
cluster whose scripts have ended. The scripts of ``returning.py`` check the values that they see,
and its ``run`` checks the bits and the time at the end. The numbers are those of
docs/testing.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvstore.optimizer.serialize import to_plain
from kvstore.server.app import REPEATED, ServerStores
from kvstore.server.sparse import KeyPart
from pslite import Postoffice
from pslite.ids import NodeInfo, Role, node_id
from pslite.node.links import Delivery
from pslite.protocol.rounds import SyncRounds
from pslite.protocol.succession import Standing, _Seat
from pslite.testing.simulator import Simulation
from pslite.wire.messages import Answer, RequestRecord, Response, RoundRecord

MOST_S = 30.0
"""How long after the last fault a script may take to its end (7)."""

Push = tuple[int, int, int]
"""The part, the rank of the worker, and its round."""


def seats_of(simulation: Simulation) -> dict[int, _Seat]:
    """The scheduler's table of seats."""
    return simulation.scheduler.control._seating.seats._seats  # type: ignore[attr-defined]


def seat_of_server(simulation: Simulation, rank: int) -> _Seat | None:
    """The seat of a server; None if no server has a standby."""
    return seats_of(simulation).get(node_id(Role.SERVER, rank))


def all_are_taken(simulation: Simulation) -> bool:
    """Whether no seat waits for a process."""
    return all(seat.standing is Standing.TAKEN for seat in seats_of(simulation).values())


def find_seats(simulation: Simulation) -> None:
    """Note which processes are the servers and standbys now, as the scheduler says."""
    for rank in range(len(simulation.servers)):
        seat = seat_of_server(simulation, rank)
        if seat is None:
            continue
        simulation.servers[rank] = simulation.nodes[seat.node.uid]
        if seat.standby is not None:
            simulation.standbys[rank] = simulation.nodes[seat.standby.uid]
        else:
            simulation.standbys.pop(rank, None)


# -- at each message ---------------------------------------------------------------------


class Invariants:
    """Checks messages when they take effect; pass ``watch`` each new node."""

    def __init__(self) -> None:
        self.simulation: Simulation | None = None
        #: The processes that have lost their seats.
        self._lost: set[str] = set()
        #: A process whose seat another one has taken -> those that had lost theirs before.
        self.fenced: dict[str, frozenset[str]] = {}
        #: Process -> how many had its seat before; absent: none.
        self._attempts: dict[str, int] = {}
        #: Process -> the one that had its seat before.
        self._before: dict[str, str] = {}
        #: Part -> the attempt of the last process that has answered for it.
        self._newest: dict[int, int] = {}
        #: Standby -> the pushes and the requests in its records.
        self._pushes: dict[str, set[Push]] = {}
        self._requests: dict[str, set[tuple[str, int]]] = {}
        #: Pushes that a standby has if they are in its state, which it is still installing: with
        #: the number of the last record that it then had.
        self._owed: list[tuple[str, int, Push]] = []
        self.num_answers = 0

    def watch(self, node: Postoffice) -> None:
        """Check the messages of a node from now on."""
        dispatch = node._dispatch

        def check_and_dispatch(delivery: Delivery, now: float) -> None:
            self._check(node, delivery)
            dispatch(delivery, now)

        node._dispatch = check_and_dispatch  # type: ignore[method-assign]
        if node.role is Role.SCHEDULER:
            self._watch_seats(node)
        elif node.traffic.standby is not None:
            self._watch_records(node)

    def _watch_seats(self, scheduler: Postoffice) -> None:
        seats = scheduler.control._seating.seats  # type: ignore[attr-defined]
        lost, welcomed, give = seats.lost, seats.welcomed, seats._give

        def note_loss(node_id: int, reason: str, now: float) -> bool:
            is_vacant: bool = lost(node_id, reason, now)
            if is_vacant:
                self._lost.add(seats._seats[node_id].node.uid)
            return is_vacant

        def note_before(seat: _Seat, node: NodeInfo) -> Any:
            succession = give(seat, node)
            self._attempts[node.uid] = seat.attempt
            self._before[node.uid] = succession.before.uid
            return succession

        def note_welcome(node_id: int, attempt: int) -> bool:
            is_welcome: bool = welcomed(node_id, attempt)
            if is_welcome:
                before = self._before[seats._seats[node_id].node.uid]
                self.fenced[before] = frozenset(self._lost)
            return is_welcome

        seats.lost, seats._give, seats.welcomed = note_loss, note_before, note_welcome

    def _watch_records(self, node: Postoffice) -> None:
        assert node.traffic.standby is not None
        replay, uid = node.traffic.standby._replay, node.van.uid
        arrived = replay.arrived
        pushes = self._pushes[uid] = set()
        requests = self._requests[uid] = set()

        def note(number: int, record: Any) -> Any:
            ready = arrived(number, record)
            for message, _ in ready:
                if isinstance(message, RoundRecord):
                    pairs = zip(message.ranks, message.rounds, strict=True)
                    pushes.update((part, *pair) for pair in pairs for part in message.parts)
                elif isinstance(message, RequestRecord):
                    requests.add((message.uid, message.request_id))
            return ready

        replay.arrived = note  # type: ignore[method-assign]

    def _check(self, node: Postoffice, delivery: Delivery) -> None:
        """Check a message.

        A standby hears its server until it knows that it has the seat. A worker that has said
        goodbye is not told of processes that have taken seats. Neither is a process that had lost
        its own seat before; the members drop what it sends.
        """
        peer, own = delivery.peer, node.van.uid
        is_told = node.info is not None and not getattr(node.control, "_leaving", False)
        knew_not = self.fenced.get(peer, frozenset())
        if peer in self.fenced and own not in self.fenced and own not in knew_not and is_told:
            kind = type(delivery.message).__name__
            raise AssertionError(f"(6) {own} acts on {kind} of {peer}, whose seat was taken")
        if node.role is Role.WORKER and node.info is not None and own not in self.fenced:
            message = delivery.message
            if isinstance(message, Answer):
                self._check_owner(peer, message)
                if message.pushed:
                    self._check_standby(node.rank, peer, message)
            elif isinstance(message, Response) and message.head in REPEATED:
                self._check_request(own, peer, message)

    def _check_owner(self, server: str, message: Answer) -> None:
        self.num_answers += 1
        attempt = self._attempts.get(server, 0)
        for part in message.parts:
            newest = self._newest.setdefault(part, attempt)
            assert attempt >= newest, f"(5) {server} answers for part {part} after its successor"
            self._newest[part] = attempt

    def _heir(self, server: str) -> Postoffice | None:
        """The process that has a server's seat after it, or would have it."""
        assert self.simulation is not None
        node = self.simulation.nodes[server]
        assert node.info is not None
        seat = seats_of(self.simulation).get(node.info.node_id)
        heir = None if seat is None else seat.standby if seat.node.uid == server else seat.node
        return None if heir is None else self.simulation.nodes[heir.uid]

    def _check_standby(self, rank: int, server: str, message: Answer) -> None:
        heir = self._heir(server)
        if heir is None or heir.traffic.standby is None:
            return
        replay = heir.traffic.standby._replay
        for part, round_ in zip(message.parts, message.rounds, strict=True):
            push = part, rank, round_
            if self._has(heir, push):
                continue
            assert replay.done < replay.stored, f"(4) {heir.van.uid} lacks {push}, as answered"
            self._owed.append((heir.van.uid, replay.stored, push))

    def _has(self, standby: Postoffice, push: Push) -> bool:
        part, rank, round_ = push
        if push in self._pushes[standby.van.uid]:
            return True
        assert standby.traffic.standby is not None
        unit = standby.traffic.standby._plane._parts.units.get(part)
        return unit is not None and unit.rounds.knows(rank, round_)

    def _check_request(self, worker: str, server: str, message: Response) -> None:
        heir = self._heir(server)
        is_first = heir is not None and heir in self._first_standbys
        if heir is not None and is_first and not message.kind:
            asked = worker, message.request_id
            assert asked in self._requests[heir.van.uid], f"(4) {heir.van.uid} lacks {asked}"

    @property
    def _first_standbys(self) -> list[Postoffice]:
        """The standbys of the beginning, which have all records."""
        assert self.simulation is not None
        num_first = 1 + len(self.simulation.servers) * 2 + len(self.simulation.workers)
        return list(self.simulation.nodes.values())[:num_first]

    def check_owed(self) -> None:
        """Check what standbys were still installing when workers got their answers (4)."""
        assert self.simulation is not None
        for uid, number, push in self._owed:
            standby = self.simulation.nodes[uid]
            side = standby.traffic.standby
            if side is not None and side._replay.done >= number and standby.error is None:
                assert self._has(standby, push), f"(4) {uid} lacks {push}, as answered"


# -- at the end --------------------------------------------------------------------------


def left(simulation: Simulation) -> list[str]:
    """What is left of requests, rounds, records and messages; nothing must be in the end (10)."""
    find_seats(simulation)
    here = [simulation.scheduler, *simulation.servers, *simulation.workers]
    uids = {node.van.uid for node in (*here, *simulation.standbys.values())}
    found = [
        f"{node.van.uid} has {number} messages to {peer}"
        for node in here
        if node.error is None
        for peer, (number, _) in node.links.unaccepted().items()
        if peer in uids
    ]
    for node in (*simulation.servers, *simulation.workers, *simulation.standbys.values()):
        control: Any = node.control
        if node.error is None and control._away.is_awaited:
            found.append(f"{node.van.uid} waits for a scheduler")
    for worker in simulation.workers:
        found += _left_on_worker(worker)
    for rank, server in enumerate(simulation.servers):
        found += _left_on_server(server)
        if rank in simulation.standbys:
            found += _left_between(server, simulation.standbys[rank])
    if simulation.scheduler.control._barriers._open:  # type: ignore[attr-defined]
        found.append("a barrier is open")
    return found


def _left_on_worker(node: Postoffice) -> Iterator[str]:
    plane, title = node.traffic.worker, node.van.uid
    if plane.num_active or any(plane.outbox.values()) or plane._stale:
        yield f"{title} has {plane.num_active} open requests of parts"
    if len(node.customers.pending):
        yield f"{title} waits for answers of apps"
    if plane._gate.held_back is not None:
        yield f"{title} holds requests back"


def _left_on_server(node: Postoffice) -> Iterator[str]:
    plane, title = node.traffic._server, node.van.uid
    if plane is None:
        yield f"{title} has ended"
        return
    if plane.num_waiting or plane.num_pulls or plane.is_applying:
        yield f"{title} holds {plane.num_waiting} pushes and {plane.num_pulls} pulls"
    if plane._early or any(plane._stale.values()):
        yield f"{title} waits for pushes of another epoch"
    if any(unit.orphans or unit.wanted for unit in plane._parts.distinct()):
        yield f"{title} remembers pushes of lost processes"
    primary = node.traffic.primary
    if primary is not None:
        journal, turns = primary._journal, primary._turns
        if journal._waiting or journal._frames or primary._when_alone or primary._awaited:
            yield f"the journal of {title} is not empty"
        if turns._waiting or turns._num_running or turns._when_idle:
            yield f"{title} is at work"


def _left_between(server: Postoffice, standby: Postoffice) -> Iterator[str]:
    primary, side, title = server.traffic.primary, standby.traffic.standby, standby.van.uid
    if primary is None or side is None or primary.standby is None:
        yield f"{title} stands by for nothing"
        return
    replay, turns = side._replay, side._turns
    if not replay.stored == replay.done == primary._journal.last:
        yield f"{title} has done {replay.done} of {replay.stored} records"
    if replay._early or replay._done_early or turns._waiting or turns._num_running:
        yield f"{title} is at work"
    if side._plane.num_waiting or side._plane.num_pulls:
        yield f"{title} holds {side._plane.num_waiting} pushes"


def assert_at_rest(simulation: Simulation, limit_s: float = MOST_S) -> None:
    """Wait until nothing is left (10); standbys then have what their servers have (8)."""
    until = simulation.now + limit_s
    try:
        simulation.until(lambda: not left(simulation), until)
    except Exception as error:
        raise AssertionError(f"(10) left at the end: {left(simulation)}") from error
    for rank, standby in simulation.standbys.items():
        assert_same_contents(simulation.servers[rank], standby)


# -- what a server has -------------------------------------------------------------------


def stores_of(node: Postoffice) -> ServerStores:
    """The stores of a server or standby."""
    (found,) = [each for each in node.traffic._owners_now() if isinstance(each, ServerStores)]
    return found


def contents(node: Postoffice) -> dict[str, Any]:
    """All that a server has and that its standby must have, too."""
    stores = stores_of(node)
    number_of = {id(store): number for number, store in stores._stores.items()}
    found: dict[str, Any] = {"kept steps": dict(stores._kept_steps)}
    for number, store in stores._stores.items():
        plain = None if store.optimizer is None else to_plain(store.optimizer)
        found[f"store {number}"] = (store.ranks, plain, store.cut_keys, store.compression.plain())
    for part in stores._parts:
        arena, some = part.arena, slice(part.start, part.stop)
        before = b"" if arena.previous is None else arena.previous[some].tobytes()
        states = [each[some].tobytes() for each in arena.state(None)]
        found[f"part {part.entry.part} of {part.title}"] = (
            number_of[id(part.store)],
            part.weight.tobytes(),
            before,
            states,
            part.count,
            part.rule.plain(),
        )
    for rows in stores._rows:
        assert isinstance(rows, KeyPart)
        ids, table = rows.table.ids(), rows.table
        states = [each.tobytes() for each in table.read_states(ids)]
        found[f"part {rows.number} of {rows.title}"] = (
            number_of[id(rows.store)],
            ids.tobytes(),
            table.read(ids).tobytes(),
            states,
            table.count,
            rows.arriving,
            None if rows._before is None else [each.tobytes() for each in rows._before.copy()[1:]],
        )
    for part_number, unit in stores._plane._parts.units.items():
        rounds, ranks = unit.rounds, range(node.config.num_workers)
        applied = [] if isinstance(rounds, SyncRounds) else [rounds.applied(r) for r in ranks]
        found[f"version of part {part_number}"] = rounds.version, applied
    return found


def assert_same_contents(server: Postoffice, standby: Postoffice) -> None:
    """Both have the same, byte for byte."""
    one, other = contents(server), contents(standby)
    assert one.keys() == other.keys()
    different = [name for name in one if one[name] != other[name]]
    assert not different, {name: (one[name], other[name]) for name in different[:2]}
