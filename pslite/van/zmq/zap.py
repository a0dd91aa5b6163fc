"""Who may connect: answers the questions that libzmq asks during a handshake (ZAP, RFC 27).

libzmq asks at ``inproc://zeromq.zap.01`` before a connection that claims to know the job's key
carries its first message. The van's own poll loop reads the questions, on the owner's thread;
a node too busy to answer lets its visitors wait, and they try again. Nothing that a question
holds is trusted: whatever is not exactly as it must be is refused, and nothing raises.
Read next: ``listener.py``.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence

import zmq

ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"pslite"
VERSION = b"1.0"

ACCEPT = (b"200", b"OK")
DENY = (b"400", b"the key differs")
CANNOT = (b"500", b"this is not a request of RFC 27")

_HEAD_FRAMES = 6  # version, request id, domain, address, identity, mechanism; then credentials
_MAX_ID_BYTES = 255


class Credentials:
    """What a connection of one mechanism must present, to the last bit."""

    __slots__ = ("_expected", "_mechanism")

    def __init__(self, mechanism: bytes, expected: Sequence[bytes]) -> None:
        self._mechanism = mechanism
        self._expected = tuple(expected)

    def match(self, mechanism: bytes, presented: Sequence[bytes]) -> bool:
        """Return whether these are they; takes as long for a near miss as for a wild guess."""
        if mechanism != self._mechanism or len(presented) != len(self._expected):
            return False
        matches = [
            hmac.compare_digest(given, wanted)
            for given, wanted in zip(presented, self._expected, strict=True)
        ]
        return all(matches)


def answer(
    question: Sequence[bytes], credentials: Credentials
) -> tuple[list[bytes] | None, str | None]:
    """The reply to the frames of a question, and the address of who was turned away, if so.

    Frames as RFC 27 numbers them, without the routing frames of ROUTER. There is no reply to a
    question without a request id: there is no telling what it belongs to.
    """
    if len(question) < 2 or not 0 < len(question[1]) <= _MAX_ID_BYTES:
        return None, None
    denied: str | None = None
    if len(question) < _HEAD_FRAMES or question[0] != VERSION or question[2] != DOMAIN:
        code, text = CANNOT
    elif credentials.match(question[5], question[6:]):
        code, text = ACCEPT
    else:
        code, text = DENY
        denied = question[3].decode("ascii", "replace")[:64]
    user_id, metadata = (b"node", b"") if code == ACCEPT[0] else (b"", b"")
    return [VERSION, question[1], code, text, user_id, metadata], denied


class ZapDoor:
    """The socket that answers. ``denied`` is called with the address of each that was refused."""

    def __init__(
        self, socket: zmq.Socket[bytes], credentials: Credentials, denied: Callable[[str], None]
    ) -> None:
        """``socket`` is a ROUTER without limits; this object binds and owns it."""
        self.socket = socket
        self._credentials = credentials
        self._denied = denied
        socket.bind(ENDPOINT)

    def read(self, _events: object, limit: int) -> None:
        """Answer up to ``limit`` questions."""
        for _ in range(limit):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # Before the question: who asks (a frame of ROUTER), and an empty delimiter.
            if len(frames) < 2 or frames[1]:
                continue
            reply, refused = answer(frames[2:], self._credentials)
            if reply is not None:
                # Dropped by ROUTER where the asking connection is over.
                self.socket.send_multipart([frames[0], b"", *reply], zmq.NOBLOCK)
            if refused is not None:
                self._denied(refused)

    def close(self) -> None:
        self.socket.close(linger=0)
