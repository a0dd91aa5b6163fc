"""The launcher ``mpi``: one ``mpirun`` starts the servers and the workers, by their ranks.

Open MPI and MPICH (and what is built like it) are told apart by what ``mpirun --version`` says;
they name the same things differently. Nothing here speaks MPI. Flags as in dmlc-core's
``tracker/dmlc_tracker/mpi.py``, which starts two mpiruns. Read ``launch/agents/cluster_job.py``
next.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvstore.launch.agents.cluster import Cluster, Member, find_program, quoted
from kvstore.launch.agents.cluster_job import agent_command, run_carried, servers_then_workers
from kvstore.launch.backends.hosts import Host, bracketed, read_hosts, spread
from kvstore.launch.backends.ssh_login import known_refusal
from kvstore.launch.job.lifecycle import Timing
from kvstore.launch.options import LaunchError, LaunchOptions

_VERSION_S = 10.0
_CONNECT_S = 60.0
_HOSTS_NAME = "hosts"
_OF_SSH = re.compile(r"\Assh: |Permission denied \(|[Hh]ost key|HOST IDENTIFICATION")

# Servers need little of a processor: a machine takes more processes than it has of these. Both
# the names up to Open MPI 4 and those from 5 on, which leaves this to PRRTE.
_OPEN_MPI_VARIABLES = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@dataclass(frozen=True)
class MpiFamily:
    """One family of mpirun: its option for a hosts file, how that names slots, and its extras."""

    name: str
    hosts_option: str
    slots: str
    rank_names: tuple[str, ...]
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


# Open MPI gives each process one processor, all threads of what it starts included, unless told.
OPEN_MPI = MpiFamily(
    "Open MPI",
    "--hostfile",
    " slots=",
    ("OMPI_COMM_WORLD_RANK", "PMIX_RANK"),  # mpirun(1), "Exported Environment Variables"
    ("--bind-to", "none"),
    _OPEN_MPI_VARIABLES,
)
# Hydra; what it calls pinning is Intel MPI's, and has to be off for the same reason.
MPICH = MpiFamily("MPICH", "-f", ":", ("PMI_RANK",), (), {"I_MPI_PIN": "off"})


def run(
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    timing: Timing,
) -> int:
    """As :func:`kvstore.launch.job.run.run_job`."""
    remedy = (
        "install Open MPI or MPICH, or load its module, or use --launcher ssh, which needs neither"
    )
    program = find_program("mpirun", options, environ, remedy)
    hosts = [] if options.hostfile is None else read_mpi_hosts(options.hostfile)
    members, counts = placement(options, hosts)
    kind = OPEN_MPI if program is None else kind_of(_version(program, environ))
    cluster = Cluster(
        members=members,
        command=lambda directory: mpirun_argv(options, kind, len(members), directory),
        # No user is there to type a password, on a terminal or in a window (ssh(1)).
        environment={**kind.variables, "SSH_ASKPASS_REQUIRE": "never", **_outside(environ)},
        rank_names=kind.rank_names,
        explain=explain,
        fatal=lambda line: login_refusal(line, hosts),
        files={_HOSTS_NAME: hosts_file(counts, kind)} if hosts else {},
        connect_s=_CONNECT_S,
    )
    return run_carried(options, environ, service_command, timing, cluster)


def kind_of(version: str) -> MpiFamily:
    """From what ``mpirun --version`` prints. Raises :class:`LaunchError` for any other."""
    if any(name in version for name in ("Open MPI", "OpenRTE", "PRRTE", "prte")):
        return OPEN_MPI
    if any(name in version for name in ("HYDRA", "MPICH", "Intel(R) MPI")):
        return MPICH
    first = version.strip().splitlines()[0] if version.strip() else "nothing"
    raise LaunchError(
        f"mpirun is from neither Open MPI nor MPICH: its --version says '{first}'", exit_code=1
    )


def read_mpi_hosts(path: str) -> list[Host]:
    """The hosts file as for ssh, or as mpirun has it. Raises :class:`LaunchError`."""
    return [_as_mpirun_has_it(host) for host in read_hosts(path)]


def placement(
    options: LaunchOptions, hosts: Sequence[Host]
) -> tuple[list[Member], list[tuple[str, int]]]:
    """Return who each rank is, and how many ranks each host gets; without hosts mpirun decides.

    mpirun fills the first host before the second; so the servers and the workers of the first
    host come first. Raises :class:`LaunchError` (exit code 2).
    """
    if not hosts:
        return servers_then_workers(options), []
    file_name = options.hostfile or "hosts"
    places = spread(hosts, options.num_servers, options.num_workers, file_name)
    members: list[Member] = []
    counts: list[tuple[str, int]] = []
    for index, host in enumerate(hosts):
        here = [(role, rank) for role, rank, where in places if where == index]
        members += here
        if here:
            counts.append((host.name, len(here)))
    return members, counts


def _as_mpirun_has_it(host: Host) -> Host:
    """``host:4`` means four slots for Hydra; a port or a user mean nothing to mpirun."""
    for option, value in (("user=", host.user), ("addr=", host.address)):
        if value is not None:
            raise LaunchError(
                f"{host.name}: {option} is for --launcher ssh; mpirun logs in by itself: write "
                "what it needs into ~/.ssh/config, and name the network by DMLC_INTERFACE",
                exit_code=2,
            )
    return host if host.port is None else replace(host, slots=host.port, port=None)


def hosts_file(counts: Sequence[tuple[str, int]], kind: MpiFamily) -> str:
    """The hosts as this kind of mpirun reads them."""
    return "".join(f"{bracketed(name)}{kind.slots}{count}\n" for name, count in counts)


def mpirun_argv(options: LaunchOptions, kind: MpiFamily, count: int, directory: Path) -> list[str]:
    hosts = [] if options.hostfile is None else [kind.hosts_option, str(directory / _HOSTS_NAME)]
    return [
        "mpirun",
        *kind.options,
        *hosts,
        *options.places.launcher_args,
        "-n",
        str(count),
        *agent_command(options, directory),
    ]


def _outside(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what an MPI around this launcher says of its own ranks."""
    ranks = {name for kind in (OPEN_MPI, MPICH) for name in kind.rank_names}
    return {name: value for name, value in environ.items() if name not in ranks}


def explain(lines: Sequence[str], code: int) -> str:
    """``mpirun`` has ended before all agents had come."""
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    said = quoted(lines)
    return f"mpirun ended ({how}) before all processes had started" + (
        f"; it said:{said}" if said else ""
    )


def login_refusal(line: str, hosts: Sequence[Host]) -> str | None:
    """A sentence if ``line`` is ssh's, which mpirun logs in with, and says why it could not."""
    if not _OF_SSH.search(line):
        return None
    named = [host for host in hosts if _mentions(line, host.name)]
    return known_refusal(named[0] if named else Host("a host of the job"), [line])


def _mentions(line: str, name: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)", line) is not None


def _version(program: str, environ: Mapping[str, str]) -> str:
    try:
        found = subprocess.run(
            [program, "--version"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"'{program} --version' did not answer: {error}", exit_code=1) from error
    return found.stdout + found.stderr
