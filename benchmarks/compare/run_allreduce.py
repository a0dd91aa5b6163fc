"""A worker that adds gradients up by all-reduce and updates by itself.

``python -m benchmarks.compare.run_allreduce TASK``. Settings of the task: ``library`` is ``gloo``
(through PyTorch's CPU build) or ``openmpi`` (through mpi4py, under mpirun); ``pieces`` says how
the model is cut: ``flat`` (one call), ``singly`` (a call for every tensor), or a number of MiB
for buckets of that size, as PyTorch's DistributedDataParallel has them.

Gradients and weights lie in one piece of memory each, of which the tensors are views, so no
contender of this kind copies anything. Each piece is updated as soon as it has been added up.
The update is PyTorch's fused SGD where there is PyTorch (one pass through memory, compiled), else
NumPy in blocks that stay in the cache.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.compare import arithmetic
from benchmarks.compare.loop import Task, run

Slice = tuple[int, int]
"""First element and the one after the last, of a piece of the flat arrays."""

BLOCK = 65_536


def pieces_of(sizes: list[int], how: str) -> list[Slice]:
    """Cut a flat array of tensors with these sizes (in elements) into pieces."""
    total = sum(sizes)
    if how == "flat":
        return [(0, total)]
    if how == "singly":
        ends = [int(end) for end in np.cumsum(sizes)]
        return list(zip([0, *ends[:-1]], ends, strict=True))
    step = int(float(how) * 2**20) // 4
    return [(start, min(start + step, total)) for start in range(0, total, step)]


class Gloo:
    """PyTorch's process group; calls run on gloo's own threads, several at a time."""

    def __init__(self, task: Task) -> None:
        import torch
        import torch.distributed as distributed

        self._torch, self._distributed = torch, distributed
        self.rank = int(os.environ["RANK"])
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{task.directory}/rendezvous",
            rank=self.rank,
            world_size=task.workers,
        )

    def barrier(self) -> None:
        self._distributed.barrier()

    def begin(self, array: Any) -> Callable[[], Any]:
        """Start to add up in place; call what is returned to wait."""
        tensor = self._torch.from_numpy(array)
        wait: Callable[[], Any] = self._distributed.all_reduce(tensor, async_op=True).wait
        return wait

    def close(self) -> None:
        # Without the interpreter's end: gloo's threads now and then abort a process that leaves
        # while another one still closes its connections.
        sys.stdout.flush()
        os._exit(0)


class OpenMPI:
    """Blocking calls: libnbc's non-blocking ones have no thread that would progress them."""

    def __init__(self, task: Task) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        self.rank = self._world.Get_rank()

    def barrier(self) -> None:
        self._world.Barrier()

    def begin(self, array: Any) -> Callable[[], Any]:
        def wait() -> None:
            self._world.Allreduce(self._mpi.IN_PLACE, array)

        return wait

    def close(self) -> None:
        pass  # mpi4py finalizes at the end of the interpreter


class BlockwiseSGD:
    """SGD with momentum in NumPy, block by block."""

    def __init__(self, weights: Any, gradients: Any) -> None:
        self._weights, self._gradients = weights, gradients
        self._velocities = np.zeros_like(weights)
        self._scratch = np.empty(BLOCK, np.float32)

    def update(self) -> None:
        for start in range(0, len(self._weights), BLOCK):
            block = slice(start, start + BLOCK)
            weight, velocity = self._weights[block], self._velocities[block]
            step = self._scratch[: len(weight)]
            np.multiply(self._gradients[block], np.float32(arithmetic.LEARNING_RATE), out=step)
            velocity *= np.float32(arithmetic.MOMENTUM)
            velocity -= step
            weight += velocity


class FusedSGD:
    """The same by PyTorch's fused kernel."""

    def __init__(self, weights: Any, gradients: Any) -> None:
        import torch

        parameter = torch.nn.Parameter(torch.from_numpy(weights))
        parameter.grad = torch.from_numpy(gradients)
        self._sgd = torch.optim.SGD(
            [parameter], lr=arithmetic.LEARNING_RATE, momentum=arithmetic.MOMENTUM, fused=True
        )

    def update(self) -> None:
        self._sgd.step()


def updater_for(task: Task, weights: Any, gradients: Any) -> Any:
    """The fastest SGD there is, on this worker's share of the processors."""
    try:
        import torch
    except ImportError:
        return BlockwiseSGD(weights, gradients)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // task.workers))
    return FusedSGD(weights, gradients)


class AllReduce:
    """One worker's side of a run."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._library = Gloo(task) if task.settings["library"] == "gloo" else OpenMPI(task)
        self.rank = self._library.rank
        self._sources = _flat(task.gradients_of(self.rank))
        self._gradients = self._sources.copy()
        self._weights = _flat(arithmetic.first_weights(task.shapes))
        sizes = [int(np.prod(shape)) for shape in task.shapes]
        cut = pieces_of(sizes, task.settings["pieces"])
        self._pieces = [self._gradients[start:end] for start, end in cut]
        if task.settings["pieces"] == "singly":  # one update of everything is cheaper than many
            cut = [(0, len(self._weights))]
        self._updaters = [
            updater_for(task, self._weights[start:end], self._gradients[start:end])
            for start, end in cut
        ]

    def prepare(self) -> None:
        self._gradients[:] = self._sources

    def barrier(self) -> None:
        self._library.barrier()

    def exchange(self) -> None:
        waits = [self._library.begin(piece) for piece in self._pieces]
        if len(self._updaters) == len(waits):
            for wait, updater in zip(waits, self._updaters, strict=True):
                wait()
                updater.update()
        else:
            for wait in waits:
                wait()
            self._updaters[0].update()

    def notes(self) -> dict[str, Any]:
        return {}

    def weights(self) -> list[Any]:
        ends = np.cumsum([int(np.prod(shape)) for shape in self._task.shapes])
        return list(np.split(self._weights, ends[:-1]))

    def close(self) -> None:
        self.barrier()
        self._library.close()


def _flat(arrays: list[Any]) -> Any:
    return np.concatenate([array.reshape(-1) for array in arrays])


def main() -> None:
    task = Task.from_arguments()
    worker = AllReduce(task)
    run(task, worker)
    worker.close()


if __name__ == "__main__":
    main()
