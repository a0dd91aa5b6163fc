"""The agents' side of the handshake, and a program that reports a missing agent.

``python join_answer.py REASON``, with a ticket beside it, tells the launcher why there is no agent:
this package, or a Python for it, is missing. It uses only the standard library of any Python from
3.6, and does not import this project, because its text is sent to hosts that share no directory
with the launcher, where an agent's output is not read. So it encodes its only frame itself
(``wire.py``): a greeting with an error.

Both ends of a new connection first prove that they know the job's key, which is never sent:

1. The launcher sends :data:`HELLO` and 32 random bytes.
2. The agent sends 32 random bytes and its proof, an HMAC-SHA256 (RFC 2104) over both.
3. The launcher sends its own proof.

A proof is valid for one connection and one side only, so a recorded proof is useless. After this,
every frame has a :class:`Seal`: 16 bytes of HMAC-SHA256 over its number and content. The seal's key
belongs to one connection and direction, and is derived in the same way.
"""

import hashlib
import hmac
import json
import os
import socket
import struct
import sys
from typing import Any

HELLO = b"KVSTORE-GATE-1\n"
NONCE_BYTES = 32
PROOF_BYTES = 32
SEAL_BYTES = 16
_CONNECT_S = 5.0
_ANSWER_S = 10.0


class WrongLauncher(Exception):
    """The launcher that answers belongs to another job."""


class Seal:
    """Numbers and signs the frames of one direction of one connection."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def next(self, content: bytes) -> bytes:
        """Return the seal of the next frame."""
        numbered = struct.pack(">Q", self._number) + content
        self._number += 1
        return hmac.new(self._key, numbered, hashlib.sha256).digest()[:SEAL_BYTES]


class Handshake:
    """The authentication of one connection: the job's key and both nonces."""

    def __init__(self, key: str, launcher_nonce: bytes, agent_nonce: bytes) -> None:
        self._key = key.strip().encode()
        self._nonces = launcher_nonce + agent_nonce

    def agent_proof(self) -> bytes:
        return self._derived(b"agent's proof")

    def launcher_proof(self) -> bytes:
        return self._derived(b"launcher's proof")

    def seal_to_agent(self) -> Seal:
        return Seal(self._derived(b"seal to the agent"))

    def seal_to_launcher(self) -> Seal:
        return Seal(self._derived(b"seal to the launcher"))

    def _derived(self, purpose: bytes) -> bytes:
        content = HELLO + purpose + b"\0" + self._nonces
        return hmac.new(self._key, content, hashlib.sha256).digest()


def shake_hands(connected: socket.socket, key: str) -> Handshake:
    """Prove to each other that both ends know ``key``; return the handshake.

    Raises OSError or :class:`WrongLauncher`.
    """
    head = _received(connected, len(HELLO) + NONCE_BYTES)
    if not head.startswith(HELLO):
        raise WrongLauncher("the program that answers is not a launcher")
    nonce = os.urandom(NONCE_BYTES)
    handshake = Handshake(key, head[len(HELLO) :], nonce)
    connected.sendall(nonce + handshake.agent_proof())
    if not hmac.compare_digest(_received(connected, PROOF_BYTES), handshake.launcher_proof()):
        raise WrongLauncher("the launcher of another job answers")
    return handshake


def main() -> None:
    path = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "ticket.json")
    with open(path, encoding="utf-8") as file:
        ticket = json.load(file)
    join_answer(ticket, sys.argv[1])
    sys.exit(3)


def join_answer(ticket: Any, reason: str) -> bool:
    """Send the launcher of ``ticket``, a dictionary, the reason; return the success."""
    for address in ticket["addresses"]:
        try:
            with socket.create_connection((address, ticket["port"]), _CONNECT_S) as connected:
                connected.settimeout(_ANSWER_S)
                content = greeting(socket.gethostname(), reason)
                seal = shake_hands(connected, ticket["key"]).seal_to_launcher().next(content)
                connected.sendall(struct.pack(">I", len(seal + content)) + seal + content)
                connected.recv(1)  # the launcher closes when it has read it
                return True
        except (OSError, WrongLauncher):
            continue
    return False


def greeting(host: str, reason: str) -> bytes:
    """Return ["greet", {"host": ..., "error": ...}] as MessagePack."""
    words = ["greet", "host", host, "error", reason]
    texts = [word[:8000].encode("utf-8", "replace") for word in words]
    packed = [struct.pack(">BH", 0xDA, len(text)) + text for text in texts]
    return b"\x92" + packed[0] + b"\x82" + b"".join(packed[1:])


def _received(connected: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connected.recv(size - len(data))
        if not part:
            raise OSError("the connection was closed")
        data += part
    return data


if __name__ == "__main__":
    main()
