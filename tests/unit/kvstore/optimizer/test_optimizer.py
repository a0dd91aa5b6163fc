"""Each optimizer against its formula written out for one scalar, and the registry's refusals."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import optimizer
from kvstore.errors import (
    ArgumentTypeError,
    NotSupportedError,
    OptimizerParameterError,
    UnknownOptimizerError,
)
from kvstore.optimizer import SGD, Adam, Optimizer
from kvstore.optimizer.parameters import registry
from kvstore.optimizer.schedule import create as create_schedule

Array = np.ndarray[Any, Any]


def clipped(value: float, limit: float | None) -> float:
    return value if limit is None else max(min(value, limit), -limit)


def sgd_by_hand(chosen: SGD, weight: float, gradients: list[float]) -> float:
    momentum = 0.0
    for raw in gradients:
        gradient = clipped(chosen.rescale_grad * raw, chosen.clip_gradient) + chosen.wd * weight
        momentum = chosen.momentum * momentum - chosen.learning_rate * gradient
        weight = weight + momentum
    return weight


def adam_by_hand(chosen: Adam, weight: float, gradients: list[float]) -> float:
    mean = variance = 0.0
    for step, raw in enumerate(gradients, start=1):
        gradient = clipped(chosen.rescale_grad * raw + chosen.wd * weight, chosen.clip_gradient)
        mean = chosen.beta1 * mean + (1 - chosen.beta1) * gradient
        variance = chosen.beta2 * variance + (1 - chosen.beta2) * gradient * gradient
        correction = math.sqrt(1 - chosen.beta2**step) / (1 - chosen.beta1**step)
        weight -= chosen.learning_rate * correction * mean / (math.sqrt(variance) + chosen.epsilon)
    return weight


def run(chosen: Optimizer, weight: Array, gradients: list[Array]) -> Array:
    weight = weight.copy()
    state = chosen.create_state(weight)
    for count, gradient in enumerate(gradients, start=1):
        chosen.update(weight, gradient.copy(), state, count, np.full_like(gradient, np.nan))
    return weight


SGDS = [
    SGD(),
    SGD(learning_rate=0.5, momentum=0.9),
    SGD(learning_rate=0.1, momentum=0.5, wd=0.2, rescale_grad=0.25, clip_gradient=0.7),
    SGD(learning_rate=-1.0, wd=0.01),
]
ADAMS = [
    Adam(),
    Adam(learning_rate=0.3, beta1=0.8, beta2=0.95, epsilon=1e-3),
    Adam(learning_rate=0.1, wd=0.4, rescale_grad=0.5, clip_gradient=0.6),
    Adam(beta1=0.0, beta2=0.0),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [("f8", 1e-14), ("f4", 1e-6)])
@pytest.mark.parametrize("chosen", [*SGDS, *ADAMS], ids=repr)
def test_updates_follow_the_formula_scalar_by_scalar(
    chosen: Optimizer, dtype: str, tolerance: float
) -> None:
    random = np.random.default_rng(7)
    weight = random.normal(size=50).astype(dtype)
    gradients = [random.normal(size=50).astype(dtype) for _ in range(5)]
    by_hand = sgd_by_hand if isinstance(chosen, SGD) else adam_by_hand
    expected = [
        by_hand(chosen, float(weight[i]), [float(gradient[i]) for gradient in gradients])  # type: ignore[arg-type]
        for i in range(50)
    ]
    result = run(chosen, weight, gradients)
    assert result.dtype == dtype
    np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_every_operation_is_done_in_the_accumulation_dtype(dtype: str) -> None:
    working: Any = np.float32 if dtype in ("f2", "f4") else np.float64
    random = np.random.default_rng(1)
    weight = random.normal(size=500).astype(dtype)
    gradient = random.normal(size=500).astype(working)
    sgd = SGD(learning_rate=0.9, momentum=0.9, wd=1 / 3, rescale_grad=1 / 3)
    raw = gradient * working(1 / 3) + weight.astype(working) * working(1 / 3)
    expected = (weight.astype(working) - raw * working(0.9)).astype(dtype)
    assert run(sgd, weight, [gradient]).tobytes() == expected.tobytes()
    adam = Adam(learning_rate=0.1, wd=1e-3)
    raw = gradient + weight.astype(working) * working(1e-3)
    mean = raw * working(1 - 0.9)
    root = np.sqrt(raw * working(1 - 0.999) * raw) + working(1e-8)
    rate = 0.1 * math.sqrt(1 - 0.999) / (1 - 0.9)
    expected = (weight.astype(working) - mean * working(rate) / root).astype(dtype)
    assert run(adam, weight, [gradient]).tobytes() == expected.tobytes()


def test_sgd_clips_before_the_decay_and_adam_after_it() -> None:
    weight, gradient = np.array([10.0]), np.array([5.0])
    sgd = SGD(learning_rate=1.0, wd=0.1, clip_gradient=2.0)
    assert run(sgd, weight, [gradient]) == 10.0 - (2.0 + 1.0)
    adam = Adam(learning_rate=1.0, beta1=0.0, beta2=0.0, epsilon=2.0, wd=0.1, clip_gradient=2.0)
    assert run(adam, weight, [gradient]) == 10.0 - 2.0 / (2.0 + 2.0)


@pytest.mark.parametrize("chosen", [SGDS[2], ADAMS[2]], ids=repr)
def test_float64_keeps_its_precision_and_float32_its_dtype(chosen: Optimizer) -> None:
    tiny = 2.0**-40
    in_double = run(chosen, np.array([1.0 + tiny]), [np.array([0.0])])
    assert in_double != run(chosen, np.array([1.0]), [np.array([0.0])])
    assert all(array.dtype == np.float32 for array in chosen.create_state(np.zeros(3, np.float32)))


def test_float16_weights_have_float32_state_and_survive_tiny_gradients() -> None:
    chosen = Adam(learning_rate=0.25)
    weight = np.ones(2, np.float16)
    state = chosen.create_state(weight)
    assert {array.dtype for array in state} == {np.dtype(np.float32)}
    # The square of this gradient is 0 in float16, and so is MXNet's epsilon.
    gradient = np.array([1e-4, 0.0], np.float32)
    chosen.update(weight, gradient, state, 1, np.empty(2, np.float32))
    np.testing.assert_allclose(weight, [0.75, 1.0], atol=2e-3)


def test_clipping_keeps_nan_so_that_a_diverged_run_shows() -> None:
    assert np.isnan(run(SGD(clip_gradient=1.0), np.array([1.0]), [np.array([np.nan])]))


@pytest.mark.parametrize("off", [None, 0, -1.0])
def test_a_clip_of_none_zero_or_less_is_off(off: float | None) -> None:
    chosen = SGD(learning_rate=1.0, clip_gradient=off)
    assert run(chosen, np.array([0.0]), [np.array([1e6])]) == -1e6


def test_names_and_numbers_make_an_equal_optimizer_again() -> None:
    chosen = optimizer.create("Adam", learning_rate=1, clip_gradient=None)
    again = optimizer.create(chosen.name, **chosen.params())
    assert chosen == again
    assert hash(chosen) == hash(again)
    assert chosen.name == "adam"
    assert chosen.params()["learning_rate"] == 1.0
    assert chosen != optimizer.create("adam", learning_rate=2)
    assert chosen != optimizer.create("sgd")


def test_defaults_are_those_of_mxnet() -> None:
    assert optimizer.create("sgd").params() == {
        "learning_rate": 0.01,
        "momentum": 0.0,
        "wd": 0.0,
        "rescale_grad": 1.0,
        "clip_gradient": None,
    }
    assert optimizer.create("adam").params() == {
        "learning_rate": 0.001,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-8,
        "wd": 0.0,
        "rescale_grad": 1.0,
        "clip_gradient": None,
        "epsilon_corrected": False,
    }


def test_numpy_numbers_become_python_ones_so_that_they_cannot_widen_float32() -> None:
    chosen = SGD(learning_rate=np.float64(0.5), momentum=np.float32(0.5), wd=1)
    assert [type(value) for value in (chosen.learning_rate, chosen.momentum, chosen.wd)] == [
        float,
        float,
        float,
    ]
    assert run(chosen, np.ones(2, np.float32), [np.ones(2, np.float32)]).dtype == np.float32


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownOptimizerError, match=r"'sdg'; known: .*adam.*sgd"):
        optimizer.create("sdg")
    with pytest.raises(ArgumentTypeError, match="must be a string"):
        optimizer.create(SGD)  # type: ignore[arg-type]


def test_an_unknown_parameter_lists_the_known_ones() -> None:
    with pytest.raises(OptimizerParameterError, match=r"sgd has no parameter lr, mom; known: lear"):
        optimizer.create("sgd", lr=0.1, mom=0.9)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("sgd", {"learning_rate": "0.1"}),
        ("sgd", {"learning_rate": None}),
        ("sgd", {"learning_rate": True}),
        ("sgd", {"momentum": float("nan")}),
        ("sgd", {"clip_gradient": float("inf")}),
        ("adam", {"wd": np.ones(3)}),
        ("adam", {"beta1": 1.0}),
        ("adam", {"beta2": -0.1}),
        ("adam", {"epsilon": -1e-8}),
    ],
)
def test_a_number_of_the_wrong_kind_or_range_is_refused(name: str, params: Any) -> None:
    with pytest.raises(OptimizerParameterError, match=next(iter(params))):
        optimizer.create(name, **params)


@pytest.mark.parametrize("dtype", ["i4", "?", "c8", "u1"])
def test_only_real_floats_can_be_updated(dtype: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"float weights, got {np.dtype(dtype)}"):
        SGD().check_dtype(np.dtype(dtype))


def test_an_optimizer_cannot_change_behind_the_store() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SGD().learning_rate = 0.5  # type: ignore[misc]
    with pytest.raises(NotSupportedError, match="momentum cannot be deleted"):
        del SGD().momentum


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda chosen: setattr(chosen, "lr", 0.5), "setting lr is not possible"),
        (lambda chosen: setattr(chosen, "learning_rate", 0.5), "setting learning_rate is not"),
        (lambda chosen: chosen.set_learning_rate(0.5), "set_learning_rate is not possible"),
    ],
)
def test_a_new_rate_goes_through_the_store_or_makes_another_optimizer(
    change: Callable[[Any], object], sentence: str
) -> None:
    chosen = SGD(learning_rate=0.1)
    with pytest.raises(NotSupportedError, match=sentence) as raised:
        change(chosen)
    assert "optimizers are immutable" in str(raised.value)
    assert "kv.set_optimizer_params(lr=...)" in str(raised.value)
    assert "optimizer.replace(lr=...) returns a changed copy" in str(raised.value)
    assert chosen.learning_rate == 0.1


def test_new_multipliers_make_another_optimizer() -> None:
    with pytest.raises(NotSupportedError, match=r"kv\.set_optimizer\(optimizer\.replace\(lr_mult="):
        SGD().set_lr_mult({"w": 0.1})
    with pytest.raises(NotSupportedError, match=r"optimizer\.replace\(wd_mult="):
        SGD().set_wd_mult({"w": 0.1})


def test_an_optimizer_is_copied_and_pickled_like_any_value() -> None:
    chosen = SGD(learning_rate=0.5, lr_mult={"w": 2.0})
    for copied in (copy.deepcopy(chosen), pickle.loads(pickle.dumps(chosen))):
        assert copied == chosen
        assert copied.for_key("w") == SGD(learning_rate=1.0)


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"begin_num_update": 3}, "each key counts its updates"),
        ({"param_idx2name": {0: "w"}}, "lr_mult and wd_mult use the keys"),
        ({"use_fused_step": False}, "one implementation of each update"),
        ({"aggregate_num": 4}, "the keys of one call are updated"),
        ({"lr": 0.1}, r"did you mean learning_rate for lr\?"),
        ({"momentun": 0.1}, r"did you mean momentum for momentun\?"),
    ],
)
@pytest.mark.parametrize("make", [SGD, lambda **params: optimizer.create("sgd", **params)])
def test_a_parameter_of_mxnet_that_is_not_taken_says_what_to_do(
    make: Callable[..., object], params: Any, sentence: str
) -> None:
    with pytest.raises(OptimizerParameterError, match=sentence):
        make(**params)


def test_a_name_that_is_nearly_one_is_suggested() -> None:
    with pytest.raises(UnknownOptimizerError, match=r"; did you mean 'adam'\?$"):
        optimizer.create("Adamm")
    with pytest.raises(OptimizerParameterError, match=r"; did you mean 'cosine'\?$"):
        create_schedule("cosin")


def test_a_custom_optimizer_is_created_by_its_class_name() -> None:
    @optimizer.register
    @dataclasses.dataclass(frozen=True)
    class Descent(Optimizer):
        step: float = 0.5
        rounds: int = 1
        label: str | None = None
        is_fast: bool = False

        def update(
            self, weight: Array, grad: Array, state: object, count: int, scratch: Array
        ) -> None:
            np.multiply(grad, self.step, out=grad)
            np.subtract(weight, grad, out=weight, dtype=grad.dtype)

    try:
        chosen = optimizer.create("descent", step=2, rounds=np.int32(3), label="a", is_fast=True)
        assert chosen.params() == {"step": 2.0, "rounds": 3, "label": "a", "is_fast": True}
        assert run(chosen, np.array([1.0]), [np.array([1.0])]) == -1.0
        with pytest.raises(OptimizerParameterError, match="rounds of Descent must be int"):
            optimizer.create("descent", rounds=1.5)
        assert optimizer.register(Descent) is Descent
    finally:
        del registry["descent"]


def test_a_name_that_is_taken_cannot_be_registered_again() -> None:
    @dataclasses.dataclass(frozen=True)
    class Sgd(Optimizer):
        pass

    with pytest.raises(ArgumentTypeError, match=r"'sgd' is taken by kvstore\.optimizer\.sgd\.SGD"):
        optimizer.register(Sgd)


def test_an_optimizer_that_is_no_frozen_dataclass_of_its_own_cannot_be_registered() -> None:
    class Plain(SGD):
        pass

    with pytest.raises(ArgumentTypeError, match="frozen dataclass"):
        optimizer.register(Plain)


class TestTakeOver:
    weight = np.ones(4, np.float32)

    def test_equal_numbers_change_nothing(self) -> None:
        velocity = np.arange(4, dtype=np.float32)
        state, count = SGD(momentum=0.9).take_over(SGD(momentum=0.9), self.weight, (velocity,), 7)
        assert state[0] is velocity
        assert count == 7

    def test_other_numbers_keep_the_state(self) -> None:
        mean, variance = np.ones(4, np.float32), np.ones(4, np.float32)
        state, count = Adam(learning_rate=9).take_over(Adam(), self.weight, (mean, variance), 7)
        assert (state[0] is mean, state[1] is variance, count) == (True, True, 7)

    def test_momentum_that_is_switched_on_begins_at_zero_and_off_is_dropped(self) -> None:
        state, count = SGD(momentum=0.9).take_over(SGD(), self.weight, (), 7)
        assert ([array.tolist() for array in state], count) == ([[0.0] * 4], 7)
        state, count = SGD().take_over(SGD(momentum=0.9), self.weight, state, 8)
        assert (state, count) == ((), 8)

    def test_another_kind_starts_afresh(self) -> None:
        state, count = Adam().take_over(
            SGD(momentum=0.9), self.weight, (np.ones(4, np.float32),), 7
        )
        assert ([array.tolist() for array in state], count) == ([[0.0] * 4] * 2, 0)


# -- by position ----------------------------------------------------------------------------

POSITIONS: dict[str, list[object]] = {
    "SGD": [0.9, False],
    "NAG": [0.9],
    "Signum": [0.1, 0.8, 0.2],
    "FTML": [0.5, 0.9, 1e-3],
    "LARS": [0.9, True, 0.1, 0.5, False],
    "LBSGD": [0.9, True, "sqrt", 2, 3, 4, 5, 6],
    "LAMB": [0.1, 0.8, 0.9, 1e-3, 0.5, 2.0, False],
    "DCASGD": [0.9, 0.1],
    "SGLD": [],
    "Adam": [0.1, 0.8, 0.9, 1e-3, False],
    "AdaGrad": [1e-3],
    "RMSProp": [0.1, 0.8, 0.7, 1e-3, True, 2.0],
    "AdaDelta": [0.95, 1e-3],
    "Ftrl": [0.05, 0.2, 0.5],
    "Adamax": [0.1, 0.8, 0.9],
    "Nadam": [0.1, 0.8, 0.9, 1e-3, 0.1],
    "Test": [],
}
"""What MXNet 1.9.1's classes take by position, in its order; names in ``POSITION_NAMES``."""

POSITION_NAMES = {
    "SGD": "momentum lazy_update",
    "NAG": "momentum",
    "Signum": "learning_rate momentum wd_lh",
    "FTML": "beta1 beta2 epsilon",
    "LARS": "momentum lazy_update eta eps momentum_correction",
    "LBSGD": "momentum multi_precision warmup_strategy warmup_epochs batch_scale "
    "updates_per_epoch begin_epoch num_epochs",
    "LAMB": "learning_rate beta1 beta2 epsilon lower_bound upper_bound bias_correction",
    "DCASGD": "momentum lamda",
    "SGLD": "",
    "Adam": "learning_rate beta1 beta2 epsilon lazy_update",
    "AdaGrad": "eps",
    "RMSProp": "learning_rate gamma1 gamma2 epsilon centered clip_weights",
    "AdaDelta": "rho epsilon",
    "Ftrl": "lamda1 learning_rate beta",
    "Adamax": "learning_rate beta1 beta2",
    "Nadam": "learning_rate beta1 beta2 epsilon schedule_decay",
    "Test": "",
}


@pytest.mark.parametrize("name", POSITIONS)
def test_values_by_position_have_the_order_of_mxnet(name: str) -> None:
    cls, values, names = getattr(optimizer, name), POSITIONS[name], POSITION_NAMES[name].split()
    made = cls(*values)
    assert made == cls(**dict(zip(names, values, strict=True)))
    assert [getattr(made, each) for each in names] == values
    kinds = inspect.signature(cls).parameters.values()
    assert [each.name for each in kinds if each.kind is each.POSITIONAL_OR_KEYWORD] == names
    assert {each.kind for each in kinds if each.name not in names} == {
        inspect.Parameter.KEYWORD_ONLY
    }
    with pytest.raises(OptimizerParameterError, match=f"{name} takes {len(values)} positional"):
        cls(*values, 1.0)


def test_a_value_by_position_and_by_name_is_refused() -> None:
    with pytest.raises(
        OptimizerParameterError, match="SGD got momentum both by position and by name"
    ):
        SGD(0.9, momentum=0.9)


def test_two_numbers_for_sgd_are_no_rate_and_momentum() -> None:
    with pytest.raises(OptimizerParameterError, match="lazy_update of SGD must be bool or None"):
        SGD(0.1, 0.9)


# -- multi_precision and lazy_update --------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_without_multi_precision_wide_weights_are_updated_as_ever(dtype: str) -> None:
    chosen = optimizer.create("sgd", learning_rate=0.5, multi_precision=False)
    assert chosen.params()["multi_precision"] is False
    assert optimizer.from_plain(optimizer.to_plain(chosen)) == chosen
    weight = np.ones(2, dtype)
    optimizer.get_updater(chosen)("w", np.ones(2, dtype), weight)
    assert weight.tolist() == [0.5, 0.5]


def test_without_multi_precision_a_weight_of_16_bits_is_refused() -> None:
    chosen = optimizer.create("sgd", multi_precision=False)
    store = kvstore.create("local")
    store.init("w", np.ones(2, np.float16))
    store.set_optimizer(chosen)
    with pytest.raises(NotSupportedError, match="through a float32 master weight"):
        store.push("w", np.ones(2, np.float16))
    assert store.pull("w").tolist() == [1, 1]


def test_lazy_update_is_what_mxnet_does_unless_it_is_given() -> None:
    lazy = {
        name: [optimizer.create(name).is_lazy(stype) for stype in ("default", "row_sparse")]
        for name in ("sgd", "adam", "adagrad", "ftrl", "rmsprop", "nag", "lars")
    }
    assert lazy.pop("ftrl") == [False, True]
    assert lazy.pop("sgd") == lazy.pop("adam") == lazy.pop("adagrad") == [True, True]
    assert set(map(tuple, lazy.values())) == {(False, False)}
    assert optimizer.SGD().lazy_update is True
    assert "lazy_update" not in SGD().params()
    for given in (True, False):
        chosen = optimizer.create("rmsprop", lazy_update=given)
        assert chosen.is_lazy("default") is chosen.is_lazy("row_sparse") is given
        assert chosen.params()["lazy_update"] is given
    assert not optimizer.create("lamb", lazy_update=True).is_lazy("default")


def test_ccsgd_is_sgd() -> None:
    assert optimizer.create("ccSGD", momentum=0.9) == optimizer.ccSGD(0.9) == SGD(0.9)


def test_a_class_with_a_scope_that_there_is_not_is_refused_at_its_definition() -> None:
    with pytest.raises(
        ArgumentTypeError, match="Mine must be 'element', 'row' or 'key', got 'rows'"
    ):

        class Mine(optimizer.Optimizer):
            scope = "rows"


def test_a_misspelt_class_says_what_may_be_meant() -> None:
    with pytest.raises(AttributeError, match="did you mean 'RMSProp'"):
        _ = optimizer.RMSprop  # type: ignore[attr-defined]
