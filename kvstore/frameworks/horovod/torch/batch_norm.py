"""``SyncBatchNorm``: batch normalization with the mean and variance of all ranks.

It uses torch's own arithmetic and two differentiable calls of ``allreduce``, on CPUs and GPUs.
Ranks may have batches of different sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvstore.errors import ArgumentValueError
from kvstore.frameworks.horovod import session
from kvstore.frameworks.horovod.calls import ReduceOperation
from kvstore.frameworks.horovod.torch.gradients import allreduce


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):  # type: ignore[misc]
    """Normalizes inputs of shape (batch, channels, ...), like ``BatchNorm1d``.

    In evaluation, and with one rank, it does the same as torch's.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ArgumentValueError(
                f"expected an input of shape (batch, channels, ...), got {tuple(input.shape)}"
            )

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the input; in training, all ranks call it."""
        self._check_input_dim(input)
        by_batch = self.training or not self.track_running_stats
        if not by_batch or session.size() == 1:
            return super().forward(input)
        channels = input.size(1)
        rows = input.transpose(0, 1).reshape(channels, -1)
        count = rows.new_full((1,), rows.size(1))
        total = allreduce(torch.cat([rows.sum(1), count]), op=ReduceOperation.SUM)
        num = total[channels].detach()
        mean = total[:channels] / num
        squares = (rows - mean[:, None]).square().sum(1)
        variance = allreduce(squares, op=ReduceOperation.SUM) / num
        if self.training and self.track_running_stats:
            self._track(mean.detach(), (variance * num / (num - 1)).detach())
        shape = [1, channels] + [1] * (input.dim() - 2)
        scale = torch.rsqrt(variance + self.eps)
        found = (input - mean.view(shape)) * scale.view(shape)
        if self.affine:
            found = found * self.weight.view(shape) + self.bias.view(shape)
        return found

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards those of this batch."""
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:
            share = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)
