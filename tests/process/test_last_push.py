"""What scripts push last is there, or their end is an error: with real processes and real TCP."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from job import MakeJob, needs_proc
from last_push import run

pytestmark = [pytest.mark.process, needs_proc]


@pytest.mark.parametrize(
    "kind",
    [
        "dist_sync",
        pytest.param("dist_async", marks=pytest.mark.slow(reason="dist_sync runs always")),
    ],
)
def test_a_push_as_the_last_line_of_a_script_arrives_whole_over_tcp(
    tmp_path: Path, kind: str
) -> None:
    """The matrix of sizes: ``python -m tests.last_push``."""
    outcome = run(tmp_path, kind, 0.4)
    assert outcome.is_right, outcome.output


BOOM = """
import atexit
import sys
atexit.register(print, "an exit handler of the user's ran", file=sys.stderr, flush=True)
import dataclasses
import kvstore as mx
@mx.optimizer.register
@dataclasses.dataclass(frozen=True)
class Boom(mx.optimizer.Optimizer):
    def update(self, weight, grad, state, count, scratch):
        raise ValueError("boom")
"""


def test_a_last_push_that_the_optimizer_refuses_ends_the_script_with_an_error(
    make_job: MakeJob,
) -> None:
    """At the end of the interpreter, and raised by ``close``."""
    job = make_job(2, 1, KVSTORE_SERVER_IMPORT="boom.py")
    (job.directory / "boom.py").write_text(BOOM)
    job.service()
    code = """
sys.path.insert(0, "")
import boom
kv = mx.kvstore.create("dist_async")
kv.init("w", vector(0, 0))
kv.set_optimizer(boom.Boom())
kv.barrier()
wait_for_file(f"go{kv.rank}")
kv.push("w", vector(1, 2))
"""
    ends, closes = job.worker(0, code), job.worker(1, code + "kv.close()\n")
    job.allow("go0")
    assert ends.wait() == 120, ends.text
    job.allow("go1")
    assert closes.wait() == 1, closes.text
    assert re.search(r"^Traceback[\s\S]*ValueError: boom", closes.text, re.MULTILINE), closes.text
    assert re.search(r"error: a push could not be applied: [\s\S]*ValueError: boom", ends.text), (
        ends.text
    )
    assert ends.lines[-1] == "an exit handler of the user's ran"
    job.wait_all()


def test_a_last_push_whose_round_needs_one_who_has_left_ends_the_script_with_an_error(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 1)
    job.service()
    code = 'kv = mx.kvstore.create("dist_sync")\nkv.init("w", vector(0, 0))\nkv.barrier()\n'
    stays, leaves = job.worker(0, code + 'kv.push("w", vector(1, 2))\n'), job.worker(1, code)
    assert job.wait_all() == [0, 0, 120, 0], job.output()
    pattern = (
        rf"error: a push could not be applied: NodeLostError: worker 1 \(pid {leaves.pid} on \S+\) "
    )
    assert re.search(pattern + "has left the job", stays.text), stays.text


def test_what_a_server_does_not_accept_in_time_is_an_error_and_no_clean_leave(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 1, PS_SHM="0", PS_CLOSE_TIMEOUT="1")
    scheduler, (server,) = job.service()
    code = """
kv = mx.kvstore.create("dist_async")
kv.init("w", np.zeros(1_000_000, np.float32))
kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
kv.barrier()
print("ready", flush=True)
wait_for_file(f"go{kv.rank}")
kv.push("w", np.ones(1_000_000, np.float32))
"""
    pushes, stays = job.workers(code)
    for worker in pushes, stays:
        worker.wait_for("ready")
    server.send(signal.SIGSTOP)
    job.allow("go0")
    assert pushes.wait() == 120
    server.send(signal.SIGCONT)
    assert re.search(
        rf"DeadlineError: closed, but .*server 0 \(pid {server.pid} on \S+\) has not accepted "
        r".* MB\).*\(PS_CLOSE_TIMEOUT\)",
        pushes.text,
    ), pushes.text
    scheduler.wait_for(rf"worker 0 \(pid {pushes.pid} on \S+\) is lost")
    job.allow("go1")
    assert job.wait_all() == [1, 1, 120, 120], job.output()
