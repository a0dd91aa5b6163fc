"""The processes of a job, each with its command and environment.

This module is pure: it turns options and facts into a list of :class:`ProcessSpec`, and neither
starts nor reads anything. The variables are those of ps-lite (``DMLC_*``) plus ``PS_JOB_ID``,
``PS_JOB_KEY_FILE``, ``PS_SECURITY``, ``PS_LISTEN_FD`` and ``PS_JOINED_FD``. With ``--restarts``
there is ``PS_REJOIN_TIMEOUT``, too. ``DMLC_NUM_ATTEMPT`` is as in dmlc-core
(tracker/dmlc_tracker/local.py), and the scheduler has ``PS_SCHEDULER_JOURNAL``. In a job that was
started again, all get ``PS_JOB_RESTARTS``, and the scheduler ``PS_RESTART_CAUSE``. With
``--standbys`` all get ``PS_STANDBYS``, and a standby has the variables of its server and
``PS_STANDS_BY``. Read ``launch/job/supervisor.py`` next, which starts these processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.launch.job.guardian import AGENT_ID_NAME
from kvstore.launch.options import LaunchError, LaunchOptions

THREAD_COUNT_NAMES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)

# With this variable, a crash in compiled code prints the Python stack (faulthandler).
_FAULTS = "PYTHONFAULTHANDLER"
_PYTHON = re.compile(r"(python|pypy)[0-9.]*\Z")
JOURNAL_NAME = "PS_SCHEDULER_JOURNAL"
# Variables of another job, which no process of this job may see.
_FOREIGN_NAMES = (
    *("PS_LISTEN_FD", "PS_JOINED_FD", "PS_JOB_KEY_FD", "DMLC_RANK", "DMLC_NUM_ATTEMPT"),
    *("PS_STANDBYS", "PS_STANDS_BY", JOURNAL_NAME, "PS_JOB_RESTARTS", "PS_RESTART_CAUSE"),
    AGENT_ID_NAME,
)
SERVER_IMPORT_NAME = "KVSTORE_SERVER_IMPORT"
REJOIN_NAME = "PS_REJOIN_TIMEOUT"
REJOIN_S = "60"


@dataclass(frozen=True)
class ProcessSpec:
    """One process. Its ``environment`` is added to :func:`base_environment`.

    ``role`` is scheduler, server, worker or standby; the ``rank`` of a standby is its server's.
    """

    role: str
    rank: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    inherited_fds: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The name in prefixes and reports; the only scheduler needs no rank."""
        return self.role if self.role == "scheduler" else f"{self.role} {self.rank}"


@dataclass(frozen=True)
class JobFacts:
    """The facts about this machine and this run that the plan needs.

    ``checkout_root`` is the directory that makes ``kvstore`` importable, or None if the package is
    installed: a ``site-packages`` on PYTHONPATH would give the wrong libraries to a worker that
    runs under another interpreter. ``key_file`` is the file with the job's key, or None if the user
    has provided a key. The scheduler inherits the socket ``listen_fd``, and writes a line to
    ``joined_fd`` when all nodes have joined. From the file ``journal``, another process could go on
    as the scheduler; it is None if none would be started. ``worker_hosts`` are the names of the
    workers' machines by rank; if it is empty, all workers run on this machine. On the machine of
    worker 0, ``store_port`` is free for the store of a framework, such as PyTorch's. The job was
    started ``attempt`` times before; ``restart_cause`` says why the last of them failed.
    """

    job_id: str
    checkout_root: str | None
    host: str = "127.0.0.1"
    port: int = 0
    cpu_count: int = 1
    listen_fd: int = -1
    key_file: str | None = None
    joined_fd: int = -1
    journal: str | None = None
    worker_hosts: tuple[str, ...] = ()
    store_port: int = 0
    attempt: int = 0
    restart_cause: str = ""


def plan_job(
    options: LaunchOptions,
    facts: JobFacts,
    environ: Mapping[str, str],
    service_command: Sequence[str],
) -> list[ProcessSpec]:
    """Plan a job: the scheduler, then the servers, their standbys, and the workers.

    ``environ`` is the launcher's own environment. ``service_command`` starts a scheduler or a
    server, depending on DMLC_ROLE.
    """
    job = _job_variables(options, facts)
    everyone = {
        "PYTHONUNBUFFERED": "1",
        **({REJOIN_NAME: REJOIN_S} if options.restarts and REJOIN_NAME not in environ else {}),
        **(security(environ) if options.launcher == "local" else {}),
        **dict(options.environment),
    }
    service = {**everyone, **dict.fromkeys(THREAD_COUNT_NAMES, "1")}
    if options.server_imports:
        service[SERVER_IMPORT_NAME] = ",".join(options.server_imports)
    server = {**service, **dict(options.server_environment)}
    worker = {
        **everyone,
        **({} if _FAULTS in environ else {_FAULTS: "1"}),
        **worker_threads(options, environ, facts.cpu_count),
        **dict(options.worker_environment),
    }
    fds = {"PS_LISTEN_FD": facts.listen_fd, "PS_JOINED_FD": facts.joined_fd}
    fds = {name: fd for name, fd in fds.items() if fd >= 0}
    scheduler = {**service, **{name: str(fd) for name, fd in fds.items()}}
    if facts.journal is not None:
        scheduler[JOURNAL_NAME] = facts.journal
    if facts.restart_cause:
        scheduler["PS_RESTART_CAUSE"] = facts.restart_cause
    roles: dict[str, tuple[int, Sequence[str], dict[str, str]]] = {
        "scheduler": (1, service_command, scheduler),
        "server": (options.num_servers, service_command, server),
        "standby": (
            options.num_servers * options.standbys,
            service_command,
            {**server, "PS_STANDS_BY": "1"},
        ),
        "worker": (options.num_workers, options.command, worker),
    }
    for role, (_, _, environment) in roles.items():
        if facts.checkout_root is not None:
            given = environment.get("PYTHONPATH", environ.get("PYTHONPATH", ""))
            path = [facts.checkout_root, given][:: -1 if role == "worker" else 1]
            environment["PYTHONPATH"] = os.pathsep.join(part for part in path if part)
    ranks = _torch_variables(options, facts, {**environ, **worker})
    return [
        ProcessSpec(
            role,
            rank,
            tuple(argv),
            {
                **environment,
                **job,
                "DMLC_ROLE": "server" if role == "standby" else role,
                "DMLC_TASK_ID": str(rank),
                **(ranks[rank] if role == "worker" else {}),
            },
            tuple(fds.values()) if role == "scheduler" else (),
        )
        for role, (count, argv, environment) in roles.items()
        for rank in range(count)
    ]


def _torch_variables(
    options: LaunchOptions, facts: JobFacts, given: Mapping[str, str]
) -> list[dict[str, str]]:
    """Return the variables that torchrun would set, for each worker.

    An address that the user has set is kept; an address of an enclosing job is not.
    TORCHELASTIC_RUN_ID tells Lightning that it must not start ranks itself.
    """
    hosts = facts.worker_hosts or (facts.host,) * options.num_workers
    groups = [*dict.fromkeys(hosts)]
    store = {}
    if not (given.get("MASTER_ADDR") and given.get("MASTER_PORT")) or is_within_a_job(given):
        store = {"MASTER_ADDR": hosts[0], "MASTER_PORT": str(facts.store_port)}
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(options.num_workers),
            "LOCAL_RANK": str(hosts[:rank].count(host)),
            "LOCAL_WORLD_SIZE": str(hosts.count(host)),
            "GROUP_RANK": str(groups.index(host)),
            "TORCHELASTIC_RUN_ID": facts.job_id,
            **store,
        }
        for rank, host in enumerate(hosts)
    ]


def script_of(command: Sequence[str]) -> str:
    """Return the file that a command such as ``python -u train.py`` runs, or ""."""
    if not _PYTHON.match(os.path.basename(command[0])):
        return ""
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-"):
            return word
        if word in ("-", "-c", "-m") or word.startswith(("-c", "-m")):
            return ""
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            next(words, None)
    return ""


def _job_variables(options: LaunchOptions, facts: JobFacts) -> dict[str, str]:
    """Return the variables of every process of the job, which override the user's."""
    job = {
        "DMLC_PS_ROOT_URI": facts.host,
        "DMLC_PS_ROOT_PORT": str(facts.port),
        "DMLC_NUM_WORKER": str(options.num_workers),
        "DMLC_NUM_SERVER": str(options.num_servers),
        "DMLC_JOB_CLUSTER": options.launcher,
        "DMLC_NUM_ATTEMPT": str(facts.attempt),
        "PS_JOB_ID": facts.job_id,
    }
    if facts.attempt:
        job["PS_JOB_RESTARTS"] = str(facts.attempt)
    if options.standbys:
        job["PS_STANDBYS"] = str(options.standbys)
    if facts.key_file is not None:
        job["PS_JOB_KEY_FILE"] = facts.key_file
    return job


def base_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the launcher's environment without the variables of an enclosing job."""
    return {name: value for name, value in environ.items() if name not in _FOREIGN_NAMES}


def scheduler_address(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the scheduler's address from the environment, or loopback and port 0.

    Inside a worker of another job, the exported address is that job's, and is ignored. Raises
    :class:`LaunchError` if the exported port is not a port number.
    """
    if is_within_a_job(environ):
        return "127.0.0.1", 0
    port = environ.get("DMLC_PS_ROOT_PORT") or "0"
    if not port.strip().isdecimal() or int(port) > 65535:
        raise LaunchError(f"DMLC_PS_ROOT_PORT must be a port number, got {port!r}")
    return environ.get("DMLC_PS_ROOT_URI") or "127.0.0.1", int(port)


def brings_a_key(options: LaunchOptions, environ: Mapping[str, str]) -> bool:
    """Return whether the user has provided a key for this job.

    The key of an enclosing job is ignored.
    """
    if any(name == "PS_JOB_KEY_FILE" for name, _ in options.environment):
        return True
    return bool(environ.get("PS_JOB_KEY_FILE")) and not is_within_a_job(environ)


def security(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable for plain messages on one host, unless the user has set it."""
    chosen = bool(environ.get("PS_SECURITY")) and not is_within_a_job(environ)
    return {} if chosen else {"PS_SECURITY": "plain"}


def is_within_a_job(environ: Mapping[str, str]) -> bool:
    """Return whether ``environ`` is the environment of another job's worker."""
    return "PS_JOB_ID" in environ and "DMLC_TASK_ID" in environ


def worker_threads(
    options: LaunchOptions, environ: Mapping[str, str], cpu_count: int
) -> dict[str, str]:
    """Return the variables that give each worker's threads its share of the cores.

    Workers that each start one BLAS thread per core are very slow.

    Return nothing if the user has set any of these variables, or if the number of cores is unknown
    (0).
    """
    given = {name for name, _ in options.environment + options.worker_environment}
    if not cpu_count or any(name in environ or name in given for name in THREAD_COUNT_NAMES):
        return {}
    threads = max(1, cpu_count // options.num_workers)
    return dict.fromkeys(THREAD_COUNT_NAMES, str(threads))
