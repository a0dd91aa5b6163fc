"""The flags that the training scripts share: the optimizer and the schedule that they make."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import common
import pytest

from kvstore.errors import OptimizerParameterError
from pslite.errors import UsageError


@dataclass
class Store:
    """What is asked of a store."""

    type: str = "local"
    num_workers: int = 1


def optimizer_of(*flags: str, store: Any = None, batches: int = 10) -> Any:
    args = common.parse(common.add_fit_args(argparse.ArgumentParser()), flags)
    return common.make_optimizer(args, store or Store(), batches)


def rates_of(optimizer: Any, *updates: int) -> list[float]:
    return [round(optimizer.rate(update), 6) for update in updates]


@pytest.mark.parametrize(
    ("store", "factor"),
    [
        (Store(), 1 / 32),
        (Store("dist_sync", 4), 1 / 128),
        (Store("dist_async", 4), 1 / 32),
    ],
)
def test_gradients_become_means_over_what_one_update_sees(store: Store, factor: float) -> None:
    made = optimizer_of("--batch-size", "32", "--lr", "0.2", "--mom", "0.7", store=store)
    assert made.params()["rescale_grad"] == factor
    assert made.params()["momentum"] == 0.7
    assert made.lr_scheduler is None


def test_an_optimizer_gets_the_numbers_that_it_has() -> None:
    assert "momentum" not in optimizer_of("--optimizer", "adam").params()
    assert "learning_rate" in optimizer_of("--optimizer", "adagrad").params()


def test_the_rate_falls_at_the_epochs_that_were_named() -> None:
    made = optimizer_of("--lr", "1", "--lr-factor", "0.5", "--lr-step-epochs", "2,3")
    assert rates_of(made, 1, 20, 21, 30, 31, 99) == [1, 1, 0.5, 0.5, 0.25, 0.25]


def test_without_rounds_every_workers_batch_is_an_update() -> None:
    flags = ("--lr", "1", "--lr-factor", "0.5", "--lr-step-epochs", "2")
    asynchronous = optimizer_of(*flags, store=Store("dist_async", 3))
    synchronous = optimizer_of(*flags, store=Store("dist_sync", 3))
    assert rates_of(asynchronous, 60, 61) == [1, 0.5]
    assert rates_of(synchronous, 20, 21) == [1, 0.5]


def test_a_warm_up_climbs_to_the_rate_with_or_without_steps() -> None:
    for steps in ("", "3"):
        made = optimizer_of("--lr", "1", "--warmup-epochs", "2", "--lr-step-epochs", steps)
        assert rates_of(made, 5, 10, 20, 30) == [0.25, 0.5, 1, 1]
        assert rates_of(made, 31) == ([0.1] if steps else [1])


@pytest.mark.parametrize(("text", "middle"), [("cosine", 0.5), ("pow1", 0.5), ("pow", 0.25)])
def test_the_rate_can_fall_to_nothing_at_the_end(text: str, middle: float) -> None:
    made = optimizer_of("--lr", "1", "--num-epochs", "4", "--lr-step-epochs", text)
    assert rates_of(made, 20, 40, 50) == [middle, 0, 0]


@pytest.mark.parametrize("text", ["two", "pow-x", "pow0", "3,b"])
def test_epochs_that_are_no_numbers_are_said(text: str) -> None:
    with pytest.raises(UsageError, match=f"--lr-step-epochs takes .* got '{text}'"):
        optimizer_of("--lr-step-epochs", text)


def test_epochs_out_of_order_are_said() -> None:
    with pytest.raises(OptimizerParameterError, match="an increasing list"):
        optimizer_of("--lr-step-epochs", "3,2")


def test_an_epoch_is_shared_by_all_workers() -> None:
    args = common.parse(common.add_fit_args(argparse.ArgumentParser()), ["--batch-size", "8"])
    assert common.count_batches(args, Store("dist_sync", 3), 100) == 5
