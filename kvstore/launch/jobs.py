"""Where the jobs of this user on this machine are, so that ``kvstore.status`` need not be told.

The launcher notes the scheduler's address beside the key that it makes for a job (``key.py``), in
a directory that only its user can enter and that goes with the job. Whoever may read the key may
read the address. Nothing that another user could have put there is looked at.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

PREFIX = "kvstore-key-"
_NOTE = "job.json"
_MAX_BYTES = 4096
_MAX_JOBS = 1000


class FoundJob(NamedTuple):
    """A job that this user's launcher runs on this machine."""

    address: str
    """``host:port`` of its scheduler."""
    security: str
    """``plain`` or ``curve``; empty for the default."""
    key_file: str


def note_job(key_file: Path, address: str, security: str) -> None:
    """Write the note beside the key; without it the job runs as well."""
    note = json.dumps({"address": address, "security": security})
    try:
        key_file.with_name(_NOTE).write_text(note, encoding="utf-8")
    except OSError:
        pass


def running_jobs() -> list[FoundJob]:
    """The jobs whose notes are there, by address."""
    directories = filter(_is_ours, Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    found = map(_read, sorted(directories)[:_MAX_JOBS])
    return sorted(job for job in found if job is not None)


def _is_ours(directory: Path) -> bool:
    """Whether nobody else can have written into it."""
    try:
        status = directory.lstat()
    except OSError:
        return False
    is_closed = stat.S_IMODE(status.st_mode) & 0o077 == 0
    return stat.S_ISDIR(status.st_mode) and is_closed and status.st_uid == os.geteuid()


def _read(directory: Path) -> FoundJob | None:
    try:
        with (directory / _NOTE).open("rb") as file:
            note = json.loads(file.read(_MAX_BYTES))
        return FoundJob(str(note["address"]), str(note["security"]), str(directory / "job.key"))
    except (OSError, ValueError, KeyError, TypeError):  # it is just ending, or older
        return None
