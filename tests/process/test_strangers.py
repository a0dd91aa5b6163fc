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
    TRAIN,
    Job,
    MakeJob,
    assert_no_traceback,
    listening_addresses,
    needs_proc,
)

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
