"""``FeedForward`` beyond the plain case: metrics, callbacks, iterators, state, plug-in stores."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clouds import Cluster, LinearSoftmax, equal, linear, three_clouds

from kvstore.arrays import initializer
from kvstore.arrays.context import cpu
from kvstore.errors import ArgumentTypeError, ArgumentValueError, NotSupportedError
from kvstore.kvstore import create
from kvstore.mxnet import metric, nd
from kvstore.mxnet.callback import Speedometer, do_checkpoint
from kvstore.mxnet.fit.network import deal_out
from kvstore.mxnet.io import DataBatch, NDArrayIter
from kvstore.mxnet.model import FeedForward, Progress, _create_kvstore
from kvstore.stores.base import KVStore, KVStoreBase
from pslite.errors import UsageError

# -- metrics and callbacks ----------------------------------------------------------------


def test_metrics_of_an_epoch_are_those_of_the_predictions_before_each_update() -> None:
    x, y = three_clouds(samples=32)
    start = {"weight": np.zeros((3, 4)), "bias": np.array([0.0, 1.0, 0.5])}
    ends: list[Progress] = []
    linear(numpy_batch_size=32, num_epoch=1, arg_params=start, ctx=[cpu(0), cpu(1)]).fit(
        x,
        y,
        eval_metric=["acc", "ce", "loss", metric.TopKAccuracy(2)],
        epoch_end_callback=ends.append,
    )
    assert ends[0].eval_metric is not None
    found = dict(ends[0].eval_metric.get_name_value())
    probabilities = np.exp(start["bias"]) / np.exp(start["bias"]).sum()
    assert found["accuracy"] == np.mean(y == 1)
    assert found["top_k_accuracy_2"] == np.mean(y > 0)
    assert found["cross-entropy"] == pytest.approx(-np.log(probabilities[y]).mean())
    assert found["loss"] == pytest.approx(found["cross-entropy"])


def test_predictions_are_computed_only_for_metrics_that_need_them() -> None:
    class Counting(LinearSoftmax):
        times = 0

        def predict(self, params: Any, x: Any) -> Any:
            self.times += 1
            return super().predict(params, x)

    x, y = three_clouds(samples=48)
    cheap, dear = Counting(), Counting()
    for network, wanted in ((cheap, ["acc", "loss"]), (dear, "ce")):
        FeedForward(network, num_epoch=1, numpy_batch_size=16).fit(x, y, eval_metric=wanted)
    # The network's own loss_and_gradients calls predict once for each of the three batches.
    assert (cheap.times, dear.times) == (3, 6)


def test_evaluation_has_its_own_metric_and_callbacks() -> None:
    x, y = three_clouds(samples=40)
    test_x, test_y = three_clouds(samples=35, seed=1)
    batches: list[Any] = []
    ends: list[Any] = []
    epochs: list[Progress] = []
    mine = metric.create(["acc", "ce"])
    model = linear(num_epoch=2)
    model.fit(
        x,
        y,
        (test_x, test_y),
        mine,
        eval_batch_end_callback=lambda at: batches.append((at.epoch, at.nbatch, at.num_batches)),
        eval_end_callback=lambda at: ends.append((at.epoch, at.eval_metric.get_name_value())),
        epoch_end_callback=epochs.append,
    )
    assert batches == [(epoch, nbatch, 3) for epoch in (0, 1) for nbatch in (1, 2, 3)]
    assert [epoch for epoch, _ in ends] == [0, 1]
    assert list(epochs[1].validation) == ends[1][1]
    assert epochs[1].eval_accuracy == dict(epochs[1].validation)["accuracy"]
    assert model.score(test_x, ["acc", "ce"], y=test_y) == [value for _, value in ends[1][1]]
    assert epochs[1].eval_metric is mine
    assert dict(mine.get_name_value())["accuracy"] == epochs[1].accuracy


def test_both_forms_of_a_callback_at_an_epochs_end_are_served() -> None:
    x, y = three_clouds(samples=40)
    model = linear(num_epoch=1)
    seen: list[Any] = []

    def as_mxnet(epoch: int, symbol: Any, arg_params: Any, aux_params: Any) -> None:
        seen.append((epoch, symbol is model.symbol, sorted(arg_params), aux_params))

    def with_defaults(iter_no: int, sym: Any = None, arg: Any = None, aux: Any = None) -> None:
        seen.append((iter_no, arg is model.arg_params))

    callbacks = [as_mxnet, with_defaults, lambda at: seen.append(at.epoch), seen.append]
    model.fit(x, y, epoch_end_callback=callbacks)
    assert seen[:3] == [(0, True, ["bias", "weight"], {}), (0, True), 0]
    assert isinstance(seen[3], Progress)


def test_the_speedometer_of_a_fit_leaves_the_epochs_metric_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, y = three_clouds(samples=96)
    ends: list[Progress] = []
    with caplog.at_level(logging.INFO):
        linear(num_epoch=2).fit(
            x,
            y,
            batch_end_callback=Speedometer(16, 3),
            epoch_end_callback=ends.append,
            logger=logging.getLogger("mine"),
        )
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition("\t")[0] for line in lines if "[" in line and "\t" in line] == [
        f"Epoch[{epoch}] Batch [{begin}-{begin + step}]"
        for epoch in (0, 1)
        for begin, step in ((1, 2), (3, 3))
    ]
    assert ends[0].eval_metric is not None
    assert ends[1].eval_metric is not None
    assert ends[1].eval_metric.get_global()[1] == ends[1].accuracy
    summaries = [line for line in lines if "Train-loss" in line]
    assert len(summaries) == 2
    assert f"Train-accuracy={ends[1].accuracy:f}" in summaries[1]


def test_create_makes_and_fits_a_model() -> None:
    x, y = three_clouds()
    made = FeedForward.create(
        LinearSoftmax(),
        x,
        y,
        num_epoch=2,
        numpy_batch_size=16,
        learning_rate=0.5,
        momentum=0.5,
        kvstore="device",
    )
    other = linear()
    other.fit(x, y)
    assert equal(made, other)


# -- data ---------------------------------------------------------------------------------


def test_an_iterator_brings_its_arrays_batch_size_and_order() -> None:
    x, y = three_clouds()
    with_arrays, with_iterator = linear(numpy_batch_size=24), linear()
    with_arrays.fit(x, y, (x, y), shuffle=False)
    iterator = NDArrayIter(x, y, batch_size=24, shuffle=False)
    with_iterator.fit(iterator, eval_data=iterator)
    assert equal(with_arrays, with_iterator)
    assert with_iterator.score(iterator) == with_arrays.score(x, y)
    assert np.array_equal(with_iterator.predict(iterator), with_arrays.predict(x))


class Pieces:
    """An iterator of a user's own, with batches in MXNet's form, of ``mx.nd`` arrays."""

    def __init__(self, x: Any, y: Any, size: int) -> None:
        self._arrays = x, y, size
        self.reset()

    def reset(self) -> None:
        self._inner = NDArrayIter(*self._arrays)

    def __iter__(self) -> Any:
        for batch in self._inner:
            yield DataBatch([nd.array(batch.data[0])], [nd.array(batch.label[0])], batch.pad)


def test_score_takes_its_arguments_in_mxnets_order() -> None:
    x, y = three_clouds(samples=40)
    model = linear(numpy_batch_size=16)
    model.fit(x, y)
    iterator = NDArrayIter(x, y, batch_size=16)
    expected = -np.log(model.predict(x)[np.arange(40), y])
    assert model.score(iterator, "ce") == pytest.approx(expected.mean())
    assert model.score(x, "ce", y=y) == pytest.approx(expected.mean())
    assert model.score(Pieces(x, y, 16), "ce") == pytest.approx(expected.mean(), rel=1e-5)
    seen: list[Any] = []
    first = model.score(iterator, "ce", 1, lambda at: seen.append((at.nbatch, at.num_batches)))
    assert first == pytest.approx(expected[:16].mean())
    assert seen == [(1, 1)]
    # The iterator stands behind its first batch.
    assert model.score(iterator, "ce", 1, None, False) == pytest.approx(expected[16:32].mean())
    assert model.score(x, y) == model.score(x, y=y) == model.score(iterator)


def test_predict_takes_its_arguments_in_mxnets_order() -> None:
    x, y = three_clouds(samples=40)
    model = linear()
    model.fit(x, y)
    iterator = NDArrayIter(x, y, batch_size=16, shuffle=True)
    predictions, data, labels = model.predict(iterator, 2, True)
    assert data.shape == (32, 4)
    assert np.array_equal(predictions, model.predict(data))
    pairs = {tuple(sample): label for sample, label in zip(x, y, strict=True)}
    assert [pairs[tuple(sample)] for sample in data] == labels.tolist()
    rest = model.predict(iterator, reset=False)
    assert rest.shape == (8, 3)  # without the samples that fill the last batch
    assert model.predict(x, return_data=True)[2] is None
    assert np.array_equal(model.predict(Pieces(x, y, 16)), model.predict(x.astype(np.float32)))
    with pytest.raises(UsageError, match="returned no batch; keep reset=True"):
        model.predict(iterator, reset=False)
    with pytest.raises(UsageError, match="num_batch must be at least 1"):
        model.predict(iterator, 0)


def test_fit_and_create_take_their_arguments_in_mxnets_order() -> None:
    x, y = three_clouds(samples=40)
    seen: list[str] = []

    def note(what: str) -> Any:
        return lambda at: seen.append(what)

    logger = logging.getLogger("mine")
    model = linear(num_epoch=1)
    ends = (note("epoch"), note("batch"), "local", logger, [1])
    model.fit(x, y, Pieces(x, y, 20), "ce", *ends, None, note("eval"), note("eval batch"))
    assert seen == ["batch"] * 3 + ["eval batch"] * 2 + ["eval", "epoch"]
    seen.clear()
    made = FeedForward.create(
        *(LinearSoftmax(), x, y, None, 1, 2, "sgd", None, (x, y), "ce"),
        *(*ends, note("eval"), note("eval batch")),
        numpy_batch_size=20,
    )
    assert seen == ["batch"] * 2 + ["eval batch"] * 2 + ["eval", "epoch"]
    assert made.epoch_size == 2
    with pytest.raises(NotSupportedError, match="monitor is not supported and must be None"):
        model.fit(x, y, monitor="weights")


def test_labels_that_do_not_fit_are_said_before_anything_is_computed() -> None:
    x, y = three_clouds(samples=40)
    model = linear(num_epoch=1)
    model.fit(x, y)
    seen: list[Any] = []
    for labels in (y[:39], y + 0.5, None):
        with pytest.raises(UsageError, match=r"label|must have shape"):
            model.score(x, y=labels, batch_end_callback=seen.append)
    assert seen == []
    with pytest.raises(UsageError, match="X is an iterator with labels"):
        model.score(NDArrayIter(x, y, 8), y=y)


def test_an_epoch_can_be_shorter_or_longer_than_the_data() -> None:
    x, y = three_clouds(samples=40)
    for size in (2, 7):
        seen: list[int] = []
        linear(num_epoch=1, epoch_size=size).fit(
            x, y, batch_end_callback=lambda at, seen=seen: seen.append(at.num_batches)
        )
        assert seen == [size] * size
    with pytest.raises(UsageError, match="epoch_size must be at least 1"):
        linear(epoch_size=0)
    for name in ("num_epoch", "begin_epoch", "seed", "numpy_batch_size", "epoch_size"):
        with pytest.raises(ArgumentTypeError, match=f"{name} must be an int, got 'a'"):
            linear(**{name: "a"})


@pytest.mark.parametrize("num_workers", [1, 3, 4, 7])
@pytest.mark.parametrize("num_samples", [1, 6, 12, 13])
def test_samples_are_dealt_out_evenly_or_without_overlap(
    num_samples: int, num_workers: int
) -> None:
    def all_of(even: bool) -> list[np.ndarray]:
        ranks = range(num_workers)
        return [deal_out(num_samples, rank, num_workers, 5, 2, even=even) for rank in ranks]

    even, own = all_of(True), all_of(False)
    assert {len(part) for part in even} == {-(-num_samples // num_workers)}
    assert set(np.concatenate(even)) == set(range(num_samples))
    assert sorted(np.concatenate(own)) == list(range(num_samples))
    assert max(map(len, own)) - min(map(len, own)) <= 1
    assert all(
        np.array_equal(part, whole[: len(part)]) for part, whole in zip(own, even, strict=True)
    )


def test_without_a_seed_samples_are_dealt_out_in_their_order() -> None:
    assert deal_out(5, 1, 2, None).tolist() == [1, 3, 0]
    assert deal_out(5, 1, 2, None, even=False).tolist() == [1, 3]
    assert deal_out(5, 0, 1, 3).tolist() != deal_out(5, 0, 1, 3, epoch=1).tolist()
    with pytest.raises(UsageError, match="rank must be from 0 to 1"):
        deal_out(5, 2, 2, even=False)
    with pytest.raises(UsageError, match="must not be negative"):
        deal_out(5, 0, 2, -1)


# -- first values -------------------------------------------------------------------------


def test_initializers_make_the_first_values_by_name() -> None:
    x, y = three_clouds()
    model = linear(initializer=initializer.One(), num_epoch=0)
    model.fit(x, y)
    assert model.arg_params is not None
    assert set(model.arg_params["weight"].ravel()) == {1.0}
    assert model.arg_params["bias"].tolist() == [0, 0, 0]


def test_parameters_too_many_are_refused_unless_they_are_allowed() -> None:
    x, y = three_clouds()
    given = {"weight": np.ones((3, 4)), "other": np.ones(3)}
    with pytest.raises(UsageError, match="arg_params has other"):
        linear(arg_params=given).fit(x, y)
    with pytest.raises(UsageError, match=r"aux_params has other.* network has no parameters"):
        linear(aux_params={"other": np.ones(3)}).fit(x, y)
    model = linear(arg_params=given, allow_extra_params=True, num_epoch=0)
    model.fit(x, y)
    assert model.arg_params is not None
    assert sorted(model.arg_params) == ["bias", "weight"]
    assert model.arg_params["weight"].tolist() == np.ones((3, 4)).tolist()


# -- networks with state ------------------------------------------------------------------


class Normalised:
    """Takes off a running mean, which is not trained; counts how many batches it saw."""

    def init_params(
        self, input_shape: tuple[int, ...], rng: np.random.Generator
    ) -> dict[str, np.ndarray]:
        return LinearSoftmax().init_params(input_shape, rng)

    def init_aux_params(self, input_shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        return {"mean": np.zeros(input_shape), "batches": np.zeros(1)}

    def predict(self, params: Any, x: Any, aux: Mapping[str, Any]) -> Any:
        return LinearSoftmax().predict(params, x - aux["mean"])

    def loss_and_gradients(
        self, params: Any, x: Any, y: Any, aux: Mapping[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        aux["mean"][...] = 0.9 * aux["mean"] + 0.1 * x.mean(axis=0)
        aux["batches"] += 1
        return LinearSoftmax().loss_and_gradients(params, x - x.mean(axis=0), y)


def stateful(**arguments: Any) -> FeedForward:
    settings = {"num_epoch": 4, "numpy_batch_size": 16, "learning_rate": 0.5, "momentum": 0.5}
    return FeedForward(Normalised(), **{**settings, **arguments})


def test_running_means_are_kept_averaged_over_devices_and_used(tmp_path: Path) -> None:
    x, y = three_clouds()
    model = stateful(ctx=[cpu(0), cpu(1)])
    model.fit(x, y, (x, y), ["acc", "ce"])
    assert model.aux_params is not None
    assert model.aux_params["batches"].tolist() == [4 * 8]
    assert np.allclose(model.aux_params["mean"], x.mean(axis=0), atol=0.3)
    assert model.score(x, y) > 0.9
    moved = stateful(arg_params=model.arg_params, aux_params={"mean": 9 * np.eye(4)[0]})
    assert 0.5 < moved.score(x, y) < 0.75  # its first class is never the answer


@pytest.mark.parametrize("devices", [1, 2])
def test_a_network_with_state_goes_on_to_the_same_bits(tmp_path: Path, devices: int) -> None:
    x, y = three_clouds()
    ctx = [cpu(index) for index in range(devices)]
    whole = stateful(ctx=ctx)
    whole.fit(x, y, epoch_end_callback=do_checkpoint(tmp_path / "m"))
    resumed = FeedForward.load(
        tmp_path / "m",
        2,
        ctx,
        symbol=Normalised(),
        num_epoch=4,
        numpy_batch_size=16,
        learning_rate=0.5,
        momentum=0.5,
    )
    resumed.fit(x, y)
    assert equal(resumed, whole)
    assert resumed.aux_params is not None
    assert whole.aux_params is not None
    for name, value in whole.aux_params.items():
        assert np.array_equal(resumed.aux_params[name], value)


# -- stores that others plug in -----------------------------------------------------------


class OnlyAdds(KVStoreBase):
    """What Horovod or BytePS offer: sums over workers, one key a call, no optimizer."""

    def __init__(self, inner: KVStore | None = None) -> None:
        self._inner = create("local") if inner is None else inner
        self.calls: list[str] = []

    @property
    def type(self) -> str:
        return "onlyadds"

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def num_workers(self) -> int:
        return self._inner.num_workers

    def is_capable(self, capability: str) -> bool:
        return False

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        self.calls.append(f"broadcast {key}")
        self._inner.broadcast(key, value, out)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        self.calls.append(f"pushpull {key} {priority}")
        self._inner.pushpull(key, value, out)


def test_a_store_that_only_adds_trains_to_the_same_bits_as_one_that_updates() -> None:
    x, y = three_clouds()
    ctx = [cpu(0), cpu(1)]
    store, on_store, here = OnlyAdds(), linear(ctx=ctx), linear(ctx=ctx)
    on_store.fit(x, y)
    here.fit(x, y, kvstore=store)
    assert equal(on_store, here)
    assert store.calls[:4] == [
        "broadcast weight",
        "broadcast bias",
        "pushpull weight 0",
        "pushpull bias -1",
    ]


def test_workers_of_a_store_that_only_adds_end_with_the_bits_of_one_that_updates() -> None:
    x, y = three_clouds(samples=70)

    def train(plug: Any) -> list[FeedForward]:
        def work(store: KVStore) -> FeedForward:
            model = linear(numpy_batch_size=8)
            model.fit(x, y, kvstore=plug(store))
            return model

        return Cluster(2, "dist_sync").run(work)

    expected = train(lambda store: store)[0]
    assert all(equal(model, expected) for model in train(OnlyAdds))


def test_a_fit_that_updates_here_can_be_saved_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    x, y = three_clouds()
    whole = linear(num_epoch=4)
    whole.fit(x, y, kvstore=OnlyAdds())
    linear(num_epoch=2).fit(
        x, y, kvstore=OnlyAdds(), epoch_end_callback=do_checkpoint(tmp_path / "m")
    )
    resumed = FeedForward.load(
        tmp_path / "m",
        2,
        symbol=LinearSoftmax(),
        num_epoch=4,
        numpy_batch_size=16,
        learning_rate=0.5,
        momentum=0.5,
    )
    resumed.fit(x, y, kvstore=OnlyAdds())
    assert equal(resumed, whole)


def test_which_store_is_made_for_how_many_devices() -> None:
    small, large = {"w": np.zeros(3)}, {"w": np.zeros(16 * 1024 * 1024 + 1, np.int8)}
    assert _create_kvstore(None, 2, small) == (None, False)
    assert _create_kvstore("local", 1, small) == (None, False)
    plugged = OnlyAdds()
    assert _create_kvstore(plugged, 1, small) == (plugged, False)
    for params, kind, updates in ((small, "local", True), (large, "local", False)):
        store, on_store = _create_kvstore(kind, 2, params)
        assert (isinstance(store, KVStore) and store.type, on_store) == (kind, updates)
    assert _create_kvstore("device", 2, large)[1] is True
    with create("local") as mine:
        assert _create_kvstore(mine, 1, small) == (mine, True)
    with pytest.raises(ArgumentTypeError, match="must be a KVStore, a str or None"):
        _create_kvstore(3, 1, small)  # type: ignore[arg-type]


def test_an_unknown_metric_is_said_before_anything_is_trained() -> None:
    x, y = three_clouds()
    with pytest.raises(ArgumentValueError, match="no metric is named"):
        linear().fit(x, y, eval_metric="acu")
