"""The launcher ``yarn`` with a stand-in for Hadoop (``standins/yarn.py``), all on this machine.

Nothing here has seen a real Hadoop. The launcher, the agents and the jobs are real.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from common import ROUND, SENTENCE_S, STAY, EveryLauncher, Launcher, python, two_lines

STAND_IN = Path(__file__).with_name("standins") / "yarn.py"
JAR = "hadoop-yarn-applications-distributedshell-3.3.6.jar"
HERE = socket.gethostname()

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for left processes in /proc"),
]


class Hadoop:
    """The stand-in's state, and what a launcher needs to use it."""

    def __init__(self, directory: Path) -> None:
        self.state = directory / "state"
        self.home = directory / "hadoop"
        self.jobs = directory / "jobs"
        self.state.mkdir()
        self.temporary = directory / "tmp"  # where the logs of failed jobs stay
        self.temporary.mkdir()
        (self.home / "bin").mkdir(parents=True)
        for program in ("yarn", "hadoop"):
            path = self.home / "bin" / program
            path.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} {program} "$@"\n')
            path.chmod(0o755)
        self.jar = self.home / "share" / "hadoop" / "yarn" / JAR
        self.jar.parent.mkdir(parents=True)
        self.jar.write_bytes(b"PK")

    @property
    def environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self.home / 'bin'}:{os.environ['PATH']}",
            "TMPDIR": str(self.temporary),
            "YARN_STANDIN": str(self.state),
            "KVSTORE_JOB_DIR": str(self.jobs),
            "HADOOP_ROOT_LOGGER": "WARN,console",  # as some have it; the launcher wants more
        }

    def set_faults(self, **faults: Any) -> None:
        draft = self.state / "faults.draft"
        draft.write_text(json.dumps(faults))
        draft.rename(self.state / "faults.json")

    def processes(self) -> list[int]:
        """Of containers and of masters; one that has just ended is none."""
        marks = (str(self.state / "nm").encode(), f"YARN_STANDIN={self.state}".encode())
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes()
                environment = (path / "environ").read_bytes()
            except OSError:
                continue
            is_master = b"--master" in words and marks[1] in environment
            if is_master or marks[0] in environment:
                found.append(int(path.name))
        return found

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.state / "calls.log").read_text().splitlines()]

    def applications(self) -> list[dict[str, Any]]:
        paths = sorted((self.state / "applications").glob("*.json"))
        return [json.loads(path.read_text()) for path in paths]

    def application(self, state: str) -> dict[str, Any]:
        """The only one, once it is in this state."""
        until_s = time.monotonic() + SENTENCE_S
        while time.monotonic() < until_s:
            found = self.applications()
            if found and found[0]["state"] == state:
                return found[0]
            time.sleep(0.05)
        raise AssertionError(f"not {state}: {self.applications()}")

    def uploaded(self) -> list[Path]:
        home = self.state / "hdfs" / "user" / "ada"
        return list(home.iterdir()) if home.exists() else []

    def kill_all(self) -> None:
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture
def hadoop(tmp_path: Path) -> Iterator[Hadoop]:
    found = Hadoop(tmp_path)
    yield found
    found.kill_all()


@pytest.fixture
def launcher(hadoop: Hadoop) -> Launcher:
    return Launcher(["--launcher", "yarn"], [HERE], hadoop.processes, hadoop.environment)


class TestYarn(EveryLauncher):
    def test_lenet_learns(self, launcher: Launcher) -> None:
        """That it learns says nothing of YARN: a small job on several servers instead."""
        done = launcher.run("-n", "3", "-s", "2", *python(ROUND))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("sum 6.0") == 3


def waiting(launcher: Launcher, *words: str) -> subprocess.Popen[str]:
    return launcher.start("-n", "2", "-s", "1", *words, "true")


def first_roster(job: subprocess.Popen[str]) -> str:
    assert job.stderr is not None
    for line in job.stderr:
        if "waiting for" in line:
            return line
    raise AssertionError("there was no roster")


def test_a_job_leaves_nothing_in_hdfs_nor_here(launcher: Launcher, hadoop: Hadoop) -> None:
    done = launcher.run("-n", "2", "-s", "1", *python(ROUND))
    assert done.returncode == 0, done.stderr
    [application] = hadoop.applications()
    assert (application["state"], application["final"]) == ("FINISHED", "SUCCEEDED")
    assert hadoop.uploaded() == []
    assert list(hadoop.jobs.iterdir()) == []
    assert not (hadoop.state / "nm" / "usercache" / "ada" / "appcache" / application["id"]).exists()
    assert [call[:2] for call in hadoop.calls()] == [
        ["hadoop", "fs"],
        ["yarn", "jar"],
        ["hadoop", "fs"],
    ]


def test_options_arrive_at_yarn(launcher: Launcher, hadoop: Hadoop) -> None:
    own = ["--jobname", "mnist", "--queue", "gpu", "--worker-memory", "2g", "--worker-cores", "2"]
    own += ["--server-memory", "4g", "--server-cores", "1"]
    own += ["--launcher-args=-container_resources yarn.io/gpu=1 -priority 3"]
    done = launcher.run("-n", "1", "-s", "1", *own, *python(ROUND))
    assert done.returncode == 0, done.stderr
    [application] = hadoop.applications()
    options = application["options"]
    assert re.fullmatch(r"mnist-[0-9a-f]{8}", options["appname"][0])
    assert options["queue"] == ["gpu"]
    assert options["container_memory"] == ["4096"], "one size for both: the larger"
    assert options["container_vcores"] == ["2"]
    assert options["num_containers"] == ["2"]
    assert options["container_resources"] == ["yarn.io/gpu=1"]
    assert options["priority"] == ["3"]
    assert options["timeout"] == ["2147483647"]
    assert options["jar"] == [str(hadoop.jar)]


def test_the_key_in_hdfs_is_behind_a_directory_of_the_user_alone(
    launcher: Launcher, hadoop: Hadoop
) -> None:
    hadoop.set_faults(queued=True)
    with waiting(launcher) as job:
        try:
            hadoop.application("ACCEPTED")
            [directory] = hadoop.uploaded()
            mode = directory.stat().st_mode & 0o777
            [script] = directory.glob("*/ExecScript")
            assert '"key"' in script.read_text()
            [local] = hadoop.jobs.glob("*/container.sh")
            assert local.stat().st_mode & 0o777 == 0o600
        finally:
            job.terminate()
            job.wait(SENTENCE_S)
    assert mode == 0o700


def test_a_job_in_the_queue_is_shown_in_yarns_own_words_and_starts_when_its_time_has_come(
    launcher: Launcher, hadoop: Hadoop
) -> None:
    hadoop.set_faults(queued=True)
    with launcher.start("-n", "2", "-s", "1", *python(ROUND)) as job:
        roster = first_roster(job)
        hadoop.set_faults()
        output, errors = job.communicate(timeout=60)
    assert "waiting for server 0, worker 0, worker 1: application_" in roster
    assert "is ACCEPTED: Application is added to the scheduler and is not yet activated." in roster
    assert "Queue's AM resource limit exceeded." in roster and "Partition" not in roster
    assert job.returncode == 0, errors
    assert output.count("sum 3.0") == 2


def test_agents_that_have_come_are_named_while_others_find_no_room(
    launcher: Launcher, hadoop: Hadoop
) -> None:
    hadoop.set_faults(room=2)
    with launcher.start("-n", "2", "-s", "1", *python(ROUND)) as job:
        roster = first_roster(job)
        hadoop.set_faults()
        output, errors = job.communicate(timeout=60)
    assert f"waiting for worker 1 (2 of 3 are there, on {HERE}): application_" in roster
    assert "is RUNNING; 'yarn logs -applicationId application_" in roster
    assert job.returncode == 0, errors
    assert output.count("sum 3.0") == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_in_the_queue_when_the_launcher_is_ended(
    launcher: Launcher, hadoop: Hadoop, number: signal.Signals
) -> None:
    hadoop.set_faults(queued=True)
    with waiting(launcher) as job:
        try:
            first_roster(job)
            job.send_signal(number)
            code = job.wait(SENTENCE_S)
        finally:
            job.kill()
    assert code == (-number if number is signal.SIGKILL else 128 + number)
    hadoop.application("KILLED")
    assert launcher.nothing_runs()
    until_s = time.monotonic() + SENTENCE_S
    while (hadoop.uploaded() or list(hadoop.jobs.iterdir())) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert hadoop.uploaded() == []
    assert list(hadoop.jobs.iterdir()) == []


def test_a_launcher_that_is_ended_in_the_midst_of_the_submission_waits_for_the_id(
    launcher: Launcher, hadoop: Hadoop
) -> None:
    hadoop.set_faults(queued=True, submitting_s=2)
    with waiting(launcher) as job:
        try:
            hadoop.application("ACCEPTED")
            job.send_signal(signal.SIGTERM)
            code = job.wait(SENTENCE_S)
        finally:
            job.kill()
    assert code == 128 + signal.SIGTERM
    hadoop.application("KILLED")
    assert launcher.nothing_runs()


def test_an_application_whose_launcher_is_gone_ends_by_itself(
    launcher: Launcher, hadoop: Hadoop
) -> None:
    """The launcher and its guardian are killed before the id is known."""
    hadoop.set_faults(queued=True, submitting_s=3)
    with waiting(launcher) as job:
        hadoop.application("ACCEPTED")
        job.send_signal(signal.SIGKILL)
        job.wait(SENTENCE_S)
    time.sleep(0.5)
    hadoop.set_faults()
    application = hadoop.application("FINISHED")
    assert application["final"] == "FAILED"
    assert launcher.nothing_runs()
    said = [path.read_text() for path in (hadoop.state / "userlogs").glob("*/*/stdout")]
    assert len(said) == 3
    assert all("cannot reach the launcher on port" in text for text in said)


def test_an_application_that_is_killed_in_the_queue_is_the_reason(
    launcher: Launcher, hadoop: Hadoop
) -> None:
    hadoop.set_faults(queued=True)
    with waiting(launcher) as job:
        first_roster(job)
        identity = hadoop.application("ACCEPTED")["id"]
        subprocess.run(
            ["yarn", "application", "-kill", identity], env=launcher.variables(), check=True
        )
        assert job.stderr is not None
        said = job.stderr.read()
        assert job.wait(SENTENCE_S) == 1
    assert f"[launcher] {identity} is KILLED before all processes had started: Application " in said
    assert "was killed by user ada at 10.0.0.1 ('yarn logs -applicationId" in said


def test_an_application_that_is_killed_while_it_runs_ends_the_job(
    launcher: Launcher, hadoop: Hadoop
) -> None:
    with launcher.start("-n", "2", "-s", "1", *python(STAY)) as job:
        try:
            two_lines(job)
            identity = hadoop.application("RUNNING")["id"]
            began = time.monotonic()
            subprocess.run(
                ["yarn", "application", "-kill", identity], env=launcher.variables(), check=True
            )
            assert job.stderr is not None
            said = job.stderr.read()
            code = job.wait(SENTENCE_S)
        finally:
            job.kill()
    assert code != 0
    assert f"{HERE} was lost" in said
    assert time.monotonic() - began < SENTENCE_S
    assert launcher.nothing_runs()


def test_an_application_master_that_fails_is_the_reason(launcher: Launcher, hadoop: Hadoop) -> None:
    hadoop.set_faults(
        master_fails="Application application_1_0001 failed 2 times due to AM Container for "
        "appattempt_1 exited with  exitCode: 1\nFailing this attempt.Diagnostics: [2026-11-22 "
        "08:00:00.000]Exception from container-launch.\n\tat org.apache.Shell.run(Shell.java:9)\n"
        "For more detailed output, check the application tracking page"
    )
    done = launcher.run("-n", "1", "-s", "1", "true")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert (
        "is FAILED before all processes had started: Application application_1_0001 failed" in line
    )
    assert "Exception from container-launch. For more detailed output" in line
    assert hadoop.uploaded() == []


def test_a_container_that_was_replaced_and_one_too_many_do_no_harm(
    launcher: Launcher, hadoop: Hadoop
) -> None:
    """The master counts on for a replacement, and an old one launches all it is given."""
    hadoop.set_faults(aborted=2, extra=1)
    done = launcher.run("-n", "2", "-s", "1", *python(ROUND))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 3.0") == 2
    assert launcher.nothing_runs()


def test_a_hadoop_without_shell_ids_counts_its_containers(
    launcher: Launcher, hadoop: Hadoop
) -> None:
    hadoop.set_faults(old_hadoop=True)
    done = launcher.run("-n", "2", "-s", "1", *python(ROUND))
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"worker \d", done.stdout)) == ["worker 0", "worker 1"]


def test_a_python_that_the_hosts_have_not_is_a_sentence(launcher: Launcher) -> None:
    began = time.monotonic()
    done = launcher.run("-n", "2", "-s", "1", "--python", "/no/such/python", "true")
    assert time.monotonic() - began < SENTENCE_S
    assert done.returncode == 1
    assert done.stderr == (
        f"[launcher] {HERE}: there is no Python at /no/such/python; --python names another\n"
    )
    assert launcher.nothing_runs()


@pytest.mark.parametrize(
    ("words", "faults", "code", "sentence"),
    [
        (["--jobname", "a b"], {}, 2, "--jobname must begin with a letter or digit"),
        (["--launcher-args=-no_such"], {}, 1, "  org.apache.commons.cli.UnrecognizedOption"),
        (["--queue", "none"], {"unknown_queues": ["none"]}, 1, "root.none is not a leaf queue"),
        ([], {"no_file_system": True}, 1, "  mkdir: Call From here to nn:8020 failed"),
    ],
)
def test_what_yarn_refuses_is_told_in_its_own_words(
    launcher: Launcher,
    hadoop: Hadoop,
    words: list[str],
    faults: dict[str, Any],
    code: int,
    sentence: str,
) -> None:
    hadoop.set_faults(**faults)
    began = time.monotonic()
    done = launcher.run("-n", "2", "-s", "1", *words, "true")
    assert time.monotonic() - began < SENTENCE_S
    assert done.returncode == code
    assert sentence in done.stderr
    assert hadoop.uploaded() == []


def test_a_resource_manager_that_does_not_answer_is_named(
    launcher: Launcher, hadoop: Hadoop
) -> None:
    hadoop.set_faults(unreachable=True)
    with waiting(launcher) as job:
        roster = first_roster(job)
        job.send_signal(signal.SIGINT)
        code = job.wait(SENTENCE_S)
    assert "worker 1: yarn cannot connect to rm/10.0.0.1:8032" in roster
    assert code == 128 + signal.SIGINT
    assert hadoop.applications() == []


def test_without_hadoop_it_says_what_is_missing(hadoop: Hadoop, launcher: Launcher) -> None:
    nowhere = replace(launcher, environment={**hadoop.environment, "PATH": "/usr/bin:/bin"})
    done = nowhere.run("-n", "1", "true")
    assert done.returncode == 1
    assert "there is no program 'yarn' here: start this on a machine with Hadoop's" in done.stderr


def test_the_jar_is_found_by_yarns_own_path_or_named(hadoop: Hadoop, launcher: Launcher) -> None:
    hadoop.jar.unlink()
    missing = launcher.run("-n", "1", "--dry-run", "true", HADOOP_HOME="", HADOOP_YARN_HOME="")
    assert missing.returncode == 1
    assert f"-*.jar in {hadoop.home}, nor on the path of 'yarn classpath': set" in missing.stderr
    named = launcher.run("-n", "1", "--launcher-args=-jar /my.jar", "--dry-run", "true")
    assert "yarn jar /my.jar org.apache.hadoop.yarn" in named.stdout
    elsewhere = hadoop.state / "elsewhere" / JAR
    elsewhere.parent.mkdir()
    shutil.copyfile(STAND_IN, elsewhere)
    found = launcher.run("-n", "1", "--dry-run", "true")
    assert f"yarn jar {elsewhere} org.apache.hadoop.yarn" in found.stdout


def test_a_dry_run_shows_what_would_run_and_no_key(launcher: Launcher, hadoop: Hadoop) -> None:
    done = launcher.run("-n", "2", "-s", "1", "--dry-run", "python", "train.py")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "sh JOBDIR/submit.sh JOBDIR/container.sh"
    assert any("-num_containers 3 -container_memory 1024" in line for line in lines)
    assert any('"port": 0, "key": "KEY", "rank_names": ["YARN_SHELL_ID"]' in line for line in lines)
    assert lines[-3:] == [
        "# agent 1, server 0: python -m kvstore.server",
        "# agent 2, worker 0: python train.py",
        "# agent 3, worker 1: python train.py",
    ]
    assert not (hadoop.state / "calls.log").exists()
    assert not hadoop.jobs.exists()
