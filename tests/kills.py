"""``make test-kills``: real jobs, in each of which processes are killed at random moments.

Each job is a short training on this machine: 2 to 4 workers, 2 servers with standbys, Adam or
momentum, small keys, one in several parts, and rows. The victim is a worker, a server, a standby or
the scheduler.
With ``--kills 2``, there are two in each job, and the second is killed when the place of the first
is usually taken.
The launcher must end by itself with exit code 0, and all workers with the weights of the same job
without a kill, bit for bit, and the states of the optimizer, too. Every fifth job is a
``dist_async`` one, in which each push must count exactly once. After a single kill the whole job
may start again only if the victim was a worker outside its loop: any other one must be replaced.
It takes about five seconds a job::

    python -m tests.kills --jobs 250 --seed 1
"""

from __future__ import annotations

import argparse
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MARK = "KILLS_MARK"
LIMIT_S = 120.0
PAUSE_S = 1.5
TOO_LATE = "the job was over before a process was killed"
RESTARTED = "the whole job restarted"

SCRIPT = """
import os, pathlib, time, zlib
import numpy as np
import kvstore as mx

kind, name = os.environ["KILLS_KIND"], os.environ["KILLS_OPTIMIZER"]
steps = int(os.environ["KILLS_STEPS"])
kv = mx.kvstore.create(kind)
if kind == "dist_async":
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=-1.0))
else:
    momentum = {"momentum": 0.9} if name == "sgd" else {}
    kv.set_optimizer(mx.optimizer.create(name, learning_rate=0.05, **momentum))
sizes = {"a": 600_000, "b": 7, "c": 3_000, "d": 1}
names = list(sizes)
kv.init(names, [np.zeros(size, np.float32) for size in sizes.values()])
kv.init("rows", mx.RowSparseArray.zeros((500, 8)))
mine = {"draws": np.random.default_rng(kv.rank), "own": np.ones(3, np.float32)}
print("begun", flush=True)
for step in kv.steps(steps, mine):
    if step == 0:
        print("looping", flush=True)
    time.sleep(0.02)
    ids = (np.arange(20) * 7 + step + kv.rank) % 500
    if kind == "dist_async":
        kv.push(names, [np.ones(size, np.float32) for size in sizes.values()])
        kv.push("rows", mx.RowSparseArray(ids, np.ones((20, 8), np.float32), (500, 8)))
        continue
    weights = kv.pull(names)
    noise = mine["draws"].normal(size=4)
    grads = [np.sin(w * 77 + n + mine["own"][0]).astype(np.float32) for w, n in zip(weights, noise)]
    mine["own"] = np.sin(mine["own"] * 13 + weights[2][:3]).astype(np.float32)
    rows = kv.row_sparse_pull("rows", row_ids=ids)
    pushed = np.sin(rows.values * 7 + noise[3] + 1).astype(np.float32)
    rows = mx.RowSparseArray(rows.indices, pushed, (500, 8))
    kv.push("rows", rows)
    kv.push("a", grads[0])
    kv.pushpull(names[1:], grads[1:], out=weights[1:])
print("looped", flush=True)
kv.wait()
kv.barrier()
if kv.rank == 0:
    kv.save_optimizer_states(os.environ["KILLS_STATES"])
kv.barrier()
weights = kv.pull(names)
rows = kv.row_sparse_pull("rows", row_ids=np.arange(500)).values
if kind == "dist_async":
    counted = {float(v) for w in weights for v in (w.min(), w.max())}
    expected = np.zeros((500, 8), np.float32)
    for step in range(steps):
        for rank in range(kv.num_workers):
            expected[(np.arange(20) * 7 + step + rank) % 500] += 1
    is_exact = counted == {float(steps * kv.num_workers)} and (rows == expected).all()
    print("sum", "exact" if is_exact else (counted, rows.sum(), expected.sum()), flush=True)
else:
    weights.append(rows)
    states = pathlib.Path(os.environ["KILLS_STATES"]).read_bytes()
    print("sum", zlib.crc32(states + b"".join(w.tobytes() for w in weights)), flush=True)
"""


class Kind(NamedTuple):
    """One kind of job."""

    store: str
    optimizer: str
    num_workers: int
    num_servers: int


KINDS = [
    Kind("dist_sync", "sgd", 2, 2),
    Kind("dist_sync", "adam", 2, 2),
    Kind("dist_sync", "adam", 4, 2),
    Kind("dist_sync", "sgd", 3, 2),
    Kind("dist_async", "sgd", 3, 2),
]


VICTIMS = {"worker": 80, "server": 60, "standby": 30, "scheduler": 30}
"""How often a process of each role is killed."""


class Outcome(NamedTuple):
    """How a job has ended."""

    exit_code: int | None
    """None: it did not end by itself."""
    sums: tuple[str, ...]
    how: str
    text: str
    must_replace: bool
    """Whether another process could take the place of each victim."""


def run(kind: Kind, kills: int, chance: random.Random | None) -> Outcome:
    """Run one job; kill processes at moments that ``chance`` chooses, if there is one."""
    mark = secrets.token_hex(8)
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PS_")}
    environment |= {
        MARK: mark,
        "PYTHONPATH": str(ROOT),
        "KILLS_KIND": kind.store,
        "KILLS_OPTIMIZER": kind.optimizer,
        "KILLS_STEPS": str(40 + 80 * (kills - 1)),
    }
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "output").open("w+") as output:
        environment["KILLS_STATES"] = str(Path(folder) / "states")
        launcher = subprocess.Popen(
            [
                *(sys.executable, str(ROOT / "tools" / "launch.py"), "--restarts", str(3 * kills)),
                *("--standbys", "1"),
                *("-n", str(kind.num_workers), "-s", str(kind.num_servers)),
                *(sys.executable, "-c", SCRIPT),
            ],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        give_up_at = time.monotonic() + LIMIT_S
        victims, must_replace = [], kills == 1
        if chance is not None:
            while "begun" not in Path(output.name).read_text() and launcher.poll() is None:
                time.sleep(0.01)
            for number in range(kills):
                time.sleep(chance.uniform(0.0, 1.2) + (PAUSE_S if number else 0.0))
                if Path(output.name).read_text().count("] sum ") == kind.num_workers:
                    break  # a server that is killed while a job ends makes it fail
                (role,) = chance.choices([*VICTIMS], [*VICTIMS.values()])
                counts = {"worker": kind.num_workers, "scheduler": 1}
                rank = chance.randrange(counts.get(role, kind.num_servers))
                name, before = f"[{role} {rank}]", Path(output.name).read_text()
                if kill_one(mark, role, rank):
                    victims.append(role)
                    time.sleep(0.05)  # for the launcher to show its last lines
                    is_over = f"{name} looped" in Path(output.name).read_text()
                    is_in_loop = f"{name} looping" in before and not is_over
                    must_replace = must_replace and (role != "worker" or is_in_loop)
        try:
            code = launcher.wait(max(0.0, give_up_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
        text = Path(output.name).read_text()
    how = f"{' and '.join(victims)}: no longer needed" if victims else TOO_LATE
    if "the job succeeded after" in text:
        how = f"{' and '.join(victims)}: {RESTARTED}"
    elif victims == ["standby"] and "goes on without it" in text:
        how = "standby: the server went on"
    elif "was replaced" in text:
        how = f"{' and '.join(victims)}: replaced"
    sums = tuple(re.findall(r"\] sum (.*)", text))
    return Outcome(code, sums, how, text, must_replace)


def kill_one(mark: str, role: str, rank: int) -> bool:
    """Kill the process of this role and rank; return whether there was one.

    Of a server and its standby, the server has run for longer.
    """
    dmlc_role = "server" if role == "standby" else role
    wanted = {f"{MARK}={mark}", f"DMLC_ROLE={dmlc_role}", f"DMLC_TASK_ID={rank}"}
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                found += [int(entry.name)] * (wanted <= set(variables))
        except OSError:
            continue
    try:
        os.kill(sorted(found)[role == "standby"], signal.SIGKILL)
    except (IndexError, ProcessLookupError):
        return False
    return True


def main() -> int:
    """Run many jobs; print what became of them. The exit code is 1 if one was not as expected."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=250, help="how many jobs to run")
    parser.add_argument("--seed", type=int, default=1, help="decides who is killed when")
    parser.add_argument("--kills", type=int, default=1, help="how many to kill in each job")
    arguments = parser.parse_args()
    expected = {kind: run(kind, arguments.kills, None).sums for kind in KINDS}
    assert all(len(set(sums)) == 1 for sums in expected.values()), expected
    outcomes: Counter[str] = Counter()
    num_wrong = 0
    for number in range(arguments.jobs):
        kind = KINDS[number % len(KINDS)]
        chance = random.Random(arguments.seed * 100_003 + number)
        outcome = run(kind, arguments.kills, chance)
        while outcome.how == TOO_LATE and outcome.exit_code == 0:
            outcome = run(kind, arguments.kills, chance)
        outcomes[outcome.how] += 1
        sums = outcome.sums  # twice as many if the whole job was restarted at its end
        is_complete = len(sums) >= kind.num_workers and set(sums) == set(expected[kind])
        is_lost = outcome.must_replace and outcome.how.endswith(RESTARTED)
        if outcome.exit_code != 0 or not is_complete or is_lost:
            num_wrong += 1
            print(f"job {number}, {kind}: exit code {outcome.exit_code}, {outcome.sums}")
            print(outcome.how)
            print(outcome.text, flush=True)
        if number % 25 == 24:
            print(f"{number + 1} jobs, {num_wrong} of them wrong", flush=True)
    shown = ", ".join(f"{how}: {count}" for how, count in outcomes.most_common())
    right = f"{arguments.jobs - num_wrong} of {arguments.jobs}"
    print(f"{right} jobs ended as without a kill ({shown})")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
