"""A Grid Engine cell of two hosts (hosts.py), each with an execd; the master runs on this machine.

Facts: the manual pages sge_conf(5), bootstrap(5), queue_conf(5) and host_aliases(5) of gridengine
8.1, and Debian's own scripts/init_cluster. Everything lies in a directory of its own (SGE_ROOT);
what Debian's packages have put into /etc and /var is left alone. The master alone must know the
hosts by name, so it sees an /etc/hosts of its own.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.batch import BatchSystem
from services.daemon import Daemon, ServiceError, free_ports, needed
from services.hosts import Host, network_of_hosts

SLOTS = 16  # of each host
QUEUE = "kvstore.q"
READY_S = 60.0
_PROGRAMS = Path("/usr/lib/gridengine")
_SHARED = Path("/usr/share/gridengine")
_INSTALLED = Path("/var/lib/gridengine")

_BOOTSTRAP = """\
admin_user none
default_domain none
ignore_fqdn false
spooling_method berkeleydb
spooling_lib libspoolb
spooling_params {directory}/spooldb
binary_path /usr/sbin
qmaster_spool_dir {directory}/qmaster
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""

# Over Debian's own defaults: root may submit, and a job that is deleted ends soon.
_CHANGES = {
    "execd_spool_dir": "{directory}/execd",
    "mailer": "/bin/true",
    "min_uid": "0",
    "min_gid": "0",
    "load_report_time": "00:00:05",
    "reporting_params": (
        "accounting=true reporting=false flush_time=00:00:01 joblog=false sharelog=00:00:00"
    ),
}
_SCHEDULER = {
    "schedule_interval": "0:0:1",
    "flush_submit_sec": "1",
    "flush_finish_sec": "1",
}

_QUEUE = """\
qname {queue}
hostlist {hosts}
seq_no 0
load_thresholds NONE
suspend_thresholds NONE
nsuspend 1
suspend_interval 00:05:00
priority 0
min_cpu_interval 00:05:00
processors UNDEFINED
qtype BATCH INTERACTIVE
ckpt_list NONE
pe_list NONE
rerun FALSE
slots {slots}
tmpdir /tmp
shell /bin/sh
prolog NONE
epilog NONE
shell_start_mode posix_compliant
starter_method NONE
suspend_method NONE
resume_method NONE
terminate_method NONE
notify 00:00:05
owner_list NONE
user_lists NONE
xuser_lists NONE
subordinate_list NONE
complex_values NONE
projects NONE
xprojects NONE
calendar NONE
initial_state default
"""
_WITHOUT_LIMIT = ("rt", "cpu", "fsize", "data", "stack", "core", "rss", "vmem")


@dataclass(frozen=True)
class GridEngine(BatchSystem):
    """A cell that takes jobs. ``environment`` is what qsub, qstat and qdel need."""

    own_processes = (f"{_PROGRAMS}/sge_execd", "sge_shepherd")

    queue: str
    hosts: tuple[str, ...]

    def jobs(self) -> list[str]:
        """The ids of jobs that wait or run."""
        return sorted({line.split()[0] for line in self.run("qstat").splitlines()[2:]})


@contextmanager
def gridengine(directory: Path) -> Iterator[GridEngine]:
    """The cell while the block runs; ``directory`` gets its state and logs."""
    needed("/usr/sbin/sge_qmaster", "/usr/sbin/sge_execd", "/usr/bin/qconf")
    with ExitStack() as stack:
        network = stack.enter_context(network_of_hosts(directory, ("kv-sge1", "kv-sge2")))
        hosts = tuple(host.name for host in network.hosts)
        ports = free_ports(2)
        environment = {
            "SGE_ROOT": str(directory / "root"),
            "SGE_CELL": "default",
            "SGE_QMASTER_PORT": str(ports[0]),
            "SGE_EXECD_PORT": str(ports[1]),
        }
        cell = GridEngine(environment, network, QUEUE, hosts)
        _make_cell(directory, cell)
        master = stack.enter_context(_master(directory, cell))
        _make_queue(directory, cell, master)
        daemons = [stack.enter_context(_execd(host, directory, cell)) for host in network.hosts]
        daemons[0].wait_until("hosts that report", lambda: _reporting(cell) == set(hosts), READY_S)
        yield cell


def _make_cell(directory: Path, cell: GridEngine) -> None:
    """What the master reads before it starts, and its empty data base."""
    root, name = directory / "root", socket.gethostname()
    common = root / "default" / "common"
    for folder in (common, directory / "qmaster/job_scripts", directory / "spooldb"):
        folder.mkdir(parents=True)
    (directory / "execd").mkdir()
    for folder in ("util", "bin", "lib", "utilbin"):
        (root / folder).symlink_to(_INSTALLED / folder)
    (common / "bootstrap").write_text(_BOOTSTRAP.format(directory=directory))
    (common / "act_qmaster").write_text(f"{name}\n")
    # Commands here reach the master from 127.0.0.1, whose name is that of no host.
    (common / "host_aliases").write_text(f"{name} localhost\n")
    changes = {name: value.format(directory=directory) for name, value in _CHANGES.items()}
    configuration = _changed((_SHARED / "default-configuration").read_text(), changes)
    (directory / "configuration").write_text(configuration)
    spooling = ("berkeleydb", "libspoolb", f"{directory}/spooldb", "init")
    cell.run(str(_PROGRAMS / "spoolinit"), *spooling)
    defaults = str(_PROGRAMS / "spooldefaults")
    cell.run(defaults, "configuration", f"{directory}/configuration")
    cell.run(defaults, "complexes", f"{_SHARED}/util/resources/centry")
    cell.run(defaults, "usersets", f"{_SHARED}/util/resources/usersets")
    cell.run(defaults, "managers", "root")


@contextmanager
def _master(directory: Path, cell: GridEngine) -> Iterator[Daemon]:
    script = 'mount --bind "$1" /etc/hosts && exec /usr/sbin/sge_qmaster'
    words = ["unshare", "--mount", "--propagation", "private"]
    words += ["sh", "-c", script, "sh", f"{directory}/hosts"]
    environment = {**os.environ, **cell.environment, "SGE_ND": "1"}
    master = Daemon("sge_qmaster", words, directory / "sge_qmaster.log", environment)
    try:
        master.wait_until("answer", lambda: _succeeds(cell, "qconf", "-sh"), READY_S)
        yield master
    finally:
        master.stop(grace_s=0.1)  # to end in order takes it seconds, and nobody needs its state


def _make_queue(directory: Path, cell: GridEngine, master: Daemon) -> None:
    # qconf looks up the hosts' names too, so it runs where the master does.
    qconf = ["nsenter", "--target", str(master.pid), "--mount", "--", "qconf"]
    cell.run(*qconf, "-as", socket.gethostname())
    for host in cell.hosts:
        cell.run(*qconf, "-ah", host)
    definition = _QUEUE.format(queue=QUEUE, hosts=" ".join(cell.hosts), slots=SLOTS)
    for limit in _WITHOUT_LIMIT:
        definition += f"s_{limit} INFINITY\nh_{limit} INFINITY\n"
    (directory / "queue").write_text(definition)
    cell.run(*qconf, "-Aq", f"{directory}/queue")
    # Look at the queue when a job comes or ends instead of every 15 s.
    scheduler = _changed(cell.run(*qconf, "-ssconf"), _SCHEDULER)
    (directory / "scheduler").write_text(scheduler)
    cell.run(*qconf, "-Msconf", f"{directory}/scheduler")


def _changed(text: str, changes: dict[str, str]) -> str:
    """A configuration of gridengine's with other values for these entries, which it has."""
    for entry, value in changes.items():
        text, count = re.subn(rf"(?m)^{entry}\s.*$", f"{entry} {value}", text)
        if count != 1:
            raise ServiceError(f"gridengine's configuration has no entry {entry}")
    return text


@contextmanager
def _execd(host: Host, directory: Path, cell: GridEngine) -> Iterator[Daemon]:
    environment = {**os.environ, **cell.environment, "SGE_ND": "1"}
    log = directory / f"sge_execd-{host.name}.log"
    words = [*host.enter, "/usr/sbin/sge_execd"]
    execd = Daemon(f"sge_execd on {host.name}", words, log, environment)
    try:
        yield execd
    finally:
        execd.stop()


def _reporting(cell: GridEngine) -> set[str]:
    """The hosts whose load the master knows, and which can take jobs."""
    lines = [line.split() for line in cell.run("qhost").splitlines()[3:]]
    return {words[0] for words in lines if words[6] != "-"}


def _succeeds(cell: GridEngine, *words: str) -> bool:
    try:
        cell.run(*words, timeout_s=10.0)
    except ServiceError:
        return False
    return True
