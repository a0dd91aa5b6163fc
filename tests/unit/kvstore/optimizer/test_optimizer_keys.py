"""What all optimizers share: rates and schedules, multipliers by key, replaced numbers, states."""

from __future__ import annotations

import copy
import dataclasses
import threading
from typing import Any

import numpy as np
import pytest

from kvstore import optimizer as opt
from kvstore.errors import OptimizerParameterError
from kvstore.optimizer import Optimizer
from kvstore.optimizer.parameters import MODULES, registry
from kvstore.optimizer.schedule import FactorScheduler, PolyScheduler, Schedule

EVERY = sorted(name.lower() for name in MODULES)


class TestRate:
    def test_without_a_schedule_it_is_the_learning_rate(self) -> None:
        assert [opt.SGD(learning_rate=0.5).rate(count) for count in (1, 1000)] == [0.5, 0.5]

    @pytest.mark.parametrize("name", EVERY)
    def test_every_optimizer_follows_a_schedule(self, name: str) -> None:
        falling = FactorScheduler(step=2, factor=0.5)
        scheduled = opt.create(name, learning_rate=0.4, lr_scheduler=falling)
        assert [scheduled.rate(count) for count in range(1, 6)] == [0.4, 0.4, 0.2, 0.2, 0.1]
        slower = opt.create(name, learning_rate=0.2)
        lag = int(name == "lbsgd")  # it takes the rate of the update before, as in MXNet
        for count, same in [(1 + lag, False), (3 + lag, True)]:
            results = []
            for chosen in (scheduled, slower):
                weight = np.linspace(1.0, 2.0, 5)
                state = chosen.create_state(weight)
                chosen.for_rows(5).update(weight, np.full(5, 0.5), state, count, np.empty(5))
                results.append(weight.tobytes())
            # LARS's momentum correction needs momentum, which is 0 by default.
            assert (results[0] == results[1]) is same

    def test_the_base_rate_of_a_schedule_counts_where_the_optimizer_has_none(self) -> None:
        schedule = FactorScheduler(step=1, factor=0.5, base_lr=0.8)
        from_schedule = opt.SGD(lr_scheduler=schedule)
        assert from_schedule == opt.SGD(
            learning_rate=0.8, lr_scheduler=FactorScheduler(step=1, factor=0.5)
        )
        assert opt.SGD(learning_rate=0.3, lr_scheduler=schedule).rate(1) == 0.3
        assert opt.SGD(learning_rate=0.3).replace(lr_scheduler=schedule).rate(1) == 0.8

    def test_a_rate_of_a_numpy_dtype_does_not_widen_the_weight(self) -> None:
        @dataclasses.dataclass(frozen=True)
        class Constant(Schedule):
            def decayed(self, count: int, base_lr: float) -> Any:
                return np.float64(0.5)

        weight = np.ones(3, np.float32)
        chosen = opt.SGD(lr_scheduler=Constant())
        assert type(chosen.rate(1)) is float
        chosen.update(weight, np.ones(3, np.float32), (), 1, np.empty(3, np.float32))
        assert weight.tolist() == [0.5] * 3

    def test_a_warm_up_from_above_the_learning_rate_is_refused(self) -> None:
        warm = FactorScheduler(step=1, warmup_steps=5, warmup_begin_lr=0.5)
        with pytest.raises(OptimizerParameterError, match=r"exceed the learning rate 0\.1"):
            opt.SGD(learning_rate=0.1, lr_scheduler=warm)


class TestMultipliers:
    chosen = opt.SGD(
        learning_rate=0.5, wd=0.25, lr_mult={"b": 0.0, "a": 2.0, 3: 4.0}, wd_mult={"b": 0.5}
    )

    def test_they_are_kept_sorted_so_that_equal_ones_are_equal(self) -> None:
        assert self.chosen.lr_mult == ((3, 4.0), ("a", 2.0), ("b", 0.0))
        same = opt.SGD(
            learning_rate=0.5,
            wd=0.25,
            lr_mult=[(3, 4), ("b", 0), ("a", np.float32(2))],
            wd_mult=(("b", 0.5),),
        )
        assert (same, hash(same)) == (self.chosen, hash(self.chosen))
        assert self.chosen != self.chosen.replace(lr_mult={})

    def test_a_key_has_its_own_rate_and_decay(self) -> None:
        assert [self.chosen.multipliers(key) for key in ("a", "b", "c", 3)] == [
            (2.0, 1.0),
            (0.0, 0.5),
            (1.0, 1.0),
            (4.0, 1.0),
        ]
        assert self.chosen.for_key("a") == opt.SGD(learning_rate=1.0, wd=0.25)
        assert self.chosen.for_key("b") == opt.SGD(learning_rate=0.0, wd=0.125)
        assert self.chosen.for_key(3) == opt.SGD(learning_rate=2.0, wd=0.25)

    def test_a_key_without_multipliers_gets_the_optimizer_itself(self) -> None:
        assert self.chosen.for_key("c") is self.chosen
        assert opt.Adam().for_key(0) is not None

    def test_the_same_object_comes_back_and_equal_keys_share_it(self) -> None:
        shared = opt.SGD(lr_mult={"a": 2.0, "b": 2.0, "c": 3.0})
        assert shared.for_key("a") is shared.for_key("a") is shared.for_key("b")
        assert shared.for_key("c") is not shared.for_key("a")

    def test_threads_that_ask_at_once_get_the_same_object(self) -> None:
        chosen = opt.SGD(lr_mult={"a": 2.0})
        found: list[Optimizer] = []
        barrier = threading.Barrier(4)

        def ask() -> None:
            barrier.wait()
            found.append(chosen.for_key("a"))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(each) for each in found}) == 1

    def test_a_schedule_is_multiplied_as_a_whole(self) -> None:
        schedule = PolyScheduler(
            max_update=10, final_lr=0.1, warmup_steps=4, warmup_begin_lr=0.2, pwr=1
        )
        chosen = opt.Adam(learning_rate=1.0, lr_scheduler=schedule, lr_mult={"a": 0.5, "b": 0.0})
        rates = [chosen.rate(count) for count in range(1, 15)]
        assert rates[0] == pytest.approx(0.4)
        assert [chosen.for_key("a").rate(count) for count in range(1, 15)] == [
            0.5 * rate for rate in rates
        ]
        assert {chosen.for_key("b").rate(count) for count in range(1, 15)} == {0.0}

    @pytest.mark.parametrize("name", [name for name in EVERY if name != "lars"])
    def test_every_optimizer_takes_them(self, name: str) -> None:
        wd = 0.0 if name == "groupadagrad" else 0.5  # it has no decay
        chosen = opt.create(
            name, learning_rate=0.5, wd=wd, lr_mult={"a": 2.0}, wd_mult={"a": 0.5, 1: 0.0}
        )
        assert chosen.for_key("a") == opt.create(name, learning_rate=1.0, wd=wd / 2)
        assert chosen.for_key(1) == opt.create(name, learning_rate=0.5, wd=0.0)

    def test_state_belongs_to_the_optimizer_and_to_that_of_a_key_alike(self) -> None:
        chosen = opt.SGD(momentum=0.9, lr_mult={"a": 2.0})
        velocity = np.ones(2)
        state, count = chosen.for_key("a").take_over(chosen, np.zeros(2), (velocity,), 5)
        assert (state[0] is velocity, count) == (True, 5)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"a": "2"},
            {"a": None},
            {"a": float("nan")},
            {"a": True},
            {2.5: 1.0},
            {True: 1.0},
            {("a", "b"): 1.0},
            [("a", 1.0), ("a", 2.0)],
            [("a",)],
            ["ab"],
            "ab",
            5,
            None,
        ],
        ids=repr,
    )
    def test_what_is_no_mapping_of_keys_to_numbers_is_refused(self, wrong: Any) -> None:
        with pytest.raises(OptimizerParameterError, match="lr_mult"):
            opt.SGD(lr_mult=wrong)

    def test_an_optimizer_without_the_number_takes_no_multipliers_of_it(self) -> None:
        @dataclasses.dataclass(frozen=True)
        class Fixed(Optimizer):
            size: float = 1.0

        assert Fixed().for_key("a") == Fixed()
        for given in ({"lr_mult": {"a": 1.0}}, {"lr_scheduler": FactorScheduler(step=1)}):
            (name,) = given
            with pytest.raises(
                OptimizerParameterError,
                match=f"Fixed does not have a learning_rate, .* cannot use {name}; remove {name}$",
            ):
                Fixed(**given)
        with pytest.raises(
            OptimizerParameterError, match=r"Fixed does not have a wd, .*; remove wd_mult$"
        ):
            Fixed(wd_mult={"a": 1.0})
        with pytest.raises(OptimizerParameterError, match="Fixed does not have a learning_rate"):
            Fixed().rate(1)


class TestReplace:
    def test_numbers_are_replaced_and_the_rest_stays(self) -> None:
        chosen = opt.SGD(momentum=0.9, lr_mult={"a": 2.0})
        replaced = chosen.replace(lr=0.5, wd=1)
        assert replaced == opt.SGD(learning_rate=0.5, momentum=0.9, wd=1.0, lr_mult={"a": 2.0})
        assert type(replaced.wd) is float
        assert chosen.learning_rate == 0.01
        assert replaced.for_key("a") == opt.SGD(learning_rate=1.0, momentum=0.9, wd=1.0)

    def test_an_unknown_name_lists_what_is_known(self) -> None:
        with pytest.raises(
            OptimizerParameterError,
            match=r"sgd has no parameter mom; known: learning_rate, .*, lr_scheduler, lr_mult",
        ):
            opt.SGD().replace(mom=0.9)

    def test_both_names_of_the_learning_rate_at_once_are_refused(self) -> None:
        with pytest.raises(OptimizerParameterError, match="give one"):
            opt.SGD().replace(lr=0.1, learning_rate=0.1)

    def test_numbers_are_checked_again(self) -> None:
        with pytest.raises(OptimizerParameterError, match="beta1"):
            opt.Adam().replace(beta1=1.0)
        with pytest.raises(OptimizerParameterError, match="lr_scheduler of SGD must be Schedule"):
            opt.SGD().replace(lr_scheduler="factor")


class TestText:
    def test_it_shows_the_class_s_own_numbers_first_and_the_others_when_set(self) -> None:
        assert repr(opt.NAG()) == (
            "NAG(learning_rate=0.01, momentum=0.0, wd=0.0, rescale_grad=1.0, clip_gradient=None)"
        )
        assert repr(opt.NAG(lr_mult={"a": 2})).endswith(", lr_mult=(('a', 2.0),))")

    def test_names_and_params_make_an_equal_one_again(self) -> None:
        chosen = opt.SGD(
            lr_scheduler=FactorScheduler(step=3), lr_mult={"a": 2}, wd_mult={5: 0.5, "x": 1}
        )
        assert opt.create(chosen.name, **chosen.params()) == chosen

    def test_a_copy_is_equal(self) -> None:
        chosen = opt.SGD(lr_mult={"a": 2})
        chosen.for_key("a")
        assert copy.deepcopy(chosen) == chosen


class TestStates:
    def test_arrays_are_taken_over_by_name(self) -> None:
        centered = opt.RMSProp(centered=True)
        square, mean, delta = (np.full(2, float(number)) for number in range(3))
        state, count = opt.RMSProp().take_over(centered, np.zeros(2), (square, mean, delta), 4)
        assert (len(state), state[0] is square, count) == (1, True, 4)
        state, _ = centered.take_over(opt.RMSProp(), np.zeros(2), state, 4)
        assert [array.tolist() for array in state] == [[0.0] * 2] * 3

    def test_an_optimizer_with_a_create_state_of_its_own_has_numbered_names(self) -> None:
        @dataclasses.dataclass(frozen=True)
        class Pair(Optimizer):
            def create_state(self, weight: Any) -> tuple[Any, ...]:
                return np.ones_like(weight), np.zeros_like(weight)

        assert Pair().state_names() == ("state0", "state1")
        kept = np.full(2, 7.0)
        state, _ = Pair().take_over(Pair(), np.zeros(2), (kept,), 1)
        assert (state[0] is kept, state[1].tolist()) == (True, [0.0, 0.0])

    def test_names_and_arrays_of_a_class_that_gives_names_only(self) -> None:
        @dataclasses.dataclass(frozen=True)
        class Named(Optimizer):
            def state_names(self) -> tuple[str, ...]:
                return ("seen",)

        (array,) = Named().create_state(np.ones(3, np.float16))
        assert (array.dtype, array.tolist()) == (np.float32, [0.0] * 3)


def test_a_parameter_without_a_default_is_asked_for_by_name() -> None:
    @opt.register
    @dataclasses.dataclass(frozen=True)
    class Needy(Optimizer):
        size: float

    try:
        with pytest.raises(OptimizerParameterError, match="needy needs a value for size"):
            opt.create("needy")
        assert opt.create("needy", size=1) == Needy(1.0)
    finally:
        del registry["needy"]
