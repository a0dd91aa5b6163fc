"""The store where ranks started by torchrun, mpiexec or srun meet.

A process opens it once and keeps it until it ends, because rank 0 may serve it.
"""

from __future__ import annotations

from typing import Any

from torch.distributed import PrefixStore, rendezvous

from kvstore.frameworks.torch.mpi import with_mpi
from kvstore.launch.ranks import RankOfProcess
from pslite.errors import ConfigError

_opened: dict[tuple[int, int], Any] = {}


def meeting_store(place: RankOfProcess, prefix: str) -> Any:
    """Return torch's store of these ranks, with keys that begin with ``prefix``.

    Raises:
        ConfigError: nothing says where the ranks meet.
        DeadlineError: a rank did not come; the text says which.
    """
    found = _opened.get((place.rank, place.size))
    if found is None:
        found = _opened[place.rank, place.size] = _open(place)
    return PrefixStore(prefix, found)


def _open(place: RankOfProcess) -> Any:
    store = with_mpi({}, False, place.environ).get("store")
    if store is not None:
        return store
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not place.environ.get(name)]
    if missing:
        raise ConfigError(
            f"rank {place.rank} of {place.size} does not know where the ranks meet: set "
            f"{' and '.join(missing)} in all processes (rank 0's host, and a free port there), "
            "or start them by torchrun, mpiexec or kvstore-launch"
        )
    store, _, _ = next(rendezvous("env://", place.rank, place.size))
    return store
