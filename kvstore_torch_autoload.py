"""Registers the backend ``kvstore`` with ``torch.distributed`` when PyTorch is imported.

``import torch`` calls :func:`autoload` (entry point of the group ``torch.backends``), and an error
in it would break ``import torch`` in the whole environment. So this module imports nothing of
``kvstore``, raises nothing, and leaves everything to the first group that is made.

``KVSTORE_TORCH_REPLACES=gloo,mpi`` has scripts that name those backends use ``kvstore`` instead,
for jobs on CPUs. Under mpiexec and srun, a group of ``kvstore`` for which the script names no rank
takes theirs. ``monitored_barrier``, which PyTorch keeps for gloo, works for groups of ``kvstore``
too. ``import kvstore.torch`` registers as well.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

NAME = "kvstore"
REPLACES_NAME = "KVSTORE_TORCH_REPLACES"
RANKS_OF_MPI = ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""What mpiexec or srun calls the rank of a process that it starts."""
_MARK = "_kvstore_replaces"


def autoload() -> None:
    """Register the backend, if that is possible; ``import torch`` calls this."""
    try:
        register()
    except Exception:
        # Whoever uses the backend imports kvstore.torch, or is told that it is unknown.
        return


def register() -> None:
    """Make ``kvstore`` known to ``torch.distributed``; without effect where it is.

    Raises ``ImportError`` where this PyTorch has no ``torch.distributed``.
    """
    import torch.distributed as dist

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    _set(dist, "monitored_barrier", _monitored_barrier(dist))
    replaced = _replaced(os.environ.get(REPLACES_NAME, ""))
    if replaced or any(name in os.environ for name in RANKS_OF_MPI):
        _replace(dist, replaced)


def _create(options: Any, backend_options: Any = None) -> Any:
    from kvstore.frameworks.torch.process_group import create

    return create(options, backend_options)


def _replaced(names: str) -> frozenset[str]:
    return frozenset(name for name in names.lower().replace(" ", "").split(",") if name)


def _replace(dist: Any, replaced: Collection[str]) -> None:
    """Have groups of these backends made by ``kvstore``, and the first one look for its rank."""
    for name in ("init_process_group", "new_group", "new_subgroups"):
        _set(dist, name, _renaming(getattr(dist, name), replaced))
    defaults = dist.Backend.default_device_backend_map
    if defaults.get("cpu") in replaced:
        defaults["cpu"] = NAME


def _set(dist: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a function of ``torch.distributed`` once."""
    if not hasattr(getattr(dist, name), _MARK):
        setattr(function, _MARK, True)
        setattr(dist, name, function)
        setattr(dist.distributed_c10d, name, function)


def _monitored_barrier(dist: Any) -> Callable[..., Any]:
    original = dist.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> Any:
        found = dist.group.WORLD if group is None else group
        if not isinstance(found, dist.ProcessGroup) or dist.get_backend(found) != NAME:
            return original(group, timeout, wait_all_ranks)
        if isinstance(timeout, (int, float)):  # PyTorch takes seconds here
            timeout = timedelta(seconds=timeout)
        return found.monitored_barrier(timeout, wait_all_ranks)

    return monitored_barrier


def _renaming(original: Callable[..., Any], replaced: Collection[str]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make_group(*arguments: Any, **named: Any) -> Any:
        given = inspect.signature(original).bind(*arguments, **named).arguments
        backend = given.get("backend")
        if not isinstance(backend, str):
            return original(*arguments, **named)
        given["backend"] = renamed(backend, replaced)
        if original.__name__ == "init_process_group" and NAME in _names(given["backend"]):
            from kvstore.frameworks.torch.mpi import with_mpi

            given = with_mpi(given, "mpi" in _names(backend), os.environ)
        return original(**given)

    return make_group


def _names(backend: str) -> list[str]:
    return [part.rpartition(":")[2].strip().lower() for part in backend.split(",")]


def renamed(backend: str, replaced: Collection[str]) -> str:
    """Return a backend's text, such as ``gloo`` or ``cpu:gloo,cuda:nccl``, with our name in it."""
    parts = []
    for part in backend.split(","):
        device, colon, name = part.rpartition(":")
        parts.append(f"{device}{colon}{NAME}" if name.strip().lower() in replaced else part)
    return ",".join(parts)
