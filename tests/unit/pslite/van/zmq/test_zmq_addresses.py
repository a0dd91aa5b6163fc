"""Names of hosts: a name server that is slow, or has no answer yet, holds up nobody else."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from van_helpers import join, poll_until, receive, wait_for

import pslite
from pslite.config import Config
from pslite.errors import DeadlineError
from pslite.node import start
from pslite.node.log import Log
from pslite.van.base import Connected, Disconnected
from pslite.van.zmq import addresses
from pslite.van.zmq.addresses import HostAddresses, HostResolver
from pslite.van.zmq.van import ZmqVan

HOST, NAME = "127.0.0.1", "head.example"


class NameServer:
    """Answers for ``NAME``: with an address, or not (yet), or not at all until ``open`` is set."""

    def __init__(self) -> None:
        self.has_address = True
        self.open = threading.Event()
        self.open.set()
        self.asked: Counter[str] = Counter()
        self._real = socket.getaddrinfo

    def __call__(self, host: str, *args: Any, flags: int = 0, **kwargs: Any) -> Any:
        if host != NAME or flags & socket.AI_NUMERICHOST:
            return self._real(host, *args, flags=flags, **kwargs)
        self.asked[threading.current_thread().name] += 1
        assert self.open.wait(20.0)
        if not self.has_address:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self._real(HOST, *args, flags=flags, **kwargs)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server)
    monkeypatch.setattr(addresses, "LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr(start, "LOOK_AGAIN_S", 0.05)
    yield server
    server.open.set()


@pytest.fixture
def make() -> Iterator[Callable[..., ZmqVan]]:
    with ExitStack() as stack:

        def make_van(uid: str, **options: Any) -> ZmqVan:
            van = ZmqVan(uid, **options)
            stack.callback(van.close)
            return van

        yield make_van


# -- vans ---------------------------------------------------------------------------------


def test_a_name_server_that_does_not_answer_holds_up_no_other_connection(
    names: NameServer, make: Callable[..., ZmqVan]
) -> None:
    client, one, two = make("client"), make("one"), make("two")
    names.open.clear()
    client.connect("one", f"tcp://{NAME}:{one.bind(HOST, 0)}")
    join(client, two, f"tcp://{HOST}:{two.bind(HOST, 0)}", name="two")
    client.send("two", [b"meanwhile"])
    assert receive(two) == [[b"meanwhile"]]
    names.open.set()
    assert wait_for(client, Connected) == [Connected("one")]
    assert set(names.asked) == {"pslite-name"}


def test_who_was_connected_to_is_not_looked_up_again(
    names: NameServer, make: Callable[..., ZmqVan]
) -> None:
    client, server = make("client"), make("server")
    port = server.bind(HOST, 0)
    client.connect("server", f"tcp://{NAME}:{port}")
    wait_for(client, Connected)
    asked = names.asked.copy()
    names.open.clear()
    server.close()
    poll_until(client, lambda events: any(type(event) is Disconnected for event in events))
    again = make("server")
    again.bind(HOST, port)
    assert wait_for(client, Connected) == [Connected("server")]
    assert names.asked == asked


def test_a_name_that_gets_its_address_later_is_asked_for_again(
    names: NameServer, make: Callable[..., ZmqVan]
) -> None:
    names.has_address = False
    client, server = make("client"), make("server")
    client.connect("server", f"tcp://{NAME}:{server.bind(HOST, 0)}")
    poll_until(client, lambda _: names.asked.total() >= 2)
    names.has_address = True
    assert wait_for(client, Connected) == [Connected("server")]


def test_what_was_looked_up_before_is_used_at_once(
    names: NameServer, make: Callable[..., ZmqVan]
) -> None:
    names.open.clear()
    client, server = make("client", hosts={NAME: HostAddresses((HOST,))}), make("server")
    client.connect("server", f"tcp://{NAME}:{server.bind(HOST, 0)}")
    assert wait_for(client, Connected) == [Connected("server")]


def test_an_address_is_known_without_asking_anybody(names: NameServer) -> None:
    for address in (HOST, "::1", "192.0.2.7"):
        place = HostResolver(address, lambda: None)
        place.look(0.0)
        assert (place.known, place.is_looking) == (HostAddresses((address,)), False)
    assert not names.asked


# -- nodes --------------------------------------------------------------------------------


def waiting(timeout_s: float, lines: list[str]) -> HostAddresses:
    config = Config(root_uri=NAME, rendezvous_timeout_s=timeout_s, roster_interval_s=0.05)
    return start.wait_for_address(config, Log("W1", 0, lines.append))


def test_a_node_waits_for_the_schedulers_name_and_says_so(names: NameServer) -> None:
    names.has_address = False

    def write(line: str) -> None:
        lines.append(line)
        names.has_address = True

    lines: list[str] = []
    config = Config(root_uri=NAME, rendezvous_timeout_s=20.0, roster_interval_s=0.05)
    assert start.wait_for_address(config, Log("W1", 0, write)) == HostAddresses((HOST,))
    assert f"resolving '{NAME}' for 0 s: [Errno -2] Name or" in lines[0]


def test_a_name_without_an_address_in_time_is_named(names: NameServer) -> None:
    names.has_address = False
    with pytest.raises(
        DeadlineError, match=rf"PS_RENDEZVOUS_TIMEOUT.*DMLC_PS_ROOT_URI={NAME}: .*not known"
    ):
        waiting(0.2, [])


def test_a_name_server_that_never_answers_is_not_waited_for_longer(names: NameServer) -> None:
    names.open.clear()
    lines: list[str] = []
    with pytest.raises(DeadlineError, match=f"{NAME}: no name server answers"):
        waiting(0.2, lines)
    assert "no name server answers" in lines[0]


@pytest.mark.parametrize("role", ["server", "worker"])
def test_servers_and_workers_do_not_end_because_the_name_is_not_there_yet(
    names: NameServer, role: str
) -> None:
    names.has_address = False
    lines: list[str] = []

    def write(line: str) -> None:
        lines.append(line)
        names.has_address = True

    config = Config(
        role=role, root_uri=NAME, root_port=9, num_workers=1, num_servers=1,
        rendezvous_timeout_s=20.0, roster_interval_s=0.05,
    )  # fmt: skip
    node = pslite.start(config, write=write, wait=False)
    node.close(goodbye=False)
    assert "resolving " in lines[0]
    assert set(names.asked) == {"pslite-name"}
