"""The launcher's standard output and error, and the status line.

A pipe into a pager, or a terminal that was paused with Ctrl-S, accepts no more output for minutes,
but the launcher must still notice ended processes and signals. So :class:`Console` keeps what it
cannot write now. Beyond a limit, the supervisor stops reading from the processes: they wait, as
they would if they wrote to that pager themselves.

On a terminal, the status is rewritten in place; elsewhere, a line is added from time to time
(:class:`StatusDisplay`, which is pure). A process asks the job's scheduler for the status again and
again (``kvstore.status --line --watch``) and writes a line for each answer. The launcher itself has
one thread and opens no socket to the job. Runs on the main thread; used by ``supervisor.py``.
"""

from __future__ import annotations

import os
import select
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from kvstore.launch.job.child import die_with_launcher
from kvstore.launch.job.places import Event, LineStream
from kvstore.launch.job.signals import ENDING, SignalPipe

# POSIX: when poll says a pipe is writable, this much can be written without waiting.
_PIECE_BYTES = select.PIPE_BUF
FULL_BYTES = 1 << 20
FIRST_AFTER_S = 3.0
"""The wait on a terminal after all have joined; a job that ends sooner needs no status."""
TERMINAL_INTERVAL_S = 2.0
PLAIN_INTERVAL_S = 60.0
_ERASE = b"\r\x1b[K"
# Remove the current directory, which comes first unless PYTHONSAFEPATH is set.
_COMMAND = (
    "import os, sys; os.nice(10); del sys.path[: sys.path[0] == '']; "
    "from kvstore.status import main; sys.exit(main(['--line', '--watch', sys.argv[1]]))"
)
_REAP_S = 1.0
_LAST_OUTPUT_S = 2.0


class Console:
    """Buffered output to a file descriptor that this object does not own."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.broken = False
        self._pending = bytearray()

    @property
    def waiting(self) -> bool:
        """Whether text waits to be written."""
        return bool(self._pending)

    @property
    def full(self) -> bool:
        return len(self._pending) > FULL_BYTES

    def write(self, data: bytes) -> None:
        """Write as much as possible now and keep the rest; drop all for a closed output."""
        if not self.broken:
            self._pending += data
            self.write_pending()

    def write_pending(self, timeout_s: float = 0.0) -> None:
        """Write the kept text, waiting at most ``timeout_s`` in all."""
        deadline_s = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        while self._pending:
            if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
                return
            try:
                written = os.write(self.fd, self._pending[:_PIECE_BYTES])
            except BlockingIOError:
                return
            except OSError:  # the reader is gone; the job continues and has its log files
                self.broken = True
                self._pending.clear()
                return
            del self._pending[:written]


class StatusDisplay:
    """The text to write for a status; ``columns`` is None without a terminal."""

    def __init__(self, columns: int | None) -> None:
        self.columns = columns
        self.line = b""  # on a terminal, below all output
        self._told = ""
        self._told_at_s = float("-inf")
        is_plain = columns is None
        # When to show the first status after all have joined, and how often to show a new one.
        self.first_after_s = PLAIN_INTERVAL_S if is_plain else FIRST_AFTER_S
        self.interval_s = PLAIN_INTERVAL_S if is_plain else TERMINAL_INTERVAL_S

    def news(self, text: str, now_s: float) -> bytes:
        """Return the text to write for a new status."""
        shown = "[launcher] " + "".join(char if char.isprintable() else "?" for char in text)
        if self.columns is not None:
            # A line as wide as the terminal would wrap, and could not be erased.
            self.line = shown[: max(0, self.columns - 1)].encode(errors="replace")
            return _ERASE + self.line
        # One second less, since the status may come a little early.
        if text == self._told or now_s - self._told_at_s < PLAIN_INTERVAL_S - 1:
            return b""
        self._told, self._told_at_s = text, now_s
        return f"{shown}\n".encode(errors="replace")


def terminal_columns(fd: int) -> int | None:
    """Return the width of the terminal at ``fd``; None if it cannot rewrite a line."""
    if not os.isatty(fd) or os.environ.get("TERM", "dumb") == "dumb":
        return None
    try:
        return os.get_terminal_size(fd).columns or 80
    except OSError:
        return 80


class Terminal:
    """The launcher's standard output and error, and the job's status.

    A failure of the status ends the status silently.
    """

    def __init__(self, output_fd: int = 1, errors_fd: int = 2) -> None:
        self._output = Console(output_fd)
        self._errors = Console(errors_fd)
        self._environment: Mapping[str, str] = {}
        self._complete = ""
        self._display: StatusDisplay | None = None
        self._process: subprocess.Popen[bytes] | None = None  # asks the scheduler for the status
        self._answers: LineStream | None = None  # what it writes
        self.due_s: float | None = None
        """The time of the next :meth:`tick` that has something to do, or None."""

    @property
    def is_full(self) -> bool:
        """Whether so much output waits that no more should be read."""
        return self._output.full or self._errors.full

    def say(self, text: str) -> None:
        """Print a line of the launcher's own on standard error."""
        self.write(f"[launcher] {text}\n".encode(), is_error=True)

    def write(self, lines: bytes, *, is_error: bool) -> None:
        """Write whole lines; first erase a status on the same terminal, then rewrite it."""
        console = self._errors if is_error else self._output
        status = b"" if self._display is None else self._display.line
        if lines and status and (is_error or os.isatty(console.fd)):
            self._errors.write(_ERASE)
            console.write(lines)
            self._errors.write(status)
        else:
            console.write(lines)

    def adjust(self, selector: selectors.BaseSelector) -> None:
        """Register slow outputs until they have room, and the source of the status."""
        for console in (self._output, self._errors):
            if console.waiting:
                write = partial(self._write_pending, console)
                selector.register(console.fd, selectors.EVENT_WRITE, write)
        if self._answers is not None:
            self._answers.adjust(selector, paused=False)

    def write_last(self, signals: SignalPipe, *, is_interrupted: bool) -> None:
        """Wait until the reader has taken all output; after a signal, wait only briefly."""
        while waiting := [one for one in (self._output, self._errors) if one.waiting]:
            with selectors.PollSelector() as selector:
                selector.register(signals.fd, selectors.EVENT_READ)
                for console in waiting:
                    selector.register(console.fd, selectors.EVENT_WRITE)
                ready = selector.select(_LAST_OUTPUT_S if is_interrupted else None)
            if not ready or set(signals.arrived()) & set(ENDING):
                return
            for console in waiting:
                console.write_pending()

    def show_status(self, environment: Mapping[str, str], complete: str) -> None:
        """Print ``complete`` when all nodes have joined, then the job's progress.

        ``environment`` contains the scheduler's address and the key, like that of the job's
        processes.
        """
        self._environment, self._complete = environment, complete
        self._display = StatusDisplay(terminal_columns(self._errors.fd))

    def begin_status(self, now_s: float) -> None:
        """Begin to show the status: all nodes have joined, or another scheduler goes on."""
        self.pause_status()
        if self._display is not None:
            if self._complete:
                self.say(self._complete)
            self._complete = ""
            self.due_s = now_s + self._display.first_after_s

    def tick(self, now_s: float) -> None:
        """Start the process that asks for the status when it is time."""
        if self._display is None or self.due_s is None or now_s < self.due_s:
            return
        self.due_s = None
        with suppress(OSError):  # if no process can be started, the job runs without a status
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, f"{self._display.interval_s:g}"],
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
                preexec_fn=die_with_launcher(),  # safe: the launcher has one thread
            )
            assert self._process.stdout is not None
            self._answers = LineStream(self._process.stdout, self._answered)

    def end_status(self) -> None:
        """Stop showing the status, and erase it. May be called again."""
        self.pause_status()
        self._display = None

    def pause_status(self) -> None:
        """Erase the status until :meth:`begin_status` is called. May be called again."""
        self.due_s = None
        if self._process is not None and self._answers is not None:
            self._process.kill()  # it has nothing to lose
            with suppress(subprocess.TimeoutExpired):  # the process hangs in the kernel
                self._process.wait(_REAP_S)
            self._answers.close()
            self._process = self._answers = None
        if self._display is not None and self._display.line:
            self._errors.write(_ERASE)
            self._display.line = b""

    def _answered(self, lines: list[bytes]) -> list[Event]:
        display = self._display
        if display is None:
            return []  # the status was ended meanwhile
        if display.columns is not None:
            display.columns = terminal_columns(self._errors.fd) or display.columns
        if not self._errors.waiting:  # a paused terminal need not show all of them later
            text = lines[-1].decode(errors="replace")
            self._errors.write(display.news(text, time.monotonic()))
        return []

    def _write_pending(self, console: Console, now_s: float) -> list[Event]:
        console.write_pending()
        return []
