"""``python -m kvstore.status`` and the launcher's line, with jobs of real processes."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from job import (
    HOST,
    PATIENCE_S,
    ROOT,
    TRAIN,
    WORKER,
    Job,
    MakeJob,
    Process,
    assert_no_traceback,
    clean_environment,
    free_port,
    needs_proc,
)

pytestmark = [pytest.mark.process, needs_proc]

NUMBERS = itertools.count(1)
LINE_S = 45.0
"""How long a test waits for the line: who supplies it gives way to all others (``os.nice``)."""
#: Runs a command on a terminal of its own, and passes on what appears there.
ON_A_TERMINAL = """
import os, pty, sys
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:], lambda fd: os.read(fd, 65536))))
"""
STOPPABLE = """
kv = mx.kvstore.create("dist_sync")
print("joined", flush=True)
time.sleep(60)
"""
STEPS = """
kv = mx.kvstore.create("dist_sync")
kv.init("w", vector(0, 0))
for step in range(100):
    kv.push("w", vector(1, 1))
    kv.pull("w")
    time.sleep(0.03)
    if step % 20 == 0:
        print("at step", step, flush=True)
    if step == 20:
        wait_for_file("go")
kv.barrier()
sys.exit({code})
"""
"""Two workers that tell of their steps, the later ones when there is a file named ``go``."""


def key_file(directory: Path, name: str) -> Path:
    path = directory / name
    path.touch(0o600)
    path.write_text(f"the key of the job in {name}\n")
    return path


def ask(job: Job, *arguments: str, settings: dict[str, str] | None = None) -> Process:
    """The command, in an environment that knows nothing of this job and of no other one."""
    place = {"PROCESS_TEST_MARK": job.mark, "TMPDIR": str(job.directory)}
    environment = {**clean_environment(), **place, **(settings or {})}
    command = [sys.executable, "-m", "kvstore.status", *arguments]
    process = job._start(f"status {next(NUMBERS)}", command, environment)
    job.processes.remove(process)  # the job ends without it
    return process


def surveyed(job: Job, *arguments: str) -> dict[str, Any]:
    return survey_in(ask(job, "--json", *arguments))


def survey_in(process: Process) -> dict[str, Any]:
    """What the command has found out."""
    assert process.wait() == 0, process.text
    found: dict[str, Any] = json.loads(process.text)
    return found


def sentence(process: Process, code: int = 1) -> str:
    """What a command had to say that could not do what it was asked for."""
    assert process.wait() == code, process.text
    [line] = process.lines
    return line


def started(job: Job) -> None:
    job.service()
    for worker in job.workers(TRAIN):
        worker.wait_for("rank")


def ends_well(job: Job) -> None:
    job.allow("stop")
    assert job.wait_all() == [0, 0, 0, 0], job.output()
    assert [process.lines[-1] for process in job.processes[2:]] == ["rounds are right"] * 2
    assert_no_traceback(*job.processes)


def test_a_job_without_a_key_is_shown_to_its_own_machine(make_job: MakeJob) -> None:
    job = make_job(2, 1)
    started(job)
    address = f"{HOST}:{job.port}"
    survey, table = ask(job, address, "--json"), ask(job, address)
    line = ask(job, address, "--line", settings={"DMLC_PS_ROOT_PORT": "1"})
    found = survey_in(survey)
    assert (found["state"], found["job"]) == ("running", f"job-{job.mark}")
    assert [(node["role"], node["rank"], node["pid"]) for node in found["nodes"]] == [
        ("scheduler", 0, job.processes[0].pid),
        ("worker", 0, job.processes[2].pid),
        ("worker", 1, job.processes[3].pid),
        ("server", 0, job.processes[1].pid),
    ]
    worker = found["nodes"][1]["report"]
    assert worker["progress"]["steps"] > 0
    assert worker["sent_bytes_per_s"] > 0
    assert table.wait() == 0
    assert re.search(rf"^worker 1 .* {job.processes[3].pid} .* running", table.text, re.M)
    assert line.wait() == 0
    assert re.match(r"2/2 workers, step \d+, [\d.]+ steps/s, \d+% communication", line.text)
    ends_well(job)


@pytest.mark.parametrize(
    "security",
    [
        pytest.param("plain", marks=pytest.mark.slow(reason="the other mechanism runs always")),
        "curve",
    ],
)
def test_a_job_with_a_key_is_shown_to_who_has_it_and_to_nobody_else(
    make_job: MakeJob, tmp_path: Path, security: str
) -> None:
    key, another = key_file(tmp_path, "one.key"), key_file(tmp_path, "two.key")
    job = make_job(2, 1, PS_JOB_KEY_FILE=str(key), PS_SECURITY=security)
    started(job)
    address = f"{HOST}:{job.port}"
    ours = ("--key-file", str(key), "--security", security)
    theirs = ("--key-file", str(another), "--security", security)
    other = "plain" if security == "curve" else "curve"
    settings = {
        "DMLC_PS_ROOT_URI": HOST,
        "DMLC_PS_ROOT_PORT": str(job.port),
        "PS_JOB_KEY_FILE": str(key),
        "PS_SECURITY": security,
        "PS_JOB_ID": f"job-{job.mark}",
    }
    refused = [
        ask(job, address),
        ask(job, address, *theirs),
        ask(job, address, "--key-file", str(key), "--security", other),
    ]
    answered, named = ask(job, "--json", address, *ours), ask(job, "--line", settings=settings)
    elsewhere = ask(job, "--line", settings={**settings, "PS_JOB_ID": "another"})
    assert survey_in(answered)["state"] == "running"
    assert named.wait() == 0
    assert "this node does not belong to the job 'another'" in sentence(elsewhere)
    for command in refused:
        assert "the job key (PS_JOB_KEY_FILE)" in sentence(command)
    ends_well(job)


def test_with_a_key_nothing_is_asked_without_it(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job(2, 1)  # has no key
    started(job)
    key = key_file(tmp_path, "one.key")
    asked = ask(job, f"{HOST}:{job.port}", settings={"PS_JOB_KEY_FILE": str(key)})
    assert "the job key (PS_JOB_KEY_FILE)" in sentence(asked)
    ends_well(job)


def test_nobody_there_is_said_in_time(make_job: MakeJob, tmp_path: Path) -> None:
    job = make_job()
    key = key_file(tmp_path, "one.key")
    began = time.monotonic()
    with socket.create_server((HOST, 0)) as silent:
        address = f"{HOST}:{silent.getsockname()[1]}"
        said = {
            "cannot connect to a scheduler at": ask(job, f"{HOST}:{free_port()}"),
            "did not answer within 4.5 s": ask(job, address, "--key-file", str(key)),
            f"neither in {job.directory} (TMPDIR)": ask(job),
        }
        senseless = {
            "address as host:port, got '127.0.0.1'": ask(job, HOST),
            f"address as host:port, got '{HOST}:99999'": ask(job, f"{HOST}:99999"),
            "without a job key": ask(job, "192.0.2.1:9091"),
            "nokey (PS_JOB_KEY_FILE) cannot be read": ask(job, address, "--key-file", "nokey"),
            "DMLC_PS_ROOT_URI": ask(job, "--key-file", str(key)),
        }
        for words, process in said.items():
            assert words in sentence(process)
        for words, process in senseless.items():
            assert words in sentence(process, 2)
    assert time.monotonic() - began < 20.0


def test_a_worker_that_is_stopped_is_listed_as_silent(make_job: MakeJob) -> None:
    job = make_job(2, 1, PS_LOST_AFTER="50")
    started(job)
    stopped = job.processes[3]
    stopped.send(signal.SIGSTOP)
    try:
        time.sleep(1.5)  # what waits for less is not listed
        began = time.monotonic()
        found = surveyed(job, f"{HOST}:{job.port}")
        assert time.monotonic() - began < PATIENCE_S
    finally:
        stopped.send(signal.SIGCONT)
    states = [node["state"] for node in found["nodes"]]
    assert states == ["running", "running", "silent", "running"]
    assert found["nodes"][2]["silent_s"] >= 1.5
    waits = [wait for node in found["nodes"] if node["report"] for wait in node["report"]["waits"]]
    assert any(wait["missing"] == ["worker 1"] for wait in waits)
    assert found["summary"]["slowest"] == "worker 1"
    ends_well(job)


def test_a_job_that_gathers_says_who_is_missing(make_job: MakeJob) -> None:
    job = make_job(2, 1, PS_ROSTER_INTERVAL="0.1")
    scheduler, server = job.scheduler(), job.server()
    scheduler.wait_for("connected: server")
    found = surveyed(job, f"{HOST}:{job.port}")
    assert (found["state"], found["missing"]) == ("gathering", ["2 of 2 workers"])
    assert [node["role"] for node in found["nodes"]] == ["scheduler", "server"]
    assert found["nodes"][1]["pid"] == server.pid
    server.send(signal.SIGINT)
    assert server.wait() == 128 + signal.SIGINT
    assert scheduler.wait() == 1
    scheduler.wait_for(f"NodeLostError: a server on .* \\(pid {server.pid}\\) is lost")


def test_watching_ends_with_the_job(make_job: MakeJob) -> None:
    job = make_job(2, 1)
    started(job)
    watching = ask(job, f"{HOST}:{job.port}", "--watch", "0.6", "--json")
    watching.wait_for(r"(?s)\}\n.*\}\n")
    ends_well(job)
    assert watching.wait() == 0
    assert "has ended" in watching.lines[-1]
    surveys = [json.loads(line) for line in watching.lines[:-1]]
    assert surveys[0]["nodes"][1]["report"]["sent_bytes_per_s"] is None
    assert surveys[1]["nodes"][1]["report"]["sent_bytes_per_s"] > 0


def test_jobs_of_the_launcher_need_no_address_and_no_key(make_job: MakeJob) -> None:
    job, other = make_job(), make_job()
    other.directory = job.directory
    launchers = [each.launch(STOPPABLE, "--no-status") for each in (job, other)]
    for launcher in launchers:
        launcher.wait_for("joined")
    several = sentence(ask(job), 2)
    addresses = re.findall(rf"{HOST}:\d+", several)
    assert several.startswith("kvstore status: you run 2 jobs; name the scheduler of one: ")
    found = [ask(job, address, "--line") for address in addresses]
    assert [each.wait() for each in found] == [0, 0]
    launchers[1].send(signal.SIGTERM)
    assert launchers[1].wait() == 128 + signal.SIGTERM
    only = ask(job, "--json")
    assert only.wait() == 0, only.text
    assert json.loads(only.text)["num_workers"] == 2
    launchers[0].send(signal.SIGTERM)
    assert launchers[0].wait() == 128 + signal.SIGTERM
    assert "found no job of yours that kvstore-launch" in sentence(ask(job))


# -- the launcher's line ----------------------------------------------------------------------


def launched(job: Job, code: str, *options: str) -> Process:
    """The launcher, on a terminal."""
    command = [
        *(sys.executable, "-c", ON_A_TERMINAL, sys.executable, str(ROOT / "tools" / "launch.py")),
        *("-n", "2", "-s", "1", *options, sys.executable, "-c", WORKER + code),
    ]
    environment = {**clean_environment(), "PROCESS_TEST_MARK": job.mark, "TERM": "xterm"}
    environment.update(job.settings)
    return job._start("terminal", command, {**environment, "TMPDIR": str(job.directory)})


def written(process: Process) -> str:
    """All of it, with its carriage returns."""
    return process.output.read_bytes().decode()


def as_shown(text: str) -> list[str]:
    """The lines that stand on the terminal in the end: what is erased is gone."""
    lines = text.replace("\r\n", "\n").split("\n")
    assert all("\r" not in part.replace("\r\x1b[K", "") for part in lines), text
    return [line.rpartition("\r\x1b[K")[2] for line in lines]


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(0, marks=pytest.mark.slow(reason="a job that fails runs always")),
        7,
    ],
)
def test_the_line_on_a_terminal_changes_nothing_but_the_terminal(
    make_job: MakeJob, code: int
) -> None:
    with_line, without = make_job(), make_job()
    quiet = launched(without, STEPS.format(code=code), "--no-status")
    shown = launched(with_line, STEPS.format(code=code))
    shown.wait_for(r"\[launcher\] 2/2 workers, step 2\d, ", LINE_S)
    for job in with_line, without:
        job.allow("go")
    assert [shown.wait(30.0), quiet.wait(30.0)] == [code, code]
    found = re.findall(r"\r\x1b\[K\[launcher\] (2/2 workers, step \d+, [^\r\n]*)", written(shown))
    assert found, shown.text
    assert "2/2 workers" not in quiet.text
    assert "\x1b" not in quiet.text
    lines = as_shown(written(shown))
    workers = [line for line in lines if line.startswith("[worker")]
    assert sorted(workers) == sorted(
        f"[worker {rank}] at step {step}" for rank in range(2) for step in range(0, 100, 20)
    )
    assert not any("2/2 workers" in line for line in lines)
    if code:
        assert any("this was the first failure" in line for line in lines)
        assert "exit code 7" in shown.text


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param(
            {"PYTHONSAFEPATH": "1"},
            id="safe path",
            marks=pytest.mark.slow(reason="without a safe path it runs always"),
        ),
    ],
)
@pytest.mark.slow(reason="the line of a job that fails runs always")
def test_the_line_vanishes_with_an_interrupt(make_job: MakeJob, settings: dict[str, str]) -> None:
    job = make_job(**settings)
    process = launched(job, STEPS.format(code=0))
    process.wait_for(r"\[launcher\] 2/2 workers", LINE_S)
    [launcher] = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and int(entry.name) in job.left() and is_launcher(entry)
    ]
    os.kill(launcher, signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    lines = as_shown(written(process))
    assert not any("2/2 workers" in line for line in lines), process.text
    assert any("got SIGTERM: ending the job" in line for line in lines)


def is_launcher(entry: Path) -> bool:
    arguments = entry.joinpath("cmdline").read_bytes().split(b"\0")
    return arguments[1:2] == [str(ROOT / "tools" / "launch.py").encode()]
