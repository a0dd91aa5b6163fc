"""Frames between the launcher and its agents, and one end of a link.

A message is a list; its first item names its kind. A frame is the length of the message (4 bytes,
big endian) and its MessagePack. The launcher sends commands (the constants below); an agent sends
the events of ``launch/job/places.py``, by the names of their classes. Over a pipe of ssh, an agent
first sends a greeting line, because a login shell may print text before it; frames follow.
Over a plain socket, both ends have shaken hands (``join_answer.py``), and every frame
begins with a seal. As with ``srun`` and ``mpirun``, others on the network can read these frames,
but they cannot change, add, repeat or remove any.

``AgentLink`` is one end. It never blocks: :attr:`AgentLink.waiting` is true while bytes wait to be
written. Both ends send an ALIVE message every few seconds; an end that is silent for ``SILENT_S``
is lost. Runs on the main thread. Read next: ``remote.py`` (the launcher's end) or ``agent.py`` (the
other end).
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

# Messages from the launcher.
# [START, {"job_id": ..., "variables": {...}, "key": ..., "processes": [[index, role, rank, [word,
# ...], {...}], ...]}]: the variables of all processes, and each process with its command and own
# variables. The key is the job's, or "" if the agent has it already or the user has provided one.
# The agent replaces the command of a scheduler or server by that of its own package.
START = "start"
SIGNAL = "signal"  # [SIGNAL, number]: to all processes of the place
CREDIT = "credit"  # the agent may send this much more output
FINISH = "finish"  # end all left-over processes, then send Finished

# The first message from an agent: the result of agent.machine, and over a socket also a rank.
GREET = "greet"  # [GREET, {...}]
GREETING = b"KVSTORE-AGENT "
"""The start of the greeting line; the rest of the line is JSON."""

# From both ends.
ALIVE = "alive"  # [ALIVE]: every ALIVE_S seconds

ALIVE_S = 5.0
SILENT_S = 60.0  # after this time without a message, the other end is lost
CREDIT_BYTES = 1 << 20

_EVENTS: dict[str, Callable[..., Event]] = {one.__name__: one for one in get_args(Event)}
_HEADER = struct.Struct(">I")
_READ_BYTES = 256 * 1024
_LONGEST_BYTES = 64 << 20  # a START with a large environment; lines are cut at 64 KiB
_LONGEST_HEAD = 1 << 20  # the most that a login shell may print before the greeting

Message = list[Any]


class LinkLost(Exception):
    """The other end is gone or is not an agent of this job; the text says why."""


def frame(message: Sequence[Any], seal: Seal | None = None) -> bytes:
    """Return the frame of ``message``; ``seal`` is None on a protected transport."""
    content: bytes = msgpack.packb(
        list(message), use_bin_type=True, unicode_errors="surrogateescape"
    )
    sealed = b"" if seal is None else seal.next(content)
    return _HEADER.pack(len(sealed) + len(content)) + sealed + content


class FrameReader:
    """Collects the bytes of a link and returns complete messages.

    With ``finds_greeting``, the first message is the GREET from the greeting line, and any text
    before that line is skipped.
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
    """One end of a link; owns ``read_fd`` and ``write_fd`` until :meth:`close`.

    ``seals`` are the seal for reading and the seal for writing. ``finds_greeting`` is that of
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
        """Whether bytes wait to be written."""
        return bool(self._pending)

    def send_raw(self, data: bytes) -> None:
        """Queue bytes and write as many as possible now. Never raises.

        A lost link is reported when reading.
        """
        self._pending += data
        self.write_pending()

    def send(self, *message: Any) -> None:
        """Queue a message, like :meth:`send_raw`."""
        self.send_raw(frame(message, self._seal))

    def tell(self, event: Event) -> None:
        """Queue an event, like :meth:`send_raw`."""
        self.send(type(event).__name__, *vars(event).values())

    def write_pending(self) -> None:
        while self._pending:
            try:
                written = os.write(self.write_fd, self._pending[:_READ_BYTES])
            except BlockingIOError:
                return
            except OSError:  # the other end has closed; reading will report it
                self._pending.clear()
                return
            del self._pending[:written]

    def adjust(self, selector: selectors.BaseSelector, read: Handler) -> None:
        """Register ``read`` for input, and the writing of pending bytes."""
        selector.register(self.read_fd, selectors.EVENT_READ, read)
        if self.waiting:
            selector.register(self.write_fd, selectors.EVENT_WRITE, self._write)

    def _write(self, now_s: float) -> list[Event]:
        self.write_pending()
        return []

    def receive(self, now_s: float) -> list[Message]:
        """Read once and return complete messages; call it when ``read_fd`` is readable.

        Raises :class:`LinkLost`.
        """
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
        """Send ALIVE if it is due; return the seconds until the next call.

        Raises :class:`LinkLost` if the other end has been silent for too long.
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

        Each of the two takes at most ``patience_s``. A socket that is closed while data arrives
        drops its unsent data (RFC 1122, 4.2.2.13). A pipe does not, so this does not wait for a
        pipe.
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
    """Return the event that :meth:`AgentLink.tell` sent. Raises :class:`LinkLost`."""
    kind, *fields = message
    try:
        return _EVENTS[kind](*fields)
    except (KeyError, TypeError):
        raise LinkLost(
            f"unknown message '{kind}'; install the same version of kvstore there"
        ) from None
