"""The launcher ``mpi``: one ``mpirun`` starts all servers and workers.

The output of ``mpirun --version`` tells Open MPI from MPICH and its relatives, which name the same
options differently. Nothing here uses MPI itself. Flags as in dmlc-core's
``tracker/dmlc_tracker/mpi.py``, which starts two mpiruns. Read ``launch/agents/cluster.py`` first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from kvstore.launch.agents.cluster import Cluster, are_here, ask
from kvstore.launch.agents.cluster_job import run_on
from kvstore.launch.agents.join import AgentTicket
from kvstore.launch.backends.hosts import Host, bracketed, read_hosts, spread
from kvstore.launch.backends.ssh_errors import known_refusal
from kvstore.launch.options import LaunchError, LaunchOptions

_VERSION_S = 10.0
_HOSTS_NAME = "hosts"
_OF_SSH = re.compile(r"\Assh: |Permission denied \(|[Hh]ost key|HOST IDENTIFICATION")

# Servers need little processor time, so a machine may get more processes than processor cores. The
# first name is for Open MPI up to 4, the second for Open MPI from 5, where PRRTE decides this.
_OPEN_MPI_VARIABLES = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@dataclass(frozen=True)
class MpiFamily:
    """A family of mpirun: its options and its format of host files."""

    hosts_option: str
    slots: str
    rank_names: tuple[str, ...]
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


# Without this, Open MPI binds each process, with all threads that it starts, to one core.
OPEN_MPI = MpiFamily(
    "--hostfile",
    " slots=",
    ("OMPI_COMM_WORLD_RANK", "PMIX_RANK"),  # mpirun(1), "Exported Environment Variables"
    ("--bind-to", "none"),
    _OPEN_MPI_VARIABLES,
)
# Hydra. Pinning is Intel MPI's name for binding, and must be off for the same reason.
MPICH = MpiFamily("-f", ":", ("PMI_RANK",), (), {"I_MPI_PIN": "off"})


class MpiJob(Cluster):
    """One mpirun of ``family``; without ``hosts``, mpirun chooses the hosts.

    mpirun fills the first host before the second, so the servers and workers of the first host come
    first. Raises :class:`LaunchError` (exit code 2).
    """

    program = "mpirun"
    connect_s = 60.0

    def __init__(
        self,
        options: LaunchOptions,
        environ: Mapping[str, str],
        family: MpiFamily,
        hosts: Sequence[Host],
    ) -> None:
        # Remove the ranks of an MPI that started this launcher. ssh must not ask for a password, on
        # a terminal or in a window (ssh(1)), since no user is there to type it.
        ranks = (*OPEN_MPI.rank_names, *MPICH.rank_names)
        outside = {name: value for name, value in environ.items() if name not in ranks}
        super().__init__(options, {**family.variables, "SSH_ASKPASS_REQUIRE": "never", **outside})
        self.rank_names = family.rank_names
        self._family = family
        self._hosts = hosts
        self._counts: Counter[int] = Counter()  # number of processes for each host's index
        if hosts:
            file_name = options.hostfile or "hosts"
            counts = options.num_servers, options.num_workers
            places = spread(hosts, *counts, file_name, options.standbys)
            places.sort(key=lambda place: place[2])
            self.members = [(role, rank) for role, rank, _ in places]
            self._counts = Counter(index for _, _, index in places)

    def submit(self, directory: Path) -> list[str]:
        family = self._family
        return [
            "mpirun",
            *family.options,
            *([family.hosts_option, str(directory / _HOSTS_NAME)] if self._hosts else []),
            *self.places.launcher_args,
            "-n",
            str(len(self.members)),
            *self.agent(directory),
        ]

    def texts(self, ticket: AgentTicket) -> dict[str, str]:
        if not self._hosts:
            return {}
        lines = (
            f"{bracketed(self._hosts[index].name)}{self._family.slots}{count}\n"
            for index, count in self._counts.items()
        )
        return {_HOSTS_NAME: "".join(lines)}

    def fatal(self, line: str) -> str | None:
        """Return a sentence if ``line`` is ssh's reason why mpirun could not log in."""
        if not _OF_SSH.search(line):
            return None
        named = [host for host in self._hosts if _mentions(line, host.name)]
        return known_refusal(named[0] if named else Host("a host of the job"), [line])


def _mentions(line: str, name: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)", line) is not None


def as_mpirun_has_them(hosts: Sequence[Host]) -> list[Host]:
    """Return the hosts as mpirun reads them: for Hydra, ``host:4`` means four slots.

    Raises :class:`LaunchError`.
    """
    for host in hosts:
        for option, value in (("user=", host.user), ("addr=", host.address)):
            if value is not None:
                raise LaunchError(
                    f"{host.name}: {option} works only with --launcher ssh, since mpirun logs in "
                    "by itself; put login options into ~/.ssh/config, and set DMLC_INTERFACE to "
                    "choose the network"
                )
    return [
        host if host.port is None else replace(host, slots=host.port, port=None) for host in hosts
    ]


def family_of(version: str) -> MpiFamily:
    """Return the family that ``mpirun --version`` names. Raises :class:`LaunchError`."""
    if any(name in version for name in ("Open MPI", "OpenRTE", "PRRTE", "prte")):
        return OPEN_MPI
    if any(name in version for name in ("HYDRA", "MPICH", "Intel(R) MPI")):
        return MPICH
    first = version.strip().splitlines()[0] if version.strip() else "nothing"
    raise LaunchError(
        f"mpirun must be from Open MPI or MPICH, its --version prints '{first}'; put another "
        "first on the PATH",
        exit_code=1,
    )


def cluster_of(options: LaunchOptions, environ: Mapping[str, str]) -> MpiJob:
    """Return the cluster of the installed mpirun. Raises :class:`LaunchError`."""
    remedy = (
        "install Open MPI or MPICH, or load its module, or use --launcher ssh, which needs neither"
    )
    family = OPEN_MPI
    if are_here(["mpirun"], options, environ, remedy):
        family = family_of(ask(["mpirun", "--version"], environ, _VERSION_S)[0])
    hosts = [] if options.hostfile is None else read_hosts(options.hostfile)
    return MpiJob(options, environ, family, as_mpirun_has_them(hosts))


run = partial(run_on, cluster_of)
