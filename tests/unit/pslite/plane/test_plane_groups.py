"""Parts: which unit a part is in, as it is opened, pushed with others and asked for alone."""

from __future__ import annotations

from pslite.plane import NO_SIZE
from pslite.plane.unit import Parts, Unit
from pslite.protocol.rounds import SyncRounds


def alone(part: int, size: int = 8) -> Unit:
    return Unit((part,), (size,), SyncRounds((0, 1), 2), 0, (size,))


def parts_of(*numbers: int) -> Parts:
    parts = Parts()
    for number in numbers:
        parts.put(alone(number))
    return parts


def units_of(parts: Parts) -> list[tuple[int, ...]]:
    return [unit.parts for unit in parts.distinct()]


def test_a_list_that_is_pushed_again_and_again_becomes_a_unit() -> None:
    parts = parts_of(1, 2, 3)
    assert [parts.whole((1, 2)) for _ in range(2)] == [None, None]
    whole = parts.whole((1, 2))
    assert whole is not None and whole.parts == (1, 2)
    assert units_of(parts) == [(1, 2), (3,)]
    assert parts.whole((1, 2)) is whole


def test_units_grow_together_in_the_order_of_the_list_only() -> None:
    parts = parts_of(1, 2, 3)
    for _ in range(3):
        parts.whole((1, 2))
    assert [parts.whole((2, 1)) for _ in range(4)] == [None] * 4
    for _ in range(3):
        parts.whole((3, 1, 2))
    assert units_of(parts) == [(3, 1, 2)]


def test_a_part_that_is_asked_for_alone_is_alone_from_then_on() -> None:
    parts = parts_of(1, 2)
    for _ in range(3):
        parts.whole((1, 2))
    single = parts.single(2)
    assert single is not None and single.parts == (2,)
    assert units_of(parts) == [(1,), (2,)]
    assert parts.single(2) is single


def test_a_list_with_a_part_that_nobody_has_is_no_unit() -> None:
    parts = parts_of(1)
    assert [parts.whole((1, 7)) for _ in range(4)] == [None] * 4
    assert (parts.whole((7, 1)), parts.whole(()), parts.single(7)) == (None, None, None)


def test_only_so_many_lists_that_are_not_familiar_are_remembered() -> None:
    parts = parts_of(1, 2)
    parts.whole((1, 2))
    parts.whole((1, 2))
    for other in range(1000):
        parts.whole((1, 1000 + other))
    assert parts.whole((1, 2)) is None


def test_a_part_without_a_plain_value_stays_alone() -> None:
    parts = parts_of(1)
    parts.put(alone(2, NO_SIZE))
    assert [parts.whole((1, 2)) for _ in range(4)] == [None] * 4


def test_a_part_that_was_removed_can_come_again_with_another_size() -> None:
    parts = parts_of(1, 2)
    parts.remove(1)
    assert (parts.single(1), parts.sizes) == (None, {2: 8})
    parts.put(alone(1, 16))
    assert parts.sizes == {2: 8, 1: 16}
