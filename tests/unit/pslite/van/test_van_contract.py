"""The contract of ``pslite/van/base.py``, kept by every van: over TCP, in process, and wrapped."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from van_helpers import join, payloads, poll_until, receive, silence, wait_for

from pslite.errors import ClosedError, ConfigError, UsageError
from pslite.testing.inproc import InprocNetwork, InprocVan
from pslite.van.base import Buffer, Connected, Disconnected, Received, Van
from pslite.van.faulty import FaultPlan, FaultyVan
from pslite.van.zmq.van import ZmqVan

HOST = "127.0.0.1"
Make = Callable[[str], Van]


class World:
    """Makes vans of one kind that can reach each other, and closes them all."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.vans: list[Van] = []
        self._network = InprocNetwork()

    def __call__(self, uid: str) -> Van:
        van = self._make(uid)
        self.vans.append(van)
        return van

    def _make(self, uid: str) -> Van:
        if self.kind == "zmq":
            return ZmqVan(uid, linger_s=10.0)  # what leaves on a busy machine may take a while
        inner = InprocVan(self._network, uid)
        if self.kind == "inproc":
            return inner
        return FaultyVan(inner, FaultPlan(), seed=1, clock=time.monotonic)

    def pair(self) -> tuple[Van, Van]:
        """A connected (client, server); the client calls the other ``server``."""
        client, server = self("client"), self("server")
        join(client, server, f"tcp://{HOST}:{server.bind(HOST, 0)}")
        return client, server

    def close(self) -> None:
        for van in self.vans:
            van.close()


@pytest.fixture(params=["zmq", "inproc", "faulty"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    yield world
    world.close()


def free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


def test_messages_go_both_ways_over_one_connection(world: World) -> None:
    client, server = world.pair()
    client.send("server", [b"head", bytearray(b"body"), memoryview(b"tail")])
    assert receive(server) == [[b"head", b"body", b"tail"]]
    server.send("client", [b"answer"])
    assert receive(client) == [[b"answer"]]


def test_many_small_messages_arrive_complete_and_in_order(world: World) -> None:
    client, server = world.pair()
    sent = [[b"%d" % number, b"x" * (number % 50)] for number in range(3000)]
    for frames in sent:
        client.send("server", frames)
    assert receive(server, len(sent)) == sent


def test_large_frames_arrive_intact(world: World) -> None:
    client, server = world.pair()
    large = np.random.default_rng(1).random((5, 131072))  # 5 MiB
    client.send("server", [b"head", large.data])
    [event] = wait_for(server, Received)
    assert event.frames[0] == b"head"
    np.testing.assert_array_equal(np.frombuffer(event.frames[1]).reshape(large.shape), large)


def test_received_views_are_bytes_that_stay_valid_after_the_next_poll(world: World) -> None:
    client, server = world.pair()
    client.send("server", [np.arange(4, dtype=np.float32).data])
    [first] = wait_for(server, Received)
    client.send("server", [np.zeros(4, dtype=np.float32).data])
    receive(server)
    view = memoryview(first.frames[0])
    assert (view.format, view.nbytes) == ("B", 16)
    assert np.frombuffer(view, np.float32).tolist() == [0, 1, 2, 3]


def test_empty_frames_are_frames(world: World) -> None:
    client, server = world.pair()
    sent: list[list[Buffer]] = [[b"", b"x", b""], [b"", b""], [b"x", np.zeros(0).data]]
    for frames in sent:
        client.send("server", frames)
    assert receive(server, 3) == [[b"", b"x", b""], [b"", b""], [b"x", b""]]


def test_each_peer_keeps_its_name_and_its_order(world: World) -> None:
    server = world("server")
    address = f"tcp://{HOST}:{server.bind(HOST, 0)}"
    clients = [world(f"client-{number}") for number in range(4)]
    for client in clients:
        join(client, server, address)
    for number in range(20):
        for client in clients:
            client.send("server", [b"%s %d" % (client.uid.encode(), number)])
    seen: dict[str, list[bytes]] = {client.uid: [] for client in clients}
    for event in wait_for(server, Received, 80):
        seen[event.peer].append(bytes(event.frames[0]))
    for client in clients:
        assert seen[client.uid] == [b"%s %d" % (client.uid.encode(), n) for n in range(20)]
        server.send(client.uid, [b"for " + client.uid.encode()])
    for client in clients:
        assert receive(client) == [[b"for " + client.uid.encode()]]


def test_a_message_to_an_unknown_peer_is_dropped_in_silence(world: World) -> None:
    client, server = world.pair()
    client.send("nobody", [b"lost"])
    server.send("nobody", [b"lost"])
    client.send("server", [b"kept"])
    assert receive(server) == [[b"kept"]]
    silence(client)


def test_one_may_connect_and_send_before_the_peer_listens(world: World) -> None:
    client, server, port = world("client"), world("server"), free_port()
    client.connect("server", f"tcp://{HOST}:{port}")
    reused = bytearray(b"first")
    client.send("server", [bytes(reused)])
    client.send("server", [b"x" * 100_000])
    silence(client)
    server.bind(HOST, port)
    assert wait_for(client, Connected) == [Connected("server")]
    client.send("server", [b"last"])
    events = poll_until(server, lambda seen: len(seen) == 4)
    assert events[0] == Connected("client")
    assert payloads(events) == [[b"first"], [b"x" * 100_000], [b"last"]]


def test_wake_from_another_thread_ends_a_wait_without_end(world: World) -> None:
    client, _ = world.pair()
    thread = threading.Timer(0.05, client.wake)
    thread.start()
    assert client.poll(None) == []
    thread.join()


def test_wakes_before_a_poll_end_that_poll_and_no_later_one(world: World) -> None:
    client, _ = world.pair()
    for _ in range(1000):
        client.wake()
    begin = time.monotonic()
    assert client.poll(10) == []
    assert time.monotonic() - begin < 5
    begin = time.monotonic()
    assert client.poll(0.1) == []
    assert time.monotonic() - begin > 0.09


def test_a_poll_without_news_lasts_as_long_as_it_was_told(world: World) -> None:
    client, _ = world.pair()
    assert client.poll(0) == []
    begin = time.monotonic()
    assert client.poll(0.1) == []
    assert 0.09 < time.monotonic() - begin < 5


def test_the_last_words_of_a_closing_client_come_before_its_end(world: World) -> None:
    client, server = world.pair()
    sent = [[b"%d" % number] for number in range(1000)] + [[b"x" * 3_000_000]]
    for frames in sent:
        client.send("server", frames)
    client.close()
    events = poll_until(server, lambda seen: bool(seen) and type(seen[-1]) is Disconnected)
    assert payloads(events) == sent
    assert [event.peer for event in events if type(event) is Disconnected] == ["client"]


def test_the_last_words_of_a_closing_server_come_before_its_end(world: World) -> None:
    client, server = world.pair()
    sent = [[b"%d" % number] for number in range(1000)]
    for frames in sent:
        server.send("client", frames)
    server.close()
    events = poll_until(client, lambda seen: bool(seen) and type(seen[-1]) is Disconnected)
    assert payloads(events) == sent
    assert [event.peer for event in events if type(event) is Disconnected] == ["server"]


def test_closing_twice_is_harmless_and_a_closed_van_is_mute(world: World) -> None:
    client, server = world.pair()
    client.close()
    client.close()
    client.send("server", [b"lost"])
    client.disconnect("server")
    client.wake()
    assert client.poll(None) == []
    assert type(poll_until(server, bool)[-1]) is Disconnected
    with pytest.raises(ClosedError):
        client.connect("server", f"tcp://{HOST}:1")
    with pytest.raises(ClosedError):
        client.bind(HOST, 0)


def test_a_closed_van_sends_nothing_to_those_who_had_connected_to_it(world: World) -> None:
    client, server = world.pair()
    server.close()
    server.send("client", [b"lost"])
    server.send("client", [b"lost", b"x" * 3_000_000])
    server.disconnect("client")
    assert server.in_transit("client").nbytes == 0
    assert server.poll(0) == []
    events = poll_until(client, lambda seen: bool(seen) and type(seen[-1]) is Disconnected)
    assert payloads(events) == []


def test_messages_to_a_lost_client_are_dropped_until_it_returns(world: World) -> None:
    server = world("server")
    address = f"tcp://{HOST}:{server.bind(HOST, 0)}"
    old = world("client")
    join(old, server, address)
    old.close()
    wait_for(server, Disconnected)
    server.send("client", [b"lost"])
    new = world("client")
    join(new, server, address)
    server.send("client", [b"welcome back"])
    assert receive(new) == [[b"welcome back"]]
    new.send("server", [b"here"])
    assert receive(server) == [[b"here"]]


def test_a_restarted_client_replaces_the_old_one_that_still_seems_alive(world: World) -> None:
    server = world("server")
    address = f"tcp://{HOST}:{server.bind(HOST, 0)}"
    old, new = world("client"), world("client")
    join(old, server, address)
    new.connect("server", address)
    wait_for(new, Connected)
    events = poll_until(server, lambda seen: len(seen) == 2)
    assert [type(event) for event in events] == [Disconnected, Connected]
    old.send("server", [b"from the past"])
    new.send("server", [b"now"])
    assert receive(server) == [[b"now"]]
    server.send("client", [b"to the new one"])
    assert receive(new) == [[b"to the new one"]]
    old.close()
    silence(server)
    silence(old, 0.01)


def test_a_client_finds_a_restarted_server_and_repeats_nothing(world: World) -> None:
    old, client = world("server"), world("client")
    port = old.bind(HOST, 0)
    join(client, old, f"tcp://{HOST}:{port}")
    old.close()
    new = world("server")
    new.bind(HOST, port)
    client.send("server", [b"lost with the connection"])
    time.sleep(0.1)  # the client is busy, and must not connect anew behind its owner's back
    assert type(client.poll(5)[0]) is Disconnected
    client.send("server", [b"for the next one"])
    assert wait_for(client, Connected) == [Connected("server")]
    events = poll_until(new, lambda seen: len(seen) == 2)
    assert events[0] == Connected("client")
    assert payloads(events) == [[b"for the next one"]]


def test_disconnecting_tells_the_other_end_only(world: World) -> None:
    client, server = world.pair()
    words = [b"x" * 1_000_000] * 30
    for word in words:
        client.send("server", [word])
    client.disconnect("server")
    client.disconnect("never met")
    events = poll_until(server, lambda seen: bool(seen) and type(seen[-1]) is Disconnected)
    assert payloads(events) == [[word] for word in words]
    client.send("server", [b"dropped"])
    silence(client)
    silence(server, 0.02)


def test_connecting_again_under_a_name_leaves_the_old_peer(world: World) -> None:
    client, first = world.pair()
    second = world("second")
    join(client, second, f"tcp://{HOST}:{second.bind(HOST, 0)}")
    assert type(wait_for(first, Disconnected)[0]) is Disconnected
    client.send("server", [b"to the second"])
    assert receive(second) == [[b"to the second"]]


def test_a_forgotten_client_is_not_heard_until_it_connects_anew(world: World) -> None:
    server = world("server")
    address = f"tcp://{HOST}:{server.bind(HOST, 0)}"
    client = world("client")
    join(client, server, address)
    server.disconnect("client")
    client.send("server", [b"unheard"])
    server.send("client", [b"unsaid"])
    silence(server)
    silence(client, 0.02)
    client.connect("server", address)
    assert wait_for(client, Connected) == [Connected("server")]
    assert wait_for(server, Connected) == [Connected("client")]


def test_two_networks_in_one_process_do_not_see_each_other(world: World) -> None:
    other = World(world.kind)
    try:
        for make, word in ((world, b"here"), (other, b"there")):
            client, server = make.pair()
            client.send("server", [word])
            assert receive(server) == [[word]]
        silence(world.vans[1], 0.02)
        silence(other.vans[1], 0.02)
    finally:
        other.close()


@pytest.mark.parametrize(
    "frames",
    [[], [b""], [np.zeros(0).data], [np.zeros((4, 4))[:, 1].data]],
    ids=["no frame", "no byte", "no element", "memory with gaps"],
)
def test_what_can_never_be_sent_is_refused_and_harms_nothing(
    world: World, frames: list[bytes]
) -> None:
    client, server = world.pair()
    with pytest.raises(UsageError):
        client.send("server", frames)
    client.send("server", [b"fine"])
    assert receive(server) == [[b"fine"]]


def test_a_busy_port_is_an_error_that_names_it(world: World) -> None:
    port = world("first").bind(HOST, 0)
    second = world("second")
    with pytest.raises(ConfigError, match=rf"{HOST}:{port}.*in use"):
        second.bind(HOST, port)
    assert second.bind(HOST, 0) != port


@pytest.mark.parametrize(("host", "port"), [("*", 0), ("", 0), (HOST, 65536), (HOST, -1)])
def test_listening_needs_a_host_and_a_port(world: World, host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        world("server").bind(host, port)


def test_a_van_listens_at_one_address(world: World) -> None:
    server = world("server")
    server.bind(HOST, 0)
    with pytest.raises(UsageError, match=f"already listening, so it cannot bind {HOST}:0; use a"):
        server.bind(HOST, 0)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:80",
        "udp://127.0.0.1:80",
        "tcp://127.0.0.1",
        "tcp://:80",
        "tcp://::1:80",
        "tcp://host:http",
        "tcp://host:0",
        "tcp://host:65536",
    ],
)
def test_a_malformed_address_is_refused_at_once(world: World, address: str) -> None:
    with pytest.raises(ConfigError):
        world("client").connect("server", address)


@pytest.mark.parametrize("uid", ["", "a\0b", "x" * 201, "line\n"])
def test_a_uid_is_short_printable_text(world: World, uid: str) -> None:
    with pytest.raises(UsageError, match="uid"):
        world(uid)
