"""One process of a job: its start, its output in whole lines, its end.

Output of several processes shares one terminal, so only whole lines may be printed. Progress bars
rewrite one line with carriage returns for hours; their latest state is shown as a line of its own
now and then (:class:`LineSplitter`, which is pure).

Linux delivers SIGKILL to every child when the launcher dies (PR_SET_PDEATHSIG); this reaches
direct children only, and not programs with set-user-id or file capabilities. What a child starts
is in its process group, to which Linux sends SIGKILL as well: each child inherits the reading end
of a pipe whose other end only the launcher has. ``guardian.py`` covers what these leave: what has
made a process group of its own. Runs on the main thread; used by ``supervisor.py``.
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
    """Collects bytes of one stream and gives back complete lines, without their ends."""

    def __init__(self) -> None:
        self._rest = b""
        self._bar_shown_at_s = float("-inf")

    def feed(self, data: bytes, now_s: float) -> list[bytes]:
        """Return the lines that new output completes, as a terminal shows them."""
        *complete, self._rest = (self._rest + data).split(b"\n")
        lines = [visible(line) for line in complete]
        if b"\r" in self._rest:
            lines.extend(self._bar_state(now_s))
        if len(self._rest) > LONGEST_LINE_BYTES:
            lines.append(visible(self._rest))
            self._rest = b""
        return lines

    def finish(self) -> list[bytes]:
        """End the stream: return the unfinished line, if there is one."""
        rest, self._rest = self._rest, b""
        return [visible(rest)] if rest.strip(b"\r") else []

    def _bar_state(self, now_s: float) -> list[bytes]:
        """Return the text before the last carriage return, about to be overwritten."""
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
    """Return the text after the last carriage return, except a closing one."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


_PR_SET_PDEATHSIG = 1
_REAP_S = 1.0


class Child:
    """The job's process ``index``, started without a shell as ``spec`` says.

    It leads its own session and process group (``group``), which a pipe that this owns kills when
    it is closed. Who reads its output and errors closes ``pipes``. Raises OSError when its program
    cannot be executed.
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
        # Standard output first: of a line there and one on standard error that are both ready,
        # it was usually written first.
        self.pipes = (self._process.stdout, self._process.stderr)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while it runs.

        The process stays a zombie until :meth:`reap`: until then, no other process
        group can get its number, and signals sent to the group reach the right processes.
        """
        if self.status is None:
            found = os.waitid(os.P_PID, self.group, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                is_exit = found.si_code == os.CLD_EXITED
                self.status = found.si_status if is_exit else -found.si_status
        return self.status

    def send_signal(self, signal_number: signal.Signals) -> None:
        """Send the signal to the process group; does nothing if that is empty."""
        with suppress(OSError):
            os.killpg(self.group, signal_number)

    def reap(self) -> None:
        """Take the exit status from the kernel and kill what is left; call it last."""
        with suppress(subprocess.TimeoutExpired):  # not even by SIGKILL: it hangs in the kernel
            self._process.wait(_REAP_S)
        os.close(self._tie_fd)


def die_with_launcher() -> Callable[[], None]:
    """Return what a child runs between fork and exec."""
    return partial(die_with_parent, os.getpid(), ctypes.CDLL(None).prctl)


def die_with_parent(parent: int, prctl: Callable[..., int] | None = None) -> None:
    """Have this process killed when ``parent`` is gone, whose child it was to be.

    ``prctl`` is C's, loaded before a fork.
    """
    (prctl or ctypes.CDLL(None).prctl)(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
