"""What of the launcher's output a caller of ``kvstore.run`` is shown, and what it is told."""

from __future__ import annotations

import io

import pytest

from kvstore.errors import JobFailed, WorkerFailed
from kvstore.launch.job.report import EndedProcess, failure_block
from kvstore.launch.job.restarts import Exit
from kvstore.launch.plan import ProcessSpec
from kvstore.launch.run.background import LauncherOutput, show
from kvstore.launch.run.call_files import MARK
from pslite import Role
from pslite.node.log import Log
from pslite.node.start import node_uid


def block(*lines: str, role: str = "worker", rank: int = 1, status: int = -9) -> str:
    spec = ProcessSpec(role, rank, ("python", "x.py"), {})
    first = EndedProcess(spec, 4711, Exit(0, status, 12.5, 1), lines)
    return failure_block([first], [], "/tmp/kvstore-run-x/logs", start_s=10.0)


def read(text: str) -> JobFailed | None:
    output = LauncherOutput()
    for line in text.splitlines():
        assert output.show(line, is_error=True) is None
    return output.report(without="/none")


def test_lines_of_processes_are_shown_as_they_come() -> None:
    output = LauncherOutput()
    assert output.show("[worker 1@host] loss 0.5", is_error=False) == "[worker 1@host] loss 0.5"
    assert output.show("[worker 1] ", is_error=True) == "[worker 1] "
    assert output.report(without="/none") is None


def test_marks_are_counted_for_each_worker_and_stream_and_not_shown() -> None:
    output = LauncherOutput()
    assert output.show(f"[worker 0] {MARK}3", is_error=False) is None
    assert output.show(f"[worker 0@b] half a line{MARK}3", is_error=True) == (
        "[worker 0@b] half a line"
    )
    assert output.has_answered(3, 0)
    assert not output.has_answered(3, 1)
    assert output.has_all_of(3, ranks=1)
    assert not output.has_all_of(3, ranks=2)
    assert not output.has_all_of(4, ranks=1)


def test_a_mark_that_no_worker_has_written_is_text() -> None:
    output = LauncherOutput()
    for line in (f"{MARK}1", f"[server 0] {MARK}1 and more"):
        assert output.show(line, is_error=False) == line
    assert output.marks == set()


def test_the_error_says_that_all_restarts_are_used() -> None:
    spec = ProcessSpec("worker", 1, ("python", "x.py"), {})
    first, used_up = EndedProcess(spec, 4711, Exit(0, -9, 12.5, 1), ["A"]), "all restarts are used"
    error = read(failure_block([first], [], "/logs", start_s=10.0, remark=used_up))
    assert error is not None and used_up in str(error).splitlines()


def test_the_final_block_is_not_shown_and_says_who_failed() -> None:
    output = LauncherOutput()
    text = block("line one", f"line two{MARK}2", "line three", f"{MARK}3")
    assert [output.show(line, is_error=True) for line in text.splitlines()] == [None] * 11
    report = output.report(without="/tmp/kvstore-run-x")
    assert isinstance(report, WorkerFailed)
    assert (report.role, report.rank) == ("worker", 1)
    assert str(report).splitlines() == [
        "worker 1 ended with signal SIGKILL, before it had returned; the last 4 lines of its log:",
        "    line one",
        "    line two",
        "    line three",
    ]


@pytest.mark.parametrize("role", ["scheduler", "server"])
def test_a_block_about_the_service_names_it(role: str) -> None:
    report = read(block(role=role, rank=0, status=7))
    assert type(report) is JobFailed
    assert (report.role, report.rank) == (role, 0)
    first, *_, last = str(report).splitlines()
    name = role if role == "scheduler" else f"{role} 0"
    assert first == f"{name} ended with exit code 7; its log is empty"
    assert last == "logs of all processes: /tmp/kvstore-run-x/logs"


def test_a_block_that_is_cut_off_is_none() -> None:
    assert read("\n".join(block().splitlines()[:3])) is None


def test_words_of_the_launcher_are_shown_until_the_caller_ends_the_job() -> None:
    output = LauncherOutput()
    assert output.show("[launcher] a note", is_error=True) == "[launcher] a note"
    output.is_ending = True
    said: list[str] = []
    for name in ("W[9]", node_uid(Role.WORKER, 7)):
        Log(name, 0, said.append).warn("server 0 (pid 8 on a) is lost: its process is gone")
    hidden = [
        "[launcher] got SIGTERM: ending the job",
        "[scheduler] [10:00:00] H[1]: worker 1 (pid 7 on a) is lost: its process is gone",
        "[server 0] NodeLostError: worker 1 (pid 7 on a) is lost: its process is gone",
        *(f"[worker 0@a] {line}" for line in said),
    ]
    assert [output.show(line, is_error=True) for line in hidden] == [None] * 5
    assert output.show("[worker 0] bye", is_error=False) == "[worker 0] bye"
    assert output.said == ["a note", "got SIGTERM: ending the job"]


def test_what_a_cluster_s_program_said_belongs_to_the_launcher_s_message() -> None:
    output = LauncherOutput()
    message = ["[launcher] srun ended (exit code 1); it said:", "  no such partition", "  x"]
    assert output.show(message[0], is_error=True) == message[0]
    assert output.show("  a line of standard output", is_error=False) is not None
    assert [output.show(line, is_error=True) for line in message[1:]] == message[1:]
    output.show("[worker 0] hello", is_error=True)
    output.show("  nobody's", is_error=True)
    assert output.said == [message[0].removeprefix("[launcher] "), *message[1:]]


def test_a_line_that_the_caller_cannot_encode_is_shown_in_other_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, "ascii"))
    show([(False, "[worker 0] naïve 漢"), (False, "[worker 0] next")])
    assert written.getvalue() == b"[worker 0] na\\xefve \\u6f22\n[worker 0] next\n"
