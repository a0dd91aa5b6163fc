"""The ssh launcher with a program in the place of ``ssh`` that runs everything on this machine.

Real agents, real jobs, no server: tests/launchers/test_ssh.py has those.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import kvstore as mx
from kvstore.launch.job.guardian import job_members

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 50.0

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for left processes in /proc"),
]

# A login shell that greets, on a host whose last word is the command.
SSH = """#!/bin/sh
for word in "$@"; do last=$word; done
echo "Welcome to this host"
case "$*" in *" -- locked "*) echo "me@locked: Permission denied (publickey)." >&2; exit 255;; esac
case "$*" in *" -- slow "*) sleep 4;; *" -- mayfly "*) exec timeout 3 sh -c "$last";; esac
exec sh -c "$last"
"""
ROUND = """
import os, sys
import numpy as np
import kvstore as mx
kv = mx.create("dist_sync")
kv.init("w", np.zeros(2, np.float32))
kv.push("w", np.full(2, kv.rank + 1, np.float32))
print("sum", kv.pull("w")[0], sys.argv[1:], os.environ["KVSTORE_MARK"], flush=True)
for line in range(int(os.environ.get("KVSTORE_LINES", 0))):
    print(line, "x" * 1000)
sys.exit(int(os.environ.get("KVSTORE_CODE", 0)) if kv.rank == 1 else 0)
"""
STEPS = """
import os, signal, sys
import numpy as np
import kvstore as mx
kv = mx.create("dist_sync")
kv.init("w", np.zeros(2, np.float32))
w = kv.pull("w")
for step in kv.steps(6):
    if step == 3 and kv.rank == 1 and kv.node.attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    kv.pushpull("w", w + np.float32(kv.rank + 1), out=w)
print("sum", w[0], kv.node.attempt, os.environ["DMLC_NUM_ATTEMPT"], flush=True)
"""
LOSE_HOST = """
import os, re, signal, sys, time
import numpy as np
import kvstore as mx
kv = mx.create("dist_sync")
keys = [f"w{number}" for number in range(6)]
kv.init(keys, [np.zeros(2, np.float32)] * 6)
values = kv.pull(keys)
for step in range(6):
    if step == 3 and kv.rank == 0:
        (pid,) = [n.pid for n in kv.node.membership.roster if (n.role, n.rank) == ("server", 2)]
        agent = re.search(r"PPid:\\s*(\\d+)", open(f"/proc/{pid}/status").read())[1]
        os.kill(int(agent), signal.SIGKILL)
    kv.pushpull(keys, [each + np.float32(kv.rank + 1) for each in values], out=values)
while open(f"{sys.argv[1]}/scheduler.log").read().count("has a standby again") < 2:
    time.sleep(0.05)
kv.barrier()
print("sum", values[0][0], flush=True)
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
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))  # where the logs of failed jobs stay
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ssh").write_text(SSH)
    (programs / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("one\ntwo\n")

    def start(*own: str, hosts: str = "", **environment: str) -> subprocess.Popen[str]:
        if hosts:
            (tmp_path / "hosts").write_text(hosts)
        launcher = [sys.executable, str(ROOT / "tools" / "launch.py"), "--launcher", "ssh"]
        return subprocess.Popen(
            [*launcher, "-H", str(tmp_path / "hosts"), *own],
            env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def ended(job: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        output, errors = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
    return job.returncode, output, errors


def test_a_job_runs_through_agents_with_its_words_and_variables(start: Start) -> None:
    words = ["a b", "it's", "$HOME", "two\nlines"]
    job = start("-n", "2", "-s", "1", sys.executable, "-c", ROUND, *words, KVSTORE_MARK="m n")
    code, output, errors = ended(job)
    assert code == 0, errors
    assert f"[worker 0@one] sum 3.0 {words} m n" in output
    assert f"[worker 1@two] sum 3.0 {words} m n" in output


@pytest.mark.slow(reason="tests/unit/kvstore/launch has the agents' output")
def test_more_output_than_an_agent_may_send_at_once_arrives_in_order(start: Start) -> None:
    job = start(
        *("-n", "2", "-s", "1", sys.executable, "-c", ROUND),
        KVSTORE_MARK="",
        KVSTORE_LINES="3000",
    )
    code, output, errors = ended(job)
    assert code == 0, errors
    for name in ("worker 0@one", "worker 1@two"):
        lines = [line for line in output.splitlines() if line.startswith(f"[{name}] ")]
        assert [line.split()[2] for line in lines[1:]] == [str(number) for number in range(3000)]


@pytest.mark.slow(reason="test_launch_local.py and test_carried.py restart jobs always")
def test_a_job_that_fails_starts_again_on_all_hosts(start: Start) -> None:
    code = ROUND.replace('environ.get("KVSTORE_CODE", 0)', 'environ["DMLC_NUM_ATTEMPT"] == "0"')
    job = start(
        *("-n", "2", "-s", "1", "--restarts", "2", sys.executable, "-c", code), KVSTORE_MARK="there"
    )
    code, output, errors = ended(job)
    assert code == 0, errors
    for name in ("worker 0@one", "worker 1@two"):
        assert output.count(f"[{name}] sum 3.0 [] there") == 2
    assert "[launcher] the job succeeded after 1 restart" in errors.splitlines()[-1]


def test_a_worker_that_is_killed_is_started_again_on_its_host(start: Start) -> None:
    code, output, errors = ended(
        start("-n", "2", "-s", "1", "--restarts", "1", sys.executable, "-c", STEPS)
    )
    assert code == 0, errors
    assert "[worker 0@one] sum 189.0 0 0" in output
    assert "[worker 1@two] sum 189.0 1 1" in output
    (said,) = [line for line in errors.splitlines() if "starting it again" in line]
    assert said.startswith("[launcher] worker 1 (pid ")
    assert said.endswith(" on two) ended with signal SIGKILL: starting it again (1 of 1 restart)")
    last = "[launcher] the job succeeded; a lost worker was replaced 1 time"
    assert errors.splitlines()[-1].startswith(f"{last}; logs of all processes: ")
    assert "that the job's processes had left running" not in errors


def test_servers_that_lose_their_standbys_with_a_host_get_others_on_hosts_that_are_left(
    start: Start, tmp_path: Path
) -> None:
    code, output, errors = ended(
        start(
            *("-n", "2", "-s", "3", "--standbys", "1", "--restarts", "2"),
            *("--log-dir", str(tmp_path / "logs")),
            *(sys.executable, "-c", LOSE_HOST, str(tmp_path / "logs")),
            hosts="one\ntwo\nthree\n",
        )
    )
    assert code == 0, errors
    assert output.count("sum 189.0") == 2
    said = [line for line in errors.splitlines() if line.startswith("[launcher] ")]
    # Server 1 was on the second host, and the standby of server 2 was on the first.
    for rank, host in [(1, "one"), (2, "two")]:
        started = f"[launcher] starting a standby of server {rank} again on {host} ("
        assert len([line for line in said if line.startswith(started)]) == 1, errors
    assert said[-1] == (
        "[launcher] the job succeeded; a lost server was replaced 1 time "
        "and a standby was started again 2 times"
    )


@pytest.mark.slow(reason="test_launch_local.py has the first failure always")
def test_the_first_failure_gives_its_code_and_its_place(start: Start) -> None:
    job = start(
        *("-n", "2", "-s", "1", sys.executable, "-c", ROUND), KVSTORE_MARK="", KVSTORE_CODE="7"
    )
    code, _, errors = ended(job)
    assert code == 7
    block = errors.partition("this was the first failure")[2]
    assert "process:  worker 1 (pid " in block and " on two)" in block
    assert "exit code 7" in block


def test_a_program_that_is_missing_there_ends_all_with_a_sentence(start: Start) -> None:
    code, _, errors = ended(start("-n", "2", "-s", "1", "no-such-program"))
    assert code == 127
    assert "'no-such-program': there is no such program on the PATH" in errors


def test_a_host_that_lets_nobody_in_is_a_sentence(start: Start) -> None:
    code, output, errors = ended(start("-n", "2", "true", hosts="one\nlocked\n"))
    assert (code, output) == (1, "")
    assert errors.startswith("[launcher] locked asks for a password, or accepts none of your keys")
    assert errors.count("\n") == 1


def test_a_python_that_lacks_packages_is_named_with_its_host(start: Start, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -E -S "$@"\n')  # no site-packages
    bare.chmod(0o755)
    code, output, errors = ended(start("-n", "1", "--python", str(bare), "true", hosts="one\n"))
    assert (code, output) == (1, "")
    assert errors.startswith("[launcher] one: kvstore cannot be imported by ")
    assert errors.endswith("install this package there, or name another Python with --python\n")


def test_a_host_that_is_lost_while_others_are_reached_is_named(start: Start) -> None:
    code, _, errors = ended(start("-n", "2", "true", hosts="mayfly\nslow\n"))
    assert code == 1
    assert "mayfly was lost: the connection was closed" in errors


@pytest.mark.slow(reason="test_launch_local.py has what a worker leaves running")
def test_what_a_worker_leaves_running_is_ended_and_a_variable_may_hold_any_bytes(
    start: Start,
) -> None:
    text = "import os, subprocess, kvstore as mx; kv = mx.create('dist_sync')\n"
    text += "assert os.environb[b'KVSTORE_ODD'] == b'\\xff'\n"
    text += "subprocess.Popen(['sh', '-c', 'while echo chatter; do :; done'])"
    job = start("-n", "1", "-s", "1", sys.executable, "-c", text, KVSTORE_ODD="\udcff")
    code, output, errors = ended(job)
    assert code == 0, errors
    assert "Traceback" not in errors
    assert "that the job's processes had left running" in errors
    assert "chatter" in output


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow(reason="the harder end runs always")),
        signal.SIGKILL,
    ],
)
def test_nothing_stays_when_the_launcher_is_ended(start: Start, number: signal.Signals) -> None:
    job = start("-n", "2", "-s", "1", sys.executable, "-c", STAY)
    try:
        assert job.stdout is not None
        words = [job.stdout.readline().split() for _ in range(2)]
        assert [line[2] for line in words] == ["here", "here"]
        job_id, keys = words[0][3], [Path(line[4]) for line in words]
        assert keys[0] != keys[1]  # each host has its own copy
        assert all(key.exists() for key in keys)
        job.send_signal(number)
    finally:
        code, _, _ = ended(job)
    assert code == (-number if number is signal.SIGKILL else 128 + number)
    until_s = time.monotonic() + LIMIT_S
    while job_members(job_id, ()) or any(key.parent.exists() for key in keys):
        assert time.monotonic() < until_s, job_members(job_id, ())
        time.sleep(0.05)


@pytest.mark.usefixtures("start")
@pytest.mark.slow(reason="test_run.py runs functions, and tests/launchers does so on hosts")
def test_a_function_runs_on_hosts_that_share_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    (tmp_path / "shared").mkdir()
    results = mx.run(
        subprocess.getoutput,
        ("echo $DMLC_JOB_CLUSTER $DMLC_TASK_ID $MARK",),
        workers=2,
        servers=1,
        launcher="ssh",
        options=(f"--hostfile={tmp_path / 'hosts'}",),
        share_dir=tmp_path / "shared",
        env={"MARK": "a b"},
        timeout_s=LIMIT_S,
    )
    assert results == ["ssh 0 a b", "ssh 1 a b"]
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_dry_run_prints_the_commands_and_who_goes_where(start: Start) -> None:
    code, output, errors = ended(start("-n", "2", "-s", "1", "--dry-run", "python", "a b.py"))
    assert code == 0, errors
    assert "# worker 1 on two: python 'a b.py'" in output
    assert output.count("BatchMode=yes") == 2


def test_a_check_tells_of_each_host(start: Start) -> None:
    code, output, errors = ended(start("-n", "2", "--check", "true", hosts="one\nlocked\n"))
    assert code == 1, errors
    good, bad = output.splitlines()
    assert good.startswith("ok  one") and "kvstore " in good
    assert bad.startswith("NO  locked") and "asks for a password" in bad
