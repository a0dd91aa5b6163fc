"""States with float32 masters: made, handed on, restored, and kept to their weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import optimizer as opt
from kvstore.arrays.dtypes import bfloat16
from kvstore.errors import ValueMismatchError
from kvstore.mxnet.gluon.parameter import Parameter
from kvstore.mxnet.gluon.trainer import Trainer
from kvstore.optimizer import states
from kvstore.optimizer.base import Optimizer

MOMENTUM = opt.SGD(momentum=0.5, learning_rate=1.0)


def half(*values: float) -> Any:
    return np.array(values, np.float16)


@pytest.mark.parametrize("dtype", ["f4", "f8", "g", "i4"])
def test_other_dtypes_have_no_master(dtype: str) -> None:
    kind = np.dtype(dtype)
    assert states.state_names(MOMENTUM, kind) == ("mom",)
    assert len(states.create_state(MOMENTUM, np.ones(3, kind))) == 1


def test_the_master_comes_last_and_has_the_values_of_the_weight() -> None:
    pytest.importorskip("ml_dtypes")
    for dtype in (np.dtype(np.float16), bfloat16()):
        weight = np.linspace(-2, 2, 9).astype(dtype)
        assert states.state_names(opt.Adam(), dtype) == ("mean", "var", "master")
        *own, master = states.create_state(opt.Adam(), weight)
        assert [array.any() for array in own] == [False, False]
        assert master.dtype == np.float32
        assert master.tolist() == weight.astype("f4").tolist()


def test_a_state_that_is_made_from_the_weight_is_made_from_its_master() -> None:
    class Remembering(Optimizer):
        def create_state(self, weight: Any) -> tuple[Any, ...]:
            return (weight.copy(),)

    first, master = states.create_state(Remembering(), half(1, 2))
    assert (first.dtype, master.dtype) == (np.float32, np.float32)
    assert not np.shares_memory(first, master)


def test_the_master_stays_whoever_takes_over() -> None:
    weight = half(1, 2)
    state, _ = states.take_over(MOMENTUM, None, weight, (), 0)
    state[-1][:] += 1e-5
    for chosen in (MOMENTUM.replace(lr=2.0), opt.SGD(), opt.Adam(), MOMENTUM):
        taken, count = states.take_over(chosen, MOMENTUM, weight, state, 7)
        assert taken[-1] is state[-1]
        assert len(taken) == len(chosen.state_names()) + 1
        assert count == (7 if type(chosen) is opt.SGD else 0)


def test_a_master_follows_its_weight_where_it_does_not_round_to_it() -> None:
    weight = half(1, 1, np.nan, np.inf, -0.0, 7)
    master = np.array([1 + 2.0**-12, 2, np.nan, 1e9, 0.0, -7], "f4")
    states.follow(weight, master)
    assert repr(master.tolist()) == f"[{1 + 2.0**-12}, 1.0, nan, 1000000000.0, -0.0, 7.0]"


@pytest.mark.parametrize("length", [0, 1, 65536, 65537, 200_000])
def test_following_works_on_any_length(length: int) -> None:
    exact = np.random.default_rng(length).normal(size=length).astype("f4")
    weight, master = exact.astype("f2"), exact.copy()
    states.follow(weight, master)
    assert master.tobytes() == exact.tobytes()
    states.follow(weight[::-1].copy(), master)
    assert master.astype("f2").tobytes() == weight[::-1].tobytes()


def test_what_was_saved_without_a_master_gets_one() -> None:
    velocity = np.array([0.5, 0.5], "f4")
    for saved in ([velocity], [velocity, np.array([9, 9], "f4")]):
        state = states.restored(MOMENTUM, half(1, 2), saved)
        assert state[0] is velocity
        assert state[1].tolist() == [1, 2]
    assert states.restored(None, half(1, 2), []) == ()
    assert states.restored(MOMENTUM, np.ones(2), [velocity]) == (velocity,)


# -- the updater, whose weights are the caller's ------------------------------------------


def test_an_updater_adds_small_steps_up() -> None:
    updater, weight = opt.Updater(opt.SGD(learning_rate=1.0)), half(64, 64)
    for _ in range(10_000):
        updater("w", half(1e-3, 0), weight)
    assert weight.tolist() == [pytest.approx(54, abs=0.03), 64]


def test_a_weight_that_its_owner_has_changed_counts() -> None:
    updater, weight = opt.Updater(opt.SGD(learning_rate=1.0)), half(64, 64)
    updater("w", half(2**-6, 2**-6), weight)
    weight[1] = 32
    updater("w", half(2**-6, 2**-6), weight)
    assert weight.tolist() == [64 - 2**-5, 32 - 2**-6]


def test_an_updater_goes_on_from_states_without_masters() -> None:
    updater, weight = opt.Updater(MOMENTUM), half(64, 64)
    updater("w", half(1, 1), weight)
    ((key, (count, saved)),) = updater.states().items()
    other = opt.Updater(MOMENTUM)
    other.set_states({key: (count, saved[:1])})
    other("w", half(0, 0), weight)
    assert weight.tolist() == [64 - 1 - 0.5] * 2


def test_a_master_for_a_float32_weight_is_refused() -> None:
    updater = opt.Updater(MOMENTUM)
    updater.set_states({"w": (1, [np.zeros(2, "f4")] * 2)})
    with pytest.raises(ValueMismatchError, match="does not fit its weight of 2 elements"):
        updater("w", np.ones(2, "f4"), np.ones(2, "f4"))


# -- the parameter of MXNet ---------------------------------------------------------------


def test_multi_precision_is_taken_and_says_nothing_new() -> None:
    asked = opt.create("sgd", learning_rate=0.5, multi_precision=True)
    assert asked == opt.SGD(learning_rate=0.5)
    assert repr(asked) == repr(opt.SGD(learning_rate=0.5))
    assert opt.from_plain(opt.to_plain(asked)) == asked
    assert dataclasses.replace(asked, multi_precision=True) == asked


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_trainer_that_updates_by_itself_saves_its_masters(
    tmp_path: Path, num_before: int
) -> None:
    """Two steps of half a spacing, with a file after the first or before it."""
    weight, grad = half(64, 64), half(2**-6, 2**-6)
    for steps in (num_before, 2 - num_before):
        parameter = Parameter(weight, grad)
        trainer = Trainer({"w": parameter}, "sgd", {"learning_rate": 1.0}, kvstore=None)
        if (tmp_path / "states").exists():
            trainer.load_states(tmp_path / "states")
        for _ in range(steps):
            trainer.step(1)
        trainer.save_states(tmp_path / "states")
    assert weight.tolist() == [64 - 2**-5] * 2
