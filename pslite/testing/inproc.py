"""``InprocVan``: a van without sockets, for nodes of one process.

It keeps the whole contract of ``van/base.py``: code that works here works over TCP. Each hub
(:class:`InprocNetwork`) is a separate network, and there may be several. Vans may have a
thread each (``poll`` blocks) or share one (the simulator calls ``poll(0)``, which never waits,
for the vans that ``on_ready`` names; then the calls alone determine the order of all events).
It has no clock and no thread; each van belongs to its owner's thread. Read next:
``van/faulty.py``.

**Frames are kept by reference when sent and copied when polled.** A real network reads a small
frame earlier and a large one at about that time. So if a sender reuses a buffer too early, its
tests see corrupted data.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pslite.errors import ClosedError, ConfigError, UsageError
from pslite.van.base import (
    Buffer,
    Connected,
    Disconnected,
    Received,
    Van,
    VanEvent,
    as_buffers,
    check_uid,
)
from pslite.van.zmq.addresses import check_bind_address, parse_address

FIRST_FREE_PORT = 20000
EVERY_INTERFACE = ("0.0.0.0", "::")

_Frames: TypeAlias = list["bytes | memoryview"]
_Address: TypeAlias = tuple[str, int]


@dataclass(slots=True, eq=False)
class _End:
    """One side of a connection; messages go to the inbox of ``far.van``.

    ``closed`` means that this side's owner neither sends nor receives on the connection.
    """

    van: InprocVan
    peer: str
    link: _Link | None
    far: _End = field(init=False)
    closed: bool = False


@dataclass(slots=True, eq=False)
class _Link:
    """A peer of ``connect``: its connection, or the messages that wait for one."""

    van: InprocVan
    peer: str
    address: _Address
    end: _End | None = None
    backlog: list[_Frames] = field(default_factory=list)


_Item: TypeAlias = "tuple[_End, _Frames | str | None]"
"""A side and its news: a message, the reason why it ended, or ``None`` if it has begun."""


class InprocNetwork:
    """The hub of the vans: listeners, and connections that wait for one.

    When the inbox of ``van`` becomes non-empty, ``on_ready(van)`` is called without a lock, on the
    thread that filled it. The other methods are for vans, with :attr:`lock` held; they add the vans
    whose inbox they filled to the list ``filled``.
    """

    def __init__(self, on_ready: Callable[[InprocVan], None] | None = None) -> None:
        self.on_ready = on_ready
        # Reentrant, because a finalizer of a frame wakes a van on whatever thread it runs.
        self.lock = threading.RLock()
        """Guards this object, and each van's inbox and connections."""
        self._listeners: dict[_Address, InprocVan] = {}
        self._waiting: list[_Link] = []
        self._next_port = FIRST_FREE_PORT

    def listen(self, van: InprocVan, host: str, port: int, filled: list[InprocVan]) -> int:
        """Register ``van``, and connect vans that wait for its address; return the port."""
        if port == 0:
            while (host, self._next_port) in self._listeners:
                self._next_port += 1
            port = self._next_port
            self._next_port += 1
        if (host, port) in self._listeners:
            raise ConfigError(
                f"cannot listen on {host}:{port}: the port is in use; choose another, or close "
                "the van that uses it"
            )
        self._listeners[host, port] = van
        waiting, self._waiting = self._waiting, []
        for link in waiting:
            self.join(link, filled)
        return port

    def join(self, link: _Link, filled: list[InprocVan]) -> None:
        """Connect ``link`` to the listener at its address, or let it wait for one."""
        host, port = link.address
        for candidate in (host, *EVERY_INTERFACE):
            listener = self._listeners.get((candidate, port))
            if listener is not None:
                _connect(link, listener, filled)
                return
        self._waiting.append(link)

    def give_up(self, link: _Link) -> None:
        """Stop ``link`` from waiting for a listener."""
        if link in self._waiting:
            self._waiting.remove(link)

    def forget(self, van: InprocVan) -> None:
        """Stop ``van`` from listening."""
        self._listeners = {at: other for at, other in self._listeners.items() if other is not van}

    def tell(self, filled: list[InprocVan]) -> None:
        """Call ``on_ready`` for ``filled``; call this without the lock."""
        if self.on_ready is not None:
            for van in filled:
                self.on_ready(van)


class InprocVan(Van):
    """A :class:`Van` of one :class:`InprocNetwork`."""

    def __init__(self, network: InprocNetwork, uid: str) -> None:
        self.uid = check_uid(uid)
        self._network = network
        self._lock = network.lock
        self._arrived = threading.Condition(network.lock)
        self._inbox: list[_Item] = []
        self._is_waiting = False
        self._woken = False
        self._bound = False
        self._closed = False
        self._links: dict[str, _Link] = {}
        self._accepted: dict[str, _End] = {}
        self._ends: dict[_End, None] = {}  # the sides whose far side is open, oldest first

    def bind(self, host: str, port: int, *, listen_fd: int | None = None) -> int:
        check_bind_address(host, port)
        if listen_fd is not None:
            raise UsageError("a van without sockets cannot take over a listening descriptor")
        filled: list[InprocVan] = []
        with self._lock:
            self._check_open("bind")
            if self._bound:
                raise UsageError(
                    f"this van is already listening, so it cannot bind {host}:{port}; "
                    "use a separate van for each address"
                )
            port = self._network.listen(self, host, port, filled)
            self._bound = True
        self._network.tell(filled)
        return port

    def connect(self, peer: str, address: str) -> None:
        link = _Link(self, check_uid(peer), parse_address(address))
        self.disconnect(peer)
        filled: list[InprocVan] = []
        with self._lock:
            self._check_open("connect")
            self._links[peer] = link
            self._network.join(link, filled)
        self._network.tell(filled)

    def disconnect(self, peer: str) -> None:
        filled: list[InprocVan] = []
        with self._lock:
            link = self._links.pop(peer, None)
            if link is not None:
                self._network.give_up(link)
                if link.end is not None:
                    _close_end(link.end, filled)
            elif peer in self._accepted:
                self._accepted.pop(peer).closed = True
        self._network.tell(filled)

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        buffers = as_buffers(frames)
        with self._lock:
            link = self._links.get(peer)
            if link is None:
                end = self._accepted.get(peer)
            else:
                end = link.end
                if end is None:
                    link.backlog.append(buffers)
            if end is None or end.far.closed:
                return
            receiver = end.far.van
            was_empty = not receiver._inbox
            receiver._inbox.append((end.far, buffers))
            if receiver._is_waiting:
                receiver._arrived.notify()
        if was_empty and self._network.on_ready is not None:
            self._network.on_ready(receiver)

    def poll(self, timeout_s: float | None) -> list[VanEvent]:
        if not self._inbox and timeout_s != 0:
            self._wait(timeout_s)
        self._woken = False
        if not self._inbox:
            return []
        with self._lock:
            inbox, self._inbox = self._inbox, []
        events: list[VanEvent] = []
        for end, what in inbox:
            if isinstance(what, list):
                if not end.closed:
                    events.append(Received(end.peer, [_delivered(frame) for frame in what]))
            elif what is None:
                self._begin(end, events)
            else:
                self._lose(end, what, events)
        return events

    def wake(self) -> None:
        with self._lock:
            self._woken = True
            self._arrived.notify()

    def close(self) -> None:
        filled: list[InprocVan] = []
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._network.forget(self)
            for link in self._links.values():
                self._network.give_up(link)
            for end in list(self._ends):
                _close_end(end, filled)
            self._links.clear()
            self._accepted.clear()
            self._inbox.clear()
            self._arrived.notify()
        self._network.tell(filled)

    def _wait(self, timeout_s: float | None) -> None:
        with self._lock:
            self._is_waiting = True
            self._arrived.wait_for(
                lambda: self._inbox or self._woken or self._closed, timeout=timeout_s
            )
            self._is_waiting = False

    def _begin(self, end: _End, events: list[VanEvent]) -> None:
        """Begin a connection; an accepted one replaces an older one of the same uid."""
        if end.closed:
            return
        if end.link is None:
            with self._lock:
                older = self._accepted.get(end.peer)
                self._accepted[end.peer] = end
                if older is not None:
                    older.closed = True
                    reason = "the same node opened a newer connection"
                    events.append(Disconnected(end.peer, reason))
        events.append(Connected(end.peer))

    def _lose(self, end: _End, reason: str, events: list[VanEvent]) -> None:
        """End a connection; if it was made by ``connect``, reopen it when possible."""
        filled: list[InprocVan] = []
        with self._lock:
            self._ends.pop(end, None)
            if end.closed:
                return
            end.closed = True
            events.append(Disconnected(end.peer, reason))
            if end.link is None:
                del self._accepted[end.peer]
            else:
                end.link.end = None
                self._network.join(end.link, filled)
        self._network.tell(filled)

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise ClosedError(f"cannot {what}: this van is closed; create another one")


def _delivered(frame: bytes | memoryview) -> bytes | memoryview:
    """Return the receiver's own copy of a frame; the frame is read only now."""
    return frame if type(frame) is bytes else memoryview(bytearray(frame))


def _connect(link: _Link, listener: InprocVan, filled: list[InprocVan]) -> None:
    """Make the two ends of a connection, and send the messages that waited for it."""
    near, far = _End(link.van, link.peer, link), _End(listener, link.van.uid, None)
    near.far, far.far = far, near
    link.end = near
    link.van._ends[near] = None
    listener._ends[far] = None
    _put(near, None, filled)
    _put(far, None, filled)
    for buffers in link.backlog:
        _put(far, buffers, filled)
    link.backlog = []


def _close_end(end: _End, filled: list[InprocVan]) -> None:
    """Close this side for good and tell the other."""
    end.closed = True
    end.van._ends.pop(end, None)
    if end.far.closed:
        end.far.van._ends.pop(end.far, None)
    else:
        _put(end.far, "the connection is gone", filled)


def _put(end: _End, what: _Frames | str | None, filled: list[InprocVan]) -> None:
    van = end.van
    if not van._inbox:
        filled.append(van)
    van._inbox.append((end, what))
    if van._is_waiting:
        van._arrived.notify()
