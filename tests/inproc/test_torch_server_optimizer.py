"""``ServerOptimizer`` on workers that are threads of this process."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from combinations import covering
from workers import Workers

torch = pytest.importorskip("torch")

import kvstore.torch as kvt  # noqa: E402
from torch_models import assert_close, batch, bits, net, train, weights  # noqa: E402

from kvstore import optimizer as servers_optimizers  # noqa: E402
from kvstore.errors import ArgumentTypeError, ArgumentValueError, OptimizerMismatch  # noqa: E402
from kvstore.frameworks.torch import pushed_gradients  # noqa: E402
from pslite.errors import UsageError  # noqa: E402

mse_loss = torch.nn.functional.mse_loss
SMALL = {"bucket_bytes": 1000}


@pytest.fixture(params=["dist_sync", "dist_device_sync"])
def synchronous(request: pytest.FixtureRequest) -> Iterator[Workers]:
    with Workers(request.param, num_workers=2) as workers:
        yield workers
    gc.collect()


@pytest.fixture
def two() -> Iterator[Workers]:
    with Workers("dist_sync", num_workers=2) as workers:
        yield workers
    gc.collect()


OFTEN: list[tuple[str, str, dict[str, Any]]] = [
    ("adam", "Adam", {"lr": 0.01}),
    ("sgd", "SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("adamw", "AdamW", {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6}),
    ("rmsprop", "RMSprop", {"lr": 0.005, "centered": True}),
]
SELDOM: list[tuple[str, str, dict[str, Any]]] = [
    ("sgd", "SGD", {"lr": 0.05, "momentum": 0.9}),
    ("sgd", "SGD", {"lr": 0.05, "momentum": 0.9, "dampening": 0.5}),
    ("adamax", "Adamax", {"weight_decay": 0.1}),
    ("nadam", "NAdam", {"lr": 0.01}),
    ("adagrad", "Adagrad", {"lr": 0.05, "weight_decay": 0.01}),
    ("adadelta", "Adadelta", {}),
    ("rmsprop", "RMSprop", {"lr": 0.005, "alpha": 0.9}),
]
slow = pytest.mark.slow(reason="test_optimizer_torch.py compares the formulas always")


@pytest.mark.parametrize(
    ("name", "theirs", "numbers"),
    [*OFTEN, *(pytest.param(*each, marks=slow) for each in SELDOM)],
    ids=str,
)
def test_fifty_steps_equal_pytorchs_on_one_process_with_all_rows(
    two: Workers, name: str, theirs: str, numbers: dict[str, Any]
) -> None:
    """By a learning rate that a scheduler changes."""

    def steps(model: Any, optimizer: Any, rank: int) -> Any:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
        return train(model, optimizer, 50, rank, 2, after_step=scheduler.step)

    def script(kv: Any) -> Any:
        model = net(3 + kv.rank)  # rank 0's weights count
        optimizer = kvt.ServerOptimizer(model, kv, name, **numbers, **SMALL)
        return steps(model, optimizer, kv.rank)

    found = two.run(script)
    alone = net()
    wanted = steps(alone, getattr(torch.optim, theirs)(alone.parameters(), **numbers), -1)
    assert bits(found[0]) == bits(found[1])
    assert_close(found[0], wanted)


def test_two_runs_give_the_same_bits_and_workers_keep_no_states(synchronous: Workers) -> None:
    def script(kv: Any) -> Any:
        model = net()
        optimizer = kvt.ServerOptimizer(model, kv, "adam", lr=0.01, **SMALL)
        found = train(model, optimizer, 10, kv.rank, 2)
        assert optimizer.state == {}
        assert all(each.grad is None for each in model.parameters())
        return bits(found)

    first = synchronous.run(script)
    assert first[0] == first[1] == synchronous.run(script, synchronous.create())[0]


def test_large_weights_move_to_views_but_not_those_that_share_their_memory(two: Workers) -> None:
    def script(kv: Any) -> None:
        model = torch.nn.ModuleList(torch.nn.Linear(200, 200, bias=False) for _ in range(4))
        shared, whole = model[1].weight, torch.zeros(2, 200, 200)
        model[2].weight.data = whole[1]
        shared.data.share_memory_()
        places = [each.data_ptr() for each in model.parameters()]
        optimizer = kvt.ServerOptimizer(model, kv, "sgd", lr=1.0)
        moved = [each.data_ptr() != at for each, at in zip(model.parameters(), places, strict=True)]
        assert moved == [True, False, False, True]
        before = [each.detach().clone() for each in model.parameters()]
        for _ in range(2):
            sum(each.weight.sum() for each in model).backward()
            optimizer.step()
        for each, old in zip(model.parameters(), before, strict=True):
            assert_close(each.detach(), old - 2.0)
        assert_close(whole[1], before[2] - 2.0)
        kv.close()
        assert_close(model[0].weight.detach(), before[0] - 2.0)

    two.run(script)


def test_one_number_that_is_written_to_a_weight_on_a_view_is_noticed(two: Workers) -> None:
    """Its page would never show a new weight."""

    def script(kv: Any) -> None:
        model = torch.nn.Linear(300, 300, bias=False)
        optimizer = kvt.ServerOptimizer(model, kv, "sgd", lr=1.0)
        model.weight.sum().backward()
        optimizer.step()
        model.weight.data[123, 45] = 7.0
        with pytest.raises(UsageError, match="weights of 'weight' were changed after the last"):
            model.weight.sum().backward()

    two.run(script)


def test_states_can_be_loaded_while_weights_are_on_views(two: Workers) -> None:
    def script(kv: Any) -> None:
        torch.manual_seed(1)
        model = torch.nn.Linear(300, 300, bias=False)
        optimizer = kvt.ServerOptimizer(model, kv, "sgd", lr=1.0, momentum=0.5)
        begun = model.weight.detach().clone()
        for _ in range(3):
            optimizer.load_state_dict(optimizer.state_dict())
            model.weight.sum().backward()
            optimizer.step()
            assert list(kv.views.live()) == ["weight"]
        assert_close(begun - model.weight.detach(), torch.full((300, 300), 1 + 1.5 + 1.75))

    two.run(script)


def test_weights_land_in_the_memory_of_the_parameters(two: Workers) -> None:
    def script(kv: Any) -> None:
        model = net()
        places = [each.data_ptr() for each in model.parameters()]
        versions = [each._version for each in model.parameters()]
        optimizer = kvt.ServerOptimizer(model, kv, "adam", lr=0.01)
        train(model, optimizer, 2, kv.rank, 2)
        assert [each.data_ptr() for each in model.parameters()] == places
        now = [each._version for each in model.parameters()]
        assert all(after > before for after, before in zip(now, versions, strict=True))

    two.run(script)


def test_what_still_needs_an_old_weight_gets_pytorchs_error(two: Workers) -> None:
    """It would get a wrong gradient from the new weight."""

    def script(kv: Any) -> None:
        first, last = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
        optimizer = kvt.ServerOptimizer(
            [("first", first), ("last", last)], kv, "sgd", lr=0.1, bucket_bytes=4
        )
        x = first * last.detach()  # saved, and needed after the gradient of ``last`` is there
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (x * last).sum().backward()
        del optimizer

    with Workers("dist_sync", num_workers=1) as workers:
        workers.run(script)
    gc.collect()


@pytest.mark.parametrize("by", ["no_sync", "passes", "late"])
def test_gradients_of_several_passes_are_added_up(two: Workers, by: str) -> None:
    options: dict[str, Any] = {
        "passes": {"backward_passes_per_step": 3},
        "late": {"overlap": False},
    }

    def steps(model: Any, optimizer: Any, rank: int, no_sync: Any) -> Any:
        for step in range(6):
            optimizer.zero_grad()
            for part in range(3):
                x, y = batch(10 * step + part, rank, 2)
                with no_sync() if part < 2 and no_sync else torch.enable_grad():
                    mse_loss(model(x), y).backward()
            optimizer.step()
        return weights(model)

    def script(kv: Any) -> Any:
        model = net()
        optimizer = kvt.ServerOptimizer(model, kv, "adam", lr=0.01, **options.get(by, {}))
        return steps(model, optimizer, kv.rank, optimizer.no_sync if by == "no_sync" else None)

    alone = net()
    wanted = steps(alone, torch.optim.Adam(alone.parameters(), lr=0.01), -1, None)
    assert_close(two.run(script)[0], wanted)


class Branches(torch.nn.Module):
    """Which layers a pass uses is said in each pass; layer 3 is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(net()[0] for _ in range(4))

    def forward(self, x: Any, used: list[int]) -> Any:
        return torch.stack([self.layers[each](x) for each in used]).sum(0)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_layer_counts_as_zeros_unless_no_rank_uses_it(two: Workers, overlap: bool) -> None:
    """Weight decay would move a weight whose gradient is zeros. In step 5, rank 1 uses nothing."""
    numbers = {"lr": 0.01, "weight_decay": 0.1}

    def used(rank: int, step: int) -> list[int]:
        return [[0, 1], [2, 0]][rank] if (rank, step) != (1, 5) else []

    def script(kv: Any) -> Any:
        model = Branches()
        optimizer = kvt.ServerOptimizer(model, kv, "adam", **numbers, overlap=overlap, **SMALL)
        for step in range(10):
            x, _ = batch(step, kv.rank, 2)
            optimizer.zero_grad()
            if used(kv.rank, step):
                (model(x, used(kv.rank, step)) ** 2).mean().backward()
            optimizer.step()
        return weights(model)

    found = two.run(script)
    alone = Branches()
    theirs = torch.optim.Adam(alone.parameters(), **numbers)
    for step in range(10):
        theirs.zero_grad()
        for rank in (0, 1):
            x, _ = batch(step, rank, 2)
            if used(rank, step):
                ((alone(x, used(rank, step)) ** 2).mean() / 2).backward()
        theirs.step()
    assert bits(found[0]) == bits(found[1])
    assert_close(found[0], weights(alone))
    assert torch.equal(found[0][-1], weights(Branches())[-1])


def embeddings() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.EmbeddingBag(50, 4, sparse=True, mode="sum"), torch.nn.Linear(4, 2)
    )


ROWS = [torch.tensor([[rank, 7, 40 + rank]] * 4) for rank in range(2)]


@pytest.fixture(params=["arrays", "tensors"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How weights reach the store: as arrays, or as the tensors that those on a GPU are."""
    if request.param == "tensors":
        monkeypatch.setattr(pushed_gradients, "_in_memory", torch.Tensor.detach)


@pytest.mark.parametrize(
    ("memory", "how", "num_workers"),
    covering(["arrays", "tensors"], ["of the module", "by name", "as dense keys"], [1, 2]),
    indirect=["memory"],
)
def test_sparse_embeddings_are_pushed_by_rows(memory: None, how: str, num_workers: int) -> None:
    def steps(model: Any, optimizer: Any, ids: Any) -> Any:
        for step in range(6):
            optimizer.zero_grad()
            (model(ids + step) ** 2).mean().backward()
            optimizer.step()
        return weights(model)

    made = [embeddings() for _ in range(num_workers + 1)]

    def script(kv: Any) -> Any:
        model = made[kv.rank]
        given = model if how == "of the module" else model.named_parameters()
        sparse = ["0.weight"] if how == "by name" else []
        optimizer = kvt.ServerOptimizer(given, kv, "sgd", lr=0.1, sparse=sparse)
        kinds = [kv.info(key).stype for key in ("0.weight", "1.weight")]
        assert kinds == ["default" if how == "as dense keys" else "row_sparse", "default"]
        return steps(model, optimizer, ROWS[kv.rank])

    with Workers("dist_sync", num_workers=num_workers) as workers:
        found = workers.run(script)
    gc.collect()
    alone = made[-1]
    wanted = steps(
        alone, torch.optim.SGD(alone.parameters(), lr=0.1), torch.cat(ROWS[:num_workers])
    )
    assert bits(found[0]) == bits(found[-1])
    assert_close(found[0], wanted)


def test_an_embedding_that_one_rank_uses_is_updated_on_all(memory: None, two: Workers) -> None:
    made = [embeddings(), embeddings()]

    def script(kv: Any) -> Any:
        model = made[kv.rank]
        optimizer = kvt.ServerOptimizer(model, kv, "sgd", lr=0.1)
        bags = model[0](ROWS[0]) if kv.rank == 0 else torch.ones(4, 4)
        (model[1](bags) ** 2).mean().backward()
        optimizer.step()
        return weights(model)

    found = two.run(script)
    before = weights(embeddings())[0]
    assert bits(found[0]) == bits(found[1])
    changed = (found[0][0] != before).any(1).nonzero().flatten().tolist()
    assert changed == [0, 7, 40]


@pytest.mark.parametrize(
    "name", ["sgd", pytest.param("adam", marks=pytest.mark.slow(reason="sgd runs always"))]
)
def test_asynchronous_workers_come_to_the_minimum(name: str) -> None:
    """Dense weights and an embedding; workers do not wait for each other."""

    made = [embeddings(), embeddings()]

    def script(kv: Any) -> Any:
        model = made[kv.rank]
        optimizer = kvt.ServerOptimizer(model, kv, name, lr=0.02)
        losses = []
        for _ in range(150 + 50 * kv.rank):
            optimizer.zero_grad()
            loss = ((model(ROWS[kv.rank]) - 1.0) ** 2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 20
        kv.barrier()
        kv.pull([*dict(model.named_parameters())], out=[each.data for each in model.parameters()])
        return [each.numpy().tobytes() for each in weights(model)]

    with Workers("dist_async", num_workers=2) as workers:
        found = workers.run(script)
        assert found[0] == found[1]
    gc.collect()


def test_groups_have_rates_and_decays_of_their_own(two: Workers) -> None:
    def groups(model: Any, *, named: bool) -> Any:
        first, last = list(model.named_parameters())[:3], list(model.named_parameters())[3:]
        parts = [{"params": first, "lr": 0.02, "weight_decay": 0.1}, {"params": last}]
        if not named:
            parts = [{**part, "params": [each for _, each in part["params"]]} for part in parts]
        return parts

    def steps(model: Any, optimizer: Any, rank: int) -> Any:
        optimizer.param_groups[1]["lr"] = torch.tensor(0.005)  # schedulers change it in place
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return train(model, optimizer, 20, rank, 2, after_step=scheduler.step)

    def script(kv: Any) -> Any:
        model = net()
        optimizer = kvt.ServerOptimizer(groups(model, named=True), kv, "adam", lr=0.005)
        return steps(model, optimizer, kv.rank)

    alone = net()
    wanted = steps(alone, torch.optim.Adam(groups(alone, named=False), lr=0.005), -1)
    assert_close(two.run(script)[1], wanted)


def test_training_goes_on_from_a_state_dict(two: Workers) -> None:
    def script(kv: Any) -> Any:
        model = net()
        optimizer = kvt.ServerOptimizer(model, kv, "adam", lr=0.01)
        train(model, optimizer, 5, kv.rank, 2)
        optimizer.param_groups[0]["lr"] = 0.02
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        return file.getvalue(), train(model, optimizer, 5, kv.rank, 2)

    saved = two.run(script)

    def resume(kv: Any) -> Any:
        found = torch.load(io.BytesIO(saved[kv.rank][0]), weights_only=True)
        model = net(9)
        model.load_state_dict(found["model"])
        optimizer = kvt.ServerOptimizer(model, kv, "adam", lr=0.5)
        optimizer.load_state_dict(found["optimizer"])
        assert optimizer.param_groups[0]["lr"] == 0.02
        return train(model, optimizer, 5, kv.rank, 2)

    resumed = two.run(resume, two.create())
    assert bits(resumed[0]) == bits(resumed[1]) == bits(saved[0][1])


def test_a_state_dict_of_a_job_of_another_size_keeps_the_share_of_this_one(two: Workers) -> None:
    def script(kv: Any) -> Any:
        model = net()
        optimizer = kvt.ServerOptimizer(model, kv, "adam", lr=0.01)
        train(model, optimizer, 2, kv.rank, kv.num_workers)
        return model.state_dict(), optimizer.state_dict()

    with one_worker() as workers:
        states = workers.run(script)[0]
    gc.collect()

    def resume(kv: Any) -> Any:
        model = net()
        model.load_state_dict(states[0])
        optimizer = kvt.ServerOptimizer(model, kv, "adam", lr=0.01)
        optimizer.load_state_dict(states[1])
        train(model, optimizer, 1, kv.rank, 2)
        return kv.optimizer_params()["rescale_grad"]

    assert two.run(resume) == [0.5, 0.5]


def test_states_of_another_rank_are_refused_on_all(two: Workers) -> None:
    def script(kv: Any) -> None:
        optimizer = kvt.ServerOptimizer(net(), kv, "adam")
        optimizer.load_state_dict(optimizer.state_dict())  # also before the first step
        theirs = torch.optim.Adam(net().parameters()).state_dict()
        with pytest.raises(UsageError, match="of worker 0 has no states of the servers"):
            optimizer.load_state_dict(theirs)
        for call in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UsageError, match="can be neither copied nor pickled"):
                call(optimizer)

    two.run(script)


def test_a_step_after_a_pass_that_raised_an_error_is_refused() -> None:
    def failing(gradient: Any) -> None:
        raise ValueError("out of memory")

    def script(kv: Any) -> None:
        model = net()
        optimizer = kvt.ServerOptimizer(model, kv, "adam", **SMALL)
        x, y = batch(0, 0, 1)
        first = model[0](x)
        first.register_hook(failing)
        with pytest.raises(ValueError, match="out of memory"):
            mse_loss(model[1:](first), y).backward()
        for call in (optimizer.step, model(x).sum().backward):
            with pytest.raises(UsageError, match="an earlier backward pass has not ended"):
                call()

    with one_worker() as workers:
        workers.run(script)
    gc.collect()


def test_optimizers_of_kvstore_are_taken_as_they_are(two: Workers) -> None:
    def script(kv: Any) -> Any:
        model = net()
        made = servers_optimizers.create("lamb", learning_rate=0.3, wd=0.1)
        optimizer = kvt.ServerOptimizer(model, kv, made, average=False)
        assert optimizer.param_groups[0]["lr"] == 0.3
        train(model, optimizer, 1, kv.rank, 2)
        return kv.optimizer_params()["wd"], kv.optimizer_params()["rescale_grad"]

    assert two.run(script) == [(0.1, 1.0)] * 2


def test_weights_of_16_bits_have_masters_on_the_servers(two: Workers) -> None:
    def script(kv: Any) -> Any:
        weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = kvt.ServerOptimizer([("weight", weight)], kv, "sgd", lr=1e-3)
        for _ in range(100):
            weight.sum().backward()
            optimizer.step()
        return weight.tolist()

    assert two.run(script) == [[pytest.approx(0.9, abs=5e-3)] * 4] * 2


def test_frozen_parameters_are_trained_once_they_are_not(two: Workers) -> None:
    def script(kv: Any) -> Any:
        model = net()
        model[0].requires_grad_(False)
        optimizer = kvt.ServerOptimizer(model, kv, "adam", lr=0.01, weight_decay=0.1)
        train(model, optimizer, 3, kv.rank, 2)
        assert torch.equal(model[0].weight, net()[0].weight)
        model[0].requires_grad_(True)
        return train(model, optimizer, 3, kv.rank, 2)

    alone = net()
    alone[0].requires_grad_(False)
    theirs = torch.optim.Adam(alone.parameters(), lr=0.01, weight_decay=0.1)
    train(alone, theirs, 3, -1, 2)
    alone[0].requires_grad_(True)
    assert_close(two.run(script)[0], train(alone, theirs, 3, -1, 2))


def one_worker() -> Workers:
    return Workers("dist_sync", num_workers=1, num_servers=1)


def test_what_would_be_wrong_silently_is_refused() -> None:
    def script(kv: Any) -> None:
        model = net()
        optimizer = kvt.ServerOptimizer(model, kv, "adam", lr=0.01)
        x, y = batch(0, 0, 1)
        loss = lambda: mse_loss(model(x), y)  # noqa: E731
        loss().backward()
        with pytest.raises(UsageError, match="pushed already: call step"):
            loss().backward()
        optimizer.param_groups[0]["lr"] = 0.5
        with pytest.raises(UsageError, match=r"changed between backward\(\) and step\(\)"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.step()
        with torch.no_grad():
            model[0].weight.fill_(1.0)
        with pytest.raises(UsageError, match=r"weights of '0\.weight' were changed"):
            loss().backward()
        with pytest.raises(UsageError, match="takes all its parameters when it is made"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        with pytest.raises(UsageError, match="the store has an optimizer already, adam"):
            kvt.ServerOptimizer(net(), kv, "sgd")

    with one_worker() as workers:
        workers.run(script)
    gc.collect()


def test_grad_scaler_is_refused() -> None:
    def script(kv: Any) -> None:
        model = net()
        optimizer = kvt.ServerOptimizer(model, kv, "adam", lr=0.01)
        scaler = torch.amp.GradScaler("cpu")
        x, y = batch(0, 0, 1)
        scaler.scale(mse_loss(model(x), y)).backward()
        with pytest.raises(UsageError, match="GradScaler cannot unscale"):
            scaler.step(optimizer)

    with one_worker() as workers:
        workers.run(script)
    gc.collect()


@pytest.mark.parametrize(
    ("params", "options", "error", "text"),
    [
        ([], {}, ArgumentValueError, "params is empty"),
        ([torch.nn.Parameter(torch.ones(1))], {}, ArgumentTypeError, "pairs of a name and a"),
        (net(), {"beta": 1}, ArgumentValueError, r"no number beta; known: lr, betas.*betas"),
        (net(), {"optimizer": "adamm"}, ValueError, "no optimizer is named 'adamm'"),
        (net(), {"optimizer": torch.optim.Adam}, ArgumentTypeError, "an optimizer of kvstore"),
        (net(), {"sparse": ["a"]}, ArgumentValueError, "sparse names a, which"),
    ],
    ids=["empty", "unnamed", "number", "name", "class", "sparse"],
)
def test_wrong_arguments_are_refused(
    params: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with one_worker() as workers, pytest.raises(error, match=text):
        kvt.ServerOptimizer(params, workers.stores[0], **options)


def test_numbers_that_differ_between_ranks_or_groups_are_refused(two: Workers) -> None:
    def script(kv: Any) -> Any:
        with pytest.raises(OptimizerMismatch, match=r"learning_rate is 0\.1 on worker 0, 0\.2 on"):
            kvt.ServerOptimizer(net(), kv, "sgd", lr=0.1 * (kv.rank + 1))
        pairs = list(net().named_parameters())
        groups = [{"params": pairs[:1]}, {"params": pairs[1:], "momentum": 0.5}]
        with pytest.raises(UsageError, match="momentum must be the same in all groups"):
            kvt.ServerOptimizer(groups, kv, "sgd", lr=0.1)

    two.run(script)


def test_a_lost_worker_is_named_by_backward_or_step() -> None:
    with Workers("dist_sync", num_workers=2, lost_after_s=0.2) as workers:
        workers.has_failed = True
        models = [net(), net()]
        optimizers = workers.run(
            lambda kv: kvt.ServerOptimizer(models[kv.rank], kv, "adam", lr=0.01)
        )
        assert workers.cluster is not None
        workers.cluster.kill(workers.cluster.workers[1])
        with pytest.raises(Exception, match=r"worker 1 .*lost"):
            train(models[0], optimizers[0], 1, 0, 2)
        del optimizers
    gc.collect()
