"""Layers of the example networks: pure functions on arrays, forward and backward.

Nothing here imports an array library other than NumPy, and then only for types: every function
finds the library (NumPy or CuPy) from its input, so the same code trains on a CPU and on a
GPU. No function keeps state, so several device threads may call them at once. Activations are
laid out as (channels, height, width, samples): the samples lie together in memory, so cutting
out patches and pooling move runs of a whole batch instead of single pixels, and the matrix
products need no transposed copy. Read next: ``lenet.py``.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = Any  # numpy.ndarray or cupy.ndarray; the two share the methods used here.


def array_module(array: Array) -> Any:
    """The library that made ``array``: the module ``numpy`` or ``cupy``."""
    name = type(array).__module__.partition(".")[0]
    return np if name == "numpy" else sys.modules[name]


def glorot_uniform(
    rng: np.random.Generator, shape: tuple[int, ...], fan_in: int, fan_out: int
) -> NDArray[Any]:
    """Float32 values from U(-a, a), a = sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010)."""
    limit = np.sqrt(6.0 / (fan_in + fan_out))
    return rng.uniform(-limit, limit, shape).astype(np.float32)


def patches(images: Array, kernel: int) -> Array:
    """All ``kernel`` x ``kernel`` patches of ``images``, one per column (im2col).

    ``images`` is (C, H, W, N), on any device; the result is a new array of the same dtype and
    device, (C * kernel * kernel, (H - kernel + 1) * (W - kernel + 1) * N).
    """
    module = array_module(images)
    channels, height, width, samples = images.shape
    at_channel, at_row, at_column, at_sample = images.strides
    out_height, out_width = height - kernel + 1, width - kernel + 1
    windows = module.lib.stride_tricks.as_strided(
        images,
        (channels, kernel, kernel, out_height, out_width, samples),
        (at_channel, at_row, at_column, at_row, at_column, at_sample),
    )
    # This copies, because the windows overlap; each row of a window is contiguous in memory.
    return windows.reshape(channels * kernel * kernel, out_height * out_width * samples)


def unpatches(columns: Array, shape: tuple[int, int, int, int], kernel: int) -> Array:
    """The transpose of ``patches``: adds every patch back where it was cut out (col2im)."""
    channels, height, width, samples = shape
    module = array_module(columns)
    out_height, out_width = height - kernel + 1, width - kernel + 1
    parts = columns.reshape(channels, kernel, kernel, out_height, out_width, samples)
    images = module.zeros(shape, dtype=columns.dtype)
    for row in range(kernel):
        for column in range(kernel):
            images[:, row : row + out_height, column : column + out_width] += parts[:, row, column]
    return images


def max_pool(images: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    """The maximum of each 2x2 square, and which of the four it was.

    ``images`` is (C, H, W, N) with even H and W; the result is (C, H/2, W/2, N). The three
    boolean arrays answer "top pair?", "left of the top pair?" and "left of the bottom pair?".
    On equal values the first one wins, so a gradient goes to exactly one pixel: in the even
    background of an image most squares hold four equal values.
    """
    module = array_module(images)
    top_left, top_right = images[:, 0::2, 0::2], images[:, 0::2, 1::2]
    bottom_left, bottom_right = images[:, 1::2, 0::2], images[:, 1::2, 1::2]
    top = module.maximum(top_left, top_right)
    bottom = module.maximum(bottom_left, bottom_right)
    choice = (top >= bottom, top_left >= top_right, bottom_left >= bottom_right)
    return module.maximum(top, bottom), choice


def max_pool_backward(gradient: Array, choice: tuple[Array, Array, Array]) -> Array:
    """The gradient at the input of ``max_pool``, from the one at its output."""
    module = array_module(gradient)
    is_top, is_left_of_top, is_left_of_bottom = choice
    channels, height, width, samples = gradient.shape
    images = module.empty((channels, 2 * height, 2 * width, samples), dtype=gradient.dtype)
    top = gradient * is_top
    bottom = gradient - top
    module.multiply(top, is_left_of_top, out=images[:, 0::2, 0::2])
    module.subtract(top, images[:, 0::2, 0::2], out=images[:, 0::2, 1::2])
    module.multiply(bottom, is_left_of_bottom, out=images[:, 1::2, 0::2])
    module.subtract(bottom, images[:, 1::2, 0::2], out=images[:, 1::2, 1::2])
    return images


def softmax(scores: Array) -> Array:
    """Probabilities from scores (classes, N), along the classes; the largest score is subtracted
    first, so that the exponential cannot overflow."""
    module = array_module(scores)
    exponentials = module.exp(scores - scores.max(axis=0))
    exponentials /= exponentials.sum(axis=0)
    return exponentials


def softmax_cross_entropy(scores: Array, labels: Array) -> tuple[float, int, Array]:
    """Sum of the losses, number of right answers, and the gradient of the sum at ``scores``.

    ``scores`` is (classes, N), ``labels`` N integers on the same device. The gradient of
    -log softmax(scores)[label] is softmax(scores) - onehot(label).
    """
    module = array_module(scores)
    samples = module.arange(labels.shape[0])
    probabilities = softmax(scores)
    tiny = np.finfo(scores.dtype).tiny
    of_labels = module.maximum(probabilities[labels, samples], tiny)
    loss_sum = -float(module.log(of_labels).sum())
    correct_count = int((probabilities.argmax(axis=0) == labels).sum())
    probabilities[labels, samples] -= 1
    return loss_sum, correct_count, probabilities
