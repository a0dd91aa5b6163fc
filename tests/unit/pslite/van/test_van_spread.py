"""Several connections between two vans over TCP: large messages take turns, and none is lost."""

from __future__ import annotations

import copy
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from van_helpers import join, payloads, poll_until, receive, silence

from pslite.config import MAX_CONNECTIONS
from pslite.security import derive
from pslite.van.base import Connected, Disconnected, Received
from pslite.van.zmq.dealer import MAX_SHORT
from pslite.van.zmq.van import SPREAD_BYTES, ZmqVan

HOST = "127.0.0.1"
LARGE = b"x" * SPREAD_BYTES


class Relay:
    """Passes TCP on to ``port``, counts the bytes of each connection, and can cut one."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        #: For each connection, in order: [bytes to the target, bytes from it].
        self.counts: list[list[int]] = []
        #: Seconds by which a connection, by its number, is late.
        self.delays: dict[int, float] = {}
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection((HOST, self._target))
            except OSError:
                return
            number = len(self._pairs)
            self.counts.append([0, 0])
            self._pairs.append((near, far))
            for way, (source, sink) in enumerate(((near, far), (far, near))):
                arguments = (source, sink, number, way)
                threading.Thread(target=self._pass_on, args=arguments, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, number: int, way: int) -> None:
        try:
            while data := source.recv(1 << 16):
                self.counts[number][way] += len(data)
                time.sleep(self.delays.get(number, 0))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def cut(self, index: int) -> None:
        """End a connection at both ends at once."""
        for end in self._pairs[index]:
            with suppress(OSError):  # a thread that saw the other end's end was here already
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        for near, far in self._pairs:
            near.close()
            far.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Pair:
    """A client with a server behind a relay."""

    def __init__(self, stack: ExitStack) -> None:
        self.server = ZmqVan("server", linger_s=30.0)
        stack.callback(self.server.close)
        self.relay = Relay(self.server.bind(HOST, 0))
        stack.callback(self.relay.close)
        self.warnings: list[str] = []
        self.client = ZmqVan("client", warn=self.warnings.append)
        stack.callback(self.client.close)

    def join(self, connections: int) -> None:
        join(self.client, self.server, f"tcp://{HOST}:{self.relay.port}")
        self.client.spread("server", connections)
        self.greet(connections)

    def greet(self, connections: int) -> None:
        """Until large messages go by so many connections, those of the past included."""
        self.server.send("client", [b"hello"])
        assert receive(self.client) == [[b"hello"]]
        deadline = time.monotonic() + 10
        while sum(count[0] >= SPREAD_BYTES for count in self.relay.counts) < connections:
            assert time.monotonic() < deadline, self.relay.counts
            self.client.send("server", [LARGE])
            assert receive(self.server) == [[LARGE]]
            silence(self.client, 0.01)

    def grown(self, before: list[list[int]]) -> list[tuple[int, int]]:
        """What each connection has carried since ``before``, a copy of the relay's counts."""
        pairs = zip(self.relay.counts, before, strict=True)
        return [(now[0] - then[0], now[1] - then[1]) for now, then in pairs]


@pytest.fixture
def pair(stack: ExitStack) -> Pair:
    return Pair(stack)


def test_large_messages_take_turns_in_both_directions(pair: Pair) -> None:
    pair.join(3)
    before = copy.deepcopy(pair.relay.counts)
    for _ in range(6):
        pair.client.send("server", [b"head", LARGE])
    assert receive(pair.server, 6) == [[b"head", LARGE]] * 6
    for _ in range(6):
        pair.server.send("client", [LARGE, b"tail"])
    assert receive(pair.client, 6) == [[LARGE, b"tail"]] * 6
    assert len(pair.relay.counts) == 3
    for there, back in pair.grown(before):
        assert 2 * SPREAD_BYTES <= there < 3 * SPREAD_BYTES
        assert 2 * SPREAD_BYTES <= back < 3 * SPREAD_BYTES


def test_small_messages_keep_to_the_first_connection_and_to_their_order(pair: Pair) -> None:
    pair.join(3)
    before = copy.deepcopy(pair.relay.counts)
    sent = [[b"%d" % number, b"y" * 1000] for number in range(300)]
    for frames in sent:
        pair.client.send("server", frames)
    assert receive(pair.server, 300) == sent
    there = sorted(there for there, _ in pair.grown(before))
    assert there[1] < 1000 < 300_000 < there[2]  # heartbeats go by all


def test_without_being_asked_there_is_one_connection(pair: Pair) -> None:
    pair.join(1)
    pair.client.send("server", [LARGE])
    assert receive(pair.server) == [[LARGE]]
    assert len(pair.relay.counts) == 1


def test_nothing_goes_by_further_connections_before_the_first_one_is_known(pair: Pair) -> None:
    """The server may hear of them in another order; what it cannot place it drops."""
    join(pair.client, pair.server, f"tcp://{HOST}:{pair.relay.port}")
    pair.client.spread("server", 3)
    silence(pair.client, 0.2)
    for _ in range(6):
        pair.client.send("server", [LARGE])
    assert receive(pair.server, 6) == [[LARGE]] * 6
    busy = [count for count in pair.relay.counts if count[0] > SPREAD_BYTES]
    assert len(pair.relay.counts) == 3
    assert len(busy) == 1


@pytest.mark.parametrize("index", [0, 1, 2])
def test_when_one_connection_is_lost_all_are_and_all_come_back(pair: Pair, index: int) -> None:
    pair.join(3)
    pair.client.send("server", [LARGE])
    assert receive(pair.server) == [[LARGE]]
    pair.relay.cut(index)
    old = len(pair.relay.counts)
    for van, peer in ((pair.client, "server"), (pair.server, "client")):
        events = poll_until(van, lambda seen: any(type(e) is Connected for e in seen))
        assert [type(event) for event in events] == [Disconnected, Connected]
        assert {event.peer for event in events} == {peer}  # type: ignore[union-attr]
    pair.greet(old + 3)
    for _ in range(6):
        pair.client.send("server", [LARGE])
        pair.server.send("client", [LARGE])
    assert receive(pair.server, 6) == [[LARGE]] * 6
    assert receive(pair.client, 6) == [[LARGE]] * 6


@pytest.mark.parametrize("latest", [0, 3])
def test_what_had_been_sent_by_any_connection_comes_before_the_end(pair: Pair, latest: int) -> None:
    pair.join(4)
    pair.relay.delays[latest] = 0.01
    words = [[b"%d" % number, 4 * LARGE] for number in range(20)]
    for frames in words:
        pair.client.send("server", frames)
    pair.client.close()
    events = poll_until(pair.server, lambda seen: bool(seen) and type(seen[-1]) is Disconnected)
    assert sorted(payloads(events)) == sorted(words)
    assert sum(type(event) is Disconnected for event in events) == 1


@pytest.mark.parametrize("latest", [0, 3])
def test_the_last_words_of_a_server_come_by_all_connections(pair: Pair, latest: int) -> None:
    pair.join(4)
    pair.relay.delays[latest] = 0.01
    words = [[b"%d" % number, 4 * LARGE] for number in range(20)]
    for frames in words:
        pair.server.send("client", frames)
    pair.server.close()
    events = poll_until(pair.client, lambda seen: any(type(e) is Disconnected for e in seen))
    assert sorted(payloads(events)) == sorted(words)


def test_connections_are_added_later_and_bounded(pair: Pair) -> None:
    pair.join(1)
    pair.client.spread("server", 2)
    pair.greet(2)
    pair.client.spread("server", 1)
    pair.client.spread("server", 10_000)
    pair.greet(MAX_CONNECTIONS)
    assert len(pair.relay.counts) == MAX_CONNECTIONS


def test_who_was_accepted_cannot_be_spread_from_here(pair: Pair) -> None:
    pair.join(1)
    pair.server.spread("client", 4)
    pair.client.spread("nobody", 4)
    pair.greet(1)


def test_disconnecting_ends_all_connections_and_what_was_sent_still_leaves(pair: Pair) -> None:
    pair.join(3)
    for _ in range(9):
        pair.client.send("server", [LARGE])
    pair.client.disconnect("server")
    events = poll_until(pair.server, lambda seen: bool(seen) and type(seen[-1]) is Disconnected)
    assert payloads(events) == [[LARGE]] * 9
    silence(pair.client)


def test_a_server_that_is_busy_at_first_gets_its_connections_later(stack: ExitStack) -> None:
    """With a key each handshake needs the server's poll, and lasts 0.2 s here at most."""
    options = {"mechanism": derive(b"the key of this job", "plain"), "handshake_timeout_s": 0.2}
    server, client = ZmqVan("server", **options), ZmqVan("client", **options)
    stack.callback(server.close)
    stack.callback(client.close)
    relay = Relay(server.bind(HOST, 0))
    stack.callback(relay.close)
    join(client, server, f"tcp://{HOST}:{relay.port}")
    client.spread("server", 3)
    silence(client, 0.5)  # the server does not poll
    deadline = time.monotonic() + 10
    server.send("client", [b"hello"])
    heard = payloads(client.poll(1))
    while sum(count[0] >= SPREAD_BYTES for count in relay.counts) < 3:
        assert time.monotonic() < deadline, relay.counts
        client.send("server", [LARGE])
        heard += payloads(client.poll(0.02))
        for event in server.poll(0.02):
            assert type(event) is Received
    assert heard == [[b"hello"]]


def test_further_connections_that_end_again_and_again_are_given_up(pair: Pair) -> None:
    """A gate on the way counts connections: each time the link would be lost with them."""
    pair.join(2)
    for count in range(1, MAX_SHORT + 1):
        pair.relay.cut(2 * count - 1)
        for van in (pair.client, pair.server):
            events = poll_until(van, lambda seen: any(type(e) is Connected for e in seen))
            assert [type(event) for event in events] == [Disconnected, Connected]
        if count < MAX_SHORT:
            pair.greet(2 * count + 2)
    assert ["this node goes on with one" in each for each in pair.warnings] == [True]
    pair.client.send("server", [LARGE])
    assert receive(pair.server) == [[LARGE]]
    silence(pair.client, 0.2)
    assert len(pair.relay.counts) == 2 * MAX_SHORT + 1


def test_a_server_that_ends_soon_is_no_reason_to_give_up(pair: Pair) -> None:
    pair.join(4)
    pair.server.close()
    events = poll_until(pair.client, bool)
    assert [type(event) for event in events] == [Disconnected]
    assert pair.warnings == []
