"""What callers of ``kvstore.run`` and ``LocalCluster`` give: checked before anything is started.

Pure. Each function returns the argument in the form in which it is used, or raises an
``ArgumentTypeError`` or ``ArgumentValueError`` that names it as the caller knows it. What the
launcher's own options mean is checked in ``job.py``, which is next.

Which error the caller of ``kvstore.run`` sees: that of the worker that failed first.

Pure, but for unpickling what a worker raised. A failure brings others: when a worker is lost, its
peers raise ``NodeLostError``, which tells the caller nothing new. So the order is: what a worker
raised of its own, the earliest first; then what the launcher names as the first failure; then
whatever else there is. Read next: ``job.py``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from kvstore.errors import ArgumentTypeError, ArgumentValueError, JobFailed, WorkerFailed
from kvstore.errors.hints import did_you_mean
from kvstore.launch.job.report import describe_status
from kvstore.launch.options import LAUNCHERS, RESERVED_NAMES, LaunchError, check_word
from kvstore.launch.run import parcels
from kvstore.launch.run.parcels import Report


def as_count(name: str, value: object) -> int:
    """``workers`` or ``servers``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentTypeError(f"{name} must be an int of at least 1, got {value!r}")
    count = int(value)
    if count < 1:
        raise ArgumentValueError(f"{name} must be an int of at least 1, got {count}")
    return count


def as_launcher(launcher: object) -> str:
    if not isinstance(launcher, str) or launcher not in LAUNCHERS:
        raise ArgumentValueError(
            f"launcher must be one of {', '.join(LAUNCHERS)}; got {launcher!r}"
            f"{did_you_mean(launcher, LAUNCHERS)}"
        )
    return launcher


def as_seconds(timeout_s: object) -> float | None:
    """Return the seconds left: None for no limit, 0 for a time that has passed."""
    if timeout_s is None:
        return None
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, Real):
        raise ArgumentTypeError(
            f"timeout_s must be a number of seconds, or None for no limit, got {timeout_s!r}"
        )
    seconds = float(timeout_s)
    if math.isnan(seconds):
        raise ArgumentValueError(f"timeout_s must be a number of seconds, got {timeout_s}")
    return None if seconds == math.inf else max(0.0, seconds)


def as_environment(env: Mapping[str, str] | None) -> dict[str, str]:
    env = {} if env is None else env
    if not isinstance(env, Mapping):
        raise ArgumentTypeError(f"env must map names to texts, got {type(env).__name__}")
    for name, text in env.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise ArgumentTypeError(f"env must map names to texts, got {name!r}: {text!r}")
        if name in RESERVED_NAMES:
            raise ArgumentValueError(f"env cannot set {name}: the launcher sets it itself")
        if not (name.isascii() and name.isidentifier()):
            raise ArgumentValueError(f"env cannot hold {name!r}: {text!r} as a variable")
        _check_word(f"env[{name!r}]", text)
    return dict(env)


def _check_word(name: str, text: str) -> None:
    try:
        check_word(text)
    except LaunchError as error:
        raise ArgumentValueError(f"{name}: {error}") from None


def as_words(options: Sequence[str] | str) -> tuple[str, ...]:
    """``options``; a single text would be taken for many letters."""
    if isinstance(options, str):
        raise ArgumentTypeError(
            f"options must be a sequence of texts, as in options=({options!r},)"
        )
    if not isinstance(options, Sequence) or not all(isinstance(word, str) for word in options):
        raise ArgumentTypeError(f"options must be a sequence of texts, got {options!r}")
    return tuple(options)


def as_path(name: str, path: object) -> str | None:
    """``share_dir``, ``log_dir`` or ``python``; None is the default."""
    if path is None:
        return None
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise ArgumentTypeError(f"{name} must be a path, got {path!r}")
    _check_word(name, text)
    return text


def check_call(
    function: Callable[..., Any], args: Iterable[Any], kwargs: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The function and its arguments; returns these as a tuple and a dictionary."""
    if not callable(function):
        raise ArgumentTypeError(f"fn must be a function, got {type(function).__name__}")
    if not isinstance(args, Iterable) or isinstance(args, str | bytes | bytearray | Mapping):
        raise ArgumentTypeError(
            "args must be a sequence of the function's arguments, as in args=(2,); "
            f"got {type(args).__name__}"
        )
    named = {} if kwargs is None else kwargs
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named):
        raise ArgumentTypeError(
            f"kwargs must map names to values, as in kwargs={{'rate': 0.1}}; got {kwargs!r:.60}"
        )
    return tuple(args), dict(named)


@dataclass(frozen=True)
class WorkerAnswer:
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
class LauncherExit:
    """How the launcher ended: ``status`` as in ``subprocess``, its report, its last words."""

    status: int
    report: Report | None
    said: Sequence[str] = ()


def first_cause(answers: Sequence[WorkerAnswer], ending: LauncherExit | None) -> Exception:
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


def value_of(answer: WorkerAnswer) -> Any:
    """Return what the worker returned. Raises ``WorkerFailed`` when it cannot be read here."""
    try:
        return parcels.load(answer.body)
    except Exception as error:  # whatever the classes in it raise
        raise WorkerFailed(
            f"what worker {answer.rank} returned cannot be read here: "
            f"{type(error).__name__}: {error}",
            role="worker",
            rank=answer.rank,
        ) from error


def error_of(answer: WorkerAnswer, failures: Sequence[WorkerAnswer]) -> Exception:
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


def _when(answer: WorkerAnswer) -> tuple[float, int]:
    return float(answer.header["at_s"]), answer.rank


def _the_same(answer: WorkerAnswer, failures: Sequence[WorkerAnswer]) -> str:
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


def _words_of(ending: LauncherExit | None) -> str:
    """For a job that ended without a report: it did not start, or was ended from outside."""
    if ending is None:
        return "the job has failed"
    if ending.status < 0:
        return f"the launcher of the job was ended by {describe_status(ending.status)}"
    said = "\n".join(ending.said) or f"its launcher ended with {describe_status(ending.status)}"
    return f"the job ended before all workers had returned: {said}"
