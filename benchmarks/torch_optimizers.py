"""How long a whole step takes, by who makes the update: each rank, some ranks, or the servers.

``python benchmarks/torch_optimizers.py``: every rank has four copies of a model's tensors and steps
them in turns, one step each, so that all meet the same machine: DistributedDataParallel over gloo
with torch.optim.SGD; the same with ZeroRedundancyOptimizer (ZeRO stage 1); DistributedOptimizer;
ServerOptimizer. A step is ``zero_grad``, a backward pass whose gradients are trivial to compute,
and ``step``. Printed are medians in ms, and ratios. The weights of all are compared at the end.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import socket
import statistics
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from benchmarks.models import chosen  # noqa: E402
from benchmarks.torch_ddp import Tensors, check  # noqa: E402

NUMBERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 1e-4},
    "momentum": {"lr": 1e-4, "momentum": 0.9},
    "adam": {"lr": 1e-4},
}
KINDS = {"sgd": torch.optim.SGD, "momentum": torch.optim.SGD, "adam": torch.optim.Adam}
WARM_UP = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", type=chosen, default="resnet50")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--optimizer", choices=NUMBERS, default="momentum")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="does it run? The figures say nothing")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    os.environ["KVSTORE_TORCH_SERVERS"] = str(options.servers)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(run_rank, args=(options, port), nprocs=options.ranks)
    return 0


def run_rank(rank: int, options: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    contenders = made(options)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(2 if options.quick else options.steps + WARM_UP):
        names = list(contenders)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            model, optimizer = contenders[name]
            dist.barrier()
            begin = time.perf_counter()
            optimizer.zero_grad()
            model(float(rank + 1)).backward()
            optimizer.step()
            if number >= WARM_UP or options.quick:
                found[name].append(1000 * (time.perf_counter() - begin))
    compare(contenders)
    if rank == 0:
        report(options, found)
    dist.barrier()
    dist.destroy_process_group()


def made(options: argparse.Namespace) -> dict[str, tuple[Any, Any]]:
    """The model and the optimizer of each contender."""
    import kvstore.torch as kvt

    numbers, kind = NUMBERS[options.optimizer], KINDS[options.optimizer]

    def tensors() -> Tensors:
        torch.manual_seed(5)
        return Tensors(options.model[0])

    ddp, zero = DistributedDataParallel(tensors()), DistributedDataParallel(tensors())
    ours, on_servers = tensors(), tensors()
    name = "adam" if options.optimizer == "adam" else "sgd"
    return {
        "DDP over gloo": (ddp, kind(ddp.parameters(), **numbers)),
        "ZeRO-1 over gloo": (
            zero,
            ZeroRedundancyOptimizer(zero.parameters(), optimizer_class=kind, **numbers),
        ),
        "DistributedOptimizer": (
            ours,
            kvt.DistributedOptimizer(kind(ours.parameters(), **numbers)),
        ),
        "ServerOptimizer": (on_servers, kvt.ServerOptimizer(on_servers, None, name, **numbers)),
    }


def compare(contenders: dict[str, tuple[Any, Any]]) -> None:
    first, *others = [list(model.parameters()) for model, _ in contenders.values()]
    for name, other in zip(list(contenders)[1:], others, strict=True):
        same = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(first, other, strict=True))
        check(same, f"weights of {name}")


def report(options: argparse.Namespace, found: dict[str, list[float]]) -> None:
    title = f"{options.model[0]}, {options.optimizer}, {options.ranks} ranks"
    print(f"{title}: ms of a step (median), and its ratio to DDP and to ZeRO-1 over gloo")
    medians = {name: statistics.median(times) for name, times in found.items()}
    ddp, zero = (medians[name] for name in ("DDP over gloo", "ZeRO-1 over gloo"))
    for name, median in medians.items():
        print(f"{name:<22} {median:8.1f}  {median / ddp:5.2f}  {median / zero:5.2f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
