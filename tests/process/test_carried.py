"""The mpi launcher with a program in the place of ``mpirun`` that runs everything here.

Real agents, a real gate, real jobs; tests/launchers/test_mpi.py has real mpiruns.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.launch.job.guardian import job_members

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 50.0

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for left processes in /proc"),
]

# Starts as many as it is told, ends when all have, and with the first code that is not 0.
MPIRUN = """#!/bin/sh
case "$*" in *--version*) echo "mpirun (Open MPI) 4.1.4"; exit;; esac
case "$*" in *--too-few-slots*) echo "There are not enough slots" >&2; exit 1;; esac
case "$*" in *--not-shared*)
    echo "python3: can't open file '/home/ann/agent.py': [Errno 2] No such file" >&2
    exec sleep 60;;
esac
while [ "$1" != -n ]; do shift; done
count=$2; shift 2
rank=0
while [ "$rank" -lt "$count" ]; do
    OMPI_COMM_WORLD_RANK=$rank "$@" &
    rank=$((rank + 1))
done
wait
"""
ROUND = """
import os, sys
import numpy as np
import kvstore as mx
kv = mx.create("dist_sync")
kv.init("w", np.zeros(2, np.float32))
kv.push("w", np.full(2, kv.rank + 1, np.float32))
print("sum", kv.pull("w")[0], sys.argv[1:], os.environ["KVSTORE_MARK"], flush=True)
sys.exit(int(os.environ.get("KVSTORE_CODE", 0)) if kv.rank == 1 else 0)
"""
STAY = """
import os, time
import kvstore as mx
kv = mx.create("dist_sync")
print("here", os.environ["PS_JOB_ID"], os.environ["PS_JOB_KEY_FILE"], flush=True)
time.sleep(60)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    programs = tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "tmp").mkdir()
    (programs / "mpirun").write_text(MPIRUN)
    (programs / "mpirun").chmod(0o755)

    def start(*own: str, **environment: str) -> subprocess.Popen[str]:
        launcher = [sys.executable, str(ROOT / "tools" / "launch.py"), "--launcher", "mpi"]
        variables = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "KVSTORE_JOB_DIR": str(tmp_path / "jobs"),
            "TMPDIR": str(tmp_path / "tmp"),  # where the logs of failed jobs stay
        }
        return subprocess.Popen(
            [*launcher, *own],
            env={**os.environ, **variables, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def test_a_job_through_the_gate_ends_with_the_first_exit_code(start: Start, tmp_path: Path) -> None:
    words = ["a b", "$x", ""]
    own = ["-n", "2", "-s", "1", sys.executable, "-c", ROUND, *words]
    done = start(*own, KVSTORE_MARK="forwarded", KVSTORE_CODE="7")
    output, errors = done.communicate(timeout=LIMIT_S)
    assert done.returncode == 7, errors
    for rank in range(2):
        assert f"[worker {rank}@{os.uname().nodename}] sum 3.0 {words} forwarded" in output
    assert "process:  worker 1 (pid " in errors
    assert list((tmp_path / "jobs").iterdir()) == [], "tickets are gone"


def test_what_mpirun_says_before_it_gives_up_is_the_reason(start: Start, tmp_path: Path) -> None:
    done = start("-n", "1", "--launcher-args=--too-few-slots", "true")
    _, errors = done.communicate(timeout=LIMIT_S)
    assert done.returncode == 1
    assert errors.splitlines() == [
        "[launcher] mpirun ended (exit code 1) before all processes had started; it said:",
        "  There are not enough slots",
    ]
    assert list((tmp_path / "jobs").iterdir()) == []


def test_a_port_that_is_in_use_is_said_before_anything_is_asked_for(start: Start) -> None:
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = other.getsockname()[1]
        done = start(
            "-n", "1", "--launcher-args=--too-few-slots", "true", DMLC_PS_ROOT_PORT=str(port)
        )
        _, errors = done.communicate(timeout=LIMIT_S)
    assert done.returncode == 1
    [line] = errors.splitlines()
    assert f"port {port} on 0.0.0.0 is in use by process {os.getpid()}" in line


def test_a_directory_that_is_not_shared_is_the_reason(start: Start) -> None:
    done = start("-n", "1", "--launcher-args=--not-shared", "true")
    _, errors = done.communicate(timeout=LIMIT_S)
    assert done.returncode == 1
    [line] = errors.splitlines()
    assert "does not find /home/ann/agent.py: set KVSTORE_JOB_DIR to a directory" in line


def test_nothing_is_left_when_the_launcher_is_killed(start: Start, tmp_path: Path) -> None:
    with start("-n", "2", "-s", "1", sys.executable, "-c", STAY) as job:
        try:
            assert job.stdout is not None
            lines = [job.stdout.readline().split() for _ in range(2)]
            job.send_signal(signal.SIGKILL)
            job.wait(LIMIT_S)
        finally:
            job.kill()
    [job_id] = {line[-2] for line in lines}
    key_files = [Path(line[-1]) for line in lines]
    until_s = time.monotonic() + LIMIT_S
    left = [*job_members(job_id, ()), *(tmp_path / "jobs").iterdir(), *key_files]
    while left and time.monotonic() < until_s:
        time.sleep(0.05)
        left = [*job_members(job_id, ()), *(tmp_path / "jobs").iterdir()]
        left += [path for path in key_files if path.exists()]
    assert left == []


@pytest.mark.slow(reason="test_launch_local.py restarts jobs always")
def test_a_job_that_fails_is_carried_again(start: Start, tmp_path: Path) -> None:
    code = ROUND.replace('environ.get("KVSTORE_CODE", 0)', 'environ["DMLC_NUM_ATTEMPT"] == "0"')
    done = start(
        *("-n", "2", "-s", "1", "--restarts", "1", sys.executable, "-c", code), KVSTORE_MARK="there"
    )
    output, errors = done.communicate(timeout=LIMIT_S)
    assert done.returncode == 0, errors
    assert output.count("sum 3.0 [] there") == 4, "two workers, twice"
    assert "[launcher] the job succeeded after 1 restart" in errors.splitlines()[-1]
    assert list((tmp_path / "jobs").iterdir()) == [], "tickets are gone"
