"""``KVStoreStrategy``: Lightning's Trainer with the optimizer on the servers.

::

    class Model(lightning.LightningModule):
        def configure_optimizers(self):
            return kvstore.torch.ServerOptimizer(self, optimizer="adam", lr=0.001)

    trainer = lightning.Trainer(strategy=kvstore.lightning.KVStoreStrategy())

Its public name is ``kvstore.lightning``. Each worker of the job is a rank with one Trainer and one
device; no process group is needed. The optimizer exchanges the gradients, and this strategy does
the rest with collective calls of a store. Runs on the Trainer's thread. Read next:
``torch/server_optimizer.py``. For DistributedDataParallel, Lightning's own strategies can use the
backend in ``torch/``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kvstore.errors import ArgumentTypeError, NotSupportedError
from kvstore.frameworks.torch import ServerOptimizer, broadcast_parameters
from kvstore.frameworks.torch.distributed_optimizer import AveragingOptimizer
from kvstore.frameworks.torch.store import store_of
from kvstore.frameworks.torch.tensors import fill, operation
from kvstore.stores.dist.store import DistKVStore

try:
    from lightning.pytorch.strategies import ParallelStrategy
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
except ModuleNotFoundError as error:
    if str(error.name).partition(".")[0] != "lightning":
        raise
    raise ModuleNotFoundError(
        "kvstore.lightning needs Lightning, which is not installed here: pip install lightning",
        name="lightning",
    ) from None

import torch

__all__ = ["KVStoreStrategy"]


class KVStoreStrategy(ParallelStrategy):  # type: ignore[misc]
    """A strategy for optimizers of ``kvstore.torch``.

    They are ``ServerOptimizer`` and ``DistributedOptimizer``. The module begins with rank 0's
    parameters and buffers. Each rank gets its share of the data (``DistributedSampler``), and rank
    0 writes the checkpoints.

    Args:
        kv: a distributed store for the strategy's own calls, which may be the optimizer's; None
            finds the job's (``kvstore.torch.init``).
        options: those of Lightning's ``ParallelStrategy``, such as ``checkpoint_io``.
    """

    is_distributed = True
    """Lightning reads this to give each rank its share of the data."""

    def __init__(self, kv: DistKVStore | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.kv = store_of(kv)

    @property
    def global_rank(self) -> int:
        return self.kv.rank

    @property
    def world_size(self) -> int:
        return self.kv.num_workers

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[self.local_rank % len(self.parallel_devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Tell the functions that Lightning runs only on rank 0 which rank this is."""
        rank_zero_only.rank = self.global_rank

    def model_to_device(self) -> None:
        """Move the module to its device, and give it rank 0's parameters and buffers."""
        self.model.to(self.root_device)
        broadcast_parameters(self.model, kv=self.kv)

    def setup_optimizers(self, trainer: Any) -> None:
        """Take the module's optimizers; raise ``ArgumentTypeError`` for other ones."""
        super().setup_optimizers(trainer)
        for each in self.optimizers:
            if not isinstance(each, ServerOptimizer | AveragingOptimizer):
                raise ArgumentTypeError(
                    "configure_optimizers must return a ServerOptimizer or DistributedOptimizer of "
                    f"kvstore.torch, since KVStoreStrategy leaves gradients to it, got a "
                    f"{type(each).__name__}"
                )

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """In this context, backward passes only add to the gradients."""
        with contextlib.ExitStack() as stack:
            for each in self.optimizers:
                stack.enter_context(each.no_sync())
            yield

    def barrier(self, name: str | None = None) -> None:
        self.kv.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src``; see ``kv.broadcast_object``."""
        return self.kv.broadcast_object(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Combine the tensors of all ranks; return anything else unchanged."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        _check(group)
        if not isinstance(reduce_op, str):
            reduce_op, factor = operation(reduce_op)
            if factor is not None:
                tensor = tensor * factor
                reduce_op = "sum"
        op = "average" if reduce_op in ("mean", "avg") else reduce_op
        result = tensor.detach().clone()
        self.kv.all_reduce(result, op, out=result)
        return result

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        """Return the tensors of all ranks, stacked by rank; they must have the same shape."""
        _check(group, sync_grads)
        found = self.kv.all_gather(tensor.detach())
        result = torch.empty((len(found), *tensor.shape), dtype=tensor.dtype)
        for row, array in zip(result, found, strict=True):
            fill(row, array)
        return result.to(tensor.device)


def _check(group: Any, sync_grads: bool = False) -> None:
    """Raise ``NotSupportedError`` for calls that need a process group."""
    if group is not None or sync_grads:
        raise NotSupportedError(
            "KVStoreStrategy has neither process groups nor gradients of all_gather: leave group "
            "and sync_grads out, or use DDPStrategy(process_group_backend='kvstore')"
        )
