"""Which rank a process is, by the variables of what started it: torchrun, mpiexec, srun.

For layers on frameworks whose scripts do not say it themselves. Runs on the caller's thread; the
environment is looked at once for each call.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from pslite.errors import ConfigError

#: What starts processes -> its variables for the rank and the number of ranks.
_VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "MPICH, or srun with PMI": ("PMI_RANK", "PMI_SIZE"),
}


class RankOfProcess(NamedTuple):
    """One of ``size`` processes that were started together."""

    rank: int
    size: int
    meets_at: str
    """MASTER_ADDR:MASTER_PORT, or "" where that is not set."""


def rank_of_process(environ: Mapping[str, str] = os.environ) -> RankOfProcess:
    """Return the rank that the environment gives this process; rank 0 of 1 where it gives none.

    Raises:
        ConfigError: the variables are no numbers, or do not fit together.
    """
    place = ""
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        place = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    for rank_name, size_name in _VARIABLES.values():
        if rank_name not in environ or size_name not in environ:
            continue
        texts = environ[rank_name], environ[size_name]
        if not all(text.isdecimal() for text in texts) or not int(texts[0]) < int(texts[1]):
            raise ConfigError(
                f"expected {rank_name} from 0 to {size_name} - 1, got {rank_name}={texts[0]!r} and "
                f"{size_name}={texts[1]!r}; set both as the launcher does, or unset both"
            )
        return RankOfProcess(int(texts[0]), int(texts[1]), place)
    return RankOfProcess(0, 1, place)
