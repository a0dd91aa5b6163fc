"""Horovod's questions about how it was built, and its timeline.

This layer sends data through its own servers, so it neither has nor needs MPI, Gloo, NCCL, DDL, CCL
or ROCm. Scripts ask these questions before they choose an operation for GPUs.
"""

from __future__ import annotations

import os

from kvstore.frameworks.horovod import session
from kvstore.frameworks.horovod.timeline import Timeline


def mpi_threads_supported() -> bool:
    """Return True: any thread may make calls."""
    return True


def _no() -> bool:
    """Return False.

    MPI can still start the processes, and tensors on GPUs go through the host's memory.
    """
    return False


mpi_enabled = mpi_built = gloo_enabled = gloo_built = _no
nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = _no


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Write the calls of rank 0 to a file for chrome://tracing, from now on.

    The other ranks do nothing. ``mark_cycles`` has no effect: servers have no cycles.
    """
    found = session.current()
    if found.rank == 0:
        stop_timeline()
        found.timeline = Timeline(file_path)


def stop_timeline() -> None:
    """Complete the file of ``start_timeline``."""
    found = session.current()
    timeline, found.timeline = found.timeline, None
    if timeline is not None:
        timeline.close()
