"""What priorities are worth on a slow network: ``sudo python benchmarks/priority.py``.

Makes network namespaces that are joined by a bridge (see network.py), and limits what each sends
and receives to ``--mbit``. First one worker pushes 100 MB to a server on another machine, and half
a second later pulls the first layer, with a higher priority and with the same one. A second time
it pulls 100 MB instead of pushing them. A *slice* is 4 MiB, the most that a message has: what is
on its way cannot be overtaken.

Then two machines, each with a worker and a server, train a model (benchmarks/models.py). The
computation is a sleep: as a GPU would, it leaves the processor to the network. Forward and backward
together take as long as the exchange alone, the backward pass two thirds of that, and each tensor
the same time. A tensor's gradient is sent once it is there, and its forward pass waits for its
weights. Prints the step with ``priority=-index`` beside the step with equal priorities.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import kvstore as mx
from benchmarks.compare.jobs import Process, run_processes
from benchmarks.models import MODELS
from benchmarks.network import address, machines

PORT = 9000
SLICE_BYTES = 4 << 20
LARGE_BYTES = 100_000_000
FIRST_VALUES = 9408
"""The first convolution of ResNet-50: 64 x 3 x 7 x 7."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--mbit", type=float, default=100.0, help="of a machine, each way (100)")
    add("--model", default="resnet50", choices=sorted(MODELS))
    add("--steps", type=int, default=8, help="with each kind of priorities (8)")
    add("--only", choices=("overtake", "train"), help="one of both parts")
    add("--task", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.task:
        task = json.loads(options.task)
        report = {"overtake": overtake, "train": train}[task["part"]](task)
        Path(task["directory"], f"rank{os.environ['DMLC_TASK_ID']}").write_text(json.dumps(report))
        return 0
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        print(f"needs root, ip and tc (Debian: iproute2); missing: {missing or 'root'}")
        return 1
    if options.only != "train":
        show_overtaking(options)
    if options.only != "overtake":
        show_training(options)
    return 0


def run(options: argparse.Namespace, part: str, workers: int, servers: list[int]) -> list[Any]:
    """Run one part; return what the workers report. ``servers`` are their machines."""
    with (
        machines(2, options.mbit / 1000, 0.0) as names,
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as directory,
    ):
        task = json.dumps({**vars(options), "part": part, "directory": directory})
        key = Path(directory, "job.key")
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(32))
        service = (sys.executable, "-m", "kvstore.server")
        worker = (sys.executable, __file__, "--task", task)
        roles = [("scheduler", 0, 0, service)]
        roles += [("server", rank, machine, service) for rank, machine in enumerate(servers)]
        roles += [("worker", rank, 1 - rank, worker) for rank in range(workers)]
        processes = [
            Process(
                ("ip", "netns", "exec", names[machine], *command),
                {
                    "DMLC_PS_ROOT_URI": address(0),
                    "DMLC_PS_ROOT_PORT": str(PORT),
                    "DMLC_NUM_WORKER": str(workers),
                    "DMLC_NUM_SERVER": str(len(servers)),
                    "DMLC_ROLE": role,
                    "DMLC_TASK_ID": str(rank),
                    "DMLC_NODE_HOST": address(machine),
                    "PS_MACHINE": f"machine {machine}",
                    "PS_JOB_KEY_FILE": str(key),
                    "OMP_NUM_THREADS": "1",
                },
            )
            for role, rank, machine, command in roles
        ]
        run_processes(processes, Path(directory), 600.0)
        paths = [Path(directory, f"rank{rank}") for rank in range(workers)]
        return [json.loads(path.read_text()) for path in paths]


# -- one pull behind much else -------------------------------------------------------------


def show_overtaking(options: argparse.Namespace) -> None:
    (report,) = run(options, "overtake", 1, [0])
    slice_s = 8 * SLICE_BYTES / options.mbit / 1e6
    print(f"{options.mbit:g} Mbit/s; a slice of 4 MiB takes {slice_s:.2f} s")
    print(
        f"  a push of 100 MB alone: {report['push']:.2f} s; the first layer: {report['idle']:.3f} s"
    )
    for what in ("push", "pull"):
        for priority, seconds in report[f"behind {what}"].items():
            print(
                f"  the first layer behind a {what} of 100 MB, priority {priority}: "
                f"{seconds:.2f} s, {seconds / slice_s:.1f} slices"
            )


def overtake(task: dict[str, Any]) -> dict[str, Any]:
    """The worker of the first part."""
    kv = mx.create("dist_sync")
    names = [f"layer {index}" for index in range(25)]
    values = [np.ones(LARGE_BYTES // 25 // 4, np.float32) for _ in names]
    outs = [np.empty_like(value) for value in values]
    first = np.empty(FIRST_VALUES, np.float32)
    kv.init(["first", *names], [first, *values])
    report: dict[str, Any] = {"behind push": {}, "behind pull": {}}
    with timed(report, "push"):
        kv.wait(kv.push_async(names, values))
    with timed(report, "idle"):
        kv.pull("first", out=first)
    for priority in (1, 0):
        for what in ("push", "pull"):
            if what == "push":
                others = [kv.push_async(*each) for each in zip(names, values, strict=True)]
            else:
                others = [kv.pull_async(*each) for each in zip(names, outs, strict=True)]
            time.sleep(0.5)
            with timed(report[f"behind {what}"], str(priority)):
                kv.pull("first", out=first, priority=priority)
            kv.wait(others)
    return report


@contextmanager
def timed(report: dict[str, Any], name: str) -> Any:
    began = time.perf_counter()
    yield
    report[name] = time.perf_counter() - began


# -- training ------------------------------------------------------------------------------


def show_training(options: argparse.Namespace) -> None:
    reports = run(options, "train", 2, [0, 1])
    found = {name: max(report[name] for report in reports) for name in reports[0]}
    both = found["exchange"]
    print(
        f"{options.model}, {options.mbit:g} Mbit/s: "
        f"exchange alone {both:.2f} s, computation as long"
    )
    equal, first = found["equal"], found["first layers first"]
    print(f"  a step with equal priorities: {equal:.2f} s")
    print(f"  a step with priority=-index:  {first:.2f} s, {equal / first - 1:.0%} faster")


def train(task: dict[str, Any]) -> dict[str, Any]:
    """A worker of the second part."""
    kv = mx.create("dist_sync")
    weights = [np.zeros(shape, np.float32) for shape in MODELS[task["model"]]()]
    layers = range(len(weights))
    for layer in layers:  # one by one, so that neighbours are on different servers
        kv.init(layer, weights[layer])
    kv.pushpull(list(layers), weights, out=weights)

    exchange_s = []
    for _ in range(3):
        kv.barrier()
        began = time.perf_counter()
        kv.wait([kv.pushpull_async(layer, weights[layer]) for layer in layers])
        exchange_s.append(time.perf_counter() - began)
    report = {"exchange": statistics.median(exchange_s)}

    compute_s = report["exchange"] / len(layers)
    for name in ("equal", "first layers first"):
        arriving = [kv.pushpull_async(layer, weights[layer]) for layer in layers]
        kv.wait(arriving)
        times = []
        for _ in range(task["steps"]):
            began = time.perf_counter()
            for layer in layers:  # forward
                kv.wait(arriving[layer])
                time.sleep(compute_s / 3)
            for layer in reversed(layers):  # backward
                time.sleep(compute_s * 2 / 3)
                priority = -layer if name != "equal" else 0
                arriving[layer] = kv.pushpull_async(layer, weights[layer], priority=priority)
            times.append(time.perf_counter() - began)
        kv.wait(arriving)
        kv.barrier()
        report[name] = statistics.median(times[2:])
    return report


if __name__ == "__main__":
    sys.exit(main())
