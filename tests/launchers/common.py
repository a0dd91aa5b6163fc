"""What every launcher has to do on other hosts, as tests; the launchers' own files inherit them.

A file has a class ``Test...(EveryLauncher)`` and a fixture ``launcher`` that returns a
:class:`Launcher` of its kind.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SENTENCE_S = 15.0  # what ends at once ends within this, says the promise to users
JOB_S = 200.0

ROUND = """
import os, socket, sys
import numpy as np
import kvstore as mx
kv = mx.create("dist_sync")
kv.init("w", np.zeros(3, np.float32))
kv.push("w", np.full(3, kv.rank + 1, np.float32))
print("sum", kv.pull("w")[0], "on", socket.gethostname(), "with", sys.argv[1:], flush=True)
"""
STAY = """
import os, time
import kvstore as mx
kv = mx.create("dist_sync")
print("here", os.environ["PS_JOB_KEY_FILE"], flush=True)
time.sleep(60)
"""
REPEAT = """
import os, signal
import numpy as np
import kvstore as mx
kv = mx.create("dist_sync")
kv.init("w", np.zeros(3, np.float32))
steps = kv.steps(6)
w = kv.pull("w")
for step in steps:
    kv.pushpull("w", np.full(3, step + kv.rank, np.float32), out=w)
    if step == 3 and kv.rank == 1 and kv.node.attempt == 0:
        os.kill(os.getpid(), signal.SIGKILL)
print("began with", steps.first, "ended with", w[0], flush=True)
"""
TRAIN = """
import time
import numpy as np
import kvstore as mx
kv = mx.create("dist_sync")
kv.init("w", np.zeros(3, np.float32))
print("here", flush=True)
for _ in range(800):
    value = kv.pushpull("w", np.ones(3, np.float32))
    time.sleep(0.05)
print("the last sum is", kv.pull("w")[0], flush=True)
"""
FUNCTION = """
import sys
import kvstore

def whoami(name):
    import socket
    import numpy as np
    kv = kvstore.create("dist_sync")
    kv.init("w", np.zeros(2, np.float32))
    kv.push("w", np.ones(2, np.float32))
    return name, kv.rank, float(kv.pull("w")[0]), socket.gethostname()

if __name__ == "__main__":
    _, launcher, *options = sys.argv
    found = kvstore.run(
        whoami, ["ann"], workers=2, servers=1, launcher=launcher, options=options, timeout_s=100
    )
    print(found)
"""
JOINED = "] all have joined: "
_OF_WAITING = re.compile(
    r"\[launcher\] (waiting for |qsub: Your job-array .* has been submitted|srun: job \d+ )"
)
WORDS = ["a b", "it's", '"$HOME"', "two\nlines", "", "-n", "--launcher=local", "*", "!x", "\\"]


@dataclass(frozen=True)
class Launcher:
    """One launcher on the hosts of the tests.

    ``own`` is how it is called; ``hosts`` are the names that prefixes can show, one for each
    host; ``processes`` is what of a job still runs there; ``agent`` is on an agent's command line.
    """

    own: Sequence[str]
    hosts: Collection[str]
    processes: Callable[[], Collection[object]]
    environment: Mapping[str, str] = field(default_factory=dict)
    agent: str = "agent.py"

    def argv(self, *words: str) -> list[str]:
        return [sys.executable, str(ROOT / "tools" / "launch.py"), *self.own, *words]

    def variables(self, **more: str) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(ROOT), **self.environment, **more}

    def run(
        self, *words: str, cwd: Path = ROOT, limit_s: float = JOB_S, **more: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*words),
            cwd=cwd,
            env=self.variables(**more),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def start(self, *words: str, cwd: Path = ROOT, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.argv(*words),
            cwd=cwd,
            env=self.variables(**more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def nothing_runs(self) -> bool:
        """Whether the hosts' processes end within a while."""
        until_s = time.monotonic() + SENTENCE_S
        while self.processes() and time.monotonic() < until_s:
            time.sleep(0.1)
        left = self.processes()
        if left:
            print("still running:", left)
        return not left


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What is on standard error, but for what is said until all have joined, and then of that."""
    lines = done.stderr.splitlines()
    return [line for line in lines if not (_OF_WAITING.match(line) or JOINED in line)]


def scheduler_of(job: subprocess.Popen[str]) -> int:
    """The process id of the scheduler, which runs beside the launcher."""
    children = subprocess.check_output(["pgrep", "-P", str(job.pid)]).split()
    return next(
        pid
        for pid in map(int, children)
        if b"DMLC_ROLE=scheduler" in Path(f"/proc/{pid}/environ").read_bytes()
    )


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def two_lines(job: subprocess.Popen[str]) -> list[str]:
    """What the two workers say when they are there."""
    assert job.stdout is not None and job.stderr is not None
    lines = [job.stdout.readline(), job.stdout.readline()]
    assert all("here" in line for line in lines), job.stderr.read()
    return lines


class EveryLauncher:
    """See the module's docstring."""

    def test_workers_run_on_the_hosts_and_get_their_arguments_untouched(
        self, launcher: Launcher
    ) -> None:
        done = launcher.run("-n", "2", "-s", "1", *python(ROUND), *WORDS)
        assert done.returncode == 0, done.stderr
        found = re.findall(
            r"^\[worker (\d)@(\S+)\] sum 3\.0 on (\S+) with (.*)$", done.stdout, re.M
        )
        assert sorted(rank for rank, _, _, _ in found) == ["0", "1"], done.stdout
        assert {words for _, _, _, words in found} == {str(WORDS)}
        assert {host for _, host, _, _ in found} <= set(launcher.hosts)
        assert said(done) == [], done.stderr + "a job that does well says nothing else of itself"
        [joined] = [line for line in done.stderr.splitlines() if JOINED in line]
        assert joined.startswith("[launcher] all have joined: 2 workers and 1 server on ")
        assert launcher.nothing_runs()

    def test_the_first_failure_is_named_with_its_host_and_its_exit_code_is_ours(
        self, launcher: Launcher
    ) -> None:
        text = "import sys, kvstore as mx; kv = mx.create('dist_sync'); print('last words')\n"
        text += "sys.exit(7 if kv.rank == 1 else 0)"
        began = time.monotonic()
        done = launcher.run("-n", "2", "-s", "1", *python(text))
        assert done.returncode == 7, done.stderr
        assert time.monotonic() - began < SENTENCE_S
        block = done.stderr.partition("this was the first failure")[2]
        assert re.search(r"process:  worker 1 \(pid \d+ on (\S+)\)", block)
        assert "exit code 7" in block
        assert "last words" in block
        assert launcher.nothing_runs()

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    def test_nothing_runs_on_when_the_launcher_is_ended(
        self, launcher: Launcher, number: signal.Signals
    ) -> None:
        with launcher.start("-n", "2", "-s", "1", *python(STAY)) as job:
            try:
                keys = [Path(line.split()[-1]) for line in two_lines(job)]
                began = time.monotonic()
                job.send_signal(number)
                code = job.wait(JOB_S)
            finally:
                job.kill()
        assert code == (-number if number is signal.SIGKILL else 128 + number)
        assert launcher.nothing_runs()
        assert not any(key.parent.exists() for key in keys)
        assert time.monotonic() - began < SENTENCE_S

    def test_a_killed_worker_is_started_again_and_takes_its_place(self, launcher: Launcher) -> None:
        done = launcher.run("-n", "2", "-s", "1", "--restarts", "1", *python(REPEAT))
        assert done.returncode == 0, done.stderr
        found = re.findall(
            r"^\[worker (\d)@\S+\] began with (\d) ended with (\S+)$", done.stdout, re.M
        )
        assert sorted(found) == [("0", "0", "11.0"), ("1", "3", "11.0")], done.stderr
        assert "[launcher] the job succeeded; a lost worker was replaced 1 time" in done.stderr
        assert launcher.nothing_runs()

    def test_a_killed_scheduler_ends_the_job_and_is_named(self, launcher: Launcher) -> None:
        with launcher.start("-n", "2", "-s", "1", *python(TRAIN)) as job:
            try:
                two_lines(job)
                scheduler = scheduler_of(job)
                os.kill(scheduler, signal.SIGKILL)
                output, errors = job.communicate(timeout=JOB_S)
            finally:
                job.kill()
        block = errors.partition("this was the first failure")[2]
        assert f"process:  scheduler (pid {scheduler}" in block, errors
        assert re.search(
            rf"NodeLostError: scheduler \(pid {scheduler} on \S+\) is lost: ", output + errors
        )
        assert "the last sum" not in output
        assert job.returncode == 137
        assert launcher.nothing_runs()

    def test_a_function_runs_on_the_hosts(self, launcher: Launcher, tmp_path: Path) -> None:
        (tmp_path / "call.py").write_text(FUNCTION)
        flag, *words = launcher.own
        assert flag == "--launcher"
        done = subprocess.run(
            [sys.executable, "call.py", *words],
            cwd=tmp_path,
            env=launcher.variables(),
            capture_output=True,
            text=True,
            timeout=JOB_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = ast.literal_eval(done.stdout)
        assert [one[:3] for one in found] == [("ann", 0, 2.0), ("ann", 1, 2.0)]
        assert {one[3] for one in found} <= set(launcher.hosts)
        assert launcher.nothing_runs()

    def test_a_missing_program_is_a_sentence(self, launcher: Launcher) -> None:
        began = time.monotonic()
        done = launcher.run("-n", "2", "-s", "1", "no-such-program")
        assert time.monotonic() - began < SENTENCE_S
        assert done.returncode == 127
        [line] = said(done)
        assert "'no-such-program': there is no such program" in line
        assert launcher.nothing_runs()

    def test_another_version_on_the_hosts_is_a_sentence(
        self, launcher: Launcher, tmp_path: Path
    ) -> None:
        """The hosts' Python finds a version of the package that is none of ours."""
        (tmp_path / "sitecustomize.py").write_text(
            "import sys, types\n"
            "found = sys.modules['pslite.version'] = types.ModuleType('pslite.version')\n"
            "found.__version__ = '0.0.1'\n"
        )
        python_there = tmp_path / "python"
        python_there.write_text(
            f'#!/bin/sh\nexport PYTHONPATH={tmp_path}\nexec {sys.executable} "$@"\n'
        )
        python_there.chmod(0o755)
        began = time.monotonic()
        done = launcher.run("-n", "2", "-s", "1", "--python", str(python_there), "true")
        assert time.monotonic() - began < SENTENCE_S
        assert done.returncode == 1, done.stderr
        [line] = said(done)
        assert "kvstore 0.0.1 is installed, and here it is " in line
        assert launcher.nothing_runs()

    def test_a_check_lists_every_process(self, launcher: Launcher) -> None:
        done = launcher.run("-n", "2", "-s", "1", "--check", "true")
        assert done.returncode == 0, done.stderr
        rows = done.stdout.splitlines()
        assert len(rows) == 3 and all(row.startswith("ok  ") for row in rows), done.stdout
        assert all(any(host in row for host in launcher.hosts) for row in rows)
        assert launcher.nothing_runs()

    def test_no_secret_is_on_a_command_line(self, launcher: Launcher, tmp_path: Path) -> None:
        key = tmp_path / "job.key"
        key.write_text("a-secret-that-nobody-may-see-1234\n")
        key.chmod(0o600)
        text = STAY.replace("60", "1") + "\nimport glob\n"
        text += "for path in glob.glob('/proc/[0-9]*/cmdline'):\n"
        text += "    try: print(open(path).read())\n    except OSError: pass\n"
        done = launcher.run(
            *("-n", "1", "-s", "1", *python(text)),
            PS_JOB_KEY_FILE=str(key),
            KVSTORE_TOKEN="another-secret",
        )
        assert done.returncode == 0, done.stderr
        assert launcher.agent in done.stdout
        assert "a-secret" not in done.stdout
        assert "another-secret" not in done.stdout

    def test_lenet_learns(self, launcher: Launcher) -> None:
        script = "examples/image_classification/train_mnist.py"
        words = ["-n", "2", "-s", "1", "--env", "OMP_NUM_THREADS=1", sys.executable, script]
        done = launcher.run(*words, "--network", "lenet", "--kv-store", "dist_sync")
        assert done.returncode == 0, done.stderr
        accuracy = float(done.stdout.rstrip().rpartition("test accuracy: ")[2])
        assert accuracy >= 0.97
