"""One process of a job: its start, its output in whole lines, its end; and where lines go.

Output of several processes shares one terminal, so only whole lines may be printed. Progress bars
rewrite one line with carriage returns for hours; their latest state is shown as a line of its own
now and then (:class:`LineSplitter`, which is pure). A pipe into a pager, or a terminal that was
paused with Ctrl-S, takes no more output for minutes; the launcher must notice deaths and signals
all the same. So :class:`Console` keeps what cannot be written now, and past a bound the supervisor
stops reading from the processes: they wait, as they would if they wrote to that pager themselves.

Linux delivers SIGKILL to every child when the launcher dies (PR_SET_PDEATHSIG); this reaches
direct children only, and not programs with set-user-id or file capabilities. What a child starts
is in its process group, to which Linux sends SIGKILL as well: each child inherits the reading end
of a pipe whose other end only the launcher has. ``guardian.py`` covers what these leave: what has
made a process group of its own. Runs on the main thread; used by ``supervisor.py``.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from kvstore.launch.job.signals import signal_when_closed
from kvstore.launch.plan import ProcessSpec

BAR_INTERVAL_S = 1.0
LONGEST_LINE_BYTES = 64 * 1024


class LineSplitter:
    """Collects bytes of one stream and gives back complete lines, without their ends."""

    def __init__(self) -> None:
        self._rest = b""
        self._bar_shown_at_s = float("-inf")

    def feed(self, data: bytes, now_s: float) -> list[bytes]:
        """Take what was read; return the lines that it completes, as a terminal would show them."""
        *complete, self._rest = (self._rest + data).split(b"\n")
        lines = [_visible(line) for line in complete]
        if b"\r" in self._rest:
            lines.extend(self._bar_state(now_s))
        if len(self._rest) > LONGEST_LINE_BYTES:
            lines.append(_visible(self._rest))
            self._rest = b""
        return lines

    def finish(self) -> list[bytes]:
        """The stream has ended: return the unfinished line, if there is one."""
        rest, self._rest = self._rest, b""
        return [_visible(rest)] if rest.strip(b"\r") else []

    def _bar_state(self, now_s: float) -> list[bytes]:
        """What stands before the last carriage return is complete and about to be overwritten."""
        finished, _, unfinished = self._rest.rpartition(b"\r")
        if unfinished:
            self._rest = unfinished
        elif b"\r" in finished:
            self._rest = finished.rpartition(b"\r")[2] + b"\r"
        else:
            # A lone final return may be the first half of a "\r\n" that was read in two pieces.
            return []
        shown = _visible(finished)
        if not shown or now_s - self._bar_shown_at_s < BAR_INTERVAL_S:
            return []
        self._bar_shown_at_s = now_s
        return [shown]


def _visible(line: bytes) -> bytes:
    """The text after the last carriage return, a closing one not counted."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


# POSIX: when poll says a pipe is writable, this much can be written without waiting.
_PIECE_BYTES = 512 if not hasattr(select, "PIPE_BUF") else select.PIPE_BUF
FULL_BYTES = 1 << 20


class Console:
    """Buffered output to a file descriptor that this object does not own."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.broken = False
        self._pending = bytearray()

    @property
    def waiting(self) -> bool:
        """There is text that the output has not taken yet."""
        return bool(self._pending)

    @property
    def full(self) -> bool:
        return len(self._pending) > FULL_BYTES

    def write(self, data: bytes) -> None:
        """Write as much as is possible now and keep the rest. A closed output drops all."""
        if self.broken:
            return
        self._pending += data
        self.write_pending()

    def write_pending(self, timeout_s: float = 0.0) -> None:
        """Write what is kept, waiting at most ``timeout_s`` in all."""
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
            except OSError:  # the reader is gone: the job continues, its logs are files
                self.broken = True
                self._pending.clear()
                return
            del self._pending[:written]


_PR_SET_PDEATHSIG = 1
_REAP_S = 1.0


class Child:
    """A started process. It leads its own session and process group (``group``).

    Owns ``tie_fd``: its closing kills the group. Who reads its output and errors closes ``pipes``.
    """

    def __init__(self, index: int, process: subprocess.Popen[bytes], tie_fd: int) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.index = index
        self.group = process.pid
        self.status: int | None = None
        # Standard output first: of a line there and one on standard error that are both ready,
        # it was usually written first.
        self.pipes = (process.stdout, process.stderr)
        self._process = process
        self._tie_fd = tie_fd

    def poll(self) -> int | None:
        """The exit status, negative for a signal, or None while it runs.

        The process stays a zombie until :meth:`reap`: until then, no other process
        group can get its number, and signals sent to the group reach the right processes.
        """
        if self.status is None:
            self.status = _exit_status(self._process)
        return self.status

    def send_signal(self, signal_number: signal.Signals) -> None:
        """To the whole process group; nothing happens when it is empty."""
        try:
            os.killpg(self.group, signal_number)
        except OSError:
            pass

    def reap(self) -> None:
        """The last call: take the exit status from the kernel and kill what is left."""
        try:
            self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:  # SIGKILL has not ended it: it hangs in the kernel
            pass
        os.close(self._tie_fd)


def start_child(
    index: int,
    spec: ProcessSpec,
    variables: Mapping[str, str],
    prepare: Callable[[], None] | None,
) -> Child:
    """Start ``spec``, the job's process ``index``, without a shell.

    Raises OSError when its program cannot be executed.
    """
    held_fd, tie_fd = os.pipe()
    try:
        process = subprocess.Popen(
            spec.argv,
            env={**variables, **spec.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=(*spec.inherited_fds, held_fd),
            preexec_fn=prepare,  # safe: the launcher has one thread
        )
        signal_when_closed(held_fd, signal.SIGKILL, -process.pid)
    except BaseException:
        os.close(tie_fd)
        raise
    finally:
        os.close(held_fd)
    return Child(index, process, tie_fd)


def die_with_launcher() -> Callable[[], None] | None:
    """Return what a child runs between fork and exec; None where the system cannot do it."""
    return _dying_with(os.getpid()) if sys.platform == "linux" else None


def die_with_parent(parent: int) -> None:
    """Have this process killed when ``parent`` is gone, whose child it was to be; on Linux only."""
    if sys.platform == "linux":
        _dying_with(parent)()


def _dying_with(parent: int) -> Callable[[], None]:
    prctl = ctypes.CDLL(None).prctl  # loaded before a fork

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return prepare


def _exit_status(process: subprocess.Popen[bytes]) -> int | None:
    if not hasattr(os, "waitid"):  # macOS before Python 3.13: reaps at once
        return process.poll()
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
