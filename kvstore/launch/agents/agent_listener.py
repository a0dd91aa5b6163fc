"""The launcher's listening socket, open until all agents have connected.

A visitor (a new connection) has a few seconds to prove that it knows the job's key
(``join_answer.py``) and to greet; only then is its link given to the code that waits for agents.
The listener closes other connections without an answer. It never blocks, and runs on the launcher's
main thread. Read ``cluster_job.py`` next.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvstore.launch.agents.join_answer import HELLO, NONCE_BYTES, PROOF_BYTES, Handshake
from kvstore.launch.agents.wire import GREET, AgentLink, LinkLost
from kvstore.launch.job.places import Event, IndexedSpecs, Note, Place

VISIT_S = 10.0  # from connecting until the greeting has arrived
MOST_VISITORS = 512  # visitors that have not greeted yet
_PAUSE_S = 1.0  # pause after reaching the limit of open files
_AT_ONCE = 64  # connections accepted in one call

Admit = Callable[[AgentLink, Mapping[str, Any]], list[Event]]


class AgentListener(Place):
    """The listening socket for agents; calls ``admit`` with each link and greeting.

    It owns ``listener``; ``admit`` takes over the link.

    No process of the job runs at this place.
    """

    def __init__(self, listener: socket.socket, key: str, admit: Admit) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._key = key
        self._admit = admit
        self._visitors: list[_Visitor] = []
        self._paused_until_s: float | None = None
        self._has_complained = False

    def start(self, specs: IndexedSpecs, variables: Mapping[str, str]) -> list[Event]:
        """Stop listening: all agents have connected."""
        self.close()
        return []

    def adjust(self, selector: selectors.BaseSelector, *, paused: bool) -> None:
        if self._paused_until_s is None and self._listener.fileno() >= 0:
            selector.register(self._listener, selectors.EVENT_READ, self.let_in)
        for visitor in self._visitors:
            selector.register(visitor.fd, selectors.EVENT_READ, partial(self._hear, visitor))

    def let_in(self, now_s: float) -> list[Event]:
        """Accept the connections that are waiting."""
        for _ in range(_AT_ONCE):
            try:
                connected, _ = self._listener.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return []  # the visitor has already disconnected
                self._paused_until_s = now_s + _PAUSE_S
                text = f"cannot let all agents in: {error.strerror}; raise 'ulimit -n'"
                is_new, self._has_complained = not self._has_complained, True
                return [Note(text)] if is_new else []
            connected.setblocking(False)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if len(self._visitors) >= MOST_VISITORS:
                # Visitors that have not proved the key make room for others.
                strangers = [one for one in self._visitors if not one.is_known]
                self._send_away((strangers or self._visitors)[0])
            self._visitors.append(_Visitor(connected, self._key, now_s))
        return []

    def _hear(self, visitor: _Visitor, now_s: float) -> list[Event]:
        """Handle what a visitor has sent."""
        try:
            if visitor not in self._visitors or (found := visitor.hear(now_s)) is None:
                return []  # the visitor was sent away meanwhile, or its greeting is incomplete
        except (LinkLost, OSError):
            self._send_away(visitor)
            return []
        self._visitors.remove(visitor)
        return self._admit(*found)

    def tick(self, now_s: float) -> tuple[list[Event], float | None]:
        """Send away visitors that take too long."""
        for visitor in [one for one in self._visitors if one.until_s <= now_s]:
            self._send_away(visitor)
        if self._paused_until_s is not None and self._paused_until_s <= now_s:
            self._paused_until_s = None
        due_s = [one.until_s for one in self._visitors]
        due_s += [] if self._paused_until_s is None else [self._paused_until_s]
        return [], min(due_s) - now_s if due_s else None

    def close(self) -> None:
        """Close the socket and all visitors. May be called again."""
        self._listener.close()
        for visitor in list(self._visitors):
            self._send_away(visitor)

    def _send_away(self, visitor: _Visitor) -> None:
        self._visitors.remove(visitor)
        visitor.close()


class _Visitor:
    """A connection that has not greeted yet."""

    def __init__(self, connected: socket.socket, key: str, now_s: float) -> None:
        self.until_s = now_s + VISIT_S
        self._socket = connected
        self._key = key
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._said = b""
        self._link: AgentLink | None = None
        try:
            connected.send(HELLO + self._nonce)  # fits into an empty buffer
        except OSError:
            self.until_s = now_s

    @property
    def is_known(self) -> bool:
        """Whether the visitor has proved that it knows the key."""
        return self._link is not None

    @property
    def fd(self) -> int:
        return self._socket.fileno() if self._link is None else self._link.read_fd

    def hear(self, now_s: float) -> tuple[AgentLink, Mapping[str, Any]] | None:
        """Return the link and the greeting, or None until it has arrived.

        Raises LinkLost or OSError.
        """
        if self._link is None:
            self._hear_proof()
            return None
        if not (messages := self._link.receive(now_s)):
            return None
        if messages[0][0] != GREET or len(messages) > 1:  # an agent then waits for START
            raise LinkLost("it does not greet")
        return self._link, messages[0][1]

    def close(self) -> None:
        (self._link or self._socket).close()

    def _hear_proof(self) -> None:
        wanted = NONCE_BYTES + PROOF_BYTES
        data = self._socket.recv(wanted - len(self._said))
        if not data:
            raise LinkLost("the connection was closed")
        self._said += data
        if len(self._said) < wanted:
            return
        handshake = Handshake(self._key, self._nonce, self._said[:NONCE_BYTES])
        if not hmac.compare_digest(self._said[NONCE_BYTES:], handshake.agent_proof()):
            raise LinkLost("it does not know the job's key")
        self._socket.send(handshake.launcher_proof())
        seals = handshake.seal_to_launcher(), handshake.seal_to_agent()
        write_fd = os.dup(self._socket.fileno())  # may fail; nothing has changed then
        self._link = AgentLink(self._socket.detach(), write_fd, time.monotonic(), seals=seals)
