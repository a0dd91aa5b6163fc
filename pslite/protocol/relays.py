"""``Relays``: which servers add up what the workers of their machine push. Pure.

Where several workers share a machine with a server, each would send its gradients to the servers of
the other machines, and get the weights from there. Instead, the server of the machine adds them up
and sends the sum: it *relays* for these workers. To the server that has the weights, the *owner*,
such a machine is one contributor. If a machine has several servers, they relay in turn, each for
some owners. All nodes compute this from the roster, and so agree.

A *contributor* is a number: a worker's rank, or -1 - rank of a relaying server.
"""

from __future__ import annotations

from collections.abc import Sequence

from pslite.config import Config
from pslite.ids import NodeInfo, Role, node_id


def contributor_of(node: int) -> int:
    """Return the number by which a server knows a worker, or a server that relays."""
    half = node // 2
    return half - 4 if node % 2 else 3 - half


def node_of(contributor: int) -> int:
    """Return the id of the node with this number; the reverse of ``contributor_of``."""
    return 2 * contributor + 9 if contributor >= 0 else 6 - 2 * contributor


class Relays:
    """The relays of a job with this roster; none without one."""

    def __init__(self, roster: Sequence[NodeInfo] = ()) -> None:
        #: Machine -> the ranks of its workers and its servers, each in order.
        self._workers: dict[str, list[int]] = {}
        self._servers: dict[str, list[int]] = {}
        #: The machine of each server.
        self._machines: dict[int, str] = {}
        for node in sorted(roster, key=lambda node: node.rank):
            if node.role == Role.WORKER.value:
                self._workers.setdefault(node.machine, []).append(node.rank)
            elif node.role == Role.SERVER.value:
                self._servers.setdefault(node.machine, []).append(node.rank)
                self._machines[node.rank] = node.machine
        pairs = self._workers.items()
        adds_up = any(len(ranks) > 1 and machine in self._servers for machine, ranks in pairs)
        self._has_any = adds_up and len(self._servers) > 1

    def __bool__(self) -> bool:
        """Return whether any server relays."""
        return self._has_any

    def of_machine(self, machine: str, owner: int) -> int | None:
        """Return the rank of the server that relays from a machine to ``owner``.

        None if the machine's workers exchange data with the owner themselves.
        """
        servers, workers = self._servers.get(machine, ()), self._workers.get(machine, ())
        if len(workers) < 2 or not servers or machine == self._machines.get(owner, machine):
            return None
        return servers[owner % len(servers)]

    def contributors(self, owner: int) -> tuple[int, ...]:
        """Return the contributors to the rounds of an owner, in order."""
        found: list[int] = []
        for machine, ranks in self._workers.items():
            relay = self.of_machine(machine, owner)
            found += ranks if relay is None else [-1 - relay]
        return tuple(sorted(found))

    def relays_to(self, owner: int) -> tuple[int, ...]:
        """Return the ranks of the servers that relay to an owner."""
        return tuple(-1 - number for number in self.contributors(owner) if number < 0)

    def owners(self, server: int) -> tuple[int, ...]:
        """Return the ranks of the owners to which a server relays."""
        machine = self._machines.get(server, "")
        return tuple(owner for owner in self._machines if self.of_machine(machine, owner) == server)

    def members(self, server: int) -> tuple[int, ...]:
        """Return the ranks of the workers for which a server relays."""
        machine = self._machines.get(server, "")
        return tuple(self._workers[machine]) if self.owners(server) else ()

    def fellows(self, server: int) -> frozenset[int]:
        """Return the ids of the servers to which a server relays, or that relay to it."""
        ranks = (*self.owners(server), *self.relays_to(server))
        return frozenset(node_id(Role.SERVER, rank) for rank in ranks)


def relays_of(roster: Sequence[NodeInfo], config: Config) -> Relays:
    """Return the relays of a job: none if lost nodes may be replaced, or if set so."""
    is_fixed = not (config.rejoin_timeout_s or config.standbys)
    return Relays(roster if is_fixed and config.hierarchical == "auto" else ())
