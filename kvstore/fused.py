"""Which keys of a call on a GPU are worked on in one launch, and with which numbers.

Pure: looks at keys, dtypes and optimizers, at no array's values, and runs nothing. What cannot
be fused is left to the formulas of ``optimizer/``, key by key. Any thread may call. Read next:
``arrays/cuda_kernels.py`` for what a launch does, then ``device.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays.cuda_kernels import C_TYPES, MOST_COPIES, Kernel, Numbers
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.sgd import SGD
from kvstore.shelf import Entry


class Job(NamedTuple):
    """Keys of a call that one kernel updates by the same numbers."""

    kernel: Kernel
    numbers: Numbers
    indices: list[int]
    """Positions of the keys in the call."""


def kernel_for(dtype: np.dtype[Any], num_copies: int, optimizer: Optimizer | None) -> Kernel | None:
    """The kernel that adds and updates keys of ``dtype``; None if there is none.

    There is one for sums of floats and integers, and for plain SGD on floats (of float16, on
    their masters), of up to ``MOST_COPIES`` values. bool, complex and bfloat16 have none, nor has
    any other optimizer, a subclass of SGD for instance.
    """
    name = f"uint{8 * dtype.itemsize}" if dtype.kind == "i" else dtype.name
    if name not in C_TYPES or num_copies > MOST_COPIES:
        return None
    if optimizer is None:
        formula = "sum"
    elif type(optimizer) is SGD and dtype.kind == "f":
        formula = "momentum" if optimizer.momentum != 0.0 else "sgd"
    else:
        return None
    return Kernel(name, num_copies, formula)


def numbers_of(optimizer: Optimizer | None, count: int) -> Numbers:
    """The numbers of the update with this count. Of SGD, or of none."""
    if not isinstance(optimizer, SGD):
        return Numbers()
    limit = optimizer.clip_gradient
    return Numbers(
        rescale=optimizer.rescale_grad,
        limit=np.inf if limit is None or limit <= 0 else limit,
        decay=optimizer.wd,
        rate=optimizer.rate(count),
        momentum=optimizer.momentum,
    )


def jobs_of(
    entries: Sequence[Entry], num_copies: Sequence[int], optimizer: Optimizer | None
) -> tuple[list[Job], list[int]]:
    """The jobs of one update of these keys, and the positions of those that cannot be fused.

    The keys live on one GPU, each with a number of copies to add. Keys whose optimizers or
    counts differ (multipliers, a schedule, a key that came later) are in different jobs.
    """
    found: dict[tuple[object, ...], Job] = {}
    others: list[int] = []
    for index, (entry, copies) in enumerate(zip(entries, num_copies, strict=True)):
        variant = None if optimizer is None else optimizer.for_key(entry.key)
        group = (entry.spec.dtype, copies, id(variant), entry.count)
        job = found.get(group)
        if job is None:
            kernel = kernel_for(entry.spec.dtype, copies, variant)
            if kernel is None:
                others.append(index)
                continue
            job = found[group] = Job(kernel, numbers_of(variant, entry.count + 1), [])
        if all(array.dtype == job.kernel.working for array in entry.state or ()):
            job.indices.append(index)
        else:
            others.append(index)
    return [job for job in found.values() if job.indices], others


def are_apart(addresses: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether no two of these stretches of memory, in bytes, overlap. Empty ones never do."""
    used = sorted((start, size) for start, size in zip(addresses, sizes, strict=True) if size)
    return all(start + size <= following for (start, size), (following, _) in pairwise(used))
