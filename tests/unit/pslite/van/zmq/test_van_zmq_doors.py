"""The doors of the van over TCP: who is let in, who is not, and what both ends are told."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import zmq
from van_helpers import join, payloads, receive

from pslite.errors import ConfigError, UsageError
from pslite.security import Mechanism, Proofs, derive
from pslite.van.base import MAX_FRAMES, Connected, Denied, TurnedAway, Van, VanEvent
from pslite.van.zmq import link
from pslite.van.zmq.accepted import make_routing_id
from pslite.van.zmq.authentication import SocketSecurity
from pslite.van.zmq.listener import OTHER_KEY, OTHER_MECHANISM, TAKEN_NAME, RejectedConnections
from pslite.van.zmq.van import ZmqVan

HOST = "127.0.0.1"
KEY, OTHER = b"the key of this job", b"the key of another one"
NAMES = ("plain", "curve")
SECURED = [derive(KEY, name) for name in NAMES]
Make = Callable[..., ZmqVan]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make(stack: ExitStack) -> Make:
    def make_van(uid: str, mechanism: Mechanism | None = None, **options: Any) -> ZmqVan:
        van = ZmqVan(uid, mechanism=mechanism, **options)
        stack.callback(van.close)
        return van

    return make_van


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "DENIED_AFTER_S", 0.3)


def poll_both(
    client: Van, server: Van, enough: Callable[[list[VanEvent], list[VanEvent]], bool]
) -> tuple[list[VanEvent], list[VanEvent]]:
    """All events of both until ``enough`` of them."""
    heard: tuple[list[VanEvent], list[VanEvent]] = ([], [])
    give_up_at = time.monotonic() + 10.0
    while not enough(*heard):
        assert time.monotonic() < give_up_at, heard
        heard[0].extend(client.poll(0.01))
        heard[1].extend(server.poll(0.01))
    return heard


def both_told(client: list[VanEvent], server: list[VanEvent]) -> bool:
    return bool(client) and bool(server)


# -- those who know the key ---------------------------------------------------------------


@pytest.mark.parametrize("mechanism", SECURED, ids=NAMES)
def test_those_who_know_the_key_talk_as_if_there_were_none(
    make: Make, mechanism: Mechanism
) -> None:
    client, server = make("client", mechanism), make("server", mechanism)
    join(client, server, f"tcp://{HOST}:{server.bind(HOST, 0)}")
    client.send("server", [b"header", bytes(200_000)])
    assert receive(server) == [[b"header", bytes(200_000)]]
    server.send("client", [b"answer"])
    assert receive(client) == [[b"answer"]]


@pytest.mark.parametrize("mechanism", SECURED, ids=NAMES)
def test_a_frame_of_exactly_the_limit_arrives_in_spite_of_what_encryption_adds(
    make: Make, mechanism: Mechanism
) -> None:
    limits = {"max_message_bytes": 10_000}
    client, server = make("client", mechanism, **limits), make("server", mechanism, **limits)
    join(client, server, f"tcp://{HOST}:{server.bind(HOST, 0)}")
    client.send("server", [bytes(10_000)])
    assert receive(server) == [[bytes(10_000)]]


def test_a_busy_listener_lets_visitors_wait_and_then_in(make: Make) -> None:
    quick = {"handshake_timeout_s": 0.2}
    client = make("client", SECURED[0], **quick)
    server = make("server", SECURED[0], **quick)
    client.connect("server", f"tcp://{HOST}:{server.bind(HOST, 0)}")
    end = time.monotonic() + 0.7  # several attempts, none of which is answered
    while time.monotonic() < end:
        assert client.poll(0.01) == []
    heard, _ = poll_both(client, server, both_told)
    assert heard == [Connected("server")]


# -- those who do not ---------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", NAMES)
def test_another_key_is_told_on_both_ends(make: Make, name: str) -> None:
    client, server = make("client", derive(OTHER, name)), make("server", derive(KEY, name))
    client.send("server", [b"never"])
    address = f"tcp://{HOST}:{server.bind(HOST, 0)}"
    client.connect("server", address)
    client.send("server", [b"never"])
    at_client, at_server = poll_both(client, server, both_told)
    (denied,) = at_client
    assert type(denied) is Denied
    assert denied.peer == "server"
    assert address.removeprefix("tcp://") in denied.reason
    assert "compare the job key (PS_JOB_KEY_FILE) and PS_SECURITY" in denied.reason
    assert at_server == [TurnedAway(HOST if name == "plain" else "", OTHER_KEY, 1)]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (None, SECURED[0]),
        (None, SECURED[1]),
        (SECURED[0], None),
        (SECURED[1], None),
        (SECURED[0], SECURED[1]),
        (SECURED[1], SECURED[0]),
    ],
    ids=lambda mechanism: mechanism.name if mechanism else "none",
)
def test_another_mechanism_is_told_to_who_connects(
    make: Make, ours: Mechanism | None, theirs: Mechanism | None
) -> None:
    client, server = make("client", ours), make("server", theirs)
    client.connect("server", f"tcp://{HOST}:{server.bind(HOST, 0)}")
    # The end that notices first hangs up; the other one may see no more than that.
    at_client, at_server = poll_both(client, server, lambda mine, _: bool(mine))
    assert [type(event) for event in at_client] == [Denied]
    assert at_server in ([], [TurnedAway("", OTHER_MECHANISM, 1)])


def test_who_was_denied_does_not_knock_again_and_keeps_nothing(make: Make) -> None:
    client, server = make("client", derive(OTHER, "plain")), make("server", SECURED[0])
    client.connect("server", f"tcp://{HOST}:{server.bind(HOST, 0)}")
    poll_both(client, server, both_told)
    client.send("server", [b"x" * 1000])
    end = time.monotonic() + 0.4
    while time.monotonic() < end:
        assert client.poll(0.01) == []
        assert server.poll(0.01) == []


def test_a_new_connect_after_a_denial_is_a_new_chance(make: Make) -> None:
    client, server = make("client", SECURED[0]), make("server", SECURED[0])
    wrong = make("wrong", derive(OTHER, "plain"))
    client.connect("server", f"tcp://{HOST}:{wrong.bind(HOST, 0)}")
    (denied,), _ = poll_both(client, wrong, lambda mine, _: bool(mine))
    assert type(denied) is Denied
    join(client, server, f"tcp://{HOST}:{server.bind(HOST, 0)}")


@pytest.mark.usefixtures("impatient")
def test_a_service_that_is_no_node_is_told_after_a_while(make: Make) -> None:
    client = make("client")
    with socket.create_server((HOST, 0)) as service:
        service.setblocking(False)
        client.connect("server", f"tcp://{HOST}:{service.getsockname()[1]}")
        events: list[VanEvent] = []
        give_up_at = time.monotonic() + 10.0
        while not events:
            assert time.monotonic() < give_up_at
            events = client.poll(0.01)
            try:
                service.accept()[0].close()
            except BlockingIOError:
                continue
    (denied,) = events
    assert type(denied) is Denied
    assert "closes each connection during the handshake" in denied.reason


# -- loopback -----------------------------------------------------------------------------


def test_without_a_key_no_address_beyond_this_machine_is_listened_at(make: Make) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(ConfigError, match=rf"cannot listen on {host}:0: .*PS_JOB_KEY_FILE"):
            make("server").bind(host, 0)


def test_without_a_key_a_name_counts_as_its_addresses(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def both(host: str, *args: object, **kwargs: object) -> object:
        found = real(HOST, *args, **kwargs)  # type: ignore[arg-type]
        return [*found, (*found[0][:4], ("192.0.2.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    with pytest.raises(ConfigError, match="PS_JOB_KEY_FILE"):
        make("server").bind("both.example", 0)


def test_without_a_key_nobody_beyond_this_machine_is_connected_to(make: Make) -> None:
    client = make("client")
    client.connect("server", "tcp://192.0.2.1:9000")
    (denied,) = client.poll(5.0)
    assert type(denied) is Denied
    assert "cannot connect to 192.0.2.1:9000" in denied.reason
    assert "PS_JOB_KEY_FILE" in denied.reason


def test_an_inherited_socket_counts_as_its_real_address(make: Make) -> None:
    with socket.create_server(("0.0.0.0", 0)) as inherited:
        port = inherited.getsockname()[1]
        with pytest.raises(ConfigError, match="PS_JOB_KEY_FILE"):
            make("server").bind(HOST, port, listen_fd=inherited.fileno())


def test_a_libzmq_without_curve_is_told_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq, "has", lambda _: False)
    with pytest.raises(ConfigError, match=r"libzmq with CURVE.*PS_SECURITY=plain"):
        SocketSecurity(SECURED[1], "server")
    assert SocketSecurity(SECURED[0], "server").credentials is not None


# -- those who took an address over, under PLAIN ------------------------------------------


class Thief:
    """Listens where a node was, lets everybody in, and keeps what they hand over."""

    def __init__(self, stack: ExitStack, port: int = 0) -> None:
        context = stack.enter_context(zmq.Context())
        context.setsockopt(zmq.LINGER, 0)
        self._zap, self._router = (
            stack.enter_context(context.socket(zmq.ROUTER)) for _ in range(2)
        )
        self._zap.bind("inproc://zeromq.zap.01")
        self._router.setsockopt(zmq.PLAIN_SERVER, 1)
        self._router.setsockopt(zmq.ZAP_DOMAIN, b"any")
        self._router.bind(f"tcp://{HOST}:{port or '*'}")
        self.port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.passwords: list[bytes] = []
        self.heard: list[list[bytes]] = []

    def look(self, word: bytes = b"") -> None:
        """Let in who knocks; say ``word`` to them."""
        while self._zap.poll(0):
            frames = self._zap.recv_multipart()
            self.passwords.append(frames[-1])
            self._zap.send_multipart([frames[0], b"", frames[2], frames[3], b"200", b"", b"", b""])
        while self._router.poll(0):
            visitor, *frames = self._router.recv_multipart()
            self.heard.append(frames)
            if word:
                self._router.send_multipart([visitor, word])


def visit(make: Make, thief: Thief, word: bytes = b"") -> tuple[ZmqVan, list[VanEvent]]:
    """A node that has something for the server; what it was told until it had come twice."""
    client = make("client", SECURED[0], handshake_timeout_s=0.2)
    client.connect("server", f"tcp://{HOST}:{thief.port}")
    client.send("server", [b"for the server only"])
    events: list[VanEvent] = []
    give_up_at = time.monotonic() + 10.0
    while len(thief.heard) < 2:
        assert time.monotonic() < give_up_at, (events, thief.heard)
        events += client.poll(0.01)
        thief.look(word)
    return client, events


@pytest.mark.parametrize(
    "word", [b"", b"trust me", bytes(Proofs.CHALLENGE_BYTES)], ids=["silence", "words", "zeros"]
)
def test_who_took_a_nodes_address_over_is_told_nothing(
    make: Make, stack: ExitStack, word: bytes
) -> None:
    thief = Thief(stack)
    _, events = visit(make, thief, word)
    assert events == []
    assert thief.heard == [[b""]] * 2


def test_a_password_that_was_handed_over_opens_no_other_door(make: Make, stack: ExitStack) -> None:
    thief = Thief(stack)
    visit(make, thief)
    scheduler = make("scheduler", SECURED[0])
    port = scheduler.bind(HOST, 0)
    raw_dealer(stack, port, "client", thief.passwords[0])
    events: list[VanEvent] = []
    while not events:
        events += scheduler.poll(5.0)
    assert [(type(event), event.reason) for event in events] == [(TurnedAway, OTHER_KEY)]  # type: ignore[union-attr]


def raw_dealer(stack: ExitStack, port: int, uid: str, password: bytes) -> zmq.Socket[bytes]:
    context = stack.enter_context(zmq.Context())
    dealer = stack.enter_context(context.socket(zmq.DEALER))
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.ROUTING_ID, make_routing_id(uid, 2**62, 1)),
        (zmq.PROBE_ROUTER, 1),
        (zmq.PLAIN_USERNAME, b"pslite"),
        (zmq.PLAIN_PASSWORD, password),
    ):
        dealer.setsockopt(option, value)
    dealer.connect(f"tcp://{HOST}:{port}")
    return dealer


def test_a_listener_hears_nobody_who_has_its_password_and_no_proof(
    make: Make, stack: ExitStack
) -> None:
    """Somebody was given it at this address before, and the node is back."""
    server = make("server", SECURED[0])
    dealer = raw_dealer(
        stack, server.bind(HOST, 0), "client", Proofs(SECURED[0].secret).password("server")
    )
    for message in (b"a message", bytes(Proofs.PROOF_BYTES), b"another"):
        dealer.send(message)
    events: list[VanEvent] = []
    while not events:
        events += server.poll(5.0)
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        events += server.poll(0.01)
    assert events == [TurnedAway("", OTHER_KEY, 1)]
    server.send("client", [b"unsaid"])
    assert len(dealer.recv()) == Proofs.CHALLENGE_BYTES
    assert not dealer.poll(50)


# -- those who know the key and misbehave -------------------------------------------------


def test_a_name_that_the_listener_has_itself_or_gave_to_another_is_not_taken_over(
    make: Make, stack: ExitStack
) -> None:
    """Else whoever connects to a server could speak as its scheduler."""
    server, scheduler = make("server"), make("scheduler")
    address = f"tcp://{HOST}:{server.bind(HOST, 0)}"
    join(server, scheduler, f"tcp://{HOST}:{scheduler.bind(HOST, 0)}", name="scheduler")
    context = stack.enter_context(zmq.Context())
    for number, name in enumerate(("scheduler", "server"), 1):
        dealer = context.socket(zmq.DEALER)
        stack.callback(dealer.close, linger=0)
        dealer.setsockopt(zmq.ROUTING_ID, make_routing_id(name, 2**62, number))
        dealer.connect(address)
        dealer.send_multipart([b"I am", name.encode()])
    told: list[VanEvent] = []
    while len(told) < 1:
        told += server.poll(5.0)
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        told += server.poll(0.01)
    assert told == [TurnedAway("", TAKEN_NAME, 1)]
    scheduler.send("server", [b"the real one"])
    events: list[VanEvent] = []
    while not payloads(events):
        events += server.poll(1.0)
    assert payloads(events) == [[b"the real one"]]


def test_the_name_of_a_peer_that_was_called_stays_its_own_after_the_end(
    make: Make, stack: ExitStack
) -> None:
    """Else somebody could come to a server and go on as the scheduler that has left."""
    server, scheduler = make("server"), make("scheduler")
    address = f"tcp://{HOST}:{server.bind(HOST, 0)}"
    join(server, scheduler, f"tcp://{HOST}:{scheduler.bind(HOST, 0)}", name="scheduler")
    server.disconnect("scheduler")
    thief = make("scheduler")
    thief.connect("server", address)
    told: list[VanEvent] = []
    give_up_at = time.monotonic() + 10.0
    while not told and time.monotonic() < give_up_at:
        thief.poll(0.01)
        told += server.poll(0.01)
    assert told == [TurnedAway("", TAKEN_NAME, 1)]


def test_a_message_of_too_many_frames_or_bytes_is_refused_by_its_sender(make: Make) -> None:
    client = make("client", max_message_bytes=1000)
    with pytest.raises(UsageError, match="a message must have at most"):
        client.send("anyone", [b""] * (MAX_FRAMES + 1))
    with pytest.raises(UsageError, match="a message must have at most"):
        client.send("anyone", [bytes(1000)] * 17)
    client.send("anyone", [bytes(1000)] * 16)


@pytest.mark.parametrize("frames", [[b"x"] * (MAX_FRAMES + 1), [bytes(1000)] * 17])
def test_who_sends_a_message_over_the_limits_is_not_heard_any_more(
    make: Make, stack: ExitStack, frames: list[bytes]
) -> None:
    server = make("server", max_message_bytes=1000)
    address = f"tcp://{HOST}:{server.bind(HOST, 0)}"
    good = make("good")
    join(good, server, address)
    context = stack.enter_context(zmq.Context())
    dealer = context.socket(zmq.DEALER)
    stack.callback(dealer.close, linger=0)
    dealer.setsockopt(zmq.ROUTING_ID, make_routing_id("bad", 1, 1))
    dealer.connect(address)
    dealer.send_multipart([b"hello", b""])
    dealer.send_multipart(frames)
    dealer.send_multipart([b"still", b"there"])
    events: list[VanEvent] = []
    while len(events) < 3:
        events += server.poll(5.0)
    assert [type(event).__name__ for event in events] == ["Connected", "Received", "Disconnected"]
    good.send("server", [b"undisturbed"])
    assert receive(server) == [[b"undisturbed"]]


# -- the record of strangers --------------------------------------------------------------


def test_a_stranger_who_keeps_knocking_is_told_once_a_minute_with_a_count() -> None:
    strangers = RejectedConnections()
    told = [
        event
        for now in (0.0, 1.0, 2.0, 59.0, 60.0, 61.0, 121.0)
        for event in strangers.note("10.0.0.9", OTHER_KEY, now)
    ]
    assert told == [
        TurnedAway("10.0.0.9", OTHER_KEY, 1),
        TurnedAway("10.0.0.9", OTHER_KEY, 4),
        TurnedAway("10.0.0.9", OTHER_KEY, 2),
    ]
    assert strangers.count == {OTHER_KEY: 7}


def test_strangers_from_ever_new_addresses_fill_neither_the_memory_nor_the_log() -> None:
    strangers = RejectedConnections()
    told = [
        event for number in range(10_000) for event in strangers.note(f"{number}", OTHER_KEY, 0.0)
    ]
    assert len(told) == 257
    assert told[-1] == TurnedAway("", OTHER_KEY, 1)
    assert strangers.count == {OTHER_KEY: 10_000}
