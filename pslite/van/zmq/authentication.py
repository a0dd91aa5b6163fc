"""Authentication of connections with the job's key: PLAIN, CURVE and ZAP.

When a peer connects and claims to know the job's key, libzmq asks the van (ZAP, RFC 27) before the
connection carries its first message. The van's own poll loop reads the questions (``ZapHandler``),
on the owner's thread. If a node is too busy to answer, its peers wait and try again. No field of a
question is trusted: a question that is not exactly right is refused, and never raises an error.
Read next: ``listener.py``; ``pslite/security.py`` derives the secrets.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence

import zmq
from zmq.utils import z85

from pslite.errors import ConfigError
from pslite.security import Mechanism, Proofs

CURVE_OVERHEAD_BYTES = 64
"""Under CURVE a frame is 33 bytes longer than its content, and MAXMSGSIZE counts them."""
USER = b"pslite"

ENDPOINT = "inproc://zeromq.zap.01"
"""The address at which libzmq asks who may connect (ZAP, RFC 27)."""
DOMAIN = b"pslite"
VERSION = b"1.0"
ACCEPT = (b"200", b"OK")
DENY = (b"400", b"the key differs")
CANNOT = (b"500", b"this is not a request of RFC 27")
_HEAD_FRAMES = 6  # version, request id, domain, address, identity, mechanism; then credentials
_MAX_ID_BYTES = 255

_Options = Sequence[tuple[int, int | bytes]]
_ZAP_OPTIONS: _Options = ((zmq.ZAP_DOMAIN, DOMAIN), (zmq.ZAP_ENFORCE_DOMAIN, 1))


Credentials = tuple[bytes, ...]
"""The mechanism, and the exact credentials that a connection must present for it."""


def _match(presented: Sequence[bytes], expected: Credentials) -> bool:
    """Return whether these are the expected credentials, in constant time."""
    if len(presented) != len(expected):
        return False
    matches = [hmac.compare_digest(*pair) for pair in zip(presented, expected, strict=True)]
    return all(matches)


def answer(
    question: Sequence[bytes], credentials: Credentials
) -> tuple[list[bytes] | None, str | None]:
    """Return the reply to a question, and the address of the rejected peer, if any.

    The frames are as in RFC 27, without ROUTER's routing frames. A question without a request id
    gets no reply, because libzmq could not tell which question it is for.
    """
    if len(question) < 2 or not 0 < len(question[1]) <= _MAX_ID_BYTES:
        return None, None
    denied: str | None = None
    if len(question) < _HEAD_FRAMES or question[0] != VERSION or question[2] != DOMAIN:
        code, text = CANNOT
    elif _match(question[5:], credentials):
        code, text = ACCEPT
    else:
        code, text = DENY
        denied = question[3].decode("ascii", "replace")[:64]
    user_id, metadata = (b"node", b"") if code == ACCEPT[0] else (b"", b"")
    return [VERSION, question[1], code, text, user_id, metadata], denied


class ZapHandler:
    """The ZAP socket; it calls ``denied`` with each rejected address."""

    def __init__(
        self, socket: zmq.Socket[bytes], credentials: Credentials, denied: Callable[[str], None]
    ) -> None:
        """Bind ``socket``, a ROUTER without limits, and own it."""
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
            # Two frames precede the question: the asker (from ROUTER) and an empty delimiter.
            if len(frames) < 2 or frames[1]:
                continue
            reply, refused = answer(frames[2:], self._credentials)
            if reply is not None:
                # ROUTER drops it if the asking connection has ended.
                self.socket.send_multipart([frames[0], b"", *reply], zmq.NOBLOCK)
            if refused is not None:
                self._denied(refused)

    def close(self) -> None:
        self.socket.close(linger=0)


class SocketSecurity:
    """Socket options by which both ends of a connection prove the job's key."""

    def __init__(self, mechanism: Mechanism | None, uid: str) -> None:
        self.uid = uid
        self.credentials: Credentials | None = None
        self.overhead_bytes = 0
        self.listening: _Options = ()
        self.proofs: Proofs | None = None
        """The proofs that both ends must send first; None if the mechanism alone is enough."""
        self._connecting: _Options = ()
        self.description = "no job key"
        if mechanism is None:
            return
        self.description = f"PS_SECURITY={mechanism.name}"
        if mechanism.name == "plain":
            self.proofs = Proofs(mechanism.secret)
            self.credentials = (b"PLAIN", USER, self.proofs.password(uid))
            self.listening = (*_ZAP_OPTIONS, (zmq.PLAIN_SERVER, 1))
        else:
            self._use_curve(mechanism.secret)

    def connecting(self, peer: str) -> _Options:
        """Return the options of a socket that connects to the node with this uid."""
        if self.proofs is None:
            return self._connecting
        password = self.proofs.password(peer)
        return ((zmq.PLAIN_USERNAME, USER), (zmq.PLAIN_PASSWORD, password))

    def _use_curve(self, secret: bytes) -> None:
        """Use one key pair for the whole job: nodes that have it may listen and connect."""
        if not zmq.has("curve"):
            raise ConfigError(
                "PS_SECURITY=curve needs a libzmq with CURVE, which this pyzmq does not have; "
                "install pyzmq from its wheel (pip install pyzmq), or, on one host or a trusted "
                "network, set PS_SECURITY=plain on all nodes"
            )
        private = z85.encode(secret)
        public = zmq.curve_public(private)
        self.credentials = (b"CURVE", z85.decode(public))
        self.overhead_bytes = CURVE_OVERHEAD_BYTES
        self.listening = (*_ZAP_OPTIONS, (zmq.CURVE_SERVER, 1), (zmq.CURVE_SECRETKEY, private))
        self._connecting = (
            (zmq.CURVE_SERVERKEY, public),
            (zmq.CURVE_PUBLICKEY, public),
            (zmq.CURVE_SECRETKEY, private),
        )
