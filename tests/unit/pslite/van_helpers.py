"""Shared by the tests of the vans: polling until something came, and readable payloads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from pslite.van.base import Connected, Disconnected, Received, Van, VanEvent

Event = TypeVar("Event", Received, Connected, Disconnected)


def poll_until(
    van: Van, enough: Callable[[list[VanEvent]], bool], timeout_s: float = 10.0
) -> list[VanEvent]:
    """All events of ``van`` until ``enough`` of them; fails when time is up."""
    events: list[VanEvent] = []
    give_up_at = time.monotonic() + timeout_s
    while not enough(events):
        if time.monotonic() > give_up_at:
            raise AssertionError(f"{van.uid} is still waiting; so far it saw {events}")
        events += van.poll(0.05)
    return events


def wait_for(van: Van, kind: type[Event], count: int = 1, timeout_s: float = 10.0) -> list[Event]:
    """The first ``count`` events of ``kind``; fails if another kind comes before the last."""
    events = poll_until(
        van, lambda seen: sum(type(event) is kind for event in seen) >= count, timeout_s
    )
    assert all(type(event) is kind for event in events), events
    return events  # type: ignore[return-value]


def payloads(events: list[VanEvent]) -> list[list[bytes]]:
    """The frames of the messages among ``events``."""
    return [[bytes(frame) for frame in event.frames] for event in events if type(event) is Received]


def receive(van: Van, count: int = 1, timeout_s: float = 10.0) -> list[list[bytes]]:
    """The frames of the next ``count`` messages; fails if another event comes between."""
    return payloads(list(wait_for(van, Received, count, timeout_s)))


def silence(van: Van, for_s: float = 0.1) -> None:
    """Fail if anything comes within ``for_s``."""
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        assert van.poll(0.01) == []


def join(client: Van, server: Van, address: str, *, name: str = "server") -> None:
    """Connect two vans and take both ``Connected`` away.

    Polls both in turn: a van with a key answers who knocks in its poll.
    """
    client.connect(name, address)
    heard: dict[str, list[VanEvent]] = {client.uid: [], server.uid: []}
    give_up_at = time.monotonic() + 10.0
    while not all(heard.values()):
        assert time.monotonic() < give_up_at, heard
        for van in (client, server):
            heard[van.uid] += van.poll(0.01)
    assert heard == {client.uid: [Connected(name)], server.uid: [Connected(client.uid)]}
