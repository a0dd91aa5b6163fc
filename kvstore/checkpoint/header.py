"""The header of a tensor file (safetensors format): each array's position.

Pure: it converts bytes to checked values, and values to bytes. It does not access files. All of a
header is checked before use: sizes must fit the file before memory is allocated for them. Any
thread may call. Read next: ``safetensors.py``.

The format, as https://huggingface.co/docs/safetensors describes it: the length of the header
(8 bytes, little-endian), the header (JSON in UTF-8, at most 100 MB, which may end in spaces),
then the values, little-endian and in C order, without holes between one array and the next::

    {"__metadata__": {"key": "text"},
     "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}

Offsets count from the end of the header. The format has no dtype for complex arrays that all
readers know, so they are stored as pairs of real numbers (one more dimension, of size 2), and the
metadata ``kvstore.complex`` lists their names as JSON. ``kvstore.crc32`` is a checksum of the
header, ``kvstore.checksums`` has those of the values (``checksums.py``). Files of other programs or
earlier versions may lack one or both.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from json.encoder import encode_basestring, encode_basestring_ascii
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays.dtypes import bfloat16, is_bfloat16
from kvstore.checkpoint.atomic import RESTORE, damaged, load_json
from kvstore.checkpoint.checksums import BlockSums, KnownSums
from kvstore.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 32
COMPLEX_KEY = "kvstore.complex"
CHECKSUM_KEY = "kvstore.crc32"
CHECKSUMS_KEY = "kvstore.checksums"

_METADATA = "__metadata__"
_MEMBERS = {"dtype", "shape", "data_offsets"}
_NO_ARRAY = (AttributeError, TypeError, ValueError, RecursionError)
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
_TAGS = {dtype: tag for tag, dtype in _DTYPES.items()}
_BFLOAT16 = "BF16"
_PAIRS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype("c8"): np.dtype("f4"),
    np.dtype("c16"): np.dtype("f8"),
}
_COMPLEX = {real: whole for whole, real in _PAIRS.items()}


class TensorSpec(NamedTuple):
    """The shape and native dtype of an array, like ``kvstore.base.KeySpec``."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class TensorEntry(NamedTuple):
    """The position of an array's values; ``begin`` counts from the header's end."""

    spec: TensorSpec
    begin: int
    end: int
    num_elements: int


class Layout:
    """The positions of the arrays in a new file, and the bytes before the values.

    Raises ``CheckpointError`` for arrays that the format cannot store.
    """

    def __init__(
        self,
        path: Path,
        specs: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]],
        metadata: Mapping[str, str],
    ) -> None:
        self._texts = _checked_texts(path, metadata)
        self.entries: dict[str, TensorEntry] = {}
        known: dict[tuple[tuple[int, ...], np.dtype[Any]], TensorSpec] = {}
        end = 0
        for name, (shape, dtype) in specs.items():
            kind = tuple(shape), dtype
            spec = known.get(kind)
            if spec is None or not isinstance(name, str) or name == _METADATA:
                spec = known[kind] = _storable(path, name, *kind)
            num_elements = math.prod(spec.shape)
            begin, end = end, end + num_elements * dtype.itemsize
            self.entries[name] = TensorEntry(spec, begin, end, num_elements)
        self.sums = BlockSums(end)
        pairs = [name for name, entry in self.entries.items() if entry.spec.dtype in _PAIRS]
        if pairs:
            self._texts[COMPLEX_KEY] = json.dumps(pairs)
        try:
            self._arrays_text = _arrays_text(self.entries)
            self.data_at = len(self._header(self.sums.blank(), "0" * 8))
        except UnicodeEncodeError as error:
            raise CheckpointError(
                f"{path}: a name or a metadata value is not valid Unicode: {error}"
            ) from error
        if self.data_at - LENGTH_BYTES > MAX_HEADER_BYTES:
            raise CheckpointError(f"{path}: {len(specs)} arrays need a header of over 100 MB")

    def header(self, read: Callable[[int, int], bytes]) -> bytes:
        """Return the bytes before the values; ``read`` returns values that were written."""
        checksums = self.sums.text(read)
        texts = {**self._texts, CHECKSUMS_KEY: checksums}
        return self._header(checksums, _checksum(self.entries, texts))

    def _header(self, checksums: str, checksum: str) -> bytes:
        """Return the bytes before the values, padded to a round number for some readers."""
        texts = {**self._texts, CHECKSUMS_KEY: checksums, CHECKSUM_KEY: checksum}
        data = b'{"' + _METADATA.encode() + b'":' + _compact(texts) + self._arrays_text + b"}"
        data += b" " * (-(LENGTH_BYTES + len(data)) % _ALIGNMENT_BYTES)
        return len(data).to_bytes(LENGTH_BYTES, "little") + data


def _checked_texts(path: Path, metadata: Mapping[str, str]) -> dict[str, str]:
    taken = (COMPLEX_KEY, CHECKSUM_KEY, CHECKSUMS_KEY)
    if any(name in metadata for name in taken) or not all(
        isinstance(text, str) for item in metadata.items() for text in item
    ):
        raise CheckpointError(
            f"{path}: metadata must map str to str, without the reserved names "
            f"{', '.join(taken)}, got {dict(metadata)}"
        )
    return dict(metadata)


def _storable(path: Path, name: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> TensorSpec:
    """Return the form in which a file stores an array; refuse unsupported ones."""
    dtype = dtype.newbyteorder("=")
    if not isinstance(name, str):
        raise CheckpointError(f"{path}: names of arrays must be str, got {name!r}")
    if (
        _tag_of(_PAIRS.get(dtype, dtype)) is None
        or name == _METADATA
        or len(shape) >= MAX_DIMENSIONS
    ):
        raise CheckpointError(
            f"{path}: cannot save the array {name!r} of dtype {dtype} with {len(shape)} "
            f"dimensions; use {', '.join(map(str, (*_DTYPES.values(), *_PAIRS)))} or bfloat16, "
            f"and fewer than {MAX_DIMENSIONS} dimensions"
        )
    return TensorSpec(tuple(map(int, shape)), dtype)


def _compact(texts: Mapping[str, str]) -> bytes:
    return json.dumps(texts, separators=(",", ":"), ensure_ascii=False).encode()


def _arrays_text(entries: Mapping[str, TensorEntry]) -> bytes:
    """Return the header's text about the arrays, which follows the metadata."""
    said = cache(_said)
    lines = []
    for name, (spec, begin, end, _) in entries.items():
        tag, shape = said(spec)
        lines.append(
            f',{encode_basestring(name)}:{{"dtype":"{tag}","shape":[{",".join(shape)}],'
            f'"data_offsets":[{begin},{end}]}}'
        )
    return "".join(lines).encode()


def _said(spec: TensorSpec) -> tuple[str | None, list[str]]:
    """Return a header's texts for dtype and shape; complex numbers are pairs."""
    shape = list(map(str, spec.shape))
    real = _PAIRS.get(spec.dtype)
    return (_tag_of(spec.dtype), shape) if real is None else (_tag_of(real), [*shape, "2"])


class Parsed(NamedTuple):
    """The contents of a header."""

    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    sums: KnownSums | None
    """The checksums of the values; None if the file has none."""


def parse(path: Path, header: bytes, data_bytes: int) -> Parsed:
    """Parse a header and check it against the size of the data."""
    text = header.rstrip(b" ")
    if not (text.startswith(b"{") and text.endswith(b"}")):
        raise CheckpointError(
            f"{path} is not a safetensors file: its header is not a JSON object; choose another "
            "file"
        )
    known: dict[tuple[str, str], tuple[TensorSpec, int]] = {}

    def entry_of(found: dict[str, Any]) -> Any:
        try:
            return _parse_entry(found, known)
        except _NO_ARRAY:
            return found

    # Entries are made during parsing: as JSON, 100,000 arrays would be half a million objects.
    parsed = load_json(path, text, entry_of)
    if type(parsed) is not dict:
        raise CheckpointError(
            f"{path} is not a safetensors file: its header is not a mapping of names to arrays; "
            "choose another file"
        )
    metadata = parsed.pop(_METADATA, {})
    if not (
        isinstance(metadata, dict) and all(isinstance(each, str) for each in metadata.values())
    ):
        raise damaged(path, "its metadata do not map str to str")
    entries = {name: _checked_entry(path, name, value) for name, value in parsed.items()}
    checksum = metadata.pop(CHECKSUM_KEY, None)
    if checksum is None and CHECKSUMS_KEY in metadata:
        raise damaged(path, "the checksum of its header is missing")
    if checksum is not None and checksum != _checksum(entries, metadata):
        raise damaged(path, "the checksum of its header does not match")
    end = 0
    for name, (_, begin, stop, _) in sorted(entries.items(), key=_place):
        if begin != end:
            raise damaged(path, f"{name} begins at {begin}, the values before it end at {end}")
        end = stop
    if end != data_bytes:
        raise CheckpointError(
            f"{path} is truncated or damaged: its header announces {end} bytes of values, got "
            f"{data_bytes}; {RESTORE}"
        )
    for name in _names_of_complex(path, metadata.pop(COMPLEX_KEY, "[]")):
        entries[name] = _joined(path, name, entries.get(name))
    return Parsed(entries, metadata, _known_sums(path, metadata, data_bytes))


def _known_sums(path: Path, metadata: dict[str, str], data_bytes: int) -> KnownSums | None:
    text = metadata.pop(CHECKSUMS_KEY, None)
    if text is None:
        return None
    try:
        return KnownSums.of(text, data_bytes)
    except ValueError as error:
        raise damaged(path, f"{CHECKSUMS_KEY}: {error}") from error


def _place(item: tuple[str, TensorEntry]) -> tuple[int, ...]:
    return item[1][1:3]


def _checked_entry(path: Path, name: str, value: Any) -> TensorEntry:
    """Return the entry of one array; raise the error that ``_parse_entry`` found."""
    if type(value) is TensorEntry:
        return value
    try:
        return _parse_entry(value, {})
    except _NO_ARRAY as error:
        raise damaged(path, f"{name!r} is not an array: {error}") from error


def _parse_entry(value: Any, known: dict[tuple[str, str], tuple[TensorSpec, int]]) -> TensorEntry:
    """Parse one array of a header; check that its shape and offsets fit.

    ``known`` caches specs and numbers of elements by dtype and shape. Raises one of ``_NO_ARRAY``.
    """
    if value.keys() != _MEMBERS:
        raise ValueError(f"unexpected fields {', '.join(value)}")
    begin, end = map(_natural, value["data_offsets"])
    # As text, since 3.0 and True are equal to integers.
    kind = value["dtype"], repr(value["shape"])
    found = known.get(kind)
    if found is None:
        found = known[kind] = _parse_spec(value["dtype"], value["shape"])
    spec, num_elements = found
    needed = num_elements * spec.dtype.itemsize
    if begin + needed != end:
        raise ValueError(
            f"{spec.shape} of {spec.dtype} needs {needed} bytes, offsets are {begin}, {end}"
        )
    return TensorEntry(spec, begin, end, num_elements)


def _parse_spec(tag: Any, sizes: Any) -> tuple[TensorSpec, int]:
    shape = tuple(map(_natural, sizes))
    dtype = _dtype_of(tag)
    num_elements = math.prod(shape)
    most = num_elements or math.prod(size for size in shape if size)
    if len(shape) > MAX_DIMENSIONS or most >= 2**60:
        raise ValueError(f"the shape {shape} is invalid")
    return TensorSpec(shape, dtype), num_elements


def _names_of_complex(path: Path, text: str) -> list[str]:
    names = load_json(path, text.encode())
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise damaged(path, f"{COMPLEX_KEY} is not a list of names")
    return names


def _joined(path: Path, name: str, pairs: TensorEntry | None) -> TensorEntry:
    """Return the complex array that is stored as these pairs of real numbers."""
    dtype = None if pairs is None else _COMPLEX.get(pairs.spec.dtype)
    if pairs is None or dtype is None or pairs.spec.shape[-1:] != (2,):
        raise damaged(path, f"{name!r} does not have pairs of real numbers")
    spec = TensorSpec(pairs.spec.shape[:-1], dtype)
    return pairs._replace(spec=spec, num_elements=pairs.num_elements // 2)


def _checksum(entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> str:
    """Return the checksum of a header's contents, for any order and spaces in it.

    It is computed from JSON with sorted names and a space after each comma and colon.
    """
    said = cache(_said)
    lines = []
    for name in sorted(entries):
        spec, begin, end, _ = entries[name]
        tag, shape = said(spec)
        lines.append(
            f'{encode_basestring_ascii(name)}: {{"data_offsets": [{begin}, {end}], '
            f'"dtype": "{tag}", "shape": [{", ".join(shape)}]}}'
        )
    text = f"[{{{', '.join(lines)}}}, {json.dumps(metadata, sort_keys=True)}]"
    return f"{zlib.crc32(text.encode()):08x}"


def _tag_of(dtype: np.dtype[Any]) -> str | None:
    return _BFLOAT16 if is_bfloat16(dtype) else _TAGS.get(dtype)


def _dtype_of(tag: Any) -> np.dtype[Any]:
    dtype = bfloat16() if tag == _BFLOAT16 else _DTYPES.get(tag)
    if dtype is None:
        raise ValueError(f"unknown dtype {tag!r}")
    return dtype


def _natural(number: Any) -> int:
    # True is an int to Python, and 3.0 is not.
    if type(number) is not int or number < 0:
        raise ValueError(f"expected an integer of at least 0, got {number!r}")
    return number
