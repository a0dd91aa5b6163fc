"""A wake-up channel: any thread may write to it, and the owner's poll watches it.

Knows nothing of vans or of ZeroMQ. The owner's thread calls everything but
:meth:`Wakeup.wake`. Read next: ``van.py``.
"""

from __future__ import annotations

import socket
import threading


class Wakeup:
    """Lets any thread end the owner's wait. Many calls before a poll cost one byte."""

    def __init__(self) -> None:
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)
        self._lock = threading.Lock()  # wake() and close() must not meet at the descriptor
        self._pending = False
        self._taken = False

    def fileno(self) -> int:
        """The descriptor that becomes readable."""
        return self._reading.fileno()

    def wake(self) -> None:
        """Make :meth:`fileno` readable. From any thread, also after :meth:`close`."""
        # Read without the lock on purpose: while it is set, a poll is bound to return, and the
        # owner looks at its queues after that.
        if self._pending:
            return
        with self._lock:
            if not self._pending:
                self._pending = True
                self._writing.send(b"\0")

    def read(self) -> None:
        """Empty the channel; called when :meth:`fileno` is readable."""
        self._reading.recv(16)
        self._pending = False
        self._taken = True

    def take(self) -> bool:
        """Return whether something was read since this was last asked."""
        taken, self._taken = self._taken, False
        return taken

    def close(self) -> None:
        """Free both ends; later calls of :meth:`wake` do nothing."""
        with self._lock:
            self._pending = True
            self._reading.close()
            self._writing.close()
