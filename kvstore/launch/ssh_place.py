"""A place on another machine that a command of its own reaches: an agent behind ``ssh``.

The command is a child of the launcher; its standard input and output are the agent's link, its
standard error says why it could not reach the machine. Runs on the main thread. Read
``remote.py`` first.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvstore.launch.agent import GREETING
from kvstore.launch.guardian_process import GuardianProcess
from kvstore.launch.lines import LineSplitter
from kvstore.launch.link import Link, LinkLost
from kvstore.launch.places import Event, Note
from kvstore.launch.remote import AgentPlace, Ready

_READ_BYTES = 64 * 1024
_LONGEST_GREETING = 1 << 20  # with all that a login shell may print before
_KEPT_LINES = 20
_REAP_S = 2.0


class SshPlace(AgentPlace):
    """One machine. ``refusal`` puts into a sentence what the command said and its exit code."""

    def __init__(
        self,
        label: str,
        command: Sequence[str],
        bootstrap: bytes,
        guardian: GuardianProcess,
        refusal: Callable[[Sequence[str], int | None], str],
        now_s: float,
    ) -> None:
        super().__init__(label)
        self._refusal = refusal
        self._refused: str | None = None  # by the program that would have become the agent
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        guardian.watch(self._process.pid)
        assert self._process.stdin and self._process.stdout and self._process.stderr
        os.set_blocking(self._process.stderr.fileno(), False)
        self._link = Link(
            os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno()), now_s
        )
        self._process.stdin.close()
        self._process.stdout.close()
        self._link.send_raw(bootstrap)
        self._head = b""
        self._complaints: deque[str] = deque(maxlen=_KEPT_LINES)
        self._splitter = LineSplitter()
        self._hung_up_s = 0.0

    def adjust(self, selector: selectors.BaseSelector, *, paused: bool) -> None:
        super().adjust(selector, paused=paused)
        fd = self._error_fd()
        if fd >= 0 and fd not in selector.get_map():
            selector.register(fd, selectors.EVENT_READ, Ready(self, fd, selector))

    def handle(self, fd: int, now_s: float, selector: selectors.BaseSelector) -> list[Event]:
        if fd == self._error_fd():
            return self._read_errors(now_s, selector)
        return super().handle(fd, now_s, selector)

    def hang_up(self) -> None:
        """Closing the link makes the agent kill what it has; its command is given a moment."""
        self._hung_up_s = time.monotonic()
        super().hang_up()

    def close(self) -> None:
        """End the command, and whatever it has started (a jump host's ssh)."""
        try:
            self._process.wait(max(0.0, self._hung_up_s + _REAP_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _receive(self, link: Link, now_s: float) -> list[Event]:
        if self.greeting is None and not self._read_greeting(link):
            return []
        return super()._receive(link, now_s)

    def _lose(self, how: str, selector: selectors.BaseSelector | None) -> list[Event]:
        events = super()._lose(how, selector)
        if self.greeting is not None:
            return events
        code = self._exit_code()  # and reads the last complaints
        self.failure = self._refused or self._refusal(list(self._complaints), code)
        return []  # the failure says it all

    def _last_words(self) -> str:
        return f" ({self._complaints[-1]})" if self._complaints else ""

    def _error_fd(self) -> int:
        stream = self._process.stderr
        return -1 if stream is None or stream.closed else stream.fileno()

    def _read_errors(self, now_s: float, selector: selectors.BaseSelector) -> list[Event]:
        fd = self._error_fd()
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return []
        lines = self._splitter.feed(data, now_s) if data else self._splitter.finish()
        texts = [line.decode(errors="replace") for line in lines]
        self._complaints.extend(texts)
        if not data:
            selector.unregister(fd)
            assert self._process.stderr is not None
            self._process.stderr.close()
        if self.greeting is None:
            return []  # the reason why there is no agent; ``failure`` will say it
        return [Note(f"{self.label}: {text}") for text in texts if text]

    def _read_greeting(self, link: Link) -> bool:
        """Skip what a login shell prints; whether the agent has more to say. Raises LinkLost."""
        self._head += link.receive_raw()
        start = self._head.find(GREETING)
        end = self._head.find(b"\n", start) if start >= 0 else -1
        if end < 0:
            if len(self._head) > _LONGEST_GREETING:
                raise LinkLost("the login shell prints without end")
            return False
        try:
            found = json.loads(self._head[start + len(GREETING) : end])
        except ValueError:
            raise LinkLost("the agent's greeting cannot be read") from None
        if not isinstance(found, dict):
            raise LinkLost("the agent's greeting cannot be read")
        if "error" in found:
            self._refused = f"{self.label}: {found['error']}"
            raise LinkLost(self._refused)
        self.greet(link, found)
        link.put_back(self._head[end + 1 :])
        self._head = b""
        return link.has_received

    def _exit_code(self) -> int | None:
        """Of the command, which has closed its output; it may need a moment."""
        try:
            code = self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            return None
        stream = self._process.stderr
        if stream is not None and not stream.closed:
            rest = b""
            try:
                rest = os.read(stream.fileno(), _READ_BYTES)
            except BlockingIOError:
                pass
            lines = [*self._splitter.feed(rest, 0.0), *self._splitter.finish()]
            self._complaints.extend(line.decode(errors="replace") for line in lines)
        return code
