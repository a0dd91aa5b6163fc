"""Messages between the launcher and its agents, as bytes.

Pure: messages in, bytes out, and back. A message is a list whose first item says what it is
(the constants below), a frame its length (4 bytes, big endian) and its MessagePack. Over a
pipe of ssh that is all; over a plain socket every frame is sealed: 16 bytes of HMAC-SHA256
(RFC 2104) with a key of this connection and direction over the frame's number and content, so
that nobody on the way can add, change, repeat or leave out one. Read ``remote.py`` (the
launcher's end) or ``agent.py`` (the other) next.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from typing import Any

import msgpack

# From the launcher.
START = "start"  # [START, {...}]: what agent.Start says
SIGNAL = "signal"  # [SIGNAL, number]: to all processes of the place
CREDIT = "credit"  # [CREDIT, bytes]: so much more output may be sent
FINISH = "finish"  # [FINISH, seconds]: end what is left, then say FINISHED

# From an agent.
GREET = "greet"  # [GREET, {...}]: over a socket, first of all; what agent.machine says, and a rank
PID = "pid"  # [PID, index, pid]: this process has started
REFUSED = "refused"  # [REFUSED, index, errno, text]: it could not; those after it were not tried
LINES = "lines"  # [LINES, index, is_error, [line, ...]]
EXITS = "exits"  # [EXITS, {index: status}]: of one sweep
NOTE = "note"  # [NOTE, text]: something to say about the place
FINISHED = "finished"  # [FINISHED, count]: nothing runs here, count processes had been left over

# From both.
ALIVE = "alive"  # [ALIVE]: every ALIVE_S seconds

ALIVE_S = 5.0
SILENT_S = 60.0  # after so long without a word the other end is taken for lost
CREDIT_BYTES = 1 << 20

_HEADER = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_SEAL_BYTES = 16
_LONGEST_BYTES = 64 << 20  # a START with a large environment; lines are cut at 64 KiB

Message = list[Any]


class BrokenLink(Exception):
    """What came over a link is none of our frames; the text says what it was."""


class Seal:
    """Numbers and signs the frames of one direction of one connection."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def next(self, content: bytes) -> bytes:
        """The seal of the next frame."""
        found = hmac.new(self._key, _NUMBER.pack(self._number) + content, hashlib.sha256)
        self._number += 1
        return found.digest()[:_SEAL_BYTES]


class FrameWriter:
    """Turns messages into frames; ``seal`` is None where the transport protects them."""

    def __init__(self, seal: Seal | None = None) -> None:
        self._seal = seal

    def frame(self, message: Sequence[Any]) -> bytes:
        content: bytes = msgpack.packb(
            list(message), use_bin_type=True, unicode_errors="surrogateescape"
        )
        seal = b"" if self._seal is None else self._seal.next(content)
        return _HEADER.pack(len(seal) + len(content)) + seal + content


class FrameReader:
    """Collects bytes of a link and gives back whole messages."""

    def __init__(self, seal: Seal | None = None) -> None:
        self._seal = seal
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that ``data`` completes. Raises :class:`BrokenLink`."""
        self._rest += data
        messages = []
        while len(self._rest) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._rest)
            if size > _LONGEST_BYTES:
                raise BrokenLink(f"a frame of {size} bytes is announced")
            end = _HEADER.size + size
            if len(self._rest) < end:
                break
            messages.append(self._opened(bytes(self._rest[_HEADER.size : end])))
            del self._rest[:end]
        return messages

    def _opened(self, frame: bytes) -> Message:
        content = frame
        if self._seal is not None:
            seal, content = frame[:_SEAL_BYTES], frame[_SEAL_BYTES:]
            if not hmac.compare_digest(seal, self._seal.next(content)):
                raise BrokenLink("a frame bears a wrong seal")
        try:
            message = msgpack.unpackb(
                content, raw=False, strict_map_key=False, unicode_errors="surrogateescape"
            )
        except (ValueError, msgpack.UnpackException) as error:
            raise BrokenLink(f"a frame cannot be read: {error}") from error
        if not isinstance(message, list) or not message or not isinstance(message[0], str):
            raise BrokenLink("a frame holds no message")
        return message
