"""A slow network on this machine's loopback: a proxy that passes on so many bytes a second.

Connect to ``link.port`` instead of the listener's own port. Its own buffers are small, so that a
sender sees the link's speed and not the size of a buffer.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time

HOST = "127.0.0.1"
BUFFER_BYTES = 16 << 10
TICK_S = 0.005


class SlowLink:
    """All connections to ``target`` share ``bytes_per_s`` in each direction.

    Args:
        cut_after: how many bytes of each connection pass before both ends are reset; 0: no limit.
    """

    def __init__(self, target: int, bytes_per_s: float, *, cut_after: int = 0) -> None:
        self.bytes_per_s = bytes_per_s
        self.cut_after = cut_after
        self.connections = 0
        self.passed_bytes = 0
        #: While it is set nothing passes, as behind a cable that was pulled.
        self.is_broken = False
        #: While it is set nothing passes from the target: all of it is lost.
        self.is_mute = False
        self._target = target
        self._listening = socket.create_server((HOST, 0))
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        #: Each end, and where its bytes go.
        self._far: dict[socket.socket, socket.socket] = {}
        self._counts: dict[socket.socket, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slow-link")
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        allowed = {True: 0.0, False: 0.0}  # to the target, and from it
        last = time.monotonic()
        while not self._ended.wait(TICK_S):
            now = time.monotonic()
            for direction in allowed:
                # What was not used is lost, but for one tick of a busy machine.
                gained = allowed[direction] + (now - last) * self.bytes_per_s
                allowed[direction] = min(gained, 0.1 * self.bytes_per_s + 1)
            last = now
            self._accept()
            if not self.is_broken:
                self._pass_on(allowed)
        for end in [*self._far, self._listening]:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except BlockingIOError:
                return
            far = socket.socket()
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            try:
                far.connect((HOST, self._target))
            except OSError:
                near.close()
                continue
            self.connections += 1
            self._counts[near] = self._counts[far] = 0
            for end in (near, far):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
                end.setblocking(False)
            self._far[near], self._far[far] = far, near

    def _pass_on(self, allowed: dict[bool, float]) -> None:
        with selectors.DefaultSelector() as selector:
            for end in self._far:
                selector.register(end, selectors.EVENT_READ)
            ready = [key.fileobj for key, _ in selector.select(0)] if self._far else []
        # Each time another one is first.
        turn = int(time.monotonic() / TICK_S) % (len(ready) or 1)
        for end in ready[turn:] + ready[:turn]:
            assert isinstance(end, socket.socket)
            if end in self._far and not (self.is_mute and self._is_from_target(end)):
                self._move(end, allowed)

    def _is_from_target(self, end: socket.socket) -> bool:
        return bool(end.getsockname()[1] != self.port)

    def _move(self, end: socket.socket, allowed: dict[bool, float]) -> None:
        far = self._far[end]
        direction = not self._is_from_target(end)
        # As much at once as a fast link brings in one tick; of a slow one all get their turn.
        nbytes = min(int(allowed[direction]), max(4096, int(TICK_S * self.bytes_per_s)))
        if nbytes < 1:
            return
        try:
            chunk = end.recv(nbytes, socket.MSG_PEEK)
            sent = far.send(chunk) if chunk else 0
            if chunk:
                end.recv(sent)
        except BlockingIOError:
            return
        except OSError:
            chunk, sent = b"", 0
        allowed[direction] -= sent
        self.passed_bytes += sent
        self._counts[end] += sent
        is_cut = self.cut_after and self._counts[end] >= self.cut_after
        if not chunk or is_cut:
            for each in (end, far):
                del self._far[each], self._counts[each]
                each.close()
