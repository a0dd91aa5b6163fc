"""Who carries collective calls by rings out, and how they end: members as threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from collective.rings import connected, mismatch, total

from pslite.collective import shared_memory_driver
from pslite.collective.shared_memory_algorithms import Description, Take
from pslite.collective.shared_memory_driver import SharedMemoryDriver
from pslite.errors import DeadlineError, NodeLostError, UsageError
from pslite.future import Future


class Group:
    """A group in one process."""

    def __init__(self, size: int) -> None:
        self.lost: BaseException | None = None
        self.members = [
            SharedMemoryDriver(
                ring, size, mismatch=mismatch, why_over=lambda ranks: self.lost, name="group 'all'"
            )
            for ring in connected(size, 4096)
        ]
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="member")

    def on_all(self, call: Callable[[int, SharedMemoryDriver], Any]) -> list[Any]:
        """What ``call`` returns on each member, each on a thread of its own."""
        futures = [
            self._pool.submit(call, rank, member) for rank, member in enumerate(self.members)
        ]
        return [future.result(30) for future in futures]

    def close(self) -> None:
        for member in self.members:
            member.close()
        self._pool.shutdown()


@pytest.fixture(params=[2, 3])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    group = Group(request.param)
    yield group
    group.close()


def reduced(member: SharedMemoryDriver, array: np.ndarray, out: np.ndarray) -> Future[Any]:
    text = f"all_reduce({array.dtype}, {array.shape})"
    description = Description(text.encode(), (array.nbytes,))
    return member.all_reduce(text, description, array, out, total, value=out)


def barrier(member: SharedMemoryDriver) -> Future[Any]:
    def begin(_: list[Description]) -> Take:
        return lambda start, pieces: None

    return member.exchange("barrier", Description(b"barrier"), [], begin, value=None)


def test_calls_of_all_sizes_one_after_the_other(group: Group) -> None:
    def train(rank: int, member: SharedMemoryDriver) -> list[float]:
        sums = []
        for length in (1, 0, 100_000, 3, 5_000, 20_000):
            out = np.empty(length)
            reduced(member, np.full(length, rank + 1.0), out).result(20)
            sums.append(out.sum() / max(1, length))
        return sums

    size = len(group.members)
    each = size * (size + 1) / 2
    assert group.on_all(train) == [[each, 0.0, each, each, each, each]] * size


def test_calls_that_nobody_waits_for_are_carried_out_in_order(group: Group) -> None:
    def train(rank: int, member: SharedMemoryDriver) -> list[float]:
        outs = [np.empty(length) for length in (3, 50_000, 2, 70_000)]
        futures = [
            reduced(member, np.full(len(out), float(index)), out) for index, out in enumerate(outs)
        ]
        futures[-1].result(20)
        assert [future.done() for future in futures] == [True] * 4
        return [float(out[0]) for out in outs]

    size = len(group.members)
    assert group.on_all(train) == [[0.0, 1.0 * size, 2.0 * size, 3.0 * size]] * size


def test_a_callback_may_make_the_next_call_and_wait(group: Group) -> None:
    def train(rank: int, member: SharedMemoryDriver) -> float:
        ended = threading.Event()
        out, second = np.empty(4), np.empty(50_000)

        def then(_: Future[Any]) -> None:
            following = reduced(member, np.ones(50_000), second)
            following.on_done(lambda _: ended.set())

        reduced(member, np.ones(4), out).on_done(then)
        assert ended.wait(20)
        return float(second[-1])

    size = len(group.members)
    assert group.on_all(train) == [float(size)] * size


def test_a_future_that_is_only_asked_comes_to_its_end(group: Group) -> None:
    def train(rank: int, member: SharedMemoryDriver) -> bool:
        future = barrier(member)
        while not future.done():
            pass
        return future.error() is None

    assert all(group.on_all(train))


def test_a_wait_has_its_limit_and_the_call_still_counts(group: Group) -> None:
    first, *others = group.members
    future = barrier(first)
    with pytest.raises(DeadlineError, match=r"timed out after 0\.05 s waiting for barrier"):
        future.result(0.05)
    for member in others:
        barrier(member)
    assert future.result(20) is None


def test_a_lost_member_ends_the_waits_of_the_others(group: Group) -> None:
    futures = [barrier(member) for member in group.members[1:]]
    for future in futures:
        future.on_done(lambda _: None)
    group.lost = NodeLostError("worker 0 is lost: its process is gone")
    for future in futures:
        with pytest.raises(NodeLostError, match="worker 0 is lost"):
            future.result(20)
    with pytest.raises(NodeLostError, match="worker 0 is lost"):
        barrier(group.members[1]).result(20)


def test_a_member_that_leaves_ends_the_waits_of_the_others(group: Group) -> None:
    futures = [barrier(member) for member in group.members[1:]]
    group.members[0].close()
    for future in futures:
        with pytest.raises(UsageError) as caught:
            future.result(20)
        assert str(caught.value).startswith(
            "rank 0 has left group 'all', and a call waits for it: every rank has to make all calls"
        )


def test_a_member_that_fails_is_not_the_cause_that_the_others_name(group: Group) -> None:
    """As when a server is lost, which one member notices first."""
    futures = [barrier(member) for member in group.members[1:]]
    for future in futures:
        future.on_done(lambda _: None)
    cause = NodeLostError("server 0 is lost: its process is gone")
    group.members[0].close(cause)
    time.sleep(0.1)  # they look meanwhile
    group.lost = cause
    for future in futures:
        with pytest.raises(NodeLostError, match="server 0 is lost"):
            future.result(20)


def test_a_member_that_fails_is_named_where_nothing_else_is_heard(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory_driver, "_HEAR_S", 0.05)
    future = barrier(group.members[1])
    group.members[0].close(NodeLostError("server 0 is lost: its process is gone"))
    with pytest.raises(UsageError, match="rank 0 has ended its calls of group 'all' with an error"):
        future.result(20)


def test_the_ring_stays_open_while_the_others_are_told_of_the_end(group: Group) -> None:
    member = group.members[0]
    ring, waits = member.ring, barrier(member)
    waits.on_done(lambda _: None)  # the thread looks every moment whether all is over
    give_up, is_open = ring.give_up, []

    def slowly(*, has_failed: bool = False) -> None:
        time.sleep(0.2)
        is_open.append(bool(ring._members))
        give_up(has_failed=has_failed)

    ring.give_up = slowly  # type: ignore[method-assign]
    member.close(NodeLostError("server 0 is lost: its process is gone"))
    assert is_open == [True]
    with pytest.raises(NodeLostError, match="server 0 is lost"):
        waits.result(20)


def test_what_was_called_before_a_member_left_is_not_lost(group: Group) -> None:
    def train(rank: int, member: SharedMemoryDriver) -> float:
        out = np.empty(40_000)
        reduced(member, np.ones(40_000), out).result(20)
        if rank == 0:
            member.close()
        return float(out[-1])

    size = len(group.members)
    assert group.on_all(train) == [float(size)] * size


def test_a_step_that_is_cut_short_ends_the_group(group: Group) -> None:
    def interrupted(contributions: Any, out: Any) -> None:
        raise KeyboardInterrupt

    def train(rank: int, member: SharedMemoryDriver) -> str:
        out = np.empty(2)
        description = Description(b"all_reduce", (16,))
        try:
            member.all_reduce(
                "all_reduce",
                description,
                np.ones(2),
                out,
                interrupted if rank == 0 else total,
                value=out,
            ).result(20)
            barrier(member).result(20)
        except (KeyboardInterrupt, UsageError) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    first, *others = group.on_all(train)
    cut_short = "UsageError: a collective call was cut short by "
    assert first == "KeyboardInterrupt: " or first.startswith(cut_short), first
    for other in others:
        assert "rank 0 has left group 'all'" in other


def test_members_that_differ_hear_of_it_before_the_last_has_come() -> None:
    group = Group(3)
    try:
        first, second, third = group.members
        futures = [barrier(first), reduced(second, np.ones(3), np.empty(3))]
        text = r"rank 0 calls barrier; rank 1 calls all_reduce\(float64, \(3,\)\)"
        for future in futures:
            with pytest.raises(UsageError, match=text):
                future.result(20)
        with pytest.raises(UsageError, match=text):
            barrier(third).result(20)
        outs = [np.empty(2) for _ in group.members]
        for member, out in zip(group.members, outs, strict=True):
            last = reduced(member, np.ones(2), out)
        last.result(20)
        assert outs[2].tolist() == [3.0, 3.0]
    finally:
        group.close()
