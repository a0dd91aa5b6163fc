"""``init``: a store whose workers are the ranks of a PyTorch job.

Under ``kvstore-launch``, they are the workers of the job. Otherwise the ranks create a cluster of
their own (``cluster.py``); they find each other through the store of their process group, or at
``MASTER_ADDR``. It waits until all ranks have joined. Read next: ``cluster.py``.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch.distributed as dist

from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.frameworks.torch import rendezvous
from kvstore.frameworks.torch.cluster import join
from kvstore.frameworks.torch.process_group import ProcessGroupKVStore
from kvstore.kvstore import STORE_TYPES
from kvstore.launch.ranks import rank_of_process
from kvstore.stores.dist.node import worker_node
from kvstore.stores.dist.store import DistKVStore, create_dist
from pslite import Config, Postoffice
from pslite.errors import ConfigError

_PREFIX = "kvstore.torch.init"

# Guards the two variables below; a forked child must not use their values.
_lock = threading.Lock()
_own: tuple[int, Postoffice, Any] | None = None
"""Process, node and PyTorch store of a cluster that was created here; it exists as long as this
process."""
_shared: DistKVStore | None = None


def init(kind: str = "dist_sync") -> DistKVStore:
    """Return a new distributed store of the ranks of this job; all ranks call it.

    ``kind`` is the name of a ``dist`` store. It works under ``kvstore-launch``, within any process
    group of ``torch.distributed``, and for ranks that torchrun, mpiexec or srun has started. Every
    call gives another store, on the same node.

    Raises:
        ArgumentValueError: ``kind`` is not a distributed store.
        ConfigError: this process is not a rank of a job; the text says how to start one.
        DeadlineError: a rank did not come; the text says which.
    """
    canonical = STORE_TYPES.get(kind.lower(), "") if isinstance(kind, str) else ""
    if not canonical.startswith("dist"):
        known = ", ".join(name for name in STORE_TYPES if name.startswith("dist"))
        raise ArgumentValueError(f"kind must be one of {known}, got {kind!r}")
    return create_dist(canonical, kind, node=_node_of_ranks())


def store_of(kv: object) -> DistKVStore:
    """Return ``kv``, or for None the shared store of this process."""
    global _shared
    if kv is None:
        node = _node_of_ranks()
        if _shared is None or _shared.node is not node:
            _shared = create_dist("dist_sync", "dist_sync", node=node)
        return _shared
    if not isinstance(kv, DistKVStore):
        raise ArgumentTypeError(
            "kv must be a distributed store, such as kvstore.torch.init() or "
            f"kvstore.create('dist_sync'), got {kv!r:.80}"
        )
    return kv


def _node_of_ranks() -> Postoffice:
    global _own
    if Config.from_env()[0].root_uri:
        return worker_node()
    world = dist.GroupMember.WORLD
    if isinstance(world, ProcessGroupKVStore):
        return world.cluster.node
    with _lock:
        if _own is None or _own[0] != os.getpid():
            store, rank, size = _meeting_place()
            found = join(store, rank, size)
            _own = os.getpid(), found.node, store
        return _own[1]


def _meeting_place() -> tuple[Any, int, int]:
    """Return a store that all ranks share, this rank, and the number of ranks."""
    if dist.is_initialized():
        store = dist.PrefixStore(_PREFIX, dist.distributed_c10d._get_default_store())
        return store, dist.get_rank(), dist.get_world_size()
    place = rank_of_process()
    if place.size == 1 and "RANK" not in place.environ:
        raise ConfigError(
            "this process is not a rank of a PyTorch job: start it by kvstore-launch, torchrun, "
            "mpiexec or srun, or call torch.distributed.init_process_group first"
        )
    return rendezvous.meeting_store(place, _PREFIX), place.rank, place.size
