"""Whether memory grows: exchanges of a model for ten minutes (``python benchmarks/soak.py``).

Starts a scheduler, servers and workers on this machine by the launcher, and looks at the resident
size of each process every five seconds. A process grows by what it holds in the last tenth of the
time beyond what it held in the second tenth (medians): asked for are at most 5 MB. Workers are
never told to wait for each other, so fast ones run ahead as far as they may. At the end the
servers' weights are compared with NumPy's.

With ``--slow-ms 50`` server 0 waits so long before each request. With ``--opposite`` every other
worker names its keys in the opposite order, one by one, and only a tenth of the model may be under
way to a server (PS_CREDIT_BYTES).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.models import MODELS  # noqa: E402

LIMIT_MB = 5.0
_EVERY_S = 5.0
#: So often workers look whether the time is over.
_ROUNDS_TOGETHER = 5
_RATE, _MOMENTUM = 1e-3, 0.9


class Sample(NamedTuple):
    """What a process held at some time."""

    at_s: float
    resident_mb: float
    shared_mb: float
    """Of it, memory that it shares with others, which each of them counts."""


class Growth(NamedTuple):
    """Resident megabytes of one process, early and late."""

    name: str
    early_mb: float
    late_mb: float
    shared_mb: float
    """So much of the growth is shared memory."""

    @property
    def is_small(self) -> bool:
        return self.late_mb - self.early_mb <= LIMIT_MB

    def __str__(self) -> str:
        sizes = f"{self.early_mb:7.1f} -> {self.late_mb:7.1f} MB"
        word = "holds" if self.is_small else "does NOT hold"
        grown = f"{self.late_mb - self.early_mb:+.1f}, of it shared {self.shared_mb:+.1f}"
        return f"  {self.name:12s} {sizes} ({grown}), {word}"


def growth(name: str, samples: list[Sample]) -> Growth:
    """Of one process's samples, in order."""
    begin, end = samples[0].at_s, samples[-1].at_s
    tenth = (end - begin) / 10
    early = [each for each in samples if begin + tenth <= each.at_s <= begin + 2 * tenth]
    late = [each for each in samples if each.at_s >= end - tenth]
    resident = [statistics.median(each.resident_mb for each in part) for part in (early, late)]
    shared = [statistics.median(each.shared_mb for each in part) for part in (early, late)]
    return Growth(name, *resident, shared[1] - shared[0])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--kv-store", default="dist_sync")
    parser.add_argument("--slow-ms", type=float, default=0.0)
    parser.add_argument("--opposite", action="store_true")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if "DMLC_ROLE" in os.environ:
        exchange(options)
        return 0
    environment = dict(os.environ)
    launcher = [sys.executable, str(ROOT / "tools" / "launch.py"), "--launcher", "local"]
    launcher += ["-n", str(options.workers), "-s", str(options.servers)]
    if options.slow_ms:
        environment["SLOW_SERVER_MS"] = str(options.slow_ms)
        launcher += ["--server-import", str(ROOT / "benchmarks" / "slow_server.py")]
    if options.opposite:
        nbytes = sum(4 * size for size in map(size_of, MODELS[options.model]()))
        environment["PS_CREDIT_BYTES"] = str(max(nbytes // 10, 1 << 20))
    command = [*launcher, sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    with subprocess.Popen(command, env=environment) as job:
        samples = watch(job)
    found = [growth(name, each) for name, each in sorted(samples.items()) if len(each) >= 20]
    print(f"resident size, early and late in {options.minutes:g} minutes:")
    print(*found, sep="\n")
    wanted = options.workers + options.servers + 1
    if job.returncode or len(found) != wanted:
        print(f"exit code {job.returncode}, {len(found)} of {wanted} processes were seen")
        return 1
    return 0 if all(each.is_small for each in found) else 1


def size_of(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def watch(job: subprocess.Popen[bytes]) -> dict[str, list[Sample]]:
    """Samples of each process of the job, by role and rank, until it is over."""
    samples: dict[str, list[Sample]] = defaultdict(list)
    while job.poll() is None:
        now = time.monotonic()
        for pid in descendants(job.pid):
            try:
                name = role_of(pid)
                if name is not None:
                    samples[name].append(Sample(now, *resident_mb(pid)))
            except OSError:  # it has just ended
                continue
        time.sleep(_EVERY_S)
    return samples


def descendants(pid: int) -> list[int]:
    found, parents = [], {pid}
    children = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text()
            except OSError:
                continue
            children[int(stat.rpartition(")")[2].split()[1])].append(int(entry))
    while parents:
        parents = {child for parent in parents for child in children[parent]}
        found += sorted(parents)
    return found


def role_of(pid: int) -> str | None:
    """Role and rank of a node's process; None for what only started one."""
    fields = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    settings = dict(
        field.decode(errors="replace").split("=", 1) for field in fields if b"=" in field
    )
    role = settings.get("DMLC_ROLE")
    if role is None or "python" not in Path("/proc", str(pid), "comm").read_text():
        return None
    return "scheduler" if role == "scheduler" else f"{role} {settings.get('DMLC_TASK_ID', '?')}"


def resident_mb(pid: int) -> tuple[float, float]:
    """All, and what of it is shared."""
    found = {"VmRSS": 0.0, "RssShmem": 0.0}
    for line in Path("/proc", str(pid), "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in found:
            found[name] = int(value.split()[0]) / 1024
    return found["VmRSS"], found["RssShmem"]


def exchange(options: argparse.Namespace) -> None:
    """One worker: rounds until the time is over, then a look at the weights."""
    import numpy as np

    import kvstore as mx

    store = mx.kvstore.create(options.kv_store)
    shapes = MODELS[options.model]()
    keys = [f"{index:03d}" for index in range(len(shapes))]
    gradients = [np.full(shape, store.rank + 1, np.float32) for shape in shapes]
    outs = [np.zeros(shape, np.float32) for shape in shapes]
    if store.rank == 0:
        sgd = mx.optimizer.create("sgd", learning_rate=_RATE, momentum=_MOMENTUM)
        store.set_optimizer(sgd)
    store.init([*keys, "over"], [*outs, np.zeros(1, np.float32)])
    store.barrier()
    end_at = time.monotonic() + 60 * options.minutes
    order = list(range(len(keys)))
    if options.opposite and store.rank % 2:
        order.reverse()
    over = np.zeros(1, np.float32)
    rounds = 0
    while not over[0]:
        for _ in range(_ROUNDS_TOGETHER):
            if options.opposite:
                for index in order:
                    store.push(keys[index], gradients[index])
                store.pull(keys, out=outs)
            else:
                store.push(keys, gradients)
                store.pull(keys, out=outs)
        rounds += _ROUNDS_TOGETHER
        # Everybody pulls the same: all stop after the same round.
        flag = np.full(1, time.monotonic() > end_at and store.rank == 0, np.float32)
        store.pushpull("over", flag, out=over)
    if "async" not in options.kv_store:
        check(outs, store.num_workers, rounds)
    if store.rank == 0:
        print(f"{rounds} rounds of {options.model}, and the weights are right", flush=True)
    store.barrier()
    store.close()


def check(outs: list, workers: int, rounds: int) -> None:  # type: ignore[type-arg]
    """All elements began alike and got the same gradients: one number's history says all."""
    import numpy as np

    total = np.float32(sum(range(1, workers + 1)))
    weight = velocity = np.float32(0)
    for _ in range(rounds):
        velocity = velocity * np.float32(_MOMENTUM) - total * np.float32(_RATE)
        weight = weight + velocity
    if any((out != weight).any() for out in outs):
        raise SystemExit("the servers' weights differ from NumPy's")


if __name__ == "__main__":
    sys.exit(main())
