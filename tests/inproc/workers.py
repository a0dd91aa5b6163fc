"""The same script on every worker of a store, whatever its type, in one process.

::

    with Workers("dist_sync") as workers:
        values = workers.run(script)        # script(kv) on each worker, at the same time
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, TypeVar

from cluster import LIMIT_S, InprocCluster

import kvstore
from kvstore.kvstore import STORE_TYPES
from kvstore.server import install
from kvstore.stores.base import KVStore
from kvstore.stores.dist.store import create_dist

T = TypeVar("T")


class Workers:
    """One store, as each of its workers sees it. Local types have one worker."""

    def __init__(
        self, kind: str, num_workers: int = 2, num_servers: int = 2, **config: Any
    ) -> None:
        self.kind = kind
        self.cluster: InprocCluster | None = None
        self.stores: list[KVStore] = []
        self._num_workers = num_workers
        self.has_failed = False
        if kind.startswith("dist"):
            self.cluster = InprocCluster(num_workers, num_servers, prepare=install, **config)
        else:
            self._num_workers = 1

    def __enter__(self) -> Workers:
        if self.cluster is not None:
            self.cluster.__enter__()
        self._threads = ThreadPoolExecutor(self._num_workers)
        self.stores = self.create()
        return self

    def create(self) -> list[KVStore]:
        """One more store of the same type, on all workers."""
        if self.cluster is None:
            return [kvstore.create(self.kind)]
        canonical = STORE_TYPES[self.kind]
        return [create_dist(canonical, self.kind, node=node) for node in self.cluster.workers]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A worker that failed may leave others waiting for it; the cluster's end frees them.
        is_well = error is None and not self.has_failed
        self._threads.shutdown(wait=is_well)
        if self.cluster is not None:
            self.cluster.close(goodbye=is_well)

    def run(self, script: Callable[[KVStore], T], stores: list[KVStore] | None = None) -> list[T]:
        """What ``script`` returns on each worker, in rank order."""
        asked = [self._threads.submit(script, kv) for kv in stores or self.stores]
        done, _ = wait(asked, LIMIT_S, FIRST_EXCEPTION)
        try:
            for future in done:  # the one that failed, not the ones that wait for it
                future.result()
            return [future.result(LIMIT_S) for future in asked]
        except BaseException:
            self.has_failed = True
            raise
