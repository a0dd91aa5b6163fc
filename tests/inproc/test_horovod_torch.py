"""kvstore.horovod.torch: tensors, gradients, the optimizer, batch normalization and states."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kvstore.horovod.torch as hvd  # noqa: E402
from horovod_ranks import OnAll, ranks_of, values  # noqa: E402

from kvstore.errors import ArgumentTypeError, ArgumentValueError  # noqa: E402
from kvstore.frameworks.horovod.torch import optimizer as optimizer_module  # noqa: E402
from pslite.errors import UsageError  # noqa: E402


@pytest.fixture(scope="module")
def two() -> Iterator[OnAll]:
    """Two ranks, for tests that end with all calls done."""
    with ranks_of(2) as on_all:
        yield on_all


@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.bfloat16, torch.float32])
def test_tensors_keep_their_dtype_and_shape(two: OnAll, dtype: Any) -> None:
    def run(rank: int) -> Any:
        own = torch.full((2, 3), rank + 1, dtype=dtype)
        strided = torch.full((3, 2), rank + 1, dtype=dtype).t()
        hvd.allreduce_(strided, op=hvd.Sum)
        return (
            hvd.allreduce(own, op=hvd.Sum),
            hvd.allgather(own)[3:],
            hvd.broadcast(own, 1) + 1,
            hvd.alltoall(own, [1, 1])[0][1:].expand(2, 3) + 1,
            strided,
        )

    for found in values(two(run)):
        assert [each.dtype for each in found] == [dtype] * 5
        assert all((each == 3).all() for each in (found[0], found[2], found[3], found[4]))
        assert (found[1] == 2).all()


def test_gradients_are_those_of_horovod(two: OnAll) -> None:
    def run(rank: int) -> Any:
        found = []

        def of(call: Any, rows: int) -> None:
            x = torch.ones(rows, requires_grad=True)
            y = call(x)
            y.backward(torch.arange(1.0, len(y) + 1) * (rank + 1))
            found.append(x.grad.tolist())

        of(lambda x: hvd.allreduce(x, op=hvd.Sum), 2)
        of(lambda x: hvd.allreduce(x, prescale_factor=2.0), 2)
        of(lambda x: hvd.grouped_allreduce([x, x], op=hvd.Sum)[0], 1)
        of(lambda x: hvd.allgather(x), 1 + rank)
        of(lambda x: hvd.broadcast(x, 1), 2)
        of(lambda x: hvd.alltoall(x, [1, 1])[0], 3)
        of(lambda x: hvd.reducescatter(x, op=hvd.Sum), 3)
        return found

    first, second = values(two(run))
    assert first[:2] == second[:2] == [[3.0, 6.0], [3.0, 6.0]]
    assert first[2] == second[2] == [3.0]
    assert (first[3], second[3]) == ([1.5], [3.0, 4.5])
    assert (first[4], second[4]) == ([0.0, 0.0], [1.5, 3.0])
    assert (first[5], second[5]) == ([1.0, 2.0, 0.0], [2.0, 4.0, 0.0])
    assert first[6] == second[6] == [2.0, 4.0, 4.0]


def test_sparse_tensors_are_added(two: OnAll) -> None:
    def run(rank: int) -> Any:
        own = torch.sparse_coo_tensor(
            [[0, 2 + rank]], [[1.0], [4.0]], (4, 1), check_invariants=True
        )
        total = hvd.synchronize(hvd.sparse_allreduce_async(own, name="s", op=hvd.Sum))
        with pytest.raises(ArgumentTypeError, match="dense tensor"):
            hvd.allreduce(own)
        with pytest.raises(ArgumentValueError, match="expected Sum or Average"):
            hvd.sparse_allreduce_async(own, op=hvd.Max)
        return total.to_dense().reshape(-1).tolist()

    assert values(two(run)) == [[2.0, 0.0, 4.0, 4.0]] * 2


def test_what_is_no_tensor_is_refused(two: OnAll) -> None:
    for error in two(lambda _: hvd.allreduce(1.0)):
        assert isinstance(error, ArgumentTypeError | AttributeError)


# -- the optimizer ---------------------------------------------------------------------------------


def net() -> Any:
    generator = torch.Generator().manual_seed(3)
    made = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    with torch.no_grad():
        for each in made.parameters():
            each.copy_(torch.randn(each.shape, generator=generator))
    return made


def batch(step: int, rows: slice) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(8, width, generator=generator) for width in (4, 2))
    return x[rows], y[rows]


def trained(wrap: Any, rows: slice, steps: int = 3, passes: int = 1) -> list[Any]:
    """The parameters after some steps of SGD with momentum."""
    model = net()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(step, rows)
        for part in range(passes):
            pick = slice(part, None, passes)
            loss = (model(x[pick]) - y[pick]).square().mean() / passes
            loss.backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 2},
        {"num_groups": 9},
        {"gradient_predivide_factor": 4.0},
        {"backward_passes_per_step": 2},
        {"op": hvd.Average, "compression": hvd.Compression.none, "sparse_as_dense": True},
    ],
    ids=str,
)
def test_two_ranks_train_like_one_with_both_batches(two: OnAll, options: Any) -> None:
    def run(rank: int) -> Any:
        def wrap(optimizer: Any, model: Any) -> Any:
            found = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
            assert isinstance(found, torch.optim.SGD)
            return found

        passes = options.get("backward_passes_per_step", 1)
        return trained(wrap, slice(4 * rank, 4 * rank + 4), passes=passes)

    wanted = trained(lambda optimizer, _: optimizer, slice(None))
    for found in values(two(run)):
        for own, other in zip(found, wanted, strict=True):
            assert torch.allclose(own, other, atol=1e-6)


def test_small_buckets_and_lists_of_parameters_give_the_same(
    two: OnAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_module, "_BUCKET_BYTES", 40)

    def run(rank: int) -> Any:
        rows = slice(4 * rank, 4 * rank + 4)
        counts = []

        def wrap(optimizer: Any, model: Any, groups: Any = None) -> Any:
            found = hvd.DistributedOptimizer(optimizer, model.named_parameters(), groups=groups)
            counts.append(len(found._exchange.buckets))
            return found

        first = trained(wrap, rows)
        lists = lambda model: [[*model[0].parameters()]]  # noqa: E731
        second = trained(lambda optimizer, model: wrap(optimizer, model, lists(model)), rows)
        return counts, all(map(torch.equal, first, second))

    assert values(two(run)) == [([4, 3], True)] * 2


def test_a_parameter_without_a_gradient_counts_as_zeros(two: OnAll) -> None:
    def run(rank: int) -> Any:
        one, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        pairs = [("one", one), ("other", other)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([one, other], lr=1.0), pairs)
        (one if rank == 0 else other).sum().backward()
        optimizer.step()
        return one.tolist(), other.tolist()

    assert values(two(run)) == [([-0.5, -0.5], [-0.5, -0.5])] * 2


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_train_an_embedding(two: OnAll, as_dense: bool) -> None:
    def run(rank: int) -> Any:
        table = torch.nn.Embedding(4, 1, sparse=True)
        torch.nn.init.zeros_(table.weight)
        inner = torch.optim.SGD(table.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(
            inner, table.named_parameters(), op=hvd.Sum, sparse_as_dense=as_dense
        )
        table(torch.tensor([0, 2 + rank])).sum().backward()
        optimizer.step()
        return table.weight.reshape(-1).tolist()

    assert values(two(run)) == [[-2.0, 0.0, -1.0, -1.0]] * 2


def test_two_optimizers_of_one_backward_pass_may_have_the_same_names(two: OnAll) -> None:
    """As the two networks of a GAN."""

    def run(rank: int) -> Any:
        nets = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
        made = [
            hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 1.0), net.named_parameters())
            for net in nets
        ]
        nets[1](nets[0](torch.full((1, 2), rank + 1.0))).sum().backward()
        for optimizer in made:
            optimizer.synchronize()
        return nets[1].bias.grad.tolist()

    assert values(two(run)) == [[1.0, 1.0]] * 2


def test_a_later_optimizer_takes_the_place_of_an_earlier_one(two: OnAll) -> None:
    def run(rank: int) -> Any:
        net = torch.nn.Linear(2, 1)
        make = lambda: torch.optim.SGD(net.parameters(), 1.0)  # noqa: E731
        before = hvd.DistributedOptimizer(make(), net.named_parameters())
        optimizer = hvd.DistributedOptimizer(make(), net.named_parameters())
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.full((1, 2), rank + 1.0)).sum().backward()
            optimizer.step()
        exchange = weakref.ref(before._exchange)
        return net.weight.grad.tolist(), exchange

    for gradient, exchange in values(two(run)):
        assert gradient == [[1.5, 1.5]]
        gc.collect()
        assert exchange() is None


def test_gradients_may_be_clipped_between_synchronize_and_step(two: OnAll) -> None:
    def run(rank: int) -> Any:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        (weight * (10.0 + rank)).sum().backward()
        optimizer.synchronize()
        combined = weight.grad.item()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        with optimizer.skip_synchronize(), warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        return combined, round(weight.item(), 4)

    assert values(two(run)) == [(10.5, -1.0)] * 2


def test_misuse_of_the_optimizer_is_named(two: OnAll) -> None:
    def run(rank: int) -> Any:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        weight.sum().backward()
        with pytest.raises(UsageError, match="more than backward_passes_per_step times"):
            weight.sum().backward()
        with pytest.raises(UsageError, match="zero_grad"):
            optimizer.zero_grad()
        optimizer.step()
        optimizer.set_backward_passes_per_step(2)
        optimizer.zero_grad()
        for _ in range(2):
            weight.sum().backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="skip_synchronize"):
            optimizer.step()
        return weight.grad.item()

    assert values(two(run)) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"named_parameters": []}, "missing: group 0, parameter 0"),
        ({"named_parameters": ["w"]}, "must be pairs"),
        ({"backward_passes_per_step": 0}, "at least 1, got 0"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=hvd.Average, got Sum"),
        ({"op": hvd.Adasum}, "Adasum is not offered"),
        ({"groups": -1}, "0 or more"),
        ({"groups": [[1]]}, "lists of parameters"),
    ],
    ids=str,
)
def test_wrong_options_of_the_optimizer_are_refused(two: OnAll, options: Any, words: str) -> None:
    def run(rank: int) -> Any:
        weight = torch.nn.Parameter(torch.zeros(1))
        with pytest.raises(UsageError, match=words):
            hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), **options)

    values(two(run))


def test_ranks_with_different_parameters_are_told_when_the_optimizer_is_made(two: OnAll) -> None:
    def run(rank: int) -> Any:
        weight = torch.nn.Parameter(torch.zeros(1 + rank))
        return hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)])

    _, error = two(run)
    assert isinstance(error, ArgumentValueError)
    assert "'w' has the shape [2] on rank 1 and [1] on rank 0" in str(error)


# -- batch normalization, and states --------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 2), (8, 3, 2, 2)], ids=str)
def test_batch_normalization_is_that_of_the_whole_batch(two: OnAll, shape: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weights = (torch.randn(shape, generator=generator) for _ in range(2))
    kinds = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}
    whole = kinds[len(shape)](3)
    given = x.clone().requires_grad_()
    wanted = whole(given)
    (wanted * weights).sum().backward()

    def run(rank: int) -> Any:
        rows = slice(0, 3) if rank == 0 else slice(3, 8)  # of different sizes
        own = hvd.SyncBatchNorm(3)
        mine = x[rows].clone().requires_grad_()
        found = own(mine)
        (found * weights[rows]).sum().backward()
        assert torch.allclose(found, wanted[rows], atol=1e-5)
        assert torch.allclose(mine.grad, given.grad[rows], atol=1e-5)
        assert torch.allclose(own.running_mean, whole.running_mean, atol=1e-6)
        assert torch.allclose(own.running_var, whole.running_var, atol=1e-6)
        assert own.num_batches_tracked == 1
        total = hvd.allreduce(own.weight.grad, op=hvd.Sum)
        assert torch.allclose(total, whole.weight.grad, atol=1e-4)
        before = own.running_mean.clone()
        own.eval()(mine)
        return torch.equal(before, own.running_mean)

    assert values(two(run)) == [True, True]


def test_models_and_optimizers_become_those_of_the_root(two: OnAll) -> None:
    def run(rank: int) -> Any:
        torch.manual_seed(rank)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
        if rank == 1:
            model(torch.ones(2)).sum().backward()
            optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        hvd.broadcast_parameters(model.named_parameters(), root_rank=1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        state = optimizer.state_dict()
        return (
            [each.tolist() for each in model.parameters()],
            state["param_groups"],
            {key: each["exp_avg"].tolist() for key, each in state["state"].items()},
        )

    first, second = values(two(run))
    assert first == second
    assert first[1][0]["lr"] == 0.2
    assert set(first[2]) == {0, 1}


def test_tensors_in_objects_arrive_as_tensors(two: OnAll) -> None:
    state = {
        "half": torch.ones(2, 2, dtype=torch.bfloat16),
        "step": torch.tensor(3),
        "all": [(torch.empty(0, 2), None)],
    }

    def run(rank: int) -> Any:
        found = hvd.broadcast_object(copy.deepcopy(state) if rank == 0 else None)
        gathered = hvd.allgather_object(torch.tensor([rank]))
        assert found["half"].dtype == torch.bfloat16
        assert torch.equal(found["half"], state["half"])
        assert found["all"][0][0].shape == (0, 2)
        return found["step"].item(), [each.item() for each in gathered]

    assert values(two(run)) == [(3, [0, 1])] * 2


def test_the_calls_for_tensors_are_those_for_arrays_and_five_more() -> None:
    from kvstore import horovod

    assert {*hvd.__all__} ^ {*horovod.__all__} == {
        *("DistributedOptimizer", "SyncBatchNorm", "sparse_allreduce_async"),
        *("broadcast_optimizer_state", "broadcast_parameters"),
    }
