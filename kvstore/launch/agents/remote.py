"""The launcher's end of the link to an agent.

Other modules start the agents: ``launch/backends/ssh.py`` starts each with its own command, and
``cluster_job.py`` lets mpirun, srun or qsub start them. Runs on the main thread. The other end is
``agent.py``.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Mapping
from typing import Any

from kvstore.launch.agents.agent import cost
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
    IndexedSpecs,
    Note,
    Output,
    Place,
    Started,
)
from kvstore.launch.plan import ProcessSpec

_LOST_STATUS = 255


class AgentPlace(Place):
    """The place that one agent serves.

    ``greeting`` is the agent's description of its machine, or None before :meth:`greet`.
    ``failure`` says why there will be no agent. If ``is_replaceable`` and the agent is lost before
    the job begins, the place waits for another agent. A place has a link only from the agent's
    connection until its loss or its end.
    """

    def __init__(self, label: str, is_replaceable: bool = False) -> None:
        self.label = label
        self.is_replaceable = is_replaceable
        self._name = label
        self.greeting: Mapping[str, Any] | None = None
        self._link: AgentLink | None = None
        self._prepared: Mapping[str, Any] = {}
        self._more: Mapping[str, str] = {}
        self._running: set[int] = set()
        self._started: set[int] = set()
        self._has_begun = False
        self._owed = 0

    @property
    def is_connected(self) -> bool:
        return self.greeting is not None

    @property
    def can_start_again(self) -> bool:  # type: ignore[override]
        return self._link is not None

    def awaited(self) -> list[str]:
        """Return the label if the agent has not connected yet, for messages."""
        return [] if self.is_connected else [str(self.label)]

    def greet(self, link: AgentLink, greeting: Mapping[str, Any]) -> None:
        """Take over the ``link`` of the agent that has connected."""
        self._link = link
        self.greeting = greeting

    def prepare(
        self, job_id: str, key: str, variables: Mapping[str, str], more: Mapping[str, str]
    ) -> None:
        """Store what :meth:`start` sends: the job, its key, and all processes' variables.

        ``key`` is "" if the agent has it already. ``more`` is added to the variables of each
        process, unless the user has set them.
        """
        self._prepared = {"job_id": job_id, "variables": dict(variables), "key": key}
        self._more = more

    def start(self, specs: IndexedSpecs, variables: Mapping[str, str]) -> list[Event]:
        """Tell the agent to start the processes; ``variables`` are not used."""
        if self._link is None:
            lost = {index: _LOST_STATUS for index, _ in specs}
            return [Ended(lost, f"{self.label} was lost before it began")] if lost else []
        self._running |= {index for index, _ in specs}
        self._has_begun = True
        processes = [
            [index, one.role, one.rank, list(one.argv), _for_elsewhere(one, self._more)]
            for index, one in specs
        ]
        self._link.send(START, {**self._prepared, "processes": processes})
        return []

    def start_again(self, index: int, spec: ProcessSpec) -> list[Event]:
        return self.start([(index, spec)], {})

    def send_signal(self, number: int) -> None:
        if self._link is not None:
            self._link.send(SIGNAL, int(number))

    def adjust(self, selector: selectors.BaseSelector, *, paused: bool) -> None:
        if self._link is None:
            return
        if not paused and self._owed:
            self._link.send(CREDIT, self._owed)
            self._owed = 0
        self._link.adjust(selector, self._read)

    def tick(self, now_s: float) -> tuple[list[Event], float | None]:
        if self._link is None or self.greeting is None:
            return [], None
        try:
            return [], self._link.tick(now_s)
        except LinkLost as error:
            return self._lose(str(error)), None

    def finish(self, leftover_s: float) -> list[Event]:
        if self._link is None:
            return [Finished(0)]
        self._link.send(FINISH, leftover_s)
        return []

    def hang_up(self) -> None:
        """Close the link, which makes the agent kill its processes."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def leave(self, how: str) -> list[Event]:
        """Handle the loss of an agent before the job began: wait for another."""
        self.hang_up()
        gone, self.label, self.greeting = self.label, self._name, None
        return [Note(f"{gone}: the agent of {self._name} {how}")]

    def _read(self, now_s: float) -> list[Event]:
        if self._link is None:
            return []
        try:
            return [one for message in self._link.receive(now_s) for one in self._heard(message)]
        except LinkLost as error:
            return self._lose(str(error))

    def _heard(self, message: Message) -> list[Event]:
        """Return the events of one message from the agent. Raises LinkLost."""
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
            self.hang_up()
        return [event]

    def _lose(self, how: str) -> list[Event]:
        """Handle the loss of the link: all processes there are lost."""
        if self.is_replaceable and not self._has_begun:
            return self.leave(f"was lost before the job began ({how}): waiting for another")
        self.hang_up()
        why = f"{self.label} was lost: {how}{self._last_words()}"
        if not self._has_begun:
            self.failure = why
            return [Finished(0)]  # the failure reports it
        lost, self._running = self._running, set()
        ended = [Ended(dict.fromkeys(lost, _LOST_STATUS), why)] if lost else []
        return [Note(why), *ended, Finished(0)]

    def _last_words(self) -> str:
        """Return a space and more details on a loss, or ""."""
        return ""


def _for_elsewhere(spec: ProcessSpec, more: Mapping[str, str]) -> dict[str, str]:
    """Return the process's variables without those that name files of this machine."""
    environment = {**more, **spec.environment}
    environment.pop("PS_JOB_KEY_FILE", None)
    path = environment.pop("PYTHONPATH", "").split(os.pathsep)
    if given := os.pathsep.join(one for one in path if one and one != checkout_root()):
        environment["PYTHONPATH"] = given
    return environment
