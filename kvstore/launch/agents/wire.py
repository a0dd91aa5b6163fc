"""Connect the launcher and its agents: frames, the handshake and one end of a link.

A message is a list whose first item names its kind (the constants below); a frame is its length (4
bytes, big endian) and its MessagePack. Over a pipe of ssh that is all. Over a plain socket both
ends first prove that they know the job's key, which never goes over the socket:

1. the launcher sends :data:`HELLO` and 32 random bytes;
2. the agent sends 32 random bytes and its proof, an HMAC-SHA256 (RFC 2104) over both;
3. the launcher sends its own proof.

A proof is good for one connection and one side, so a recorded one is useless. After this every
frame is sealed: 16 bytes of HMAC-SHA256, with a key of this connection and direction, over the
frame's number and content. Frames can be read on the way, as with ``srun`` and ``mpirun``, but not
changed, added, repeated or left out.

``AgentLink`` is one end. It never blocks: :attr:`AgentLink.waiting` tells whether anything is still
to be written. Both ends send a sign of life every few seconds; an end that is silent for
``SILENT_S`` is lost. Runs on the main thread. Read next: ``remote.py`` (the launcher's end) or
``agent.py`` (the other).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import stat
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
    """The bytes of a link are not our frames; the text says what they were."""


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
                raise BrokenLink(f"a frame announces {size} bytes")
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
                raise BrokenLink("a frame has a wrong seal")
        try:
            message = msgpack.unpackb(
                content, raw=False, strict_map_key=False, unicode_errors="surrogateescape"
            )
        except (ValueError, msgpack.UnpackException) as error:
            raise BrokenLink(f"cannot read a frame: {error}") from error
        if not isinstance(message, list) or not message or not isinstance(message[0], str):
            raise BrokenLink("a frame does not contain a message")
        return message


HELLO = b"KVSTORE-GATE-1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32


@dataclass(frozen=True)
class Handshake:
    """One connection: ``key`` is the text of the job's key, the nonces are each side's bytes."""

    key: str
    launcher_nonce: bytes
    agent_nonce: bytes

    def agent_proof(self) -> bytes:
        return self._derived(b"agent's proof")

    def launcher_proof(self) -> bytes:
        return self._derived(b"launcher's proof")

    def seal_to_agent(self) -> Seal:
        return Seal(self._derived(b"seal to the agent"))

    def seal_to_launcher(self) -> Seal:
        return Seal(self._derived(b"seal to the launcher"))

    def _derived(self, purpose: bytes) -> bytes:
        content = HELLO + purpose + b"\0" + self.launcher_nonce + self.agent_nonce
        return hmac.new(self.key.strip().encode(), content, hashlib.sha256).digest()


def is_same(one: bytes, other: bytes) -> bool:
    """Compare proofs without telling by the time it takes where they differ."""
    return hmac.compare_digest(one, other)


_READ_BYTES = 256 * 1024


class LinkLost(Exception):
    """The other end is gone, or was never one of ours; the text says how that was seen."""


class AgentLink:
    """Owns ``read_fd`` and ``write_fd`` (the same for a socket) until :meth:`close`.

    ``seals`` are for what is read and for what is written.
    """

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        now_s: float,
        *,
        seals: tuple[Seal, Seal] | None = None,
    ) -> None:
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        self.read_fd = read_fd
        self.write_fd = write_fd
        self._reader = FrameReader(None if seals is None else seals[0])
        self._writer = FrameWriter(None if seals is None else seals[1])
        self._received = b""
        self._pending = bytearray()
        self._heard_s = now_s
        self._said_s = now_s

    @property
    def waiting(self) -> bool:
        """There are bytes that the connection has not taken yet."""
        return bool(self._pending)

    @property
    def has_received(self) -> bool:
        """There are bytes that :meth:`put_back` was given."""
        return bool(self._received)

    def send_raw(self, data: bytes) -> None:
        """Queue bytes that are no frame, before the first one."""
        self._pending += data
        self.write_pending()

    def receive_raw(self) -> bytes:
        """Read once, of data that is not framed. Raises :class:`LinkLost`."""
        try:
            data = os.read(self.read_fd, _READ_BYTES)
        except BlockingIOError:
            return b""
        except OSError as error:
            raise LinkLost(f"the connection broke: {error.strerror}") from error
        if not data:
            raise LinkLost("the connection was closed")
        return data

    def put_back(self, data: bytes) -> None:
        """What was read and is not needed there: the next :meth:`receive` begins with it."""
        self._received = data

    def send(self, *message: Any) -> None:
        """Queue a message and write what can be written. Never raises: reading tells of a loss."""
        self._pending += self._writer.frame(message)
        self.write_pending()

    def write_pending(self) -> None:
        while self._pending:
            try:
                written = os.write(self.write_fd, self._pending[:_READ_BYTES])
            except BlockingIOError:
                return
            except OSError:  # the other end has closed; reading will say so
                self._pending.clear()
                return
            del self._pending[:written]

    def receive(self, now_s: float) -> list[Message]:
        """Read once; call it when ``read_fd`` is readable. Raises :class:`LinkLost`."""
        data, self._received = self._received, b""
        if not data:
            data = self.receive_raw()
            if not data:
                return []
        self._heard_s = now_s
        try:
            found = self._reader.feed(data)
        except BrokenLink as error:
            raise LinkLost(str(error)) from error
        return [message for message in found if message[0] != ALIVE]

    def tick(self, now_s: float) -> float:
        """Say that this end is there, if it is time; return the seconds until the next call.

        Raises :class:`LinkLost` when the other end has been silent for too long.
        """
        if now_s - self._heard_s >= SILENT_S:
            raise LinkLost(f"nothing was heard for {now_s - self._heard_s:.0f} s")
        if now_s - self._said_s >= ALIVE_S:
            self._said_s = now_s
            if not self._pending:
                self.send(ALIVE)
        return self._said_s + ALIVE_S - now_s

    def say_goodbye(self, patience_s: float) -> None:
        """Wait until the other end has closed, which has read everything then.

        A socket that is closed while something comes in drops what it has not sent yet (RFC 1122,
        4.2.2.13); a pipe does not, and is not waited for.
        """
        if not stat.S_ISSOCK(os.fstat(self.write_fd).st_mode):
            return
        until_s = time.monotonic() + patience_s
        with socket.socket(fileno=os.dup(self.write_fd)) as connected:
            try:
                connected.shutdown(socket.SHUT_WR)
                while (left_s := until_s - time.monotonic()) > 0:
                    connected.settimeout(left_s)
                    if not connected.recv(_READ_BYTES):
                        return
            except OSError:  # closed, or time is up
                return

    def close(self) -> None:
        for fd in {self.read_fd, self.write_fd}:
            try:
                os.close(fd)
            except OSError:
                pass


def fields(message: Sequence[Any], *kinds: type) -> tuple[Any, ...]:
    """The items behind a message's name, checked. Raises :class:`LinkLost` if they do not fit."""
    items = tuple(message[1:])
    if len(items) != len(kinds) or not all(map(isinstance, items, kinds)):
        raise LinkLost(f"cannot understand a message '{message[0]}'")
    return items
