"""The launcher ``ssh`` over real ssh servers, on two hosts with addresses of their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from common import (
    JOB_S,
    ROOT,
    ROUND,
    SENTENCE_S,
    STAY,
    EveryLauncher,
    Launcher,
    python,
    two_lines,
)
from services.sshd import SshHosts


def through_ssh(hosts: SshHosts, hostfile: Path) -> list[str]:
    arguments = f"--launcher-args={hosts.launcher_args}"
    return ["--launcher", "ssh", "-H", str(hostfile), arguments]


@pytest.fixture
def launcher(ssh_hosts: SshHosts, tmp_path: Path) -> Launcher:
    (tmp_path / "tmp").mkdir()
    return Launcher(
        own=through_ssh(ssh_hosts, ssh_hosts.write_hostfile(tmp_path / "hosts")),
        hosts=[*ssh_hosts.addresses, *ssh_hosts.names],
        processes=ssh_hosts.processes,
        environment={"TMPDIR": str(tmp_path / "tmp")},  # where the logs of failed jobs stay
        agent="sshd",
    )


def with_hosts(launcher: Launcher, hosts: SshHosts, path: Path, *lines: str) -> Launcher:
    return replace(launcher, own=through_ssh(hosts, hosts.write_hostfile(path, *lines)))


class TestSsh(EveryLauncher):
    def test_a_check_lists_every_process(self, launcher: Launcher) -> None:
        """A row for each host: one agent serves all of its processes."""
        done = launcher.run("-n", "2", "-s", "1", "--check", "true")
        assert done.returncode == 0, done.stderr
        rows = done.stdout.splitlines()
        assert len(rows) == 2 and all(row.startswith("ok  ") for row in rows)
        assert launcher.nothing_runs()

    def test_lenet_learns(self, ssh_hosts: SshHosts, tmp_path: Path) -> None:  # type: ignore[override]
        """By the command of the guides as it stands, but for the tests' own configuration."""
        here = tmp_path / "mxnet" / "examples" / "image_classification"
        shutil.copytree(ROOT / "examples" / "image_classification", here)
        (tmp_path / "mxnet" / "tools").symlink_to(ROOT / "tools")
        ssh_hosts.write_hostfile(here / "hosts")
        line = "../../tools/launch.py -n 2 --launcher ssh -H hosts "
        line += f"--launcher-args='{ssh_hosts.launcher_args}' --sync-dst-dir {tmp_path}/some/dir "
        line += "python train_mnist.py --network lenet --kv-store dist_sync"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", f"export DMLC_INTERFACE={ssh_hosts.interface}; {line}"],
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


def test_each_host_gets_a_worker(launcher: Launcher, ssh_hosts: SshHosts) -> None:
    done = launcher.run("-n", "2", "-s", "1", *python(ROUND))
    assert done.returncode == 0, done.stderr
    for rank, (address, name) in enumerate(zip(ssh_hosts.addresses, ssh_hosts.names, strict=True)):
        assert f"[worker {rank}@{address}] sum 3.0 on {name}" in done.stdout


def test_the_interface_is_the_users_choice(launcher: Launcher, ssh_hosts: SshHosts) -> None:
    environment = {"DMLC_INTERFACE": ssh_hosts.interface, "PS_VERBOSE": "1"}
    done = launcher.run("-n", "2", "-s", "1", *python(ROUND), **environment)
    assert done.returncode == 0, done.stderr
    assert ssh_hosts.launcher_address in done.stderr, done.stderr


def test_a_port_that_is_in_use_is_a_sentence(launcher: Launcher) -> None:
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = other.getsockname()[1]
        began = time.monotonic()
        done = launcher.run("-n", "2", "true", DMLC_PS_ROOT_PORT=str(port))
    assert time.monotonic() - began < SENTENCE_S
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert f"port {port} on 0.0.0.0 is in use by process {os.getpid()}" in line


def test_slots_put_two_workers_on_a_host(
    launcher: Launcher, ssh_hosts: SshHosts, tmp_path: Path
) -> None:
    line = f"{ssh_hosts.addresses[0]} slots=2  # both"
    one = with_hosts(launcher, ssh_hosts, tmp_path / "slots", line)
    done = one.run("-n", "2", "-s", "1", *python(ROUND))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"sum 3.0 on {ssh_hosts.names[0]}") == 2


def test_the_directory_is_copied_to_the_hosts(
    launcher: Launcher, ssh_hosts: SshHosts, tmp_path: Path
) -> None:
    source, copy = tmp_path / "source dir", tmp_path / "copy" / "of it"
    source.mkdir()
    (source / "train.py").write_text(ROUND)
    own = ["-n", "2", "-s", "1", "--sync-dst-dir", str(copy), "--env", f"PYTHONPATH={ROOT}"]
    done = launcher.run(*own, sys.executable, "train.py", cwd=source)
    assert done.returncode == 0, done.stderr
    assert (copy / "train.py").read_text() == ROUND
    assert done.stdout.count("sum 3.0") == 2
    assert f"copying {source} to {ssh_hosts.addresses[1]}:{copy}" in done.stderr


def test_a_host_that_is_lost_is_named(launcher: Launcher, ssh_hosts: SshHosts) -> None:
    with launcher.start("-n", "2", "-s", "1", *python(STAY)) as job:
        try:
            two_lines(job)
            reach = next(
                pid
                for pid in subprocess.check_output(["pgrep", "-P", str(job.pid), "ssh"]).split()
                if ssh_hosts.addresses[1].encode() in Path(f"/proc/{int(pid)}/cmdline").read_bytes()
            )
            os.kill(int(reach), signal.SIGKILL)
            assert job.stderr is not None
            said = job.stderr.read()
            assert job.wait(JOB_S) != 0
        finally:
            job.kill()
    assert f"{ssh_hosts.addresses[1]} was lost: the connection was closed" in said
    assert launcher.nothing_runs()


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
    launcher: Launcher, ssh_hosts: SshHosts, tmp_path: Path, host: str, sentence: str
) -> None:
    name = getattr(ssh_hosts, host)
    wrong = with_hosts(launcher, ssh_hosts, tmp_path / "wrong", ssh_hosts.addresses[0], name)
    began = time.monotonic()
    done = wrong.run("-n", "2", "true")
    assert time.monotonic() - began < SENTENCE_S
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("[launcher] ")
    assert sentence.format(host=name) in line
    assert launcher.nothing_runs()


@pytest.mark.parametrize(
    ("own", "code", "sentence"),
    [
        (["-n", "3", "true"], 2, "has 2 slots on 2 hosts"),
        (
            ["-n", "2", "--python", "/no/python", "true"],
            1,
            "has no /no/python, or you may not run it",
        ),
        (["-n", "2", "-H", "none", "true"], 2, "cannot read the hosts file 'none'"),
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
    assert launcher.nothing_runs()


def test_a_check_names_the_host_that_cannot_be_reached(
    launcher: Launcher, ssh_hosts: SshHosts, tmp_path: Path
) -> None:
    lines = [ssh_hosts.addresses[0], ssh_hosts.asks_password]
    some = with_hosts(launcher, ssh_hosts, tmp_path / "some", *lines)
    done = some.run("-n", "2", "--check", "true")
    assert done.returncode == 1, done.stderr
    good, bad = done.stdout.splitlines()
    assert good.startswith("ok  ") and ssh_hosts.names[0] in good
    assert bad.startswith("NO  ") and "asks for a password" in bad
