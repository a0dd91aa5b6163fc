"""Names for the numbers that nodes exchange: roles, node ids, ranks, groups.

The types are distinct, so that mypy rejects a rank in place of a node id. This module holds only
pure values and imports no other module of the project. Read next: ``config.py``.

Node ids are computed as in ps-lite (``include/ps/internal/postoffice.h``), whose logs print them:
the scheduler is 1, server rank r is 2r+8, worker rank r is 2r+9, and 1, 2, 4 and their sums name
groups.
"""

from __future__ import annotations

import enum
from typing import NamedTuple, NewType

NodeId = NewType("NodeId", int)
Rank = NewType("Rank", int)

SCHEDULER_ID = NodeId(1)
SCHEDULER_GROUP = 1
SERVER_GROUP = 2
WORKER_GROUP = 4
ALL_GROUP = 7


class Role(str, enum.Enum):
    """The role of a process in the cluster."""

    SCHEDULER = "scheduler"
    SERVER = "server"
    WORKER = "worker"

    @property
    def letter(self) -> str:
        """H, S or W: the abbreviation of the role in ps-lite's log lines."""
        return {"scheduler": "H", "server": "S", "worker": "W"}[self.value]


def node_id(role: Role, rank: int) -> NodeId:
    """Return the id of a node, computed as in ps-lite."""
    if role is Role.SCHEDULER:
        return SCHEDULER_ID
    return NodeId(2 * rank + (8 if role is Role.SERVER else 9))


def role_of(node: int) -> Role:
    """Return the role of the node with this id."""
    if node == SCHEDULER_ID:
        return Role.SCHEDULER
    return Role.SERVER if node % 2 == 0 else Role.WORKER


def rank_of(node: int) -> Rank:
    """Return the rank of the node with this id."""
    return Rank(max((node - 8) // 2, 0))


def group_members(group: int, num_workers: int, num_servers: int) -> frozenset[int]:
    """Return the node ids of a group: a sum of 1, 2 and 4, or a node id."""
    if group > ALL_GROUP:
        return frozenset({group})
    members: set[int] = set()
    if group & SCHEDULER_GROUP:
        members.add(SCHEDULER_ID)
    if group & SERVER_GROUP:
        members.update(node_id(Role.SERVER, rank) for rank in range(num_servers))
    if group & WORKER_GROUP:
        members.update(node_id(Role.WORKER, rank) for rank in range(num_workers))
    return frozenset(members)


def group_title(group: int) -> str:
    """Return the name of a group for people, such as ``the workers``."""
    roles = {SCHEDULER_GROUP: "the scheduler", SERVER_GROUP: "the servers"}
    roles[WORKER_GROUP] = "the workers"
    if group > ALL_GROUP:
        return f"node {group}"
    return " and ".join(title for bit, title in roles.items() if group & bit) or f"group {group}"


class NodeInfo(NamedTuple):
    """A registered node: one entry of the roster."""

    role: str
    rank: int
    uid: str
    """The name of the node's van."""
    incarnation: int
    """A random number of the process: never 0, different after every restart."""
    address: str
    """``tcp://host:port`` of its listening socket; empty for a node that only connects."""
    host: str
    """Host name, for people."""
    machine: str
    """The identity of the running kernel, which tells hosts apart better than a name.

    If PS_MACHINE is set, this is its value instead. Nodes with the same value then share a network
    connection, but perhaps not process ids.
    """
    pid: int

    @property
    def node_id(self) -> NodeId:
        return node_id(Role(self.role), self.rank)

    @property
    def name(self) -> str:
        """``worker 1`` or ``scheduler``."""
        return self.role if self.role == "scheduler" else f"{self.role} {self.rank}"

    @property
    def title(self) -> str:
        """``worker 1 (pid 4711 on host)``, for messages."""
        return f"{self.name} (pid {self.pid} on {self.host})"
