"""The store of a fit: workers agree on their inputs, and gradients become updates.

``agree`` compares the workers' data first, so that no worker waits for a batch that never comes.
``OnStore`` and ``Here`` are the two places where an update can happen: on the store, or in every
worker if the store can only add. Everything runs on the caller's thread. Read next: ``loop.py``,
which uses them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.arrays import Array
from kvstore.errors import ArgumentTypeError, DuplicateKeyError
from kvstore.mxnet.fit.network import (
    EpochPlan,
    HostArray,
    check_same_start,
    is_synchronous,
    plan_epochs,
    rescale_grad,
)
from kvstore.optimizer import Optimizer
from kvstore.optimizer import create as create_optimizer
from kvstore.optimizer.scripted import check_travels
from kvstore.stores.base import KVStore, KVStoreBase
from kvstore.stores.local.store import LocalKVStore
from pslite.errors import UsageError

Weights = list[list[Array]]
"""The copies of each parameter: one for each device."""

DATA_KEY = "__data_of_workers"
"""The key under which the workers of a synchronous job compare their data at the start."""

LARGE_ELEMENTS = 16 * 1024 * 1024
"""If an array has more elements than this, a ``local`` store only adds (``create_kvstore``)."""


class OnStore:
    """The store of this package updates: one round trip exchanges the whole model.

    ``store`` receives the gradients; ``states`` is the store with the optimizer's states.
    """

    def __init__(self, store: KVStore, optimizer: Optimizer) -> None:
        self.states = self.store = store
        self._optimizer = optimizer

    def start(self, names: list[str], values: list[HostArray], weights: Weights) -> None:
        """Set every device's values to the first values of rank 0."""
        self.store.set_optimizer(self._optimizer)
        with new_keys():
            self.store.init(names, values)
        self.store.pull(names, out=weights)

    def step(self, names: list[str], gradients: Weights, weights: Weights) -> None:
        """Add up the gradients, update once, and write the new values into ``weights``."""
        self.store.pushpull(names, gradients, out=weights)

    def finish(self) -> None:
        """Wait for every worker's last update."""
        self.store.barrier()


class Here:
    """The worker updates; the store only adds, as plug-ins do.

    Each worker updates its own copy of the weights, and all copies stay equal. Each call to the
    store has only one key, because a plug-in need not accept lists. Otherwise as ``OnStore``.
    """

    def __init__(self, store: KVStoreBase, optimizer: Optimizer) -> None:
        self.store = store
        self.states = LocalKVStore()
        self.states.set_optimizer(optimizer)

    def start(self, names: list[str], values: list[HostArray], weights: Weights) -> None:
        for index, (name, value) in enumerate(zip(names, values, strict=True)):
            self.store.broadcast(name, value, out=weights[index], priority=-index)
        self.states.init(names, [copies[0] for copies in weights])

    def step(self, names: list[str], gradients: Weights, weights: Weights) -> None:
        for index, name in enumerate(names):
            self.store.pushpull(name, gradients[index], out=gradients[index], priority=-index)
        self.states.pushpull(names, [copies[0] for copies in gradients], out=weights)

    def finish(self) -> None:
        """Do nothing: the last sum needed every worker."""


Updates = OnStore | Here
"""The place where gradients of all devices and workers become new weights."""


def updates_of(
    store: KVStoreBase, optimizer: str | Optimizer, numbers: Mapping[str, Any], batch_size: int
) -> Updates:
    """Return where a fit updates: on the store if it supports that, else here.

    ``optimizer`` is ready, or the name of one with these ``numbers``.
    """
    if not isinstance(optimizer, Optimizer):
        kind = "dist_sync" if adds_all_workers(store) else store.type
        factor = rescale_grad(kind, batch_size, store.num_workers)
        optimizer = create_optimizer(optimizer, **{"rescale_grad": factor, **numbers})
        check_travels(optimizer)
    if isinstance(store, KVStore) and store.is_capable(KVStore.OPTIMIZER):
        return OnStore(store, optimizer)
    return Here(store, optimizer)


def check_store(kvstore: object) -> None:
    """Raise ``ArgumentTypeError`` unless this is a store, the name of a type or None."""
    if kvstore is not None and not isinstance(kvstore, str | KVStoreBase):
        raise ArgumentTypeError(
            f"kvstore must be a KVStore, the name of a type or None, got {type(kvstore).__name__}"
        )


@contextmanager
def opened(kvstore: KVStoreBase | str | None) -> Iterator[KVStoreBase]:
    """Yield the store, or a new one of this type that is closed afterwards.

    None means a local store.
    """
    check_store(kvstore)
    if isinstance(kvstore, KVStoreBase):
        yield kvstore
        return
    from kvstore.kvstore import create

    store = create(kvstore or "local")
    try:
        yield store
    finally:
        close = getattr(store, "close", None)  # a plug-in need not have one
        if close is not None:
            close()


def exchange(store: KVStoreBase, mine: NDArray[np.int64]) -> NDArray[np.int64]:
    """Exchange rows: return each worker's, in rank order, after one round."""
    from kvstore.stores.dist.store import DistKVStore, create_dist

    if isinstance(store, DistKVStore):  # a store of its own: checkpoints do not have this key
        store = create_dist("dist_sync", "dist_sync", node=store.node)
    table = np.zeros((store.num_workers, len(mine)), np.int64)
    result = np.zeros_like(table)
    with new_keys():
        store.broadcast(DATA_KEY, table, out=[result])
    if isinstance(store, DistKVStore) and store.catches_up:
        return result  # the lost worker whose place this one takes has exchanged them
    table[store.rank] = mine
    store.pushpull(DATA_KEY, [table], out=[result])
    if not np.array_equal(result[store.rank], mine):
        raise UsageError(
            "fit needs a store without an optimizer, and this store has one; create a new store"
        )
    return result


@contextmanager
def new_keys() -> Iterator[None]:
    """Explain the error of a key that exists already in terms of a fit."""
    try:
        yield
    except DuplicateKeyError as error:
        raise UsageError(
            "the store already has keys with the names of the parameters, perhaps from another "
            "fit; create a new store, or pass the name of a store type"
        ) from error


def agree(
    store: KVStoreBase,
    described: NDArray[np.int64],
    start: NDArray[np.int64],
    sharded_here: bool,
    saves: bool,
    logger: logging.Logger,
) -> EpochPlan:
    """Agree on this worker's samples; a synchronous job compares all workers first.

    ``described`` comes from ``describe_data``; ``start`` is a row for ``check_same_start``.
    Asynchronous workers never wait for each other's batches, so they need not agree, unless they
    save their progress together (``saves``).
    """
    rank, num_workers = store.rank, store.num_workers
    if num_workers > 1 and (saves or adds_all_workers(store)):
        said = exchange(store, np.concatenate([described, start]))
        rows = said[:, : len(described)]
        check_same_start(said[:, len(described) :])
    else:
        rows = np.tile(described, (num_workers if sharded_here else 1, 1))
    plan, warning = plan_epochs(rows, rank, sharded_here)
    if warning is not None and rank == 0:
        logger.warning(warning)
    return plan


def adds_all_workers(store: KVStoreBase) -> bool:
    """Return whether an update uses the gradients of all workers.

    This is true of every plug-in.
    """
    return not isinstance(store, KVStore) or is_synchronous(store.type)


def create_kvstore(
    kvstore: KVStoreBase | str | None, num_device: int, arg_params: Mapping[str, HostArray]
) -> tuple[KVStoreBase | None, bool]:
    """Return the store to train with (or None), and whether it should update.

    It follows the original's function of this name: one device in one process needs no store, and a
    ``local`` store with an array of more than 16 Mi elements only adds. ``FeedForward`` itself
    always uses a store. Raises ``ArgumentTypeError``.
    """
    if kvstore is None:
        return None, False
    if isinstance(kvstore, KVStoreBase):
        return kvstore, kvstore.is_capable(KVStoreBase.OPTIMIZER)
    if not isinstance(kvstore, str):
        raise ArgumentTypeError(
            f"kvstore must be a KVStore, a str or None, got {type(kvstore).__name__}"
        )
    if num_device == 1 and "dist" not in kvstore:
        return None, False
    from kvstore.kvstore import create

    store = create(kvstore)
    largest = max((np.size(value) for value in arg_params.values()), default=0)
    only_adds = kvstore == "local" and largest > LARGE_ELEMENTS
    return store, not only_adds and store.is_capable(KVStoreBase.OPTIMIZER)
