"""One end of a connection between the launcher and an agent: a pair of descriptors.

Never blocks: what cannot be written now is kept, and :attr:`Link.waiting` says so. Both ends
say that they are there every few seconds; an end that says nothing for ``SILENT_S`` is lost.
Runs on the main thread. Used by ``remote.py`` and ``agent.py``.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Sequence
from typing import Any

from kvstore.launch.frames import (
    ALIVE,
    ALIVE_S,
    SILENT_S,
    BrokenLink,
    FrameReader,
    FrameWriter,
    Message,
    Seal,
)

_READ_BYTES = 256 * 1024


class LinkLost(Exception):
    """The other end is gone, or was never one of ours; the text says how that was seen."""


class Link:
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
        """Read once, what is no frame. Raises :class:`LinkLost`."""
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
        raise LinkLost(f"a message '{message[0]}' cannot be understood")
    return items
