"""The directory of keys: who decides, who waits, who disagrees, whatever the order of calls."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvstore import optimizer as optimizers
from kvstore.arrays import keys
from kvstore.optimizer.serialize import from_plain, to_plain
from kvstore.protocol.placement import chunk_ranges
from kvstore.protocol.requests import (
    CLOSING,
    DIRECTORY_APP,
    Declared,
    DirectoryCall,
    KeyEntry,
    pack,
    pack_specs,
    unpack,
    unpack_entries,
)
from kvstore.server import optimizer_calls
from kvstore.server.directory import Directory
from kvstore.stores.base import Key, KeySpec
from pslite.errors import DeadlockError, UsageError
from pslite.future import Future
from pslite.node.customer import Customers, Reply
from pslite.wire.messages import Request, Response

STORE = 1
FLOAT = np.dtype(np.float32)
SMALL = KeySpec((4,), FLOAT)
SGD = to_plain(optimizers.create("sgd", learning_rate=0.1))
FASTER = to_plain(optimizers.create("sgd", learning_rate=0.5))


class Job:
    """A directory and the workers that ask it."""

    def __init__(
        self, num_workers: int, num_servers: int = 2, chunk_bytes: int = 16, **others: Any
    ) -> None:
        self.live = list(range(num_workers))
        self.directory = Directory(num_servers, chunk_bytes, lambda: self.live, **others)
        self._commands: list[Any] = []
        self._replies: dict[int, Future[dict[int, Reply]]] = {}
        self._scheduler = Customers(self._replied, lambda command: command())
        self._scheduler.add(DIRECTORY_APP, self.directory.handle)
        self._asker = Customers(self._asked, self._commands.append)
        self._rank = 0
        self._num_optimizer_calls = 0

    def _asked(self, node: int, message: Request | Response, frames: Sequence[Any]) -> None:
        assert isinstance(message, Request)
        self._scheduler.request_arrived(2 * self._rank + 9, message, frames, 0.0)

    def _replied(self, node: int, message: Request | Response, frames: Sequence[Any]) -> None:
        assert isinstance(message, Response)
        self._asker.response_arrived(1, message, frames)

    def ask(self, rank: int, call: int, *fields: Any) -> Future[bytes]:
        """A worker's call; its future holds the body of the answer."""
        self._rank = rank
        future: Future[dict[int, Reply]] = Future()
        self._asker.ask([1], DIRECTORY_APP, 0, call, pack(*fields), {}, future)
        return future.map(lambda replies: replies[1].body)

    def declare(
        self,
        rank: int,
        *specs: tuple[Key, KeySpec],
        store: int = STORE,
        kind: str = "sync",
        scope: str = "element",
    ) -> Future[tuple[bool, list[KeyEntry]]]:
        """(this rank has to create the parts, where everything lives)"""
        asked = self.ask(
            rank,
            DirectoryCall.DECLARE,
            store,
            kind,
            scope,
            pack_specs([Declared(*each) for each in specs]),
        )
        return asked.map(_declared)

    def initialised(self, rank: int, *keys: Key) -> None:
        self.ask(rank, DirectoryCall.INITIALISED, STORE, list(keys), "", "").result(0)

    def together(self, rank: int, call: int, name: str) -> Future[bytes]:
        return self.ask(rank, DirectoryCall.TOGETHER, STORE, "sync", call, name, "", "")

    def done_together(self, rank: int, call: int, *deleted: Key, said: str = "") -> bytes:
        fields = STORE, call, list(deleted), said, "", ""
        return self.ask(rank, DirectoryCall.DONE_TOGETHER, *fields).result(0)

    def leave(self, rank: int) -> None:
        self.live.remove(rank)
        self.directory.departed()

    def set_optimizer(self, optimizer: Any, kind: str = "", text: str = "") -> Future[bytes]:
        """Worker 0's next call has reached all servers, or failed with this error."""
        self._num_optimizer_calls += 1
        fields = STORE, "sync", self._num_optimizer_calls, optimizer, kind, text
        return self.ask(0, DirectoryCall.OPTIMIZER_IS_SET, *fields)

    def same_optimizer(self, rank: int, call: int, optimizer: Any) -> Future[bytes]:
        return self.ask(rank, DirectoryCall.SAME_OPTIMIZER, STORE, "sync", call, optimizer)


def _declared(body: bytes) -> tuple[bool, list[KeyEntry]]:
    decides, rows = unpack(body, bool, bytes)
    return decides, unpack_entries(rows)


def kind_of(future: Future[Any]) -> str:
    return type(future.error()).__name__


# -- keys ---------------------------------------------------------------------------------


def test_rank_0_decides_where_a_key_lives_and_creates_it() -> None:
    job = Job(2)
    decides, (entry,) = job.declare(0, ("w", KeySpec((10,), FLOAT))).result(0)
    assert decides
    assert (entry.key, entry.first_part, entry.chunk_bytes) == ("w", 1, 16)
    assert len(entry.servers) == len(chunk_ranges(10, 4, 16)) == 3


@pytest.mark.parametrize(
    ("scope", "shape", "sizes"),
    [
        ("element", (4, 3), [16, 16, 16]),
        ("row", (4, 3), [12] * 4),
        ("row", (5, 2), [16, 16, 8]),
        ("row", (2, 3, 2), [24, 24]),  # a row is more than a chunk
        ("row", (6,), [16, 8]),
        ("row", (0, 3), [0]),
        ("row", (3, 0), [0]),
        ("key", (4, 3), [48]),
    ],
)
def test_keys_are_cut_where_their_optimizer_lets_them_be_cut(
    scope: str, shape: tuple[int, ...], sizes: list[int]
) -> None:
    _, (entry,) = Job(1).declare(0, ("w", KeySpec(shape, FLOAT)), scope=scope).result(0)
    assert entry.part_bytes() == sizes


def test_a_scope_that_there_is_not_is_a_protocol_error() -> None:
    assert kind_of(Job(1).declare(0, ("w", SMALL), scope="column")) == "ProtocolError"


@pytest.mark.parametrize("early", [True, False])
def test_other_ranks_get_the_same_answer_once_the_values_are_there(early: bool) -> None:
    job = Job(2)
    waiting = [job.declare(1, ("w", SMALL))] if early else []
    _, entries = job.declare(0, ("w", SMALL)).result(0)
    waiting += [] if early else [job.declare(1, ("w", SMALL))]
    before = waiting[0].done()
    job.initialised(0, "w")
    assert before is False
    assert waiting[0].result(0) == (False, entries)


def test_only_the_deciding_rank_can_say_that_values_are_there() -> None:
    job = Job(2)
    job.declare(0, ("w", SMALL)).result(0)
    waiting = job.declare(1, ("w", SMALL))
    with pytest.raises(UsageError, match="INITIALISED came from worker 1, but only worker 0"):
        job.initialised(1, "w")
    assert not waiting.done()
    job.initialised(0, "w")
    assert waiting.done()


def test_an_init_of_several_keys_waits_for_the_last_of_them() -> None:
    job = Job(2)
    both = job.declare(1, ("b", SMALL), ("a", SMALL))
    job.declare(0, ("a", SMALL))
    job.initialised(0, "a")
    halfway = both.done()
    job.declare(0, ("b", SMALL))
    job.initialised(0, "b")
    decides, entries = both.result(0)
    assert (halfway, decides, [entry.key for entry in entries]) == (False, False, ["b", "a"])


def test_parts_are_numbered_once_over_all_stores() -> None:
    job = Job(1)
    large = KeySpec((10,), FLOAT)
    _, first = job.declare(0, ("a", large), ("b", SMALL)).result(0)
    _, second = job.declare(0, ("a", SMALL), store=2).result(0)
    assert [entry.first_part for entry in first + second] == [1, 4, 5]


def test_placement_balances_what_was_placed_before() -> None:
    job = Job(1, num_servers=2)
    servers = [
        entry.servers
        for key in ("a", "b", "c", "d")
        for entry in job.declare(0, (key, SMALL)).result(0)[1]
    ]
    assert sorted(server for placed in servers for server in placed) == [0, 0, 1, 1]


def test_all_keys_are_placed_by_the_shares_that_were_found_for_the_first() -> None:
    to_find = [[0.5, 0.0, 0.25]]
    job = Job(1, num_servers=3, find_shares=to_find.pop)
    job.declare(0)
    assert len(to_find) == 1  # not before the first key: the roster may not be there yet
    placed = [
        server
        for key in range(12)
        for entry in job.declare(0, (key, SMALL)).result(0)[1]
        for server in entry.servers
    ]
    assert [placed.count(server) for server in range(3)] == [8, 0, 4]


def test_a_key_declared_again_by_rank_0_stays_where_it_is() -> None:
    job = Job(1)
    _, first = job.declare(0, ("w", SMALL)).result(0)
    _, again = job.declare(0, ("w", SMALL), ("v", SMALL)).result(0)
    assert again[0] == first[0]
    assert again[1].first_part == 2


@pytest.mark.parametrize("early", [True, False])
def test_a_rank_with_another_shape_is_told_both(early: bool) -> None:
    job = Job(2)
    theirs = [job.declare(1, ("w", KeySpec((2, 2), FLOAT)))] if early else []
    job.declare(0, ("w", SMALL))
    job.initialised(0, "w")
    theirs += [] if early else [job.declare(1, ("w", KeySpec((2, 2), FLOAT)))]
    text = str(theirs[0].error())
    assert kind_of(theirs[0]) == "ValueMismatchError"
    assert "(4,)" in text
    assert "(2, 2)" in text


def test_a_rank_with_another_dtype_is_told_both() -> None:
    job = Job(2)
    job.declare(0, ("w", SMALL))
    theirs = job.declare(1, ("w", KeySpec((4,), np.dtype(np.float64))))
    assert kind_of(theirs) == "ValueMismatchError"
    assert "float32" in str(theirs.error())
    assert "float64" in str(theirs.error())


def test_keys_of_both_kinds_are_refused() -> None:
    job = Job(2)
    job.declare(0, ("w", SMALL))
    assert kind_of(job.declare(1, (3, SMALL))) == "KeyTypeError"


def test_stores_created_in_another_order_are_noticed() -> None:
    job = Job(2)
    job.declare(0, ("w", SMALL), kind="sync")
    other = job.declare(1, ("w", SMALL), kind="async")
    assert kind_of(other) == "UnknownTypeError"
    assert "worker 1" in str(other.error())


def test_key_spaces_of_stores_are_apart() -> None:
    job = Job(1)
    job.declare(0, ("w", SMALL))
    decides, _ = job.declare(0, ("w", KeySpec((9,), FLOAT)), store=2).result(0)
    assert decides


# -- departures ---------------------------------------------------------------------------


def test_the_lowest_rank_that_is_left_stands_in_for_rank_0() -> None:
    job = Job(3)
    second, third = job.declare(2, ("w", SMALL)), job.declare(1, ("w", SMALL))
    job.leave(0)
    decides, entries = third.result(0)
    halfway = second.done()
    job.initialised(1, "w")
    assert (decides, halfway, second.result(0)) == (True, False, (False, entries))


def test_a_key_that_is_there_is_not_created_again_when_rank_0_has_left() -> None:
    # Its parts exist on the servers, which would refuse them.
    job = Job(2)
    _, entries = job.declare(0, ("w", SMALL)).result(0)
    job.initialised(0, "w")
    job.leave(0)
    assert job.declare(1, ("w", SMALL)).result(0) == (False, entries)


def test_a_set_optimizer_that_waits_for_rank_0_ends_when_rank_0_leaves() -> None:
    job = Job(2)
    waiting = job.same_optimizer(1, 1, SGD)
    job.leave(0)
    assert waiting.done()


# -- optimizers ---------------------------------------------------------------------------


@pytest.mark.parametrize("early", [True, False])
def test_the_same_optimizer_on_another_rank_is_fine(early: bool) -> None:
    job = Job(2)
    theirs = [job.same_optimizer(1, 1, SGD)] if early else []
    before = [future.done() for future in theirs]
    job.set_optimizer(SGD).result(0)
    theirs += [] if early else [job.same_optimizer(1, 1, SGD)]
    assert before in ([], [False])
    assert theirs[0].result(0) == b""


@pytest.mark.parametrize("early", [True, False])
def test_another_optimizer_on_another_rank_is_an_error_with_both(early: bool) -> None:
    job = Job(2)
    theirs = [job.same_optimizer(1, 1, FASTER)] if early else []
    job.set_optimizer(SGD)
    theirs += [] if early else [job.same_optimizer(1, 1, FASTER)]
    text = str(theirs[0].error())
    assert kind_of(theirs[0]) == "OptimizerMismatch"
    assert all(word in text for word in ("worker 1", "worker 0", "0.1", "0.5", "sgd"))


def test_the_first_optimizer_is_compared_with_the_first_and_the_second_with_the_second() -> None:
    job = Job(2)
    job.set_optimizer(SGD)
    first, second = job.same_optimizer(1, 1, SGD), job.same_optimizer(1, 2, FASTER)
    before = (first.done(), second.done())
    job.set_optimizer(FASTER)
    assert (before, second.result(0)) == ((True, False), b"")


def test_after_a_disagreement_the_others_still_get_their_answers() -> None:
    job = Job(3)
    wrong, right = job.same_optimizer(1, 1, FASTER), job.same_optimizer(2, 1, SGD)
    job.set_optimizer(SGD)
    assert (wrong.done(), right.done()) == (True, True)


def test_the_latest_optimizer_can_be_asked_for() -> None:
    job = Job(2)
    none = job.ask(1, DirectoryCall.OPTIMIZER_OF, STORE).result(0)
    job.set_optimizer(SGD)
    job.set_optimizer(FASTER)
    found, _ = unpack(job.ask(1, DirectoryCall.OPTIMIZER_OF, STORE).result(0), list, int)
    assert unpack(none, list, int) == [[], 0]
    assert from_plain(found[0]) == optimizers.create("sgd", learning_rate=0.5)


def test_a_rank_hears_with_the_optimizer_how_many_calls_it_has_decided() -> None:
    """Another process in its seat can then tell which of them it need not make again."""
    job = Job(2)

    def decided(rank: int) -> int:
        body = job.ask(rank, DirectoryCall.OPTIMIZER_OF, STORE).result(0)
        number: int = unpack(body, list, int)[1]
        return number

    counts = [decided(0)]
    job.set_optimizer(SGD)
    counts.append(decided(0))
    job.set_optimizer(FASTER, "UsageError", "a key is cut")  # it is over too
    assert ([*counts, decided(0)], decided(1)) == ([0, 1, 2], 0)


# -- joint calls --------------------------------------------------------------------------


def test_the_news_have_the_keys_the_count_of_optimizers_and_what_the_deciding_rank_says() -> None:
    job = Job(2)
    _, entries = job.declare(0, ("w", SMALL)).result(0)
    job.initialised(0, "w")
    job.set_optimizer(SGD)
    meetings = [job.together(rank, 1, "steps") for rank in (0, 1)]
    news = job.done_together(0, 1, said="found 4 steps")
    rows, num_optimizers, said = unpack(news, bytes, int, str)
    assert (unpack_entries(rows), num_optimizers, said) == (entries, 1, "found 4 steps")
    assert [unpack(each.result(0), bool, bytes) for each in meetings] == [
        [True, b""],
        [False, news],
    ]


# -- a job that lives long ----------------------------------------------------------------


def grown_by(act: Callable[[int], object]) -> float:
    """Bytes that each of 400 calls leaves, after 100 that may fill what is bounded."""
    tracemalloc.start()
    try:
        for number in range(100):
            act(number)
        before = tracemalloc.get_traced_memory()[0]
        for number in range(100, 500):
            act(number)
        gc.collect()
        return (tracemalloc.get_traced_memory()[0] - before) / 400
    finally:
        tracemalloc.stop()


def test_settings_and_keys_of_a_long_job_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rate that is set in every step, by one rank alone or by all; keys for a step each."""
    monkeypatch.setattr(keys, "_MOST_DELETED", 50)
    monkeypatch.setattr(optimizer_calls, "MOST_CALLS", 50)
    job = Job(2)

    def alone(number: int) -> None:
        job.set_optimizer(["sgd", {"learning_rate": 1.0 + number}])

    def both(number: int) -> None:
        alone(number)
        job.same_optimizer(1, 501 + number, ["sgd", {"learning_rate": 1.0 + number}])

    def key(number: int) -> None:
        name = f"key {number}"
        job.declare(0, (name, SMALL))
        job.initialised(0, name)
        meetings = [job.together(rank, number + 1, "delete") for rank in (0, 1)]
        job.done_together(0, number + 1, name)
        assert all(each.done() for each in meetings)

    assert max(grown_by(alone), grown_by(both), grown_by(key)) < 20.0


def test_a_rank_far_behind_is_not_compared_with_what_is_forgotten() -> None:
    """Nor is it an error then: it may well have been right."""
    job = Job(2)
    for number in range(optimizer_calls.MOST_CALLS + 10):
        job.set_optimizer(["sgd", {"learning_rate": 1.0 + number}])
    assert job.same_optimizer(1, 10, ["sgd", {"learning_rate": 10.0}]).result(0) == b""
    assert job.same_optimizer(1, 11, ["sgd", {"learning_rate": 11.0}]).result(0) == b""
    wrong = job.same_optimizer(1, 12, ["sgd", {"learning_rate": 0.5}])
    assert kind_of(wrong) == "OptimizerMismatch"


def test_a_deleted_key_goes_on_counting_its_generations() -> None:
    job = Job(1)
    found = []
    for call in (1, 2, 3):
        _, (entry,) = job.declare(0, ("w", SMALL)).result(0)
        found.append(entry.generation)
        job.initialised(0, "w")
        job.together(0, call, "delete")
        job.done_together(0, call, "w")
    assert found == [1, 2, 3]


# -- what makes no sense ------------------------------------------------------------------


def test_a_call_that_the_directory_does_not_know_is_a_protocol_error() -> None:
    assert kind_of(Job(1).ask(0, 99)) == "ProtocolError"


def test_a_malformed_body_is_a_protocol_error() -> None:
    assert kind_of(Job(1).ask(0, DirectoryCall.DECLARE, STORE, 7, "element", [])) == "ProtocolError"


def test_an_unknown_store_cannot_be_initialised() -> None:
    job = Job(1)
    assert kind_of(job.ask(0, DirectoryCall.INITIALISED, 9, ["w"], "", "")) == "UsageError"


def test_a_request_that_fails_leaves_the_directory_as_it_was() -> None:
    job = Job(2)
    job.declare(0, ("w", SMALL))
    job.declare(0, ("v", SMALL), ("w", KeySpec((9,), FLOAT)))
    decides, (entry,) = job.declare(0, ("v", SMALL)).result(0)
    assert (decides, entry.first_part) == (True, 2)


# -- deadlocks ----------------------------------------------------------------------------


def test_what_waits_in_a_deadlock_ends_and_can_be_asked_again() -> None:
    job = Job(2)
    error = DeadlockError("all wait")
    waiting = [
        job.declare(1, ("b", SMALL)),
        job.same_optimizer(1, 1, SGD),
        job.together(1, 1, "delete(['w'])"),
    ]
    closing = job.together(1, 2, CLOSING)
    job.directory.deadlocked(error)
    assert [kind_of(each) for each in waiting] == ["DeadlockError"] * 3
    assert not closing.done(), "nobody waits for it"
    assert kind_of(job.together(0, 1, "delete(['w'])")) == "DeadlockError", "it is over for all"
    job.set_optimizer(SGD).result(0)
    job.same_optimizer(1, 2, SGD).result(0)
    assert job.declare(0, ("b", SMALL)).result(0)[0]
    again = job.declare(1, ("b", SMALL))
    job.initialised(0, "b")
    assert not again.result(0)[0]
    assert job.together(0, 2, CLOSING).done()
