"""Signals as bytes in a pipe, and the end of a pipe as a signal.

While a :class:`SignalPipe` is open, SIGINT, SIGTERM, SIGHUP and SIGCHLD interrupt nothing: each
writes a byte to the pipe (``signal.set_wakeup_fd``). Main thread only.

``kvstore.run`` starts the launcher with ``--tied FD:DIRECTORY`` (:class:`Tie`). ``FD`` is the
reading end of a pipe whose other end only the caller holds, so the kernel closes that end when the
caller dies. Linux then sends SIGTERM to the launcher, which ends the job as after any SIGTERM. No
loop has to watch the pipe, so this works for every launcher and from the first moment. The other
side is ``launch/run/background.py``.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from kvstore.launch.options import LaunchError

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that tell a launcher to end its job."""


class SignalPipe:
    """A pipe that becomes readable (``fd``) when a signal arrives.

    Use it as ``with SignalPipe() as signals``.
    """

    def __enter__(self) -> SignalPipe:
        self._told_to_end = False
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self._previous: dict[signal.Signals, object] = {}
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in (*ENDING, signal.SIGCHLD):
            # A signal that the parent process ignores (nohup, &) stays ignored.
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, _do_nothing)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.close(self.fd)
        os.close(self._write_fd)

    def arrived(self) -> list[signal.Signals]:
        """Return the signals that arrived since the last call, in order."""
        try:
            found = [signal.Signals(number) for number in os.read(self.fd, 4096)]
        except BlockingIOError:
            return []
        self._told_to_end = self._told_to_end or not set(ENDING).isdisjoint(found)
        return found

    def told_to_end(self) -> bool:
        """Return whether a signal has told the launcher to end, at any time."""
        self.arrived()
        return self._told_to_end


def signal_when_closed(fd: int, number: signal.Signals, to: int) -> None:
    """Make the kernel send a signal when a pipe's writing end is closed.

    ``fd`` is the pipe's reading end; the signal is sent as long as any process has it open.
    ``number`` is the signal. ``to`` is a process, or a process group if negative. Source: O_ASYNC
    with F_SETSIG in ``fcntl(2)``.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, to)
    fcntl.fcntl(fd, fcntl.F_SETSIG, number)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python writes the byte to the pipe only if a handler exists."""


@dataclass(frozen=True)
class Tie:
    """The pipe to the caller, and the directory for files between both.

    The directory is removed after the caller has died.
    """

    fd: int
    directory: Path

    def hold(self) -> None:
        """Turn the caller's death into SIGTERM; before the job starts, into an interrupt."""
        os.set_inheritable(self.fd, False)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        signal_when_closed(self.fd, signal.SIGTERM, os.getpid())
        if self.is_cut():  # the caller died before the lines above
            raise KeyboardInterrupt

    def is_cut(self) -> bool:
        """Return whether the caller is dead; nothing is ever written to the pipe."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(0))

    def clean_up(self) -> None:
        """Remove the directory if the caller is dead; call it last."""
        if self.is_cut():
            shutil.rmtree(self.directory, ignore_errors=True)


def parse(text: str) -> Tie:
    """Parse ``FD:DIRECTORY``. Raises :class:`LaunchError`."""
    number, _, directory = text.partition(":")
    if not number.isdecimal() or not directory.startswith("/"):
        raise LaunchError(
            f"--tied needs FD:DIRECTORY, not '{text}'; it is for kvstore.run only", exit_code=2
        )
    return Tie(int(number), Path(directory))
