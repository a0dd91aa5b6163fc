"""The launcher's line about a running job: who supplies it, and what it does to the terminal.

``StatusDisplay`` is pure: lines and the time in, bytes to write out. On a terminal the line stands
below all output and is rewritten in place; elsewhere a line is added now and then. ``JobStatus`` is
what ``supervisor.py`` uses, on the main thread: a process that asks the job's scheduler again and
again (``kvstore.status --line --watch``) and writes a line for each answer; the launcher itself has
one thread and opens no socket to the job.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress

from kvstore.launch.job.child import LineSplitter

FIRST_AFTER_S = 3.0
"""On a terminal, after the job is complete; one that is over sooner needs no status."""
TERMINAL_INTERVAL_S = 2.0
PLAIN_INTERVAL_S = 60.0
_ERASE = b"\r\x1b[K"
# Without the current directory, which is first unless PYTHONSAFEPATH is set.
_COMMAND = (
    "import os, sys; os.nice(10); del sys.path[: sys.path[0] == '']; "
    "from kvstore.status import main; sys.exit(main(['--line', '--watch', sys.argv[1]]))"
)
_READ_BYTES = 64 * 1024
_REAP_S = 1.0


class StatusDisplay:
    """Decides what is written for a status. ``columns`` is the terminal's width, None for none."""

    def __init__(self, columns: int | None) -> None:
        self._columns = columns
        self._line = b""
        self._is_shown = False
        self._told = ""
        self._told_at_s = float("-inf")

    @property
    def interval_s(self) -> float:
        """How often a new status is of use."""
        return PLAIN_INTERVAL_S if self._columns is None else TERMINAL_INTERVAL_S

    @property
    def first_after_s(self) -> float:
        """How long after the job is complete the first one is of use."""
        return PLAIN_INTERVAL_S if self._columns is None else FIRST_AFTER_S

    def news(self, text: str, now_s: float) -> bytes:
        """A new status: what to write for it."""
        if self._columns is None:
            return self._plain(text, now_s)
        # A line as wide as the terminal would wrap, and could not be erased.
        fitting = f"[launcher] {_printable(text)}"[: max(0, self._columns - 1)]
        self._line = fitting.encode(errors="replace")
        self._is_shown = True
        return _ERASE + self._line

    def _plain(self, text: str, now_s: float) -> bytes:
        # A moment less: the status may come a little early.
        if text == self._told or now_s - self._told_at_s < PLAIN_INTERVAL_S - 1:
            return b""
        self._told, self._told_at_s = text, now_s
        return f"[launcher] {_printable(text)}\n".encode(errors="replace")

    def resize(self, columns: int) -> None:
        """The terminal has another width; counts from the next status on."""
        if self._columns is not None:
            self._columns = columns

    def before_output(self) -> bytes:
        """Return what to write before whole lines of output appear on the same terminal."""
        return _ERASE if self._is_shown else b""

    def after_output(self) -> bytes:
        """Return what to write after them."""
        return self._line if self._is_shown else b""

    def end(self) -> bytes:
        """The job is ending: no status any more, and no trace of one on the terminal."""
        erase = self.before_output()
        self._is_shown = False
        return erase


def terminal_columns(fd: int) -> int | None:
    """The width of the terminal at ``fd``; None where that is not one, or cannot rewrite a line."""
    if not os.isatty(fd) or os.environ.get("TERM", "dumb") == "dumb":
        return None
    try:
        return os.get_terminal_size(fd).columns or 80
    except OSError:
        return 80


class JobStatus:
    """The status of one job, from its completion to the beginning of its end.

    ``environment`` names the job's scheduler, as that of any of its processes does; ``fd`` is
    standard error, to which what the methods return is to be written at once. ``prepare`` runs
    between fork and exec of the process that asks. What goes wrong there ends it and says nothing.
    """

    def __init__(
        self, environment: Mapping[str, str], fd: int, prepare: Callable[[], None] | None
    ) -> None:
        self._environment = environment
        self._fd = fd
        self._prepare = prepare
        self._process: subprocess.Popen[bytes] | None = None
        self._splitter = LineSplitter()
        self.display = StatusDisplay(terminal_columns(fd))
        self.due_s: float | None = None
        """When ``tick`` has something to do."""

    def begin(self, now_s: float) -> None:
        """The job is complete."""
        self.due_s = now_s + self.display.first_after_s

    def tick(self, now_s: float) -> bool:
        """Start to ask when it is time; return whether there is a pipe to read from now on."""
        if self.due_s is None or now_s < self.due_s:
            return False
        self.due_s = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, f"{self.display.interval_s:g}"],
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
                preexec_fn=self._prepare,  # safe: the launcher has one thread
            )
        except OSError:  # no process can be started: a job needs no status
            return False
        return True

    @property
    def is_asking(self) -> bool:
        return self._process is not None

    def fileno(self) -> int:
        """The pipe of the process that asks."""
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout.fileno()

    def read(self, now_s: float) -> tuple[bytes, bool]:
        """Read the pipe once, which must be ready; what to write, and whether more may come."""
        data = os.read(self.fileno(), _READ_BYTES)
        lines = self._splitter.feed(data, now_s)
        columns = terminal_columns(self._fd)
        if columns is not None:
            self.display.resize(columns)
        shown = self.display.news(lines[-1].decode(errors="replace"), now_s) if lines else b""
        return shown, bool(data)

    def end(self) -> bytes:
        """The job is ending, or nothing more will come. Idempotent."""
        self.due_s = None
        if self._process is not None:
            assert self._process.stdout is not None
            self._process.kill()  # it has nothing to lose
            with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
                self._process.wait(_REAP_S)
            self._process.stdout.close()
            self._process = None
        return self.display.end()


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)
