"""How long PyTorch's collective calls and steps of DistributedDataParallel take, beside gloo.

``python benchmarks/torch_ddp.py``: all ranks have a group of both backends and use them in turns,
one operation of each, so that both meet the same machine. Printed are medians in ms and their
ratio. ``all_reduce`` adds float32 tensors of several sizes; ``DDP`` runs a backward pass over the
tensors of a model, whose gradients are trivial to compute. Results of both are compared: a
fast wrong answer ends with an error.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import socket
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from benchmarks.models import MODELS, chosen  # noqa: E402

SIZES = {
    "8 B": (8, 400),
    "1 MB": (1 << 20, 100),
    "25 MB": (25 << 20, 25),
    "100 MB": (100 << 20, 15),
}
"""Bytes of a tensor, and how many times it is added."""
BACKENDS = ("gloo", "kvstore")
WARM_UP = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", type=chosen, default="resnet50,resnet110")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="does it run? The figures say nothing")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(run_rank, args=(options, port), nprocs=options.ranks)
    return 0


def run_rank(rank: int, options: argparse.Namespace, port: int) -> None:
    import kvstore.torch  # noqa: F401  registers the backend

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    if rank == 0:
        print(f"{options.ranks} ranks, ms (median), kvstore : gloo")
    for title, (nbytes, times) in SIZES.items():
        time_all_reduce(rank, title, nbytes, groups, 2 if options.quick else times)
    for model in options.models:
        time_model(rank, model, groups, 2 if options.quick else options.steps)
    dist.destroy_process_group()


def time_all_reduce(rank: int, title: str, nbytes: int, groups: dict[str, Any], times: int) -> None:
    """Time sums of one size."""
    values = torch.arange(nbytes // 4) % 1000 + float(rank)
    tensors = {name: values.clone() for name in BACKENDS}
    found = in_turns(
        times,
        lambda name: tensors[name].copy_(values),
        lambda name: dist.all_reduce(tensors[name], group=groups[name]),
    )
    check(torch.equal(*tensors.values()), f"all_reduce of {title}")
    report(rank, f"all_reduce, {title}", found)


def time_model(rank: int, model: str, groups: dict[str, Any], steps: int) -> None:
    """Time backward passes of DDP over the tensors of a model."""
    modules = {}
    for name, group in groups.items():
        torch.manual_seed(5)
        modules[name] = DistributedDataParallel(Tensors(model), process_group=group)

    def step(name: str) -> None:
        modules[name](float(rank + 1)).backward()

    found = in_turns(steps, lambda name: modules[name].zero_grad(set_to_none=False), step)
    gradients = [[tensor.grad for tensor in each.parameters()] for each in modules.values()]
    same = all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(*gradients, strict=True))
    check(same, f"DDP of {model}")
    report(rank, f"DDP, {model}", found)


class Tensors(torch.nn.Module):
    """The tensors of a model without its arithmetic: gradients cost one pass over memory."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.tensors = torch.nn.ParameterList(torch.randn(shape) for shape in MODELS[model]())

    def forward(self, factor: float) -> torch.Tensor:
        return torch.stack([tensor.sum() for tensor in self.tensors]).sum() * factor


def in_turns(
    times: int, prepare: Callable[[str], Any], run: Callable[[str], Any]
) -> dict[str, list[float]]:
    """Time ``run`` of each backend, one after the other; ms of each time."""
    found: dict[str, list[float]] = {name: [] for name in BACKENDS}
    for number in range(times + WARM_UP):
        for name in BACKENDS if number % 2 else reversed(BACKENDS):
            prepare(name)
            dist.barrier()
            begin = time.perf_counter()
            run(name)
            if number >= WARM_UP:
                found[name].append(1000 * (time.perf_counter() - begin))
    return found


def check(is_right: bool, what: str) -> None:
    if not is_right:
        raise SystemExit(f"{what}: the two backends differ")


def report(rank: int, title: str, found: dict[str, list[float]]) -> None:
    if rank == 0:
        gloo, ours = (statistics.median(found[name]) for name in BACKENDS)
        print(f"{title:<20} {ours:8.3f} : {gloo:8.3f} = {ours / gloo:.2f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
