"""Encode and decode one part of a key with a chain of codecs, with checks.

A chain is a codec of numbers (``2bit``, ``1bit``, ``fp16``, ``bf16``, ``int8``), or ``topk`` or
``randomk``, or one of these two followed by one of the others: then only the numbers that were
picked are encoded further. An encoded part is a header of a few bytes (``header.py``) and one
payload, whose length depends on the part's size only.

The encoder keeps a residual for each part where the chain has error feedback
(``residuals.py``). The decoder has the same chain, by agreement, and refuses what another one
made. Pure; any thread may call, with different arrays. Read next: ``codec.py``.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays.cpu.sums import Flat, Workspace
from kvstore.arrays.cpu.threads import Cores, Task
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.compression.casts import Exact
from kvstore.compression.codec import Payload, ValueCodec, add_to, check_finite, run, spans, widened
from kvstore.compression.header import Header, dtype_code
from kvstore.compression.residuals import Statistics
from kvstore.compression.sparsify import Draw, Pick
from kvstore.errors import ArgumentValueError, ValueMismatchError
from pslite.errors import ProtocolError

_NO_DRAW = Draw()
_MOST_HEADERS = 1024

Readable = bytes | bytearray | memoryview | Payload


class Encoded(NamedTuple):
    """One part as it travels."""

    header: bytes
    payload: Payload


class Chain:
    """Codecs with their parameters. Immutable but for its statistics; any thread may use it."""

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
        """As in the parameter ``type``."""
        default = (pick or self.codec).has_feedback
        self.has_feedback = default if has_feedback is None else has_feedback
        """Whether who encodes keeps a residual."""
        self.statistics = statistics or Statistics()
        #: By the elements and the dtype of a part: its header, where nothing is drawn.
        self._headers: dict[tuple[int, np.dtype[Any]], bytes] = {}

    def payload_bytes(self, num_elements: int, dtype: np.dtype[Any]) -> int:
        """The length of every payload of a part of this many elements, of a key of this dtype."""
        ids, count = 0, num_elements
        if self.pick is not None:
            ids, count = self.pick.ids_bytes(num_elements), self.pick.count(num_elements)
        return ids + self.codec.payload_bytes(count, dtype)

    @cached_property
    def header_bytes(self) -> int:
        """The length of every header."""
        return len(self._header(np.dtype(np.float32), 0, _NO_DRAW).packed())

    def encoded_bytes(self, num_elements: int, dtype: np.dtype[Any]) -> int:
        """The length of every header with its payload behind it, of a part of this size."""
        return self.header_bytes + self.payload_bytes(num_elements, dtype)

    def check(self, array: np.ndarray[Any, Any], cores: Cores | None = None) -> None:
        """Raise what ``encode`` raises for these numbers: ``ArgumentValueError`` for NaN."""
        if not self.codec.carries_all:
            check_finite(_flat(array), self.name, cores)

    def encode_into(
        self,
        array: np.ndarray[Any, Any],
        out: Payload,
        *,
        residual: Flat | None = None,
        draw: Draw = _NO_DRAW,
        cores: Cores | None = None,
    ) -> None:
        """``encode`` for numbers that were checked; ``out`` gets the header, then the payload."""
        payload = out[self.header_bytes :]
        encoded = self._encode(array, payload, residual, draw, cores)
        out[: self.header_bytes] = np.frombuffer(encoded.header, np.uint8)

    def decode_from(
        self,
        data: Payload,
        out: np.ndarray[Any, Any],
        *,
        add: bool = False,
        cores: Cores | None = None,
    ) -> None:
        """``decode`` (with ``add``, ``decode_add``) of what ``encode_into`` wrote."""
        header = data[: self.header_bytes].tobytes()
        self._decode(header, data[self.header_bytes :], out, None, cores, add=add)

    def is_of_non_finite(self, data: Payload, num_elements: int, dtype: np.dtype[Any]) -> bool:
        """Whether ``encode_into`` was given NaN or infinity that this chain cannot carry.

        For chains without a pick. ``data`` is of ``encoded_bytes`` and otherwise unchecked.
        """
        payload = data[self.header_bytes :]
        return self.codec.is_of_non_finite(payload, num_elements, dtype)

    def check_encoded(self, data: Payload, num_elements: int, dtype: np.dtype[Any]) -> None:
        """Raise ``ProtocolError`` for what ``decode_from`` refuses; ``dtype`` is the key's.

        Costs a look at the header, at the scales of int8 and at the ids of topk.
        """
        header, payload = data[: self.header_bytes].tobytes(), data[self.header_bytes :]
        known = self._headers.get((num_elements, dtype))
        if known is None and not (self.pick is not None and self.pick.draws):
            if len(self._headers) >= _MOST_HEADERS:
                self._headers.clear()
            known = self._header(dtype, num_elements, _NO_DRAW).packed()
            self._headers[num_elements, dtype] = known
        if header != known:
            self._checked_header(header, num_elements, dtype, None)
        self._check_length(payload, num_elements, dtype)
        count = num_elements
        if self.pick is not None:
            self.pick.check_ids(payload, num_elements)
            payload = payload[self.pick.ids_bytes(num_elements) :]
            count = self.pick.count(num_elements)
        self.codec.check_payload(payload, count, dtype)

    def encode(
        self,
        array: np.ndarray[Any, Any],
        out: Payload | None = None,
        *,
        residual: Flat | None = None,
        draw: Draw = _NO_DRAW,
        cores: Cores | None = None,
    ) -> Encoded:
        """One part, encoded into ``out`` (new memory where there is none).

        ``array``: floats of any shape on the host, only read, before the call returns. ``out``:
        uint8, 1-D, of ``payload_bytes``, the caller's. ``residual``: 1-D, contiguous, of the dtype
        in which such values are added, exactly where the chain has feedback; changed in place
        to what this part lost. ``draw``: what ``randomk`` chooses by. ``cores``: whose threads
        share the work; None for the process's.

        Raises ``ArgumentTypeError`` for no floats, ``ArgumentValueError`` for NaN and infinity in
        what cannot carry them, and ``ValueMismatchError`` for arrays that do not fit; then neither
        ``out`` nor ``residual`` has changed.
        """
        self.check(array, cores)
        return self._encode(array, out, residual, draw, cores)

    def _encode(
        self,
        array: np.ndarray[Any, Any],
        out: Payload | None,
        residual: Flat | None,
        draw: Draw,
        cores: Cores | None,
    ) -> Encoded:
        source = _flat(array)
        header = self._header(source.dtype, len(source), draw).packed()
        payload = self._checked_out(out, self.payload_bytes(len(source), source.dtype))
        self._check_residual(residual, source)
        with np.errstate(all="ignore"):
            if self.pick is None:
                self.codec.encode(source.dtype, source, residual, payload, cores)
            else:
                self._encode_picked(self.pick, source, residual, payload, draw, cores)
        self.statistics.encoded(self.name, source.nbytes, len(header) + len(payload))
        return Encoded(header, payload)

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
            residual[ids] = numbers  # what was lost of them

    def decode(
        self,
        header: bytes,
        payload: Readable,
        out: np.ndarray[Any, Any],
        *,
        draw: Draw | None = None,
        cores: Cores | None = None,
    ) -> None:
        """Set ``out`` to the numbers of an encoded part; what was not sent is zero.

        ``payload``: anything with a buffer, at any address, only read. ``out``: C-contiguous, of
        any shape, of the key's dtype or the one in which such values are added; the caller's.
        ``draw``, where it is given, must be what was drawn by.

        Raises ``ProtocolError`` for what this chain did not write for an array of this size and
        dtype; then ``out`` has not changed.
        """
        self._decode(header, payload, out, draw, cores, add=False)

    def decode_add(
        self,
        header: bytes,
        payload: Readable,
        into: np.ndarray[Any, Any],
        *,
        draw: Draw | None = None,
        cores: Cores | None = None,
    ) -> None:
        """As ``decode``, but the numbers are added. What was not sent is not touched."""
        self._decode(header, payload, into, draw, cores, add=True)

    def _decode(
        self,
        header: bytes,
        payload: Readable,
        out: np.ndarray[Any, Any],
        draw: Draw | None,
        cores: Cores | None,
        *,
        add: bool,
    ) -> None:
        if not (out.flags.c_contiguous and out.flags.writeable):
            raise ArgumentValueError("a part must be decoded into a C-contiguous, writeable array")
        flat = out.reshape(-1)
        found = self._checked_header(header, len(flat), flat.dtype, draw, is_sum=True)
        dtype, memory = found.dtype, np.frombuffer(payload, np.uint8)
        self._check_length(memory, len(flat), dtype)
        with np.errstate(all="ignore"):
            if self.pick is None:
                self.codec.check_payload(memory, len(flat), dtype)
                self.codec.decode(memory, dtype, flat, cores, add=add)
            else:
                self._decode_picked(self.pick, found, memory, flat, cores, add)
        self.statistics.decoded(self.name, len(flat) * dtype.itemsize, len(header) + len(memory))

    def _decode_picked(
        self,
        pick: Pick,
        header: Header,
        payload: Payload,
        out: Flat,
        cores: Cores | None,
        add: bool,
    ) -> None:
        ids = pick.read_ids(payload, len(out), header.draw)
        rest = payload[pick.ids_bytes(len(out)) :]
        self.codec.check_payload(rest, len(ids), header.dtype)
        numbers = np.empty(len(ids), accumulation_dtype(header.dtype))
        self.codec.decode(rest, header.dtype, numbers, cores)
        if add:
            numbers += out[ids]
        else:
            out[:] = 0
        out[ids] = numbers

    # -- headers and checks ------------------------------------------------------------

    def _header(self, dtype: np.dtype[Any], num_elements: int, draw: Draw) -> Header:
        pick, codec, count = self.pick, self.codec, num_elements
        numbers = codec.numbers()
        if pick is not None:
            count = pick.count(num_elements)
            numbers = (*pick.numbers(), *numbers)
        code = 0 if pick is None else pick.code
        return Header(dtype, code, codec.code, num_elements, count, numbers, draw)

    def _checked_header(
        self,
        header: bytes,
        num_elements: int,
        dtype: np.dtype[Any],
        draw: Draw | None,
        *,
        is_sum: bool = False,
    ) -> Header:
        found = Header.unpacked(header)
        if found.num_elements != num_elements:
            raise ProtocolError(
                f"expected an encoded part of {num_elements} elements, got {found.num_elements}"
            )
        if dtype != found.dtype and not (is_sum and dtype == accumulation_dtype(found.dtype)):
            raise ProtocolError(f"expected an encoded part of {dtype}, got {found.dtype}")
        wanted = self._header(found.dtype, num_elements, found.draw if draw is None else draw)
        is_drawn = self.pick is not None and self.pick.draws
        if found._replace(draw=wanted.draw) != wanted:
            raise ProtocolError(
                f"an encoded part came from other codecs than {self.name} with {self.plain()}: the "
                "workers of a job must all set the same compression"
            )
        if is_drawn and found.draw != wanted.draw:
            raise ProtocolError(
                f"an encoded part was drawn for stream {found.draw.stream} and round "
                f"{found.draw.round}, not {wanted.draw.stream} and {wanted.draw.round}"
            )
        return found

    def _check_length(self, payload: Payload, num_elements: int, dtype: np.dtype[Any]) -> None:
        wanted = self.payload_bytes(num_elements, dtype)
        if len(payload) != wanted:
            raise ProtocolError(
                f"a {self.name} payload of {num_elements} elements has {len(payload)} bytes, not "
                f"{wanted}"
            )

    def _checked_out(self, out: Payload | None, length: int) -> Payload:
        if out is None:
            return np.empty(length, np.uint8)
        if out.dtype != np.uint8 or out.shape != (length,) or not out.flags.c_contiguous:
            raise ValueMismatchError(
                f"a {self.name} payload of this part goes into a uint8 array of {length} bytes, "
                f"got {out.dtype} of shape {out.shape}"
            )
        return out

    def _check_residual(self, residual: Flat | None, source: Flat) -> None:
        if not self.has_feedback:
            if residual is not None:
                raise ArgumentValueError(f"{self.name} without feedback takes no residual")
            return
        wanted = accumulation_dtype(source.dtype)
        if residual is None:
            raise ArgumentValueError(f"{self.name} with feedback needs the part's residual")
        is_fit = residual.dtype == wanted and residual.shape == source.shape
        if not (is_fit and residual.flags.c_contiguous and residual.flags.writeable):
            raise ValueMismatchError(
                f"the residual of {len(source)} elements of {source.dtype} has the dtype {wanted} "
                f"and the shape ({len(source)},), got {residual.dtype} and {residual.shape}"
            )

    # -- parameters --------------------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """Everything that decides what it writes and reads, as plain data."""
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
