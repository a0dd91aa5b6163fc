"""Names for the numbers that nodes exchange: roles, node ids, ranks, groups.

Distinct types, so that mypy refuses a rank where a node id is meant. Pure values; this
module imports nothing of the project. Next: ``config.py``.

The arithmetic of node ids is ps-lite's (``include/ps/internal/postoffice.h``): the
scheduler is 1, server rank r is 2r+8, worker rank r is 2r+9, and 1, 2, 4 and their sums
name groups. Users of the original meet these numbers in its logs.
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
        """H, S or W, as ps-lite's log lines abbreviate the roles."""
        return {"scheduler": "H", "server": "S", "worker": "W"}[self.value]


def node_id(role: Role, rank: int) -> NodeId:
    """Return the id of a node, as ps-lite counts it."""
    if role is Role.SCHEDULER:
        return SCHEDULER_ID
    return NodeId(2 * rank + (8 if role is Role.SERVER else 9))


def role_of(node: int) -> Role:
    """Return the role that a node id stands for."""
    if node == SCHEDULER_ID:
        return Role.SCHEDULER
    return Role.SERVER if node % 2 == 0 else Role.WORKER


def rank_of(node: int) -> Rank:
    """Return the rank that a node id stands for."""
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
    """Return a group as people call it: ``the workers``."""
    roles = {SCHEDULER_GROUP: "the scheduler", SERVER_GROUP: "the servers"}
    roles[WORKER_GROUP] = "the workers"
    if group > ALL_GROUP:
        return f"node {group}"
    return " and ".join(title for bit, title in roles.items() if group & bit) or f"group {group}"


class NodeInfo(NamedTuple):
    """One registered node, as the roster lists it."""

    role: str
    rank: int
    uid: str
    """The name under which its van is known."""
    incarnation: int
    """The process's own number: random, never 0, different after every restart."""
    address: str
    """``tcp://host:port`` of its listening socket; empty for a node that only connects."""
    host: str
    """Host name, for people."""
    machine: str
    """Identity of the running kernel, so that "same host" is not guessed from a name.

    Or what PS_MACHINE says. Then it tells whose network connection is shared, and does not promise
    that process ids are.
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
