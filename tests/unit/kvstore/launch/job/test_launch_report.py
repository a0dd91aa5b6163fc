"""Whose failure was the first, and the block that says so."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from kvstore.launch.job.lifecycle import Lifecycle
from kvstore.launch.job.report import (
    EndedProcess,
    JobReport,
    cause_of,
    complete_line,
    describe_end,
    describe_status,
    exit_code,
    failure_block,
    failures_of,
    goes_on,
    may_restart,
    show_failure,
    starts_again,
)
from kvstore.launch.job.restarts import Exit, Timing
from kvstore.launch.plan import ProcessSpec

SCHEDULER, SERVER, WORKER_0, WORKER_1 = range(4)
SPECS = [
    ProcessSpec(role, rank, ("python", "a b.py"), {})
    for role, rank in [("scheduler", 0), ("server", 0), ("worker", 0), ("worker", 1)]
]
NODE_LOST = ["Traceback ...", "pslite.errors.NodeLostError: worker 1 is lost"]


def ended(index: int, status: int, sweep: int, *, stopped: bool = False) -> Exit:
    return Exit(index, status, float(sweep), sweep, stopped)


def order(exits: list[Exit], last_lines: dict[int, list[str]] | None = None) -> list[int]:
    logs = last_lines or {}
    ended = [EndedProcess(SPECS[one.index], 1, one, logs.get(one.index, ())) for one in exits]
    return [one.exit.index for one in failures_of(ended, SPECS)[0]]


def test_whoever_was_noticed_first_is_the_cause() -> None:
    exits = [ended(WORKER_0, 1, 2), ended(WORKER_1, 7, 1), ended(SERVER, 1, 3)]
    assert order(exits) == [WORKER_1, WORKER_0, SERVER]


def test_of_two_seen_in_one_sweep_the_one_killed_by_a_signal_is_the_cause() -> None:
    assert order([ended(SERVER, 1, 1), ended(WORKER_1, -11, 1)]) == [WORKER_1, SERVER]


def test_an_error_that_names_a_lost_node_is_a_consequence_even_when_it_ended_first() -> None:
    exits = [ended(WORKER_0, 1, 1), ended(WORKER_1, 3, 2)]
    assert order(exits, {WORKER_0: NODE_LOST}) == [WORKER_1, WORKER_0]
    assert order(exits[:1], {WORKER_0: NODE_LOST}) == [WORKER_0]


def test_a_server_that_ended_with_0_too_early_is_the_cause_of_lost_nodes() -> None:
    exits = [ended(SERVER, 0, 1), ended(WORKER_0, 1, 2), ended(WORKER_1, 1, 3)]
    exits.append(ended(SCHEDULER, 0, 4))
    logs = {WORKER_0: NODE_LOST, WORKER_1: NODE_LOST}
    assert order(exits, logs) == [SERVER, WORKER_0, WORKER_1]


def test_a_service_that_ended_as_a_whole_is_not_blamed_for_what_a_worker_does_later() -> None:
    exits = [ended(SERVER, 0, 1), ended(SCHEDULER, 0, 2), ended(WORKER_0, 0, 3)]
    assert order([*exits, ended(WORKER_1, 7, 4)]) == [WORKER_1]


def test_a_server_that_ended_alone_is_a_failure_although_the_launcher_ended_the_rest() -> None:
    exits = [
        ended(SERVER, 0, 1),
        ended(WORKER_0, 0, 2),
        ended(WORKER_1, -15, 3, stopped=True),
        ended(SCHEDULER, -15, 3, stopped=True),
    ]
    assert order(exits) == [SERVER]


def test_it_is_still_a_failure_when_a_worker_could_not_even_be_killed() -> None:
    exits = [ended(SERVER, 0, 1), ended(SCHEDULER, -15, 2, stopped=True)]
    assert order(exits) == [SERVER]


def test_a_scheduler_that_was_killed_is_the_cause_of_lost_nodes() -> None:
    exits = [ended(SCHEDULER, -9, 2), *(ended(each, 1, 1) for each in (SERVER, WORKER_0))]
    exits.append(ended(WORKER_1, 0, 3))
    logs = dict.fromkeys([SERVER, WORKER_0], NODE_LOST)
    assert order(exits, logs) == [SCHEDULER, SERVER, WORKER_0]


def test_a_scheduler_that_notices_a_server_which_ended_too_early_is_not_the_cause() -> None:
    exits = [ended(SERVER, 0, 1), ended(SCHEDULER, 1, 2)]
    exits += [ended(WORKER_0, 1, 3), ended(WORKER_1, 1, 4)]
    logs = dict.fromkeys([SCHEDULER, WORKER_0, WORKER_1], NODE_LOST)
    assert order(exits, logs)[0] == SERVER


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(7, 7, "exit code 7"), (-9, 137, "signal SIGKILL"), (0, 1, "exit code 0")],
)
def test_exit_codes_follow_the_shell(status: int, code: int, words: str) -> None:
    assert exit_code(ended(WORKER_0, status, 1)) == code
    assert describe_status(status) == words


def test_a_signal_without_a_name_is_given_by_number() -> None:
    number = int(signal.SIGRTMIN) + 1
    assert describe_status(-number) == f"signal {number}"


def test_the_block_tells_the_first_failure_in_full_and_the_rest_in_a_line() -> None:
    first = EndedProcess(
        SPECS[WORKER_1], 4711, ended(WORKER_1, -9, 3), [f"line {n}" for n in range(30)]
    )
    other = EndedProcess(SPECS[WORKER_0], 4710, ended(WORKER_0, 1, 4), NODE_LOST)
    stopped = EndedProcess(SPECS[SERVER], 4709, ended(SERVER, -15, 5, stopped=True), [])
    text = failure_block([first, other], [stopped], "/logs", start_s=0.5)
    assert text.splitlines() == [
        "",
        "======== the job failed; this was the first failure ========",
        "process:  worker 1 (pid 4711)",
        "ended:    signal SIGKILL, 2.5 s after the start",
        "command:  python 'a b.py'",
        "the last 20 lines of its log:",
        *(f"    line {n}" for n in range(10, 30)),
        "other failures: worker 0 (exit code 1)",
        "ended by the launcher: server 0",
        "logs of all processes: /logs",
    ]


def test_the_block_says_so_when_a_log_is_empty_and_a_service_ended_too_early() -> None:
    early = EndedProcess(SPECS[SERVER], 1, ended(SERVER, 0, 1), [])
    text = failure_block([early], [], "/logs", start_s=0.0)
    assert "ended:    exit code 0, while workers still ran, 1.0 s after the start" in text
    assert "its log is empty" in text
    assert "other failures" not in text


def test_whoever_failed_in_the_same_words_is_only_named() -> None:
    error = "UnknownTypeError: unknown store type 'dist_sink'"
    specs = [ProcessSpec("worker", rank, ("x",), {}) for rank in range(4)]
    logs = [[f"pid {rank}", error] for rank in range(3)] + [["pid 3", "MemoryError"]]
    failures = [
        EndedProcess(spec, 1, ended(spec.rank, 1, 1), log)
        for spec, log in zip(specs, logs, strict=True)
    ]
    lines = failure_block(failures, [], "/logs", start_s=0.0).splitlines()
    assert lines[-3:-1] == [
        "the same on worker 1, worker 2",
        "other failures: worker 3 (exit code 1)",
    ]
    killed = EndedProcess(specs[1], 1, ended(1, -9, 1), logs[1])
    lines = failure_block([failures[0], killed], [], "/logs", start_s=0.0).splitlines()
    assert lines[-2] == "other failures: worker 1 (signal SIGKILL)"


def report_of(statuses: dict[int, int], *, was_signalled: bool = False) -> JobReport:
    """The report of a job whose processes all had joined and ended by themselves."""
    job = Lifecycle(SPECS, Timing())
    job.joined(0.0)
    for now_s, (index, status) in enumerate(statuses.items(), start=1):
        job.exited({index: status}, float(now_s))
    records = [EndedProcess(SPECS[index], 1, found, ()) for index, found in job.exits.items()]
    return JobReport(job, SPECS, records, 0.0, was_signalled)


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ({WORKER_0: 0, WORKER_1: 0, SERVER: 0, SCHEDULER: 0}, False),
        ({WORKER_0: -9, WORKER_1: 1, SERVER: 1, SCHEDULER: 1}, True),
        ({SERVER: -9, WORKER_0: 1, WORKER_1: 1, SCHEDULER: 1}, True),
        ({SCHEDULER: -9, SERVER: 0, WORKER_0: 0, WORKER_1: 0}, False),
        ({WORKER_0: 0, WORKER_1: 0, SERVER: 3, SCHEDULER: 1}, False),
    ],
)
def test_a_job_may_start_again_unless_its_workers_have_succeeded(
    statuses: dict[int, int], expected: bool
) -> None:
    assert may_restart(report_of(statuses)) == expected


def test_a_job_that_its_user_has_ended_does_not_start_again() -> None:
    statuses = {WORKER_0: 1, WORKER_1: 1, SERVER: 1, SCHEDULER: 1}
    assert may_restart(report_of(statuses))
    assert not may_restart(report_of(statuses, was_signalled=True))


@pytest.mark.parametrize(
    ("attempt", "name", "told"),
    [(None, "the job", ["all restarts are used (2 of 2)"]), (1, "attempt 2 of the job", [])],
)
def test_the_last_report_says_that_all_restarts_are_used_and_others_name_the_attempt(
    attempt: int | None, name: str, told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of({WORKER_0: 1, WORKER_1: 1, SERVER: 1, SCHEDULER: 1})
    report.lifecycle.restarts.num_all = 2
    show_failure(report, Path("/logs"), attempt)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == f"======== {name} failed; this was the first failure ========"
    assert [line for line in lines if "restart" in line] == told
    assert lines[-1] == "logs of all processes: /logs"


# -- workers that were started again -------------------------------------------------------


def after_a_setback(
    setback: Exit, lines: list[str], exits: list[Exit], logs: dict[int, list[str]]
) -> list[tuple[int, int]]:
    """Index and status of all failures; ``setback`` is a worker's first end, with these lines."""
    before = EndedProcess(SPECS[setback.index], 1, setback, lines)
    found = [EndedProcess(SPECS[one.index], 2, one, logs.get(one.index, ())) for one in exits]
    failures, _ = failures_of(found, SPECS, [before])
    return [(one.exit.index, one.exit.status) for one in failures]


def test_the_first_end_of_a_worker_that_got_no_place_is_the_cause() -> None:
    exits = [ended(SCHEDULER, 1, 4), ended(WORKER_1, 1, 3), ended(WORKER_0, 1, 5)]
    found = after_a_setback(ended(WORKER_1, -9, 1), [], exits, {WORKER_0: NODE_LOST})
    assert found == [(WORKER_1, -9), (WORKER_1, 1), (SCHEDULER, 1), (WORKER_0, 1)]


def test_it_is_the_cause_although_the_launcher_has_ended_its_second_process() -> None:
    exits = [ended(SCHEDULER, 1, 2), ended(WORKER_1, -15, 3, stopped=True)]
    assert after_a_setback(ended(WORKER_1, -9, 1), [], exits, {})[0] == (WORKER_1, -9)


def test_a_first_end_that_names_a_lost_node_is_a_consequence() -> None:
    setback, exits = ended(WORKER_1, 1, 1), [ended(SERVER, -9, 2), ended(WORKER_0, 1, 3)]
    logs = {WORKER_0: NODE_LOST}
    found = after_a_setback(setback, NODE_LOST, exits, logs)
    assert found == [(SERVER, -9), (WORKER_1, 1), (WORKER_0, 1)]
    assert after_a_setback(setback, ["an error"], exits, logs)[0] == (WORKER_1, 1)


def test_the_block_tells_the_first_end_of_a_worker_that_got_no_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = EndedProcess(SPECS[WORKER_1], 4711, ended(WORKER_1, -9, 1), ["its words"])
    second = EndedProcess(SPECS[WORKER_1], 4712, ended(WORKER_1, 1, 2), ["no place"])
    job = Lifecycle(SPECS, Timing())
    report = JobReport(job, SPECS, [second], 0.0, setbacks=[first])
    failures = show_failure(report, Path("/logs"))
    assert [one.pid for one in failures] == [4711, 4712]
    shown = capsys.readouterr().err.splitlines()
    assert shown[2:4] == [
        "process:  worker 1 (pid 4711)",
        "ended:    signal SIGKILL, 1.0 s after the start",
    ]
    assert "other failures: worker 1 (exit code 1)" in shown


@pytest.mark.parametrize(
    ("status", "place", "reason", "sentence"),
    [
        (-9, "", "", "worker 1 (pid 4711) ended with signal SIGKILL: starting it again (1 of 3)"),
        (
            *(3, "pid 47 on node2", "gone"),
            "worker 1 (pid 47 on node2) ended with exit code 3 (gone): starting it again (1 of 3)",
        ),
    ],
)
def test_a_worker_that_is_started_again_is_told_with_its_end(
    status: int, place: str, reason: str, sentence: str
) -> None:
    found = ended(WORKER_1, status, 1)
    failed = EndedProcess(SPECS[WORKER_1], 4711, found, [], place=place, reason=reason)
    assert starts_again(failed, "1 of 3") == sentence


@pytest.mark.parametrize(
    ("role", "is_awaited", "text"),
    [
        ("server", True, "waiting for standby 1 to take its place"),
        ("server", False, "standby 1 has already taken its place"),
        ("standby", False, "server 1 goes on without it"),
    ],
)
def test_a_server_and_a_standby_without_which_the_job_goes_on_are_told(
    role: str, is_awaited: bool, text: str
) -> None:
    lost = EndedProcess(ProcessSpec(role, 1, ("python",), {}), 7, ended(1, -9, 1), ())
    told = goes_on(lost, is_awaited=is_awaited)
    assert told == f"{role} 1 (pid 7) ended with signal SIGKILL: {text}"


def test_a_standby_in_the_place_of_its_server_is_blamed_like_a_server() -> None:
    specs = [
        ProcessSpec(role, rank, ("python",), {})
        for role, rank in [("scheduler", 0), ("server", 0), ("standby", 1), ("worker", 0)]
    ]
    exits = [ended(2, 0, 1), ended(3, 1, 2), ended(0, 1, 3), ended(1, 0, 3)]
    logs = {3: NODE_LOST, 0: NODE_LOST}
    all_ended = [EndedProcess(specs[one.index], 1, one, logs.get(one.index, ())) for one in exits]
    failures, _ = failures_of(all_ended, specs)
    assert [one.spec.name for one in failures] == ["standby 1", "worker 0", "scheduler"]


def test_a_standby_that_the_launcher_ended_makes_no_server_a_failure() -> None:
    specs = [*SPECS, ProcessSpec("standby", 0, ("python",), {})]
    exits = [ended(SCHEDULER, 0, 1), ended(SERVER, 0, 2), ended(WORKER_0, 7, 2)]
    exits += [ended(WORKER_1, 0, 3), ended(4, -15, 4, stopped=True)]
    all_ended = [EndedProcess(specs[one.index], 1, one, ()) for one in exits]
    failures, stopped = failures_of(all_ended, specs)
    assert [one.spec.name for one in failures] == ["worker 0"]
    assert [one.spec.name for one in stopped] == ["standby 0"]


def test_the_line_that_all_have_joined_counts_standbys() -> None:
    specs = [*SPECS, ProcessSpec("standby", 0, ("python",), {})]
    line = complete_line(specs, ["this machine"], "h:1", "logs")
    assert line.startswith("all have joined: 2 workers, 1 server and 1 standby on this machine; ")
    line = complete_line(SPECS, ["this machine"], "h:1", "logs")
    assert line.startswith("all have joined: 2 workers and 1 server on this machine; ")


@pytest.mark.parametrize(
    ("ends", "verdict", "cause"),
    [
        # The lost process has not ended: what the scheduler says of it is the cause.
        (
            [(SERVER, 1), (SCHEDULER, 1)],
            "its place is empty",
            "worker 1 is lost: its place is empty",
        ),
        ([(WORKER_1, -9), (SCHEDULER, 1)], "gone", "worker 1 (pid 7) ended with signal SIGKILL"),
        (
            *([(WORKER_1, -9), (SCHEDULER, 1)], "gone; it was lost 3 times"),
            "worker 1 (pid 7) ended with signal SIGKILL; it was lost 3 times",
        ),
        ([(WORKER_1, 3)], "", "worker 1 (pid 7) ended with exit code 3"),
        # A worker was being replaced when the server was lost.
        (
            *([(WORKER_0, -9), (SERVER, -9), (SCHEDULER, 1)], "gone; it had no standby"),
            "worker 1 is lost: gone; it had no standby",
        ),
    ],
)
def test_the_cause_of_a_restart_names_the_lost_process(
    ends: list[tuple[int, int]], verdict: str, cause: str
) -> None:
    lines = {
        WORKER_1: ["ValueError: wrong"],
        SERVER: ["NodeLostError: worker 1 is lost"],
        SCHEDULER: [f"NodeLostError: worker 1 is lost: {verdict}", "a last line"],
    }
    failures = [
        EndedProcess(SPECS[index], 7, ended(index, status, 1), lines.get(index, ()))
        for index, status in ends
    ]
    assert cause_of(failures) == cause
    block = failure_block(failures, [], "/logs", start_s=0.0)
    end, _, why = cause.partition("; ")
    is_own = end == describe_end(failures[0])
    told = f"not replaced: {why}\n" if is_own else f"cause:    {cause}\n"
    assert (told in block) == (cause != describe_end(failures[0]))
