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
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from kvstore.launch.lines import LineSplitter
from kvstore.launch.options import LaunchError
from kvstore.launch.plan import ProcessSpec
from kvstore.launch.report import SHOWN_LINES

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

    def __init__(
        self, spec: ProcessSpec, process: subprocess.Popen[bytes], log: IO[bytes] | None
    ) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.spec = spec
        self.group = process.pid
        self.status: int | None = None
        # Standard output first: of a line there and one on standard error that are both ready,
        # it was usually written first.
        self.open_streams = [
            Stream(self, process.stdout, is_error=False),
            Stream(self, process.stderr, is_error=True),
        ]
        self.last_lines: deque[bytes] = deque(maxlen=SHOWN_LINES)
        self._prefix = f"[{spec.name}] ".encode()
        self._process = process
        self._log = log

    def record(self, lines: list[bytes]) -> bytes:
        """Write lines to the log file; return them as they go to the terminal."""
        self.last_lines.extend(lines)
        if self._log is not None and lines:
            self._log.write(b"".join(line + b"\n" for line in lines))
        return b"".join(self._prefix + line + b"\n" for line in lines)

    def stop_logging(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

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
        self.stop_logging()


def start_child(
    spec: ProcessSpec,
    base_environment: Mapping[str, str],
    log_path: Path,
    prepare: Callable[[], None] | None,
) -> Child:
    """Start ``spec`` without a shell.

    Raises OSError when its program cannot be executed, LaunchError when its log cannot be made.
    """
    try:
        log = open(log_path, "wb", buffering=0)  # noqa: SIM115 - the child owns it
    except OSError as error:
        raise LaunchError(f"cannot write {log_path}: {error.strerror}", exit_code=1) from error
    try:
        process = subprocess.Popen(
            spec.argv,
            env={**base_environment, **spec.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            pass_fds=spec.inherited_fds,
            preexec_fn=prepare,  # safe: the launcher has one thread
        )
    except OSError:
        log.close()
        raise
    return Child(spec, process, log)


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


def _exit_status(process: subprocess.Popen[bytes]) -> int | None:
    if not hasattr(os, "waitid"):  # macOS before Python 3.13: reaps at once
        return process.poll()
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
