"""Follows the log of one pod, also when the connection for it breaks.

``kubectl logs --follow`` ends whenever somebody on the way hangs up, with or without an error,
and may then have missed lines. So lines are asked for with their times, a new call begins where
the last one ended, and the log is whole only when a call that began after the end of the
container has ended well. Standard output and error of a container are one stream there. Main
thread; used by ``follow.py``.
"""

from __future__ import annotations

import os
import subprocess
from collections import deque
from typing import IO

from kvstore.launch.backends.kubernetes.kubectl import REFUSAL, Kubectl, end_process, kill
from kvstore.launch.job.child import LineSplitter
from kvstore.launch.job.report import SHOWN_LINES
from kvstore.launch.plan import ProcessSpec

JOINED_LINE = b"all have joined"
"""What a scheduler with ``--joined-fd`` writes."""
_READ_BYTES = 64 * 1024
_LONGEST_LINE_BYTES = 1 << 20
_LONGEST_ERROR_BYTES = 4096
# After the container's end: a log that cannot be read so often is gone.
_LAST_TRIES = 5


class TimedLines:
    """Pure: bytes of ``kubectl logs --timestamps`` in; lines without times out, each once."""

    def __init__(self) -> None:
        self.last = b""
        """The time of the last line that was let through."""
        self._rest = b""
        self._before = b""
        self._splitter = LineSplitter()

    def begin(self) -> None:
        """A new call: what it repeats (times are asked for in whole seconds) is dropped."""
        self._rest = b""
        self._before = self.last

    def feed(self, data: bytes, now_s: float) -> list[bytes]:
        """Take what was read; return the lines that it completes."""
        *complete, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE_BYTES:
            complete.append(self._rest)
            self._rest = b""
        return [shown for line in complete for shown in self._line(line, now_s)]

    def finish(self, now_s: float) -> list[bytes]:
        """The log is whole; a program may have ended within a line."""
        rest, self._rest = self._rest, b""
        return (self._line(rest, now_s) if rest else []) + self._splitter.finish()

    def _line(self, line: bytes, now_s: float) -> list[bytes]:
        time, _, text = line.partition(b" ")
        if not _is_time(time):
            return self._splitter.feed(line + b"\n", now_s)
        if self._before and _sortable(time) <= _sortable(self._before):
            return []
        self.last = time
        return self._splitter.feed(text + b"\n", now_s)


def _is_time(word: bytes) -> bool:
    """As in ``2026-01-31T23:59:59.123456789Z``."""
    return len(word) >= 20 and word[4:5] == b"-" and word[10:11] == b"T" and word[:4].isdigit()


def _sortable(time: bytes) -> tuple[bytes, bytes]:
    """Zeros at the end of the fraction are left out in the text."""
    return time[:19], time[19:].strip(b".Z").ljust(9, b"0")


class PodLog:
    """The log of the process ``spec`` in one pod: what is read, shown and kept."""

    def __init__(
        self, kubectl: Kubectl, spec: ProcessSpec, pod: str, node: str, file: IO[bytes] | None
    ) -> None:
        self.spec = spec
        self.is_whole = False
        self.last_lines: deque[bytes] = deque(maxlen=SHOWN_LINES)
        self._kubectl = kubectl
        self._pod = pod
        self._prefix = f"[{spec.name}@{node}] ".encode()
        self._file = file
        self._lines = TimedLines()
        self._process: subprocess.Popen[bytes] | None = None
        self._error = b""
        self._complaint: str | None = None
        self._has_complained = False
        self._has_ended = False
        self._began_after_the_end = False
        self._next_at_s = 0.0
        self._tries_left = _LAST_TRIES

    @property
    def streams(self) -> list[IO[bytes]]:
        """What to wait for: standard output and error of the call that runs."""
        if self._process is None:
            return []
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        return [
            stream for stream in (self._process.stdout, self._process.stderr) if not stream.closed
        ]

    def container_has_ended(self) -> None:
        self._has_ended = True

    def tick(self, now_s: float, pause_s: float) -> None:
        """Begin a call where none runs and the log is not whole yet."""
        if self.is_whole or self._process is not None or now_s < self._next_at_s:
            return
        self._next_at_s = now_s + pause_s
        self._began_after_the_end = self._has_ended
        since = []
        if self._lines.last:
            since = [f"--since-time={self._lines.last.decode(errors='replace')}"]
        self._lines.begin()
        self._error = b""
        self._process = self._kubectl.start(
            "logs", "--follow", "--timestamps", *since, self._pod, f"--container={self.spec.role}"
        )

    def read(self, stream: IO[bytes], now_s: float) -> list[bytes]:
        """Read once from a stream that is readable; return whole lines."""
        assert self._process is not None
        is_error = stream is self._process.stderr
        data = os.read(stream.fileno(), _READ_BYTES)
        if data and is_error:
            self._error = (self._error + data)[-_LONGEST_ERROR_BYTES:]
            return []
        if data:
            return self._lines.feed(data, now_s)
        stream.close()
        return [] if self.streams else self._call_ended(now_s)

    def record(self, lines: list[bytes]) -> bytes:
        """Write lines to the log file; return them as they go to the terminal."""
        self.last_lines.extend(lines)
        if self._file is not None and lines:
            try:
                self._file.write(b"".join(line + b"\n" for line in lines))
            except OSError:  # the disk is full; what is shown matters more
                self._file.close()
                self._file = None
        return b"".join(self._prefix + line + b"\n" for line in lines)

    def take_complaint(self) -> str | None:
        """Return why the log may not be read, once; broken connections are nothing to speak of."""
        complaint, self._complaint = self._complaint, None
        return complaint

    def close(self) -> None:
        """End the call that runs."""
        if self._process is not None:
            kill(self._process)
            for stream in self.streams:
                stream.close()
            end_process(self._process)
            self._process = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _call_ended(self, now_s: float) -> list[bytes]:
        assert self._process is not None
        status = end_process(self._process)
        self._process = None
        error = self._error.decode(errors="replace").strip()
        if REFUSAL in error and not self._has_complained:
            self._complaint, self._has_complained = error.splitlines()[-1], True
        if not self._began_after_the_end:
            return []
        if status != 0:
            self._tries_left -= 1
        self.is_whole = status == 0 or self._tries_left <= 0 or b"NotFound" in self._error
        return self._lines.finish(now_s) if self.is_whole else []
