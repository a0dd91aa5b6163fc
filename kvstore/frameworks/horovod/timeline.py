"""A timeline of this rank's calls, as a file for chrome://tracing and Perfetto.

It has one bar for each call, from its start to its end, in the order in which calls end. There are
no negotiations or cycles to show, because servers match calls when they arrive. Events come from
the callers' threads and the node's I/O thread.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

from kvstore.errors import CheckpointError
from pslite import Future


class Timeline:
    """Writes trace events to a file: a JSON array that :meth:`close` completes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise CheckpointError(
                f"cannot write the timeline {os.fspath(path)!r}: {error.strerror}; pass a path in "
                "a directory that exists"
            ) from error
        self._lock = threading.Lock()  # guards the file
        self._file.write("[")
        self._separator = "\n"

    def note(self, name: str, kind: str, future: Future[Any]) -> None:
        """Write a call to the file when it ends."""
        began_us = time.time_ns() // 1000

        def ended(done: Future[Any]) -> None:
            event = {
                "name": name,
                "cat": kind,
                "ph": "X",
                "ts": began_us,
                "dur": time.time_ns() // 1000 - began_us,
                "pid": os.getpid(),
                "tid": 0,
                "args": {} if done.error() is None else {"error": str(done.error())},
            }
            with self._lock:
                if not self._file.closed:
                    self._file.write(self._separator + json.dumps(event))
                    self._separator = ",\n"

        future.on_done(ended)

    def close(self) -> None:
        """Complete the file. Calls that end later are left out."""
        with self._lock:
            if not self._file.closed:
                self._file.write("\n]\n")
                self._file.close()
