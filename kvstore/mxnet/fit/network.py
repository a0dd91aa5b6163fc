"""The parts of ``FeedForward`` that need no store: protocols, slices, progress.

Pure functions and plain values, without store, threads or clock. NumPy is the only array library,
and is used only for indices on the host. Any thread may call. The most important function is
``plan_epochs``: from the data of all workers it computes a number of batches that is the same on
all of them, because in a synchronous job a worker with one batch more would wait forever. Read
next: ``mxnet/model.py``, which runs the loop.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.arrays import Array
from kvstore.errors import ArgumentTypeError
from kvstore.mxnet.metric import EvalMetric
from kvstore.stores.samples import deal_out as deal_out
from kvstore.stores.samples import shard as shard
from pslite.errors import UsageError

HostArray = NDArray[Any]


class Network(Protocol):
    """A model that ``FeedForward`` can train: it computes, and keeps no state.

    All arrays of one call are on one device and of one library, NumPy or CuPy; so are the results.
    A network never changes its parameters, which are named arrays. Several device threads may call
    one object at the same time. A complete example is ``examples/image_classification/mlp.py``.
    """

    def init_params(
        self, input_shape: tuple[int, ...], rng: np.random.Generator
    ) -> dict[str, HostArray]:
        """Return new NumPy arrays for samples of ``input_shape``, without the batch."""

    def loss_and_gradients(
        self, params: Mapping[str, Array], x: Array, y: Array
    ) -> tuple[float, int, Mapping[str, Array]]:
        """Return the loss, the number of right answers, and the gradients.

        ``x`` is (n, *input_shape), ``y`` (n,) int64. There is one new gradient for each parameter,
        of its shape and dtype. Loss and gradients are sums over the samples, not means, so they can
        be added over devices and workers; the optimizer's ``rescale_grad`` divides once.
        """

    def predict(self, params: Mapping[str, Array], x: Array) -> Array:
        """Return class probabilities, (n, classes)."""


class StatefulNetwork(Protocol):
    """A network that also has untrained arrays, such as running means.

    Its methods have one more argument than those of ``Network``: ``aux``, the device's own arrays,
    which ``loss_and_gradients`` changes in place. At the end of each epoch, the devices of a worker
    continue with the mean of their arrays. Each worker keeps its own; rank 0's are saved.
    """

    def init_params(
        self, input_shape: tuple[int, ...], rng: np.random.Generator
    ) -> dict[str, HostArray]:
        """As in ``Network``."""

    def init_aux_params(self, input_shape: tuple[int, ...]) -> dict[str, HostArray]:
        """Return new NumPy arrays of floats, by name."""

    def loss_and_gradients(
        self, params: Mapping[str, Array], x: Array, y: Array, aux: Mapping[str, Array]
    ) -> tuple[float, int, Mapping[str, Array]]:
        """As in ``Network``; gradients for ``params`` only."""

    def predict(self, params: Mapping[str, Array], x: Array, aux: Mapping[str, Array]) -> Array:
        """As in ``Network``; changes nothing."""


class Initializer(Protocol):
    """Makes the initial value of a parameter, instead of ``Network.init_params``."""

    def __call__(self, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> HostArray:
        """Return an array of ``shape``; it is cast to the dtype that the network chose."""


@dataclass(frozen=True)
class Progress:
    """The progress of a fit on this worker, passed to its callbacks.

    ``loss`` and ``accuracy`` are means over the epoch's batches so far, each computed before the
    update with that batch. ``nbatch`` counts the finished batches of the epoch, from 1.
    """

    epoch: int
    nbatch: int
    num_batches: int
    samples_per_s: float
    loss: float
    accuracy: float
    eval_accuracy: float | None = None
    """On ``eval_data``; only at the end of an epoch."""
    eval_metric: EvalMetric | None = None
    """The ``eval_metric`` of ``fit`` over the epoch's batches so far; in callbacks of the
    evaluation, over ``eval_data``."""
    validation: tuple[tuple[str, float], ...] = ()
    """Names and values of the metrics on ``eval_data``; only at the end of an epoch."""

    def __str__(self) -> str:
        train = self.eval_metric.get_global_name_value() if self.eval_metric else []
        values = [(f"Train-{name}", value) for name, value in train]
        values += [(f"Validation-{name}", value) for name, value in self.validation]
        return (
            f"Epoch[{self.epoch}] Batch [{self.nbatch}/{self.num_batches}] "
            f"{self.samples_per_s:.2f} samples/sec Train-loss={self.loss:f} "
            + " ".join(f"{name}={value:f}" for name, value in values)
        )


class EpochPlan(NamedTuple):
    """The samples of a worker: its shard, and the number of batches."""

    rank: int
    num_workers: int
    num_batches: int


def split_input_slice(batch_size: int, work_load_list: Sequence[float]) -> list[slice]:
    """Cut a batch into one slice for each device, in proportion to the loads.

    Device i gets round(load_i * batch_size / sum) samples (halves are rounded to even). The last
    device also gets the samples that are left over; no slice goes beyond ``batch_size``. Raises
    ``UsageError`` if a device would get no sample. Source of the rule: ``_split_input_slice`` in
    python/mxnet/executor_manager.py of the original.
    """
    if not work_load_list or not all(load > 0 and math.isfinite(load) for load in work_load_list):
        raise UsageError(f"work_load_list must have positive numbers, got {list(work_load_list)}")
    total = sum(work_load_list)
    sizes = [round(load * batch_size / total) for load in work_load_list]
    sizes[-1] += max(0, batch_size - sum(sizes))
    slices = []
    end = 0
    for index, size in enumerate(sizes):
        begin, end = end, min(end + size, batch_size)
        if begin >= end:
            raise UsageError(
                f"a batch of {batch_size} samples for {len(sizes)} devices with "
                f"work_load_list={list(work_load_list)} leaves device {index} without a sample; "
                "use a larger batch or fewer devices"
            )
        slices.append(slice(begin, end))
    return slices


def describe_data(x: HostArray, y: HostArray, batch_size: int) -> NDArray[np.int64]:
    """Describe the samples, for workers to compare: size, batch size, fingerprint."""
    digest = 0
    for part in (y, x[:8], x[-8:]):
        digest = zlib.crc32(np.ascontiguousarray(part).tobytes(), digest)
    return np.array([len(y), batch_size, digest], np.int64)


def plan_epochs(
    described: NDArray[np.int64], rank: int, sharded_here: bool
) -> tuple[EpochPlan, str | None]:
    """Return worker ``rank``'s plan, and a warning, from all workers' data.

    ``described`` is (num_workers, 3), with a row of ``describe_data`` for each worker. With
    ``sharded_here``, all must have the same data, and each visits its shard of it; if they differ,
    every worker raises the same ``UsageError``. Without it, each visits all of its own data, and
    workers with fewer batches than the longest start again.
    """
    num_workers = len(described)
    num_samples, batch_sizes, digests = described.T
    if sharded_here:
        for what, values in (
            ("numbers of samples", num_samples),
            ("batch sizes", batch_sizes),
            ("samples (by checksum)", digests),
        ):
            if len(set(values.tolist())) > 1:
                raise UsageError(
                    "fit shards the data over the workers, so all workers must pass the same "
                    f"data; the {what} of ranks 0 to {num_workers - 1} are {values.tolist()}. "
                    "Pass the full data set on each rank, or shard=False to use each rank's own "
                    "data"
                )
        num_batches = math.ceil(int(num_samples[0]) / (num_workers * int(batch_sizes[0])))
        return EpochPlan(rank, num_workers, num_batches), None
    warning = None
    if num_workers > 1 and len(set(digests.tolist())) == 1:
        warning = (
            f"all {num_workers} workers train on the same samples although shard=False says that "
            f"each has its own; leave shard=True to have fit deal them out"
        )
    longest = max(
        math.ceil(samples / batch)
        for samples, batch in zip(num_samples.tolist(), batch_sizes.tolist(), strict=True)
    )
    return EpochPlan(0, 1, longest), warning


def is_synchronous(store_type: str) -> bool:
    """Return whether this type adds all workers' gradients before an update."""
    return "dist" in store_type and "async" not in store_type


def rescale_grad(store_type: str, batch_size: int, num_workers: int) -> float:
    """Return the factor that turns the sum of an update into a mean over its samples.

    A synchronous update uses the batches of all workers, any other update one batch. Source:
    ``fit`` in python/mxnet/model.py of the original.
    """
    return 1.0 / (batch_size * num_workers if is_synchronous(store_type) else batch_size)


def checked_data(x: object, y: object) -> tuple[HostArray, NDArray[np.int64]]:
    """Return samples and labels as NumPy arrays; raise an error for unusable ones.

    ``x`` is any array with at least one sample, ``y`` has one integer for each. Arrays that already
    fit are not copied. Float labels that are whole numbers, as MXNet has them, become integers.
    """
    if y is None:
        raise UsageError("labels are missing; pass y with one integer for each sample")
    samples, labels = np.asarray(x), np.asarray(y)
    if samples.ndim < 1 or len(samples) == 0 or labels.shape != samples.shape[:1]:
        raise UsageError(
            f"X must have shape (n, ...) with n >= 1 and y shape (n,), got {samples.shape} and "
            f"{labels.shape}"
        )
    if labels.dtype.kind == "f":
        _check_whole(labels)
    elif labels.dtype.kind not in "iu":
        raise ArgumentTypeError(
            f"labels must be integers (class numbers from 0), got {labels.dtype}; convert them "
            "with y.astype(int)"
        )
    return samples, labels.astype(np.int64, copy=False)


def _check_whole(labels: HostArray) -> None:
    """Raise ``ArgumentTypeError`` unless these floats are integers, to the last bit."""
    # NaN is unequal to itself, and above 2**53 a float64 cannot hold every integer.
    with np.errstate(over="ignore"):  # of a long double beyond float64
        magnitudes = np.abs(labels.astype(np.float64))
    wrong = (labels != np.trunc(labels)) | ~(magnitudes <= 2.0**53)
    if wrong.any():
        at = int(wrong.argmax())
        raise ArgumentTypeError(
            f"labels must be whole numbers (class numbers from 0), got {labels[at]} at index "
            f"{at}; use y.astype(int) to truncate them"
        )


def check_network(network: object) -> None:
    """Raise ``ArgumentTypeError`` unless this object has the methods of ``Network``."""
    needed = ("init_params", "loss_and_gradients", "predict")
    absent = [name for name in needed if not callable(getattr(network, name, None))]
    if isinstance(network, type):
        problem = f"the class {network.__name__}, not an object of it"
    elif absent:
        problem = f"{type(network).__name__} {network!r:.60}, without {', '.join(absent)}"
    else:
        return
    raise ArgumentTypeError(
        "symbol must be a network with the methods init_params(input_shape, rng), "
        "loss_and_gradients(params, x, y) and predict(params, x) (see kvstore.model.Network), "
        f"got {problem}"
    )


START = (
    "begin_epoch",
    "num_epoch",
    "epoch_size",
    "resumed from saved states (1) or not (0)",
    "with a checkpoint directory (1) or not (0)",
    "seed",
)
"""What must be equal on all workers, besides the data, so that they visit the same batches."""


def check_same_start(starts: NDArray[np.int64]) -> None:
    """Raise the same ``UsageError`` on every worker unless all train the same epochs.

    ``starts`` is (num_workers, len(START)).
    """
    for what, values in zip(START, starts.T.tolist(), strict=True):
        if len(set(values)) > 1:
            raise UsageError(
                f"all workers of a job must train the same epochs; {what} of ranks 0 to "
                f"{len(values) - 1} is {values}. Pass the same value and load the same "
                "checkpoint on each rank"
            )


def initial_params(
    network: Any,
    input_shape: tuple[int, ...],
    seed: int,
    initializer: Initializer | None,
    given: Mapping[str, HostArray] | None,
    allow_extra: bool = False,
) -> dict[str, HostArray]:
    """Return new arrays with the initial parameters.

    They are the network's own values, the initializer's, or given ones.
    """
    rng = np.random.default_rng(seed)
    own: dict[str, HostArray] = network.init_params(input_shape, rng)
    made = dict(own)
    if initializer is not None:
        for name, value in own.items():
            if name not in (given or {}):
                made[name] = fitting_value(name, initializer(name, value.shape, rng), value)
    return taken_over("arg_params", made, given, allow_extra)


def initial_aux(
    network: Any,
    input_shape: tuple[int, ...],
    given: Mapping[str, HostArray] | None,
    allow_extra: bool = False,
) -> dict[str, HostArray]:
    """Return new arrays of the network's untrained values.

    Most networks have none.
    """
    made = network.init_aux_params(input_shape) if has_aux(network) else {}
    return taken_over("aux_params", made, given, allow_extra)


def has_aux(network: Any) -> bool:
    """Return whether a network keeps auxiliary parameters (a ``StatefulNetwork``)."""
    return hasattr(network, "init_aux_params")


def taken_over(
    what: str, made: dict[str, HostArray], given: Mapping[str, HostArray] | None, allow_extra: bool
) -> dict[str, HostArray]:
    """Return ``made`` with the given values instead of its own, cast to its dtypes."""
    unknown = sorted(set(given or {}) - set(made))
    if unknown and not allow_extra:
        raise UsageError(
            f"{what} has {', '.join(unknown)}, which the network does not have; the network has "
            f"{', '.join(made) or 'no parameters'}"
        )
    return {
        name: fitting_value(name, given[name], own) if given and name in given else own
        for name, own in made.items()
    }


def fitting_value(name: str, value: HostArray, own: HostArray) -> HostArray:
    """Return a copy of ``value`` in the dtype of ``own``; the shapes must be equal."""
    if np.shape(value) != own.shape:
        raise UsageError(
            f"the value for {name} must have the network's shape {own.shape}, got {np.shape(value)}"
        )
    return np.array(value, dtype=own.dtype)
