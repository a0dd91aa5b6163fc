"""What no exchange can beat: adding and copying in memory, and bare sockets of pyzmq.

The receiving end runs on the caller's thread; senders are processes of their own, started as
``python -m benchmarks.compare.floors ENDPOINT TOTAL_BYTES CHUNK_BYTES``. All of it goes over the
loopback device by TCP. Used by ``peers.py`` and by the small scripts beside it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import zmq

from benchmarks.compare.figures import summary
from benchmarks.compare.jobs import ROOT
from benchmarks.models import resnet50

MODEL_BYTES = 4 * sum(int(np.prod(shape)) for shape in resnet50())
MIB = 2**20
PATIENCE_MS = 30_000


def add_ms(nbytes: int, rounds: int) -> list[float]:
    """``np.add`` of two float32 arrays into a third, each of ``nbytes``."""
    left, right, out = (np.ones(nbytes // 4, np.float32) for _ in range(3))
    return timed_ms(lambda: np.add(left, right, out=out), rounds)


def copy_ms(nbytes: int, rounds: int) -> list[float]:
    """``np.copyto`` from one float32 array to another (memcpy)."""
    source, target = (np.ones(nbytes // 4, np.float32) for _ in range(2))
    return timed_ms(lambda: np.copyto(target, source), rounds)


def send_ms(nbytes: int, chunk_bytes: int, rounds: int, senders: int = 1) -> list[float]:
    """Each of the senders sends so many bytes, in messages of ``chunk_bytes``, without copies."""
    with _router(nbytes, chunk_bytes, senders) as (socket, peers):
        count = senders * -(-nbytes // chunk_bytes)

        def receive() -> None:
            for peer in peers:
                socket.send_multipart([peer, b"go"])
            for _ in range(count):
                socket.recv_multipart(copy=False)

        return timed_ms(receive, rounds)


def round_trip_ms(rounds: int) -> list[float]:
    """An empty message to a DEALER, which sends one back, seen from the ROUTER."""
    with _router(1, 1, 1) as (socket, peers):

        def there_and_back() -> None:
            socket.send_multipart([peers[0], b"go"])
            socket.recv_multipart()

        return timed_ms(there_and_back, rounds)


def timed_ms(work: Callable[[], object], rounds: int) -> list[float]:
    """Time of each round after two that are not counted."""
    times_ms = []
    for _ in range(rounds + 2):
        begin = time.perf_counter()
        work()
        times_ms.append(1e3 * (time.perf_counter() - begin))
    return times_ms[2:]


@contextmanager
def _router(nbytes: int, chunk_bytes: int, senders: int) -> Iterator[tuple[Any, list[bytes]]]:
    """A ROUTER with so many connected senders, and their names."""
    context: Any = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.set(zmq.RCVTIMEO, PATIENCE_MS)
    socket.set(zmq.LINGER, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    sizes = [str(nbytes), str(chunk_bytes)]
    command = [sys.executable, "-m", __name__, f"tcp://127.0.0.1:{port}", *sizes]
    children = [subprocess.Popen(command, cwd=ROOT) for _ in range(senders)]
    try:
        yield socket, [socket.recv_multipart()[0] for _ in children]
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait()
        socket.close()
        context.term()


def _send_for_ever(endpoint: str, nbytes: int, chunk_bytes: int) -> None:
    """A sender's process: sends everything whenever it is told to, until it is ended."""
    context: Any = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send(b"here")
    data = memoryview(bytearray(nbytes))
    chunks = [data[start : start + chunk_bytes] for start in range(0, nbytes, chunk_bytes)]
    while True:
        socket.recv()
        for chunk in chunks:
            socket.send(chunk, copy=len(chunk) < 65_536)


def measure(*, quick: bool) -> dict[str, list[float]]:
    """The floors under an exchange of ResNet-50's gradients, in milliseconds."""
    rounds = 3 if quick else 15
    return {
        f"np.add of {MODEL_BYTES / 1e6:.0f} MB": add_ms(MODEL_BYTES, rounds),
        f"memcpy of {MODEL_BYTES / 1e6:.0f} MB": copy_ms(MODEL_BYTES, rounds),
        "the same in messages of 1 MiB by bare pyzmq over TCP": send_ms(MODEL_BYTES, MIB, rounds),
        "round trip of an empty message, DEALER and ROUTER": round_trip_ms(20 * rounds),
    }


def text(found: dict[str, list[float]]) -> str:
    """The floors for people."""
    lines = [f"  {name}: {summary(times_ms).text()} ms" for name, times_ms in found.items()]
    return "\n".join(["floors:", *lines])


if __name__ == "__main__":
    _send_for_ever(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
