"""``create``: metrics from names, functions, objects, configurations and lists.

Read next: ``kvstore/mxnet/callback.py``, which shows metrics, and ``kvstore/mxnet/model.py``, which
updates them.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from kvstore.arrays.torch import tensor_of
from kvstore.errors import ArgumentTypeError, ArgumentValueError, NotSupportedError
from kvstore.mxnet.metric.base import (
    Arrays,
    BatchResult,
    EvalMetric,
    HostArray,
    Names,
    alias,
    check_label_shapes,
    host_pairs,
    on_host,
    register,
    registered,
)
from kvstore.mxnet.metric.sums import Counted

Function: TypeAlias = Callable[[HostArray, HostArray], Any]
MetricLike: TypeAlias = (
    "str | Function | EvalMetric | type[EvalMetric] | Mapping[str, Any] | Sequence[MetricLike]"
)
"""What ``create`` takes: a name, a function, a metric or its configuration, or a list of these."""


@register
class CustomMetric(Counted):
    """A metric from a function of (label, prediction), both NumPy arrays.

    The function returns a number for the batch, which is averaged over batches, or a pair (sum,
    count). With ``allow_extra_outputs``, predictions without a label are ignored.
    """

    def __init__(
        self,
        feval: Function,
        name: str | None = None,
        allow_extra_outputs: bool = False,
        output_names: Names = None,
        label_names: Names = None,
    ) -> None:
        if not callable(feval):
            raise ArgumentTypeError(
                f"feval must be a function (label, prediction), got {type(feval).__name__}"
            )
        super().__init__(name or _name_of(feval), output_names, label_names)
        self._feval = feval
        self._allow_extra_outputs = allow_extra_outputs

    def update(self, labels: Arrays, preds: Arrays) -> None:
        several, answers = on_host(labels), on_host(preds)
        if not self._allow_extra_outputs:
            check_label_shapes(several, answers)
        for label, pred in zip(several, answers, strict=False):
            value = self._feval(label, pred)
            total, number = value if isinstance(value, tuple) else (value, 1)
            self._count(float(total), int(number))

    def get_config(self) -> dict[str, Any]:
        raise NotSupportedError(
            f"the metric {self.name!r} is a function and does not have a configuration; register "
            "a subclass of mx.metric.EvalMetric instead"
        )


class ObjectMetric(EvalMetric):
    """An object that computes its own value, such as those of torchmetrics.

    It has ``update(predictions, labels)``, ``compute()``, which returns a number or a dict of
    numbers, and ``reset()``. Objects of PyTorch get tensors on the CPU, others NumPy arrays. The
    object itself counts everything; a deep copy of it counts since ``reset_local``.
    """

    def __init__(
        self,
        counted: Any,
        name: str | None = None,
        output_names: Names = None,
        label_names: Names = None,
    ) -> None:
        self._all = counted
        self._recent = copy.deepcopy(counted)
        self._takes_tensors = hasattr(counted, "state_dict")  # an nn.Module
        super().__init__(name or type(counted).__name__.lower(), output_names, label_names)

    def update(self, labels: Arrays, preds: Arrays) -> None:
        for pair in host_pairs(labels, preds):
            label, pred = map(tensor_of, pair) if self._takes_tensors else pair
            self._recent.update(pred, label)
            self._all.update(pred, label)
        self.num_inst += 1
        self.global_num_inst += 1

    def reset(self) -> None:
        super().reset()
        self._recent.reset()
        self._all.reset()

    def reset_local(self) -> None:
        self.num_inst = 0
        self._recent.reset()

    def get(self) -> tuple[Any, Any]:
        return self._computed(self._recent) if self.num_inst else super().get()

    def get_global(self) -> tuple[Any, Any]:
        return self._computed(self._all) if self.global_num_inst else super().get()

    def get_config(self) -> dict[str, Any]:
        raise NotSupportedError(
            f"the metric {self.name!r} uses an instance of {type(self._all).__name__} and does "
            "not have a configuration; use a registered metric instead"
        )

    def _computed(self, counted: Any) -> tuple[Any, Any]:
        value = counted.compute()
        if isinstance(value, Mapping):
            return list(value), [float(each) for each in value.values()]
        return self.name, float(value)


@register
@alias("composite")
class CompositeEvalMetric(EvalMetric):
    """Several metrics that are updated together; names and values are lists."""

    def __init__(
        self,
        metrics: Iterable[MetricLike] | None = None,
        name: str = "composite",
        output_names: Names = None,
        label_names: Names = None,
    ) -> None:
        self.metrics = [create(metric) for metric in metrics or ()]
        super().__init__(name, output_names, label_names)

    @property
    def needs_predictions(self) -> bool:  # type: ignore[override]
        return any(metric.needs_predictions for metric in self.metrics)

    def add(self, metric: MetricLike) -> None:
        """Add one metric."""
        self.metrics.append(create(metric))

    def get_metric(self, index: int) -> EvalMetric:
        """Return one metric. Raises ``ArgumentValueError`` if there are fewer."""
        if not -len(self.metrics) <= index < len(self.metrics):
            raise ArgumentValueError(
                f"the index of a metric must be from 0 to {len(self.metrics) - 1}, got {index}"
            )
        return self.metrics[index]

    def update(self, labels: Arrays, preds: Arrays) -> None:
        for metric in self.metrics:
            metric.update(labels, preds)

    def update_dict(self, label: Mapping[str, Any], pred: Mapping[str, Any]) -> None:
        """Update each metric with its own names, among those that this metric takes."""
        if self.label_names is not None:
            label = {name: each for name, each in label.items() if name in self.label_names}
        if self.output_names is not None:
            pred = {name: each for name, each in pred.items() if name in self.output_names}
        for metric in self.metrics:
            metric.update_dict(label, pred)

    def update_batch(self, result: BatchResult) -> None:
        for metric in self.metrics:
            metric.update_batch(result)

    def reset(self) -> None:
        for metric in self.metrics:
            metric.reset()

    def reset_local(self) -> None:
        for metric in self.metrics:
            metric.reset_local()

    def get(self) -> tuple[Any, Any]:
        return _apart(metric.get_name_value() for metric in self.metrics)

    def get_global(self) -> tuple[Any, Any]:
        return _apart(metric.get_global_name_value() for metric in self.metrics)

    def get_config(self) -> dict[str, Any]:
        metrics = [metric.get_config() for metric in self.metrics]
        return {**super().get_config(), "metrics": metrics}


def _apart(pairs: Iterable[list[tuple[str, float]]]) -> tuple[list[str], list[float]]:
    """Return names and values separately."""
    together = list(itertools.chain.from_iterable(pairs))
    return [name for name, _ in together], [value for _, value in together]


def create(metric: MetricLike, *args: Any, **kwargs: Any) -> EvalMetric:
    """Return a metric from a name, a function, an object, or a list of them.

    Names are ``acc``, ``ce``, ``f1`` and so on. A function takes (label, prediction). An object
    has ``update``, ``compute`` and ``reset``. A metric is returned unchanged.

    ``args`` and ``kwargs`` are for the class, or for each class of a list. It also accepts the
    result of ``get_config``, as a mapping or as JSON text, and a text
    ``["name", {...}]``.
    Raises ``ArgumentValueError``, which lists the names, and ``ArgumentTypeError``.
    """
    if isinstance(metric, EvalMetric):
        if args or kwargs:
            raise ArgumentValueError(
                f"{metric!r} is already an instance and cannot get arguments; pass its name instead"
            )
        return metric
    if isinstance(metric, str):
        if metric[:1] in ("[", "{"):
            return _from_json(metric, args, kwargs)
        return _made(registered(metric), args, kwargs)
    if isinstance(metric, Mapping):
        return _from_config(metric, kwargs)
    if isinstance(metric, type) and issubclass(metric, EvalMetric):
        return _made(metric, args, kwargs)
    calls = (getattr(metric, call, None) for call in ("update", "compute", "reset"))
    if not isinstance(metric, type) and all(map(callable, calls)):
        return ObjectMetric(metric, *args, **kwargs)
    if callable(metric):
        return CustomMetric(metric, *args, **kwargs)
    if isinstance(metric, list | tuple):
        return CompositeEvalMetric([create(each, *args, **kwargs) for each in metric])
    raise ArgumentTypeError(
        "a metric must be a name, a function (label, prediction), an EvalMetric or a list of "
        f"these, got {type(metric).__name__}"
    )


def np(
    numpy_feval: Function, name: str | None = None, allow_extra_outputs: bool = False
) -> CustomMetric:
    """Return a metric from a function of two NumPy arrays, named after it."""
    return CustomMetric(numpy_feval, name, allow_extra_outputs)


def _made(cls: type[EvalMetric], args: tuple[Any, ...], kwargs: dict[str, Any]) -> EvalMetric:
    try:
        inspect.signature(cls).bind(*args, **kwargs)
    except TypeError as error:
        takes = inspect.signature(cls).parameters.values()
        plain = ", ".join(str(each.replace(annotation=each.empty)) for each in takes)
        given = [f"{value!r:.60}" for value in args]
        given += [f"{name}={value!r:.60}" for name, value in kwargs.items()]
        raise ArgumentTypeError(
            f"{cls.__name__}({', '.join(given)}): {error}; it takes ({plain})"
        ) from None
    return cls(*args, **kwargs)


def _from_json(text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EvalMetric:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ArgumentValueError(f"the metric {text!r:.80} is not JSON: {error}") from None
    match found:
        case {"metric": _}:
            return _from_config(found, kwargs)
        case [str(name), dict(numbers)]:
            return create(name, *args, **{**numbers, **kwargs})
    raise ArgumentValueError(
        f'a metric in JSON must be {{"metric": "acc", ...}} or ["acc", {{...}}], got {text!r:.80}'
    )


def _from_config(config: Mapping[str, Any], kwargs: dict[str, Any]) -> EvalMetric:
    if "metric" not in config:
        raise ArgumentValueError(
            "a metric's configuration must have its name, "
            f'{{"metric": "acc", ...}}, got {config!r:.80}'
        )
    return create(**{**config, **kwargs})


def _name_of(feval: Any) -> str:
    name = getattr(feval, "__name__", type(feval).__name__)
    return f"custom({name})" if "<" in name else name
