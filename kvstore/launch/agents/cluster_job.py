"""The code that launchers on mpirun, srun and qsub share.

Such a launcher is a :class:`Cluster`: it defines the command that starts one agent for each server
and worker, and how an agent learns its rank. The rest is here: a ticket for the agents
(``join.py``), a listener at which they connect (``agent_listener.py``), and the command itself as a
place (:class:`Carrier`). After that, the job runs as with any launcher, with the scheduler on this
machine. The command's output is shown as notes; if the command ends before all agents have
connected, it explains the failure. Runs on the main thread. Read ``launch/job/run.py`` and
``remote.py`` first.
"""

from __future__ import annotations

import json
import math
import os
import re
import selectors
import shlex
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from kvstore.launch.agents.agent_listener import AgentListener
from kvstore.launch.agents.cluster import (
    Cluster,
    Member,
    agent_row,
    apart,
    common_address,
    core_count,
    forwarded_variables,
    is_loopback,
    print_processes,
    quoted,
    seen_from_away,
    wished_address,
)
from kvstore.launch.agents.join import PROGRAM_NAME, AgentTicket, job_directory, write_ticket
from kvstore.launch.agents.remote import AgentPlace
from kvstore.launch.agents.wire import GREETING, AgentLink
from kvstore.launch.environment import allow_files, listen, share_gpus
from kvstore.launch.job.checks import conclude_check
from kvstore.launch.job.child import die_with_launcher
from kvstore.launch.job.guardian import GuardianProcess, succeeds
from kvstore.launch.job.places import Event, Finished, IndexedSpecs, LineStream, Note, Place
from kvstore.launch.job.registry import SHARED_NAME, new_key
from kvstore.launch.job.report import some_of
from kvstore.launch.job.restarts import Timing
from kvstore.launch.job.run import Arrangement, check_plan, checking, run_job
from kvstore.launch.job.supervisor import Supervisor
from kvstore.launch.options import LaunchError, LaunchOptions
from kvstore.launch.plan import script_of
from pslite.node.address import local_addresses

_CHECK_S = 60.0
_DIRECTORY_SHOWN = Path("JOBDIR")
_KEPT_LINES = 200  # only the last lines are kept
_ENDING_S = 5.0  # for the command to end after its agents, and again after SIGTERM
_NO_PROGRAM = re.compile(rf"can't open file '([^']*{re.escape(PROGRAM_NAME)})'")
_CANCEL_S = 30.0
_TROUBLE_S = 1.0  # between two calls of Cluster.trouble
_ROSTER_S = (5.0, 10.0, 20.0, 40.0, 60.0)  # between two reports of the awaited agents


def run_on(
    cluster_of: Callable[[LaunchOptions, Mapping[str, str]], Cluster],
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    timing: Timing,
) -> int:
    """Run a job on the cluster that ``cluster_of`` returns; see ``run_job``."""
    cluster = cluster_of(options, environ)
    allow_files(3 * len(cluster.members))  # each agent: two for its link, one for its log
    if options.dry_run or options.check:
        check_plan(options, environ, service_command)
    if options.dry_run:
        return _print_plan(options, cluster)
    if options.check:
        return _check(options, environ, timing, cluster)

    checked = [cluster]  # for the first attempt; each other makes one of its own

    def arrange(supervisor: Supervisor, key: str) -> Arrangement:
        cluster = checked.pop() if checked else cluster_of(options, environ)
        agents, directory = _start_agents(supervisor, environ, cluster, key)
        greetings = [place.greeting or {} for place in agents]
        wished, port = wished_address(environ)
        host = wished or common_address(seen_from_away(greetings))
        variables = forwarded_variables(options, environ)
        gpus: Mapping[Member, Mapping[str, str]] = {}
        if cluster.worker_gpus:
            gpus = share_gpus(cluster.members, greetings, cluster.worker_gpus)
        hosts_of_agents = [str(one.get("host")) for one in greetings]
        places = dict(zip(apart(cluster.members, hosts_of_agents), agents, strict=True))
        for member, place in places.items():
            place.prepare(supervisor.job_id, "", variables, gpus.get(member, {}))
        cores = (cluster.worker_cores or options.places.worker_cores or 0) * options.num_workers
        named = zip(cluster.members, greetings, strict=True)
        hosts = {rank: str(one.get("host")) for (role, rank), one in named if role == "worker"}
        names = [hosts[rank] for rank in sorted(hosts)]
        return Arrangement(host, port, cores or core_count(greetings), places, directory, names)

    return run_job(options, environ, service_command, timing, arrange)


def _start_agents(
    supervisor: Supervisor,
    environ: Mapping[str, str],
    cluster: Cluster,
    key: str,
    script: str = "",
) -> tuple[list[AgentPlace], Path]:
    """Start the agents and wait for them; return their places and the job's directory.

    Raises :class:`LaunchError`.
    """
    agents = [AgentPlace(f"{one[0]} {one[1]}", cluster.replaces) for one in cluster.members]
    host, scheduler_port = wished_address(environ)
    if scheduler_port:  # if the port is in use, say so now and not after hours in a queue
        listen(host or "0.0.0.0", scheduler_port).close()
    listener = listen(host, 0) if host else _listen_everywhere()
    directory = job_directory(environ)
    supervisor.remove_at_the_end(directory)
    addresses = [host] if host else own_addresses()
    port = int(listener.getsockname()[1])
    names, first_rank = cluster.rank_names, cluster.first_rank
    ticket = AgentTicket(addresses, port, key, names, first_rank, cluster.if_lost, script)
    write_ticket(directory, ticket, os.getcwd(), cluster.texts(ticket))
    argv = cluster.submit(directory)
    try:
        carrier = Carrier(cluster, argv, agents, supervisor.guardian)
    except OSError as error:
        listener.close()
        missing = isinstance(error, FileNotFoundError)
        advice = "; install it on this machine, or put it on the PATH" if missing else ""
        raise LaunchError(
            f"cannot start '{argv[0]}': {error.strerror}{advice}", exit_code=1
        ) from error
    for place in (carrier, AgentListener(listener, key, carrier.admit), *agents):
        supervisor.add_place(place)
    supervisor.connect([carrier, *agents], None)
    return agents, directory


def own_addresses() -> list[str]:
    """Return this machine's addresses, loopback addresses last."""
    found = [address for of_one in local_addresses().values() for address in of_one]
    found += [socket.gethostname(), "127.0.0.1"]  # in case the system does not list the others
    return sorted(dict.fromkeys(found), key=is_loopback)


def _listen_everywhere() -> socket.socket:
    """Return a socket that listens on every interface; agents find a usable address."""
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        return socket.create_server(("", 0), backlog=1024)
    except OSError as error:
        raise LaunchError(f"cannot listen for agents: {error.strerror}", exit_code=1) from error


def _print_plan(options: LaunchOptions, cluster: Cluster) -> int:
    print(shlex.join(cluster.submit(_DIRECTORY_SHOWN)))
    shown = AgentTicket(["LAUNCHER"], 0, "KEY", cluster.rank_names, cluster.first_rank)
    for name, text in cluster.texts(shown).items():
        print(f"# {_DIRECTORY_SHOWN / name}:")
        print("".join(f"#   {line}\n" for line in text.splitlines()), end="")
    ranks = range(cluster.first_rank, cluster.first_rank + len(cluster.members))
    named = zip(ranks, cluster.members, strict=True)
    print_processes(options, [(role, f"agent {n}, {role} {rank}") for n, (role, rank) in named])
    return 0


def _check(
    options: LaunchOptions, environ: Mapping[str, str], timing: Timing, cluster: Cluster
) -> int:
    """Start the agents, print a row for each, and return 0, or 1 on failure."""
    with checking(environ, timing) as supervisor:
        # A check must end soon, even if a job may wait in a queue.
        cluster.connect_s = min(cluster.connect_s or _CHECK_S, _CHECK_S)
        script = script_of(options.command)
        agents, _ = _start_agents(supervisor, environ, cluster, new_key(), script)
        for place in agents:
            place.finish(0.0)  # otherwise they would believe that their launcher is lost
        rows = [
            agent_row(f"{role} {rank}@{place.label}", place.greeting or {})
            for (role, rank), place in zip(cluster.members, agents, strict=True)
        ]
    return conclude_check(rows)


# -- the command ---------------------------------------------------------------------------


class Carrier(Place):
    """The command ``argv`` of ``cluster``; ``workers`` are the agents' places by rank."""

    def __init__(
        self,
        cluster: Cluster,
        argv: Sequence[str],
        workers: Sequence[AgentPlace],
        guardian: GuardianProcess,
    ) -> None:
        self._cluster = cluster
        self._workers = workers
        self._guardian = guardian
        self._cancellation: Sequence[str] | None = None
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)  # output before all had connected
        self._unshown: deque[str] = deque(maxlen=_KEPT_LINES)
        self._has_begun = False
        self._is_over = False
        self._hung_up_s = time.monotonic()
        self._rosters = 0
        self._roster_s = self._hung_up_s + _ROSTER_S[0]
        self._trouble_s = self._hung_up_s + _TROUBLE_S
        self._last_came_s = self._hung_up_s
        self._learn_to_cancel("")
        self._process, pipes = _started(argv, cluster.environ, cluster.has_terminal)
        self._streams = [LineStream(pipe, self.heard) for pipe in pipes]
        guardian.watch(self._process.pid)

    def awaited(self) -> list[str]:
        return [name for place in self._workers for name in place.awaited()]

    def admit(self, link: AgentLink, greeting: Mapping[str, Any]) -> list[Event]:
        """Take an agent that greeted; send away an unknown or taken rank.

        If the greeting is an error instead, the job fails with its text.
        """
        rank = greeting.get("rank")
        host = str(greeting.get("host"))
        if "error" in greeting:
            link.close()
            self._fail(f"{host}: {greeting['error']}")
            return []
        free = [index for index, place in enumerate(self._workers) if not place.is_connected]
        if self._cluster.only_wishes and free and rank not in free:
            rank = free[0]
        if not isinstance(rank, int) or not 0 <= rank < len(self._workers):
            link.close()
            return [Note(f"{host}: an agent with the rank {rank} came, but there is no such rank")]
        place = self._workers[rank]
        if place.is_connected and not place.is_replaceable:
            link.close()
            return [Note(f"{host}: a second agent with the rank {rank} came and was sent away")]
        # The cluster starts a second agent only if it knows that the first is lost.
        events = place.leave("is replaced by another") if place.is_connected else []
        place.label = host
        place.greet(link, greeting)
        self._last_came_s = time.monotonic()
        return events

    def start(self, specs: IndexedSpecs, variables: Mapping[str, str]) -> list[Event]:
        self._has_begun = True
        return []

    def adjust(self, selector: selectors.BaseSelector, *, paused: bool) -> None:
        for stream in self._streams:
            stream.adjust(selector, paused=paused)

    def heard(self, lines: Sequence[bytes]) -> list[Event]:
        """Handle lines that the command, or one of its agents, has printed."""
        notes: list[Event] = []
        for line in lines:
            if GREETING in line:
                self._fail(refusal(line))  # the first reason is kept
                continue
            text = line.decode(errors="replace").rstrip()
            if not text.strip(" -="):
                continue  # a separator line
            self._learn_to_cancel(text)
            if not self._cluster.is_news(text) or self._is_over:
                continue  # after the job's end, the end of agents is not a failure
            if self._has_begun:
                notes.append(self._note(text))
                continue
            self._said.append(text)
            if self.failure is None:
                self.failure = _not_shared(text) or self._cluster.fatal(text)
            if self.failure is None:  # a failure is reported by itself
                self._unshown.append(text)
        return notes

    def sweep(self) -> list[Event]:
        if self._process.returncode is not None or (code := self._process.poll()) is None:
            return []
        with suppress(OSError):  # processes that it left behind: its number may soon be reused
            os.killpg(self._process.pid, signal.SIGTERM)
        if not self.awaited():
            is_news = code != 0 and not self._is_over
            return [Note(f"{self._cluster.program} ended with exit code {code}")] if is_news else []
        for stream in self._streams:
            stream.read_rest()
        if self.failure is None:
            self.failure = self._cluster.explain(list(self._said), code)
        return []

    def tick(self, now_s: float) -> tuple[list[Event], float | None]:
        if self._has_begun or not self.awaited():
            return [], None
        if now_s >= self._trouble_s and self.failure is None:
            self.failure = self._cluster.trouble()
            self._trouble_s = now_s + _TROUBLE_S
        awaited, connect_s = some_of(self.awaited()), self._cluster.connect_s
        late_s = math.inf if connect_s is None else self._last_came_s + connect_s
        if now_s >= late_s:
            said = f"; {self._cluster.program} said:{quoted(self._said)}" if self._said else ""
            self._fail(f"no answer from {awaited} within {connect_s:g} s{self._state()}{said}")
        events: list[Event] = []
        if now_s >= self._roster_s:
            here = [place for place in self._workers if place.is_connected]
            hosts = some_of(sorted({str(place.label) for place in here}))
            there = f" ({len(here)} of {len(self._workers)} are there, on {hosts})" if here else ""
            events += [self._note(text) for text in self._unshown]
            events.append(Note(f"waiting for {awaited}{there}{self._state()}"))
            self._unshown.clear()
            self._rosters += 1
            self._roster_s = now_s + _ROSTER_S[min(self._rosters, len(_ROSTER_S) - 1)]
        return events, max(0.0, min(self._roster_s, self._trouble_s, late_s) - now_s)

    def finish(self, leftover_s: float) -> list[Event]:
        self._is_over = True
        return [Finished(0)]

    def hang_up(self) -> None:
        self._hung_up_s = time.monotonic()

    def close(self) -> None:
        """Wait a moment for the command to end; agents end when their links close.

        If the command has not succeeded by then, or the job has not begun, cancel the cluster's
        job.
        """
        if self._has_begun:
            self._wait(self._hung_up_s + self._cluster.ending_s)
        self._wait(time.monotonic() + _ENDING_S, self._cluster.is_submitting)
        was_killed = (self._process.poll() or 0) < 0
        if not self._cluster.clears_up:
            self._take_out()
        self._signal(signal.SIGTERM)
        self._wait(time.monotonic() + _ENDING_S)
        if self._cluster.clears_up and (was_killed or self._process.poll() is None):
            self._take_out()  # the command could not do it itself
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in self._streams:
            stream.close()

    def _fail(self, reason: str) -> None:
        if self.failure is None and not self._has_begun:
            self.failure = reason

    def _note(self, text: str) -> Note:
        """Return a note with the command's name in front, unless it is there already."""
        prefix = f"{self._cluster.program}: "
        return Note(text if text.startswith(prefix) else prefix + text)

    def _state(self) -> str:
        """Return a colon and the cluster's state, or ""."""
        state = self._cluster.poll()
        return f": {state}" if state else ""

    def _wait(self, until_s: float, is_to_go_on: Callable[[], bool] = lambda: True) -> None:
        """Wait until ``until_s`` for the command to end, and read its output meanwhile."""
        while is_to_go_on() and self._process.poll() is None:
            if (left_s := until_s - time.monotonic()) <= 0:
                return
            with selectors.PollSelector() as selector:
                self.adjust(selector, paused=False)
                ready = selector.select(min(left_s, 0.05))
            for key, _ in ready:
                key.data(0.0)

    def _learn_to_cancel(self, line: str) -> None:
        if self._cancellation is None and (command := self._cluster.cancel(line)):
            self._cancellation = command
            self._guardian.cancel_at_the_end(command)

    def _take_out(self) -> None:
        has_done_well = self._has_begun and self._process.poll() == 0
        if self._cancellation is None or has_done_well:
            return
        # If this fails, the command's own cleanup must suffice.
        succeeds(self._cancellation, _CANCEL_S, self._cluster.environ)
        self._wait(time.monotonic() + _ENDING_S)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


def _not_shared(line: str) -> str | None:
    """Return a sentence if ``line`` is Python's error about the missing agent program."""
    if (found := _NO_PROGRAM.search(line)) is None:
        return None
    what = f"set {SHARED_NAME} to a directory that all hosts share"
    return f"a host does not find {found[1]}: {what} ({line})"


def refusal(line: bytes) -> str:
    """Return the reason from the line with which a program refused to become an agent."""
    try:
        found = json.loads(line[line.index(GREETING) + len(GREETING) :])
        return f"{found['host']}: {found['error']}"
    except (ValueError, KeyError, TypeError):
        return line.decode(errors="replace")


def _started(
    argv: Sequence[str], environment: Mapping[str, str], has_terminal: bool
) -> tuple[subprocess.Popen[bytes], list[IO[bytes]]]:
    """Start the command; return its process and its output streams. Raises OSError."""
    ours, theirs = os.openpty() if has_terminal else (-1, subprocess.PIPE)
    try:
        process = subprocess.Popen(
            list(argv),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=die_with_launcher(),  # safe: the launcher has one thread
        )
    except OSError:
        if has_terminal:
            os.close(ours)
        raise
    finally:
        if has_terminal:
            os.close(theirs)
    output = os.fdopen(ours, "rb", 0) if has_terminal else process.stdout
    assert output is not None and process.stderr is not None
    return process, [output, process.stderr]
