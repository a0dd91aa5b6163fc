"""The types of the data plane: parts, effects, and the app's interface.

Pure. The docstring of the package (``pslite/plane``) states the whole contract.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise, repeat
from typing import Any, NamedTuple, Protocol

from pslite.errors import ProtocolError
from pslite.protocol.rounds import Batch
from pslite.wire.base import Ints, Message

Buffer = Any
"""Anything with the buffer protocol, C-contiguous."""


class Piece(NamedTuple):
    """The bytes of one part: ``frame[start:stop]``.

    If it holds the bytes of several parts, the frame may be a ``Row``.
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

    def frames(self, start: int, stop: int) -> list[Buffer]:
        """Return the bytes [start, stop) as views of the frames that hold them."""
        found, begin = [], 0
        for frame, end in zip(self._frames, self.stops, strict=True):
            if begin < stop and start < end:
                view = memoryview(frame)
                found.append(view[max(start - begin, 0) : min(stop, end) - begin])
            begin = end
        return found

    def piece(self, start: int, stop: int) -> Piece:
        """Return the bytes [start, stop) as a piece of one frame, or else of this row."""
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


def side_by_side(
    pieces: Sequence[Piece], start: int, stop: int
) -> list[tuple[int, int, list[Piece]]]:
    """Return the bytes [start, stop) of pieces, cut wherever a frame ends.

    The result has (start, stop, these bytes of each piece), in order. No result is of a ``Row``.
    """
    cuts = {start, stop}
    for frame, begin, _ in pieces:
        if type(frame) is Row:
            cuts.update(end - begin for end in frame.stops if start < end - begin < stop)
    bounds = sorted(cuts)
    return [
        (start, stop, [piece_of(piece, start, stop) for piece in pieces])
        for start, stop in pairwise(bounds)
    ]


def frames_of(piece: Piece) -> list[Buffer]:
    """Return the bytes of a piece as frames to send."""
    if type(piece.frame) is Row:
        return piece.frame.frames(piece.start, piece.stop)
    return [memoryview(piece.frame).cast("B")[piece.start : piece.stop]]


def piece_from(frames: Sequence[Buffer]) -> Piece:
    """Return received frames as one piece."""
    if len(frames) == 1:
        frame = memoryview(frames[0]).cast("B")
        return Piece(frame, 0, len(frame))
    if not frames:
        return Piece(b"", 0, 0)
    row = Row([memoryview(frame).cast("B") for frame in frames])
    return Piece(row, 0, len(row))


class Job(NamedTuple):
    """Parts and the contributions to apply to them, in rank order."""

    parts: Ints
    sizes: Ints
    """Bytes of each part's value."""
    push_sizes: Ints
    """Bytes of each part in a contribution."""
    batch: Batch
    """Its payloads are ``Piece`` values with the bytes of the parts in order. They are read-only
    and valid until the job is done."""
    wanted: bool = False
    """Whether a worker waits for the new values: ``read`` is called after success."""
    is_formed: bool = False
    """Whether some payloads are results of ``ServerApp.take`` instead of ``Piece`` values. Such a
    job has a single part."""


Outcome = Sequence[BaseException | None] | None
"""The outcome of a job: None for success, else an error or None for each of its parts."""


class Formed(Protocol):
    """An app's own form of a payload, which the plane passes on unchanged."""

    @property
    def nbytes(self) -> int:
        """The size of a contribution, or of the answer to a pull if known."""

    @property
    def source(self) -> tuple[int, Piece]:
        """The form and the bytes from which a contribution was made, for a standby."""


class StateRecord(NamedTuple):
    """A request that gives a new standby a piece of its server's state."""

    sender: int
    """The node id of the worker that seems to ask; 0 for none."""
    head: int
    body: bytes
    frames: Sequence[Buffer]


class ServerApp(Protocol):
    """The server's app. ``apply`` runs on pool threads, the rest on the I/O thread."""

    def apply(self, jobs: Sequence[Job]) -> Sequence[Outcome]:
        """Apply the contributions of each job, in order; return an outcome for each job.

        The jobs of a part always run on the same pool thread, and never at the same time as
        ``read`` of that part. So a part needs no lock. Never raises: that would end the node.
        """

    def summed(self, jobs: Sequence[Job]) -> list[Job]:
        """Return these jobs, with a sum in place of contributions where possible.

        To apply such a job gives the same bits. The sums are in memory that a standby can read,
        and stay unchanged. Runs before ``apply``, on the same thread; only called on a server with
        a standby.
        """

    def copy_state(self) -> list[StateRecord] | None:
        """Return the whole state as requests that a new standby carries out.

        The frames are copies. No round is applied meanwhile. None means that the state is
        incomplete at this moment, for example because a file is being loaded.
        """

    def read(self, parts: Sequence[int]) -> list[Buffer]:
        """Return frames with the values of these parts in order, each with whole parts.

        The plane sends them without a copy and may send them again until they are accepted.
        If a value may change in that time (asynchronous parts), this returns a copy.
        """

    def read_again(self, parts: Sequence[int], *, before_last: bool) -> list[Buffer]:
        """Return copies of these parts' values, for a process that repeats a step.

        It does so in place of a lost worker. With ``before_last``, the values are those before the
        last round. Only called for synchronous parts of a plane that ``keeps_previous``.
        """

    def take(self, part: int, form: int, piece: Piece, *, is_push: bool) -> Formed:
        """Check a payload in the app's own form; return a contribution or a pull.

        The result for a pull is passed to ``answer``. If the payload is invalid, this raises an
        error, which only the sender gets. The piece is valid until the job is done.
        """

    def check(self, part: int, piece: Piece) -> None:
        """Check a plain payload of a part that was opened with ``is_checked``.

        Raises as ``take`` does. It must be quick, because all later messages wait for it.
        """

    def answer(self, part: int, wanted: Any, *, before_last: bool) -> Buffer:
        """Return the answer to the pull ``wanted`` of a part; the frame must not change.

        With ``before_last``, it has the values before the last round, as in ``read_again``.
        """


class Send(NamedTuple):
    """Effect: send a message to a peer.

    It is a server's node id, or a contributor's number (``protocol/relays.py``).
    """

    peer: int
    message: Message
    frames: Sequence[Buffer] = ()
    priority: int = 0
    """If there are several to a peer, one with values of a higher priority goes first."""


class Run(NamedTuple):
    """Effect: call ``app.apply(jobs)`` on the pool thread of ``lane``."""

    lane: int
    jobs: list[Job]


Effect = Send | Run


def cut(sizes: Sequence[int], frames: Sequence[Buffer]) -> list[Piece]:
    """Return the bytes of each part in a payload.

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
    """Return the frame as single bytes; received frames already are."""
    if type(frame) is memoryview and frame.itemsize != 1:
        return frame.cast("B")
    return frame
