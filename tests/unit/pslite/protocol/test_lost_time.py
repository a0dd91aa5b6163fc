"""How long a node waits for processes in place of lost ones: each second counts once."""

from __future__ import annotations

from pslite.protocol.lost_time import LostTime


def test_nothing_is_waited_for_at_first() -> None:
    assert LostTime().seconds(7.0) == 0.0


def test_the_time_runs_while_a_place_is_vacant_and_not_between_two_losses() -> None:
    lost_time, seen = LostTime(), []
    lost_time.begins(9, 1.0)
    seen.append(lost_time.seconds(3.0))
    lost_time.ends(9, 4.0)
    seen.append(lost_time.seconds(100.0))
    lost_time.begins(9, 200.0)
    lost_time.ends(9, 200.5)
    seen.append(lost_time.seconds(300.0))
    assert seen == [2.0, 3.0, 3.5]


def test_a_second_in_which_two_places_are_vacant_counts_once() -> None:
    lost_time = LostTime()
    for node, now in ((9, 1.0), (8, 2.0), (9, 3.0)):  # 9 is told twice
        lost_time.begins(node, now)
    lost_time.ends(9, 5.0)
    assert (lost_time.places, lost_time.seconds(6.0)) == ({8}, 5.0)
    lost_time.ends(8, 7.0)
    assert (lost_time.places, lost_time.seconds(50.0)) == (set(), 6.0)


def test_the_end_of_another_wait_or_of_none_changes_nothing() -> None:
    lost_time = LostTime()
    lost_time.ends(9, 1.0)
    lost_time.begins(9, 2.0)
    lost_time.ends(8, 3.0)
    assert lost_time.seconds(4.0) == 2.0
