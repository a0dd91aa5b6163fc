"""Records of a server, and the standby that repeats them: order, what waits, who is slowed down."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pslite.errors import ProtocolError
from pslite.protocol.replication import Journal, Replay, Turns, from_pieces, in_pieces


def said(log: list[int], number: int) -> Callable[[], None]:
    return lambda: log.append(number)


def run(actions: list[Callable[[], None]]) -> None:
    for action in actions:
        action()


# -- the server's side --------------------------------------------------------------------


def test_what_waits_goes_on_once_the_standby_has_its_record_and_all_before() -> None:
    journal, log = Journal(100), list[int]()
    assert [journal.add(None, 1, said(log, number)) for number in (1, 2, 3)] == [1, 2, 3]
    run(journal.told(2, 0))
    assert log == [1, 2]
    run(journal.told(1, 0))  # an old report changes nothing
    run(journal.told(3, 1))
    assert log == [1, 2, 3]


def test_a_standby_that_is_behind_slows_its_server_down() -> None:
    journal, log = Journal(10), list[int]()
    for number in range(1, 6):
        journal.add(None, 6, said(log, number))
    run(journal.told(5, 0))
    assert log == [1, 2]  # 12 bytes before the third are not done
    run(journal.told(5, 1))
    assert log == [1, 2, 3]
    run(journal.told(5, 5))
    assert log == [1, 2, 3, 4, 5]


def test_a_single_record_above_the_limit_does_not_wait_for_ever() -> None:
    journal, log = Journal(10), list[int]()
    journal.add(None, 1000, said(log, 1))
    run(journal.told(1, 0))
    assert log == [1]


def test_the_frames_live_until_the_standby_has_done_with_them() -> None:
    import weakref

    class Frame:
        pass

    journal, frame = Journal(10), Frame()
    alive = weakref.ref(frame)
    journal.add([frame], 4, lambda: None)
    del frame
    journal.told(1, 0)
    assert alive() is not None
    journal.told(1, 1)
    assert alive() is None


def test_without_a_standby_nothing_waits_any_more() -> None:
    journal, log = Journal(10), list[int]()
    for number in (1, 2):
        journal.add(None, 50, said(log, number))
    run(journal.end())
    assert log == [1, 2]
    assert journal.told(2, 2) == []


def test_a_report_of_records_that_were_never_sent_is_cut() -> None:
    journal, log = Journal(10), list[int]()
    journal.add(None, 1, said(log, 1))
    run(journal.told(7, 0))
    journal.add(None, 1, said(log, 2))
    assert log == [1]
    assert journal.told(1, 1) == []


# -- the standby's side -------------------------------------------------------------------


def test_records_are_done_in_their_order_however_they_arrive() -> None:
    for seed in range(50):
        replay, found = Replay[int](), list[int]()
        numbers = list(range(1, 9)) * 2
        random.Random(seed).shuffle(numbers)
        for number in numbers:
            found += replay.arrived(number, number)
        assert found == list(range(1, 9))
        assert replay.stored == 8


def test_a_record_after_a_missing_one_is_neither_done_nor_stored() -> None:
    replay = Replay[str]()
    assert replay.arrived(1, "one") == ["one"]
    assert replay.arrived(3, "three") == []
    assert replay.stored == 1
    replay.drop_early()
    assert replay.arrived(2, "two") == ["two"]


def test_done_is_counted_without_gaps() -> None:
    replay = Replay[int]()
    for number in (1, 2, 3):
        replay.arrived(number, number)
    replay.has_done(2)
    replay.has_done(3)
    assert replay.done == 0
    replay.has_done(1)
    assert replay.done == 3


# -- turns --------------------------------------------------------------------------------


def test_work_goes_on_side_by_side_unless_some_must_be_alone() -> None:
    turns, log = Turns(), list[int]()
    turns.add(said(log, 1))
    turns.add(said(log, 2))
    turns.add(said(log, 3), alone=True)
    turns.add(said(log, 4))
    assert log == [1, 2]
    turns.ended()
    assert log == [1, 2]
    turns.ended()
    assert log == [1, 2, 3]
    turns.ended()
    assert log == [1, 2, 3, 4]


def test_work_may_be_over_when_begin_returns() -> None:
    turns, log = Turns(), list[int]()

    def at_once(number: int) -> Callable[[], None]:
        def begin() -> None:
            log.append(number)
            turns.ended()

        return begin

    for number in range(1, 6):
        turns.add(at_once(number), alone=number % 2 == 0)
    assert log == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("alone", [False, True])
def test_idle_means_that_nothing_runs_or_waits(alone: bool) -> None:
    turns, log = Turns(), list[int]()
    turns.add(said(log, 1), alone=alone)
    turns.add(said(log, 2), alone=alone)
    turns.when_idle(said(log, 9))
    turns.ended()
    assert 9 not in log
    turns.ended()
    assert log == [1, 2, 9]
    turns.when_idle(said(log, 10))
    assert log[-1] == 10


# -- large payloads -----------------------------------------------------------------------


@pytest.mark.parametrize("most_bytes", [1, 3, 4, 7, 100])
def test_a_payload_in_pieces_has_the_same_frames_again(most_bytes: int) -> None:
    frames = [b"", b"abc", b"d", memoryview(b"efghijk"), b""]
    pieces = list(in_pieces(frames, most_bytes))
    assert all(sum(map(len, piece)) <= most_bytes for piece in pieces)
    whole = bytearray(b"".join(each for piece in pieces for each in piece))
    assert from_pieces(whole, tuple(map(len, frames))) == frames


def test_a_payload_that_lacks_a_piece_is_refused() -> None:
    with pytest.raises(ProtocolError, match="expected a payload of 5 bytes, got 4"):
        from_pieces(bytearray(b"abcd"), (2, 3))
