"""``FaultyVan``: a van that loses, repeats, delays and reorders messages.

The same seed, plan and calls give the same faults: every wrapper has its own random generator,
seeded once. (ps-lite's PS_DROP_MSG reseeds for each message from the wall clock in seconds, so all
messages of one second share one fate; ``src/van.cc``.) The time comes from the caller's clock,
which may be the simulator's virtual one. A ``FaultyVan`` does not know what the frames mean; it
runs on the owner's thread. Read next: the simulator, or the tests of the injector's statistics.

A held message is kept by reference, like one that libzmq has not sent yet, and is dropped when
its connection is lost, as ``base.py`` promises.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pslite.van.base import (
    Buffer,
    Connected,
    Disconnected,
    InTransit,
    Received,
    TurnedAway,
    Van,
    VanEvent,
    as_buffers,
)


@dataclass(frozen=True)
class FaultPlan:
    """Probabilities of faults for each message, and how long messages wait.

    Args:
        drop: a sent message is lost.
        duplicate: a sent message is sent twice; each copy may be delayed by itself.
        delay: a message waits for a random time, uniform in ``delay_s``.
        delay_s: (shortest, longest) in seconds of the clock.
        reorder: a message waits for a random time, uniform in ``reorder_s``, so that some
            messages sent after it overtake it.
        reorder_s: (shortest, longest) in seconds of the clock.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    delay_s: tuple[float, float] = (0.001, 0.01)
    reorder: float = 0.0
    reorder_s: tuple[float, float] = (0.0001, 0.001)


COUNTED = ("sent", "dropped", "duplicated", "delayed", "reordered", "received", "drop_received")


class FaultyVan(Van):
    """A :class:`Van` that passes everything on to ``inner``, and adds faults.

    ``drop_received`` is the probability that a message is lost after it has arrived (as with
    ps-lite's PS_DROP_MSG). ``counts`` has the number of messages that the owner ``sent`` and, of
    these, ``dropped``, ``duplicated``, ``delayed`` and ``reordered`` (each copy counts); the number
    ``received`` from ``inner`` and, of these, ``drop_received``; ``cut``: lost to :meth:`cut` in
    either direction; ``muted``: lost to :meth:`mute`; ``discarded``: held when their connection
    was lost.
    """

    def __init__(
        self,
        inner: Van,
        plan: FaultPlan,
        seed: int,
        clock: Callable[[], float],
        *,
        drop_received: float = 0.0,
    ) -> None:
        self.uid = inner.uid
        self.counts = dict.fromkeys((*COUNTED, "cut", "muted", "discarded"), 0)
        self._inner = inner
        self.plan = plan
        self._drop_received = drop_received
        self._clock = clock
        # Two generators, so that sent messages get the same faults whatever arrives in between.
        self._on_send = random.Random(seed)
        self._on_receive = random.Random(self._on_send.getrandbits(64))
        self._held: list[tuple[float, int, str, list[bytes | memoryview]]] = []
        self._order = itertools.count()
        self._cuts: dict[str, float] = {}
        self._mutes: dict[str, float] = {}
        self._up: set[str] = set()
        self._news: list[Disconnected] = []

    def cut(self, peer: str, until: float) -> None:
        """Lose all messages to and from ``peer`` until the clock shows ``until``.

        The owner sees ``Disconnected`` at its next poll, and ``Connected`` at the first poll at or
        after ``until`` if there is a connection then. Messages that have arrived by that poll are
        lost too. Only this end is cut off: the peer notices only silence, unless it is cut as
        well. A second cut can only make the cut longer; ``math.inf`` is for ever.
        """
        if peer in self._cuts:
            self._cuts[peer] = max(until, self._cuts[peer])
            return
        self._cuts[peer] = until
        self._discard_held(peer)
        if peer in self._up:
            self._news.append(Disconnected(peer, "closed by the fault injector"))

    def mute(self, peer: str, until: float) -> None:
        """Lose all messages to ``peer`` until the clock shows ``until``, but none from it.

        The connection stays: neither end notices anything but silence. Messages that are held
        are lost if they are due before ``until``. A second call can only make it longer.
        """
        self._mutes[peer] = max(until, self._mutes.get(peer, until))

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        counts, plan = self.counts, self.plan
        counts["sent"] += 1
        if peer in self._cuts:
            counts["cut"] += 1
            return
        chance = self._on_send.random
        if plan.drop and chance() < plan.drop:
            counts["dropped"] += 1
            return
        if plan.duplicate and chance() < plan.duplicate:
            counts["duplicated"] += 1
            self._send_copy(peer, frames)
        self._send_copy(peer, frames)

    def trouble(self, peer: str) -> str:
        return self._inner.trouble(peer)

    def is_refused(self, peer: str) -> bool:
        return self._inner.is_refused(peer)

    def is_answered(self, peer: str) -> bool:
        return self._inner.is_answered(peer)

    def in_transit(self, peer: str) -> InTransit:
        return self._inner.in_transit(peer)

    def poll(self, timeout_s: float | None) -> list[VanEvent]:
        if timeout_s == 0:
            return self._turn(0)
        end = math.inf if timeout_s is None else self._clock() + timeout_s
        while True:
            due = self.next_due()
            stop = min(due, end)
            events = self._turn(None if stop == math.inf else max(0.0, stop - self._clock()))
            now = self._clock()
            if events or now >= end or now < due:  # if before both, the inner van was woken
                return events

    def next_due(self) -> float:
        """Return when to call ``poll`` even if no event arrives."""
        dues = list(self._cuts.values())
        if self._news:
            dues.append(self._clock())
        if self._held:
            dues.append(self._held[0][0])
        return min(dues, default=math.inf)

    def bind(self, host: str, port: int, *, listen_fd: int | None = None) -> int:
        return self._inner.bind(host, port, listen_fd=listen_fd)

    def connect(self, peer: str, address: str) -> None:
        self._forget(peer)
        self._inner.connect(peer, address)

    def spread(self, peer: str, connections: int) -> None:
        self._inner.spread(peer, connections)

    def disconnect(self, peer: str) -> None:
        self._forget(peer)
        self._inner.disconnect(peer)

    def wake(self) -> None:
        self._inner.wake()

    def close(self) -> None:
        self._held.clear()
        self._cuts.clear()
        self._mutes.clear()
        self._news.clear()
        self._inner.close()

    def _send_copy(self, peer: str, frames: Sequence[Buffer]) -> None:
        plan, generator = self.plan, self._on_send
        if plan.delay and generator.random() < plan.delay:
            self.counts["delayed"] += 1
            wait_s = generator.uniform(*plan.delay_s)
        elif plan.reorder and generator.random() < plan.reorder:
            self.counts["reordered"] += 1
            wait_s = generator.uniform(*plan.reorder_s)
        else:
            self._pass_on(peer, frames)
            return
        held = (self._clock() + wait_s, next(self._order), peer, as_buffers(frames))
        heapq.heappush(self._held, held)

    def _pass_on(self, peer: str, frames: Sequence[Buffer]) -> None:
        if self._mutes and self._is_muted(peer):
            self.counts["muted"] += 1
        else:
            self._inner.send(peer, frames)

    def _is_muted(self, peer: str) -> bool:
        if self._mutes.get(peer, -math.inf) > self._clock():
            return True
        self._mutes.pop(peer, None)
        return False

    def _turn(self, wait_s: float | None) -> list[VanEvent]:
        """Send due messages, poll the inner van once, and apply faults to its events."""
        if self._held:
            now = self._clock()
            while self._held and self._held[0][0] <= now:
                _, _, peer, frames = heapq.heappop(self._held)
                self._pass_on(peer, frames)
        arrived = self._inner.poll(0 if self._news else wait_s)
        if not (arrived or self._news or self._cuts):
            return arrived
        events: list[VanEvent] = [*self._news]
        self._news.clear()
        for event in arrived:
            if type(event) is Received:
                if self._arrives(event.peer):
                    events.append(event)
            else:
                self._note(event, events)
        if self._cuts:
            self._mend(events)
        return events

    def _arrives(self, peer: str) -> bool:
        self.counts["received"] += 1
        if peer in self._cuts:
            self.counts["cut"] += 1
            return False
        if self._drop_received and self._on_receive.random() < self._drop_received:
            self.counts["drop_received"] += 1
            return False
        return True

    def _note(self, event: VanEvent, events: list[VanEvent]) -> None:
        """Record the connection's real state; report it unless the connection is cut."""
        if isinstance(event, TurnedAway):
            events.append(event)
            return
        if type(event) is Connected:
            self._up.add(event.peer)
        else:
            self._up.discard(event.peer)
            self._discard_held(event.peer)
        if event.peer not in self._cuts:
            events.append(event)

    def _mend(self, events: list[VanEvent]) -> None:
        now = self._clock()
        for peer in [peer for peer, until in self._cuts.items() if until <= now]:
            del self._cuts[peer]
            if peer in self._up:
                events.append(Connected(peer))

    def _forget(self, peer: str) -> None:
        self._up.discard(peer)
        self._discard_held(peer)
        self._news = [event for event in self._news if event.peer != peer]

    def _discard_held(self, peer: str) -> None:
        kept = [message for message in self._held if message[2] != peer]
        if len(kept) < len(self._held):
            self.counts["discarded"] += len(self._held) - len(kept)
            self._held = kept
            heapq.heapify(kept)
