"""Saving and going on: a fit that was stopped at an epoch's end comes to the same bits."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clouds import Cluster, LinearSoftmax, equal, linear, three_clouds

from kvstore.arrays.context import cpu
from kvstore.checkpoint.safetensors import TensorSpec, TensorWriter
from kvstore.errors import ArgumentTypeError, CheckpointError
from kvstore.kvstore import create
from kvstore.mxnet.callback import do_checkpoint
from kvstore.mxnet.model import FeedForward, load_checkpoint, save_checkpoint
from kvstore.optimizer import create as create_optimizer
from kvstore.optimizer.schedule import FactorScheduler
from kvstore.stores.base import KVStore
from pslite.errors import UsageError

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": "sgd", "learning_rate": 0.5, "momentum": 0.9},
    "adam": {"optimizer": "adam", "learning_rate": 0.05},
    "schedule": {
        "optimizer": "sgd",
        "learning_rate": 0.5,
        "momentum": 0.5,
        "lr_scheduler": FactorScheduler(step=10, factor=0.5, warmup_steps=5),
    },
}


def model(optimizer: str, **arguments: Any) -> FeedForward:
    settings = {"num_epoch": 4, "numpy_batch_size": 16, "seed": 3, **OPTIMIZERS[optimizer]}
    return FeedForward(LinearSoftmax(), **{**settings, **arguments})


def loaded(prefix: Path, epoch: int, optimizer: str, **arguments: Any) -> FeedForward:
    settings = {"num_epoch": 4, "numpy_batch_size": 16, "seed": 3, **OPTIMIZERS[optimizer]}
    return FeedForward.load(prefix, epoch, symbol=LinearSoftmax(), **{**settings, **arguments})


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("store_type", ["local", "device"])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_fit_that_goes_on_ends_with_the_bits_of_one_that_never_stopped(
    tmp_path: Path, optimizer: str, store_type: str, devices: int
) -> None:
    x, y = three_clouds()
    ctx = [cpu(index) for index in range(devices)]
    whole = model(optimizer, ctx=ctx)
    whole.fit(x, y, kvstore=store_type)
    model(optimizer, ctx=ctx, num_epoch=2).fit(
        x, y, kvstore=store_type, epoch_end_callback=do_checkpoint(tmp_path / "m")
    )
    resumed = loaded(tmp_path / "m", 2, optimizer, ctx=ctx)
    assert resumed.begin_epoch == 2
    resumed.fit(x, y, kvstore=store_type)
    assert equal(resumed, whole)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_workers_of_a_synchronous_job_go_on_to_the_same_bits(
    tmp_path: Path, optimizer: str
) -> None:
    x, y = three_clouds(samples=70)

    def train(start: Any, **arguments: Any) -> tuple[list[FeedForward], Cluster]:
        def work(store: KVStore) -> FeedForward:
            trained = start()
            trained.fit(x, y, kvstore=store, **arguments)
            return trained

        cluster = Cluster(2, "dist_sync")
        return cluster.run(work), cluster

    wholes, _ = train(lambda: model(optimizer, numpy_batch_size=8))
    checkpoint = do_checkpoint(tmp_path / "m", 2)
    _, cluster = train(
        lambda: model(optimizer, numpy_batch_size=8, num_epoch=3), epoch_end_callback=checkpoint
    )
    assert cluster.savers == [(0, "m-0002.states")]
    assert sorted(os.listdir(tmp_path)) == ["m-0002.params", "m-0002.states"]
    resumed, _ = train(lambda: loaded(tmp_path / "m", 2, optimizer, numpy_batch_size=8))
    assert all(equal(one, wholes[0]) for one in (*wholes, *resumed))


def test_without_the_states_a_fit_with_momentum_ends_elsewhere(tmp_path: Path) -> None:
    """The tests above could not fail if the states did not matter."""
    x, y = three_clouds()
    whole, half = model("momentum"), model("momentum", num_epoch=2)
    whole.fit(x, y)
    half.fit(x, y)
    half.save(tmp_path / "m")
    assert os.listdir(tmp_path) == ["m-0002.params"]
    resumed = loaded(tmp_path / "m", 2, "momentum")
    resumed.fit(x, y)
    assert not equal(resumed, whole)


def test_a_worker_that_did_not_load_the_checkpoint_is_told_before_anyone_waits(
    tmp_path: Path,
) -> None:
    x, y = three_clouds()
    model("momentum").fit(x, y, epoch_end_callback=do_checkpoint(tmp_path / "m"))

    def work(store: KVStore) -> str:
        mine = loaded(tmp_path / "m", 2, "momentum") if store.rank else model("momentum")
        with pytest.raises(UsageError, match=r"begin_epoch of ranks 0 to 1 is \[0, 2\]"):
            mine.fit(x, y, kvstore=store)
        return "told"

    assert Cluster(2, "dist_sync").run(work) == ["told", "told"]


@pytest.mark.parametrize(
    ("name", "values"), [("seed", (1, 2)), ("epoch_size", (2, 3)), ("num_epoch", (2, 1))]
)
def test_workers_that_would_visit_other_batches_are_told_before_anyone_waits(
    name: str, values: tuple[int, int]
) -> None:
    x, y = three_clouds()

    def work(store: KVStore) -> str:
        with pytest.raises(UsageError, match=rf"{name} of ranks 0 to 1 is \[{values[0]}, "):
            linear(**{name: values[store.rank]}).fit(x, y, kvstore=store)
        return "told"

    assert Cluster(2, "dist_sync").run(work) == ["told", "told"]


def test_workers_with_data_of_their_own_may_have_seeds_of_their_own() -> None:
    x, y = three_clouds()

    def work(store: KVStore) -> FeedForward:
        mine = slice(store.rank, None, 2)
        trained = linear(seed=store.rank)
        trained.fit(x[mine], y[mine], kvstore=store, shard=False)
        return trained

    first, second = Cluster(2, "dist_sync").run(work)
    assert equal(first, second)


def test_in_the_middle_of_an_epoch_no_states_are_saved_that_belong_to_other_parameters(
    tmp_path: Path,
) -> None:
    x, y = three_clouds()
    trained = linear()
    trained.fit(
        x,
        y,
        batch_end_callback=lambda at: trained.save(tmp_path / "m", 10 * at.epoch + at.nbatch),
        epoch_end_callback=lambda at: trained.save(tmp_path / "end", at.epoch),
    )
    assert not list(tmp_path.glob("m-*.states"))
    assert len(list(tmp_path.glob("m-*.params"))) == 16
    assert len(list(tmp_path.glob("end-*.states"))) == 2


def test_save_writes_the_states_while_the_store_that_was_passed_is_open(tmp_path: Path) -> None:
    x, y = three_clouds()
    with create("local") as store:
        trained = linear()
        trained.fit(x, y, kvstore=store)
        trained.save(tmp_path / "open")
    trained.save(tmp_path / "closed", 7)
    assert sorted(os.listdir(tmp_path)) == [
        "closed-0007.params",
        "open-0002.params",
        "open-0002.states",
    ]
    assert equal(loaded(tmp_path / "closed", 7, "momentum"), trained)


def test_parameters_of_a_rank_other_than_0_are_not_written(tmp_path: Path) -> None:
    x, y = three_clouds()

    def work(store: KVStore) -> None:
        trained = linear()
        trained.fit(x, y, kvstore=store)
        trained.save(tmp_path / f"rank{store.rank}")

    Cluster(2, "dist_sync").run(work)
    assert sorted(os.listdir(tmp_path)) == ["rank0-0002.params", "rank0-0002.states"]


def test_a_loaded_model_predicts_at_once_and_goes_on_at_its_epoch(tmp_path: Path) -> None:
    x, y = three_clouds()
    trained = linear()
    trained.fit(x, y)
    trained.save(tmp_path / "m", 5)
    found = FeedForward.load(tmp_path / "m", 5, symbol=LinearSoftmax())
    assert np.array_equal(found.predict(x), trained.predict(x))
    assert found.begin_epoch == 5
    assert (
        FeedForward.load(tmp_path / "m", 5, symbol=LinearSoftmax(), begin_epoch=1).begin_epoch == 1
    )


def test_states_that_were_promised_and_are_gone_are_an_error(tmp_path: Path) -> None:
    x, y = three_clouds()
    linear().fit(x, y, epoch_end_callback=do_checkpoint(tmp_path / "m"))
    (tmp_path / "m-0002.states").unlink()
    with pytest.raises(CheckpointError, match=r"m-0002\.states"):
        loaded(tmp_path / "m", 2, "momentum").fit(x, y)


@pytest.mark.parametrize("kind", ["params", "states"])
def test_parameters_and_states_of_different_saves_are_an_error(tmp_path: Path, kind: str) -> None:
    x, y = three_clouds()
    for name, seed in ("m", 3), ("n", 4):
        checkpoint = do_checkpoint(tmp_path / name)
        model("momentum", num_epoch=2, seed=seed).fit(x, y, epoch_end_callback=checkpoint)
    assert loaded(tmp_path / "n", 2, "momentum").begin_epoch == 2
    shutil.copy(tmp_path / f"m-0002.{kind}", tmp_path / f"n-0002.{kind}")
    with pytest.raises(
        CheckpointError, match=r"n-0002\.states and .*n-0002\.params are from different saves"
    ):
        loaded(tmp_path / "n", 2, "momentum")
    load_checkpoint(tmp_path / "n", 2)  # the parameters alone


def test_states_of_another_optimizer_are_an_error(tmp_path: Path) -> None:
    x, y = three_clouds()
    model("adam").fit(x, y, epoch_end_callback=do_checkpoint(tmp_path / "m"))
    with pytest.raises(UsageError, match="adam"):
        loaded(tmp_path / "m", 2, "momentum").fit(x, y)


def test_there_must_be_something_to_save(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"parameters .* and an epoch"):
        linear().save(tmp_path / "m", 1)
    empty = linear(num_epoch=None, arg_params={"weight": np.zeros((3, 4)), "bias": np.zeros(3)})
    with pytest.raises(UsageError, match="got epoch None"):
        empty.save(tmp_path / "m")


def test_files_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*m-0003\.params"):
        load_checkpoint(tmp_path / "m", 3)
    path = tmp_path / "m-0003.params"
    path.write_bytes(b"\x12\x01" + bytes(30))  # how a file of MXNet begins
    with pytest.raises(CheckpointError, match=r"m-0003\.params"):
        load_checkpoint(tmp_path / "m", 3)
    spec = TensorSpec((0,), np.dtype("f4"))
    with TensorWriter(path, {"arg:w": spec}):
        pass
    with pytest.raises(CheckpointError, match="is not a saved model"):
        load_checkpoint(tmp_path / "m", 3)
    with TensorWriter(path, {"w": spec}, {"kvstore.model": "1"}):
        pass
    with pytest.raises(CheckpointError, match="'w' is not a parameter of a model"):
        load_checkpoint(tmp_path / "m", 3)


def test_a_prefix_or_an_epoch_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match=r"a file name must be a str or .*, got 3"):
        load_checkpoint(3, 1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="epoch must be an int, got 'last'"):
        load_checkpoint(tmp_path / "m", "last")  # type: ignore[arg-type]


def test_a_prefix_that_is_a_directory_stays_one(tmp_path: Path) -> None:
    save_checkpoint(f"{tmp_path}/", 1, None, {"w": np.zeros(2)})
    assert [path.name for path in tmp_path.iterdir()] == ["-0001.params"]


def test_parameters_of_any_dtype_and_name_come_back(tmp_path: Path) -> None:
    values = {"a:b": np.arange(3, dtype=np.float16), "c": np.array(2.5), "": np.zeros((0, 2), "i1")}
    save_checkpoint(os.fspath(tmp_path / "m"), 12345, None, values)
    shutil.move(tmp_path / "m-12345.params", tmp_path / "n-0001.params")
    _, arg_params, aux_params = load_checkpoint(tmp_path / "n", 1)
    assert aux_params == {}
    assert {name: (value.dtype, value.tolist()) for name, value in arg_params.items()} == {
        name: (value.dtype, value.tolist()) for name, value in values.items()
    }


class Died(Exception):
    """The process dies here."""


def dies_in(epoch: int) -> Any:
    def callback(progress: Any) -> None:
        if progress.epoch == epoch and progress.nbatch == 2:
            raise Died

    return callback


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("epoch", [0, 1, 3])
def test_a_fit_goes_on_by_itself_after_the_last_epoch_that_was_saved(
    tmp_path: Path, optimizer: str, epoch: int
) -> None:
    x, y = three_clouds()
    whole = model(optimizer)
    whole.fit(x, y)
    with pytest.raises(Died):
        model(optimizer).fit(
            x, y, checkpoint=tmp_path, batch_end_callback=dies_in(epoch), kvstore="local"
        )
    epochs: list[int] = []
    resumed = model(optimizer)
    resumed.fit(
        x, y, checkpoint=tmp_path, epoch_end_callback=lambda done: epochs.append(done.epoch)
    )
    assert epochs == list(range(epoch, 4))
    assert equal(resumed, whole)


def test_a_fit_that_was_finished_gives_its_parameters_again(tmp_path: Path) -> None:
    x, y = three_clouds()
    first, again = model("adam"), model("adam")
    first.fit(x, y, checkpoint=tmp_path)
    again.fit(x, y, checkpoint=tmp_path, batch_end_callback=dies_in(0))
    assert equal(again, first)


def test_untrained_arrays_go_on_too(tmp_path: Path) -> None:
    class Counting(LinearSoftmax):
        """Counts its batches in an array that is not trained."""

        def init_aux_params(self, input_shape: Any) -> dict[str, np.ndarray[Any, Any]]:
            return {"batches": np.zeros(1, np.float32)}

        def loss_and_gradients(self, params: Any, x: Any, y: Any, aux: Any) -> Any:  # type: ignore[override]
            aux["batches"] += 1
            return super().loss_and_gradients(params, x, y)

        def predict(self, params: Any, x: Any, aux: Any = None) -> Any:
            return super().predict(params, x)

    x, y = three_clouds()
    made = [FeedForward(Counting(), num_epoch=3, numpy_batch_size=16) for _ in range(3)]
    made[0].fit(x, y)
    with pytest.raises(Died):
        made[1].fit(x, y, checkpoint=tmp_path, batch_end_callback=dies_in(2))
    made[2].fit(x, y, checkpoint=tmp_path)
    assert made[0].aux_params is not None
    assert made[2].aux_params is not None
    assert made[2].aux_params["batches"] == made[0].aux_params["batches"] > 3


@pytest.mark.parametrize("devices", [1, 2, 7])
def test_untrained_arrays_go_on_with_another_number_of_devices(
    tmp_path: Path, devices: int
) -> None:
    """Seven equal numbers have a mean that may be another number."""

    class Seeing(LinearSoftmax):
        def init_aux_params(self, input_shape: Any) -> dict[str, np.ndarray[Any, Any]]:
            return {"mean": np.zeros(input_shape, np.float32)}

        def loss_and_gradients(self, params: Any, x: Any, y: Any, aux: Any) -> Any:  # type: ignore[override]
            aux["mean"] += 0.1 * x.mean(axis=0)
            return super().loss_and_gradients(params, x, y)

        def predict(self, params: Any, x: Any, aux: Any = None) -> Any:
            return super().predict(params, x)

    x, y = three_clouds()
    ctx = [cpu(index) for index in range(7)]
    first = FeedForward(Seeing(), ctx, 2, numpy_batch_size=16)
    first.fit(x, y, checkpoint=tmp_path)
    again = FeedForward(Seeing(), ctx[:devices], 2, numpy_batch_size=16)
    again.fit(x, y, checkpoint=tmp_path)
    assert first.aux_params is not None
    assert again.aux_params is not None
    assert again.aux_params["mean"].tobytes() == first.aux_params["mean"].tobytes()


def test_progress_of_other_batches_is_refused(tmp_path: Path) -> None:
    x, y = three_clouds()
    model("adam", num_epoch=2).fit(x, y, checkpoint=tmp_path)
    for batch_size, text in (
        (20, "must be of epochs of 6 batches, got 8; pass the data, batch size"),
        (60, r"the progress of 16 steps, but stop is 8 \(a batch is a step of a fit\)"),
    ):
        with pytest.raises(CheckpointError, match=text):
            model("adam", numpy_batch_size=batch_size).fit(x, y, checkpoint=tmp_path)


def test_the_progress_of_another_loop_is_refused(tmp_path: Path) -> None:
    x, y = three_clouds()
    with create("local") as kv:
        kv.init(["weight", "bias"], [np.zeros((3, 4)), np.zeros(3)])
        kv.set_optimizer(create_optimizer("adam"))
        list(kv.steps(3, {"weight": np.zeros(2)}, tmp_path, every=1))
    with pytest.raises(CheckpointError, match="must be of epochs of 8 batches, got None"):
        model("adam").fit(x, y, checkpoint=tmp_path)


def test_a_checkpoint_that_contradicts_other_arguments_is_refused(tmp_path: Path) -> None:
    x, y = three_clouds()
    with pytest.raises(UsageError, match="but begin_epoch is 1; pass only one of them"):
        model("adam", begin_epoch=1).fit(x, y, checkpoint=tmp_path)
    with pytest.raises(UsageError, match="needs a store that updates the weights, got 'teststore'"):
        model("adam").fit(x, y, kvstore="teststore", checkpoint=tmp_path)
