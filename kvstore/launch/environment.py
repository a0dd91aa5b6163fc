"""Inspect this machine's cores, network and GPUs; open the scheduler's socket.

Some clusters show all of a host's GPUs to each process. For those, agents call ``visible_gpus`` on
their hosts (``launch/agents/agent.py``).

The launcher binds the scheduler's socket before it starts any process, and the scheduler inherits
the descriptor. So no other program can take the port in between, and processes that start before
the scheduler queue up instead of being refused. The launcher keeps the socket open for the whole
job, so that no other process can listen there after the scheduler has died.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore.launch.options import LaunchError

_OTHER_FILES = 256


def available_cores() -> list[int]:
    """Return the numbers of the processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def available_cpu_count() -> int:
    return len(available_cores())


def network_id() -> str:
    """Return an identifier of this process's network namespace and machine.

    Processes with the same identifier have the same addresses. Containers on one machine may share
    processes but not addresses, or addresses but not processes.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return socket.gethostname()


def allow_files(count: int) -> None:
    """Raise this process's limit of open files to above ``count`` if possible.

    Raise it no further than needed: child processes inherit the limit, and some programs close
    every possible descriptor.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OTHER_FILES + count
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def checkout_root() -> str | None:
    """Return the directory to add to PYTHONPATH, or None if ``kvstore`` is installed."""
    root = Path(__file__).resolve().parents[2]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    if root in installed or root.name in ("site-packages", "dist-packages"):
        return None
    return str(root)


def gpu_count() -> int:
    """Return the number of NVIDIA's device files, without loading NVIDIA's libraries."""
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])


VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that a process may use, as CUDA_VISIBLE_DEVICES names them."""
    if VISIBLE not in environ:
        return [str(number) for number in range(gpu_count())]
    names = [name.strip() for name in environ[VISIBLE].split(",")]
    return [name for name in names if name and name not in ("-1", "NoDevFiles")]


def share_gpus(
    members: Sequence[tuple[str, int]], greetings: Sequence[Mapping[str, Any]], each: int
) -> dict[tuple[str, int], dict[str, str]]:
    """Return variables that give ``each`` GPUs to every worker and none to a server.

    ``greetings`` are the greetings of the members' agents. Raises :class:`LaunchError` if a host
    has too few GPUs.
    """
    found: dict[tuple[str, int], dict[str, str]] = {}
    given: dict[str, int] = {}
    for member, greeting in zip(members, greetings, strict=True):
        if member[0] != "worker":
            found[member] = {VISIBLE: ""}
            continue
        host = str(greeting.get("host"))
        names = [str(name) for name in greeting.get("gpu_names", ())]
        first = given.get(host, 0)
        given[host] = first + each
        if given[host] > len(names):
            raise LaunchError(
                f"each worker on {host} needs {each} GPUs (--worker-gpus), but the job has "
                f"{len(names)} there; request more GPUs or more hosts",
                exit_code=1,
            )
        found[member] = {VISIBLE: ",".join(names[first : given[host]])}
    return found


_LISTEN_STATE = "0A"  # /proc/net/tcp: TCP_LISTEN
_BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on ``host`` and ``port``; 0 means any free port.

    The caller owns the socket. Raises :class:`LaunchError` (exit code 1) if the address cannot be
    used; the error names the process that uses the port, if that can be found.
    """
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            f"cannot resolve the scheduler's address '{host}' ({error.strerror}); "
            "correct or unset DMLC_PS_ROOT_URI",
            exit_code=1,
        ) from error
    # A name such as localhost may have an IPv4 and an IPv6 address; clients try IPv4 first, too.
    family, kind, protocol, _, address = min(candidates, key=lambda one: one[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        # Allows a port to be used again right after a job, but not while another socket listens on
        # it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise LaunchError(_refusal(host, port, error), exit_code=1) from error
    return listener


def _refusal(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        holders = ", ".join(str(pid) for pid in listening_processes(port))
        by_whom = f" by process {holders}" if holders else ""
        return (
            f"port {port} on {host} is in use{by_whom}; unset DMLC_PS_ROOT_PORT to let the "
            "launcher choose a free one"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{host} is not an address of this machine; unset DMLC_PS_ROOT_URI or set it to one "
            "of this machine's addresses"
        )
    return f"cannot listen on {host} port {port}: {error.strerror}"


def listening_processes(port: int) -> list[int]:
    """Return the process ids, as far as visible, that listen on this TCP port."""
    names = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not names:
        return []
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and names & _open_names(pid)]


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        for row in rows:
            if row[3] == _LISTEN_STATE and int(row[1].rpartition(":")[2], 16) == port:
                yield row[9]


def _open_names(pid: str) -> set[str]:
    names = set()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            names.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    except OSError:  # the process has ended, or belongs to another user
        pass
    return names
