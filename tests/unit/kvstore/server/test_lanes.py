"""Which lane a part gets, and work that is done on several lanes for one request."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from store_requests import Asked

from kvstore.server.lanes import LaneNumbers, Lanes
from pslite.errors import RemoteError


class Part(NamedTuple):
    name: str
    lane: int


class Pool:
    """A pool whose lanes work when the test says so."""

    def __init__(self) -> None:
        self.work: dict[int, list[Callable[[], None]]] = {}
        self.lanes = Lanes(lambda lane, work: self.work.setdefault(lane, []).append(work))

    def run(self, lane: int) -> None:
        for work in self.work.pop(lane):
            work()


def test_small_parts_share_a_lane_until_it_is_full() -> None:
    numbers = LaneNumbers(100)
    assert [numbers.shared(each) for each in (40, 60, 1, 99, 1)] == [0, 0, 1, 1, 2]


def test_a_large_part_has_a_lane_for_itself() -> None:
    numbers = LaneNumbers(100)
    assert [numbers.shared(each) for each in (1, 500, 1, 1)] == [0, 1, 2, 2]


def test_nothing_joins_a_part_that_has_a_lane_of_its_own() -> None:
    numbers = LaneNumbers(100)
    assert numbers.shared(1) == 0
    assert [numbers.own(), numbers.own()] == [1, 3]
    assert numbers.shared(1) not in (0, 1, 3)


def test_the_answer_comes_when_the_last_lane_is_done() -> None:
    pool, asked, done = Pool(), Asked(), []
    parts = [Part("a", 1), Part("b", 2), Part("c", 1)]
    pool.lanes.run(
        asked.incoming, parts, lambda part: done.append(part.name), asked.incoming.respond
    )
    pool.run(2)
    assert (done, asked.answer) == (["b"], None)
    pool.run(1)
    assert done == ["b", "a", "c"]
    assert asked.body == b""


def test_without_parts_the_answer_comes_at_once() -> None:
    pool, asked = Pool(), Asked()
    parts: list[Part] = []
    pool.lanes.run(asked.incoming, parts, lambda part: None, asked.incoming.respond)
    assert asked.body == b""


def test_what_a_lane_raises_is_the_answer_and_nothing_follows() -> None:
    pool, asked = Pool(), Asked()

    def fail(part: Part) -> None:
        if part.lane == 1:
            raise MemoryError("the server is full")

    pool.lanes.run(asked.incoming, [Part("a", 1), Part("b", 2)], fail, asked.incoming.respond)
    pool.run(1)
    pool.run(2)
    assert isinstance(asked.error, RemoteError)
    assert "the server is full" in str(asked.error)
