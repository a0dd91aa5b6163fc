"""What the workers of a synchronous ``Trainer`` compare in every step, so that none can drift.

Each worker says in a row of a small table what it is about to do: batch size, learning rate,
which parameters. The table travels through a store of its own that only adds, so every worker
sees every row; an error is raised on all of them alike, before a gradient is sent, and none
waits for another that does something else. It costs a step one round trip of some bytes. Called
from the trainer's thread. Read next: ``trainer_store.py``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvstore.errors import OptimizerMismatch
from kvstore.keys import Key
from kvstore.optimizer.base import Optimizer
from kvstore.parameter import Parameter
from pslite.errors import UsageError

if TYPE_CHECKING:
    from kvstore.dist import DistKVStore

Table = np.ndarray[Any, np.dtype[np.float64]]
"""A row of three numbers for each worker."""

_KEY = "what the workers do"


class Plan(NamedTuple):
    """What a worker is about to do."""

    batch_size: float
    """0 where the call has none."""
    learning_rate: float
    keys: int
    """A fingerprint of the parameters that take part."""


class Agreement:
    """The comparison between the workers of ``store``; all of them make one at the same time."""

    def __init__(self, store: DistKVStore) -> None:
        from kvstore.dist import create_dist

        # On the same node, and so of the same workers. The store itself cannot carry numbers:
        # it may have an optimizer, and its keys are the user's.
        self._store = create_dist("dist_sync", "dist_sync", node=store.node)
        table = self._table()
        self._store.broadcast(_KEY, table, out=table)

    def start(self, params: Mapping[Key, Parameter], optimizer: Optimizer, updates: bool) -> None:
        """Raise, on all workers, unless they train the same parameters by the same optimizer."""
        specs = [(key, *parameter.spec) for key, parameter in params.items()]
        row = fingerprint(specs), updates, fingerprint([optimizer])
        check_starts(self._exchange(row), optimizer)

    def meet(self, plan: Plan) -> None:
        """Wait until every worker has said its plan. Raises, on all, unless they are the same."""
        check_plans(self._exchange(plan))

    def from_first(self, number: float) -> float:
        """The number that worker 0 has given; the others' do not count."""
        return float(self._exchange((number, 0, 0))[0, 0])

    def _exchange(self, row: Iterable[float]) -> Table:
        table = self._table()
        table[self._store.rank] = tuple(row)
        self._store.pushpull(_KEY, table, out=table)
        return table

    def _table(self) -> Table:
        return np.zeros((self._store.num_workers, len(Plan._fields)), np.float64)


def fingerprint(items: Iterable[object]) -> int:
    """A number that tells lists of strings and numbers apart, the same in every process."""
    return zlib.crc32("\n".join(map(repr, items)).encode())


def check_plans(table: Table) -> None:
    """Raise unless all rows, a ``Plan`` of each rank, are the same.

    ``OptimizerMismatch`` for numbers of the optimizer, ``UsageError`` for the parameters.
    """
    batch_sizes, rates, keys = table.T
    if _differ(batch_sizes):
        raise OptimizerMismatch(
            f"the workers' batch sizes differ: {_by_rank(batch_sizes)}; all have to give the same "
            "number, such as that of all workers' samples in this step"
        )
    if _differ(rates):
        raise OptimizerMismatch(
            f"the workers' learning rates differ: {_by_rank(rates)}; all have to call "
            "set_learning_rate before the same step"
        )
    if _differ(keys):
        raise UsageError(
            "the workers train different parameters in this step: which ones are frozen "
            "(requires_grad, grad_req) must be the same on all"
        )


def check_starts(table: Table, optimizer: Optimizer) -> None:
    """Raise unless all rows, of ``Agreement.start``, are the same; ``optimizer`` is ours."""
    specs, updates, optimizers = table.T
    if _differ(specs):
        raise UsageError(
            "the workers have different parameters: names, order, shapes and dtypes must be the "
            "same on all"
        )
    if _differ(updates):
        raise UsageError(
            f"update_on_kvstore differs between the workers (1 is True): {_by_rank(updates)}"
        )
    if _differ(optimizers):
        raise OptimizerMismatch(
            "the workers have different optimizers; all have to give the same numbers and the "
            f"same batch size (1 / rescale_grad). This worker has {optimizer!r}"
        )


def _differ(column: np.ndarray[Any, Any]) -> bool:
    return bool((column != column[0]).any())


def _by_rank(column: np.ndarray[Any, Any]) -> str:
    return ", ".join(f"worker {rank} {number:.10g}" for rank, number in enumerate(column))
