"""The van between real processes: a killed one is noticed at both ends, a frozen one in time."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest

from pslite.van.base import Connected, Disconnected, Received, Van, VanEvent
from pslite.van.zmq.sockets import has_more
from pslite.van.zmq.van import ZmqVan

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
Event = TypeVar("Event", Received, Connected, Disconnected)

# Listens, connects to the parent, and echoes whatever it gets to where it came from.
CHILD = """
import sys
from pslite.van.base import Received
from pslite.van.zmq.van import ZmqVan
van = ZmqVan("child", heartbeat_interval_s=0.2, heartbeat_timeout_s=0.8)
print(van.bind("127.0.0.1", 0), flush=True)
van.connect("parent", sys.argv[1])
while True:
    for event in van.poll(None):
        if type(event) is Received:
            van.send(event.peer, event.frames)
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def vans(stack: ExitStack) -> tuple[ZmqVan, ZmqVan]:
    """One that listens and one that connects, so that each end of a loss is seen alone."""
    made = []
    for uid in ("listener", "connecter"):
        van = ZmqVan(uid, heartbeat_interval_s=0.2, heartbeat_timeout_s=0.8)
        stack.callback(van.close)
        made.append(van)
    return made[0], made[1]


@pytest.fixture
def child(vans: tuple[ZmqVan, ZmqVan], stack: ExitStack) -> subprocess.Popen[str]:
    """A process that is connected to both vans and has answered the connecting one."""
    listener, connecter = vans
    port = listener.bind(HOST, 0)
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, f"tcp://{HOST}:{port}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.enter_context(process)
    stack.callback(process.kill)
    assert process.stdout is not None
    connecter.connect("child", f"tcp://{HOST}:{int(process.stdout.readline())}")
    connecter.send("child", [b"hello"])
    assert next_of(connecter, Connected) == Connected("child")
    assert bytes(next_of(connecter, Received).frames[0]) == b"hello"
    assert next_of(listener, Connected) == Connected("child")
    return process


def next_of(van: Van, kind: type[Event], timeout_s: float = 10.0) -> Event:
    """The next event, which must be of ``kind``."""
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at:
        events = van.poll(0.05)
        if events:
            assert len(events) == 1, events
            assert isinstance(events[0], kind), events
            return events[0]
    raise AssertionError(f"{van.uid} saw no {kind.__name__} within {timeout_s} s")


def test_a_killed_process_is_noticed_at_both_ends_within_two_seconds(
    vans: tuple[ZmqVan, ZmqVan], child: subprocess.Popen[str]
) -> None:
    killed_at = time.monotonic()
    child.send_signal(signal.SIGKILL)
    for van in vans:
        assert next_of(van, Disconnected).peer == "child"
    assert time.monotonic() - killed_at < 2
    for van in vans:
        van.send("child", [b"lost"])
        assert van.poll(0.1) == []


def test_a_frozen_process_is_lost_by_its_heartbeat_and_returns_when_it_thaws(
    vans: tuple[ZmqVan, ZmqVan], child: subprocess.Popen[str]
) -> None:
    frozen_at = time.monotonic()
    child.send_signal(signal.SIGSTOP)
    for van in vans:
        assert next_of(van, Disconnected).peer == "child"
    assert 0.5 < time.monotonic() - frozen_at < 5
    child.send_signal(signal.SIGCONT)
    for van in vans:
        assert next_of(van, Connected) == Connected("child")
    vans[0].send("child", [b"back"])
    assert bytes(next_of(vans[0], Received).frames[0]) == b"back"


def test_what_was_sent_before_the_kill_is_received_before_the_loss(
    vans: tuple[ZmqVan, ZmqVan], child: subprocess.Popen[str]
) -> None:
    connecter = vans[1]
    connecter.send("child", [b"last"])
    dealer = connecter._links["child"]._dealer
    assert dealer is not None
    give_up_at = time.monotonic() + 30
    while not has_more(dealer._socket):  # until the echo is in this process, where it stays unread
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    time.sleep(0.1)
    events: list[VanEvent] = []
    while len(events) < 2:
        assert time.monotonic() < give_up_at, events
        events += connecter.poll(1)
    assert [type(event) for event in events] == [Received, Disconnected]


OUT_OF_FILES = """
import resource
from pslite.errors import ConfigError
from pslite.van.zmq.van import ZmqVan
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
van = ZmqVan("van")
try:
    for number in range(100):
        van.connect(f"peer-{number}", "tcp://127.0.0.1:1")
except ConfigError as error:
    print(error)
van.close()
print("closed")
"""


def test_running_out_of_open_files_is_an_error_that_says_what_to_raise() -> None:
    run = subprocess.run(
        [sys.executable, "-c", OUT_OF_FILES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "RLIMIT_NOFILE is 100; raise the limit with `ulimit -n 200`" in run.stdout
    assert run.stdout.endswith("closed\n")
