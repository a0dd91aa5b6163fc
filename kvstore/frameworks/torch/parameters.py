"""Send the parameters, optimizer states and objects of one rank to all ranks.

A script calls these functions once, before its first step. Tensors are sent unchanged, other values
by the rules of ``kv.broadcast_object``: nothing is pickled. All ranks make the same calls, which
wait.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvstore.errors import ArgumentTypeError
from kvstore.frameworks.torch.store import store_of
from kvstore.frameworks.torch.tensors import array_of, contiguous, fill
from kvstore.stores.dist.store import DistKVStore
from pslite.errors import UsageError

Named = Iterable[tuple[str, torch.Tensor]]


def broadcast_parameters(
    params: torch.nn.Module | Mapping[str, torch.Tensor] | Named,
    root_rank: int = 0,
    kv: DistKVStore | None = None,
) -> None:
    """Copy the tensors of rank ``root_rank`` into those of all ranks, in place.

    ``params`` is a module (parameters and buffers), its ``state_dict()`` or pairs of a name and a
    tensor. Names, shapes and dtypes must be the same on all ranks. Tensors on a GPU are copied
    through the host.

    Raises:
        ArgumentTypeError: a value is not a tensor.
        UsageError: the ranks have different tensors; all ranks raise the same error.
    """
    store = store_of(kv)
    named = _named(params)
    check_alike(store, named, "the tensors of broadcast_parameters")
    with torch.no_grad():
        hosts = [tensor.detach().cpu() for _, tensor in named]
        arrays = [contiguous(host) for host in hosts]
        futures = [store.communicator.broadcast(array, root_rank) for array in arrays]
        store.wait(futures)
        if store.rank == root_rank:
            return
        for (_, tensor), host, array in zip(named, hosts, arrays, strict=True):
            fill(host, array)
            if not _is_same_memory(host, tensor):
                tensor.detach().copy_(host)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, kv: DistKVStore | None = None
) -> None:
    """Load the optimizer's ``state_dict`` of rank ``root_rank`` on all ranks.

    Raises ``ArgumentTypeError`` on all ranks if it contains an object of a class.
    """
    store = store_of(kv)
    is_root = store.rank == root_rank
    found = torch.optim.Optimizer.state_dict(optimizer) if is_root else None
    found = store.broadcast_object(found, root_rank)
    if not is_root:
        torch.optim.Optimizer.load_state_dict(optimizer, _with_tensors(found))


def broadcast_object(obj: object = None, root_rank: int = 0, kv: DistKVStore | None = None) -> Any:
    """Return the object of rank ``root_rank``; see ``kv.broadcast_object``.

    Tensors arrive as NumPy arrays.
    """
    return store_of(kv).broadcast_object(obj, root_rank)


def check_alike(store: DistKVStore, named: Sequence[tuple[str, torch.Tensor]], whose: str) -> None:
    """Raise on all ranks unless their tensors have the same names, shapes and dtypes."""
    mine = [f"{name}: {tuple(each.shape)} of {each.dtype}" for name, each in named]
    gathered = store.all_gather(np.frombuffer(json.dumps(mine).encode(), np.uint8))
    texts = [json.loads(bytes(each)) for each in gathered]
    for rank, text in enumerate(texts):
        if text == texts[0]:
            continue
        pairs = list(zip(texts[0], text, strict=False))
        place = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
        one, other = (each[place] if place < len(each) else "nothing" for each in (texts[0], text))
        raise UsageError(
            f"{whose} must be the same on all ranks, in the same order: number {place} is {one} "
            f"on rank 0 and {other} on rank {rank}"
        )


def _named(params: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, torch.nn.Module):
        params = params.state_dict()
    pairs = list(params.items() if isinstance(params, Mapping) else params)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
            raise ArgumentTypeError(
                "params must be a module, its state_dict() or named_parameters(), got an item "
                f"{pair!r:.80}; give other values to broadcast_object"
            )
    return pairs


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.device == other.device and one.data_ptr() == other.data_ptr())


def _with_tensors(value: Any) -> Any:
    """Return the object with tensors instead of arrays."""
    if isinstance(value, np.ndarray):
        tensor = torch.empty(value.shape, dtype=_torch_dtype(value.dtype))
        array_of(tensor)[...] = value
        return tensor
    if isinstance(value, dict):
        return {key: _with_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_with_tensors, value))
    return value


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.name)
    return found
