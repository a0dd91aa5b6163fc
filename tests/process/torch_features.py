"""What else than DistributedDataParallel PyTorch builds on a process group, tried by two ranks.

Functions as in ``torch_ddp_features.py``: they import more of PyTorch, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch_ddp_features import (
    BATCH,
    DDP,
    SIZE,
    STEPS,
    Feature,
    Tensors,
    adam,
    alike,
    alone,
    batch,
    loss_of,
    network,
    step_with,
    trained,
    weights,
)

# -- optimizers and weights that are spread over the ranks ---------------------------------------


def zero(rank: int, folder: Path) -> Tensors:
    net = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
    found = alike(trained(net, optimizer, rank), alone(adam))
    optimizer.consolidate_state_dict(0)
    assert rank or len(optimizer.state_dict()["state"]) == len(found)
    return found


def zero_join(rank: int, folder: Path) -> Tensors:
    """A rank that has joined goes on with its last gradients, unlike one process."""
    net = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
    with Join([net, optimizer]):
        for step in range(3 + 2 * rank):
            step_with(optimizer, net, step, rank)
    return weights(net)


def zero_overlap(rank: int, folder: Path) -> Tensors:
    """Steps overlap the backward pass; the first three passes only learn the order of buckets."""
    net = DistributedDataParallel(network(), static_graph=True)
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.01
    )
    hook = hook_with_zero_step(allreduce_hook, net, optimizer)
    net.register_comm_hook(None, hook)
    single = network()
    reference = adam(single)
    for step in range(STEPS + 3):
        net.zero_grad()
        loss_of(net, batch(step, rank)).backward()
        if step >= 3:
            step_with(reference, single, step, *range(SIZE))
    return alike(weights(net), weights(single))


def fsdp1(rank: int, folder: Path) -> Tensors:
    net = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    trained(net, adam(net), rank)
    with FullyShardedDataParallel.summon_full_params(net):
        flat = torch.cat([each.detach().flatten() for each in net.parameters()])
    return alike([flat], [torch.cat([each.flatten() for each in alone(adam)])])


def fsdp2(rank: int, folder: Path) -> Tensors:
    net = network()
    for layer in net[0], net[2]:
        fully_shard(layer)
    fully_shard(net)
    trained(net, adam(net), rank)
    return alike(whole(net), alone(adam))


def whole(net: nn.Module) -> Tensors:
    parameters: Iterable[Any] = net.parameters()
    return [each.full_tensor().detach() for each in parameters]


def checkpoints(rank: int, folder: Path) -> Tensors:
    """Of FSDP2 with its optimizer, and of plain tensors in the background."""
    nets = [network(), network()]
    optimizers = []
    for net in nets:
        fully_shard(net)
        optimizers.append(adam(net))
    step_with(optimizers[0], nets[0], 0, rank)
    states = [
        dict(zip(("net", "optimizer"), get_state_dict(net, optimizer), strict=True))
        for net, optimizer in zip(nets, optimizers, strict=True)
    ]
    checkpoint.save(states[0], checkpoint_id=folder / "saved")
    checkpoint.load(states[1], checkpoint_id=folder / "saved")
    set_state_dict(
        nets[1],
        optimizers[1],
        model_state_dict=states[1]["net"],
        optim_state_dict=states[1]["optimizer"],
    )
    for net, optimizer in zip(nets, optimizers, strict=True):
        step_with(optimizer, net, 1, rank)
    plain = {"tensor": torch.arange(5.0)}
    checkpoint.async_save(plain, checkpoint_id=folder / "background").result()
    loaded = {"tensor": torch.zeros(5)}
    checkpoint.load(loaded, checkpoint_id=folder / "background")
    alike(loaded.values(), plain.values())
    return alike(*map(whole, nets))


def dtensor(rank: int, folder: Path) -> Tensors:
    mesh = init_device_mesh("cpu", (SIZE,))
    x = torch.arange(21.0).reshape(7, 3)  # the shards differ in size
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    product = sharded @ sharded.T.redistribute(mesh, [Replicate()])
    columns = sharded.redistribute(mesh, [Shard(1)])
    found = [each.full_tensor() for each in (sharded, product, columns, sharded.sum())]
    return alike(found, [x, x @ x.T, x, x.sum()])


def tensor_parallel(rank: int, folder: Path) -> Tensors:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    net = parallelize_module(network(), init_device_mesh("cpu", (SIZE,)), plan)
    trained(net, adam(net), *range(SIZE))  # of all ranks the same batch
    return alike(whole(net), alone(adam))


def pipeline(rank: int, folder: Path) -> Tensors:
    """Rank 0 has the first layers and rank 1 the last; two parts of the batch go in turn."""
    net, single = network(), network()
    stage = PipelineStage(net[:2] if rank == 0 else net[2:], rank, SIZE, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda output, target: (output - target).mean())
    x, target = batch(0, 0), torch.zeros(BATCH, 2)
    schedule.step(x) if rank == 0 else schedule.step(target=target)
    (single(x) - target).mean().backward()
    layer = 0 if rank == 0 else 2
    alike([net[layer].weight.grad], [single[layer].weight.grad])
    return []


# -- objects, and calls that a compiler can see --------------------------------------------------


def objects(rank: int, folder: Path) -> Tensors:
    told: list[Any] = [{"rank": rank}, "text"]
    dist.broadcast_object_list(told, 1)
    assert told == [{"rank": 1}, "text"]
    gathered: list[Any] | None = [None] * SIZE if rank == 0 else None
    dist.gather_object((rank, "x"), gathered, 0)
    assert gathered == ([(0, "x"), (1, "x")] if rank == 0 else None)
    piece: list[Any] = [None]
    dist.scatter_object_list(piece, [["a"], {"b": 1}] if rank == 0 else None, 0)
    assert piece == [[["a"], {"b": 1}][rank]]
    if rank == 0:
        dist.send_object_list([1, "b"], 1)
        return []
    received: list[Any] = [None, None]
    dist.recv_object_list(received, 0)
    assert received == [1, "b"]
    return []


def functional_collectives(rank: int, folder: Path) -> Tensors:
    group, mine = dist.group.WORLD, torch.full((2,), float(rank))
    found = [
        functional.all_reduce(mine + 1, "sum", group),
        functional.all_gather_tensor(mine, 0, group),
        functional.reduce_scatter_tensor(torch.ones(4), "sum", 0, group),
        functional.all_to_all_single(mine, [1, 1], [1, 1], group),
        functional.broadcast(mine, 1, group),
        *functional.all_reduce_coalesced([mine, mine + 1], "max", group),
    ]
    lists = [[3, 3], [0, 0, 1, 1], [2, 2], [0, 1], [1, 1], [1, 1], [2, 2]]
    return alike([each + 0 for each in found], [torch.tensor(each).float() for each in lists])


FEATURES: dict[str, Feature] = DDP | {
    function.__name__: function
    for function in (
        *(zero, zero_join, zero_overlap, fsdp1, fsdp2, checkpoints, dtensor),
        *(tensor_parallel, pipeline, objects, functional_collectives),
    )
}
