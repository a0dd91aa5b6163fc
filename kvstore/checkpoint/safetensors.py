"""Read and write files of named arrays (safetensors format), piece by piece.

A file contains no code, and all of it is checked before use. A writer fills a temporary file in the
same directory and renames it when it is complete and on the disk, so a reader finds the old file,
the new one or none, never an incomplete one. Data is compared with the checksums that were computed
when it was written (``checksums.py``). Readers and writers keep only the current piece and some
blocks of 256 KiB in memory, so files may be larger than the memory. An object belongs to one thread
at a time. Read next: ``header.py``, which has the format.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.checkpoint.atomic import (
    RESTORE,
    Replacement,
    checked_path,
    damaged,
    open_regular,
)
from kvstore.checkpoint.checksums import KnownSums
from kvstore.checkpoint.header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    Layout,
    Parsed,
    TensorEntry,
    TensorSpec,
    parse,
)
from kvstore.errors import CheckpointError

__all__ = ["TensorReader", "TensorSpec", "TensorWriter"]

_STEP_BYTES = 1 << 19
"""This much is written at a time, then summed while it is in the processor's cache."""

_MOST_RECENT = 8
"""The number of arrays that may be read in turn, piece by piece: states and values of a key."""


class TensorWriter(AbstractContextManager["TensorWriter"]):
    """A file with the arrays of ``specs``, written in pieces in any order.

    ::

        with TensorWriter(path, {"w": TensorSpec((2, 3), np.dtype("f4"))}, {"epoch": "4"}) as out:
            out.write("w", 0, first_half)
            out.write("w", 3, second_half)

    At the end of the block the new file replaces the old one. After an exception, or if a piece is
    missing, the old file stays and the new one is removed. ``specs`` are pairs of shape and dtype:
    bool, integers up to 64 bits, float16, float32, float64, bfloat16, complex64 and complex128.
    Raises ``CheckpointError``, which names the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        specs: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._path = checked_path(path)
        self._layout = Layout(self._path, specs, metadata or {})
        self._entries, self._data_at = self._layout.entries, self._layout.data_at
        self._written: dict[str, list[tuple[int, int]]] = {name: [] for name in specs}
        self.digest = ""
        """A digest of the contents, as in ``TensorReader``; set when the file is complete."""
        self._file = Replacement(self._path)

    def write(self, name: str, start_element: int, array: NDArray[Any]) -> None:
        """Write ``array``, flattened in C order, at an element of tensor ``name``.

        ``array`` has the dtype of the spec (any byte order), lives on the host and is only
        read. The same elements may be written again.
        """
        entry = _find(self._path, self._entries, name)
        if array.dtype.newbyteorder("=") != entry.spec.dtype:
            raise CheckpointError(
                f"{self._path}: {name} has dtype {entry.spec.dtype}, the piece has {array.dtype}"
            )
        stop = start_element + array.size
        if not 0 <= start_element <= stop <= entry.num_elements:
            raise CheckpointError(
                f"{self._path}: {name} has {entry.num_elements} elements, the piece has elements "
                f"{start_element} to {stop}"
            )
        at = entry.begin + start_element * entry.spec.dtype.itemsize
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
        data = little.view(np.uint8).data
        for begin in range(0, len(data), _STEP_BYTES):
            step = data[begin : begin + _STEP_BYTES]
            self._file.write(self._data_at + at + begin, step)
            self._layout.sums.add(at + begin, step)
        if array.size:
            self._written[name] = _merged(self._written[name], start_element, stop)

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._check_complete()
                header = self._layout.header(self._read_back)
                self._file.write(0, header)
                self._file.commit()
                self.digest = _digest(header)
        finally:
            self._file.discard()

    def _read_back(self, at: int, length: int) -> bytes:
        return self._file.read(self._data_at + at, length)

    def _check_complete(self) -> None:
        for name, entry in self._entries.items():
            if entry.num_elements and self._written[name] != [(0, entry.num_elements)]:
                pieces = ", ".join(f"{start} to {stop}" for start, stop in self._written[name][:8])
                raise CheckpointError(
                    f"{self._path} was not written: {name} needs {entry.num_elements} elements, "
                    f"got {pieces or 'none'}"
                )


class TensorReader(AbstractContextManager["TensorReader"]):
    """Reads a file of named arrays; checks its header when the object is made.

    ``names`` are in the file's order, ``metadata`` is a dictionary of texts; ``digest`` differs
    for files that differ. The file stays open until ``close`` or the end of the ``with`` block.
    Raises ``CheckpointError``, which names the file and the problem, such as damaged values. In
    files without checksums (of other programs and earlier versions) only the header and the sizes
    are checked.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = checked_path(path)
        #: The last blocks that were partly read, the latest at the end.
        self._recent: dict[int, memoryview] = {}
        self._file = open_regular(self._path)
        try:
            (self._entries, self.metadata, self._sums), self._data_at = self._read_header()
        except BaseException:
            self._file.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all arrays, in a new tuple; ``name in reader`` looks up one."""
        return tuple(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype of the array ``name``."""
        return _find(self._path, self._entries, name).spec

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Return a new flat array of elements [start, stop), all by default, in C order."""
        entry = _find(self._path, self._entries, name)
        last = entry.num_elements if stop is None else stop
        if not 0 <= start <= last <= entry.num_elements:
            raise CheckpointError(
                f"{self._path}: {name} has {entry.num_elements} elements, cannot read {start} to "
                f"{last}"
            )
        dtype = entry.spec.dtype
        at = entry.begin + start * dtype.itemsize
        values = self._values_at(at, last - start, dtype.newbyteorder("<"))
        if dtype.kind == "b" and values.view(np.uint8).max(initial=0) > 1:
            raise damaged(self._path, f"{name} is bool but has bytes other than 0 and 1")
        return values.astype(dtype, copy=False)

    def tensor(self, name: str) -> NDArray[Any]:
        """Return a new array: all of ``name``, in its shape."""
        return self.read(name).reshape(self.spec(name).shape)

    def verify(self) -> None:
        """Compare all values with their checksums, if the file has any."""
        sums = self._sums
        if sums is None or not len(sums):
            return
        buffer = memoryview(bytearray(sums.length(0)))
        for block in range(len(sums)):
            self._read_block(sums, block, buffer[: sums.length(block)])

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_header(self) -> tuple[Parsed, int]:
        file_bytes = os.fstat(self._file.fileno()).st_size
        prefix = bytearray(LENGTH_BYTES)
        if file_bytes < len(prefix):
            raise CheckpointError(
                f"{self._path} is truncated: it has {file_bytes} bytes; {RESTORE}"
            )
        self._fill(0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{self._path} is damaged or not a safetensors file: its header would have "
                f"{length} bytes, more than {MAX_HEADER_BYTES}; {RESTORE}"
            )
        if len(prefix) + length > file_bytes:
            raise CheckpointError(
                f"{self._path} is truncated: its header needs {length} bytes, the file has "
                f"{file_bytes}; {RESTORE}"
            )
        header = bytearray(length)
        self._fill(len(prefix), memoryview(header))
        data_at = len(prefix) + length
        self.digest = _digest(prefix + header)
        return parse(self._path, bytes(header), file_bytes - data_at), data_at

    def _values_at(self, at: int, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return a new array of the ``count`` elements from byte ``at`` of the values."""
        sums = self._sums
        if sums is not None and count:
            block, start = divmod(at, sums.block_bytes)
            if start + count * dtype.itemsize < sums.block_bytes:  # as most of many small arrays
                found = np.frombuffer(self._recent_block(sums, block), dtype, count, start)
                return np.array(found)
        values: NDArray[Any] = np.empty(count, dtype)
        buffer = values.view(np.uint8).data
        if sums is None:
            self._fill(self._data_at + at, buffer)
        else:
            self._fill_blocks(sums, at, buffer)
        return values

    def _fill_blocks(self, sums: KnownSums, at: int, buffer: memoryview) -> None:
        while buffer:
            block, start = divmod(at, sums.block_bytes)
            stop = min(start + len(buffer), sums.length(block))
            part = buffer[: stop - start]
            if len(part) == sums.length(block):
                self._read_block(sums, block, part)
            else:
                part[:] = self._recent_block(sums, block)[start:stop]
            at, buffer = at + len(part), buffer[len(part) :]

    def _recent_block(self, sums: KnownSums, block: int) -> memoryview:
        """Return a whole block and cache it, since the next pieces often begin in it."""
        found = self._recent.pop(block, None)
        if found is None:
            found = memoryview(bytearray(sums.length(block)))
            self._read_block(sums, block, found)
            if len(self._recent) >= _MOST_RECENT:
                del self._recent[next(iter(self._recent))]
        self._recent[block] = found
        return found

    def _read_block(self, sums: KnownSums, block: int, buffer: memoryview) -> None:
        at = self._data_at + block * sums.block_bytes
        self._fill(at, buffer)
        if not sums.fits(block, buffer):
            raise damaged(self._path, f"wrong checksum of bytes {at} to {at + len(buffer)}")

    def _fill(self, at: int, buffer: memoryview) -> None:
        try:
            while buffer:
                count = os.preadv(self._file.fileno(), [buffer], at)
                if not count:
                    raise CheckpointError(
                        f"{self._path} was truncated while it was read; try again"
                    )
                at, buffer = at + count, buffer[count:]
        except OSError as error:
            raise CheckpointError(f"cannot read {self._path}: {error.strerror}") from error


def _digest(header: bytes | bytearray) -> str:
    """Return a digest of a header, which includes the checksums of all values."""
    return hashlib.blake2b(header, digest_size=16).hexdigest()


def _find(path: Path, entries: Mapping[str, TensorEntry], name: str) -> TensorEntry:
    entry = entries.get(name)
    if entry is None:
        known = ", ".join(list(entries)[:10]) or "none"
        raise CheckpointError(f"{path} does not have the array {name!r}; it has {known}")
    return entry


def _merged(ranges: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Add a range to sorted ranges that do not touch each other; merge neighbours."""
    apart = []
    for each in ranges:
        if each[1] < start or each[0] > stop:
            apart.append(each)
        else:
            start, stop = min(start, each[0]), max(stop, each[1])
    return sorted([*apart, (start, stop)])
