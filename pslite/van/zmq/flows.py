"""The kernel's counters of TCP connections: bytes moved, and time without bytes.

libzmq counts a frame as a sign of life only when all of it has arrived. So on a slow link a large
frame would end its own connection, be resent from its start, and end the next one. The kernel
counts bytes. Both ends send a ZMTP heartbeat each second, so a connection is dead if no byte
arrives for seconds, and alive if any byte does, however slowly. Linux only
(``struct tcp_info`` of ``linux/tcp.h``); :func:`counts_bytes` tells whether this system can.

A descriptor belongs to libzmq, which may close it at any moment, and the kernel gives its number
to the next file. So the counters may be those of another connection. Before a connection is
ended, its cookie is compared, because no two sockets share one. Runs on the owner's thread. Read
next: ``dealer.py`` and ``listener.py``.
"""

from __future__ import annotations

import functools
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from pslite.van.base import InTransit

# Offsets in struct tcp_info; Linux has the last two since version 4.1.
_SEGMENT_BYTES_AT = 16
_UNACKED_SEGMENTS_AT = 24
_LAST_DATA_RECV_AT = 52
_BYTES_ACKED_AT = 120
_INFO_BYTES = 136
_NUMBER = struct.Struct("=I")
_COUNTERS = struct.Struct("=QQ")

_SO_COOKIE = 57
_COOKIE_BYTES = 8
_TRIAL_S = 1.0


TAKEN_BYTES = 1024
"""More bytes than a connection's heartbeats between two checks. The kernel acknowledges heartbeats
even for a stopped process, until its buffer is full."""


class FlowState(NamedTuple):
    """The counters of one connection at one moment."""

    silent_s: float
    """Time since data last arrived; heartbeats count, bare acknowledgements do not."""
    received_bytes: int
    acked_bytes: int
    """The sent bytes that have arrived at the other machine."""
    network_bytes: int = 0
    """About how many bytes have left this machine and have not arrived yet."""

    @property
    def moved_bytes(self) -> int:
        """The bytes that have moved in both directions."""
        return self.received_bytes + self.acked_bytes


class Silence:
    """The time without traffic on one connection, from repeated counters. Pure.

    On a full link, the other end may have lost a packet, which it resends after 1, 2 and 4 s. Then
    nothing arrives from it for seconds, although it takes all that this end sends. So the bytes
    that it takes are a sign of life too, if they are more than heartbeats.
    """

    __slots__ = ("_acked_bytes", "_taken_at")

    def __init__(self) -> None:
        self._acked_bytes = 0
        self._taken_at = -math.inf

    def lasts(self, state: FlowState, now: float) -> float:
        """Return how many seconds the connection has been without traffic."""
        if state.acked_bytes - self._acked_bytes > TAKEN_BYTES:
            self._taken_at = now
        self._acked_bytes = state.acked_bytes
        return min(state.silent_s, now - self._taken_at)


def flow_state(descriptor: int) -> FlowState | None:
    """Return the kernel's counters for a connection of this process, or None."""
    info = _ask(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    if len(info) < _INFO_BYTES:
        return None
    segment_bytes, unacked, silent_ms = (
        _NUMBER.unpack_from(info, at)[0]
        for at in (_SEGMENT_BYTES_AT, _UNACKED_SEGMENTS_AT, _LAST_DATA_RECV_AT)
    )
    acked, received = _COUNTERS.unpack_from(info, _BYTES_ACKED_AT)
    return FlowState(silent_ms / 1000, received, acked, unacked * segment_bytes)


class Flow(Protocol):
    """A connection whose sent bytes are counted."""

    sent_bytes: int

    @property
    def descriptor(self) -> int | None:
        """The descriptor while the connection exists."""


def in_transit(flows: Iterable[Flow]) -> InTransit:
    """Return how many sent bytes have not arrived yet; 0 if that is not counted.

    The result is slightly too low, because libzmq's own bytes count as arrived too. What they add
    up to is forgotten whenever all bytes have arrived.
    """
    if not counts_bytes():
        return InTransit()
    nbytes, queued = 0, []
    for flow in flows:
        state = None if flow.descriptor is None else flow_state(flow.descriptor)
        if state is not None:
            flow.sent_bytes = max(flow.sent_bytes, state.acked_bytes)
            left = flow.sent_bytes - state.acked_bytes
            nbytes += left
            queued.append(max(0, left - state.network_bytes))
    return InTransit(nbytes, (sum(queued) if all(queued) else 0) if queued else None)


def flow_cookie(descriptor: int) -> bytes:
    """Return the kernel's name for a descriptor's socket; empty if there is none."""
    return _ask(descriptor, socket.SOL_SOCKET, _SO_COOKIE, _COOKIE_BYTES)


def end_flow(descriptor: int, cookie: bytes) -> bool:
    """End the connection with this cookie, if ``descriptor`` still refers to it.

    Its owner then reads the end of the stream, as if the other side had closed it.
    """
    if not cookie:
        return False
    try:
        copy = os.dup(descriptor)  # what the copy refers to cannot change
    except OSError:
        return False
    try:
        if flow_cookie(copy) != cookie:
            return False
        borrowed = _borrow(copy)
        try:
            borrowed.shutdown(socket.SHUT_RDWR)
        except OSError:  # the kernel has already ended it
            return False
        finally:
            borrowed.detach()
        return True
    finally:
        os.close(copy)


@functools.cache
def counts_bytes() -> bool:
    """Find out whether this system counts the bytes of connections."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), _TRIAL_S) as sender,
        ):
            receiver, _ = server.accept()
            with receiver:
                receiver.settimeout(_TRIAL_S)
                sender.sendall(b"1234")
                receiver.recv(4)
                state = flow_state(receiver.fileno())
                if state is None or state.received_bytes != 4:
                    return False
                until = time.monotonic() + _TRIAL_S
                while time.monotonic() < until:
                    state = flow_state(sender.fileno())
                    if state is not None and state.acked_bytes >= 4:
                        return True
                    time.sleep(0.001)
                return False  # gVisor has these counters, but they stay 0
    except OSError:
        return False


def _ask(descriptor: int, level: int, option: int, nbytes: int) -> bytes:
    try:
        borrowed = _borrow(descriptor)
    except OSError:
        return b""
    try:
        return borrowed.getsockopt(level, option, nbytes)
    except OSError:
        return b""
    finally:
        borrowed.detach()


def _borrow(descriptor: int) -> socket.socket:
    """Make a socket that must be detached: libzmq owns the descriptor."""
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
