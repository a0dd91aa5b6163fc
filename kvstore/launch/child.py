"""One process of a job: its start, its output, its end.

Linux delivers SIGKILL to every child when the launcher dies (PR_SET_PDEATHSIG); this reaches
direct children only, and not programs with set-user-id or file capabilities. ``guardian.py``
covers what it leaves. Runs on the main thread; used by ``supervisor.py``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import IO

from kvstore.launch.lines import LineSplitter
from kvstore.launch.plan import ProcessSpec

_PR_SET_PDEATHSIG = 1
_READ_BYTES = 64 * 1024
_REAP_S = 1.0


class Stream:
    """The launcher's end of a child's standard output or error."""

    def __init__(self, child: Child, pipe: IO[bytes], *, is_error: bool) -> None:
        self.child = child
        self.is_error = is_error
        self._pipe = pipe
        self._splitter = LineSplitter()

    def fileno(self) -> int:
        return self._pipe.fileno()

    def read(self, now_s: float) -> tuple[list[bytes], bool]:
        """Read once, which must not block; return the lines and whether the stream is open."""
        data = os.read(self._pipe.fileno(), _READ_BYTES)
        if data:
            return self._splitter.feed(data, now_s), True
        return self.close(), False

    def close(self) -> list[bytes]:
        """Close the launcher's end; return the unfinished line, if any."""
        self._pipe.close()
        return self._splitter.finish()


class Child:
    """A started process. It leads its own session and process group (``group``)."""

    def __init__(self, index: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.index = index
        self.group = process.pid
        self.status: int | None = None
        # Standard output first: of a line there and one on standard error that are both ready,
        # it was usually written first.
        self.open_streams = [
            Stream(self, process.stdout, is_error=False),
            Stream(self, process.stderr, is_error=True),
        ]
        self._process = process

    def poll(self) -> int | None:
        """The exit status, negative for a signal, or None while it runs.

        The process stays a zombie until :meth:`reap`: as long as it is one, no other process
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
        """The last call: take the exit status from the kernel and close everything."""
        try:
            self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:  # SIGKILL has not ended it: it hangs in the kernel
            pass
        for stream in self.open_streams:
            stream.close()


def start_child(
    index: int,
    spec: ProcessSpec,
    variables: Mapping[str, str],
    prepare: Callable[[], None] | None,
) -> Child:
    """Start ``spec``, the job's process ``index``, without a shell.

    Raises OSError when its program cannot be executed.
    """
    process = subprocess.Popen(
        spec.argv,
        env={**variables, **spec.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        pass_fds=spec.inherited_fds,
        preexec_fn=prepare,  # safe: the launcher has one thread
    )
    return Child(index, process)


def die_with_launcher() -> Callable[[], None] | None:
    """What a child runs between fork and exec; None where the system cannot do it."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    launcher = os.getpid()

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != launcher:  # it died before the line above
            os._exit(1)

    return prepare


def die_with_parent(parent: int) -> None:
    """Have this process killed when ``parent`` is gone, whose child it was to be; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def _exit_status(process: subprocess.Popen[bytes]) -> int | None:
    if not hasattr(os, "waitid"):  # macOS before Python 3.13: reaps at once
        return process.poll()
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
