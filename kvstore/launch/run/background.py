"""The launcher as a process in the background, for a caller that is not a launcher.

A notebook, a test or a thread cannot be the launcher, which wants the main thread and the signals
of a process. So it gets one, in a session of its own (a Ctrl-C in the terminal reaches the caller
only), tied to the caller by a pipe (``launch/job/signals.py``).

Three things of its output are not shown to people: the marks by which a worker says that it has
answered a call, the final block about a failure (which becomes the text of an exception), and,
once the caller ends the job, what launcher, scheduler and nodes say about that. ``worker.py``
writes the marks, ``launch/job/report.py`` the block. Used by ``job.py``, whose thread reads.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from kvstore.errors import ArgumentValueError, JobFailed, WorkerFailed
from kvstore.launch.environment import checkout_root
from kvstore.launch.job.report import FAILURE_HEADING, GOES_ON, describe_status
from kvstore.launch.options import RESERVED_NAMES, LaunchError, LaunchOptions, parse_arguments
from kvstore.launch.run.parcels import MARK, WorkerAnswer, error_of

_READ_BYTES = 64 * 1024
# sys.argv[1] is the directory of a checkout, or empty where the package is installed. It takes
# the place of the current directory, which is first unless PYTHONSAFEPATH is set.
_START = (
    "import sys; root = sys.argv.pop(1); sys.path[: sys.path[0] == ''] = [root] if root else []; "
    "from kvstore.launch.cli import main; sys.exit(main())"
)
# What a job gives its processes besides; a job within it has its own.
_OF_A_JOB = RESERVED_NAMES | {
    "DMLC_RANK",
    "KVSTORE_SERVER_IMPORT",
    "PS_JOB_KEY_FILE",
    "PS_SECURITY",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
}

_MARKED = re.compile(rf"(?P<before>.*){MARK}(?P<call>\d+)\Z", re.DOTALL)
_PREFIX = re.compile(r"\[(?P<role>worker|server|scheduler)(?: (?P<rank>\d+))?[^]]*\] ")
# What nodes say when others end: all of scheduler and servers, and the dated lines of workers.
_OF_THE_END = re.compile(
    r"\[(?:scheduler|server|worker \d+[^]]*\] \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] W[\w[\]]*: )"
)
_PROCESS = re.compile(r"process: +(?P<role>worker|server|scheduler)(?: (?P<rank>\d+))?\b")
_ENDED = re.compile(r"ended: +(?P<how>.*?), [0-9.]+ s after the start")
_LOG_HEADING = re.compile(r"the last (?:line|\d+ lines) of its log:|its log is empty")

Line = tuple[bool, str]
"""(is it of standard error, the line without its end)."""


@dataclass(frozen=True)
class JobOptions:
    """What the caller asked for, each checked by itself; see :func:`checked_command`."""

    workers: int
    servers: int
    launcher: str = "local"
    env: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    share_dir: str | None = None
    log_dir: str | None = None
    python: str | None = None


def checked_command(wanted: JobOptions, directory: Path, mode: str) -> list[str]:
    """The launcher's arguments. Raises a ``UsageError`` where they make no sense."""
    log_dir = wanted.log_dir or str(directory / "logs")
    python = wanted.python or sys.executable
    arguments = [
        *("-n", str(wanted.workers), "-s", str(wanted.servers), "--launcher", wanted.launcher),
        *("--log-dir", log_dir, "--no-status"),
        *(part for name in wanted.env for part in ("--env", name)),
        *(() if wanted.python is None or wanted.launcher == "local" else ("--python", python)),
        *wanted.options,
    ]
    command = (python, "-m", "kvstore.launch.run.worker", str(directory), mode)
    arguments += ["--", *command]
    try:
        understood: LaunchOptions | None = parse_arguments(arguments)
    except LaunchError as error:
        text = str(error).replace("(--help", "(kvstore-launch --help")
        raise ArgumentValueError(text) from error
    except SystemExit:  # of --help or --version
        understood = None
    if understood is None or not _is_as_wanted(wanted, understood, command):
        raise ArgumentValueError(
            "options are for the launcher's other options: workers, servers and launcher have "
            f"arguments of their own, and the job must run; got {list(wanted.options)}"
        )
    _check_launcher(understood)
    return arguments


def _is_as_wanted(wanted: JobOptions, found: LaunchOptions, command: tuple[str, ...]) -> bool:
    """Whether the further options have left alone what has arguments of its own."""
    return (
        found.command == command
        and (found.num_workers, found.num_servers) == (wanted.workers, wanted.servers)
        and found.launcher == wanted.launcher
        and not (found.check or found.dry_run)
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


def own_environment(environ: Mapping[str, str], additions: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment less an enclosing job's variables, with ``additions``."""
    is_in_a_job = "DMLC_ROLE" in environ
    kept = {name: text for name, text in environ.items() if not (is_in_a_job and name in _OF_A_JOB)}
    return {**kept, **additions}


class BackgroundLauncher:
    """A running launcher. One thread reads until its end and closes it; any may signal."""

    def __init__(
        self, arguments: Sequence[str], additions: Mapping[str, str], directory: Path
    ) -> None:
        self.output = LauncherOutput()
        held, self._tie = os.pipe()
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-c", _START, checkout_root() or ""),
                    *("--tied", f"{held}:{directory}", *arguments),
                ],
                env=own_environment(os.environ, additions),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=(held,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._tie)
            raise
        finally:
            os.close(held)
        self._selector = selectors.DefaultSelector()
        self._rests: dict[IO[bytes], bytes] = {}
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            self._rests[pipe] = b""
            self._selector.register(pipe, selectors.EVENT_READ)

    def read(self, timeout_s: float | None) -> list[Line] | None:
        """Wait for output, at most that long; the lines to show, or None after the last one.

        Both outputs are closed then, which the launcher does by ending.
        """
        if not self._rests:
            return None
        lines: list[Line] = []
        for key, _ in self._selector.select(timeout_s):
            pipe: IO[bytes] = key.fileobj  # type: ignore[assignment]
            data = os.read(pipe.fileno(), _READ_BYTES)
            *complete, rest = (self._rests[pipe] + data).split(b"\n")
            self._rests[pipe] = rest
            if not data:
                self._selector.unregister(pipe)
                del self._rests[pipe]
                complete += [rest] if rest else []  # of one that was killed; else lines are whole
            is_error = pipe is self._process.stderr
            lines += [(is_error, line.decode(errors="replace")) for line in complete]
        shown = [(is_error, self.output.show(line, is_error=is_error)) for is_error, line in lines]
        return [(is_error, line) for is_error, line in shown if line is not None]

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        self._process.send_signal(number)

    def close(self) -> int:
        """After the last line: close everything; return the exit status, negative for a signal."""
        self._selector.close()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        status = self._process.wait()
        os.close(self._tie)
        return status


@dataclass(frozen=True)
class FailureReport:
    """The launcher's final block: who failed first and how; ``text`` is for people."""

    role: str
    rank: int
    how: str
    text: str


@dataclass
class LauncherOutput:
    """Sorts the lines of one launcher. ``said`` are the launcher's own, without their prefix."""

    said: list[str] = field(default_factory=list)
    block: list[str] = field(default_factory=list)
    #: (call, rank, is it of standard error)
    marks: set[tuple[int, int, bool]] = field(default_factory=set)
    is_ending: bool = False
    _goes_on: bool = False

    def show(self, line: str, *, is_error: bool) -> str | None:
        """Return the line to show, or None. Lines come without their end."""
        if is_error and (self.block or line == FAILURE_HEADING):
            self.block.append(line)
            return None
        if is_error and not line:  # stands above the block, and nowhere else
            return None
        if self._is_of_the_launcher(line, is_error):
            self.said.append(line.removeprefix("[launcher] "))
            return None if self.is_ending else line
        if self.is_ending and _OF_THE_END.match(line):
            return None
        return self._without_mark(line, is_error)

    def has_answered(self, call: int, rank: int) -> bool:
        """Whether a worker has said, on any stream, that its answer is there."""
        return not self.marks.isdisjoint({(call, rank, False), (call, rank, True)})

    def has_all_of(self, call: int, ranks: int) -> bool:
        """Whether every worker has said, on both streams, that the call's lines are complete."""
        return all(
            (call, rank, is_error) in self.marks
            for rank in range(ranks)
            for is_error in (False, True)
        )

    @property
    def is_without_scheduler(self) -> bool:
        """Whether the launcher has said that the scheduler is lost and the job continues."""
        return any(GOES_ON in text for text in self.said)

    def _is_of_the_launcher(self, line: str, is_error: bool) -> bool:
        """Its messages begin with its name; what a cluster's program said follows, indented."""
        begins = line.startswith("[launcher] ")
        if not is_error:
            return begins
        self._goes_on = begins or (self._goes_on and line.startswith("  "))
        return self._goes_on

    def _without_mark(self, line: str, is_error: bool) -> str | None:
        found = _MARKED.match(line)
        prefix = _PREFIX.match(line)
        if found is None or prefix is None or prefix["rank"] is None:
            return line
        self.marks.add((int(found["call"]), int(prefix["rank"]), is_error))
        return None if found["before"] == prefix[0] else found["before"]

    def report(self, without: str) -> FailureReport | None:
        """Return what the final block says, or None where it names no process.

        ``without`` is a directory that will be gone when somebody reads it: lines that name it
        are left out.
        """
        process = next(filter(None, map(_PROCESS.match, self.block)), None)
        ended = next(filter(None, map(_ENDED.match, self.block)), None)
        if process is None or ended is None:
            return None
        log = [i for i, line in enumerate(self.block) if _LOG_HEADING.match(line)]
        lines = [line.partition(MARK)[0] for line in self.block[log[0] :]] if log else []
        text = "\n".join(line for line in lines if line.strip() and without not in line)
        return FailureReport(process["role"], int(process["rank"] or 0), ended["how"], text)


def show(lines: Sequence[Line]) -> None:
    """Write lines to ``sys.stdout`` and ``sys.stderr`` as they are now: a notebook's, a test's."""
    for is_error, line in lines:
        stream = sys.stderr if is_error else sys.stdout
        if stream is None:
            continue
        try:
            stream.write(f"{line}\n")
        except UnicodeEncodeError:  # no reason to end a job
            encoding = stream.encoding or "ascii"
            stream.write(f"{line}\n".encode(encoding, "backslashreplace").decode(encoding))
    for stream in (sys.stdout, sys.stderr):
        if lines and stream is not None:
            stream.flush()


# -- which error the caller sees --------------------------------------------------------------


@dataclass(frozen=True)
class LauncherExit:
    """How the launcher ended: ``status`` as in ``subprocess``, its report, its last words."""

    status: int
    report: FailureReport | None
    said: Sequence[str] = ()


def first_cause(answers: Mapping[int, WorkerAnswer], ending: LauncherExit | None) -> Exception:
    """The error to raise for a call that has failed. ``ending`` is None while the job runs.

    A failure brings others: when a worker is lost, its peers raise ``NodeLostError``, which tells
    the caller nothing new. So the order is: what a worker raised of its own, the earliest first;
    then what the launcher names as the first failure; then whatever else there is.
    """
    failures = {rank: answer for rank, answer in answers.items() if answer.failed}
    earliest = sorted(failures, key=lambda rank: (failures[rank].at_s, rank))
    for rank in earliest:
        if not failures[rank].blames_another:
            return error_of(rank, failures)
    report = None if ending is None else ending.report
    if report is not None and not (report.role == "worker" and report.rank in failures):
        return _error_of_report(report)
    if failures:
        return error_of(earliest[0] if report is None else report.rank, failures)
    return JobFailed(_words_of(ending))


def _error_of_report(report: FailureReport) -> JobFailed:
    name = report.role if report.role == "scheduler" else f"{report.role} {report.rank}"
    ended = f"{name} ended with {report.how}"
    if report.role == "worker":
        text = f"{ended}, before it had returned; {report.text}"
        return WorkerFailed(text, role=report.role, rank=report.rank)
    return JobFailed(f"{ended}; {report.text}", role=report.role, rank=report.rank)


def _words_of(ending: LauncherExit | None) -> str:
    """For a job that ended without a report: it did not start, or was ended from outside."""
    if ending is None:
        return "the job has failed"
    if ending.status < 0:
        return f"the launcher of the job was ended by {describe_status(ending.status)}"
    said = "\n".join(ending.said) or f"its launcher ended with {describe_status(ending.status)}"
    return f"the job ended before all workers had returned: {said}"
