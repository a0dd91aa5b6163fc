"""Real jobs repeat to the last bit, whatever the servers, kernels and order of arrival."""

from __future__ import annotations

import pytest
from job import MakeJob, needs_proc

pytestmark = [pytest.mark.process, needs_proc]

NUM_WORKERS = 3

TRAIN = """
import hashlib, random
STEPS, WORKERS = 8, 3
SHAPES = {"dense": (120, 33), "bias": (33,), "large": (70_000,), "one": ()}
kv = mx.kvstore.create(sys.argv[1])
draw = np.random.default_rng(100)
keys = list(SHAPES)
values = [np.asarray(draw.standard_normal(shape), np.float32) for shape in SHAPES.values()]
kv.init(keys, values)
kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.01, momentum=0.9, wd=1e-3))
outs = [np.zeros_like(value) for value in values]

def gradients(rank, step):
    # Nine orders of magnitude: another order of additions would give other bits.
    draw = np.random.default_rng([rank, step])
    return [
        np.asarray(draw.standard_normal(s) * 10.0 ** draw.uniform(-6, 3, s), np.float32)
        for s in SHAPES.values()
    ]

pauses = random.Random(os.getpid())     # other ones in every run
for step in range(STEPS):
    time.sleep(pauses.choice([0, 0, 0.001, 0.02]))
    if sys.argv[1] == "local":
        of_ranks = [gradients(rank, step) for rank in range(WORKERS)]
        kv.push(keys, [list(of_key) for of_key in zip(*of_ranks)])
    else:
        order = pauses.sample(range(len(keys)), len(keys))
        mine = gradients(kv.rank, step)
        for index in order:
            kv.push(keys[index], mine[index], priority=-index)
    kv.pull(keys, out=outs)
if kv.rank == 0:
    print("sha256", hashlib.sha256(b"".join(out.tobytes() for out in outs)).hexdigest())
kv.close()
"""


def test_three_workers_give_the_bits_of_three_local_devices_on_any_servers_compiled_or_not(
    make_job: MakeJob,
) -> None:
    alone = make_job(1, 1, KVSTORE_NATIVE="0")
    alone.worker(None, TRAIN, arguments=["local"])
    jobs = []
    # Where nothing is compiled, KVSTORE_NATIVE changes nothing.
    for num_servers, native in (1, "1"), (2, "0"), (3, "1"):
        # Small chunks, so that the large key lies on all servers.
        settings = {"PS_CHUNK_BYTES": "65536", "KVSTORE_NATIVE": native}
        job = make_job(NUM_WORKERS, num_servers, **settings)
        job.service()
        for rank in range(NUM_WORKERS):
            job.worker(rank, TRAIN, arguments=["dist_sync"])
        jobs.append(job)
    printed = []
    for job in alone, *jobs:
        assert set(job.wait_all(30)) == {0}, job.output()
        printed += [line for process in job.processes for line in process.lines]
    assert len(printed) == 4
    assert len(set(printed)) == 1
    assert printed[0].startswith("sha256 ")
