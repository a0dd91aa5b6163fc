"""Checks of a process's limits: open files, memory, threads.

They run before a node starts, so that the error can say which limit to raise. If libzmq cannot
open a file, it aborts the process or retries for ever.

Open files were counted on Linux with pyzmq 27 (``/proc/PID/fd`` of real jobs): a node opens four
for each connection that it makes, one for each that it accepts, and up to seven more for the pipes
and memory that two nodes of one machine share.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pslite.errors import ConfigError
from pslite.ids import Role

#: Files for shared memory, and files that scripts and libraries open briefly.
_SPARE_FILES = 40
_FILES_PER_PEER = 8
_PROBED_BYTES = 16 << 20
_NO_MEMORY = (
    "this process cannot get more memory; raise its limit (ulimit -v, --memory= of a "
    "container), or use a machine with more memory"
)


class FilesNeeded(NamedTuple):
    """The number of open files that a node needs (``least``) and uses (``usual``)."""

    least: int
    usual: int


def files_needed(role: Role, num_workers: int, num_servers: int) -> FilesNeeded:
    """Return how many more files a node of this role needs to open."""
    own, connects, accepts = {
        Role.SCHEDULER: (10, 0, num_workers + num_servers),
        Role.SERVER: (17, 1, num_workers),
        Role.WORKER: (17, 1 + num_servers, 0),
    }[role]
    least = own + 4 * connects + accepts
    return FilesNeeded(least, own + _SPARE_FILES + _FILES_PER_PEER * (connects + accepts))


def allow_files(role: Role, num_workers: int, num_servers: int) -> None:
    """Raise the soft limit of open files for such a node, up to the hard limit.

    Call it only in processes of this project, and do not raise the limit further: child processes
    inherit it, and some programs close every file number below it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = (_num_open() or 0) + files_needed(role, num_workers, num_servers).usual
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_files(role: Role, num_workers: int, num_servers: int) -> str | None:
    """Check that such a node can open its files; return a warning if they may run out.

    Raises ``ConfigError`` if it cannot.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = _num_open()
    if soft == resource.RLIM_INFINITY or num_open is None:
        return None
    need = files_needed(role, num_workers, num_servers)
    if soft >= num_open + need.usual:
        return None
    text = (
        f"a {role.value} in a job of {num_workers + num_servers + 1} nodes opens up to "
        f"{need.usual} files, but this process may open only {max(soft - num_open, 0)} more: "
        f"{_how_to_raise(num_open + need.usual)}"
    )
    if soft >= num_open + need.least:
        return text
    raise ConfigError(text)


def _how_to_raise(wanted: int) -> str:
    """Return a text that names the limit and how to raise it to at least ``wanted``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    how = f"raise the limit with `ulimit -n {wanted}` before the start"
    if hard != resource.RLIM_INFINITY and hard < wanted:
        how += (
            f" (the hard limit is {hard}; ask an administrator to raise it in limits.conf, "
            "LimitNOFILE= of systemd, or --ulimit nofile= of a container)"
        )
    return f"RLIMIT_NOFILE is {soft}; {how}"


def cannot_open(what: str, code: int | None) -> ConfigError:
    """Return the error for a failure to open ``what``; ``code`` is its ``errno``."""
    reason = os.strerror(code or 0)
    if code not in (errno.EMFILE, errno.ENFILE):
        return ConfigError(f"cannot open {what} ({reason}): {_NO_MEMORY}")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ConfigError(
        f"cannot open {what} ({reason}): a node needs about {_FILES_PER_PEER} open files for each "
        "of its peers, and four for each further connection (PS_CONNECTIONS); "
        f"{_how_to_raise(2 * soft)}"
    )


def _num_open() -> int | None:
    """Return how many files this process has open; None if that is unknown."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # one of them reads the list
    except FileNotFoundError:  # not Linux
        return None
    except OSError:  # this process cannot open even this file
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


# -- memory and threads ---------------------------------------------------------------------


@contextmanager
def shortage_told() -> Iterator[None]:
    """Turn a shortage of files or memory into a ``ConfigError`` with advice."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise cannot_open("what a node needs", error.errno) from error
        raise
    except MemoryError as error:
        raise ConfigError(_NO_MEMORY) from error


def check_threads(num_threads: int) -> None:
    """Raise ``ConfigError`` if the process cannot start this many more threads.

    libzmq aborts the process if it cannot start its two threads.
    """
    release = threading.Event()
    started = []
    try:
        mmap.mmap(-1, _PROBED_BYTES).close()
        for _ in range(num_threads):
            thread = threading.Thread(target=release.wait, name="pslite-probe", daemon=True)
            thread.start()
            started.append(thread)
    except (OSError, MemoryError) as error:
        raise ConfigError(_NO_MEMORY) from error
    except RuntimeError as error:
        raise ConfigError(
            f"a node needs {num_threads} threads, but only {len(started)} could be started; "
            "raise the limit of processes and threads (ulimit -u, pids.max of a container, "
            "TasksMax= of systemd) or of address space (ulimit -v)"
        ) from error
    finally:
        release.set()
        for thread in started:
            thread.join()
