"""``mx.gluon.utils``: cutting a batch into one slice for each device.

Pure functions over arrays that the caller owns; no threads. ``FeedForward`` has a rule of its
own, by work loads (``training.py``). Source of names and rule: ``python/mxnet/gluon/utils.py``
of MXNet 1.9.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.arrays import Array, adapter_for, adapter_on
from kvstore.context import Context
from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.ndarray import NDArray

__all__ = ["split_and_load", "split_data"]


def split_data(
    data: Array, num_slice: int, batch_axis: int = 0, even_split: bool = True
) -> list[Array]:
    """Cut ``data`` along ``batch_axis`` into ``num_slice`` neighbouring slices, in order.

    Any array with NumPy's slicing: of NumPy, PyTorch, JAX, CuPy or ``mx.nd``. The slices are
    of its library, on its device, and views where the library makes views. Without
    ``even_split`` the first ``size % num_slice`` ones have one sample more than the others.

    Raises ``ArgumentValueError`` (a ``ValueError``) when the samples do not divide evenly and
    ``even_split`` is set, when there are fewer samples than slices, and for an axis that the
    array does not have; ``ArgumentTypeError`` for what is no array.
    """
    size = _batch_size(data, batch_axis)
    _check_number("num_slice", num_slice)
    length, longer = divmod(size, num_slice)
    if even_split and longer:
        raise ArgumentValueError(
            f"a batch of {size} samples cannot be cut evenly into {num_slice} slices; take a "
            f"batch of a multiple of {num_slice}, or even_split=False"
        )
    if length == 0:
        raise ArgumentValueError(
            f"a batch of {size} samples leaves some of {num_slice} slices empty; take a larger "
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
    """``split_data`` into one slice for each context, each brought there.

    A tensor of PyTorch and an ``mx.nd.NDArray`` stay what they are; other arrays become CuPy's
    on a GPU, and NumPy's on a CPU unless they live there already. What is on its context
    already is not copied. Raises as ``split_data`` does, and ``ArgumentTypeError`` for a list
    that holds anything but contexts.
    """
    if not isinstance(ctx_list, list | tuple):
        raise ArgumentTypeError(
            f"ctx_list is a list of contexts such as [mx.cpu(0)], got {type(ctx_list).__name__}"
        )
    for context in ctx_list:
        if not isinstance(context, Context):
            raise ArgumentTypeError(f"ctx_list holds {context!r}, which is no context")
    slices = split_data(data, len(ctx_list), batch_axis, even_split)
    return [_loaded(part, context) for part, context in zip(slices, ctx_list, strict=True)]


def _batch_size(data: Array, batch_axis: int) -> int:
    shape = adapter_for(data).shape(data)
    if isinstance(batch_axis, bool) or not isinstance(batch_axis, int):
        raise ArgumentTypeError(f"batch_axis must be an int, got {batch_axis!r}")
    if not 0 <= batch_axis < len(shape):
        raise ArgumentValueError(f"an array of shape {shape} has no axis {batch_axis}")
    return shape[batch_axis]


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ArgumentValueError(f"{name} must be at least 1, got {value}")


def _loaded(part: Array, context: Context) -> Array:
    if isinstance(part, NDArray):
        return part.as_in_context(context)
    adapter = adapter_for(part)
    home = adapter.context(part)
    if home == context or home.device_type == context.device_type == "cpu":
        return part
    if hasattr(part, "requires_grad"):  # a tensor: it knows its way by itself
        on_gpu = context.device_type == "gpu"
        return part.to(f"cuda:{context.device_id}" if on_gpu else "cpu")
    return adapter_on(context).to_context(part, context)
