"""Bytes that real processes exchange over their machines' networks, against the optimum.

All run on this machine and are told other names of theirs (PS_MACHINE). The links of the workers
count what went through the van, to and from each server; so all that crossed between machines
is known from the workers' ends.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
from job import MakeJob, needs_proc

pytestmark = [pytest.mark.process, needs_proc]

CHUNK_BYTES = 16_384
MODEL_BYTES = 6_400_000
NUM_ROUNDS = 2

EXCHANGE = f"""
import json
ROUNDS, BYTES = {NUM_ROUNDS}, {MODEL_BYTES}
kv = mx.kvstore.create("dist_sync")
keys = ["embedding", "dense", "bias"]
sizes = [BYTES // 8, BYTES // 8 - 400, 400]
values = [np.full(size, 1, np.float32) for size in sizes]
outs = [np.zeros(size, np.float32) for size in sizes]
kv.init(keys, values)
kv.barrier()

def counts():
    by_peer = kv.node.links.byte_counts()
    servers = [node for node in kv.node.membership.roster if node.role == "server"]
    return {{node.machine: by_peer.get(node.uid, (0, 0)) for node in servers}}

before = counts()
kv.pushpull(keys, values, out=outs)
kv.push(keys, values)
kv.pull(keys, out=outs)
assert all((out == kv.num_workers).all() for out in outs)
after = counts()
kv.barrier()
moved = {{
    machine: [(b - a) / ROUNDS for a, b in zip(before[machine], after[machine])]
    for machine in after
}}
print(json.dumps(moved))
kv.close()
"""


def bound(n: int, k: int) -> float:
    """What the busiest machine sends in a round at the least, in models."""
    return 2 * n * (n - 1) / (n * n + k * n - 2 * k)


@pytest.mark.parametrize(
    ("n", "k"),
    [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow(reason="a smaller job runs always"))],
)
def test_the_busiest_machine_sends_and_receives_what_it_must(
    make_job: MakeJob, n: int, k: int
) -> None:
    """n machines have a worker and a server each, k more have a server alone."""
    # Who waits at the end for a process that has ended does so for PS_LOST_AFTER: the names of
    # machines say that process ids tell nothing.
    job = make_job(n, n + k, PS_CHUNK_BYTES=str(CHUNK_BYTES), PS_LOST_AFTER="1")
    job.scheduler()
    for rank in range(n + k):
        job.server(rank, {"PS_MACHINE": f"machine {rank}"})
    workers = [job.worker(rank, EXCHANGE, {"PS_MACHINE": f"machine {rank}"}) for rank in range(n)]
    assert set(job.wait_all(60)) == {0}, job.output()
    sent: Counter[str] = Counter()
    received: Counter[str] = Counter()
    for rank, worker in enumerate(workers):
        home = f"machine {rank}"
        (moved,) = (line for line in worker.lines if line.startswith("{"))
        for away, (pushed, pulled) in json.loads(moved).items():
            if away != home:
                sent.update({home: pushed, away: pulled})
                received.update({home: pulled, away: pushed})
    assert len(sent) == n + k
    busiest = max(*sent.values(), *received.values())
    assert busiest == pytest.approx(bound(n, k) * MODEL_BYTES, rel=0.05)
