"""A small training that ranks do together, and one process by itself: for tests of optimizers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import mse_loss

_generator = threading.Lock()  # PyTorch has one for all threads
ROWS = 8
"""Of a rank's batch."""


def net(seed: int = 3) -> torch.nn.Sequential:
    with _generator, torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(6, 40), torch.nn.ReLU(), torch.nn.Linear(40, 20), torch.nn.Linear(20, 2)
        )


def batch(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of one rank; of all ranks for rank -1."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ROWS * size, width, generator=generator) for width in (6, 2))
    mine = slice(None) if rank < 0 else slice(ROWS * rank, ROWS * rank + ROWS)
    return x[mine], y[mine]


def train(
    model: Any,
    optimizer: Any,
    steps: int,
    rank: int,
    size: int,
    *,
    before_step: Callable[[], Any] = lambda: None,
    after_step: Callable[[], Any] = lambda: None,
) -> list[torch.Tensor]:
    for step in range(steps):
        x, y = batch(step, rank, size)
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        before_step()
        optimizer.step()
        after_step()
    return weights(model)


def weights(model: Any) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [each.numpy().tobytes() for each in tensors]


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor], atol: float = 1e-5) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)
