"""The numbers of a run with row-sparse keys: ids, gradients, and what the table must be.

As ``arithmetic.py``, for a table of which each worker touches some rows in a round, others in the
next: ids are drawn anew, sorted, each once, from all rows with equal chances, so that two workers
have some in common. Pure, and NumPy only (from 1.23 on), because it runs inside every contender's
processes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.compare.arithmetic import LEARNING_RATE
from benchmarks.compare.loop import Task

KEY = "table"
_STEP = 10
"""Every tenth row is compared at the end."""


@dataclass(frozen=True)
class RowTask(Task):
    """A task whose settings are ``rows`` and ``width`` of the table, and ``ids``, how many of its
    rows each worker touches in a round."""

    @staticmethod
    def from_arguments() -> RowTask:
        return RowTask(**json.loads(sys.argv[1]))

    @property
    def shape(self) -> tuple[int, int]:
        """Of the table."""
        return int(self.settings["rows"]), int(self.settings["width"])

    @property
    def num_ids(self) -> int:
        return int(self.settings["ids"])

    def ids(self, rank: int, round_: int) -> Any:
        """The rows that a worker touches in a round, int64, sorted, each once."""
        rng = np.random.default_rng((11, rank, round_))
        return np.sort(rng.choice(self.shape[0], self.num_ids, replace=False, shuffle=False))

    def gradients(self, rank: int) -> Any:
        """Float32 rows that a worker pushes in every round, for whatever ids."""
        rng = np.random.default_rng(1000 + rank)
        return rng.standard_normal((self.num_ids, self.shape[1]), np.float32)

    def first_table(self) -> Any:
        """Float32 rows to begin with, the same in every process."""
        return np.random.default_rng(7).standard_normal(self.shape, np.float32)

    @property
    def compared_ids(self) -> Any:
        """The rows whose values are compared after the last round."""
        return np.arange(0, self.shape[0], _STEP)

    def expected_weights(self) -> list[Any]:
        """These rows after all rounds of SGD: row = row - lr (g0 + g1 + ...), of those workers
        that have touched it in the round, added in the order of ranks."""
        ids = self.compared_ids
        rows = self.first_table()[ids]
        gradients = [self.gradients(rank) for rank in range(self.workers)]
        for round_ in range(self.total_rounds):
            total = np.zeros_like(rows)
            for rank in range(self.workers):
                touched = self.ids(rank, round_)
                at = np.flatnonzero(touched % _STEP == 0)
                total[touched[at] // _STEP] += gradients[rank][at]
            # Rows that nobody has touched lose 0, which leaves them as they are.
            rows -= np.float32(LEARNING_RATE) * total
        return [rows]
