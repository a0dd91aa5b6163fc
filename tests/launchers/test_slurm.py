"""The launcher ``slurm`` with a real slurmctld, and two hosts with a slurmd each."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    said,
    two_lines,
)
from services.daemon import wait_for
from services.slurm import Slurm

SCRIPT_S = 100.0
SAY = """
import os, sys, socket
import kvstore as mx
kv = mx.create("dist_sync")
found = [os.environ.get(name) for name in sys.argv[1:]]
print("rank", kv.rank, "on", socket.gethostname(), "has", found)
"""


@pytest.fixture
def launcher(slurm: Slurm, tmp_path: Path) -> Iterator[Launcher]:
    jobs = tmp_path / "jobs"
    yield Launcher(
        own=["--launcher", "slurm"],
        hosts=slurm.nodes,
        processes=lambda: [*slurm.processes(), *slurm.jobs()],
        environment={**slurm.environment, "KVSTORE_JOB_DIR": str(jobs)},
    )
    slurm.run("scancel", "--quiet", "--user=root")
    if jobs.exists():
        wait_for("end of the job's directory", lambda: not list(jobs.iterdir()), SENTENCE_S)


class TestSlurm(EveryLauncher):
    pass


@contextmanager
def all_hosts_taken(slurm: Slurm) -> Iterator[str]:
    """By a job of somebody, whose number this is."""
    words = ["--parsable", "--exclusive", "--nodes=2", "--output=/dev/null"]
    job_id = slurm.run("sbatch", *words, "--wrap", "sleep 300").strip()
    state = ["squeue", "--noheader", "--format=%T", f"--jobs={job_id}"]
    wait_for("running job", lambda: slurm.run(*state).strip() == "RUNNING")
    try:
        yield job_id
    finally:
        slurm.run("scancel", "--quiet", job_id)


def waiting_line(job: subprocess.Popen[str]) -> str:
    """The first roster of a job that waits."""
    assert job.stderr is not None
    for line in job.stderr:
        if "waiting for" in line and "queued" not in line:
            return line
    raise AssertionError("the launcher has ended")


def processes_of(job: subprocess.Popen[str], words: str) -> list[int]:
    """This machine's processes below ``job`` with ``words`` in their command."""
    parents, found = {job.pid}, []
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,args=", "--sort=pid"], capture_output=True, text=True, check=True
    )
    for line in listed.stdout.splitlines():
        pid, parent, command = line.split(None, 2)
        if int(parent) in parents:
            parents.add(int(pid))
            if words in command:
                found.append(int(pid))
    return found


class TestQueue:
    def test_the_roster_says_what_slurm_waits_for_and_then_the_job_runs(
        self, launcher: Launcher, slurm: Slurm
    ) -> None:
        with (
            all_hosts_taken(slurm) as taken,
            launcher.start("-n", "2", "-s", "1", *python(ROUND)) as job,
        ):
            try:
                line = waiting_line(job)
                assert "waiting for server 0, worker 0, worker 1: Slurm's job " in line
                assert " is PENDING (Resources)" in line
                slurm.run("scancel", taken)
                output, _ = job.communicate(timeout=JOB_S)
            finally:
                job.kill()
        assert job.returncode == 0
        assert output.count("sum 3.0") == 2

    @pytest.mark.parametrize("options", [[], ["--worker-cores", "2"]], ids=["one", "two"])
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
    def test_a_launcher_that_is_ended_leaves_nothing_in_the_queue(
        self, launcher: Launcher, slurm: Slurm, number: signal.Signals, options: list[str]
    ) -> None:
        with all_hosts_taken(slurm) as taken:
            with launcher.start("-n", "2", "-s", "1", *options, *python(STAY)) as job:
                try:
                    waiting_line(job)
                    assert len(slurm.jobs()) > 1
                    began = time.monotonic()
                    job.send_signal(number)
                    code = job.wait(SENTENCE_S)
                finally:
                    job.kill()
            wait_for("empty queue", lambda: slurm.jobs() == [taken], SENTENCE_S)
        assert code == (-number if number is signal.SIGKILL else 128 + number)
        assert time.monotonic() - began < SENTENCE_S

    def test_a_job_that_is_cancelled_while_it_waits_is_a_sentence(
        self, launcher: Launcher, slurm: Slurm
    ) -> None:
        with all_hosts_taken(slurm), launcher.start("-n", "2", "-s", "1", "true") as job:
            try:
                found = re.search(r"Slurm's job (\d+)", waiting_line(job))
                assert found is not None
                slurm.run("scancel", found[1])
                _, output = job.communicate(timeout=SENTENCE_S)
            finally:
                job.kill()
        assert job.returncode == 1
        assert output.splitlines()[-1] == (
            "[launcher] Slurm does not run the job: it was cancelled (scancel) before all "
            "processes had started"
        )

    @pytest.mark.parametrize("more", [[], ["--server-cores", "99"]], ids=["two", "one"])
    def test_the_roster_says_that_no_node_can_give_what_was_asked_for(
        self, launcher: Launcher, more: list[str]
    ) -> None:
        """Slurm takes a job that can never run, and lets it wait (EnforcePartLimits=NO)."""
        words = ["-n", "2", "-s", "1", "--worker-cores", "99", *more]
        with launcher.start(*words, "true") as job:
            try:
                line = waiting_line(job)
                job.send_signal(signal.SIGINT)
                code = job.wait(SENTENCE_S)
            finally:
                job.kill()
        assert "no node of its partition satisfies the request" in line
        assert code == 130
        assert launcher.nothing_runs()


class TestEnds:
    def test_a_job_that_is_cancelled_while_it_runs_fails_by_name(
        self, launcher: Launcher, slurm: Slurm
    ) -> None:
        with launcher.start("-n", "2", "-s", "1", *python(STAY)) as job:
            try:
                two_lines(job)
                began = time.monotonic()
                slurm.run("scancel", *slurm.jobs())
                _, output = job.communicate(timeout=SENTENCE_S)
            finally:
                job.kill()
        assert job.returncode != 0
        assert "the agent got SIGTERM" in output
        assert "this was the first failure" in output
        assert time.monotonic() - began < SENTENCE_S
        assert launcher.nothing_runs()

    def test_agents_give_the_allocation_back_when_all_is_lost_on_the_launchers_machine(
        self, launcher: Launcher
    ) -> None:
        with launcher.start("-n", "2", "-s", "1", *python(STAY)) as job:
            try:
                two_lines(job)
                sruns = processes_of(job, "srun")
                guardians = processes_of(job, "guardian.py")
                assert len(sruns) == 2, "one of them clears up after the other"
                for pid in sruns:
                    os.kill(pid, signal.SIGSTOP)
                for pid in [*guardians, *sruns, job.pid]:
                    os.kill(pid, signal.SIGKILL)
            finally:
                job.kill()
        assert launcher.nothing_runs()
        for directory in Path(launcher.environment["KVSTORE_JOB_DIR"]).iterdir():
            for path in directory.iterdir():
                path.unlink()
            directory.rmdir()

    def test_an_agent_that_slurm_loses_is_named(self, launcher: Launcher, slurm: Slurm) -> None:
        with launcher.start("-n", "2", "-s", "1", *python(STAY)) as job:
            try:
                two_lines(job)
                began = time.monotonic()
                [agent, *_] = [
                    pid for pid, words in slurm.processes().items() if "agent.py" in words
                ]
                os.kill(agent, signal.SIGKILL)
                _, output = job.communicate(timeout=SENTENCE_S)
            finally:
                job.kill()
        assert job.returncode != 0
        assert re.search("kv-node. was lost", output)
        assert time.monotonic() - began < SENTENCE_S
        assert launcher.nothing_runs()


class TestOptions:
    def test_what_is_asked_for_arrives_at_slurm(self, launcher: Launcher, slurm: Slurm) -> None:
        own = ["--jobname", "my-job", "--queue", slurm.partition, "--worker-cores", "2"]
        own += ["--worker-memory", "300m", "--server-memory", "200m", "--worker-gpus", "1"]
        names = ["SLURM_CPUS_PER_TASK", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"]
        with launcher.start("-n", "2", "-s", "1", *own, *python(SAY + "\n" + STAY), *names) as job:
            try:
                assert job.stdout is not None
                found = [job.stdout.readline() for _ in range(4)]
                queued = slurm.run("squeue", "--noheader", "--format=%j %P %C %m")
                job.send_signal(signal.SIGINT)
                job.communicate(timeout=SENTENCE_S)
            finally:
                job.kill()
        has = [line.partition(" has ")[2].strip() for line in found if " has " in line]
        assert sorted(has) == ["['2', '2', '0']", "['2', '2', '1']"]
        server, worker = f"my-job {slurm.partition} 1 200M", f"my-job {slurm.partition} 4 150M"
        assert queued.splitlines() == [server, worker], "of the memory, the share of a processor"

    def test_further_words_for_srun_are_passed_on(self, launcher: Launcher, slurm: Slurm) -> None:
        words = f"--launcher-args=--nodelist={slurm.nodes[1]} --comment 'a b'"
        done = launcher.run("-n", "2", "-s", "1", words, *python(ROUND))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f"sum 3.0 on {slurm.nodes[1]}") == 2

    def test_servers_without_gpus_are_on_another_host_than_workers_with_them(
        self, launcher: Launcher
    ) -> None:
        done = launcher.run("-n", "2", "-s", "1", "--worker-gpus", "1", "--check", "true")
        assert done.returncode == 0, done.stderr
        server, *workers = (line.split("@")[1].split()[0] for line in done.stdout.splitlines())
        assert server not in workers

    @pytest.mark.parametrize(
        ("words", "sentence"),
        [
            (["--queue", "nowhere"], "there is no such partition"),
            (["--worker-gpus", "9"], "no node of the partition satisfies the request"),
            (["--launcher-args=--no-such-option"], "unrecognized option '--no-such-option'"),
            (["--python", "/no/python"], "the agent could not start"),
        ],
    )
    def test_what_slurm_refuses_is_a_sentence(
        self, launcher: Launcher, words: list[str], sentence: str
    ) -> None:
        began = time.monotonic()
        done = launcher.run("-n", "2", "-s", "1", *words, "true")
        assert time.monotonic() - began < SENTENCE_S
        assert done.returncode == 1
        assert sentence in done.stderr
        assert launcher.nothing_runs()

    def test_without_srun_it_says_where_to_start(self, launcher: Launcher, tmp_path: Path) -> None:
        done = launcher.run("-n", "2", "true", PATH=str(tmp_path))
        assert done.returncode == 1
        assert "there is no program 'srun' here: start the job where" in done.stderr

    def test_a_directory_that_is_not_shared_is_a_sentence(
        self, launcher: Launcher, request: pytest.FixtureRequest
    ) -> None:
        own = Path(tempfile.mkdtemp(dir="/dev/shm"))  # each host has another /dev/shm
        request.addfinalizer(own.rmdir)
        began = time.monotonic()
        done = launcher.run("-n", "2", "-s", "1", "true", KVSTORE_JOB_DIR=str(own))
        assert time.monotonic() - began < SENTENCE_S
        assert done.returncode == 1
        [line] = said(done)
        assert "a host does not find /dev/shm/" in line
        assert "set KVSTORE_JOB_DIR to a directory that all hosts share" in line
        assert launcher.nothing_runs()

    def test_a_dry_run_prints_the_command(self, launcher: Launcher, slurm: Slurm) -> None:
        done = launcher.run("-n", "2", "-s", "1", "--worker-gpus", "1", "--dry-run", "true")
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("srun --job-name=kvstore ")
        assert " : " in done.stdout
        assert slurm.jobs() == []


class TestScript:
    """The launcher in a script of sbatch's, as the guide has it."""

    def script(self, slurm: Slurm, launcher: Launcher, path: Path, *lines: str) -> str:
        """What it printed. The lines name the launcher ``kvstore-launch``."""
        output = path / "output"
        start = shlex.join([sys.executable, str(ROOT / "tools" / "launch.py")])
        variables = {**launcher.environment, "PYTHONPATH": str(ROOT)}
        text = ["#!/bin/bash", f"#SBATCH --output={output}", f"#SBATCH --chdir={ROOT}"]
        text += [line for line in lines if line.startswith("#SBATCH")]
        text += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        text += [f"export PATH={Path(sys.executable).parent}:$PATH"]
        text += ["kvstore-launch() { " + start + ' "$@"; }']
        text += [line for line in lines if not line.startswith("#SBATCH")]
        (path / "job.sh").write_text("\n".join([*text, "echo the end: $?", ""]))
        (path / "train.py").write_text(ROUND)
        (path / "say.py").write_text(SAY)
        (path / "stay.py").write_text(STAY)
        slurm.run("sbatch", str(path / "job.sh"))
        wait_for("end of the script", lambda: not launcher.processes(), SCRIPT_S)
        return output.read_text()

    def test_four_workers_run_on_the_nodes_of_the_script(
        self, slurm: Slurm, launcher: Launcher, tmp_path: Path
    ) -> None:
        output = self.script(
            slurm,
            launcher,
            tmp_path,
            "#SBATCH --nodes=2",
            "#SBATCH --ntasks-per-node=2 --cpus-per-task=2",
            f"kvstore-launch --launcher slurm -n 4 -s 2 python {tmp_path}/train.py",
        )
        found = re.findall(r"^\[worker (\d)@(\S+)\] sum 10\.0 on (\S+) with", output, re.M)
        assert sorted(rank for rank, _, _ in found) == list("0123"), output
        hosts = [host for _, _, host in sorted(found)]
        assert sorted(hosts) == sorted(2 * slurm.nodes), "each node has as many workers"
        assert output.endswith("the end: 0\n")

    def test_more_processes_than_processors_share_them(
        self, slurm: Slurm, launcher: Launcher, tmp_path: Path
    ) -> None:
        command = f"kvstore-launch --launcher slurm -n 3 -s 2 python {tmp_path}/train.py"
        output = self.script(slurm, launcher, tmp_path, "#SBATCH --ntasks=1", command)
        assert output.count("sum 6.0") == 3, output

    def test_each_worker_gets_gpus_of_its_own(
        self, slurm: Slurm, launcher: Launcher, tmp_path: Path
    ) -> None:
        command = "kvstore-launch --launcher slurm -n 4 -s 1 --worker-gpus 1 python "
        command += f"{tmp_path}/say.py CUDA_VISIBLE_DEVICES"
        lines = ["#SBATCH --nodes=2 --ntasks=4 --gpus-per-node=2", command]
        output = self.script(slurm, launcher, tmp_path, *lines)
        found = sorted(re.findall(r"on (\S+) has \['(\d)'\]", output))
        assert found == [(host, gpu) for host in slurm.nodes for gpu in "01"], output

    def test_of_two_components_the_first_has_the_servers(
        self, slurm: Slurm, launcher: Launcher, tmp_path: Path
    ) -> None:
        output = self.script(
            slurm,
            launcher,
            tmp_path,
            "#SBATCH --ntasks=1",
            "#SBATCH hetjob",
            "#SBATCH --ntasks=2 --gpus-per-task=1",
            "kvstore-launch --launcher slurm -n 2 -s 1 --check true",
            f"kvstore-launch --launcher slurm -n 2 -s 1 python {tmp_path}/say.py "
            "CUDA_VISIBLE_DEVICES",
        )
        found = dict(re.findall(r"^ok +(\w+ \d)@(\S+)", output, re.M))
        assert found["worker 0"] == found["worker 1"] != found["server 0"], output
        assert sorted(re.findall(r"has \['(\d)'\]", output)) == ["0", "1"], output

    def test_a_failure_is_the_scripts(
        self, slurm: Slurm, launcher: Launcher, tmp_path: Path
    ) -> None:
        command = "kvstore-launch --launcher slurm -n 2 -s 1 python -c 'import sys; sys.exit(7)'"
        output = self.script(slurm, launcher, tmp_path, "#SBATCH --ntasks=3", command)
        assert "exit code 7" in output
        assert output.endswith("the end: 7\n")

    @pytest.mark.parametrize("number", ["INT", "KILL"])
    def test_a_launcher_that_is_ended_leaves_the_allocation_to_the_script(
        self, slurm: Slurm, launcher: Launcher, tmp_path: Path, number: str
    ) -> None:
        output = self.script(
            slurm,
            launcher,
            tmp_path,
            "#SBATCH --ntasks=3",
            f"cd {tmp_path}",
            "kvstore-launch --launcher slurm -n 2 -s 1 python stay.py >said &",
            "until [ $(grep -c here said) = 2 ]; do sleep 0.1; done",
            # The function runs in a shell of its own.
            f"pkill -{number} -P $! -f tools/launch.py",
            "wait $!; echo it ended",
            "until [ $(squeue --noheader --steps --job=$SLURM_JOB_ID | grep -vc batch) = 0 ]",
            "do sleep 0.1; done",
            "srun --overlap --ntasks=1 hostname",
        )
        assert "it ended" in output
        assert output.endswith(f"{slurm.nodes[0]}\nthe end: 0\n"), output

    @pytest.mark.parametrize(
        ("command", "sentence"),
        [
            ("srun kvstore-launch", "srun started 2 launchers"),
            (
                "kvstore-launch --queue kvstore",
                "--queue cannot be used inside the Slurm allocation",
            ),
            (
                "kvstore-launch --worker-gpus 1",
                "needs 1 GPUs (--worker-gpus), but the job has 0 there",
            ),
        ],
    )
    def test_what_has_no_sense_there_is_a_sentence(
        self, slurm: Slurm, launcher: Launcher, tmp_path: Path, command: str, sentence: str
    ) -> None:
        start = f"{sys.executable} {ROOT / 'tools' / 'launch.py'}"
        line = command.replace("kvstore-launch", start) + " --launcher slurm -n 2 -s 1 true"
        output = self.script(slurm, launcher, tmp_path, "#SBATCH --ntasks=2", line)
        assert sentence in output


def test_salloc_gives_the_nodes_too(launcher: Launcher, slurm: Slurm) -> None:
    words = launcher.argv("-n", "2", "-s", "1", *python(ROUND))
    done = subprocess.run(
        ["salloc", "--nodes=2", *words],
        cwd=ROOT,
        env=launcher.variables(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=JOB_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for host in slurm.nodes:
        assert f"sum 3.0 on {host}" in done.stdout


def test_variables_that_srun_would_read_change_nothing(launcher: Launcher) -> None:
    odd = replace(
        launcher,
        environment={
            **launcher.environment,
            "SLURM_STDOUTMODE": "none",
            "SLURM_STDERRMODE": "none",
            "SLURM_NTASKS": "17",
            "SLURM_KILL_BAD_EXIT": "1",
            "SLURM_WAIT": "1",
        },
    )
    done = odd.run("-n", "2", "-s", "1", *python(ROUND))
    assert done.returncode == 0, done.stderr
    assert said(done) == []


def test_what_a_user_likes_to_see_of_the_queue_changes_nothing(
    launcher: Launcher, slurm: Slurm
) -> None:
    wishes = {"SQUEUE_STATES": "RUNNING", "SQUEUE_PARTITION": "other", "SCANCEL_INTERACTIVE": "1"}
    odd = replace(launcher, environment={**launcher.environment, **wishes})
    with all_hosts_taken(slurm) as taken:
        with odd.start("-n", "2", "-s", "1", "true") as job:
            try:
                assert " is PENDING (Resources)" in waiting_line(job)
            finally:
                job.kill()
        wait_for("empty queue", lambda: slurm.jobs() == [taken], SENTENCE_S)
