"""Rank, size and a common store for ranks that mpiexec or srun starts.

PyTorch's own backend ``mpi`` gets all three from MPI. Here, rank and size come from the variables
that mpiexec and srun set. The ranks of one host use a file in a directory that only this user can
open. The file's name contains the id and start time of the process that started all ranks, so no
other job uses it. Rank 0 writes the name of the ranks' store into the file. It removes the file
when all ranks have opened the store, before any of them continues, so no rank finds an old store.
Ranks on several hosts need MASTER_ADDR and MASTER_PORT.

Runs on the thread that creates the group, and waits. Read next: ``cluster.py``.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from kvstore.launch.job.registry import is_private
from kvstore.launch.ranks import MpiRank, rank_of
from kvstore_torch_autoload import RANKS_OF_MPI
from pslite.errors import ConfigError, DeadlineError
from pslite.node.address import machine_id
from pslite.node.log import try_to_stderr

_POLL_S = 0.01
_SAY_AFTER_S = 10.0
_ADVICE = (
    "Give all ranks MASTER_ADDR, the name of rank 0's host, and MASTER_PORT, a free port there: "
    "mpiexec -x MASTER_ADDR=HOST -x MASTER_PORT=29500 (Open MPI), mpiexec -genv MASTER_ADDR HOST "
    "-genv MASTER_PORT 29500 (MPICH), or export both before srun"
)


def with_mpi(given: Mapping[str, Any], is_mpi: bool, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments of ``init_process_group`` with MPI's rank, size and store.

    Args:
        given: the script's arguments, by name.
        is_mpi: whether the script requests ``mpi``, which ignores the script's rank and size.
        environ: the environment. Its RANK and WORLD_SIZE override the values of MPI.

    Raises:
        ConfigError: the rank is unknown, or ranks on several hosts cannot find each other.
        DeadlineError: a rank did not come; the text says which.
    """
    arguments = dict(given)
    has_place = arguments.get("store") is not None
    has_place = has_place or arguments.get("init_method") not in (None, "env://")
    has_rank = arguments.get("rank", -1) != -1 or arguments.get("world_size", -1) != -1
    if has_place or (has_rank and not is_mpi):
        return arguments
    told = {name: arguments.pop(name, -1) for name in ("rank", "world_size")}
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return arguments
    mpi = rank_of(environ)
    if mpi is None:
        if is_mpi and not 0 <= told["rank"] < told["world_size"]:
            raise ConfigError(
                "a process group of mpi takes rank and size from what has started the script, but "
                f"neither RANK nor {' nor '.join(RANKS_OF_MPI)} is set. Start it by mpiexec -n N "
                "python SCRIPT, or by srun, kvstore-launch or torchrun"
            )
        return dict(given)
    arguments.update(rank=mpi.rank, world_size=mpi.size)
    starter = _starter(mpi.name) if mpi.is_one_host else None
    if starter is not None:
        limit = arguments.get("timeout") or default_pg_timeout
        arguments.pop("init_method", None)
        arguments["store"] = _meet(mpi, starter, limit)
    elif not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
        where = "are on several hosts" if not mpi.is_one_host else "do not see who started them"
        raise ConfigError(
            f"the {mpi.size} ranks of this MPI job {where}, so they cannot find each other. "
            f"{_ADVICE}"
        )
    return arguments


# -- ranks of one host ----------------------------------------------------------------------


def _meet(mpi: MpiRank, starter: str, limit: timedelta) -> dist.Store:
    """Return a store that all ranks have opened and no other user can open."""
    directory = _private_directory()
    _remove_what_the_dead_left(directory)
    note = directory / f"job-{starter}"
    until_s = time.monotonic() + limit.total_seconds()
    if mpi.rank > 0:
        store = _open(_wait_for(until_s, lambda: _noted(note), lambda: [0]), mpi.size, limit)
        store.set(f"here/{mpi.rank}", "")
        _wait_for(until_s, lambda: store.check(["all"]), lambda: _missing(store, mpi.size))
        return store
    path = directory / f"store-{_process(os.getpid())}-{secrets.token_hex(8)}"
    store = _open(path, mpi.size, limit)
    # This runs after the handler that waits for the other ranks, which is registered later.
    atexit.register(path.unlink, missing_ok=True)
    store.set("here/0", "")
    draft = directory / f"draft-{path.name.partition('-')[2]}"
    draft.write_text(path.name)
    draft.replace(note)
    try:
        _wait_for(until_s, lambda: not _missing(store, mpi.size), lambda: _missing(store, mpi.size))
    finally:
        note.unlink(missing_ok=True)
    store.set("all", "")
    return store


def _open(path: Path, size: int, limit: timedelta) -> dist.Store:
    store = dist.FileStore(str(path), size)
    store.set_timeout(limit)
    return store


def _missing(store: dist.Store, size: int) -> list[int]:
    return [rank for rank in range(size) if not store.check([f"here/{rank}"])]


def _noted(note: Path) -> Path | None:
    """Return the store in rank 0's note; None if it is missing or its process ended."""
    try:
        name = note.read_text()
    except FileNotFoundError:
        return None
    return note.parent / name if _is_of_a_living(name) else None


def _wait_for(until_s: float, value: Callable[[], Any], missing: Callable[[], list[int]]) -> Any:
    """Wait until ``value()`` is true; print once which ranks are ``missing``."""
    say_at = time.monotonic() + _SAY_AFTER_S
    while not (found := value()):
        now = time.monotonic()
        if now >= min(until_s, say_at):
            ranks = ", ".join(map(str, missing()))
            text = f"of the ranks that mpiexec or srun has started, not yet here: {ranks}"
            if now >= until_s:
                raise DeadlineError(
                    f"{text}. Each rank must call init_process_group within its timeout; look at "
                    "what the missing ones have written"
                )
            try_to_stderr(text)
            say_at = until_s
        time.sleep(_POLL_S)
    return found


def _private_directory() -> Path:
    """Return this user's directory for notes on this machine; create it if missing."""
    machine = hashlib.sha256(machine_id().encode()).hexdigest()[:12]
    path = Path(tempfile.gettempdir()) / f"kvmpi-{os.geteuid()}-{machine}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make {path}, where ranks that mpiexec starts meet: {error.strerror}; set "
            "TMPDIR to a writable directory of this machine"
        ) from error
    if not is_private(path):
        raise ConfigError(
            f"expected {path} to be a directory that this user alone can open, and others can open "
            "it, or own it; remove it, or set TMPDIR to another directory of this machine"
        )
    return path


def _remove_what_the_dead_left(directory: Path) -> None:
    for path in directory.iterdir():
        if not _is_of_a_living(path.name):
            path.unlink(missing_ok=True)


# -- processes ------------------------------------------------------------------------------


def _starter(rank_name: str) -> str | None:
    """Return the name of the process that has started all ranks.

    It is the nearest parent that is not a process of a rank. None if the kernel does not show it,
    for example with a container for each rank.
    """
    pid, mark = os.getppid(), f"\0{rank_name}=".encode()
    try:
        while mark in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(_status(pid)[1])
    except PermissionError:
        pass  # a process of another user, such as Slurm's daemon
    except OSError:
        return None
    return _process(pid)


def _process(pid: int) -> str | None:
    """Return a process's unique name since the machine's start; None if it has ended."""
    try:
        status = _status(pid)
    except OSError:
        return None
    return None if status[0] in "ZX" else f"{pid}-{status[19]}"


def _status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat, beginning with the state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _is_of_a_living(name: str) -> bool:
    """Return whether the process in a name, such as ``store-PID-BEGIN-x``, still runs."""
    _, pid, began, *_ = [*name.split("-"), "", ""]
    return pid.isdigit() and _process(int(pid)) == f"{pid}-{began}"
