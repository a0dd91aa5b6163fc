"""The launcher ``ssh`` over real ssh servers, on two hosts with addresses of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from services.sshd import SshHosts

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
import time
import kvstore as mx
kv = mx.create("dist_sync")
print("here", flush=True)
time.sleep(60)
"""
WITHOUT_SCHEDULER = """
import time
import numpy as np
import kvstore as mx
from pslite.errors import PSError
kv = mx.create("dist_sync")
kv.init("w", np.zeros(2, np.float32))
kv.barrier()
print("here", flush=True)
for n in range(1, 41):
    kv.push("w", np.full(2, n, np.float32))
    assert kv.pull("w").tolist() == [2 * n, 2 * n]
    time.sleep(0.05)
try:
    kv.barrier()
except PSError as error:
    print(f"barrier: {type(error).__name__}: {error}", flush=True)
kv.push("w", np.ones(2, np.float32))
print("last", kv.pull("w")[0], flush=True)
"""


class Launcher:
    """Starts the launcher for the hosts of the tests."""

    def __init__(self, hosts: SshHosts, directory: Path) -> None:
        self.hosts = hosts
        self.hostfile = str(hosts.write_hostfile(directory / "hosts"))

    def argv(self, *own: str, hostfile: str | None = None) -> list[str]:
        return [
            *(sys.executable, str(ROOT / "tools" / "launch.py"), "--launcher", "ssh"),
            *("-H", hostfile or self.hostfile),
            f"--launcher-args={self.hosts.launcher_args}",
            *own,
        ]

    def run(
        self, *own: str, hostfile: str | None = None, cwd: Path = ROOT, limit_s: float = JOB_S
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*own, hostfile=hostfile),
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    @contextmanager
    def staying(self) -> Iterator[subprocess.Popen[str]]:
        """A job whose two workers are here, and stay; it is killed when the block ends."""
        job = subprocess.Popen(
            self.argv("-n", "2", "-s", "1", sys.executable, "-c", STAY),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with job:
            try:
                assert job.stdout is not None
                said = [job.stdout.readline(), job.stdout.readline()]
                assert all("here" in line for line in said), job.stderr and job.stderr.read()
                yield job
            finally:
                job.kill()


@pytest.fixture
def launcher(ssh_hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))  # where the logs of failed jobs stay
    return Launcher(ssh_hosts, tmp_path)


def nothing_runs(hosts: SshHosts) -> bool:
    """Whether the hosts' processes end within a while; ssh's own may take a moment."""
    until_s = time.monotonic() + SENTENCE_S
    while hosts.processes() and time.monotonic() < until_s:
        time.sleep(0.1)
    return not hosts.processes()


def test_workers_run_on_the_hosts_in_turn_and_get_their_arguments_untouched(
    launcher: Launcher,
) -> None:
    words = ["a b", "it's", '"$HOME"', "two\nlines", "", "-n", "--launcher=local", "*", "!x"]
    done = launcher.run("-n", "2", "-s", "1", sys.executable, "-c", ROUND, *words)
    assert done.returncode == 0, done.stderr
    names = launcher.hosts.names
    for rank, (address, name) in enumerate(zip(launcher.hosts.addresses, names, strict=True)):
        assert f"[worker {rank}@{address}] sum 3.0 on {name} with {words}" in done.stdout
    assert nothing_runs(launcher.hosts)


def test_the_interface_is_the_users_choice(launcher: Launcher) -> None:
    environment = {"DMLC_INTERFACE": launcher.hosts.interface, "PS_VERBOSE": "1"}
    done = subprocess.run(
        launcher.argv("-n", "2", "-s", "1", sys.executable, "-c", ROUND),
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    assert launcher.hosts.launcher_address in done.stderr, done.stderr


def test_slots_put_two_workers_on_a_host(launcher: Launcher, tmp_path: Path) -> None:
    hosts = tmp_path / "slots"
    hosts.write_text(f"{launcher.hosts.addresses[0]} slots=2  # both\n")
    done = launcher.run("-n", "2", "-s", "1", sys.executable, "-c", ROUND, hostfile=str(hosts))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"sum 3.0 on {launcher.hosts.names[0]}") == 2


def test_the_directory_is_copied_to_the_hosts(launcher: Launcher, tmp_path: Path) -> None:
    source, copy = tmp_path / "source dir", tmp_path / "copy" / "of it"
    source.mkdir()
    (source / "train.py").write_text(ROUND)
    own = ["-n", "2", "-s", "1", "--sync-dst-dir", str(copy), "--env", f"PYTHONPATH={ROOT}"]
    done = launcher.run(*own, sys.executable, "train.py", cwd=source)
    assert done.returncode == 0, done.stderr
    assert (copy / "train.py").read_text() == ROUND
    assert done.stdout.count("sum 3.0") == 2
    assert f"copying {source} to {launcher.hosts.addresses[1]}:{copy}" in done.stderr


def test_the_first_failure_is_named_with_its_host_and_its_exit_code_is_ours(
    launcher: Launcher,
) -> None:
    text = "import os, sys, kvstore as mx; kv = mx.create('dist_sync'); print('last words')\n"
    text += "sys.exit(7 if kv.rank == 1 else 0)"
    done = launcher.run("-n", "2", "-s", "1", sys.executable, "-c", text)
    assert done.returncode == 7, done.stderr
    block = done.stderr.partition("this was the first failure")[2]
    assert "process:  worker 1 (pid " in block
    assert f" on {launcher.hosts.addresses[1]})" in block
    assert "exit code 7" in block
    assert "last words" in block
    assert nothing_runs(launcher.hosts)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_runs_on_when_the_launcher_is_ended(
    launcher: Launcher, number: signal.Signals
) -> None:
    with launcher.staying() as job:
        began = time.monotonic()
        job.send_signal(number)
        code = job.wait(JOB_S)
    assert code == (-number if number is signal.SIGKILL else 128 + number)
    assert time.monotonic() - began < SENTENCE_S
    assert nothing_runs(launcher.hosts)


def test_a_host_that_is_lost_is_named(launcher: Launcher) -> None:
    with launcher.staying() as job:
        reach = next(
            pid
            for pid in subprocess.check_output(["pgrep", "-P", str(job.pid), "ssh"]).split()
            if launcher.hosts.addresses[1].encode()
            in Path(f"/proc/{int(pid)}/cmdline").read_bytes()
        )
        os.kill(int(reach), signal.SIGKILL)
        assert job.stderr is not None
        said = job.stderr.read()
        assert job.wait(JOB_S) != 0
    assert f"{launcher.hosts.addresses[1]} was lost: the connection was closed" in said
    assert nothing_runs(launcher.hosts)


def test_the_job_goes_on_when_the_scheduler_is_killed(launcher: Launcher) -> None:
    job = subprocess.Popen(
        launcher.argv("-n", "2", "-s", "2", sys.executable, "-c", WITHOUT_SCHEDULER),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with job:
        try:
            assert job.stdout is not None and job.stderr is not None
            assert all("here" in job.stdout.readline() for _ in range(2))
            scheduler = next(
                int(pid)
                for pid in subprocess.check_output(["pgrep", "-P", str(job.pid)]).split()
                if b"DMLC_ROLE=scheduler" in Path(f"/proc/{int(pid)}/environ").read_bytes()
            )
            os.kill(scheduler, signal.SIGKILL)
            killed_at = time.monotonic()
            line = next(line for line in job.stderr if line.startswith("[launcher] "))
            assert time.monotonic() - killed_at < 1
            output, errors = job.communicate(timeout=JOB_S)
        finally:
            job.kill()
    assert line.startswith(f"[launcher] the scheduler was killed by SIGKILL (pid {scheduler}")
    assert "push and pull go on; barriers, init and joins no longer work" in line
    assert job.returncode == 137, errors
    assert output.count(f"barrier: NodeLostError: scheduler (pid {scheduler} on ") == 2, output
    assert output.count("] last 2.0") == 2
    block = errors.partition("this was the first failure")[2]
    assert f"process:  scheduler (pid {scheduler}" in block
    assert "all others ended with exit code 0" in block
    assert nothing_runs(launcher.hosts)


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("asks_password", "asks for a password"),
        ("unknown_key", "Host key verification failed"),
        ("unknown_name", "Could not resolve hostname"),
        ("unreachable", "{host}"),
    ],
)
def test_a_host_that_cannot_be_reached_is_a_sentence(
    launcher: Launcher, tmp_path: Path, host: str, sentence: str
) -> None:
    name = getattr(launcher.hosts, host)
    hosts = tmp_path / "wrong"
    hosts.write_text(f"{launcher.hosts.addresses[0]}\n{name}\n")
    began = time.monotonic()
    done = launcher.run("-n", "2", "true", hostfile=str(hosts))
    assert time.monotonic() - began < SENTENCE_S
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("[launcher] ")
    assert sentence.format(host=name) in line
    assert nothing_runs(launcher.hosts)


@pytest.mark.parametrize(
    ("own", "code", "sentence"),
    [
        (["-n", "3", "true"], 2, "has 2 slots on 2 hosts, and 3 workers were asked for"),
        (
            ["-n", "2", "--python", "/no/python", "true"],
            1,
            "has no /no/python, or you may not run it",
        ),
        (["-n", "2", "no-such-program"], 127, "'no-such-program': there is no such program"),
        (["-n", "2", "--sync-dst-dir", "/proc/no", "true"], 1, "/proc/no"),
    ],
)
def test_what_cannot_start_is_a_sentence(
    launcher: Launcher, tmp_path: Path, own: list[str], code: int, sentence: str
) -> None:
    began = time.monotonic()
    done = launcher.run(*own, cwd=tmp_path)
    assert time.monotonic() - began < SENTENCE_S
    assert (done.returncode, sentence in done.stderr) == (code, True), done.stderr
    assert nothing_runs(launcher.hosts)


def test_no_secret_is_on_a_command_line(launcher: Launcher, tmp_path: Path) -> None:
    key = tmp_path / "job.key"
    key.write_text("a-secret-that-nobody-may-see-1234\n")
    key.chmod(0o600)
    text = STAY.replace("60", "1") + "\nimport glob\n"
    text += "for path in glob.glob('/proc/[0-9]*/cmdline'):\n    try: print(open(path).read())\n"
    text += "    except OSError: pass\n"
    environment = {**os.environ, "PS_JOB_KEY_FILE": str(key), "KVSTORE_TOKEN": "another-secret"}
    done = subprocess.run(
        launcher.argv("-n", "1", "-s", "1", sys.executable, "-c", text),
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=JOB_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "sshd" in done.stdout
    assert "a-secret" not in done.stdout
    assert "another-secret" not in done.stdout


def test_a_check_lists_every_host(launcher: Launcher, tmp_path: Path) -> None:
    hosts = tmp_path / "some"
    hosts.write_text(f"{launcher.hosts.addresses[0]}\n{launcher.hosts.asks_password}\n")
    done = launcher.run("-n", "2", "--check", "true", hostfile=str(hosts))
    assert done.returncode == 1, done.stderr
    good, bad = done.stdout.splitlines()
    assert good.startswith("ok  ") and launcher.hosts.names[0] in good
    assert bad.startswith("NO  ") and "asks for a password" in bad


def test_lenet_learns_by_the_command_of_the_guides(launcher: Launcher, tmp_path: Path) -> None:
    """As it stands there, but for the tests' own configuration of ssh."""
    here = tmp_path / "mxnet" / "examples" / "image_classification"
    shutil.copytree(ROOT / "examples" / "image_classification", here)
    (tmp_path / "mxnet" / "tools").symlink_to(ROOT / "tools")
    launcher.hosts.write_hostfile(here / "hosts")
    line = f"../../tools/launch.py -n 2 --launcher ssh -H hosts --sync-dst-dir {tmp_path}/some/dir "
    line += f"--launcher-args='{launcher.hosts.launcher_args}' "
    line += "python train_mnist.py --network lenet --kv-store dist_sync"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"export DMLC_INTERFACE={launcher.hosts.interface}; {line}"],
        cwd=here,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.rstrip().rpartition("test accuracy: ")[2])
    assert accuracy >= 0.97
