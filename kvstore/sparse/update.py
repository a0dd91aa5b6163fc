"""Run optimizers on some rows of a table, on several cores.

All optimizers work the same way: gather a block of rows of the weight and of each state, update it
by the optimizer's own dense formula, and write it back. Blocks stay in the processor's cache;
consecutive rows are updated in place. Arrays are 2-D, (rows, numbers in a row), on the host, and
belong to the caller. Other threads may work on other rows meanwhile, with another workspace.
Access to scattered rows mostly waits for memory, so threads share the rows; this does not change a
bit of the result.

**Lazy** (``Optimizer.is_lazy``): rows without a gradient do not change: no decay, no momentum.
**Not lazy**: they are updated with a gradient of zero, and the result equals that of the dense
gradient to the last bit. Read next: ``table.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from kvstore.arrays.cpu import kernels
from kvstore.arrays.cpu.sums import BLOCK_ELEMENTS, Flat, Workspace, update_block
from kvstore.arrays.cpu.threads import shared
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import create_state, has_master
from kvstore.sparse.ids import Ids, is_increasing
from kvstore.sparse.sums import RowValues, Sum, put_rows

_LEAST_ELEMENTS = 1 << 18
"""Work on fewer numbers is not divided further among threads."""

_EACH = 2
"""How many spans each thread gets, so that others can take over work from a slow thread."""


def over_cores(num_rows: int, width: int, work: Callable[[int, int, int], None]) -> None:
    """Call ``work(number, start, stop)`` in parallel for spans that cover all rows.

    ``number`` counts the spans from 0. Returns when all calls have ended. If calls raise errors,
    it raises that of the first span.
    """
    cores = shared()
    step = max(-(-num_rows // (_EACH * cores.num_threads)), _LEAST_ELEMENTS // max(width, 1), 1)
    tasks = [
        partial(work, number, start, min(start + step, num_rows))
        for number, start in enumerate(range(0, num_rows, step))
    ]
    failure = cores.run(tasks)
    if failure is not None:
        raise failure.error


_GRADIENT, _WEIGHT, _SUM, _STATE = 0, 10, 11, 12
"""Slots of a workspace; ``update_block`` expects the gradient in slot 0 and uses slot 1."""

_LAZY_BLOCK = 4 * BLOCK_ELEMENTS
"""Larger than for whole arrays, since scattered rows take more calls for each block."""


def update_lazily(
    weight: RowValues,
    state: Sequence[RowValues],
    places: Ids,
    total: Sum,
    optimizer: Optimizer,
    count: int,
    workspace: Workspace,
) -> None:
    """Update only the rows ``places`` of ``weight`` and ``state`` with ``total``.

    ``places`` has a place for each row of ``total``; they are distinct, in any order. If there
    are many, all cores share the work.
    """

    def update(number: int, start: int, stop: int) -> None:
        values, at, span = total.values, total.at, (start, stop)
        if kernels.update_rows(weight, state, places, values, at, optimizer, count, span):
            return
        mine = workspace.of(number)
        with np.errstate(all="ignore"):
            for first, last in row_blocks(stop - start, total.width, _LAZY_BLOCK):
                low, high = start + first, start + last
                gradient = _block(mine, _GRADIENT, total.dtype, high - low, total.width)
                total.rows(low, high, gradient)
                _update_rows(weight, state, places[low:high], gradient, optimizer, count, mine)

    over_cores(len(total), total.width, update)


def update_all(
    weight: RowValues,
    state: Sequence[RowValues],
    places: Ids,
    total: Sum,
    optimizer: Optimizer,
    count: int,
    workspace: Workspace,
    held: Ids | None = None,
) -> None:
    """Update all rows; those not in ``places`` get a gradient of zero.

    ``held`` (sorted) lists the places of all rows, including ``places``; None: all places.
    """
    sums, ordered = total.whole(), places if held is None else np.searchsorted(held, places)
    if not is_increasing(ordered):
        order = np.argsort(ordered)
        sums, ordered = sums[order], ordered[order]
    num_rows = len(weight) if held is None else len(held)
    blocks = row_blocks(num_rows, total.width)
    with np.errstate(all="ignore"):
        for start, stop in [(0, num_rows)] if optimizer.scope == "key" else blocks:
            gradient = _block(workspace, _GRADIENT, total.dtype, stop - start, total.width)
            gradient.fill(0)
            low, high = np.searchsorted(ordered, (start, stop))
            gradient[ordered[low:high] - start] = sums[low:high]
            at = np.arange(start, stop) if held is None else held[start:stop]
            _update_rows(weight, state, at, gradient, optimizer, count, workspace)


def assign(weight: RowValues, places: Ids, total: Sum, workspace: Workspace) -> None:
    """Set the rows ``places`` of ``weight`` to ``total``, rounded to its dtype."""
    with np.errstate(all="ignore"):
        for start, stop in row_blocks(len(total), total.width):
            block = _block(workspace, _SUM, total.dtype, stop - start, total.width)
            total.rows(start, stop, block)
            weight[places[start:stop]] = block


def keeps_zero(optimizer: Optimizer, dtype: np.dtype[np.generic], count: int) -> bool:
    """Return whether update ``count`` with gradient 0 leaves a weight of 0 unchanged.

    Then rows that were never pushed need no memory, even where updates are not lazy.
    """
    weight: Flat = np.zeros(optimizer.block_length(1, 1), dtype)
    state = create_state(optimizer, weight)
    before = [array.tobytes() for array in (weight, *state)]
    gradient: Flat = np.zeros(len(weight), accumulation_dtype(dtype))
    with np.errstate(all="ignore"):
        update_block(weight, gradient, optimizer, state, count, Workspace())
    return before == [array.tobytes() for array in (weight, *state)]


def row_blocks(
    num_rows: int, width: int, elements: int = BLOCK_ELEMENTS
) -> Iterator[tuple[int, int]]:
    """Yield blocks of rows, as (start, stop), that fit the cache."""
    step = max(elements // max(width, 1), 1)
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def _update_rows(
    weight: RowValues,
    state: Sequence[RowValues],
    at: Ids,
    gradient: RowValues,
    optimizer: Optimizer,
    count: int,
    workspace: Workspace,
) -> None:
    """Update the rows ``at`` (at least one), in place or through copies."""
    if _is_stretch(at):
        rows = slice(int(at[0]), int(at[0]) + len(at))
        mine = [array[rows] for array in state]
        _apply(weight[rows], gradient, mine, optimizer, count, workspace)
        return
    if has_master(weight.dtype):  # the master determines the weight, so do not gather it
        block = _block(workspace, _WEIGHT, weight.dtype, len(at), weight.shape[1])
    else:
        block = _gathered(weight, at, workspace, _WEIGHT)
    mine = [_gathered(array, at, workspace, _STATE + index) for index, array in enumerate(state)]
    _apply(block, gradient, mine, optimizer, count, workspace)
    put_rows(block, weight, at)
    for array, updated in zip(state, mine, strict=True):
        put_rows(updated, array, at)


def _apply(
    weight: RowValues,
    gradient: RowValues,
    state: Sequence[RowValues],
    optimizer: Optimizer,
    count: int,
    workspace: Workspace,
) -> None:
    flat, total = weight.reshape(-1), gradient.reshape(-1)
    states = [array.reshape(-1) for array in state]
    if not kernels.apply(flat, ([total],), optimizer, states, count):
        update_block(flat, total, optimizer, states, count, workspace)


def _is_stretch(places: Ids) -> bool:
    if not len(places):
        return False
    return int(places[-1]) - int(places[0]) == len(places) - 1 and is_increasing(places)


def _gathered(array: RowValues, places: Ids, workspace: Workspace, slot: int) -> RowValues:
    out = _block(workspace, slot, array.dtype, len(places), array.shape[1])
    # With "raise", NumPy would copy the rows to a temporary buffer first.
    return np.take(array, places, axis=0, out=out, mode="clip")


def _block(
    workspace: Workspace, slot: int, dtype: np.dtype[np.generic], num_rows: int, width: int
) -> RowValues:
    return workspace.block(slot, dtype, num_rows * width).reshape(num_rows, width)
