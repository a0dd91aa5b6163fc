"""``SchedulerJournal``: the file on disk from which a restarted scheduler goes on.

The file (PS_SCHEDULER_JOURNAL) is on the scheduler's machine, on which it is started again. A
record is in the system's hands when ``append`` returns, so it outlives the process. One process at
a time has the file: there are never two schedulers. ``protocol/charter.py`` has the records.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

from pslite.errors import ConfigError
from pslite.wire.codec import pack_value, unpack_value

CHARTER, REQUEST, DEADLOCK, TERM, APPS, EVENT = b"C", b"R", b"D", b"T", b"A", b"E"
"""The kinds of records.

A ``Charter``; a ``RecordedRequest``; the text of a deadlock; how many processes have had the
journal, and the title of the last; the state of the apps, which stands for all requests before it;
when something has happened to the nodes, by the machine's monotonic clock, and the text for the
status of the job.
"""

#: Each record begins with its kind, the bytes of its plain data, and their CRC-32.
_HEAD = struct.Struct("<cII")


class SchedulerJournal:
    """One journal. On any one thread."""

    def __init__(self, path: str) -> None:
        """Open or make the file.

        Raises ``ConfigError`` if this is impossible, or another process has it.
        """
        self._path = path
        where = f"PS_SCHEDULER_JOURNAL={path}"
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot open {where}: {error.strerror}") from None
        self._end = weakref.finalize(self, os.close, self._file)
        if not self._has_lock(path):
            self.close()
            raise ConfigError(
                f"another scheduler has {where}; end it first (it may be stopped)"
            ) from None
        #: The records that were there: (kind, plain data).
        self.found: list[tuple[bytes, Any]] = []
        self._read()

    def _has_lock(self, path: str) -> bool:
        """Lock the file; return False if another process has it, or has just replaced it."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(self._file), os.stat(path))
        except OSError:
            return False

    def _read(self) -> None:
        """Read all whole records; remove what a process has not written to its end."""
        size = os.fstat(self._file).st_size
        data = os.pread(self._file, size, 0)
        start = 0
        while start + _HEAD.size <= len(data):
            kind, length, checksum = _HEAD.unpack_from(data, start)
            body = data[start + _HEAD.size : start + _HEAD.size + length]
            if len(body) < length or zlib.crc32(body) != checksum:
                break
            self.found.append((kind, unpack_value(body)))
            start += _HEAD.size + length
        os.ftruncate(self._file, start)
        os.lseek(self._file, start, os.SEEK_SET)
        self.nbytes = start

    def append(self, kind: bytes, plain: Any) -> None:
        """Add a record. Raises ``OSError`` if it cannot be written."""
        body = pack_value(plain)
        record = _HEAD.pack(kind, len(body), zlib.crc32(body)) + body
        self.nbytes += len(record)
        while record:
            record = record[os.write(self._file, record) :]

    def replace(self, records: Sequence[tuple[bytes, Any]]) -> None:
        """Let these records stand for all that are there.

        Raises ``OSError`` if that is impossible; then nothing has changed.
        """
        other = f"{self._path}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(other)  # a process was lost while it wrote it
        fresh = SchedulerJournal(other)
        try:
            for kind, plain in records:
                fresh.append(kind, plain)
            os.rename(other, self._path)
        except OSError:
            fresh.close()
            os.unlink(other)
            raise
        self._end()
        fresh._end.detach()
        self._file, self.nbytes = fresh._file, fresh.nbytes
        self._end = weakref.finalize(self, os.close, self._file)

    def empty(self) -> None:
        """Remove all records: no process can go on from them any more."""
        os.ftruncate(self._file, 0)

    def close(self) -> None:
        """Let another process have the file."""
        self._end()
