"""Residual networks for 32 x 32 images in PyTorch, of all depths that their formulas allow.

``resnet``: K. He et al., "Deep Residual Learning for Image Recognition", arXiv 1512.03385, section
4.2: 6n + 2 layers. ``resnext``: S. Xie et al., "Aggregated Residual Transformations", arXiv
1611.05431, in the form of MXNet's ``example/image-classification/symbols/resnext.py`` (1.x), and
in the paper's own for CIFAR (section 5.3). Here, ``cifar.py`` normalises pixels before the
network, where MXNet uses a batch norm. This file only makes modules; initial values come from
torch's random numbers, so ``torch.manual_seed`` decides them. Read next:
``torch_training.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pslite.errors import UsageError

NUM_STAGES = 3
"""One stage each for maps of 32 x 32, 16 x 16 and 8 x 8."""

FIRST_GROUPED_DEPTH = 164
"""From this depth, MXNet's ``resnext`` uses three layers per unit if both formulas fit."""


class ResidualNetwork(nn.Module):  # type: ignore[misc]
    """A convolution, three stages of units, the mean of each map, and a linear layer.

    Takes (N, 3, H, W) float32 and returns scores, (N, num_classes).
    """

    def __init__(self, stem: int, stages: list[nn.Sequential], width: int, num_classes: int):
        super().__init__()
        self.stem = nn.Sequential(*convolution(3, stem), nn.ReLU())
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.stages(self.stem(images))
        scores: Tensor = self.classifier(maps.mean(dim=(2, 3)))
        return scores


class Unit(nn.Module):  # type: ignore[misc]
    """relu(body(x) + shortcut(x))."""

    def __init__(self, body: list[nn.Module], shortcut: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)
        self.shortcut = shortcut

    def forward(self, maps: Tensor) -> Tensor:
        total: Tensor = self.body(maps) + self.shortcut(maps)
        return functional.relu(total)


class PaddedShortcut(nn.Module):  # type: ignore[misc]
    """Every second pixel, and zeros as the new channels: the paper's option A, no parameters."""

    def __init__(self, added_channels: int, stride: int) -> None:
        super().__init__()
        self.added_channels = added_channels
        self.stride = stride

    def forward(self, maps: Tensor) -> Tensor:
        kept = maps[:, :, :: self.stride, :: self.stride]
        return functional.pad(kept, (0, 0, 0, 0, 0, self.added_channels))


def resnet(num_layers: int, num_classes: int = 10) -> ResidualNetwork:
    """He et al.'s network of ``num_layers`` = 6n + 2: units of two 3 x 3 convolutions.

    Raises ``UsageError`` for another depth.
    """
    if num_layers < 8 or (num_layers - 2) % 6:
        raise UsageError(
            f"resnet has 6n + 2 layers on images of 32 x 32 (8, 14, 20, 26, 32, ... 110), and "
            f"there is no n for --num-layers {num_layers}"
        )
    units_each = (num_layers - 2) // 6
    stages, width = [], 16
    for index in range(NUM_STAGES):
        outputs = 16 * 2**index
        units = []
        for position in range(units_each):
            stride = 2 if index > 0 and position == 0 else 1
            same = stride == 1 and width == outputs
            shortcut = nn.Identity() if same else PaddedShortcut(outputs - width, stride)
            units.append(Unit(two_layers(width, outputs, stride), shortcut))
            width = outputs
        stages.append(nn.Sequential(*units))
    return ResidualNetwork(16, stages, width, num_classes)


def resnext(
    num_layers: int, num_classes: int = 10, num_group: int = 32, group_width: int | None = None
) -> ResidualNetwork:
    """Xie et al.'s network of 9n + 2 layers, or 6n + 2, whose units are too short for groups.

    As in MXNet, units have two ungrouped 3 x 3 convolutions when ``num_layers`` is 6n + 2 and
    below 164 (so 110 is one of these), and a shortcut with a convolution where each stage
    begins; else three layers, the middle one of ``num_group`` groups, over 64, 128 and 256
    channels. With ``group_width`` the network is the paper's: ``resnext(29, num_group=8,
    group_width=64)`` is its ResNeXt-29, 8x64d. Raises ``UsageError`` for another depth.
    """
    three_layers_fit = num_layers >= 11 and (num_layers - 2) % 9 == 0
    two_layers_fit = group_width is None and num_layers >= 8 and (num_layers - 2) % 6 == 0
    if two_layers_fit and not (three_layers_fit and num_layers >= FIRST_GROUPED_DEPTH):
        return _projected(16, [16, 32, 64], (num_layers - 2) // 6, num_classes, None, None)
    if not three_layers_fit:
        raise UsageError(
            f"resnext has 9n + 2 layers (29, 38, 47, ...) or 6n + 2 (20, 32, 50, 110, ...) on "
            f"images of 32 x 32, and there is no n for --num-layers {num_layers}"
        )
    stem, outputs = (16, [64, 128, 256]) if group_width is None else (64, [256, 512, 1024])
    inner = [
        channels // 2 if group_width is None else num_group * group_width * 2**index
        for index, channels in enumerate(outputs)
    ]
    if num_group < 1 or inner[0] < 1 or inner[0] % num_group:
        raise UsageError(
            f"the {inner[0]} channels inside the first units cannot be cut into {num_group} "
            f"groups; take a --num-group that divides them"
        )
    return _projected(stem, outputs, (num_layers - 2) // 9, num_classes, inner, num_group)


def _projected(
    stem: int,
    outputs: list[int],
    units_each: int,
    num_classes: int,
    inner: list[int] | None,
    num_group: int | None,
) -> ResidualNetwork:
    """A network whose stages begin with a 1 x 1 convolution as the shortcut."""
    stages, width = [], stem
    for index, channels in enumerate(outputs):
        units = []
        for position in range(units_each):
            stride = 2 if index > 0 and position == 0 else 1
            if inner is None or num_group is None:
                body = two_layers(width, channels, stride)
            else:
                body = three_layers(width, inner[index], channels, stride, num_group)
            shortcut: nn.Module = nn.Identity()
            if position == 0:
                shortcut = nn.Sequential(*convolution(width, channels, 1, stride))
            units.append(Unit(body, shortcut))
            width = channels
        stages.append(nn.Sequential(*units))
    return ResidualNetwork(stem, stages, width, num_classes)


def two_layers(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    """The part that a unit without groups adds to its input."""
    return [
        *convolution(inputs, outputs, 3, stride),
        nn.ReLU(),
        *convolution(outputs, outputs),
    ]


def three_layers(
    inputs: int, inner: int, outputs: int, stride: int, num_group: int
) -> list[nn.Module]:
    """The part that a unit with groups adds to its input: 1 x 1, grouped 3 x 3, 1 x 1."""
    return [
        *convolution(inputs, inner, 1),
        nn.ReLU(),
        *convolution(inner, inner, 3, stride, num_group),
        nn.ReLU(),
        *convolution(inner, outputs, 1),
    ]


def convolution(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, num_group: int = 1
) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """A convolution that keeps the size of the maps (but for ``stride``), and its batch norm."""
    return (
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=num_group, bias=False),
        nn.BatchNorm2d(outputs),
    )


def num_parameters(network: nn.Module) -> int:
    """The number of trained numbers."""
    return sum(parameter.numel() for parameter in network.parameters())


def decay_factors(network: nn.Module) -> dict[str, float]:
    """``wd_mult`` of an optimizer: 0 for biases, and for scales and shifts of batch norms.

    These are the vectors; only filters and matrices decay. MXNet's optimizers also exclude biases
    and shifts, but let scales (gamma) decay.
    """
    return {name: 0.0 for name, value in network.named_parameters() if value.ndim == 1}


NETWORKS = {"resnet": resnet, "resnext": resnext}


def create(network: str, num_layers: int, num_group: int, seed: int) -> ResidualNetwork:
    """A network of ``NETWORKS``; equal seeds give equal first values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if network == "resnet":
            return resnet(num_layers)
        return resnext(num_layers, num_group=num_group)
