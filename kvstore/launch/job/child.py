"""One process of a job: its start, its output in whole lines, and its end.

The output of several processes shares one terminal, so only whole lines may be printed. Progress
bars rewrite one line with carriage returns for hours; from time to time, their latest state is
printed as a line of its own (:class:`LineSplitter`, which is pure).

When the launcher dies, Linux sends SIGKILL to each of its children (PR_SET_PDEATHSIG), but not to
their children, nor to programs with set-user-id or file capabilities. The children's children are
in the same process group. Linux sends SIGKILL to the group as well, because each child inherits the
reading end of a pipe whose other end only the launcher has. ``guardian.py`` ends the remaining
processes: those that made a process group of their own. Runs on the main thread; used by
``supervisor.py``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from kvstore.launch.job.signals import signal_when_closed
from kvstore.launch.plan import ProcessSpec

BAR_INTERVAL_S = 1.0
LONGEST_LINE_BYTES = 64 * 1024


class LineSplitter:
    """Collects the bytes of one stream and returns complete lines without line ends."""

    def __init__(self) -> None:
        self._rest = b""
        self._bar_shown_at_s = float("-inf")

    def feed(self, data: bytes, now_s: float) -> list[bytes]:
        """Return the lines that ``data`` completes, as a terminal would show them."""
        *complete, self._rest = (self._rest + data).split(b"\n")
        lines = [visible(line) for line in complete]
        if b"\r" in self._rest:
            lines.extend(self._bar_state(now_s))
        if len(self._rest) > LONGEST_LINE_BYTES:
            lines.append(visible(self._rest))
            self._rest = b""
        return lines

    def finish(self) -> list[bytes]:
        """Return the unfinished last line, if there is one."""
        rest, self._rest = self._rest, b""
        return [visible(rest)] if rest.strip(b"\r") else []

    def _bar_state(self, now_s: float) -> list[bytes]:
        """Return the text that the next output will overwrite, at most once a second."""
        finished, _, unfinished = self._rest.rpartition(b"\r")
        if unfinished:
            self._rest = unfinished
        elif b"\r" in finished:
            self._rest = finished.rpartition(b"\r")[2] + b"\r"
        else:
            # A lone final return may be the first half of a "\r\n" that was read in two pieces.
            return []
        shown = visible(finished)
        if not shown or now_s - self._bar_shown_at_s < BAR_INTERVAL_S:
            return []
        self._bar_shown_at_s = now_s
        return [shown]


def visible(line: bytes) -> bytes:
    """Return the text after the last carriage return; ignore one at the end."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


_PR_SET_PDEATHSIG = 1
_REAP_S = 1.0


class Child:
    """The job's process ``index``, started from ``spec`` without a shell.

    It leads its own session and process group (``group``). This object owns a pipe; when the pipe
    is closed, the group is killed. The code that reads the output must close ``pipes``. Raises
    OSError if the program cannot be executed.
    """

    def __init__(
        self,
        index: int,
        spec: ProcessSpec,
        variables: Mapping[str, str],
        prepare: Callable[[], None],
    ) -> None:
        held_fd, self._tie_fd = os.pipe()
        try:
            self._process = subprocess.Popen(
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
            signal_when_closed(held_fd, signal.SIGKILL, -self._process.pid)
        except BaseException:
            os.close(self._tie_fd)
            raise
        finally:
            os.close(held_fd)
        assert self._process.stdout is not None and self._process.stderr is not None
        self.index = index
        self.group = self._process.pid
        self.status: int | None = None
        # Standard output first: if a line is ready on both, the one on standard output was usually
        # written first.
        self.pipes = (self._process.stdout, self._process.stderr)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None if it still runs.

        The process stays a zombie until :meth:`reap`. Until then, no other process group can get
        its number, and signals to the group reach the right processes.
        """
        if self.status is None:
            found = os.waitid(os.P_PID, self.group, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                is_exit = found.si_code == os.CLD_EXITED
                self.status = found.si_status if is_exit else -found.si_status
        return self.status

    def send_signal(self, signal_number: signal.Signals) -> None:
        """Send the signal to the process group; do nothing if the group is empty."""
        with suppress(OSError):
            os.killpg(self.group, signal_number)

    def reap(self) -> None:
        """Take the exit status from the kernel and kill the rest of the group. Call last."""
        with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel despite SIGKILL
            self._process.wait(_REAP_S)
        os.close(self._tie_fd)


def die_with_launcher() -> Callable[[], None]:
    """Return the function that a child runs between fork and exec."""
    return partial(die_with_parent, os.getpid(), ctypes.CDLL(None).prctl)


def die_with_parent(parent: int, prctl: Callable[..., int] | None = None) -> None:
    """Make the kernel kill this process when ``parent`` ends; exit if it already has.

    ``prctl`` is the C function, loaded before a fork.
    """
    (prctl or ctypes.CDLL(None).prctl)(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the line above
        os._exit(1)
