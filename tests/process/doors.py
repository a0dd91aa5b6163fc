"""Finds every listening socket of a job, and knocks at it. For tests; needs /proc.

``knock`` says whether a handshake came to its good end, which is all that a stranger needs to
get a message in; it runs in the caller's process, with a context of its own for each call.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from pslite.security import Proofs, derive

_LISTENS = "0A"  # the state, in /proc/net/tcp
_ACCEPTS = 0x10000  # the flag, in /proc/net/unix
_EVENT = struct.Struct("=HI")


def settings_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with; nothing of one that has ended."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = [entry.decode(errors="replace").partition("=") for entry in entries]
    return {name: value for name, _, value in pairs}


def sockets_of(pid: int) -> set[str]:
    """The inodes of a process's sockets; none of one that has ended."""
    inodes: set[str] = set()
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return inodes
    for descriptor in descriptors:
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    return inodes


def tcp_doors(pids: Iterable[int]) -> dict[tuple[str, int], int]:
    """(address, port) of all listening TCP sockets of these processes, and whose each is."""
    owners = {inode: pid for pid in pids for inode in sockets_of(pid)}
    found = {}
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if not table.exists():
            continue
        for row in table.read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == _LISTENS and fields[9] in owners:
                address, _, port = fields[1].partition(":")
                found[_address(address), int(port, 16)] = owners[fields[9]]
    return found


def other_doors(pids: Iterable[int]) -> list[str]:
    """Listening UNIX sockets, and all UDP sockets, of these processes."""
    inodes = {inode for pid in pids for inode in sockets_of(pid)}
    found = []
    for row in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = row.split()
        if fields[6] in inodes and int(fields[3], 16) & _ACCEPTS:
            found.append(f"unix {' '.join(fields[7:])}")
    for table in (Path("/proc/net/udp"), Path("/proc/net/udp6")):
        if table.exists():
            rows = [row.split() for row in table.read_text().splitlines()[1:]]
            found += [f"udp {row[1]}" for row in rows if row[9] in inodes]
    return found


def _address(text: str) -> str:
    """An address as /proc/net/tcp writes it: words of the machine's own byte order."""
    words = bytes.fromhex(text)
    if sys.byteorder == "little":
        words = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    return str(ipaddress.ip_address(words))


def plain(key: bytes, uid: str = "scheduler") -> dict[int, Any]:
    """The options of somebody who connects with this key under PLAIN to the node of this uid.

    They open the door; to be heard takes a proof besides.
    """
    password = Proofs(derive(key, "plain").secret).password(uid)
    return {zmq.PLAIN_USERNAME: b"pslite", zmq.PLAIN_PASSWORD: password}


def curve(key: bytes) -> dict[int, Any]:
    """The options of somebody who connects with this key under CURVE."""
    private = z85.encode(derive(key, "curve").secret)
    public = zmq.curve_public(private)
    return {
        zmq.CURVE_SERVERKEY: public,
        zmq.CURVE_PUBLICKEY: public,
        zmq.CURVE_SECRETKEY: private,
    }


def knock(
    door: tuple[str, int],
    options: Mapping[int, Any],
    messages: Sequence[Sequence[bytes]] = (),
    *,
    patience_s: float = 5.0,
) -> bool:
    """Try to come in, and to leave messages; whether the handshake succeeded."""
    context = zmq.Context()
    dealer, monitor = context.socket(zmq.DEALER), context.socket(zmq.PAIR)
    try:
        dealer.setsockopt(zmq.RECONNECT_IVL, 2**30)
        for option, value in options.items():
            dealer.setsockopt(option, value)
        wanted = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        dealer.monitor("inproc://monitor", wanted)
        monitor.connect("inproc://monitor")
        host, port = door
        dealer.setsockopt(zmq.IPV6, int(":" in host))
        dealer.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        with suppress(zmq.Again):  # turned away before it could leave anything
            for message in messages:
                dealer.send_multipart(message, zmq.NOBLOCK)
        if not monitor.poll(patience_s * 1000):
            return False
        event, _ = _EVENT.unpack(monitor.recv_multipart()[0])
        return bool(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
    finally:
        dealer.monitor(None, 0)
        monitor.close(linger=0)
        dealer.close(linger=500 if messages else 0)
        context.term()


def accepts_tcp(door: tuple[str, int]) -> bool:
    """Whether anybody listens there at all."""
    try:
        socket.create_connection(door, timeout=5).close()
    except OSError:
        return False
    return True
