"""``kvstore.run`` and ``LocalCluster`` with real jobs: what comes back, and that nothing stays.

Functions are defined within the tests, so they travel by value. Directories for temporary files
are those of the test, and must be empty at its end; processes carry the mark of the test's job.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from job import ROOT, MakeJob, Process, clean_environment, needs_proc

import kvstore as mx
from kvstore.errors import JobFailed, WorkerFailed
from kvstore.launch.run import Call
from pslite.errors import ClosedError, DeadlineError

pytest.importorskip("cloudpickle")
pytestmark = [pytest.mark.process, needs_proc]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory for temporary files of this process and of what it starts."""
    place = tmp_path / "tmp"
    place.mkdir()
    for name in [name for name in os.environ if name not in clean_environment()]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield place
    give_up_at = time.monotonic() + 20
    while list(place.iterdir()) and time.monotonic() < give_up_at:
        time.sleep(0.02)
    assert list(place.iterdir()) == []


def test_results_come_in_the_order_of_the_ranks_and_output_on_sys_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    offset = 10.0

    def work(scale: float, *, name: str) -> tuple[int, list[float], str]:
        kv = mx.create("dist_sync")
        kv.init("w", np.zeros(2, np.float32))
        kv.push("w", np.full(2, (kv.rank + 1) * scale, np.float32))
        print(f"hello from {name} {kv.rank}")
        return kv.rank, [float(x) + offset for x in kv.pull("w")], os.environ["GREETING"]

    found: list[list[object]] = []

    def call() -> None:  # on a thread that is not the main one
        results = mx.run(
            work,
            args=(2.0,),
            kwargs={"name": "worker"},
            workers=3,
            servers=2,
            env={"GREETING": "a b"},
            timeout_s=50,
        )
        found.append(results)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(50)
    assert found == [[(rank, [22.0, 22.0], "a b") for rank in range(3)]]
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [f"[worker {rank}] hello from worker {rank}" for rank in range(3)]


def test_what_one_worker_raises_is_raised_and_the_others_are_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Unlucky(ValueError):
        pass

    def work() -> None:
        kv = mx.create("dist_sync")
        if kv.rank == 1:
            raise Unlucky("number 13")
        time.sleep(50)

    began = time.monotonic()
    with pytest.raises(Unlucky, match="number 13") as raised:
        mx.run(work, workers=2, servers=1)
    assert capsys.readouterr() == ("", "")
    assert time.monotonic() - began < 40
    cause = raised.value.__cause__
    assert isinstance(cause, WorkerFailed)
    assert (cause.role, cause.rank) == ("worker", 1)
    assert re.search(r"worker 1 raised Unlucky; .*in work\n +raise Unlucky", str(cause), re.DOTALL)


def test_a_worker_that_is_killed_is_named_with_its_signal_and_its_last_lines() -> None:
    def work() -> None:
        kv = mx.create("dist_sync")
        if kv.rank == 1:
            print(*(f"line {i}" for i in range(30)), sep="\n", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        kv.barrier()

    with pytest.raises(WorkerFailed) as raised:
        mx.run(work, workers=2, servers=1)
    assert (raised.value.role, raised.value.rank) == ("worker", 1)
    text = str(raised.value)
    assert text.startswith("worker 1 ended with signal SIGKILL, before it had returned; ")
    assert re.findall(r"line (\d+)$", text, re.MULTILINE) == [str(i) for i in range(10, 30)]
    assert "logs of all processes" not in text  # they are gone


def kill_the_scheduler() -> None:
    """On a worker: the process that the same launcher has started as the scheduler."""
    mine = f"\nPPid:\t{os.getppid()}\n"
    for entry in Path("/proc").iterdir():
        try:
            is_sibling = entry.name.isdigit() and mine in (entry / "status").read_text()
            if is_sibling and b"DMLC_ROLE=scheduler" in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:  # it has ended meanwhile
            continue


def by_value(function: Callable[[], None]) -> Callable[[], None]:
    """The same function, which is sent as a whole: workers do not have this module."""
    return type(function)(function.__code__, {**function.__globals__, "__name__": "__main__"})


def test_a_worker_that_is_killed_is_started_again_and_its_call_goes_on() -> None:
    def train(num_steps: int) -> tuple[int, list[float]]:
        kv = mx.create("dist_sync")
        kv.init("w", np.ones(2))
        steps = kv.steps(num_steps, {"rank": kv.rank})
        weights = kv.pull("w")
        for step in steps:
            kv.pushpull("w", weights * 0.9 / kv.num_workers, out=weights)
            if step == 3 and kv.rank == 1 and kv.node.attempt == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return steps.first, weights.round(6).tolist()

    results = mx.run(train, args=(6,), workers=2, servers=1, restarts=1)
    assert results == [(0, [0.531441] * 2), (3, [0.531441] * 2)]


def test_a_server_that_is_killed_twice_is_replaced_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(scheduler_log: Path) -> list[float]:
        kv = mx.create("dist_sync")
        kv.init("w", np.ones(2))
        weights = kv.pull("w")
        for kill_number in (1, 2):
            if kv.rank == 0:
                (pid,) = [node.pid for node in kv.node.membership.roster if node.role == "server"]
                os.kill(pid, signal.SIGKILL)
            kv.pushpull("w", weights * 0.9 / kv.num_workers, out=weights)
            while scheduler_log.read_text().count("has a standby again") < kill_number:
                time.sleep(0.01)
            kv.barrier()
        return weights.round(6).tolist()

    logs = tmp_path / "logs"
    results = mx.run(
        train,
        args=(logs / "scheduler.log",),
        workers=2,
        servers=1,
        standbys=1,
        restarts=2,
        log_dir=logs,
    )
    assert results == [[0.81, 0.81]] * 2
    err = capsys.readouterr().err
    assert "[launcher] starting a standby of server 0 again (2 of 2 restarts)" in err


@pytest.mark.slow(reason="test_losses.py kills a scheduler always")
def test_a_call_names_the_scheduler_that_was_killed() -> None:
    kill = by_value(kill_the_scheduler)

    def work() -> None:
        kv = mx.create("dist_sync")
        if kv.rank == 0:
            kill()
        kv.barrier()

    killed = r"^scheduler ended with signal SIGKILL; "
    with pytest.raises(JobFailed, match=killed):
        mx.run(work, workers=2, servers=1)
    with mx.LocalCluster(workers=2, servers=1) as cluster:
        with pytest.raises(JobFailed, match=killed):
            cluster.run(work)
        with pytest.raises(ClosedError):
            cluster.run(work)


@pytest.mark.slow(reason="it waits; a call that never returns runs always")
def test_when_the_time_is_up_the_error_names_who_has_not_returned(tmp_path: Path) -> None:
    def work() -> str:
        if mx.create("dist_sync").rank in (0, 2):
            time.sleep(50)
        return "done"

    with pytest.raises(TimeoutError) as raised:
        mx.run(work, workers=3, servers=1, timeout_s=12, log_dir=tmp_path / "logs")
    assert isinstance(raised.value, DeadlineError)
    assert str(raised.value) == "after 12 s workers 0 and 2 had not returned"
    assert (tmp_path / "logs" / "worker-0.log").exists()


def test_a_job_that_cannot_start_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(JobFailed, match="cannot start worker 0: '/no/python': there is no such"):
        mx.run(os.getpid, workers=1, servers=1, python="/no/python")
    assert capsys.readouterr().err.startswith("[launcher] cannot start worker 0")


@pytest.mark.slow(reason="two jobs; tests/unit/kvstore/launch has what a job inherits")
def test_a_worker_may_run_a_job_of_its_own_which_inherits_nothing_of_the_outer_one() -> None:
    def inner() -> tuple[str, str]:
        return os.environ["PS_JOB_ID"], os.environ["DMLC_NUM_WORKER"]

    def outer() -> tuple[str, list[tuple[str, str]]]:
        return os.environ["PS_JOB_ID"], mx.run(inner, workers=2, servers=1)

    [(job, inner_jobs)] = mx.run(outer, workers=1, servers=1)
    assert len({job, *(name for name, _ in inner_jobs)}) == 2
    assert [count for _, count in inner_jobs] == ["2", "2"]


@pytest.mark.slow(reason="a function that prints runs always")
def test_answers_are_heard_of_through_a_function_that_replaces_the_standard_streams(
    tmp_path: Path,
) -> None:
    def silence() -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)

    (tmp_path / "shared").mkdir()
    assert mx.run(silence, workers=1, servers=1, share_dir=tmp_path / "shared") == [None]
    assert list((tmp_path / "shared").iterdir()) == []
    with mx.LocalCluster(workers=1, servers=1) as cluster:
        assert [cluster.run(silence) for _ in range(2)] == [[None]] * 2


def test_a_cluster_makes_several_calls_on_the_same_workers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.launch.run.job.PATIENCE_S", 20.0)  # the machine may be busy

    class Point:
        def __init__(self, x: int) -> None:
            self.x = x

    def rank() -> int:
        return mx.create("dist_sync").rank

    def say(text: str) -> int:
        print(text, end="")  # the line has no end
        print("an error", file=sys.stderr)
        return os.getpid()

    with mx.LocalCluster(workers=2, servers=1) as cluster:
        first = cluster.run(say, ("one",))
        out, err = capsys.readouterr()
        assert sorted(out.splitlines()) == ["[worker 0] one", "[worker 1] one"]
        assert sorted(err.splitlines()) == ["[worker 0] an error", "[worker 1] an error"]

        second, third = cluster.submit(say, ("two",)), cluster.submit(rank)
        assert third.result(30) == [0, 1]
        assert second.done()
        assert second.result() == first  # the same processes
        assert all(isinstance(point, Point) for point in cluster.run(lambda: Point(1)))

        with pytest.raises(ZeroDivisionError) as raised:
            cluster.run(lambda: 1 / 0)
        assert "as did worker" in str(raised.value.__cause__)
        with pytest.raises(WorkerFailed, match=r"cannot send back the function.s result: .*lock"):
            cluster.run(threading.Lock)
        with pytest.raises(WorkerFailed, match="raised SystemExit"):
            cluster.run(sys.exit)
        assert cluster.run(rank) == [0, 1]  # it goes on

        slow = cluster.submit(time.sleep, (2.0,))
        with pytest.raises(DeadlineError, match=r"after 0\.01 s workers 0 and 1 had not"):
            slow.result(0.01)
        assert slow.result(30) == [None, None]
    with pytest.raises(ClosedError, match="it was closed; create a new one"):
        cluster.run(rank)


@pytest.mark.slow(reason="several calls on one cluster run always")
def test_threads_submit_and_end_a_cluster_while_another_one_waits_for_a_result(
    tmp_path: Path,
) -> None:
    def wait_for(name: str) -> str:
        while not (tmp_path / name).exists():
            time.sleep(0.01)
        return name

    outcomes: list[object] = []

    def await_result(call: Call) -> threading.Thread:
        def take() -> None:
            try:
                outcomes.append(call.result())
            except ClosedError as error:
                outcomes.append(str(error))

        thread = threading.Thread(target=take)
        thread.start()
        return thread

    with mx.LocalCluster(workers=1, servers=1) as cluster:
        first = cluster.submit(wait_for, ("go",))
        waiting = await_result(first)
        second, third = cluster.submit(os.getpid), cluster.submit(wait_for, ("never",))
        assert not first.done()
        (tmp_path / "go").touch()
        waiting.join(30)
        assert outcomes == [["go"]]
        for_third = await_result(third)  # which takes the answer of the second as well
        assert len(second.result(30)) == 1
        with pytest.raises(DeadlineError):
            cluster.run(os.getpid, timeout_s=0.5)
        for_third.join(30)
        ended = "a call took longer than its timeout_s"
        assert outcomes[1] == f"the cluster ended before this call had returned: {ended}"
        with pytest.raises(ClosedError, match=ended):
            cluster.submit(os.getpid)


@pytest.mark.slow(reason="workers that wait for one that raised are ended always")
def test_an_exception_or_close_with_a_timeout_ends_a_call_that_never_returns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def endless() -> None:
        threading.Event().wait()

    cluster = mx.LocalCluster(workers=1, servers=1)
    call = cluster.submit(endless)
    with pytest.raises(DeadlineError), cluster:
        call.result(timeout_s=0.01)
    with pytest.raises(ClosedError, match="an exception left its with block"):
        call.result()

    cluster = mx.LocalCluster(workers=1, servers=1)
    call = cluster.submit(endless)
    cluster.close(timeout_s=0.01)
    with pytest.raises(ClosedError, match="closing it took longer than its timeout_s"):
        call.result()
    assert capsys.readouterr().err.startswith("[launcher] closing the cluster: after 0.01 s work")


def test_a_cluster_whose_workers_wait_for_the_one_that_raised_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work() -> None:
        kv = mx.create("dist_sync")
        if kv.rank == 0:
            raise KeyError("gone")
        kv.barrier()

    with mx.LocalCluster(workers=2, servers=1) as cluster:
        call, later = cluster.submit(work), cluster.submit(os.getpid)
        with pytest.raises(KeyError, match="gone"):
            call.result(30)
        with pytest.raises(ClosedError, match="a call failed: 'gone'"):
            later.result(30)
        with pytest.raises(ClosedError, match="this cluster has ended: a call failed: 'gone'"):
            cluster.run(os.getpid)
    assert capsys.readouterr() == ("", "")


# -- callers that end: scripts of their own, without a __main__ guard --------------------------

SCRIPT = """
import os, sys, time
import kvstore as mx
print("imported once", flush=True)
def work():
    kv = mx.create("dist_sync")
    print("working", flush=True)
    time.sleep(50)
mx.run(work, workers=2, servers=1)
"""


def start_script(make_job: MakeJob, temporary: Path, text: str = SCRIPT) -> Process:
    job = make_job(2, 1, TMPDIR=str(temporary))
    script = job.directory / "script.py"
    script.write_text(text)
    remove = {name: None for name in job.environment("worker", 0) if name.startswith("DMLC_")}
    return job.start("worker", 0, [str(script)], {**remove, "PS_JOB_ID": None})


def test_nothing_stays_when_the_caller_is_killed(make_job: MakeJob, temporary: Path) -> None:
    """The fixtures look for processes and for files."""
    caller = start_script(make_job, temporary)
    caller.wait_for(r"(?s)worker \d\] working.*worker \d\] working")
    caller.send(signal.SIGKILL)
    assert caller.wait() == -signal.SIGKILL
    assert caller.text.count("imported once") == 1


@pytest.mark.slow(reason="a caller that is killed runs always")
def test_nothing_stays_when_a_ctrl_c_ends_the_call(make_job: MakeJob, temporary: Path) -> None:
    caller = start_script(make_job, temporary)
    caller.wait_for(r"(?s)worker \d\] working.*worker \d\] working")
    caller.send(signal.SIGINT)
    assert caller.wait() == -signal.SIGINT
    assert caller.lines[-1] == "KeyboardInterrupt"


def test_a_cluster_that_nobody_closes_ends_with_the_interpreter(
    make_job: MakeJob, temporary: Path
) -> None:
    text = "import kvstore as mx\ncluster = mx.LocalCluster(1, 1)\nprint(cluster.run(abs, (-7,)))\n"
    caller = start_script(make_job, temporary, text)
    assert caller.wait() == 0
    assert caller.lines == ["[7]"]


@pytest.mark.slow(reason="functions of all kinds run always, with cloudpickle")
def test_without_cloudpickle_functions_of_modules_work_and_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_functions.py").write_text(
        "import kvstore\ndef rank():\n    return kvstore.create('dist_sync').rank\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    import my_functions  # type: ignore[import-not-found]

    assert mx.run(my_functions.rank, workers=2, servers=1) == [0, 1]
    with pytest.raises(mx.errors.MissingDependencyError, match="pip install cloudpickle"):
        mx.run(lambda: 1)
    assert str(ROOT) in sys.path
