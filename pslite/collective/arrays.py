"""Arrays of collective calls: check them, and cut them into chunks.

Pure; runs on any thread. Read next: ``communicator.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pslite.collective.sums import BFLOAT16, DTYPES, check_op
from pslite.collective.wire import MAX_NAME, ArrayLayout
from pslite.errors import ProtocolError, UsageError, check_unicode
from pslite.node.customer import Reply
from pslite.protocol.collective import CollectiveCall

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

IN_PLACE_BYTES = 1 << 20
"""A server in a rank's process writes a result of at least this many bytes straight to the rank's
array, if the call puts it there. The rank's call is done once the others have accepted it."""


def checked_name(name: str) -> str:
    if not isinstance(name, str) or len(name) > MAX_NAME:
        raise UsageError(f"a name must be a text of at most {MAX_NAME} letters, got {name!r:.80}")
    return check_unicode("a name", name)


def checked(array: Array) -> Array:
    """Return ``array`` if it can be sent; else raise ``UsageError``."""
    if not isinstance(array, np.ndarray):
        raise UsageError(f"expected a NumPy array, got {type(array).__name__}; pass numpy.asarray")
    if not array.flags.c_contiguous:
        raise UsageError(
            f"expected a C-contiguous array, got one of shape {array.shape} with strides "
            f"{array.strides}; pass numpy.ascontiguousarray of it"
        )
    dtype_name(array)
    return array


def one_for_each(arrays: Sequence[Array], size: int) -> list[Array]:
    """Return a list with one array for each rank; check that they have one dtype."""
    found = [checked(array) for array in arrays]
    dtypes = sorted({str(array.dtype) for array in found})
    if len(found) != size or len(dtypes) > 1:
        raise UsageError(
            f"expected {size} arrays of one dtype, one for each rank, got {len(found)} of "
            f"{', '.join(dtypes) or 'none'}"
        )
    return found


def checked_out(out: Array, like: Array) -> Array:
    """Return ``out`` if a result with the shape and dtype of ``like`` can fill it."""
    checked(out)
    if out.shape != like.shape or out.dtype != like.dtype:
        raise UsageError(
            f"expected out of shape {like.shape} and dtype {like.dtype}, got {out.shape} and "
            f"{out.dtype}"
        )
    if not out.flags.writeable:
        raise UsageError("the array to fill is read-only; pass one that may be written")
    return out


def dtype_name(array: Array, dtype: str | None = None) -> str:
    """Return an array's dtype name in ``DTYPES``; ``dtype`` overrides it if allowed."""
    own = str(array.dtype.name)
    if own not in DTYPES or not array.dtype.isnative:
        raise UsageError(
            f"arrays of dtype {array.dtype} cannot be sent; use one of {', '.join(DTYPES)}, in "
            "native byte order"
        )
    if dtype is None or dtype == own:
        return own
    if dtype == BFLOAT16 and own == "uint16":
        return dtype
    raise UsageError(f"dtype must be that of the array, or bfloat16 of uint16; got {dtype!r}")


def with_op(call: CollectiveCall) -> CollectiveCall:
    if call.factor is not None:
        try:
            call = call._replace(factor=float(call.factor))
        except (TypeError, ValueError):
            raise UsageError(f"a factor must be a number, got {call.factor!r}") from None
        if not math.isfinite(call.factor or 0):
            raise UsageError(f"a factor must be finite, got {call.factor}")
    check_op(call.op, call.dtype, call.factor)
    return call


def flat(array: Array) -> Bytes:
    """Return the array's memory as bytes."""
    return array.reshape(-1).view(np.uint8)


def chunks(nbytes: int, step: int) -> list[slice]:
    """Cut ``nbytes`` into chunks of ``step``; there is at least one."""
    return [slice(at, at + step) for at in range(0, max(nbytes, 1), step)]


def spans(lengths: Sequence[int], chunk: slice) -> list[slice]:
    """Return the bytes of each array in a chunk of all arrays laid end to end."""
    found, begin = [], 0
    for length in lengths:
        start, stop = (min(max(at - begin, 0), length) for at in (chunk.start, chunk.stop))
        found.append(slice(start, stop))
        begin += length
    return found


def filling(places: Sequence[Bytes]) -> Callable[[Reply], None]:
    """Return a function that copies the frames of an answer into ``places``."""

    def fill(reply: Reply) -> None:
        expected = [len(place) for place in places]
        if [len(frame) for frame in reply.frames] != expected:
            got = [len(frame) for frame in reply.frames]
            raise ProtocolError(f"expected an answer with frames of {expected} bytes, got {got}")
        for place, frame in zip(places, reply.frames, strict=True):
            values = np.frombuffer(frame, np.uint8)
            if not is_same(place, values):
                place[:] = values

    return fill


def is_same(one: Bytes, other: Bytes) -> bool:
    """Return whether two flat arrays are the same memory."""
    begins = [array.__array_interface__["data"][0] for array in (one, other)]
    return begins[0] == begins[1] and len(one) == len(other)


def layout_of(arrays: Sequence[Array]) -> ArrayLayout:
    """Return the dtype and shapes of the arrays that this rank sends."""
    dtype = dtype_name(arrays[0]) if arrays else ""
    return ArrayLayout(dtype, tuple(array.shape for array in arrays))


def piece_for(call: CollectiveCall, rank: int) -> int:
    """Return the index of the array that each rank sends to ``rank``."""
    return 0 if call.kind in ("all_gather", "gather") else rank


def receivers(
    layouts: Sequence[ArrayLayout],
    sources: Sequence[int],
    index: int,
    like: Sequence[Array],
    outs: Sequence[Array] | None,
) -> list[Array]:
    """Return the arrays to fill with the ``index``-th array of each of ``sources``.

    New arrays have the dtype of ``like``, the caller's own arrays, if there are any.

    Raises:
        UsageError: one of ``outs`` does not fit.
    """
    dtype = like[0].dtype if like else None
    found = list(outs or [layouts[source].empty(index, dtype) for source in sources])
    for source, array in zip(sources, found, strict=True):
        layouts[source].check(index, array)
    return found
