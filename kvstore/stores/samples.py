"""Shard the samples of a data set over the workers.

Pure arithmetic on indices, used by ``kv.shard`` and ``FeedForward``.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ArgumentTypeError
from pslite.errors import UsageError


def shard(
    num_samples: int,
    rank: int = 0,
    num_workers: int = 1,
    *,
    batch_size: int = 1,
    num_batches: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
) -> NDArray[np.int64]:
    """Return the samples that worker ``rank`` visits in ``epoch``, one batch per row.

    The result is int64 indices of shape (num_batches, batch_size). Every worker computes the same
    order of all samples from ``seed`` and ``epoch``, and the workers take batches from it in turn.
    Without ``num_batches`` the shards are disjoint, cover all samples and have the same length:
    ceil(num_samples / (num_workers * batch_size)) batches, the last of them filled up from the
    start of the order. Step t of W workers with batch size B visits the same samples as step t of
    one worker with batch size W * B.
    """
    if seed < 0 or epoch < 0:
        raise UsageError(f"seed and epoch must not be negative, got {seed} and {epoch}")
    if num_samples < 1 or batch_size < 1 or not 0 <= rank < num_workers:
        raise UsageError(
            f"cannot shard {num_samples} samples for rank {rank} of {num_workers} in batches of "
            f"{batch_size}: need at least 1 sample, a batch size of at least 1, and a rank from "
            "0 to the number of workers minus 1"
        )
    order: np.ndarray[Any, Any] = np.arange(num_samples)
    if shuffle:
        order = np.random.default_rng((seed, epoch)).permutation(num_samples)
    if num_batches is None:
        num_batches = math.ceil(num_samples / (num_workers * batch_size))
    dealt = np.resize(order, (num_batches, num_workers, batch_size))
    mine: np.ndarray[Any, np.dtype[np.int64]] = dealt[:, rank].astype(np.int64, copy=False)
    return mine


def deal_out(
    num_samples: int,
    rank: int,
    num_workers: int,
    seed: int | None = 0,
    epoch: int = 0,
    *,
    even: bool = True,
) -> NDArray[np.int64]:
    """Return the samples of worker ``rank`` in ``epoch``: int64 indices, shape (n,).

    All workers compute the same order from ``seed`` and ``epoch`` (``seed`` None: no shuffle) and
    take samples from it in turn, so together the shards have all samples. With ``even`` all shards
    have the same length: the last ones repeat samples from the start of the order. Otherwise they
    are disjoint, and their lengths differ by at most one; a shard may be empty. Raises a
    ``UsageError``.
    """
    num_samples, epoch = as_int("num_samples", num_samples), as_int("epoch", epoch)
    seed = None if seed is None else as_int("seed", seed)
    if not 0 <= rank < num_workers:
        raise UsageError(
            f"rank must be from 0 to {num_workers - 1} (the job has {num_workers} workers), got "
            f"{rank}"
        )
    of, among = (rank, num_workers) if even else (0, 1)
    rows = shard(num_samples, of, among, seed=seed or 0, epoch=epoch, shuffle=seed is not None)
    dealt: NDArray[np.int64] = rows.reshape(-1)
    return dealt if even else dealt[rank::num_workers].copy()


def as_int(name: str, value: Any) -> int:
    """Check the int argument ``name`` and return it. Raises ``ArgumentTypeError``.

    NumPy's integers are accepted.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentTypeError(f"{name} must be an int, got {value!r}") from None
