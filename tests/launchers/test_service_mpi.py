"""Both kinds of MPI do what they are there for, before the mpi launcher uses them."""

from __future__ import annotations

import socket
from pathlib import Path

from services.mpi import Mpi
from services.sshd import SshHosts


def test_mpirun_runs_as_many_processes_as_it_is_told(mpi: Mpi) -> None:
    said = mpi.run("-n", "3", "hostname")

    assert said.splitlines() == [socket.gethostname()] * 3


def test_mpirun_reads_the_hosts_file(mpi: Mpi, tmp_path: Path) -> None:
    option = "--hostfile" if mpi.kind == "openmpi" else "-f"

    said = mpi.run(option, str(mpi.write_hostfile(tmp_path / "hosts")), "-n", "4", "hostname")

    assert said.splitlines() == [socket.gethostname()] * 4


def test_mpirun_says_which_kind_it_is(mpi: Mpi) -> None:
    version = mpi.run("--version")

    assert ("Open MPI" in version, "HYDRA" in version) == (
        mpi.kind == "openmpi",
        mpi.kind == "mpich",
    )


def test_mpirun_starts_processes_on_other_hosts(mpi: Mpi, ssh_hosts: SshHosts) -> None:
    option = "--host" if mpi.kind == "openmpi" else "-hosts"
    hosts = ",".join(f"{address}:1" for address in ssh_hosts.addresses)

    said = mpi.run(option, hosts, "-n", "2", "hostname", env=mpi.environment_for(ssh_hosts))

    assert sorted(said.splitlines()) == list(ssh_hosts.names)
