"""The numbers of a run: gradients, and what the weights must be after all rounds.

Pure, and NumPy only (from 1.23 on), because it runs inside every contender's processes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

LEARNING_RATE = 1e-3
MOMENTUM = 0.9

Arrays = Sequence["np.ndarray[Any, Any]"]


class Check(NamedTuple):
    """How the weights of a run compare with NumPy's."""

    exact: bool
    difference: float
    """The greatest difference of an element, in parts of the greatest weight."""


def first_weights(shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray[Any, Any]]:
    """Float32 weights to begin with, the same in every process."""
    rng = np.random.default_rng(7)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def gradients(shapes: Sequence[tuple[int, ...]], contributor: int) -> list[np.ndarray[Any, Any]]:
    """Float32 gradients of one contributor (a worker, or a device of one), in every round."""
    rng = np.random.default_rng(1000 + contributor)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def expected_weights(
    shapes: Sequence[tuple[int, ...]], contributors: int, rounds: int, *, one_by_one: bool
) -> list[np.ndarray[Any, Any]]:
    """Weights after all rounds of SGD with momentum: v = 0.9 v - lr g; w = w + v.

    Gradients are added left to right in the order of contributors, then applied once a round.
    ``one_by_one`` is for asynchronous stores: each contribution is applied by itself, and all
    are contributor 0's, so that their order does not matter.
    """
    weights = first_weights(shapes)
    totals = gradients(shapes, 0)
    if not one_by_one:
        for contributor in range(1, contributors):
            for total, gradient in zip(totals, gradients(shapes, contributor), strict=True):
                total += gradient
    for weight, step in zip(weights, totals, strict=True):
        step *= np.float32(LEARNING_RATE)
        velocity = np.zeros_like(weight)
        for _ in range(rounds * contributors if one_by_one else rounds):
            velocity *= np.float32(MOMENTUM)
            velocity -= step
            weight += velocity
    return weights


def compare(expected: Arrays, found: Arrays) -> Check:
    """Compare arrays of equal shapes; NaN counts as an infinite difference."""
    largest = max((float(np.abs(array).max()) for array in expected if array.size), default=1.0)
    exact, difference = True, 0.0
    for wanted, array in zip(expected, found, strict=True):
        array = np.asarray(array).reshape(wanted.shape)
        if not np.array_equal(wanted, array):
            exact = False
            apart = float(np.abs(wanted - array).max()) / largest
            difference = max(difference, float("inf") if np.isnan(apart) else apart)
    return Check(exact, difference)


def checksum(arrays: Arrays) -> int:
    """Equal for equal bits: to see that all workers ended with the same weights."""
    value = 0
    for array in arrays:
        value = zlib.crc32(memoryview(np.ascontiguousarray(array)).cast("B"), value)
    return value
