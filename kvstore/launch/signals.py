"""Signals as bytes in a pipe, for a loop that waits for other things as well.

While a :class:`SignalPipe` is open, SIGINT, SIGTERM, SIGHUP and SIGCHLD interrupt nothing: each
leaves a byte (``signal.set_wakeup_fd``). Main thread only. Used by ``supervisor.py``
and ``kube_follow.py``.
"""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What tells a launcher to end its job."""


class SignalPipe:
    """Use as ``with SignalPipe() as signals``; ``fd`` is readable when a signal has come."""

    def __init__(self) -> None:
        self.fd = -1
        self._write_fd = -1
        self._previous: dict[signal.Signals, object] = {}
        self._previous_wakeup_fd = -1

    def __enter__(self) -> SignalPipe:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in (*ENDING, signal.SIGCHLD):
            # A signal that whoever started us has switched off (nohup, &) stays switched off.
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, _do_nothing)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.close(self.fd)
        os.close(self._write_fd)

    def arrived(self) -> list[signal.Signals]:
        """The signals since the last call, in their order."""
        try:
            return [signal.Signals(number) for number in os.read(self.fd, 4096)]
        except BlockingIOError:
            return []


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A handler must exist for the byte to be written; the loop does the rest."""
