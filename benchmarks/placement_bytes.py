"""Bytes that the busiest machine sends or receives in a round, against BytePS's bound.

For n machines with a worker and a server each, and k more with a server alone, for all n + k up
to ``--most``: starts all processes on this machine, tells them that they run on machines of their
own (PS_MACHINE), lets the workers push and pull a model, and adds up what their links counted to
and from each server. What stays on a machine costs no network and does not count. Prints the
bound ``2 n (n - 1) / (n^2 + k n - 2 k)`` (never less than 1: every worker sends the model; 0 for
one worker, beside whose server everything can lie) and what was measured, in models.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections import Counter

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
MIB = 1 << 20
ALLOWED = 1.05
"""How many times the bound may be measured."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=12, help="the largest n + k")
    parser.add_argument("--least", type=int, default=1, help="the smallest n + k")
    parser.add_argument("--model-bytes", type=int, default=8 * MIB)
    parser.add_argument("--chunk-bytes", type=int, default=16 * 1024)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--placement", default="network", help="network or equal")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if "DMLC_ROLE" in os.environ:
        exchange(options)
        return 0
    print(" n  k   bound  measured  ratio   most that a server holds, of its share")
    failed = 0
    for total in range(options.least, options.most + 1):
        for n in range(total, 0, -1):
            failed += not measure(n, total - n, options)
    return 1 if failed else 0


def bound(n: int, k: int) -> float:
    """What the busiest machine sends in a round at the least, in models."""
    return 0.0 if n == 1 else max(2 * n * (n - 1) / (n * n + k * n - 2 * k), 1.0)


def measure(n: int, k: int, options: argparse.Namespace) -> bool:
    """Run one job and print its row; whether it is near enough to the bound."""
    from kvstore.server.shares import server_shares

    sent: Counter[str] = Counter()
    received: Counter[str] = Counter()
    results = run(n, k, options)
    for rank, result in enumerate(results):
        home = machine(rank)
        for away, (pushed, pulled) in result["moved"].items():
            if away != home:
                sent.update({home: pushed, away: pulled})
                received.update({home: pulled, away: pushed})
    whole = options.model_bytes * options.rounds
    measured = max([0, *sent.values(), *received.values()]) / whole
    homes = [machine(rank) for rank in range(n + k)]
    shares = server_shares(homes[:n], homes)
    loads = [load / options.model_bytes for load in results[0]["placed"]]
    fullest = max(load / share for load, share in zip(loads, shares, strict=True) if share)
    ratio = measured / bound(n, k) if bound(n, k) else 1.0 + measured
    print(f"{n:2d} {k:2d}  {bound(n, k):6.4f}    {measured:6.4f}  {ratio:.4f}  {fullest:.4f}")
    sys.stdout.flush()
    return ratio <= ALLOWED


def machine(rank: int) -> str:
    return f"machine {rank}"


def run(n: int, k: int, options: argparse.Namespace) -> list[dict]:  # type: ignore[type-arg]
    """What each worker has printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": "1",
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(n),
        "DMLC_NUM_SERVER": str(n + k),
        "PS_CHUNK_BYTES": str(options.chunk_bytes),
        "PS_LOST_AFTER": "2",
        "KVSTORE_PLACEMENT": options.placement,
    }

    def start(role: str, rank: int, *command: str) -> subprocess.Popen[str]:
        own = {"DMLC_ROLE": role, "DMLC_TASK_ID": str(rank)}
        if role != "scheduler":
            own["PS_MACHINE"] = machine(rank)
        environment = {**common, **own}
        command = (sys.executable, *command)
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    service = ("-m", "kvstore.server")
    processes = [start("scheduler", 0, *service)]
    processes += [start("server", rank, *service) for rank in range(n + k)]
    script = str(pathlib.Path(__file__).resolve())
    workers = [start("worker", rank, script, *sys.argv[1:]) for rank in range(n)]
    processes += workers
    printed = {process.pid: process.communicate()[0] for process in processes}
    if any(process.returncode for process in processes):
        raise SystemExit(f"the job with n = {n}, k = {k} failed")
    return [json.loads(printed[worker.pid]) for worker in workers]


def exchange(options: argparse.Namespace) -> None:
    """What a worker does."""
    import numpy as np

    import kvstore as mx

    kv = mx.kvstore.create("dist_sync")
    half = options.model_bytes // 8
    keys = ["first", "second"]
    values = [np.full(half, 1, np.float32), np.full(half, 2, np.float32)]
    outs = [np.zeros_like(value) for value in values]
    kv.init(keys, values)
    kv.barrier()

    def counts() -> dict[str, tuple[int, int]]:
        by_peer = kv.node.links.byte_counts()
        servers = [node for node in kv.node.membership.roster if node.role == "server"]
        return {node.machine: by_peer.get(node.uid, (0, 0)) for node in servers}

    before = counts()
    for _ in range(options.rounds):
        kv.pushpull(keys, values, out=outs)
    kv.barrier()
    time.sleep(0.05)  # the last acceptances
    after = counts()
    if any((out != factor * kv.num_workers).any() for factor, out in enumerate(outs, 1)):
        raise SystemExit("the servers' values are wrong")
    moved = {
        name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in after
    }
    placed = [sum(keys.values()) for keys in kv.placement().values()]
    print(json.dumps({"moved": moved, "placed": placed}))
    kv.close()


if __name__ == "__main__":
    sys.exit(main())
