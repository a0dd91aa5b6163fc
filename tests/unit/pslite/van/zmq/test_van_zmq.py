"""What only the van over TCP can get wrong: names, descriptors, heartbeats, strangers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.utils.garbage
from van_helpers import join, payloads, poll_until, receive, silence, wait_for

from pslite.errors import ConfigError, UsageError
from pslite.security import derive
from pslite.van.base import Connected, Disconnected, Received, TurnedAway, Van, VanEvent
from pslite.van.zmq.accepted import make_routing_id
from pslite.van.zmq.sockets import LOOPBACK_BUFFER_BYTES
from pslite.van.zmq.van import Wakeup, ZmqVan

HOST = "127.0.0.1"
PLAIN = derive(b"the key of this job", "plain")
Make = Callable[..., ZmqVan]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make(stack: ExitStack) -> Make:
    def make_van(uid: str, **options: Any) -> ZmqVan:
        van = ZmqVan(uid, **options)
        stack.callback(van.close)
        return van

    return make_van


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def greet(client: Van, server: Van, address: str) -> None:
    join(client, server, address)
    client.send("server", [b"hello"])
    assert receive(server) == [[b"hello"]]
    server.send(client.uid, [b"welcome"])
    assert receive(client) == [[b"welcome"]]


def test_host_names_are_resolved_on_both_ends(make: Make) -> None:
    client, server = make("client"), make("server")
    greet(client, server, f"tcp://localhost:{server.bind('localhost', 0)}")


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ipv6_addresses_work_on_both_ends(make: Make) -> None:
    client, server = make("client"), make("server")
    greet(client, server, f"tcp://[::1]:{server.bind('::1', 0)}")


def test_every_interface_is_opened_when_it_is_named(make: Make) -> None:
    client, server = make("client", mechanism=PLAIN), make("server", mechanism=PLAIN)
    greet(client, server, f"tcp://{HOST}:{server.bind('0.0.0.0', 0)}")


@pytest.mark.parametrize(
    ("host", "problem"),
    [
        ("192.0.2.1", "does not have this address"),
        ("no-such-host.invalid", "cannot resolve"),
        ("a..b", "cannot resolve"),
    ],
)
def test_what_is_not_of_this_machine_cannot_be_listened_at(
    make: Make, host: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=rf"cannot listen on {host}:0: .*{problem}"):
        make("server", mechanism=PLAIN).bind(host, 0)


def test_a_name_that_has_no_address_yet_is_tried_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a pod appears in the name service only when the pod runs."""
    client, server = make("client"), make("server")
    port = server.bind(HOST, 0)
    real, asked = socket.getaddrinfo, []

    def late(host: str, *args: object, **kwargs: object) -> object:
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror("not known yet")
        return real(HOST, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", late)
    greet(client, server, f"tcp://late.example:{port}")
    assert asked == ["late.example"] * 3


def test_an_address_that_nobody_listens_at_does_not_hide_another_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name may have several addresses; the attempts go through all of them."""
    client, server = make("client"), make("server")
    port = server.bind(HOST, 0)
    real = socket.getaddrinfo

    def two(host: str, *args: object, **kwargs: object) -> object:
        return [*real("127.0.0.2", *args, **kwargs), *real(HOST, *args, **kwargs)]  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    greet(client, server, f"tcp://two.example:{port}")


def test_an_inherited_listening_socket_is_taken_over(make: Make) -> None:
    with socket.create_server((HOST, 0)) as inherited:
        port = inherited.getsockname()[1]
        descriptor = inherited.detach()
    client, server = make("client"), make("server")
    client.connect("server", f"tcp://{HOST}:{port}")  # before the owner has adopted it
    assert server.bind(HOST, port, listen_fd=descriptor) == port
    assert wait_for(client, Connected) == [Connected("server")]
    assert wait_for(server, Connected) == [Connected("client")]
    server.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def buffer_sizes(port: int) -> list[tuple[int, int]]:
    """What the kernel may hold, sent and received, at each end of this process's connections."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(entry))) as end:
                if port in (end.getsockname()[1], end.getpeername()[1]):
                    options = (socket.SO_SNDBUF, socket.SO_RCVBUF)
                    sizes = [end.getsockopt(socket.SOL_SOCKET, option) for option in options]
                    found.append((sizes[0], sizes[1]))
        except (OSError, IndexError):  # no socket, or not connected
            continue
    return found


def small_buffers() -> tuple[int, int]:
    """As Linux reports them: twice what is asked for, within what it allows."""
    most = (int(Path(f"/proc/sys/net/core/{kind}mem_max").read_text()) for kind in "wr")
    sent, received = (2 * min(LOOPBACK_BUFFER_BYTES, each) for each in most)
    return sent, received


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are listed by Linux")
@pytest.mark.parametrize("is_inherited", [False, True])
def test_connections_within_this_machine_have_small_buffers(make: Make, is_inherited: bool) -> None:
    """What waits in large ones has left the processor's cache when it is read."""
    client, server = make("client"), make("server")
    descriptor = socket.create_server((HOST, 0)).detach() if is_inherited else None
    port = server.bind(HOST, 0, listen_fd=descriptor)
    greet(client, server, f"tcp://{HOST}:{port}")
    assert buffer_sizes(port) == [small_buffers()] * 2


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are listed by Linux")
def test_the_system_sizes_the_buffers_of_connections_to_other_machines(make: Make) -> None:
    client, server = make("client", mechanism=PLAIN), make("server", mechanism=PLAIN)
    port = server.bind("0.0.0.0", 0)
    greet(client, server, f"tcp://{HOST}:{port}")
    # The client knows that this one goes to its own machine, the server does not.
    sizes = buffer_sizes(port)
    assert len(sizes) == 2
    assert sizes.count(small_buffers()) == 1


def test_a_descriptor_that_does_not_listen_is_refused(make: Make, stack: ExitStack) -> None:
    server = make("server")
    plain = stack.enter_context(socket.socket())
    file = os.open(os.devnull, os.O_RDONLY)
    stack.callback(os.close, file)
    listening = stack.enter_context(socket.create_server((HOST, 0)))
    port = listening.getsockname()[1]
    for descriptor, asked, problem in [
        (plain.fileno(), 0, "not a listening TCP socket"),
        (file, 0, "not a socket"),
        (10_000, 0, "not open"),
        (listening.fileno(), port % 65535 + 1, f"listens on port {port}"),
    ]:
        with pytest.raises(
            ConfigError, match=rf"{HOST}:{asked}: descriptor {descriptor} .*{problem}"
        ):
            server.bind(HOST, asked, listen_fd=descriptor)
    assert server.bind(HOST, 0) > 0


def test_a_node_too_busy_to_poll_is_not_taken_for_lost(make: Make) -> None:
    """With a receive limit libzmq would stop reading, and the heartbeats with it."""
    quick = {"heartbeat_interval_s": 0.1, "heartbeat_timeout_s": 0.4}
    client, server = make("client", **quick), make("server", **quick)
    join(client, server, f"tcp://{HOST}:{server.bind(HOST, 0)}")
    for _ in range(2000):
        client.send("server", [b"x" * 10_000])
    silence(client, for_s=1.2)
    assert len(receive(server, 2000)) == 2000


def test_a_peer_that_stops_answering_is_lost_and_the_name_stays_usable(make: Make) -> None:
    """A listener that accepts and never speaks: as a frozen process or a stranger's service."""
    client = make("client", handshake_timeout_s=0.2)
    with socket.create_server((HOST, 0)) as mute:
        port = mute.getsockname()[1]
        client.connect("server", f"tcp://{HOST}:{port}")
        client.send("server", [b"patient"])
        silence(client, for_s=0.5)
    server = make("server")
    server.bind(HOST, port)
    assert wait_for(client, Connected) == [Connected("server")]
    poll_until(server, lambda seen: len(seen) == 2)


def test_a_stranger_that_talks_nonsense_disturbs_nobody(make: Make) -> None:
    client, server = make("client"), make("server")
    port = server.bind(HOST, 0)
    join(client, server, f"tcp://{HOST}:{port}")
    for nonsense in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, bytes(1000)):
        with socket.create_connection((HOST, port)) as stranger:
            stranger.sendall(nonsense)
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        assert all(type(event) is TurnedAway for event in server.poll(0.01))
    client.send("server", [b"still here"])
    assert receive(server) == [[b"still here"]]


def test_a_frame_over_the_limit_is_refused_by_its_sender(make: Make) -> None:
    client = make("client", max_message_bytes=1000)
    with pytest.raises(UsageError, match="at most 1000 bytes, got 1001"):
        client.send("anyone", [b"", memoryview(bytes(1001))])
    client.send("anyone", [bytes(1000)])


def test_a_peer_that_sends_a_frame_over_the_limit_is_disconnected(make: Make) -> None:
    client, server = make("client"), make("server", max_message_bytes=1000)
    join(client, server, f"tcp://{HOST}:{server.bind(HOST, 0)}")
    client.send("server", [bytes(1001)])
    assert [event.peer for event in wait_for(server, Disconnected)] == ["client"]
    assert [event.peer for event in wait_for(client, Disconnected)] == ["server"]
    assert wait_for(client, Connected) == [Connected("server")]
    assert wait_for(server, Connected) == [Connected("client")]


def test_a_small_frame_may_be_reused_at_once_even_before_the_connection(make: Make) -> None:
    """libzmq copies frames under 64 KiB when they are sent; what waits here is no different."""
    client, server = make("client"), make("server")
    header = bytearray(b"first")
    client.connect("server", f"tcp://{HOST}:{server.bind(HOST, 0)}")
    client.send("server", [header])
    header[:] = b"XXXXX"
    wait_for(client, Connected)
    header[:] = b"after"
    client.send("server", [header])
    header[:] = b"XXXXX"
    events = poll_until(server, lambda seen: len(seen) == 3)
    assert payloads(events) == [[b"first"], [b"after"]]


def test_a_hundred_connections_of_one_uid_leave_one(make: Make) -> None:
    """Descriptors are reused at once here, which is what the record of them must survive."""
    server = make("server")
    address = f"tcp://{HOST}:{server.bind(HOST, 0)}"
    other = make("other")
    join(other, server, address)
    client = make("client")
    for _ in range(100):
        client.connect("server", address)
        wait_for(client, Connected)
    client.send("server", [b"the last one"])
    events = poll_until(server, lambda seen: bool(seen) and type(seen[-1]) is Received)
    ups = sum(event == Connected("client") for event in events)
    downs = sum(type(event) is Disconnected and event.peer == "client" for event in events)
    assert ups == downs + 1
    server.send("client", [b"found"])
    assert receive(client) == [[b"found"]]
    other.send("server", [b"untouched"])
    assert receive(server) == [[b"untouched"]]


def test_an_unread_crowd_is_told_apart_when_the_owner_comes_back(make: Make) -> None:
    """Twenty nodes come, speak and go while the owner is away, on few descriptors."""
    server = make("server")
    address = f"tcp://{HOST}:{server.bind(HOST, 0)}"
    for number in range(20):
        guest = ZmqVan(f"guest-{number}")
        guest.connect("server", address)
        wait_for(guest, Connected)
        guest.send("server", [b"%d" % number])
        guest.close()
    stayer = make("stayer")
    stayer.connect("server", address)
    wait_for(stayer, Connected)

    def over(seen: list[VanEvent]) -> bool:
        return sum(type(event) is Disconnected for event in seen) >= 20

    events = poll_until(server, over)
    for number in range(20):
        story = [type(e).__name__ for e in events if e.peer == f"guest-{number}"]
        assert story[0] == "Connected"
        assert story[-1] == "Disconnected"
        assert "Received" in story
    assert [e for e in events if e.peer == "stayer"] == [Connected("stayer")]
    stayer.send("server", [b"alive"])
    assert receive(server) == [[b"alive"]]


def test_closing_gives_back_every_descriptor_and_thread() -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def use() -> None:
        client, server = ZmqVan("client"), ZmqVan("server")
        join(client, server, f"tcp://{HOST}:{server.bind(HOST, 0)}")
        client.send("server", [bytes(100_000)])
        client.connect("nobody", f"tcp://{HOST}:1")
        server.close()
        client.close()

    if not Path("/proc/self/task").is_dir():
        pytest.skip("needs /proc")
    use()  # starts the thread of pyzmq that frees the buffers of large frames
    before = count()
    for _ in range(5):
        use()
    assert count() == before


def test_closing_is_quick_when_a_peer_never_came(make: Make) -> None:
    client = make("client")
    client.connect("server", f"tcp://{HOST}:1")
    client.send("server", [bytes(100_000)])
    client.poll(0.1)
    begin = time.monotonic()
    client.close()
    assert time.monotonic() - begin < 0.9


def test_a_van_that_is_closed_while_its_peers_end_waits_for_none_of_them(
    stack: ExitStack,
) -> None:
    """A connection that has just ended, with messages for it left, held libzmq for ever."""
    context = stack.enter_context(zmq.Context())
    for attempt in range(300):
        server = ZmqVan("server")
        address = f"tcp://{HOST}:{server.bind(HOST, 0)}"
        guests = [context.socket(zmq.DEALER) for _ in range(8)]
        for number, guest in enumerate(guests):
            guest.setsockopt(zmq.ROUTING_ID, make_routing_id(f"guest-{number}", 1, 1))
            guest.connect(address)
            guest.send(b"hello")
        poll_until(server, lambda seen: len(payloads(seen)) == 8)
        leaving = threading.Thread(target=lambda: [guest.close(linger=0) for guest in guests])  # noqa: B023
        leaving.start()
        time.sleep(attempt % 20 * 2e-5)
        for number in range(8):
            for _ in range(4):
                server.send(f"guest-{number}", [bytes(100_000)])
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        closing.join(5)
        leaving.join()
        assert not closing.is_alive()


def test_a_thousand_wakes_before_a_read_cost_one_byte() -> None:
    wakeup = Wakeup()
    for _ in range(1000):
        wakeup.wake()
    assert len(os.read(wakeup.fileno(), 100)) == 1
    wakeup.close()
    wakeup.wake()


def test_a_wake_after_a_read_is_a_new_one() -> None:
    wakeup = Wakeup()
    for _ in range(3):
        wakeup.wake()
        wakeup.read()
        assert wakeup.take()
        assert not wakeup.take()
    wakeup.close()


def test_large_frames_go_by_copy_once_pyzmq_sends_none_without(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an exit handler that runs after pyzmq's own; sent without a copy before that."""
    listener, connecter = make("server"), make("client")
    port = listener.bind(HOST, 0)
    join(connecter, listener, f"tcp://{HOST}:{port}")
    first, second = os.urandom(300_000), os.urandom(300_000)
    connecter.send("server", [b"before", first])
    assert receive(listener) == [[b"before", first]]
    monkeypatch.setattr(zmq.utils.garbage.gc, "_stay_down", True)
    connecter.send("server", [b"after", second, first, b"small"])
    assert receive(listener) == [[b"after", second, first, b"small"]]
    listener.send("client", [second])
    assert receive(connecter) == [[second]]


def test_exit_handlers_registered_after_the_van_is_imported_run_before_that_of_pyzmq() -> None:
    code = """
import atexit
import zmq
import pslite.van.zmq.van
def look():
    print("down" if zmq.utils.garbage.gc._stay_down else "up")
atexit.register(look)
zmq.Frame(bytes(100_000), copy=False)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr, done.returncode) == ("up\n", "", 0)
