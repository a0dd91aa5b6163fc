"""``--restarts``: a job of which any process is killed goes on, and ends with the same bits."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from job import Job, MakeJob, Process, needs_proc

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
    if step == 7 and STOPS and os.environ["DMLC_NUM_ATTEMPT"] == "0":
        print("at step 7", flush=True)
        wait_for_file("go")
    gradient = state["draws"].normal(size=1000) - weights
    kv.pushpull("w", gradient.astype("f4"), out=weights)
print("from", steps.first, "to", zlib.crc32(weights.tobytes()), flush=True)
"""

FIT = """
import zlib
from kvstore.model import FeedForward

class Softmax:
    def init_params(self, shape, rng):
        return {"weight": rng.normal(0, 0.1, (*shape, 3)).astype("f4")}

    def init_aux_params(self, shape):
        return {"mean": np.zeros(shape, "f4")}

    def predict(self, params, x, aux):
        scores = np.exp((x - aux["mean"]) @ params["weight"])
        return scores / scores.sum(axis=1, keepdims=True)

    def loss_and_gradients(self, params, x, y, aux):
        aux["mean"] += 0.1 * (x.mean(axis=0) - aux["mean"])
        wrong = self.predict(params, x, aux)
        rows = np.arange(len(y))
        loss, right = -np.log(wrong[rows, y]).sum(), (wrong.argmax(axis=1) == y).sum()
        wrong[rows, y] -= 1
        return loss, right, {"weight": (x - aux["mean"]).T @ wrong}

def look(at):
    steps.append(3 * at.epoch + at.nbatch - 1)
    if steps[-1] == 7 and STOPS and os.environ["DMLC_NUM_ATTEMPT"] == "0":
        print("at step 7", flush=True)
        wait_for_file("go")

rng = np.random.default_rng(1)
x, y, steps = rng.normal(size=(48, 4)).astype("f4"), rng.integers(0, 3, 48), []
model = FeedForward(Softmax(), num_epoch=4, numpy_batch_size=8, optimizer="adam")
model.fit(x, y, kvstore="dist_sync", batch_end_callback=look, checkpoint=DIRECTORY)
arrays = model.arg_params["weight"].tobytes() + model.aux_params["mean"].tobytes()
print("from", steps[0], "to", zlib.crc32(arrays), flush=True)
"""


def ends(text: str) -> list[tuple[str, ...]]:
    """(rank, first step, checksum of the weights) of each worker."""
    return sorted(re.findall(r"\[worker (\d)\] from (\d+) to (\d+)", text))


def at_step_7(job: Job, script: str, *options: str) -> tuple[str, Process]:
    """The text of a whole run, and the launcher of another one that waits in step 7."""

    def filled(directory: str, *, stops: bool) -> str:
        found = script.replace("DIRECTORY", repr(str(job.directory / directory)))
        return found.replace("STOPS", str(stops))

    ended = job.launch(filled("ended", stops=True), *options)
    whole = job.whole(filled("whole", stops=False))
    for number in range(2):
        ended.wait_for(rf"\[worker {number}\] at step 7")
    return whole, ended


FITS = pytest.mark.slow(reason="the same in one process: tests/inproc/test_fit_returning.py")


@pytest.mark.parametrize("script", [TRAIN, pytest.param(FIT, marks=FITS)], ids=["steps", "fit"])
def test_a_job_without_a_server_goes_on_from_its_last_checkpoint_with_the_same_bits(
    make_job: MakeJob, script: str
) -> None:
    job = make_job(2, 2)
    whole, ended = at_step_7(job, script, "--restarts", "1")
    os.kill(job.launched("server", 0), signal.SIGKILL)
    assert ended.wait() == 0, ended.text
    expected = [(rank, "6", checksum) for rank, _, checksum in ends(whole)]
    assert len(expected) == 2
    assert ends(ended.text) == expected
    assert "process:  server 0 (pid" in ended.text
    assert (
        "[launcher] restart 1 of the job: starting all processes again in 1 s (1 of" in ended.text
    )
    told = re.findall(r"restart 1 of the job: (server 0 .*)", ended.text)
    assert len(told) == 1, ended.text
    assert re.fullmatch(
        r"server 0 \(pid \d+\) ended with signal SIGKILL; it had no standby", told[0]
    )
    assert "[launcher] the job succeeded after 1 restart; logs of all" in ended.lines[-1]


@pytest.mark.parametrize(
    ("script", "rank"),
    [
        (TRAIN, 0),
        pytest.param(TRAIN, 1, marks=pytest.mark.slow(reason="worker 0 does more for all")),
        pytest.param(FIT, 0, marks=FITS),
    ],
    ids=["steps-0", "steps-1", "fit-0"],
)
def test_a_killed_worker_is_replaced_in_its_step_and_the_bits_are_the_same(
    make_job: MakeJob, script: str, rank: int
) -> None:
    job = make_job(2, 2)
    whole, ended = at_step_7(job, script, "--restarts", "1")
    os.kill(job.launched("worker", rank), signal.SIGKILL)
    job.allow("go")
    assert ended.wait() == 0, ended.text
    expected = [
        (number, "7" if number == str(rank) else "0", checksum)
        for number, _, checksum in ends(whole)
    ]
    assert ends(ended.text) == expected
    assert f"[launcher] worker {rank} (pid" in ended.text
    assert "ended with signal SIGKILL: starting it again" in ended.text
    assert "another process may take its place" in ended.text
    taken = rf"worker {rank} \(pid \d+ .*\) has taken the place of worker {rank}"
    assert re.search(rf"\[worker {1 - rank}\] .*{taken}", ended.text)
    said, _, logs = ended.lines[-1].partition("; logs of all processes: ")
    assert said == "[launcher] the job succeeded; a lost worker was replaced 1 time"
    assert "at step 7" in (Path(logs) / f"worker-{rank}.log").read_text()
    assert "Traceback" not in ended.text


STOPPED = """
import zlib
kv = mx.kvstore.create("dist_sync")
kv.init("w", np.zeros(1000, "f4"))
weights = kv.pull("w")
for step in kv.steps(6):
    if step == 3 and kv.rank == 1 and kv.node.attempt == 0:
        print("at step 3", flush=True)
        wait_for_file("woken")
    if step == 4:
        print("at step 4", flush=True)
        wait_for_file("go")
    kv.pushpull("w", (np.sin(weights * 7) + kv.rank + step).astype("f4"), out=weights)
print("sum", zlib.crc32(weights.tobytes()), flush=True)
"""


def test_a_stopped_worker_that_wakes_up_after_it_was_replaced_ends_with_an_error(
    make_job: MakeJob,
) -> None:
    other = make_job(2, 1)
    other.allow("woken")
    other.allow("go")
    expected = other.whole(STOPPED)
    job = make_job(2, 1, PS_REJOIN_TIMEOUT="30", PS_LOST_AFTER="1", PS_HEARTBEAT_TIMEOUT="2")
    job.service()
    first, stopped = job.worker(0, STOPPED), job.worker(1, STOPPED)
    stopped.wait_for("at step 3")
    stopped.send(signal.SIGSTOP)
    replacing = job.worker(1, STOPPED)
    replacing.wait_for("at step 4")
    stopped.send(signal.SIGCONT)
    job.allow("woken")
    assert stopped.wait() == 1
    assert (
        "NodeLostError: this process was stopped or cut off for too long: worker 1 (pid"
        in stopped.text
    )
    assert "it must not go on" in stopped.text
    job.allow("go")
    assert [process.wait() for process in (first, replacing)] == [0, 0], job.output()
    sums = re.findall(r"sum (\d+)", first.text + replacing.text + expected)
    assert len(sums) == 4
    assert len(set(sums)) == 1
