"""How long PyTorch's collective calls and steps of DistributedDataParallel take, beside gloo.

``python benchmarks/torch_ddp.py``: all ranks have a group of both backends and use them in turns,
one operation of each, so that both meet the same machine. Printed are medians in ms and their
ratio, for each of ``--ranks`` on this machine and then for ``--network-ranks`` in network
namespaces, which have TCP and nothing else between them (as root, with ``ip``). Each namespace
stands for a machine with ``--per-machine`` ranks, which share its memory and its TCP.

``--parts``: ``sums``, all_reduce of float32 tensors of several sizes; ``buckets``, the gradients of
ResNet-50 in the five buckets in which DDP sends them, all at a time; ``backward``, DDP's backward
pass over the tensors of ``--models``, whose gradients are trivial to compute; ``step``, whole steps
of ResNet-18. Results of both backends are compared: a fast wrong answer ends with an error.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from benchmarks.models import MODELS, chosen, resnet50  # noqa: E402
from benchmarks.network import address, machines  # noqa: E402

SIZES = {
    "8 B": (8, 200),
    "1 MB": (1 << 20, 60),
    "25 MB": (25 << 20, 15),
    "100 MB": (100 << 20, 7),
}
"""Bytes of a tensor, and how many times it is added."""
PARTS = ("sums", "buckets", "backward", "step")
BACKENDS = ("gloo", "kvstore")
WARM_UP = 2
PORT = 29500
"""In a namespace of its own, so it is free."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=numbers, default="2,4", help="on this machine (2,4)")
    parser.add_argument("--network-ranks", type=numbers, default="2", help="in namespaces (2)")
    parser.add_argument("--per-machine", type=int, default=1, help="ranks of each namespace (1)")
    parser.add_argument("--gbit", type=float, default=0.0, help="of each namespace; 0: no limit")
    parser.add_argument("--parts", default=",".join(PARTS), help="which (all)")
    parser.add_argument("--models", type=chosen, default="resnet50,resnet110")
    parser.add_argument("--steps", type=int, default=7, help="of buckets, backward and step (7)")
    parser.add_argument("--quick", action="store_true", help="does it run? The figures say nothing")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)  # RANK/SIZE, of a rank in a namespace
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"--parts has {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    return options


def numbers(text: str) -> list[int]:
    """Numbers of ranks, for argparse; an empty text means none."""
    return [int(word) for word in text.split(",") if word]


def main() -> int:
    options = arguments()
    if options.rank_of:
        rank, size = map(int, options.rank_of.split("/"))
        run_rank(rank, size, options, address(0), PORT)
        return 0
    for size in options.ranks:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        print(f"{size} ranks on one machine, ms (median), kvstore : gloo", flush=True)
        spawned = (size, options, "127.0.0.1", port)
        torch.multiprocessing.spawn(run_rank, args=spawned, nprocs=size)
    return max([run_in_namespaces(size, options) for size in options.network_ranks], default=0)


def run_in_namespaces(size: int, options: argparse.Namespace) -> int:
    """Run ranks on machines whose only way to each other is TCP; return an exit code."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        print("network namespaces are left out: they need root and ip (Debian: iproute2)")
        return 0
    limit = f" of {options.gbit:g} Gbit/s" if options.gbit else ""
    count = -(-size // options.per_machine)
    where = f"{size} ranks on {count} machines by TCP{limit}"
    print(f"{where}, ms (median), kvstore : gloo", flush=True)
    with machines(count, options.gbit, 0.0) as names:
        placed = [rank // options.per_machine for rank in range(size)]
        ranks = [
            subprocess.Popen(
                [
                    *("ip", "netns", "exec", names[machine], sys.executable, *sys.argv),
                    *("--rank-of", f"{rank}/{size}"),
                ],
                env={
                    **os.environ,
                    "PS_MACHINE": f"machine {machine}",
                    "DMLC_NODE_HOST": address(machine),
                    "GLOO_SOCKET_IFNAME": "net",
                },
            )
            for rank, machine in enumerate(placed)
        ]
        try:
            return max(rank.wait() for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()


def run_rank(rank: int, size: int, options: argparse.Namespace, host: str, port: int) -> None:
    import kvstore.torch  # noqa: F401  registers the backend

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    steps = 2 if options.quick else options.steps
    if "sums" in options.parts:
        for title, (nbytes, times) in SIZES.items():
            time_all_reduce(rank, title, nbytes, groups, 2 if options.quick else times)
    if "buckets" in options.parts:
        time_buckets(rank, groups, steps)
    if "backward" in options.parts:
        for model in options.models:
            time_model(rank, model, groups, steps)
    if "step" in options.parts:
        time_step(rank, groups, steps)
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


def buckets() -> Iterator[int]:
    """How many numbers DDP sends at a time of ResNet-50: 1 MB first, then 25 MB, from the end."""
    count, limit = 0, 1 << 20
    for shape in reversed(resnet50()):
        count += torch.Size(shape).numel()
        if 4 * count >= limit:
            yield count
            count, limit = 0, 25 << 20
    if count:
        yield count


def time_buckets(rank: int, groups: dict[str, Any], steps: int) -> None:
    """Time the sums of a model's gradients, all under way at a time, as in DDP's backward."""
    values = [torch.arange(count) % 1000 + float(rank) for count in buckets()]
    tensors = {name: [each.clone() for each in values] for name in BACKENDS}

    def prepare(name: str) -> None:
        for tensor, each in zip(tensors[name], values, strict=True):
            tensor.copy_(each)

    def run(name: str) -> None:
        calls = [
            dist.all_reduce(tensor, group=groups[name], async_op=True) for tensor in tensors[name]
        ]
        for call in calls:
            call.wait()

    found = in_turns(steps, prepare, run)
    check(all(map(torch.equal, *tensors.values())), "buckets")
    report(rank, f"ResNet-50, {len(values)} buckets", found)


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


def time_step(rank: int, groups: dict[str, Any], steps: int) -> None:
    """Time whole steps of ResNet-18 on images of 64 x 64: forward, backward, SGD."""
    modules, optimizers = {}, {}
    first: dict[str, torch.Tensor] = {}
    for name, group in groups.items():
        torch.manual_seed(5)
        modules[name] = DistributedDataParallel(resnet18(), process_group=group)
        optimizers[name] = torch.optim.SGD(modules[name].parameters(), lr=0.01, momentum=0.9)
    torch.manual_seed(rank)
    images, labels = torch.randn(4, 3, 64, 64), torch.randint(1000, (4,))

    def step(name: str) -> None:
        optimizers[name].zero_grad()
        nn.functional.cross_entropy(modules[name](images), labels).backward()
        optimizers[name].step()
        if name not in first:  # later on, differences in the last bit grow
            first[name] = nn.utils.parameters_to_vector(modules[name].parameters()).detach()

    found = in_turns(steps, lambda name: None, step)
    check(torch.allclose(*first.values(), rtol=1e-5, atol=1e-6), "a step of ResNet-18")
    report(rank, "DDP step, ResNet-18", found)


class Tensors(nn.Module):
    """The tensors of a model without its arithmetic: gradients cost one pass over memory."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.randn(shape) for shape in MODELS[model]())

    def forward(self, factor: float) -> torch.Tensor:
        return torch.stack([tensor.sum() for tensor in self.tensors]).sum() * factor


class BasicBlock(nn.Module):
    """Two layers and a shortcut around them (He et al. 2015, arXiv:1512.03385, figure 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)),
            nn.ReLU(),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(x) + self.shortcut(x))


def resnet18() -> nn.Sequential:
    """ResNet-18 of the same paper's table 1: 11.7 M numbers in 62 tensors."""
    blocks: list[nn.Module] = []
    width = 64
    for stage, outputs in enumerate((64, 128, 256, 512)):
        for number in range(2):
            blocks.append(BasicBlock(width, outputs, 2 if stage and not number else 1))
            width = outputs
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.MaxPool2d(3, 2, 1), *blocks),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)),
    )


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
        print(f"{title:<22} {ours:8.3f} : {gloo:8.3f} = {ours / gloo:.2f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
