"""Growing tables of the stores in one process, as their users meet them."""

from __future__ import annotations

import dataclasses
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvstore as mx
from kvstore import KVStore, Table, create, init, optimizer
from kvstore.arrays.cpu.sums import Flat
from kvstore.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DuplicateKeyError,
    NotSupportedError,
    UnknownOptimizerError,
    ValueMismatchError,
)
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.parameters import MODULES, find
from kvstore.sparse.sums import Contribution
from kvstore.sparse.tables.ids import shares_of
from kvstore.sparse.tables.settings import OVERHEAD_BYTES, checked_settings
from kvstore.sparse.tables.shard import TableShare
from pslite.errors import ClosedError

SGD = optimizer.create("sgd", learning_rate=1.0)
#: Of this package, which tests may add to; those that need whole keys are no good for tables.
BY_ELEMENT = sorted(
    cls.name
    for cls in (find(name.lower()) for name in MODULES)
    if cls is not None and cls.scope == "element" and cls.name != "test"
)
ONES = np.ones((3, 2), np.float32)


@pytest.fixture(params=["local", "device"])
def kv(request: pytest.FixtureRequest) -> Iterator[KVStore]:
    with create(request.param) as store:
        yield store


@pytest.fixture
def table(kv: KVStore) -> Table:
    return kv.create_table("user", 2, init.Constant(0.5), SGD, capacity=100)


# -- what is there ------------------------------------------------------------------------


def test_a_row_is_made_when_it_is_first_asked_for(table: Table) -> None:
    assert (table.name, table.dim, table.dtype, table.size) == ("user", 2, np.float32, 0)
    ids = np.array([[2**64 - 1, 7], [7, 0]], np.uint64)
    assert table.pull(ids).tolist() == np.full((2, 2, 2), 0.5).tolist()
    assert table.ids().tolist() == [-1, 0, 7]
    assert len(table) == 3
    assert repr(table) == "<table 'user': 3 rows of 2 float32>"


def test_gradients_of_one_id_are_added_before_the_update(table: Table) -> None:
    table.push([5, -1, 5], np.array([[1, 2], [10, 20], [3, 4]], np.float32))
    assert table.pull([5, 2**64 - 1]).tolist() == [[-3.5, -5.5], [-9.5, -19.5]]
    table.push(np.array([[5]]), np.array([[[0.5, 0.5]]], np.float32))
    assert table.pull(5).tolist() == [-4.0, -6.0]


def test_a_table_without_an_optimizer_holds_what_is_pushed(kv: KVStore) -> None:
    table = kv.create_table("features", 2, init=0)
    table.push([1, 2, 1], np.array([[1, 1], [2, 2], [3, 3]], np.float32))
    table.push([2], np.array([[7, 7]], np.float32))
    assert table.pull([1, 2, 3]).tolist() == [[4, 4], [7, 7], [0, 0]]
    assert table.optimizer is None


def test_no_ids_at_all_do_nothing_but_count_a_push(table: Table) -> None:
    assert table.pull([]).shape == (0, 2)
    assert table.pull(np.empty((3, 0), np.int64)).shape == (3, 0, 2)
    table.push([], np.empty((0, 2), np.float32))
    assert (table.size, table.statistics().pushes) == (0, 1)


def test_a_pull_that_does_not_touch_leaves_no_trace(table: Table) -> None:
    table.pull([1])
    before = table.statistics()
    assert table.pull([1, 2], touch=False).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert table.statistics() == before


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", BY_ELEMENT)
def test_rows_are_updated_as_those_of_a_key_are(name: str, dtype: str) -> None:
    kind = np.dtype(dtype) if dtype != "bfloat16" else pytest.importorskip("ml_dtypes").bfloat16
    random = np.random.default_rng(1)
    chosen = optimizer.create(name)
    with create("local") as kv:
        kv.set_optimizer(chosen.replace(lazy_update=True))
        table = kv.create_table("t", 3, init.Uniform(1.0), chosen, dtype=kind)
        start = table.pull(np.arange(20))
        kv.init("w", mx.RowSparseArray(np.arange(20), start, (20, 3)))
        for _ in range(4):
            ids = random.integers(0, 20, 9)
            gradients = random.standard_normal((9, 3)).astype(kind)
            table.push(ids, gradients)
            kv.push("w", mx.RowSparseArray(ids, gradients, (20, 3)))
        expected = kv.row_sparse_pull("w", row_ids=np.arange(20)).values
        found = table.pull(np.arange(20), touch=False)
    assert found.dtype == kind
    assert found.tobytes() == expected.tobytes() != start.tobytes()


# -- determinism --------------------------------------------------------------------------


def test_rows_begin_alike_in_any_order_and_in_any_number_of_shares() -> None:
    ids = np.random.default_rng(3).integers(-(2**63), 2**63 - 1, 500)
    with create("local") as kv:
        whole = kv.create_table("user", 5).pull(ids)
    settings = checked_settings(
        "user", 5, init="uniform", capacity=None, ttl=None, admit_after=1, dtype="f4", seed=0
    )
    for num_shares in (1, 2, 5):
        found = np.empty_like(whole)
        for number in range(num_shares):
            share = TableShare(settings, None, number, num_shares)
            mine = np.flatnonzero(shares_of(ids, num_shares) == number)[::-1]
            rows = np.empty((len(mine), 5), np.float32)
            share.pull(ids[mine], rows)
            found[mine] = rows
        np.testing.assert_array_equal(found, whole)


def test_which_number_of_shares_there_is_changes_no_row_that_is_trained() -> None:
    random = np.random.default_rng(4)
    settings = checked_settings(
        "user", 3, init="normal", capacity=None, ttl=5, admit_after=2, dtype="f4", seed=1
    )
    tables = [
        [TableShare(settings, optimizer.create("adam"), n, number) for n in range(number)]
        for number in (1, 2, 5)
    ]
    for _ in range(20):
        ids = random.integers(0, 60, 40)
        gradients = random.standard_normal((40, 3)).astype(np.float32)
        pulled = []
        for shares in tables:
            out = np.empty((40, 3), np.float32)
            for share in shares:
                mine = shares_of(ids, len(shares)) == share.share
                rows = np.empty((np.count_nonzero(mine), 3), np.float32)
                share.pull(ids[mine], rows)
                out[mine] = rows
                share.push([Contribution(ids[mine], gradients[mine])])
            pulled.append(out.tobytes())
        assert pulled[0] == pulled[1] == pulled[2]


def test_the_capacity_is_split_evenly_over_the_shares() -> None:
    settings = checked_settings(
        "user", 3, init=0, capacity=11, ttl=None, admit_after=1, dtype="f4", seed=0
    )
    assert [settings.capacity_of(share, 3) for share in range(3)] == [4, 4, 3]
    options = {"init": 0, "ttl": None, "admit_after": 1, "dtype": "f4", "seed": 0}
    with pytest.raises(ArgumentValueError, match=r"from 3 \(the number of servers\)"):
        checked_settings("user", 3, capacity=2, num_shares=3, **options)


# -- which rows stay ----------------------------------------------------------------------


def test_the_row_that_was_touched_longest_ago_makes_room(kv: KVStore) -> None:
    table = kv.create_table("t", 2, init=0, optimizer=SGD, capacity=3)
    table.pull([1, 2, 3])
    table.pull([1])
    table.push([2], ONES[:1])
    table.pull([4])
    assert table.ids().tolist() == [1, 2, 4]
    table.pull([5, 6, 1])
    assert table.ids().tolist() == [1, 5, 6]
    assert table.pull([2], touch=False).tolist() == [[0, 0]]
    seen = table.statistics()
    assert (seen.made, seen.evicted, seen.rows) == (6, 3, 3)


def test_a_call_with_more_ids_than_there_is_room_for_gives_rows_to_the_first(kv: KVStore) -> None:
    table = kv.create_table("t", 2, init=0.25, optimizer=SGD, capacity=2)
    table.push([1, 2, 3, 2], np.ones((4, 2), np.float32))
    assert table.ids().tolist() == [1, 2]
    assert table.pull([1, 2, 3]).tolist() == [[-0.75] * 2, [-1.75] * 2, [0.25] * 2]
    seen = table.statistics()
    assert (seen.dropped, seen.refused, seen.evicted) == (1, 2, 0)


def test_a_row_that_comes_back_begins_afresh_with_its_state(kv: KVStore) -> None:
    momentum = optimizer.create("sgd", learning_rate=1.0, momentum=0.5)
    table = kv.create_table("t", 2, init=0, optimizer=momentum, capacity=1)
    table.push([1], ONES[:1])
    table.push([1], ONES[:1])
    assert table.pull([1]).tolist() == [[-2.5, -2.5]]
    table.pull([2])
    table.push([1], ONES[:1])
    assert table.pull([1]).tolist() == [[-1, -1]]


def test_rows_that_no_push_or_pull_touched_for_long_go(kv: KVStore) -> None:
    table = kv.create_table("t", 2, init=0, optimizer=SGD, ttl=2)
    table.push([1, 2], ONES[:2])
    table.push([3], ONES[:1])
    table.push([1], ONES[:1])
    assert table.size == 3
    table.push([], ONES[:0])
    assert table.ids().tolist() == [1, 3]
    assert table.pull([2], touch=False).tolist() == [[0, 0]]
    assert table.statistics().expired == 1
    assert table.pull([2, 1]).tolist() == [[0, 0], [-2, -2]]


def test_a_push_to_a_row_that_went_for_its_age_begins_a_new_one(kv: KVStore) -> None:
    table = kv.create_table("t", 2, init=0, optimizer=SGD, ttl=2)
    for id_ in (1, 2, 2, 1):
        table.push([id_], ONES[:1])
    assert table.pull([1, 2]).tolist() == [[-1, -1], [-2, -2]]
    assert table.statistics().expired == 1


def test_an_id_gets_its_row_with_the_pull_that_admits_it(kv: KVStore) -> None:
    table = kv.create_table("t", 2, init=0.5, optimizer=SGD, admit_after=3)
    for size in (0, 0, 1):
        assert table.pull([9, 9, 9]).tolist() == [[0.5, 0.5]] * 3
        assert table.size == size
        table.push([9], ONES[:1])
    assert table.pull([9]).tolist() == [[-0.5, -0.5]]
    seen = table.statistics()
    assert (seen.dropped, seen.refused, seen.waiting, seen.hits) == (2, 4, 0, 1)


def test_an_id_that_is_admitted_and_finds_no_room_gets_its_row_with_the_next_pull(
    kv: KVStore,
) -> None:
    table = kv.create_table("t", 2, init=0, capacity=2, admit_after=2)
    for ids in ([10, 11], [10, 11], [3], [10, 11, 3]):
        table.pull(ids)
    assert table.ids().tolist() == [10, 11]
    assert table.statistics().waiting == 1
    table.pull([3])
    assert table.ids().tolist() == [3, 11]
    assert table.statistics().waiting == 0


def test_statistics_say_how_many_ids_had_a_row(table: Table) -> None:
    assert table.statistics().hit_rate == 0.0
    table.pull([1, 2])
    table.pull([1, 1, 3, 4])
    seen = table.statistics()
    assert (seen.pulled, seen.hits, seen.hit_rate) == (6, 2, 2 / 6)
    assert (seen.capacity, seen.rows, seen.made) == (100, 4, 4)


# -- memory -------------------------------------------------------------------------------


def test_a_hundred_thousand_ids_leave_a_small_table_within_its_limit(kv: KVStore) -> None:
    table = kv.create_table(
        "t", 16, optimizer=optimizer.create("adam"), capacity=10_000, ttl=30, admit_after=1
    )
    random = np.random.default_rng(5)
    rows = np.ones((1000, 16), np.float32)
    limit = table.statistics().limit_bytes
    assert limit == 10_000 * (16 * 4 * 3 + OVERHEAD_BYTES)
    table.push(np.arange(1000), rows)  # scratch memory of the update
    tracemalloc.start()
    try:
        for _ in range(100):
            ids = random.integers(-(2**63), 2**63 - 1, 1000)
            table.pull(ids)
            table.push(ids, rows)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    seen = table.statistics()
    assert seen.rows == 10_000
    assert seen.nbytes <= limit
    # What a call needs for itself: ten times its rows, and 10 bytes a row while some are evicted;
    # and half of an array that is copied to its last size, of which half has no memory yet.
    assert peak <= limit + 10 * rows.nbytes + 10 * 10_000 + 5_000 * 16 * 4


def test_ids_that_come_once_take_no_more_than_what_waiting_may(kv: KVStore) -> None:
    table = kv.create_table("t", 64, capacity=1000, admit_after=2)
    for start in range(0, 50_000, 500):
        table.pull(np.arange(start, start + 500))
    seen = table.statistics()
    assert (seen.rows, seen.waiting) == (0, 1000)
    assert seen.limit_bytes == 1000 * (64 * 4 + OVERHEAD_BYTES + 20)
    assert seen.nbytes <= seen.limit_bytes


@pytest.mark.parametrize(("capacity", "admit_after"), [(2_000_000_000, 1), (20_000_000, 2)])
def test_a_great_capacity_costs_nothing_before_it_is_used(
    kv: KVStore, capacity: int, admit_after: int
) -> None:
    table = kv.create_table("t", 64, capacity=capacity, admit_after=admit_after)
    table.pull([1])
    assert table.statistics().nbytes < 1_000_000


@pytest.mark.parametrize("capacity", [None, 1, 1000])
def test_wide_rows_take_memory_as_they_come(kv: KVStore, capacity: int | None) -> None:
    table = kv.create_table("t", 1_000_000, init=0, capacity=capacity)
    assert table.statistics().nbytes < 5_000_000
    for id_ in range(5):
        table.pull([id_])
    assert table.size == min(5, capacity or 5)
    assert table.statistics().nbytes < 9 * 4_000_000


# -- arrays of other libraries ------------------------------------------------------------


def test_ids_gradients_and_outs_may_be_tensors(kv: KVStore) -> None:
    torch = pytest.importorskip("torch")
    table = kv.create_table("t", 2, init=0, optimizer=SGD)
    ids = torch.tensor([[3, 4]])
    table.push(ids, torch.ones(1, 2, 2))
    out = torch.zeros(1, 2, 2, dtype=torch.float64)
    assert table.pull(ids, out=out) is None
    assert out.tolist() == [[[-1, -1], [-1, -1]]]
    array = mx.nd.zeros((2, 2))
    table.pull([3, 5], out=array)
    assert array.asnumpy().tolist() == [[-1, -1], [0, 0]]


def test_out_may_have_strides_and_another_dtype(table: Table) -> None:
    out = np.zeros((2, 4), np.float64)
    assert table.pull([1, 2], out=out[:, ::2]) is None
    assert out.tolist() == [[0.5, 0, 0.5, 0]] * 2
    plain = np.zeros((2, 2), np.float32)
    table.pull([1, 2], out=plain)
    assert plain.tolist() == [[0.5, 0.5]] * 2
    with pytest.raises(
        ValueMismatchError, match="has dtype float32, and the array to fill has int32"
    ):
        table.pull([1, 2], out=np.zeros((2, 2), np.int32))


# -- optimizers ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Remembering(Optimizer):
    """Sets a weight back to what it was at first, less the gradient."""

    def create_state(self, weight: Flat) -> tuple[Flat, ...]:
        return (weight.astype(np.float32),)

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        np.subtract(state[0], grad, out=weight)


def test_states_may_depend_on_the_first_values_of_each_row(kv: KVStore) -> None:
    table = kv.create_table("t", 2, optimizer=Remembering(), capacity=2)
    for ids in ([1, 2], [3, 1], [2, 3]):
        first = table.pull(ids)
        table.push(ids, ONES[:2])
        table.push(ids, ONES[:2])
        np.testing.assert_array_equal(table.pull(ids), first - 1)
        table.pull([8, 9])  # both go


def test_another_optimizer_keeps_states_of_its_own_class_alone(kv: KVStore) -> None:
    momentum = optimizer.create("sgd", learning_rate=1.0, momentum=0.5)
    table = kv.create_table("t", 2, init=0, optimizer=momentum)
    table.push([1], ONES[:1])
    table.set_optimizer(momentum.replace(lr=2.0))
    table.push([1], ONES[:1])
    assert table.pull([1])[0, 0] == -1 - (0.5 + 2)
    table.set_optimizer("adagrad")
    assert table.optimizer == optimizer.create("adagrad")
    table.push([1], ONES[:1])
    fresh = kv.create_table("fresh", 2, init=-3.5, optimizer="adagrad")
    fresh.push([1], ONES[:1])
    assert table.pull([1]).tolist() == fresh.pull([1]).tolist()


def test_rows_that_are_not_pushed_stay_whatever_the_optimizer_keeps(kv: KVStore) -> None:
    table = kv.create_table("t", 2, init=1, optimizer=optimizer.create("adam", wd=0.1))
    table.push([1, 2], ONES[:2])
    before = table.pull([1])
    table.push([2], ONES[:1])
    assert table.pull([1]).tolist() == before.tolist()


# -- misuse -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"name": 5}, ArgumentTypeError, "name of a table"),
        ({"name": ""}, ArgumentTypeError, "non-empty"),
        ({"name": "\ud800"}, ArgumentValueError, "name of a table must be valid"),
        ({"dim": 2**24 + 1}, ArgumentValueError, "dim of a table must be at most 16777216"),
        ({"dim": 2**40}, ArgumentValueError, "dim of a table must be at most 16777216"),
        ({"dtype": None}, ArgumentTypeError, "float dtype, got None"),
        ({"dtype": np.longdouble}, ArgumentTypeError, "float16, bfloat16, float32 or float64, got"),
        (
            {"admit_after": 2**31},
            ArgumentValueError,
            "admit_after of a table must be at most 2147483647",
        ),
        ({"init": float("nan")}, ArgumentValueError, "not finite in the table's dtype float32"),
        ({"init": float("inf")}, ArgumentValueError, "are not finite"),
        ({"init": 10**400}, ArgumentValueError, "are not finite"),
        ({"init": -1e39}, ArgumentValueError, "are not finite"),
        ({"init": 65520.0, "dtype": "f2"}, ArgumentValueError, "dtype float16"),
        ({"init": init.Uniform(1e5), "dtype": "f2"}, ArgumentValueError, "Uniform.scale=100000"),
        ({"init": init.Uniform(1e39), "dtype": "f8"}, ArgumentValueError, "are not finite"),
        ({"init": init.Normal(12000), "dtype": "f2"}, ArgumentValueError, "are not finite"),
        ({"init": init.Normal(float("nan"))}, ArgumentValueError, "are not finite"),
        ({"init": init.Uniform("1")}, ArgumentTypeError, "must be a number"),
        ({"dim": 0}, ArgumentValueError, "dim of a table must be at least 1, got 0"),
        ({"dim": 2.0}, ArgumentTypeError, "dim of a table must be an int, got 2.0"),
        ({"dim": True}, ArgumentTypeError, "dim of a table must be an int"),
        ({"capacity": 0}, ArgumentValueError, "capacity of a table must be at least 1, got 0"),
        ({"capacity": -5}, ArgumentValueError, "capacity"),
        ({"capacity": 2**31}, ArgumentValueError, "2147483647"),
        ({"capacity": 1.5}, ArgumentTypeError, "capacity"),
        ({"ttl": 0}, ArgumentValueError, "ttl of a table must be at least 1"),
        ({"ttl": "7d"}, ArgumentTypeError, "ttl"),
        ({"admit_after": 0}, ArgumentValueError, "admit_after"),
        ({"dtype": "int64"}, ArgumentTypeError, "float32 or float64, got int64"),
        ({"dtype": "nonsense"}, ArgumentTypeError, "float dtype"),
        ({"seed": 1.5}, ArgumentTypeError, "seed"),
        ({"init": "xavier"}, ArgumentValueError, "one by one"),
        ({"init": object()}, ArgumentTypeError, "init of a table"),
        ({"optimizer": 3}, ArgumentTypeError, "got int"),
        ({"optimizer": "nonsense"}, UnknownOptimizerError, "nonsense"),
        ({"optimizer": "lamb"}, NotSupportedError, "all rows at once"),
        ({"optimizer": optimizer.create("sgd", lazy_update=False)}, NotSupportedError, "lazy"),
    ],
)
def test_a_table_that_cannot_be_is_refused_and_not_there(
    kv: KVStore, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        kv.create_table(**{"name": "t", "dim": 2, **arguments})
    kv.create_table("t", 2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("chosen", "dtype"),
    [
        (65519.0, "f2"),
        (-3.4e38, "f4"),
        (1e300, "f8"),
        (2**70, "f4"),
        (init.Uniform(65000), "f2"),
        (init.Uniform(-3e38), "f8"),
        (init.Normal(10000.0), "f2"),
    ],
)
def test_first_values_may_go_to_the_ends_of_the_dtype(kv: KVStore, chosen: Any, dtype: str) -> None:
    table = kv.create_table("t", 50, chosen, dtype=dtype)
    assert np.isfinite(table.pull(np.arange(1000))).all()


@pytest.mark.parametrize(
    ("ids", "gradients", "error"),
    [
        (np.array([1.0, 2.0]), ONES[:2], ArgumentTypeError),
        ([1, 2.5], ONES[:2], ArgumentTypeError),
        ([1, 2**64], ONES[:2], ArgumentValueError),
        ([1, 2], ONES, ValueMismatchError),
        (np.array([[1, 2]]), ONES[:2], ValueMismatchError),
        ([1, 2], np.ones((2, 3), np.float32), ValueMismatchError),
        ([1, 2], np.ones((2, 2)), ValueMismatchError),
        ([1, 2], [[1.0, 1.0], [1.0, 1.0]], ArgumentTypeError),
    ],
    ids=repr,
)
def test_a_push_that_does_not_fit_leaves_the_table_as_it_was(
    table: Table, ids: Any, gradients: Any, error: type[Exception]
) -> None:
    table.push([1], ONES[:1])
    before = table.statistics(), table.pull([1, 2], touch=False).tolist()
    with pytest.raises(error):
        table.push(ids, gradients)
    assert (table.statistics(), table.pull([1, 2], touch=False).tolist()) == before


def test_a_pull_that_does_not_fit_leaves_the_table_as_it_was(table: Table) -> None:
    frozen = np.zeros((2, 2), np.float32)
    frozen.flags.writeable = False
    for out in (np.zeros((3, 2), np.float32), np.zeros((2, 3), np.float32), frozen):
        with pytest.raises(ValueMismatchError):
            table.pull([1, 2], out=out)
    with pytest.raises(ArgumentTypeError):
        table.pull([1, 2], out=[0, 0])
    with pytest.raises(ArgumentTypeError):
        table.pull(np.array([0.5]))
    assert table.statistics().pulled == 0


def test_two_tables_of_a_store_have_two_names(kv: KVStore) -> None:
    table = kv.create_table("t", 2)
    with pytest.raises(DuplicateKeyError, match="'t' already"):
        kv.create_table("t", 2)
    kv.init("t", ONES)  # keys have names of their own
    table.close()
    table.close()
    for call in (lambda: table.size, lambda: table.pull([1]), table.statistics):
        with pytest.raises(ClosedError, match="'t' is closed"):
            call()
    assert repr(table) == "<table 't': closed of 2 float32>"
    assert kv.create_table("t", 3).dim == 3


def test_a_closed_store_has_closed_tables(kv: KVStore) -> None:
    table = kv.create_table("t", 2)
    kv.close()
    with pytest.raises(ClosedError):
        table.pull([1])
    with pytest.raises(ClosedError):
        kv.create_table("u", 2)


def test_set_optimizer_of_a_table_refuses_what_tables_cannot_use(table: Table) -> None:
    for wrong, error in ((None, ArgumentTypeError), ("lars", NotSupportedError)):
        with pytest.raises(error):
            table.set_optimizer(wrong)  # type: ignore[arg-type]
    assert table.optimizer == SGD


def test_other_stores_say_that_they_have_no_tables() -> None:
    other: Any = SimpleNamespace(type="horovod")
    other._create_table = partial(KVStore._create_table, other)
    with pytest.raises(NotSupportedError, match="a horovod store does not support growing tables"):
        KVStore.create_table(other, "t", 2)


def test_a_checkpoint_of_a_store_with_tables_says_what_it_leaves_out(
    kv: KVStore, table: Table, tmp_path: Any
) -> None:
    with pytest.warns(UserWarning, match=r"growing tables user; save each with") as found:
        kv.save_checkpoint(tmp_path)
    assert found[0].filename == __file__


def test_threads_may_share_a_table(kv: KVStore) -> None:
    table = kv.create_table("t", 2, init=0, optimizer=SGD, capacity=50)

    def work() -> None:
        for _ in range(100):
            table.pull(np.arange(20, 90))
            table.push([1, 2], ONES[:2])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = table.statistics()
    assert (seen.pushes, seen.rows) == (400, 50)
    assert seen.made - seen.evicted == 50
