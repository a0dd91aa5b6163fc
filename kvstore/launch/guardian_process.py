"""Starts ``guardian.py`` and speaks to it.

The guardian must outlive the launcher and must not belong to the job, so it gets a session of
its own, none of the user's output, and an environment without the id of any job (otherwise
the guardian of an enclosing job would kill it before it has done its work). Runs on the main
thread; used by ``supervisor.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvstore.launch import guardian

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
