"""What the launcher knows of one process of a job, wherever that runs.

Runs on the main thread; used by ``supervisor.py``.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import IO

from kvstore.launch.lifecycle import Exit
from kvstore.launch.options import LaunchError
from kvstore.launch.plan import ProcessSpec
from kvstore.launch.report import SHOWN_LINES, Ended


class ProcessRecord:
    """Its log file, its last lines and its number, which is 0 until it has started.

    ``label`` stands behind its name (``worker 1@label``); None says nothing of its place. Raises
    :class:`LaunchError` (exit code 1) when the log cannot be made.
    """

    def __init__(self, spec: ProcessSpec, label: str | None, log_dir: Path) -> None:
        self.spec = spec
        self.pid = 0
        self.why: str | None = None
        self.last_lines: deque[bytes] = deque(maxlen=SHOWN_LINES)
        self._label = label
        self._name = spec.name if label is None else f"{spec.name}@{label}"
        self._prefix = f"[{self._name}] ".encode()
        self._log: IO[bytes] | None = None
        path = log_dir / f"{spec.name.replace(' ', '-')}.log"
        try:
            self._log = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by stop_logging
        except OSError as error:
            raise LaunchError(f"cannot write {path}: {error.strerror}", exit_code=1) from error

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

    def ended(self, found: Exit) -> Ended:
        """For the report."""
        lines = [line.decode(errors="replace") for line in self.last_lines]
        place = "" if self._label is None else f"pid {self.pid} on {self._label}"
        return Ended(self.spec, self.pid, found, lines, place=place, reason=self.why or "")
