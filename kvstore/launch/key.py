"""The key of one job, made by the launcher and handed over as a file that only its user can read.

The key itself is on no command line, in no environment and in no log: the environment holds
the file's name. The directory lives as long as the job (``supervisor.py`` removes it, or
``guardian.py`` where the launcher is killed). Runs on the main thread; used by ``local.py``.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from kvstore.launch.jobs import PREFIX
from kvstore.launch.options import LaunchError

_KEY_BYTES = 32


def new_key_file() -> Path:
    """Where the key of a new job will be; nothing is made yet, and nobody can guess the name."""
    return Path(tempfile.gettempdir()) / f"{PREFIX}{secrets.token_hex(8)}" / "job.key"


def new_key() -> str:
    """The text of a key, fresh from the kernel."""
    return secrets.token_urlsafe(_KEY_BYTES)


def write_key(path: Path, key: str | None = None) -> None:
    """Make the directory (mode 0700) and ``key``, or a new one, in it (mode 0600).

    Raises :class:`LaunchError` when either cannot be made, or was there.
    """
    try:
        path.parent.mkdir(mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as file:
            file.write((key or new_key()) + "\n")
    except OSError as error:
        raise LaunchError(
            f"cannot make the job's key in {path.parent}: {error.strerror}; set TMPDIR to a "
            "directory of this machine that can be written to, or PS_JOB_KEY_FILE to a key",
            exit_code=1,
        ) from error
