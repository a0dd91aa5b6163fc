"""What ``--dry-run`` prints, and what ``--check`` looks at on this machine.

The texts are pure; :func:`local_rows` looks at this machine and changes nothing. Used by
``local.py``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.launch.options import LaunchError
from kvstore.launch.plan import ProcessSpec, base_environment
from kvstore.launch.preflight import by_role, check_interface, check_key, check_settings
from pslite.version import __version__

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED_BYTES = 64 << 20  # what containers have by default, which no model fits in


@dataclass(frozen=True)
class Row:
    """One thing that was looked at, what was found, and whether a job can run with it."""

    name: str
    found: str
    is_good: bool


def rehearsal(specs: Sequence[ProcessSpec], directory: str) -> str:
    """What would be started: a command with its own variables for each process.

    Lines that a shell could read; the names in capitals are made when the job starts.
    """
    lines = [f"cd {shlex.quote(directory)}"]
    for spec in specs:
        variables = sorted(spec.environment.items())
        words = [f"{name}={shlex.quote(value)}" for name, value in variables]
        lines += [f"# {spec.name}", " ".join([*words, shlex.join(spec.argv)])]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[Row]) -> str:
    """The rows in columns, with what is wrong marked."""
    width = max(len(row.name) for row in rows)
    lines = [f"{'ok' if row.is_good else 'NO':<4}{row.name:<{width}}  {row.found}" for row in rows]
    return "\n".join(lines) + "\n"


def local_rows(
    specs: Sequence[ProcessSpec], environ: Mapping[str, str], *, has_key: bool
) -> list[Row]:
    """Look at this machine as the job's processes would find it; ``has_key``: the user's own.

    The scheduler's address and the servers' modules are tried before, and are errors there.
    """
    environments = by_role(specs, base_environment(environ))
    worker = next(spec for spec in specs if spec.role == "worker")
    path = worker.environment.get("PATH", environ.get("PATH", os.defpath))
    program = shutil.which(worker.argv[0], path=path)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [
        Row("python", f"{sys.version.split()[0]} ({sys.executable})", True),
        Row("kvstore", __version__, True),
        Row(
            "worker's program", program or f"there is no program '{worker.argv[0]}'", bool(program)
        ),
        Row("directory", os.getcwd(), True),
        _tried("settings", lambda: "; ".join(check_settings(environments.values())) or "readable"),
        _tried("job key", lambda: check_key(environments["scheduler"]))
        if has_key
        else Row("job key", "a new one", True),
        Row("scheduler's address", _address(worker), True),
        _tried("servers' address", lambda: check_interface(environments["server"])),
        _tried("workers' address", lambda: check_interface(environments["worker"])),
        _shared_memory(),
        Row("processors", f"{cores} for {len(specs)} processes", True),
        Row("GPUs", str(gpu_count()), True),
    ]


def _tried(name: str, look: Callable[[], str]) -> Row:
    """What ``look`` returns, or the sentence of its :class:`LaunchError`."""
    try:
        return Row(name, look(), True)
    except LaunchError as error:
        return Row(name, str(error), False)


def _address(worker: ProcessSpec) -> str:
    port = worker.environment["DMLC_PS_ROOT_PORT"]
    return f"{worker.environment['DMLC_PS_ROOT_URI']}, port {'of its own' if port == '0' else port}"


def _shared_memory() -> Row:
    if not _SHARED_MEMORY.is_dir():
        return Row("shared memory", f"there is no {_SHARED_MEMORY}; TCP is used instead", True)
    free = shutil.disk_usage(_SHARED_MEMORY).free
    text = f"{free / 2**20:.0f} MiB free"
    if free < _LEAST_SHARED_BYTES:
        return Row("shared memory", f"{text}: too little (PS_SHM=0 does without)", False)
    return Row("shared memory", text, True)


def gpu_count() -> int:
    """NVIDIA's device files, without loading any of its libraries."""
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])
