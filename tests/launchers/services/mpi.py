"""The MPI programs of this machine: Open MPI and MPICH side by side, each by its own name.

Neither has a service: mpirun starts its helpers itself, on other hosts with ssh (sshd.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from services.daemon import command, needed
from services.sshd import SshHosts

SLOTS = 16
RUN_S = 60.0
KINDS = ("openmpi", "mpich")


@dataclass(frozen=True)
class Mpi:
    """One kind of MPI. ``environment`` is what a launcher that finds mpirun by PATH needs."""

    kind: str  # one of KINDS
    mpirun: Path
    environment: dict[str, str]
    directory: Path

    def run(self, *words: str, env: dict[str, str] | None = None) -> str:
        """What ``mpirun WORDS`` printed, which must succeed."""
        environment = {**os.environ, **(self.environment if env is None else env)}
        return command("mpirun", *words, env=environment, timeout_s=RUN_S)

    def write_hostfile(self, path: Path, *hosts: str) -> Path:
        """A hosts file of mpirun's own kind, by default of this machine; returns ``path``."""
        slots = f" slots={SLOTS}" if self.kind == "openmpi" else f":{SLOTS}"
        path.write_text("".join(f"{host}{slots}\n" for host in hosts or ("localhost",)))
        return path

    def environment_for(self, hosts: SshHosts) -> dict[str, str]:
        """``environment``, and with it what lets mpirun log in to those hosts."""
        network = f"{hosts.launcher_address}/24"
        if self.kind == "openmpi":
            return {
                **self.environment,
                "OMPI_MCA_plm_rsh_agent": f"ssh {hosts.launcher_args}",
                "OMPI_MCA_oob_tcp_if_include": network,
                "OMPI_MCA_btl_tcp_if_include": network,
            }
        # It passes its own options of ssh and leaves no room for a configuration file.
        agent = _write_program(
            self.directory / "ssh", f'exec /usr/bin/ssh {hosts.launcher_args} "$@"'
        )
        return {
            **self.environment,
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": str(agent),
            "HYDRA_IFACE": hosts.interface,
        }


def mpi(kind: str, directory: Path) -> Mpi:
    """The MPI of this kind; ``directory`` gets a program named mpirun."""
    mpirun = Path(f"/usr/bin/mpirun.{kind}")
    needed(str(mpirun))
    programs = directory / "bin"
    programs.mkdir()
    environment = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    if kind == "mpich":
        # No link: it looks for its helper, hydra_pmi_proxy, in the directory that it is called in.
        _write_program(programs / "mpirun", f'exec {mpirun} "$@"')
    else:
        # No script: it calls itself what it is called by, and "Open MPI" only as mpirun.
        (programs / "mpirun").symlink_to(mpirun)
        # It asks root whether it means it, and puts no more processes on a machine than it has
        # processors unless it is told that it may.
        environment |= {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
        }
    return Mpi(kind, mpirun, environment, directory)


def _write_program(path: Path, line: str) -> Path:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path
