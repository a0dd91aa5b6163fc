"""``FeedForward``: trains a network over devices and workers through a key-value store.

Each batch is cut over the devices, every device computes gradients with its own copy of the
parameters, and one ``pushpull`` moves the whole model: the store adds the gradients of all
devices and workers, updates, and the new weights land in every copy. The same loop serves one
device and a cluster. Devices compute on a small thread pool that lives as long as a fit; the
store is only ever called from the caller's thread. Read next: ``training.py`` for what a network
must offer and how batches are cut and dealt out, then ``examples/image_classification``.

Source of names and flow: python/mxnet/model.py of the original (``FeedForward``, 1.x).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.arrays import Array, adapter_on
from kvstore.base import Keys, KVStore, Values
from kvstore.context import Context, cpu
from kvstore.errors import ArgumentTypeError, DuplicateKeyError
from kvstore.optimizer import Number, Optimizer
from kvstore.optimizer import create as create_optimizer
from kvstore.training import (
    EpochPlan,
    HostArray,
    Initializer,
    Network,
    Progress,
    checked_data,
    describe_data,
    initial_params,
    is_synchronous,
    plan_epochs,
    rescale_grad,
    shard,
    split_input_slice,
)
from pslite.errors import UsageError

__all__ = ["FeedForward", "Initializer", "Network", "Progress", "shard", "split_input_slice"]

Callback = Callable[[Progress], None]
Callbacks = Callback | Sequence[Callback] | None

DATA_KEY = "__data_of_workers"
"""Under this key the workers of a synchronous job compare their data before they start."""


class FeedForward:
    """A network, its parameters, and how to train it.

    ``symbol`` is the network (see ``Network``), ``ctx`` one device or a list of them,
    ``numpy_batch_size`` the samples per step of this worker over all its devices.
    ``arg_params`` holds the parameters as NumPy arrays, None until they are given or made; a
    fit starts from them and replaces them. ``optimizer`` is a registered name, created with
    ``optimizer_params``, or a ready ``Optimizer``, whose ``rescale_grad`` then is the caller's
    business. Equal seeds give equal first values and equal orders of samples.

    One thread at a time may use an object.
    """

    def __init__(
        self,
        symbol: Network,
        ctx: Context | Sequence[Context] | None = None,
        num_epoch: int | None = None,
        optimizer: str | Optimizer = "sgd",
        initializer: Initializer | None = None,
        numpy_batch_size: int = 128,
        arg_params: dict[str, HostArray] | None = None,
        begin_epoch: int = 0,
        seed: int = 0,
        **optimizer_params: Number,
    ) -> None:
        if isinstance(optimizer, Optimizer) and optimizer_params:
            raise UsageError(
                f"{', '.join(optimizer_params)} would have no effect on a ready optimizer; give "
                f"its name instead, or the numbers when you create it"
            )
        if numpy_batch_size < 1:
            raise UsageError(f"numpy_batch_size must be at least 1, got {numpy_batch_size}")
        self.symbol = symbol
        self.ctx = [cpu()] if ctx is None else [ctx] if isinstance(ctx, Context) else list(ctx)
        self.num_epoch = num_epoch
        self.optimizer = optimizer
        self.initializer = initializer
        self.numpy_batch_size = numpy_batch_size
        self.arg_params = arg_params
        self.begin_epoch = begin_epoch
        self.seed = seed
        self.optimizer_params = optimizer_params

    def fit(
        self,
        X: Any,  # noqa: N803 (the original's name)
        y: Any = None,
        eval_data: tuple[Any, Any] | None = None,
        *,
        kvstore: KVStore | str | None = "local",
        work_load_list: Sequence[float] | None = None,
        batch_end_callback: Callbacks = None,
        epoch_end_callback: Callbacks = None,
        shuffle: bool = True,
        shard: bool = True,
        logger: logging.Logger | None = None,
    ) -> None:
        """Train from epoch ``begin_epoch`` to ``num_epoch`` and keep the result in ``arg_params``.

        ``X`` is (n, ...) of the dtype that the network takes, ``y`` (n,) of integers, NumPy
        arrays that are only read. With a ``dist`` store every worker gives the full data and
        fit deals them out (``kvstore.model.shard``); with ``shard=False`` each trains on what
        it gives, and fit sees to an equal number of batches. A batch that runs out of samples
        is filled from the start of the epoch's order.

        A store given by name lives as long as the call; one that is passed in stays open and
        serves one fit. ``work_load_list`` weighs the devices. ``epoch_end_callback`` sees
        ``arg_params`` of that moment. In the end all workers wait for each other and hold the
        store's final weights. Raises ``UsageError`` for what does not fit together, before
        the first batch, and the store's errors.
        """
        samples, labels = checked_data(X, y)
        if self.num_epoch is None:
            raise UsageError("fit needs num_epoch, the number of the epoch to stop before")
        loads = [1.0] * len(self.ctx) if work_load_list is None else list(work_load_list)
        if len(loads) != len(self.ctx):
            raise UsageError(
                f"work_load_list has {len(loads)} numbers for {len(self.ctx)} devices; give one "
                f"for each"
            )
        slices = split_input_slice(self.numpy_batch_size, loads)
        evaluation = None if eval_data is None else checked_data(*eval_data)
        self.arg_params = initial_params(
            self.symbol, samples.shape[1:], self.seed, self.initializer, self.arg_params
        )
        with _opened(kvstore) as store, ThreadPoolExecutor(len(slices)) as pool:
            plan = self._agree(store, samples, labels, shard, logger or logging.getLogger(__name__))
            replicas = [
                _Replica(context, self.symbol, part, self.arg_params)
                for context, part in zip(self.ctx, slices, strict=True)
            ]
            training = _Training(store, replicas, pool)
            training.start(self.arg_params, self._make_optimizer(store))
            for epoch in range(self.begin_epoch, self.num_epoch):
                order = self._order(plan, len(labels), epoch, shuffle)
                progress = training.run_epoch(epoch, order, samples, labels, batch_end_callback)
                self._end_epoch(replicas[0], progress, evaluation, epoch_end_callback, logger)
            training.finish()
            self.arg_params = replicas[0].to_host()

    def score(self, X: Any, y: Any) -> float:  # noqa: N803 (the original's name)
        """The share of the samples whose most likely class is their label, in [0, 1]."""
        samples, labels = checked_data(X, y)
        return float(np.mean(self.predict(samples).argmax(axis=1) == labels))

    def predict(self, X: Any) -> HostArray:  # noqa: N803 (the original's name)
        """Class probabilities, a new NumPy array (n, classes), computed on the first device.

        Raises ``UsageError`` when there are no parameters yet.
        """
        if self.arg_params is None:
            raise UsageError("there are no parameters yet: call fit first, or give arg_params")
        samples = np.asarray(X)
        replica = _Replica(self.ctx[0], self.symbol, slice(None), self.arg_params)
        batch = self.numpy_batch_size
        starts = range(0, max(len(samples), 1), batch)
        return np.concatenate([replica.predict(samples[at : at + batch]) for at in starts])

    def _agree(
        self,
        store: KVStore,
        samples: HostArray,
        labels: NDArray[np.int64],
        sharded_here: bool,
        logger: logging.Logger,
    ) -> EpochPlan:
        """What this worker visits; a synchronous job first compares what its workers hold.

        Asynchronous workers never wait for each other's batches, so they need not agree.
        """
        mine = describe_data(samples, labels, self.numpy_batch_size)
        rank, num_workers = store.rank, store.num_workers
        if num_workers > 1 and is_synchronous(store.type):
            described = _exchange(store, mine)
        else:
            described = np.tile(mine, (num_workers if sharded_here else 1, 1))
        plan, warning = plan_epochs(described, rank, sharded_here)
        if warning is not None and rank == 0:
            logger.warning(warning)
        return plan

    def _order(
        self, plan: EpochPlan, num_samples: int, epoch: int, shuffle: bool
    ) -> NDArray[np.int64]:
        return shard(
            num_samples,
            plan.rank,
            plan.num_workers,
            batch_size=self.numpy_batch_size,
            num_batches=plan.num_batches,
            seed=self.seed,
            epoch=epoch,
            shuffle=shuffle,
        )

    def _make_optimizer(self, store: KVStore) -> Optimizer:
        if isinstance(self.optimizer, Optimizer):
            return self.optimizer
        factor = rescale_grad(store.type, self.numpy_batch_size, store.num_workers)
        return create_optimizer(self.optimizer, **{"rescale_grad": factor, **self.optimizer_params})

    def _end_epoch(
        self,
        replica: _Replica,
        progress: Progress,
        evaluation: tuple[HostArray, NDArray[np.int64]] | None,
        callbacks: Callbacks,
        logger: logging.Logger | None,
    ) -> None:
        self.arg_params = replica.to_host()
        if evaluation is not None:
            progress = replace(progress, eval_accuracy=self.score(*evaluation))
        if logger is not None:
            logger.info("%s", progress)
        _call(callbacks, progress)


class _Replica:
    """One device: its share of every batch and its own copy of the parameters.

    ``compute`` and ``predict`` may run on any one thread at a time.
    """

    def __init__(
        self, context: Context, network: Network, part: slice, params: dict[str, HostArray]
    ) -> None:
        self._context = context
        self._network = network
        self._part = part
        self._adapter = adapter_on(context)
        with self._adapter.on(context):
            self.params = {
                name: self._adapter.copy(self._adapter.to_context(value, context))
                for name, value in params.items()
            }

    def compute(
        self, batch: tuple[HostArray, NDArray[np.int64]]
    ) -> tuple[float, int, dict[str, Array]]:
        """Loss sum, right answers and gradients of this device's share of a batch."""
        with self._adapter.on(self._context):
            x, y = (self._adapter.to_context(part[self._part], self._context) for part in batch)
            loss_sum, correct_count, gradients = self._network.loss_and_gradients(self.params, x, y)
            return float(loss_sum), int(correct_count), dict(gradients)

    def predict(self, samples: HostArray) -> HostArray:
        """Class probabilities on the host."""
        with self._adapter.on(self._context):
            x = self._adapter.to_context(samples, self._context)
            return self._adapter.to_host(self._network.predict(self.params, x))

    def to_host(self) -> dict[str, HostArray]:
        """New NumPy arrays with the parameters."""
        return {name: np.array(self._adapter.to_host(own)) for name, own in self.params.items()}


class _Training:
    """The loop of one fit: the store, the devices and what the store calls the parameters."""

    def __init__(
        self, store: KVStore, replicas: Sequence[_Replica], pool: ThreadPoolExecutor
    ) -> None:
        self._store = store
        self._replicas = replicas
        # One device computes on the caller's thread: a hand-over would only cost time.
        self._map: Callable[..., Iterator[Any]] = pool.map if len(replicas) > 1 else map
        self._names = list(replicas[0].params)
        self._weights = [[replica.params[name] for replica in replicas] for name in self._names]

    def start(self, params: dict[str, HostArray], optimizer: Optimizer) -> None:
        """Hand optimizer and first values to the store; those of rank 0 reach every device."""
        self._store.set_optimizer(optimizer)
        _init_once(self._store, self._names, [params[name] for name in self._names])
        self._store.pull(self._names, out=self._weights)

    def run_epoch(
        self,
        epoch: int,
        order: NDArray[np.int64],
        samples: HostArray,
        labels: NDArray[np.int64],
        callbacks: Callbacks,
    ) -> Progress:
        """One batch for each row of ``order``; returns the progress at its end."""
        began_s = time.perf_counter()
        loss_sum, correct_count = 0.0, 0
        num_batches, batch_size = order.shape
        for nbatch, chosen in enumerate(order, start=1):
            losses, corrects = self._step((samples[chosen], labels[chosen]))
            loss_sum += losses
            correct_count += corrects
            seen = nbatch * batch_size
            progress = Progress(
                epoch=epoch,
                nbatch=nbatch,
                num_batches=num_batches,
                samples_per_s=seen / max(time.perf_counter() - began_s, 1e-9),
                loss=loss_sum / seen,
                accuracy=correct_count / seen,
            )
            _call(callbacks, progress)
        return progress

    def finish(self) -> None:
        """Wait until every worker's last update is in, then take the final weights."""
        self._store.barrier()
        self._store.pull(self._names, out=self._weights)

    def _step(self, batch: tuple[HostArray, NDArray[np.int64]]) -> tuple[float, int]:
        """Gradients on all devices, then one round through the store for the whole model."""
        results = list(self._map(_Replica.compute, self._replicas, [batch] * len(self._replicas)))
        for _, _, gradients in results:
            if gradients.keys() != set(self._names):
                raise UsageError(
                    f"the network has the parameters {', '.join(sorted(self._names))} but gives "
                    f"gradients for {', '.join(sorted(gradients))}"
                )
        gradients_by_name = [[grads[name] for _, _, grads in results] for name in self._names]
        self._store.pushpull(self._names, gradients_by_name, out=self._weights)
        return sum(loss for loss, _, _ in results), sum(count for _, count, _ in results)


@contextmanager
def _opened(kvstore: KVStore | str | None) -> Iterator[KVStore]:
    """The store itself, or a new one of this type that is closed afterwards; None is local."""
    if isinstance(kvstore, KVStore):
        yield kvstore
        return
    if kvstore is not None and not isinstance(kvstore, str):
        raise ArgumentTypeError(
            f"kvstore must be a KVStore, the name of a type or None, got {type(kvstore).__name__}"
        )
    from kvstore.kvstore import create

    with create(kvstore or "local") as store:
        yield store


def _exchange(store: KVStore, mine: NDArray[np.int64]) -> NDArray[np.int64]:
    """What every worker said, a row each in rank order; one round without an optimizer."""
    table = np.zeros((store.num_workers, len(mine)), np.int64)
    _init_once(store, DATA_KEY, table)
    table[store.rank] = mine
    result = np.zeros_like(table)
    store.pushpull(DATA_KEY, table, out=result)
    if not np.array_equal(result[store.rank], mine):
        raise UsageError(
            "the store already updates by an optimizer; fit sets its own and needs a new store"
        )
    return result


def _init_once(store: KVStore, key: Keys, value: Values) -> None:
    try:
        store.init(key, value)
    except DuplicateKeyError as error:
        raise UsageError(
            "the store served a fit already, or holds keys of the same names; create a new one, "
            "or give fit the name of a type"
        ) from error


def _call(callbacks: Callbacks, progress: Progress) -> None:
    if callbacks is None:
        return
    for callback in [callbacks] if callable(callbacks) else callbacks:
        callback(progress)
