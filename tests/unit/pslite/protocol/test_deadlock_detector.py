"""Whether all workers wait for each other: when the scheduler looks, and what it concludes."""

from __future__ import annotations

import pytest

from pslite.protocol.deadlocks import AGAIN_S, PAUSE_S, DeadlockDetector
from pslite.protocol.surveys import ANSWER_S, FRESH_S

W0, W1 = 9, 11
STILL = {1: 5, 8: 3, W0: 7, W1: 2}


def looking(now: float = 10.0) -> DeadlockDetector:
    """All workers have waited for long, and all nodes are asked."""
    looks = DeadlockDetector()
    looks.long_wait(W0, 2, now)
    looks.long_wait(W1, 2, now)
    assert looks.take_due(now)
    return looks


def test_nobody_is_asked_before_all_workers_have_waited_for_long() -> None:
    looks = DeadlockDetector()
    looks.long_wait(W0, 2, 10.0)
    looks.long_wait(W0, 2, 20.0)
    assert (looks.due_at, looks.take_due(20.0)) == (None, False)
    looks.long_wait(W1, 2, 30.0)
    assert looks.take_due(30.0)


def test_two_looks_at_which_nobody_can_go_on_and_nothing_has_moved_are_certain() -> None:
    looks = looking()
    assert not looks.seen(STILL, 4, 10.1)
    assert looks.due_at == 10.1 + PAUSE_S
    assert not looks.take_due(10.5)
    assert looks.take_due(11.2)
    assert looks.seen(dict(STILL), 4, 11.3)
    assert looks.due_at is None


@pytest.mark.parametrize(
    "other",
    [
        {**STILL, 8: 4},
        {**STILL, W1: -1},
        {node: count for node, count in STILL.items() if node != 8},
        {},
    ],
    ids=["has moved", "may act", "does not answer", "nobody answers"],
)
@pytest.mark.parametrize("which", [0, 1])
def test_anything_else_is_not_and_ends_the_looking(other: dict[int, int], which: int) -> None:
    looks = looking()
    answers = [STILL, STILL]
    answers[which] = other
    for at, moved in zip((10.0, 12.0), answers, strict=True):
        looks.take_due(at)
        assert not looks.seen(moved, 4, at)
        if moved is other and not (which == 0 and other == {**STILL, 8: 4}):
            break
    assert looks.due_at is None
    looks.long_wait(W0, 2, 20.0)
    assert looks.due_at is None, "both have to say again that they wait"
    looks.long_wait(W1, 2, 21.0)
    assert looks.due_at == 21.0


def test_a_look_from_before_does_not_count_for_a_later_pair() -> None:
    looks = looking()
    looks.seen(STILL, 4, 10.0)
    looks.seen({**STILL, W0: -1}, 4, 11.0)
    looks.long_wait(W0, 2, 20.0)
    looks.long_wait(W1, 2, 20.0)
    assert not looks.seen(STILL, 4, 20.1)


def test_a_worker_that_says_so_again_changes_nothing_while_nodes_are_asked() -> None:
    looks = looking()
    looks.long_wait(W0, 2, 10.1)
    assert not looks.take_due(10.1)


def test_a_question_that_was_forgotten_is_asked_again() -> None:
    looks = looking()
    assert looks.take_due(10.0 + AGAIN_S)


def test_the_second_questions_are_asked_after_the_first_answers() -> None:
    """A survey that is given again must not be the second look."""
    assert PAUSE_S > FRESH_S
    assert AGAIN_S > ANSWER_S
