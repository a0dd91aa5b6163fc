"""Frames and links: whole messages come out, whatever the pieces, and nothing else does."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest

from kvstore.launch.agents.join_answer import Seal
from kvstore.launch.agents.wire import (
    ALIVE_S,
    GREET,
    GREETING,
    SILENT_S,
    AgentLink,
    FrameReader,
    LinkLost,
    event_of,
    frame,
)
from kvstore.launch.job.places import CannotStart, Ended, Event, Finished, Note, Output, Started

MESSAGES = [["signal", 15], ["lines", 3, True, [b"a", b"\xff\n"]], ["exits", {1: -9}], ["alive"]]
KEY = b"k" * 32


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_messages_come_back_whatever_the_pieces(is_sealed: bool, size: int) -> None:
    seal = Seal(KEY) if is_sealed else None
    reader = FrameReader(Seal(KEY) if is_sealed else None)
    data = b"".join(frame(message, seal) for message in MESSAGES)
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    assert [message for piece in pieces for message in reader.feed(piece)] == MESSAGES


@pytest.mark.parametrize("change", ["flip", "repeat", "leave out", "other key"])
def test_a_sealed_frame_that_was_tampered_with_breaks_the_link(change: str) -> None:
    seal = Seal(KEY if change != "other key" else b"x" * 32)
    first, second = (frame(message, seal) for message in MESSAGES[:2])
    reader = FrameReader(Seal(KEY))
    data = {
        "flip": first[:-1] + bytes([first[-1] ^ 1]),
        "repeat": first + first,
        "leave out": second,
        "other key": first,
    }[change]
    with pytest.raises(LinkLost, match="wrong HMAC"):
        reader.feed(data)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (struct.pack(">I", 1 << 31), "a frame announces"),
        (struct.pack(">I", 1) + b"\xc1", "cannot read a frame"),
        (struct.pack(">I", 1) + b"\x01", "does not contain a message"),
        (struct.pack(">I", 1) + b"\x90", "does not contain a message"),
    ],
)
def test_what_is_no_frame_breaks_the_link(data: bytes, complaint: str) -> None:
    with pytest.raises(LinkLost, match=complaint):
        FrameReader().feed(data)


@pytest.fixture
def ends() -> Iterator[tuple[AgentLink, AgentLink]]:
    here_read, there_write = os.pipe()
    there_read, here_write = os.pipe()
    here, there = AgentLink(here_read, here_write, 0.0), AgentLink(there_read, there_write, 0.0)
    yield here, there
    here.close()
    there.close()


def test_a_link_keeps_what_the_other_end_does_not_take_yet(
    ends: tuple[AgentLink, AgentLink],
) -> None:
    here, there = ends
    here.send("lines", 0, False, [b"x" * 1_000_000])
    assert here.waiting
    found: list[list[object]] = []
    while not found:
        found = there.receive(1.0)
        here.write_pending()
    assert not here.waiting
    assert found == [["lines", 0, False, [b"x" * 1_000_000]]]


def test_signs_of_life_are_sent_and_their_absence_is_a_loss(
    ends: tuple[AgentLink, AgentLink],
) -> None:
    here, there = ends
    assert here.tick(1.0) == ALIVE_S - 1.0
    here.tick(ALIVE_S)
    assert there.receive(SILENT_S - 1.0) == []
    there.tick(SILENT_S + 1.0)
    with pytest.raises(LinkLost, match="no sign of life for 60 s"):
        here.tick(SILENT_S)


def test_an_end_that_closes_is_lost(ends: tuple[AgentLink, AgentLink]) -> None:
    here, there = ends
    there.close()
    here.send("alive")
    with pytest.raises(LinkLost, match="the connection was closed"):
        here.receive(1.0)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_greeting_is_found_in_what_a_login_shell_prints(size: int) -> None:
    data = b"Welcome\n0: " + GREETING + b'{"host": "node1"}\n' + frame(["signal", 15])
    reader = FrameReader(finds_greeting=True)
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    found = [message for piece in pieces for message in reader.feed(piece)]
    assert found == [[GREET, {"host": "node1"}], ["signal", 15]]


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (GREETING + b"{]\n", "the agent's greeting cannot be read"),
        (GREETING + b"3\n", "the agent's greeting cannot be read"),
        (b"x" * (1 << 20) + b"x", "the login shell does not stop printing"),
    ],
)
def test_what_does_not_greet_is_no_agent(data: bytes, complaint: str) -> None:
    with pytest.raises(LinkLost, match=complaint):
        FrameReader(finds_greeting=True).feed(data)


@pytest.mark.parametrize(
    "event",
    [
        Started(1, 4711),
        Output(1, True, [b"a", b"\xff"]),
        Ended({1: -9, 2: 0}),
        CannotStart(1, 2, "No such file or directory"),
        Note("hello"),
        Finished(3),
    ],
)
def test_events_come_back_as_they_were(ends: tuple[AgentLink, AgentLink], event: Event) -> None:
    here, there = ends
    here.tell(event)
    assert [event_of(message) for message in there.receive(1.0)] == [event]


@pytest.mark.parametrize("message", [["Started", 1], ["Started", 1, 2, 3], ["started", 1, 2]])
def test_a_message_that_is_no_event_is_refused(message: list[object]) -> None:
    with pytest.raises(LinkLost, match=f"unknown message '{message[0]}'"):
        event_of(message)
