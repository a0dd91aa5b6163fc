"""The launcher as a background process, for notebooks and tests.

A notebook, a test or a thread cannot be the launcher, which needs the main thread and the signals
of a process. So the launcher runs in a process with a session of its own (a Ctrl-C in the terminal
reaches only the caller), tied to the caller by a pipe (``launch/job/signals.py``).

Three parts of its output are not shown to users: the marks with which a worker reports its answer
to a call; the final report of a failure, which becomes the text of an exception; and, after the
caller has ended the job, the messages of launcher, scheduler and nodes about this end.
``worker.py`` writes the marks, ``launch/job/report.py`` the report. Used by ``job.py``, whose
thread reads the output.
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
from kvstore.launch.job.report import FAILURE_HEADING, describe_status
from kvstore.launch.options import RESERVED_NAMES, LaunchError, LaunchOptions, parse_arguments
from kvstore.launch.run.call_files import MARK, WorkerAnswer, error_of

_READ_BYTES = 64 * 1024
# sys.argv[1] is the directory of a checkout, or "" if the package is installed. It replaces the
# current directory, which comes first unless PYTHONSAFEPATH is set.
_START = (
    "import sys; root = sys.argv.pop(1); sys.path[: sys.path[0] == ''] = [root] if root else []; "
    "from kvstore.launch.cli import main; sys.exit(main())"
)
# Further variables of a job's processes; a job within it sets its own.
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
_PREFIX = re.compile(r"\[(?P<role>worker|server|standby|scheduler)(?: (?P<rank>\d+))?[^]]*\] ")
# Messages of nodes when others end: all of the service, and the dated lines of workers.
_OF_THE_END = re.compile(
    r"\[(?:scheduler|server|standby|worker \d+[^]]*\] "
    r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] W[\w[\]]*: )"
)
_PROCESS = re.compile(
    r"process: +(?P<name>(?P<role>worker|server|standby|scheduler)(?: (?P<rank>\d+))?)\b"
)
_ENDED = re.compile(r"ended: +(?P<how>.*?), [0-9.]+ s after the start")
_LOG_HEADING = re.compile(r"the last (?:line|\d+ lines) of its log:|its log is empty")

Line = tuple[bool, str]
"""(whether it is from standard error, the line without its end)."""


@dataclass(frozen=True)
class JobOptions:
    """The caller's request, with checked values; see :func:`checked_command`."""

    workers: int
    servers: int
    launcher: str = "local"
    env: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    share_dir: str | None = None
    log_dir: str | None = None
    python: str | None = None
    restarts: int = 0
    """How many times workers and standbys may be started again."""
    standbys: int = 0


def checked_command(wanted: JobOptions, directory: Path, mode: str) -> list[str]:
    """Return the launcher's arguments. Raises ``UsageError`` if they are invalid."""
    python = wanted.python or sys.executable
    command = (python, "-m", "kvstore.launch.run.worker", str(directory), mode)
    arguments = [
        *("-n", str(wanted.workers), "-s", str(wanted.servers), "--launcher", wanted.launcher),
        *("--log-dir", wanted.log_dir or str(directory / "logs"), "--no-status"),
        *(part for name in wanted.env for part in ("--env", name)),
        *(() if wanted.python is None or wanted.launcher == "local" else ("--python", python)),
        *(() if not wanted.restarts else ("--worker-restarts", str(wanted.restarts))),
        *(() if not wanted.standbys else ("--standbys", str(wanted.standbys))),
        *wanted.options,
        *("--", *command),
    ]
    try:
        found: LaunchOptions | None = parse_arguments(arguments)
    except LaunchError as error:
        text = str(error).replace("(--help", "(kvstore-launch --help")
        raise ArgumentValueError(text) from error
    except SystemExit:  # from --help or --version
        found = None
    # The further options must not change values that have arguments of their own.
    if (
        found is None
        or (found.num_workers, found.num_servers) != (wanted.workers, wanted.servers)
        or (found.command, found.launcher) != (command, wanted.launcher)
        or (found.check or found.dry_run)
    ):
        raise ArgumentValueError(
            "options must not have -n, -s, --launcher, --check or --dry-run, got "
            f"{list(wanted.options)}; use the arguments workers, servers and launcher"
        )
    if found.restarts:
        raise ArgumentValueError(
            "options must not have --restarts, because kvstore.run and LocalCluster start a job "
            "once; use the argument restarts of kvstore.run, which starts lost workers again"
        )
    if found.launcher == "kubernetes":
        raise ArgumentValueError(
            "launcher='kubernetes' cannot run a function, since pods share no directory with "
            "this process; put the function into a script for kvstore-launch --launcher "
            "kubernetes, or choose another launcher"
        )
    if found.launcher == "ssh" and found.hostfile is None:
        raise ArgumentValueError(
            "launcher='ssh' needs a hosts file: options=('--hostfile=FILE',), with one host on "
            "each line of FILE"
        )
    return arguments


def own_environment(environ: Mapping[str, str], additions: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without an enclosing job's variables.

    It includes ``additions``.
    """
    is_in_a_job = "DMLC_ROLE" in environ
    kept = {name: text for name, text in environ.items() if not (is_in_a_job and name in _OF_A_JOB)}
    return {**kept, **additions}


class BackgroundLauncher:
    """A running launcher; one thread reads and closes it, any thread may signal it."""

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
        assert self._process.stdout is not None and self._process.stderr is not None
        self._rests = {self._process.stdout: b"", self._process.stderr: b""}
        for pipe in self._rests:
            self._selector.register(pipe, selectors.EVENT_READ)

    def read(self, timeout_s: float | None) -> list[Line] | None:
        """Wait at most ``timeout_s`` for output; return its lines, or None at the end.

        At the end, the launcher has closed both outputs.
        """
        if not self._rests:
            return None
        shown: list[Line] = []
        for key, _ in self._selector.select(timeout_s):
            pipe: IO[bytes] = key.fileobj  # type: ignore[assignment]
            data = os.read(pipe.fileno(), _READ_BYTES)
            *complete, rest = (self._rests[pipe] + data).split(b"\n")
            self._rests[pipe] = rest
            if not data:
                self._selector.unregister(pipe)
                del self._rests[pipe]
                pipe.close()
                complete += [rest] if rest else []  # only a killed launcher leaves half a line
            is_error = pipe is self._process.stderr
            for line in complete:
                text = self.output.show(line.decode(errors="replace"), is_error=is_error)
                shown += [] if text is None else [(is_error, text)]
        return shown

    def signal(self, number: signal.Signals) -> None:
        """Send the launcher a signal, unless it has ended."""
        self._process.send_signal(number)

    def close(self) -> int:
        """Close everything after the last line; return the exit status."""
        self._selector.close()
        for pipe in self._rests:
            pipe.close()
        status = self._process.wait()
        os.close(self._tie)
        return status


@dataclass
class LauncherOutput:
    """A launcher's output by line; ``said`` are the launcher's own lines."""

    said: list[str] = field(default_factory=list)
    block: list[str] = field(default_factory=list)
    #: (call, rank, whether it is from standard error)
    marks: set[tuple[int, int, bool]] = field(default_factory=set)
    is_ending: bool = False
    _goes_on: bool = False

    def show(self, line: str, *, is_error: bool) -> str | None:
        """Return the line to show, or None; ``line`` has no line end."""
        if is_error and (self.block or line == FAILURE_HEADING):
            self.block.append(line)
            return None
        if is_error and not line:  # the empty line above the final report
            return None
        # The launcher's messages begin with its name; a cluster program's output in them is
        # indented.
        is_own = line.startswith("[launcher] ")
        if is_error:
            is_own = self._goes_on = is_own or (self._goes_on and line.startswith("  "))
        if is_own:
            self.said.append(line.removeprefix("[launcher] "))
            return None if self.is_ending else line
        if self.is_ending and _OF_THE_END.match(line):
            return None
        found, prefix = _MARKED.match(line), _PREFIX.match(line)
        if found is None or prefix is None or prefix["rank"] is None:
            return line
        self.marks.add((int(found["call"]), int(prefix["rank"]), is_error))
        return None if found["before"] == prefix[0] else found["before"]

    def has_answered(self, call: int, rank: int) -> bool:
        """Return whether a worker has announced its answer on any stream."""
        return not self.marks.isdisjoint({(call, rank, False), (call, rank, True)})

    def has_all_of(self, call: int, ranks: int) -> bool:
        """Return whether every worker has announced that its lines are complete."""
        return {(call, rank, one) for rank in range(ranks) for one in (False, True)} <= self.marks

    def report(self, without: str) -> JobFailed | None:
        """Return the error of the final report (the first failure), or None.

        ``without`` is a directory that will soon be removed: lines that name it are left out.
        """
        process = next(filter(None, map(_PROCESS.match, self.block)), None)
        ended = next(filter(None, map(_ENDED.match, self.block)), None)
        if process is None or ended is None:
            return None
        log = [i for i, line in enumerate(self.block) if _LOG_HEADING.match(line)]
        lines = [line.partition(MARK)[0] for line in self.block[log[0] :]] if log else []
        text = "\n".join(line for line in lines if line.strip() and without not in line)
        is_worker = process["role"] == "worker"
        kind, when = (WorkerFailed, ", before it had returned") if is_worker else (JobFailed, "")
        return kind(
            f"{process['name']} ended with {ended['how']}{when}; {text}",
            role=process["role"],
            rank=int(process["rank"] or 0),
        )


def show(lines: Sequence[Line]) -> None:
    """Write lines to the current ``sys.stdout`` and ``sys.stderr``.

    These may belong to a notebook or a test.
    """
    for is_error, line in lines:
        stream = sys.stderr if is_error else sys.stdout
        if stream is None:
            continue
        try:
            stream.write(f"{line}\n")
        except UnicodeEncodeError:  # not a reason to end the job
            encoding = stream.encoding or "ascii"
            stream.write(f"{line}\n".encode(encoding, "backslashreplace").decode(encoding))
    for stream in (sys.stdout, sys.stderr):
        if lines and stream is not None:
            stream.flush()


# -- which error the caller sees --------------------------------------------------------------


@dataclass(frozen=True)
class LauncherExit:
    """The end of the launcher: its status, the first failure and its own lines."""

    status: int
    report: JobFailed | None
    said: Sequence[str] = ()


def first_cause(answers: Mapping[int, WorkerAnswer], ending: LauncherExit | None) -> Exception:
    """Return the error of a failed call. ``ending`` is None while the job runs.

    One failure causes others: when a worker is lost, its peers raise ``NodeLostError``, which tells
    the caller nothing new. So the first of these is returned: the earliest error that a worker
    raised itself; the first failure in the launcher's report; any other error.
    """
    failures = {rank: answer for rank, answer in answers.items() if answer.failed}
    earliest = sorted(failures, key=lambda rank: (failures[rank].at_s, rank))
    for rank in earliest:
        if not failures[rank].blames_another:
            return error_of(rank, failures)
    report = None if ending is None else ending.report
    if report is not None and not (report.role == "worker" and report.rank in failures):
        return report
    if failures:
        return error_of(earliest[0] if report is None else report.rank, failures)
    if ending is None:
        return JobFailed("the job has failed")
    how = describe_status(ending.status)  # the job did not start, or was ended from outside
    if ending.status < 0:
        return JobFailed(f"the launcher of the job was ended by {how}")
    said = "\n".join(ending.said) or f"its launcher ended with {how}"
    return JobFailed(f"the job ended before all workers had returned: {said}")
