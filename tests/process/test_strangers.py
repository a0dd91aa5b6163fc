"""Ports of a job are open to every process of the machine; nothing that it sends disturbs."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest
from job import (
    HOST,
    PATIENCE_S,
    ROOT,
    TRAIN,
    Job,
    MakeJob,
    assert_no_traceback,
    listening_addresses,
    needs_proc,
)

from pslite.security import derive
from pslite.van.base import Received, VanEvent
from pslite.van.zmq.van import ZmqVan

pytestmark = [pytest.mark.process, needs_proc]


# Speaks ZMTP, as nodes do, and then says what no node would say. In a process of its own, so
# that the test needs no context.
FALSE_NODE = """
import random, sys, zmq
numbers = random.Random(5)
context = zmq.Context()
for name in b"scheduler", b"W0000000000000001", b"S0000000000000001", b"\\xff" * 40:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.ROUTING_ID, name)
    dealer.connect(sys.argv[1])
    for count in range(50):
        frames = [numbers.randbytes(numbers.choice([0, 1, 20, 3000])) for _ in range(count % 4 + 1)]
        dealer.send_multipart(frames)
    dealer.close(linger=1000)
context.term()
"""


def ports_of(job: Job) -> list[int]:
    """Those of the scheduler and of the server."""
    server = job.processes[1]
    return [job.port, *(port for _, port in listening_addresses(server.pid))]


@pytest.fixture
def job(make_job: MakeJob) -> Job:
    """A scheduler, a server and two workers, in this order, in the middle of their rounds."""
    job = make_job(2, 1)
    job.service()
    for worker in job.workers(TRAIN):
        worker.wait_for("rank")
    return job


def ends_well(job: Job) -> None:
    time.sleep(0.2)  # some rounds more
    job.allow("stop")
    assert job.wait_all() == [0, 0, 0, 0], job.output()
    assert [process.lines[-1] for process in job.processes[2:]] == ["rounds are right"] * 2
    assert_no_traceback(*job.processes)


def test_rubbish_and_other_protocols_do_not_disturb_a_job(job: Job) -> None:
    numbers = random.Random(4)
    texts = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"", b"\xff" + bytes(8) + b"\x7f", b"\x00"]
    texts += [numbers.randbytes(2000) for _ in range(5)]
    for port in ports_of(job):
        for text in texts:
            with socket.create_connection((HOST, port)) as stranger:
                stranger.sendall(text)
    ends_well(job)


def test_connections_that_say_nothing_do_not_disturb_a_job(job: Job) -> None:
    with ExitStack() as stack:
        for port in ports_of(job):
            for _ in range(100):
                stack.enter_context(socket.create_connection((HOST, port)))
        ends_well(job)


def test_false_nodes_do_not_disturb_a_job(job: Job) -> None:
    for port in ports_of(job):
        subprocess.run(
            [sys.executable, "-c", FALSE_NODE, f"tcp://{HOST}:{port}"], check=True, timeout=20
        )
    ends_well(job)


# A listening van with a key, which says what memory it had at most so far whenever it is asked.
LISTENER = """
import sys
from pathlib import Path
from pslite.security import derive
from pslite.van.base import Received
from pslite.van.zmq.van import ZmqVan
mechanism = derive(b"the key of this job", sys.argv[1])
# No stranger ends because its handshake has lasted too long.
van = ZmqVan(
    "server", mechanism=mechanism, stranger_bytes=int(sys.argv[2]), handshake_timeout_s=60.0
)
print(van.bind("127.0.0.1", 0), flush=True)
while True:
    for event in van.poll(None):
        if type(event) is Received:
            status = Path("/proc/self/status").read_text()
            van.send(event.peer, [status.partition("VmHWM:")[2].split()[0].encode()])
"""
MIB = 1 << 20
ALL_MIB = 290
"""What the strangers send together: less than they could."""


class Greedy:
    """A stranger that has greeted as nodes do, and then sends a command that never ends."""

    def __init__(self, port: int, security: str, nbytes: int) -> None:
        self.socket = socket.create_connection((HOST, port))
        signature = b"\xff" + bytes(8) + b"\x7f\x03\x01"
        self.socket.sendall(signature + security.upper().encode().ljust(20, b"\0") + bytes(32))
        self.socket.sendall(b"\x06" + nbytes.to_bytes(8, "big"))
        self.socket.setblocking(False)
        self.is_open = True

    def send(self, block: bytes) -> None:
        try:
            self.socket.send(block)
        except BlockingIOError:
            pass
        except OSError:
            self.is_open = False


def most_mib(client: ZmqVan) -> float:
    client.send("server", [b"how much?"])
    (event,) = (each for each in poll_until_received(client) if type(each) is Received)
    return int(bytes(event.frames[0])) / 1024


def poll_until_received(van: ZmqVan) -> list[VanEvent]:
    events: list[VanEvent] = []
    give_up_at = time.monotonic() + PATIENCE_S
    while Received not in map(type, events):
        assert time.monotonic() < give_up_at, events
        events += van.poll(0.05)
    return events


@pytest.mark.parametrize("security", ["plain", "curve"])
@pytest.mark.parametrize(
    ("strangers", "frame_mib"), [pytest.param(4, 250, id="a few"), pytest.param(150, 2, id="many")]
)
def test_strangers_cannot_fill_the_memory_of_a_node_before_they_show_the_key(
    security: str, strangers: int, frame_mib: int
) -> None:
    with ExitStack() as stack:
        server = subprocess.Popen(
            [sys.executable, "-c", LISTENER, security, str(16 * MIB)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.enter_context(server)
        stack.callback(server.kill)
        assert server.stdout is not None
        port = int(server.stdout.readline())
        client = ZmqVan("client", mechanism=derive(b"the key of this job", security))
        stack.callback(client.close)
        client.connect("server", f"tcp://{HOST}:{port}")
        before = most_mib(client)
        greedy = [Greedy(port, security, frame_mib * MIB - 1024) for _ in range(strangers)]
        for each in greedy:
            stack.enter_context(each.socket)
        block, left = bytes(64 * 1024), ALL_MIB * MIB
        while left > 0 and any(each.is_open for each in greedy):
            for each in greedy:
                each.send(block)
                left -= len(block)
            time.sleep(0.05 * strangers / 150)  # a server on a busy machine needs a moment to look
        assert most_mib(client) - before < ALL_MIB / 2
