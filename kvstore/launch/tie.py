"""Ends the launcher when the process that started it dies, in whatever way.

``kvstore.run`` starts the launcher with ``--tied FD:DIRECTORY``: ``FD`` is the reading end of a
pipe whose other end only the caller holds, so the kernel closes it with the caller's life. Linux
then sends SIGTERM to the launcher (``fcntl(2)``, O_ASYNC with F_SETSIG), which ends the job as
for any SIGTERM; no loop has to watch the pipe, so it holds for every launcher and from the first
moment. ``DIRECTORY`` holds what caller and workers hand each other; where the caller is gone, the
launcher removes it. Elsewhere than on Linux nothing is tied. Runs on the main thread; used by
``cli.py``; the other side is ``background.py``.
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from kvstore.launch.options import LaunchError


@dataclass(frozen=True)
class Tie:
    """The pipe to the caller, and the directory that goes when the caller has gone."""

    fd: int
    directory: Path

    def hold(self) -> None:
        """From here on the caller's death is a SIGTERM; before the job starts, an interrupt."""
        os.set_inheritable(self.fd, False)
        signal.signal(signal.SIGTERM, _interrupt)
        if sys.platform == "linux":
            fcntl.fcntl(self.fd, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(self.fd, fcntl.F_SETSIG, signal.SIGTERM)
            flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_ASYNC)
        if self.is_cut():  # it died before the lines above
            raise KeyboardInterrupt

    def is_cut(self) -> bool:
        """Whether the caller is dead; nothing is ever written to the pipe."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(0))

    def clean_up(self) -> None:
        """Call last: all processes of the job have ended."""
        if self.is_cut():
            shutil.rmtree(self.directory, ignore_errors=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def parse(text: str) -> Tie:
    """``FD:DIRECTORY``, or :class:`LaunchError`."""
    number, _, directory = text.partition(":")
    if not number.isdecimal() or not directory.startswith("/"):
        raise LaunchError(
            f"--tied needs FD:DIRECTORY, not '{text}'; it is for kvstore.run only", exit_code=2
        )
    return Tie(int(number), Path(directory))
