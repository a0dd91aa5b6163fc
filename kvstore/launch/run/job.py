"""One job of ``kvstore.run`` or ``LocalCluster``: its directory, its launcher, its answers.

The function goes into a file, the launcher is started in the background, its workers run
``kvstore/launch/run/worker.py`` and leave their answers as files. Nothing waits without showing
what the processes write, and nothing stays: not after an error, an interrupt, or the death of the
caller. Calls are made one after the other; ``cluster.py`` sees to that. Read
``parcels.py`` and ``background.py`` next, ``checks.py`` for who is to blame.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.errors import ArgumentTypeError, ArgumentValueError, JobFailed, MissingDependencyError
from kvstore.launch.options import LaunchError, LaunchOptions, parse_arguments
from kvstore.launch.run import parcels
from kvstore.launch.run.background import BackgroundLauncher, show
from kvstore.launch.run.checks import LauncherExit, WorkerAnswer, check_call, first_cause, value_of
from pslite.errors import DeadlineError, UsageError

LOOK_S = 1.0
"""How often answers are looked for where no bell can be heard: in a directory of several hosts."""

PATIENCE_S = 2.0
"""For the other workers' answers after one has raised, in a cluster that shall go on."""

VERDICT_S = 15.0
"""For the launcher to name who was lost; it waits for the others a while itself."""

END_S = 75.0
"""For processes to end by themselves after the last answer: longer than a worker waits for servers
that accept nothing of what it has pushed (PS_CLOSE_TIMEOUT)."""

LAST_LINES_S = 1.0


@dataclass(frozen=True)
class JobOptions:
    """What the caller asked for, checked by ``running_checks``; see :func:`checked_command`."""

    workers: int
    servers: int
    launcher: str = "local"
    env: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    share_dir: str | None = None
    log_dir: str | None = None
    python: str | None = None


@dataclass(frozen=True)
class CallOutcome:
    """How a call ended: ``answers`` in the order of the ranks, unless there is an ``error``."""

    answers: Sequence[WorkerAnswer]
    error: Exception | None = None

    def values(self) -> list[Any]:
        """Return what the workers returned; raises the error."""
        if self.error is not None:
            raise self.error
        return [value_of(answer) for answer in self.answers]


def checked_command(options: JobOptions, directory: Path, mode: str) -> list[str]:
    """The launcher's arguments. Raises a ``UsageError`` where they make no sense."""
    log_dir = options.log_dir or str(directory / "logs")
    python = options.python or sys.executable
    arguments = [
        *("-n", str(options.workers), "-s", str(options.servers), "--launcher", options.launcher),
        *("--log-dir", log_dir, "--no-status"),
        *(part for name in options.env for part in ("--env", name)),
        *(() if options.python is None or options.launcher == "local" else ("--python", python)),
        *options.options,
    ]
    command = (python, "-m", "kvstore.launch.run.worker", str(directory), mode)
    arguments += ["--", *command]
    try:
        understood = parse_arguments(arguments)
    except LaunchError as error:
        text = str(error).replace("(--help", "(kvstore-launch --help")
        raise ArgumentValueError(text) from error
    except SystemExit:  # of --help or --version
        raise _no_such_options(options) from None
    if understood.command != command:
        raise _no_such_options(options)
    _check_agreement(options, understood)
    _check_launcher(understood)
    return arguments


def _check_agreement(options: JobOptions, understood: LaunchOptions) -> None:
    wanted = (options.workers, options.servers, options.launcher)
    found = (understood.num_workers, understood.num_servers, understood.launcher)
    if wanted != found or understood.check or understood.dry_run:
        raise _no_such_options(options)


def _no_such_options(options: JobOptions) -> ArgumentValueError:
    return ArgumentValueError(
        "options are for the launcher's other options: workers, servers and launcher have "
        f"arguments of their own, and the job must run; got {list(options.options)}"
    )


def _check_launcher(understood: LaunchOptions) -> None:
    """Whether the workers of this launcher can be handed a function."""
    if understood.launcher == "kubernetes":
        raise ArgumentValueError(
            "launcher='kubernetes' cannot run a function: pods share no directory with this "
            "process; put the function into a script and start that with kvstore-launch "
            "--launcher kubernetes, or choose another launcher"
        )
    if understood.launcher == "ssh" and understood.hostfile is None:
        raise ArgumentValueError(
            "launcher='ssh' needs the hosts: options=('--hostfile=FILE',), with one host on each "
            "line of FILE"
        )


class RunningJob:
    """A job that has been started; ``mode`` is that of ``worker_main``. End it with :meth:`end`.

    One thread at a time gathers answers, finishes or ends it. Meanwhile one other may leave and
    order calls, until :meth:`finish` or :meth:`end`, and any may stop it.
    """

    def __init__(self, options: JobOptions, mode: str) -> None:
        self.workers = options.workers
        self._mode = mode
        self._is_local = options.launcher == "local"
        self._launcher: BackgroundLauncher | None = None
        self._orders: list[int] = []
        self._serial = 0
        self._env = options.env
        self._directory = _make_directory(options)
        try:
            self._arguments = checked_command(options, self._directory, mode)
        except BaseException:
            self.end()
            raise

    # -- calls -------------------------------------------------------------------------

    def leave_call(self, call: int, body: bytes) -> None:
        """Put a function, :func:`packed`, where the workers find it."""
        header = {
            "python": parcels.python_version(),
            "by_value": parcels.holds_code(body),
            "path": own_path(sys.path, os.getcwd()),
        }
        try:
            parcels.write(parcels.call_path(self._directory, call), header, body)
        except OSError as error:
            raise UsageError(
                f"the function cannot be written to {self._directory}: {error.strerror}; give "
                "another directory (share_dir=..., or TMPDIR)"
            ) from error

    def start(self) -> None:
        """Start the launcher, which starts everything else."""
        if self._mode == "serve":
            for rank in range(self.workers):
                path = parcels.orders_path(self._directory, rank)
                os.mkfifo(path, 0o600)
                # For reading, too: so it can be opened before the worker is there.
                self._orders.append(os.open(path, os.O_RDWR | os.O_NONBLOCK))
        self._launcher = BackgroundLauncher(self._arguments, self._env, self._directory)

    def order(self, call: int) -> None:
        """Tell the workers, which serve, to make this call."""
        self._write_orders(f"{call}\n")

    def is_answered(self, call: int) -> bool:
        """Return whether all workers have answered, without waiting."""
        return all(self._answer_path(call, rank).exists() for rank in range(self.workers))

    def gather(
        self, call: int, timeout_s: float | None, began_s: float | None = None
    ) -> CallOutcome:
        """Wait for all workers' answers, or for a failure; shows their output meanwhile.

        After a failure the job may still run, see :attr:`goes_on`. Raises ``DeadlineError`` when
        ``timeout_s`` are over, counted from ``began_s`` of the monotonic clock (now); it may be
        called again then.
        """
        began_s = time.monotonic() if began_s is None else began_s
        give_up_at_s = float("inf") if timeout_s is None else began_s + timeout_s
        answers: dict[int, WorkerAnswer] = {}
        failed_at_s: float | None = None
        while True:
            ending = self._ending()
            self._read_answers(call, answers)
            if len(answers) == self.workers and not any(a.failed for a in answers.values()):
                break
            now_s = time.monotonic()
            found = list(answers.values())
            if failed_at_s is None and any(answer.failed for answer in found):
                failed_at_s = now_s
            wait_until_s = self._wait_until(found, failed_at_s)
            if ending is not None or now_s >= wait_until_s:
                self._after_failure(call, found)
                return CallOutcome(found, first_cause(found, ending))
            if now_s >= give_up_at_s:
                missing = [rank for rank in range(self.workers) if rank not in answers]
                raise DeadlineError(f"after {timeout_s:g} s {_names(missing)} had not returned")
            self._wait(min(wait_until_s, give_up_at_s) - now_s)
        self._show_last(call)
        self._forget(call)
        return CallOutcome([answers[rank] for rank in range(self.workers)])

    @property
    def goes_on(self) -> bool:
        """Whether the job still runs."""
        return self._launcher is not None and self._launcher.status is None

    # -- the end -----------------------------------------------------------------------

    def stop(self) -> None:
        """End all processes; a thread that gathers answers gets an outcome. Any thread may call."""
        if self._launcher is not None:
            self._launcher.stop()

    def finish(self) -> None:
        """After the last answer: let all processes end by themselves, showing what they write.

        Those that do not are ended after :data:`END_S`.
        """
        assert self._launcher is not None
        if self._orders:
            self._write_orders(parcels.END)
            self._close_orders()
        give_up_at_s = time.monotonic() + END_S
        while self._launcher.status is None and time.monotonic() < give_up_at_s:
            self._wait(give_up_at_s - time.monotonic())
        if self._launcher.status is None:
            show([(True, f"[launcher] the job did not end within {END_S:g} s; ending it")])
        ending = self._ending()
        if ending is not None and ending.report is not None:
            error = first_cause([], ending)
            order = "although" if ending.report.role == "scheduler" else "but then"
            show([(True, f"[launcher] all workers had returned, {order} {error}")])
        self.end()

    def end(self) -> None:
        """End whatever runs, show the last lines, and remove the directory; idempotent."""
        try:
            if self._launcher is not None:
                self._launcher.close()
                show(self._launcher.news(0, 0)[1])
        finally:
            self._close_orders()
            shutil.rmtree(self._directory, ignore_errors=True)

    # -- parts -------------------------------------------------------------------------

    def _wait(self, timeout_s: float) -> None:
        assert self._launcher is not None
        hears = self._launcher.hears_the_bell and self._is_local
        longest_s = timeout_s if hears else min(timeout_s, LOOK_S)
        limit_s = None if longest_s == float("inf") else max(0.0, longest_s)
        self._serial, lines = self._launcher.news(self._serial, limit_s)
        show(lines)

    def _answer_path(self, call: int, rank: int) -> Path:
        return parcels.answer_path(self._directory, call, rank)

    def _read_answers(self, call: int, answers: dict[int, WorkerAnswer]) -> None:
        for rank in range(self.workers):
            if rank in answers:
                continue
            try:
                header, body = parcels.read(self._answer_path(call, rank))
            except FileNotFoundError:
                continue
            except parcels.NotReadable as error:
                raise JobFailed(str(error)) from error
            answers[rank] = WorkerAnswer(rank, header, body)

    def _wait_until(self, answers: Sequence[WorkerAnswer], failed_at_s: float | None) -> float:
        """Until when other answers, or the launcher's verdict, are awaited after a failure."""
        if failed_at_s is None:
            return float("inf")
        assert self._launcher is not None
        # Workers that serve go on without the scheduler: the launcher has no verdict to give.
        is_known = self._mode == "serve" and self._launcher.output.is_without_scheduler
        if all(one.blames_another for one in answers if one.failed) and not is_known:
            return failed_at_s + VERDICT_S
        if self._mode == "serve" and len(answers) < self.workers:
            return failed_at_s + PATIENCE_S
        return failed_at_s

    def _after_failure(self, call: int, answers: Sequence[WorkerAnswer]) -> None:
        """End a job that cannot go on: with answers missing, its workers wait for each other."""
        assert self._launcher is not None
        unanswered = len(answers) < self.workers
        lost = any(answer.blames_another for answer in answers)
        if self._mode == "once" or unanswered or lost:
            self._launcher.stop()
        self._show_last(call)
        self._forget(call)

    def _ending(self) -> LauncherExit | None:
        assert self._launcher is not None
        status = self._launcher.status
        if status is None:
            return None
        output = self._launcher.output
        return LauncherExit(status, output.report(without=str(self._directory)), output.said)

    def _show_last(self, call: int) -> None:
        """The lines of a call that come after its answers; not for ever."""
        assert self._launcher is not None
        if self._mode == "once" or call == 0:
            return
        give_up_at_s = time.monotonic() + LAST_LINES_S
        while not self._launcher.has_all_of(call, self.workers) and self.goes_on:
            left_s = give_up_at_s - time.monotonic()
            if left_s <= 0:
                return
            self._wait(left_s)
        show(self._launcher.news(0, 0)[1])

    def _forget(self, call: int) -> None:
        """Free the room that a call took."""
        parcels.call_path(self._directory, call).unlink(missing_ok=True)
        for rank in range(self.workers):
            self._answer_path(call, rank).unlink(missing_ok=True)

    def _write_orders(self, text: str) -> None:
        for descriptor in self._orders:
            try:
                os.write(descriptor, text.encode())
            except BlockingIOError as error:
                raise UsageError(
                    "thousands of calls wait for their turn; wait for their results first"
                ) from error

    def _close_orders(self) -> None:
        while self._orders:
            os.close(self._orders.pop())


def _make_directory(options: JobOptions) -> Path:
    parent = options.share_dir
    if parent is None and options.launcher != "local":
        parent = os.getcwd()
    try:
        return parcels.make_directory(parent)
    except OSError as error:
        raise ArgumentValueError(
            f"no directory for the job can be made in {error.filename}: {error.strerror}; give "
            "one that exists and can be written to (share_dir=...)"
        ) from error


def packed(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> bytes:
    """A call as bytes. Raises a ``UsageError`` where it cannot travel."""
    positional, named = check_call(function, args, kwargs)
    what = f"the function {getattr(function, '__name__', type(function).__name__)}"
    try:
        return parcels.dump((function, positional, named), what)
    except parcels.NotSendable as error:
        if error.needs_cloudpickle:
            raise MissingDependencyError(str(error)) from error
        raise ArgumentTypeError(str(error)) from error


def own_path(path: Sequence[str], here: str) -> list[str]:
    """The caller's own directories of modules; workers have those of their Python themselves."""
    library = os.path.realpath(sysconfig.get_path("stdlib"))
    entries = [os.path.join(here, entry).rstrip("/") or "/" for entry in path]
    return [entry for entry in entries if not _is_library(entry, library)]


def _is_library(entry: str, library: str) -> bool:
    found = os.path.realpath(entry)
    return (
        f"{found}/".startswith(f"{library}/")
        or not {"site-packages", "dist-packages"}.isdisjoint(found.split("/"))
        or re.search(r"/python\d+\.zip$", found) is not None
    )


def _names(ranks: Sequence[int]) -> str:
    """``worker 2``, or ``workers 0, 1 and 3``."""
    *first, last = map(str, ranks)
    return f"workers {', '.join(first)} and {last}" if first else f"worker {last}"
