"""What SGLD draws: normal numbers that depend on seed, key and count, and on nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvstore as mx
from kvstore.arrays.cpu.sums import Workspace, apply_round
from kvstore.errors import OptimizerParameterError
from kvstore.optimizer import SGLD

KEY = "w"


def noise(chosen: Any = None, count: int = 1, *, key: str = KEY, length: int = 1000) -> Any:
    """What one update without a gradient adds to zeros, for a rate of 1."""
    chosen = (chosen or SGLD(learning_rate=1.0)).for_key(key)
    weight = np.zeros(length, np.float32)
    apply_round(weight, [np.zeros_like(weight)], chosen, (), count, Workspace())
    return weight


def test_noise_is_normal_and_has_the_variance_of_the_rate() -> None:
    drawn = noise(SGLD(learning_rate=0.04), length=200_000)
    assert abs(drawn.mean()) < 5 * 0.2 / np.sqrt(200_000)
    assert drawn.std() == pytest.approx(0.2, rel=0.01)
    within = (np.abs(drawn) < 0.2).mean()
    assert within == pytest.approx(0.6827, abs=0.01)  # of a normal distribution
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.02


def test_noise_is_the_same_again_for_the_same_seed_key_and_update() -> None:
    first = noise().tobytes()
    assert noise(SGLD(learning_rate=1.0, seed=0)).tobytes() == first
    others = [noise(SGLD(learning_rate=1.0, seed=1)), noise(count=2), noise(key="v")]
    assert len({first, *(other.tobytes() for other in others)}) == 4
    for other in others:
        assert abs(np.corrcoef(noise(), other)[0, 1]) < 0.15


def test_a_multiplier_of_a_key_scales_its_noise_and_changes_no_draw() -> None:
    slower = SGLD(learning_rate=1.0, lr_mult={KEY: 0.25})
    np.testing.assert_allclose(noise(slower), 0.5 * noise(), rtol=1e-6)
    assert not noise(SGLD(learning_rate=1.0, lr_mult={KEY: 0.0})).any()


def test_longer_keys_begin_with_the_same_noise() -> None:
    assert noise(length=200_000)[:1000].tobytes() == noise().tobytes()


def test_a_store_draws_the_noise_of_the_formula_for_each_key() -> None:
    store = mx.create("local")
    store.set_optimizer(SGLD(learning_rate=1.0))
    store.init([KEY, "v"], [np.zeros(1000, np.float32)] * 2)
    store.push([KEY, "v"], [np.zeros(1000, np.float32)] * 2)
    assert store.pull(KEY).tobytes() == noise().tobytes()
    assert store.pull("v").tobytes() == noise(key="v").tobytes()


class Elsewhere:
    """Memory on a device: what is drawn on the host is set."""

    def __init__(self, length: int) -> None:
        self.host = np.full(length, np.nan, np.float32)
        self.dtype = self.host.dtype

    def __len__(self) -> int:
        return len(self.host)

    def set(self, values: Any) -> None:
        self.host[...] = values


def test_a_device_gets_the_noise_of_the_host() -> None:
    from kvstore.optimizer.sgd import _draw

    chosen: Any = SGLD(learning_rate=1.0).for_key(KEY)
    there = Elsewhere(1000)
    _draw(chosen._generator(1), there)
    assert there.host.tobytes() == noise().tobytes()


def test_a_rate_below_zero_is_refused() -> None:
    with pytest.raises(OptimizerParameterError, match="learning_rate of SGLD must not be negative"):
        SGLD(learning_rate=-1.0)
