"""Small messages between processes of one machine: both ends of a pipe, and a van that has some."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from van_helpers import join, payloads, poll_until, receive, wait_for

from pslite.errors import ProtocolError
from pslite.van.base import Connected, Disconnected, Received, VanEvent
from pslite.van.zmq.pipes import (
    MAX_MESSAGE_BYTES,
    MAX_MESSAGE_FRAMES,
    PipeIn,
    PipeOut,
    Pipes,
    PipeTicket,
)
from pslite.van.zmq.van import ZmqVan

HOST = "127.0.0.1"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def pipe(stack: ExitStack) -> tuple[PipeOut, PipeIn]:
    reading = PipeIn()
    stack.callback(reading.close)
    writing = PipeOut(os.getpid(), reading.ticket)
    stack.callback(writing.close)
    return writing, reading


def holders(inode: int) -> int:
    """How many descriptors of this process belong to a pipe."""
    found = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{entry}") == f"pipe:[{inode}]"
        except OSError:  # that of the listing itself
            continue
    return found


def read(reading: PipeIn) -> list[list[bytes]]:
    return [[bytes(frame) for frame in frames] for frames in reading.read()]


# -- the two ends -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frames",
    [
        [b"header"],
        [b"", b""],
        [b"header", b"", b"payload"],
        [b"x" * (MAX_MESSAGE_BYTES - 8)],
        [b"1"] * MAX_MESSAGE_FRAMES,
    ],
)
def test_frames_come_out_as_they_went_in(pipe: tuple[PipeOut, PipeIn], frames: list[bytes]) -> None:
    writing, reading = pipe
    assert reading.read() == []
    for kind in (bytes, memoryview):
        assert writing.send([kind(frame) for frame in frames])
        assert read(reading) == [frames]
    assert reading.read() == []


@pytest.mark.parametrize(
    "frames", [[b"x" * (MAX_MESSAGE_BYTES - 7)], [b"1"] * (MAX_MESSAGE_FRAMES + 1)]
)
def test_what_is_too_large_is_not_taken(pipe: tuple[PipeOut, PipeIn], frames: list[bytes]) -> None:
    writing, reading = pipe
    assert not writing.send(frames)
    assert reading.read() == []


def test_a_full_pipe_takes_no_message_and_nobody_waits(pipe: tuple[PipeOut, PipeIn]) -> None:
    writing, reading = pipe
    sent = []
    for number in range(1000):
        message = [str(number).encode(), b"x" * 5000]
        if not writing.send(message):
            break
        sent.append(message)
    assert 5 < len(sent) < 20
    assert not writing.send([b"small"])
    found = read(reading)
    while writing.is_stuck:
        writing.flush()
    assert found + read(reading) == sent
    assert writing.send([b"small"])
    assert read(reading) == [[b"small"]]


SIZES = st.lists(st.lists(st.integers(0, 9000), min_size=1, max_size=4), min_size=1, max_size=40)


@given(SIZES, st.integers(0, 1 << 30))
def test_whatever_is_taken_comes_once_and_in_order(sizes: list[list[int]], seed: int) -> None:
    rng = random.Random(seed)
    reading = PipeIn()
    writing = PipeOut(os.getpid(), reading.ticket)
    taken, found = [], []
    for number, lengths in enumerate(sizes):
        message = [bytes([number]) * length for length in lengths]
        if writing.send(message):
            taken.append(message)
        if rng.random() < 0.3:
            found += read(reading)
        if writing.is_stuck and rng.random() < 0.5:
            writing.flush()
    while writing.is_stuck or len(found) < len(taken):
        found += read(reading)
        writing.flush()
    writing.close()
    reading.close()
    assert found == taken


@pytest.mark.parametrize(
    "data",
    [
        (MAX_MESSAGE_FRAMES + 1).to_bytes(4, "little"),
        b"\xff" * 64,
        (1).to_bytes(4, "little") + MAX_MESSAGE_BYTES.to_bytes(4, "little"),
    ],
)
def test_what_is_no_message_is_an_error(pipe: tuple[PipeOut, PipeIn], data: bytes) -> None:
    writing, reading = pipe
    os.write(writing.fileno(), data)
    with pytest.raises(ProtocolError, match="a message through a pipe must have"):
        reading.read()


def test_only_the_pipe_that_was_offered_is_opened(stack: ExitStack) -> None:
    reading = PipeIn()
    stack.callback(reading.close)
    fd, inode = reading.ticket
    file = os.open(os.devnull, os.O_RDWR)
    stack.callback(os.close, file)
    for wrong in (PipeTicket(fd, inode + 1), PipeTicket(file, inode), PipeTicket(10_000, inode)):
        with pytest.raises(OSError, match=r"not the offered pipe|No such file"):
            PipeOut(os.getpid(), wrong)
    assert holders(inode) == 2


def test_a_writer_hears_that_nobody_reads_any_more() -> None:
    reading = PipeIn()
    writing = PipeOut(os.getpid(), reading.ticket)
    assert writing.send([b"unread"])
    reading.close()
    with pytest.raises(BrokenPipeError):
        writing.send([b"lost"])
    writing.close()


# -- vans ---------------------------------------------------------------------------------


class Pair:
    """Two vans with a connection, and a pipe from the client to the server."""

    def __init__(self, stack: ExitStack) -> None:
        self.client, self.server = ZmqVan("client"), ZmqVan("server")
        for van in (self.client, self.server):
            stack.callback(van.close)
        self.port = self.server.bind(HOST, 0)
        join(self.client, self.server, f"tcp://{HOST}:{self.port}")
        ticket = self.server.offer_pipe("client")
        assert ticket is not None
        assert self.client.take_pipe("server", os.getpid(), ticket)
        self.ticket = ticket


@pytest.fixture
def pair(stack: ExitStack) -> Pair:
    return Pair(stack)


def count_reads(van: ZmqVan, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many messages came to ``van`` through pipes."""
    found: list[Any] = []
    original = PipeIn.read

    def counting(self: PipeIn) -> list[list[memoryview | bytes]]:
        messages = original(self)
        found.extend(messages)
        return messages

    monkeypatch.setattr(PipeIn, "read", counting)
    return lambda: len(found)


def test_small_messages_take_the_pipe_and_large_ones_the_connection(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    came_by_pipe = count_reads(pair.server, monkeypatch)
    pair.client.send("server", [b"small"])
    assert receive(pair.server) == [[b"small"]]
    assert came_by_pipe() == 1
    large = bytes(range(256)) * 1000
    pair.client.send("server", [b"large", large])
    assert receive(pair.server) == [[b"large", large]]
    assert came_by_pipe() == 1
    pair.server.send("client", [b"back"])  # this way there is no pipe
    assert receive(pair.client) == [[b"back"]]


def test_messages_that_find_the_pipe_full_take_the_connection(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    came_by_pipe = count_reads(pair.server, monkeypatch)
    numbers = {str(number).encode() for number in range(300)}
    for number in sorted(numbers):
        pair.client.send("server", [number, b"x" * 3000])
        pair.client.poll(0)
    found: list[list[bytes]] = []
    while len(found) < len(numbers):
        found += payloads(poll_until(pair.server, lambda seen: bool(seen)))
        pair.client.poll(0)  # has the end of what was stuck written
    assert {frames[0] for frames in found} == numbers
    assert 10 < came_by_pipe() < 300


def test_what_waits_in_a_pipe_comes_before_the_end_of_the_connection(pair: Pair) -> None:
    for number in range(50):
        pair.client.send("server", [str(number).encode(), b"x" * 3000])
    pair.client.close()
    events = poll_until(
        pair.server, lambda seen: any(type(event) is Disconnected for event in seen)
    )
    assert type(events[-1]) is Disconnected
    assert {bytes(frames[0]) for frames in payloads(events)} == {
        str(number).encode() for number in range(50)
    }


def test_rubbish_in_a_pipe_ends_the_pipe_and_not_the_connection(pair: Pair) -> None:
    writing = PipeOut(os.getpid(), pair.ticket)
    os.write(writing.fileno(), b"\xff" * 100)
    writing.close()
    pair.server.poll(0.05)
    for number in range(3):
        pair.client.send("server", [b"still here", bytes([number])])
        assert receive(pair.server) == [[b"still here", bytes([number])]]


def test_a_pipe_ends_with_its_connection_and_a_new_one_can_be_offered(pair: Pair) -> None:
    assert holders(pair.ticket.inode) == 3
    pair.client.disconnect("server")
    assert holders(pair.ticket.inode) == 2
    assert wait_for(pair.server, Disconnected) == [Disconnected("client", "the connection is gone")]
    assert holders(pair.ticket.inode) == 0
    other = ZmqVan("client")
    try:
        other.connect("server", f"tcp://{HOST}:{pair.port}")
        assert wait_for(pair.server, Connected) == [Connected("client")]
        ticket = pair.server.offer_pipe("client")
        assert ticket is not None
        assert pair.server.offer_pipe("client") is None  # one is enough
        assert other.take_pipe("server", os.getpid(), ticket)
        other.send("server", [b"again"])
        assert receive(pair.server) == [[b"again"]]
    finally:
        other.close()


def test_who_cannot_open_a_pipe_does_without(pair: Pair) -> None:
    other = ZmqVan("other")
    try:
        assert not other.take_pipe("server", os.getpid(), PipeTicket(10_000, 1))
        assert not other.take_pipe("server", 2**22 + 1, pair.ticket)
    finally:
        other.close()
    pair.client.send("server", [b"hello"])
    assert receive(pair.server) == [[b"hello"]]


def test_what_comes_by_a_pipe_goes_before_an_end_that_was_read_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A socket's reader may report an end; the pipe may be read after it in the same poll."""
    pipes = Pipes(lambda source, reader, wanted: None, lambda source: None)
    ticket = pipes.offer("peer")
    assert ticket is not None
    writing = PipeOut(os.getpid(), ticket)
    for message in ([b"1"], [b"2"]):
        assert writing.send(message)
    end = Disconnected("peer", "it sent a message over the size limits")
    events: list[VanEvent] = [Connected("other"), end, Connected("third")]
    pipes._read("peer", events, 1)
    assert [type(event) for event in events] == [
        Connected, Received, Received, Disconnected, Connected
    ]  # fmt: skip
    assert writing.send([b"last"])
    pipes.end(events)
    assert payloads(events) == [[b"1"], [b"2"], [b"last"]]
    assert events.index(end) == 4
    assert holders(ticket.inode) == 1
    writing.close()


ENDED_BY_SIGPIPE = """
import os, signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
import pslite
from cluster import InprocCluster
from pslite.van.zmq.pipes import PipeIn, PipeOut
with InprocCluster(1, 1) as cluster:
    reading = PipeIn()
    writing = PipeOut(os.getpid(), reading.ticket)
    reading.close()
    told = pslite.Future("an answer")
    def send():
        try:
            writing.send([b"lost"])
        except BrokenPipeError:
            told.set_result("heard")
    cluster.workers[0].call(send)
    print(told.result(10))
"""


def test_a_script_that_wants_to_end_by_sigpipe_does_not_end_when_a_peer_has() -> None:
    inproc = Path(__file__).resolve().parents[4] / "inproc"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(inproc), *sys.path])}
    found = subprocess.run(
        [sys.executable, "-c", ENDED_BY_SIGPIPE],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (found.returncode, found.stdout) == (0, "heard\n"), found.stderr
