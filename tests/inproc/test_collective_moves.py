"""Collective calls that give each rank something else, over in-process clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from collective_groups import (
    SMALL_CHUNKS,
    Array,
    cluster_of,
    errors,
    groups,
    opened,
    results,
    sit_together,
)

from pslite import Communicator, Future
from pslite.collective.sums import DTYPES
from pslite.errors import MismatchError, UsageError

NUMPY_DTYPES = [name for name in DTYPES if name != "bfloat16"]
LENGTHS = [[3, 3, 3], [0, 5, 1], [1000, 0, 70], [0, 0, 0]]
"""Of the arrays of three ranks; chunks have 256 bytes, or 1024 where sizes differ."""


@pytest.fixture(scope="module", params=["servers", "servers beside two workers", "rings"])
def three(request: pytest.FixtureRequest) -> Iterator[list[Communicator]]:
    """A group of three workers on two servers, for the tests that break nothing."""
    with cluster_of(3, 2, **SMALL_CHUNKS, shm=request.param == "rings") as cluster:
        if request.param == "servers beside two workers":
            sit_together(cluster)
        yield opened(groups(cluster, rings=request.param == "rings"))


def filled(source: int, to: int, length: int, dtype: str = "int32") -> Array:
    """What a rank sends to another: all differ."""
    return (np.arange(length * 2).reshape(length, 2) + 100 * source + 10 * to).astype(dtype)


def same(found: Array, wanted: Array) -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("root", [0, 1, 2])
def test_only_the_root_gets_what_is_reduced(three: list[Communicator], root: int) -> None:
    arrays = [np.arange(200.0) * (rank + 1) for rank in range(3)]
    out = np.empty(200)
    futures = [
        group.reduce(array, root, "sum", out=out if rank == root else None)
        for rank, (group, array) in enumerate(zip(three, arrays, strict=True))
    ]
    found = results(futures)
    assert [found[rank] for rank in range(3) if rank != root] == [None, None]
    assert found[root] is out
    same(out, np.arange(200.0) * 6)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_all_ranks_get_the_arrays_of_all(three: list[Communicator], lengths: list[int]) -> None:
    sent = [filled(rank, 0, length) for rank, length in enumerate(lengths)]
    futures = [group.all_gather(array) for group, array in zip(three, sent, strict=True)]
    for found in results(futures):
        for array, wanted in zip(found, sent, strict=True):
            same(array, wanted)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_arrays_of_every_dtype_travel(three: list[Communicator], dtype: str) -> None:
    sent = [[filled(rank, to, 5, dtype) for to in range(3)] for rank in range(3)]
    gathered = results([g.all_gather(row[0]) for g, row in zip(three, sent, strict=True)])
    swapped = results([g.all_to_all(row) for g, row in zip(three, sent, strict=True)])
    for rank in range(3):
        for source in range(3):
            same(gathered[rank][source], sent[source][0])
            same(swapped[rank][source], sent[source][rank])


def test_arrays_without_dimensions_are_gathered(three: list[Communicator]) -> None:
    found = results([g.all_gather(np.array(r)) for r, g in enumerate(three)])
    assert found == [[0, 1, 2]] * 3


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("root", [0, 2])
def test_the_root_gathers_and_scatters(
    three: list[Communicator], lengths: list[int], root: int
) -> None:
    sent = [filled(rank, 0, length) for rank, length in enumerate(lengths)]
    gathered = results([g.gather(a, root) for g, a in zip(three, sent, strict=True)])
    assert [gathered[rank] for rank in range(3) if rank != root] == [None, None]
    for array, wanted in zip(gathered[root], sent, strict=True):
        same(array, wanted)
    futures = [g.scatter(sent if r == root else None, root) for r, g in enumerate(three)]
    for array, wanted in zip(results(futures), sent, strict=True):
        same(array, wanted)


def test_what_is_scattered_may_be_written_into_an_array(three: list[Communicator]) -> None:
    sent = [filled(0, to, 400) for to in range(3)]
    outs = [np.empty((400, 2), np.int32) for _ in range(3)]
    futures = [g.scatter(sent if r == 1 else None, 1, out=outs[r]) for r, g in enumerate(three)]
    for array, out, wanted in zip(results(futures), outs, sent, strict=True):
        assert array is out
        same(out, wanted)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_each_rank_gets_its_part_of_the_sum(three: list[Communicator], lengths: list[int]) -> None:
    sent = [[filled(r, to, n, "float32") for to, n in enumerate(lengths)] for r in range(3)]
    found = results([g.reduce_scatter(row, "average") for g, row in zip(three, sent, strict=True)])
    for rank, array in enumerate(found):
        total = sent[0][rank] + sent[1][rank] + sent[2][rank]
        same(array, total / np.float32(3))


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_each_rank_sends_something_else_to_each(
    three: list[Communicator], lengths: list[int], shift: int
) -> None:
    sent = [[filled(r, to, lengths[(r * shift + to) % 3]) for to in range(3)] for r in range(3)]
    found = results([g.all_to_all(row) for g, row in zip(three, sent, strict=True)])
    for rank in range(3):
        for source in range(3):
            same(found[rank][source], sent[source][rank])


def test_bfloat16_keeps_its_dtype() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with cluster_of(2, 1) as cluster:
        pair = groups(cluster)
        array = np.array([1.5, 2.5], ml_dtypes.bfloat16)
        for found in results([group.all_gather(array) for group in pair]):
            for each in found:
                same(each, array)
        for total in results([group.all_reduce(array) for group in pair]):
            same(total, array + array)


def zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


DIFFERENT: list[tuple[Callable[[Communicator], Future[Any]], Callable[[Communicator], Future[Any]]]]
DIFFERENT = [
    (lambda g: g.all_gather(zeros(3, 2)), lambda g: g.all_gather(zeros(3, 3))),
    (lambda g: g.all_gather(zeros(3, 2)), lambda g: g.all_gather(np.zeros((3, 2)))),
    (lambda g: g.all_gather(zeros(3, 2)), lambda g: g.gather(zeros(3, 2), 0)),
    (lambda g: g.reduce(zeros(3), 0), lambda g: g.reduce(zeros(3), 1)),
    (
        lambda g: g.reduce_scatter([zeros(3)] * 3),
        lambda g: g.reduce_scatter([zeros(3), zeros(3), zeros(4)]),
    ),
    (lambda g: g.all_to_all([zeros(3)] * 3), lambda g: g.all_to_all([np.zeros(3)] * 3)),
    (lambda g: g.all_gather(zeros(900, 2)), lambda g: g.barrier()),
]


@pytest.mark.parametrize(("usual", "odd"), DIFFERENT)
def test_different_calls_end_on_all_ranks(
    three: list[Communicator],
    usual: Callable[[Communicator], Future[Any]],
    odd: Callable[[Communicator], Future[Any]],
) -> None:
    futures = [usual(three[0]), odd(three[1]), usual(three[2])]
    assert [type(error) for error in errors(futures)] == [MismatchError] * 3
    assert results([g.all_reduce(np.ones(1)) for g in three]) == [3.0] * 3


def test_an_array_to_fill_that_does_not_fit_ends_the_call_on_all_ranks() -> None:
    with cluster_of(2, 2, **SMALL_CHUNKS, shm=False) as cluster:
        pair = groups(cluster)
        sent = [np.zeros(900), np.zeros(900)]
        futures = [pair[0].scatter(sent, 0), pair[1].scatter(None, 0, out=np.zeros(5))]
        for error in errors(futures):
            assert isinstance(error, UsageError)
            assert "expected out of shape (900,) and dtype float64, as was sent" in str(error)


def test_what_cannot_be_called_is_refused_at_the_caller(three: list[Communicator]) -> None:
    group, array = three[0], np.zeros(3)
    refused: list[tuple[str, Callable[[], object]]] = [
        ("expected 3 arrays of one dtype", lambda: group.all_to_all([array] * 2)),
        ("got 3 of float32, float64", lambda: group.all_to_all([array, array, zeros(3)])),
        ("got 0 of none", lambda: group.reduce_scatter([])),
        ("takes arrays on rank 0", lambda: group.scatter(None, 0)),
        ("takes arrays on rank 1", lambda: group.scatter([array] * 3, 1)),
        ("C-contiguous", lambda: group.all_gather(np.zeros((3, 3)).T)),
        ("out of shape", lambda: group.reduce(array, 0, out=np.zeros(4))),
        ("unknown op", lambda: group.reduce_scatter([array] * 3, "mean")),
    ]
    for text, call in refused:
        with pytest.raises(UsageError, match=text):
            call()
    assert results([g.all_reduce(np.ones(1)) for g in three]) == [3.0] * 3
