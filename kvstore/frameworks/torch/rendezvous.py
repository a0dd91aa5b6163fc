"""The store in which ranks meet that PyTorch's launchers start: MASTER_ADDR and MASTER_PORT."""

from __future__ import annotations

from typing import Any

from torch.distributed import PrefixStore, rendezvous


def store_at(rank: int, size: int, prefix: str) -> Any:
    """Return torch's store of these ranks, with keys that begin with ``prefix``.

    Rank 0 serves it where torchrun does not, for as long as the process lives.
    """
    store, _, _ = next(rendezvous("env://", rank, size))
    return PrefixStore(prefix, store)
