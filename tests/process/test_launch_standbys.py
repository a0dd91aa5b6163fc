"""``--standbys``: a job of which a server or a standby is killed goes on with the same bits."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from job import Job, MakeJob, Process, environment_of, needs_proc, wait_until

pytestmark = [pytest.mark.process, needs_proc]

#: What the launcher may see first: the end of a server, or that its standby has its place.
TOLD = "waiting for standby 1 to take its place|standby 1 has already taken its place"
TRAIN = """
import signal, zlib
kv = mx.kvstore.create("dist_sync")
kv.init(["a", "b"], [np.ones(1000, "f4"), np.ones(30, "f4")])
kv.set_optimizer(mx.optimizer.create("adam", learning_rate=0.1))
weights = kv.pull(["a", "b"])
for step in range(12):
    if step in STEPS and kv.rank == 0:
        victim
    gradients = [np.sin(each * 77 + step + kv.rank) for each in weights]
    kv.pushpull(["a", "b"], gradients, out=weights)
print("sum", zlib.crc32(b"".join(each.tobytes() for each in weights)), flush=True)
"""
PAUSE = """
        (pid,) = [n.pid for n in kv.node.membership.roster if (n.role, n.rank) == ("server", 1)]
        print("server 1 is", pid, flush=True)
        wait_for_file(f"go{step}")
"""
"""It says which process is to be killed, and goes on when it was."""
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

TABLE = """
kv = mx.kvstore.create("dist_sync")
table = kv.create_table("t", dim=2)
table.pull(np.arange(3))
wait_for_file("go")
"""


def train(job: Job, victim: str, *options: str) -> Process:
    return train_with_pauses(job, victim, (5,), *options)


def train_with_pauses(job: Job, victim: str, steps: tuple[int, ...], *options: str) -> Process:
    code = TRAIN.replace("        victim", victim.rstrip("\n")).replace("STEPS", repr(steps))
    return job.launch(code, *options)


def whole(job: Job) -> str:
    """What the workers of a job print of which no process is killed."""
    return job.whole(TRAIN.replace("        victim", "        pass").replace("STEPS", "()"))


def again(text: str, count: int) -> str:
    """Return a pattern for lines of which ``count`` have this text."""
    return rf"(?s)(?:{text}.*){{{count}}}"


def sums(text: str) -> list[str]:
    return re.findall(r"\[worker \d\] sum (\d+)", text)


def without_logs(line: str) -> str:
    return line.partition("; logs of all processes: ")[0]


@pytest.mark.slow(reason="a server that is killed twice runs always")
def test_a_server_that_is_killed_is_replaced_by_its_standby(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    ended = train(job, SERVER_1, "--standbys", "1")
    expected = sums(whole(job))
    assert ended.wait() == 0, job.output()
    assert sums(ended.text) == expected
    assert len(set(expected)) == 1
    assert re.search(
        rf"\[launcher\] server 1 \(pid \d+\) ended with signal SIGKILL: ({TOLD})",
        ended.text,
    )
    assert (
        without_logs(ended.lines[-1])
        == "[launcher] the job succeeded; a lost server was replaced 1 time"
    )
    assert "Traceback" not in ended.text


@pytest.mark.slow(reason="a standby that is killed and started again runs always")
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


def test_a_server_whose_new_standby_is_filled_may_be_killed_again(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    ended = train_with_pauses(job, PAUSE, (3, 6), "--standbys", "1", "--restarts", "3")
    expected = sums(whole(job))
    for kill_number in (1, 2):
        ended.wait_for(again("server 1 is", kill_number))
        pid = int(re.findall(r"server 1 is (\d+)", ended.text)[-1])
        os.kill(pid, signal.SIGKILL)
        if kill_number == 1:
            job.allow("go3")  # its standby takes its place, and another one is filled, meanwhile
        ended.wait_for(again("has a standby again", kill_number))
    job.allow("go6")
    assert ended.wait() == 0, job.output()
    assert sums(ended.text) == expected
    said = [line for line in ended.lines if line.startswith("[launcher] ")]
    said = [re.sub(TOLD, "told", line) for line in said]
    killed = "[launcher] server 1 (pid N) ended with signal SIGKILL: told"
    assert [re.sub(r"\d{2,}", "N", without_logs(line)) for line in said[1:]] == [
        killed,
        "[launcher] starting a standby of server 1 again (1 of 3 restarts)",
        killed,
        "[launcher] starting a standby of server 1 again (2 of 3 restarts)",
        "[launcher] the job succeeded; a lost server was replaced 2 times "
        "and a standby was started again 2 times",
    ]
    assert "Traceback" not in ended.text


def test_a_standby_that_is_killed_is_started_again(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    victim = f"{STANDBY_1.rstrip()}\n        wait_for_file('go')\n"
    ended = train(job, victim, "--standbys", "1", "--restarts", "3")
    ended.wait_for(r"server 1 .* has a standby again")
    job.allow("go")
    assert ended.wait() == 0, ended.text
    assert len(sums(ended.text)) == 2
    assert re.search(
        r"(?s)\[launcher\] standby 1 \(pid \d+\) ended with signal SIGKILL: server 1 goes on "
        r"without it\n.*\[launcher\] starting a standby of server 1 again \(1 of 3 restarts\)\n",
        ended.text,
    )
    assert (
        without_logs(ended.lines[-1])
        == "[launcher] the job succeeded; a standby was started again 1 time"
    )
    assert "Traceback" not in ended.text


def test_a_standby_that_its_server_needs_no_more_is_not_started_again(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    ended = job.launch(TABLE, "--standbys", "1", "--restarts", "3")
    ended.wait_for("server 0 .* does something that no standby repeats, and goes on without one")
    wait_until(
        lambda: not any(b"PS_STANDS_BY=1" in environment_of(pid) for pid in job.left()), "its end"
    )
    time.sleep(0.5)  # a worker would be started again after 0.2 s
    job.allow("go")
    assert ended.wait() == 0, ended.text
    assert "[launcher]" not in ended.text.partition("all have joined")[2], ended.text


DIES = """
import os
if "PS_STANDS_BY" in os.environ and os.environ["DMLC_NUM_ATTEMPT"] != "0":
    os._exit(3)
"""


@pytest.mark.slow(reason="tests/unit/kvstore/launch/job counts standbys that end always")
def test_a_server_whose_standbys_end_again_and_again_is_left_without_one(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 2)
    (job.directory / "dies.py").write_text(DIES)
    victim = f"{STANDBY_1.rstrip()}\n        wait_for_file('go')\n"
    own = ("--standbys", "1", "--restarts", "5", "--server-import", "dies.py")
    ended = train(job, victim, *own)
    alone = "server 1 is left without a standby: 3 in a row have ended before they had its state"
    ended.wait_for(re.escape(f"[launcher] {alone}\n"))
    job.allow("go")
    assert ended.wait() == 0, ended.text
    assert len(sums(ended.text)) == 2
    assert ended.text.count("standby 1 (pid ") == 4
    assert without_logs(ended.lines[-1]) == (
        f"[launcher] the job succeeded; a standby was started again 3 times; {alone}"
    )
