"""A job's key, and the note with which ``kvstore status`` finds the job.

The key is on no command line, in no environment and in no log. The environment contains the name of
a file that only its user can read. Beside it is a note with the scheduler's address.
``supervisor.py`` removes the directory at the job's end, or ``guardian.py`` if the launcher is
killed. If a cluster starts the processes, key and note are also in the directory that the hosts
share (``launch/agents/join.py``), so that jobs are found on other machines too. Files that another
user could have written are not read. Runs on the main thread.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

from kvstore.launch.options import LaunchError
from pslite.node.address import machine_id

PREFIX = "kvstore-key-"
SHARED_NAME = "KVSTORE_JOB_DIR"
"""The variable that replaces the directory :data:`SHARED`."""
SHARED = "~/.kvstore/jobs"
_KEY = "job.key"
_NOTE = "job.json"
_MAX_BYTES = 4096
_MAX_JOBS = 1000


class FoundJob(NamedTuple):
    """A job that a launcher of this user runs."""

    address: str
    """``host:port`` of its scheduler."""
    security: str
    """``plain`` or ``curve``; empty for the default."""
    key_file: str


def note_job(directory: Path, address: str, security: str, key: str = "") -> None:
    """Write the job's note, and ``key`` unless it is "", to ``directory`` if possible.

    Other users must not be able to enter ``directory``.
    """
    note = {"address": address, "security": security, "machine": machine_id(), "pid": os.getpid()}
    try:
        if key:
            write_secret(directory / _KEY, f"{key}\n")
        (directory / _NOTE).write_text(json.dumps(note), encoding="utf-8")
    except OSError:
        pass


def shared_directory() -> str:
    """Return the shared directory of jobs, with "~" kept."""
    return os.environ.get(SHARED_NAME) or SHARED


def running_jobs() -> list[FoundJob]:
    """Return the jobs that have a note, sorted by address."""
    here = sorted(filter(is_private, Path(tempfile.gettempdir()).glob(f"{PREFIX}*")))
    away = sorted(filter(is_private, Path(os.path.expanduser(shared_directory())).glob("*")))
    found = {}
    for job in map(_read, [*away[:_MAX_JOBS], *here[:_MAX_JOBS]]):
        if job is not None:
            found[job.address] = job  # if a job has two notes, use the one on this machine
    return sorted(found.values())


def is_private(directory: Path) -> bool:
    """Return whether ``directory`` is this user's and closed to all others."""
    try:
        status = directory.lstat()
    except OSError:
        return False
    is_closed = stat.S_IMODE(status.st_mode) & 0o077 == 0
    return stat.S_ISDIR(status.st_mode) and is_closed and status.st_uid == os.geteuid()


def _read(directory: Path) -> FoundJob | None:
    """Return the job in a note; None if there is no note or its launcher has ended."""
    try:
        with (directory / _NOTE).open("rb") as file:
            note = json.loads(file.read(_MAX_BYTES))
        job = FoundJob(str(note["address"]), str(note["security"]), str(directory / _KEY))
        if note["machine"] == machine_id():
            os.kill(int(note["pid"]), 0)
    except (OSError, ValueError, KeyError, TypeError):  # the job is ending, or its note is older
        return None
    return job


def new_key_file() -> Path:
    """Return an unguessable path for a new job's key; create nothing."""
    return Path(tempfile.gettempdir()) / f"{PREFIX}{secrets.token_hex(8)}" / _KEY


def new_key() -> str:
    """Return the text of a new key from the kernel's random numbers."""
    return secrets.token_urlsafe(32)


def write_key(path: Path, key: str | None = None) -> None:
    """Create the directory (mode 0700) with ``key``, or a new key (mode 0600).

    Raises :class:`LaunchError` if either cannot be created or already exists.
    """
    try:
        path.parent.mkdir(mode=0o700)
        write_secret(path, f"{key or new_key()}\n")
    except OSError as error:
        raise LaunchError(
            f"cannot create the job's key in {path.parent}: {error.strerror}; set TMPDIR to a "
            "writable directory of this machine, or PS_JOB_KEY_FILE to a key file",
            exit_code=1,
        ) from error


def write_secret(path: Path, text: str) -> None:
    """Create a file that only this user can read. Raises OSError if it exists."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
