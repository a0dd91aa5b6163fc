"""Ranks of a PyTorch process group that are threads of one process, over an in-process cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from cluster import LIMIT_S, InprocCluster

from kvstore.frameworks.torch.cluster import GroupCluster
from kvstore.frameworks.torch.process_group import ProcessGroupKVStore
from kvstore.server import install


@contextmanager
def ranks_of(
    size: int, num_servers: int = 2, *, timeout_s: float = LIMIT_S, **config: Any
) -> Iterator[list[ProcessGroupKVStore]]:
    """A group of each rank, in its order."""
    with InprocCluster(size, num_servers, prepare=install, **config) as cluster:
        groups = []
        for rank, node in enumerate(cluster.workers):
            group = ProcessGroupKVStore(rank, size)
            members = GroupCluster(node, tuple(range(size)), lambda: None)
            group.begin(members, members.ranks, "0", timeout_s, None)
            groups.append(group)
        # The rings of one machine are opened, with the thread of each rank: a call of arrays whose
        # sizes may differ always needs it.
        one = np.zeros(1)
        for future in [group.calls.all_gather(one) for group in groups]:
            future.result(LIMIT_S)
        yield groups
        for group in groups:
            group.shutdown()


def on_all(
    groups: list[ProcessGroupKVStore], run: Callable[[ProcessGroupKVStore], Any]
) -> list[Any]:
    """What ``run`` returns or raises on each rank, all at the same time."""
    found: list[Any] = [None] * len(groups)

    def rank(number: int) -> None:
        try:
            found[number] = run(groups[number])
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
        assert not thread.is_alive(), "a rank still waits"
    return found
