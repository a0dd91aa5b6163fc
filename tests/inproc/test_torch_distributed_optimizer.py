"""``DistributedOptimizer`` on ranks that are threads of this process."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from workers import Workers

torch = pytest.importorskip("torch")

import kvstore.torch as kvt  # noqa: E402
from torch_models import (  # noqa: E402
    assert_close,
    batch,
    bits,
    net,
    train,
    weights,
)

from kvstore.errors import ArgumentTypeError  # noqa: E402
from pslite.errors import UsageError  # noqa: E402

SGD = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)  # noqa: E731
SMALL = 1000
"""Bytes of a bucket, of which the network then has several."""


@pytest.fixture(params=[1, 3])
def several(request: pytest.FixtureRequest) -> Iterator[Workers]:
    with Workers("dist_sync", num_workers=request.param) as workers:
        yield workers
    gc.collect()  # parameters refer to hooks, and these to buckets in shared memory


@pytest.fixture
def two() -> Iterator[Workers]:
    with Workers("dist_sync", num_workers=2) as workers:
        yield workers
    gc.collect()


def on_all(workers: Workers, script: Callable[[Any], Any]) -> list[Any]:
    """What ``script`` returns or raises on each rank."""

    def run(kv: Any) -> Any:
        try:
            return script(kv)
        except Exception as error:
            return error

    return workers.run(run)


def wrapped(kv: Any, model: Any, make: Any = SGD, **options: Any) -> Any:
    return kvt.DistributedOptimizer(
        make(model.parameters()),
        model.named_parameters(),
        kv,
        **{"bucket_bytes": SMALL, **options},
    )


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_ranks_train_as_one_process_does_on_all_rows(several: Workers, name: str) -> None:
    make: Any = SGD if name == "SGD" else lambda params: torch.optim.Adam(params, lr=0.01)

    def script(kv: Any) -> Any:
        model = net()
        return train(model, wrapped(kv, model, make), 20, kv.rank, kv.num_workers)

    found, again = several.run(script), several.run(script)
    alone = net()
    wanted = train(alone, make(alone.parameters()), 20, -1, len(found))
    assert bits(found[0]) == bits(found[-1]) == bits(again[0])
    assert_close(found[0], wanted)


def test_it_stays_the_optimizer_that_it_was(two: Workers) -> None:
    def script(kv: Any) -> Any:
        model = net()
        mine = SGD(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(mine, step_size=7, gamma=0.5)
        optimizer = kvt.DistributedOptimizer(mine, kv=kv)
        assert optimizer is mine and isinstance(optimizer, torch.optim.SGD)
        later = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)

        def after() -> None:
            scheduler.step()
            later.step()

        train(model, optimizer, 20, kv.rank, 2, after_step=after)
        other = SGD(net().parameters())
        other.load_state_dict(optimizer.state_dict())
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 0.05 / 4
        return weights(model)

    alone = net()
    theirs = SGD(alone.parameters())
    schedulers = [
        torch.optim.lr_scheduler.StepLR(theirs, step_size=7, gamma=0.5),
        torch.optim.lr_scheduler.ExponentialLR(theirs, 0.99),
    ]
    wanted = train(
        alone, theirs, 20, -1, 2, after_step=lambda: [each.step() for each in schedulers]
    )
    assert_close(two.run(script)[1], wanted)


def test_gradients_are_clipped_by_the_norm_of_all_ranks(two: Workers) -> None:
    def clip(model: Any) -> Callable[[], Any]:
        return lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def script(kv: Any) -> Any:
        model = net()
        return train(model, wrapped(kv, model), 20, kv.rank, 2, before_step=clip(model))

    alone = net()
    wanted = train(alone, SGD(alone.parameters()), 20, -1, 2, before_step=clip(alone))
    assert_close(two.run(script)[0], wanted)


def test_grad_scaler_skips_the_steps_of_all_ranks_if_one_overflows(two: Workers) -> None:
    def scaled(model: Any, optimizer: Any, rank: int, size: int, *, sick: bool) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        for step in range(10):
            x, y = batch(step, rank, size)
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            scaler.scale(loss * (float("inf") if step == 4 and sick else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        return weights(model), scaler.get_scale()

    def script(kv: Any) -> Any:
        model = net()
        return scaled(model, wrapped(kv, model), kv.rank, 2, sick=kv.rank == 1)

    alone = net()
    wanted, scale = scaled(alone, SGD(alone.parameters()), -1, 2, sick=True)
    for found, its_scale in two.run(script):
        assert its_scale == scale == 512.0
        assert_close(found, wanted)


@pytest.mark.parametrize("by", ["no_sync", "passes", "average"])
def test_gradients_of_several_passes_are_added_up(two: Workers, by: str) -> None:
    """Also where each of them is sent: an average of averages."""

    def steps(model: Any, optimizer: Any, rank: int, no_sync: Any) -> Any:
        for step in range(6):
            optimizer.zero_grad()
            for part in range(3):
                x, y = batch(10 * step + part, rank, 2)
                with no_sync() if part < 2 and no_sync else torch.enable_grad():
                    torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return weights(model)

    def script(kv: Any) -> Any:
        model = net()
        count = 3 if by == "passes" else 1
        optimizer = wrapped(kv, model, backward_passes_per_step=count)
        return steps(model, optimizer, kv.rank, optimizer.no_sync if by == "no_sync" else None)

    alone = net()
    wanted = steps(alone, SGD(alone.parameters()), -1, None)
    assert_close(two.run(script)[0], wanted)


def test_a_step_after_fewer_passes_takes_what_there_is(two: Workers) -> None:
    def script(kv: Any) -> Any:
        model = net()
        optimizer = wrapped(kv, model, backward_passes_per_step=4)
        return train(model, optimizer, 3, kv.rank, 2)

    alone = net()
    wanted = train(alone, SGD(alone.parameters()), 3, -1, 2)
    assert_close(two.run(script)[0], wanted)


def test_a_sum_is_not_added_up_twice(two: Workers) -> None:
    def script(kv: Any) -> Any:
        model = net()
        optimizer = wrapped(kv, model, average=False)
        x, y = batch(0, kv.rank, 2)
        loss = lambda: torch.nn.functional.mse_loss(model(x), y)  # noqa: E731
        loss().backward()
        total = model[0].weight.grad.clone()
        with pytest.raises(UsageError, match="are sums over all ranks already"):
            loss().backward()
        del optimizer  # it lives as long as its user wants
        return total

    alone = net()
    x, y = batch(0, -1, 2)
    torch.nn.functional.mse_loss(alone(x), y).backward()
    for total in two.run(script):
        torch.testing.assert_close(total, 2 * alone[0].weight.grad)


class Branches(torch.nn.Module):
    """Which layers a pass uses is said in each pass; layer 3 is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(net()[0] for _ in range(4))

    def forward(self, x: Any, used: list[int]) -> Any:
        return torch.stack([self.layers[each](x) for each in used]).sum(0)


def test_a_layer_without_gradient_counts_as_zeros_and_stays_without_where_no_rank_has_one(
    two: Workers,
) -> None:
    """Weight decay would move a weight whose gradient is zeros."""
    make: Any = lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.1)  # noqa: E731
    used = {0: [0, 1], 1: [2, 0]}

    def script(kv: Any) -> Any:
        model = Branches()
        optimizer = wrapped(kv, model, make)
        for step in range(10):
            x, _ = batch(step, kv.rank, 2)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            (model(x, used[kv.rank]) ** 2).mean().backward()
            if step == 0:
                assert model.layers[3].weight.grad is None
                assert model.layers[3 - kv.rank - 1].weight.grad is not None
            optimizer.step()
        return weights(model)

    found = two.run(script)
    alone = Branches()
    theirs = make(alone.parameters())
    for step in range(10):
        theirs.zero_grad()
        for rank in (0, 1):
            x, _ = batch(step, rank, 2)
            ((alone(x, used[rank]) ** 2).mean() / 2).backward()
        theirs.step()
    assert bits(found[0]) == bits(found[1])
    assert_close(found[0], weights(alone))
    assert torch.equal(found[0][-1], weights(Branches())[-1])


@pytest.mark.parametrize("args", [(), (None,)], ids=str)
def test_a_rank_whose_pass_reaches_no_parameter_takes_part_in_step(
    two: Workers, args: tuple[None, ...]
) -> None:
    def script(kv: Any) -> Any:
        model = net()
        optimizer = wrapped(kv, model)
        for step in range(3):
            x, y = batch(step, kv.rank, 2)
            optimizer.zero_grad()
            if kv.rank == 0:
                torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step(*args)
        return weights(model)

    alone = net()
    theirs = SGD(alone.parameters())
    for step in range(3):
        x, y = batch(step, 0, 2)
        theirs.zero_grad()
        (torch.nn.functional.mse_loss(alone(x), y) / 2).backward()
        theirs.step()
    found = two.run(script)
    assert bits(found[0]) == bits(found[1])
    assert_close(found[0], weights(alone))


def test_a_step_after_a_pass_that_raised_an_error_is_refused(two: Workers) -> None:
    """Other ranks would take what it sends again for what comes next."""

    def failing(gradient: Any) -> None:
        raise ValueError("out of memory")

    def script(kv: Any) -> None:
        model = net()
        optimizer = wrapped(kv, model)
        train(model, optimizer, 1, kv.rank, 2)  # the buckets are known now
        x, y = batch(1, kv.rank, 2)
        optimizer.zero_grad()
        first = model[0](x)
        first.register_hook(failing)
        with pytest.raises(ValueError, match="out of memory"):
            torch.nn.functional.mse_loss(model[1:](first), y).backward()
        for call in (optimizer.step, optimizer.synchronize, model(x).sum().backward):
            with pytest.raises(UsageError, match="an earlier backward pass has not ended"):
                call()

    two.run(script)


@pytest.mark.parametrize("average", [True, False])
def test_gradients_that_are_added_to_those_of_all_ranks_are_combined_again(
    two: Workers, average: bool
) -> None:
    def script(kv: Any) -> Any:
        model = net()
        optimizer = wrapped(kv, model, average=average)
        x, y = batch(0, kv.rank, 2)
        loss = lambda: torch.nn.functional.mse_loss(model(x), y)  # noqa: E731
        loss().backward()
        with optimizer.no_sync():
            if not average:
                with pytest.raises(UsageError, match="are sums over all ranks already"):
                    loss().backward()
                return []
            loss().backward()
        optimizer.step()
        return weights(model)

    alone = net()
    theirs = SGD(alone.parameters())
    x, y = batch(0, -1, 2)
    (2 * torch.nn.functional.mse_loss(alone(x), y)).backward()
    theirs.step()
    found = two.run(script)
    assert bits(found[0]) == bits(found[1])
    if average:
        assert_close(found[0], weights(alone))


def test_a_later_optimizer_takes_over_the_gradients_of_an_earlier_one(two: Workers) -> None:
    def script(kv: Any) -> Any:
        model = net()
        before = wrapped(kv, model, average=False)
        optimizer = wrapped(kv, model, average=False)
        found = train(model, optimizer, 3, kv.rank, 2)
        assert not before.state
        return found

    alone = net()
    make = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)  # twice the gradient
    assert_close(two.run(script)[0], train(alone, make, 3, -1, 2))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_with_a_graph_of_their_own_are_averaged(two: Workers) -> None:
    def script(kv: Any) -> Any:
        model = net()
        optimizer = wrapped(kv, model)
        for step in range(3):
            x, y = batch(step, kv.rank, 2)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward(create_graph=True)
            optimizer.step()
        return weights(model)

    alone = net()
    assert_close(two.run(script)[0], train(alone, SGD(alone.parameters()), 3, -1, 2))


def test_an_embedding_whose_sparse_gradient_comes_late_is_averaged(two: Workers) -> None:
    def steps(parts: Any, optimizer: Any, ids: Any) -> Any:
        for step in range(3):
            optimizer.zero_grad()
            bags = parts[0](ids) if step else torch.ones(len(ids), 4)
            (parts[1](bags) ** 2).mean().backward()
            optimizer.step()
        return weights(parts)

    def model() -> Any:
        return torch.nn.Sequential(torch.nn.EmbeddingBag(9, 4, sparse=True), torch.nn.Linear(4, 2))

    made = [model() for _ in range(3)]
    for each in made[1:]:
        each.load_state_dict(made[0].state_dict())
    ids = torch.tensor([[1, 2], [3, 1]])
    descent = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731

    def script(kv: Any) -> Any:
        net = made[kv.rank]
        return steps(net, wrapped(kv, net, descent), ids[kv.rank :][:1])

    wanted = steps(made[2], descent(made[2].parameters()), ids)
    assert_close(two.run(script)[0], wanted)


def test_copies_and_pickles_are_refused_by_name(two: Workers) -> None:
    def script(kv: Any) -> None:
        optimizer = wrapped(kv, net())
        for call in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UsageError, match="DistributedSGD can be neither copied nor"):
                call(optimizer)

    two.run(script)


def test_sparse_gradients_stay_sparse(two: Workers) -> None:
    def model() -> Any:
        torch.manual_seed(1)
        return torch.nn.Sequential(
            torch.nn.EmbeddingBag(50, 4, sparse=True, mode="sum"), torch.nn.Linear(4, 2)
        )

    def steps(net: Any, optimizer: Any, ids: Any) -> Any:
        for step in range(5):
            optimizer.zero_grad()
            (net(ids(step)) ** 2).mean().backward()
            optimizer.step()
        return weights(net)

    made = [model() for _ in range(3)]
    rows = [torch.tensor([[rank, 7, 40 + rank]] * 4) for rank in range(2)]
    descent = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731

    def script(kv: Any) -> Any:
        net = made[kv.rank]
        found = steps(net, wrapped(kv, net, descent), lambda step: rows[kv.rank] + step)
        assert net[0].weight.grad.is_sparse
        return found

    wanted = steps(made[2], descent(made[2].parameters()), lambda step: torch.cat(rows) + step)
    found = two.run(script)
    assert bits(found[0]) == bits(found[1])
    assert_close(found[0], wanted)


@pytest.mark.parametrize(
    ("compression", "bound"), [("fp16", 1e-3), ("bf16", 1e-2), ({"type": "int8"}, 0.02)]
)
def test_compressed_gradients_come_near(two: Workers, compression: Any, bound: float) -> None:
    def script(kv: Any) -> Any:
        model = net()
        return train(model, wrapped(kv, model, compression=compression), 20, kv.rank, 2)

    alone = net()
    wanted = train(alone, SGD(alone.parameters()), 20, -1, 2)
    found = two.run(script)
    assert bits(found[0]) == bits(found[1])
    assert_close(found[0], wanted, bound)
    with pytest.raises(AssertionError):
        assert_close(found[0], wanted, 1e-7)


def test_parameters_of_16_bits_and_of_two_dtypes_are_averaged(two: Workers) -> None:
    def script(kv: Any) -> Any:
        params = [torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16)) for _ in range(2)]
        params.append(torch.nn.Parameter(torch.ones(3, dtype=torch.float64)))
        optimizer = kvt.DistributedOptimizer(SGD(params), kv=kv)
        for _ in range(2):
            optimizer.zero_grad()
            sum((each * (kv.rank + 1)).sum().double() for each in params).backward()
            assert [each.grad.dtype for each in params] == [each.dtype for each in params]
        return [each.grad.tolist() for each in params]

    assert two.run(script) == [[[1.5] * 5, [1.5] * 5, [1.5] * 3]] * 2


def test_parameters_that_are_added_later_are_averaged_too(two: Workers) -> None:
    def script(kv: Any) -> Any:
        model, more = net(), net(4)
        optimizer = wrapped(kv, model)
        train(model, optimizer, 2, kv.rank, 2)
        optimizer.add_param_group({"params": more.parameters(), "lr": 0.01})
        x, _ = batch(5, kv.rank, 2)
        optimizer.zero_grad()
        (model(x) + more(x)).sum().backward()
        return [each.grad.clone() for each in more.parameters()]

    found = two.run(script)
    alone = net(4)
    alone(batch(5, -1, 2)[0]).sum().backward()
    assert_close(found[0], [each.grad / 2 for each in alone.parameters()])
    assert_close(found[0], found[1])


@pytest.mark.parametrize(("compression", "bound"), [(None, 1e-5), ("fp16", 1e-3)])
def test_frozen_parameters_are_trained_once_they_are_not(
    two: Workers, compression: str | None, bound: float
) -> None:
    def steps(model: Any, optimizer: Any, rank: int) -> Any:
        for layer in (2, 0, 0):  # one after the other
            train(model, optimizer, 2, rank, 2)
            model[layer].requires_grad_(True)
        return train(model, optimizer, 2, rank, 2)

    def frozen() -> Any:
        model = net()
        model[:3].requires_grad_(False)
        return model

    def script(kv: Any) -> Any:
        model = frozen()
        return steps(model, wrapped(kv, model, compression=compression), kv.rank)

    alone = frozen()
    found = two.run(script)
    assert bits(found[0]) == bits(found[1])
    assert_close(found[0], steps(alone, SGD(alone.parameters()), -1), bound)


def test_ranks_with_other_parameters_are_told_so_on_all(two: Workers) -> None:
    def script(kv: Any) -> Any:
        model = torch.nn.Linear(2 + kv.rank, 1)
        return kvt.DistributedOptimizer(SGD(model.parameters()), model.named_parameters(), kv)

    for error in on_all(two, script):
        assert isinstance(error, UsageError)
        assert "weight: (1, 2) of torch.float32 on rank 0 and weight: (1, 3)" in str(error)


def test_wrong_arguments_are_refused(two: Workers) -> None:
    kv = two.stores[0]
    with pytest.raises(ArgumentTypeError, match=r"one of torch\.optim.*got Linear"):
        kvt.DistributedOptimizer(torch.nn.Linear(1, 1), kv=kv)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="kv must be a distributed store"):
        kvt.DistributedOptimizer(SGD(net().parameters()), kv=object())  # type: ignore[arg-type]


def test_a_lost_rank_is_named_by_backward() -> None:
    with Workers("dist_sync", num_workers=2, lost_after_s=0.2) as workers:
        workers.has_failed = True
        ready = workers.run(lambda kv: (kv, wrapped(kv, net())))
        assert workers.cluster is not None
        workers.cluster.kill(workers.cluster.workers[1])
        model = net()
        with pytest.raises(Exception, match=r"worker 1 .*lost"):
            train(model, wrapped_of(ready[0][1], model), 1, 0, 2)


def wrapped_of(optimizer: Any, model: Any) -> Any:
    """The optimizer with the parameters that it has, whose gradients the model gives."""
    mine = [each for group in optimizer.param_groups for each in group["params"]]
    for parameter, other in zip(model.parameters(), mine, strict=True):
        parameter.data = other.data
    for index, parameter in enumerate(mine):
        layer, name = list(model.named_parameters())[index][0].split(".")
        setattr(model[int(layer)], name, parameter)
    return optimizer


def test_broadcasts_give_all_ranks_the_values_of_one(two: Workers) -> None:
    def script(kv: Any) -> Any:
        model = torch.nn.Sequential(net(kv.rank), torch.nn.BatchNorm1d(2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (kv.rank + 1))
        train(model, optimizer, 1 + kv.rank, 0, 2)
        kvt.broadcast_parameters(model, 1, kv)
        kvt.broadcast_optimizer_state(optimizer, 1, kv)
        said = kvt.broadcast_object({"epoch": kv.rank, "ids": torch.arange(3)}, 1, kv)
        steps = [float(state["step"]) for state in optimizer.state.values()]
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        return (
            [each.clone() for each in model.state_dict().values()],
            moments,
            (steps, optimizer.param_groups[0]["lr"], said["epoch"], np.asarray(said["ids"]).sum()),
        )

    (one, moments, rest), (other, others, more) = two.run(script)
    assert bits(one) == bits(other)
    assert bits(moments) == bits(others)
    assert rest == more == ([2.0] * 8, 0.2, 1, 3)


def test_broadcasts_of_different_tensors_are_an_error_on_all(two: Workers) -> None:
    def script(kv: Any) -> Any:
        return kvt.broadcast_parameters({"a": torch.zeros(2 + kv.rank)}, 0, kv)

    for error in on_all(two, script):
        assert isinstance(error, UsageError)
        assert "a: (2,) of torch.float32 on rank 0 and a: (3,)" in str(error)
