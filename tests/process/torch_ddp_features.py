"""DistributedDataParallel in all its forms, tried by two ranks on the CPU.

Each function compares with one process where that can do the same, and returns tensors that must be
alike on all ranks and with every backend. ``torch_features.py`` has what else PyTorch builds on a
process group.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

SIZE, BATCH, STEPS = 2, 8, 4
Tensors = list[torch.Tensor]
Feature = Callable[[int, Path], Tensors]
NOT_WITH_GLOO = ("zero_overlap",)
"""PyTorch raises an error there, since it may hang."""


class Halves(nn.Module):
    """Each pass uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[which](x)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def batch(step: int, *ranks: int) -> torch.Tensor:
    """The inputs of these ranks, one after the other."""
    whole = torch.randn(SIZE, BATCH, 6, generator=torch.Generator().manual_seed(step))
    return torch.cat([whole[rank] for rank in ranks])


def loss_of(net: nn.Module, *inputs: Any) -> torch.Tensor:
    return net(*inputs).square().mean()


def step_with(optimizer: torch.optim.Optimizer, net: nn.Module, step: int, *ranks: int) -> None:
    optimizer.zero_grad()
    loss_of(net, batch(step, *ranks)).backward()
    optimizer.step()


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, *ranks: int) -> Tensors:
    for step in range(STEPS):
        step_with(optimizer, net, step, *ranks)
    return weights(net)


def weights(net: nn.Module) -> Tensors:
    return [each.detach().clone() for each in net.parameters()]


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01)


def alike(ours: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> Tensors:
    found, expected = list(ours), list(others)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    return found


def alone(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Tensors:
    """The weights that one process reaches with the batch of all ranks."""
    net = network()
    return trained(net, make(net), *range(SIZE))


# -- DistributedDataParallel ---------------------------------------------------------------------


def ddp_static_graph(rank: int, folder: Path) -> Tensors:
    net = DistributedDataParallel(network(), static_graph=True, bucket_cap_mb=0.0001)
    return alike(trained(net, sgd(net), rank), alone(sgd))


def ddp_unused_parameters(rank: int, folder: Path) -> Tensors:
    """In each step, the ranks use different layers, and then all the same one."""
    nets = [DistributedDataParallel(Halves(), find_unused_parameters=True), Halves()]
    optimizers = [*map(sgd, nets)]
    for step in range(STEPS):
        used = [(step + each) % 2 if step < 2 else 0 for each in range(SIZE)]
        optimizers[0].zero_grad()
        loss_of(nets[0], batch(step, rank), used[rank]).backward()
        optimizers[1].zero_grad()
        for each in range(SIZE):
            (loss_of(nets[1], batch(step, each), used[each]) / SIZE).backward()
        for optimizer in optimizers:
            optimizer.step()
    return alike(*map(weights, nets))


def ddp_no_sync(rank: int, folder: Path) -> Tensors:
    """Two passes for each step, of which the second adds up the gradients."""
    net, single = DistributedDataParallel(network()), network()
    optimizer, reference = sgd(net), sgd(single)
    for step in range(STEPS):
        optimizer.zero_grad()
        with net.no_sync():
            loss_of(net, batch(step, rank)).backward()
        loss_of(net, batch(step + STEPS, rank)).backward()
        optimizer.step()
        reference.zero_grad()
        for each in (step, step + STEPS):
            loss_of(single, batch(each, *range(SIZE))).backward()
        reference.step()
    return alike(weights(net), weights(single))


def ddp_join(rank: int, folder: Path) -> Tensors:
    """Rank 1 has two batches more; rank 0 counts as zeros there."""
    net, single = DistributedDataParallel(network()), network()
    optimizer, reference = sgd(net), sgd(single)
    with net.join():
        for step in range(3 + 2 * rank):
            step_with(optimizer, net, step, rank)
    for step in range(5):
        reference.zero_grad()
        for each in range(SIZE):
            if step < 3 + 2 * each:
                (loss_of(single, batch(step, each)) / SIZE).backward()
        reference.step()
    return alike(weights(net), weights(single))


def ddp_sparse_embedding(rank: int, folder: Path) -> Tensors:
    def embedding() -> nn.Embedding:
        torch.manual_seed(3)
        return nn.Embedding(10, 3, sparse=True)

    net, single = DistributedDataParallel(embedding()), embedding()
    rows = [torch.tensor([each, 5, 5]) for each in range(SIZE)]
    loss_of(net, rows[rank]).backward()
    loss_of(single, torch.cat(rows)).backward()
    found, expected = net.module.weight.grad, single.weight.grad
    assert found.is_sparse
    return alike([found.to_dense()], [expected.to_dense()])


def ddp_hooks(rank: int, folder: Path) -> Tensors:
    """PowerSGD of rank 1 begins with the third step; fp16 halves what is sent."""
    found: Tensors = []
    exact = alone(sgd)
    for hook, state in (
        (default_hooks.allreduce_hook, None),
        (default_hooks.fp16_compress_hook, None),
        (powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(None, 1, 2)),
    ):
        net = DistributedDataParallel(network())
        net.register_comm_hook(state, hook)
        reached = trained(net, sgd(net), rank)
        torch.testing.assert_close(reached, exact, atol=0.1, rtol=0)
        found += reached
    return found


def ddp_post_local_sgd(rank: int, folder: Path) -> Tensors:
    """The subgroup of the hook is the whole group, so that all ranks stay alike."""
    net, (part, _) = DistributedDataParallel(network()), dist.new_subgroups(SIZE)
    state = post_localSGD_hook.PostLocalSGDState(None, part, 2)
    net.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return alike(trained(net, sgd(net), rank), alone(sgd))


DDP: dict[str, Feature] = {
    function.__name__: function
    for function in (
        *(ddp_static_graph, ddp_unused_parameters, ddp_no_sync, ddp_join),
        *(ddp_sparse_embedding, ddp_hooks, ddp_post_local_sgd),
    )
}


# -- the ranks -----------------------------------------------------------------------------------


def run(features: Mapping[str, Feature], backends: Sequence[str], folder: Path) -> None:
    """Try the features with each backend; print the name of each that works."""
    rank = int(os.environ["RANK"])
    found: dict[str, Tensors] = {}
    for backend in backends:
        dist.init_process_group(
            backend, init_method=f"file://{folder / backend}", rank=rank, world_size=SIZE
        )
        for name, feature in features.items():
            if backend == "gloo" and name in NOT_WITH_GLOO:
                continue
            torch.manual_seed(7)
            tensors = feature(rank, folder / f"{backend} {name}")
            check_ranks(tensors)
            first = found.setdefault(name, tensors)
            torch.testing.assert_close(tensors, first, atol=1e-6, rtol=0)
            print(backend, name, flush=True)
        dist.destroy_process_group()


def check_ranks(tensors: Tensors) -> None:
    """All ranks must have the same bits."""
    for tensor in tensors:
        everywhere = [torch.empty_like(tensor) for _ in range(SIZE)]
        dist.all_gather(everywhere, tensor)
        assert all(torch.equal(tensor, each) for each in everywhere)
