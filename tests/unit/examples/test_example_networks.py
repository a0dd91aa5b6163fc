"""The example networks: gradients against differences, and layers against their definition."""

from __future__ import annotations

import itertools
import sys
import types
from typing import Any

import numpy as np
import pytest
from layers import (
    array_module,
    max_pool,
    max_pool_backward,
    patches,
    softmax_cross_entropy,
    unpatches,
)
from lenet import LeNet
from mlp import MLP

SMALL_LENET = LeNet(num_classes=3, filters=(2, 3), hidden=5, kernel=3)
SMALL_MLP = MLP(num_classes=3, hidden=(6, 5))


def params_of(network: Any, shape: tuple[int, ...], seed: int) -> dict[str, np.ndarray]:
    """Parameters in float64, with biases that are not zero."""
    rng = np.random.default_rng(seed)
    params = network.init_params(shape, rng)
    return {name: value + rng.normal(0, 0.05, value.shape) for name, value in params.items()}


@pytest.mark.parametrize(
    ("network", "shape"),
    [
        (SMALL_LENET, (1, 10, 10)),
        (SMALL_LENET, (10, 14)),
        (SMALL_LENET, (2, 10, 10)),
        (SMALL_MLP, (1, 3, 3)),
        (SMALL_MLP, (7,)),
    ],
)
def test_gradients_equal_differences_of_the_loss(network: Any, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(0, 1, (4, *shape)), rng.integers(0, 3, 4)
    params = params_of(network, shape, seed=2)
    _, _, gradients = network.loss_and_gradients(params, x, y)
    assert gradients.keys() == params.keys()
    step = 1e-6
    for name, value in params.items():
        assert gradients[name].shape == value.shape
        for index in rng.choice(value.size, min(value.size, 12), replace=False):
            place = np.unravel_index(index, value.shape)
            losses = []
            for sign in (1, -1):
                moved = {**params, name: value.copy()}
                moved[name][place] += sign * step
                losses.append(network.loss_and_gradients(moved, x, y)[0])
            difference = (losses[0] - losses[1]) / (2 * step)
            assert gradients[name][place] == pytest.approx(difference, rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize(("network", "shape"), [(SMALL_LENET, (1, 10, 10)), (SMALL_MLP, (9,))])
def test_loss_and_right_answers_agree_with_the_prediction(
    network: Any, shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(3)
    x, y = rng.normal(0, 1, (6, *shape)), rng.integers(0, 3, 6)
    params = params_of(network, shape, seed=4)
    probabilities = network.predict(params, x)
    loss_sum, correct_count, _ = network.loss_and_gradients(params, x, y)
    assert probabilities.shape == (6, 3)
    assert np.allclose(probabilities.sum(axis=1), 1)
    assert loss_sum == pytest.approx(-np.log(probabilities[range(6), y]).sum())
    assert correct_count == (probabilities.argmax(axis=1) == y).sum()


@pytest.mark.parametrize(("network", "shape"), [(SMALL_LENET, (1, 10, 10)), (SMALL_MLP, (9,))])
def test_gradients_of_parts_of_a_batch_add_up_to_those_of_the_whole(
    network: Any, shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(5)
    x, y = rng.normal(0, 1, (6, *shape)), rng.integers(0, 3, 6)
    params = params_of(network, shape, seed=6)
    whole = network.loss_and_gradients(params, x, y)[2]
    parts = [
        network.loss_and_gradients(params, x[part], y[part])[2] for part in (slice(2), slice(2, 6))
    ]
    for name, gradient in whole.items():
        assert np.allclose(parts[0][name] + parts[1][name], gradient)


def test_the_library_of_an_array_is_the_one_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = types.ModuleType("cupy")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    on_gpu = type("ndarray", (), {"__module__": "cupy._core.core"})()
    assert array_module(on_gpu) is cupy
    assert array_module(np.zeros(1)) is np


@pytest.mark.parametrize("network", [LeNet(), MLP()])
def test_float32_stays_float32_and_nothing_given_is_changed(network: Any) -> None:
    rng = np.random.default_rng(7)
    x, y = rng.random((4, 1, 28, 28), dtype=np.float32), np.array([3, 0, 9, 1])
    params = network.init_params((1, 28, 28), rng)
    before = {name: value.copy() for name, value in params.items()}
    for array in (x, y, *params.values()):
        array.flags.writeable = False
    _, _, gradients = network.loss_and_gradients(params, x, y)
    dtypes = {value.dtype for value in (*params.values(), *gradients.values())}
    assert dtypes == {np.dtype(np.float32)}
    assert network.predict(params, x).dtype == np.float32
    assert all(np.array_equal(params[name], before[name]) for name in before)


def test_lenet_has_the_layers_of_the_original() -> None:
    params = LeNet().init_params((1, 28, 28), np.random.default_rng(0))
    assert {name: value.shape for name, value in params.items()} == {
        "conv1_weight": (20, 25),
        "conv1_bias": (20,),
        "conv2_weight": (50, 500),
        "conv2_bias": (50,),
        "fc1_weight": (500, 800),
        "fc1_bias": (500,),
        "fc2_weight": (10, 500),
        "fc2_bias": (10,),
    }


def test_lenet_equals_its_definition_pixel_by_pixel() -> None:
    params = params_of(SMALL_LENET, (1, 10, 10), seed=8)
    x = np.random.default_rng(9).normal(0, 1, (2, 1, 10, 10))
    expected = np.stack([lenet_by_definition(params, image) for image in x])
    assert np.allclose(SMALL_LENET.predict(params, x), expected)


def lenet_by_definition(params: dict[str, np.ndarray], image: np.ndarray) -> np.ndarray:
    """Convolve, tanh, then pool, as the original orders them."""
    for name in ("conv1", "conv2"):
        filters = params[f"{name}_weight"].reshape(-1, image.shape[0], 3, 3)
        size = image.shape[1] - 2
        sums = np.zeros((len(filters), size, size))
        for number, row, column in itertools.product(range(len(filters)), range(size), range(size)):
            window = image[:, row : row + 3, column : column + 3]
            sums[number, row, column] = (window * filters[number]).sum()
        responses = np.tanh(sums + params[f"{name}_bias"][:, None, None])
        image = responses.reshape(len(filters), size // 2, 2, size // 2, 2).max(axis=(2, 4))
    hidden = np.tanh(params["fc1_weight"] @ image.ravel() + params["fc1_bias"])
    scores = np.exp(params["fc2_weight"] @ hidden + params["fc2_bias"])
    return scores / scores.sum()


def test_unpatches_is_the_transpose_of_patches() -> None:
    rng = np.random.default_rng(10)
    images = rng.normal(0, 1, (2, 6, 7, 3))
    columns = patches(images, 3)
    assert columns.shape == (2 * 9, 4 * 5 * 3)
    other = rng.normal(0, 1, columns.shape)
    assert (columns * other).sum() == pytest.approx(
        (images * unpatches(other, images.shape, 3)).sum()
    )


def test_each_column_is_one_patch() -> None:
    images = np.arange(2 * 4 * 5 * 2, dtype=np.float32).reshape(2, 4, 5, 2)
    columns = patches(images, 3).reshape(2, 3, 3, 2, 3, 2)
    assert np.array_equal(columns[:, :, :, 1, 2, 1], images[:, 1:4, 2:5, 1])


def test_the_gradient_of_an_even_square_goes_to_one_pixel_only() -> None:
    images = np.zeros((1, 2, 4, 1), np.float32)
    images[0, 1, 2, 0] = 5
    largest, choice = max_pool(images)
    gradient = max_pool_backward(np.array([[[[2.0], [3.0]]]], np.float32), choice)
    assert largest.ravel().tolist() == [0, 5]
    assert gradient[0, :, :, 0].tolist() == [[2, 0, 0, 0], [0, 0, 3, 0]]


def test_large_scores_neither_overflow_nor_give_an_endless_loss() -> None:
    scores = np.array([[1e4, -1e4], [-1e4, 1e4]], np.float32)
    loss_sum, correct_count, gradient = softmax_cross_entropy(scores, np.array([0, 0]))
    assert np.isfinite(loss_sum)
    assert loss_sum > 50
    assert correct_count == 1
    assert gradient.tolist() == [[0, -1], [0, 1]]
