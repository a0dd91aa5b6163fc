"""What the tasks of an array job leave behind, and what Grid Engine 8.1 says of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from stand_ins import program

from kvstore.launch.backends.sge import ArrayJob
from kvstore.launch.options import parse_arguments

QSTAT = """\
case "$*" in
"-g d") echo '
10 0.50000 j3 root r   11/22/2026 08:18:22 kvstore.q@kv-sge1 1 1
10 0.50000 j3 root qw  11/22/2026 08:18:22                   1 2
10 0.50000 j3 root Eqw 11/22/2026 08:18:22                   1 3' ;;
"-j 10") echo "
job_name:                   j4
error reason          1:      11/22/2026 08:18:35 [0:27200]: error: can't chdir to /data: Not there
scheduling info:            Job is in error state" ;;
*) echo "\
CLUSTER QUEUE                   CQLOAD   USED    RES  AVAIL  TOTAL aoACDS  cdsuE
--------------------------------------------------------------------------------
kvstore.q                         2.75      0      0     2       2      0      0" ;;
esac
"""


def job_of(*words: str, environ: dict[str, str] | None = None) -> ArrayJob:
    options = parse_arguments(["--launcher", "sge", "-n", "2", "-s", "1", *words, "true"])
    return ArrayJob(options, environ or {})


def test_a_task_that_refuses_to_be_an_agent_is_the_reason(tmp_path: Path) -> None:
    job = job_of()
    job.submit(tmp_path)
    assert job.trouble() is None
    found = {"error": "there is no directory /data", "host": "node7"}
    (tmp_path / "ended.2").write_text(f"KVSTORE-AGENT {json.dumps(found)}\n(exit code 3 on node7)")
    assert job.trouble() == "node7: there is no directory /data"
    assert job.fatal("Job 9.2 exited with exit code 3.") == "node7: there is no directory /data"


def test_a_python_that_is_not_there_is_named_with_its_host(tmp_path: Path) -> None:
    job = job_of("--python", "/opt/python")
    job.submit(tmp_path)
    text = "/spool/job_scripts/9: 5: /opt/python: not found\n(exit code 127 on node7)\n"
    (tmp_path / "ended.1").write_text(text)
    expected = "node7: '/opt/python' cannot be run there (not found); --python names another"
    assert job.trouble() == expected


def test_a_task_that_ends_otherwise_is_named_with_what_it_said(tmp_path: Path) -> None:
    job = job_of()
    job.submit(tmp_path)
    job.cancel("9.1-3:1")
    (tmp_path / "ended.3").write_text("Illegal instruction\n(exit code 132 on node7)\n")
    assert job.trouble() == (
        "worker 1 (task 3 of job 9) ended before it had reached the launcher; it said:\n"
        "  Illegal instruction\n  (exit code 132 on node7)"
    )


def test_the_commands_that_print_cannot_be_had_and_the_roster_still_says_something() -> None:
    job = job_of(environ={"PATH": "/nonexistent"})
    assert job.poll() == "qsub has not printed the number of the job yet"
    assert job.cancel("Your job 9 is there") == ["qdel", "9"]
    assert job.poll() == "job 9"


def test_why_tasks_wait_or_never_run_is_told_in_short(tmp_path: Path) -> None:
    program(tmp_path, "qstat", QSTAT)
    program(tmp_path, "qalter", "echo 'Job 10 cannot run in PE \"smp\": it only offers 0 slots'")
    job = job_of(environ={"PATH": str(tmp_path)})
    job.submit(tmp_path)
    job.cancel("10.1-3:1")
    assert job.poll() == (
        'tasks of job 10 by state: 1 Eqw, 1 qw, 1 r; cannot run in PE "smp": it only offers 0 '
        "slots; the cluster has 2 slots in all, and 3 are needed at the same time"
    )
    assert job.trouble() == (
        "Grid Engine cannot run job 10, which is in an error state (E): can't chdir to /data: "
        "Not there"
    )


def test_the_parallel_environment_is_one_that_gives_slots_of_one_host(tmp_path: Path) -> None:
    rules = {"mpi": "$round_robin", "shared": "$pe_slots", "smp": "$pe_slots"}
    cases = "".join(f"{name}) echo 'allocation_rule {rule}';;\n" for name, rule in rules.items())
    program(tmp_path, "qconf", f'case $2 in "") echo {" ".join(rules)};;\n{cases}esac')
    job = job_of("--worker-cores", "4", environ={"PATH": str(tmp_path)})
    assert " -pe smp 4 " in " ".join(job.submit(Path("/jobs/1")))
    assert sys.executable in job.submit(Path("/jobs/1"))
