"""The updater: many keys by one optimizer, on whole arrays, with the bits of the local store."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvstore as mx
from kvstore import optimizer as opt
from kvstore.arrays.cpu.sums import BLOCK_ELEMENTS
from kvstore.errors import ArgumentTypeError, NotSupportedError, ValueMismatchError
from kvstore.optimizer.schedule import FactorScheduler

Array = Any

CHOSEN = [
    opt.SGD(learning_rate=0.1, momentum=0.9, wd=0.01),
    opt.Adam(wd=0.1, lr_scheduler=FactorScheduler(step=1, factor=0.5)),
    opt.LAMB(learning_rate=0.1),
    opt.SGD(lr_mult={"w": 0.5}, wd=0.1, wd_mult={"w": 0.0}),
]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("chosen", CHOSEN, ids=lambda chosen: chosen.name)
def test_it_gives_the_bits_of_the_local_store(chosen: opt.Optimizer, dtype: str) -> None:
    random = np.random.default_rng(2)
    shape = (3, BLOCK_ELEMENTS // 2 + 5)
    weight = random.normal(size=shape).astype(dtype)
    store = mx.kv.create("local")
    store.init("w", weight)
    store.set_optimizer(chosen)
    updater = opt.get_updater(chosen)
    for _ in range(3):
        grad = random.normal(size=shape).astype(dtype)
        store.push("w", grad)
        updater("w", grad, weight)
    assert store.pull("w").tobytes() == weight.tobytes()
    store.close()


def layouts() -> dict[str, Array]:
    base = np.arange(24.0).reshape(4, 6)
    return {
        "transposed": base.copy().T,
        "strided": np.arange(96.0).reshape(8, 12)[::2, ::2],
        "reversed": base.copy()[::-1],
        "fortran": np.asfortranarray(base),
        "big-endian": base.astype(">f8"),
        "unaligned": np.frombuffer(bytearray(b"x" + base.tobytes()), np.uint8)[1:].view("f8"),
        "0-d": np.array(5.0),
        "empty": np.zeros((0, 3)),
    }


@pytest.mark.parametrize("layout", layouts())
def test_any_shape_and_memory_order_is_updated_in_place(layout: str) -> None:
    weight = layouts()[layout]
    grad = np.random.default_rng(0).normal(size=weight.shape)
    expected = weight - 0.5 * (grad + 0.1 * weight)
    updater = opt.Updater(opt.SGD(learning_rate=0.5, wd=0.1))
    updater(3, grad, weight)
    np.testing.assert_allclose(weight, expected, rtol=1e-15)
    backwards = grad[::-1] if grad.ndim else grad
    updater(3, backwards, weight)
    np.testing.assert_allclose(weight, expected - 0.5 * (backwards + 0.1 * expected))


def test_keys_have_states_and_counts_of_their_own() -> None:
    updater = opt.Updater(opt.Adam())
    a, b = np.zeros(2), np.zeros(2)
    for _ in range(3):
        updater("a", np.ones(2), a)
    updater("b", np.ones(2), b)
    assert {key: count for key, (count, _) in updater.states().items()} == {"a": 3, "b": 1}
    alone = opt.Updater(opt.Adam())
    again = np.zeros(2)
    alone("b", np.ones(2), again)
    assert again.tobytes() == b.tobytes()


def test_lists_are_updated_in_order() -> None:
    updater = opt.Updater(opt.SGD(learning_rate=1.0))
    weights = [np.zeros(1), np.zeros(2)]
    updater([0, 1], [np.ones(1), np.full(2, 2.0)], weights)
    assert [weight.tolist() for weight in weights] == [[-1.0], [-2.0, -2.0]]
    with pytest.raises(
        ValueMismatchError, match="2 keys needs 2 gradients and weights, got 1 and 2"
    ):
        updater([0, 1], [np.ones(1)], weights)


def test_states_are_copies_and_go_on_elsewhere_bit_for_bit() -> None:
    first, weight = opt.Updater(opt.Adam()), np.ones(4, np.float16)
    first("w", np.full(4, 0.5, np.float16), weight)
    saved, copy = first.states(), weight.copy()
    second = opt.Updater(opt.Adam())
    second.set_states(saved)
    saved["w"][1][0][:] = 99.0
    for updater, array in ((first, weight), (second, copy)):
        updater("w", np.full(4, 0.25, np.float16), array)
    assert weight.tobytes() == copy.tobytes()
    assert second.states()["w"][0] == 2
    assert second.states()["w"][1][0].dtype == np.float32


def test_states_that_do_not_fit_are_refused() -> None:
    updater = opt.Updater(opt.Adam())
    with pytest.raises(
        ValueMismatchError, match=r"1 arrays and 3 updates, but adam keeps 2 arrays \(mean"
    ):
        updater.set_states({"w": (3, (np.zeros(2),))})
    updater.set_states({"w": (3, (np.zeros(2), np.zeros(2)))})
    with pytest.raises(ValueMismatchError, match="does not fit its weight of 3 elements"):
        updater("w", np.ones(3), np.ones(3))


def test_another_optimizer_takes_over_as_in_a_store() -> None:
    updater, weight = opt.Updater(opt.SGD(learning_rate=1.0, momentum=0.5)), np.zeros(1)
    updater("w", np.ones(1), weight)
    updater.optimizer = updater.optimizer.replace(lr=0.0)
    updater("w", np.ones(1), weight)
    assert weight == -1.5
    assert updater.states()["w"][0] == 2
    updater.optimizer = opt.Adam()
    updater("w", np.ones(1), weight)
    assert updater.states()["w"][0] == 1


def test_the_gradient_is_only_read() -> None:
    grad = np.full(3, 2.0)
    grad.setflags(write=False)
    updater = opt.Updater(opt.SGD(learning_rate=1.0, rescale_grad=0.5))
    weight = np.zeros(3)
    updater("w", grad, weight)
    assert (weight.tolist(), grad.tolist()) == ([-1.0] * 3, [2.0] * 3)


def test_a_tensor_of_pytorch_is_updated_in_place() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.ones(2, 3).T
    opt.Updater(opt.SGD(learning_rate=1.0))("w", torch.full((3, 2), 0.25), weight)
    assert weight.tolist() == [[0.75, 0.75]] * 3


def test_misuse_is_refused_before_anything_changes() -> None:
    updater = opt.Updater(opt.SGD())
    weight = np.ones(3, np.float32)
    with pytest.raises(ValueMismatchError, match=r"\(3,\) and float32, got \(2,\) and float32"):
        updater("w", np.ones(2, np.float32), weight)
    with pytest.raises(ValueMismatchError, match=r"got \(3,\) and float64"):
        updater("w", np.ones(3), weight)
    with pytest.raises(ArgumentTypeError, match="needs float weights"):
        updater("w", np.ones(3, int), np.ones(3, int))
    with pytest.raises(ArgumentTypeError):
        updater("w", [1.0], [2.0])
    frozen = np.ones(3, np.float32)
    frozen.setflags(write=False)
    with pytest.raises(ArgumentTypeError, match="cannot update the weight of key 'w'"):
        updater("w", np.ones(3, np.float32), frozen)
    with pytest.raises(ArgumentTypeError, match="needs an Optimizer, got str"):
        opt.Updater("sgd")  # type: ignore[arg-type]
    assert updater.states() == {}
    assert weight.tolist() == [1.0] * 3


def test_an_updater_tells_an_optimizer_that_sees_rows_how_long_they_are() -> None:
    updater = opt.get_updater(opt.contrib.GroupAdaGrad(eps=0.0))
    deep, flat = np.zeros((2, 2, 2)), np.zeros(3)
    grad = np.array([[[1.0, -1], [3, 5]], [[0, 0], [0, 4]]])
    updater(["deep", "flat"], [grad, np.array([2.0, -3, 4])], [deep, flat])
    np.testing.assert_allclose(deep, -0.01 * grad / np.array([3.0, 2]).reshape(2, 1, 1))
    np.testing.assert_allclose(flat, [-0.01, 0.01, -0.01])  # each number is a row
    count, (history,) = updater.states()["deep"]
    assert (count, history.tolist()) == (1, [9.0] * 4 + [4.0] * 4)


def test_an_optimizer_that_sees_rows_refuses_numbers_without_them() -> None:
    chosen = opt.create("groupadagrad")
    for unfit in (chosen, chosen.for_rows(2)):
        arrays = [np.zeros(3) for _ in range(4)]
        with pytest.raises(NotSupportedError, match="whole rows of"):
            unfit.update(arrays[0], arrays[1], [arrays[2]], 1, arrays[3])
    assert chosen.for_rows(3) is chosen.for_key("w", 3) is chosen.for_rows(3).for_rows(3)
    assert chosen.for_rows(3) == chosen


@pytest.mark.parametrize("is_gradient", [True, False])
def test_row_sparse_arrays_are_refused(is_gradient: bool) -> None:
    rows = mx.RowSparseArray([0], np.ones((1, 2), np.float32), (3, 2))
    dense = np.ones((3, 2), np.float32)
    updater = opt.Updater(opt.SGD(learning_rate=0.1))
    with pytest.raises(NotSupportedError, match="dense arrays, got a row-sparse array for key 'w'"):
        updater("w", *((rows, dense) if is_gradient else (dense, rows)))
    assert (dense == 1).all()
