"""How qsub is called, and what is made of what Grid Engine's commands print, as of 8.1."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvstore.launch.backends import sge
from kvstore.launch.backends.sge import ArrayJob, run, slots_of_a_task
from kvstore.launch.job.lifecycle import Timing
from kvstore.launch.options import LaunchError, parse_arguments

QSTAT = """\
job-ID  prior   name       user         state submit/start at     queue            slots ja-task-ID
------------------------------------------------------------------------------------------
     10 0.50000 j3         root         r     11/22/2026 08:18:22 kvstore.q@kv-sge1   1 31
     10 0.50000 j3         root         r     11/22/2026 08:18:22 kvstore.q@kv-sge2   1 32
     10 0.50000 j3         root         qw    11/22/2026 08:18:22                     1 33-40:1
     11 0.50000 other      root         qw    11/22/2026 08:18:22                     1 1-7:2
"""
DESCRIBED = """\
job_name:                   j4
error reason          1:      11/22/2026 08:18:35 [0:27200]: error: can't chdir to /data: Not there
error reason          2:      11/22/2026 08:18:35 [0:27199]: error: can't chdir to /data: Not there
scheduling info:            Job is in error state
"""
QUEUES = """\
CLUSTER QUEUE                   CQLOAD   USED    RES  AVAIL  TOTAL aoACDS  cdsuE
--------------------------------------------------------------------------------
all.q                             -NA-      0      0      8     10      0      2
kvstore.q                         2.75      0      0     32     32      0      0
"""
VERIFIED = """\
Job 10 (-l NONE) cannot run in queue "a.q@one" because it offers only qc:slots=0.000000
Job 10 (-l NONE) cannot run in queue "a.q@two" because it offers only qc:slots=0.000000
Job 10 (-l NONE) cannot run in queue "a.q@three" because it offers only qc:slots=0.000000
verification: no suitable queues
"""


def job_of(*words: str, environ: dict[str, str] | None = None) -> ArrayJob:
    options = parse_arguments(["--launcher", "sge", "-n", "2", "-s", "1", *words, "true"])
    return ArrayJob(options, environ or {})


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ('Your job-array 26.1-2:1 ("j7") has been submitted', "26"),
        ('Your job 4 ("s.sh") has been submitted', "4"),
        ("26.1-2:1", "26"),
        ("4", None),
        ("warning: no suitable queues", None),
        ("Unable to run job: denied", None),
    ],
)
def test_qsub_says_the_number_of_the_job(line: str, number: str | None) -> None:
    assert sge.job_number(line) == number


@pytest.mark.parametrize(
    ("words", "slots"),
    [
        ([], 1),
        (["--worker-cores", "4"], 4),
        (["--launcher-args=-l gpu=1 -pe smp 3"], 3),
        (["--worker-cores", "4", "--launcher-args=-pe smp 3"], 3),
        (["--launcher-args=-pe smp"], 1),
        (["--launcher-args=-pe smp 2-4"], 1),
    ],
)
def test_a_task_has_the_slots_that_were_asked_for(words: list[str], slots: int) -> None:
    options = parse_arguments(["--launcher", "sge", "-n", "2", *words, "true"])
    assert slots_of_a_task(options) == slots


def test_a_line_tells_that_a_task_is_over_and_how() -> None:
    over = sge.task_over("Job 24.2 exited with exit code 2.")
    assert over == sge.TaskOver("24", 2, "exited with exit code 2")
    over = sge.task_over("Job 24.1 exited because of signal SIGKILL")
    assert over == sge.TaskOver("24", 1, "exited because of signal SIGKILL")
    assert sge.task_over('Your job 4 ("s.sh") has been submitted') is None


def test_a_deleted_job_is_told_from_one_that_was_not_taken() -> None:
    assert "job 25 was deleted" in str(sge.deletion("Unable to run job 25.1"))
    assert sge.deletion("Unable to run job: denied") is None


def test_the_reason_of_a_refusal_is_one_line() -> None:
    said = ["warning: this", 'Unable to run job: unknown resource "gpu"', "Exiting."]
    assert sge.refusal_of_job(said) == 'unknown resource "gpu"'
    assert sge.refusal_of_job(["usage: qsub"]) is None


@pytest.mark.parametrize(
    ("text", "count"), [("3", 1), ("1,2", 2), ("33-40:1", 8), ("1-7:2,9", 5), ("", 0), ("x", 0)]
)
def test_tasks_are_counted_as_grid_engine_lists_them(text: str, count: int) -> None:
    assert sge.task_count(text) == count


def test_only_the_states_of_the_own_job_count() -> None:
    assert sge.states(QSTAT, "10") == {"r": 2, "qw": 8}
    assert sge.states("", "10") == {}


def test_why_a_job_is_in_error_is_told_without_dates_and_process_ids() -> None:
    expected = "can't chdir to /data: Not there"
    assert sge.error_reason(DESCRIBED) == expected
    assert sge.error_reason("job_name: j4") is None


def test_obstacles_are_told_in_short() -> None:
    assert sge.obstacles(VERIFIED) == (
        'cannot run in queue "a.q@one" because it has no free slot; '
        'cannot run in queue "a.q@two" because it has no free slot; and so on, 3 in all'
    )
    in_environment = 'Job 29 cannot run in PE "smp" because it only offers 0 slots\n'
    assert sge.obstacles(in_environment) == in_environment.removeprefix("Job 29 ").strip()
    assert sge.obstacles("verification: found suitable queue(s)") == ""


def test_slots_are_those_of_all_queues() -> None:
    assert sge.slot_total(QUEUES) == 42
    assert sge.slot_total("") is None


@pytest.mark.parametrize(
    ("name", "is_good"),
    [
        *((name, True) for name in ("lenet-7", "-x", "a_b.c", "x+y=z")),
        *((name, False) for name in ("7up", "a b", ".a", "a/b", "", "ümläut", "#a", "a\n")),
    ],
)
def test_names_of_jobs(name: str, is_good: bool) -> None:
    assert sge.is_job_name(name) is is_good


def test_a_name_that_grid_engine_does_not_take_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    (tmp_path / "qsub").write_text("#!/bin/sh\n")
    (tmp_path / "qsub").chmod(0o755)
    words = ["--launcher", "sge", "-n", "1", "--jobname", "a b", "true"]
    with pytest.raises(LaunchError, match="--jobname 'a b' is not a name for Grid Engine"):
        run(parse_arguments(words), {"PATH": str(tmp_path)}, [], Timing())


def test_what_is_asked_for_is_on_the_command_line_and_ones_own_words_come_last() -> None:
    words = ["--jobname", "lenet", "--queue", "gpu.q", "--worker-gpus", "2"]
    job = job_of(*words, "--launcher-args=-l h_rt=60 -m 'e b'", "--python", "/opt/python")
    assert job.command(Path("/jobs/1")) == [
        *("qsub", "-sync", "y", "-t", "1-3", "-w", "w", "-r", "n", "-N", "lenet"),
        *("-S", "/bin/sh", "-wd", "/", "-j", "y", "-o", "/dev/null", "-q", "gpu.q", "-l", "gpu=2"),
        *("-l", "h_rt=60", "-m", "e b", "/jobs/1/task.sh", "/opt/python", "/jobs/1/agent.py"),
    ]


def test_cores_without_an_environment_that_gives_them_are_an_error_and_ones_own_are_not() -> None:
    with pytest.raises(LaunchError, match=r"allocation_rule \$pe_slots"):
        job_of("--worker-cores", "4", environ={"PATH": "/nonexistent"})
    job = job_of("--worker-cores", "4", "--launcher-args=-pe mine 4")
    assert " -pe mine 4 " in " ".join(job.command(Path("/jobs/1")))


def test_a_task_that_refuses_to_be_an_agent_is_the_reason(tmp_path: Path) -> None:
    job = job_of()
    job.command(tmp_path)
    assert job.trouble() is None
    found = {"error": "there is no directory /data", "host": "node7"}
    (tmp_path / "ended.2").write_text(f"KVSTORE-AGENT {json.dumps(found)}\n(exit code 3 on node7)")
    assert job.trouble() == "node7: there is no directory /data"
    assert job.fatal("Job 9.2 exited with exit code 3.") == "node7: there is no directory /data"


def test_a_python_that_is_not_there_is_named_with_its_host(tmp_path: Path) -> None:
    job = job_of("--python", "/opt/python")
    job.command(tmp_path)
    text = "/spool/job_scripts/9: 5: /opt/python: not found\n(exit code 127 on node7)\n"
    (tmp_path / "ended.1").write_text(text)
    expected = "node7: '/opt/python' cannot be run there (not found); --python names another"
    assert job.trouble() == expected


def test_a_task_that_ends_otherwise_is_named_with_what_it_said(tmp_path: Path) -> None:
    job = job_of()
    job.command(tmp_path)
    job.cancel("9.1-3:1")
    (tmp_path / "ended.3").write_text("Illegal instruction\n(exit code 132 on node7)\n")
    assert job.trouble() == (
        "worker 1 (task 3 of job 9) ended before it had reached the launcher; it said:\n"
        "  Illegal instruction\n  (exit code 132 on node7)"
    )


def test_the_commands_that_print_cannot_be_had_and_the_roster_still_says_something() -> None:
    job = job_of(environ={"PATH": "/nonexistent"})
    assert job.state() == "qsub has not said yet which number the job has"
    assert job.cancel("Your job 9 is there") == ["qdel", "9"]
    assert job.state() == "job 9"


def test_qsub_that_ends_too_early_is_explained() -> None:
    job = job_of("--worker-gpus", "2")
    said = ['Unable to run job: unknown resource "gpu"', "Exiting."]
    assert job.explain(said, 1) == (
        'Grid Engine does not take the job: unknown resource "gpu": --worker-gpus asks for it; '
        "use --launcher-args='-l NAME=COUNT' instead"
    )
    assert job.explain([], -9).startswith("qsub ended (killed by signal 9) before all")


def test_the_parallel_environment_is_one_that_gives_slots_of_one_host(tmp_path: Path) -> None:
    rules = {"mpi": "$round_robin", "shared": "$pe_slots", "smp": "$pe_slots"}
    cases = "".join(f"{name}) echo 'allocation_rule {rule}';;\n" for name, rule in rules.items())
    program = tmp_path / "qconf"
    program.write_text(f'#!/bin/sh\ncase $2 in "") echo {" ".join(rules)};;\n{cases}esac\n')
    program.chmod(0o755)
    job = job_of("--worker-cores", "4", environ={"PATH": str(tmp_path)})
    assert " -pe smp 4 " in " ".join(job.command(Path("/jobs/1")))
    assert sys.executable in job.command(Path("/jobs/1"))
