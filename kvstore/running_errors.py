"""Which error the caller of ``kvstore.run`` sees: that of the worker that failed first.

Pure, but for unpickling what a worker raised. A failure brings others: when a worker is lost, its
peers raise ``NodeLostError``, which is no news to the caller. So the order is: what a worker
raised of its own, the earliest first; then what the launcher names as the first failure; then
whatever else there is. Read next: ``running_job.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.errors import JobFailed, WorkerFailed
from kvstore.launch import parcels
from kvstore.launch.failure import describe_status
from kvstore.launch.markers import Report


@dataclass(frozen=True)
class Answer:
    """What one worker has left for one call: a value, an error or a refusal, see ``parcels``."""

    rank: int
    header: Mapping[str, Any]
    body: bytes = b""

    @property
    def failed(self) -> bool:
        return bool(self.header["kind"] != "value")

    @property
    def blames_another(self) -> bool:
        """An error that a process has because another one is lost."""
        return self.failed and bool(self.header["blames"])


@dataclass(frozen=True)
class Ending:
    """How the launcher ended: ``status`` as in ``subprocess``, its report, its last words."""

    status: int
    report: Report | None
    said: Sequence[str] = ()


def first_cause(answers: Sequence[Answer], ending: Ending | None) -> Exception:
    """The error to raise for a call that has failed. ``ending`` is None while the job runs."""
    failures = sorted((one for one in answers if one.failed), key=_when)
    own = [one for one in failures if not one.blames_another]
    if own:
        return error_of(own[0], failures)
    report = None if ending is None else ending.report
    if report is None:
        if failures:
            return error_of(failures[0], failures)
        return JobFailed(_words_of(ending))
    named = [one for one in failures if report.role == "worker" and one.rank == report.rank]
    return error_of(named[0], failures) if named else _error_of_report(report)


def value_of(answer: Answer) -> Any:
    """What the worker returned. Raises ``WorkerFailed`` when it cannot be read here."""
    try:
        return parcels.load(answer.body)
    except Exception as error:  # whatever the classes in it raise
        raise WorkerFailed(
            f"what worker {answer.rank} returned cannot be read here: "
            f"{type(error).__name__}: {error}",
            role="worker",
            rank=answer.rank,
        ) from error


def error_of(answer: Answer, failures: Sequence[Answer]) -> Exception:
    """The exception that a worker raised, with its traceback there as the cause."""
    name = f"worker {answer.rank}"
    if answer.header["kind"] == "refusal":
        text = f"{name}: {answer.header['text']}"
        return WorkerFailed(text, role="worker", rank=answer.rank)
    kind = answer.header["type"]
    told = WorkerFailed(
        f"{name} raised {kind}{_the_same(answer, failures)}; its traceback there:\n"
        f"{answer.header['text']}",
        role="worker",
        rank=answer.rank,
    )
    if not answer.body:
        return told
    try:
        raised = parcels.load(answer.body)
    except Exception:  # its module is not here: the text must do
        return told
    if not isinstance(raised, Exception):
        return told
    raised.__cause__ = told
    return raised


def _when(answer: Answer) -> tuple[float, int]:
    return float(answer.header["at_s"]), answer.rank


def _the_same(answer: Answer, failures: Sequence[Answer]) -> str:
    others = [
        str(one.rank)
        for one in failures
        if one.rank != answer.rank and one.header.get("type") == answer.header["type"]
    ]
    if not others:
        return ""
    return f", as did worker{'s' if len(others) > 1 else ''} {', '.join(sorted(others, key=int))}"


def _error_of_report(report: Report) -> JobFailed:
    name = report.role if report.role == "scheduler" else f"{report.role} {report.rank}"
    text = f"{name} ended with {report.how}, before it had returned; {report.text}"
    if report.role == "worker":
        return WorkerFailed(text, role=report.role, rank=report.rank)
    text = f"{name} ended with {report.how}; {report.text}"
    return JobFailed(text, role=report.role, rank=report.rank)


def _words_of(ending: Ending | None) -> str:
    """For a job that ended without a report: it did not start, or was ended from outside."""
    if ending is None:
        return "the job has failed"
    if ending.status < 0:
        return f"the launcher of the job was ended by {describe_status(ending.status)}"
    said = "\n".join(ending.said) or f"its launcher ended with {describe_status(ending.status)}"
    return f"the job ended before all workers had returned: {said}"
