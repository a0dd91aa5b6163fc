"""Shared by the tests of the data plane: a witness app, transfers that remember, a small cluster.

The payload of every part is a vector of 64-bit integers in which slot w counts what worker w has
pushed, so any pulled value shows exactly which contributions it contains. ``Cluster`` connects
whole planes by a network that one seeded generator drives: any message may overtake any other,
be lost (and sent again by its ``Channel``) or come twice.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from pslite.errors import NodeLostError
from pslite.plane import (
    Effect,
    Job,
    Outcome,
    Piece,
    Run,
    Send,
    ServerPlane,
    Transfer,
    WorkerPlane,
)
from pslite.protocol.channel import Channel, Outgoing
from pslite.wire.base import Ints, Message
from pslite.wire.messages import Answer, Exchange, PartsFailed, StaleEpoch

SERVER = 8
"""Node id of the only server of a test."""
LOST = NodeLostError("worker 1 is lost", role="worker", rank=1)


def counts(*values: int) -> bytes:
    """A payload: one 64-bit integer for each slot."""
    return np.array(values, np.int64).tobytes()


def slots(data: Any) -> tuple[int, ...]:
    """The integers in a payload."""
    return tuple(np.frombuffer(data, np.int64).tolist())


class CountingApp:
    """A server app whose values are running sums; it lends its memory to answers, uncopied."""

    def __init__(self, *, copies: bool = False) -> None:
        self.values: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}
        self.applied: list[tuple[int, tuple[tuple[int, int], ...]]] = []
        self.errors: dict[int, BaseException] = {}
        """Part -> what its next update raises."""
        self._copies = copies

    def add(self, part: int, num_slots: int) -> int:
        """Make a part of zeros; returns its size in bytes."""
        self.values[part] = np.zeros(num_slots, np.int64)
        return self.values[part].nbytes

    def apply(self, jobs: Sequence[Job]) -> list[Outcome]:
        return [self._apply(job) for job in jobs]

    def _apply(self, job: Job) -> Outcome:
        errors = []
        start = 0
        for part in job.parts:
            self.applied.append((part, job.batch.rounds))
            value = self.values[part]
            error = self.errors.pop(part, None)
            if error is None:
                for piece in job.batch.payloads:
                    data = bytes(piece.frame)[piece.start : piece.stop]
                    value += slots(data[start : start + value.nbytes])
            errors.append(error)
            start += value.nbytes
        return errors if any(errors) else None

    def read(self, parts: Sequence[int]) -> list[Any]:
        values = [self.values[part] for part in parts]
        return [(value.copy() if self._copies else value).view(np.uint8).data for value in values]


@dataclass
class Asked:
    """A transfer, and everything that it was told."""

    transfer: Transfer = field(init=False)
    values: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Part -> slots."""
    versions: dict[int, int] = field(default_factory=dict)
    endings: list[BaseException | None] = field(default_factory=list)

    def sink(
        self, indices: Sequence[int], pieces: Sequence[Piece], versions: Sequence[int]
    ) -> None:
        for index, piece, version in zip(indices, pieces, versions, strict=True):
            part = self.transfer.parts[index]
            self.values[part] = slots(bytes(piece.frame)[piece.start : piece.stop])
            self.versions[part] = version


def ask(
    *parts: int,
    push: Sequence[bytes] | None = None,
    pull: bool = False,
    size: int = 8,
    server: int = SERVER,
    priority: int = 0,
    apart: bool = False,
) -> Asked:
    """A transfer of parts of ``size`` bytes each; ``push`` holds one payload a part.

    They travel in one frame, or ``apart``, each in its own.
    """
    asked = Asked()
    frames = None if push is None else list(push) if apart else [b"".join(push)]
    sizes = (size,) * len(parts)
    sink = asked.sink if pull else None
    done = asked.endings.append
    asked.transfer = Transfer(server, parts, sizes, frames, sink, done, priority)
    return asked


def mail(plane: WorkerPlane, server: int = SERVER) -> list[Send]:
    """Everything that a worker would send now."""
    sends = []
    while server in plane.outbox:
        sends.append(plane.take(server))
    return sends


def pushed(part: int, round_: int, *, pull: bool = False, priority: int = 0) -> Exchange:
    return Exchange(True, pull, (part,), (round_,), (8,), priority=priority)


def pulled(part: int, after_round: int) -> Exchange:
    return Exchange(False, True, (part,), (after_round,), ())


def applied(part: int, round_: int) -> Answer:
    """The answer to a push without a pull."""
    return Answer(True, (part,), (round_,), (round_,), ())


def refusal(rounds: Ints, *, consumed: bool, parts: Ints = (1,)) -> PartsFailed:
    return PartsFailed(True, consumed, parts, rounds, "UsageError", "no", "", -1)


def exchange(server: ServerPlane, send: Send) -> list[Effect]:
    """What the server makes of worker 0's message."""
    assert isinstance(send.message, Exchange)
    return server.exchange(0, 1, send.message, send.frames)


def answers(effects: Sequence[Effect]) -> list[tuple[int, Message]]:
    """(peer, message) of the sends among effects."""
    return [(effect.peer, effect.message) for effect in effects if isinstance(effect, Send)]


def runs(effects: Sequence[Effect]) -> list[Run]:
    """The work among effects."""
    return [effect for effect in effects if isinstance(effect, Run)]


def make_server(
    app: CountingApp,
    ranks: Sequence[int] | None,
    *parts: int,
    num_slots: int = 1,
    window: int = 2,
    message_bytes: int = 1 << 20,
) -> ServerPlane:
    """A server with these parts, each in a lane of its own."""
    plane = ServerPlane(app, window=window, message_bytes=message_bytes, stall_report_s=60.0)
    for part in parts:
        plane.open_part(part, app.add(part, num_slots), ranks, lane=part)
    return plane


def push_to(
    plane: ServerPlane,
    rank: int,
    parts: Ints,
    round_: int,
    *values: int,
    pull: bool = False,
    priority: int = 0,
) -> list[Effect]:
    """A worker's push of one integer for each part."""
    rounds, sizes = (round_,) * len(parts), (8,) * len(parts)
    message = Exchange(True, pull, parts, rounds, sizes, priority=priority)
    return plane.exchange(rank, plane.epoch, message, [counts(*values)])


def pull_from(
    plane: ServerPlane, rank: int, parts: Ints, after_round: int, *, priority: int = 0
) -> list[Effect]:
    rounds = (after_round,) * len(parts)
    message = Exchange(False, True, parts, rounds, (), priority=priority)
    return plane.exchange(rank, plane.epoch, message, [])


def sent_values(effects: list[Effect]) -> dict[int, list[tuple[int, ...]]]:
    """Rank -> the values that it is sent."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for effect in effects:
        if isinstance(effect, Send):
            found.setdefault(effect.peer, []).extend(slots(frame) for frame in effect.frames)
    return found


def carry_out(plane: ServerPlane, effects: Sequence[Effect]) -> list[Effect]:
    """Do the work among effects at once; returns all sends, in order."""
    sends: list[Effect] = []
    queue = deque(effects)
    while queue:
        effect = queue.popleft()
        if isinstance(effect, Run):
            queue.extend(plane.finished(effect.jobs, plane.app.apply(effect.jobs)))
        else:
            sends.append(effect)
    return sends


def deliver(worker: WorkerPlane, effects: Sequence[Effect]) -> None:
    """Hand a server's messages to the worker they are for, as a van would."""
    for effect in effects:
        if not isinstance(effect, Send):
            continue
        if isinstance(effect.message, Answer):
            worker.answered(effect.message, [bytes(frame) for frame in effect.frames])
        elif isinstance(effect.message, PartsFailed):
            worker.refused(effect.message)
        elif isinstance(effect.message, StaleEpoch):
            worker.stale(effect.message)


@dataclass(frozen=True)
class _Packet:
    """A transmission: what it carries is copied when it leaves, as over a wire."""

    sender: int
    receiver: int
    sequence: int
    low: int
    also: tuple[int, ...]
    epoch: int
    message: Message | None
    frames: tuple[bytes, ...]


class Cluster:
    """Workers and servers, their channels, and a network that one seed decides about.

    Nodes are named by their node ids (worker rank r is 2r+9, server rank r is 2r+8).
    """

    def __init__(
        self,
        seed: int,
        *,
        num_workers: int,
        num_servers: int,
        window: int = 2,
        loss: float = 0.0,
        synchronous: bool = True,
    ) -> None:
        self.random = random.Random(seed)
        self.window = window
        self.loss = loss
        self.now = 0.0
        self.num_workers = num_workers
        self.ranks = tuple(range(num_workers)) if synchronous else None
        self.workers = {2 * rank + 9: WorkerPlane(window) for rank in range(num_workers)}
        self.apps = {2 * r + 8: CountingApp(copies=not synchronous) for r in range(num_servers)}
        self.servers = {
            node: ServerPlane(app, window=window, message_bytes=40, stall_report_s=60.0)
            for node, app in self.apps.items()
        }
        self._channels: dict[tuple[int, int], Channel] = defaultdict(lambda: Channel(1.0))
        self._in_flight: list[_Packet] = []
        self._owing: dict[tuple[int, int], None] = {}
        self._work: dict[tuple[int, int], deque[Run]] = defaultdict(deque)
        self._announcements: list[Callable[[], None]] = []
        self.delivered: list[str] = []

    def open_part(self, server: int, part: int, lane: int) -> None:
        size = self.apps[server].add(part, self.num_workers)
        self.servers[server].open_part(part, size, self.ranks, lane)

    def submit(self, worker: int, asked: Asked) -> None:
        self.workers[worker].submit(asked.transfer)

    def announce_epoch(self, epoch: int) -> None:
        """Every node hears of the epoch some time from now, each on its own."""
        for node in (*self.workers, *self.servers):
            self._announcements.append(partial(self._begin_epoch, node, epoch))

    def _begin_epoch(self, node: int, epoch: int) -> None:
        # As in ``control.py``: news of an epoch that is over are no news.
        if node in self.workers:
            if epoch > self.workers[node].epoch:
                self.workers[node].begin_epoch(epoch)
        elif epoch > self.servers[node].epoch:
            self._carry_out(node, self.servers[node].begin_epoch(epoch))

    def run(self, limit: int = 20_000) -> None:
        """Until nothing is left to do; a cluster that never comes to rest is an error."""
        for _ in range(limit):
            choices = self._choices()
            if choices:
                self.random.choice(choices)()
            elif not self._repeat():
                return
        raise AssertionError(f"no rest after {limit} steps; last: {self.delivered[-5:]}")

    def _choices(self) -> list[Callable[[], None]]:
        choices: list[Callable[[], None]] = []
        for node, worker in self.workers.items():
            for server in list(worker.outbox):
                choices.append(partial(self._post, node, server))
        choices += [partial(self._do_work, lane) for lane, queue in self._work.items() if queue]
        choices += [self._arrive] * min(len(self._in_flight), 3)
        if self._announcements and (not choices or self.random.random() < 0.1):
            choices.append(self._announce)
        return choices

    def _announce(self) -> None:
        self._announcements.pop(self.random.randrange(len(self._announcements)))()

    def _post(self, worker: int, server: int) -> None:
        plane = self.workers[worker]
        send = plane.take(server)
        self._send(worker, server, plane.epoch, send.message, send.frames)

    def _do_work(self, lane: tuple[int, int]) -> None:
        run = self._work[lane].popleft()
        plane = self.servers[lane[0]]
        self._carry_out(lane[0], plane.finished(run.jobs, plane.app.apply(run.jobs)))

    def _carry_out(self, server: int, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Run):
                self._work[server, effect.lane].append(effect)
            else:
                self._send(server, 2 * effect.peer + 9, 0, effect.message, effect.frames)

    # -- the network -------------------------------------------------------------------

    def _send(
        self, sender: int, receiver: int, epoch: int, message: Message, frames: Sequence[Any]
    ) -> None:
        channel = self._channels[sender, receiver]
        self._transmit(sender, receiver, channel.number(message, frames, 0, epoch, self.now))

    def _transmit(self, sender: int, receiver: int, outgoing: Outgoing | None) -> None:
        if self.random.random() < self.loss:
            return
        self._owing.pop((sender, receiver), None)
        low, also = self._channels[sender, receiver].acceptance
        packet = _Packet(sender, receiver, 0, low, also, 0, None, ())
        if outgoing is not None:
            frames = tuple(bytes(frame) for frame in outgoing.frames)
            packet = _Packet(
                sender, receiver, outgoing.sequence, low, also, outgoing.epoch, outgoing.message,
                frames,
            )  # fmt: skip
        self._in_flight += [packet] * (2 if self.random.random() < self.loss else 1)

    def _arrive(self) -> None:
        packet = self._in_flight.pop(self.random.randrange(len(self._in_flight)))
        channel = self._channels[packet.receiver, packet.sender]
        channel.accepted(packet.low, packet.also)
        if packet.message is None:
            return
        self._owing[packet.receiver, packet.sender] = None
        if not channel.admit(packet.sequence):
            return
        self.delivered.append(f"{packet.sender}->{packet.receiver} {packet.message}")
        if packet.receiver in self.servers:
            assert isinstance(packet.message, Exchange)
            rank = (packet.sender - 9) // 2
            plane = self.servers[packet.receiver]
            effects = plane.exchange(rank, packet.epoch, packet.message, packet.frames)
            self._carry_out(packet.receiver, effects)
        else:
            send = Send(packet.sender, packet.message, packet.frames)
            deliver(self.workers[packet.receiver], [send])

    def _repeat(self) -> bool:
        """Let time pass until something is sent again; False when nothing is under way."""
        owing = list(self._owing)
        for sender, receiver in owing:
            self._transmit(sender, receiver, None)
        due = min((channel.next_due for channel in self._channels.values()), default=math.inf)
        if due < math.inf:
            self.now = max(self.now, due)
        elif not owing:
            return False
        for (sender, receiver), channel in list(self._channels.items()):
            for outgoing in channel.repeats(self.now):
                self._transmit(sender, receiver, outgoing)
        return True
