"""The launcher ``sge`` with a real Grid Engine: a master here, an execd on each of two hosts."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from common import JOB_S, ROUND, SENTENCE_S, STAY, EveryLauncher, Launcher, python, two_lines
from services.daemon import wait_for
from services.gridengine import SLOTS, GridEngine

PARALLEL_ENVIRONMENT = """\
pe_name {name}
slots 999
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule {rule}
control_slaves FALSE
job_is_first_task TRUE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
"""
GPU = "gpu gpu INT <= YES YES 0 0\n"


@pytest.fixture(scope="module")
def cell(gridengine: GridEngine, tmp_path_factory: pytest.TempPathFactory) -> GridEngine:
    """With what many cells have: two parallel environments, and a resource ``gpu``."""
    file = tmp_path_factory.mktemp("sge") / "definition"
    for name, rule in (("many", "$round_robin"), ("one-host", "$pe_slots")):
        file.write_text(PARALLEL_ENVIRONMENT.format(name=name, rule=rule))
        gridengine.run("qconf", "-Ap", str(file))
        gridengine.run("qconf", "-aattr", "queue", "pe_list", name, gridengine.queue)
    file.write_text(gridengine.run("qconf", "-sc") + GPU)
    gridengine.run("qconf", "-Mc", str(file))
    gridengine.run("qconf", "-aattr", "queue", "complex_values", "gpu=8", gridengine.queue)
    return gridengine


@pytest.fixture
def launcher(cell: GridEngine, tmp_path: Path) -> Iterator[Launcher]:
    jobs = tmp_path / "jobs"
    yield Launcher(
        own=["--launcher", "sge"],
        hosts=cell.hosts,
        processes=cell.processes,
        environment={**cell.environment, "KVSTORE_JOB_DIR": str(jobs)},
    )
    wait_for("end of all jobs", lambda: cell.jobs() == [])
    wait_for("end of all directories of jobs", lambda: not list(jobs.glob("*")))


class TestSge(EveryLauncher):
    pass


def heard(job: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """The first line on standard error that has ``pattern``; others before are allowed."""
    assert job.stderr is not None
    said = []
    for line in job.stderr:
        if found := re.search(pattern, line):
            return found
        said.append(line)
    raise AssertionError("".join(said))


@contextmanager
def waiting(launcher: Launcher, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A launcher whose job is held in the queue, and the job's number."""
    with launcher.start("-n", "2", "-s", "1", "--launcher-args=-h", *words) as job:
        try:
            yield job, heard(job, r"tasks of job (\d+) by state: 3 hqw$")[1]
        finally:
            job.kill()


def test_a_job_of_the_guides_needs_no_option_of_its_own(launcher: Launcher, tmp_path: Path) -> None:
    """Roles go by rank: servers first, and every rank has one process."""
    text = "import kvstore as mx; kv = mx.create('dist_sync'); print(kv.rank, kv.num_workers)"
    done = launcher.run("-n", "3", *python(text), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"\] (\d 3)$", done.stdout, re.M)) == ["0 3", "1 3", "2 3"]


def test_a_job_waits_for_slots_and_says_what_for(launcher: Launcher, cell: GridEngine) -> None:
    filler = ["-b", "y", "-t", "1-2", "-pe", "one-host", str(SLOTS), "-o", "/dev/null"]
    full = cell.run("qsub", "-terse", "-j", "y", *filler, "/bin/sleep", "600").partition(".")[0]
    wait_for("full cluster", lambda: " qw " not in cell.run("qstat"))
    with launcher.start("-n", "1", "-s", "1", *python(ROUND)) as job:
        try:
            line = heard(job, r"waiting for .*")[0]
            cell.run("qdel", full)
            said, _ = job.communicate(timeout=60)
        finally:
            job.kill()
    assert "waiting for server 0, worker 0: tasks of job " in line
    assert " by state: 2 qw; cannot run in queue" in line
    assert "because it has no free slot" in line
    assert "sum 1.0" in said
    assert job.returncode == 0


def test_more_tasks_than_the_cell_has_slots_are_named_while_some_are_there(
    launcher: Launcher,
) -> None:
    with launcher.start("-n", "2", "-s", "1", "--worker-cores", str(SLOTS), "true") as job:
        try:
            line = heard(job, r"waiting for .*")[0]
            job.send_signal(signal.SIGINT)
            job.communicate(timeout=SENTENCE_S)
        finally:
            job.kill()
    assert "waiting for worker 1 (2 of 3 are there, on kv-sge1, kv-sge2)" in line
    assert f"the cluster has {2 * SLOTS} slots in all, and {3 * SLOTS} are needed" in line
    assert launcher.nothing_runs()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_in_the_queue_when_the_launcher_is_ended(
    launcher: Launcher, cell: GridEngine, number: signal.Signals
) -> None:
    with waiting(launcher, "true") as (job, _):
        began = time.monotonic()
        job.send_signal(number)
        code = job.wait(SENTENCE_S)
        assert code == (-number if number is signal.SIGKILL else 128 + number)
        wait_for("empty queue", lambda: cell.jobs() == [], SENTENCE_S)
        assert time.monotonic() - began < SENTENCE_S


def test_a_job_that_is_deleted_from_the_queue_ends_with_a_sentence(
    launcher: Launcher, cell: GridEngine
) -> None:
    with waiting(launcher, "true") as (job, number):
        cell.run("qdel", number)
        _, said = job.communicate(timeout=SENTENCE_S)
    assert job.returncode == 1
    assert said == (
        f"[launcher] job {number} was deleted (qdel) before all its tasks had started\n"
    )


def test_a_job_that_is_deleted_while_it_runs_ends(launcher: Launcher, cell: GridEngine) -> None:
    with launcher.start("-n", "2", "-s", "1", *python(STAY)) as job:
        try:
            two_lines(job)
            [number] = cell.jobs()
            cell.run("qdel", number)
            _, said = job.communicate(timeout=SENTENCE_S)
        finally:
            job.kill()
    assert job.returncode != 0
    assert re.search(r"kv-sge\d was lost", said)
    assert launcher.nothing_runs()


def test_a_job_outlives_its_qsub_and_leaves_nothing(launcher: Launcher, cell: GridEngine) -> None:
    """Whoever kills qsub hurts nobody; the launcher deletes what there may be at the end."""
    with launcher.start("-n", "1", "-s", "1", *python(STAY.replace("60", "4"))) as job:
        try:
            assert job.stdout is not None
            assert "here" in job.stdout.readline()
            children = f"/proc/{job.pid}/task/{job.pid}/children"
            [qsub] = [
                int(pid)
                for pid in Path(children).read_text().split()
                if "-sync" in Path(f"/proc/{pid}/cmdline").read_text()
            ]
            subprocess.run(["kill", "-9", str(qsub)], check=True)
            _, said = job.communicate(timeout=JOB_S)
        finally:
            job.kill()
    _, _, after = said.partition("all have joined")  # a slow cluster was perhaps waited for
    assert after.splitlines()[1:] == ["[launcher] qsub ended with exit code -9"]
    assert job.returncode == 0


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--jobname", "lenet-7"], r"^job_name: +lenet-7$"),
        (["--queue", "kvstore.q"], r"^hard_queue_list: +kvstore\.q$"),
        (["--worker-cores", "4"], r"^parallel environment: +one-host range: 4$"),
        (["--worker-gpus", "2"], r"^hard resource_list: +gpu=2$"),
        (["--launcher-args=-l h_rt=1:00:00 -p -10"], r"^hard resource_list: +h_rt=3600$"),
    ],
)
def test_what_is_asked_for_arrives_at_the_cluster(
    launcher: Launcher, cell: GridEngine, words: list[str], wanted: str
) -> None:
    with waiting(launcher, *words, "true") as (job, number):
        known = cell.run("qstat", "-j", number)
        job.send_signal(signal.SIGINT)
        job.wait(SENTENCE_S)
    assert re.search(wanted, known, re.MULTILINE), known


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--queue", "no.q"], 'Grid Engine does not take the job: .*unknown queue "no.q"'),
        (["--launcher-args=-l gpus=1"], 'does not take the job: unknown resource "gpus"'),
        (["--launcher-args=-bogus"], r"qsub ended \(exit code 2\) .* it said:"),
        (["--launcher-args=-wd /no/where"], r"in an error state \(E\): can't chdir to /no/where"),
        (["--python", "/no/python"], r"'/no/python' cannot be run there \(not found\)"),
    ],
)
def test_what_cannot_be_is_a_sentence(launcher: Launcher, words: list[str], sentence: str) -> None:
    began = time.monotonic()
    done = launcher.run("-n", "2", "-s", "1", *words, "true")
    assert time.monotonic() - began < SENTENCE_S
    assert done.returncode == 1
    assert re.search(sentence, done.stderr), done.stderr
    assert launcher.nothing_runs()


def test_a_directory_that_the_hosts_do_not_share_is_a_sentence(
    launcher: Launcher,
) -> None:
    began = time.monotonic()
    alone = Path("/dev/shm/kvstore-test-jobs")  # each host has a /dev/shm of its own
    try:
        done = launcher.run("-n", "2", "true", KVSTORE_JOB_DIR=str(alone))
        assert list(alone.iterdir()) == []
    finally:
        alone.rmdir()
    assert time.monotonic() - began < SENTENCE_S
    assert done.returncode == 1
    assert f"does not see {alone}/" in done.stderr
    assert "set KVSTORE_JOB_DIR to a directory that all hosts of the job share" in done.stderr


def test_a_directory_that_is_not_on_the_hosts_is_a_sentence(launcher: Launcher) -> None:
    here = Path("/dev/shm/kvstore-test-here")
    here.mkdir()
    try:
        done = launcher.run("-n", "2", "true", cwd=here)
    finally:
        here.rmdir()
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert f"there is no directory {here}" in line


def test_a_dry_run_shows_the_command_and_asks_nobody(launcher: Launcher) -> None:
    done = launcher.run("-n", "2", "-s", "1", "--dry-run", "python", "train.py")
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert first.startswith("qsub -sync y -t 1-3 ")
    assert "# agent 1, server 0: python -m kvstore.server" in rest
    assert "# agent 3, worker 1: python train.py" in rest


def test_without_qsub_it_says_what_to_do(tmp_path: Path) -> None:
    nowhere = Launcher(["--launcher", "sge"], (), list, {"PATH": str(tmp_path)})
    done = nowhere.run("-n", "2", "true")
    assert done.returncode == 1
    assert "there is no program 'qsub' here: start the job on a submit host" in done.stderr


def test_without_a_master_it_says_so(launcher: Launcher) -> None:
    began = time.monotonic()
    done = launcher.run("-n", "2", "true", SGE_QMASTER_PORT="1")
    assert time.monotonic() - began < SENTENCE_S
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "unable to send message to qmaster using port 1" in line
