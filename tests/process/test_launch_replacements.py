"""Agents that come, go and come again before their job begins."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvstore.launch.agents.cluster import Cluster
from kvstore.launch.agents.cluster_job import Carrier
from kvstore.launch.agents.remote import AgentPlace
from kvstore.launch.agents.wire import AgentLink
from kvstore.launch.job.guardian import GuardianProcess
from kvstore.launch.job.places import Event, Note
from kvstore.launch.options import parse_arguments

pytestmark = pytest.mark.process


class Agents:
    """Both ends of links; ``there`` are the agents' ends."""

    def __init__(self, stack: ExitStack) -> None:
        self.there: list[socket.socket] = []
        self._stack = stack

    def link(self) -> AgentLink:
        here, there = socket.socketpair()
        there.settimeout(5.0)
        self.there.append(self._stack.enter_context(there))
        fd = here.detach()
        return AgentLink(fd, os.dup(fd), time.monotonic())


@pytest.fixture
def agents() -> Iterator[Agents]:
    with ExitStack() as stack:
        yield Agents(stack)


def carrier_of(places: list[AgentPlace]) -> Iterator[Carrier]:
    guardian = GuardianProcess("0123456789abcdef", os.environ)
    cluster = Cluster(parse_arguments(["-n", "1", "true"]), os.environ)
    carrier = Carrier(cluster, ["sleep", "60"], places, guardian)
    try:
        yield carrier
    finally:
        for place in places:
            place.hang_up()
        carrier.close()
        guardian.dismiss()


@pytest.fixture
def places(request: pytest.FixtureRequest) -> list[AgentPlace]:
    return [AgentPlace("worker 0", is_replaceable=request.param)]


@pytest.fixture
def carrier(places: list[AgentPlace]) -> Iterator[Carrier]:
    yield from carrier_of(places)


def texts(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


def ready(place: AgentPlace) -> list[Event]:
    """What the place makes of what there is to read."""
    with selectors.PollSelector() as selector:
        place.adjust(selector, paused=False)
        found = [event for key, _ in selector.select(5.0) for event in key.data(time.monotonic())]
    with selectors.PollSelector() as selector:
        place.adjust(selector, paused=False)
        assert not selector.get_map() or place.is_connected
    return found


@pytest.mark.parametrize("places", [True], indirect=True)
def test_an_agent_that_is_lost_is_awaited_again(
    carrier: Carrier, places: list[AgentPlace], agents: Agents
) -> None:
    carrier.admit(agents.link(), {"rank": 0, "host": "node1"})
    assert carrier.awaited() == []
    agents.there[0].close()
    assert texts(ready(places[0])) == [
        "node1: the agent of worker 0 was lost before the job began (the connection was closed): "
        "waiting for another"
    ]
    assert carrier.failure is None
    assert carrier.awaited() == ["worker 0"]
    carrier.admit(agents.link(), {"rank": 0, "host": "node2"})
    assert carrier.awaited() == []
    assert places[0].label == "node2"


@pytest.mark.parametrize("places", [True], indirect=True)
def test_the_agent_that_comes_last_is_the_one_that_serves(
    carrier: Carrier, places: list[AgentPlace], agents: Agents
) -> None:
    carrier.admit(agents.link(), {"rank": 0, "host": "node1"})
    notes = carrier.admit(agents.link(), {"rank": 0, "host": "node2"})
    assert texts(notes) == ["node1: the agent of worker 0 is replaced by another"]
    assert agents.there[0].recv(1) == b"", "the first one is let go, and ends"
    assert places[0].label == "node2"


@pytest.mark.parametrize("places", [False], indirect=True)
def test_where_nothing_starts_another_a_loss_ends_the_wait(
    carrier: Carrier, places: list[AgentPlace], agents: Agents
) -> None:
    carrier.admit(agents.link(), {"rank": 0, "host": "node1"})
    notes = carrier.admit(agents.link(), {"rank": 0, "host": "node2"})
    assert texts(notes) == ["node2: a second agent with the rank 0 came and was sent away"]
    assert agents.there[1].recv(1) == b""
    agents.there[0].close()
    ready(places[0])
    assert places[0].failure == "node1 was lost: the connection was closed"
