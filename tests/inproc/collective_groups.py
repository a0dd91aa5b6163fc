"""Groups of workers for the tests of collective calls, over in-process clusters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cluster import LIMIT_S, InprocCluster

from pslite import CollectiveServer, Communicator, Future, Postoffice, Role

Array = np.ndarray[Any, Any]
SMALL_CHUNKS = {"chunk_bytes": 64}


def serve(node: Postoffice) -> None:
    if node.role is Role.SERVER:
        CollectiveServer(node)


def cluster_of(num_workers: int, num_servers: int, **config: Any) -> InprocCluster:
    return InprocCluster(num_workers, num_servers, prepare=serve, **config)


def groups(
    cluster: InprocCluster, *, rings: bool = False, any_order: bool = False, name: str = ""
) -> list[Communicator]:
    options = {"rings": rings or any_order, "any_order": any_order}
    return [Communicator(worker, name=name, **options) for worker in cluster.workers]


def sit_together(cluster: InprocCluster) -> None:
    """Worker i and server i read each other's frames in place."""
    for worker, server in zip(cluster.workers, cluster.servers, strict=False):
        worker.sit_beside(server)


def results(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(LIMIT_S) for future in futures]


def errors(futures: list[Future[Any]]) -> list[BaseException]:
    found: list[BaseException] = []
    for future in futures:
        with pytest.raises(Exception) as caught:
            future.result(LIMIT_S)
        found.append(caught.value)
    return found


def opened(members: list[Communicator]) -> list[Communicator]:
    """The same, whose rings are open: a test leaves nothing new behind."""
    results([member.all_gather(np.zeros(1)) for member in members])
    return members
