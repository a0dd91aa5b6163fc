"""What happens to the processes and connections of a simulated run; a seed decides it.

A process is lost only while no seat waits for another one. So several may be lost together, before
the first loss is noticed, or one after the other; but no server is lost with its standby. All else
(short pauses and cuts, slow nodes) comes at any time. Each mishap waits until it can happen, and
is counted only then.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from pslite import Postoffice
from pslite.errors import PSError
from pslite.ids import Role, node_id
from pslite.testing.simulator import Simulation
from tests.faults.invariants import all_are_taken, find_seats, seats_of

Link = tuple[Postoffice, Postoffice]

_AGAIN_S = 0.25
#: How long after a long cut or pause the scheduler may still decide that a process is lost.
_DECISION_S = 8.0

LOSSES = (
    "worker killed",
    "standby killed",
    "worker stopped",
    "server stopped",
    "standby stopped",
    "long cut",
    "long one-way cut",
)
"""Mishaps in which processes are lost, or may be; they are stopped for longer than the others
wait, and wake up."""
LOSSES_OF_SERVERS = ("server killed", "worker and server killed", "worker and server killed")
"""These need more to happen, so they are chosen more often."""
OTHERS = (
    "scheduler killed",
    "worker paused",
    "server paused",
    "standby paused",
    "one-way cut",
    "slow node",
)
KINDS = (
    *dict.fromkeys((*LOSSES, *LOSSES_OF_SERVERS, *OTHERS)),
    "server killed without a standby",
)
"""All that ``Mishaps`` does."""


class Mishaps:
    """The mishaps of one run.

    ``num_steps`` is how many steps of the simulation the run takes without any.
    """

    def __init__(
        self,
        simulation: Simulation,
        chance: random.Random,
        num_steps: int,
    ) -> None:
        self._simulation = simulation
        self._chance = chance
        self.counts: Counter[str] = Counter()
        #: When the last one is over, so that nothing more goes wrong.
        self.over_at = 0.0
        #: When the last one is over of those that may cost a process its seat.
        self._calm_at = 0.0
        #: When the next scheduler begins, which decides what the last one has not.
        self._scheduler_until = 0.0
        #: The seat that was lost and that no process can take, if there is one.
        self.hopeless = ""
        self._acts: dict[str, Callable[[], bool]] = {
            **{f"{role} killed": partial(self._kill, role) for role in _FINDERS},
            **{f"{role} stopped": partial(self._stop, role) for role in _FINDERS},
            **{f"{role} paused": partial(self._pause, role) for role in _FINDERS},
            "worker and server killed": self._kill_two,
            "long cut": self._cut_for_long,
            "long one-way cut": self._cut_one_way_for_long,
            "one-way cut": self._cut_one_way,
            "slow node": self._slow,
            "server killed without a standby": self._kill_alone,
            "scheduler killed": self._kill_scheduler,
        }
        self._has_one_scheduler = True
        self._plan = self._make_plan(num_steps)
        self._watch_steps()
        simulation.launcher = self._start_again

    def _make_plan(self, num_steps: int) -> list[tuple[int, str]]:
        """Before which step of the simulation which mishap is due; the last one first."""
        chance, has_standbys = self._chance, bool(self._simulation.standbys)
        if not has_standbys and chance.random() < 0.2:
            return [(chance.randint(1, num_steps), "server killed without a standby")]
        kinds = [kind for kind in (*LOSSES, *LOSSES_OF_SERVERS, *OTHERS) if self._fits(kind)]
        num = chance.randint(3, 7) if has_standbys else chance.randint(0, 3)
        chosen = [*dict.fromkeys(chance.sample(kinds, num))]
        # Most rules for lost workers matter without standbys, with which a step begins later.
        chosen += ["worker killed"] * (0 if has_standbys else chance.randint(1, 3))
        self._has_one_scheduler = "scheduler killed" not in chosen
        last = num_steps * 4 // 5  # the job must not be over before they can happen
        return sorted(((chance.randint(1, last), kind) for kind in chosen), reverse=True)

    def _fits(self, kind: str) -> bool:
        """Whether this could happen in this run."""
        if self._simulation.standbys:
            return True
        return "server" not in kind.replace("server paused", "") and "standby" not in kind

    def _watch_steps(self) -> None:
        simulation, plan = self._simulation, self._plan
        one_step, before = simulation._step, simulation.steps

        def step() -> None:
            while plan and simulation.steps - before >= plan[-1][0]:
                self._due(plan.pop()[1])
            if not plan:
                simulation._step = one_step  # type: ignore[method-assign]
            one_step()

        simulation._step = step  # type: ignore[method-assign]

    def _due(self, kind: str) -> None:
        """Let it happen at this step, or a while later, when nodes perhaps wait for messages."""
        if self._chance.random() < 0.5:
            self._try(kind)
        else:
            when = self._simulation.now + self._chance.uniform(0.0, 2.0)
            self._simulation.at(when, partial(self._try, kind))

    def _try(self, kind: str) -> None:
        """Let it happen now, or as soon as it can."""
        simulation = self._simulation
        if all(task.over for task in simulation._tasks):
            return
        find_seats(simulation)
        if self._acts[kind]():
            self.counts[kind] += 1
        else:
            simulation.at(simulation.now + _AGAIN_S, partial(self._try, kind))

    def _lasts(self, seconds: float, *, is_loss: bool = False) -> float:
        """Note how long a mishap lasts; return its end."""
        until = self._simulation.now + seconds
        self.over_at = max(self.over_at, until)
        if is_loss:
            decided_at = max(until, self._scheduler_until) + _DECISION_S
            self._calm_at = max(self._calm_at, decided_at)
        return until

    def _prolongs(self, seconds: float) -> float:
        """Note how long a mishap lasts; while it is decided who is lost, it prolongs that."""
        return self._lasts(seconds, is_loss=self._simulation.now < self._calm_at)

    # -- who can be lost ---------------------------------------------------------------

    def _is_calm(self) -> bool:
        """Whether another process may be lost now: no seat waits for one."""
        simulation = self._simulation
        return simulation.now >= self._calm_at and all_are_taken(simulation)

    def _lives(self, node: Postoffice) -> bool:
        """Whether a process has joined, runs and has not failed."""
        return not (self._simulation.is_stopped(node) or node.error or node.info is None)

    def _lossy_workers(self) -> list[Postoffice]:
        """The workers whose place another process could take."""
        simulation = self._simulation
        seats = [seats_of(simulation).get(node_id(Role.WORKER, r)) for r in self._ranks()]
        return [
            node
            for node, task, seat in zip(simulation.workers, simulation._tasks, seats, strict=True)
            if seat is not None
            and seat.may_return
            and seat.num_losses < 2
            and seat.node.uid == node.van.uid
            and self._lives(node)
            and not task.over
        ]

    def _ranks(self) -> range:
        return range(len(self._simulation.workers))

    def _lossy_servers(self) -> list[Postoffice]:
        """The servers whose standbys could take their places."""
        simulation = self._simulation
        return [simulation.servers[rank] for rank in self._living_standbys()]

    def _lossy_standbys(self) -> list[Postoffice]:
        """The processes that stand by for living servers."""
        return list(self._living_standbys().values())

    def _living_standbys(self) -> dict[int, Postoffice]:
        simulation = self._simulation
        return {
            rank: standby
            for rank, standby in simulation.standbys.items()
            if not simulation.is_stopped(standby)
            and standby.error is None
            and self._lives(simulation.servers[rank])
        }

    def _victim(self, role: str) -> Postoffice | None:
        nodes = _FINDERS[role](self) if self._is_calm() else []
        return self._chance.choice(nodes) if nodes else None

    # -- losses ------------------------------------------------------------------------

    def _kill(self, role: str) -> bool:
        simulation, chance, node = self._simulation, self._chance, self._victim(role)
        if node is None:
            return False
        if role == "worker":
            after_s = chance.uniform(0.0, 3.0)
            simulation.restart(node, after_s)
            self._lasts(after_s)
        else:
            simulation.kill(node)
            self._lasts(0.0)
            self._perhaps_another_standby(node)
        return True

    def _kill_two(self) -> bool:
        """Kill a worker and a server at nearly the same moment, as when their host is lost."""
        simulation, chance = self._simulation, self._chance
        worker, server = self._victim("worker"), self._victim("server")
        if worker is None or server is None:
            return False
        back_s = chance.uniform(0.0, 3.0)

        def kill_worker() -> None:
            if worker in self._lossy_workers():
                simulation.restart(worker, back_s)

        def kill_server() -> None:
            if server in self._lossy_servers():
                simulation.kill(server)

        first, second = chance.sample([kill_worker, kill_server], 2)
        first()
        until = self._lasts(chance.choice([0.0, chance.uniform(0.0, 2.0)]))
        self._calm_at = max(self._calm_at, until)
        if until > simulation.now:
            simulation.at(until, second)
        else:
            second()
        self._lasts(until - simulation.now + back_s)
        self._perhaps_another_standby(server)
        return True

    def _perhaps_another_standby(self, lost: Postoffice) -> None:
        """Start a process that stands by, as an operator may after a loss."""
        if self._chance.random() < 0.7:
            after_s = self._chance.uniform(0.0, 3.0)
            self._simulation.start_standby(lost.config.task_id, after_s)
            self._lasts(after_s)

    def _stop(self, role: str) -> bool:
        """Stop a process until after it was declared lost, or about as long."""
        simulation, chance, node = self._simulation, self._chance, self._victim(role)
        if node is None:
            return False
        seconds = chance.uniform(9.0, 17.0)
        simulation.pause(node, self._lasts(seconds, is_loss=True))
        if role == "worker":
            # It is lost before it wakes up, if there is a scheduler to say so.
            if seconds > 12.0 and self._has_one_scheduler and chance.random() < 0.5:
                simulation.replace(simulation.workers.index(node), chance.uniform(0.3, 15.0))
                self._lasts(15.0)
        else:
            self._perhaps_another_standby(node)
        return True

    def _cut_for_long(self) -> bool:
        link = self._lossy_link()
        if link is not None:
            self._simulation.cut(*link, self._lasts(self._chance.uniform(4.5, 9.0), is_loss=True))
        return link is not None

    def _cut_one_way_for_long(self) -> bool:
        link = self._lossy_link()
        if link is not None:
            until = self._lasts(self._chance.uniform(9.0, 14.0), is_loss=True)
            self._simulation.cut_one_way(*link, until)
        return link is not None

    def _lossy_link(self) -> Link | None:
        """Two nodes either of which may be lost."""
        if not self._is_calm():
            return None
        scheduler = self._simulation.scheduler
        workers, servers = self._lossy_workers(), self._lossy_servers()
        links = {
            "worker and scheduler": [(worker, scheduler) for worker in workers],
            "standby and scheduler": [(each, scheduler) for each in self._lossy_standbys()],
            "server and scheduler": [(server, scheduler) for server in servers],
            "worker and server": [(worker, server) for worker in workers for server in servers],
            "server and standby": list(zip(servers, self._lossy_standbys(), strict=True)),
        }
        chosen = [what for what in links if links[what]]
        if not chosen:
            return None
        what = self._chance.choice(chosen)
        self.counts[f"long cut of {what}"] += 1
        return self._either_way(links[what])

    def _either_way(self, links: list[Link]) -> Link | None:
        if not links:
            return None
        link = self._chance.choice(links)
        return link if self._chance.random() < 0.5 else (link[1], link[0])

    def _kill_alone(self) -> bool:
        """Kill a server that has no standby; the job then ends."""
        simulation = self._simulation
        rank = self._chance.randrange(len(simulation.servers))
        simulation.kill(simulation.servers[rank])
        self._lasts(0.0)
        self.hopeless = f"server {rank}"
        return True

    def _kill_scheduler(self) -> bool:
        """Kill the scheduler; another process goes on in its place."""
        simulation, chance = self._simulation, self._chance
        if simulation.is_dead(simulation.scheduler):
            return False
        after_s = chance.choice([chance.uniform(0.02, 0.5), chance.uniform(0.5, 12.0)])
        simulation.restart_scheduler(after_s)
        self._scheduler_until = self._prolongs(after_s)
        return True

    # -- what costs no process its seat --------------------------------------------------------

    def _pause(self, role: str) -> bool:
        """Stop a process for less time than the others wait; its connections stay."""
        simulation = self._simulation
        nodes = {
            "worker": simulation.workers,
            "server": [*simulation.servers, simulation.scheduler],
            "standby": list(simulation.standbys.values()),
        }[role]
        nodes = [node for node in nodes if not (simulation.is_stopped(node) or node.error)]
        if nodes:
            until = self._prolongs(self._chance.uniform(0.05, 4.5))
            simulation.pause(self._chance.choice(nodes), until)
        return bool(nodes)

    def _cut_one_way(self) -> bool:
        simulation = self._simulation
        servers, scheduler = simulation.servers, simulation.scheduler
        links = [(worker, server) for worker in simulation.workers for server in servers]
        links += [(node, scheduler) for node in (*simulation.workers, *servers)]
        links += [(servers[rank], standby) for rank, standby in simulation.standbys.items()]
        link = self._either_way(links)
        assert link is not None
        simulation.cut_one_way(*link, self._prolongs(self._chance.uniform(0.1, 4.5)))
        return True

    def _slow(self) -> bool:
        simulation = self._simulation
        nodes = [simulation.scheduler, *simulation.servers, *simulation.workers]
        node = self._chance.choice([*nodes, *simulation.standbys.values()])
        factor = self._chance.choice([3.0, 30.0, 200.0])
        simulation.slow(node, factor, self._prolongs(self._chance.uniform(1.0, 8.0)))
        return True

    # -- the launcher --------------------------------------------------------------------

    def _start_again(self, rank: int, error: BaseException) -> bool:
        """Start a worker's process again if it fails and its place is free, as a launcher does."""
        simulation = self._simulation
        if not isinstance(error, PSError) or self.hopeless:
            return False
        task = simulation._tasks[rank]
        after_s = self._chance.uniform(0.2, 3.0)

        def start() -> None:
            seat = seats_of(simulation).get(node_id(Role.WORKER, rank))
            if simulation.scheduler.error is not None or seat is None or not seat.may_return:
                task.fail(error)
            else:
                self.counts["worker started again"] += 1
                simulation.restart(task.node)

        simulation.at(self._lasts(after_s), start)
        return True


_FINDERS: dict[str, Callable[[Any], list[Postoffice]]] = {
    "worker": Mishaps._lossy_workers,
    "server": Mishaps._lossy_servers,
    "standby": Mishaps._lossy_standbys,
}
