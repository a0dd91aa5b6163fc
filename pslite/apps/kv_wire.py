"""Encode and decode pushes and pulls as bodies and frames. Pure.

Section 14 of ``docs/wire.md`` describes the layout. A request's body is ``[push, pull, dtype,
columns, has lens, series, number]``. Its frames are the keys and, for a push, values and lens. The
keys may be left out if the server knows the list of that name (``kv_lists.py``). The answer to a
pull has the body ``[dtype, columns, has lens]`` and the frames values and lens. The answer to a
push is empty. If the server does not know the list, the answer is ``[number]``. All data is
checked before it is used. Read next: ``kv_app.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pslite.apps.kv_lists import NO_LIST, ListName
from pslite.apps.kv_pairs import VALUE_KINDS, Keys, KVPairs, Lens, Values, fault_in_values
from pslite.errors import ProtocolError
from pslite.wire.codec import pack_value, unpack_value

_FLAT = -1

Resolve = Callable[[ListName, "Keys | None"], "Keys | None"]
"""A function of a list's name and its keys, if sent. It returns checked keys, or None."""


class Asked(NamedTuple):
    """A decoded request."""

    push: bool
    pull: bool
    pairs: KVPairs
    """For a pull without a push: the keys, and values of shape (0,)."""


class Missing(NamedTuple):
    """A request whose key list is unknown, so it cannot be decoded."""

    number: int
    """The number of the unknown list."""


def pack_request(
    push: bool, pull: bool, values: Values | None, lens: Lens | None, name: ListName = NO_LIST
) -> bytes:
    """Return the body of one push or pull, which is the same for every server."""
    layout = ["", _FLAT, False] if values is None else _layout(values, lens)
    return pack_value([push, pull, *layout, *name])


def request_frames(pairs: KVPairs, push: bool) -> list[memoryview]:
    """Return the frames for one server: views of the arrays, keys first."""
    frames = [_bytes_of(pairs.keys.astype("<u8", copy=False))]
    return frames + _value_frames(pairs.values, pairs.lens) if push else frames


def unpack_request(body: bytes, frames: Sequence[Any], resolve: Resolve) -> Asked | Missing:
    """Check and return a request; its values and lens are read-only views.

    Raises:
        ProtocolError: the format is not that of ``pack_request`` and ``request_frames``.
    """
    push, pull, *layout, series, number = _fields(body, bool, bool, str, int, bool, int, int)
    if not (push or pull) or series < 0 or number < 0 or (number == 0 and series):
        raise ProtocolError(
            f"expected a push or pull and a valid key list, got push={push}, pull={pull}, "
            f"series {series}, list {number}"
        )
    has_keys = len(frames) - (1 + layout[-1] if push else 0)
    if has_keys not in (0, 1) or not (has_keys or number):
        raise ProtocolError(f"a request of {len(frames)} frames does not fit its body")
    sent = _array(frames[0], np.dtype("<u8")) if has_keys else None
    keys = resolve(ListName(series, number), sent)
    if keys is None:
        return Missing(number)
    if not push:
        return Asked(push, pull, KVPairs(keys, np.empty(0, np.float32)))
    values, lens = _unpack_values(layout, frames[has_keys:], len(keys))
    return Asked(push, pull, KVPairs(keys, values, lens))


def pack_answer(values: Values, lens: Lens | None) -> tuple[bytes, list[memoryview]]:
    """Return the body and the frames of the answer to a pull."""
    return pack_value(_layout(values, lens)), _value_frames(values, lens)


def unpack_answer(body: bytes, frames: Sequence[Any], keys: Keys) -> KVPairs:
    """Check and return the answer to a pull of ``keys``, as views of the frames.

    Raises:
        ProtocolError: it does not fit the keys, or its format is not that of ``pack_answer``.
    """
    values, lens = _unpack_values(_fields(body, str, int, bool), frames, len(keys))
    return KVPairs(keys, values, lens)


def pack_missing(missing: Missing) -> bytes:
    """Return the body of the answer to a request whose key list is unknown."""
    return pack_value([missing.number])


def says_missing(body: bytes, number: int) -> bool:
    """Return whether an answer says that the server does not know the list ``number``.

    Raises:
        ProtocolError: the answer names another list.
    """
    fields = unpack_value(body) if body else None
    if type(fields) is not list or len(fields) != 1:
        return False
    if fields != [number]:
        raise ProtocolError(f"expected an answer about key list {number}, got {fields[0]!r:.60}")
    return True


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
        wanted = ", ".join(kind.__name__ for kind in kinds)
        raise ProtocolError(f"expected a body of the fields {wanted}, got {fields!r:.60}")
    return fields


def _unpack_values(
    layout: Sequence[Any], frames: Sequence[Any], num_keys: int
) -> tuple[Values, Lens | None]:
    text, columns, has_lens = layout
    if len(frames) != 1 + has_lens:
        raise ProtocolError(f"expected {1 + has_lens} frames of values and lens, got {len(frames)}")
    values = _array(frames[0], _dtype_of(text))
    lens = _array(frames[1], np.dtype("<i8")) if has_lens else None
    if columns != _FLAT:
        if columns < 0 or columns * num_keys != values.size:
            raise ProtocolError(
                f"expected {num_keys} rows of {columns} values, got {values.size} values"
            )
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
        raise ProtocolError(f"values cannot have the dtype {text!r:.60}")
    return dtype


def _array(frame: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    if len(frame) % dtype.itemsize:
        raise ProtocolError(f"expected whole {dtype} elements, got {len(frame)} bytes")
    array = np.frombuffer(frame, dtype) if len(frame) else np.empty(0, dtype)
    array = array.astype(dtype.newbyteorder("="), copy=False)
    array.flags.writeable = False
    return array
