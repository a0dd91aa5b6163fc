"""Keep the optimizer state of a weight, with a float32 master for 16 bits.

float16 and bfloat16 weights are too coarse for small updates: near 1, a float16 has steps of 0.001,
and an update of less than half a step is lost. So if an optimizer updates such a weight, the last
array of its state is a float32 copy, the **master**. The optimizer updates the master, and the
weight is always the rounded master. An optimizer does not know about this; it sees a float32
weight. Code that keeps state calls these functions instead of the optimizer's own methods. Other
dtypes have no master.

Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740), section 3.1; MXNet's
``multi_precision`` (``python/mxnet/optimizer/optimizer.py``). Pure; arrays are the caller's. Read
next: ``kvstore/arrays/cpu/sums.py``, which performs the updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.arrays.cpu import kernels
from kvstore.arrays.dtypes import accumulation_dtype

if TYPE_CHECKING:
    from kvstore.arrays.cpu.sums import Flat
    from kvstore.optimizer.base import Optimizer

MASTER = "master"
"""The name of the master array, in states and in files."""

_BLOCK_ELEMENTS = 65536
"""How many elements are rounded at a time: 128 KiB of 16-bit floats."""


def has_master(dtype: np.dtype[Any]) -> bool:
    """Return whether weights of ``dtype`` have a master."""
    return accumulation_dtype(dtype) != dtype


def state_names(optimizer: Optimizer, dtype: np.dtype[Any]) -> tuple[str, ...]:
    """Return the names of the state arrays for weights of ``dtype``, in order."""
    names = optimizer.state_names()
    return (*names, MASTER) if has_master(dtype) else names


def create_state(optimizer: Optimizer, weight: Flat) -> tuple[Flat, ...]:
    """Return a new array for each of ``state_names``, on the device of ``weight``."""
    if not has_master(weight.dtype):
        return optimizer.create_state(weight)
    master = _widened(weight)
    return (*optimizer.create_state(master), master)


def state_dtypes(optimizer: Optimizer | None, dtype: np.dtype[Any]) -> list[np.dtype[Any]]:
    """Return the dtypes of the states that an optimizer keeps for values of ``dtype``."""
    if optimizer is None:
        return []
    return [array.dtype for array in create_state(optimizer, np.zeros(1, dtype))]


def take_over(
    optimizer: Optimizer,
    previous: Optimizer | None,
    weight: Flat,
    state: Sequence[Flat],
    count: int,
) -> tuple[tuple[Flat, ...], int]:
    """Return the state and update count for a weight that gets another optimizer.

    It works like ``Optimizer.take_over``, but always keeps the master. If ``state`` is empty,
    it creates the master from the weight.
    """
    if not has_master(weight.dtype):
        return optimizer.take_over(previous, weight, state, count)
    own, master = (state[:-1], state[-1]) if state else ((), _widened(weight))
    taken, count = optimizer.take_over(previous, master, own, count)
    return (*taken, master), count


def restored(optimizer: Optimizer | None, weight: Flat, saved: Sequence[Flat]) -> tuple[Flat, ...]:
    """Return the state of ``weight``, on the host, from saved arrays.

    If the master was not saved, it is created from the weight. Where it does not round to the
    weight, it is corrected (``follow``). The function only reads the arrays of ``saved``; the
    result may contain them.
    """
    if optimizer is None or not has_master(weight.dtype):
        return tuple(saved)
    num_own = len(optimizer.state_names())
    master = _widened(weight)
    if len(saved) > num_own:
        master = np.array(saved[num_own])
        follow(weight, master)
    return (*saved[:num_own], master)


def follow(weight: Flat, master: Flat) -> None:
    """Set ``master`` to ``weight`` in place wherever it does not round to ``weight``.

    Call it if the weight may have been set without the master. Both are 1-D and have the same
    length. The function compares bits, so a NaN equals itself.
    """
    step = min(len(weight), _BLOCK_ELEMENTS)
    block = np.empty(step, weight.dtype)
    with np.errstate(all="ignore"):
        for start in range(0, len(weight), max(step, 1)):
            mine, values = master[start : start + step], weight[start : start + step]
            rounded = block[: len(mine)]
            if not kernels.add_up((mine,), rounded):
                np.copyto(rounded, mine, casting="unsafe")
            differs = rounded.view(np.uint16) != values.view(np.uint16)
            if differs.any():
                np.copyto(mine, values, where=differs)


def _widened(weight: Flat) -> Flat:
    master: Flat = weight.astype(accumulation_dtype(weight.dtype))
    return master
