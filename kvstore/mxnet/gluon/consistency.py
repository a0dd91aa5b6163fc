"""The optimizer of a ``Trainer``, and the check that workers agree.

Before each step, each worker describes it in a row of a small table: batch size, parameters and so
on. The workers exchange the table through a separate store that only adds, so every worker gets all
rows. If rows differ, all workers raise the same error before any gradient is sent, so no worker
waits for one that does something else. This costs each step one round trip of a few bytes. Called
from the trainer's thread.

The ``lr_mult`` or ``wd_mult`` of a ``Parameter`` may be changed at any time, for example to freeze
a layer. Optimizers are immutable, so ``Factors`` finds the changes and a new optimizer replaces
the old one. Read next: ``trainer_store.py``.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvstore.arrays.keys import Key
from kvstore.errors import ArgumentTypeError, ArgumentValueError, OptimizerMismatch
from kvstore.mxnet.gluon.parameter import Parameter
from kvstore.optimizer import Optimizer, create
from kvstore.optimizer.parameters import parameter_names
from kvstore.optimizer.scripted import check_travels
from kvstore.optimizer.serialize import what_was_given
from pslite.errors import UsageError

if TYPE_CHECKING:
    from kvstore.stores.dist.store import DistKVStore


Table = np.ndarray[Any, np.dtype[np.float64]]
"""A row of numbers for each worker."""

_KEY = "what the workers do"
_TEXTS = "what the workers have"
MAX_TEXT_BYTES = 1024 * 1024
"""The maximum length of the text that a worker shows to the others."""


class Plan(NamedTuple):
    """The next step of a worker, for the comparison between workers."""

    batch_size: float
    """0 if the call has no batch size."""
    learning_rate: float
    keys: int
    """A fingerprint of the parameters in the step."""
    factors: int = 0
    """A fingerprint of their ``lr_mult`` and ``wd_mult``."""
    num_changed: int = 0
    """How many weights the worker has set that the store would overwrite."""


class Agreement:
    """The comparison of plans between the workers of ``store``; all workers take part."""

    def __init__(self, store: DistKVStore) -> None:
        from kvstore.stores.dist.store import create_dist

        # It uses the same node, so it has the same workers. The user's store cannot exchange the
        # numbers: it may have an optimizer, and its keys belong to the user.
        self._store = create_dist("dist_sync", "dist_sync", node=store.node)
        table = self._table()
        self._store.broadcast(_KEY, table, out=table)

    def start(
        self,
        params: Mapping[Key, Parameter],
        optimizer: Optimizer,
        updates: bool,
        averages: bool,
    ) -> None:
        """Raise on all workers unless they have the same parameters and optimizer."""
        specs = [(key, *parameter.spec) for key, parameter in params.items()]
        table = self._exchange([fingerprint(specs), updates, fingerprint([optimizer]), averages])
        if _differ(table[:, 0]):
            shown = {str(key): f"{shape} of {dtype}" for key, shape, dtype in specs}
            raise UsageError(
                "parameters must have the same names, order, shapes and dtypes on all workers. "
                f"{differences(self._exchange_texts(shown))}"
            )
        check_starts(table)
        if _differ(table[:, 2]):
            raise OptimizerMismatch(
                "the workers have different optimizers; pass the same numbers and the same batch "
                f"size on all workers. {differences(self._exchange_texts(described(optimizer)))}"
            )

    def meet(self, plan: Plan) -> None:
        """Wait for every worker's plan; raise on all workers if plans differ."""
        check_plans(self._exchange(plan))

    def from_first(self, number: float) -> float:
        """Return worker 0's number, on all workers."""
        return float(self._exchange([number])[0, 0])

    def _exchange_texts(self, mine: Mapping[str, str]) -> list[dict[str, str]]:
        """Exchange texts: return each worker's. All workers call it."""
        text = json.dumps(mine).encode()
        if len(text) > MAX_TEXT_BYTES:
            text = json.dumps({"": f"{len(mine)} of them, too many to show"}).encode()
        longest = int(self._exchange([len(text)])[:, 0].max())
        table = np.zeros((self._store.num_workers, longest), np.uint8)
        self._store.broadcast(_TEXTS, table, out=table)
        table[self._store.rank, : len(text)] = np.frombuffer(text, np.uint8)
        self._store.pushpull(_TEXTS, table, out=table)
        self._store.delete(_TEXTS)
        return [json.loads(row.tobytes().rstrip(b"\0")) for row in table]

    def _exchange(self, row: Sequence[float]) -> Table:
        table = self._table()
        if self._store.catches_up:  # the lost worker whose place this one takes was compared
            table[:, : len(row)] = row
            return table
        table[self._store.rank, : len(row)] = row
        self._store.pushpull(_KEY, table, out=table)
        return table

    def _table(self) -> Table:
        return np.zeros((self._store.num_workers, len(Plan._fields)), np.float64)


def fingerprint(items: Iterable[object]) -> int:
    """Return a hash of strings and numbers, the same in every process."""
    return zlib.crc32("\n".join(map(repr, items)).encode())


def check_plans(table: Table) -> None:
    """Check that all rows, one ``Plan`` of each worker, are equal.

    Raises ``OptimizerMismatch`` for the optimizer's numbers, ``UsageError`` for parameters.
    """
    batch_sizes, rates, keys, factors, changed = table.T
    if _differ(batch_sizes):
        raise OptimizerMismatch(
            f"the workers' batch sizes differ: {_by_rank(batch_sizes)}; pass the same "
            "number on all, such as the number of all workers' samples in this step"
        )
    if _differ(rates):
        raise OptimizerMismatch(
            f"the workers' learning rates differ: {_by_rank(rates)}; call "
            "set_learning_rate before the same step on all workers"
        )
    if _differ(keys):
        raise UsageError(
            "the workers train different parameters in this step; freeze the same parameters "
            "(requires_grad, grad_req) on all workers"
        )
    if _differ(factors):
        raise OptimizerMismatch(
            "lr_mult and wd_mult of the parameters differ between the workers; set the same "
            "values before the same step on all workers"
        )
    if changed.any():
        raise UsageError(
            f"the weights were set or loaded since the last step ({_by_rank(changed)} of them); "
            f"{SET_TOO_LATE}"
        )


SET_TOO_LATE = (
    "the store keeps the weights and would overwrite these. Set or load weights before the first "
    "step; later, make a new Trainer over a new store, or one with update_on_kvstore=False, where "
    "each worker updates its own"
)


def check_starts(table: Table) -> None:
    """Raise unless all workers update (column 1) and average (column 3) alike."""
    for what, column in (("update_on_kvstore", 1), ('reduction="mean"', 3)):
        if _differ(table[:, column]):
            raise UsageError(
                f"{what} differs between the workers (1 is True): {_by_rank(table[:, column])}; "
                "pass the same value on all workers"
            )


def described(optimizer: Optimizer) -> dict[str, str]:
    """Return an optimizer's numbers by name, with the batch size for ``rescale_grad``."""
    shown = {name: repr(value) for name, value in optimizer.params().items()}
    factor = optimizer.params().get("rescale_grad")
    if factor:
        shown["batch size (1 / rescale_grad)"] = f"{1 / float(factor):.10g}"
        del shown["rescale_grad"]
    return {"optimizer": optimizer.name, **shown}


def differences(said: Sequence[Mapping[str, str]]) -> str:
    """Return the differences as text, at most five of them.

    For example: ``learning_rate is 0.1 on worker 0, 0.2 on worker 1``.
    """
    names = list(dict.fromkeys(name for each in said for name in each))
    apart = [name for name in names if len({each.get(name) for each in said}) > 1]
    texts = [
        f"{name} is "
        + ", ".join(
            f"{each.get(name, 'missing')} on worker {rank}" for rank, each in enumerate(said)
        )
        for name in apart[:5]
    ]
    if not apart:
        texts = ["they come in a different order"]
    if len(apart) > 5:
        texts.append(f"and {len(apart) - 5} more differ")
    return "; ".join(texts)


def _differ(column: np.ndarray[Any, Any]) -> bool:
    return bool((column != column[0]).any())


def _by_rank(column: np.ndarray[Any, Any]) -> str:
    return ", ".join(f"worker {rank} {number:.10g}" for rank, number in enumerate(column))


class Factors:
    """The ``lr_mult`` and ``wd_mult`` of parameters, instead of the optimizer's."""

    def __init__(self, params: Mapping[Key, Parameter], optimizer: Optimizer) -> None:
        self._params = list(params.items())
        self._own = dict(optimizer.lr_mult), dict(optimizer.wd_mult)
        """The optimizer's original factors, for parameters whose own factor is 1."""
        self._known: list[tuple[float, float]] = [(1.0, 1.0)] * len(self._params)
        self.fingerprint = 0
        """A hash, equal on workers whose parameters have equal factors."""

    def have_changed(self) -> bool:
        """Return whether a parameter's factors changed since the last ``changes``."""
        return self._present() != self._known

    def changes(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's parameters to replace, so that the current factors apply."""
        known, self._known = self._known, self._present()
        self.fingerprint = fingerprint(self._known)
        changed: dict[str, Any] = {}
        for index, name in enumerate(("lr_mult", "wd_mult")):
            numbers = dict(getattr(optimizer, name))
            before = dict(numbers)
            for (key, _), old, new in zip(self._params, known, self._known, strict=True):
                if old[index] != new[index]:
                    _put(numbers, key, new[index], self._own[index].get(key))
            if numbers != before:
                changed[name] = numbers
        return changed

    def _present(self) -> list[tuple[float, float]]:
        return [(parameter.lr_mult, parameter.wd_mult) for _, parameter in self._params]


def _put(numbers: dict[Key, float], key: Key, factor: float, own: float | None) -> None:
    if factor != 1.0:
        numbers[key] = factor
    elif own is not None:
        numbers[key] = own
    else:
        numbers.pop(key, None)


def optimizer_for(
    optimizer: str | Optimizer, optimizer_params: Mapping[str, Any] | None
) -> Optimizer:
    """Return the given optimizer, or create it from its name and numbers.

    Raises for anything else.
    """
    if isinstance(optimizer, Optimizer):
        if optimizer_params:
            raise ArgumentValueError(
                "optimizer_params can be used only with the name of an optimizer, got an "
                "Optimizer; set the parameters when you create it"
            )
    elif not isinstance(optimizer, str):
        raise ArgumentTypeError(
            "optimizer must be a name or an Optimizer of kvstore, got "
            f"{what_was_given(optimizer)}; pass a name and parameters: Trainer(params, 'sgd', "
            "{'learning_rate': 0.1})"
        )
    elif isinstance(optimizer_params, Mapping | None):
        optimizer = create(optimizer, **(optimizer_params or {}))
    else:
        raise ArgumentTypeError(
            f"optimizer_params must be a mapping, got {type(optimizer_params).__name__}"
        )
    check_travels(optimizer)
    if "rescale_grad" not in parameter_names(type(optimizer)):
        raise ArgumentValueError(
            "a Trainer needs an optimizer with the field rescale_grad, to divide by the batch "
            f"size; add it to {optimizer.name}"
        )
    return optimizer


def check_batch_size(batch_size: object) -> None:
    """Check that a batch size is a positive number."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | float | np.number):
        raise ArgumentTypeError(f"batch_size must be a number, got {batch_size!r}")
    if not 0 < batch_size < math.inf:
        raise ArgumentValueError(f"batch_size must be positive and finite, got {batch_size}")
