"""A place that an agent serves, as the launcher has it: the launcher's end of the agent's link.

How an agent comes to be is another matter: ``launch/backends/ssh.py`` has one started by a command
of its own, ``command.py`` those that mpirun and the like start. Runs on the main thread. The other
end is ``agent.py``.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvstore.launch.agents.agent import Start, cost
from kvstore.launch.agents.wire import (
    CREDIT,
    FINISH,
    SIGNAL,
    START,
    AgentLink,
    LinkLost,
    Message,
    event_of,
)
from kvstore.launch.environment import checkout_root
from kvstore.launch.job.places import (
    CannotStart,
    Ended,
    Event,
    Finished,
    Note,
    Output,
    Place,
    Started,
    unwatch,
)
from kvstore.launch.plan import ProcessSpec

_LOST_STATUS = 255


class AgentPlace(Place):
    """What one agent serves. ``label`` is the host's name in prefixes.

    ``greeting`` is what the agent has told of its machine, None before :meth:`greet`;
    ``failure`` says why there will be none. An agent that ``is_replaceable`` may be lost before
    the job begins: another is then awaited.
    """

    def __init__(self, label: str, *, is_replaceable: bool = False) -> None:
        self.label = label
        self.is_replaceable = is_replaceable
        self._name = label
        self.greeting: Mapping[str, Any] | None = None
        self.failure: str | None = None
        self._link: AgentLink | None = None
        self._selector: selectors.BaseSelector | None = None
        self._prepared = Start("", (), {}, "")
        self._more: Mapping[str, str] = {}
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

    def prepare(
        self, job_id: str, key: str, variables: Mapping[str, str], more: Mapping[str, str]
    ) -> None:
        """What :meth:`start` hands over: the job, the text of its key, all processes' variables.

        ``key`` is "" where the agent has it already. ``more`` is added to the variables of each
        process that the user has not set.
        """
        self._prepared = Start(job_id, (), variables, key)
        self._more = more

    def start(
        self, specs: Sequence[tuple[int, ProcessSpec]], variables: Mapping[str, str]
    ) -> list[Event]:
        """The agent answers later; ``variables`` are those of the launcher's machine, not used."""
        if self._is_over or self._link is None:
            lost = {index: _LOST_STATUS for index, _ in specs}
            return [Ended(lost, f"{self.label} was lost before it began")] if lost else []
        self._running = {index for index, _ in specs}
        self._has_begun = True
        processes = [(index, _for_elsewhere(spec, self._more)) for index, spec in specs]
        self._link.send(START, replace(self._prepared, processes=processes).packed())
        return []

    def send_signal(self, number: int) -> None:
        self._send(SIGNAL, int(number))

    def adjust(self, selector: selectors.BaseSelector, *, paused: bool) -> None:
        if not paused and self._owed:
            self._send(CREDIT, self._owed)
            self._owed = 0
        self._selector = selector
        if self._link is not None and not self._is_over:
            self._link.adjust(selector, self._read)

    def tick(self, now_s: float) -> tuple[list[Event], float | None]:
        if self._is_over or self._link is None or self.greeting is None:
            return [], None
        try:
            return [], self._link.tick(now_s)
        except LinkLost as error:
            return self._lose(str(error)), None

    def finish(self, leftover_s: float) -> list[Event]:
        if self._is_over or self._link is None:
            return [Finished(0)]
        self._send(FINISH, leftover_s)
        return []

    def hang_up(self) -> None:
        """Closing the link makes the agent kill what it has."""
        self._is_over = True
        if self._link is not None:
            self._link.close()

    def leave(self, how: str) -> list[Event]:
        """Its agent is gone, in the way of ``how``, before the job has begun: await another."""
        self._unregister()
        if self._link is not None:
            self._link.close()
        gone, self.label = self.label, self._name
        self._link = self.greeting = None
        return [Note(f"{gone}: the agent of {self._name} {how}")]

    def _unregister(self) -> None:
        if self._link is not None:
            unwatch(self._selector, self._link.read_fd, self._link.write_fd)

    def _send(self, *message: Any) -> None:
        if not self._is_over and self._link is not None:
            self._link.send(*message)

    def _read(self, now_s: float) -> list[Event]:
        if self._link is None or self._is_over:
            return []
        try:
            return [one for message in self._link.receive(now_s) for one in self._heard(message)]
        except LinkLost as error:
            return self._lose(str(error))

    def _heard(self, message: Message) -> list[Event]:
        """Raises LinkLost."""
        event = event_of(message)
        if isinstance(event, Output):
            self._owed += cost(event)
        elif isinstance(event, Started):
            self._started.add(event.index)
        elif isinstance(event, Ended):
            self._running -= set(event.statuses)
        elif isinstance(event, CannotStart):
            self._running &= self._started
        elif isinstance(event, Note):
            return [Note(f"{self.label}: {event.text}")]
        else:
            self._is_over = True
            self._unregister()
        return [event]

    def _lose(self, how: str) -> list[Event]:
        """The link is gone, and with it all that ran there."""
        if self.is_replaceable and not self._has_begun:
            return self.leave(f"was lost before the job began ({how}): waiting for another")
        self._is_over = True
        self._unregister()
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


def _for_elsewhere(spec: ProcessSpec, more: Mapping[str, str]) -> ProcessSpec:
    """Without what names a file of this machine; the agent adds its own."""
    environment = {**more, **spec.environment}
    environment.pop("PS_JOB_KEY_FILE", None)
    path = environment.pop("PYTHONPATH", "").split(os.pathsep)
    if given := os.pathsep.join(one for one in path if one and one != checkout_root()):
        environment["PYTHONPATH"] = given
    return replace(spec, environment=environment)
