"""kvstore.horovod: what ranks get, how calls are matched, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvstore.horovod as hvd
import numpy as np
import pytest
from cluster import LIMIT_S
from horovod_ranks import LARGE, OnAll, ranks_of, sessions, values

from kvstore.errors import ArgumentTypeError, ArgumentValueError, NotSupportedError
from kvstore.frameworks.horovod.session import HorovodSession
from kvstore.stores.dist import progress
from pslite.errors import DeadlockError, MismatchError, UsageError


@pytest.fixture(scope="module")
def three() -> Iterator[OnAll]:
    """Three ranks on two servers, for tests that end with all calls done; chunks are small."""
    with ranks_of(3, 2, chunk_bytes=64) as on_all:
        yield on_all


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8", "float16", "float32", "float64"])
def test_allreduce_averages_unless_it_is_told(three: OnAll, dtype: str) -> None:
    def run(rank: int) -> Any:
        own = (np.arange(40) * (rank + 1)).astype(dtype).reshape(8, 5)
        return hvd.allreduce(own), hvd.allreduce(own, op=hvd.Sum), hvd.allreduce(own, average=False)

    for average, total, older in values(three(run)):
        assert average.dtype == total.dtype == dtype
        assert (average == (np.arange(40) * 2).reshape(8, 5)).all()
        assert (total == (np.arange(40) * 6).astype(dtype).reshape(8, 5)).all()
        assert (older == total).all()


@pytest.mark.parametrize(
    ("op", "wanted"), [(hvd.Min, [1, -3]), (hvd.Max, [3, -1]), (hvd.Product, [6, -6])]
)
def test_allreduce_knows_the_other_operations(three: OnAll, op: Any, wanted: list[int]) -> None:
    run = lambda rank: hvd.allreduce(np.array([rank + 1, -rank - 1]), op=op)  # noqa: E731
    assert [each.tolist() for each in values(three(run))] == [wanted] * 3


def test_averages_and_factors_of_whole_numbers_are_cut_towards_zero(three: OnAll) -> None:
    def run(rank: int) -> Any:
        own = np.array([-5, 5, 7])
        return (
            hvd.allreduce(own + (rank == 0), average=True).tolist(),
            hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5).tolist(),
            hvd.allreduce(own, op=hvd.Sum, postscale_factor=0.1).tolist(),
        )

    assert values(three(run)) == [([-4, 5, 7], [-6, 6, 9], [-1, 1, 2])] * 3


def test_factors_of_halves_are_applied_in_float32(three: OnAll) -> None:
    own = np.array([1001.0], np.float16)
    run = lambda rank: hvd.allreduce(own, op=hvd.Max, prescale_factor=0.1)  # noqa: E731
    wanted = (own.astype(np.float32) * np.float32(0.1)).astype(np.float16)
    assert all(each == wanted for each in values(three(run)))


def test_calls_are_matched_by_name_and_not_by_their_order(three: OnAll) -> None:
    def run(rank: int) -> Any:
        names = ["a", "b", "c"] if rank else ["c", "b", "a"]
        handles = {name: hvd.allreduce_async(np.array([ord(name)]), name=name) for name in names}
        return [hvd.synchronize(handles[name]).item() for name in "abc"]

    assert values(three(run)) == [[97, 98, 99]] * 3


def test_large_arrays_go_by_shared_memory_whatever_their_order(
    three: OnAll, by_servers: list[str]
) -> None:
    def run(rank: int) -> Any:
        names = ["a", "b", "c"] if rank else ["c", "b", "a"]
        own = {name: np.full(LARGE, 10.0**rank * ord(name)) for name in names}
        handles = [hvd.allreduce_async_(own[name], name=name, op=hvd.Sum) for name in names]
        group = hvd.grouped_allreduce([own["a"] * 0 + rank, np.array([rank])], name="g", op=hvd.Max)
        rows = hvd.broadcast(np.full(LARGE, rank), 2)
        for handle in handles:
            hvd.synchronize(handle)
        return [own[name][-1] for name in "abc"], [each[-1] for each in group], rows[-1]

    wanted = [111.0 * ord(name) for name in "abc"], [2.0, 2.0], 2
    assert values(three(run)) == [wanted] * 3
    assert by_servers == ["allreduce.g.1"] * 3


def test_a_name_of_one_kind_of_call_is_free_for_another(three: OnAll) -> None:
    def run(rank: int) -> Any:
        first = hvd.allreduce_async(np.ones(2), name="x", op=hvd.Sum)
        second = hvd.allgather_async(np.array([rank]), name="x")
        return hvd.synchronize(first).tolist(), second().tolist()

    assert values(three(run)) == [([3.0, 3.0], [0, 1, 2])] * 3


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda rank: hvd.allreduce(np.ones(2 + rank), name="x"), ["shape (2,)", "shape (3,)"]),
        (
            lambda rank: hvd.allreduce(np.ones(2, "f4" if rank else "i8"), name="x"),
            ["int64", "float32"],
        ),
        (
            lambda rank: hvd.allreduce(np.ones(2), name="x", op=hvd.Max if rank else hvd.Sum),
            ["all_reduce(sum", "all_reduce(max"],
        ),
        (lambda rank: hvd.broadcast(np.ones(2), rank, name="x"), ["root 0", "root 1"]),
        (lambda rank: hvd.allgather(np.ones((1, 2 + rank)), name="x"), ["any, 2", "any, 3"]),
        (lambda rank: hvd.barrier() if rank else hvd.allreduce(1.0), ["all_reduce", "barrier"]),
        (lambda rank: hvd.alltoall(np.ones((2, 1 + rank))), ["(1,)", "(2,)"]),
    ],
    ids=["shape", "dtype", "op", "root", "columns", "kind", "rows"],
)
def test_ranks_that_differ_all_get_an_error_that_names_both(call: Any, words: list[str]) -> None:
    with ranks_of(2) as two:
        for error in two(call):
            assert isinstance(error, hvd.HorovodInternalError)
            assert isinstance(error.__cause__, MismatchError)
            assert all(word in str(error) for word in words), str(error)


def test_a_name_that_is_under_way_is_refused_at_the_caller() -> None:
    with ranks_of(2) as two:
        refused = threading.Event()

        def run(rank: int) -> Any:
            if rank == 1:
                assert refused.wait(LIMIT_S)
                return hvd.allreduce(np.ones(1), name="x", op=hvd.Sum).item()
            handle = hvd.allreduce_async(np.ones(1), name="x", op=hvd.Sum)
            assert not hvd.poll(handle)
            with pytest.raises(ValueError, match=r"named 'allreduce.x' is under way"):
                hvd.allreduce_async(np.ones(1), name="x")
            refused.set()
            return hvd.synchronize(handle).item()

        assert values(two(run)) == [2.0, 2.0]


def test_gathered_rows_may_differ_by_rank(three: OnAll) -> None:
    def run(rank: int) -> Any:
        one, two = hvd.grouped_allgather([np.full((rank, 2), rank), np.array([rank])], name="g")
        return one.tolist(), two.tolist()

    assert values(three(run)) == [([[1, 1], [2, 2], [2, 2]], [0, 1, 2])] * 3


def test_alltoall_sends_as_many_rows_as_splits_say(three: OnAll) -> None:
    def run(rank: int) -> Any:
        own = np.arange(6) + 10 * rank
        found, received = hvd.alltoall(own, [1, 2, 3])
        return found.tolist(), received.tolist(), hvd.alltoall(own).tolist()

    first, second, third = values(three(run))
    assert first == ([0, 10, 20], [1, 1, 1], [0, 1, 10, 11, 20, 21])
    assert second == ([1, 2, 11, 12, 21, 22], [2, 2, 2], [2, 3, 12, 13, 22, 23])
    assert third[0] == [3, 4, 5, 13, 14, 15, 23, 24, 25]


def test_the_first_ranks_get_the_rows_of_a_reducescatter_that_are_left(three: OnAll) -> None:
    run = lambda rank: hvd.reducescatter(np.arange(5.0) + rank, op=hvd.Sum).tolist()  # noqa: E731
    assert values(three(run)) == [[3.0, 6.0], [9.0, 12.0], [15.0]]


def test_grouped_calls_treat_each_array_as_the_call_for_one(three: OnAll) -> None:
    def run(rank: int) -> Any:
        own = [np.arange(5.0) + rank, np.full((3, 2), rank)]
        kept = [np.full(3, float(rank)), np.full(2, rank)]
        begun = [
            hvd.grouped_allgather_async([each[:rank] for each in own], name="rows"),
            hvd.grouped_reducescatter_async(own, op=hvd.Sum, prescale_factor=2.0),
        ]
        found = hvd.grouped_allreduce_(kept, op=hvd.Max)
        assert all(one is other for one, other in zip(found, kept, strict=True))
        hvd.synchronize(hvd.grouped_allreduce_async_(kept, op=hvd.Sum, name="kept"))
        begun = [[each.tolist() for each in hvd.synchronize(handle)] for handle in begun]
        again = hvd.grouped_reducescatter(own, op=hvd.Sum, postscale_factor=2.0)
        assert [each.tolist() for each in again] == begun[1]
        return begun, [each.tolist() for each in kept]

    for rank, ((gathered, shares), kept) in enumerate(values(three(run))):
        assert gathered == [[1.0, 2.0, 3.0], [[1, 1], [2, 2], [2, 2]]]
        assert shares == [[[6.0, 12.0], [18.0, 24.0], [30.0]][rank], [[6, 6]]]
        assert kept == [[6.0] * 3, [6] * 2]


def test_calls_in_place_fill_the_array(three: OnAll) -> None:
    def run(rank: int) -> Any:
        total, copy = np.full(3, float(rank)), np.full(3, float(rank))
        assert hvd.allreduce_(total, op=hvd.Sum, postscale_factor=2.0) is total
        assert hvd.broadcast_(copy, 2) is copy
        return total.tolist(), copy.tolist()

    assert values(three(run)) == [([6.0] * 3, [2.0] * 3)] * 3


def test_a_broadcast_leaves_its_argument_alone(three: OnAll) -> None:
    def run(rank: int) -> Any:
        own = np.array([rank])
        return hvd.broadcast(own, 1).item(), own.item()

    assert values(three(run)) == [(1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("length", [1, LARGE])
def test_a_rank_that_has_joined_counts_as_zeros(length: int) -> None:
    with ranks_of(3) as three:

        def run(rank: int) -> Any:
            found = []
            for _ in range(2):  # the numbers of calls begin anew
                sums = [
                    hvd.allreduce(np.full(length, 3.0), name=name)[-1].item()
                    for name in ["x", None, "x"][: 3 - rank]
                ]
                found.append((sums, hvd.join()))
            return found

        first, second, third = values(three(run))
    assert [sums for sums, _ in first] == [[3.0, 2.0, 1.0]] * 2
    assert [sums for sums, _ in second] == [[3.0, 2.0]] * 2
    assert [sums for sums, _ in third] == [[3.0]] * 2
    assert {last for rank in (first, second, third) for _, last in rank} == {0}


def test_other_calls_end_with_an_error_while_a_rank_has_joined() -> None:
    with ranks_of(2) as two:

        def run(rank: int) -> Any:
            if rank == 0:
                return hvd.join()
            with pytest.raises(hvd.HorovodInternalError, match=r"rank 0 .*has joined"):
                hvd.allgather(np.ones(1))
            return hvd.join()

        assert values(two(run)) == [1, 1]


# -- process sets ------------------------------------------------------------------------------


def test_calls_of_a_process_set_are_among_its_ranks() -> None:
    with ranks_of(3) as three:

        def run(rank: int) -> Any:
            ends = hvd.add_process_set([2, 0])
            assert (ends.size(), ends.included()) == (2, rank != 1)
            if rank == 1:
                with pytest.raises(ArgumentValueError, match="rank 1 does not belong to"):
                    hvd.allreduce(np.ones(1), process_set=ends)
                assert hvd.remove_process_set(ends)
                return None
            with pytest.raises(ArgumentValueError, match=r"one of \[0, 2\], got 1"):
                hvd.broadcast(np.ones(1), 1, process_set=ends)
            found = (
                ends.rank(),
                hvd.allreduce(np.array([rank]), op=hvd.Sum, process_set=ends).item(),
                hvd.broadcast(np.array([rank]), 2, process_set=ends).item(),
                hvd.broadcast_object({"rank": rank}, 2, process_set=ends),
            )
            assert hvd.remove_process_set(ends)
            with pytest.raises(ArgumentValueError, match="is not known here"):
                hvd.barrier(ends)
            return found

        assert values(three(run)) == [(0, 2, 2, {"rank": 2}), None, (1, 2, 2, {"rank": 2})]


def test_the_same_ranks_have_one_process_set_at_a_time(three: OnAll) -> None:
    def run(rank: int) -> Any:
        found = hvd.add_process_set([0, 1])
        with pytest.raises(ArgumentValueError, match=r"the ranks \[0, 1\] already"):
            hvd.add_process_set([1, 0])
        assert hvd.remove_process_set(found)
        assert not hvd.remove_process_set(found)
        return hvd.remove_process_set(hvd.global_process_set)

    assert values(three(run)) == [False] * 3


def test_ranks_that_add_different_process_sets_are_both_named() -> None:
    with ranks_of(2) as two:
        for error in two(lambda rank: hvd.add_process_set([rank])):
            assert isinstance(error, hvd.HorovodInternalError)
            assert "[0]" in str(error)
            assert "[1]" in str(error)


@pytest.mark.parametrize("ranks", [[], [0, 3], [-1, 0], [1, 1]])
def test_ranks_that_do_not_exist_make_no_process_set(three: OnAll, ranks: list[int]) -> None:
    for error in three(lambda _: hvd.add_process_set(ranks)):
        assert isinstance(error, ArgumentValueError)
        assert "different ranks from 0 to 2" in str(error)


# -- objects -----------------------------------------------------------------------------------


def test_objects_arrive_as_they_were(three: OnAll) -> None:
    def run(rank: int) -> Any:
        state = {"step": 7, "names": ("a", b"b"), 3: {1, 2}, "w": np.arange(3)}
        found = hvd.broadcast_object(state if rank == 1 else None, root_rank=1)
        return found.pop("w").tolist(), found, hvd.allgather_object([rank] * rank)

    wanted = [0, 1, 2], {"step": 7, "names": ("a", b"b"), 3: {1, 2}}, [[], [1], [2, 2]]
    assert values(three(run)) == [wanted] * 3


def test_an_object_that_cannot_be_sent_is_an_error_on_all_ranks(three: OnAll) -> None:
    for call in (
        lambda rank: hvd.broadcast_object({"f": open} if rank == 1 else 1, 1),
        lambda rank: hvd.allgather_object(open if rank == 1 else 1),
    ):
        first, own, third = three(call)
        assert isinstance(own, ArgumentTypeError)
        for error in (first, third):
            assert isinstance(error, hvd.HorovodInternalError)
            assert "rank 1 cannot send its object" in str(error)
            assert "builtin_function_or_method" in str(error)


def test_ranks_that_name_different_roots_of_an_object_all_get_an_error(three: OnAll) -> None:
    for error in three(lambda rank: hvd.broadcast_object(rank, min(rank, 1))):
        assert isinstance(error, hvd.HorovodInternalError)
        assert "[0, 1] have sent" in str(error)


# -- arguments, and one rank ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: hvd.allreduce(1.0, op=hvd.Adasum), NotSupportedError, "Adasum is not offered"),
        (lambda: hvd.allreduce(1.0, average=True, op=hvd.Sum), ArgumentValueError, "not both"),
        (lambda: hvd.allreduce(1.0, op="sum"), ArgumentTypeError, "op must be one of"),
        (lambda: hvd.allreduce(["a"]), ArgumentValueError, "dtype <U1 cannot be sent"),
        (lambda: hvd.allreduce_([1.0]), ArgumentTypeError, "needs a NumPy array, got list"),
        (lambda: hvd.allgather(1.0), ArgumentValueError, "at least one dimension"),
        (lambda: hvd.broadcast(1.0, 3), ArgumentValueError, "got 3"),
        (lambda: hvd.alltoall(np.ones(4)), ArgumentValueError, "share equally, got 4"),
        (lambda: hvd.alltoall(np.ones(4), [1, 2, 3]), ArgumentValueError, "at most 4 rows"),
        (lambda: hvd.alltoall(np.ones(3), [1.0] * 3), ArgumentValueError, "whole numbers"),
        (lambda: hvd.synchronize(3), ArgumentTypeError, "takes the handle"),
        (lambda: hvd.ProcessSet(5), ArgumentTypeError, "takes a list of ranks, got 5"),
    ],
)
def test_what_is_wrong_is_an_error_before_anything_is_sent(
    three: OnAll, call: Any, error: type[Exception], words: str
) -> None:
    def run(rank: int) -> Any:
        if rank == 0:
            with pytest.raises(error, match=words):
                call()
        return hvd.allreduce(1.0, op=hvd.Sum).item()

    assert values(three(run)) == [3.0] * 3


def test_a_process_alone_needs_no_servers(tmp_path: Path) -> None:
    def run(rank: int) -> Any:
        own = np.arange(3)
        hvd.barrier()
        assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
        assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
        assert hvd.alltoall(own, [2])[0].tolist() == [0, 1]
        assert hvd.reducescatter(own).tolist() == [0, 1, 2]
        assert hvd.allgather_object("x") == ["x"]
        assert hvd.broadcast_object("x") == "x"
        assert hvd.join() == 0
        return hvd.allreduce(own, op=hvd.Sum, postscale_factor=2.0).tolist()

    with sessions([HorovodSession()]) as alone:
        assert values(alone(run)) == [[0, 2, 4]]


def test_compression_sends_floats_as_halves(three: OnAll) -> None:
    own = np.array([1.0, 2049.0], np.float32)  # 2049 is no half
    run = lambda rank: hvd.allreduce(own, compression=hvd.Compression.fp16)  # noqa: E731
    for found in values(three(run)):
        assert found.dtype == np.float32
        assert found.tolist() == [1.0, 2048.0]
    assert hvd.Compression.fp16.compress(np.array([1]))[0].dtype == np.int64


def test_the_timeline_of_rank_0_has_its_calls(three: OnAll, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"

    def run(rank: int) -> Any:
        hvd.start_timeline(path)
        hvd.allreduce(1.0, name="loss")
        hvd.allgather([1.0])
        hvd.stop_timeline()
        hvd.allreduce(1.0, name="later")

    values(three(run))
    events = json.loads(path.read_text())
    assert [(each["name"], each["cat"]) for each in events] == [
        ("loss", "allreduce"),
        ("(no name)", "allgather"),
    ]
    assert all(each["dur"] >= 0 for each in events)


def test_calls_before_init_say_so() -> None:
    assert not hvd.is_initialized()
    with pytest.raises(UsageError, match=r"call hvd.init\(\) first"):
        hvd.allreduce(1.0)


def test_ranks_are_counted_on_each_machine() -> None:
    found = HorovodSession()
    found._machine_of_rank = ["a", "b", "a", "b", "a"]
    found.machines, found.rank, found.size = ["a", "b"], 3, 5
    found.local_ranks = [1, 3]

    def run(_: int) -> Any:
        return hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.is_homogeneous()

    with sessions([found]) as one:
        assert values(one(run)) == [(1, 2, 1, False)]
        found.rank, found.local_ranks = 4, [0, 2, 4]
        assert values(one(lambda _: (hvd.cross_rank(), hvd.cross_size()))) == [(0, 1)]


def test_ranks_that_wait_for_calls_of_different_names_are_told_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "others_may_act", lambda waiting: False)  # the test's own threads
    with ranks_of(2, stall_report_s=0.05) as on_all:
        run = lambda rank: hvd.allreduce(np.ones(2), name=f"gradient {rank}")  # noqa: E731
        for error in on_all(run):
            assert isinstance(error, hvd.HorovodInternalError)
            assert isinstance(error.__cause__, DeadlockError)
            assert "gradient 0" in str(error)
            assert "gradient 1" in str(error)
