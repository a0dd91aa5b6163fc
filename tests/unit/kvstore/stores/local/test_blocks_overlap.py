"""Which arrays may be written on several threads at once, and while others are read."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.stores.local.blocks import are_apart


def new(*shape: int) -> np.ndarray:
    return np.zeros(shape or (6,), np.float32)


def test_arrays_that_own_their_memory_lie_apart() -> None:
    assert are_apart([[new(), new()], [new(2, 3)]], [[new(), new()], [new(2, 3)]])
    assert are_apart([])
    assert are_apart([[], []], [[new()], []])


def test_an_array_that_stands_twice_does_not() -> None:
    array = new()
    assert not are_apart([[array], [array]])
    assert not are_apart([[array, array]])


def test_the_slices_of_one_array_lie_apart_unless_they_overlap() -> None:
    flat = new(20)
    assert are_apart([[flat[:5]], [flat[5:10].reshape(5, 1)], [flat[19:10:-1]]])
    assert not are_apart([[flat[:5]], [flat[4:10]]])
    assert not are_apart([[flat]], [[flat[3:4]]])
    assert not are_apart([[flat[:9]], [flat[9:]]], [[new()], [flat[8:12]]])
    assert are_apart([[flat[:9]], [flat[9:]]], [[new()], [new()]])


def test_empty_arrays_lie_apart_from_everything() -> None:
    flat = new(4)
    assert are_apart([[flat], [flat[2:2]]], [[flat[1:1]], [flat[3:3]]])


def test_a_key_may_be_read_from_where_it_is_written() -> None:
    rows = [[new(), new()], [new()]]
    assert are_apart(rows, rows)
    assert are_apart(rows, [list(row) for row in rows])
    assert are_apart([[rows[0][1]], [new()]], rows)
    views = [[array[:] for array in row] for row in rows]
    assert are_apart(views, rows)


@pytest.mark.parametrize("is_view", [False, True])
def test_but_not_from_where_another_key_is_written(is_view: bool) -> None:
    first, second = new(), new()
    reads = [[new()], [first[:] if is_view else first]]
    assert not are_apart([[first], [second]], reads)


def test_a_key_may_not_be_read_from_the_same_memory_in_another_order() -> None:
    square = new(3, 3)
    assert not are_apart([[square]], [[square.T]])
    assert not are_apart([[square[::-1]]], [[square]])
    assert not are_apart([[square.reshape(-1)]], [[square.reshape(-1).view(np.int32)]])


def test_memory_that_no_numpy_array_owns_is_told_apart_by_its_addresses() -> None:
    memory = bytearray(80)
    left, right = np.frombuffer(memory, "f4", 10), np.frombuffer(memory, "f4", 10, 40)
    assert are_apart([[left], [right]])
    assert not are_apart([[left], [np.frombuffer(memory, "f4", 10, 20)]])
