"""``FeedForward`` on one process's stores, and on a stand-in for the distributed ones."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest
from clouds import Cluster, LinearSoftmax, equal, linear, three_clouds

from kvstore.arrays.context import cpu
from kvstore.errors import ArgumentTypeError
from kvstore.kvstore import create
from kvstore.mxnet.io import NDArrayIter
from kvstore.mxnet.model import FeedForward, Progress
from kvstore.optimizer import create as create_optimizer
from kvstore.stores.base import KVStore
from pslite.errors import ClosedError, UsageError


@pytest.mark.parametrize("kvstore", [None, "local", "device"])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_network_learns_three_clouds(kvstore: str | None, devices: int) -> None:
    x, y = three_clouds()
    model = linear(ctx=[cpu(index) for index in range(devices)], num_epoch=5)
    model.fit(x, y, kvstore=kvstore)
    test_x, test_y = three_clouds(seed=1)
    assert model.score(test_x, test_y) > 0.95
    assert np.allclose(model.predict(test_x).sum(axis=1), 1)


def test_equal_seeds_give_equal_bits_and_another_seed_other_ones() -> None:
    x, y = three_clouds()
    first, second, third = linear(seed=4), linear(seed=4), linear(seed=5)
    for model in (first, second, third):
        model.fit(x, y)
    assert equal(first, second)
    assert not equal(first, third)


def test_two_workers_and_two_devices_of_one_worker_end_with_the_same_bits() -> None:
    x, y = three_clouds(samples=118)
    one = linear(ctx=[cpu(0), cpu(1)], numpy_batch_size=16)
    one.fit(x, y)

    def work(store: KVStore) -> FeedForward:
        model = linear(numpy_batch_size=8)
        model.fit(x, y, kvstore=store)
        return model

    for worker in Cluster(2, "dist_sync").run(work):
        assert equal(worker, one)


def test_two_devices_come_close_to_one() -> None:
    x, y = three_clouds()
    one, two = linear(), linear(ctx=[cpu(0), cpu(1)])
    one.fit(x, y)
    two.fit(x, y, work_load_list=[3, 1])
    assert one.arg_params is not None
    assert two.arg_params is not None
    assert np.allclose(one.arg_params["weight"], two.arg_params["weight"], atol=1e-5)


def test_the_values_of_rank_0_count_when_workers_begin_with_others() -> None:
    x, y = three_clouds()

    def work(store: KVStore) -> FeedForward:
        start = {"weight": np.full((3, 4), float(store.rank)), "bias": np.zeros(3)}
        model = linear(arg_params=start, num_epoch=0)
        model.fit(x, y, kvstore=store)
        return model

    for worker in Cluster(2, "dist_sync").run(work):
        assert worker.arg_params is not None
        assert not worker.arg_params["weight"].any()


def test_workers_with_uneven_data_of_their_own_run_equally_many_batches() -> None:
    x, y = three_clouds(samples=100)
    seen: list[list[int]] = [[], []]

    def work(store: KVStore) -> FeedForward:
        mine = slice(0, 70) if store.rank == 0 else slice(70, 100)
        model = linear(numpy_batch_size=8)
        model.fit(
            x[mine],
            y[mine],
            kvstore=store,
            shard=False,
            batch_end_callback=lambda progress: seen[store.rank].append(progress.nbatch),
        )
        return model

    first, second = Cluster(2, "dist_sync").run(work)
    assert seen == [[*range(1, 10)] * 2] * 2
    assert equal(first, second)


def test_a_worker_that_sharded_by_itself_is_told_before_anyone_waits() -> None:
    x, y = three_clouds(samples=100)

    def work(store: KVStore) -> str:
        size = 50 + store.rank
        with pytest.raises(UsageError, match=r"\[50, 51\].*shard=False"):
            linear().fit(x[:size], y[:size], kvstore=store)
        return "told"

    assert Cluster(2, "dist_sync").run(work) == ["told", "told"]


def test_the_same_own_data_everywhere_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, y = three_clouds(samples=20)
    with caplog.at_level(logging.WARNING):
        Cluster(2, "dist_sync").run(lambda kv: linear().fit(x, y, kvstore=kv, shard=False))
    assert [record.message[:40] for record in caplog.records] == [
        "all 2 workers train on the same samples "
    ]


@pytest.mark.parametrize(("store_type", "factor"), [("dist_sync", 1 / 32), ("dist_async", 1 / 16)])
def test_the_optimizer_divides_by_the_samples_of_one_update(store_type: str, factor: float) -> None:
    x, y = three_clouds()
    cluster = Cluster(2, store_type)
    cluster.run(lambda kv: linear(num_epoch=1).fit(x, y, kvstore=kv))
    wanted = create_optimizer("sgd", learning_rate=0.5, momentum=0.5, rescale_grad=factor)
    assert cluster.optimizers == [wanted, wanted]


def test_a_factor_or_an_optimizer_of_the_caller_is_kept() -> None:
    x, y = three_clouds()
    ready = create_optimizer("sgd", learning_rate=0.25)
    cluster = Cluster(1, "dist_sync")
    cluster.run(lambda kv: linear(rescale_grad=0.125).fit(x, y, kvstore=kv))
    assert cluster.optimizers[0].params()["rescale_grad"] == 0.125
    cluster = Cluster(1, "dist_sync")
    cluster.run(
        lambda kv: FeedForward(LinearSoftmax(), num_epoch=1, optimizer=ready).fit(x, y, kvstore=kv)
    )
    assert cluster.optimizers == [ready]


def test_callbacks_see_each_batch_and_each_epoch() -> None:
    x, y = three_clouds(samples=40)
    batches: list[Progress] = []
    epochs: list[Progress] = []
    again: list[int] = []
    model = linear(begin_epoch=3, num_epoch=5)
    weights = []

    def on_epoch(progress: Progress) -> None:
        epochs.append(progress)
        assert model.arg_params is not None
        weights.append(model.arg_params["weight"].copy())

    model.fit(
        x,
        y,
        (x, y),
        batch_end_callback=[batches.append, lambda progress: again.append(progress.nbatch)],
        epoch_end_callback=on_epoch,
    )
    assert [(at.epoch, at.nbatch, at.num_batches) for at in batches] == [
        (epoch, nbatch, 3) for epoch in (3, 4) for nbatch in (1, 2, 3)
    ]
    assert again == [1, 2, 3, 1, 2, 3]
    assert [at.epoch for at in epochs] == [3, 4]
    assert epochs[1].eval_accuracy == model.score(x, y)
    assert epochs[1].loss < epochs[0].loss
    assert all(at.samples_per_s > 0 for at in batches)
    assert not np.array_equal(weights[0], weights[1])


def test_loss_and_accuracy_are_means_over_the_samples() -> None:
    x, y = three_clouds(samples=32)
    start = {"weight": np.zeros((3, 4)), "bias": np.array([0.0, 1.0, 0.0])}
    model = linear(numpy_batch_size=32, num_epoch=1, arg_params=start)
    epochs: list[Progress] = []
    model.fit(x, y, epoch_end_callback=epochs.append)
    expected = -np.log(np.exp(start["bias"][y]) / np.exp(start["bias"]).sum()).mean()
    assert epochs[0].loss == pytest.approx(expected)
    assert epochs[0].accuracy == np.mean(y == 1)


def test_an_epoch_goes_to_the_logger_that_was_given(caplog: pytest.LogCaptureFixture) -> None:
    x, y = three_clouds(samples=20)
    with caplog.at_level(logging.INFO, "mine"):
        linear(num_epoch=1).fit(x, y, logger=logging.getLogger("mine"))
    assert [record.name for record in caplog.records] == ["mine"]


def test_a_second_fit_goes_on_from_the_first() -> None:
    x, y = three_clouds()
    whole = linear(num_epoch=4, momentum=0.0)
    whole.fit(x, y)
    halves = linear(num_epoch=2, momentum=0.0)
    halves.fit(x, y)
    halves.begin_epoch, halves.num_epoch = 2, 4
    halves.fit(x, y)
    assert equal(whole, halves)


def test_a_store_that_was_passed_in_stays_open_and_serves_one_fit() -> None:
    x, y = three_clouds()
    with create("local") as store:
        model = linear()
        model.fit(x, y, kvstore=store)
        assert model.arg_params is not None
        assert np.array_equal(store.pull("weight"), model.arg_params["weight"])
        with pytest.raises(UsageError, match="perhaps from another fit"):
            model.fit(x, y, kvstore=store)


@pytest.mark.parametrize("fails", [False, True])
def test_a_store_made_by_name_is_closed_whatever_happens(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[KVStore] = []

    def create_and_keep(name: str) -> KVStore:
        made.append(create(name))
        return made[-1]

    monkeypatch.setattr("kvstore.kvstore.create", create_and_keep)

    def stop(progress: Progress) -> None:
        if fails:
            raise KeyError("stop")

    x, y = three_clouds()
    threads = threading.active_count()
    try:
        linear(ctx=[cpu(0), cpu(1)]).fit(x, y, kvstore="local", batch_end_callback=stop)
    except KeyError:
        assert fails
    with pytest.raises(ClosedError):
        made[0].pull("weight")
    assert threading.active_count() == threads


def test_a_store_that_has_an_optimizer_cannot_compare_the_data() -> None:
    x, y = three_clouds()
    cluster = Cluster(2, "dist_sync")
    cluster.store.set_optimizer(create_optimizer("sgd"))

    def work(store: KVStore) -> str:
        try:
            linear().fit(x, y, kvstore=store)
        except (UsageError, threading.BrokenBarrierError) as error:
            return type(error).__name__
        return "trained"

    assert "trained" not in cluster.run(work)


class WithoutBias(LinearSoftmax):
    def loss_and_gradients(
        self, params: Any, x: np.ndarray, y: np.ndarray
    ) -> tuple[float, int, dict[str, np.ndarray]]:
        loss, correct, gradients = super().loss_and_gradients(params, x, y)
        del gradients["bias"]
        return loss, correct, gradients


def test_a_network_that_forgets_a_gradient_is_told_which() -> None:
    x, y = three_clouds()
    with pytest.raises(UsageError, match=r"parameters bias, weight, got .* weight$"):
        FeedForward(WithoutBias(), num_epoch=1, numpy_batch_size=8).fit(x, y)


@pytest.mark.parametrize(
    ("changes", "arguments", "sentence"),
    [
        ({"num_epoch": None}, {}, "needs num_epoch"),
        ({}, {"y": None}, "labels are missing"),
        ({}, {"y": np.zeros(3, np.int64)}, "must have shape"),
        ({}, {"X": np.zeros((0, 4)), "y": np.zeros(0, np.int64)}, "n >= 1"),
        ({}, {"y": np.full(120, 0.5)}, "must be whole numbers"),
        ({}, {"work_load_list": [1, 1]}, "for each of the 1 devices, got 2"),
        ({}, {"kvstore": 3}, "kvstore must be"),
        ({}, {"eval_data": np.zeros((3, 4))}, "eval_data must be a pair"),
        ({}, {"eval_data": (np.zeros((3, 4)), None)}, "labels are missing"),
        ({"learning_rat": 1.0}, {}, "learning_rat"),
    ],
)
def test_what_does_not_fit_together_is_said_before_training(
    changes: dict[str, Any], arguments: dict[str, Any], sentence: str
) -> None:
    x, y = three_clouds()
    with pytest.raises(UsageError, match=sentence):
        linear(**changes).fit(**{"X": x, "y": y, **arguments})


def test_numbers_for_a_ready_optimizer_are_refused() -> None:
    with pytest.raises(UsageError, match="learning_rate, momentum can be used only"):
        linear(optimizer=create_optimizer("sgd"))
    with pytest.raises(UsageError, match="numpy_batch_size must be at least 1, got 0"):
        linear(numpy_batch_size=0)


def test_prediction_needs_parameters() -> None:
    with pytest.raises(UsageError, match="call fit first"):
        linear().predict(np.zeros((2, 4)))
    start = {"weight": np.zeros((3, 4)), "bias": np.array([0.0, 1.0, 0.0])}
    model = linear(arg_params=start, numpy_batch_size=2)
    assert model.predict(np.zeros((5, 4))).shape == (5, 3)
    assert model.score(np.zeros((5, 4)), np.array([1, 1, 1, 0, 2])) == 0.6


def test_data_that_is_no_integer_label_is_an_argument_type_error() -> None:
    with pytest.raises(ArgumentTypeError):
        linear(arg_params={"weight": np.zeros((3, 4)), "bias": np.zeros(3)}).score(
            np.zeros((2, 4)), np.array([False, True])
        )


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_labels_that_are_whole_numbers_train_to_the_bits_of_integers(dtype: str) -> None:
    x, y = three_clouds()
    integers, floats, iterated = linear(), linear(), linear()
    integers.fit(x, y)
    floats.fit(x, y.astype(dtype))
    iterated.fit(
        NDArrayIter({"data": x}, {"softmax_label": y.astype(dtype)}, batch_size=16, shuffle=True)
    )
    assert equal(integers, floats)
    assert equal(integers, iterated)
    assert floats.score(x, y.astype(dtype)) == integers.score(x, y)


@pytest.mark.parametrize("label", [0.5, float("nan"), float("inf"), 1e300, 1.0000000000000002])
def test_a_label_that_is_no_whole_number_is_named(label: float) -> None:
    x, y = three_clouds()
    labels = y.astype(float)
    labels[7] = label
    with pytest.raises(ArgumentTypeError, match=r"at index 7; use y\.astype\(int\)"):
        linear().fit(x, labels)


@pytest.mark.parametrize(
    ("symbol", "sentence"),
    [
        ("softmax", "got str 'softmax', without init_params, loss_and_gradients, predict"),
        (None, "got NoneType None, without"),
        (LinearSoftmax, "got the class LinearSoftmax, not an object of it"),
    ],
)
def test_what_is_no_network_is_refused_at_once(symbol: Any, sentence: str) -> None:
    with pytest.raises(ArgumentTypeError, match=sentence) as raised:
        FeedForward(symbol)
    assert "loss_and_gradients(params, x, y) and predict(params, x)" in str(raised.value)
