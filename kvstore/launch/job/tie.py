"""Start the guardian of a job, and end the launcher when its own caller dies.

``GuardianProcess`` starts ``guardian.py`` and speaks to it. The guardian must outlive the launcher
and must not belong to the job, so it gets a session of its own, none of the user's output, and an
environment without the id of any job (otherwise the guardian of an enclosing job would kill it
before it has done its work).

``kvstore.run`` starts the launcher with ``--tied FD:DIRECTORY``: ``FD`` is the reading end of a
pipe whose other end only the caller holds, so the kernel closes it with the caller's life. Linux
then sends SIGTERM to the launcher (``signals.signal_when_closed``), which ends the job as for any
SIGTERM; no loop has to watch the pipe, so it holds for every launcher and from the first moment.
``DIRECTORY`` holds what caller and workers hand each other; where the caller is gone, the launcher
removes it. Elsewhere than on Linux nothing is tied. Runs on the main thread; used by
``supervisor.py`` and ``cli.py``; the other side is ``launch/run/background.py``.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from kvstore.launch.job import guardian
from kvstore.launch.job.signals import signal_when_closed
from kvstore.launch.options import LaunchError

_DONE_WAIT_S = 5.0


class GuardianProcess:
    """A running guardian of the job ``job_id``, or of what an agent of it starts.

    Close it with :meth:`dismiss`.
    """

    def __init__(
        self, job_id: str, environ: Mapping[str, str], agent_id: str | None = None
    ) -> None:
        script = str(Path(guardian.__file__).resolve())
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script, job_id, *([agent_id] if agent_id else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in environ.items() if name != "PS_JOB_ID"},
            cwd="/",
            start_new_session=True,
            bufsize=0,
        )

    def watch(self, group: int) -> None:
        """Tell it of a process group that was just started."""
        self._tell(f"{group}\n")

    def remove_at_the_end(self, directory: Path) -> None:
        """Have ``directory``, which may not be there yet, removed should the launcher be killed."""
        self._tell(f"remove {os.fsencode(directory).hex()}\n")

    def cancel_at_the_end(self, argv: Sequence[str]) -> None:
        """Have ``argv`` run, without an empty word, should the launcher be killed."""
        self._tell(f"cancel {' '.join(os.fsencode(word).hex() for word in argv)}\n")

    def dismiss(self) -> None:
        """Everything has ended: nothing is left for it to do."""
        self._tell("done\n")
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_DONE_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
        except OSError:  # somebody killed it; the death signal of the children remains
            pass


@dataclass(frozen=True)
class Tie:
    """The pipe to the caller, and the directory that goes when the caller has gone."""

    fd: int
    directory: Path

    def hold(self) -> None:
        """From here on the caller's death is a SIGTERM; before the job starts, an interrupt."""
        os.set_inheritable(self.fd, False)
        signal.signal(signal.SIGTERM, _interrupt)
        signal_when_closed(self.fd, signal.SIGTERM, os.getpid())
        if self.is_cut():  # it died before the lines above
            raise KeyboardInterrupt

    def is_cut(self) -> bool:
        """Return whether the caller is dead; nothing is ever written to the pipe."""
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
