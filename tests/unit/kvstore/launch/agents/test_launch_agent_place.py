"""The launcher's end of an agent's link: processes that are started again, and lost ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

from kvstore.launch.agents.remote import AgentPlace
from kvstore.launch.agents.wire import START, AgentLink
from kvstore.launch.job.places import Ended, Event, Started
from kvstore.launch.plan import ProcessSpec


def spec(attempt: int) -> ProcessSpec:
    return ProcessSpec("worker", 1, ("prog",), {"DMLC_NUM_ATTEMPT": str(attempt)})


class Agents:
    """A place with its agent; ``there`` is the agent's end of the link."""

    def __init__(self) -> None:
        here_read, there_write = os.pipe()
        there_read, here_write = os.pipe()
        self.there = AgentLink(there_read, there_write, 0.0)
        self.place = AgentPlace("node1")
        self.place.greet(AgentLink(here_read, here_write, 0.0), {"host": "node1"})
        self.place.prepare("0123", "a-key", {"A": "b"}, {})

    def tell(self, *events: Event) -> Sequence[Event]:
        for event in events:
            self.there.tell(event)
        return self.place._read(0.0)

    def is_lost(self) -> Sequence[Event]:
        self.there.close()
        return [event for event in self.place._read(0.0) if isinstance(event, Ended)]


@pytest.fixture
def agents() -> Iterator[Agents]:
    agents = Agents()
    yield agents
    agents.place.hang_up()
    agents.there.close()


def test_a_process_is_started_again_with_the_same_message_as_the_first_time(
    agents: Agents,
) -> None:
    agents.place.start([(0, spec(0)), (1, spec(0))], {})
    agents.place.start_again(1, spec(1))
    of_job = {"job_id": "0123", "key": "a-key", "variables": {"A": "b"}}
    processes = [
        [index, "worker", 1, ["prog"], {"DMLC_NUM_ATTEMPT": str(attempt)}]
        for index, attempt in ((0, 0), (1, 0), (1, 1))
    ]
    assert agents.there.receive(0.0) == [
        [START, {**of_job, "processes": processes[:2]}],
        [START, {**of_job, "processes": processes[2:]}],
    ]


def test_when_the_agent_is_lost_all_that_ran_are_and_none_that_had_ended(agents: Agents) -> None:
    agents.place.start([(0, spec(0)), (1, spec(0)), (2, spec(0))], {})
    agents.tell(*(Started(index, 10 + index) for index in range(3)))
    agents.tell(Ended({1: -9}))
    agents.tell(Ended({2: -9}))
    agents.place.start_again(1, spec(1))
    why = "node1 was lost: the connection was closed"
    assert agents.is_lost() == [Ended({0: 255, 1: 255}, why)]


def test_a_process_can_be_started_again_only_while_the_agent_is_there(agents: Agents) -> None:
    assert not AgentPlace("node2").can_start_again
    assert agents.place.can_start_again
    agents.place.start([(1, spec(0))], {})
    agents.tell(Started(1, 11), Ended({1: -9}))
    assert agents.is_lost() == []
    assert not agents.place.can_start_again
    (ended,) = agents.place.start_again(1, spec(1))
    assert isinstance(ended, Ended)
    assert ended.statuses == {1: 255}
    assert ended.why is not None and ended.why.startswith("node1 was lost")
