"""The types of the data plane: parts, effects, and the app's interface.

Pure. The contract as a whole stands in the package's docstring (``pslite/plane``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, repeat
from typing import Any, NamedTuple, Protocol

from pslite.errors import ProtocolError
from pslite.protocol.rounds import Batch
from pslite.wire.messages import Ints, Message

Buffer = Any
"""Anything with the buffer protocol, C-contiguous."""


class Piece(NamedTuple):
    """The bytes of one part: ``frame[start:stop]``.

    The frame of several parts may be a ``Row``.
    """

    frame: Buffer
    start: int
    stop: int


class Row:
    """Several consecutive frames as one, without a copy.

    Args:
        frames: buffers of single bytes.
    """

    __slots__ = ("_frames", "stops")

    def __init__(self, frames: Sequence[Buffer]) -> None:
        self._frames = frames
        self.stops = list(accumulate(map(len, frames)))
        """Where each frame ends."""

    def __len__(self) -> int:
        return self.stops[-1]

    def __bytes__(self) -> bytes:
        return b"".join(self._frames)

    def piece(self, start: int, stop: int) -> Piece:
        """Return the bytes [start, stop) of the one frame they lie in, or of this row."""
        index = min(bisect_right(self.stops, start), len(self.stops) - 1)
        if stop > self.stops[index]:
            return Piece(self, start, stop)
        frame = self._frames[index]
        skipped = self.stops[index] - len(frame)
        return Piece(frame, start - skipped, stop - skipped)


def piece_of(piece: Piece, start: int, stop: int) -> Piece:
    """Return the bytes [start, stop) of a piece."""
    start, stop = piece.start + start, piece.start + stop
    if type(piece.frame) is Row:
        return piece.frame.piece(start, stop)
    return Piece(piece.frame, start, stop)


def cuts_of(pieces: Sequence[Piece]) -> list[int]:
    """Return where frames end inside of these pieces of one size, from their begin."""
    cuts: set[int] = set()
    for frame, start, stop in pieces:
        if type(frame) is Row:
            cuts.update(end - start for end in frame.stops if start < end < stop)
    return sorted(cuts)


class Job(NamedTuple):
    """Parts and the contributions to apply to them, in rank order."""

    parts: Ints
    sizes: Ints
    """Bytes of each part's value."""
    push_sizes: Ints
    """Bytes of each part in a contribution."""
    batch: Batch
    """Its payloads are ``Piece`` values, which hold the parts' bytes one after the other:
    read-only, valid until the job is done."""
    wanted: bool = False
    """Whether a worker waits for the new values: ``read`` is called when all is well."""
    is_formed: bool = False
    """Whether some payloads are what ``ServerApp.take`` returned, not ``Piece`` values. Then it
    is a job of a single part."""


Outcome = Sequence[BaseException | None] | None
"""What became of a job: None when all is well, else an entry for each of its parts."""


class Formed(Protocol):
    """An app's own form of a payload, which the plane passes on unchanged."""

    @property
    def nbytes(self) -> int:
        """Return the size of a contribution, or of the answer to a pull if known."""


class ServerApp(Protocol):
    """The server's app. ``apply`` runs on pool threads, the rest on the I/O thread."""

    def apply(self, jobs: Sequence[Job]) -> Sequence[Outcome]:
        """Apply each job's contributions to its parts, in order; one outcome for each job.

        A part's jobs always come on the same pool thread and never overlap with ``read`` of
        that part, so a part needs no lock.
        """

    def read(self, parts: Sequence[int]) -> list[Buffer]:
        """Return frames that hold these parts' values in order, each frame whole parts.

        The plane sends them without a copy and may send them again until they are accepted.
        Where the rule for results does not keep a value in place meanwhile (asynchronous
        parts), this returns a copy.
        """

    def take(self, part: int, form: int, piece: Piece, *, is_push: bool) -> Formed:
        """Look at a payload in a form of the app's own; what it returns is a contribution.

        Or, for a pull, what ``answer`` gets. Raises for a payload that makes no sense: its sender
        gets that error; other workers do not notice. The piece is valid until the job is done.
        """

    def check(self, part: int, piece: Piece) -> None:
        """Look at a plain payload of a part that was opened as checked, before it counts.

        Raises as ``take`` does. Should be quick: it delays all that arrives.
        """

    def answer(self, part: int, wanted: Any) -> Buffer:
        """Return one frame with what a pull ``wanted`` of a part; it must not change."""


class Send(NamedTuple):
    """Effect: send a message to a peer (a worker's rank, or a server's node id)."""

    peer: int
    message: Message
    frames: Sequence[Buffer] = ()


class Run(NamedTuple):
    """Effect: have ``app.apply(jobs)`` run on the pool thread of ``lane``."""

    lane: int
    jobs: list[Job]


Effect = Send | Run


def cut(sizes: Sequence[int], frames: Sequence[Buffer]) -> list[Piece]:
    """Return the slice of each part in the payload.

    Raises:
        ProtocolError: the sizes do not add up to frames of whole parts.
    """
    frame: Buffer
    if len(frames) == 1:
        frame = _as_bytes(frames[0])
        stops = list(accumulate(sizes))
        if stops and stops[-1] == len(frame) and min(sizes) >= 0:
            return list(map(Piece, repeat(frame), [0, *stops[:-1]], stops))
    pieces = []
    rest = iter(frames)
    frame = b""
    start = length = 0
    for size in sizes:
        if start == length:
            frame = _as_bytes(next(rest, b""))
            start, length = 0, len(frame)
        if size < 0 or start + size > length:
            raise _misfit(sizes, frames)
        pieces.append(Piece(frame, start, start + size))
        start += size
    if start != length or next(rest, None) is not None:
        raise _misfit(sizes, frames)
    return pieces


def _misfit(sizes: Sequence[int], frames: Sequence[Buffer]) -> ProtocolError:
    found = [memoryview(frame).nbytes for frame in frames]
    return ProtocolError(
        f"expected frames of whole parts, {sum(sizes)} bytes in all, got frames of these bytes: "
        f"{found!s:.60}"
    )


def _as_bytes(frame: Buffer) -> Buffer:
    """Return the frame as a view of single bytes; received frames are that already."""
    if type(frame) is memoryview and frame.itemsize != 1:
        return frame.cast("B")
    return frame
