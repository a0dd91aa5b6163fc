"""What all ranks do together: who carries it out, who hears of it, who leaves half-way."""

from __future__ import annotations

import itertools

import pytest
from store_requests import Asked

from kvstore.protocol.requests import pack, unpack
from kvstore.server.joint_calls import JointCallCoordinator
from pslite.errors import UsageError


class Ranks:
    """A store's meetings and the ranks that come to them."""

    def __init__(self, num_workers: int) -> None:
        self.live = list(range(num_workers))
        self.meetings = JointCallCoordinator()

    def come(
        self,
        rank: int,
        name: str = "delete(['w'])",
        call: int = 1,
        error: BaseException | None = None,
    ) -> Asked:
        asked = Asked(rank)
        self.meetings.arrive(call, name, asked.incoming, self.live, error)
        return asked

    def leave(self, rank: int) -> None:
        self.live.remove(rank)
        self.meetings.departed(self.live)


def outcome(asked: Asked) -> object:
    """None while it waits; (whether it is to act, the news); or the error's text."""
    if asked.answer is None:
        return None
    if asked.error is not None:
        return str(asked.error)
    return tuple(unpack(asked.body, bool, bytes))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_lowest_rank_acts_when_all_have_come_and_the_others_when_it_has(
    order: tuple[int, ...],
) -> None:
    ranks = Ranks(3)
    asked = {}
    for rank in order:
        assert all(outcome(other) is None for other in asked.values())
        asked[rank] = ranks.come(rank)
    assert outcome(asked[0]) == (True, b"")
    assert outcome(asked[1]) is outcome(asked[2]) is None
    ranks.meetings.done(1, b"news", None)
    assert outcome(asked[1]) == outcome(asked[2]) == (False, b"news")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_all_hear_the_error_of_a_rank_that_cannot_take_part_and_can_call_again(
    order: tuple[int, ...],
) -> None:
    ranks = Ranks(3)
    asked = {
        rank: ranks.come(rank, error=UsageError("its file is damaged") if rank == 1 else None)
        for rank in order
    }
    assert {outcome(each) for each in asked.values()} == {"its file is damaged"}
    again = [ranks.come(rank, call=2) for rank in order]
    assert outcome(again[order.index(0)]) == (True, b"")


def test_one_worker_alone_acts_at_once() -> None:
    assert outcome(Ranks(1).come(0)) == (True, b"")


def test_an_error_of_who_acts_reaches_all_others() -> None:
    ranks = Ranks(3)
    asked = [ranks.come(rank) for rank in range(3)]
    ranks.meetings.done(1, b"news", UsageError("no such file"))
    assert [outcome(other) for other in asked[1:]] == ["no such file"] * 2
    assert outcome(asked[0]) == (True, b"")


def test_meetings_of_other_numbers_do_not_mix() -> None:
    ranks = Ranks(2)
    first, second = ranks.come(0, call=1), ranks.come(1, call=2)
    assert outcome(first) is outcome(second) is None
    assert outcome(ranks.come(0, call=2)) == (True, b"")
    assert outcome(first) is None


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize("other", [0, 1])
def test_ranks_that_do_different_things_are_all_told_both(num_workers: int, other: int) -> None:
    ranks = Ranks(num_workers)
    names = ["close" if rank == other else "load_checkpoint" for rank in range(num_workers)]
    asked = [ranks.come(rank, names[rank]) for rank in reversed(range(num_workers))]
    texts = {outcome(one) for one in asked}
    assert len(texts) == 1
    (text,) = texts
    assert isinstance(text, str)
    assert f"worker {other} called close, but worker" in text or (
        "called load_checkpoint, but worker" in text and "called close" in text
    )
    assert text.endswith(
        "make the same calls with the same arguments in the same order on all workers"
    )
    assert text.count(f"worker {other} ") == 1


def test_after_a_disagreement_the_next_meeting_is_a_new_one() -> None:
    ranks = Ranks(3)
    for rank in range(3):
        ranks.come(rank, f"delete({rank})")
    asked = [ranks.come(rank, call=2) for rank in (2, 1, 0)]
    assert [outcome(one) for one in asked] == [None, None, (True, b"")]
    # Nothing is kept of the first one: a rank with that number would be the first to come.
    assert outcome(ranks.come(0, call=1)) is None


def test_nobody_waits_for_a_rank_that_is_gone() -> None:
    ranks = Ranks(3)
    asked = [ranks.come(rank) for rank in (0, 1)]
    ranks.leave(2)
    assert outcome(asked[0]) == (True, b"")
    assert outcome(asked[1]) is None


def test_the_next_rank_acts_when_the_lowest_is_gone_before_all_have_come() -> None:
    ranks = Ranks(3)
    asked = ranks.come(1)
    ranks.leave(0)
    assert outcome(asked) is None
    ranks.come(2)
    assert outcome(asked) == (True, b"")


def test_the_next_rank_acts_when_who_was_acting_is_gone() -> None:
    ranks = Ranks(3)
    asked = [ranks.come(rank) for rank in range(3)]
    ranks.leave(0)
    assert outcome(asked[1]) == (True, b"")
    assert outcome(asked[2]) is None
    ranks.meetings.done(1, b"news", None)
    assert outcome(asked[2]) == (False, b"news")


def test_the_last_to_disagree_may_leave_instead_of_coming() -> None:
    ranks = Ranks(3)
    asked = [ranks.come(0, "close"), ranks.come(1, "delete")]
    ranks.leave(2)
    assert all("same order" in str(outcome(one)) for one in asked)
    assert outcome(ranks.come(0, "close", call=2)) is None


def test_news_of_nothing_that_is_open_are_ignored() -> None:
    ranks = Ranks(2)
    ranks.meetings.done(7, b"news", None)
    waiting = ranks.come(1)
    ranks.meetings.done(2, b"news", None)
    assert outcome(waiting) is None
    assert unpack(pack(False, b"news"), bool, bytes) == [False, b"news"]
