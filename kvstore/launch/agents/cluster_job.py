"""What the launchers share that have another program start their processes: mpirun, srun, qsub.

Such a launcher says in a :class:`Cluster` which command starts as many agents as there are servers
and workers, and how an agent knows which one it is. The rest is here: a ticket for the agents
(``ticket.py``), a gate where they come in (``gate.py``), the command itself (``command.py``), and
then the job as everywhere, with the scheduler on this machine. Read ``launch/job/run.py`` first.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvstore.launch.agents.cluster import (
    Cluster,
    Member,
    agent_row,
    common_address,
    core_count,
    forwarded_variables,
    is_loopback,
    seen_from_away,
    wished_address,
)
from kvstore.launch.agents.command import Carrier
from kvstore.launch.agents.gate import AgentListener
from kvstore.launch.agents.remote import AgentPlace
from kvstore.launch.agents.ticket import AgentTicket, job_directory, write_ticket
from kvstore.launch.environment import allow_files, listen, share_gpus
from kvstore.launch.job.checks import conclude_check
from kvstore.launch.job.lifecycle import Timing
from kvstore.launch.job.registry import new_key
from kvstore.launch.job.run import Arrangement, check_plan, checking, run_job
from kvstore.launch.job.supervisor import Supervisor
from kvstore.launch.options import LaunchError, LaunchOptions
from kvstore.launch.plan import script_of
from pslite.node.address import local_addresses

_CHECK_S = 60.0
_DIRECTORY_SHOWN = Path("JOBDIR")


def run_on(
    cluster_of: Callable[[LaunchOptions, Mapping[str, str]], Cluster],
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    timing: Timing,
) -> int:
    """As :func:`kvstore.launch.job.run.run_job`, on the cluster that ``cluster_of`` returns."""
    cluster = cluster_of(options, environ)
    allow_files(3 * len(cluster.members))  # two for its agent, and a log
    if options.dry_run or options.check:
        check_plan(options, environ, service_command)
    if options.dry_run:
        return _print_plan(options, cluster)
    if options.check:
        return _check(options, environ, timing, cluster)

    def arrange(supervisor: Supervisor, key: str) -> Arrangement:
        agents = _places(cluster)
        directory = _start_agents(supervisor, environ, cluster, agents, key)
        greetings = [place.greeting or {} for place in agents]
        wished, port = wished_address(environ)
        host = wished or common_address(seen_from_away(greetings))
        variables = forwarded_variables(options, environ)
        gpus: Mapping[Member, Mapping[str, str]] = {}
        if cluster.worker_gpus:
            gpus = share_gpus(cluster.members, greetings, cluster.worker_gpus)
        places = dict(zip(cluster.members, agents, strict=True))
        for member, place in places.items():
            place.prepare(supervisor.job_id, "", variables, gpus.get(member, {}))
        cores = (cluster.worker_cores or options.places.worker_cores or 0) * options.num_workers
        return Arrangement(host, port, cores or core_count(greetings), places, directory)

    return run_job(options, environ, service_command, timing, arrange)


def _places(cluster: Cluster) -> list[AgentPlace]:
    return [
        AgentPlace(f"{role} {rank}", is_replaceable=cluster.replaces)
        for role, rank in cluster.members
    ]


def _start_agents(
    supervisor: Supervisor,
    environ: Mapping[str, str],
    cluster: Cluster,
    agents: Sequence[AgentPlace],
    key: str,
    script: str = "",
) -> Path:
    """Start the agents, wait until all have come, and return the directory that they share.

    Raises :class:`LaunchError`.
    """
    host, scheduler_port = wished_address(environ)
    if scheduler_port:  # is it in use? Not after hours in a queue
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
        raise LaunchError(f"cannot start '{argv[0]}': {error.strerror}", exit_code=1) from error
    for place in (carrier, AgentListener(listener, key, carrier.admit), *agents):
        supervisor.add_place(place)
    supervisor.connect([carrier], None)
    return directory


def own_addresses() -> list[str]:
    """This machine's addresses, those that only it can use itself last."""
    found = [address for of_one in local_addresses().values() for address in of_one]
    found += [socket.gethostname(), "127.0.0.1"]  # where the system cannot be asked
    return sorted(dict.fromkeys(found), key=is_loopback)


def _listen_everywhere() -> socket.socket:
    """On every interface: which one the hosts can reach is seen when they come."""
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
    print("# scheduler: this machine")
    for number, (role, rank) in enumerate(cluster.members):
        words = options.command if role == "worker" else ("python", "-m", "kvstore.server")
        print(f"# agent {number + cluster.first_rank}, {role} {rank}: {shlex.join(words)}")
    return 0


def _check(
    options: LaunchOptions, environ: Mapping[str, str], timing: Timing, cluster: Cluster
) -> int:
    """Have the agents started, and print what each says of its machine; 0, or 1 and why."""
    agents = _places(cluster)
    names = [str(place.label) for place in agents]
    with checking(environ, timing) as supervisor:
        # Who checks wants to know soon, also where a job may wait.
        cluster.connect_s = min(cluster.connect_s or _CHECK_S, _CHECK_S)
        script = script_of(options.command)
        _start_agents(supervisor, environ, cluster, agents, new_key(), script)
        for place in agents:
            place.finish(0.0)  # else they would take their launcher for lost
        rows = [
            agent_row(f"{name}@{place.label}", place.greeting or {})
            for name, place in zip(names, agents, strict=True)
        ]
    return conclude_check(rows)
