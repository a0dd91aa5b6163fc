"""Define the base class of codecs, and check their parameters.

A ``CodecParameter`` checks one value and returns its plain form (bool, int, float). Workers and
servers send and compare the plain form. Numbers may be given as text, as in MXNet ("0.5").

A codec turns numbers into fewer bytes and back. The encoding of n numbers always has the same
length (``payload_bytes``), so stores can plan messages before there is anything to send. A subclass
packs and unpacks one span (``value_codecs.py``). This file does the rest: it cuts an array into
spans that stay in the cache, adds and updates the residual, and handles threads and dtypes.

**Error feedback.** With gradient g and residual e, the codec packs p = g + e, and e becomes
p - decoded(p). So the next gradient includes what was lost (Seide et al., Interspeech 2014;
Karimireddy et al., ICML 2019, algorithm 2 with the learning rate left to the optimizer). The
residual is updated in place, without other memory.

**Dtypes.** Codecs compute in the accumulation dtype (``accumulation_dtype``), in which stores add:
float64 for float64, else float32. A residual has that dtype.

**Bits.** Spans begin at multiples of a codec's unit, and every operation stays within one unit. So
neither threads nor the size of spans can change a bit. Any threads may call at once, each with its
own arrays. Read next: ``value_codecs.py``, the codecs themselves; then ``chain.py``, the caller.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, SupportsIndex

import numpy as np

from kvstore.arrays.cpu import kernels
from kvstore.arrays.cpu.sums import Flat, Workspace, Workspaces
from kvstore.arrays.cpu.threads import Cores, Task, shared
from kvstore.arrays.dtypes import accumulation_dtype, is_bfloat16
from kvstore.errors import ArgumentTypeError, ArgumentValueError

_MOST = (1 << 63) - 1
_LEAST_FLOAT32 = 1.401298464324817e-45
_MOST_FLOAT32 = 3.4028234663852886e38


class CodecParameter(NamedTuple):
    """One parameter of a codec."""

    check: Callable[[str, Any], Any]
    """Takes the parameter's name (for errors) and the value, and returns the plain form."""
    default: Any
    """The value if the user gives none. None means unset: another parameter applies."""


def flag(name: str, value: Any) -> bool:
    """Check a flag: True, False, 1 or 0."""
    if type(value) is bool or (type(value) is int and value in (0, 1)):
        return bool(value)
    raise ArgumentTypeError(
        f"the compression parameter {name!r} must be True or False, got {value!r}"
    )


def finite(name: str, value: Any) -> float:
    """Check a number: any that a float32 can hold."""
    number = _number(name, value)
    if not abs(number) <= _MOST_FLOAT32:
        raise ArgumentValueError(
            f"the compression parameter {name!r} must be a number from -3.4e38 to 3.4e38 "
            f"(float32), got {value!r}"
        )
    return number


def positive(name: str, value: Any) -> float:
    """Check a number: above 0, even after rounding to float32."""
    number = finite(name, value)
    if number < _LEAST_FLOAT32:
        raise ArgumentValueError(
            f"the compression parameter {name!r} must be greater than 0, got {value!r}; it is "
            "the step size of the encoded gradients"
        )
    return number


def ratio(name: str, value: Any) -> float:
    """Check a fraction: above 0 and at most 1."""
    number = _number(name, value)
    if not 0.0 < number <= 1.0:
        raise ArgumentValueError(
            f"the compression parameter {name!r} must be greater than 0 and at most 1, got "
            f"{value!r}; use 'k' to give a count instead of a fraction"
        )
    return number


def count(name: str, value: Any) -> int | None:
    """Check a count: an integer of at least 1, or None."""
    if value is None:
        return None
    return _whole(name, value, 1, _MOST)


def size(name: str, value: Any) -> int:
    """Check an integer: at least 0."""
    return _whole(name, value, 0, _MOST)


def block(name: str, value: Any) -> int:
    """Check a block size (how many numbers share a scale): 8 to 65536."""
    return _whole(name, value, 8, 65536)


def _whole(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            pass
    # NumPy's integers are accepted too, but not floats.
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ArgumentTypeError(
            f"the compression parameter {name!r} must be an integer, got {value!r}"
        )
    number = operator.index(value)
    if not least <= number <= most:
        raise ArgumentValueError(
            f"the compression parameter {name!r} must be from {least} to {most}, got {number}"
        )
    return number


def _number(name: str, value: Any) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentTypeError(
            f"the compression parameter {name!r} must be a number, got {value!r}"
        ) from None
    return number


Payload = np.ndarray[Any, np.dtype[np.uint8]]
"""Encoded bytes, 1-D, at any address."""

SPAN_ELEMENTS = 65536
"""How many numbers are encoded at a time. With residual and scratch memory that is 1 MiB of
float32, which fits a core's second-level cache. With smaller spans, threads wait for each other."""

SHARED_BYTES = 1 << 20
"""Work on fewer bytes uses one thread: it ends before another thread would wake up."""

_ALONE = Cores(1)


class Span(NamedTuple):
    """The elements ``start`` to ``stop`` of an array of ``total`` elements."""

    start: int
    stop: int
    total: int
    dtype: np.dtype[Any]


class Coder(ABC):
    """The base class of codecs of numbers and of ``Pick`` codecs."""

    name: ClassVar[str]
    """The codec's name in parameters and statistics."""
    code: ClassVar[int]
    """The codec's number in headers (``header.py``); never reuse it for another codec."""
    parameters: ClassVar[Mapping[str, CodecParameter]] = {}
    """The checks and defaults of the codec's parameters."""
    in_header: ClassVar[tuple[str, ...]] = ()
    """The parameters on which decoding depends."""
    format: ClassVar[str] = ""
    """The ``struct`` format of these parameters in a header."""
    has_feedback: ClassVar[bool]
    """The default of the parameter ``feedback``: whether the encoder keeps a residual."""

    def numbers(self) -> tuple[float, ...]:
        """Return the values of ``in_header``."""
        return tuple(getattr(self, name) for name in self.in_header)

    def plain(self) -> dict[str, Any]:
        """Return the codec's parameters with their values, as plain data."""
        return {name: getattr(self, name) for name in self.parameters}


class ValueCodec(Coder):
    """A codec of an array of floats. Immutable; any thread may use it."""

    carries_all: ClassVar[bool]
    """Whether it can encode NaN and infinity. If not, arrays with them raise an error."""

    def __init__(self) -> None:
        self._workspaces = Workspaces()

    @property
    def unit(self) -> int:
        """How many elements form a unit; spans begin at multiples of this number."""
        return 1

    @abstractmethod
    def payload_bytes(self, num_elements: int, dtype: np.dtype[Any]) -> int:
        """Return the payload length in bytes for this many elements and the key's dtype."""

    @abstractmethod
    def pack(
        self, wide: Flat, span: Span, payload: Payload, workspace: Workspace, *, rest: bool
    ) -> None:
        """Write the encoding of a span into its slice of the whole payload.

        ``wide`` has the span's numbers in float32 or float64. With ``rest``, each number is
        replaced by number - decoded number; otherwise ``wide`` is only read. The slots of
        ``workspace`` above 0 are free.
        """

    @abstractmethod
    def unpack(self, payload: Payload, span: Span, wide: Flat, workspace: Workspace) -> None:
        """Decode the numbers of a span from the whole payload into ``wide``.

        ``wide`` is float32 or float64, aligned and contiguous. Nothing is checked.
        """

    def check_payload(self, payload: Payload, num_elements: int, dtype: np.dtype[Any]) -> None:
        """Check that this codec can have written the payload.

        The payload has the right length. Raises ``ProtocolError``.
        """

    def is_of_non_finite(self, payload: Payload, num_elements: int, dtype: np.dtype[Any]) -> bool:
        """Return whether a payload was made from NaN or infinity.

        The payload must have the right length. The result is always False if ``carries_all``.
        """
        return False

    # -- whole arrays ------------------------------------------------------------------

    def encode(
        self,
        dtype: np.dtype[Any],
        source: Flat | None,
        residual: Flat | None,
        payload: Payload,
        cores: Cores | None,
    ) -> None:
        """Encode ``source`` + ``residual`` into ``payload``.

        One of the two may be None, which means zeros. ``residual`` is set to what was lost. Both
        are 1-D and have the same length; nothing is checked. ``dtype`` is the dtype of the key and
        of ``source``, which is only read.
        """
        given = source if residual is None else residual
        assert given is not None
        tasks: list[Task] = [
            partial(self._encode_span, span, source, residual, payload)
            for span in spans(len(given), self.unit, dtype)
        ]
        run(tasks, given.nbytes, cores)

    def _encode_span(
        self, span: Span, source: Flat | None, residual: Flat | None, payload: Payload
    ) -> None:
        start, stop = span.start, span.stop
        if self.code in kernels.CODED and kernels.encode(
            self.code, self.numbers()[0], span.dtype, source, residual, payload, start, stop
        ):
            return
        workspace = self._workspaces.take()
        if residual is not None:
            wide = residual[start:stop]
            if source is not None:
                add_to(wide, source[start:stop], workspace)
        else:
            assert source is not None
            wide = widened(source[start:stop], workspace)
        self.pack(wide, span, payload, workspace, rest=residual is not None)
        if residual is not None and self.carries_all:
            drop_non_finite(wide, workspace)
        self._workspaces.give(workspace)

    def decode(
        self,
        payload: Payload,
        dtype: np.dtype[Any],
        out: Flat,
        cores: Cores | None,
        *,
        add: bool = False,
    ) -> None:
        """Set ``out`` to the numbers of a payload, or add them to it.

        ``dtype`` is the key's. ``out`` is 1-D and has this dtype or its accumulation dtype;
        results are rounded once. The payload must have been checked.
        """
        tasks: list[Task] = [
            partial(self._decode_span, span, payload, out, add)
            for span in spans(len(out), self.unit, dtype)
        ]
        run(tasks, out.nbytes, cores)

    def _decode_span(self, span: Span, payload: Payload, out: Flat, add: bool) -> None:
        start, stop = span.start, span.stop
        target, working = out[start:stop], accumulation_dtype(span.dtype)
        is_wide = out.dtype == working
        if (is_wide and self.code in kernels.CODED) and kernels.decode(
            self.code, self.numbers()[0], payload, out, start, stop, add=add
        ):
            return
        workspace = self._workspaces.take()
        if is_wide and not add and target.flags.aligned:
            self.unpack(payload, span, target, workspace)
        else:
            wide = workspace.block(0, working, len(target))
            self.unpack(payload, span, wide, workspace)
            if add:
                np.add(target, wide, out=target, dtype=working, casting="unsafe")
            else:
                np.copyto(target, wide, casting="unsafe")
        self._workspaces.give(workspace)


def spans(num_elements: int, unit: int, dtype: np.dtype[Any]) -> Iterator[Span]:
    """Yield spans of this many elements, cut at multiples of ``unit``."""
    step = max(SPAN_ELEMENTS // unit, 1) * unit
    for start in range(0, num_elements, step):
        yield Span(start, min(start + step, num_elements), num_elements, dtype)


def run(tasks: Sequence[Task], nbytes: int, cores: Cores | None) -> None:
    """Run all tasks, on all ``cores`` (None: the process's) if there are many bytes."""
    chosen = _ALONE if nbytes < SHARED_BYTES else shared() if cores is None else cores
    failure = chosen.run(tasks)
    if failure is not None:
        raise failure.error


def add_to(wide: Flat, values: Flat, workspace: Workspace) -> None:
    """Compute ``wide += values``; ``values`` may have a narrower dtype."""
    np.add(wide, widened(values, workspace), out=wide)


def widened(values: Flat, workspace: Workspace) -> Flat:
    """Return the values in the working dtype, copied to slot 0 if necessary."""
    working = accumulation_dtype(values.dtype)
    if values.dtype == working and values.flags.aligned:
        return values
    wide = workspace.block(0, working, len(values))
    convert(values, wide)
    return wide


def convert(values: Flat, target: Flat) -> None:
    """Set ``target[...] = values``, rounded; compiled kernels speed up float16."""
    if not kernels.apply(target, ((values,),), None, (), 0):
        np.copyto(target, values, casting="unsafe")


def drop_non_finite(rest: Flat, workspace: Workspace) -> None:
    """Set NaN and infinity in a residual to 0, so that they are not sent again."""
    fine = np.isfinite(rest, out=workspace.block(9, np.dtype(bool), len(rest)))
    if not fine.all():
        rest[~fine] = 0


#: The bits of the exponent; only NaN and infinity have all of them set.
_FLOAT16_EXPONENT = 0x7C00
_BFLOAT16_EXPONENT = 0x7F80


def check_finite(source: Flat, name: str, cores: Cores | None) -> None:
    """Raise ``ArgumentValueError`` unless all numbers are finite.

    ``name`` is the chain's name, for the message.
    """
    check: Callable[[Flat], None] = partial(_check_span, name)
    tasks: list[Task] = [
        partial(check, source[span.start : span.stop])
        for span in spans(len(source), 1, source.dtype)
    ]
    run(tasks, source.nbytes, cores)


def _check_span(name: str, values: Flat) -> None:
    if values.dtype.itemsize > 2:
        # With NaN, max and min are NaN. These two passes are faster than one with a mask.
        is_fine = bool(np.isfinite(values.max()) and np.isfinite(values.min()))
    else:
        exponent = _BFLOAT16_EXPONENT if is_bfloat16(values.dtype) else _FLOAT16_EXPONENT
        magnitudes = values.view(np.uint16) & np.uint16(0x7FFF)
        is_fine = bool(magnitudes.max(initial=0) < exponent)
    if not is_fine:
        raise ArgumentValueError(
            f"the gradient has NaN or infinity, which {name} cannot encode, so it was not sent; "
            "skip the step, or compress with fp16, bf16, topk or randomk"
        )
