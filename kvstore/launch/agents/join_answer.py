"""Tells the launcher why there is no agent where this package, or a Python for it, is missing.

``python join_answer.py REASON``, with a ticket beside it. Standard library only, for any Python
from 3.6 on, and no import of this project: its text goes to hosts that share no directory with the
launcher, where what an agent prints is not read. So it knows by itself the handshake
(``wire.py``) and the one frame that it sends (``wire.py``): a greeting with an error.
"""

import hashlib
import hmac
import json
import os
import socket
import struct
import sys
from typing import Any

_HELLO = b"KVSTORE-GATE-1\n"
_CONNECT_S = 5.0
_ANSWER_S = 10.0


def main() -> None:
    path = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "ticket.json")
    with open(path, encoding="utf-8") as file:
        ticket = json.load(file)
    join_answer(ticket, sys.argv[1])
    sys.exit(3)


def join_answer(ticket: Any, reason: str) -> bool:
    """Return whether the launcher of this ticket, a dictionary, has been told."""
    for address in ticket["addresses"]:
        try:
            with socket.create_connection((address, ticket["port"]), _CONNECT_S) as connected:
                connected.settimeout(_ANSWER_S)
                _tell(connected, ticket["key"].strip().encode(), reason)
                return True
        except OSError:
            continue
    return False


def _tell(connected: socket.socket, key: bytes, reason: str) -> None:
    """Raises OSError when it is not a launcher, or not ours."""
    head = _received(connected, len(_HELLO) + 32)
    ours = os.urandom(32)

    def derived(purpose: bytes) -> bytes:
        content = _HELLO + purpose + b"\0" + head[len(_HELLO) :] + ours
        return hmac.new(key, content, hashlib.sha256).digest()

    connected.sendall(ours + derived(b"agent's proof"))
    if not hmac.compare_digest(_received(connected, 32), derived(b"launcher's proof")):
        raise OSError("another job's launcher")
    content = greeting(socket.gethostname(), reason)
    seal = hmac.new(derived(b"seal to the launcher"), bytes(8) + content, hashlib.sha256)
    connected.sendall(struct.pack(">I", 16 + len(content)) + seal.digest()[:16] + content)
    connected.recv(1)  # the launcher closes when it has read it


def greeting(host: str, reason: str) -> bytes:
    """["greet", {"host": ..., "error": ...}] as MessagePack."""
    words = ["greet", "host", host, "error", reason]
    packed = [struct.pack(">BH", 0xDA, len(one)) + one for one in map(_encoded, words)]
    return b"\x92" + packed[0] + b"\x82" + b"".join(packed[1:])


def _encoded(text: str) -> bytes:
    return text[:8000].encode("utf-8", "replace")


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
