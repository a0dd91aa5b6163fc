"""What ``--dry-run`` and ``--check`` say of a job on this machine."""

from __future__ import annotations

import importlib.util
import shlex
import socket
import sys
from pathlib import Path

import pytest

from kvstore.launch.cli import main
from kvstore.launch.job.checks import CheckResult, table
from kvstore.launch.options import LAUNCHERS
from kvstore.launch.plan import script_of


def test_a_dry_run_prints_every_process_and_starts_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mark = str(tmp_path / "started")
    code = main(["-n", "2", "-s", "1", "--dry-run", "--env-worker", "A:b c", "touch", mark])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    names = [line[2:] for line in lines if line.startswith("# ")]
    assert names == ["scheduler", "server 0", "worker 0", "worker 1"]
    worker = shlex.split(lines[-1])
    assert worker[-2:] == ["touch", mark]
    assert {"A=b c", "DMLC_ROLE=worker", "DMLC_TASK_ID=1", "DMLC_NUM_SERVER=1"} <= set(worker)
    assert not list(tmp_path.iterdir())


def test_a_check_names_a_program_that_is_missing_and_ends_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["-n", "1", "--check", sys.executable, "-V"]) == 0
    assert "NO" not in capsys.readouterr().out
    assert main(["-n", "1", "--check", "no-such-program"]) == 1
    assert "NO  worker's program     there is no program 'no-such-program'" in (
        capsys.readouterr().out
    )


def test_a_check_tries_the_port_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("DMLC_PS_ROOT_PORT", str(taken.getsockname()[1]))
        assert main(["-n", "1", "--check", "true"]) == 1
    assert "is in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "row"),
    [
        ("PS_VERBOSE", "x", "settings             PS_VERBOSE is 'x'; expected a whole number "),
        ("PS_JOB_KEY_FILE", "nokey", "job key              the job key nokey "),
        (
            "DMLC_INTERFACE",
            "nosuch",
            "servers' address     DMLC_INTERFACE=nosuch: this host does not have such an interface",
        ),
        (
            "DMLC_INTERFACE",
            "nosuch",
            "workers' address     DMLC_INTERFACE=nosuch: this host does not have such an interface",
        ),
    ],
)
def test_a_check_finds_what_processes_could_not_start_with(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    row: str,
) -> None:
    monkeypatch.setenv(name, value)
    assert main(["-n", "1", "--check", sys.executable, "-V"]) == 1
    assert f"NO  {row}" in capsys.readouterr().out


def test_a_check_reads_the_settings_of_each_role(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-n", "1", "--env-server", "PS_SHM:maybe", "--check", sys.executable, "-V"]) == 1
    assert "NO  settings             PS_SHM is 'maybe'; expected 1 or 0" in capsys.readouterr().out


@pytest.mark.parametrize("own", [[], ["--check"]])
@pytest.mark.parametrize(
    ("name", "sentence", "code"),
    [
        ("PS_VERBOSE", "PS_VERBOSE is 'no-such'; expected a whole number ", 2),
        ("PS_JOB_KEY_FILE", "the job key no-such (PS_JOB_KEY_FILE) cannot be read: ", 1),
        ("DMLC_INTERFACE", "DMLC_INTERFACE=no-such: this host does not have such an interface", 1),
    ],
)
def test_no_host_is_asked_when_it_is_known_here_that_the_job_cannot_run(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    own: list[str],
    name: str,
    sentence: str,
    code: int,
) -> None:
    (tmp_path / "hosts").write_text("one\n")
    monkeypatch.setenv(name, "no-such")
    monkeypatch.setattr("kvstore.launch.backends.ssh.SshPlace", None)
    assert main(["-n", "1", "-H", str(tmp_path / "hosts"), *own, "true"]) == code
    said = capsys.readouterr()
    assert said.err.startswith(f"[launcher] {sentence}") and said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_variable_to_pass_on_that_is_not_set_is_an_error(
    capsys: pytest.CaptureFixture[str], launcher: str
) -> None:
    assert main(["-n", "1", "--launcher", launcher, "--env", "NO_SUCH_NAME", "true"]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == (
        "",
        "[launcher] --env NO_SUCH_NAME: the variable is not set here; export it, or "
        "write --env NO_SUCH_NAME=VALUE\n",
    )


def test_what_the_launcher_sets_itself_need_not_be_set_to_be_passed_on() -> None:
    assert main(["-n", "1", "--env", "DMLC_ROLE", "--dry-run", "true"]) == 0


def test_a_table_has_its_findings_in_one_column() -> None:
    text = table([CheckResult("a", "x", True), CheckResult("long", "y", False)])
    assert text == "ok  a     x\nNO  long  y\n"


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("python train.py --epochs 2", "train.py"),
        ("/usr/bin/python3.12 -u -W error -X dev examples/train.py -x", "examples/train.py"),
        ("python -m package.train file.py", ""),
        ("python -c print(1) file.py", ""),
        ("python -", ""),
        ("python", ""),
        ("./train.sh train.py", ""),
        ("pythonic train.py", ""),
    ],
)
def test_the_script_of_a_command_is_the_file_that_python_runs(command: str, script: str) -> None:
    assert script_of(command.split()) == script


def test_a_check_names_a_script_that_is_missing_and_ends_with_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    command = ["-n", "1", "--check", sys.executable, "-u", str(script)]
    assert main(command) == 1
    assert f"NO  worker's script      there is no file {script}\n" in capsys.readouterr().out
    script.touch()
    assert main(command) == 0
    assert f"ok  worker's script      {script}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("launcher", "missing", "shown"),
    [
        (
            "mpi",
            "there is no program 'mpirun' here: install Open MPI",
            "mpirun --bind-to none",
        ),
        ("slurm", "there is no program 'srun' here: start the job where", "srun "),
        ("sge", "there is no program 'qsub' here: start the job on", "qsub -sync y -t 1-3 "),
        ("yarn", "there is no program 'yarn' here: start this on", "sh JOBDIR/"),
        ("ray", "Ray is not installed in ", "ray_driver.py"),
    ],
)
def test_a_dry_run_needs_no_program_of_the_cluster_and_a_check_does(
    launcher: str,
    missing: str,
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("kvstore.launch.cli.missing_packages", lambda: None)
    command = ["-n", "2", "-s", "1", "--launcher", launcher]
    assert main([*command, "--dry-run", "true"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith(f"[launcher] {missing}")
    assert err.endswith(" (what follows is only shown)\n")
    assert shown in out
    assert main([*command, "--check", "true"]) in (1, 2)
    out, err = capsys.readouterr()
    assert (out, err.startswith(f"[launcher] {missing}")) == ("", True)
