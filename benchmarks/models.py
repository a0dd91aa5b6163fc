"""Tensor shapes of real models, for benchmarks: what a data-parallel step exchanges."""

from __future__ import annotations

import argparse

Shape = tuple[int, ...]


def resnet50() -> list[Shape]:
    """ResNet-50 (He et al. 2015, arXiv:1512.03385, table 1): 161 tensors, 25.6 M numbers."""
    shapes: list[Shape] = _conv_bn(64, 3, 7)
    width_in = 64
    for units, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for unit in range(units):
            shapes += _conv_bn(width, width_in, 1) + _conv_bn(width, width, 3)
            shapes += _conv_bn(4 * width, width, 1)
            if unit == 0:
                shapes += _conv_bn(4 * width, width_in, 1)
            width_in = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def resnet110() -> list[Shape]:
    """ResNet-110 for CIFAR-10 (same paper, section 4.2): 328 tensors, 1.7 M numbers."""
    shapes: list[Shape] = _conv_bn(16, 3, 3)
    width_in = 16
    for width in (16, 32, 64):
        for _ in range(18):
            shapes += _conv_bn(width, width_in, 3) + _conv_bn(width, width, 3)
            width_in = width
    return [*shapes, (10, 64)]


def lenet() -> list[Shape]:
    """LeNet as MXNet's MNIST example has it: 8 tensors, 0.4 M numbers."""
    return [(20, 1, 5, 5), (20,), (50, 20, 5, 5), (50,), (500, 800), (500,), (10, 500), (10,)]


def one_tensor() -> list[Shape]:
    """One tensor of 100 MB."""
    return [(25_000_000,)]


def _conv_bn(width: int, width_in: int, kernel: int) -> list[Shape]:
    return [(width, width_in, kernel, kernel), (width,), (width,)]


MODELS = {"resnet50": resnet50, "resnet110": resnet110, "lenet": lenet, "one": one_tensor}


def chosen(names: str) -> list[str]:
    """The models of a list with commas, for argparse: an unknown one is an error in words."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted or [names]:
        if name not in MODELS:
            raise argparse.ArgumentTypeError(
                f"there is no model {name!r}; the models are {', '.join(MODELS)}"
            )
    return wanted
