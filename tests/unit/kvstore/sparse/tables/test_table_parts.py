"""The parts of a growing table by themselves: hash, ids, index, ages, admission, first values."""

from __future__ import annotations

import statistics
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.arrays import initializer
from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.sparse.tables.admission import WAITING_BYTES, WaitingIds
from kvstore.sparse.tables.ages import NO_ROW, Ages, stamp_at
from kvstore.sparse.tables.hash_index import PLACE_BYTES, IdIndex
from kvstore.sparse.tables.ids import checked_table_ids, first_appearances, mix, shares_of, spread
from kvstore.sparse.tables.initial_rows import FirstValues, checked_init, normal
from kvstore.sparse.tables.lineage import Line, Lineage, agreed, line_of, new_lineage

WORD = 2**64 - 1
EXTREMES = np.array([0, -1, 1, 2**63 - 1, -(2**63), -(2**63) + 1], np.int64)


def splitmix(state: int) -> tuple[int, int]:
    """Vigna's ``next``: the new state and the word."""
    state = (state + 0x9E3779B97F4A7C15) & WORD
    word = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return state, word ^ (word >> 31)


# -- hash ---------------------------------------------------------------------------------


def test_the_hash_is_that_of_splitmix64() -> None:
    # The first outputs for seed 1234567, as other implementations give them.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    state, words = 1234567, []
    for _ in known:
        state, word = splitmix(state)
        words.append(word)
    assert words == known
    steps = np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix(np.uint64(1234567) + steps).tolist() == known


def test_ids_that_follow_each_other_fall_evenly_to_shares_and_within_a_share_to_slots() -> None:
    ids = np.arange(100_000)
    counts = np.bincount(shares_of(ids, 5), minlength=5)
    assert counts.min() > 19_500 and counts.max() < 20_500
    mine = ids[shares_of(ids, 5) == 2]
    assert np.bincount(spread(mine, 10), minlength=10).min() > len(mine) / 10 * 0.9
    assert spread(EXTREMES, 7).min() >= 0 and spread(EXTREMES, 7).max() < 7


# -- ids ----------------------------------------------------------------------------------


def test_all_64_bits_of_an_id_count_and_both_dtypes_name_the_same_ids() -> None:
    unsigned = np.array([0, 2**64 - 1, 2**63, 2**53 + 1], np.uint64)
    flat, shape = checked_table_ids(unsigned.reshape(2, 2))
    assert (flat.tolist(), shape) == ([0, -1, -(2**63), 2**53 + 1], (2, 2))
    assert checked_table_ids([2**64 - 1, -1, 5])[0].tolist() == [-1, -1, 5]
    assert checked_table_ids(np.array([3, -3], np.int8))[0].tolist() == [3, -3]
    flat, shape = checked_table_ids(np.uint64(2**64 - 2))
    assert (flat.tolist(), shape) == ([-2], ())
    assert checked_table_ids([])[1] == (0,)
    assert checked_table_ids(range(2))[0].tolist() == [0, 1]


@pytest.mark.parametrize(
    "ids",
    [np.array([1.0]), np.array([True]), [1.5], [True], 2.0, ["a"], np.array(["a"]), None, {1: 2}],
    ids=repr,
)
def test_ids_that_are_no_integers_are_refused(ids: object) -> None:
    with pytest.raises(ArgumentTypeError):
        checked_table_ids(ids)


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
def test_ids_of_more_than_64_bits_are_refused(number: int) -> None:
    with pytest.raises(ArgumentValueError, match="64 bits"):
        checked_table_ids([number])


@given(st.lists(st.integers(-3, 3), min_size=1))
def test_different_ids_come_in_the_order_in_which_they_appear(numbers: list[int]) -> None:
    unique, inverse = first_appearances(np.array(numbers))
    assert unique.tolist() == list(dict.fromkeys(numbers))
    assert unique[inverse].tolist() == numbers


# -- index --------------------------------------------------------------------------------

SOME = st.lists(st.integers(0, 25), unique=True, max_size=12)


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "grow"]), SOME), max_size=40))
@settings(max_examples=200)
def test_an_index_knows_what_a_dictionary_does(calls: list[tuple[str, list[int]]]) -> None:
    # 26 ids that hash to few slots, so that they stand in each other's way.
    every = np.arange(2_000)
    pool = every[spread(every, 52) < 8][:26]
    index, known = IdIndex(26), dict[int, int]()
    for name, numbers in calls:
        ids = pool[numbers]
        if name == "grow":
            index.grow(len(index.ids) + 1)
        elif name == "add":
            new = [int(id_) for id_ in ids if int(id_) not in known]
            free = sorted(set(range(26)) - set(known.values()))[: len(new)]
            known.update(zip(new, free, strict=True))
            index.add(np.array(new, np.int64), np.array(free, np.intp))
        else:
            old = [known.pop(int(id_)) for id_ in ids if int(id_) in known]
            index.remove(np.array(old, np.intp))
        assert index.look_up(pool).tolist() == [known.get(int(id_), -1) for id_ in pool]
        assert len(index) == len(known)


def test_any_id_can_be_in_an_index_even_that_of_places_without_one() -> None:
    index = IdIndex(8)
    assert index.look_up(EXTREMES).tolist() == [-1] * 6
    index.add(EXTREMES, np.arange(6))
    assert (
        index.look_up(np.repeat(EXTREMES[::-1], 2)).tolist()
        == np.repeat(np.arange(6)[::-1], 2).tolist()
    )
    assert index.nbytes == 8 * PLACE_BYTES


def test_an_index_that_rows_go_through_for_long_stays_right_and_small() -> None:
    random = np.random.default_rng(1)
    index, size = IdIndex(1000), IdIndex(1000).nbytes
    ids = random.integers(-(2**63), 2**63 - 1, 1000)
    index.add(ids, np.arange(1000))
    for _ in range(50):
        places = random.choice(1000, 300, replace=False)
        index.remove(places)
        ids[places] = random.integers(-(2**63), 2**63 - 1, 300)
        index.add(ids[places], places)
        assert index.look_up(ids).tolist() == list(range(1000))
    assert (index.nbytes, len(index)) == (size, 1000)


# -- ages ---------------------------------------------------------------------------------


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("touch"), st.lists(st.integers(0, 19), min_size=1, max_size=6)),
            st.tuples(st.just("touch"), st.lists(st.integers(0, 19), min_size=1, max_size=6)),
            st.tuples(st.just("tick"), st.just([])),
            st.tuples(st.just("take"), st.lists(st.just(0), max_size=8)),
        ),
        max_size=30,
    )
)
def test_the_oldest_are_those_that_were_touched_longest_ago(
    calls: list[tuple[str, list[int]]],
) -> None:
    ages, order = Ages(20), OrderedDict[int, None]()
    for name, numbers in calls:
        if name == "tick":
            ages.tick()
        elif name == "touch":
            ages.stamps[np.array(numbers)] = ages.next_stamps(len(numbers))
            for place in numbers:
                order[place] = None
                order.move_to_end(place)
        else:
            places, stamps = ages.take_oldest(len(numbers), stamp_at(ages.time + 1))
            expected = [order.popitem(last=False)[0] for _ in range(min(len(numbers), len(order)))]
            assert places.tolist() == expected
            assert (np.diff(stamps) > 0).all()
    assert ages.held().tolist() == sorted(order)


def test_rows_from_a_stamp_on_are_not_taken() -> None:
    ages = Ages(10)
    ages.stamps[:4] = ages.next_stamps(4)
    ages.tick()
    ages.stamps[4:6] = ages.next_stamps(2)
    assert ages.take_oldest(9, stamp_at(1))[0].tolist() == [0, 1, 2, 3]
    assert ages.take_oldest(9, stamp_at(1))[0].tolist() == []
    assert ages.held().tolist() == [4, 5]
    assert (ages.stamps[:4] == NO_ROW).all()


def test_touches_without_a_push_stay_in_order_however_many_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.sparse.tables.ages._MOST_TOUCHES", 9)
    ages = Ages(4)
    ages.set_time(3)
    ages.stamps[3] = stamp_at(2) + 5  # touched before the last push, so the oldest
    order = [3, 0, 1, 2]
    ages.stamps[order[1:]] = ages.next_stamps(3)
    random = np.random.default_rng(1)
    for _ in range(50):
        touched = random.permutation(3)[: random.integers(1, 4)].tolist()
        ages.stamps[touched] = ages.next_stamps(len(touched))
        order = [place for place in order if place not in touched] + touched
        assert np.argsort(ages.stamps, kind="stable").tolist() == order
        assert (ages.stamps < stamp_at(3) + 9).all()
    assert ages.take_oldest(2, stamp_at(4))[0].tolist() == order[:2]


# -- admission ----------------------------------------------------------------------------


@given(
    st.integers(2, 4),
    st.integers(1, 6),
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), unique=True, max_size=8), st.integers(0, 8)),
        max_size=20,
    ),
)
def test_ids_are_admitted_when_they_came_often_enough_among_the_last(
    admit_after: int, size: int, calls: list[tuple[list[int], int]]
) -> None:
    """In each call the first of those that are admitted find room; the others stay admitted."""
    waiting, known, came = WaitingIds(admit_after, size), dict[int, list[int]](), 0
    for numbers, room in calls:
        expected = []
        for id_ in numbers:
            if id_ in known:
                known[id_][1] += 1
            expected.append(id_ in known and known[id_][1] >= admit_after)
        for id_ in numbers:
            if id_ not in known:
                known[id_] = [came, 1]
                came += 1
        known = {id_: each for id_, each in known.items() if came - each[0] <= size}
        ids = np.array(numbers, np.int64)
        is_admitted = waiting.touch(ids)
        assert is_admitted.tolist() == expected
        waiting.remove(ids[is_admitted][:room])
        for id_ in ids[is_admitted][:room].tolist():
            known.pop(id_, None)
        assert len(waiting) == len(known)


@pytest.mark.parametrize("size", [1500, 2048, 5000])
@pytest.mark.parametrize("step", [1024, 300, 7, 7000])
def test_ids_that_wait_are_the_last_ones_while_their_memory_grows(size: int, step: int) -> None:
    waiting = WaitingIds(2, size)
    assert waiting.nbytes <= 1500 * WAITING_BYTES
    for start in range(0, 6000, step):
        waiting.touch(np.arange(start, start + step))
        assert len(waiting) == min(start + step, size)
    assert waiting.nbytes == size * WAITING_BYTES
    known = np.arange(len(waiting)) + max(start + step - size, 0)
    assert not waiting.touch(known[:1] - 1).any()
    assert waiting.touch(known[1:]).all()


# -- first values -------------------------------------------------------------------------


def test_first_values_are_those_of_the_formula() -> None:
    values = FirstValues(initializer.Uniform(0.5), 7, "user")
    stream = int(values._stream)
    made = values.make(EXTREMES, 5, np.dtype("f4"))
    for id_, row in zip(EXTREMES.tolist(), made, strict=True):
        # The hash of a word is the output of a generator one step before it.
        _, state = splitmix((id_ + stream - 0x9E3779B97F4A7C15) & WORD)
        numbers: list[int] = []
        for _ in range(3):
            state, word = splitmix(state)
            numbers += [word & 0xFFFFFFFF, word >> 32]
        expected = [((number >> 8) * 2.0**-23 - 1) * 0.5 for number in numbers[:5]]
        assert row.tolist() == expected


def test_first_values_differ_by_seed_table_id_and_column_and_by_nothing_else() -> None:
    init, ids = initializer.Uniform(), np.arange(2000)
    whole = FirstValues(init, 0, "user").make(ids, 64, np.dtype("f4"))
    assert len(np.unique(whole)) > 0.98 * whole.size
    order = np.random.default_rng(1).permutation(2000)
    again = FirstValues(init, 0, "user")
    np.testing.assert_array_equal(again.make(ids[order], 64, np.dtype("f4")), whole[order])
    np.testing.assert_array_equal(again.make(ids[5:6], 64, np.dtype("f8"))[0], whole[5])
    for other in (FirstValues(init, 1, "user"), FirstValues(init, 0, "item")):
        assert not np.isin(other.make(ids, 64, np.dtype("f4")), whole).all(axis=1).any()


def test_uniform_values_fill_their_range_evenly() -> None:
    values = FirstValues(initializer.Uniform(2.0), 0, "t").make(
        np.arange(20_000), 7, np.dtype("f4")
    )
    assert -2 <= values.min() < -1.99 and 1.99 < values.max() < 2
    counts, _ = np.histogram(values, 20, (-2, 2))
    assert counts.min() > 0.95 * values.size / 20
    assert np.abs(np.corrcoef(values.T) - np.eye(7)).max() < 0.03


def test_normal_values_are_the_inverse_of_the_distribution() -> None:
    numbers = np.unique(np.concatenate([np.arange(0, 2**32, 2**22 + 1), [1, 2, 2**32 - 1]]))
    found = normal(numbers.astype(np.uint32))
    inverse = statistics.NormalDist().inv_cdf
    expected = [inverse((number + 0.5) / 2**32) for number in numbers.tolist()]
    np.testing.assert_allclose(found, expected, rtol=3e-7, atol=1e-9)
    values = FirstValues(initializer.Normal(0.1), 0, "t").make(np.arange(9_000), 8, np.dtype("f4"))
    assert values.mean() == pytest.approx(0, abs=1e-3)
    assert values.std() == pytest.approx(0.1, rel=1e-2)


def test_known_bits_of_first_values_never_change() -> None:
    # Tables that were exported go on with the same rows: these numbers must stay what they are.
    ids = np.array([1, -1])
    uniform = FirstValues(initializer.Uniform(), 0, "t").make(ids, 2, np.dtype("f4"))
    gaussian = FirstValues(initializer.Normal(), 3, "t").make(ids, 2, np.dtype("f4"))
    assert uniform.astype("<f4").tobytes().hex() == "73a3bd3ccdef823d38371d3d3fb6c23c"
    assert gaussian.astype("<f4").tobytes().hex() == "97e0073cecf45abb6fa2413c21da393b"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("zero", initializer.Zero()),
        (0.5, initializer.Constant(0.5)),
        (np.float32(2), initializer.Constant(2.0)),
        ("Uniform", initializer.Uniform()),
        (initializer.Normal(3.0), initializer.Normal(3.0)),
    ],
)
def test_init_may_be_an_initializer_its_name_or_a_number(given: object, expected: object) -> None:
    assert checked_init(given) == expected


@pytest.mark.parametrize("init", ["xavier", initializer.Orthogonal(), "nonsense"])
def test_initializers_that_need_a_matrix_are_refused(init: object) -> None:
    with pytest.raises(ArgumentValueError):
        checked_init(init)


@pytest.mark.parametrize("init", [None, True, np.zeros(3), [0.1]])
def test_what_is_no_initializer_is_refused(init: object) -> None:
    with pytest.raises(ArgumentTypeError):
        checked_init(init)


# -- lineage ------------------------------------------------------------------------------


def test_a_mark_belongs_to_the_first_line_that_reaches_it() -> None:
    lines = (Line("first", 3), Line("resumed", 7))
    found = [line_of(lines, mark) for mark in (0, 3, 4, 7, 8)]
    assert found == ["first", "first", "resumed", "resumed", None]


def test_shares_agree_on_what_all_of_them_have_loaded_and_on_nothing_else() -> None:
    lines = (Line("first", 3),)
    same = Lineage(lines, "own")
    assert agreed([same, same]) == same
    apart = agreed([new_lineage(lines), new_lineage(lines)])
    assert (apart.loaded, apart.at) == (lines, lines[0])
    assert agreed([new_lineage(lines), new_lineage()]).at is None
    assert len({new_lineage().own for _ in range(100)}) == 100
