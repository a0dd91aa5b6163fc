"""Throws what no node would send at every listening socket of a running job.

``python -m tests.fuzz_sockets 100000 [seed] [plain]`` starts two workers and two servers, throws so
many things at them - mutated messages of every type, raw bytes below ZMTP, handshakes that
break off, multipart oddities; with the job's key and without it - and prints what became of
the job: its processes' memory before and after, and whether its results were right to the
last bit. Who has the key speaks under names of its own here: somebody who forges a member's
name *and* has the key is a member (``docs/security.md``). Under PLAIN they know the password of
the scheduler's door and cannot prove that they know the key.
"""

from __future__ import annotations

import random
import re
import socket
import struct
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import zmq

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent / "process"))

from doors import curve, plain, settings_of, tcp_doors
from job import Job, Process

from pslite.ids import NodeInfo
from pslite.van.zmq.accepted import further_routing_id, make_routing_id
from pslite.version import __version__
from pslite.wire.base import Message
from pslite.wire.codec import Envelope, encode
from pslite.wire.messages import (
    Accepted,
    Answer,
    BarrierEnter,
    BarrierLeave,
    BarrierWaits,
    Beat,
    Exchange,
    Leave,
    Members,
    PartsFailed,
    Refused,
    Register,
    Request,
    Response,
    Roster,
    RoundWaits,
    StaleEpoch,
    StatusQuestion,
    StatusReport,
    StatusSurvey,
    Waiting,
)
from pslite.wire.recovery import MayReturn, Seated, StepRepeated, Vacant

Frames = list[bytes]
Door = tuple[str, int]

TRAIN = """
kv = mx.kvstore.create("dist_sync")
numbers = np.random.default_rng(kv.rank)
kv.init("w", np.zeros(1000, np.float32))
print("rank", kv.rank, flush=True)
both = [np.random.default_rng(rank) for rank in range(2)]
while not os.path.exists(f"stop{kv.rank}"):
    pushed = [each.standard_normal(1000, np.float32) for each in both]
    kv.push("w", pushed[kv.rank])
    assert kv.pull("w").tobytes() == (pushed[0] + pushed[1]).tobytes(), "wrong bits"
    kv.barrier()
    if kv.rank == 0 and os.path.exists("stop"):
        open("stop1", "w"), open("stop0", "w")
    kv.barrier()
print("rounds are right", flush=True)
"""
"""Every worker computes the sum of all gradients itself, and compares bytes."""

WARM_UP = 3000
"""After so many, caches and pools are filled and the memory is measured for the first time."""
PER_CONNECTION = 50
MOST_OPEN = 50
PAUSE_S = 0.01
"""After each connection: the nodes share few cores with this, and should read what it throws."""


class Outcome(NamedTuple):
    """What became of the job."""

    thrown: int
    seconds: float
    grown_kib: dict[str, int]
    """Role and rank -> by how much its resident memory grew."""
    died: list[str]
    ended_well: bool
    output: str


# -- what is thrown -----------------------------------------------------------------------


def recorded(job_id: str, receiver: int) -> list[Frames]:
    """One transmission of every type, as nodes send them."""
    node = NodeInfo("worker", 0, "W1", 1, "", "host", "machine", 4711)
    messages: list[tuple[Message, Frames]] = [
        (Accepted(), []),
        (Beat(), []),
        (Register((node,), 2, 2, "0.1"), []),
        (Roster(9, (node, node._replace(role="server", uid="S1")), (0, 0)), []),
        (Waiting(("worker 0",), ("1 of 2 workers",), 1.5), []),
        (Refused("ConfigError", "no", "", -1), []),
        (Leave(), []),
        (Members(2, (9, 8), (1, 0), ("", "lost")), []),
        (BarrierEnter(4, 1, 0.0), []),
        (BarrierLeave(4, 1, "", ""), []),
        (BarrierWaits(4, 1, (9, 11), 60.0), []),
        (Exchange(True, True, (1, 2), (1, 1), (4, 8)), [bytes(12)]),
        (Exchange(False, True, (1,), (1,), ()), []),
        (Answer(True, (1,), (1,), (1,), (4,)), [bytes(4)]),
        (PartsFailed(True, False, (1,), (1,), "NodeLostError", "gone", "worker", 1), []),
        (StaleEpoch(2, True, (1,), (1,)), []),
        (RoundWaits(1, 1, (0, 1), 60.0), []),
        (Request(1000002, 0, 1, 1, msgpack.packb([1, True, [[1, 5, "<f4"]]])), [bytes(20)]),
        (Request(1000001, 0, 1, 1, msgpack.packb([1, "sync", [["k", [5], "<f4"]]])), []),
        (Response(1000002, 0, 1, 1, "", "", "", -1, b"body"), []),
        (StatusQuestion(1, __version__), []),
        (StatusQuestion(1, "0.0"), []),
        (StatusReport(1, msgpack.packb(["0.1", 1.0, 1, 2, 3, 4, 5, 6, None, []])), []),
        (StatusSurvey(1, msgpack.packb([])), []),
        (Vacant(9, 0, "lost"), []),
        (Seated((node,), 1), []),
        (MayReturn(True), []),
        (StepRepeated(3, 1), []),
    ]
    return [
        [encode(Envelope(job_id, 1, 77, receiver, number, 0, (), (), message)), *payload]
        for number, (message, payload) in enumerate(messages, 1)
    ]


WEIRD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**62, 2**63, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf"),
    "", "x" * 5000, "\0\x1b[31m", b"", bytes(7), bytes(8), b"\xff" * 8, bytes(8 * 5000), [], {},
    [[]], [None] * 3, {"a": 1}, [["worker", 0, "u", 1, "", "h", "m", 1]], [[["deep"] * 20]],
)  # fmt: skip


def mutate(frames: Frames, numbers: random.Random) -> Frames:
    """The transmission with something wrong (or, rarely, nothing)."""
    frames = list(frames)
    change = numbers.choice((_bytes, _bytes, _length, _field, _field, _field, _frames, _marks))
    change(frames, numbers)
    return frames


def _bytes(frames: Frames, numbers: random.Random) -> None:
    data = bytearray(frames[0])
    for _ in range(numbers.randrange(1, 6)):
        data[numbers.randrange(len(data))] = numbers.randrange(256)
    frames[0] = bytes(data)


def _length(frames: Frames, numbers: random.Random) -> None:
    cut = numbers.randrange(len(frames[0]))
    tail = numbers.randbytes(numbers.choice((0, 1, 30, 2000)))
    frames[0] = frames[0][:cut] + tail


def _field(frames: Frames, numbers: random.Random) -> None:
    fields = msgpack.unpackb(frames[0], strict_map_key=False)
    for _ in range(numbers.choice((1, 1, 2))):
        fields[numbers.randrange(2, len(fields))] = numbers.choice(WEIRD)
    frames[0] = msgpack.packb(fields)


def _frames(frames: Frames, numbers: random.Random) -> None:
    kind = numbers.randrange(4)
    if kind == 0:
        frames += [b""] * numbers.choice((1, 100, 3000))
    elif kind == 1:
        frames.insert(0, numbers.randbytes(numbers.randrange(20)))
    elif kind == 2:
        frames.append(numbers.randbytes(100_000))
    else:
        frames[:] = [numbers.randbytes(numbers.randrange(300)) or b"x"]


def _marks(frames: Frames, numbers: random.Random) -> None:
    """Claims of huge sizes, in the marks of MessagePack that have a length."""
    at = numbers.randrange(1, len(frames[0]))
    mark = numbers.choice((0xC6, 0xC9, 0xDB, 0xDD, 0xDF, 0xDC, 0xDE, 0xC7))
    claim = struct.pack(">BI", mark, numbers.choice((2**32 - 1, 2**24, 70_000)))
    frames[0] = frames[0][:at] + claim + frames[0][at:]


def _greeting(mechanism: bytes = b"PLAIN", *, as_server: bool = False) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(
        [as_server]
    ) + bytes(31)  # fmt: skip


def _command(name: bytes, body: bytes = b"") -> bytes:
    body = bytes([len(name)]) + name + body
    if len(body) < 256:
        return b"\x04" + bytes([len(body)]) + body
    return b"\x06" + struct.pack(">Q", len(body)) + body


def below_zmtp(numbers: random.Random) -> bytes:
    """Bytes for a bare TCP connection."""
    kind = numbers.randrange(9)
    if kind == 0:
        return numbers.randbytes(numbers.choice((1, 10, 64, 2000)))
    if kind == 1:
        return b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    if kind == 2:
        return _greeting(numbers.choice((b"PLAIN", b"CURVE", b"NULL", b"GSSAPI", b"\xff" * 20)))[
            : numbers.randrange(64)
        ]
    if kind == 3:
        return _greeting() + _command(b"HELLO", b"\x06pslite" + b"\x40" + b"0" * 64)
    if kind == 4:
        return _greeting() + _command(b"HELLO", numbers.randbytes(numbers.randrange(600)))
    if kind == 5:
        ready = _command(b"READY", b"\x0bSocket-Type\0\0\0\x06DEALER")
        return _greeting(b"NULL") + ready + b"\0\x05hello"
    if kind == 6:
        return _greeting() + b"\x06" + struct.pack(">Q", numbers.choice((2**63, 2**40, 2**27)))
    if kind == 7:
        return _greeting() + _command(b"INITIATE", bytes(20)) + b"\x03" + bytes(8)
    return _greeting(b"CURVE") + _command(b"HELLO", numbers.randbytes(194))


# -- how it is thrown ---------------------------------------------------------------------


class Fuzzer:
    """Throws things at the doors of one job."""

    def __init__(
        self, doors: Sequence[Door], key: bytes, job_id: str, seed: int, security: str
    ) -> None:
        self._doors = doors
        self._numbers = random.Random(seed)
        keys = {"plain": plain(key), "curve": curve(key)}
        self._mine = keys.pop(security)
        self._others = [{}, plain(b"x" * 20), curve(b"x" * 20), *keys.values()]
        # Receiver 0: meant for whoever it is, so nothing is dropped for a wrong incarnation.
        self._recorded = recorded(job_id, receiver=0)
        self._context = zmq.Context()
        self._open: deque[tuple[zmq.Socket[bytes], int]] = deque()
        self._count = 0
        self._last_name = b""
        self.thrown = 0

    def throw(self, count: int) -> None:
        """Throw ``count`` things."""
        until = self.thrown + count
        while self.thrown < until:
            door = self._numbers.choice(self._doors)
            kind = self._numbers.random()
            if kind < 0.80:
                self._as_holder_of_the_key(door, min(PER_CONNECTION, until - self.thrown))
            elif kind < 0.90:
                self._as_stranger(door)
            else:
                for _ in range(min(10, until - self.thrown)):
                    self._below_zmtp(door)

    def _as_holder_of_the_key(self, door: Door, count: int) -> None:
        messages = [
            mutate(self._numbers.choice(self._recorded), self._numbers) for _ in range(count)
        ]
        self._send(door, self._mine, self._name(), messages, linger_ms=2000)

    def _as_stranger(self, door: Door) -> None:
        messages = [self._numbers.choice(self._recorded)]
        options = self._numbers.choice(self._others)
        self._send(door, options, self._name(), messages, linger_ms=20)

    def _below_zmtp(self, door: Door) -> None:
        with socket.create_connection(door, timeout=5) as stranger:
            try:
                stranger.sendall(below_zmtp(self._numbers))
                if self._numbers.random() < 0.3:
                    stranger.settimeout(0.02)
                    stranger.recv(1000)
            except OSError:
                pass
        self.thrown += 1

    def _name(self) -> bytes:
        """A fresh name of our own; or one that no van has, or that is taken, or a further one."""
        self._count += 1
        kind = self._numbers.randrange(8)
        if kind == 0:
            return b"x" + self._numbers.randbytes(self._numbers.randrange(200))
        if kind == 1 and self._last_name:  # of a connection that may still be there
            return further_routing_id(self._last_name, self._numbers.randrange(1, 16))
        uid = "scheduler" if kind == 2 else f"fuzz{self._count}"
        self._last_name = make_routing_id(uid, time.time_ns(), self._count)
        return self._last_name

    def _send(
        self,
        door: Door,
        options: dict[int, Any],
        name: bytes,
        messages: Sequence[Frames],
        linger_ms: int,
    ) -> None:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, name)
        dealer.setsockopt(zmq.RECONNECT_IVL, 2**30)
        dealer.setsockopt(zmq.SNDHWM, 0)
        for option, value in options.items():
            dealer.setsockopt(option, value)
        dealer.connect(f"tcp://{door[0]}:{door[1]}")
        try:
            for message in messages:
                dealer.send_multipart(message, zmq.NOBLOCK)
                self.thrown += 1
        except zmq.Again:  # turned away before the last was sent: nobody is there to wait for
            pass
        self._open.append((dealer, linger_ms))
        if len(self._open) > MOST_OPEN:
            oldest, linger_ms = self._open.popleft()
            oldest.close(linger=linger_ms)
            time.sleep(PAUSE_S)

    def close(self) -> None:
        """Have everything leave that was thrown."""
        for dealer, linger_ms in self._open:
            dealer.close(linger=linger_ms)
        self._open.clear()
        self._context.term()


# -- the job ------------------------------------------------------------------------------


def resident_kib(pid: int) -> int:
    """VmRSS of a process; 0 if it has ended."""
    try:
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) if found else 0


def settled(pids: Sequence[int], measure: Callable[[int], int] = resident_kib) -> dict[int, int]:
    """The memory of processes, once it has not changed much for a while."""
    before: dict[int, int] = {}
    for _ in range(40):
        time.sleep(0.25)
        now = {pid: measure(pid) for pid in pids}
        if before and all(abs(now[pid] - before[pid]) < 100 for pid in pids):
            return now
        before = now
    return before


def fuzz(directory: Path, count: int, seed: int = 1, security: str = "curve") -> Outcome:
    """Throw ``count`` things at a job of two workers and two servers."""
    # With PS_VERBOSE nodes say what they have dropped.
    job = Job(directory, 2, 2, {"PS_VERBOSE": "1", "PS_SECURITY": security})
    try:
        launcher = job.launch(TRAIN)
        for rank in range(2):
            launcher.wait_for(rf"\[worker {rank}\] rank {rank}")
        return _fuzz(job, launcher, count, seed)
    finally:
        job.end()


def _fuzz(job: Job, launcher: Process, count: int, seed: int) -> Outcome:
    names = dict(_members(job))
    owners = tcp_doors(names)
    settings = settings_of(next(iter(names)))
    key = Path(settings["PS_JOB_KEY_FILE"]).read_bytes().strip()
    security = settings["PS_SECURITY"]
    fuzzer = Fuzzer(list(owners), key, settings["PS_JOB_ID"], seed, security)
    try:
        fuzzer.throw(min(WARM_UP, count // 2))
        before = settled(list(names))
        begun_at = time.monotonic()
        fuzzer.throw(count - fuzzer.thrown)
        seconds = time.monotonic() - begun_at
    finally:
        fuzzer.close()
    after = settled(list(names))
    died = [name for pid, name in names.items() if not after[pid]]
    job.allow("stop")
    status = launcher.wait(60)
    text = launcher.text
    return Outcome(
        fuzzer.thrown,
        seconds,
        {name: after[pid] - before[pid] for pid, name in names.items()},
        died,
        status == 0 and text.count("rounds are right") == 2 and "Traceback" not in text,
        text,
    )


def _members(job: Job) -> Iterator[tuple[int, str]]:
    for pid in job.left():
        settings = settings_of(pid)
        if "DMLC_ROLE" in settings:
            yield pid, f"{settings['DMLC_ROLE']} {settings['DMLC_TASK_ID']}"


def main(arguments: Sequence[str]) -> int:
    count = int(arguments[0]) if arguments else 10_000
    seed = int(arguments[1]) if len(arguments) > 1 else 1
    security = arguments[2] if len(arguments) > 2 else "curve"
    with tempfile.TemporaryDirectory() as directory:
        outcome = fuzz(Path(directory), count, seed, security)
    print(f"{outcome.thrown} things thrown in {outcome.seconds:.0f} s (seed {seed})")
    for name, grown in sorted(outcome.grown_kib.items()):
        print(f"{name}: {grown:+d} KiB")
    print(f"died: {', '.join(outcome.died) or 'nobody'}")
    print(f"results right to the last bit, and a clean end: {outcome.ended_well}")
    print("\n".join(line for line in outcome.output.splitlines() if ": dropped " in line))
    if not outcome.ended_well:
        print(outcome.output[-5000:])
    return 0 if outcome.ended_well and not outcome.died else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
