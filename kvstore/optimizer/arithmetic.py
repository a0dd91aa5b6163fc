"""Steps that update formulas share: rescaling, clipping, decay, means, norms.

Everything works in place on 1-D arrays of the caller, written as NumPy ufuncs with ``out=``
and ``dtype=``, which CuPy arrays carry out on their device (NEP 13). No threads, no clock.
Read next: ``base.py``, then ``sgd.py``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvstore.arrays.cpu.sums import Flat

NORM_ELEMENTS = 16384
"""Elements whose squares are added at a time on the host: 128 KiB of float64."""

DEVICE_NORM_ELEMENTS = 1 << 22
"""The same on a GPU, where each call costs a launch: 32 MiB of float64."""


def is_on_host(array: Flat) -> bool:
    """Return whether blocks should fit a processor's cache: the array is NumPy's."""
    return isinstance(array, np.ndarray)


def rescale(grad: Flat, factor: float) -> None:
    """grad *= factor, in place."""
    if factor != 1.0:
        np.multiply(grad, factor, out=grad)


def clip(grad: Flat, limit: float | None) -> None:
    """Clip each element to [-limit, limit] in place; None, 0 and less: off."""
    if limit is not None and limit > 0:
        np.minimum(grad, limit, out=grad)
        np.maximum(grad, -limit, out=grad)


def add_decay(grad: Flat, weight: Flat, wd: float, scratch: Flat) -> None:
    """grad += wd * weight, in place; overwrites ``scratch``."""
    if wd != 0.0:
        np.multiply(weight, wd, out=scratch, dtype=grad.dtype)
        np.add(grad, scratch, out=grad)


def descend(weight: Flat, step: Flat) -> None:
    """Subtract ``step`` from ``weight``, in its dtype, and round once.

    The difference is computed in the dtype of ``step`` and rounded to that of ``weight``.
    """
    np.subtract(weight, step, out=weight, dtype=step.dtype)


def move(weight: Flat, step: Flat, velocity: Flat, momentum: float) -> None:
    """velocity = momentum * velocity - step, then weight += velocity, both in place."""
    np.multiply(velocity, momentum, out=velocity)
    np.subtract(velocity, step, out=velocity)
    np.add(weight, velocity, out=weight, dtype=step.dtype)


def average(mean: Flat, value: Flat, beta: float, scratch: Flat) -> None:
    """mean = beta * mean + (1 - beta) * value, in place; overwrites ``scratch``."""
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
    """out = sqrt(square + epsilon) if ``is_inside`` else sqrt(square) + epsilon."""
    if is_inside:
        np.add(square, epsilon, out=out)
        np.sqrt(out, out=out)
    else:
        np.sqrt(square, out=out)
        np.add(out, epsilon, out=out)


def norm(values: Flat) -> float:
    """Return the Euclidean norm of a 1-D array, reproducible bit for bit.

    It depends only on the elements and their order.

    Squares are taken in float64 and added within blocks of ``NORM_ELEMENTS`` by NumPy's
    pairwise sum, and the sums of the blocks one after the other, so neither threads nor the
    block size of the caller matter. On a GPU the blocks have ``DEVICE_NORM_ELEMENTS`` and are
    summed and added on the device (CuPy's reduction has a fixed tree for a length, without
    atomics, but another tree than NumPy's: the last bits may differ from the host's); the
    host waits once, for the result. Makes one float64 block, on the array's device.
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
