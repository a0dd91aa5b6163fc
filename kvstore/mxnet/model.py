"""``FeedForward``: train a network over devices and workers through a KVStore.

Each batch is divided over the devices, and every device computes gradients with its own copy of the
parameters. One ``pushpull`` exchanges the whole model: the store adds the gradients of all devices
and workers and updates, and each copy gets the new weights. The same loop is used for one device
and for a cluster. A fit that continues from a file saved at the end of an epoch gives the same
bits. Stores and callbacks are called only on the caller's thread. Read next: ``mxnet/fit/loop.py``
for the loop, ``mxnet/fit/network.py`` for what a network must have and how samples are divided,
then ``examples/image_classification``.

Source of names and flow: python/mxnet/model.py of the original (``FeedForward``, 1.x).
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any

import numpy as np

from kvstore.arrays.context import Context, cpu
from kvstore.errors import NotSupportedError
from kvstore.mxnet.callback import BatchEndParam, Checkpoint
from kvstore.mxnet.fit.files import (
    Prefix,
    check_states,
    load_checkpoint,
    load_model,
    save_checkpoint,
    states_path,
)
from kvstore.mxnet.fit.loop import (
    Callbacks,
    Data,
    Evaluation,
    Labels,
    Replica,
    Samples,
    Training,
    as_list,
    checked_eval_data,
    checked_pair,
    is_iterator,
    takes_four,
)
from kvstore.mxnet.fit.network import (
    EpochPlan,
    HostArray,
    Initializer,
    Network,
    Progress,
    StatefulNetwork,
    check_network,
    checked_data,
    describe_data,
    initial_aux,
    initial_params,
    shard,
    split_input_slice,
)
from kvstore.mxnet.fit.store import OnStore, Updates, agree, opened, updates_of
from kvstore.mxnet.fit.store import create_kvstore as _create_kvstore
from kvstore.mxnet.io import NDArrayIter
from kvstore.mxnet.metric import MetricLike
from kvstore.mxnet.metric import create as create_metric
from kvstore.optimizer import Optimizer
from kvstore.stores.base import KVStore, KVStoreBase
from kvstore.stores.samples import as_int
from pslite.errors import ClosedError, UsageError

__all__ = [
    "BatchEndParam",
    "FeedForward",
    "Initializer",
    "Network",
    "Progress",
    "StatefulNetwork",
    "_create_kvstore",
    "load_checkpoint",
    "save_checkpoint",
    "shard",
    "split_input_slice",
]

EpochCallbacks = Callable[..., Any] | Sequence[Callable[..., Any]] | None

_logger = logging.getLogger(__name__)


class FeedForward:
    """A network, its parameters, and how to train it.

    ``symbol`` is the network (see ``Network``), ``ctx`` one device or a list of devices, and
    ``numpy_batch_size`` the number of samples per step of this worker over all its devices.
    ``epoch_size`` is the number of batches of an epoch, if an epoch is not one pass over all
    samples. ``arg_params`` has the parameters as NumPy arrays, or None until they are given or
    made; a fit starts from them and replaces them. ``aux_params`` has the untrained arrays (see
    ``StatefulNetwork``). ``optimizer`` is a registered name, created with ``optimizer_params``, or
    an ``Optimizer``; then the caller must set its ``rescale_grad``. Equal seeds give equal initial
    values and equal orders of samples.

    One thread at a time may use an object.
    """

    def __init__(
        self,
        symbol: Network | StatefulNetwork,
        ctx: Context | Sequence[Context] | None = None,
        num_epoch: int | None = None,
        epoch_size: int | None = None,
        optimizer: str | Optimizer = "sgd",
        initializer: Initializer | None = None,
        numpy_batch_size: int = 128,
        arg_params: dict[str, HostArray] | None = None,
        aux_params: dict[str, HostArray] | None = None,
        allow_extra_params: bool = False,
        begin_epoch: int = 0,
        *,
        seed: int = 0,
        **optimizer_params: Any,
    ) -> None:
        if isinstance(optimizer, Optimizer) and optimizer_params:
            raise UsageError(
                f"{', '.join(optimizer_params)} can be used only with the name of an optimizer, "
                "got an Optimizer; set them when you create it"
            )
        for name, number in (
            ("num_epoch", num_epoch),
            ("begin_epoch", begin_epoch),
            ("seed", seed),
        ):
            if number is not None:
                as_int(name, number)
        for name, number in (("numpy_batch_size", numpy_batch_size), ("epoch_size", epoch_size)):
            if number is not None and as_int(name, number) < 1:
                raise UsageError(f"{name} must be at least 1, got {number}")
        check_network(symbol)
        self.symbol = symbol
        self.ctx = [cpu()] if ctx is None else [ctx] if isinstance(ctx, Context) else list(ctx)
        self.num_epoch = num_epoch
        self.epoch_size = epoch_size
        self.optimizer = optimizer
        self.initializer = initializer
        self.numpy_batch_size = numpy_batch_size
        self.arg_params = arg_params
        self.aux_params = aux_params
        self.allow_extra_params = allow_extra_params
        self.begin_epoch = begin_epoch
        self.seed = seed
        self.optimizer_params = optimizer_params
        self._load_states_from: Prefix | None = None
        self._states: KVStore | None = None
        self._rank = 0

    @staticmethod
    def create(
        symbol: Network | StatefulNetwork,
        X: Any,  # noqa: N803 (the original's name)
        y: Any = None,
        ctx: Context | Sequence[Context] | None = None,
        num_epoch: int | None = None,
        epoch_size: int | None = None,
        optimizer: str | Optimizer = "sgd",
        initializer: Initializer | None = None,
        *of_fit: Any,
        **arguments: Any,
    ) -> FeedForward:
        """Create a model and fit it; takes arguments of ``fit`` and the class.

        Further positional arguments are those of ``fit`` after ``y``, without ``monitor``.
        """
        names = [name for name in inspect.signature(FeedForward.fit).parameters if name != "self"]
        given = dict(zip((name for name in names[2:] if name != "monitor"), of_fit, strict=False))
        given |= {name: arguments.pop(name) for name in names if name in arguments}
        model = FeedForward(symbol, ctx, num_epoch, epoch_size, optimizer, initializer, **arguments)
        model.fit(X, y, **given)
        return model

    def fit(
        self,
        X: Any,  # noqa: N803 (the original's name)
        y: Any = None,
        eval_data: Any = None,
        eval_metric: MetricLike = "acc",
        epoch_end_callback: EpochCallbacks = None,
        batch_end_callback: Callbacks = None,
        kvstore: KVStoreBase | str | None = "local",
        logger: logging.Logger | None = None,
        work_load_list: Sequence[float] | None = None,
        monitor: None = None,
        eval_end_callback: Callbacks = None,
        eval_batch_end_callback: Callbacks = None,
        *,
        shuffle: bool = True,
        shard: bool = True,
        checkpoint: Prefix | None = None,
    ) -> None:
        """Train epochs ``begin_epoch`` to ``num_epoch - 1``; set ``arg_params``.

        ``X`` is (n, ...) of the dtype that the network takes, and ``y`` is (n,) of integers (or of
        floats that are whole numbers). They are NumPy arrays, which are only read; or ``X`` is an
        ``NDArrayIter`` of both, whose ``batch_size`` and ``shuffle`` are then used. ``eval_data``
        is a pair of such arrays or an ``NDArrayIter``. With a ``dist`` store, every worker passes
        the full data and fit divides them (``kvstore.model.shard``); with ``shard=False``, each
        worker trains on its own data, and fit gives all the same number of batches. A batch with
        too few samples is filled from the start of the epoch's order.

        ``eval_metric`` is anything that ``kvstore.metric.create`` takes. Metrics other than
        accuracy and loss need a second forward pass over the training batches. Callbacks get a
        ``Progress``; an ``epoch_end_callback`` with four arguments instead gets MXNet's epoch,
        symbol, arg_params and aux_params. Both see the current ``arg_params``.

        With ``checkpoint``, a directory that all workers share, the progress is saved after each
        epoch, and a later call with it begins after the last that was saved, as with ``kv.steps``.
        If the store updates, each batch is a step of ``kv.steps``: with ``--restarts``, a process
        in place of a lost worker repeats one batch (``docs/recovery.md``).

        A store given by name is closed at the end of the call; a store that you pass stays open and
        can be used for one fit. ``work_load_list`` weighs the devices. At the end, all workers wait
        for each other and get the store's final weights. The order of the arguments is MXNet's;
        ``monitor`` must be None. Raises ``UsageError`` for arguments that contradict each other,
        before the first batch, and the store's errors.
        """
        if monitor is not None:
            raise NotSupportedError(
                "monitor is not supported and must be None; use eval_metric and batch_end_callback"
            )
        if isinstance(X, NDArrayIter):
            self.numpy_batch_size, shuffle = X.batch_size, X.shuffle
        data = checked_pair(X, y)
        if self.num_epoch is None:
            raise UsageError("fit needs num_epoch, the number of epochs; pass it to FeedForward")
        if checkpoint is not None and (begin := self.begin_epoch):
            raise UsageError(
                f"checkpoint says where to begin, but begin_epoch is {begin}; pass only one of them"
            )
        slices = self._slices(work_load_list)
        metric = create_metric(eval_metric)
        # A separate object, so that its reset does not change the training metric.
        own_metric = create_metric(copy.deepcopy(eval_metric))
        evaluation = Evaluation(own_metric, eval_batch_end_callback)
        held_out = None if eval_data is None else self._samples(*checked_eval_data(eval_data))
        params, aux = self._first_values(data[0].shape[1:])
        with opened(kvstore) as store, ThreadPoolExecutor(len(slices)) as pool:
            self._rank = store.rank
            updates = updates_of(
                store, self.optimizer, self.optimizer_params, self.numpy_batch_size
            )
            plan = self._agree(store, data, shard, checkpoint is not None, logger or _logger)
            replicas = [
                Replica(context, self.symbol, part, params, aux)
                for context, part in zip(self.ctx, slices, strict=True)
            ]
            training = Training(updates, replicas, pool, metric, plan.num_batches)
            training.start(params)
            if self._load_states_from is not None:
                updates.states.load_optimizer_states(self._load_states_from)
                self._load_states_from = None
            order_of = lru_cache(1)(partial(self._order, plan, len(data[1]), shuffle))
            for step in self._steps(updates, training, plan.num_batches, checkpoint):
                epoch, index = divmod(step, plan.num_batches)
                epoch += self.begin_epoch
                chosen = order_of(epoch)[index]
                batch = data[0][chosen], data[1][chosen]
                progress = training.run_batch(epoch, index, batch, batch_end_callback)
                if progress.nbatch < progress.num_batches:
                    continue
                training.average()
                self.arg_params, self.aux_params = training.to_host()
                if held_out is not None:
                    progress = evaluation.end_epoch(
                        replicas[0], held_out, progress, eval_end_callback
                    )
                if logger is not None:
                    logger.info("%s", progress)
                self._end_epoch(updates, progress, epoch_end_callback)
            training.finish()
            self.arg_params = replicas[0].to_host()
        self._states = updates.states if store is kvstore else None

    def score(
        self,
        X: Any,  # noqa: N803 (the original's name)
        eval_metric: MetricLike = "acc",
        num_batch: int | None = None,
        batch_end_callback: Callbacks = None,
        reset: bool = True,
        *,
        y: Any = None,
    ) -> Any:
        """Return the value of a metric, by default the accuracy.

        The accuracy is the share of samples whose most likely class is their label. A list
        of metrics returns a list of values.

        ``X`` is an ``NDArrayIter``, or any iterator of such batches, which is reset first unless
        ``reset`` is False; or it is an array with the labels ``y``. ``model.score(X, y)`` works
        too, since a metric is never an array. ``num_batch`` limits the number of batches. Raises
        ``UsageError`` if there are no parameters yet, and for arguments that do not fit.
        """
        if y is None and hasattr(eval_metric, "shape"):
            y, eval_metric = eval_metric, "acc"
        if not is_iterator(X):
            X, y = checked_data(X, y)  # noqa: N806
        evaluation = Evaluation(create_metric(eval_metric), batch_end_callback)
        start = Progress(self.begin_epoch, 0, 0, 0.0, float("nan"), float("nan"))
        samples = self._samples(X, y, limit=num_batch, reset=reset)
        evaluation.run(self._first_device(), samples, start)
        return evaluation.metric.get_global()[1]

    def predict(
        self,
        X: Any,  # noqa: N803 (the original's name)
        num_batch: int | None = None,
        return_data: bool = False,
        reset: bool = True,
    ) -> Any:
        """Return class probabilities (n, classes), computed on the first device.

        ``X``, ``num_batch`` and ``reset`` are as in ``score``, without labels. With
        ``return_data`` it returns a tuple of probabilities, samples and labels (None if there are
        none), in the iterator's order. Raises ``UsageError`` if there are no parameters yet.
        """
        replica = self._first_device()
        samples = self._samples(X, limit=num_batch, reset=reset)
        parts = [(replica.predict(x), x, y) for x, y in samples.batches()]
        if not parts:
            raise UsageError("the iterator is at its end and returned no batch; keep reset=True")
        predictions = np.concatenate([part for part, _, _ in parts])
        if not return_data:
            return predictions
        labels = [y for _, _, y in parts if y is not None]
        data = np.concatenate([x for _, x, _ in parts])
        return predictions, data, np.concatenate(labels) if labels else None

    def save(self, prefix: Prefix, epoch: int | None = None) -> None:
        """Write the parameters to ``PREFIX-0003.params``, for ``epoch`` 3.

        The default of ``epoch`` is ``num_epoch``. In an ``epoch_end_callback``, or after a fit
        while the store that you passed to it is open, it also writes the optimizer's states to
        ``PREFIX-0003.states``; a loaded model continues with them. With several workers, all may
        call it, and the lowest rank writes. Raises ``CheckpointError``, and ``UsageError`` if there
        is nothing to save yet.
        """
        epoch = self.num_epoch if epoch is None else epoch
        if epoch is None or epoch < 0 or self.arg_params is None:
            raise UsageError(
                "save needs parameters (from fit or arg_params) and an epoch of at least 0, got "
                f"epoch {epoch}"
            )
        if self._rank != 0:
            return
        # Write the states first, so that no file of parameters names states that do not exist.
        has_states = self._save_states(prefix, epoch)
        save_checkpoint(
            prefix, epoch, self.symbol, self.arg_params, self.aux_params, has_states=has_states
        )

    @staticmethod
    def load(
        prefix: Prefix,
        epoch: int,
        ctx: Context | Sequence[Context] | None = None,
        *,
        symbol: Network | StatefulNetwork,
        **arguments: Any,
    ) -> FeedForward:
        """Load the model that ``save`` wrote; it continues at ``epoch``.

        The network is code and not in the file, so you pass it again, like all other arguments of
        ``FeedForward`` (``arguments``). ``fit`` loads the optimizer's states if they were saved.
        With several workers, all load, and rank 0's values are used. Raises ``CheckpointError``,
        also for states that were not saved with these parameters.
        """
        saved = load_model(prefix, epoch)
        check_states(prefix, epoch, saved)
        model = FeedForward(
            symbol,
            ctx,
            **{
                "arg_params": saved.arg_params,
                "aux_params": saved.aux_params,
                "begin_epoch": epoch,
                **arguments,
            },
        )
        model._load_states_from = states_path(prefix, epoch) if saved.has_states else None
        return model

    def _samples(self, x: Any, y: Any = None, **options: Any) -> Samples:
        return Samples(x, y, batch_size=self.numpy_batch_size, **options)

    def _slices(self, work_load_list: Sequence[float] | None) -> list[slice]:
        loads = [1.0] * len(self.ctx) if work_load_list is None else list(work_load_list)
        if len(loads) != len(self.ctx):
            raise UsageError(
                f"work_load_list must have one number for each of the {len(self.ctx)} devices, "
                f"got {len(loads)}"
            )
        return split_input_slice(self.numpy_batch_size, loads)

    def _first_values(
        self, input_shape: tuple[int, ...]
    ) -> tuple[dict[str, HostArray], dict[str, HostArray]]:
        extra = self.allow_extra_params
        params = initial_params(
            self.symbol, input_shape, self.seed, self.initializer, self.arg_params, extra
        )
        aux = initial_aux(self.symbol, input_shape, self.aux_params, extra)
        self.arg_params, self.aux_params = params, aux
        return params, aux

    def _first_device(self) -> Replica:
        if self.arg_params is None:
            raise UsageError(
                "the model does not have parameters yet; call fit first, or pass arg_params"
            )
        aux = self.aux_params or {}
        return Replica(self.ctx[0], self.symbol, slice(None), self.arg_params, aux)

    def _agree(
        self,
        store: KVStoreBase,
        data: Data,
        sharded_here: bool,
        has_checkpoint: bool,
        logger: logging.Logger,
    ) -> EpochPlan:
        # Workers with different seeds would compute shards that overlap.
        seed = self.seed % 2**62 if sharded_here else 0
        resumes = self._load_states_from is not None
        epochs = (self.begin_epoch, self.num_epoch or 0, self.epoch_size or 0)
        start = (*epochs, resumes, has_checkpoint, seed)
        described = describe_data(*data, self.numpy_batch_size)
        row = np.array(start, np.int64)
        plan = agree(store, described, row, sharded_here, has_checkpoint, logger)
        return plan if self.epoch_size is None else plan._replace(num_batches=self.epoch_size)

    def _steps(
        self, updates: Updates, training: Training, num_batches: int, checkpoint: Prefix | None
    ) -> Iterable[int]:
        """Return the numbers of the batches to train; load an earlier run's progress."""
        stop = max((self.num_epoch or 0) - self.begin_epoch, 0) * num_batches
        if not isinstance(updates, OnStore):
            if checkpoint is None:
                return range(stop)
            raise UsageError(
                f"checkpoint needs a store that updates the weights, got {updates.store.type!r}"
            )
        every = 0 if checkpoint is None else num_batches
        steps = updates.store.steps(stop, training, checkpoint, every)
        if steps.first:
            training.pull()
            self.arg_params, self.aux_params = training.to_host()
        return steps

    def _order(self, plan: EpochPlan, num_samples: int, shuffle: bool, epoch: int) -> Labels:
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

    def _save_states(self, prefix: Prefix, epoch: int) -> bool:
        """Save the optimizer's states if there is a store; return whether they were."""
        if self._states is None:
            return False
        try:
            self._states.save_optimizer_states(states_path(prefix, epoch))
        except ClosedError:
            self._states = None
            return False
        return True

    def _end_epoch(self, updates: Updates, progress: Progress, callbacks: EpochCallbacks) -> None:
        # Only here: within an epoch, states and arg_params belong to different updates.
        self._states = updates.states
        for callback in as_list(callbacks):
            if isinstance(callback, Checkpoint):
                callback.end_epoch(progress, self.save)
            elif takes_four(callback):
                callback(progress.epoch, self.symbol, self.arg_params, self.aux_params)
            else:
                callback(progress)
        self._states = None
