"""Where keys of one process lie: small ones next to each other, with their optimizer's arrays."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore import Context
from kvstore.stores.local import memory
from kvstore.stores.local.memory import Shelves, StoredKey


@pytest.fixture(autouse=True)
def short_shelves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "SMALL_ELEMENTS", 8)
    monkeypatch.setattr(memory, "SHELF_ELEMENTS", 20)


def place(*sizes: int, dtype: str = "f4") -> list[StoredKey]:
    shelves = Shelves()
    return [shelves.place(n, np.full(size, n, dtype), 1) for n, size in enumerate(sizes)]


def test_small_keys_lie_one_after_the_other_and_a_large_one_alone() -> None:
    first, large, second = place(3, 9, 8)
    assert first.shelf is second.shelf is not None
    assert (first.stop, second.start, second.stop) == (3, 3, 11)
    assert large.shelf is None
    np.testing.assert_array_equal(first.shelf.values[:11], [0] * 3 + [2] * 8)
    np.testing.assert_array_equal(large.weight, [1] * 9)


def test_a_full_shelf_is_followed_by_another() -> None:
    entries = place(8, 8, 5, 4)
    assert [entry.shelf is entries[0].shelf for entry in entries] == [True, True, False, False]
    assert [entry.start for entry in entries] == [0, 8, 0, 5]


def test_every_dtype_has_shelves_of_its_own() -> None:
    shelves = Shelves()
    one, other = (shelves.place(dtype, np.ones(2, dtype), 1) for dtype in ("f4", "f8"))
    assert one.shelf is not other.shelf


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 3), (3, 3)])
def test_a_key_keeps_its_shape_and_gets_a_copy(shape: tuple[int, ...]) -> None:
    value = np.ones(shape)
    entry = Shelves().place("w", value, 4)
    assert entry.weight.shape == entry.spec.shape == shape
    assert entry.flat.shape == (value.size,)
    assert not np.shares_memory(entry.weight, value)
    entry.flat[...] = 5
    assert (entry.weight == 5).all()
    assert (value == 1).all()


def test_states_of_small_keys_lie_in_the_order_of_the_keys() -> None:
    entries = place(3, 4)
    for number, entry in enumerate(entries):
        size = entry.stop - entry.start
        entry.keep_state((np.full(size, number, "f4"), np.full(size, number + 5, "f8")), 7)
    assert entries[0].shelf is not None
    velocity = entries[0].shelf.state(0, np.dtype("f4"))
    np.testing.assert_array_equal(velocity[:7], [0, 0, 0, 1, 1, 1, 1])
    np.testing.assert_array_equal(entries[1].state[1], [6, 6, 6, 6])
    assert entries[0].shelved == entries[1].shelved == (np.dtype("f4"), np.dtype("f8"))
    assert entries[0].count == 7


def test_states_that_change_their_places_keep_their_values() -> None:
    (entry,) = place(3)
    entry.keep_state((np.full(3, 1, "f4"), np.full(3, 2, "f4")), 1)
    one, two = entry.state
    entry.keep_state((two, one), 1)
    np.testing.assert_array_equal(entry.state, [[2, 2, 2], [1, 1, 1]])
    entry.keep_state((np.zeros(3, "f4"), entry.state[0]), 1)
    np.testing.assert_array_equal(entry.state, [[0, 0, 0], [2, 2, 2]])


def test_states_of_another_length_stay_where_they_are() -> None:
    (entry,) = place(3)
    given = np.ones(1)
    entry.keep_state((given,), 2)
    assert entry.state is not None
    assert entry.state[0] is given
    assert entry.shelved is None
    entry.keep_state(None, 0)
    assert entry.state is None
    assert entry.shelved == ()


def test_a_new_value_is_copied_to_the_shelf_or_taken_over() -> None:
    small, large = place(3, 9)
    for entry in (small, large):
        value = np.full(entry.spec.shape, 9, "f4")
        entry.set_weight(value)
        np.testing.assert_array_equal(entry.weight, value)
    assert small.shelf is not None
    assert small.shelf.values[0] == 9


def test_a_key_that_moves_leaves_its_shelf() -> None:
    (entry,) = place(3)
    entry.keep_state((np.ones(3, "f4"),), 3)
    weight, state = np.zeros(3, "f4"), np.full(3, 4, "f4")
    entry.move(Context("gpu", 1), weight, (state,))
    assert (entry.home, entry.shelf, entry.count) == (Context("gpu", 1), None, 3)
    assert entry.weight is weight
    assert entry.state is not None
    assert entry.state[0] is state
