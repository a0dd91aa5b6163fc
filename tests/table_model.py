"""What a share of a growing table should hold, as plain dictionaries and in the plainest words.

Values are float64 and all numbers multiples of 2**-24, so that sums are exact in any order.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import numpy as np

from kvstore.arrays import initializer
from kvstore.optimizer import SGD
from kvstore.sparse.tables.initial_rows import FirstValues
from kvstore.sparse.tables.settings import TableSettings

DIM = 2
RATE, MOMENTUM = 0.5, 0.5
OPTIMIZER = SGD(learning_rate=RATE, momentum=MOMENTUM)

Row = np.ndarray[Any, Any]


def settings_of(
    capacity: int | None = None, ttl: int | None = None, admit_after: int = 1
) -> TableSettings:
    init = initializer.Uniform(0.5)  # its numbers are multiples of 2**-24
    return TableSettings("user", DIM, np.dtype("f8"), init, capacity, ttl, admit_after, 3)


class Model:
    """A share of ``capacity`` rows; of the settings, it takes all else."""

    def __init__(self, settings: TableSettings, capacity: int | None, num_waiting: int) -> None:
        self.ttl, self.admit_after = settings.ttl, settings.admit_after
        self.capacity, self.num_waiting = capacity, num_waiting
        self.first_values = FirstValues(settings.init, settings.seed, settings.name)
        self.time = 0
        self.rows = OrderedDict[int, list[Row]]()
        """Values and momentum by id, the row that was touched last at the end."""
        self.touched: dict[int, int] = {}
        self.waiting: dict[int, list[int]] = {}
        """When an id came, and how often."""
        self.came = 0
        self.counts = dict.fromkeys(
            ("pulled", "hits", "made", "evicted", "expired", "dropped", "refused"), 0
        )

    def pull(self, ids: list[int], *, touch: bool = True) -> list[Row]:
        if touch:
            self.expire()
            self.counts["pulled"] += len(ids)
            self.counts["hits"] += sum(id_ in self.rows for id_ in ids)
            self._touch(ids, is_pull=True)
        alive = {id_ for id_ in self.rows if not self._is_over(id_)}
        return [self.rows[id_][0].copy() if id_ in alive else self.first(id_) for id_ in ids]

    def push(self, contributions: list[tuple[list[int], list[list[int]]]]) -> None:
        self.time += 1
        self.expire()
        self._touch([id_ for ids, _ in contributions for id_ in ids], is_pull=False)
        total: dict[int, Row] = {}
        for ids, gradients in contributions:
            for id_, gradient in zip(ids, gradients, strict=True):
                if id_ in self.rows:
                    total[id_] = total.get(id_, np.zeros(DIM)) + gradient
                else:
                    self.counts["dropped"] += 1
        for id_, gradient in total.items():
            value, momentum = self.rows[id_]
            momentum[...] = MOMENTUM * momentum - RATE * np.array(gradient)
            value += momentum

    def first(self, id_: int) -> Row:
        return self.first_values.make(np.array([id_]), DIM, np.dtype("f8"))[0]

    def expire(self) -> None:
        for id_ in [id_ for id_ in self.rows if self._is_over(id_)]:
            del self.rows[id_]
            self.counts["expired"] += 1

    def held(self) -> dict[int, tuple[list[float], list[float]]]:
        self.expire()
        return {id_: (row[0].tolist(), row[1].tolist()) for id_, row in self.rows.items()}

    def snapshot(self) -> Model:
        return copy.deepcopy(self)

    def load(self, saved: Model) -> None:
        """Go on with the rows of another one, and with one's own statistics."""
        self.rows = copy.deepcopy(saved.rows)
        self.touched, self.time = dict(saved.touched), saved.time
        self.waiting = {}

    def _is_over(self, id_: int) -> bool:
        return self.ttl is not None and self.time - self.touched[id_] > self.ttl

    def _touch(self, ids: list[int], *, is_pull: bool) -> None:
        here = {id_ for id_ in ids if id_ in self.rows}
        new = [id_ for id_ in dict.fromkeys(ids) if id_ not in self.rows]
        admitted = self._admitted(new) if is_pull or self.admit_after == 1 else []
        room = len(admitted) if self.capacity is None else self.capacity - len(here)
        for id_ in admitted[:room]:
            if self.capacity is not None and len(self.rows) >= self.capacity:
                del self.rows[next(old for old in self.rows if old not in here)]
                self.counts["evicted"] += 1
            self.rows[id_] = [self.first(id_), np.zeros(DIM)]
            self.waiting.pop(id_, None)
            here.add(id_)
            self.counts["made"] += 1
        self.counts["refused"] += len(new) - len(admitted[:room])
        for id_ in ids:
            if id_ in self.rows:
                self.rows.move_to_end(id_)
                self.touched[id_] = self.time

    def _admitted(self, new: list[int]) -> list[int]:
        """Those that wait no longer once they have rows; until then they stay admitted."""
        if self.admit_after == 1:
            return new
        admitted = []
        for id_ in new:
            if id_ in self.waiting:
                self.waiting[id_][1] += 1
                if self.waiting[id_][1] >= self.admit_after:
                    admitted.append(id_)
        for id_ in new:
            if id_ not in self.waiting:
                self.waiting[id_] = [self.came, 1]
                self.came += 1
        self.waiting = {
            id_: each
            for id_, each in self.waiting.items()
            if self.came - each[0] <= self.num_waiting
        }
        return admitted
