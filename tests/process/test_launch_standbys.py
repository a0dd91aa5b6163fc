"""``--standbys``: a job of which a server or a standby is killed goes on with the same bits."""

from __future__ import annotations

import re

import pytest
from job import Job, MakeJob, Process, needs_proc

pytestmark = [pytest.mark.process, needs_proc]

TRAIN = """
import signal, zlib
kv = mx.kvstore.create("dist_sync")
kv.init(["a", "b"], [np.ones(1000, "f4"), np.ones(30, "f4")])
kv.set_optimizer(mx.optimizer.create("adam", learning_rate=0.1))
weights = kv.pull(["a", "b"])
for step in range(12):
    if step == 5 and kv.rank == 0:
        victim
    gradients = [np.sin(each * 77 + step + kv.rank) for each in weights]
    kv.pushpull(["a", "b"], gradients, out=weights)
print("sum", zlib.crc32(b"".join(each.tobytes() for each in weights)), flush=True)
"""
SERVER_1 = """
        (pid,) = [n.pid for n in kv.node.membership.roster if (n.role, n.rank) == ("server", 1)]
        os.kill(pid, signal.SIGKILL)
"""
STANDBY_1 = """
        for entry in os.listdir("/proc"):
            try:
                found = set(open(f"/proc/{entry}/environ", "rb").read().split(b"\\0"))
            except OSError:
                continue
            job = f"PS_JOB_ID={os.environ['PS_JOB_ID']}".encode()
            if {job, b"PS_STANDS_BY=1", b"DMLC_TASK_ID=1"} <= found:
                os.kill(int(entry), signal.SIGKILL)
"""


def train(job: Job, victim: str, *options: str) -> Process:
    return job.launch(TRAIN.replace("        victim", victim.rstrip("\n")), *options)


def sums(text: str) -> list[str]:
    return re.findall(r"\[worker \d\] sum (\d+)", text)


def test_a_server_that_is_killed_is_replaced_by_its_standby(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    whole = train(job, "        pass")
    ended = train(job, SERVER_1, "--standbys", "1")
    assert [whole.wait(), ended.wait()] == [0, 0], job.output()
    assert sums(ended.text) == sums(whole.text)
    assert len(set(sums(whole.text))) == 1
    assert re.search(
        r"\[launcher\] server 1 \(pid \d+\) ended with signal SIGKILL: standby 1 takes its place",
        ended.text,
    )
    assert ended.lines[-1] == "[launcher] the job succeeded; a lost server was replaced 1 time"
    assert "Traceback" not in ended.text


def test_a_job_whose_standby_is_killed_goes_on(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    ended = train(job, STANDBY_1, "--standbys", "1")
    assert ended.wait() == 0, ended.text
    assert len(sums(ended.text)) == 2
    assert re.search(
        r"\[launcher\] standby 1 \(pid \d+\) ended with signal SIGKILL: server 1 goes on without",
        ended.text,
    )
    assert "the job failed" not in ended.text
    assert "replaced" not in ended.text
    assert "Traceback" not in ended.text
