"""Send models, optimizers and objects of one rank to all ranks; nothing is pickled.

Objects may contain what ``kvstore.horovod`` allows, and tensors. Tensors are sent as arrays and
arrive as tensors on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kvstore.errors import ArgumentTypeError
from kvstore.frameworks.horovod import objects, session
from kvstore.frameworks.horovod.session import ProcessSet, global_process_set
from kvstore.frameworks.horovod.torch import operations
from kvstore.frameworks.torch.tensors import contiguous

_TENSOR = "\0tensor"


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Fill tensors with those of rank ``root_rank``.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, or a list of tensors.
    """
    if isinstance(params, Mapping):
        pairs: list[Any] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
        pairs = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise ArgumentTypeError(
            f"params must be a state_dict or a list of tensors, got {type(params).__name__}"
        )
    handles = [
        operations.broadcast_async_(tensor, root_rank, name, process_set)
        for name, tensor in pairs
        if isinstance(tensor, torch.Tensor)
    ]
    for handle in handles:
        handle.result()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None
) -> None:
    """Load the state and options of rank ``root_rank``'s optimizer on all ranks.

    An optimizer that was not used yet has no state; then only its options are sent. ``model`` is
    only for compatibility.
    """
    state = broadcast_object(optimizer.state_dict(), root_rank)
    if session.rank() != root_rank:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of a global rank on all ranks; see ``kvstore.horovod``."""
    is_root = session.rank() == root_rank
    found = objects.broadcast_object(
        _without_tensors(obj) if is_root else None, root_rank, name, process_set
    )
    return obj if is_root else _with_tensors(found)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order; see ``kvstore.horovod``."""
    return [
        _with_tensors(each)
        for each in objects.allgather_object(_without_tensors(obj), name, process_set)
    ]


def _without_tensors(value: Any) -> Any:
    """Return the value with each tensor as a tuple of a mark, a dtype and its bytes."""
    if isinstance(value, torch.Tensor):
        data = contiguous(value.detach().cpu().reshape(-1)).view("u1")
        return (_TENSOR, str(value.dtype).removeprefix("torch."), tuple(value.shape), data)
    if isinstance(value, dict):
        return {_without_tensors(key): _without_tensors(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_without_tensors, value))
    return value


def _with_tensors(value: Any) -> Any:
    if type(value) is tuple and value[:1] == (_TENSOR,):
        _, dtype, shape, data = value
        found = torch.empty(shape, dtype=getattr(torch, dtype))
        if data.size:
            found.copy_(torch.from_numpy(data.copy()).view(found.dtype).reshape(shape))
        return found
    if isinstance(value, dict):
        return {key: _with_tensors(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_with_tensors, value))
    return value
