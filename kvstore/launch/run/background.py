"""The launcher as a process in the background, for a caller that is not a launcher.

A notebook, a test or a thread cannot be the launcher, which wants the main thread and the signals
of a process. So it gets one, in a session of its own (a Ctrl-C in the terminal reaches the caller
only), tied to the caller by a pipe (``launch/job/signals.py``). One thread reads what it writes and
hears the bell of the parcels; a caller that waits takes the lines and shows them on the thread that
called, where notebooks and tests expect output. Any thread may call. Used by
``kvstore/launch/run/job.py``.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from kvstore.launch.environment import checkout_root
from kvstore.launch.options import RESERVED_NAMES
from kvstore.launch.run import parcels
from kvstore.launch.run.parcels import LauncherOutput

MOST_LINES = 20_000
"""At most this many lines are kept until they are taken; then the oldest go."""

_READ_BYTES = 64 * 1024
_END_S = 20.0
_KILL_S = 5.0
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

Line = tuple[bool, str]
"""(is it of standard error, the line without its end)."""


def own_environment(environ: Mapping[str, str], additions: Mapping[str, str]) -> dict[str, str]:
    """The launcher's environment: this process's, without what a job around it has set."""
    is_in_a_job = "DMLC_ROLE" in environ
    kept = {name: text for name, text in environ.items() if not (is_in_a_job and name in _OF_A_JOB)}
    return {**kept, **additions}


class BackgroundLauncher:
    """A running launcher. ``directory`` is that of the parcels; the caller owns it.

    Close it with :meth:`close`, after which nothing of the job runs.
    """

    def __init__(
        self, arguments: Sequence[str], additions: Mapping[str, str], directory: Path
    ) -> None:
        #: Sorts what the launcher writes; read it when the launcher has ended.
        self.output = LauncherOutput()
        self._condition = threading.Condition()
        self._lines: deque[Line] = deque(maxlen=MOST_LINES)
        self._serial = 0
        self._status: int | None = None
        self._bell = _open_bell(directory)
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
            self._close_descriptors()
            raise
        finally:
            os.close(held)
        self._thread = threading.Thread(
            target=self._listen, name=f"kvstore-run-{self._process.pid}", daemon=True
        )
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs or lines may still come."""
        with self._condition:
            return self._status

    @property
    def hears_the_bell(self) -> bool:
        """Whether parcels of this machine are announced; others are to be looked for anyhow."""
        return self._bell is not None

    def news(self, after: int, timeout_s: float | None) -> tuple[int, list[Line]]:
        """Wait for anything to happen after ``after`` (0 at first), at most ``timeout_s``.

        Returns the number to give next time, and the lines that were not taken yet.
        """
        with self._condition:
            self._condition.wait_for(
                lambda: self._serial > after or self._status is not None, timeout_s
            )
            lines = list(self._lines)
            self._lines.clear()
            return self._serial, lines

    def wait_for_end(self, timeout_s: float) -> bool:
        """Return whether it has ended within that time."""
        with self._condition:
            return self._condition.wait_for(lambda: self._status is not None, timeout_s)

    def has_all_of(self, call: int, ranks: int) -> bool:
        """Return whether all lines of a call have come."""
        with self._condition:
            return self.output.has_all_of(call, ranks)

    def stop(self) -> None:
        """End the job, at once and without words of the launcher; returns when it has ended.

        An interrupt meanwhile kills the launcher; then its guardian ends the job.
        """
        self.output.is_ending = True
        try:
            self._signal(signal.SIGTERM)
            ended = self.wait_for_end(_END_S)
        except BaseException:
            self._signal(signal.SIGKILL)
            raise
        if not ended:
            self._signal(signal.SIGKILL)
            self.wait_for_end(_KILL_S)

    def close(self) -> None:
        """End what still runs, and close everything. The last call; idempotent.

        Garbage may be collected on any thread, on the one that listens too: that cannot wait for
        itself, and the launcher ends the job alone.
        """
        listens = threading.current_thread() is self._thread
        try:
            if listens:
                self._signal(signal.SIGTERM)
            elif self.status is None:
                self.stop()
        finally:
            if not listens:
                self._thread.join(_KILL_S)
            if self._tie >= 0:
                os.close(self._tie)
                self._tie = -1

    def _signal(self, number: signal.Signals) -> None:
        if self.status is None:
            self._process.send_signal(number)

    # -- the thread --------------------------------------------------------------------

    def _listen(self) -> None:
        """Read until the launcher has closed both outputs, which it does by ending."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        rests = {self._process.stdout: b"", self._process.stderr: b""}
        try:
            with selectors.DefaultSelector() as selector:
                for pipe in rests:
                    selector.register(pipe, selectors.EVENT_READ, pipe)
                if self._bell is not None:
                    selector.register(self._bell, selectors.EVENT_READ, None)
                while rests:
                    for key, _ in selector.select():
                        if key.data is None:
                            self._hear_bell()
                        elif not self._read(key.data, rests):
                            selector.unregister(key.data)
                            del rests[key.data]
        finally:
            status = self._process.wait()
            for pipe in (self._process.stdout, self._process.stderr):
                pipe.close()
            with self._condition:
                self._status = status
                self._condition.notify_all()
            if self._bell is not None:
                os.close(self._bell)

    def _hear_bell(self) -> None:
        assert self._bell is not None
        os.read(self._bell, _READ_BYTES)
        self._announce([])

    def _read(self, pipe: IO[bytes], rests: dict[IO[bytes], bytes]) -> bool:
        """Take what has come by ``pipe``; whether it is still open."""
        data = os.read(pipe.fileno(), _READ_BYTES)
        *complete, rest = (rests[pipe] + data).split(b"\n")
        if not data and rest:  # the launcher writes whole lines, unless it is killed
            complete, rest = [*complete, rest], b""
        rests[pipe] = rest
        is_error = pipe is self._process.stderr
        self._announce([(is_error, line.decode(errors="replace")) for line in complete])
        return bool(data)

    def _announce(self, lines: Sequence[Line]) -> None:
        with self._condition:
            for is_error, line in lines:
                shown = self.output.show(line, is_error=is_error)
                if shown is not None:
                    self._lines.append((is_error, shown))
            self._serial += 1
            self._condition.notify_all()

    def _close_descriptors(self) -> None:
        os.close(self._tie)
        if self._bell is not None:
            os.close(self._bell)


def _open_bell(directory: Path) -> int | None:
    """For reading and writing, so that it does not end when the last worker has rung."""
    if not parcels.has_bell(directory):
        return None
    return os.open(directory / parcels.BELL, os.O_RDWR | os.O_NONBLOCK)


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
