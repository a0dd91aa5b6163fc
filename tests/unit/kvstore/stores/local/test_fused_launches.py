"""Which keys go into one launch, by which kernel and with which numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from kvstore import optimizer
from kvstore.arrays.gpu.kernels import MOST_COPIES, Kernel, KernelParameters
from kvstore.arrays.keys import KeySpec
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.schedule import FactorScheduler
from kvstore.optimizer.sgd import SGD
from kvstore.stores.local.device import are_apart, jobs_of, kernel_for, numbers_of
from kvstore.stores.local.memory import StoredKey

SGD_MOMENTUM = optimizer.create("sgd", learning_rate=0.1, momentum=0.9)
PLAIN_SGD = optimizer.create("sgd", learning_rate=0.1)


def entry(key: str, dtype: Any = np.float32, count: int = 0) -> StoredKey:
    value = np.zeros(3, dtype)
    made = StoredKey(key, KeySpec(value.shape, value.dtype), value, 1)
    made.count = count
    return made


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("f2", "float16"), ("f4", "float32"), ("f8", "float64"), ("u1", "uint8"), ("i4", "uint32")],
)
def test_sums_of_floats_and_integers_have_a_kernel(dtype: str, name: str) -> None:
    assert kernel_for(np.dtype(dtype), 3, None) == Kernel(name, 3, "sum")


@pytest.mark.parametrize("dtype", ["?", "c8", "c16"])
def test_bool_and_complex_have_none(dtype: str) -> None:
    assert kernel_for(np.dtype(dtype), 3, None) is None


def test_sgd_has_a_kernel_with_and_without_momentum() -> None:
    assert kernel_for(np.dtype("f2"), 4, SGD_MOMENTUM) == Kernel("float16", 4, "momentum")
    assert kernel_for(np.dtype("f4"), 1, PLAIN_SGD) == Kernel("float32", 1, "sgd")


def test_other_optimizers_have_none_nor_has_a_subclass_with_a_formula_of_its_own() -> None:
    @dataclasses.dataclass(frozen=True)
    class Own(SGD):
        pass

    others: list[Optimizer] = [optimizer.create("adam"), optimizer.create("nag"), Own()]
    assert [kernel_for(np.dtype("f4"), 2, other) for other in others] == [None] * 3


def test_too_many_copies_have_none() -> None:
    assert kernel_for(np.dtype("f4"), MOST_COPIES, PLAIN_SGD) is not None
    assert kernel_for(np.dtype("f4"), MOST_COPIES + 1, PLAIN_SGD) is None


def test_the_numbers_are_those_of_the_update_with_this_count() -> None:
    schedule = FactorScheduler(step=2, factor=0.5)
    used = optimizer.create(
        "sgd", learning_rate=0.4, momentum=0.9, wd=1e-3, clip_gradient=2.0, lr_scheduler=schedule
    )
    assert numbers_of(used, 1) == KernelParameters(1.0, 2.0, 1e-3, 0.4, 0.9)
    assert numbers_of(used, 3).rate == used.rate(3) == 0.2


@pytest.mark.parametrize("limit", [None, 0.0, -1.0])
def test_no_clipping_is_an_infinite_limit(limit: float | None) -> None:
    used = optimizer.create("sgd", clip_gradient=limit)
    assert numbers_of(used, 1).limit == np.inf


def test_keys_of_one_kind_are_one_job() -> None:
    entries = [entry("a"), entry("b"), entry("c")]
    jobs, others = jobs_of(entries, [4, 4, 4], SGD_MOMENTUM)
    assert [job.indices for job in jobs] == [[0, 1, 2]]
    assert jobs[0].kernel == Kernel("float32", 4, "momentum")
    assert others == []


def test_dtypes_and_numbers_of_copies_divide_the_jobs() -> None:
    entries = [entry("a"), entry("b", np.float16), entry("c"), entry("d")]
    jobs, others = jobs_of(entries, [2, 2, 3, 2], None)
    assert [(job.kernel, job.indices) for job in jobs] == [
        (Kernel("float32", 2, "sum"), [0, 3]),
        (Kernel("float16", 2, "sum"), [1]),
        (Kernel("float32", 3, "sum"), [2]),
    ]
    assert others == []


def test_a_multiplier_and_a_later_count_make_jobs_of_their_own() -> None:
    schedule = FactorScheduler(step=1, factor=0.5)
    used = optimizer.create("sgd", learning_rate=1.0, lr_scheduler=schedule, lr_mult={"b": 0.1})
    entries = [entry("a"), entry("b"), entry("c", count=5), entry("d")]
    jobs, _ = jobs_of(entries, [1] * 4, used)
    assert [job.indices for job in jobs] == [[0, 3], [1], [2]]
    rates = [used.rate(1), used.for_key("b").rate(1), used.rate(6)]
    assert [job.numbers.rate for job in jobs] == rates
    assert len(set(rates)) == 3


def test_what_cannot_be_fused_is_left_over() -> None:
    entries = [entry("a", np.complex64), entry("b"), entry("c", bool)]
    jobs, others = jobs_of(entries, [1] * 3, None)
    assert [job.indices for job in jobs] == [[1]]
    assert others == [0, 2]
    assert jobs_of(entries[1:2], [1], optimizer.create("adam")) == ([], [0])


def test_a_velocity_of_another_dtype_is_left_to_the_formula() -> None:
    strange, usual = entry("a"), entry("b")
    strange.keep_state([np.zeros(3, np.float64)], 0)
    usual.keep_state([np.zeros(3, np.float32)], 0)
    jobs, others = jobs_of([strange, usual], [1, 1], SGD_MOMENTUM)
    assert [job.indices for job in jobs] == [[1]]
    assert others == [0]


def test_stretches_that_touch_are_apart_and_those_that_overlap_are_not() -> None:
    assert are_apart([], [])
    assert are_apart([100, 0, 50], [10, 50, 50])
    assert not are_apart([100, 0, 50], [10, 51, 50])
    assert not are_apart([7, 7], [4, 4])
    assert are_apart([7, 7, 8], [0, 4, 0])
