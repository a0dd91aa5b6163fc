"""Writes whole lines to one output without ever being stuck in it.

A pipe into a pager, or a terminal that was paused with Ctrl-S, takes no more output for
minutes; the launcher must notice deaths and signals all the same. So what cannot be written
now is kept, and past a bound the supervisor stops reading from the processes: they wait, as
they would if they wrote to that pager themselves. Runs on the main thread; used by
``supervisor.py``.
"""

from __future__ import annotations

import os
import select
import time

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
            except OSError:  # nobody reads any more: the job goes on, its logs are files
                self.broken = True
                self._pending.clear()
                return
            del self._pending[:written]
