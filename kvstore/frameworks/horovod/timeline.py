"""A timeline of the calls of this rank, as a file that chrome://tracing and Perfetto show.

It has one bar for each call, from the call to its end, in the order in which they ended. There is
nothing to show of a negotiation or of cycles: servers match calls when they arrive. Events come
from callers' threads and the node's I/O thread.
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
    """Writes a file of trace events; a JSON array that is complete after :meth:`close`."""

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
        """Write a call once it has ended."""
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
        """Complete the file. Calls that end later are not in it."""
        with self._lock:
            if not self._file.closed:
                self._file.write("\n]\n")
                self._file.close()
