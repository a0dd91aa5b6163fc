"""What tests of misuse share: a store with a key, and the proof that it goes on as if nothing was.

Every store uses the optimizer ``test`` (weight + sum of the gradients), since ``dist_async``
needs one. ``w`` has several parts, so that a misuse that takes effect in half of them shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from workers import Workers

from kvstore import KVStore, optimizer

KINDS = ["local", "dist_sync", "dist_async"]
LARGE = 300
"""Elements of float64: ten parts of 256 bytes."""
PARTS = {"chunk_bytes": 256, "credit_bytes": 512}

Misuse = Callable[[KVStore], Any]


class Shared:
    """One cluster for all tests of a file, each of which gets stores of its own.

    What nodes make when they first talk, such as shared memory, is there before the first test.
    A test that fails leaves the next one a new cluster.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._begin()

    def _begin(self) -> None:
        self._workers = Workers(self._kind, **PARTS)
        self._workers.__enter__()
        ready(self._workers).run(grown)

    @contextmanager
    def lent(self) -> Iterator[Workers]:
        """The workers with new stores, which are closed afterwards."""
        workers = self._workers
        is_well = False
        try:
            workers.stores = workers.create()
            yield workers
            if not workers.has_failed:
                for kv in workers.stores:
                    kv.close()
                is_well = True
        finally:
            if not is_well:
                workers.has_failed = True
                self.close()
                self._begin()

    def close(self) -> None:
        self._workers.__exit__(None, None, None)


def ready(workers: Workers, key: Any = "w") -> Workers:
    """The store has ``test`` as its optimizer, and a key."""
    workers.run(lambda kv: kv.set_optimizer(optimizer.create("test")))
    workers.run(lambda kv: kv.init(key, np.zeros(LARGE)))
    return workers


def misused(workers: Workers, misuse: Misuse, error: Any, text: str, *, key: Any = "w") -> None:
    """``misuse`` raises ``error`` at who does it, and all go on as if nothing had been.

    One worker does it first, when the others are pushing already, and then all of them.
    """
    num_workers = workers.stores[0].num_workers
    for first in sorted({num_workers - 1, 0}, reverse=True):
        before = workers.stores[0].pull(key)

        def script(kv: KVStore, first: int = first) -> Any:
            if kv.rank >= first:
                with pytest.raises(error, match=text):
                    misuse(kv)
            return grown(kv, key)

        for value in workers.run(script):
            np.testing.assert_array_equal(value, before + num_workers)


def grown(kv: KVStore, key: Any = "w") -> Any:
    """The value after one push of ones by every worker."""
    kv.push(key, np.ones(LARGE))
    kv.wait(key)
    kv.barrier()
    value = kv.pull(key)
    kv.barrier()
    return value
