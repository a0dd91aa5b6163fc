"""``--restarts``: a job of which any process is killed goes on, and ends with the same bits."""

from __future__ import annotations

import os
import re
import signal

import pytest
from job import MakeJob, needs_proc

pytestmark = [pytest.mark.process, needs_proc]

TRAIN = """
import zlib
kv = mx.kvstore.create("dist_sync")
kv.init("w", np.zeros(1000, "f4"))
kv.set_optimizer(mx.optimizer.create("adam", learning_rate=0.1))
state = {"draws": np.random.default_rng(kv.rank)}
steps = kv.steps(12, state, DIRECTORY, every=3)
weights = kv.pull("w")
for step in steps:
    if step == 7 and os.environ.get("DMLC_NUM_ATTEMPT") == "0":
        print("at step 7", flush=True)
        time.sleep(60)
    gradient = state["draws"].normal(size=1000) - weights
    kv.pushpull("w", gradient.astype("f4"), out=weights)
print("from", steps.first, "to", zlib.crc32(weights.tobytes()), flush=True)
"""


def ends(text: str) -> list[tuple[str, ...]]:
    """(rank, first step, checksum of the weights) of each worker."""
    return sorted(re.findall(r"\[worker (\d)\] from (\d+) to (\d+)", text))


SLOW = pytest.mark.slow(reason="the launcher starts a job again in the same way for a server")


@pytest.mark.parametrize("victim", [pytest.param("worker 1", marks=SLOW), "server 0"])
def test_a_job_goes_on_from_its_last_checkpoint_with_the_same_bits(
    make_job: MakeJob, victim: str
) -> None:
    job = make_job(2, 2)
    role, _, rank = victim.partition(" ")
    whole = job.launch(TRAIN.replace("DIRECTORY", repr(str(job.directory / "whole"))))
    ended = job.launch(
        TRAIN.replace("DIRECTORY", repr(str(job.directory / "ended"))), "--restarts", "1"
    )
    assert whole.wait() == 0, whole.text
    for number in range(2):
        ended.wait_for(rf"\[worker {number}\] at step 7")
    os.kill(job.launched(role, int(rank)), signal.SIGKILL)
    assert ended.wait() == 0, ended.text
    expected = [(rank, "6", checksum) for rank, _, checksum in ends(whole.text)]
    assert len(expected) == 2
    assert ends(ended.text) == expected
    assert f"process:  {victim} (pid" in ended.text
    assert "[launcher] restart 1 of 1: starting all processes again in 1 s" in ended.text
    assert "[launcher] the job succeeded after 1 restart; logs of all" in ended.lines[-1]
