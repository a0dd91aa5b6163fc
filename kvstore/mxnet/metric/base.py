"""The base class of metrics: a sum, the number of its items, and a name.

One thread at a time may use a metric. Predictions and labels are only read. They may be on any
device and of any library that stores accept; formulas get NumPy arrays. Read next: ``sums.py``, the
metrics that are sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import numpy
from numpy.typing import NDArray

from kvstore.arrays import adapter_for
from kvstore.arrays.dtypes import is_bfloat16
from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.errors.hints import did_you_mean

HostArray = NDArray[Any]
Arrays = Any
"""One array, or a list of them."""
Names = Sequence[str] | None


class BatchResult(NamedTuple):
    """The results of a training step for a batch before the update."""

    labels: HostArray
    loss_sum: float
    correct_count: int
    predictions: HostArray | None
    """(n, classes), in the order of the labels; None if no metric needs them."""


class EvalMetric:
    """The base of all metrics.

    A subclass defines ``update``, which adds to two numbers::

        @mx.metric.register
        class Misses(mx.metric.EvalMetric):
            def __init__(self, name="misses", output_names=None, label_names=None):
                super().__init__(name, output_names, label_names)

            def update(self, labels, preds):
                for label, pred in zip(labels, preds):
                    self.sum_metric += (pred.argmax(axis=1) != label).sum()
                    self.num_inst += len(label)

    The value is ``sum_metric / num_inst``, or NaN if nothing was counted. ``reset`` forgets
    everything. ``reset_local`` restarts the count for ``get``, while ``get_global`` still counts
    since ``reset``. So a value that is shown every few batches does not change that of the whole
    epoch. As in MXNet, a subclass that adds to ``global_sum_metric`` and ``global_num_inst`` itself
    passes ``has_global_stats=True``.

    ``output_names`` and ``label_names`` choose what ``update_dict`` takes from its mappings; None
    takes everything. Further keywords are kept for ``get_config``.
    """

    needs_predictions: bool = True
    sum_metric: float = 0.0
    num_inst: float = 0
    global_sum_metric: float = 0.0
    global_num_inst: float = 0

    def __init__(
        self,
        name: str,
        output_names: Names = None,
        label_names: Names = None,
        *,
        has_global_stats: bool = False,
        **config: Any,
    ) -> None:
        self.name = str(name)
        self.output_names = output_names
        self.label_names = label_names
        self._has_global_stats = has_global_stats
        self._config = config
        self.reset()

    def update(self, labels: Arrays, preds: Arrays) -> None:
        """Count samples: lists of labels (n,) and of predictions (n, classes)."""
        raise NotImplementedError(f"{type(self).__name__} must define update()")

    def update_batch(self, result: BatchResult) -> None:
        """Count a batch of a fit."""
        assert result.predictions is not None, "needs_predictions is True"
        self.update([result.labels], [result.predictions])

    def update_dict(self, label: Mapping[str, Any], pred: Mapping[str, Any]) -> None:
        """Count arrays by name: ``label_names`` and ``output_names``, or all."""
        self.update(
            _chosen("label_names", self.label_names, label),
            _chosen("output_names", self.output_names, pred),
        )

    def reset(self) -> None:
        """Forget everything."""
        self.global_sum_metric, self.global_num_inst = 0.0, 0
        self.sum_metric, self.num_inst = 0.0, 0

    def reset_local(self) -> None:
        """Restart the count for ``get``, but not for ``get_global``."""
        if not self._has_global_stats:
            self.global_sum_metric += self.sum_metric
            self.global_num_inst += self.num_inst
        self.sum_metric, self.num_inst = 0.0, 0

    def get(self) -> tuple[Any, Any]:
        """Return name and value since the last reset of either kind; lists if composite."""
        return self.name, ratio(self.sum_metric, self.num_inst)

    def get_global(self) -> tuple[Any, Any]:
        """Return name and value since ``reset``."""
        total, number = self.global_sum_metric, self.global_num_inst
        if not self._has_global_stats:
            total, number = total + self.sum_metric, number + self.num_inst
        return self.name, ratio(total, number)

    def get_name_value(self) -> list[tuple[str, float]]:
        """Return the result of ``get`` as a list of pairs."""
        return _pairs(self.get())

    def get_global_name_value(self) -> list[tuple[str, float]]:
        """Return the result of ``get_global`` as a list of pairs."""
        return _pairs(self.get_global())

    def get_config(self) -> dict[str, Any]:
        """Return the mapping, or JSON text, from which ``create`` makes an equal metric."""
        return {
            **self._config,
            "metric": type(self).__name__,
            "name": self.name,
            "output_names": self.output_names,
            "label_names": self.label_names,
        }

    def _count(self, total: float, number: float) -> None:
        """Add to the sums, for both ``get`` and ``get_global``."""
        self.sum_metric += total
        self.num_inst += number
        self.global_sum_metric += total
        self.global_num_inst += number

    def __repr__(self) -> str:
        return f"EvalMetric: {dict(self.get_name_value())}"


_Class = TypeVar("_Class", bound=type[EvalMetric])
_registry: dict[str, type[EvalMetric]] = {}


@overload
def register(klass: _Class, name: str | None = None) -> _Class: ...


@overload
def register(klass: str, *aliases: str) -> Callable[[_Class], _Class]: ...


def register(klass: Any, *names: Any, name: str | None = None) -> Any:
    """Decorate a class so that ``create`` finds it by its name, in any case.

    Use ``@register`` as in MXNet, or ``@register("alias", ...)`` for further names. ``name``
    replaces the class's own name. Returns the class. Raises ``ArgumentTypeError``.
    """
    if isinstance(klass, str):
        return lambda cls: alias(klass, *names)(register(cls))
    if not (isinstance(klass, type) and issubclass(klass, EvalMetric)):
        raise ArgumentTypeError(
            f"register needs a subclass of mx.metric.EvalMetric, or alias names, got {klass!r}"
        )
    given = (*names, name or klass.__name__)[0]
    _registry[given.lower()] = klass
    return klass


def alias(*aliases: str) -> Callable[[_Class], _Class]:
    """Decorate a class so that ``create`` also finds it by these names."""

    def add(cls: _Class) -> _Class:
        for each in aliases:
            register(cls, each)
        return cls

    return add


def registered(name: str) -> type[EvalMetric]:
    """Return the class of this name.

    Raises ``ArgumentValueError``, which lists the known names.
    """
    cls = _registry.get(name.lower())
    if cls is None:
        raise ArgumentValueError(
            f"no metric is named {name!r}; known: {', '.join(sorted(_registry))}"
            f"{did_you_mean(name.lower(), _registry)}"
        )
    return cls


def check_label_shapes(
    labels: Any, preds: Any, wrap: bool = False, shape: bool = False
) -> tuple[Any, Any]:
    """Raise ``ArgumentValueError`` unless there are as many labels as predictions.

    With ``shape`` their shapes must be equal, otherwise their lengths. Returns both; with ``wrap``,
    a single array becomes a list.
    """
    found = (labels.shape, preds.shape) if shape else (len(labels), len(preds))
    if found[0] != found[1]:
        raise ArgumentValueError(
            f"a metric needs equally many labels and predictions, got {found[0]} and {found[1]}"
        )
    return (listed(labels), listed(preds)) if wrap else (labels, preds)


def host_pairs(labels: Arrays, preds: Arrays) -> list[tuple[HostArray, HostArray]]:
    """Return pairs of NumPy arrays of the same length."""
    several, answers = on_host(labels), on_host(preds)
    check_label_shapes(several, answers)
    pairs = list(zip(several, answers, strict=True))
    for label, pred in pairs:
        check_label_shapes(numpy.atleast_1d(label), numpy.atleast_1d(pred))
    return pairs


def on_host(arrays: Arrays) -> list[HostArray]:
    """Return each array as NumPy's."""
    return [_to_host(each) for each in listed(arrays)]


def listed(arrays: Arrays) -> list[Any]:
    """Return one array as a list."""
    return list(arrays) if isinstance(arrays, list | tuple) else [arrays]


def ratio(total: float, number: float) -> float:
    """Return the mean, or NaN if ``number`` is 0."""
    return total / number if number else math.nan


def _to_host(array: Any) -> HostArray:
    if isinstance(array, numpy.ndarray | numpy.generic | list | tuple | int | float):
        return numpy.asarray(array)
    host = adapter_for(array).to_host(array)
    return host.astype(numpy.float32) if is_bfloat16(host.dtype) else host


def _chosen(what: str, names: Names, arrays: Mapping[str, Any]) -> list[Any]:
    if names is None:
        return list(arrays.values())
    absent = [name for name in names if name not in arrays]
    if absent:
        raise ArgumentValueError(
            f"{what} has unknown names {', '.join(map(repr, absent))}; known: "
            f"{', '.join(map(repr, arrays)) or 'none'}"
        )
    return [arrays[name] for name in names]


def _pairs(named: tuple[Any, Any]) -> list[tuple[str, float]]:
    names, values = named
    if not isinstance(names, list):
        return [(names, values)]
    return list(zip(names, values, strict=True))
