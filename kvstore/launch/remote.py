"""A place on another machine, as the launcher has it: an agent and the command that reaches it.

The command (``ssh``) is a child of the launcher; its standard input and output are the link,
its standard error says why it could not reach the machine. Runs on the main thread. The other
end is ``agent.py``.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore.launch.agent import GREETING, Start
from kvstore.launch.frames import (
    CREDIT,
    EXITS,
    FINISH,
    FINISHED,
    LINES,
    NOTE,
    PID,
    REFUSED,
    SIGNAL,
    START,
    Message,
)
from kvstore.launch.guardian_process import GuardianProcess
from kvstore.launch.lines import LineSplitter
from kvstore.launch.link import Link, LinkLost, fields
from kvstore.launch.places import CannotStart, Ended, Event, Finished, Note, Output, Started
from kvstore.launch.plan import ProcessSpec

_READ_BYTES = 64 * 1024
_LONGEST_GREETING = 1 << 20  # with all that a login shell may print before
_KEPT_LINES = 20
_LOST_STATUS = 255
_REAP_S = 2.0


class RemotePlace:
    """One machine. ``refusal`` puts into a sentence what the command said and its exit code.

    ``greeting`` is what the agent has told of its machine, None before; ``failure`` says why
    there will be none.
    """

    def __init__(
        self,
        label: str,
        command: Sequence[str],
        bootstrap: bytes,
        guardian: GuardianProcess,
        refusal: Callable[[Sequence[str], int | None], str],
        now_s: float,
    ) -> None:
        self.label: str | None = label
        self.greeting: Mapping[str, Any] | None = None
        self.failure: str | None = None
        self._variables: Mapping[str, str] = {}
        self._job_id = ""
        self._key = ""
        self._refusal = refusal
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
        self._running: set[int] = set()
        self._started: set[int] = set()
        self._has_begun = False
        self._hung_up_s = 0.0
        self._owed = 0
        self._is_over = False

    def prepare(self, job_id: str, key: str, variables: Mapping[str, str]) -> None:
        """What :meth:`start` hands over: the job, the text of its key, all processes' variables."""
        self._job_id, self._key, self._variables = job_id, key, variables

    def start(
        self, specs: Sequence[tuple[int, ProcessSpec]], variables: Mapping[str, str]
    ) -> list[Event]:
        """The agent answers later; ``variables`` are those of the launcher's machine, not used."""
        if self._is_over:
            lost = {index: _LOST_STATUS for index, _ in specs}
            return [Ended(lost, f"{self.label} was lost before it began")] if lost else []
        self._running = {index for index, _ in specs}
        self._has_begun = True
        start = Start(self._job_id, specs, self._variables, self._key)
        self._link.send(START, start.packed())
        return []

    def send_signal(self, number: int) -> None:
        if not self._is_over:
            self._link.send(SIGNAL, int(number))

    def adjust(self, selector: selectors.BaseSelector, *, paused: bool) -> None:
        if not paused and self._owed and not self._is_over:
            self._link.send(CREDIT, self._owed)
            self._owed = 0
        watched = selector.get_map()
        wanted = {
            self._link.read_fd: not self._is_over,
            self._link.write_fd: not self._is_over and self._link.waiting,
            self._error_fd(): self._error_fd() >= 0,
        }
        for fd, is_wanted in wanted.items():
            if fd < 0:
                continue
            if is_wanted and fd not in watched:
                kind = selectors.EVENT_WRITE if fd == self._link.write_fd else selectors.EVENT_READ
                selector.register(fd, kind, _Ready(self, fd, selector))
            elif not is_wanted and fd in watched:
                selector.unregister(fd)

    def handle(self, fd: int, now_s: float, selector: selectors.BaseSelector) -> list[Event]:
        """A descriptor of this place is ready."""
        if fd == self._error_fd():
            return self._read_errors(now_s, selector)
        if self._is_over:
            return []
        if fd == self._link.write_fd:
            self._link.write_pending()
            return []
        try:
            if self.greeting is None and not self._read_greeting():
                return []
            return [
                event for message in self._link.receive(now_s) for event in self._heard(message)
            ]
        except LinkLost as error:
            return self._lose(str(error), selector)

    def sweep(self) -> list[Event]:
        return []

    def tick(self, now_s: float) -> tuple[list[Event], float | None]:
        if self._is_over or self.greeting is None:
            return [], None
        try:
            return [], self._link.tick(now_s)
        except LinkLost as error:
            return self._lose(str(error), None), None

    def finish(self, leftover_s: float) -> list[Event]:
        if self._is_over:
            return [Finished(0)]
        self._link.send(FINISH, float(leftover_s))
        return []

    def hang_up(self) -> None:
        """Closing the link makes the agent kill what it has; its command is given a moment."""
        self._is_over = True
        self._hung_up_s = time.monotonic()
        self._link.close()

    def close(self) -> None:
        """End the command, and whatever it has started (a jump host's ssh)."""
        try:
            self._process.wait(max(0.0, self._hung_up_s + _REAP_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()

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

    def _read_greeting(self) -> bool:
        """Skip what a login shell prints; whether the agent has greeted. Raises LinkLost."""
        self._head += self._link.receive_raw()
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
            self.failure = str(found["error"])
            raise LinkLost(self.failure)
        self.greeting = found
        self._link.put_back(self._head[end + 1 :])
        self._head = b""
        return bool(self._link.has_received)

    def _heard(self, message: Message) -> list[Event]:
        kind = message[0]
        if kind == LINES:
            index, is_error, lines = fields(message, int, bool, list)
            self._owed += sum(map(len, lines)) + len(lines)
            return [Output(self._known(index), is_error, lines)]
        if kind == PID:
            index, pid = fields(message, int, int)
            self._started.add(index)
            return [Started(self._known(index), pid)]
        if kind == EXITS:
            (statuses,) = fields(message, dict)
            ended = {self._known(index): int(status) for index, status in statuses.items()}
            self._running -= set(ended)
            return [Ended(ended)]
        if kind == REFUSED:
            index, number, text = fields(message, int, int, str)
            self._running &= self._started
            return [CannotStart(self._known(index), OSError(number or errno.EIO, text))]
        if kind == FINISHED:
            (count,) = fields(message, int)
            self._is_over = True
            return [Finished(count)]
        if kind == NOTE:
            return [Note(f"{self.label}: {fields(message, str)[0]}")]
        raise LinkLost(f"a message '{kind}' cannot be understood")

    def _known(self, index: Any) -> int:
        if not isinstance(index, int) or index < 0:
            raise LinkLost("a message speaks of no process")
        return index

    def _lose(self, how: str, selector: selectors.BaseSelector | None) -> list[Event]:
        """The link is gone, and with it all that ran there."""
        self._is_over = True
        if selector is not None:
            for fd in (self._link.read_fd, self._link.write_fd):
                if fd in selector.get_map():
                    selector.unregister(fd)
        if self.greeting is None:
            if self.failure is None:
                code = self._exit_code()  # and reads the last complaints
                self.failure = self._refusal(list(self._complaints), code)
            return []
        if not self._has_begun:
            self.failure = f"{self.label} was lost: {how}"
        lost, self._running = self._running, set()
        last = f" ({self._complaints[-1]})" if self._complaints else ""
        why = f"{self.label} was lost: {how}{last}"
        events: list[Event] = [Note(why)]
        if lost:
            events.append(Ended(dict.fromkeys(lost, _LOST_STATUS), why))
        return [*events, Finished(0)]

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


class _Ready:
    """A descriptor of a place, as a source."""

    def __init__(self, place: RemotePlace, fd: int, selector: selectors.BaseSelector) -> None:
        self._place = place
        self._fd = fd
        self._selector = selector

    def handle(self, now_s: float) -> list[Event]:
        return self._place.handle(self._fd, now_s, self._selector)
