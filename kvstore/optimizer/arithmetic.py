"""Share steps between update formulas: rescaling, clipping, decay, means, norms.

All functions work in place on the caller's 1-D arrays. They use NumPy ufuncs with ``out=`` and
``dtype=``, which CuPy arrays execute on their device (NEP 13). No threads, no clock.
Read next: ``base.py``, then ``sgd.py``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvstore.arrays.cpu.sums import Flat

NORM_ELEMENTS = 16384
"""How many squares are added at a time on the host: 128 KiB of float64."""

DEVICE_NORM_ELEMENTS = 1 << 22
"""The same on a GPU, where each call costs a launch: 32 MiB of float64."""


def is_on_host(array: Flat) -> bool:
    """Return whether the array is NumPy's, so that blocks should fit the cache."""
    return isinstance(array, np.ndarray)


def rescale(grad: Flat, factor: float) -> None:
    """Compute grad *= factor, in place."""
    if factor != 1.0:
        np.multiply(grad, factor, out=grad)


def clip(grad: Flat, limit: float | None) -> None:
    """Clip each element to [-limit, limit] in place; None, 0 or less means no limit."""
    if limit is not None and limit > 0:
        np.minimum(grad, limit, out=grad)
        np.maximum(grad, -limit, out=grad)


def add_decay(grad: Flat, weight: Flat, wd: float, scratch: Flat) -> None:
    """Compute grad += wd * weight, in place; overwrites ``scratch``."""
    if wd != 0.0:
        np.multiply(weight, wd, out=scratch, dtype=grad.dtype)
        np.add(grad, scratch, out=grad)


def descend(weight: Flat, step: Flat) -> None:
    """Subtract ``step`` from ``weight`` in place, and round once.

    The difference is computed in the dtype of ``step`` and rounded to that of ``weight``.
    """
    np.subtract(weight, step, out=weight, dtype=step.dtype)


def move(weight: Flat, step: Flat, velocity: Flat, momentum: float) -> None:
    """Compute velocity = momentum * velocity - step; weight += velocity, in place."""
    np.multiply(velocity, momentum, out=velocity)
    np.subtract(velocity, step, out=velocity)
    np.add(weight, velocity, out=weight, dtype=step.dtype)


def average(mean: Flat, value: Flat, beta: float, scratch: Flat) -> None:
    """Set mean = beta * mean + (1 - beta) * value, in place; overwrites ``scratch``."""
    np.multiply(mean, beta, out=mean)
    np.multiply(value, 1.0 - beta, out=scratch)
    np.add(mean, scratch, out=mean)


def average_square(mean: Flat, value: Flat, beta: float, scratch: Flat) -> None:
    """Set mean = beta * mean + (1 - beta) * value ** 2, in place.

    Overwrites ``scratch``.
    """
    np.multiply(mean, beta, out=mean)
    np.multiply(value, 1.0 - beta, out=scratch)
    np.multiply(scratch, value, out=scratch)
    np.add(mean, scratch, out=mean)


def root(square: Flat, epsilon: float, is_inside: bool, out: Flat) -> None:
    """Set out = sqrt(square + epsilon) if ``is_inside``, else sqrt(square) + epsilon."""
    if is_inside:
        np.add(square, epsilon, out=out)
        np.sqrt(out, out=out)
    else:
        np.sqrt(square, out=out)
        np.add(out, epsilon, out=out)


def norm(values: Flat) -> float:
    """Return the Euclidean norm of a 1-D array, reproducible bit for bit.

    It depends only on the elements and their order.

    Squares are computed in float64. NumPy's pairwise sum adds each block of ``NORM_ELEMENTS``;
    then the sums of the blocks are added one after the other. So threads and the caller's block
    size do not matter. On a GPU the blocks have ``DEVICE_NORM_ELEMENTS`` and are added on the
    device. CuPy always adds arrays of the same length in the same order, but not in NumPy's
    order, so the last bits may differ from the host's. The host waits once, for the result. The
    function allocates one float64 block, on the array's device.
    """
    if len(values) == 0:
        return 0.0
    step = NORM_ELEMENTS if is_on_host(values) else DEVICE_NORM_ELEMENTS
    squares = np.empty_like(values[:step], dtype=np.float64)
    total: Any = None
    for start in range(0, len(values), step):
        block = values[start : start + step]
        into = squares[: len(block)]
        np.multiply(block, block, out=into, dtype=np.float64)
        partial: Any = into.sum()
        total = partial if total is None else total + partial
    return math.sqrt(float(total))
