"""Sum contributions and apply them: the arithmetic of every store, on flat arrays.

No I/O, no threads, no clock. NumPy computes, or the compiled kernels of ``kernels.py`` if they are
built and support the case; the bits are the same. Local stores and servers of distributed stores
use the same functions, so both give the same bits. A function may run on any thread as long as no
other thread uses the same arrays or the same :class:`Workspace`.
Read next: ``optimizer/base.py``.

**Order.** Contributions are added left to right, ((c0 + c1) + c2) + ..., in rank order for a
server and in list order for a device list. Every operation is elementwise, so neither the size
of the blocks nor cutting a key into parts can change a bit.

**Blocks.** Arrays are processed in blocks that stay in the processor's cache: one block of all
contributions is added and updated, then the next. Calls of NumPy on whole arrays would move each
operand through memory once per operation.

**Dtypes.** float16 and bfloat16 are added in float32 and rounded once at the end. An optimizer
updates their float32 master weight (``optimizer/states.py``), and the weight is rounded from it.
float32, float64, integers (which wrap), bool (logical or) and complex are added in their own dtype.
Overflow and NaN follow IEEE 754 without warnings; a training run that diverges shows it in its
loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from kvstore.arrays.cpu import kernels
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.errors import ValueMismatchError

Flat = np.ndarray[Any, Any]
"""A 1-D array. Contributions may be read-only and unaligned (views of received frames)."""

BLOCK_ELEMENTS = 65536
"""Elements per block: 256 KiB of float32 per operand, small enough for the second-level cache
and long enough that two threads rarely wait for each other's interpreter lock."""


class UpdateRule(Protocol):
    """The part of the interface of ``Optimizer`` that sums and updates use."""

    def block_length(self, length: int, elements: int) -> int: ...

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None: ...


class Workspace:
    """Scratch blocks that are reused, to avoid allocations in each update.

    Belongs to one thread at a time. What ``block`` returns is overwritten by the next call
    with the same slot and dtype.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, np.dtype[Any]], Flat] = {}
        self._others: dict[int, Workspace] = {}

    def of(self, number: int) -> Workspace:
        """Return the workspace with this number, always the same; 0 is this workspace."""
        if not number:
            return self
        return self._others.setdefault(number, Workspace())

    def block(self, slot: int, dtype: np.dtype[Any], length: int) -> Flat:
        """Return an uninitialized 1-D array that the workspace owns."""
        found = self._blocks.get((slot, dtype))
        if found is None or len(found) < length:
            found = np.empty(length, dtype)
            self._blocks[slot, dtype] = found
        return found[:length]


class Workspaces:
    """The scratch memory of all threads that work for a store."""

    def __init__(self) -> None:
        self._free: list[Workspace] = []  # append and pop are atomic

    def take(self) -> Workspace:
        """Return a workspace that is the caller's alone until ``give``."""
        try:
            return self._free.pop()
        except IndexError:
            return Workspace()

    def give(self, workspace: Workspace) -> None:
        """Take back a workspace for reuse."""
        self._free.append(workspace)


def sum_in_order(
    contributions: Sequence[Flat],
    out: Flat,
    workspace: Workspace | None = None,
    *,
    block_elements: int = BLOCK_ELEMENTS,
) -> None:
    """Set ``out`` to ((c0 + c1) + c2) + ..., cast to ``out``'s dtype at the end.

    All arrays are 1-D on the host and have the same length; contributions share one dtype and are
    only read, before the call returns. ``out`` is the caller's and may be ``contributions[0]``
    itself; it must not overlap any other. ``workspace`` saves allocations if the dtypes need
    scratch space. Raises ``ValueMismatchError`` if there are no contributions, or if lengths or
    dtypes differ.
    """
    _check(contributions, out)
    if kernels.add_up(contributions, out):
        return
    working = accumulation_dtype(contributions[0].dtype)
    workspace = workspace or Workspace()
    with np.errstate(all="ignore"):
        for start, stop in _blocks(len(out), block_elements):
            into = out[start:stop]
            total = into
            if out.dtype != working and len(contributions) > 1:
                total = workspace.block(0, working, stop - start)
            add_up([contribution[start:stop] for contribution in contributions], total)
            if total is not into:
                np.copyto(into, total, casting="unsafe")


def apply_round(
    weight: Flat,
    contributions: Sequence[Flat],
    optimizer: UpdateRule | None,
    state: Sequence[Flat],
    count: int,
    workspace: Workspace,
    *,
    outs: Sequence[Flat] = (),
    block_elements: int = BLOCK_ELEMENTS,
) -> None:
    """Apply one complete round to a key or to one part of it, in place.

    Without an optimizer ``weight`` is set to the sum; it never accumulates. With an optimizer, one
    pass calls ``optimizer.update`` with each block of the sum, and the same block of ``weight`` and
    of each array of ``state``. For 16-bit weights it passes the master, the last array of
    ``state``, and rounds ``weight`` from it. ``count`` is the number of this update, from 1.

    ``weight``, ``contributions`` and the arrays of ``state`` are 1-D on the host and have the same
    length; ``weight`` and contributions share one dtype. ``weight`` and ``state`` are the
    caller's, are changed in place and must not overlap a contribution; contributions are only
    read, before the call returns. They must be as long as the optimizer's scope requires. The new
    values are also written to ``outs``, arrays like ``weight``, while they are in the cache. Raises
    ``ValueMismatchError`` as ``sum_in_order`` does, and the optimizer's errors.
    """
    _check(contributions, weight)
    if optimizer is None and not outs:
        sum_in_order(contributions, weight, workspace, block_elements=block_elements)
        return
    if kernels.apply(weight, (contributions,), optimizer, state, count, (outs,) if outs else ()):
        return
    if optimizer is None:
        sum_in_order(contributions, weight, workspace, block_elements=block_elements)
        for out in outs:
            out[:] = weight
        return
    working = accumulation_dtype(weight.dtype)
    block = optimizer.block_length(len(weight), max(block_elements, 1))
    with np.errstate(all="ignore"):
        for start, stop in _blocks(len(weight), block):
            gradient = workspace.block(0, working, stop - start)
            add_up([contribution[start:stop] for contribution in contributions], gradient)
            part = [array[start:stop] for array in state]
            update_block(weight[start:stop], gradient, optimizer, part, count, workspace)
            for out in outs:
                out[start:stop] = weight[start:stop]


def add_up(contributions: Sequence[np.ndarray[Any, Any]], total: np.ndarray[Any, Any]) -> None:
    """Set the block ``total`` to ((c0 + c1) + c2) + ..., in its own dtype.

    All are the caller's NumPy arrays with the same shape, of any number of dimensions; nothing
    is checked. ``total`` may be ``contributions[0]`` itself and must not overlap any other.
    Call it within ``np.errstate(all="ignore")``. With ``update_block`` it does the work of
    ``apply_round``, for callers that choose their own blocks.
    """
    first = contributions[0]
    if len(contributions) == 1:
        np.copyto(total, first, casting="unsafe")
    elif first.dtype == total.dtype:
        np.add(first, contributions[1], total)
        for contribution in contributions[2:]:
            np.add(total, contribution, total)
    elif not kernels.add_up(contributions, total):
        np.add(first, contributions[1], out=total, dtype=total.dtype)
        for contribution in contributions[2:]:
            np.add(total, contribution, out=total, dtype=total.dtype)


def update_block(
    weight: Flat,
    gradient: Flat,
    optimizer: UpdateRule,
    state: Sequence[Flat],
    count: int,
    workspace: Workspace,
) -> None:
    """Update one block of ``weight`` and ``state`` from its summed gradient, in place.

    Arguments are as in ``apply_round``. ``gradient`` is slot 0 of ``workspace``, in the
    accumulation dtype, and is overwritten. Nothing is checked.
    """
    scratch = workspace.block(1, gradient.dtype, len(gradient))
    if weight.dtype == gradient.dtype:
        optimizer.update(weight, gradient, state, count, scratch)
        return
    *own, master = state
    optimizer.update(master, gradient, own, count, scratch)
    np.copyto(weight, master, casting="unsafe")


def _blocks(length: int, block_elements: int) -> Iterator[tuple[int, int]]:
    step = max(block_elements, 1)
    for start in range(0, length, step):
        yield start, min(start + step, length)


def _check(contributions: Sequence[Flat], out: Flat) -> None:
    # NumPy would broadcast a contribution of length 1 to the whole block without an error.
    if not contributions:
        raise ValueMismatchError("a sum needs at least one contribution, got none")
    for index, contribution in enumerate(contributions):
        if contribution.shape != out.shape or contribution.ndim != 1:
            raise ValueMismatchError(
                f"contribution {index} must be a flat array of {out.size} elements, like the "
                f"sum, got shape {contribution.shape}"
            )
        if contribution.dtype != contributions[0].dtype:
            raise ValueMismatchError(
                "the contributions of one round must have one dtype, got "
                f"{contributions[0].dtype} and {contribution.dtype}"
            )
