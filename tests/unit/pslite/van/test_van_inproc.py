"""What only the in-process van has: one thread for many vans, and buffers that show misuse."""

from __future__ import annotations

import random

import pytest
from van_helpers import payloads

from pslite.errors import UsageError
from pslite.testing.inproc import InprocNetwork, InprocVan
from pslite.van.base import Connected, Disconnected, Received, VanEvent

HOST = "10.0.0.1"


def pair(network: InprocNetwork) -> tuple[InprocVan, InprocVan]:
    client, server = InprocVan(network, "client"), InprocVan(network, "server")
    client.connect("server", f"tcp://{HOST}:{server.bind(HOST, 0)}")
    assert client.poll(0) == [Connected("server")]
    assert server.poll(0) == [Connected("client")]
    return client, server


def test_a_buffer_reused_before_delivery_is_seen_as_corrupted() -> None:
    client, server = pair(InprocNetwork())
    buffer = bytearray(b"gradient")
    client.send("server", [buffer])
    buffer[:4] = b"XXXX"
    assert payloads(server.poll(0)) == [[b"XXXXient"]]


def test_a_delivered_frame_is_the_receivers_own() -> None:
    client, server = pair(InprocNetwork())
    buffer = bytearray(b"gradient")
    client.send("server", [buffer])
    [event] = server.poll(0)
    assert type(event) is Received
    buffer[:4] = b"XXXX"
    view = memoryview(event.frames[0])
    assert bytes(view) == b"gradient"
    view[0] = 0  # it may be worked on in place
    assert buffer == b"XXXXient"


def test_the_hub_names_each_van_once_when_its_inbox_becomes_non_empty() -> None:
    ready: list[str] = []
    network = InprocNetwork(on_ready=lambda van: ready.append(van.uid))
    client, server = InprocVan(network, "client"), InprocVan(network, "server")
    client.connect("server", f"tcp://{HOST}:20000")
    assert ready == []
    assert server.bind(HOST, 0) == 20000
    assert ready == ["client", "server"]
    server.poll(0)
    client.poll(0)
    ready.clear()
    for _ in range(3):
        client.send("server", [b"x"])
    assert ready == ["server"]
    server.send("client", [b"y"])
    assert ready == ["server", "client"]
    server.poll(0)
    client.send("server", [b"x"])
    assert ready == ["server", "client", "server"]
    client.poll(0)
    server.close()
    assert ready[3:] == ["client"]


def test_the_hook_may_poll_the_van_it_is_told_of() -> None:
    seen: list[VanEvent] = []
    network = InprocNetwork(on_ready=lambda van: seen.extend(van.poll(0)))
    client, server = InprocVan(network, "client"), InprocVan(network, "server")
    client.connect("server", f"tcp://{HOST}:{server.bind(HOST, 0)}")
    client.send("server", [b"now"])
    client.close()
    assert [type(event).__name__ for event in seen] == [
        "Connected",
        "Connected",
        "Received",
        "Disconnected",
    ]


def test_free_ports_are_numbered_and_a_hub_is_a_world_of_its_own() -> None:
    for _ in range(2):
        network = InprocNetwork()
        vans = [InprocVan(network, f"van-{number}") for number in range(3)]
        assert vans[0].bind(HOST, 20001) == 20001
        assert [van.bind(HOST, 0) for van in vans[1:]] == [20000, 20002]


def test_who_listens_on_every_interface_is_found_under_any_host() -> None:
    network = InprocNetwork()
    client, server = InprocVan(network, "client"), InprocVan(network, "server")
    client.connect("server", f"tcp://some-host:{server.bind('0.0.0.0', 0)}")
    assert client.poll(0) == [Connected("server")]


def test_a_closed_listener_frees_its_port() -> None:
    network = InprocNetwork()
    InprocVan(network, "first").bind(HOST, 5)
    with pytest.raises(UsageError, match="in use"):
        InprocVan(network, "second").bind(HOST, 5)
    first = InprocVan(network, "third")
    assert first.bind(HOST, 6) == 6
    first.close()
    assert InprocVan(network, "fourth").bind(HOST, 6) == 6


def test_a_descriptor_cannot_be_taken_over_where_there_are_no_sockets() -> None:
    with pytest.raises(UsageError, match="without sockets"):
        InprocVan(InprocNetwork(), "server").bind(HOST, 0, listen_fd=0)


def test_closed_vans_leave_nothing_in_the_hub_or_at_their_peers() -> None:
    network = InprocNetwork()
    server = InprocVan(network, "server")
    address = f"tcp://{HOST}:{server.bind(HOST, 0)}"
    for round_number in range(3):
        for uid in ("a", "b"):
            client = InprocVan(network, uid)
            client.connect("server", address)
            client.connect("nobody", f"tcp://{HOST}:1")
            if uid == "b":
                server.poll(0)
                server.disconnect("b")
            client.close()
        twin = InprocVan(network, "a")
        twin.connect("server", address)
        server.poll(0)
        twin.close()
        assert server.poll(0)[-1:] == [Disconnected("a", "the connection is gone")], round_number
    assert not server._ends
    assert not server._accepted
    assert not network._waiting


def play(seed: int) -> list[tuple[str, str]]:
    """A random hour of five vans in one thread; returns everything they saw, in order."""
    rng = random.Random(seed)
    seen: list[tuple[str, str]] = []
    ready: list[InprocVan] = []
    network = InprocNetwork(on_ready=ready.append)
    hub = InprocVan(network, "hub")
    address = f"tcp://{HOST}:{hub.bind(HOST, 0)}"
    vans = {uid: InprocVan(network, uid) for uid in "abcd"}
    for _ in range(400):
        uid = rng.choice("abcd")
        action = rng.random()
        if action < 0.1:
            vans[uid].connect("hub", address)
        elif action < 0.15:
            vans[uid].close()
            vans[uid] = InprocVan(network, uid)
        elif action < 0.6:
            vans[uid].send("hub", [b"%f" % action])
        else:
            hub.send(uid, [b"%f" % action])
        while ready and rng.random() < 0.7:
            van = ready.pop(rng.randrange(len(ready)))
            seen += [(van.uid, str(event)) for event in van.poll(0) if type(event) is not Received]
    return seen


def test_one_thread_always_sees_the_same_events_in_the_same_order() -> None:
    assert play(1) == play(1)
    assert play(1) != play(2)


@pytest.mark.parametrize("seed", range(5))
def test_beginnings_and_ends_of_a_peer_alternate(seed: int) -> None:
    state: dict[tuple[str, str], str] = {}
    for van, text in play(seed):
        kind, _, rest = text.partition("(peer='")
        peer = rest.partition("'")[0]
        if van == "hub":
            assert state.get((van, peer)) != kind
            state[van, peer] = kind
