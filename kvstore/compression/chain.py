"""Encode and decode one part of a key with a chain of codecs, with checks.

A chain is a codec of numbers (``2bit``, ``1bit``, ``fp16``, ``bf16``, ``int8``), or a pick
(``topk`` or ``randomk``), or a pick followed by a codec of numbers, which then encodes only the
picked numbers. An encoded part is a header of a few bytes (``header.py``) and one payload; the
payload's length depends only on the part's size and dtype.

If the chain has error feedback, the encoder keeps a residual for each part (``residuals.py``). The
decoder must have the same chain; it refuses parts that another chain encoded. Pure; any threads may
call at once, each with its own arrays. Read next: ``codec.py``.
"""

from __future__ import annotations

from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from kvstore.arrays.cpu.sums import Flat, Workspace
from kvstore.arrays.cpu.threads import Cores, Task
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.compression.codec import Payload, ValueCodec, add_to, check_finite, run, spans, widened
from kvstore.compression.header import draw_in, dtype_code, header
from kvstore.compression.residuals import Statistics
from kvstore.compression.sparsify import Draw, Pick
from kvstore.compression.value_codecs import Exact
from pslite.errors import ProtocolError

_NO_DRAW = Draw()
_MOST_HEADERS = 1024


class Chain:
    """Codecs with their parameters. Immutable except for its statistics.

    Any thread may use it.
    """

    def __init__(
        self,
        pick: Pick | None,
        codec: ValueCodec | None,
        *,
        has_feedback: bool | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        self.pick = pick
        self.codec = codec or Exact()
        self.name = "+".join(each.name for each in (pick, codec) if each is not None)
        """The name, as the parameter ``type`` takes it."""
        default = (pick or self.codec).has_feedback
        self.has_feedback = default if has_feedback is None else has_feedback
        """Whether the encoder keeps a residual."""
        self.statistics = statistics or Statistics()
        # The parts of a store are the same in each round, and so are their headers.
        self._header = lru_cache(_MOST_HEADERS)(partial(header, pick, self.codec))

    def payload_bytes(self, num_elements: int, dtype: np.dtype[Any]) -> int:
        """Return the payload length of a part of this many elements and dtype."""
        ids, count = 0, num_elements
        if self.pick is not None:
            ids, count = self.pick.ids_bytes(num_elements), self.pick.count(num_elements)
        return ids + self.codec.payload_bytes(count, dtype)

    @cached_property
    def header_bytes(self) -> int:
        """The length of every header."""
        return len(self._header(0, np.dtype(np.float32), _NO_DRAW))

    def encoded_bytes(self, num_elements: int, dtype: np.dtype[Any]) -> int:
        """Return the length of the header and payload of a part of this size."""
        return self.header_bytes + self.payload_bytes(num_elements, dtype)

    def check(self, array: np.ndarray[Any, Any], cores: Cores | None = None) -> None:
        """Raise ``ArgumentValueError`` for NaN or infinity that the chain cannot encode.

        Chains whose codec can encode both accept any array.
        """
        if not self.codec.carries_all:
            check_finite(_flat(array), self.name, cores)

    def encode(
        self,
        array: np.ndarray[Any, Any],
        out: Payload | None = None,
        *,
        residual: Flat | None = None,
        draw: Draw = _NO_DRAW,
        cores: Cores | None = None,
    ) -> Payload:
        """Encode one part into ``out`` or new memory: header, then payload.

        ``array`` has floats of any shape on the host, which ``check`` has accepted; only this call
        reads it. ``out`` is the caller's: uint8, 1-D, of length ``encoded_bytes``. Pass
        ``residual`` if and only if the chain has feedback: 1-D, contiguous, in the accumulation
        dtype; it is updated in place. ``draw`` determines ``randomk``'s choice. ``cores`` are the
        threads that share the work; None for those of the process.
        """
        source = _flat(array)
        if out is None:
            out = np.empty(self.encoded_bytes(len(source), source.dtype), np.uint8)
        made = self._header(len(source), source.dtype, draw)
        out[: len(made)] = np.frombuffer(made, np.uint8)
        payload = out[len(made) :]
        with np.errstate(all="ignore"):
            if self.pick is None:
                self.codec.encode(source.dtype, source, residual, payload, cores)
            else:
                self._encode_picked(self.pick, source, residual, payload, draw, cores)
        self.statistics.encoded(self.name, source.nbytes, len(out))
        return out

    def _encode_picked(
        self,
        pick: Pick,
        source: Flat,
        residual: Flat | None,
        payload: Payload,
        draw: Draw,
        cores: Cores | None,
    ) -> None:
        if residual is None:
            wide = widened(source, Workspace())
        else:
            wide = residual
            tasks: list[Task] = [
                partial(_add_span, residual[span.start : span.stop], source[span.start : span.stop])
                for span in spans(len(source), 1, source.dtype)
            ]
            run(tasks, source.nbytes, cores)
        ids = pick.choose(wide, draw)
        ids_bytes = pick.ids_bytes(len(source))
        if ids_bytes:
            payload[:ids_bytes] = ids.view(np.uint8)
        numbers = wide[ids]
        if residual is None:
            weights = pick.weights(ids, len(source))
            if weights is not None:
                np.multiply(numbers, weights, out=numbers, casting="unsafe")
        self.codec.encode(source.dtype, None, numbers, payload[ids_bytes:], cores)
        if residual is not None:
            residual[ids] = numbers  # encode() replaced each number by what was lost

    def decode(
        self,
        data: Payload,
        out: np.ndarray[Any, Any],
        *,
        dtype: np.dtype[Any] | None = None,
        add: bool = False,
        cores: Cores | None = None,
    ) -> None:
        """Set ``out`` to the numbers of an encoded part, or add them to it.

        Numbers that were not sent count as zero.

        ``data`` may be at any address and is only read. ``out`` is C-contiguous and has any shape.
        It has the key's dtype. If you pass the key's dtype as ``dtype``, ``out`` may also have its
        accumulation dtype.

        Raises the errors of ``check_encoded``, and then leaves ``out`` unchanged.
        """
        flat = out.reshape(-1)
        dtype = flat.dtype if dtype is None else dtype
        self.check_encoded(data, len(flat), dtype)
        made, payload = data[: self.header_bytes], data[self.header_bytes :]
        with np.errstate(all="ignore"):
            if self.pick is None:
                self.codec.decode(payload, dtype, flat, cores, add=add)
            else:
                draw = draw_in(made.tobytes()) if self.pick.draws else _NO_DRAW
                self._decode_picked(self.pick, draw, dtype, payload, flat, cores, add)
        self.statistics.decoded(self.name, len(flat) * dtype.itemsize, len(data))

    def _decode_picked(
        self,
        pick: Pick,
        draw: Draw,
        dtype: np.dtype[Any],
        payload: Payload,
        out: Flat,
        cores: Cores | None,
        add: bool,
    ) -> None:
        ids = pick.read_ids(payload, len(out), draw)
        numbers = np.empty(len(ids), accumulation_dtype(dtype))
        self.codec.decode(payload[pick.ids_bytes(len(out)) :], dtype, numbers, cores)
        if add:
            numbers += out[ids]
        else:
            out[:] = 0
        out[ids] = numbers

    def check_encoded(self, data: Payload, num_elements: int, dtype: np.dtype[Any]) -> None:
        """Check that ``data`` can be this chain's encoding of such a part.

        ``dtype`` is the key's. The check reads only the header, the scales of int8 and the ids of
        topk. Raises ``ProtocolError``.
        """
        found = data[: self.header_bytes].tobytes()
        draw = _NO_DRAW
        if self.pick is not None and self.pick.draws and len(found) == self.header_bytes:
            draw = draw_in(found)
        wanted = self._header(num_elements, dtype, draw)
        if found != wanted:
            raise ProtocolError(
                f"an encoded part has header {found.hex()}, expected {wanted.hex()} for "
                f"{num_elements} elements of {dtype} by {self.name} with {self.plain()}; set the "
                "same compression on all workers"
            )
        if len(data) != self.encoded_bytes(num_elements, dtype):
            raise ProtocolError(
                f"an encoded part of {num_elements} elements by {self.name} has {len(data)} bytes, "
                f"expected {self.encoded_bytes(num_elements, dtype)}"
            )
        payload, count = data[self.header_bytes :], num_elements
        if self.pick is not None:
            self.pick.check_ids(payload, num_elements)
            payload = payload[self.pick.ids_bytes(num_elements) :]
            count = self.pick.count(num_elements)
        self.codec.check_payload(payload, count, dtype)

    def is_of_non_finite(self, data: Payload, num_elements: int, dtype: np.dtype[Any]) -> bool:
        """Return whether ``encode`` got NaN or infinity that this chain cannot encode.

        Only for chains without a pick. ``data`` has length ``encoded_bytes`` and may be unchecked.
        """
        payload = data[self.header_bytes :]
        return self.codec.is_of_non_finite(payload, num_elements, dtype)

    def plain(self) -> dict[str, Any]:
        """Return all parameters that determine the encoding, as plain data."""
        parameters: dict[str, Any] = {"type": self.name, "feedback": self.has_feedback}
        for each in (self.pick, self.codec):
            if each is not None:
                parameters.update(each.plain())
        return parameters


def _flat(array: np.ndarray[Any, Any]) -> Flat:
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    dtype_code(native.dtype)
    return np.ascontiguousarray(native).reshape(-1)


def _add_span(wide: Flat, values: Flat) -> None:
    add_to(wide, values, Workspace())
