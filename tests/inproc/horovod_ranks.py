"""Ranks of kvstore.horovod that are threads of one process, over an in-process cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import kvstore.horovod as hvd
import numpy as np
import pytest
from cluster import LIMIT_S, InprocCluster

from kvstore.frameworks.horovod import session
from kvstore.frameworks.horovod.session import HorovodSession
from kvstore.server import install

LARGE = 1 << 14
"""Floats of 128 KiB: arrays of that size go by shared memory."""
OnAll = Callable[[Callable[[int], Any]], list[Any]]


@contextmanager
def ranks_of(size: int, num_servers: int = 1, **config: Any) -> Iterator[OnAll]:
    """What runs a function on each rank at the same time; gives what it returned or raised."""
    with InprocCluster(size, num_servers, prepare=install, **config) as cluster:
        found = [HorovodSession(node, range(size)) for node in cluster.workers]
        with sessions(found) as on_all:
            # Opens the rings and starts their threads: a test leaves nothing new behind.
            values(on_all(lambda _: hvd.allreduce(np.zeros(8 * LARGE), name="the first")))
            yield on_all


@contextmanager
def sessions(found: Sequence[HorovodSession]) -> Iterator[OnAll]:
    """The same, with sessions that were made before."""
    of_thread = threading.local()

    def on_all(run: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * len(found)

        def rank(number: int) -> None:
            of_thread.session = found[number]
            try:
                results[number] = run(number)
            except Exception as error:
                results[number] = error

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(found))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LIMIT_S)
            assert not thread.is_alive(), f"a rank still waits; the others: {results}"
        return results

    usual = session.current
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "current", lambda: getattr(of_thread, "session", None) or usual())
        yield on_all
    for each in found:
        each.close()


def values(results: list[Any]) -> list[Any]:
    """The results, of which none is an error."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results
