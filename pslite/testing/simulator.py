"""The simulator: a cluster in one thread, with virtual time and faults.

The nodes are the real ones (``node/postoffice.py``), on in-process vans wrapped in fault injectors.
Only the clock, the pool and the order of the nodes' steps are simulated. All random numbers come
from one seed, so a run with the same seed repeats message for message. Scripts drive the workers:
generators that yield futures (to wait for), or seconds of virtual time (to sleep).

::

    def script(node):
        yield node.ready
        yield node.barrier(pslite.WORKER_GROUP)

    Simulation(seed=7, num_workers=4, num_servers=2, faults=Faults(drop=0.05)).run(script)
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pslite.config import Config
from pslite.errors import PSError
from pslite.ids import Role
from pslite.node.log import Log
from pslite.node.pool import Work
from pslite.node.postoffice import Postoffice
from pslite.node.start import make_node, node_uid
from pslite.testing.inproc import InprocNetwork, InprocVan
from pslite.testing.pace import Pace
from pslite.testing.scripts import Script, SimulatedPool, Task
from pslite.van.faulty import FaultPlan, FaultyVan

#: A cluster that makes this many steps while no time passes is in an endless loop.
_MAX_STEPS_AT_ONE_TIME = 100_000


class HangError(PSError):
    """A script still waits although nothing more can happen, or time is up."""


@dataclass(frozen=True)
class Faults(FaultPlan):
    """The faults of the network: lost messages, delays, broken connections."""

    delay_s: tuple[float, float] = (0.001, 0.5)
    cuts: int = 0
    """How many times a connection is cut during the first ``cut_within_s``."""
    cut_within_s: float = 5.0
    cut_s: tuple[float, float] = (0.1, 2.0)
    """How long a cut lasts; shorter than the time after which a peer counts as lost."""
    until_s: float = math.inf
    """From this time on, no message is lost, repeated, delayed or reordered."""


#: How long a connection stays when nothing arrives on it, as with the van over TCP.
SILENCE_S = 5.0

#: Settings of simulated nodes: small numbers, so that a short run exercises every rule.
DEFAULTS: dict[str, Any] = {
    "root_uri": "sim",
    "root_port": 9091,
    "node_host": "sim",
    "resend_timeout_s": 0.5,
    "lost_after_s": 5.0,
    "chunk_bytes": 64,
    "credit_bytes": 1024,
}


class _Van(InprocVan):
    """Tells the simulation when the node needs a step."""

    def __init__(self, network: InprocNetwork, uid: str, wake: Callable[[str], None]) -> None:
        super().__init__(network, uid)
        self._wake = wake

    def wake(self) -> None:
        self._wake(self.uid)


class Simulation:
    """One cluster. ``run`` drives it to the end of all scripts."""

    def __init__(
        self,
        seed: int,
        num_workers: int,
        num_servers: int,
        faults: Faults | None = None,
        *,
        prepare: Callable[[Postoffice], None] | None = None,
        **settings: Any,
    ) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.faults = faults if faults is not None else Faults()
        self.lines: list[str] = []
        self.steps = 0
        self._ready: dict[str, None] = {}
        self._events: list[tuple[float, int, Work]] = []
        self._order = itertools.count()
        self._network = InprocNetwork(on_ready=lambda van: self._wake(van.uid))
        self._settings = {
            **DEFAULTS,
            **settings,
            "num_workers": num_workers,
            "num_servers": num_servers,
        }
        self._prepare = prepare
        self.nodes: dict[str, Postoffice] = {}
        #: When each node that lives next has something to do by itself. Only a step changes it;
        #: any other event that might change it wakes the node.
        self._dues: dict[str, float] = {}
        self._vans: dict[str, FaultyVan] = {}
        self.pace = Pace()
        #: Called with the rank and the error of a worker whose script has failed; returns whether
        #: it will start another process, as a launcher does.
        self.launcher: Callable[[int, BaseException], bool] | None = None
        self._tasks: list[Task] = []
        roles = [(Role.SCHEDULER, 0)]
        roles += [(Role.SERVER, rank) for rank in range(num_servers)]
        roles += [(Role.WORKER, rank) for rank in range(num_workers)]
        made = [self._make(role, rank) for role, rank in roles]
        self.scheduler = made[0]
        self.servers = made[1 : 1 + num_servers]
        self.workers = made[1 + num_servers :]
        #: The standbys by rank, until they take the places of their servers.
        self.standbys = {
            rank: self._make(Role.SERVER, rank, stands_by=True)
            for rank in range(num_servers if settings.get("standbys") else 0)
        }
        self._plan_cuts()
        self.at(self.faults.until_s, self._calm_down)

    def _make(self, role: Role, rank: int, *, stands_by: bool = False) -> Postoffice:
        config = Config(**self._settings, role=role.value, task_id=rank, stands_by=stands_by)
        incarnation = self.random.getrandbits(62) | 1
        uid = node_uid(role, incarnation)
        inner = _Van(self._network, uid, self._wake)
        plan = self.faults if self.now < self.faults.until_s else FaultPlan()
        van = FaultyVan(inner, plan, self.random.getrandbits(32), self._clock)
        log = Log(uid, config.verbose, self._write)
        node = make_node(
            config,
            van,
            incarnation=incarnation,
            log=log,
            pool=SimulatedPool(self, uid),
            clock=self._clock,
        )
        if self._prepare is not None:
            self._prepare(node)
        self.nodes[uid] = node
        self._vans[uid] = van
        for other, until in self.pace.stopped.items():  # which can make no connection now
            if self.now < until < math.inf:
                self.cut(self.nodes[other], node, until)
        node.begin()
        self._dues[uid] = node.io_queue.due
        self._wake(uid)
        return node

    def _clock(self) -> float:
        return self.now

    def _write(self, line: str) -> None:
        self.lines.append(f"{self.now:10.4f} {line}")

    def _wake(self, uid: str) -> None:
        self._ready[uid] = None

    # -- what happens when -------------------------------------------------------------

    def at(self, time: float, event: Work) -> None:
        """Schedule ``event`` for a virtual time."""
        heapq.heappush(self._events, (time, next(self._order), event))

    def _plan_cuts(self) -> None:
        faults = self.faults
        for _ in range(faults.cuts):
            when = self.random.uniform(0.0, faults.cut_within_s)
            until = when + self.random.uniform(*faults.cut_s)
            first = self.random.choice([self.scheduler, *self.servers])
            second = self.random.choice(
                self.workers if first is not self.scheduler else [*self.workers, *self.servers]
            )
            self.at(when, partial(self.cut, first, second, until))

    def _calm_down(self) -> None:
        for van in self._vans.values():
            van.plan = FaultPlan()

    def cut(self, first: Postoffice, second: Postoffice, until: float) -> None:
        """Cut the connection between two nodes until a virtual time."""
        for one, other in ((first, second), (second, first)):
            self._vans[one.van.uid].cut(other.van.uid, until)
            self._wake(one.van.uid)

    def cut_one_way(self, sender: Postoffice, receiver: Postoffice, until: float) -> None:
        """Lose what one node sends to another, in one direction, until a virtual time.

        After ``SILENCE_S`` the receiver gives the connection up, so both see that it is gone.
        """
        self._vans[sender.van.uid].mute(receiver.van.uid, until)
        if until > self.now + SILENCE_S:
            self.at(self.now + SILENCE_S, partial(self.cut, sender, receiver, until))

    def slow(self, node: Postoffice, factor: float, until: float) -> None:
        """Let a node take ``factor`` milliseconds for a message, until a virtual time.

        Other nodes take no time. What it does in its pool takes ``factor`` times as long.
        """
        self.pace.slow(node.van.uid, factor, until)

    def slowness(self, uid: str) -> float:
        """Return how many times slower a node is now."""
        return self.pace.slowness(uid, self.now)

    def defer(self, uid: str, work: Work) -> bool:
        """Let work of a stopped process wait until it goes on; return False if it runs."""
        is_stopped = self.pace.is_stopped(uid, self.now)
        if is_stopped and not self.pace.is_dead(uid):
            self.at(self.pace.stopped[uid], work)
        return is_stopped

    def kill(self, node: Postoffice) -> None:
        """End a node as if its process died: it is never stepped again."""
        self.pace.stopped[node.van.uid] = math.inf
        self._dues.pop(node.van.uid, None)
        node.van.close()
        for task in self._tasks:
            if task.node is node:
                task.over = task.is_stopped = True

    def is_stopped(self, node: Postoffice) -> bool:
        """Return whether a node is dead, or stopped now."""
        return self.pace.is_stopped(node.van.uid, self.now)

    def is_dead(self, node: Postoffice) -> bool:
        """Return whether a node was killed."""
        return self.pace.is_dead(node.van.uid)

    def restart_scheduler(self, after_s: float = 0.0) -> None:
        """Kill the scheduler; after a while, start another process in its place."""
        self.kill(self.scheduler)

        def start() -> None:
            del self.pace.stopped[self.scheduler.van.uid]
            self.scheduler = self._make(Role.SCHEDULER, 0)

        self.at(self.now + after_s, start)

    def kill_server(self, rank: int) -> None:
        """Kill a server; its standby takes its place if it has one."""
        self.kill(self.servers[rank])
        if rank in self.standbys:
            self.servers[rank] = self.standbys.pop(rank)

    def kill_standby(self, rank: int) -> None:
        """Kill the standby of a server."""
        self.kill(self.standbys.pop(rank))

    def start_standby(self, rank: int, after_s: float = 0.0) -> None:
        """Start a process after a while that stands by for a server, once that has none."""

        def start() -> None:
            self.standbys[rank] = self._make(Role.SERVER, rank, stands_by=True)

        self.at(self.now + after_s, start)

    def pause(self, node: Postoffice, until: float) -> None:
        """Stop a process as SIGSTOP does, until a virtual time.

        Its connections stay for ``SILENCE_S``. Then the others see that they are gone, and so does
        the process when it goes on.
        """
        uid = node.van.uid
        self.pace.stopped[uid] = until
        self._dues[uid] = until

        def give_up() -> None:
            if self.pace.stopped.get(uid) == until:  # it was not killed meanwhile
                for name, other in self.nodes.items():
                    if name != uid and not self.is_dead(other):
                        self.cut(node, other, until)

        if until > self.now + SILENCE_S:
            self.at(self.now + SILENCE_S, give_up)

    def restart(self, node: Postoffice, after_s: float = 0.0) -> None:
        """Kill a worker's node; after a while, start another process with the same script."""
        rank = next(i for i, each in enumerate(self.workers) if each is node)
        if not self.is_dead(node):
            self.kill(node)
        self.replace(rank, after_s)

    def replace(self, rank: int, after_s: float = 0.0) -> None:
        """Start another process of a worker after a while; end the present script."""
        if rank < len(self._tasks):
            self._tasks[rank].over, self._tasks[rank].is_stopped = False, True
        self.at(self.now + after_s, partial(self._start_again, rank))

    def _start_again(self, rank: int) -> None:
        other = self.workers[rank] = self._make(Role.WORKER, rank)
        if rank < len(self._tasks):
            task = self._tasks[rank] = Task(self, other, self._tasks[rank].script)
            task.wake()

    # -- running -----------------------------------------------------------------------

    def run(self, *scripts: Script, limit_s: float = 300.0) -> None:
        """Run one script on all workers (or one for each), then let the cluster end.

        Raises:
            HangError: a script still waits when nothing more can happen, or after
                ``limit_s`` of virtual time; the text says what each waits for.
        """
        chosen = list(scripts) if len(scripts) > 1 else [scripts[0]] * len(self.workers)
        tasks = self._tasks = [
            Task(self, node, script) for node, script in zip(self.workers, chosen, strict=True)
        ]
        for task in tasks:
            task.wake()

        def is_over() -> bool:
            is_every_one_over = True
            for task in tasks:
                if task.error is not None:
                    return True
                is_every_one_over = is_every_one_over and task.over
            return is_every_one_over

        self._until(is_over, tasks, limit_s)
        for task in tasks:
            if task.error is not None:
                raise task.error

    def until(self, condition: Callable[[], bool], limit_s: float = 300.0) -> None:
        """Let time pass until ``condition`` holds; raise ``HangError`` after ``limit_s``."""
        self._until(condition, [], limit_s)

    def finish(self, limit_s: float = 300.0) -> None:
        """Let all workers say goodbye, and wait until servers and standbys are finished."""
        for node in self.workers:
            node.io_queue.call(node.control.say_goodbye)
        left = [*self.servers, *self.standbys.values()]
        self._until(
            lambda: all(node.finished.done() or self.is_dead(node) for node in left),
            [],
            self.now + limit_s,
        )

    def _until(self, over: Callable[[], bool], tasks: list[Task], limit_s: float) -> None:
        steps_before = self.steps
        while not over():
            due = self.now if self._ready else self._next_due()
            if due > limit_s or self.steps - steps_before > _MAX_STEPS_AT_ONE_TIME:
                waits = "; ".join(task.describe() for task in tasks if not task.over)
                raise HangError(f"at {self.now:.3f} s of virtual time: {waits or 'the end'}")
            if due > self.now:
                self.now, steps_before = due, self.steps
            if self._ready:
                self._step()
            else:
                self._wake_due()

    def _step(self) -> None:
        """Step a random one of the nodes that have something to do."""
        names = list(self._ready)
        name = names[self.random.randrange(len(names))] if len(names) > 1 else names[0]
        del self._ready[name]
        until = self.pace.goes_on_at(name)
        if self.now < until:
            if until < math.inf:
                self._dues[name] = until
            return
        self.steps += 1
        node = self.nodes[name]
        if self.pace.is_slow(name):
            self._step_slowly(name, node)
            return
        node.step(0.0)
        self._dues[name] = min(node.io_queue.due, self._vans[name].next_due())

    def _step_slowly(self, name: str, node: Postoffice) -> None:
        """Step a node that is perhaps slow, and then busy with its messages for a while."""
        counts = self._vans[name].counts
        before = counts["received"]
        node.step(0.0)
        free_at = self.pace.took(name, counts["received"] - before, self.now)
        self._dues[name] = max(min(node.io_queue.due, self._vans[name].next_due()), free_at)

    def _next_due(self) -> float:
        due = min(self._dues.values())
        return min(due, self._events[0][0]) if self._events else due

    def _wake_due(self) -> None:
        now, events = self.now, self._events
        while events and events[0][0] <= now:
            heapq.heappop(events)[2]()
        ready = self._ready
        for name, due in self._dues.items():
            if due <= now:
                ready[name] = None

    def counts(self) -> Counter[str]:
        """Return what the fault injectors of all nodes have done."""
        total: Counter[str] = Counter()
        for van in self._vans.values():
            total.update(van.counts)
        return total
