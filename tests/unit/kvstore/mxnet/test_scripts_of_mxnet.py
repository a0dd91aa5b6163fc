"""Calls in the form in which MXNet's own training scripts make them; only the import differs.

After ``example/image-classification/common/fit.py`` (1.9.1) and
``example/distributed_training/cifar10_dist.py`` (2.0): what these ask of stores, schedules,
optimizers, initializers, metrics, callbacks and ``gluon``. Networks, autograd, data sets and
``Module`` are not here; what stands in for them is marked.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore as mx
from kvstore import kv
from kvstore.mxnet import gluon, nd
from kvstore.mxnet.gluon.parameter import Parameter


def flags(**changes: Any) -> argparse.Namespace:
    """The command line of the script, as far as it counts here."""
    return argparse.Namespace(
        **{
            "kv_store": "local",
            "gc_type": "none",
            "gc_threshold": 0.5,
            "lr": 0.1,
            "lr_factor": 0.1,
            "lr_step_epochs": "2,4",
            "num_epochs": 6,
            "load_epoch": None,
            "optimizer": "sgd",
            "mom": 0.9,
            "wd": 1e-4,
            "batch_size": 8,
            "disp_batches": 2,
            "top_k": 0,
            "loss": "",
            **changes,
        }
    )


def schedule_of(args: argparse.Namespace, epoch_size: int) -> tuple[float, Any]:
    """The rate to begin with, and how it falls: by powers, in steps, or not at all."""
    if args.lr_step_epochs.startswith("pow"):
        power = float(args.lr_step_epochs.removeprefix("pow"))
        return args.lr, mx.lr_scheduler.PolyScheduler(args.num_epochs * epoch_size, args.lr, power)
    begin = args.load_epoch or 0
    epochs = [int(each) for each in args.lr_step_epochs.split(",")]
    rate = args.lr * args.lr_factor ** sum(begin >= each for each in epochs)
    steps = [epoch_size * (each - begin) for each in epochs if each > begin]
    if not steps:
        return rate, None
    scheduler = mx.lr_scheduler.MultiFactorScheduler(
        step=steps, factor=args.lr_factor, base_lr=args.lr
    )
    return rate, scheduler


HAVE_MOMENTUM = {"sgd", "dcasgd", "nag", "signum", "lbsgd"}


@pytest.mark.parametrize("optimizer", [*sorted(HAVE_MOMENTUM), "adam", "rmsprop", "adagrad"])
@pytest.mark.parametrize("changes", [{}, {"lr_step_epochs": "pow2"}, {"load_epoch": 5}])
def test_store_schedule_and_optimizer_are_made_as_fit_makes_them(
    changes: dict[str, Any], optimizer: str
) -> None:
    args = flags(optimizer=optimizer, gc_type="2bit", **changes)
    store = mx.kvstore.create(args.kv_store)
    assert (store.rank, store.num_workers) == (0, 1)
    if args.gc_type != "none":
        store.set_gradient_compression({"type": args.gc_type, "threshold": args.gc_threshold})
    rate, scheduler = schedule_of(args, epoch_size=3)
    numbers = {
        "learning_rate": rate,
        "wd": args.wd,
        "lr_scheduler": scheduler,
        "multi_precision": True,
    }
    if args.optimizer in HAVE_MOMENTUM:
        numbers["momentum"] = args.mom
    if args.optimizer == "lbsgd":
        numbers |= {"updates_per_epoch": 3, "begin_epoch": args.load_epoch or 0, "batch_scale": 1}
        numbers |= {"warmup_strategy": "linear", "warmup_epochs": 5, "num_epochs": args.num_epochs}
    made = mx.optimizer.create(args.optimizer, **numbers)
    is_power = args.lr_step_epochs.startswith("pow")
    assert made.rate(1) == pytest.approx(rate * (17 / 18) ** 2 if is_power else rate)
    if scheduler is not None:
        assert made.rate(18) < rate / 10
    store.set_optimizer(made)
    store.init("weight", np.zeros(4, np.float32))
    store.push("weight", np.ones(4, np.float32))
    assert (store.pull("weight") < 0).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: mx.init.Normal(),
        lambda: mx.init.Xavier(),
        lambda: mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2),
        lambda: mx.init.MSRAPrelu(),
        lambda: mx.init.Orthogonal(),
        lambda: mx.init.Uniform(),
        lambda: mx.init.One(),
        lambda: mx.init.Zero(),
    ],
)
def test_initializers_are_made_as_fit_makes_them_and_train(make: Any) -> None:
    x, y = np.random.default_rng(0).normal(size=(24, 4)), np.arange(24) % 3
    model = mx.model.FeedForward(Linear(), num_epoch=1, numpy_batch_size=8, initializer=make())
    model.fit(x, y)
    assert np.isfinite(model.predict(x)).all()


class Linear:
    """In the place of a symbol: a linear classifier."""

    def init_params(self, input_shape: Any, rng: Any) -> Any:
        return {"fc_weight": np.zeros((3, *input_shape)), "fc_bias": np.zeros(3)}

    def predict(self, params: Any, x: Any) -> Any:
        odds = np.exp(x @ params["fc_weight"].T + params["fc_bias"])
        return odds / odds.sum(axis=1, keepdims=True)

    def loss_and_gradients(self, params: Any, x: Any, y: Any) -> Any:
        wrong = self.predict(params, x)
        loss = -np.log(wrong[np.arange(len(y)), y]).sum()
        correct = int((wrong.argmax(axis=1) == y).sum())
        wrong[np.arange(len(y)), y] -= 1
        return loss, correct, {"fc_weight": wrong.T @ x, "fc_bias": wrong.sum(axis=0)}


def test_metrics_callbacks_and_checkpoints_are_made_as_fit_makes_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = flags(top_k=2, loss="ce,nll")
    metrics: list[Any] = ["accuracy"]
    if args.top_k > 0:
        metrics.append(mx.metric.create("top_k_accuracy", top_k=args.top_k))
    for loss in args.loss.split(","):
        metrics.append(mx.metric.create("nll_loss" if loss == "nll" else loss))
    prefix = str(tmp_path / "net")
    store = mx.kvstore.create(args.kv_store)
    # In the place of Module.fit, with the same keywords.
    model = mx.model.FeedForward(Linear(), mx.cpu(), num_epoch=2, numpy_batch_size=args.batch_size)
    x, y = np.random.default_rng(0).normal(size=(48, 4)), np.arange(48) % 3
    with caplog.at_level(logging.INFO):
        model.fit(
            X=mx.io.NDArrayIter(x, y, args.batch_size, shuffle=True),
            eval_data=mx.io.NDArrayIter(x, y, args.batch_size),
            eval_metric=metrics,
            kvstore=store,
            batch_end_callback=[mx.callback.Speedometer(args.batch_size, args.disp_batches)],
            epoch_end_callback=mx.callback.do_checkpoint(prefix, period=1),
        )
    lines = [line for line in caplog.messages if "Speed" in line]
    assert lines
    for name in ("accuracy=", "top_k_accuracy_2=", "cross-entropy=", "nll-loss="):
        assert name in lines[0]
    _, arg_params, aux_params = mx.model.load_checkpoint(prefix, 2)
    assert np.array_equal(arg_params["fc_weight"], model.arg_params["fc_weight"])
    assert aux_params == {}


@pytest.mark.parametrize("name", ["autograd", "mod", "mon", "profiler"])
def test_what_the_scripts_use_besides_is_named_with_what_to_do(name: str) -> None:
    with pytest.raises(AttributeError, match=f"there is no mx.{name} here: "):
        getattr(mx, name)


def test_a_trainer_on_several_devices_is_used_as_the_distributed_script_uses_it() -> None:
    store = kv.create("local")
    ctx = [mx.cpu(i) for i in range(2)]
    random = np.random.default_rng(1)
    x = random.normal(size=(64, 4)).astype("f4")
    y = (x @ np.array([[2.0], [-1.0], [0.5], [1.0]], "f4") > 0).astype("f4").reshape(-1)
    # In the place of net.collect_params() and autograd: a logistic regression by hand.
    weights = [nd.zeros((4, 1), ctx=each) for each in ctx]
    net = {"weight": Parameter(weights, [nd.zeros((4, 1), ctx=each) for each in ctx])}
    trainer = gluon.Trainer(net, "adam", {"learning_rate": 0.05}, kvstore=store)
    for _ in range(60):
        data = gluon.utils.split_and_load(nd.array(x), ctx)
        label = gluon.utils.split_and_load(nd.array(y), ctx)
        for weight, grad, part, wanted in zip(
            net["weight"].list_data(), net["weight"].list_grad(), data, label, strict=True
        ):
            odds = 1 / (1 + np.exp(-(part.asnumpy() @ weight.asnumpy())))
            grad[:] = part.asnumpy().T @ (odds - wanted.asnumpy().reshape(-1, 1))
        trainer.step(len(x))
    metric = mx.metric.Accuracy()
    odds = nd.array(1 / (1 + np.exp(-(x @ weights[0].asnumpy()))))
    metric.update(
        preds=nd.array(np.hstack([1 - odds.asnumpy(), odds.asnumpy()])), labels=nd.array(y)
    )
    assert metric.get()[0] == "accuracy"
    assert metric.get()[1] > 0.9
