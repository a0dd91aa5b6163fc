"""What the launcher and its agents have to know of the machine that they run on."""

from __future__ import annotations

import os
import socket
import sysconfig
from pathlib import Path


def available_cores() -> list[int]:
    """The numbers of the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def available_cpu_count() -> int:
    return len(available_cores())


def network_id() -> str:
    """Names what this process sees of networks: equal for processes that have the same addresses.

    Containers on one machine may have processes in common and addresses of their own, and the
    other way round.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return socket.gethostname()


def checkout_root() -> str | None:
    """The directory to put on PYTHONPATH, or None where ``kvstore`` is installed."""
    root = Path(__file__).resolve().parents[2]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    if root in installed or root.name in ("site-packages", "dist-packages"):
        return None
    return str(root)
