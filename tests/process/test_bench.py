"""``python -m kvstore.bench`` as a user runs it, and the processes of benchmarks/."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from job import MARK, ROOT, MakeJob, clean_environment, needs_proc
from test_networks import REASON

from benchmarks.compare.jobs import JobFailed, Process, run_processes, run_task
from benchmarks.compare.loop import Task
from benchmarks.compare.scripts import MODULE, launched

pytestmark = [pytest.mark.process, needs_proc]


def run(make_job: MakeJob, *command: str, limit_s: float = 55.0) -> str:
    """Run a Python command to its good end; returns what it has printed."""
    job = make_job()
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**clean_environment(), MARK: job.mark, "TMPDIR": str(job.directory)},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow(reason="it starts several jobs; the measurement in a given job runs always")
def test_alone_it_starts_jobs_and_compares_them(make_job: MakeJob) -> None:
    options = ["-n", "1", "--seconds", "0.3", "--parameters", "1000000", "--tensors", "10"]
    text = run(make_job, "-m", "kvstore.bench", *options)
    for setup in "1 worker, 1 server, TCP", "1 worker, 2 servers, ":
        assert f"{setup}" in text
    assert text.count("each megabyte") == 3
    assert "your model (10 tensors, 4.0 MB), one step, estimated:" in text


@pytest.mark.slow(reason="it measures; the comparison's short run runs always")
def test_under_the_launcher_it_measures_the_job_it_is_in(make_job: MakeJob) -> None:
    launcher = [str(ROOT / "tools" / "launch.py"), "-n", "2", "-s", "1", "--launcher", "local"]
    bench = [sys.executable, "-m", "kvstore.bench", "--seconds", "0.2", "--model", "lenet"]
    text = run(make_job, *launcher, "--env", "PS_SHM=0", *bench)
    assert text.count("2 workers, 1 server, TCP, push and pull:") == 1  # one of both prints
    assert text.count("2 workers, 1 server, TCP, 4 connections to a server, push and pull:") == 1
    assert "lenet (8 tensors, 1.7 MB)" in text


def test_a_run_of_the_comparison_reports_times_and_right_weights() -> None:
    task = Task("lenet", workers=1, warmup=1, rounds=2)
    reports = run_task(task, lambda task: launched(MODULE, task, {}))
    assert [len(report["times_ms"]) for report in reports] == [2]
    assert reports[0]["check"] == {"exact": True, "difference": 0.0}


def test_a_failing_process_ends_the_others_and_its_last_lines_are_told(tmp_path: Path) -> None:
    fails = (sys.executable, "-c", "raise SystemExit('no such device')")
    stays = (sys.executable, "-c", "import time; time.sleep(60)")
    with pytest.raises(JobFailed, match=r"exit code 1:\n.*no such device"):
        run_processes([Process(stays), Process(fails)], tmp_path, timeout_s=30)


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    stays = (sys.executable, "-c", "import time; time.sleep(60)")
    with pytest.raises(JobFailed, match=r"not over after 0\.2 s"):
        run_processes([Process(stays)], tmp_path, timeout_s=0.2)


@pytest.mark.slow(reason="what it counts has tests of its own; this one runs the script")
def test_the_walk_counts_calls_on_each_thread(make_job: MakeJob) -> None:
    lines = run(make_job, str(ROOT / "benchmarks" / "walk.py"), "--times", "2").splitlines()
    rows = {line[:12].strip(): [int(word) for word in line[12:].split()] for line in lines[1:]}
    assert list(rows) == ["push, wait", "pull", "push, pull", "pushpull"]
    for calls, functions, files, caller, worker, server, pool in rows.values():
        assert calls == caller + worker + server + pool
        assert calls > functions > files > 10
        assert min(caller, worker, server) > 10


LONG_S = 240.0
"""Two to five processes import PyTorch, on a machine that may be busy."""


def of_torch(test: Callable[..., None]) -> Callable[..., None]:
    """Marks of a test that runs one of PyTorch's benchmarks."""
    for mark in (
        pytest.mark.slow(reason="each rank imports PyTorch, and adds up models"),
        pytest.mark.timeout(LONG_S + 10),
        pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch"),
    ):
        test = mark(test)
    return test


def ratios(lines: list[str]) -> list[str]:
    """What was timed, of lines as ``torch_ddp.py`` prints them."""
    found = [re.fullmatch(r"(\S.*\S) +[\d.]+ : +[\d.]+ = [\d.]+", line) for line in lines]
    assert all(found), lines
    return [match[1] for match in found if match]


SUMS = [f"all_reduce, {size}" for size in ("8 B", "1 MB", "25 MB", "100 MB")]


@of_torch
def test_every_part_of_the_comparison_with_gloo_runs(make_job: MakeJob) -> None:
    options = ["--quick", "--ranks", "2", "--network-ranks", "", "--models", "lenet"]
    text = run(make_job, "benchmarks/torch_ddp.py", *options, limit_s=LONG_S)
    title, *lines = text.splitlines()
    assert title.startswith("2 ranks on one machine, ms (median)")
    more = ["ResNet-50, 5 buckets", "DDP, lenet", "DDP step, ResNet-18"]
    assert ratios(lines) == [*SUMS, *more]


@of_torch
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_several_ranks_of_the_comparison_with_gloo_share_a_machine(make_job: MakeJob) -> None:
    options = ["--quick", "--ranks", "", "--network-ranks", "3", "--per-machine", "2"]
    text = run(make_job, "benchmarks/torch_ddp.py", *options, "--parts", "sums", limit_s=LONG_S)
    title, *lines = text.splitlines()
    assert title.startswith("3 ranks on 2 machines by TCP, ms (median)")
    assert ratios(lines) == SUMS


@of_torch
def test_steps_of_all_optimizers_are_compared(make_job: MakeJob) -> None:
    options = ["--quick", "--model", "lenet", "--optimizer", "adam"]
    text = run(make_job, "benchmarks/torch_optimizers.py", *options, limit_s=LONG_S)
    title, *lines = text.splitlines()
    assert title.startswith("lenet, adam, 2 ranks: ms of a step (median)")
    names = ["DDP over gloo", "ZeRO-1 over gloo", "DistributedOptimizer", "ServerOptimizer"]
    assert [re.split(r"  +", line)[0] for line in lines] == names
