"""A place that an agent serves, as the launcher has it: the launcher's end of the agent's link.

How an agent comes to be is another matter: ``launch/backends/ssh.py`` has one started by a command
of its own, ``command.py`` those that mpirun and the like start. Runs on the main thread. The other
end is ``agent.py``.
"""

from __future__ import annotations

import errno
import selectors
from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.launch.agents.agent import Start
from kvstore.launch.agents.wire import (
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
    AgentLink,
    LinkLost,
    Message,
    fields,
)
from kvstore.launch.job.places import CannotStart, Ended, Event, Finished, Note, Output, Started
from kvstore.launch.plan import ProcessSpec

_LOST_STATUS = 255


class AgentPlace:
    """What one agent serves. ``label`` is the host's name in prefixes.

    ``greeting`` is what the agent has told of its machine, None before :meth:`greet`;
    ``failure`` says why there will be none. An agent that ``is_replaceable`` may be lost before
    the job begins: another is then awaited.
    """

    def __init__(self, label: str, *, is_replaceable: bool = False) -> None:
        self.label: str | None = label
        self.is_replaceable = is_replaceable
        self._name = label
        self.greeting: Mapping[str, Any] | None = None
        self.failure: str | None = None
        self._link: AgentLink | None = None
        self._selector: selectors.BaseSelector | None = None
        self._variables: Mapping[str, str] = {}
        self._job_id = ""
        self._key = ""
        self._running: set[int] = set()
        self._started: set[int] = set()
        self._has_begun = False
        self._owed = 0
        self._is_over = False

    @property
    def is_connected(self) -> bool:
        return self.greeting is not None

    def awaited(self) -> list[str]:
        """Return who has not come yet, for people."""
        return [] if self.is_connected else [str(self.label)]

    def greet(self, link: AgentLink, greeting: Mapping[str, Any]) -> None:
        """The agent is there, and speaks over ``link``, which this place owns from now on."""
        self._link = link
        self.greeting = greeting

    def prepare(self, job_id: str, key: str, variables: Mapping[str, str]) -> None:
        """What :meth:`start` hands over: the job, the text of its key, all processes' variables.

        ``key`` is "" where the agent has it already.
        """
        self._job_id, self._key, self._variables = job_id, key, variables

    def start(
        self, specs: Sequence[tuple[int, ProcessSpec]], variables: Mapping[str, str]
    ) -> list[Event]:
        """The agent answers later; ``variables`` are those of the launcher's machine, not used."""
        if self._is_over or self._link is None:
            lost = {index: _LOST_STATUS for index, _ in specs}
            return [Ended(lost, f"{self.label} was lost before it began")] if lost else []
        self._running = {index for index, _ in specs}
        self._has_begun = True
        start = Start(self._job_id, specs, self._variables, self._key)
        self._link.send(START, start.packed())
        return []

    def send_signal(self, number: int) -> None:
        self._send(SIGNAL, int(number))

    def adjust(self, selector: selectors.BaseSelector, *, paused: bool) -> None:
        if not paused and self._owed:
            self._send(CREDIT, self._owed)
            self._owed = 0
        if self._link is None:
            return
        self._selector = selector
        watched = selector.get_map()
        read_fd, write_fd = self._link.read_fd, self._link.write_fd
        for fd, kind, is_wanted in (
            (read_fd, selectors.EVENT_READ, True),
            (write_fd, selectors.EVENT_WRITE, self._link.waiting),
        ):
            is_wanted = is_wanted and not self._is_over
            if is_wanted and fd not in watched:
                selector.register(fd, kind, Ready(self, fd, selector))
            elif not is_wanted and fd in watched:
                selector.unregister(fd)

    def handle(self, fd: int, now_s: float, selector: selectors.BaseSelector) -> list[Event]:
        """A descriptor of this place is ready."""
        if self._is_over or self._link is None:
            return []
        if fd == self._link.write_fd:
            self._link.write_pending()
            return []
        try:
            return self._receive(self._link, now_s)
        except LinkLost as error:
            return self._lose(str(error), selector)

    def sweep(self) -> list[Event]:
        return []

    def tick(self, now_s: float) -> tuple[list[Event], float | None]:
        if self._is_over or self._link is None or self.greeting is None:
            return [], None
        try:
            return [], self._link.tick(now_s)
        except LinkLost as error:
            return self._lose(str(error), None), None

    def finish(self, leftover_s: float) -> list[Event]:
        if self._is_over or self._link is None:
            return [Finished(0)]
        self._send(FINISH, float(leftover_s))
        return []

    def hang_up(self) -> None:
        """Closing the link makes the agent kill what it has."""
        self._is_over = True
        if self._link is not None:
            self._link.close()

    def close(self) -> None:
        """Nothing is left to release once the link is closed."""

    def leave(self, how: str) -> list[Event]:
        """Its agent is gone, in the way of ``how``, before the job has begun: await another."""
        if self._link is not None:
            self._unregister(self._selector, self._link)
            self._link.close()
        gone, self.label = self.label, self._name
        self._link = self.greeting = None
        return [Note(f"{gone}: the agent of {self._name} {how}")]

    def _unregister(self, selector: selectors.BaseSelector | None, link: AgentLink) -> None:
        for fd in (link.read_fd, link.write_fd):
            if selector is not None and fd in selector.get_map():
                selector.unregister(fd)

    def _send(self, *message: Any) -> None:
        if not self._is_over and self._link is not None:
            self._link.send(*message)

    def _receive(self, link: AgentLink, now_s: float) -> list[Event]:
        """``link`` is readable. Raises LinkLost."""
        return [event for message in link.receive(now_s) for event in self._heard(message)]

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
        raise LinkLost(f"cannot understand a message '{kind}'")

    def _known(self, index: Any) -> int:
        if not isinstance(index, int) or index < 0:
            raise LinkLost("a message names an unknown process")
        return index

    def _lose(self, how: str, selector: selectors.BaseSelector | None) -> list[Event]:
        """The link is gone, and with it all that ran there."""
        if self.is_replaceable and not self._has_begun:
            return self.leave(f"was lost before the job began ({how}): waiting for another")
        self._is_over = True
        if self._link is not None:
            self._unregister(selector, self._link)
        why = f"{self.label} was lost: {how}{self._last_words()}"
        if not self._has_begun:
            self.failure = why
            return [Finished(0)]  # the failure says it
        lost, self._running = self._running, set()
        events: list[Event] = [Note(why)]
        if lost:
            events.append(Ended(dict.fromkeys(lost, _LOST_STATUS), why))
        return [*events, Finished(0)]

    def _last_words(self) -> str:
        """Return what else is known about a loss, with a space in front."""
        return ""


class Ready:
    """A descriptor of a place, as a source."""

    def __init__(self, place: AgentPlace, fd: int, selector: selectors.BaseSelector) -> None:
        self._place = place
        self._fd = fd
        self._selector = selector

    def handle(self, now_s: float) -> list[Event]:
        return self._place.handle(self._fd, now_s, self._selector)
