"""Callbacks: what they log, draw and save, at which batches and epochs."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import kvstore as mx
from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.mxnet import metric
from kvstore.mxnet.callback import (
    LogValidationMetricsCallback,
    ProgressBar,
    Speedometer,
    do_checkpoint,
    log_train_metric,
    module_checkpoint,
)
from kvstore.mxnet.model import Progress, load_checkpoint


class Param(NamedTuple):
    """What MXNet hands to callbacks."""

    epoch: int
    nbatch: int
    eval_metric: metric.EvalMetric | None


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "kvstore.mxnet.callback")
    return lambda: [record.getMessage() for record in caplog.records]


def counted(right: int, of: int) -> metric.EvalMetric:
    made = metric.create("acc")
    made.update_batch(metric.BatchResult(np.zeros(of), 0.0, right, None))
    return made


def test_the_speedometer_shows_samples_per_second_and_the_batches_since_its_last_line(
    logged: Any,
) -> None:
    seconds = iter([10.0, 12.0, 16.0, 20.0, 23.0, 24.0])
    speed = Speedometer(batch_size=4, frequent=2, clock=lambda: next(seconds))
    made = metric.create("acc")
    for epoch in (0, 1):
        made.reset()
        for nbatch in range(1, 6):
            made.update_batch(metric.BatchResult(np.zeros(4), 0.0, nbatch % 4, None))
            speed(Param(epoch, nbatch, made))
    assert logged() == [
        "Epoch[0] Batch [1-2]\tSpeed: 2.00 samples/sec\taccuracy=0.375000",
        "Epoch[0] Batch [2-4]\tSpeed: 2.00 samples/sec\taccuracy=0.375000",
        "Epoch[1] Batch [1-2]\tSpeed: 1.33 samples/sec\taccuracy=0.375000",
        "Epoch[1] Batch [2-4]\tSpeed: 8.00 samples/sec\taccuracy=0.375000",
    ]
    assert made.get_global() == ("accuracy", 7 / 20)


def test_the_speedometer_needs_no_metric_and_can_leave_it_alone(logged: Any) -> None:
    seconds = iter(range(100))
    for made in (None, counted(1, 2)):
        speed = Speedometer(8, 2, auto_reset=False, clock=lambda: float(next(seconds)))
        speed(Param(0, 1, made))
        speed(Param(0, 2, made))
    assert [line.partition("sec")[2] for line in logged()] == ["", "\taccuracy=0.500000"]
    assert made is not None
    assert made.get() == ("accuracy", 0.5)


def test_training_metrics_are_logged_every_so_many_batches(logged: Any) -> None:
    made = counted(1, 2)
    log = log_train_metric(3, auto_reset=True)
    for nbatch in range(1, 7):
        log(Param(2, nbatch, made))
    assert logged()[0] == "Iter[2] Batch[3] Train-accuracy=0.500000"
    assert logged()[1] == "Iter[2] Batch[6] Train-accuracy=nan"
    LogValidationMetricsCallback()(Param(2, 6, counted(3, 4)))
    assert logged()[2:] == ["Epoch[2] Validation-accuracy=0.750000"]


def test_the_bar_grows_over_itself_and_ends_its_line() -> None:
    stream = io.StringIO()
    bar = ProgressBar(total=8, length=4, stream=stream)
    for nbatch in (1, 2, 2, 4, 8, 9):
        bar(Param(0, nbatch, None))
    assert stream.getvalue() == ("\r[----] 13%\r[=---] 25%\r[==--] 50%\r[====] 100%\n")


def test_a_bar_of_no_stream_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    ProgressBar(total=1, length=2)(Param(0, 1, None))
    assert capsys.readouterr().err == "\r[==] 100%\n"


def test_a_checkpoint_is_written_every_period_from_the_first_epoch_on(tmp_path: Path) -> None:
    save = do_checkpoint(tmp_path / "m", period=2)
    weights = {"w": np.arange(3.0)}
    for epoch in range(5):
        save(epoch, None, weights, {"mean": np.ones(2, np.float16)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m-0002.params", "m-0004.params"]
    symbol, arg_params, aux_params = load_checkpoint(tmp_path / "m", 4)
    assert symbol is None
    assert arg_params["w"].tolist() == [0, 1, 2]
    assert aux_params["mean"].dtype == np.float16


def test_a_fit_saves_through_its_own_save() -> None:
    saved: list[tuple[Any, int]] = []
    callback = do_checkpoint("m", period=3)
    for epoch in range(7):
        callback.end_epoch(
            Progress(epoch, 1, 1, 1.0, 0.0, 0.0), lambda prefix, at: saved.append((prefix, at))
        )
    assert saved == [("m", 3), ("m", 6)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Speedometer(0),
        lambda: Speedometer(1, frequent=0),
        lambda: ProgressBar(0),
        lambda: log_train_metric(0),
        lambda: do_checkpoint("m", 0),
    ],
)
def test_a_period_of_nothing_is_refused(make: Any) -> None:
    with pytest.raises(ArgumentValueError, match="must be at least 1, got 0"):
        make()


def test_a_period_in_words_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="batch_size must be a number, got 'a'"):
        Speedometer("a")  # type: ignore[arg-type]


def test_a_loop_of_ones_own_reports_in_mxnets_form(caplog: pytest.LogCaptureFixture) -> None:
    assert mx.model.BatchEndParam is mx.callback.BatchEndParam
    caplog.set_level(logging.INFO)
    param = mx.model.BatchEndParam(epoch=1, nbatch=4, eval_metric=counted(3, 4), locals=locals())
    log_train_metric(2)(param)
    assert caplog.messages == ["Iter[1] Batch[4] Train-accuracy=0.750000"]
    assert mx.callback.BatchEndParam(0, 1)[2:] == (None, None)


def test_a_module_saves_itself_every_few_epochs() -> None:
    class Module:
        def save_checkpoint(self, *arguments: Any) -> None:
            saved.append(arguments)

    class Model:
        def save(self, *arguments: Any) -> None:
            saved.append(arguments)

    saved: list[Any] = []
    for mod in (Module(), Model()):
        callback = module_checkpoint(mod, "prefix", 2, True)
        for epoch in range(4):
            callback(epoch, None, {}, {})
    assert saved == [("prefix", 2, True), ("prefix", 4, True), ("prefix", 2), ("prefix", 4)]
    with pytest.raises(ArgumentTypeError, match="must have a method save_checkpoint or save"):
        module_checkpoint(3, "prefix")
