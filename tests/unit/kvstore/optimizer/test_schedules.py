"""Each schedule against MXNet's formulas, written as loops over updates; and its refusals."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import kvstore.lr_scheduler as schedules
import pytest

import kvstore as mx
from kvstore.errors import ArgumentTypeError, OptimizerParameterError
from kvstore.optimizer.schedule import ScaledScheduler, _registry

COUNTS = range(1, 41)


def factor_by_hand(base: float, step: int, factor: float, least: float) -> list[float]:
    """Update for update, as MXNet's stateful one changes its rate."""
    rates, changed = [], 0
    for count in COUNTS:
        while count > changed + step:
            changed += step
            base = max(base * factor, least)
        rates.append(base)
    return rates


@pytest.mark.parametrize(
    ("step", "factor", "least"), [(1, 0.9, 1e-8), (7, 0.5, 1e-8), (5, 0.1, 1e-3), (3, 1.0, 0.0)]
)
def test_factor_multiplies_after_each_stretch_down_to_the_least(
    step: int, factor: float, least: float
) -> None:
    schedule = schedules.FactorScheduler(step, factor, least)
    expected = factor_by_hand(0.5, step, factor, least)
    assert [schedule.rate(count, 0.5) for count in COUNTS] == pytest.approx(expected, rel=1e-12)


def test_multifactor_multiplies_after_each_of_its_updates() -> None:
    schedule = schedules.MultiFactorScheduler(step=[3, 4, 10], factor=0.5)
    assert schedule.step == (3, 4, 10)
    rates = [schedule.rate(count, 8.0) for count in range(1, 13)]
    assert rates == [8.0, 8.0, 8.0, 4.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("warmup", [0, 6])
def test_poly_falls_to_the_final_rate_and_stays(warmup: int) -> None:
    schedule = schedules.PolyScheduler(
        max_update=20, pwr=3, final_lr=0.1, warmup_steps=warmup, warmup_begin_lr=0.2
    )
    for count in COUNTS:
        if count < warmup:
            expected = 0.2 + (0.7 - 0.2) * count / warmup
        else:
            left = 1 - (min(count, 20) - warmup) / (20 - warmup)
            expected = 0.1 + (0.7 - 0.1) * left**3
        assert schedule.rate(count, 0.7) == pytest.approx(expected, rel=1e-12)


def test_cosine_falls_along_half_a_wave_and_stays() -> None:
    schedule = schedules.CosineScheduler(max_update=20, final_lr=0.1, warmup_steps=10)
    for count in range(10, 41):
        turned = math.pi * (min(count, 20) - 10) / 10
        expected = 0.1 + (0.7 - 0.1) * (1 + math.cos(turned)) / 2
        assert schedule.rate(count, 0.7) == pytest.approx(expected, rel=1e-12)
    assert [schedule.rate(count, 0.7) for count in (20, 21, 10**9)] == [0.1] * 3


ALL = [
    schedules.FactorScheduler(step=100),
    schedules.MultiFactorScheduler(step=(100,)),
    schedules.PolyScheduler(max_update=100),
    schedules.CosineScheduler(max_update=100),
]


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.name)
def test_a_warm_up_climbs_in_equal_steps_or_stays_low(schedule: schedules.Schedule) -> None:
    warm = dataclasses.replace(schedule, warmup_steps=4, warmup_begin_lr=0.2)
    assert [warm.rate(count, 1.0) for count in range(1, 4)] == pytest.approx([0.4, 0.6, 0.8])
    assert warm.rate(4, 1.0) == warm.decayed(4, 1.0)
    low = dataclasses.replace(warm, warmup_mode="constant")
    assert [low.rate(count, 1.0) for count in range(1, 4)] == [0.2] * 3
    assert low.rate(4, 1.0) == warm.rate(4, 1.0)


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.name)
def test_the_order_of_questions_does_not_matter(schedule: schedules.Schedule) -> None:
    backwards = [schedule.rate(count, 0.3) for count in reversed(COUNTS)]
    assert backwards[::-1] == [schedule.rate(count, 0.3) for count in COUNTS]


def test_mxnets_way_to_call_starts_from_the_schedules_own_base_or_from_its_default() -> None:
    assert schedules.FactorScheduler(step=2, factor=0.5, base_lr=0.8)(3) == 0.4
    assert schedules.FactorScheduler(step=2, factor=0.5)(3) == 0.005


def test_names_make_schedules() -> None:
    assert schedules.create("Factor", step=3) == schedules.FactorScheduler(3)
    names = [schedule.name for schedule in ALL]
    assert names == ["factor", "multifactor", "poly", "cosine"]
    assert schedules.LRScheduler is schedules.Schedule
    assert mx.lr_scheduler.FactorScheduler(3).step == 3


def test_a_schedule_of_your_own_is_registered_under_its_name() -> None:
    @schedules.register
    @dataclasses.dataclass(frozen=True)
    class HalvingScheduler(schedules.Schedule):
        every: int = 2

        def decayed(self, count: int, base_lr: float) -> float:
            return base_lr / 2.0 ** (count // self.every)

    try:
        assert schedules.create("halving", every=3).rate(6, 1.0) == 0.25
    finally:
        del _registry["halving"]


def test_a_schedule_without_a_formula_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Schedule must define decayed"):
        schedules.Schedule().rate(1, 0.1)


def test_scaled_multiplies_everything() -> None:
    inner = schedules.CosineScheduler(max_update=9, final_lr=0.5, warmup_steps=3)
    scaled = ScaledScheduler(inner, 0.25, 2.0)
    for count in COUNTS:
        assert scaled.rate(count, 99.0) == 0.25 * inner.rate(count, 2.0)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("factor", {}, "factor needs a value for step"),
        ("factor", {"step": 0}, "step must be at least 1"),
        ("factor", {"step": 1.5}, "step of FactorScheduler must be int"),
        ("factor", {"step": 10**400}, "step of FactorScheduler must be int"),
        ("factor", {"step": 1, "factor": 1.5}, "factor must lie in"),
        ("factor", {"step": 1, "base_lr": 10**400}, "base_lr of FactorScheduler must be"),
        ("factor", {"step": 1, "warmup_steps": -1}, "warmup_steps must not be negative"),
        ("factor", {"step": 1, "warmup_mode": "cubic"}, "'linear' or 'constant', got 'cubic'"),
        (
            "factor",
            {"step": 1, "base_lr": 0.1, "warmup_steps": 1, "warmup_begin_lr": 0.2},
            "warmup_begin_lr must not exceed the learning rate 0.1, got 0.2",
        ),
        ("factor", {"step": 1, "gamma": 2}, "factor has no parameter gamma; known: step, factor"),
        ("multifactor", {"step": []}, "step must be an increasing list"),
        ("multifactor", {"step": [0, 1]}, "step must be an increasing list"),
        ("multifactor", {"step": [3, 3]}, "step must be an increasing list"),
        ("multifactor", {"step": 3}, "step of MultiFactorScheduler must be a list of int"),
        ("multifactor", {"step": [1.5]}, "step of MultiFactorScheduler must be int"),
        ("multifactor", {"step": [1], "factor": -0.1}, "factor must lie in"),
        ("poly", {"max_update": 0}, "max_update must be at least 1"),
        ("poly", {"max_update": 5, "warmup_steps": 5}, r"greater than warmup_steps \(5\)"),
        ("poly", {"max_update": 5, "pwr": -1}, "pwr must not be negative"),
        ("cosine", {"max_update": 5, "final_lr": "0"}, "final_lr of CosineScheduler must be"),
        ("linear", {}, "no learning-rate schedule is named 'linear'; known: cosine, factor"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(
    name: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptimizerParameterError, match=message):
        schedules.create(name, **params)


def test_a_name_must_be_text_and_a_class_a_frozen_dataclass_of_a_name_of_its_own() -> None:
    with pytest.raises(ArgumentTypeError, match="must be a string"):
        schedules.create(5)  # type: ignore[arg-type]

    class Plain(schedules.FactorScheduler):
        pass

    with pytest.raises(ArgumentTypeError, match="frozen dataclass"):
        schedules.register(Plain)

    @dataclasses.dataclass(frozen=True)
    class Poly(schedules.Schedule):
        pass

    with pytest.raises(ArgumentTypeError, match="the schedule name 'poly' is taken by"):
        schedules.register(Poly)


# -- MXNet's order, and whose rate counts ---------------------------------------------------


def test_values_by_position_have_the_order_of_mxnet() -> None:
    warm_up = {"warmup_steps": 3, "warmup_begin_lr": 0.1, "warmup_mode": "constant"}
    last = warm_up.values()
    assert schedules.FactorScheduler(5, 0.5, 1e-3, 0.4, *last) == schedules.FactorScheduler(
        step=5, factor=0.5, stop_factor_lr=1e-3, base_lr=0.4, **warm_up
    )
    assert schedules.MultiFactorScheduler([5], 0.5, 0.4, *last) == schedules.MultiFactorScheduler(
        step=[5], factor=0.5, base_lr=0.4, **warm_up
    )
    assert schedules.PolyScheduler(50, 0.5, 3, 0.2, *last) == schedules.PolyScheduler(
        max_update=50, base_lr=0.5, pwr=3, final_lr=0.2, **warm_up
    )
    assert schedules.CosineScheduler(50, 0.5, 0.2, *last) == schedules.CosineScheduler(
        max_update=50, base_lr=0.5, final_lr=0.2, **warm_up
    )
    assert schedules.PolyScheduler(50, 0.5, 2)(25) == 0.125
    assert schedules.CosineScheduler(50, 0.5)(50) == 0.0


def test_a_learning_rate_that_is_given_outranks_base_lr_even_if_it_is_the_default() -> None:
    schedule = schedules.FactorScheduler(100, base_lr=0.5)
    assert mx.optimizer.SGD(lr_scheduler=schedule).rate(1) == 0.5
    assert mx.optimizer.SGD(learning_rate=0.01, lr_scheduler=schedule).rate(1) == 0.01
    assert mx.optimizer.create("adam", lr_scheduler=schedule).rate(1) == 0.001
    assert mx.optimizer.Adam(0.02, lr_scheduler=schedule).rate(1) == 0.02
    assert mx.optimizer.Ftrl(learning_rate=0.3, lr_scheduler=schedule).rate(1) == 0.5
    for kept in (schedules.PolyScheduler(9, 0.5), schedules.CosineScheduler(9, 0.5)):
        assert mx.optimizer.SGD(learning_rate=0.01, lr_scheduler=kept).rate(0) == 0.5


def test_a_rate_that_was_settled_stays_when_an_optimizer_travels_or_is_copied() -> None:
    schedule = schedules.FactorScheduler(100, base_lr=0.5)
    for chosen in (
        mx.optimizer.SGD(lr_scheduler=schedule),
        mx.optimizer.Adam(lr_scheduler=schedule),
    ):
        rate = chosen.rate(1)
        for same in (
            mx.optimizer.from_plain(mx.optimizer.to_plain(chosen)),
            mx.optimizer.create(chosen.name, **chosen.params()),
            chosen.replace(wd=0.5).replace(wd=0.0),
            copy.deepcopy(chosen),
        ):
            assert (same, same.rate(1)) == (chosen, rate)
