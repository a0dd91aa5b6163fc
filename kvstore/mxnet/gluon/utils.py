"""``mx.gluon.utils``: split a batch over devices, and clip gradients.

Pure functions on the caller's arrays; no threads. ``FeedForward`` splits batches by another rule,
by work loads (``fit/network.py``). Source of names and rule:
``python/mxnet/gluon/utils.py`` of MXNet 1.9.1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np

from kvstore.arrays import Array, adapter_for, adapter_on
from kvstore.arrays.context import Context
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.mxnet.nd.ndarray import NDArray

__all__ = ["clip_global_norm", "split_and_load", "split_data"]


def split_data(
    data: Array, num_slice: int, batch_axis: int = 0, even_split: bool = True
) -> list[Array]:
    """Cut ``data`` along ``batch_axis`` into ``num_slice`` slices, in order.

    ``data`` is an array of NumPy, PyTorch, JAX, CuPy or ``mx.nd``. The slices have its library and
    device, and are views if the library's slicing returns views. Without ``even_split`` the first
    ``size % num_slice`` slices have one sample more than the others.

    Raises ``ArgumentValueError`` (a ``ValueError``) if the samples do not divide evenly and
    ``even_split`` is set, if there are fewer samples than slices, and for an axis that the array
    does not have; ``ArgumentTypeError`` if ``data`` is not an array.
    """
    shape = adapter_for(data).shape(data)
    for name, number in (("batch_axis", batch_axis), ("num_slice", num_slice)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise ArgumentTypeError(f"{name} must be an int, got {number!r}")
    if not 0 <= batch_axis < len(shape):
        raise ArgumentValueError(
            f"batch_axis of an array of shape {shape} must be from 0 to {len(shape) - 1}, got "
            f"{batch_axis}"
        )
    if num_slice < 1:
        raise ArgumentValueError(f"num_slice must be at least 1, got {num_slice}")
    size = shape[batch_axis]
    length, longer = divmod(size, num_slice)
    if even_split and longer:
        raise ArgumentValueError(
            f"a batch of {size} samples cannot be split evenly into {num_slice} slices; use a "
            f"multiple of {num_slice}, or even_split=False"
        )
    if length == 0:
        raise ArgumentValueError(
            f"a batch of {size} samples leaves some of {num_slice} slices empty; use a larger "
            "batch or fewer slices"
        )
    slices = []
    stop = 0
    for index in range(num_slice):
        start, stop = stop, stop + length + (index < longer)
        slices.append(data[(slice(None),) * batch_axis + (slice(start, stop),)])
    return slices


def split_and_load(
    data: Array,
    ctx_list: Sequence[Context],
    batch_axis: int = 0,
    even_split: bool = True,
) -> list[Array]:
    """Split the data into one slice for each context, and copy each there.

    Tensors of PyTorch and ``mx.nd.NDArray`` keep their type. Other arrays become CuPy's on a GPU,
    and NumPy's on a CPU unless they are on a CPU already. A slice that is already on its context
    is not copied. Raises as ``split_data`` does, and ``ArgumentTypeError`` for a list with
    elements that are not contexts.
    """
    if not isinstance(ctx_list, list | tuple):
        raise ArgumentTypeError(
            "ctx_list must be a list of contexts such as [mx.cpu(0)], got "
            f"{type(ctx_list).__name__}"
        )
    for context in ctx_list:
        if not isinstance(context, Context):
            raise ArgumentTypeError(f"ctx_list must have contexts only, got {context!r}")
    slices = split_data(data, len(ctx_list), batch_axis, even_split)
    return [_loaded(part, context) for part, context in zip(slices, ctx_list, strict=True)]


def clip_global_norm(
    arrays: Sequence[Array], max_norm: float, check_isfinite: bool = True
) -> float:
    """Scale arrays in place so that their joint norm is at most ``max_norm``.

    Use it for gradients between ``Trainer.allreduce_grads`` and ``update``, when they are not yet
    divided by the batch size. The arrays are writable, of any library and device. They are scaled
    by ``max_norm / (norm + 1e-8)`` if that is less than 1. Returns the norm before scaling, the
    root of the sum of all squares, as a float (also without ``check_isfinite``, where MXNet returns
    an array). If the norm is NaN or infinite, the arrays are undefined afterwards, and there is a
    ``UserWarning`` unless ``check_isfinite`` is False.

    Raises ``ArgumentTypeError`` for a value that is not a writable array, and
    ``ArgumentValueError`` for an empty list or a negative ``max_norm``; nothing changes then.
    """
    if not isinstance(arrays, list | tuple) or not arrays:
        raise ArgumentValueError(
            "clip_global_norm needs a list of at least one array, got an empty list"
        )
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float | np.number):
        raise ArgumentTypeError(f"max_norm must be a number, got {max_norm!r}")
    if not max_norm >= 0:
        raise ArgumentValueError(f"max_norm must not be negative, got {max_norm}")
    adapters = [adapter_for(array) for array in arrays]
    for adapter, array in zip(adapters, arrays, strict=True):
        adapter.dtype(array)
        refusal = adapter.why_read_only(array)
        if refusal is not None:
            raise ArgumentTypeError(f"cannot scale an array: {refusal}")
    norm = math.sqrt(sum(map(_sum_of_squares, arrays)))
    if check_isfinite and not math.isfinite(norm):
        warnings.warn(
            "the norm of the gradients is NaN or infinite, so the clipped gradients are undefined",
            UserWarning,
            stacklevel=2,
        )
    factor = float(max_norm) / (norm + 1e-8)
    if not factor >= 1.0:
        for adapter, array in zip(adapters, arrays, strict=True):
            with adapter.on(adapter.context(array)):
                scalar = accumulation_dtype(adapter.dtype(array)).type(factor)
                adapter.assign(adapter.view(array) * scalar, array)
    return norm


def _sum_of_squares(array: Array) -> float:
    """Return the sum of squares in float64, which does not overflow."""
    adapter = adapter_for(array)
    with adapter.on(adapter.context(array)):
        flat = adapter.view(array).reshape(-1).astype(np.float64)
        return float(flat @ flat)


def _loaded(part: Array, context: Context) -> Array:
    if isinstance(part, NDArray):
        return part.as_in_context(context)
    adapter = adapter_for(part)
    home = adapter.context(part)
    if home == context or home.device_type == context.device_type == "cpu":
        return part
    if hasattr(part, "requires_grad"):  # a tensor, which has its own method for this
        on_gpu = context.device_type == "gpu"
        return part.to(f"cuda:{context.device_id}" if on_gpu else "cpu")
    return adapter_on(context).to_context(part, context)
