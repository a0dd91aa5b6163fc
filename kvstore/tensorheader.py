"""The header of a file of tensors: where each array lies, in the safetensors format.

Pure: bytes in, checked values out, and the other way round. No file is touched here, and
nothing that a header says is believed before it was checked: sizes are known to fit the file
before anybody allocates by them. Any thread may call. Read next: ``tensorfile.py``.

The format, as https://huggingface.co/docs/safetensors describes it: the length of the header
(8 bytes, little-endian), the header (JSON in UTF-8, at most 100 MB, which may end in spaces),
then the values, little-endian and in C order, without holes between one array and the next::

    {"__metadata__": {"key": "text"},
     "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}

Offsets count from the end of the header. Complex arrays have no dtype there that all readers
know; they are stored as pairs of real numbers (one more dimension, of 2), and the metadata
``kvstore.complex`` lists their names as JSON. ``kvstore.crc32`` is a checksum of the header.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore.atomicfile import load_json
from kvstore.dtypes import bfloat16, is_bfloat16
from kvstore.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 32
COMPLEX_KEY = "kvstore.complex"
CHECKSUM_KEY = "kvstore.crc32"

_METADATA = "__metadata__"
LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 64

_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("bool"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "U16": np.dtype("u2"),
    "I16": np.dtype("i2"),
    "F16": np.dtype("f2"),
    "U32": np.dtype("u4"),
    "I32": np.dtype("i4"),
    "F32": np.dtype("f4"),
    "U64": np.dtype("u8"),
    "I64": np.dtype("i8"),
    "F64": np.dtype("f8"),
}
_BFLOAT16 = "BF16"
_PAIRS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype("c8"): np.dtype("f4"),
    np.dtype("c16"): np.dtype("f8"),
}
_COMPLEX = {real: whole for whole, real in _PAIRS.items()}


class TensorSpec(NamedTuple):
    """Shape and dtype (in native byte order) of an array; ``kvstore.base.KeySpec`` fits too."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Entry(NamedTuple):
    """Where an array's values lie: from ``begin`` on, counted from the end of the header."""

    spec: TensorSpec
    begin: int
    num_elements: int

    @property
    def end(self) -> int:
        return self.begin + self.num_elements * self.spec.dtype.itemsize


def layout(
    path: Path,
    specs: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
    metadata: Mapping[str, str],
) -> tuple[dict[str, Entry], bytes]:
    """Where each array goes, and the first bytes of the file up to the values."""
    texts = dict(metadata)
    if {COMPLEX_KEY, CHECKSUM_KEY} & texts.keys() or not all(
        isinstance(text, str) for item in texts.items() for text in item
    ):
        raise CheckpointError(
            f"{path}: metadata must be texts by name, and the names {COMPLEX_KEY} and "
            f"{CHECKSUM_KEY} are taken; got {texts}"
        )
    entries: dict[str, Entry] = {}
    arrays: dict[str, Any] = {}
    end = 0
    for name, (shape, given) in specs.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: names must be str, got {name!r}")
        dtype = given.newbyteorder("=")
        real = _PAIRS.get(dtype, dtype)
        tag = _tag_of(real)
        if tag is None or name == _METADATA or len(shape) >= MAX_DIMENSIONS:
            raise CheckpointError(
                f"{path}: an array {name!r} of {dtype} in {len(shape)} dimensions cannot be "
                f"stored; dtypes are {', '.join(map(str, (*_DTYPES.values(), *_PAIRS)))} and "
                f"bfloat16, dimensions fewer than {MAX_DIMENSIONS}"
            )
        entry = Entry(TensorSpec(tuple(shape), dtype), end, _product(shape))
        stored = tuple(shape) if real == dtype else (*shape, 2)
        arrays[name] = {
            "dtype": tag,
            "shape": [int(size) for size in stored],
            "data_offsets": [end, entry.end],
        }
        entries[name], end = entry, entry.end
    pairs = [name for name, entry in entries.items() if entry.spec.dtype in _PAIRS]
    if pairs:
        texts[COMPLEX_KEY] = json.dumps(pairs)
    texts[CHECKSUM_KEY] = _checksum(arrays, texts)
    return entries, _header(path, {_METADATA: texts, **arrays})


def _header(path: Path, header: dict[str, Any]) -> bytes:
    """The bytes before the values; these begin at a round number, as some readers like it."""
    try:
        data = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{path}: a name or a text is no Unicode: {error}") from error
    data += b" " * (-(LENGTH_BYTES + len(data)) % _ALIGNMENT_BYTES)
    if len(data) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: {len(header) - 1} arrays need a header of over 100 MB")
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def parse(path: Path, header: bytes, data_bytes: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """The arrays and the metadata of a header, checked against the size of the data."""
    text = header.rstrip(b" ")
    if not (text.startswith(b"{") and text.endswith(b"}")):
        raise CheckpointError(f"{path} is no file of tensors: its header is no JSON object")
    parsed = load_json(path, text)
    metadata = parsed.pop(_METADATA, {})
    if not (
        isinstance(metadata, dict) and all(isinstance(each, str) for each in metadata.values())
    ):
        raise CheckpointError(f"{path} is damaged: its metadata are not texts by name")
    entries = {name: _parse_entry(path, name, value) for name, value in parsed.items()}
    checksum = metadata.pop(CHECKSUM_KEY, None)
    if checksum is not None and checksum != _checksum(parsed, metadata):
        raise CheckpointError(f"{path} is damaged: the checksum of its header does not fit")
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise CheckpointError(
                f"{path} is damaged: {name} begins at {entry.begin}, the values before it end at "
                f"{end}"
            )
        end = entry.end
    if end != data_bytes:
        raise CheckpointError(
            f"{path} is cut off or damaged: by its header it has {end} bytes of values, and "
            f"there are {data_bytes}"
        )
    for name in _names_of_complex(path, metadata.pop(COMPLEX_KEY, "[]")):
        entries[name] = _joined(path, name, entries.get(name))
    return entries, metadata


def _parse_entry(path: Path, name: str, value: Any) -> Entry:
    """One array of a header; that its shape and its offsets fit together is checked."""
    try:
        if value.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"it has the members {', '.join(value)}")
        begin, end = (_natural(number) for number in value["data_offsets"])
        shape = tuple(_natural(size) for size in value["shape"])
        dtype = _dtype_of(value["dtype"])
        if len(shape) > MAX_DIMENSIONS or _product(size for size in shape if size) >= 2**60:
            raise ValueError(f"the shape {shape} is none that an array can have")
        entry = Entry(TensorSpec(shape, dtype), begin, _product(shape))
        if entry.end != end:
            raise ValueError(
                f"{shape} of {dtype} needs {entry.end - begin} bytes, offsets are {begin}, {end}"
            )
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {name!r} is no array: {error}") from error
    return entry


def _names_of_complex(path: Path, text: str) -> list[str]:
    names = load_json(path, text.encode())
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{path} is damaged: {COMPLEX_KEY} is no list of names")
    return names


def _joined(path: Path, name: str, pairs: Entry | None) -> Entry:
    """The complex array that is stored as these pairs of real numbers."""
    dtype = None if pairs is None else _COMPLEX.get(pairs.spec.dtype)
    if pairs is None or dtype is None or pairs.spec.shape[-1:] != (2,):
        raise CheckpointError(f"{path} is damaged: {name!r} does not hold pairs of real numbers")
    return Entry(TensorSpec(pairs.spec.shape[:-1], dtype), pairs.begin, pairs.num_elements // 2)


def _checksum(arrays: Mapping[str, Any], metadata: Mapping[str, str]) -> str:
    """Of what the header says, whatever the order and the spaces with which it says it."""
    text = json.dumps([arrays, metadata], sort_keys=True)
    return f"{zlib.crc32(text.encode()):08x}"


def _tag_of(dtype: np.dtype[Any]) -> str | None:
    if is_bfloat16(dtype):
        return _BFLOAT16
    return next((tag for tag, known in _DTYPES.items() if known == dtype), None)


def _dtype_of(tag: Any) -> np.dtype[Any]:
    dtype = bfloat16() if tag == _BFLOAT16 else _DTYPES.get(tag)
    if dtype is None:
        raise ValueError(f"the dtype {tag!r} is not known here")
    return dtype


def _natural(number: Any) -> int:
    # True is an int to Python, and 3.0 is none.
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no whole number from 0 on")
    return number


def _product(sizes: Iterable[int]) -> int:
    return math.prod(int(size) for size in sizes)
