"""Starts the processes of one run, waits for all of them, and reads what they report.

The only module here that starts and ends processes (those that it has started, by their process
groups). Runs on the caller's thread.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.compare.loop import Task

ROOT = Path(__file__).resolve().parents[2]
LAST_LINES = 12

Report = dict[str, Any]


class JobFailed(Exception):
    """A process of a run failed or took too long; the text has its last lines."""


@dataclass(frozen=True)
class Process:
    """A command, and variables that it has besides those of this process."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


MakeProcesses = Callable[[Task], list[Process]]
"""Takes a task whose directory exists; its processes write their reports there."""


def read_reports(directory: Path, task: Task) -> list[Report]:
    """What the workers of a run have reported, in the order of ranks. Raises JobFailed."""
    paths = sorted(directory.glob("rank*.json"), key=lambda path: int(path.stem[4:]))
    if len(paths) != task.workers:
        raise JobFailed(
            f"{len(paths)} of {task.workers} workers have reported:\n{_logs(directory)}"
        )
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def output_of(directory: Path) -> str:
    """All that the processes of a run have printed."""
    paths = sorted(directory.glob("process*.log"))
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def run_task(
    task: Task,
    make: MakeProcesses,
    timeout_s: float = 300.0,
    read: Callable[[Path, Task], list[Report]] = read_reports,
) -> list[Report]:
    """One run in processes of its own; returns what ``read`` finds afterwards.

    Raises JobFailed.
    """
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as directory:
        run_processes(make(replace(task, directory=directory)), Path(directory), timeout_s)
        return read(Path(directory), task)


def run_processes(processes: Sequence[Process], directory: Path, timeout_s: float) -> None:
    """Run all at the same time until the last has ended; logs go to ``directory``.

    Raises JobFailed as soon as one fails, and after ``timeout_s``; none is left then.
    """
    running: list[subprocess.Popen[bytes]] = []
    deadline_s = time.monotonic() + timeout_s
    try:
        for index, process in enumerate(processes):
            running.append(_start(process, directory / f"process{index}.log"))
        while any(child.poll() is None for child in running):
            for child in running:
                if child.poll() not in (None, 0):
                    raise JobFailed(f"exit code {child.returncode}:\n{_logs(directory)}")
            if time.monotonic() > deadline_s:
                raise JobFailed(f"not over after {timeout_s:g} s:\n{_logs(directory)}")
            # Often enough to start the next run soon, seldom enough to disturb nobody.
            time.sleep(0.05)
        if any(child.returncode for child in running):
            raise JobFailed(f"a process failed:\n{_logs(directory)}")
    finally:
        for child in running:
            _end(child)


def _start(process: Process, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **process.environment}
    with log.open("wb") as output:
        return subprocess.Popen(
            process.command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _end(child: subprocess.Popen[bytes]) -> None:
    """End what still runs of a process and its children: the group is its own."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _logs(directory: Path) -> str:
    texts = []
    for path in sorted(directory.glob("process*.log")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        texts += [f"  {path.stem}: {line}" for line in lines[-LAST_LINES:]]
    return "\n".join(texts)


def launched(
    module: str, task: Task, environment: Mapping[str, str], launcher: Sequence[str] = ()
) -> list[Process]:
    """A job of ours on this machine, by the launcher; workers run ``module``."""
    command = [sys.executable, str(ROOT / "tools" / "launch.py"), "--launcher", "local", *launcher]
    command += ["-n", str(task.workers), "-s", str(task.servers)]
    command += [sys.executable, "-m", module, task.to_json()]
    return [Process(tuple(command), environment)]


def by_roles(
    command: Sequence[str], task: Task, environment: Mapping[str, str], *, host: str = "127.0.0.1"
) -> list[Process]:
    """The same command once for each role, told apart by the DMLC_* variables."""
    roles = ["scheduler"] + ["server"] * task.servers + ["worker"] * task.workers
    common = {
        "DMLC_PS_ROOT_URI": host,
        "DMLC_PS_ROOT_PORT": str(free_port(host)),
        "DMLC_NUM_WORKER": str(task.workers),
        "DMLC_NUM_SERVER": str(task.servers),
        "DMLC_NODE_HOST": host,
        **environment,
    }
    return [Process(tuple(command), {**common, "DMLC_ROLE": role}) for role in roles]


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at this moment."""
    while True:
        # From below the ports that the system gives to clients, which would take it meanwhile.
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
                return port
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
