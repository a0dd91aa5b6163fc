"""``Trainer`` on several workers: equal to one that sees all samples, and never at odds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from workers import Workers

import kvstore as mx
from kvstore import KVStore
from kvstore.errors import ArgumentValueError, OptimizerMismatch
from kvstore.mxnet.gluon import Parameter, Trainer
from pslite.errors import UsageError

Array = Any

SHAPES = {"weight": (40, 13), "bias": (7,)}
ADAM = {"learning_rate": 0.01, "wd": 0.1}


def values(*seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=shape).astype("f4") for name, shape in SHAPES.items()}


def parameters(rank: int = 0, make: Callable[[Array], Array] = np.array) -> dict[str, Parameter]:
    """Rank 0's values are those that count."""
    return {name: Parameter(make(value), name=name) for name, value in values(rank).items()}


def give(params: dict[str, Parameter], step: int, rank: int, make: Any = np.array) -> None:
    for name, value in values(step, rank + 1).items():
        params[name].grad = make(value)


def bits(params: dict[str, Parameter]) -> dict[str, bytes]:
    return {name: np.asarray(each.data).tobytes() for name, each in params.items()}


def two_devices(
    script: Callable[[Trainer, int], None], steps: int, **options: Any
) -> dict[str, bytes]:
    """What two devices of one process come to; ``script`` acts before each step."""
    params = {
        name: Parameter([value, value.copy()], name=name) for name, value in values(0).items()
    }
    trainer = Trainer(params, "adam", ADAM, "local", **options)
    for step in range(steps):
        for name, parameter in params.items():
            parameter.grad = [values(step, rank + 1)[name] for rank in (0, 1)]
        script(trainer, step)
    return {name: each.list_data()[0].tobytes() for name, each in params.items()}


def on_workers(
    script: Callable[[Trainer, int], None], steps: int, make: Any = np.array, **options: Any
) -> list[dict[str, bytes]]:
    """What two workers come to."""

    def train(kv: KVStore) -> dict[str, bytes]:
        params = parameters(kv.rank, make)
        trainer = Trainer(params, "adam", ADAM, kv, **options)
        for step in range(steps):
            give(params, step, kv.rank, make)
            script(trainer, step)
        return bits(params)

    with Workers("dist_sync", chunk_bytes=1024, credit_bytes=4096) as workers:
        return workers.run(train)


def plain_step(trainer: Trainer, step: int) -> None:
    trainer.step(8)


def new_rate_and_batch(trainer: Trainer, step: int) -> None:
    if step == 2:
        trainer.set_learning_rate(0.5)
    if step == 4:
        trainer.set_learning_rate(0.2)
    trainer.step(8 if step != 3 else 5)


def halves(trainer: Trainer, step: int) -> None:
    trainer.allreduce_grads()
    trainer.update(8)


# -- the same as in one process ---------------------------------------------------------------


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize("script", [plain_step, new_rate_and_batch])
def test_two_workers_give_the_bits_of_two_devices(
    on_store: bool, script: Callable[[Trainer, int], None]
) -> None:
    expected = two_devices(script, 6, update_on_kvstore=on_store)
    assert on_workers(script, 6, update_on_kvstore=on_store) == [expected] * 2
    if script is new_rate_and_batch:
        assert two_devices(plain_step, 6) != expected


def test_sums_and_updates_apart_give_the_same_bits() -> None:
    expected = two_devices(plain_step, 3)
    assert on_workers(halves, 3, update_on_kvstore=False) == [expected] * 2


@pytest.mark.parametrize("on_store", [True, False])
def test_arrays_of_all_libraries_give_the_same_bits(on_store: bool) -> None:
    torch = pytest.importorskip("torch")
    expected = two_devices(plain_step, 3)
    for make in mx.nd.array, torch.tensor:
        assert on_workers(plain_step, 3, make, update_on_kvstore=on_store) == [expected] * 2


def lenet(torch: Any) -> Any:
    """Two convolutions and two dense layers for 12 x 12 pixels, without batch norm."""
    nn = torch.nn
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(6, 12, 2), nn.Tanh()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 10)),
    )


@pytest.mark.parametrize("on_store", [True, False])
def test_pytorch_on_two_workers_equals_its_own_optimizer_on_the_joined_batch(
    on_store: bool,
) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(20, 16, 1, 12, 12, generator=draw)
    y = torch.randint(10, (20, 16), generator=draw)
    torch.manual_seed(3)
    nets = [lenet(torch) for _ in range(3)]  # each with other values
    alone = nets[0]
    start = {name: value.clone() for name, value in alone.state_dict().items()}

    descent = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    for step in range(20):
        descent.zero_grad()
        functional.cross_entropy(alone(x[step]), y[step]).backward()
        descent.step()

    def train(kv: KVStore) -> Any:
        net = nets[1 + kv.rank]
        if kv.rank == 0:
            net.load_state_dict(start)
        sgd = {"learning_rate": 0.05, "momentum": 0.9, "wd": 1e-3}
        trainer = Trainer(net.named_parameters(), "sgd", sgd, kv, update_on_kvstore=on_store)
        samples = slice(8 * kv.rank, 8 * kv.rank + 8)
        if kv.rank != 0:
            assert not torch.equal(net[0].weight, start["0.weight"])
        trainer.broadcast_parameters()
        assert torch.equal(net[0].weight, start["0.weight"])
        for step in range(20):
            net.zero_grad()
            loss = functional.cross_entropy(
                net(x[step, samples]), y[step, samples], reduction="sum"
            )
            loss.backward()
            trainer.step(8 * trainer.num_workers)
        return net.state_dict()

    with Workers("dist_sync") as workers:
        found = workers.run(train)
    for name, expected in alone.state_dict().items():
        assert torch.equal(found[0][name], found[1][name])
        torch.testing.assert_close(found[0][name], expected, rtol=0, atol=1e-5)
    moved = max(float((alone.state_dict()[name] - start[name]).abs().max()) for name in start)
    assert moved > 0.01


# -- learning rates and batch sizes -----------------------------------------------------------


def test_the_servers_have_the_new_numbers_and_every_worker_reads_them() -> None:
    def script(kv: KVStore) -> tuple[float, float, float]:
        params = parameters()
        trainer = Trainer(params, "sgd", {"learning_rate": 0.5}, kv)
        give(params, 0, kv.rank)
        trainer.step(8)
        kv.barrier()
        trainer.set_learning_rate(0.25)
        if kv.rank == 0:
            assert kv.optimizer_params()["learning_rate"] == 0.25
        trainer.step(4)
        numbers = kv.optimizer_params()
        return numbers["learning_rate"], numbers["rescale_grad"], trainer.learning_rate

    with Workers("dist_sync") as workers:
        assert workers.run(script) == [(0.25, 0.25, 0.25)] * 2


Difference = Callable[[Trainer, KVStore], None]


def batch_of_one_rank(changing: int) -> Difference:
    return lambda trainer, kv: trainer.step(5 if kv.rank == changing else 8)


def rate_of_one_rank(changing: int) -> Difference:
    def script(trainer: Trainer, kv: KVStore) -> None:
        if kv.rank == changing:
            trainer.set_learning_rate(0.7)
        trainer.step(8)

    return script


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize(
    ("script", "text"),
    [
        (batch_of_one_rank(0), "batch sizes differ: worker 0 5, worker 1 8"),
        (batch_of_one_rank(1), "batch sizes differ: worker 0 8, worker 1 5"),
        (lambda trainer, kv: trainer.step(9 + kv.rank), "batch sizes differ: worker 0 9"),
        (rate_of_one_rank(0), "learning rates differ: worker 0 0.7, worker 1 0.01"),
        (rate_of_one_rank(1), "learning rates differ: worker 0 0.01, worker 1 0.7"),
    ],
)
def test_workers_that_differ_all_get_an_error_and_no_weight_changes(
    script: Difference, text: str, on_store: bool
) -> None:
    def train(kv: KVStore) -> None:
        params = parameters()
        trainer = Trainer(params, "adam", ADAM, kv, update_on_kvstore=on_store)
        give(params, 0, kv.rank)
        trainer.step(8)
        before = bits(params)
        with pytest.raises(OptimizerMismatch, match=text):
            script(trainer, kv)
        if on_store:
            kv.pull(list(SHAPES), out=[params[name].data for name in SHAPES])
        assert bits(params) == before

    with Workers("dist_sync") as workers:
        workers.run(train)


def test_workers_that_update_apart_by_other_batch_sizes_all_get_an_error() -> None:
    def train(kv: KVStore) -> None:
        params = parameters()
        trainer = Trainer(params, "adam", ADAM, kv, update_on_kvstore=False)
        give(params, 0, kv.rank)
        trainer.allreduce_grads()
        before = bits(params)
        with pytest.raises(OptimizerMismatch, match="batch sizes differ"):
            trainer.update(8 + kv.rank)
        assert bits(params) == before

    with Workers("dist_sync") as workers:
        workers.run(train)


def test_after_such_an_error_the_workers_can_agree_and_go_on() -> None:
    def script(trainer: Trainer, step: int) -> None:
        if step == 1:
            assert trainer.kvstore is not None
            with pytest.raises(OptimizerMismatch):
                trainer.step(8 + trainer.kvstore.rank)
        trainer.step(8)

    assert on_workers(script, 3) == [two_devices(plain_step, 3)] * 2


@pytest.mark.parametrize("on_store", [True, False])
@pytest.mark.parametrize(
    ("difference", "error", "text"),
    [
        ("names", UsageError, r"w is \(2,\) of float64 on worker 0, missing on worker 1"),
        ("shapes", UsageError, r"w is \(2,\) of float64 on worker 0, \(3,\) of float64 on worker"),
        ("numbers", OptimizerMismatch, "learning_rate is 0.1 on worker 0, 0.2 on worker 1$"),
        ("class", OptimizerMismatch, "optimizer is sgd on worker 0, adam on worker 1"),
        ("batch", OptimizerMismatch, "batch size.* is 1 on worker 0, 2 on worker 1$"),
        ("mean", UsageError, 'reduction="mean" differs.*worker 0 0, worker 1 1'),
        ("where", UsageError, "update_on_kvstore differs"),
    ],
)
def test_workers_that_begin_differently_all_get_an_error(
    difference: str, error: type[Exception], text: str, on_store: bool
) -> None:
    def train(kv: KVStore) -> None:
        other = kv.rank == 1
        name = "v" if other and difference == "names" else "w"
        shape = 3 if other and difference == "shapes" else 2
        rate = 0.2 if other and difference == "numbers" else 0.1
        batch_size = 2 if other and difference == "batch" else 1
        here = on_store != (other and difference == "where")
        params = {name: Parameter(np.zeros(shape), np.zeros(shape))}
        reduction = "mean" if other and difference == "mean" else "sum"
        optimizer = "adam" if other and difference == "class" else "sgd"
        numbers = {"learning_rate": rate}
        trainer = Trainer(params, optimizer, numbers, kv, None, here, reduction=reduction)
        with pytest.raises(error, match=text):
            trainer.step(batch_size)

    with Workers("dist_sync") as workers:
        workers.run(train)


def test_parameters_that_are_frozen_on_one_worker_only_are_an_error_on_all() -> None:
    def train(kv: KVStore) -> None:
        params = parameters()
        trainer = Trainer(params, "sgd", None, kv)
        give(params, 0, kv.rank)
        trainer.step(1)
        if kv.rank == 1:
            params["bias"].grad_req = "null"
        with pytest.raises(UsageError, match="different parameters in this step"):
            trainer.step(1)
        for parameter in params.values():
            parameter.grad_req = "null"
        trainer.step(1)  # nothing to train, on all of them

    with Workers("dist_sync") as workers:
        workers.run(train)


# -- missing gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("on_store", [True, False])
def test_a_worker_without_a_gradient_takes_part_with_zeros_when_that_is_ignored(
    on_store: bool,
) -> None:
    def train(kv: KVStore) -> list[float]:
        params = {"w": Parameter(np.zeros(2)), "v": Parameter(np.zeros(2), np.ones(2))}
        trainer = Trainer(params, "sgd", {"learning_rate": 1.0}, kv, update_on_kvstore=on_store)
        if kv.rank == 0:
            params["w"].grad = np.full(2, 3.0)
        trainer.step(1, ignore_stale_grad=True)
        return [params["w"].data[0], params["v"].data[0]]

    with Workers("dist_sync") as workers:
        assert workers.run(train) == [[-3, -2]] * 2


def test_asynchronous_workers_leave_out_what_has_no_gradient_but_get_its_weights() -> None:
    def train(kv: KVStore) -> list[float]:
        params = {"w": Parameter(np.zeros(2)), "v": Parameter(np.zeros(2), np.ones(2))}
        trainer = Trainer(params, "sgd", {"learning_rate": 1.0, "wd": 0.5}, kv)
        if kv.rank == 0:
            params["w"].grad = np.ones(2)
            trainer.step(1)
        else:
            trainer.step(1, ignore_stale_grad=True)
        kv.barrier()
        before = kv.pull("w")[0]
        params["w"].grad = None
        trainer.step(1, ignore_stale_grad=True)
        return [before, params["w"].data[0]]

    with Workers("dist_async") as workers:
        assert workers.run(train) == [[-1, -1]] * 2


# -- the types of stores ----------------------------------------------------------------------


def test_an_asynchronous_store_updates_by_itself_and_refuses_anything_else() -> None:
    def train(kv: KVStore) -> tuple[bool, float]:
        params = {"w": Parameter(np.zeros(2), np.ones(2))}
        with pytest.raises(ArgumentValueError, match="applies each push at once"):
            Trainer(params, "sgd", None, kv, update_on_kvstore=False).step(1)
        trainer = Trainer(params, "sgd", {"learning_rate": 1.0}, kv)
        for batch_size, rate in (2, 1.0), (4, 1.0), (4, 10.0):
            trainer.set_learning_rate(rate)
            kv.barrier()
            trainer.step(batch_size)
            kv.barrier()
        return trainer.update_on_kvstore, kv.pull("w")[0]

    with Workers("dist_async") as workers:
        assert workers.run(train) == [(True, -1 - 0.5 - 5)] * 2


def test_the_named_store_is_made_once_and_every_device_store_will_do() -> None:
    for kind in "dist_sync", "dist_device_sync", "local", "device":

        def train(kv: KVStore) -> float:
            params = {"w": Parameter([np.zeros(2)] * 1, [np.ones(2)])}
            trainer = Trainer(params, "sgd", {"learning_rate": 1.0}, kv)
            trainer.step(trainer.num_workers)
            assert trainer.kvstore is kv
            return float(params["w"].list_data()[0][0])

        with Workers(kind) as workers:
            assert set(workers.run(train)) == {-1.0}


def test_two_trainers_on_two_stores_do_not_mix() -> None:
    def train(kv: KVStore, other: KVStore) -> list[float]:
        weights = []
        for rate, store in (1.0, kv), (2.0, other):
            params = {"w": Parameter(np.zeros(2), np.ones(2))}
            trainer = Trainer(params, "sgd", {"learning_rate": rate}, store)
            trainer.step(1)
            weights.append(params["w"].data[0])
        return weights

    with Workers("dist_sync") as workers:
        others = workers.create()
        assert workers.run(lambda kv: train(kv, others[kv.rank])) == [[-2, -4]] * 2


# -- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_store", [True, False])
def test_training_that_is_resumed_gives_the_bits_of_one_that_went_on(
    tmp_path: Path, on_store: bool
) -> None:
    def run(trainer: Trainer, params: dict[str, Parameter], rank: int, steps: range) -> None:
        for step in steps:
            give(params, step, rank)
            trainer.step(8 if step < 5 else 4)

    def whole(kv: KVStore) -> Any:
        params = parameters()
        trainer = Trainer(params, "adam", ADAM, kv, update_on_kvstore=on_store)
        run(trainer, params, kv.rank, range(2))
        trainer.set_learning_rate(0.05)
        run(trainer, params, kv.rank, range(2, 3))
        if kv.rank == 0 or not on_store:  # on one rank or on all
            trainer.save_states(tmp_path / "states")
        saved = {name: each.data.copy() for name, each in params.items()}
        kv.barrier()
        run(trainer, params, kv.rank, range(3, 6))
        return saved, bits(params)

    def resumed(kv: KVStore, saved: dict[str, Array]) -> Any:
        params = {name: Parameter(value.copy(), name=name) for name, value in saved.items()}
        trainer = Trainer(params, "adam", {"learning_rate": 9.0}, kv, update_on_kvstore=on_store)
        trainer.load_states(tmp_path / "states")
        assert trainer.learning_rate == 0.05
        run(trainer, params, kv.rank, range(3, 6))
        return bits(params)

    with Workers("dist_sync", 2, 3, chunk_bytes=1024, credit_bytes=4096) as workers:
        (saved, expected), _ = workers.run(whole)
    with Workers("dist_sync", 2, 1) as workers:
        assert workers.run(lambda kv: resumed(kv, saved)) == [expected] * 2


def test_the_count_of_a_schedule_is_loaded_on_all_workers(tmp_path: Path) -> None:
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5)
    sgd = {"learning_rate": 1.0, "lr_scheduler": schedule}
    alone = parameters()
    trainer = Trainer(alone, "sgd", sgd)
    for step in range(5):
        give(alone, step, 0)
        trainer.step(1)
    trainer.save_states(tmp_path / "states")

    def script(kv: KVStore) -> float:
        loaded = Trainer(parameters(), "sgd", sgd, kv)
        loaded.load_states(tmp_path / "states")
        return loaded.learning_rate

    with Workers("dist_sync") as workers:
        assert workers.run(script) == [0.25, 0.25]


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_sparse_gradients_of_pytorch_reach_the_store_as_rows(kind: str) -> None:
    torch = pytest.importorskip("torch")

    def script(kv: KVStore) -> Any:
        table = torch.nn.Embedding(600, 8, sparse=True)
        with torch.no_grad():
            table.weight.fill_(1.0)
        trainer = Trainer({"table": table.weight}, "sgd", {"learning_rate": 1.0}, kv)
        for _ in range(2):
            table.weight.grad = None
            table(torch.tensor([[3, 5], [5, 599]])).sum().backward()
            trainer.step(1)
        assert kv.info("table").stype == "default"
        return table.weight.detach().numpy()

    with Workers(kind, 2, 2, chunk_bytes=1000) as workers:
        steps = 2 * workers.stores[0].num_workers
        for weight in workers.run(script):
            expected = np.ones((600, 8), "f4")
            expected[[3, 599]] -= steps
            expected[5] -= 2 * steps
            np.testing.assert_array_equal(weight, expected)
