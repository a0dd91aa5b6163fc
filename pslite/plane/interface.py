"""What the two halves of the data plane and their callers share: parts, effects, the app.

Pure. The contract as a whole stands in the package's docstring (``pslite/plane``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from typing import Any, NamedTuple, Protocol

from pslite.errors import ProtocolError
from pslite.protocol.rounds import Batch
from pslite.wire.messages import Ints, Message

Buffer = Any
"""Anything with the buffer protocol, C-contiguous."""


class Piece(NamedTuple):
    """The bytes of one part: ``frame[start:stop]``."""

    frame: Buffer
    start: int
    stop: int


class Job(NamedTuple):
    """Parts and the contributions to apply to them, in rank order."""

    parts: Ints
    sizes: Ints
    """Bytes of each part."""
    batch: Batch
    """Its payloads are ``Piece`` values, which hold the parts' bytes one after the other:
    read-only, valid until the job is done."""


Outcome = Sequence[BaseException | None] | None
"""What became of a job: None when all is well, else an entry for each of its parts."""


class ServerApp(Protocol):
    """What a server does with rounds. ``apply`` runs on pool threads, the rest on I/O's."""

    def apply(self, jobs: Sequence[Job]) -> Sequence[Outcome]:
        """Apply each job's contributions to its parts, in order; one outcome for each job.

        A part's jobs always come on the same pool thread and never overlap with ``read`` of
        that part, so a part needs no lock.
        """

    def read(self, parts: Sequence[int]) -> list[Buffer]:
        """Frames that together hold these parts' values in order, each frame whole parts.

        The plane sends them without a copy and may send them again until they are accepted.
        Where the rule for results does not keep a value in place meanwhile (asynchronous
        parts), this returns a copy.
        """


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
    """Where each part lies in the payload.

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
            raise ProtocolError("the payload is shorter than its sizes say")
        pieces.append(Piece(frame, start, start + size))
        start += size
    if start != length or next(rest, None) is not None:
        raise ProtocolError("the payload is longer than its sizes say")
    return pieces


def _as_bytes(frame: Buffer) -> Buffer:
    """The frame as a view of single bytes; received frames are that already."""
    if type(frame) is memoryview and frame.itemsize != 1:
        return frame.cast("B")
    return frame
