"""Split large frames into pieces, and reassemble them. Pure.

No connection carries a frame of more than ``PIECE_BYTES``. So a stranger who has not yet proved
that it knows the key cannot make a node allocate more than that, heartbeats get through between
two pieces, and a large value is copied to its place while the rest of it is still in flight.
A message with a larger frame is sent as several messages. Each has a head that begins with
``MARK``, which no other message begins with, and then one piece. The first head has the sizes of
all frames. All pieces of a message take the same connection, in order; ``docs/wire.md``, section 3,
is the specification. Runs on the owner's thread. Read next: ``van/zmq/sockets.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np

from pslite.errors import ProtocolError
from pslite.van.base import MAX_FRAMES, size_of

PIECE_BYTES = 4 << 20
"""No message of a collective call is larger than this, so it is received without a copy."""
MARK = b"\xc1"
"""MessagePack never uses this byte, and nodes' messages begin with a MessagePack array."""
_MARK_BYTE = MARK[0]


def cut(frames: list[bytes | memoryview]) -> Iterator[list[bytes | memoryview]]:
    """Return the messages that carry these frames: one, unless a frame is large.

    This copies nothing; pieces are views of the frames.
    """
    if all(size_of(frame) <= PIECE_BYTES for frame in frames):
        yield frames
        return
    head = MARK + struct.pack(f"<{len(frames)}q", *map(size_of, frames))
    for frame in frames:
        view = memoryview(frame).cast("B")
        for start in range(0, view.nbytes, PIECE_BYTES):
            yield [head, view[start : start + PIECE_BYTES]]
            head = MARK


def is_piece(frames: Sequence[bytes | memoryview]) -> bool:
    """Return whether a message is a piece of a larger one."""
    return len(frames) == 2 and len(frames[0]) > 0 and frames[0][0] == _MARK_BYTE


class Reassembly:
    """Reassembles the messages of one connection from pieces.

    Args:
        max_frame_bytes: the most bytes of a frame.
        max_total_bytes: the most bytes of all frames of a message together.
    """

    __slots__ = ("_filled", "_frames", "_max_frame_bytes", "_max_total_bytes", "_sizes", "_target")

    def __init__(self, max_frame_bytes: int, max_total_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._max_total_bytes = max_total_bytes
        #: The sizes of the frames that are not complete, the next one last.
        self._sizes: list[int] = []
        self._frames: list[bytes | memoryview] = []
        #: The memory of the current frame, and how much of it has arrived.
        self._target: memoryview | None = None
        self._filled = 0

    def take(self, message: Sequence[bytes | memoryview]) -> list[bytes | memoryview] | None:
        """Add a piece; if it was the last, return all frames of its message.

        A frame that arrived in one piece is returned without a copy; others are copied.

        Raises:
            ProtocolError: the piece does not fit those before it, or the message is too large.
        """
        head, piece = message
        if len(head) > 1:
            self._begin(bytes(head[1:]))
        elif not self._sizes:
            raise ProtocolError("a piece of a message arrived before the first piece")
        self._add(memoryview(piece).cast("B"))
        self._skip_empty()
        if self._sizes:
            return None
        frames, self._frames = self._frames, []
        return frames

    def _begin(self, packed: bytes) -> None:
        if self._sizes:
            raise ProtocolError(
                "a message in pieces began before the previous message was complete"
            )
        count, rest = divmod(len(packed), 8)
        if rest or count > MAX_FRAMES:
            raise ProtocolError(
                f"expected the sizes of at most {MAX_FRAMES} frames, got {len(packed)} bytes"
            )
        sizes = list(struct.unpack(f"<{count}q", packed))
        if min(sizes) < 0 or max(sizes) > self._max_frame_bytes:
            raise ProtocolError(
                f"a frame's size must be from 0 to {self._max_frame_bytes}, got {sizes!r:.60}"
            )
        if not 0 < sum(sizes) <= self._max_total_bytes:
            raise ProtocolError(
                f"expected 1 to {self._max_total_bytes} bytes in total, got {sum(sizes)}"
            )
        sizes.reverse()
        self._sizes = sizes
        self._skip_empty()

    def _skip_empty(self) -> None:
        while self._sizes and self._sizes[-1] == 0 and self._target is None:
            self._sizes.pop()
            self._frames.append(b"")

    def _add(self, piece: memoryview) -> None:
        size = self._sizes[-1]
        if self._target is None:
            if piece.nbytes == size:
                self._frames.append(piece)
                self._sizes.pop()
                return
            self._target, self._filled = np.empty(size, np.uint8).data, 0
        end = self._filled + piece.nbytes
        if end > size or not piece.nbytes:
            raise ProtocolError(
                f"expected a piece of 1 to {size - self._filled} bytes, got {piece.nbytes}"
            )
        self._target[self._filled : end] = piece
        self._filled = end
        if end == size:
            self._frames.append(self._target)
            self._sizes.pop()
            self._target = None
