"""Sums and updates repeat to the last bit, whatever the blocks, the parts and the memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernel_sets import SETS, computing_with

from kvstore import optimizer
from kvstore.arrays.cpu.sums import Workspace, apply_round, sum_in_order
from kvstore.arrays.dtypes import accumulation_dtype, bfloat16
from kvstore.errors import ValueMismatchError
from kvstore.optimizer import Optimizer
from kvstore.optimizer.states import create_state

Array = np.ndarray[Any, Any]
LENGTH = 3001
BLOCKS = [7, 64, 1000, 3000, 3001, 65536]


@pytest.fixture(autouse=True, params=SETS)
def arithmetic(request: pytest.FixtureRequest) -> Iterator[None]:
    with computing_with(request.param):
        yield


def gradients(count: int, dtype: str = "f4", length: int = LENGTH) -> list[Array]:
    """Values over nine orders of magnitude, so that another order of sums shows in the bits."""
    random = np.random.default_rng(11)
    lowest = -6 if dtype == "f2" else -4
    return [
        (random.normal(size=length) * 10.0 ** random.uniform(lowest, lowest + 9, length)).astype(
            dtype
        )
        for _ in range(count)
    ]


def test_another_order_of_sums_would_show_in_these_gradients() -> None:
    first, second, third = gradients(3)
    assert ((first + second) + third).tobytes() != (first + (second + third)).tobytes()


@pytest.mark.parametrize("dtype", ["f4", "f8", "g", "c8", "c16"])
@pytest.mark.parametrize("block", BLOCKS)
def test_contributions_are_added_left_to_right_in_any_block_size(dtype: str, block: int) -> None:
    values = gradients(5, dtype)
    expected = (((values[0] + values[1]) + values[2]) + values[3]) + values[4]
    out = np.empty(LENGTH, dtype)
    sum_in_order(values, out, block_elements=block)
    np.testing.assert_array_equal(out, expected, strict=True)
    assert out.dtype == expected.dtype


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "?"])
def test_integers_wrap_and_booleans_are_or_ed(dtype: str) -> None:
    random = np.random.default_rng(2)
    values = [random.integers(0, 2 if dtype == "?" else 120, 500).astype(dtype) for _ in range(4)]
    out = np.empty(500, dtype)
    sum_in_order(values, out)
    expected = ((values[0] + values[1]) + values[2]) + values[3]
    np.testing.assert_array_equal(out, expected, strict=True)


def test_float16_is_added_in_float32_and_rounded_once() -> None:
    assert accumulation_dtype(np.dtype(np.float16)) == np.float32
    values = [np.array([2048.0, 1.0], np.float16)] + [np.ones(2, np.float16)] * 3
    out = np.empty(2, np.float16)
    sum_in_order(values, out)
    # In float16, 2048 + 1 is 2048 again, three times over.
    np.testing.assert_array_equal(out, np.array([2052.0, 4.0], np.float16))


def as_dtype(values: list[Array], name: str) -> list[Array]:
    if name == "bfloat16":
        pytest.importorskip("ml_dtypes")
    with np.errstate(all="ignore"):
        return [value.astype(bfloat16() if name == "bfloat16" else name) for value in values]


def halves(count: int, name: str) -> list[Array]:
    """Gradients in one of the two 16-bit floats."""
    return gradients(count, name) if name == "f2" else as_dtype(gradients(count), name)


@pytest.mark.parametrize("name", ["f2", "bfloat16"])
@pytest.mark.parametrize("block", [7, 1000, 65536])
def test_halves_are_summed_in_float32_and_rounded_once(name: str, block: int) -> None:
    values = halves(4, name)
    wide = [value.astype(np.float32) for value in values]
    expected = (((wide[0] + wide[1]) + wide[2]) + wide[3]).astype(values[0].dtype)
    rounded_each_time = ((values[0] + values[1]) + values[2]) + values[3]
    assert expected.tobytes() != rounded_each_time.tobytes()
    out = np.empty(LENGTH, values[0].dtype)
    sum_in_order(values, out, block_elements=block)
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["f2", "bfloat16"])
def test_the_masters_of_halves_are_updated_and_rounded_once(name: str) -> None:
    class TwoSteps(Optimizer):
        def update(
            self, weight: Array, grad: Array, state: object, count: int, scratch: Array
        ) -> None:
            # Either change alone is too small for a weight of 16 bits.
            np.multiply(weight, 1 + 2.0**-12, out=weight)
            np.multiply(weight, 1 + 2.0**-13, out=weight)
            np.subtract(weight, grad, out=weight)

    values = halves(3, name)
    weight = np.linspace(1, 2, LENGTH).astype(values[0].dtype)
    wide = [value.astype(np.float32) for value in values]
    expected = weight.astype(np.float32)
    chosen = TwoSteps()
    (master,) = create_state(chosen, weight)
    for count in (1, 2, 3):
        expected *= np.float32(1 + 2.0**-12)
        expected *= np.float32(1 + 2.0**-13)
        expected -= (wide[0] + wide[1]) + wide[2]
        apply_round(weight, values, chosen, (master,), count, Workspace(), block_elements=64)
        assert master.tobytes() == expected.tobytes()
        assert weight.tobytes() == expected.astype(weight.dtype).tobytes()


def test_one_contribution_is_copied_exactly() -> None:
    value = np.array([-0.0, np.inf, np.nan, 1e-45], np.float32)
    out = np.empty(4, np.float32)
    sum_in_order([value], out)
    assert out.tobytes() == value.tobytes()


def test_the_result_may_overwrite_the_first_contribution() -> None:
    values = gradients(3)
    expected = (values[0] + values[1]) + values[2]
    sum_in_order(values, values[0], block_elements=64)
    assert values[0].tobytes() == expected.tobytes()


FLOATS = ["f2", "bfloat16", "f4", "f8", "g"]


@pytest.mark.parametrize(
    ("name", "chosen"),
    [(name, None) for name in ["?", "i1", "i2", "u4", "i8", "c8", "c16", *FLOATS]]
    + [(name, optimizer.create("sgd", learning_rate=0.5)) for name in FLOATS],
)
def test_views_of_received_frames_are_added_where_they_lie(
    name: str, chosen: Optimizer | None
) -> None:
    values = as_dtype(gradients(3, "f2" if name == "f2" else "f4"), name)
    dtype = values[0].dtype
    frames = [b"#" + value.tobytes() for value in values]
    views = [np.frombuffer(frame, np.uint8, offset=1).view(dtype) for frame in frames]
    assert not any(view.flags.writeable for view in views)
    assert dtype.itemsize == 1 or not any(view.flags.aligned for view in views)
    out, expected = np.zeros(LENGTH, dtype), np.zeros(LENGTH, dtype)
    for into, contributions in ((out, views), (expected, values)):
        state = () if chosen is None else create_state(chosen, into)
        apply_round(into, contributions, chosen, state, 1, Workspace())
    np.testing.assert_array_equal(out, expected)  # a long double has bytes without meaning
    assert out.any()


def test_an_empty_key_has_an_empty_sum() -> None:
    out = np.empty(0, np.float32)
    sum_in_order([np.empty(0, np.float32)] * 2, out)
    apply_round(out, [out.copy()], optimizer.create("adam"), (out, out), 1, Workspace())


def test_overflow_is_infinite_without_a_warning() -> None:
    out = np.empty(1, np.float32)
    sum_in_order([np.array([3e38], np.float32)] * 2, out)
    assert out[0] == np.inf


@pytest.mark.parametrize(
    "contributions",
    [
        [],
        [np.zeros(3), np.zeros(1)],
        [np.zeros(4)],
        [np.zeros((3, 1))],
        [np.zeros(3), np.zeros(3, np.float32)],
    ],
)
def test_contributions_that_do_not_fit_are_refused_and_nothing_is_written(
    contributions: list[Array],
) -> None:
    out = np.ones(3)
    with pytest.raises(ValueMismatchError):
        sum_in_order(contributions, out)
    with pytest.raises(ValueMismatchError):
        apply_round(out, contributions, optimizer.create("sgd"), (), 1, Workspace())
    np.testing.assert_array_equal(out, np.ones(3))


def test_without_an_optimizer_a_round_assigns_the_sum_and_never_accumulates() -> None:
    weight = np.full(LENGTH, 7, np.float32)
    values = gradients(2)
    for _ in range(3):
        apply_round(weight, values, None, (), 0, Workspace())
    assert weight.tobytes() == (values[0] + values[1]).tobytes()


def run_rounds(
    chosen: Optimizer, dtype: str, block: int, borders: tuple[int, ...] = (0, LENGTH)
) -> tuple[bytes, ...]:
    """Three rounds of three contributions on the pieces between ``borders``."""
    drawn = halves(3, dtype) if dtype == "bfloat16" else gradients(3, dtype)
    weight = np.linspace(-2, 2, LENGTH).astype(drawn[0].dtype)
    state = create_state(chosen, weight)
    workspace = Workspace()
    for count in (1, 2, 3):
        values = [value * np.array(count, weight.dtype) for value in drawn]
        for start, stop in itertools.pairwise(borders):
            apply_round(
                weight[start:stop],
                [value[start:stop] for value in values],
                chosen,
                [array[start:stop] for array in state],
                count,
                workspace,
                block_elements=block,
            )
    return (weight.tobytes(), *(array.tobytes() for array in state))


OPTIMIZERS = [
    optimizer.create("sgd", learning_rate=0.3, wd=1e-3),
    optimizer.create("sgd", learning_rate=0.1, momentum=0.9, wd=1e-4, clip_gradient=50.0),
    optimizer.create("adam", learning_rate=0.05, wd=1e-4, rescale_grad=0.25),
]


@pytest.mark.parametrize("chosen", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("dtype", ["f2", "bfloat16", "f4", "f8"])
def test_updates_have_the_same_bits_in_every_block_size(chosen: Optimizer, dtype: str) -> None:
    expected = run_rounds(chosen, dtype, LENGTH)
    assert {block for block in BLOCKS if run_rounds(chosen, dtype, block) != expected} == set()


@pytest.mark.parametrize("chosen", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("dtype", ["f2", "bfloat16", "f4", "f8"])
def test_updates_of_the_pieces_are_the_update_of_the_whole(chosen: Optimizer, dtype: str) -> None:
    whole = run_rounds(chosen, dtype, 65536)
    assert run_rounds(chosen, dtype, 65536, (0, 1, 900, 901, 2222, LENGTH)) == whole


def test_a_round_leaves_its_contributions_as_they_were() -> None:
    values = gradients(1)
    before = values[0].tobytes()
    values[0].setflags(write=False)
    weight = np.zeros(LENGTH, np.float32)
    apply_round(weight, values, optimizer.create("sgd", rescale_grad=2.0), (), 1, Workspace())
    assert values[0].tobytes() == before


def test_steady_rounds_reuse_the_same_scratch_blocks() -> None:
    workspace = Workspace()
    first = workspace.block(0, np.dtype("f4"), 100)
    assert np.shares_memory(first, workspace.block(0, np.dtype("f4"), 40))
    assert not np.shares_memory(first, workspace.block(1, np.dtype("f4"), 100))
    assert workspace.block(0, np.dtype("f8"), 100).dtype == np.float64
    assert len(workspace.block(0, np.dtype("f4"), 200)) == 200


def test_an_optimizer_of_key_scope_sees_the_whole_key() -> None:
    class Norms(Optimizer):
        scope = "key"
        seen: list[int] = []

        def update(
            self, weight: Array, grad: Array, state: object, count: int, scratch: Array
        ) -> None:
            self.seen.append(len(grad))

    weight = np.zeros(100, np.float32)
    apply_round(weight, [weight + 1], Norms(), (), 1, Workspace(), block_elements=10)
    assert Norms.seen == [100]
