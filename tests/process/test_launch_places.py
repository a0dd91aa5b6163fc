"""Processes that are started again in their place: on this machine, and by an agent."""

from __future__ import annotations

import os
import selectors
import sys
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from kvstore.launch.agents.agent import Agent
from kvstore.launch.agents.remote import AgentPlace
from kvstore.launch.agents.wire import AgentLink
from kvstore.launch.job.guardian import GuardianProcess, job_members
from kvstore.launch.job.places import Ended, Event, LocalPlace, Output, Place, Started
from kvstore.launch.job.signals import SignalPipe
from kvstore.launch.plan import ProcessSpec

LIMIT_S = 20.0
JOB = f"places-{os.getpid()}"

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for left processes in /proc"),
]


class Watched:
    """In the place of the guardian."""

    def __init__(self) -> None:
        self.groups: list[int] = []

    def watch(self, group: int) -> None:
        self.groups.append(group)


def worker(script: str, **environment: str) -> ProcessSpec:
    return ProcessSpec("worker", 0, ("sh", "-c", script), environment)


def output(events: list[Event], index: int) -> list[bytes]:
    found = [event for event in events if isinstance(event, Output) and event.index == index]
    return [line for event in found for line in event.lines]


def pids(events: list[Event]) -> list[int]:
    return [event.pid for event in events if isinstance(event, Started)]


def until(happened: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < until_s, "it does not happen"
        time.sleep(0.01)


def read(place: Place) -> list[Event]:
    """The events of what there is to read within a moment."""
    with selectors.PollSelector() as selector:
        place.adjust(selector, paused=False)
        ready = [key for key, _ in selector.select(0.02)] if selector.get_map() else []
    return [event for key in ready for event in key.data(time.monotonic())]


def swept(place: Place, *, reads: bool = True) -> list[Event]:
    """All events until processes have ended; without ``reads``, output stays in its pipes."""
    events: list[Event] = []

    def has_ended() -> bool:
        events.extend(read(place) if reads else [])
        found = place.sweep()
        events.extend(found)
        return bool(found)

    until(has_ended)
    return events


# -- on this machine -----------------------------------------------------------------------


@pytest.fixture
def place() -> Iterator[LocalPlace]:
    place = LocalPlace(JOB, cast(GuardianProcess, Watched()))
    yield place
    place.close()


def test_what_a_process_left_is_ended_and_read_before_it_is_started_again(
    place: LocalPlace,
) -> None:
    lines = "echo out; echo error >&2; printf 'no end'"
    specs = [worker(f"{lines}; sleep 60 & exit 7"), worker("exec sleep 60")]
    events = place.start(list(enumerate(specs)), {})
    first, other = pids(events)
    assert swept(place, reads=False) == [Ended({0: 7})]
    assert len(job_members(JOB, {first})) == 1, "its sleep, which holds the pipes open"
    events = place.start_again(0, worker("echo again; exit 3"))
    second = events.pop()
    assert isinstance(second, Started) and second.index == 0
    assert sorted(output(events, 0)) == [b"error", b"no end", b"out"]
    assert [event.is_error for event in events if isinstance(event, Output)].count(True) == 1
    until(lambda: job_members(JOB, {first}) == [])
    assert len(job_members(JOB, {other})) == 1, "the other one runs on"
    assert cast(Watched, place._guardian).groups == [first, other, second.pid]


def test_the_second_process_has_output_and_an_end_of_its_own(place: LocalPlace) -> None:
    specs = [worker("echo $GIVEN; exit 7"), worker("exec sleep 60")]
    place.start(list(enumerate(specs)), {"GIVEN": "given"})
    events = swept(place)
    assert [event for event in events if isinstance(event, Ended)] == [Ended({0: 7})]
    assert output(events + read(place), 0) == [b"given"]
    place.start_again(0, worker("echo $GIVEN $MARK; exit 3", MARK="own"))
    events = swept(place)
    assert [event for event in events if isinstance(event, Ended)] == [Ended({0: 3})]
    assert output(events + read(place), 0) == [b"given own"]
    assert place.sweep() == []


# -- by an agent ---------------------------------------------------------------------------


class Pair:
    """The launcher's place and the agent that serves it, both in this process."""

    def __init__(self, signals: SignalPipe) -> None:
        here_read, there_write = os.pipe()
        there_read, here_write = os.pipe()
        now_s = time.monotonic()
        self.agent = Agent(AgentLink(there_read, there_write, now_s), signals)
        self.place = AgentPlace("node1")
        self.place.greet(AgentLink(here_read, here_write, now_s), {"host": "node1"})
        self.place.prepare(JOB, "a-key", {"GIVEN": "given"}, {})

    def ended(self, index: int) -> list[Event]:
        """All events until a process has ended, and what it has written."""
        events: list[Event] = []
        until_s = time.monotonic() + LIMIT_S
        while not (output(events, index) and any(isinstance(event, Ended) for event in events)):
            assert time.monotonic() < until_s, events
            self.agent._turn()
            events += read(self.place)
        return events

    def close(self) -> None:
        self.place.hang_up()
        assert self.agent.serve(), "the link is lost, and everything is ended"


@pytest.fixture
def pair() -> Iterator[Pair]:
    with SignalPipe() as signals:
        pair = Pair(signals)
        yield pair
        pair.close()


def test_an_agent_starts_a_process_again_among_those_that_it_has(pair: Pair) -> None:
    script = "echo $KVSTORE_AGENT_ID $PS_JOB_KEY_FILE $GIVEN $ATTEMPT; sleep 60 & exit $ATTEMPT"
    assert pair.place.start([(4, worker(script, ATTEMPT="1"))], {}) == []
    first = pair.ended(4)
    assert pair.place.start_again(4, worker(script, ATTEMPT="2")) == []
    second = pair.ended(4)
    assert [event for event in first + second if isinstance(event, Ended)] == [
        Ended({4: 1}),
        Ended({4: 2}),
    ]
    (before,), (after,) = output(first, 4), output(second, 4)
    agent_id, key_file, *rest = before.split()
    assert after.split() == [agent_id, key_file, b"given", b"2"]
    assert rest == [b"given", b"1"]
    (group,), (group_again,) = pids(first), pids(second)
    until(lambda: job_members(JOB, {group}) == [])
    assert len(job_members(JOB, {group_again})) == 1, "the sleep of the second process"
