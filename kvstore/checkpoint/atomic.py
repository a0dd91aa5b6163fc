"""Write files and JSON atomically.

A ``Replacement`` is written under a temporary name in the same directory and renamed when it is on
the disk, so a process that is killed at any moment leaves the old file or the new one. The next
writer of NAME removes an abandoned temporary file, ``NAME.tmp-MACHINE-NUMBER``. A file that is
still being written is locked (flock(2)); the lock ends with its process. Some file systems do not
show locks of other machines, so files of other machines are only removed if they were also not
written for a day. Any thread may call; an object belongs to one thread. Read next:
``safetensors.py``.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from kvstore.errors import ArgumentTypeError, CheckpointError
from pslite.node.address import machine_id

MAX_JSON_BYTES = 16 * 1024 * 1024

ABANDONED_AFTER_S = 24 * 3600
_OWN_NAME = re.compile(r"(.+)\.tmp-([0-9a-f]{8})-[0-9a-f]{8}")
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


#: What to do about a damaged file.
RESTORE = "load an earlier checkpoint, or restore the file"


def damaged(path: str | os.PathLike[str], what: str) -> CheckpointError:
    """Return the error for a file with wrong contents."""
    return CheckpointError(f"{path} is damaged: {what}; {RESTORE}")


def checked_path(path: object) -> Path:
    """Check a file name and return it as a ``Path``.

    Raises ``ArgumentTypeError`` for other types than str and path, and ``CheckpointError`` for text
    that cannot name a file.
    """
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise ArgumentTypeError(f"a file name must be a str or a pathlib.Path, got {path!r}")
    text = os.fspath(path)
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        encoded = b""
    if not encoded or b"\0" in encoded:
        raise CheckpointError(
            f"a file name must be non-empty text in valid Unicode without NUL, got {text!r}"
        )
    return Path(path)


def open_regular(path: str | os.PathLike[str]) -> FileIO:
    """Open a regular file to read. Raises ``CheckpointError``; never waits for a pipe."""
    try:
        file = FileIO(path, "rb", opener=_open_without_waiting)
        mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        file.close()
        raise CheckpointError(f"cannot read {path}: expected a regular file, found {_kind(mode)}")
    return file


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


class Replacement:
    """A temporary file that replaces ``path`` when committed, else is deleted.

    If ``path`` is a symbolic link, its target is replaced, and the link stays. Raises
    ``CheckpointError``, also if ``path`` is not a regular file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._place = _place_of(path)
            self._own, self._file = _new_file_for(self._place)
        except OSError as error:
            raise self._failed(error) from error
        self._is_ours = True
        name, now = self._place.name, os.fstat(self._file.fileno()).st_mtime
        remove_abandoned(self._place.parent, lambda each: each == name, now)

    def write(self, at: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(self._file.fileno(), view, at)
                at, view = at + count, view[count:]
        except OSError as error:
            raise self._failed(error) from error

    def read(self, at: int, length: int) -> bytes:
        """Return ``length`` bytes that were written at byte ``at``."""
        try:
            return os.pread(self._file.fileno(), length, at)
        except OSError as error:
            raise self._failed(error) from error

    def commit(self) -> None:
        """Flush the file to the disk, then rename it; both are durable on return."""
        try:
            os.fsync(self._file.fileno())
            os.replace(self._own, self._place)
            self._is_ours = False
            folder = os.open(self._place.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self._failed(error) from error

    def discard(self) -> None:
        """Remove the temporary file unless it was committed; idempotent."""
        if self._is_ours:
            self._is_ours = False
            with suppress(OSError):
                os.unlink(self._own)
        self._file.close()

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"cannot write {self._path}: {error.strerror}")


def _place_of(path: Path) -> Path:
    """Return the file to replace: ``path`` with links resolved.

    Raises ``CheckpointError`` if it is not a regular file, and ``OSError``.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    if not stat.S_ISREG(mode):
        raise CheckpointError(
            f"cannot write {path}: it exists and is {_kind(mode)}; choose another file name"
        )
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _new_file_for(place: Path) -> tuple[Path, FileIO]:
    """Return a new, locked temporary file in the directory of ``place``."""
    while True:
        own = place.with_name(f"{place.name}.tmp-{machine_name()}-{secrets.token_hex(4)}")
        file = FileIO(own, "x+b")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return own, file
        file.close()  # before it was locked, another process removed it as abandoned


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def remove_abandoned(folder: Path, is_meant: Callable[[str], bool], now: float) -> None:
    """Remove temporary files of killed processes for these names.

    ``now`` is the time in seconds by the file system's clock, which may differ from this machine's.
    """
    with suppress(OSError):  # the folder may be writable but not readable
        for each in os.scandir(folder):
            found = _OWN_NAME.fullmatch(each.name)
            if found is not None and is_meant(found[1]):
                with suppress(OSError):  # it was removed meanwhile, or belongs to another user
                    _remove_if_abandoned(each.path, found[2], now)


def _remove_if_abandoned(path: str, machine: str, now: float) -> None:
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        is_sure = machine == machine_name()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return  # another process is writing it
        except OSError:
            is_sure = False  # a file system without locks
        if is_sure or now - os.fstat(file).st_mtime > ABANDONED_AFTER_S:
            os.unlink(path)
    finally:
        os.close(file)


def machine_name() -> str:
    """Return eight digits that identify the running kernel, also in containers."""
    kernel = machine_id().partition("/")[0]
    return hashlib.blake2b(kernel.encode(), digest_size=4).hexdigest()


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Replace the file ``path`` by ``value`` as JSON, atomically.

    Raises ``CheckpointError`` if the value cannot be JSON (such as NaN) or cannot be written.
    """
    try:
        text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot write the value as JSON: {error}") from error
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace the file ``path`` by ``data``, atomically.

    Raises ``CheckpointError``.
    """
    file = Replacement(checked_path(path))
    try:
        file.write(0, data)
        file.commit()
    finally:
        file.discard()


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the contents of a file. Raises ``CheckpointError``."""
    with open_regular(checked_path(path)) as file:
        return file.readall()


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the value in a JSON file of at most ``max_bytes``.

    The caller checks the value's form. Raises ``CheckpointError`` if the file cannot be read, is
    too long, or is not JSON. Repeated names and NaN are errors too.
    """
    try:
        with open_regular(path) as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > max_bytes:
        raise damaged(path, f"it has more than {max_bytes} bytes, the limit for such a file")
    return load_json(Path(path), data)


def load_json(
    path: Path, data: bytes, made_of: Callable[[dict[str, Any]], Any] = lambda found: found
) -> Any:
    """Parse JSON from the file ``path``; see ``read_json``.

    Each object is replaced by the result of ``made_of``, inner objects first.
    """

    def without_doubles(pairs: list[tuple[str, Any]]) -> Any:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name appears twice")
        return made_of(found)

    try:
        return json.loads(
            data.decode(), object_pairs_hook=without_doubles, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"invalid JSON: {error}") from error


def _refuse_constant(text: str) -> None:
    raise ValueError(f"expected a JSON number, got {text}")
