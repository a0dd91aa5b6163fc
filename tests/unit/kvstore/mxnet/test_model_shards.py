"""How a batch is cut over devices, and how samples are dealt out among workers."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.mxnet.fit.network import (
    describe_data,
    initial_params,
    is_synchronous,
    plan_epochs,
    rescale_grad,
)
from kvstore.mxnet.model import shard, split_input_slice
from pslite.errors import UsageError


def sizes_of(slices: list[slice]) -> list[int]:
    return [part.stop - part.start for part in slices]


# The first four are values of the original's own rule.
@pytest.mark.parametrize(
    ("batch_size", "loads", "sizes"),
    [
        (10, [1, 1, 1], [3, 3, 4]),
        (5, [1, 1], [2, 3]),
        (8, [3, 1], [6, 2]),
        (7, [1], [7]),
        (3, [1, 1], [2, 1]),
        (6, [0.5, 0.25, 0.25], [3, 2, 1]),
    ],
)
def test_a_batch_is_cut_in_proportion_and_the_last_device_takes_what_is_missing(
    batch_size: int, loads: list[float], sizes: list[int]
) -> None:
    slices = split_input_slice(batch_size, loads)
    assert sizes_of(slices) == sizes
    covered = np.concatenate([np.arange(batch_size)[part] for part in slices])
    assert covered.tolist() == list(range(batch_size))


@pytest.mark.parametrize(("batch_size", "loads"), [(3, [1] * 4), (6, [1] * 4), (8, [1, 1e-9])])
def test_a_device_without_samples_is_an_error(batch_size: int, loads: list[float]) -> None:
    with pytest.raises(UsageError, match="leaves device"):
        split_input_slice(batch_size, loads)


@pytest.mark.parametrize("loads", [[], [1, 0], [-1, 2], [float("nan")], [float("inf"), 1]])
def test_work_loads_must_be_positive_numbers(loads: list[float]) -> None:
    with pytest.raises(UsageError, match="positive"):
        split_input_slice(8, loads)


@pytest.mark.parametrize(("samples", "workers"), [(12, 3), (13, 3), (14, 3), (1, 4), (8, 1)])
def test_shards_cover_everything_and_overlap_only_where_they_are_filled_up(
    samples: int, workers: int
) -> None:
    shards = [shard(samples, rank, workers, seed=5) for rank in range(workers)]
    per_worker = -(-samples // workers)
    assert {part.size for part in shards} == {per_worker}
    visited = np.bincount(np.concatenate(shards).ravel(), minlength=samples)
    assert visited.min() >= 1
    assert visited.max() - visited.min() <= 1
    assert visited.sum() == per_worker * workers


def test_every_worker_has_the_same_number_of_full_batches() -> None:
    shards = [shard(103, rank, 4, batch_size=8) for rank in range(4)]
    assert [part.shape for part in shards] == [(4, 8)] * 4


def test_a_step_of_all_workers_visits_what_a_step_of_one_large_worker_visits() -> None:
    large = shard(50, batch_size=12, seed=3, epoch=2)
    small = [shard(50, rank, 3, batch_size=4, seed=3, epoch=2) for rank in range(3)]
    assert np.array_equal(np.concatenate(small, axis=1), large)


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    first = shard(40, seed=1, epoch=1)
    assert np.array_equal(first, shard(40, seed=1, epoch=1))
    assert not np.array_equal(first, shard(40, seed=1, epoch=2))
    assert not np.array_equal(first, shard(40, seed=2, epoch=1))
    assert shard(5, shuffle=False).ravel().tolist() == [0, 1, 2, 3, 4]


def test_more_batches_than_samples_begin_the_order_again() -> None:
    assert shard(3, batch_size=2, num_batches=4, shuffle=False).tolist() == [
        [0, 1],
        [2, 0],
        [1, 2],
        [0, 1],
    ]


@pytest.mark.parametrize(("samples", "rank", "workers"), [(0, 0, 1), (5, 2, 2), (5, -1, 2)])
def test_a_shard_of_nothing_or_of_nobody_is_an_error(samples: int, rank: int, workers: int) -> None:
    with pytest.raises(UsageError, match="cannot shard"):
        shard(samples, rank, workers)


def described(*sizes: int, batch: int = 4, same: bool = False) -> np.ndarray:
    rows = []
    for index, size in enumerate(sizes):
        x = np.arange(size, dtype=np.float32) + (0 if same else index)
        rows.append(describe_data(x, np.zeros(size, np.int64), batch))
    return np.stack(rows)


def test_workers_with_the_full_data_each_visit_their_shard() -> None:
    plan, warning = plan_epochs(described(9, 9, same=True), rank=1, sharded_here=True)
    assert (plan, warning) == ((1, 2, 2), None)


def test_workers_that_sharded_already_are_told_so_instead_of_waiting_for_each_other() -> None:
    with pytest.raises(UsageError, match=r"\[9, 8\].*shard=False"):
        plan_epochs(described(9, 8), rank=0, sharded_here=True)
    with pytest.raises(UsageError, match=r"checksum.*shard=False"):
        plan_epochs(described(9, 9), rank=0, sharded_here=True)


def test_workers_with_other_batch_sizes_are_told_so() -> None:
    rows = np.concatenate([described(9, same=True, batch=3), described(9, same=True, batch=4)])
    with pytest.raises(UsageError, match=r"batch sizes.*\[3, 4\]"):
        plan_epochs(rows, rank=0, sharded_here=True)


def test_workers_with_their_own_data_all_run_as_many_batches_as_the_longest() -> None:
    plans = [plan_epochs(described(9, 17, 4), rank, sharded_here=False) for rank in range(3)]
    assert [plan for plan, _ in plans] == [(0, 1, 5)] * 3
    assert {warning for _, warning in plans} == {None}


def test_own_data_that_is_the_same_everywhere_gives_a_warning() -> None:
    _, warning = plan_epochs(described(9, 9, same=True), rank=0, sharded_here=False)
    assert warning is not None
    assert "same samples" in warning


@pytest.mark.parametrize(
    ("store_type", "synchronous", "factor"),
    [
        ("local", False, 1 / 32),
        ("device", False, 1 / 32),
        ("dist", True, 1 / 128),
        ("dist_sync", True, 1 / 128),
        ("dist_device_sync", True, 1 / 128),
        ("dist_async", False, 1 / 32),
        ("dist_device_async", False, 1 / 32),
    ],
)
def test_the_mean_is_over_the_samples_of_one_update(
    store_type: str, synchronous: bool, factor: float
) -> None:
    assert is_synchronous(store_type) is synchronous
    assert rescale_grad(store_type, 32, 4) == factor


class TwoParameters:
    """A network of which only the first values are asked."""

    def init_params(
        self, input_shape: tuple[int, ...], rng: np.random.Generator
    ) -> dict[str, np.ndarray]:
        return {"a": rng.random(input_shape, dtype=np.float32), "b": np.zeros(2, np.float32)}


def test_first_values_come_from_the_caller_then_the_initializer() -> None:
    mine = np.ones(2)
    params = initial_params(
        TwoParameters(), (3,), 0, lambda name, shape, rng: np.full(shape, 7.0), {"b": mine}
    )
    assert {name: value.tolist() for name, value in params.items()} == {
        "a": [7.0, 7.0, 7.0],
        "b": [1.0, 1.0],
    }
    assert {value.dtype for value in params.values()} == {np.dtype(np.float32)}
    mine[:] = 0
    assert params["b"].tolist() == [1.0, 1.0]


def test_given_values_that_do_not_fit_the_network_are_an_error() -> None:
    with pytest.raises(UsageError, match=r"has c, which .* a, b"):
        initial_params(TwoParameters(), (3,), 0, None, {"c": np.zeros(2)})
    with pytest.raises(UsageError, match=r"for a must have .* \(3,\), got \(2,\)"):
        initial_params(TwoParameters(), (3,), 0, None, {"a": np.zeros(2)})
