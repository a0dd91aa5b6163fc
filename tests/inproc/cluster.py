"""A whole cluster in this process, over the van without sockets: for tests.

::

    with InprocCluster(2, 1) as cluster:
        worker = pslite.KVWorker(cluster.workers[0], app=0)

Each node has its own I/O thread, as in a real job. Any number of clusters may run at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import pslite
from pslite.testing.inproc import InprocNetwork, InprocVan

#: Generous: the machine may be busy. Nothing waits that long when all is well.
LIMIT_S = 20.0


class InprocCluster:
    """One scheduler, servers and workers; started by ``with``, closed in a safe order.

    Args:
        prepare: called with the scheduler and each server before they join, to add apps.
        machines: the names of the workers' machines, where they are not all on this one.
        server_machines: those of the servers.
        config: fields of ``pslite.Config``, the same for all nodes.
    """

    def __init__(
        self,
        num_workers: int,
        num_servers: int,
        *,
        prepare: Callable[[pslite.Postoffice], None] | None = None,
        machines: Sequence[str] = (),
        server_machines: Sequence[str] = (),
        **config: Any,
    ) -> None:
        self._network = InprocNetwork()
        self._prepare = prepare
        self._machines = {"worker": machines, "server": server_machines}
        self._config = {"root_uri": "127.0.0.1", "root_port": 9091, **config}
        self._config.update(num_workers=num_workers, num_servers=num_servers)
        self._killed = False
        self.servers: list[pslite.Postoffice] = []
        self.workers: list[pslite.Postoffice] = []
        self.scheduler: pslite.Postoffice
        #: What the nodes had to say; nothing goes to stderr.
        self.lines: list[str] = []

    @property
    def nodes(self) -> list[pslite.Postoffice]:
        """All nodes that were started, the workers first: the order of closing."""
        scheduler = [self.scheduler] if hasattr(self, "scheduler") else []
        return [*self.workers, *self.servers, *scheduler]

    def __enter__(self) -> InprocCluster:
        try:
            self.scheduler = self._start("scheduler", None)
            for rank in range(self._config["num_servers"]):
                self.servers.append(self._start("server", rank))
            for rank in range(self._config["num_workers"]):
                self.workers.append(self._start("worker", rank))
            for node in self.nodes:
                node.ready.result(LIMIT_S)
        except BaseException:
            self.close(goodbye=False)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(goodbye=error is None)

    def close(self, *, goodbye: bool = True) -> None:
        """Close all nodes: workers say goodbye, then the others end by themselves.

        After a failed test or a ``kill``, or without ``goodbye``, all end at once.
        """
        goodbye = goodbye and not self._killed
        try:
            for worker in self.workers if goodbye else ():
                worker.leave()  # all at the same time: each stays for the others' rounds
            for node in self.nodes:
                if goodbye and node not in self.workers:
                    node.finished.result(LIMIT_S)
                node.close(goodbye=goodbye)
        finally:
            for node in self.nodes:
                node.close(goodbye=False)

    def kill(self, node: pslite.Postoffice) -> None:
        """End a node without a goodbye. The others notice after ``lost_after_s``."""
        self._killed = True
        node.close(goodbye=False)

    def replace(self, worker: pslite.Postoffice) -> pslite.Postoffice:
        """Kill a worker and start another process in its place; return that one's node."""
        rank = self.workers.index(worker)
        self.kill(worker)
        self.workers[rank] = other = self._start("worker", rank)
        other.ready.result(LIMIT_S)
        return other

    def _start(self, role: str, rank: int | None) -> pslite.Postoffice:
        config = dict(self._config)
        if self._machines.get(role):
            config["machine"] = self._machines[role][rank or 0]
        return pslite.start(
            pslite.Config(role=role, task_id=rank, **config),
            make_van=lambda uid: InprocVan(self._network, uid),
            prepare=None if role == "worker" else self._prepare,
            write=self.lines.append,
            wait=False,
        )
