"""The timed loop, the same for every contender, and how a process reports its figures.

Runs on the main thread of a worker process of a contender, also in the environment of an old
NumPy and Python 3.10; imports nothing but NumPy and the standard library. A ``Task`` arrives as
JSON on the command line; a report is a JSON file in the task's directory.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.compare import arithmetic
from benchmarks.models import MODELS, Shape


@dataclass(frozen=True)
class Task:
    """What one run does."""

    model: str = "resnet50"
    store: str = "dist_sync"
    workers: int = 2
    servers: int = 1
    devices: int = 1
    tensors: int = 0
    """Instead of the model: so many tensors of ``tensor_bytes`` each."""
    tensor_bytes: int = 4
    warmup: int = 3
    rounds: int = 15
    by_key: bool = False
    """A push and a pull for every key, with priorities, instead of a list of all."""
    check: bool = True
    """Whether the weights are compared with NumPy's at the end."""
    settings: dict[str, str] = field(default_factory=dict)
    """What is particular to the contender, such as the call to use."""
    directory: str = ""
    """Where reports go."""

    @property
    def shapes(self) -> list[Shape]:
        if self.tensors:
            return [(self.tensor_bytes // 4,)] * self.tensors
        return MODELS[self.model]()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return 4 * sum(math.prod(shape) for shape in self.shapes)

    @property
    def is_async(self) -> bool:
        return "async" in self.store

    @property
    def total_rounds(self) -> int:
        return self.warmup + self.rounds

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_arguments() -> Task:
        """The task of this process, from its command line."""
        return Task(**json.loads(sys.argv[1]))

    def gradients_of(self, rank: int, device: int = 0) -> list[Any]:
        """Of an asynchronous store all contribute the same: see ``expected_weights``."""
        contributor = 0 if self.is_async else rank * self.devices + device
        return arithmetic.gradients(self.shapes, contributor)

    def expected_weights(self) -> list[Any]:
        contributors = self.workers * self.devices
        return arithmetic.expected_weights(
            self.shapes, contributors, self.total_rounds, one_by_one=self.is_async
        )


class Exchanger(Protocol):
    """What a contender's worker process can do."""

    rank: int

    def prepare(self) -> None:
        """Write the gradients anew, as a backward pass does. Not timed."""

    def barrier(self) -> None:
        """Wait for the other workers."""

    def exchange(self) -> None:
        """Give the gradients and have the new weights of the whole model. Timed."""

    def notes(self) -> dict[str, Any]:
        """What else goes into the report; asked after the last round."""

    def weights(self) -> list[Any]:
        """What this worker has got, as NumPy arrays."""


def run(task: Task, worker: Exchanger) -> None:
    """Warm up, time the rounds, check the weights, and report."""
    times_ms = []
    for _ in range(task.total_rounds):
        worker.prepare()
        worker.barrier()
        begin = time.perf_counter()
        worker.exchange()
        times_ms.append(1e3 * (time.perf_counter() - begin))
    worker.barrier()
    report: dict[str, Any] = {"times_ms": times_ms[task.warmup :], **worker.notes()}
    if task.check:
        weights = worker.weights()
        report["checksum"] = arithmetic.checksum(weights)
        if worker.rank == 0:
            report["check"] = arithmetic.compare(task.expected_weights(), weights)._asdict()
    write_report(task.directory, worker.rank, report)


def write_report(directory: str, rank: int, report: dict[str, Any]) -> None:
    """Leave a report for the process that started the run."""
    Path(directory, f"rank{rank}.json").write_text(json.dumps(report), encoding="utf-8")
