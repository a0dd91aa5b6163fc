"""Run optimizers written MXNet's way, as code with state, in one process.

::

    @mx.optimizer.register
    class Descent(mx.optimizer.Optimizer):
        def create_state(self, index, weight):
            return mx.nd.zeros(weight.shape, weight.context)

        def update(self, index, weight, grad, state):
            self._update_count(index)
            state[:] = 0.9 * state - self._get_lr(index) * (grad * self.rescale_grad)
            weight[:] += state

The methods of such a class take an index. ``OptimizerKind`` therefore replaces its base
``Optimizer`` by ``ScriptedOptimizer``; the two have nothing in common but the name. Source of names
and meaning: ``python/mxnet/optimizer/optimizer.py`` of MXNet 1.9.1. Only one thread at a time may
use an instance. Read next: ``updater.py``, which calls them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvstore.errors import NotSupportedError, OptimizerParameterError
from kvstore.optimizer.schedule import Schedule

_METHODS = {"update": 4, "update_multi_precision": 4}
_METHODS |= {"create_state": 2, "create_state_multi_precision": 2}
"""How many arguments MXNet's methods take besides ``self``; ours take other numbers."""

_scripted: dict[str, type[ScriptedOptimizer]] = {}
"""The registered classes by lower-case name."""


class ScriptedOptimizer:
    """The base class of optimizers that are written MXNet's way.

    A subclass defines ``update`` and, if it keeps state, ``create_state``. Arrays are
    ``mx.nd.NDArray``, and are changed in place. Attributes are MXNet's and may be set at any time:
    ``lr``, ``wd``, ``rescale_grad``, ``clip_gradient``, ``lr_scheduler``, ``num_update``. It runs
    in ``local`` and ``device`` stores and in an ``Updater``, on the host.
    """

    def __init__(
        self,
        rescale_grad: float = 1.0,
        param_idx2name: Mapping[Any, str] | None = None,
        wd: float = 0.0,
        clip_gradient: float | None = None,
        learning_rate: float | None = None,
        lr_scheduler: Schedule | None = None,
        sym: None = None,
        begin_num_update: int = 0,
        multi_precision: bool = False,
        param_dict: Mapping[Any, Any] | None = None,
    ) -> None:
        if sym is not None:
            raise OptimizerParameterError(
                "the parameter sym is not supported; remove it and call set_lr_mult or set_wd_mult"
            )
        if not isinstance(lr_scheduler, Schedule | None):
            raise OptimizerParameterError(
                f"lr_scheduler must be a schedule of kvstore.lr_scheduler, got {lr_scheduler!r}"
            )
        if (
            lr_scheduler is not None
            and lr_scheduler.base_lr is not None
            and (learning_rate is None or not lr_scheduler.gives_way)
        ):
            learning_rate = lr_scheduler.base_lr
        self.lr = 0.01 if learning_rate is None else learning_rate
        self.lr_scheduler = lr_scheduler
        self.rescale_grad = rescale_grad
        self.wd = wd
        self.clip_gradient = clip_gradient
        self.multi_precision = multi_precision
        self.begin_num_update = self.num_update = begin_num_update
        self.aggregate_num = 0
        self.idx2name = dict(param_idx2name or {})
        self.param_dict = param_dict or {}
        self._index_update_count: dict[Any, int] = {}
        self.set_lr_mult({})
        self.set_wd_mult({})

    # -- what a subclass defines -----------------------------------------------------------

    def create_state(self, index: Any, weight: Any) -> Any:
        """Return the state of a weight: NDArrays, numbers, lists, tuples or None."""

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Change ``weight`` and ``state`` in place."""
        raise NotImplementedError(f"{type(self).__name__} must define update()")

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        """Return the state of a weight.

        For float16 with ``multi_precision``, return a float32 copy and the state of the copy.
        """
        if self.multi_precision and weight.dtype == np.float16:
            master = weight.astype(np.float32)
            return master, self.create_state(index, master)
        return self.create_state(index, weight)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Update; for float16 with ``multi_precision``, update the float32 copy."""
        if self.multi_precision and weight.dtype == np.float16:
            master, own = state
            self.update(index, master, grad.astype(np.float32), own)
            weight[:] = master
        else:
            self.update(index, weight, grad, state)

    # -- numbers -----------------------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """The current rate, from the schedule if there is one, else ``lr``."""
        if self.lr_scheduler is None:
            return self.lr
        return self.lr_scheduler.rate(self.num_update, self.lr)

    def set_learning_rate(self, lr: float) -> None:
        """Set ``lr``. Raises ``NotSupportedError`` if there is a schedule."""
        if self.lr_scheduler is not None:
            raise NotSupportedError(
                "cannot set the learning rate of an optimizer with an lr_scheduler; create it "
                "without one"
            )
        self.lr = lr

    def set_lr_mult(self, args_lr_mult: Mapping[Any, float]) -> None:
        """Set factors for the rate, by index or by name in ``param_idx2name``."""
        self.lr_mult = dict(args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Mapping[Any, float]) -> None:
        """Set factors for the decay; names other than weights and gammas default to 0."""
        names = self.idx2name.values()
        self.wd_mult = {name: 0.0 for name in names if not name.endswith(("_weight", "_gamma"))}
        self.wd_mult.update(args_wd_mult)

    def _update_count(self, index: Any) -> None:
        for each in index if isinstance(index, list | tuple) else (index,):
            count = self._index_update_count.get(each, self.begin_num_update) + 1
            self._index_update_count[each] = count
            self.num_update = max(self.num_update, count)

    def _get_lr(self, index: Any) -> float:
        return self._get_lrs([index])[0]

    def _get_lrs(self, indices: Sequence[Any]) -> list[float]:
        return [self.learning_rate * self._factor(self.lr_mult, each, "lr") for each in indices]

    def _get_wd(self, index: Any) -> float:
        return self._get_wds([index])[0]

    def _get_wds(self, indices: Sequence[Any]) -> list[float]:
        return [self.wd * self._factor(self.wd_mult, each, "wd") for each in indices]

    def _factor(self, factors: Mapping[Any, float], index: Any, kind: str) -> float:
        if index in self.param_dict:
            return float(getattr(self.param_dict[index], f"{kind}_mult"))
        if index in factors:
            return factors[index]
        return factors.get(self.idx2name.get(index), 1.0)


class OptimizerKind(type):
    """The metaclass of ``Optimizer``: supports classes written MXNet's way.

    Such a class gets the base that it was written for. If it extends another optimizer of this
    package, such as SGD, it raises ``NotSupportedError``.
    """

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any
    ) -> Any:
        ours = [base for base in bases if type(base) is OptimizerKind]
        if not ours or not _is_scripted(namespace):
            return super().__new__(cls, name, bases, namespace, **options)
        wrong = [base.__name__ for base in ours if type(base.__base__) is OptimizerKind]
        if wrong:
            raise NotSupportedError(
                f"{name} extends {wrong[0]}, whose methods do not take an index here; extend "
                "mx.optimizer.Optimizer and write out the formula, or write a frozen dataclass "
                "(docs/optimizers.md, Your own)"
            )
        swapped = (ScriptedOptimizer if base in ours else base for base in bases)
        return type(name, tuple(swapped), namespace, **options)


def _is_scripted(namespace: Mapping[str, Any]) -> bool:
    if "__dataclass_fields__" in namespace:  # made again by dataclass(slots=True)
        return False
    return "__init__" in namespace or any(
        len(inspect.signature(namespace[name]).parameters) == 1 + number
        for name, number in _METHODS.items()
        if inspect.isfunction(namespace.get(name))
    )


def register_scripted(cls: type[ScriptedOptimizer]) -> None:
    """Register a class by its lower-case name; a later class replaces an earlier one."""
    _scripted[cls.__name__.lower()] = cls


def create_scripted(name: str, params: Mapping[str, Any]) -> ScriptedOptimizer | None:
    """Create a registered optimizer; None if the name is unknown."""
    cls = _scripted.get(name.lower())
    return None if cls is None else cls(**params)


def check_travels(optimizer: object) -> None:
    """Check that an optimizer can be sent: a ``ScriptedOptimizer`` cannot."""
    if isinstance(optimizer, ScriptedOptimizer):
        name = type(optimizer).__name__
        raise NotSupportedError(
            f"{name} extends mx.optimizer.Optimizer, which only local and device stores and "
            "Updaters can run. For servers or a Trainer, write it as a frozen dataclass "
            "(docs/optimizers.md, Your own) and register it in a module that this process and "
            "the servers (--server-import MODULE) import"
        )


class ScriptedStates:
    """A scripted optimizer with its state for each weight."""

    def __init__(self, optimizer: ScriptedOptimizer) -> None:
        self.optimizer = optimizer
        self.states: dict[Any, Any] = {}

    def update(self, index: Any, grad: Any, weight: Any) -> None:
        """Change ``weight`` in place; ``weight`` and ``grad`` are NumPy arrays."""
        from kvstore.mxnet.nd.ndarray import NDArray  # imports all array libraries' adapters

        weight, grad = NDArray(weight), NDArray(grad)
        if index not in self.states:
            created = self.optimizer.create_state_multi_precision(index, weight)
            self.states[index] = created
        self.optimizer.update_multi_precision(index, weight, grad, self.states[index])

    def count(self, index: Any) -> int:
        """Return how many updates a weight has had."""
        return self.optimizer._index_update_count.get(index, 0)

    def restore(self, entries: Mapping[Any, tuple[int, Any]]) -> None:
        """Replace all states and counts; arrays become NDArrays."""
        self.states = {index: _as_ndarrays(state) for index, (_, state) in entries.items()}
        counts = {index: count for index, (count, _) in entries.items()}
        self.optimizer._index_update_count = counts
        self.optimizer.num_update = max([self.optimizer.begin_num_update, *counts.values()])


def _as_ndarrays(state: Any) -> Any:
    from kvstore.mxnet.nd.ndarray import NDArray

    if isinstance(state, list | tuple):
        return type(state)(map(_as_ndarrays, state))
    return NDArray(state) if isinstance(state, np.ndarray) else state
