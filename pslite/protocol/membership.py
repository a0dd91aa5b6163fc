"""``Rendezvous`` and ``Membership``: joining and members. Pure.

``Rendezvous`` is the scheduler's side: it collects registrations, assigns ranks, and says who is
missing. Ranks are stable: a node that requests a rank (the launcher's order) gets it, and the
others get free ranks in the order of registration. Host names do not matter (ps-lite sorts by
them). ``Membership`` is every node's view after that: the members, the epoch, and the gone nodes.
``LossReports`` holds what members report about others. Such a report alone does not remove a
member.

In the view of one node, another one is

==============  ========================================  ========================================
state           event                                     then
==============  ========================================  ========================================
present         it has said goodbye (``depart``)          leaving: it may still wait for answers
present         it is lost for good (``depart``)          lost, which ends this node, too
present         its process is lost (``vacate``)          vacant: its seat waits for another one
leaving         its connection has ended (``ended``)      ended
vacant          no process has come (``depart``)          lost
any             another process has its seat (``seat``)   present, under the name of that process
==============  ========================================  ========================================

News of an earlier process of a seat change nothing: processes are numbered (``attempts``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pslite.errors import NodeLostError, UsageError
from pslite.ids import NodeInfo, Role, role_of
from pslite.protocol.lost_time import LostTime
from pslite.protocol.relays import Relays

_SAME_ROUNDS = (
    "others wait for its next push or collective call, and all workers must make equally many "
    "(kv.shard and FeedForward.fit ensure it for pushes)"
)

_SERVED_WORKER = [Role.WORKER.value, Role.SERVER.value]
"""The nodes of a process whose worker runs a server, in the order of the roster."""


class Refusal(NamedTuple):
    """The reason why a registration is refused."""

    reason: str
    fatal: bool = False
    """Whether the nodes disagree about the job itself, so that it cannot start."""


class Rendezvous:
    """Collects the registrations of one cluster until it is complete."""

    def __init__(self, num_workers: int, num_servers: int, package: str, standbys: int = 0) -> None:
        """``standbys`` is the number of standbys of each server."""
        self._wanted = {Role.WORKER: num_workers, Role.SERVER: num_servers}
        self._num_standbys = standbys * num_servers
        self._package = package
        self._started_at = 0.0
        #: The registered nodes, in the order of registration.
        self.registered: tuple[NodeInfo, ...] = ()
        #: The standbys of servers, with the ranks of these servers.
        self.standbys: tuple[NodeInfo, ...] = ()
        #: All nodes by role and rank (workers, then servers); empty until all have registered.
        self.roster: tuple[NodeInfo, ...] = ()

    def begin(self, now: float) -> None:
        """Start measuring how long nodes wait."""
        self._started_at = now

    def register(
        self,
        node: NodeInfo,
        num_workers: int,
        num_servers: int,
        package: str,
        *,
        stands_by: bool = False,
    ) -> Refusal | None:
        """Register a node, or a standby. Registering it again changes nothing."""
        for known in self.registered + self.standbys:
            if known.incarnation == node.incarnation or known.uid == node.uid:
                is_same = (known.incarnation, known.uid) == (node.incarnation, node.uid)
                return None if is_same else Refusal("another node has the same name")
        if stands_by:
            refusal = self.disagreement(node, num_workers, num_servers, package)
            refusal = refusal or self._superfluous(node)
        else:
            refusal = self._mismatch(node, num_workers, num_servers, package)
        if refusal is not None:
            return refusal
        if stands_by:
            self.standbys += (node,)
        else:
            self.registered += (node,)
        is_complete = len(self.registered) == sum(self._wanted.values())
        if is_complete and len(self.standbys) == self._num_standbys:
            self.roster = self._ranked()
        return None

    def _superfluous(self, standby: NodeInfo) -> Refusal | None:
        """Return why a standby is not needed."""
        what = f"the standby of server {standby.rank} on {standby.host} (pid {standby.pid})"
        if len(self.standbys) >= self._num_standbys:
            return Refusal(
                f"this job needs no more than {self._num_standbys} standbys; {what} is one too many"
            )
        is_known = any(known.rank == standby.rank for known in self.standbys)
        if is_known or not 0 <= standby.rank < self._wanted[Role.SERVER]:
            return Refusal(
                f"DMLC_TASK_ID of a standby must be the rank of a server without one; got {what}"
            )
        return None

    def disagreement(
        self, node: NodeInfo, num_workers: int, num_servers: int, package: str
    ) -> Refusal | None:
        """Return why a node cannot be of this job: its numbers or its version differ."""
        role = Role(node.role)
        for name, theirs, ours in (
            ("DMLC_NUM_WORKER", num_workers, self._wanted[Role.WORKER]),
            ("DMLC_NUM_SERVER", num_servers, self._wanted[Role.SERVER]),
        ):
            if theirs != ours:
                return Refusal(
                    f"the {role.value} on {node.host} (pid {node.pid}) has {name}={theirs}, "
                    f"the scheduler has {ours}; start all processes with the same numbers",
                    fatal=True,
                )
        if package != self._package:
            return Refusal(
                f"the {role.value} on {node.host} (pid {node.pid}) runs version {package}, "
                f"the scheduler {self._package}; install the same version on all hosts",
                fatal=True,
            )
        return None

    def _mismatch(
        self, node: NodeInfo, num_workers: int, num_servers: int, package: str
    ) -> Refusal | None:
        refusal = self.disagreement(node, num_workers, num_servers, package)
        if refusal is not None:
            return refusal
        role = Role(node.role)
        if role not in self._wanted:
            return Refusal("this job already has a scheduler")
        same = [known for known in self.registered if known.role == node.role]
        if len(same) >= self._wanted[role]:
            return Refusal(
                f"this job already has all its {self._wanted[role]} {role.value}s; the "
                f"{role.value} on {node.host} (pid {node.pid}) is one too many"
            )
        if node.rank >= self._wanted[role]:
            return Refusal(
                f"DMLC_TASK_ID={node.rank} of the {role.value} on {node.host} is too high: "
                f"the job has {self._wanted[role]} {role.value}s, counted from 0"
            )
        twin = next((known for known in same if known.rank == node.rank >= 0), None)
        if twin is not None:
            return Refusal(
                f"two {role.value}s have DMLC_TASK_ID={node.rank} (pid {twin.pid} on "
                f"{twin.host}, pid {node.pid} on {node.host}); give each its own number",
                fatal=True,
            )
        return None

    def _ranked(self) -> tuple[NodeInfo, ...]:
        roster: list[NodeInfo] = []
        for role in (Role.WORKER, Role.SERVER):
            nodes = [node for node in self.registered if node.role == role.value]
            taken = {node.rank for node in nodes if node.rank >= 0}
            free = iter(rank for rank in range(len(nodes)) if rank not in taken)
            placed = [node if node.rank >= 0 else node._replace(rank=next(free)) for node in nodes]
            roster += sorted(placed, key=lambda node: node.rank)
        return tuple(roster)

    def resume(self, roster: tuple[NodeInfo, ...]) -> None:
        """Go on with the roster of a lost scheduler."""
        self.registered = self.roster = roster

    def seat(self, node: NodeInfo) -> None:
        """Replace a roster's entry: another process has taken the seat."""
        self.roster = tuple(node if each.node_id == node.node_id else each for each in self.roster)

    def missing(self) -> tuple[str, ...]:
        """Return the missing nodes, for people: ``2 of 4 workers``."""
        found = {role.value: 0 for role in self._wanted}
        for node in self.registered:
            found[node.role] += 1
        counts = [(role.value, found[role.value], wanted) for role, wanted in self._wanted.items()]
        counts.append(("standby", len(self.standbys), self._num_standbys))
        return tuple(
            f"{wanted - there} of {wanted} {name}{'' if wanted == 1 else 's'}"
            for name, there, wanted in counts
            if there < wanted
        )

    def present(self) -> tuple[str, ...]:
        """Return the registered nodes, for people."""
        named = [(node.role, node) for node in self.registered]
        named += [(f"standby of server {node.rank}", node) for node in self.standbys]
        return tuple(f"{name} on {node.host} (pid {node.pid})" for name, node in named)

    def waited_s(self, now: float) -> float:
        return now - self._started_at


class Gone(NamedTuple):
    """A node that has left or is lost."""

    node: NodeInfo
    left: bool
    """Whether it said goodbye (and was not lost)."""
    reason: str
    title: str = ""
    """Its name for people, if it is not that of the roster's entry."""

    @property
    def sentence(self) -> str:
        """``worker 1 (pid 4711 on host) is lost: its process is gone``."""
        text = f"{self.title or self.node.title} {'has left the job' if self.left else 'is lost'}"
        return f"{text}: {self.reason}" if self.reason else text

    @property
    def error(self) -> NodeLostError:
        """The error for calls that need the node; it says what to do."""
        is_early = self.left and self.node.role == Role.WORKER.value
        text = f"{self.sentence}; {_SAME_ROUNDS}" if is_early else self.sentence
        return NodeLostError(text, role=self.node.role, rank=self.node.rank)


@dataclass(slots=True, eq=False, repr=False)
class Membership:
    """A node's view of the cluster: members, their names, lost nodes and the epoch."""

    role: Role
    """The role of this node."""
    roster: tuple[NodeInfo, ...] = ()
    epoch: int = 0
    gone: dict[int, Gone] = field(default_factory=dict)
    has_said_goodbye: bool = False
    """Whether this node has told the others that it waits only for answers."""
    told: set[int] = field(default_factory=set)
    """The ids of nodes that have said goodbye to this node itself."""
    ended: set[int] = field(default_factory=set)
    """The ids of nodes that have said goodbye and have ended."""
    ending: set[int] = field(default_factory=set)
    """The ids of nodes that have said that they end because of a lost node."""
    vacant: dict[int, str] = field(default_factory=dict)
    """The ids of lost nodes whose seats wait for another process, with the reasons."""
    attempts: dict[int, int] = field(default_factory=dict)
    """Node id -> how many processes had its seat before; absent for the first one."""
    uids: dict[int, str] = field(default_factory=dict)
    """Node id -> the van's name of the node."""
    node_ids: dict[str, int] = field(default_factory=dict)
    """The van's name of a node -> node id."""
    lost_time: LostTime = field(default_factory=LostTime)
    """How long this node has waited for workers and servers in place of lost ones."""
    no_scheduler_time: LostTime = field(default_factory=LostTime)
    """How long this node has been without a scheduler."""
    relays: Relays = field(default_factory=Relays)
    """The servers that add up what the workers of their machine push."""
    fellows: frozenset[int] = frozenset()
    """The ids of the servers to which this server relays, or which relay to it."""

    def begin(
        self, roster: tuple[NodeInfo, ...], epoch: int = 1, attempts: Sequence[int] = ()
    ) -> None:
        """Set the roster: the cluster is complete. ``attempts`` are parallel to it."""
        self.roster, self.epoch = roster, epoch
        self.attempts = {
            node.node_id: count for node, count in zip(roster, attempts, strict=False) if count
        }
        self.uids = {node.node_id: node.uid for node in roster}
        self.node_ids = {node.uid: node.node_id for node in roster}

    def num_replaced(self, role: Role) -> int:
        """Return how many lost processes of a role were replaced. From any thread."""
        attempts = list(self.attempts.items())
        return sum(count for node_id, count in attempts if role_of(node_id) is role)

    def node(self, node_id: int) -> NodeInfo | None:
        """Return the roster's entry of a node."""
        return next((node for node in self.roster if node.node_id == node_id), None)

    def title(self, node_id: int) -> str:
        """Return a node's name for people; that of a server names a worker in its process."""
        node = self.node(node_id)
        if node is None:
            return f"{role_of(node_id).value} (node {node_id})"
        if node_id in self.vacant:
            return f"{node.name} (lost; waiting for another process)"
        worker = self.worker_of(node)
        return f"{node.name} in the process of {worker.title}" if worker else node.title

    def worker_of(self, server: NodeInfo) -> NodeInfo | None:
        """Return the worker in whose process this server runs, on one of its threads."""
        place = server.machine, server.host, server.pid  # PS_MACHINE may join several hosts
        here = [node for node in self.roster if (node.machine, node.host, node.pid) == place]
        is_served = server in here and [node.role for node in here] == _SERVED_WORKER
        return here[0] if is_served and server.role == Role.SERVER.value else None

    def peer_title(self, uid: str) -> str:
        """Return the title of the node that has this name in the van."""
        node_id = self.node_ids.get(uid)
        return uid if node_id is None else self.title(node_id)

    def neighbours(self) -> list[NodeInfo]:
        """Return the present nodes with which this node communicates."""
        return [
            node
            for node in self.roster
            if self._communicates_with(node)
            and node.node_id not in self.gone
            and node.node_id not in self.vacant
        ]

    def listeners(self) -> list[NodeInfo]:
        """Return the neighbours, and nodes that left but may still wait for answers."""
        return [
            node
            for node in self.roster
            if self._communicates_with(node)
            and node.node_id not in self.vacant
            and (node.node_id not in self.gone or self.is_leaving(node.node_id))
        ]

    def meet_relays(self, own: NodeInfo, relays: Relays) -> None:
        """Set the relays of the job, before ``begin``; ``own`` is this node's entry."""
        self.relays = relays
        if self.role is Role.SERVER:
            self.fellows = relays.fellows(own.rank)

    def connects_to(self, own: NodeInfo, node: NodeInfo) -> bool:
        """Return whether this node, ``own``, connects to ``node``, and not vice versa."""
        if node.role != Role.SERVER.value:
            return False
        return self.role is Role.WORKER or (node.node_id in self.fellows and own.rank < node.rank)

    def _communicates_with(self, node: NodeInfo) -> bool:
        return node.role != self.role.value or node.node_id in self.fellows

    def is_leaving(self, node_id: int) -> bool:
        """Return whether a node has said goodbye but may not have ended yet."""
        gone = self.gone.get(node_id)
        return gone is not None and gone.left and node_id not in self.ended

    def depart(self, node_id: int, *, left: bool, reason: str) -> Gone | None:
        """Note that a node is gone; return None if that was known or it is not a member."""
        node = self.node(node_id)
        if node is None or node_id in self.gone:
            return None
        self.vacant.pop(node_id, None)
        title = self.title(node_id)
        gone = Gone(node, left, reason, "" if title == node.title else title)
        self.gone[node_id] = gone
        return gone

    def vacate(self, node_id: int, attempt: int, reason: str) -> NodeInfo | None:
        """Note that a node's process is lost, and that its seat waits for another.

        Returns the entry of the process; None if that was known, or another one has the seat.
        """
        node = self.node(node_id)
        is_old = attempt < self.attempts.get(node_id, 0)
        if node is None or is_old or node_id in self.vacant or node_id in self.gone:
            return None
        self.vacant[node_id] = reason
        return node

    def seat(self, node: NodeInfo, attempt: int) -> NodeInfo | None:
        """Give a seat to another process; return the entry of the one before.

        Returns None if the seat does not exist, or if this is not news.
        """
        node_id = node.node_id
        before = self.node(node_id)
        if before is None or attempt <= self.attempts.get(node_id, 0):
            return None
        self.attempts[node_id] = attempt
        self.roster = tuple(node if each is before else each for each in self.roster)
        self.node_ids.pop(before.uid, None)
        self.uids[node_id], self.node_ids[node.uid] = node.uid, node_id
        for known in (self.vacant, self.gone):
            known.pop(node_id, None)
        for said in (self.told, self.ended, self.ending):
            said.discard(node_id)
        return before

    def has_gone(self, uid: str) -> bool:
        """Return whether the node with this name in the van is gone and has ended."""
        node = self.node_ids.get(uid)
        return node in self.gone and not self.is_leaving(node)

    def why_unreachable(
        self, nodes: Sequence[int], own: NodeInfo | None, *, may_wait: bool = False
    ) -> NodeLostError | UsageError | None:
        """Return the error if the node ``own`` cannot send to ``nodes``; else None.

        ``may_wait`` says whether to wait for the next process of a lost server.
        """
        if own is None:
            return UsageError("requests need a complete cluster; wait for node.ready first")
        for node in nodes:
            gone = self.gone.get(node)
            if gone is not None:
                return NodeLostError(gone.sentence, role=gone.node.role, rank=gone.node.rank)
            info = self.node(node)
            waits = may_wait and role_of(node) is Role.SERVER
            if info is not None and node in self.vacant and not waits:
                text = f"{info.title} is lost: {self.vacant[node]}"
                return NodeLostError(text, role=info.role, rank=info.rank)
            is_neighbour = info is not None and self._communicates_with(info)
            if not is_neighbour and node != own.node_id:
                return UsageError(
                    f"{own.title} cannot send to {self.title(node)}: they are not connected"
                )
        return None

    def live(self, role: Role) -> tuple[int, ...]:
        """Return the ranks of a role that are not gone."""
        return tuple(
            node.rank
            for node in self.roster
            if node.role == role.value and node.node_id not in self.gone
        )


def with_seated(
    members: Sequence[NodeInfo],
    attempts: Sequence[int],
    seated: Sequence[tuple[NodeInfo, int]],
) -> tuple[tuple[NodeInfo, ...], list[int]]:
    """Return a roster and its attempts after ``seated``: (entry, attempt) of seats."""
    found, counts = list(members), list(attempts)
    for node, attempt in seated:
        for place, before in enumerate(found):
            if before.node_id == node.node_id and attempt > counts[place]:
                found[place], counts[place] = node, attempt
    return tuple(found), counts


@dataclass(slots=True, eq=False, repr=False)
class _Said:
    about: int
    reason: str
    title: str
    until: float
    ended: str | None = None
    """Why the reporting member itself is gone; None if it is not."""


class LossReports:
    """Reports of lost nodes by members, and the members that wait for them.

    The scheduler decides from its own observations which node is lost, so that a member cannot
    remove another. But a member that loses another member ends too, and must not be named as the
    cause. So the scheduler holds back the news of its end until it can confirm the report.
    """

    def __init__(self) -> None:
        self._said: dict[int, _Said] = {}

    def note(self, speaker: int, about: int, reason: str, title: str, until: float) -> None:
        """Note that ``speaker`` reports the loss of ``about``; replaces earlier reports."""
        said = self._said.get(speaker)
        if said is None or said.ended is None:
            self._said[speaker] = _Said(about, reason, title, until)

    def puts_off(self, speaker: int, reason: str, now: float) -> bool:
        """Return whether to hold back the end of ``speaker``; ``ended`` returns it later."""
        said = self._said.get(speaker)
        if said is None or now >= said.until:
            return False
        if said.ended is None:
            word = f"it has lost {said.title}: {said.reason}"
            said.ended = f"{reason}; {word}" if reason else word
        return True

    def ended(self, now: float) -> list[tuple[int, str]]:
        """Return and remove members whose end was held back long enough, with reasons."""
        over = [
            speaker
            for speaker, said in self._said.items()
            if said.ended is not None and now >= said.until
        ]
        return [(speaker, self._said.pop(speaker).ended or "") for speaker in over]
