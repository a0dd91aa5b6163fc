"""Frames between the launcher and its agents, and one end of a link.

A message is a list whose first item names its kind; a frame is its length (4 bytes, big endian)
and its MessagePack. The launcher commands (the constants below), an agent tells what it sees: the
events of ``launch/job/places.py``, by the names of their classes. Over a pipe of ssh an agent's
frames begin after a line that greets, before which a login shell may have printed. Over a plain
socket both ends have shaken hands (``join_answer.py``), and every frame begins with a seal: frames
can be read on the way, as with ``srun`` and ``mpirun``, but not changed, added, repeated or left
out.

``AgentLink`` is one end. It never blocks: :attr:`AgentLink.waiting` tells whether anything is still
to be written. Both ends send a sign of life every few seconds; an end that is silent for
``SILENT_S`` is lost. Runs on the main thread. Read next: ``remote.py`` (the launcher's end) or
``agent.py`` (the other).
"""

from __future__ import annotations

import hmac
import json
import os
import selectors
import socket
import stat
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, get_args

import msgpack

from kvstore.launch.agents.join_answer import SEAL_BYTES, Seal
from kvstore.launch.job.places import Event, Handler

# From the launcher.
# [START, {"job_id": ..., "variables": {...}, "key": ..., "processes": [[index, role, rank, [word,
# ...], {...}], ...]}]: processes with their commands and own variables, and variables of all. The
# key is the job's, "" where the agent has it already or the processes bring one. What serves is
# the package's there, whatever its command.
START = "start"
SIGNAL = "signal"  # [SIGNAL, number]: to all processes of the place
CREDIT = "credit"  # [CREDIT, bytes]: so much more output may be sent
FINISH = "finish"  # [FINISH, seconds]: end what is left, then say Finished

# From an agent, first of all; what agent.machine says, and over a socket a rank.
GREET = "greet"  # [GREET, {...}]
GREETING = b"KVSTORE-AGENT "
"""How the line that greets begins, before the same as JSON."""

# From both.
ALIVE = "alive"  # [ALIVE]: every ALIVE_S seconds

ALIVE_S = 5.0
SILENT_S = 60.0  # after so long without a word the other end is taken for lost
CREDIT_BYTES = 1 << 20

_EVENTS: dict[str, Callable[..., Event]] = {one.__name__: one for one in get_args(Event)}
_HEADER = struct.Struct(">I")
_READ_BYTES = 256 * 1024
_LONGEST_BYTES = 64 << 20  # a START with a large environment; lines are cut at 64 KiB
_LONGEST_HEAD = 1 << 20  # all that a login shell may print before the greeting

Message = list[Any]


class LinkLost(Exception):
    """The other end is gone or was no agent of ours; the text says why."""


def frame(message: Sequence[Any], seal: Seal | None = None) -> bytes:
    """Return a frame; ``seal`` is None where the transport protects frames."""
    content: bytes = msgpack.packb(
        list(message), use_bin_type=True, unicode_errors="surrogateescape"
    )
    sealed = b"" if seal is None else seal.next(content)
    return _HEADER.pack(len(sealed) + len(content)) + sealed + content


class FrameReader:
    """Collects bytes of a link and gives back whole messages.

    With ``finds_greeting`` the first is the GREET of a line, and what stands before is skipped.
    """

    def __init__(self, seal: Seal | None = None, *, finds_greeting: bool = False) -> None:
        self._seal = seal
        self._finds_greeting = finds_greeting
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that ``data`` completes. Raises :class:`LinkLost`."""
        self._rest += data
        messages = self._greeting() if self._finds_greeting else []
        while not self._finds_greeting and len(self._rest) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._rest)
            if size > _LONGEST_BYTES:
                raise LinkLost(f"a frame announces {size} bytes")
            end = _HEADER.size + size
            if len(self._rest) < end:
                break
            messages.append(self._opened(bytes(self._rest[_HEADER.size : end])))
            del self._rest[:end]
        return messages

    def _greeting(self) -> list[Message]:
        start = self._rest.find(GREETING)
        end = self._rest.find(b"\n", start) if start >= 0 else -1
        if end < 0:
            if len(self._rest) > _LONGEST_HEAD:
                raise LinkLost(
                    "the login shell does not stop printing; make its startup files silent"
                )
            return []
        try:
            found = dict(json.loads(self._rest[start + len(GREETING) : end]))
        except (ValueError, TypeError):
            raise LinkLost(
                "the agent's greeting cannot be read; install the same version of kvstore there"
            ) from None
        del self._rest[: end + 1]
        self._finds_greeting = False
        return [[GREET, found]]

    def _opened(self, content: bytes) -> Message:
        if self._seal is not None:
            seal, content = content[:SEAL_BYTES], content[SEAL_BYTES:]
            if not hmac.compare_digest(seal, self._seal.next(content)):
                raise LinkLost("a frame has a wrong HMAC")
        try:
            message = msgpack.unpackb(
                content, raw=False, strict_map_key=False, unicode_errors="surrogateescape"
            )
        except (ValueError, msgpack.UnpackException) as error:
            raise LinkLost(f"cannot read a frame: {error}") from error
        if not isinstance(message, list) or not message or not isinstance(message[0], str):
            raise LinkLost("a frame does not contain a message")
        return message


class AgentLink:
    """Owns ``read_fd`` and ``write_fd`` (the same for a socket) until :meth:`close`.

    ``seals`` are for what is read and for what is written; ``finds_greeting`` as for
    :class:`FrameReader`.
    """

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        now_s: float,
        *,
        seals: tuple[Seal | None, Seal | None] = (None, None),
        finds_greeting: bool = False,
    ) -> None:
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        self.read_fd = read_fd
        self.write_fd = write_fd
        self._reader = FrameReader(seals[0], finds_greeting=finds_greeting)
        self._seal = seals[1]
        self._pending = bytearray()
        self._heard_s = now_s
        self._said_s = now_s

    @property
    def waiting(self) -> bool:
        """There are bytes that the connection has not taken yet."""
        return bool(self._pending)

    def send_raw(self, data: bytes) -> None:
        """Queue bytes and write what is possible. Never raises.

        Reading reports the loss of the link.
        """
        self._pending += data
        self.write_pending()

    def send(self, *message: Any) -> None:
        """Queue a message, as :meth:`send_raw`."""
        self.send_raw(frame(message, self._seal))

    def tell(self, event: Event) -> None:
        """Queue what has happened, as :meth:`send_raw`."""
        self.send(type(event).__name__, *vars(event).values())

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

    def adjust(self, selector: selectors.BaseSelector, read: Handler) -> None:
        """Have ``read`` called when there is something to read, and write what is pending."""
        selector.register(self.read_fd, selectors.EVENT_READ, read)
        if self.waiting:
            selector.register(self.write_fd, selectors.EVENT_WRITE, self._write)

    def _write(self, now_s: float) -> list[Event]:
        self.write_pending()
        return []

    def receive(self, now_s: float) -> list[Message]:
        """Read once; call it when ``read_fd`` is readable. Raises :class:`LinkLost`."""
        try:
            data = os.read(self.read_fd, _READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LinkLost(f"the connection broke: {error.strerror}") from error
        if not data:
            raise LinkLost("the connection was closed")
        self._heard_s = now_s
        return [message for message in self._reader.feed(data) if message[0] != ALIVE]

    def tick(self, now_s: float) -> float:
        """Send a sign of life if due; return the seconds until the next call.

        Raises :class:`LinkLost` when the other end has been silent for too long.
        """
        if now_s - self._heard_s >= SILENT_S:
            raise LinkLost(f"no sign of life for {now_s - self._heard_s:.0f} s")
        if now_s - self._said_s >= ALIVE_S:
            self._said_s = now_s
            if not self._pending:
                self.send(ALIVE)
        return self._said_s + ALIVE_S - now_s

    def say_goodbye(self, patience_s: float) -> None:
        """Write the rest, then wait until the other end has read it and closed.

        Either for ``patience_s`` at most. A socket that is closed while something comes in drops
        what it has not sent yet (RFC 1122, 4.2.2.13); a pipe does not, and is not waited for.
        """
        until_s = time.monotonic() + patience_s
        with selectors.PollSelector() as selector:
            selector.register(self.write_fd, selectors.EVENT_WRITE)
            while self._pending and (left_s := until_s - time.monotonic()) > 0:
                selector.select(left_s)
                self.write_pending()
        if not stat.S_ISSOCK(os.fstat(self.write_fd).st_mode):
            return
        until_s = time.monotonic() + patience_s
        with socket.socket(fileno=os.dup(self.write_fd)) as connected, suppress(OSError):
            connected.shutdown(socket.SHUT_WR)
            while (left_s := until_s - time.monotonic()) > 0:
                connected.settimeout(left_s)
                if not connected.recv(_READ_BYTES):
                    return

    def close(self) -> None:
        self._pending.clear()
        for fd in {self.read_fd, self.write_fd}:
            with suppress(OSError):
                os.close(fd)


def event_of(message: Message) -> Event:
    """Return what an agent tells by :meth:`AgentLink.tell`. Raises :class:`LinkLost`."""
    kind, *fields = message
    try:
        return _EVENTS[kind](*fields)
    except (KeyError, TypeError):
        raise LinkLost(
            f"unknown message '{kind}'; install the same version of kvstore there"
        ) from None
