"""Each optimizer against its paper's or MXNet's formula, written out anew in float64 NumPy.

The formulas here are written for reading, with new arrays at every step, and know nothing of
blocks, dtypes and scratch space.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import optimizer as opt
from kvstore.arrays.cpu.sums import Workspace, apply_round
from kvstore.errors import OptimizerParameterError
from kvstore.optimizer import Optimizer, arithmetic
from kvstore.optimizer.arithmetic import NORM_ELEMENTS, norm
from kvstore.optimizer.parameters import MODULES, registry
from kvstore.optimizer.schedule import FactorScheduler
from kvstore.optimizer.states import create_state

Array = Any
State = dict[str, Any]
Formula = Callable[[Any, Array, Array, State, int], Array]


def clipped(values: Array, limit: float | None) -> Array:
    return values if not limit else np.clip(values, -limit, limit)


def clip_then_decay(o: Any, w: Array, g: Array) -> Array:
    return clipped(o.rescale_grad * g, o.clip_gradient) + o.wd * w


def decay_then_clip(o: Any, w: Array, g: Array) -> Array:
    return clipped(o.rescale_grad * g + o.wd * w, o.clip_gradient)


def no_decay(o: Any, g: Array) -> Array:
    return clipped(o.rescale_grad * g, o.clip_gradient)


def moments(o: Any, g: Array, s: State) -> tuple[Array, Array]:
    s["m"] = o.beta1 * s.get("m", 0) + (1 - o.beta1) * g
    s["v"] = o.beta2 * s.get("v", 0) + (1 - o.beta2) * g**2
    return s["m"], s["v"]


def sgd(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    s["v"] = o.momentum * s.get("v", 0) - o.learning_rate * clip_then_decay(o, w, g)
    return w + s["v"]


def nag(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    g = clip_then_decay(o, w, g)
    before = s.get("v", 0)
    s["v"] = o.momentum * before - o.learning_rate * g
    if o.momentum == 0:
        return w + s["v"]
    return w - o.momentum * before + (1 + o.momentum) * s["v"]  # Bengio et al., equation 7


def torchsgd(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    g = clip_then_decay(o, w, g)
    if o.momentum:
        fresh = g if t == 1 else (1 - o.dampening) * g
        s["v"] = o.momentum * s.get("v", 0) + fresh
        g = g + o.momentum * s["v"] if o.nesterov else s["v"]
    return w - o.learning_rate * g


def adam(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    m, v = moments(o, decay_then_clip(o, w, g), s)
    if o.epsilon_corrected:  # algorithm 1 of the paper
        return w - o.learning_rate * (m / (1 - o.beta1**t)) / (
            np.sqrt(v / (1 - o.beta2**t)) + o.epsilon
        )
    rate = o.learning_rate * np.sqrt(1 - o.beta2**t) / (1 - o.beta1**t)
    return w - rate * m / (np.sqrt(v) + o.epsilon)


def adamw(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    m, v = moments(o, no_decay(o, g), s)
    c1, c2 = (1 - o.beta1**t, 1 - o.beta2**t) if o.correct_bias else (1, 1)
    if o.epsilon_corrected:
        step = (m / c1) / (np.sqrt(v / c2) + o.epsilon)
    else:
        step = np.sqrt(c2) / c1 * m / (np.sqrt(v) + o.epsilon)
    decay = o.wd * (np.sqrt(c2) / c1 if o.decay_corrected else 1)
    return w - o.learning_rate * (step + decay * w)


def adamax(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    g = decay_then_clip(o, w, g)
    s["m"] = o.beta1 * s.get("m", 0) + (1 - o.beta1) * g
    s["u"] = np.maximum(o.beta2 * s.get("u", 0), np.abs(g) + o.epsilon)
    return w - o.learning_rate / (1 - o.beta1**t) * s["m"] / s["u"]


def nadam(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    g = decay_then_clip(o, w, g)
    m, v = moments(o, g, s)
    mu = [o.beta1 * (1 - 0.5 * 0.96 ** (i * o.schedule_decay)) for i in range(1, t + 2)]
    here, ahead = np.prod(mu[:-1]), np.prod(mu)
    bar = (1 - mu[-2]) * g / (1 - here) + mu[-1] * m / (1 - ahead)
    return w - o.learning_rate * bar / (np.sqrt(v / (1 - o.beta2**t)) + o.epsilon)


def adagrad(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    g = no_decay(o, g) if o.decoupled_decay else clip_then_decay(o, w, g)
    s["h"] = s.get("h", 0) + g**2
    divisor = np.sqrt(s["h"] + o.eps) if o.epsilon_inside else np.sqrt(s["h"]) + o.eps
    return w - o.learning_rate * (g / divisor + (o.wd * w if o.decoupled_decay else 0))


def groupadagrad(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    g = no_decay(o, g)
    means = (g.reshape(-1, WIDTH) ** 2).sum(axis=1) / WIDTH
    s["h"] = s.get("h", 0) + np.repeat(means, WIDTH)
    return w - o.learning_rate * g / np.sqrt(s["h"] + o.eps)


def rmsprop(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    g = decay_then_clip(o, w, g)
    s["n"] = o.gamma1 * s.get("n", 0) + (1 - o.gamma1) * g**2
    spread = s["n"]
    if o.centered:
        s["g"] = o.gamma1 * s.get("g", 0) + (1 - o.gamma1) * g
        spread = spread - s["g"] ** 2
    divisor = np.sqrt(spread + o.epsilon) if o.epsilon_inside else np.sqrt(spread) + o.epsilon
    kept = o.gamma2 * s.get("d", 0) if o.centered else 0
    s["d"] = kept - o.learning_rate * g / divisor
    return clipped(w + s["d"], o.clip_weights)


def adadelta(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    g = no_decay(o, g) if o.decoupled_decay else clip_then_decay(o, w, g)
    s["g"] = o.rho * s.get("g", 0) + (1 - o.rho) * g**2
    delta = np.sqrt(s.get("d", 0) + o.epsilon) / np.sqrt(s["g"] + o.epsilon) * g
    s["d"] = o.rho * s.get("d", 0) + (1 - o.rho) * delta**2
    return w - o.learning_rate * (delta + (o.wd * w if o.decoupled_decay else 0))


def ftrl(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    g = no_decay(o, g)
    n = s.get("n", np.zeros_like(w))
    s["n"] = n + g**2
    s["z"] = s.get("z", 0) + g - (np.sqrt(s["n"]) - np.sqrt(n)) / o.learning_rate * w
    z = s["z"]
    full = (np.sign(z) * o.lamda1 - z) / ((o.beta + np.sqrt(s["n"])) / o.learning_rate + o.wd)
    return np.where(np.abs(z) <= o.lamda1, 0.0, full)


def signum(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    if o.momentum == 0:
        return signsgd(o, w, g, s, t)
    s["m"] = o.momentum * s.get("m", 0) + (1 - o.momentum) * clip_then_decay(o, w, g)
    return (1 - o.learning_rate * o.wd_lh) * w - o.learning_rate * np.sign(s["m"])


def signsgd(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    return (1 - o.learning_rate * o.wd) * w - o.learning_rate * np.sign(o.rescale_grad * g)


def lars(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    w_norm, g_norm = np.linalg.norm(w), np.linalg.norm(o.rescale_grad * g)
    ratio = 1.0
    if w_norm > 0 and g_norm > 0:
        ratio = o.eta * w_norm / (g_norm + o.wd * w_norm + o.eps)
    step = o.learning_rate * ratio * clip_then_decay(o, w, g)
    s["v"] = o.momentum * s.get("v", 0) - step
    return w + s["v"]


def lamb(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    m, v = moments(o, no_decay(o, g), s)
    c1, c2 = (1 - o.beta1**t, 1 - o.beta2**t) if o.bias_correction else (1, 1)
    step = (m / c1) / (np.sqrt(v / c2) + o.epsilon) + o.wd * w
    size = max(np.linalg.norm(w), o.lower_bound or 0.0)
    size = min(size, o.upper_bound or np.inf)
    length = np.linalg.norm(step)
    return w - o.learning_rate * (size / length if size and length else 1.0) * step


def ftml(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    g = decay_then_clip(o, w, g)
    s["v"] = o.beta2 * s.get("v", 0) + (1 - o.beta2) * g**2
    root = np.sqrt(s["v"] / (1 - o.beta2**t)) + o.epsilon
    before, s["d"] = s.get("d", 0), (1 - o.beta1**t) / o.learning_rate * root
    s["z"] = o.beta1 * s.get("z", 0) + (1 - o.beta1) * g - (s["d"] - o.beta1 * before) * w
    return -s["z"] / s["d"]


def dcasgd(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    g = no_decay(o, g)
    g = g + o.wd * w + o.lamda * g * g * (w - s.get("before", w))
    s["m"] = o.momentum * s.get("m", 0) - o.learning_rate * g
    s["before"] = w
    return w + s["m"]


NOISE = 0.25
WIDTH = 4
"""Numbers in a row, where an optimizer sees rows."""


def sgld(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    drift = o.learning_rate / 2 * (no_decay(o, g) + o.wd * w)
    return w - drift + np.sqrt(o.learning_rate) * NOISE


def lbsgd(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    n = o.begin_epoch * o.updates_per_epoch + t
    s["sum"] = s.get("sum", 0) + g
    if n % o.batch_scale:
        return w
    g, s["sum"] = s["sum"] / o.batch_scale, 0
    share = min(n / (o.warmup_epochs * o.updates_per_epoch), 1)
    grown = {"linear": share, "power2": share**2, "sqrt": share**0.5}
    factor = 1 + (o.batch_scale - 1) * grown.get(o.warmup_strategy, share == 1)
    if o.warmup_strategy == "lars":
        length = (w**2).sum()
        factor = np.clip(np.sqrt(length / ((g**2).sum() + o.wd * length + 1e-18)), 0.01, 100)
    s["m"] = o.momentum * s.get("m", 0) - o.learning_rate * factor * clip_then_decay(o, w, g)
    return w + s["m"]


def test(o: Any, w: Array, g: Array, s: State, t: int) -> Array:
    return w - o.learning_rate * (o.rescale_grad * g + o.wd * w)


test.__test__ = False  # type: ignore[attr-defined]

FORMULAS: dict[str, Formula] = {
    each.__name__: each
    for each in (
        *(sgd, nag, torchsgd, adam, adamw, adamax, nadam, adagrad, groupadagrad, rmsprop, adadelta),
        *(ftrl, signum, signsgd, lars, lamb, ftml, dcasgd, sgld, lbsgd, test),
    )
}

COMMON: dict[str, Any] = {"wd": 0.05, "rescale_grad": 0.5, "clip_gradient": 0.4}
#: For each optimizer the settings that it is tried with, besides its defaults.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "sgd": [{"learning_rate": 0.1, "momentum": 0.9, **COMMON}],
    "nag": [{"learning_rate": 0.1, "momentum": 0.9, **COMMON}, {"momentum": 0.5}],
    "torchsgd": [
        {"learning_rate": 0.1, "momentum": 0.9, **COMMON},
        {"learning_rate": 0.1, "momentum": 0.5, "dampening": 0.2, "nesterov": False},
        {"learning_rate": 0.1, "momentum": 0.5, "nesterov": True},
    ],
    "adam": [{"learning_rate": 0.1, **COMMON}, {"epsilon_corrected": True, "epsilon": 0.1}],
    "adamw": [
        {"learning_rate": 0.1, **COMMON},
        {"wd": 0.1, "epsilon_corrected": True, "epsilon": 0.1, "decay_corrected": False},
        {"wd": 0.1, "correct_bias": False},
    ],
    "adamax": [{"learning_rate": 0.1, **COMMON}, {"epsilon": 0.0}],
    "nadam": [{"learning_rate": 0.1, "schedule_decay": 0.5, **COMMON}],
    "adagrad": [
        {"learning_rate": 0.1, "eps": 0.01, **COMMON},
        {"eps": 0.01, "epsilon_inside": False, "decoupled_decay": False, **COMMON},
    ],
    "groupadagrad": [
        {"learning_rate": 0.1, "eps": 0.01, "rescale_grad": 0.5, "clip_gradient": 0.4},
    ],
    "rmsprop": [
        {"learning_rate": 0.1, "epsilon": 0.01, **COMMON},
        {"learning_rate": 0.1, "centered": True, "gamma2": 0.5, **COMMON},
        {"centered": True, "epsilon_inside": False, "epsilon": 0.01},
        {"learning_rate": 0.5, "clip_weights": 0.75, "epsilon_inside": False},
    ],
    "adadelta": [
        {"rho": 0.8, "epsilon": 1e-3, **COMMON},
        {"learning_rate": 0.5, "decoupled_decay": False, **COMMON},
    ],
    "ftrl": [{"learning_rate": 0.3, "lamda1": 0.5, "beta": 0.5, **COMMON}],
    "signum": [
        {"wd_lh": 0.1, **COMMON},
        {"momentum": 0.0, "wd": 0.1, "rescale_grad": 0.5},
    ],
    "signsgd": [{"learning_rate": 0.1, "wd": 0.1, "rescale_grad": -1.0}],
    "lars": [
        {"learning_rate": 2.0, "momentum": 0.9, "eta": 0.1, "eps": 0.5, **COMMON},
        {"learning_rate": 2.0, "eta": 0.1},
    ],
    "lamb": [
        {"learning_rate": 0.1, **COMMON},
        {"lower_bound": 20.0, "bias_correction": False},
        {"upper_bound": 2.0, "wd": 0.1},
    ],
    "ftml": [{"beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3, **COMMON}],
    "dcasgd": [
        {"learning_rate": 0.3, "momentum": 0.9, "lamda": 2.0, **COMMON},
        {"learning_rate": 0.3, "lamda": 2.0, **COMMON},
    ],
    "sgld": [{"learning_rate": 0.1, **COMMON}],
    "lbsgd": [
        {"learning_rate": 0.1, "momentum": 0.9, "batch_scale": 3, "updates_per_epoch": 2, **COMMON},
        {"batch_scale": 2, "warmup_strategy": "power2", "updates_per_epoch": 3, "begin_epoch": 1},
        {"batch_scale": 4, "warmup_strategy": "sqrt"},
        {"batch_scale": 2, "warmup_strategy": "lars", "momentum": 0.5, **COMMON},
        {"batch_scale": 2, "warmup_strategy": "none", "warmup_epochs": 1, "updates_per_epoch": 9},
    ],
    "test": [{"learning_rate": 0.1, "wd": 0.2, "rescale_grad": 0.5}],
}
CASES = [
    pytest.param(opt.create(name, **params), id=f"{name}-{index}")
    for name, settings in SETTINGS.items()
    for index, params in enumerate([{}, *settings])
]
ONE_OF_EACH = [
    pytest.param(opt.create(name, **settings[0]), id=name) for name, settings in SETTINGS.items()
]


@pytest.fixture(autouse=True)
def _known_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that SGLD draws; ``test_optimizer_noise.py`` is about what it draws else."""
    monkeypatch.setattr("kvstore.optimizer.sgd._draw", lambda generator, out: out.fill(NOISE))


def problem(length: int = 200, steps: int = 20, dtype: Any = np.float64) -> tuple[Array, Any]:
    random = np.random.default_rng(11)
    weight = random.normal(size=length).astype(dtype)
    return weight, [random.normal(size=length).astype(dtype) for _ in range(steps)]


def updated(chosen: Optimizer, weight: Array, gradients: list[Array], block: int = 64) -> Array:
    weight, chosen = weight.copy(), chosen.for_rows(WIDTH)
    state = create_state(chosen, weight)
    workspace = Workspace()
    for count, gradient in enumerate(gradients, start=1):
        apply_round(weight, [gradient], chosen, state, count, workspace, block_elements=block)
    return weight


def by_formula(chosen: Optimizer, weight: Array, gradients: list[Array]) -> Array:
    state: State = {}
    weight = weight.astype(np.float64)
    for count, gradient in enumerate(gradients, start=1):
        weight = FORMULAS[chosen.name](chosen, weight, gradient.astype(float), state, count)
    return weight


def test_there_is_a_formula_for_every_optimizer_of_the_package() -> None:
    assert set(FORMULAS) == set(SETTINGS) == {name.lower() for name in MODULES}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 2e-5), (np.float16, 1e-3)]
)
@pytest.mark.parametrize("chosen", CASES)
def test_twenty_updates_follow_the_formula(chosen: Optimizer, dtype: Any, tolerance: float) -> None:
    weight, gradients = problem(dtype=dtype)
    result = updated(chosen, weight, gradients)
    assert result.dtype == dtype
    expected = by_formula(chosen, weight, gradients)
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chosen", ONE_OF_EACH)
def test_the_size_of_blocks_changes_no_bit(chosen: Optimizer) -> None:
    weight, gradients = problem(dtype=np.float32, steps=3)
    whole = updated(chosen, weight, gradients, block=1000)
    assert updated(chosen, weight, gradients, block=7).tobytes() == whole.tobytes()


@pytest.mark.parametrize("chosen", CASES)
def test_bfloat16_weights_are_what_their_float32_masters_round_to(chosen: Optimizer) -> None:
    bfloat16 = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    weight, gradients = problem(dtype=np.float32, steps=5)
    weight, gradients = weight.astype(bfloat16), [each.astype(bfloat16) for each in gradients]
    chosen.check_dtype(bfloat16)
    assert {array.dtype for array in chosen.create_state(weight)} <= {np.dtype(np.float32)}
    wide = [gradient.astype(np.float32) for gradient in gradients]
    exact = updated(chosen, weight.astype(np.float32), wide)
    result = updated(chosen, weight, gradients)
    assert result.dtype == bfloat16
    assert result.tobytes() == exact.astype(bfloat16).tobytes()


class OnDevice:
    """An array that is none of NumPy's, takes only what CuPy's takes, and makes no new ones."""

    def __init__(self, host: Array) -> None:
        self.host, self.dtype = host, host.dtype

    def __len__(self) -> int:
        return len(self.host)

    def __getitem__(self, part: slice) -> OnDevice:
        return OnDevice(self.host[part])

    def __add__(self, other: OnDevice) -> OnDevice:
        assert self.host.ndim == 0, "only sums of blocks are added without out="
        return OnDevice(self.host + other.host)

    def reshape(self, *shape: int) -> OnDevice:
        return OnDevice(self.host.reshape(*shape))

    def mean(self, axis: int, keepdims: bool) -> OnDevice:
        return OnDevice(self.host.mean(axis=axis, keepdims=keepdims))

    def __float__(self) -> float:
        return float(self.host)

    def fill(self, value: float) -> None:
        self.host.fill(value)

    def sum(self) -> OnDevice:
        return OnDevice(self.host.sum())

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        assert method == "__call__"
        assert all(isinstance(each, OnDevice) or type(each) is float for each in inputs)
        (out,) = options.pop("out")
        plain = [each.host if isinstance(each, OnDevice) else each for each in inputs]
        ufunc(*plain, out=out.host, **options)
        return out

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        assert function in (np.empty_like, np.zeros_like)
        return OnDevice(function(args[0].host, **options))


@pytest.mark.parametrize("chosen", CASES)
def test_only_calls_that_a_gpu_array_carries_out_are_used(
    chosen: Optimizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "DEVICE_NORM_ELEMENTS", 64)
    weight, gradients = problem(dtype=np.float32, steps=3)
    device = OnDevice(weight.copy())
    chosen = chosen.for_rows(WIDTH)
    state = chosen.create_state(device)  # type: ignore[arg-type]
    assert all(isinstance(array, OnDevice) for array in state)
    for count, gradient in enumerate(gradients, start=1):
        scratch: Any = OnDevice(np.full(len(weight), np.nan, np.float32))
        grad: Any = OnDevice(gradient.copy())
        chosen.update(device, grad, state, count, scratch)  # type: ignore[arg-type]
    host = updated(chosen, weight, gradients)
    np.testing.assert_allclose(device.host, host, rtol=1e-6 if chosen.scope == "key" else 0)


@pytest.mark.parametrize("chosen", CASES)
def test_the_gradient_zero_never_makes_nan(chosen: Optimizer) -> None:
    zeros = [np.zeros(8, np.float32)] * 3
    result = updated(chosen, np.ones(8, np.float32), zeros)
    if chosen == opt.Adamax(epsilon=0.0):
        assert np.isnan(result).all()  # as in MXNet 1.9.1
    else:
        assert np.isfinite(result).all()


@pytest.mark.parametrize("chosen", CASES)
def test_state_names_name_the_arrays_of_the_state(chosen: Optimizer) -> None:
    names = chosen.state_names()
    assert len(names) == len(set(names)) == len(chosen.create_state(np.zeros(2)))


@pytest.mark.parametrize("chosen", ONE_OF_EACH)
def test_an_empty_part_is_updated_without_a_word(chosen: Optimizer) -> None:
    assert len(updated(chosen, np.zeros(0, np.float32), [np.zeros(0, np.float32)])) == 0
    empty, chosen = np.zeros(0, np.float32), chosen.for_rows(WIDTH)
    chosen.update(empty, empty.copy(), chosen.create_state(empty), 1, empty.copy())


# -- one by one ------------------------------------------------------------------------------


def test_a_norm_depends_on_the_elements_only_and_keeps_float64() -> None:
    values = np.random.default_rng(5).normal(size=3 * NORM_ELEMENTS + 77).astype(np.float32)
    assert norm(values) == pytest.approx(np.linalg.norm(values.astype(np.float64)), rel=1e-14)
    unaligned = np.frombuffer(b"x" + values.tobytes(), np.uint8)[1:].view(np.float32)
    assert norm(unaligned) == norm(values) == norm(np.repeat(values, 2)[::2])
    assert norm(np.full(4, 1e30, np.float32)) == pytest.approx(2e30)  # float32 would overflow
    assert norm(np.full(4, 200.0, np.float16)) == 400.0
    assert norm(np.zeros(0)) == 0.0
    assert np.isnan(norm(np.array([1.0, np.nan])))


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_key_scope_sees_the_whole_key_whatever_the_blocks(name: str) -> None:
    weight, gradients = problem(length=NORM_ELEMENTS * 5, steps=2, dtype=np.float32)
    chosen = opt.create(name, learning_rate=0.5, wd=0.01)
    assert chosen.scope == "key"
    ours = updated(chosen, weight, gradients, block=1000)
    np.testing.assert_allclose(ours, by_formula(chosen, weight, gradients), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["lars", "lamb"])
@pytest.mark.parametrize(("weight", "grad"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_a_norm_of_zero_leaves_the_learning_rate_as_it_is(
    name: str, weight: float, grad: float
) -> None:
    chosen = opt.create(name, learning_rate=0.5)
    result = updated(chosen, np.full(4, weight), [np.full(4, grad)])
    np.testing.assert_allclose(result, weight - 0.5 * grad, rtol=1e-5)


def test_lars_corrects_momentum_when_the_schedule_changes_the_rate() -> None:
    halved = FactorScheduler(step=1, factor=0.5)
    corrected = opt.LARS(learning_rate=1.0, momentum=0.8, adapt=False, lr_scheduler=halved)
    weight = updated(corrected, np.zeros(1), [np.ones(1)] * 2)
    # -1, then 0.8 * 0.5 * -1 - 0.5
    np.testing.assert_allclose(weight, -1.0 - 0.9)
    plain = corrected.replace(momentum_correction=False)
    np.testing.assert_allclose(updated(plain, np.zeros(1), [np.ones(1)] * 2), -1.0 - 1.3)


@pytest.mark.parametrize("name", ["layer1_gamma", "bn_beta", "fc_bias"])
def test_lars_does_not_scale_keys_that_are_named_like_biases(name: str) -> None:
    chosen = opt.LARS(eta=0.1, lr_mult={name: 2.0, "w": 2.0})
    plain = chosen.for_key(name)
    assert isinstance(plain, opt.LARS)
    assert (plain.adapt, plain.learning_rate) == (False, 0.02)
    assert chosen.for_key(name) is plain
    assert plain.for_key(name) is plain
    assert chosen.for_key("w") == opt.LARS(eta=0.1, learning_rate=0.02)
    assert chosen.for_key(7) is chosen
    assert opt.LARS().for_key(name) == opt.LARS(adapt=False)


def test_ftrl_makes_exact_zeros_and_a_rate_of_zero_freezes() -> None:
    chosen = opt.Ftrl(lamda1=5.0)
    weak = [np.array([0.1, 4.0])] * 3
    result = updated(chosen, np.ones(2), weak)
    assert result[0] == 0.0
    assert result[1] != 0.0
    frozen = updated(chosen.replace(lr=0.0), np.ones(2), weak)
    assert frozen.tolist() == [1.0, 1.0]


def test_nadams_product_depends_on_the_count_only() -> None:
    from kvstore.optimizer import adam as nadam

    asked = [5000, 3, 1024, 1025, 2047, 3, 1, 70, 4096]
    for beta1, decay in [(0.9, 0.004), (0.999999, 1e9), (0.0, 0.0)]:
        nadam._product.cache_clear()
        nadam._stretch.cache_clear()
        there = {count: nadam._product(beta1, decay, count) for count in asked}
        nadam._product.cache_clear()
        nadam._stretch.cache_clear()
        assert there == {count: nadam._product(beta1, decay, count) for count in sorted(asked)}
        for count, product in there.items():
            factors = [nadam._momentum(beta1, decay, i) for i in range(1, count + 1)]
            assert product == pytest.approx(float(np.prod(factors)), rel=1e-10, abs=1e-20)
    assert nadam._product.cache_info().maxsize is not None


def test_the_test_optimizer_is_that_of_mxnet_191_until_it_is_given_a_rate() -> None:
    chosen = opt.Test(rescale_grad=2.0)
    weight = np.array([1.0], np.float16)
    state = chosen.create_state(weight)
    chosen.update(weight, np.array([3.0], np.float32), state, 1, np.empty(1, np.float32))
    assert weight == 7.0
    assert (state[0].dtype, state[0].tolist()) == (np.float32, [7.0])
    like_master = opt.Test(learning_rate=-0.1, wd=0.5)
    np.testing.assert_allclose(updated(like_master, np.ones(1), [np.ones(1)]), 1.0 + 0.1 * 1.5)


def test_a_centered_variance_that_rounding_made_negative_is_no_nan() -> None:
    steady = [np.linspace(100, 200, 500, dtype=np.float32)] * 300
    result = updated(opt.RMSProp(centered=True), np.ones(500, np.float32), steady)
    assert np.isfinite(result).all()


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("adamw", {"beta1": 1.0}),
        ("adamax", {"epsilon": -1.0}),
        ("nadam", {"schedule_decay": -0.1}),
        ("adagrad", {"eps": -1e-7}),
        ("groupadagrad", {"eps": -1e-5}),
        ("groupadagrad", {"wd": 0.1}),
        ("rmsprop", {"gamma1": 1.5}),
        ("adadelta", {"rho": 1.0}),
        ("ftrl", {"lamda1": -0.1}),
        ("signum", {"momentum": -0.5}),
        ("lars", {"eta": -0.1}),
        ("lamb", {"beta2": 1.0}),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(name: str, params: dict[str, float]) -> None:
    with pytest.raises(OptimizerParameterError, match=next(iter(params))):
        opt.create(name, **params)


MXNET_DEFAULTS: dict[str, dict[str, Any]] = {
    "nag": {"learning_rate": 0.01, "momentum": 0.0},
    "adamw": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6},
    "adamax": {"learning_rate": 0.002, "beta1": 0.9, "beta2": 0.999},
    "nadam": {"learning_rate": 0.001, "epsilon": 1e-8, "schedule_decay": 0.004},
    "adagrad": {"learning_rate": 0.01, "eps": 1e-7},
    "groupadagrad": {"learning_rate": 0.01, "eps": 1e-5},
    "rmsprop": {"learning_rate": 0.001, "gamma1": 0.9, "gamma2": 0.9, "epsilon": 1e-8},
    "adadelta": {"rho": 0.9, "epsilon": 1e-5},
    "ftrl": {"learning_rate": 0.1, "lamda1": 0.01, "beta": 1.0},
    "signum": {"learning_rate": 0.01, "momentum": 0.9, "wd_lh": 0.0},
    "lars": {"learning_rate": 0.01, "momentum": 0.0, "eta": 0.001, "eps": 0.0},
    "lamb": {"learning_rate": 0.001, "epsilon": 1e-6, "lower_bound": None, "upper_bound": None},
}


@pytest.mark.parametrize("name", MXNET_DEFAULTS)
def test_names_and_defaults_are_those_of_mxnet(name: str) -> None:
    common = {"wd": 0.0, "rescale_grad": 1.0, "clip_gradient": None}
    wanted = {**MXNET_DEFAULTS[name], **common}
    params = opt.create(name).params()
    assert {key: params[key] for key in wanted} == wanted


# -- the page that lists them ----------------------------------------------------------------

PAGE = (Path(__file__).parents[4] / "docs" / "optimizers.md").read_text()


@pytest.mark.parametrize("name", SETTINGS)
def test_the_page_has_every_parameter_with_its_default_and_the_scope(name: str) -> None:
    section = PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]
    chosen = opt.create(name)
    listed = " ".join(f"`{key}={value!r}`" for key, value in chosen.params().items())
    assert f"| parameters | {listed} |" in section
    assert f"| scope, state | {chosen.scope};" in section
    full = chosen.replace(momentum=0.5) if "momentum" in chosen.params() else chosen
    assert all(f"`{state}`" in section for state in full.state_names())


def test_the_optimizer_on_the_page_follows_the_formula_of_lion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = PAGE.split("## Your own\n\n```python\n")[1].split("```")[0]
    page = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)
    exec(compile(code, "optimizers.md", "exec", dont_inherit=True), vars(page))
    try:
        weight, gradients = problem(steps=3)
        chosen = page.Lion(learning_rate=0.1)
        w, m = weight, np.zeros_like(weight)
        for g in gradients:  # Chen et al., arXiv 2302.06675, without decay
            w = w - 0.1 * np.sign(0.9 * m + (1 - 0.9) * g)
            m = 0.99 * m + (1 - 0.99) * g
        np.testing.assert_allclose(updated(chosen, weight, gradients), w, rtol=1e-12)
    finally:
        del registry["lion"]
