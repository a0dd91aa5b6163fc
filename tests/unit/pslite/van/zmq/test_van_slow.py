"""The van over TCP on links that are slow, silent or cut: bytes that move are a sign of life."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from slow_link import SlowLink
from van_helpers import join, payloads, poll_until, receive, wait_for

from pslite.van.base import Connected, Disconnected, InTransit, Received
from pslite.van.cutting import MARK, PIECE_BYTES
from pslite.van.zmq.flows import (
    TAKEN_BYTES,
    FlowState,
    Silence,
    counts_bytes,
    end_flow,
    flow_cookie,
    flow_state,
    in_transit,
)
from pslite.van.zmq.link import Attempts
from pslite.van.zmq.van import ZmqVan

HOST = "127.0.0.1"
QUICK = {"heartbeat_interval_s": 0.1, "heartbeat_timeout_s": 0.5}
Make = Callable[..., ZmqVan]
Slow = Callable[..., SlowLink]

pytestmark = pytest.mark.skipif(not counts_bytes(), reason="this system does not count TCP's bytes")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make(stack: ExitStack) -> Make:
    def make_van(uid: str, **options: Any) -> ZmqVan:
        van = ZmqVan(uid, **{**QUICK, **options})
        stack.callback(van.close)
        return van

    return make_van


@pytest.fixture
def slow(stack: ExitStack) -> Slow:
    """A link to a van that listens."""

    def make_link(server: ZmqVan, bytes_per_s: float, **options: Any) -> SlowLink:
        link = SlowLink(server.bind(HOST, 0), bytes_per_s, **options)
        stack.callback(link.close)
        return link

    return make_link


def receive_both(vans: tuple[ZmqVan, ZmqVan]) -> None:
    """Poll until each has one message, and nothing else."""
    seen: dict[str, list[object]] = {van.uid: [] for van in vans}
    give_up_at = time.monotonic() + 30.0
    while not all(seen.values()):
        assert time.monotonic() < give_up_at, seen
        for van in vans:
            seen[van.uid] += van.poll(0.02)
    assert [type(event) for events in seen.values() for event in events] == [Received, Received]


def test_a_frame_that_takes_longer_than_the_timeout_does_not_end_its_connection(
    make: Make, slow: Slow
) -> None:
    client, server = make("client"), make("server")
    link = slow(server, 400_000)
    join(client, server, f"tcp://{HOST}:{link.port}")
    began_at = time.monotonic()
    frame = os.urandom(800_000)
    client.send("server", [b"there", frame])
    server.send("client", [b"back", frame])
    receive_both((client, server))
    assert time.monotonic() - began_at > 2 * QUICK["heartbeat_timeout_s"]
    assert link.connections == 1


def test_a_link_over_which_nothing_comes_any_more_is_lost_at_both_ends(
    make: Make, slow: Slow
) -> None:
    client, server = make("client"), make("server")
    link = slow(server, 1e6)
    join(client, server, f"tcp://{HOST}:{link.port}")
    link.is_broken = True
    assert [event.peer for event in wait_for(client, Disconnected)] == ["server"]
    assert [event.peer for event in wait_for(server, Disconnected)] == ["client"]
    link.is_broken = False
    assert Connected("server") in poll_until(client, lambda seen: Connected("server") in seen)


def test_silence_ends_a_further_connection_too(make: Make, slow: Slow) -> None:
    client, server = make("client"), make("server")
    link = slow(server, 1e6)
    join(client, server, f"tcp://{HOST}:{link.port}")
    server.send("client", [b"known"])
    receive(client)
    client.spread("server", 3)
    give_up_at = time.monotonic() + 10
    while link.connections < 3:
        assert time.monotonic() < give_up_at
        client.poll(0.01), server.poll(0.01)
    link.is_broken = True
    wait_for(client, Disconnected)


def lasts(*looks: tuple[float, int]) -> list[float]:
    """What is said of (seconds since something arrived, bytes acknowledged), second by second."""
    silence = Silence()
    return [
        silence.lasts(FlowState(silent_s, 0, acked_bytes), float(now))
        for now, (silent_s, acked_bytes) in enumerate(looks)
    ]


def test_who_takes_more_than_heartbeats_is_not_silent() -> None:
    beat, many = 100, TAKEN_BYTES + 1
    assert lasts((0.5, beat), (1.5, 2 * beat), (2.5, 3 * beat)) == [0.5, 1.5, 2.5]
    assert lasts((6.0, many), (7.0, 2 * many), (8.0, 2 * many)) == [0.0, 0.0, 1.0]
    assert lasts((6.0, many), (7.0, many + beat), (0.25, many + beat)) == [0.0, 1.0, 0.25]


def test_a_connection_whose_other_end_takes_bytes_and_is_not_heard_is_kept(
    make: Make, slow: Slow
) -> None:
    client, server = make("client"), make("server")
    link = slow(server, 400_000)
    join(client, server, f"tcp://{HOST}:{link.port}")
    link.is_mute = True
    client.send("server", [b"there", os.urandom(600_000)])
    seen: list[object] = []
    give_up_at = time.monotonic() + 30.0
    while not seen:  # three times as long as a silence may last
        assert time.monotonic() < give_up_at
        seen += server.poll(0.02)
        assert client.poll(0) == []
    assert [type(event) for event in seen] == [Received]
    assert [event.peer for event in wait_for(client, Disconnected)] == ["server"]


# -- attempts to connect ------------------------------------------------------------------


def test_a_handshake_of_three_seconds_succeeds(make: Make, slow: Slow) -> None:
    """64 bytes of greeting and 50 more each way, and heartbeats in between."""
    client = make("client", heartbeat_interval_s=1.0, heartbeat_timeout_s=5.0)
    server = make("server", heartbeat_interval_s=1.0, heartbeat_timeout_s=5.0)
    link = slow(server, 40.0)
    began_at = time.monotonic()
    join(client, server, f"tcp://{HOST}:{link.port}")
    assert time.monotonic() - began_at > 2.5
    assert link.connections == 1


def test_both_ends_know_that_a_connection_is_being_made_when_bytes_arrive(
    make: Make, slow: Slow
) -> None:
    client, server = make("client"), make("server")
    assert not client.is_answered("server")
    assert not server.is_answered("client")
    link = slow(server, 20.0)
    client.connect("server", f"tcp://{HOST}:{link.port}")
    assert not client.is_answered("server")
    give_up_at = time.monotonic() + 10
    while not (client.is_answered("server") and server.is_answered("client")):
        assert time.monotonic() < give_up_at
        assert client.poll(0.02) == server.poll(0.02) == []
    link.bytes_per_s = 1e6
    wait_for(client, Connected)
    wait_for(server, Connected)
    assert not client.is_answered("server")
    assert not server.is_answered("client")


def test_a_peer_that_was_there_and_does_not_listen_any_more_is_refused(make: Make) -> None:
    client, server = make("client"), make("server")
    port = server.bind(HOST, 0)
    client.connect("server", f"tcp://{HOST}:{port}")
    client.connect("nobody", f"tcp://{HOST}:1")
    wait_for(client, Connected)
    assert not client.is_refused("server")
    server.close()
    give_up_at = time.monotonic() + 10
    while not client.is_refused("server"):
        assert time.monotonic() < give_up_at
        client.poll(0.02)
    assert not client.is_refused("nobody"), "it may not have begun to listen"
    assert not client.is_refused("stranger")
    again = make("server")
    assert again.bind(HOST, port) == port
    wait_for(client, Connected)
    assert not client.is_refused("server")


def test_where_somebody_listens_and_says_nothing_no_connection_is_about_to_come(
    make: Make,
) -> None:
    client = make("client")
    with socket.create_server((HOST, 0)) as listening:
        client.connect("server", f"tcp://{HOST}:{listening.getsockname()[1]}")
        listening.settimeout(10)
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.recv(1)  # the client speaks first, to whoever is there
            assert client.poll(0.05) == []
            assert not client.is_answered("server")


def times_of_syns(until_s: float) -> list[float]:
    """When SYNs leave while nothing is answered, by a kernel that waits 1, 2, 4 s in between."""
    attempts, began_at, syns = Attempts(), 0.0, []
    while began_at < until_s:
        ends_at = began_at + attempts.timeout_s
        syns += [began_at + after for after in (0, 1, 3, 7) if began_at + after < ends_at]
        began_at = ends_at + attempts.failed(attempts.timeout_s)
    return syns


def test_a_network_that_comes_back_is_tried_again_soon() -> None:
    """PS_LOST_AFTER is 5 s: with one attempt alone nothing leaves between 3 and 7 s."""
    syns = times_of_syns(60)
    gaps = [after - before for before, after in itertools.pairwise(syns)]
    assert max(gaps) < 3.1
    assert max(gap for gap, at in zip(gaps, syns, strict=False) if at < 3.6) < 1.7


def test_attempts_grow_longer_only_while_nobody_answers() -> None:
    """Where an answer takes seconds, a short attempt would never be answered."""
    attempts = Attempts()
    for _ in range(20):
        attempts.failed(lasted_s=0.001)  # somebody did: the port is closed
    assert attempts.timeout_s < 2
    for _ in range(5):
        attempts.failed(lasted_s=attempts.timeout_s)
    assert attempts.timeout_s == 5
    attempts.succeeded()
    assert attempts.timeout_s < 2
    assert attempts.failed(0.001) < 0.1


# -- what the kernel tells ----------------------------------------------------------------


@pytest.fixture
def pair(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    with socket.create_server((HOST, 0)) as server:
        client = stack.enter_context(socket.create_connection(server.getsockname()))
        accepted, _ = server.accept()
    return client, stack.enter_context(accepted)


def test_the_kernel_counts_bytes_and_silence(pair: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = pair
    sender.sendall(b"x" * 1000)
    receiver.recv(1000, socket.MSG_WAITALL)
    time.sleep(0.2)
    there, here = flow_state(receiver.fileno()), flow_state(sender.fileno())
    assert there is not None and here is not None
    assert there.received_bytes == 1000
    assert here.acked_bytes in (1000, 1001)  # some kernels count the SYN
    assert there.silent_s >= 0.1


def test_what_is_not_a_connection_has_no_state(pair: tuple[socket.socket, socket.socket]) -> None:
    reading, writing = os.pipe()
    assert flow_state(reading) is None
    assert flow_cookie(reading) == b""
    os.close(reading), os.close(writing)
    assert flow_state(reading) is None
    assert not end_flow(reading, b"")


def test_only_the_connection_that_is_meant_is_ended(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    client, accepted = pair
    assert flow_cookie(client.fileno()) != flow_cookie(accepted.fileno())
    assert not end_flow(accepted.fileno(), flow_cookie(client.fileno()))
    client.sendall(b"1")
    assert accepted.recv(1) == b"1"
    assert end_flow(accepted.fileno(), flow_cookie(accepted.fileno()))
    assert accepted.recv(1) == b"" == client.recv(1)
    assert accepted.fileno() >= 0  # its owner closes it


# -- large frames -------------------------------------------------------------------------


def test_a_frame_larger_than_any_that_travels_arrives_whole_both_ways(make: Make) -> None:
    client, server = make("client"), make("server")
    join(client, server, f"tcp://{HOST}:{server.bind(HOST, 0)}")
    large = os.urandom(2 * PIECE_BYTES + 12345)
    for _ in range(2):
        client.send("server", [b"head", large, b"", b"tail"])
        assert receive(server) == [[b"head", large, b"", b"tail"]]
        server.send("client", [memoryview(large)[1:], large])
        assert receive(client) == [[large[1:], large]]


def test_what_had_come_of_a_large_frame_is_dropped_with_its_connection(
    make: Make, slow: Slow
) -> None:
    # It is the link that ends the first connection, and nothing ends the second one.
    client, server = (make(uid, heartbeat_timeout_s=30.0) for uid in ("client", "server"))
    link = slow(server, 50e6, cut_after=PIECE_BYTES + 100_000)
    join(client, server, f"tcp://{HOST}:{link.port}")
    large = os.urandom(2 * PIECE_BYTES)
    client.send("server", [b"lost", large])
    poll_until(server, lambda seen: Disconnected in map(type, seen), 30.0)
    link.cut_after = 0
    wait_for(client, Disconnected)
    wait_for(client, Connected)
    client.send("server", [b"again", large])
    events = poll_until(server, lambda seen: Received in map(type, seen), 30.0)
    assert payloads(events) == [[b"again", large]]


def test_pieces_that_make_no_message_end_what_is_heard_of_their_sender(make: Make) -> None:
    client, server = make("client"), make("server")
    join(client, server, f"tcp://{HOST}:{server.bind(HOST, 0)}")
    client.send("server", [MARK, b"the middle of nothing"])
    assert [event.peer for event in wait_for(server, Disconnected)] == ["client"]
    server.send("client", [b"not sent"])


def test_what_a_link_has_still_to_bring_is_known_at_both_ends(make: Make, slow: Slow) -> None:
    client, server = make("client"), make("server")
    link = slow(server, 1e6)
    client.send("server", [bytes(1000)])
    assert client.in_transit("server") == (0, 0)  # nobody of this name
    client.connect("server", f"tcp://{HOST}:{link.port}")
    client.send("server", [bytes(1000)])
    assert client.in_transit("server") == (1000, None)  # waits for the connection
    wait_for(client, Connected)
    poll_until(server, lambda seen: len(seen) == 2)
    link.is_broken = True
    for van, peer in ((client, "server"), (server, "client")):
        van.send(peer, [bytes(2_000_000)])
        wait_until_known(van, peer)
    link.is_broken, link.bytes_per_s = False, 50e6
    receive_both((client, server))
    assert client.in_transit("server") == server.in_transit("client") == (0, 0)


def wait_until_known(van: ZmqVan, peer: str) -> None:
    """libzmq's thread has given the kernel what it takes: far from all of it arrives."""
    give_up_at = time.monotonic() + 10
    while True:
        nbytes, queued = van.in_transit(peer)
        if queued is not None and 1_000_000 < queued <= nbytes < 2_000_001:
            return
        assert time.monotonic() < give_up_at, (nbytes, queued)
        time.sleep(0.01)


class Flow:
    """A connection whose counters are set by the test."""

    def __init__(self, *, sent: int, acked: int = 0, in_network: int = 0) -> None:
        self.descriptor: int | None = id(self)
        self.sent_bytes = sent
        self.state = FlowState(0.0, 0, acked, in_network)


@pytest.fixture
def flows(monkeypatch: pytest.MonkeyPatch) -> Callable[..., InTransit]:
    """Return what is in transit on these flows together."""

    def ask(*flows: Flow) -> InTransit:
        states = {flow.descriptor: flow.state for flow in flows}
        monkeypatch.setattr("pslite.van.zmq.flows.flow_state", states.get)
        return in_transit(flows)

    return ask


def test_what_has_left_this_machine_is_not_queued(flows: Any) -> None:
    one, other = Flow(sent=1000, acked=100, in_network=300), Flow(sent=50, acked=10)
    assert flows(one) == (900, 600)
    assert flows(one, other) == (940, 640)


def test_nothing_is_queued_while_one_of_several_connections_is_idle(flows: Any) -> None:
    busy, idle = Flow(sent=1000), Flow(sent=10, acked=5, in_network=1448)
    assert flows(busy, idle) == (1005, 0)


def test_without_a_connection_nothing_is_known(flows: Any) -> None:
    ended = Flow(sent=1000)
    ended.descriptor = None
    assert flows(ended) == flows() == (0, None)


def test_what_libzmq_adds_does_not_count_once_all_has_arrived(flows: Any) -> None:
    flow = Flow(sent=100, acked=130)
    assert flows(flow) == (0, 0)
    flow.sent_bytes += 5000
    assert flows(flow) == (5000, 5000)


def test_a_system_that_does_not_count_sets_no_limit(
    flows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pslite.van.zmq.flows.counts_bytes", lambda: False)
    assert flows(Flow(sent=1000)) == (0, 0)


def test_counters_that_stay_zero_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    received = FlowState(0.0, 4, 0)
    monkeypatch.setattr("pslite.van.zmq.flows.flow_state", lambda descriptor: received)
    monkeypatch.setattr("pslite.van.zmq.flows._TRIAL_S", 0.01)
    assert not counts_bytes.__wrapped__()
