"""Calls of torch.distributed's process groups, on ranks that are threads of this process."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.distributed import (  # noqa: E402
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch_ranks import on_all, ranks_of  # noqa: E402

from kvstore.frameworks.torch.process_group import ProcessGroupKVStore  # noqa: E402
from pslite.errors import DeadlineError, MismatchError, UsageError  # noqa: E402

DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]


@pytest.fixture(scope="module")
def three() -> Iterator[list[Any]]:
    """A group of three ranks on two servers, for tests that break nothing; chunks are small."""
    with ranks_of(3, chunk_bytes=64) as groups:
        yield groups


def options(kind: Any, **fields: Any) -> Any:
    """As torch.distributed's functions make them for a call that is waited for at once."""
    made = kind()
    made.asyncOp = False
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def done(work: Any) -> None:
    assert work.wait() is True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_adds_in_place(three: list[Any], dtype: Any) -> None:
    def run(group: Any) -> Any:
        tensor = torch.arange(100).to(dtype) % 20 + group.rank()
        done(group.allreduce([tensor], options(AllreduceOptions)))
        return tensor

    wanted = torch.arange(100).to(dtype) % 20 * 3 + 3
    assert all(torch.equal(tensor, wanted) for tensor in on_all(three, run))


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        (ReduceOp.SUM, [6.0, 9.0]),
        (ReduceOp.AVG, [2.0, 3.0]),
        (ReduceOp.PRODUCT, [6.0, 24.0]),
        (ReduceOp.MIN, [1.0, 2.0]),
        (ReduceOp.MAX, [3.0, 4.0]),
        (torch.distributed._make_nccl_premul_sum(0.5), [3.0, 4.5]),
    ],
    ids=["sum", "average", "product", "min", "max", "premul_sum"],
)
def test_all_reduce_knows_the_operations_of_floats(
    three: list[Any], op: Any, wanted: list[float]
) -> None:
    def run(group: Any) -> list[float]:
        tensor = torch.tensor([1.0, 2.0]) + group.rank()
        done(group.allreduce([tensor], options(AllreduceOptions, reduceOp=op)))
        return list(tensor.tolist())

    assert on_all(three, run) == [wanted] * 3


@pytest.mark.parametrize(
    ("op", "wanted"), [(ReduceOp.BAND, 0), (ReduceOp.BOR, 7), (ReduceOp.BXOR, 7)]
)
def test_all_reduce_knows_the_operations_of_bits(three: list[Any], op: Any, wanted: int) -> None:
    def run(group: Any) -> int:
        tensor = torch.tensor([1 << group.rank()])
        done(group.allreduce([tensor], options(AllreduceOptions, reduceOp=op)))
        return int(tensor.item())

    assert on_all(three, run) == [wanted] * 3


def test_tensors_that_are_not_contiguous_and_parameters_are_reduced_in_place(
    three: list[Any],
) -> None:
    def run(group: Any) -> Any:
        whole = torch.zeros(4, 6)
        strided = whole.t()[1::2]
        strided += group.rank()
        parameter = torch.nn.Parameter(torch.ones(2))
        done(group.allreduce([strided], options(AllreduceOptions)))
        done(group.allreduce([parameter], options(AllreduceOptions)))
        return whole.tolist(), parameter.tolist()

    row = [0.0, 3.0] * 3
    assert on_all(three, run) == [([row] * 4, [3.0, 3.0])] * 3


def test_sparse_tensors_are_added_row_by_row(three: list[Any]) -> None:
    """As gradients of embeddings with ``sparse=True``."""

    def run(group: Any) -> Any:
        rank = group.rank()
        rows = torch.tensor([[rank, 5]])
        values = torch.full((2, 2), rank + 1.0)
        tensor = torch.sparse_coo_tensor(rows, values, (6, 2), check_invariants=True)
        done(group.allreduce([tensor], options(AllreduceOptions)))
        return tensor.to_dense()[:, 0].tolist(), tensor.is_sparse

    assert on_all(three, run) == [([1.0, 2.0, 3.0, 0.0, 0.0, 6.0], True)] * 3


def test_empty_tensors_and_scalars_travel(three: list[Any]) -> None:
    def run(group: Any) -> Any:
        scalar, empty = torch.tensor(group.rank() + 1.0), torch.empty(0)
        done(group.allreduce_coalesced([scalar, empty], options(AllreduceOptions)))
        return scalar.item(), empty.numel()

    assert on_all(three, run) == [(6.0, 0)] * 3


def test_reduce_changes_the_root_only(three: list[Any]) -> None:
    def run(group: Any) -> list[float]:
        tensor = torch.tensor([float(group.rank())])
        done(group.reduce([tensor], options(ReduceOptions, rootRank=1)))
        return list(tensor.tolist())

    assert on_all(three, run) == [[0.0], [3.0], [2.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16, torch.complex64])
def test_broadcast_copies_the_root(three: list[Any], dtype: Any) -> None:
    def run(group: Any) -> Any:
        tensor = torch.arange(50).to(dtype) if group.rank() == 2 else torch.zeros(50, dtype=dtype)
        done(group.broadcast([tensor], options(BroadcastOptions, rootRank=2)))
        return tensor

    wanted = torch.arange(50).to(dtype)
    assert all(torch.equal(tensor, wanted) for tensor in on_all(three, run))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float8_e5m2])
def test_gathers_of_any_dtype_take_sizes_that_differ(three: list[Any], dtype: Any) -> None:
    def run(group: Any) -> Any:
        rank = group.rank()
        mine = torch.full((rank, 2), float(rank)).to(dtype)
        outputs = [torch.zeros(other, 2).to(dtype) for other in range(3)]
        done(group.allgather([outputs], [mine]))
        at_root = [torch.zeros(other, 2).to(dtype) for other in range(3)] if rank == 1 else []
        done(group.gather([at_root] if at_root else [], [mine], options(GatherOptions, rootRank=1)))
        return [[each.float().tolist() for each in found] for found in (outputs, at_root)]

    wanted = [[[float(other)] * 2] * other for other in range(3)]
    assert on_all(three, run) == [[wanted, wanted if rank == 1 else []] for rank in range(3)]


def test_all_gather_into_one_tensor(three: list[Any]) -> None:
    def run(group: Any) -> Any:
        mine = torch.full((2, 2), float(group.rank()))
        stacked, transposed = torch.empty(6, 2), torch.empty(2, 6).t()
        done(group.all_gather_single(stacked, mine))
        done(group._allgather_base(transposed, mine))
        lists = [[torch.empty(2, 2)] for _ in range(3)]
        done(group.allgather_coalesced(lists, [mine]))
        assert torch.equal(transposed, stacked)
        assert torch.equal(torch.cat([each for (each,) in lists]), stacked)
        return stacked[:, 0].tolist()

    assert on_all(three, run) == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]] * 3


def test_scatter_and_reduce_scatter_give_each_rank_its_piece(three: list[Any]) -> None:
    def run(group: Any) -> Any:
        rank = group.rank()
        scattered, reduced, single = torch.zeros(2), torch.zeros(2), torch.zeros(2)
        pieces = [torch.full((2,), 10.0 * other) for other in range(3)]
        sources = [pieces] if rank == 0 else []
        done(group.scatter([scattered], sources, options(ScatterOptions, rootRank=0)))
        done(group.reduce_scatter([reduced], [pieces], options(ReduceScatterOptions)))
        average = options(ReduceScatterOptions, reduceOp=ReduceOp.AVG)
        done(group.reduce_scatter_single(single, torch.cat(pieces) + rank, average))
        return scattered.tolist(), reduced.tolist(), single.tolist()

    assert on_all(three, run) == [
        ([10.0 * rank] * 2, [30.0 * rank] * 2, [10.0 * rank + 1] * 2) for rank in range(3)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e5m2])
def test_scatter_moves_any_dtype(three: list[Any], dtype: Any) -> None:
    pieces = [torch.tensor([1.5, rank]).to(dtype) for rank in range(3)]

    def run(group: Any) -> Any:
        sources = [pieces] if group.rank() == 1 else []
        tensor = torch.zeros(2).to(dtype)
        done(group.scatter([tensor], sources, options(ScatterOptions, rootRank=1)))
        return tensor.float()

    found = on_all(three, run)
    assert [tensor.tolist() for tensor in found] == [piece.float().tolist() for piece in pieces]


def test_all_to_all_in_lists_and_in_one_tensor(three: list[Any]) -> None:
    def run(group: Any) -> Any:
        rank = group.rank()
        outputs = [torch.zeros(other + 1) for other in range(3)]
        done(group.alltoall(outputs, [torch.full((rank + 1,), float(rank))] * 3))
        mine = torch.arange(6.0).reshape(6, 1) + 10 * rank
        together = torch.zeros(3 * (rank + 1), 1)
        done(group.all_to_all_single(together, mine, [rank + 1] * 3, [1, 2, 3]))
        even = torch.zeros(6, 1)
        done(group.alltoall_base(even, mine, [], []))
        return [each.tolist() for each in outputs], together[:, 0].tolist(), even[:, 0].tolist()

    cut = [[0], [1, 2], [3, 4, 5]]
    assert on_all(three, run) == [
        (
            [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]],
            [10.0 * other + at for other in range(3) for at in cut[rank]],
            [10.0 * other + at for other in range(3) for at in (2 * rank, 2 * rank + 1)],
        )
        for rank in range(3)
    ]


def test_the_tensors_of_every_call_can_still_be_resized(three: list[Any]) -> None:
    def run(group: Any) -> list[int]:
        rank = group.rank()
        tensors = [torch.ones(3) for _ in range(14)]
        a, b, c, d, e, f, *many = tensors
        whole, third, inputs, outputs = torch.ones(9), torch.ones(3), many[:3], many[3:6]
        done(group.allreduce([a], options(AllreduceOptions)))
        done(group.reduce([b], options(ReduceOptions, rootRank=1)))
        done(group.broadcast([c], options(BroadcastOptions, rootRank=1)))
        done(group.allgather([outputs], [d]))
        done(group.gather([outputs] if rank == 0 else [], [e], options(GatherOptions)))
        done(group.scatter([f], [inputs] if rank == 0 else [], options(ScatterOptions)))
        done(group.reduce_scatter([many[6]], [inputs], options(ReduceScatterOptions)))
        done(group.alltoall(outputs, inputs))
        done(group.all_gather_single(whole, third))
        done(group.reduce_scatter_single(third, whole, options(ReduceScatterOptions)))
        done(group.all_to_all_single(third, many[7]))
        sent = group.send([a], (rank + 1) % 3)
        done(group.recv([b], (rank + 2) % 3))
        done(sent)
        return [each.resize_(100).numel() for each in (*tensors, whole, third)]

    assert on_all(three, run) == [[100] * 16] * 3


def test_messages_keep_their_tags_and_say_whom_they_are_from(three: list[Any]) -> None:
    def run(group: Any) -> Any:
        if group.rank() > 0:
            for tag in (0, 7):
                done(group.send([torch.tensor([group.rank() * 10.0 + tag])], 0, tag))
            return None
        found = []
        for _ in range(2):
            tensor = torch.zeros(1)
            work = group.recv_anysource([tensor], 7)
            done(work)
            found.append((work._source_rank(), tensor.item()))
        for source in (2, 1):
            tensor = torch.zeros(1)
            done(group.recv([tensor], source, 0))
            found.append((source, tensor.item()))
        return sorted(found[:2]), found[2:]

    got = on_all(three, run)
    assert got[0] == ([(1, 17.0), (2, 27.0)], [(2, 20.0), (1, 10.0)])


def test_a_received_tensor_must_fit(three: list[Any]) -> None:
    def run(group: Any) -> Any:
        if group.rank() == 0:
            return group.send([torch.zeros(3)], 1, 0).wait()
        if group.rank() == 1:
            return group.recv([torch.zeros(4)], 0, 0).wait()
        return None

    error = on_all(three, run)[1]
    assert isinstance(error, UsageError)
    assert "expected a tensor of 3 elements of float32" in str(error)


def test_messages_within_a_part_of_the_group_name_ranks_of_the_part(three: list[Any]) -> None:
    parts = {}
    for rank, world in ((1, 0), (0, 2)):
        parts[rank] = ProcessGroupKVStore(rank, 2)
        parts[rank].begin(three[world].cluster, [2, 0], "part", 20.0, None)

    def run(group: Any) -> Any:
        half = torch.zeros(3, dtype=torch.bfloat16)
        if group.rank() == 0:
            done(group.send([half + 1.5], 1, 3))
            return None
        work = group.recv_anysource([half], 3)
        done(work)
        return work.source_rank(), half.tolist()

    assert on_all([parts[0], parts[1]], run)[1] == (0, [1.5] * 3)


def test_the_results_of_a_work_that_is_not_waited_for_arrive_as_well(three: list[Any]) -> None:
    def run(group: Any) -> Any:
        tensor = torch.ones(3)
        work = group.allreduce([tensor], options(AllreduceOptions, asyncOp=True))
        arrived = threading.Event()
        work.get_future().then(lambda _: arrived.set())
        assert arrived.wait(20)
        assert work.is_completed() and work.is_success() and work.exception() is None
        return tensor.tolist(), work.result()[0].tolist()

    assert on_all(three, run) == [([3.0] * 3, [3.0] * 3)] * 3


def test_a_callback_of_a_future_may_wait_for_further_calls(three: list[Any]) -> None:
    """As the hook of PowerSGD does."""

    def run(group: Any) -> Any:
        def further(done: Any) -> float:
            tensor = done.value()[0] * 2
            group.allreduce([tensor], options(AllreduceOptions)).get_future().wait()
            return float(tensor.item())

        works = [group.allreduce([torch.ones(1)], options(AllreduceOptions)) for _ in range(4)]
        return [each.wait() for each in [work.get_future().then(further) for work in works]]

    # Each rank's callbacks run at the same time: which calls meet is open, what they add is not.
    assert on_all(three, run) == [[18.0] * 4] * 3


def summed(group: Any, tensor: Any, **fields: Any) -> Any:
    return group.allreduce([tensor], options(AllreduceOptions, **fields))


def gathered(group: Any, tensor: Any) -> Any:
    return group.allgather([[torch.empty_like(tensor) for _ in range(3)]], [tensor])


def scattered(group: Any, root: int) -> Any:
    pieces = [[torch.zeros(2)] * 3] if group.rank() == root else []
    return group.scatter([torch.zeros(2)], pieces, options(ScatterOptions, rootRank=root))


CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce(sum, float32, shape (2,))": lambda g: summed(g, torch.zeros(2)),
    "all_reduce(sum, float64, shape (2,))": lambda g: summed(g, torch.zeros(2).double()),
    "all_reduce(sum, bfloat16, shape (2,))": lambda g: summed(g, torch.zeros(2).bfloat16()),
    "all_reduce(sum, float32, shape (1, 2))": lambda g: summed(g, torch.zeros(1, 2)),
    "all_reduce(sum, float32, shape (100000,))": lambda g: summed(g, torch.zeros(100_000)),
    "all_reduce(max, float32, shape (2,))": lambda g: summed(
        g, torch.zeros(2), reduceOp=ReduceOp.MAX
    ),
    "reduce(sum, float32, shape (2,), root 1)": lambda g: g.reduce(
        [torch.zeros(2)], options(ReduceOptions, rootRank=1)
    ),
    "reduce(sum, float32, shape (2,), root 2)": lambda g: g.reduce(
        [torch.zeros(2)], options(ReduceOptions, rootRank=2)
    ),
    "broadcast(float32, shape (2,), root 0)": lambda g: g.broadcast(
        [torch.zeros(2)], options(BroadcastOptions)
    ),
    "broadcast(float32, shape (2,), root 1)": lambda g: g.broadcast(
        [torch.zeros(2)], options(BroadcastOptions, rootRank=1)
    ),
    "reduce_scatter(sum, float32, shapes (2,) (2,) (2,))": lambda g: g.reduce_scatter(
        [torch.zeros(2)], [[torch.zeros(2)] * 3], options(ReduceScatterOptions)
    ),
    "all_gather(float32, shape (any,))": lambda g: gathered(g, torch.zeros(2)),
    "all_gather(int64, shape (any,))": lambda g: gathered(g, torch.zeros(2, dtype=torch.int64)),
    "scatter(root 0)": lambda g: scattered(g, 0),
    "scatter(root 1)": lambda g: scattered(g, 1),
    "all_to_all(float32)": lambda g: g.alltoall([torch.zeros(2)] * 3, [torch.zeros(2)] * 3),
    "barrier()": lambda g: g.barrier(),
}
"""Calls by the words that an error has for them."""


@pytest.mark.parametrize(("usual", "odd"), [*itertools.pairwise([*CALLS, next(iter(CALLS))])])
def test_different_calls_name_both_ranks_on_all(three: list[Any], usual: str, odd: str) -> None:
    def run(group: Any) -> None:
        CALLS[odd if group.rank() == 1 else usual](group).wait()

    for error in on_all(three, run):
        assert isinstance(error, MismatchError), error
        assert re.search(rf"rank [02] calls {re.escape(usual)}", str(error)), error
        assert f"rank 1 calls {odd}" in str(error), error


def test_an_error_is_an_error_of_the_torch_future_too(three: list[Any]) -> None:
    def run(group: Any) -> Any:
        size = 2 + (group.rank() == 2)
        work = group.allreduce([torch.zeros(size)], options(AllreduceOptions))
        future = work.get_future()
        with pytest.raises(RuntimeError, match="rank 2 calls"):
            future.then(lambda done: done.value()).wait()
        assert isinstance(work.exception(), MismatchError)
        return work.is_success()

    assert on_all(three, run) == [False] * 3


def test_a_call_of_which_a_rank_is_missing_ends_with_the_timeout() -> None:
    with ranks_of(2) as groups:
        work = groups[0].allreduce(
            [torch.zeros(2)], options(AllreduceOptions, timeout=timedelta(seconds=0.05))
        )
        with pytest.raises(DeadlineError, match=r"Timed out after 0\.05 s.*all_reduce"):
            work.wait()
        with pytest.raises(DeadlineError, match=r"Timed out after 0\.01 s"):
            work.wait(timedelta(seconds=0.01))
        groups[0].set_timeout(timedelta(seconds=0.02))
        with pytest.raises(DeadlineError, match=r"Timed out after 0\.02 s"):
            groups[0].barrier().wait()
        done(groups[1].allreduce([torch.ones(2)], options(AllreduceOptions)))
        done(groups[1].barrier())
        done(work)


@pytest.mark.parametrize("shm", [True, False])
def test_a_monitored_barrier_names_all_ranks_that_have_not_come(shm: bool) -> None:
    """Without shared memory, the servers are asked, in time for a timeout of a second."""
    with ranks_of(4, shm=shm) as groups:
        late = threading.Thread(target=lambda: groups[1].monitored_barrier())
        late.start()
        with pytest.raises(DeadlineError, match=r"Timed out after 1 s.*barrier.*for ranks 2, 3 "):
            groups[0].monitored_barrier(timedelta(seconds=1), wait_all_ranks=True)
        on_all(groups[2:], lambda group: group.monitored_barrier())
        late.join(20)
        assert not late.is_alive()


def test_a_long_wait_is_reported() -> None:
    with ranks_of(2, stall_report_s=0.05) as groups:
        node = groups[0].cluster.node
        said = threading.Event()
        node.log.warn = lambda text: said.set() if "barrier" in text else None  # type: ignore[method-assign]
        waiting = threading.Thread(target=lambda: groups[0].barrier().wait())
        waiting.start()
        assert said.wait(20)
        done(groups[1].barrier())
        waiting.join(20)


def test_tensors_that_cannot_travel_are_refused(three: list[Any]) -> None:
    group = three[0]
    with pytest.raises(TypeError, match=r"takes dense tensors, got one of torch\.sparse_coo"):
        group.broadcast([torch.eye(2).to_sparse()], options(BroadcastOptions))
    with pytest.raises(TypeError, match=r"takes tensors on the CPU, got one on meta"):
        group.allreduce([torch.empty(2, device="meta")], options(AllreduceOptions))
    with pytest.raises(TypeError, match=r"float8_e5m2 can be moved and not added"):
        group.allreduce([torch.ones(2).to(torch.float8_e5m2)], options(AllreduceOptions))


def test_sums_are_the_same_bits_on_every_rank_and_on_every_run(three: list[Any]) -> None:
    def run(group: Any) -> bytes:
        generator = np.random.default_rng(group.rank())
        tensor = torch.from_numpy(generator.standard_normal(1000).astype(np.float32))
        done(group.allreduce([tensor], options(AllreduceOptions)))
        return tensor.numpy().tobytes()

    first, second = on_all(three, run), on_all(three, run)
    assert len({*first, *second}) == 1
