"""A Slurm cluster of two hosts (hosts.py), each with a slurmd; slurmctld runs on this machine.

Facts: Slurm 22.05's slurm.conf(5) and gres.conf(5). proctrack/linuxproc and task/none need no
cgroups. The GPUs of each host are twins of /dev/null: Slurm counts them and hands out their
numbers (CUDA_VISIBLE_DEVICES), and asks no driver.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.batch import BatchSystem
from services.daemon import Daemon, ServiceError, free_ports, needed
from services.hosts import Host, Network, network_of_hosts

CPUS = 8
GPUS = 2
MEMORY_MB = 4000
PARTITION = "kvstore"
READY_S = 60.0

_CONFIGURATION = """\
ClusterName=kvstore
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
SlurmctldPort={controller_port}
SlurmdPort={host_port}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=100000
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
GresTypes=gpu
NodeName=DEFAULT CPUs={cpus} RealMemory={memory} Gres=gpu:{gpus} State=UNKNOWN
{nodes}
PartitionName={partition} Nodes=ALL Default=YES OverSubscribe=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm(BatchSystem):
    """A cluster that takes jobs. ``environment`` is what srun, sbatch and squeue need."""

    own_processes = ("/usr/sbin/slurmd ", "slurmstepd:")

    partition: str
    nodes: tuple[str, ...]

    def jobs(self) -> list[str]:
        """The ids of jobs that wait or run."""
        return self.run("squeue", "--noheader", "--format=%i").split()


@contextmanager
def slurm(directory: Path) -> Iterator[Slurm]:
    """The cluster while the block runs; ``directory`` gets its state, sockets and logs."""
    needed("/usr/sbin/munged", "/usr/sbin/slurmctld", "/usr/sbin/slurmd", "/usr/bin/srun")
    with ExitStack() as stack:
        network = stack.enter_context(network_of_hosts(directory, ("kv-node1", "kv-node2")))
        configuration = _configure(directory, network)
        environment = {"SLURM_CONF": str(configuration)}
        stack.enter_context(_munge(directory))
        controller = stack.enter_context(_controller(configuration))
        for host in network.hosts:
            stack.enter_context(_node(host, configuration))
        nodes = tuple(host.name for host in network.hosts)
        cluster = Slurm(environment, network, PARTITION, nodes)
        controller.wait_until("idle hosts", lambda: _idle_nodes(cluster) == set(nodes), READY_S)
        try:
            yield cluster
        finally:
            cluster.run("scancel", "--user=root", "--signal=KILL")


def _configure(directory: Path, network: Network) -> Path:
    configuration = directory / "slurm.conf"
    controller_port, host_port = free_ports(2)
    configuration.write_text(
        _CONFIGURATION.format(
            directory=directory,
            controller=socket.gethostname(),
            address=network.address,
            controller_port=controller_port,
            host_port=host_port,
            cpus=CPUS,
            memory=MEMORY_MB,
            gpus=GPUS,
            partition=PARTITION,
            nodes="\n".join(
                f"NodeName={host.name} NodeAddr={host.addresses[0]}" for host in network.hosts
            ),
        )
    )
    for number in range(GPUS):
        os.mknod(directory / f"gpu{number}", stat.S_IFCHR | 0o666, os.stat("/dev/null").st_rdev)
    (directory / "gres.conf").write_text(f"Name=gpu File={directory}/gpu[0-{GPUS - 1}]\n")
    (directory / "state").mkdir()
    for host in network.hosts:
        (directory / f"spool-{host.name}").mkdir()
    return configuration


@contextmanager
def _munge(directory: Path) -> Iterator[None]:
    """munged vouches for who sends a message, with a key that only this cluster has."""
    key, socket_path = directory / "munge.key", directory / "munge.socket"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    files = [f"--key-file={key}", f"--socket={socket_path}", f"--pid-file={directory}/munge.pid"]
    files += [f"--seed-file={directory}/munge.seed", f"--log-file={directory}/munged.log"]
    munged = Daemon(
        "munged", ["/usr/sbin/munged", "--foreground", "--force", *files], directory / "munge.log"
    )
    try:
        munged.wait_until("socket", socket_path.exists)
        yield
    finally:
        munged.stop()


@contextmanager
def _controller(configuration: Path) -> Iterator[Daemon]:
    words = ["/usr/sbin/slurmctld", "-D", "-c", "-f", str(configuration)]
    controller = Daemon("slurmctld", words, configuration.parent / "slurmctld.log")
    try:
        yield controller
    finally:
        controller.stop()


@contextmanager
def _node(host: Host, configuration: Path) -> Iterator[None]:
    log = configuration.parent / f"slurmd-{host.name}.log"
    words = [*host.enter, "/usr/sbin/slurmd", "-D", "-f", str(configuration)]
    slurmd = Daemon(f"slurmd on {host.name}", words, log)
    try:
        yield
    finally:
        slurmd.stop()


def _idle_nodes(cluster: Slurm) -> set[str]:
    try:
        found = cluster.run("sinfo", "--noheader", "--Node", "--format=%N %T", timeout_s=10.0)
    except ServiceError:  # the controller does not listen yet
        return set()
    lines = [line.split() for line in found.splitlines()]
    return {name for name, state in lines if state == "idle"}
