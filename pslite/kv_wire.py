"""Pushes and pulls as bodies and frames, and back. Pure, runs on any thread.

A request's body is ``[push, pull, dtype, columns, has lens]`` and its frames are the keys,
then, of a push, values and lens; the answer to a pull has the body ``[dtype, columns, has
lens]`` and the frames values and lens; the answer to a push is empty. Keys are little-endian
uint64, lens little-endian int64, a dtype is its text in NumPy's array interface, columns are
-1 for 1-D values. Everything is checked before it is used. Next: ``kv_app.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pslite.errors import ProtocolError
from pslite.kv_pairs import VALUE_KINDS, Keys, KVPairs, Lens, Values, fault_in, fault_in_values
from pslite.wire.codec import pack_value, unpack_value

_FLAT = -1


class Asked(NamedTuple):
    """A request as it arrived."""

    push: bool
    pull: bool
    pairs: KVPairs
    """Of a pure pull: the keys, and no values (shape (0,))."""


def pack_request(push: bool, pull: bool, values: Values | None, lens: Lens | None) -> bytes:
    """The body that goes to every server of one push or pull."""
    layout = ["", _FLAT, False] if values is None else _layout(values, lens)
    return pack_value([push, pull, *layout])


def request_frames(pairs: KVPairs, push: bool) -> list[memoryview]:
    """The frames for one server: views of the arrays."""
    frames = [_bytes_of(pairs.keys.astype("<u8", copy=False))]
    return frames + _value_frames(pairs.values, pairs.lens) if push else frames


def unpack_request(body: bytes, frames: Sequence[Any]) -> Asked:
    """A request, checked; its arrays are read-only views of the frames.

    Raises:
        ProtocolError: it is not what ``pack_request`` and ``request_frames`` write.
    """
    push, pull, *layout = _fields(body, bool, bool, str, int, bool)
    if not (push or pull) or not frames:
        raise ProtocolError("a request must push or pull, and needs a frame of keys")
    keys = _array(frames[0], np.dtype("<u8"))
    if not push and len(frames) != 1:
        raise ProtocolError("a pull has one frame, the keys")
    fault = fault_in(keys)
    if fault is not None:
        raise ProtocolError(fault)
    if not push:
        return Asked(push, pull, KVPairs(keys, np.empty(0, np.float32)))
    values, lens = _unpack_values(layout, frames[1:], len(keys))
    return Asked(push, pull, KVPairs(keys, values, lens))


def pack_answer(values: Values, lens: Lens | None) -> tuple[bytes, list[memoryview]]:
    """Body and frames of the answer to a pull."""
    return pack_value(_layout(values, lens)), _value_frames(values, lens)


def unpack_answer(body: bytes, frames: Sequence[Any], keys: Keys) -> KVPairs:
    """The answer to a pull of ``keys``, checked; views of the frames.

    Raises:
        ProtocolError: it does not fit the keys, or is not what ``pack_answer`` writes.
    """
    values, lens = _unpack_values(_fields(body, str, int, bool), frames, len(keys))
    return KVPairs(keys, values, lens)


def _layout(values: Values, lens: Lens | None) -> list[Any]:
    columns = values.shape[1] if values.ndim == 2 else _FLAT
    return [values.dtype.str, columns, lens is not None]


def _value_frames(values: Values, lens: Lens | None) -> list[memoryview]:
    frames = [_bytes_of(values)]
    return frames if lens is None else [*frames, _bytes_of(lens.astype("<i8", copy=False))]


def _bytes_of(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _fields(body: bytes, *kinds: type) -> list[Any]:
    fields = unpack_value(body)
    if type(fields) is not list or [type(field) for field in fields] != list(kinds):
        raise ProtocolError("the body of a key-value message has wrong fields")
    return fields


def _unpack_values(
    layout: Sequence[Any], frames: Sequence[Any], num_keys: int
) -> tuple[Values, Lens | None]:
    text, columns, has_lens = layout
    if len(frames) != 1 + has_lens:
        raise ProtocolError(f"{len(frames)} frames of values and lens, not {1 + has_lens}")
    values = _array(frames[0], _dtype_of(text))
    lens = _array(frames[1], np.dtype("<i8")) if has_lens else None
    if columns != _FLAT:
        if columns < 0 or columns * num_keys != values.size:
            raise ProtocolError(f"{values.size} values are not {num_keys} rows of {columns}")
        values = values.reshape(num_keys, columns)
    fault = fault_in_values(num_keys, values, lens)
    if fault is not None:
        raise ProtocolError(fault)
    return values, lens


def _dtype_of(text: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(text if 3 <= len(text) <= 8 else "O")
    except (TypeError, ValueError):
        dtype = np.dtype(object)
    if dtype.kind not in VALUE_KINDS or dtype.str != text:
        raise ProtocolError(f"{text!r} is no dtype that values can have")
    return dtype


def _array(frame: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    if len(frame) % dtype.itemsize:
        raise ProtocolError(f"{len(frame)} bytes are no whole number of {dtype} elements")
    array = np.frombuffer(frame, dtype) if len(frame) else np.empty(0, dtype)
    array = array.astype(dtype.newbyteorder("="), copy=False)
    array.flags.writeable = False
    return array
