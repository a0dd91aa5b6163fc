"""Named arrays in one file, in the safetensors format, written and read piece by piece.

A file holds nothing that can be run, and nothing of it is believed before it was checked. A
writer fills a file of another name next to its place and renames it when it is complete and on
the disk, so whoever reads finds the old file, the new one or none, never half of one. Neither
reader nor writer keeps more than the piece at hand, so files may be larger than the memory. An
object belongs to one thread at a time. Read next: ``tensorheader.py``, which has the format.
"""

from __future__ import annotations

import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.atomicfile import Replacement, checked_path, read_json, write_json
from kvstore.errors import CheckpointError
from kvstore.tensorheader import LENGTH_BYTES, MAX_HEADER_BYTES, Entry, TensorSpec, layout, parse

__all__ = ["TensorReader", "TensorSpec", "TensorWriter", "read_json", "write_json"]


class TensorWriter:
    """Writes the arrays of ``specs`` to ``path``, in pieces of any size and in any order.

    ::

        with TensorWriter(path, {"w": TensorSpec((2, 3), np.dtype("f4"))}, {"epoch": "4"}) as out:
            out.write("w", 0, first_half)
            out.write("w", 3, second_half)

    The block's good end puts the whole file in place of what had the name; an exception, or a
    piece that is missing, leaves that untouched and removes what was written. ``specs`` are
    pairs of shape and dtype: bool, integers up to 64 bits, float16, float32, float64, bfloat16,
    complex64 and complex128. Raises ``CheckpointError``, which names the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        specs: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._path = checked_path(path)
        self._entries, header = layout(self._path, specs, metadata or {})
        self._data_at = len(header)
        self._written: dict[str, list[tuple[int, int]]] = {name: [] for name in specs}
        self._file = Replacement(self._path)
        try:
            self._file.write(0, header)
        except BaseException:
            self._file.discard()
            raise

    def write(self, name: str, start_element: int, array: NDArray[Any]) -> None:
        """Put ``array``, flattened in C order, at this element of the flat tensor ``name``.

        ``array`` has the dtype of the spec (any byte order), lives on the host and is only
        read. The same elements may be written again.
        """
        entry = _find(self._path, self._entries, name)
        if array.dtype.newbyteorder("=") != entry.spec.dtype:
            raise CheckpointError(
                f"{self._path}: {name} holds {entry.spec.dtype}, the piece is {array.dtype}"
            )
        stop = start_element + array.size
        if not 0 <= start_element <= stop <= entry.num_elements:
            raise CheckpointError(
                f"{self._path}: {name} has {entry.num_elements} elements, the piece would cover "
                f"{start_element} to {stop}"
            )
        at = self._data_at + entry.begin + start_element * entry.spec.dtype.itemsize
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
        self._file.write(at, little.view(np.uint8).data)
        if array.size:
            self._written[name] = _merged(self._written[name], start_element, stop)

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        try:
            if exception is None:
                self._check_complete()
                self._file.commit()
        finally:
            self._file.discard()

    def _check_complete(self) -> None:
        for name, entry in self._entries.items():
            if entry.num_elements and self._written[name] != [(0, entry.num_elements)]:
                pieces = ", ".join(f"{start} to {stop}" for start, stop in self._written[name][:8])
                raise CheckpointError(
                    f"{self._path} was not written: {name} has {entry.num_elements} elements and "
                    f"only {pieces or 'none'} were given"
                )


class TensorReader:
    """Reads a file of named arrays; its header is checked when the object is made.

    ``names`` are in the file's order, ``metadata`` is a dictionary of texts. The file stays
    open until ``close`` or the end of the ``with`` block. Raises ``CheckpointError``, which
    names the file and what is wrong with it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = checked_path(path)
        try:
            self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115 (closed in close)
        except OSError as error:
            raise CheckpointError(f"cannot read {self._path}: {error.strerror}") from error
        try:
            self._entries, self.metadata, self._data_at = self._read_header()
        except BaseException:
            self._file.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of the array ``name``."""
        return _find(self._path, self._entries, name).spec

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """A new flat array of the elements ``start`` to ``stop`` (all by default), C order."""
        entry = _find(self._path, self._entries, name)
        last = entry.num_elements if stop is None else stop
        if not 0 <= start <= last <= entry.num_elements:
            raise CheckpointError(
                f"{self._path}: {name} has {entry.num_elements} elements, asked for {start} to "
                f"{last}"
            )
        dtype = entry.spec.dtype
        values = np.empty(last - start, dtype.newbyteorder("<"))
        at = self._data_at + entry.begin + start * dtype.itemsize
        self._fill(at, values.view(np.uint8).data)
        if dtype.kind == "b" and values.view(np.uint8).max(initial=0) > 1:
            raise CheckpointError(
                f"{self._path}: {name} is bool but holds other bytes than 0 and 1"
            )
        return values.astype(dtype, copy=False)

    def tensor(self, name: str) -> NDArray[Any]:
        """A new array: all of ``name``, in its shape."""
        return self.read(name).reshape(self.spec(name).shape)

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_header(self) -> tuple[dict[str, Entry], dict[str, str], int]:
        file_bytes = os.fstat(self._file.fileno()).st_size
        prefix = bytearray(LENGTH_BYTES)
        if file_bytes < len(prefix):
            raise CheckpointError(f"{self._path} is cut off: it has {file_bytes} bytes")
        self._fill(0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{self._path} is no file of tensors, or a damaged one: its header would have "
                f"{length} bytes, more than {MAX_HEADER_BYTES}"
            )
        if len(prefix) + length > file_bytes:
            raise CheckpointError(
                f"{self._path} is cut off: a header of {length} bytes in a file of {file_bytes}"
            )
        header = bytearray(length)
        self._fill(len(prefix), memoryview(header))
        data_at = len(prefix) + length
        entries, metadata = parse(self._path, bytes(header), file_bytes - data_at)
        return entries, metadata, data_at

    def _fill(self, at: int, buffer: memoryview) -> None:
        try:
            self._file.seek(at)
            while buffer:
                count = self._file.readinto(buffer)
                if not count:
                    raise CheckpointError(f"{self._path} became shorter while it was read")
                buffer = buffer[count:]
        except OSError as error:
            raise CheckpointError(f"cannot read {self._path}: {error.strerror}") from error


def _find(path: Path, entries: Mapping[str, Entry], name: str) -> Entry:
    entry = entries.get(name)
    if entry is None:
        known = ", ".join(list(entries)[:10]) or "none"
        raise CheckpointError(f"{path} has no array {name!r}; its arrays are {known}")
    return entry


def _merged(ranges: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Ranges that are sorted and do not touch each other, with one more."""
    apart = []
    for each in ranges:
        if each[1] < start or each[0] > stop:
            apart.append(each)
        else:
            start, stop = min(start, each[0]), max(stop, each[1])
    return sorted([*apart, (start, stop)])
