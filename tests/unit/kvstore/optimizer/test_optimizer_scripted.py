"""Optimizers that are written MXNet's way: what runs, and what is refused with what to do."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore as mx
from kvstore import optimizer as opt
from kvstore.errors import (
    ArgumentTypeError,
    CheckpointError,
    NotSupportedError,
    OptimizerParameterError,
    UnknownOptimizerError,
    ValueMismatchError,
)
from kvstore.optimizer import scripted
from kvstore.optimizer.serialize import from_bytes, to_bytes
from pslite.wire.codec import pack_value


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted, "_scripted", {})


def defined() -> Any:
    """Adam as a script for MXNet has it, line for line but for the names."""

    @mx.optimizer.Optimizer.register
    class MyAdam(mx.optimizer.Optimizer):  # type: ignore[misc]
        def __init__(self, learning_rate: float = 0.001, beta1: float = 0.9, **kwargs: Any) -> None:
            super().__init__(learning_rate=learning_rate, **kwargs)
            self.beta1 = beta1

        def create_state(self, index: Any, weight: Any) -> Any:  # type: ignore[override]
            return (
                mx.nd.zeros(weight.shape, weight.context, dtype=weight.dtype),
                mx.nd.zeros(weight.shape, weight.context, dtype=weight.dtype),
            )

        def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:  # type: ignore[override]
            self._update_count(index)
            lr, wd = self._get_lr(index), self._get_wd(index)
            t = self._index_update_count[index]
            lr *= math.sqrt(1.0 - 0.999**t) / (1.0 - self.beta1**t)
            grad = grad * self.rescale_grad + wd * weight
            mean, var = state
            mean[:] = self.beta1 * mean + (1.0 - self.beta1) * grad
            var[:] = 0.999 * var + 0.001 * grad * grad
            weight[:] -= lr * mean / (mx.nd.sqrt(var) + 1e-8)

    return MyAdam


NUMBERS: dict[str, Any] = {"wd": 0.1, "rescale_grad": 0.5, "learning_rate": 0.05}


def problem(steps: int = 5, dtype: Any = "f4") -> tuple[Any, Iterator[Any]]:
    random = np.random.default_rng(4)
    grads = (random.standard_normal((3, 2)).astype(dtype) for _ in range(steps))
    return random.standard_normal((3, 2)).astype(dtype), grads


@pytest.mark.parametrize("kind", ["local", "device"])
def test_a_store_of_one_process_updates_by_it(kind: str) -> None:
    defined()
    mine, ours = mx.create(kind), mx.create(kind)
    mine.set_optimizer(mx.optimizer.create("myadam", **NUMBERS))
    ours.set_optimizer(mx.optimizer.create("adam", **NUMBERS))
    weight, grads = problem()
    for store in (mine, ours):
        store.init(["v", "w"], [weight, weight])
    for grad in grads:
        for store in (mine, ours):
            store.push(["v", "w"], [[grad, grad], [grad]])
    for key in ("v", "w"):
        np.testing.assert_allclose(mine.pull(key), ours.pull(key), rtol=1e-5)
        assert not np.allclose(mine.pull(key), weight)


@pytest.mark.parametrize("make", [mx.optimizer.get_updater, mx.optimizer.Updater])
def test_an_updater_updates_by_it(make: Any) -> None:
    defined()
    mine = make(mx.optimizer.Optimizer.create_optimizer("MyAdam", **NUMBERS))
    ours = mx.optimizer.get_updater(mx.optimizer.create("adam", **NUMBERS))
    weight, grads = problem()
    other, array = weight.copy(), mx.nd.array(weight)
    for grad in grads:
        mine(0, grad, weight)
        mine(1, mx.nd.array(grad), array)
        ours(0, grad, other)
    np.testing.assert_allclose(weight, other, rtol=1e-5)
    np.testing.assert_array_equal(array.asnumpy(), weight)


def test_multipliers_schedules_and_attributes_are_those_of_mxnet() -> None:
    cls = defined()
    chosen = cls(param_idx2name={0: "fc_weight", 1: "fc_bias"}, wd=0.5, learning_rate=0.25)
    assert [chosen._get_wd(index) for index in (0, 1, 2)] == [0.5, 0.0, 0.5]
    chosen.set_lr_mult({"fc_bias": 2.0, 0: 3.0})
    assert chosen._get_lrs([0, 1, 2]) == [0.75, 0.5, 0.25]
    chosen.set_learning_rate(1.0)
    chosen.lr = chosen.lr * 2
    assert (chosen.learning_rate, chosen._get_lr(0)) == (2.0, 6.0)
    halving = mx.lr_scheduler.FactorScheduler(1, 0.5, base_lr=0.8)
    scheduled = cls(lr_scheduler=halving, begin_num_update=1)
    assert scheduled.lr == 0.001  # its own default, as in MXNet
    scheduled._update_count([5, 6])
    assert (scheduled.num_update, scheduled._index_update_count) == (2, {5: 2, 6: 2})
    assert scheduled.learning_rate == pytest.approx(0.0005)
    with pytest.raises(NotSupportedError, match="lr_scheduler"):
        scheduled.set_learning_rate(0.1)
    cosine = cls(lr_scheduler=mx.lr_scheduler.CosineScheduler(9, 0.5))
    assert cosine.learning_rate == 0.5
    with pytest.raises(OptimizerParameterError, match=r"a schedule of kvstore\.lr_scheduler"):
        cls(lr_scheduler=lambda count: 0.1)


def test_multi_precision_keeps_a_float32_copy() -> None:
    cls = defined()
    weight = np.ones(2, np.float16)
    updater = mx.optimizer.get_updater(cls(learning_rate=2**-13, multi_precision=True))
    for _ in range(4):  # each is half of the spacing below 1, or less
        updater(0, np.ones(2, np.float16), weight)
    assert weight.tolist() == [1 - 2**-11] * 2


def test_an_error_of_an_update_comes_out_of_push_and_changes_nothing() -> None:
    class Broken(mx.optimizer.Optimizer):
        def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:  # type: ignore[override]
            weight[:] = 7
            raise RuntimeError("broken")

    store = mx.create("local")
    store.init("w", np.ones(2))
    store.set_optimizer(Broken())
    with pytest.raises(RuntimeError, match="broken"):
        store.push("w", np.ones(2))
    assert store.pull("w").tolist() == [1, 1]


# -- states -------------------------------------------------------------------------------


def test_states_go_on_from_bytes() -> None:
    cls = defined()
    weight, grads = problem(6)
    first = mx.optimizer.get_updater(cls(**NUMBERS))
    other, later = weight.copy(), None
    straight = mx.optimizer.get_updater(cls(**NUMBERS))
    for count, grad in enumerate(grads):
        straight("w", grad, other)
        if count == 3:
            later = mx.optimizer.get_updater(cls(**NUMBERS))
            later.set_states(first.get_states())
        (later or first)("w", grad, weight)
    np.testing.assert_array_equal(weight, other)
    assert later is not None
    assert later.optimizer.num_update == 6


def test_a_store_writes_its_states_to_a_file(tmp_path: Path) -> None:
    cls = defined()
    weight, grads = problem(2)
    one, grad = mx.create("local"), next(grads)
    one.init("w", weight)
    one.set_optimizer(cls(**NUMBERS))
    one.push("w", grad)
    one.save_optimizer_states(tmp_path / "states")
    again = mx.create("local")
    again.init("w", one.pull("w"))
    again.set_optimizer(cls(**NUMBERS))
    again.load_optimizer_states(tmp_path / "states")
    for store in (one, again):
        store.push("w", grad)
    np.testing.assert_array_equal(one.pull("w"), again.pull("w"))
    for call in (
        lambda: one.save_checkpoint(tmp_path / "checkpoint"),
        lambda: one.save_optimizer_states(tmp_path / "states", dump_optimizer=True),
        one.current_optimizer,
    ):
        with pytest.raises(NotSupportedError, match=r"MyAdam extends mx\.optimizer\.Optimizer"):
            call()


@pytest.mark.parametrize("dump", [False, True])
def test_states_of_a_value_go_on_from_bytes_and_bring_it_along(dump: bool) -> None:
    weight, grads = problem(4)
    momentum = opt.SGD(0.9, learning_rate=0.5)
    one = opt.get_updater(momentum)
    for grad in grads:
        one("w", grad, weight)
    two = opt.get_updater(momentum.replace(lr=0.25))
    two.set_states(one.get_states(dump_optimizer=dump))
    assert two.optimizer.learning_rate == (0.5 if dump else 0.25)
    assert two.states()["w"][0] == 4
    assert two.states()["w"][1][0].tobytes() == one.states()["w"][1][0].tobytes()


@pytest.mark.parametrize("state", [None, 3, 0.5, "a", (1, [None, 2.5]), [(), {"a": 1}]])
def test_states_of_all_kinds_are_there_again(state: Any) -> None:
    if state == [(), {"a": 1}]:
        with pytest.raises(ArgumentTypeError, match="'w': it contains dict"):
            to_bytes({"w": (0, state)}, None)
        return
    assert from_bytes(to_bytes({"w": (2, state), 3: (0, None)}, None)) == (
        {"w": (2, state), 3: (0, None)},
        None,
    )


def test_arrays_of_all_shapes_are_there_again() -> None:
    arrays = [np.arange(6, dtype="f4").reshape(2, 3), np.zeros((0, 2), "i8"), np.array(True)]
    found, _ = from_bytes(to_bytes({0: (1, arrays)}, None))
    for mine, theirs in zip(arrays, found[0][1], strict=True):
        assert (mine.dtype, mine.shape, mine.tobytes()) == (
            theirs.dtype,
            theirs.shape,
            theirs.tobytes(),
        )


def test_bytes_that_are_not_states_are_refused() -> None:
    good = to_bytes({"w": (1, (np.ones(4, "f4"), 2))}, None)
    for bad in (b"", b"\x80\x04}", good[:-1], good + b"x", good.replace(b"<f4", b"|O8")):
        with pytest.raises(CheckpointError):
            from_bytes(bad)
    for at in range(len(good)):
        damaged = good[:at] + bytes([good[at] ^ 0x5A]) + good[at + 1 :]
        try:
            from_bytes(damaged)
        except CheckpointError:
            continue
    updater = opt.get_updater(opt.SGD(0.9))
    with pytest.raises(ValueMismatchError, match="must be a tuple of arrays"):
        updater.set_states(to_bytes({"w": (1, 5)}, None))
    with pytest.raises(ValueMismatchError, match="has 3 arrays"):
        updater.set_states(to_bytes({"w": (1, (np.ones(2),) * 3)}, None))


def test_states_as_deep_as_msgpack_goes_are_read_or_refused() -> None:
    state: Any = None
    for _ in range(505):  # as deep as msgpack goes
        state = ["list", [state]]
    header = pack_value([None, [["w", 1, state]]])
    first_line = to_bytes({}, None).partition(b"\n")[0] + b"\n"
    saved = first_line + len(header).to_bytes(8, "little") + header
    if sys.version_info >= (3, 14):  # which allows deeper calls than those before it
        from_bytes(saved)
        return
    with pytest.raises(CheckpointError, match="recursion"):
        from_bytes(saved)


def test_rows_are_refused() -> None:
    """An updater of MXNet would change whole arrays."""
    store = mx.create("local")
    store.init("w", mx.RowSparseArray.zeros((3, 2)))
    store.set_optimizer(defined()())
    with pytest.raises(NotSupportedError, match="row-sparse"):
        store.push("w", mx.RowSparseArray([1], np.ones((1, 2), "f4"), (3, 2)))


# -- what is refused ----------------------------------------------------------------------


def test_what_cannot_run_it_says_what_to_do() -> None:
    defined()
    chosen: Any = mx.optimizer.create("myadam")
    from kvstore.optimizer.serialize import check_optimizer

    for call in (
        lambda: check_optimizer(chosen),  # of the stores with servers
        lambda: mx.gluon.Trainer({"w": mx.gluon.Parameter(np.ones(2), np.ones(2))}, "myadam"),
        lambda: opt.get_updater(chosen).states(),
    ):
        with pytest.raises(NotSupportedError, match="--server-import MODULE"):
            call()
    with pytest.raises(ArgumentTypeError, match=r"one of kvstore\.optimizer"):
        mx.create("local").create_table("t", 2, optimizer="myadam")


def test_a_class_that_extends_another_in_mxnets_way_is_refused_at_its_definition() -> None:
    with pytest.raises(NotSupportedError, match=r"Faster extends SGD, .*mx\.optimizer\.Optimizer"):

        class Faster(mx.optimizer.SGD):
            def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:  # type: ignore[override]
                pass


def test_a_name_of_ours_is_not_given_away() -> None:
    with pytest.raises(ArgumentTypeError, match="must be a frozen dataclass"):

        @opt.register
        class SGD(mx.optimizer.Optimizer):
            def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:  # type: ignore[override]
                pass

    with pytest.raises(ArgumentTypeError, match="register needs a class"):
        mx.optimizer.Optimizer.register(3)
    with pytest.raises(UnknownOptimizerError):
        mx.optimizer.create("myadam")


def test_classes_extend_each_other_and_come_again_under_a_name() -> None:
    first, second = defined(), defined()

    class Slower(second):  # type: ignore[misc]
        def _get_lr(self, index: Any) -> float:
            return 0.5 * float(super()._get_lr(index))

    assert Slower(learning_rate=1.0)._get_lr(0) == 0.5
    assert type(mx.optimizer.create("MyAdam")) is second is not first


def test_ours_with_slots_is_still_ours() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Descent(opt.Optimizer):
        learning_rate: float = 0.5

        def update(self, weight: Any, grad: Any, state: Any, count: int, scratch: Any) -> None:
            np.subtract(weight, grad, out=weight)

    assert isinstance(Descent(), opt.Optimizer)


def test_opt_is_optimizer() -> None:
    assert mx.opt is mx.optimizer
