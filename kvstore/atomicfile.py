"""Files that are there whole or not at all, and JSON in them.

A ``Replacement`` is written under another name next to its place and renamed when it is on the
disk, so a process that is killed at any moment leaves the file of before or the one of after.
What it leaves besides is ``NAME.tmp-PID``, which may be deleted. Nothing here knows what the
files are for; any thread may call, an object belongs to one. Read next: ``tensorfile.py``.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvstore.errors import ArgumentTypeError, CheckpointError

MAX_JSON_BYTES = 16 * 1024 * 1024


def checked_path(path: object) -> Path:
    """Raises ``ArgumentTypeError`` for what is neither text nor a path."""
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise ArgumentTypeError(f"files are named by a str or a pathlib.Path, got {path!r}")
    return Path(path)


class Replacement:
    """A file that takes the place of ``path`` when it is committed, and vanishes otherwise."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._own = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        self._is_ours = False
        try:
            self._file = open(self._own, "wb", buffering=0)  # noqa: SIM115 (closed in discard)
        except OSError as error:
            raise self._failed(error) from error
        self._is_ours = True

    def write(self, at: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        try:
            self._file.seek(at)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise self._failed(error) from error

    def commit(self) -> None:
        """Onto the disk, then under its name; the name itself is on the disk on return."""
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._own, self._path)
            self._is_ours = False
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self._failed(error) from error

    def discard(self) -> None:
        """Remove what was not committed; idempotent."""
        self._file.close()
        if self._is_ours:
            self._is_ours = False
            with suppress(OSError):
                os.unlink(self._own)

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"cannot write {self._path}: {error.strerror}")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Put ``value`` into the file ``path`` as JSON, in place of any that was there, at once.

    Raises ``CheckpointError`` when it is no JSON (NaN is none) or cannot be written.
    """
    try:
        text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the value cannot be written as JSON: {error}") from error
    file = Replacement(Path(path))
    try:
        file.write(0, text.encode())
        file.commit()
    finally:
        file.discard()


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value in a JSON file of at most ``max_bytes``; its form is the caller's to check.

    Raises ``CheckpointError`` when it cannot be read, is too long, or is no JSON. Doubled
    names and NaN are errors too.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > max_bytes:
        raise CheckpointError(f"{path} is longer than {max_bytes} bytes")
    return load_json(Path(path), data)


def load_json(path: Path, data: bytes) -> Any:
    """The value that this JSON of the file ``path`` means; see ``read_json``."""
    try:
        return json.loads(
            data.decode(), object_pairs_hook=_without_doubles, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its JSON cannot be read: {error}") from error


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")
