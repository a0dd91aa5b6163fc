"""The rank of a process, from the variables of torchrun, mpiexec or srun.

The layers on frameworks use it when the script does not give a rank. Pure, except that it reads the
environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvstore_torch_autoload import RANKS_OF_MPI
from pslite.errors import ConfigError


@dataclass(frozen=True)
class MpiRank:
    """The rank and size that mpiexec or srun gives to one of its processes."""

    rank: int
    size: int
    is_one_host: bool
    #: The variable that contains the rank.
    name: str


def rank_of(environ: Mapping[str, str]) -> MpiRank | None:
    """Return the rank that mpiexec or srun has set, or None if neither has.

    Raises ``ConfigError`` for numbers that contradict each other.
    """
    # For each variable of a rank: the variables of the size, the ranks on this host, the hosts.
    others = {
        "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", ""),
        "MV2_COMM_WORLD_RANK": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", ""),
        "PMI_RANK": ("PMI_SIZE", "MPI_LOCALNRANKS", ""),
        # SLURM_PROCID and SLURM_NTASKS are also set in a batch script, though that is one process.
        "SLURM_PROCID": ("SLURM_STEP_NUM_TASKS", "", "SLURM_STEP_NUM_NODES"),
    }
    for name in RANKS_OF_MPI:
        size_name, local_name, nodes_name = others[name]
        if not (name in environ and size_name in environ):
            continue
        try:
            rank, size = int(environ[name]), int(environ[size_name])
            local_size = int(environ.get(local_name) or -1)
            num_nodes = int(environ.get(nodes_name) or -1)
        except ValueError:
            rank, size, local_size, num_nodes = -1, 0, 0, 0
        if not 0 <= rank < size:
            raise ConfigError(
                f"expected {name} and {size_name} as mpiexec sets them, a rank and a size above "
                f"it, got {environ[name]!r} and {environ[size_name]!r}"
            )
        return MpiRank(rank, size, size in (1, local_size) or num_nodes == 1, name)
    return None


class RankOfProcess(NamedTuple):
    """The rank of one of ``size`` processes that were started together."""

    rank: int
    size: int
    environ: Mapping[str, str]


def rank_of_process(environ: Mapping[str, str] = os.environ) -> RankOfProcess:
    """Return this process's rank from the environment, or rank 0 of 1 if unset.

    Raises ``ConfigError`` for numbers that contradict each other.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        texts = environ["RANK"], environ["WORLD_SIZE"]
        if not all(text.isdecimal() for text in texts) or not int(texts[0]) < int(texts[1]):
            raise ConfigError(
                "expected RANK and WORLD_SIZE as torchrun sets them, a rank and a size above it, "
                f"got {texts[0]!r} and {texts[1]!r}"
            )
        return RankOfProcess(int(texts[0]), int(texts[1]), environ)
    mpi = rank_of(environ)
    rank, size = (0, 1) if mpi is None else (mpi.rank, mpi.size)
    return RankOfProcess(rank, size, environ)
