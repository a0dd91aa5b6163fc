"""When the memory of a push is free again at its worker: when nobody can read it any more."""

from __future__ import annotations

from typing import Any

import pytest

from pslite.errors import NodeLostError
from pslite.memory.heap import Heap
from pslite.plane import Send, Transfer, WorkerPlane
from pslite.wire.messages import Answer, PartsFailed, StaleEpoch

SERVER, NBYTES = 8, 6400
LOST = NodeLostError("server 0 is lost", role="server", rank=0)


class Worker:
    """A plane with pushes of two parts each, whose memory is a heap's."""

    def __init__(self) -> None:
        self.heap = Heap(shared=False)
        self.plane = WorkerPlane(window=0)
        self.errors: list[BaseException | None] = []

    def push(self) -> None:
        frames = [self.heap.buffer(NBYTES).data]
        sizes = NBYTES // 2, NBYTES // 2
        self.plane.submit(Transfer(SERVER, (1, 2), sizes, frames, None, self.errors.append))

    def sent(self) -> Send | None:
        """What goes out; who holds it is the channel, until it is accepted."""
        return self.plane.take(SERVER) if SERVER in self.plane.outbox else None

    @property
    def held(self) -> int:
        """How many pushes' memory is not free."""
        return self.heap.used_bytes // NBYTES


def answer(*parts: int, round_: int = 1) -> Answer:
    rounds = (round_,) * len(parts)
    return Answer(True, parts, rounds, rounds, ())


def failed(*parts: int, consumed: bool) -> PartsFailed:
    return PartsFailed(True, consumed, parts, (1,) * len(parts), "UsageError", "no", "", -1)


def test_a_push_keeps_its_memory_after_it_was_accepted_until_it_is_answered() -> None:
    worker = Worker()
    worker.push()
    send = worker.sent()
    assert send is not None
    del send  # it was accepted
    assert worker.held == 1
    worker.plane.answered(answer(1, 2), ())
    assert worker.held == 0
    assert worker.errors == [None]


def test_a_message_that_may_be_repeated_keeps_the_memory_of_a_push_that_was_answered() -> None:
    worker = Worker()
    worker.push()
    send = worker.sent()
    worker.plane.answered(answer(1, 2), ())
    assert worker.held == 1
    del send
    assert worker.held == 0


@pytest.mark.parametrize("last", [answer(2), failed(2, consumed=True), failed(2, consumed=False)])
def test_it_is_the_last_part_that_frees_the_memory(last: Any) -> None:
    worker = Worker()
    worker.push()
    worker.sent()
    worker.plane.answered(answer(1), ())
    assert worker.held == 1
    (worker.plane.answered(last, ()) if isinstance(last, Answer) else worker.plane.refused(last))
    assert worker.held == 0
    assert len(worker.errors) == 1


def test_a_push_that_waits_for_its_turn_or_is_asked_for_again_keeps_its_memory() -> None:
    worker = Worker()
    worker.push()
    worker.push()  # held: the window is empty
    worker.sent()
    worker.plane.stale(StaleEpoch(2, True, (1, 2), (1, 1)))
    assert worker.sent() is None
    assert worker.held == 2
    worker.plane.begin_epoch(2)
    again = worker.sent()
    assert again is not None
    assert sum(len(frame) for frame in again.frames) == NBYTES
    del again
    assert worker.held == 2
    worker.plane.answered(answer(1, 2), ())
    assert worker.held == 1
    worker.sent()
    worker.plane.answered(answer(1, 2, round_=2), ())
    assert worker.held == 0


def test_what_was_pushed_to_a_lost_server_is_never_used_again() -> None:
    """It may live, and read, though it was declared lost."""
    worker = Worker()
    worker.push()
    worker.sent()
    worker.plane.answered(answer(1), ())
    worker.plane.depart(SERVER, LOST)
    assert worker.errors == [LOST]
    assert worker.held == 1
    for _ in range(3):
        worker.push()  # is refused at once
    assert worker.errors == [LOST] * 4
    assert worker.held == 1


def test_what_was_pushed_before_the_node_failed_is_never_used_again() -> None:
    worker = Worker()
    worker.push()
    worker.push()
    worker.sent()
    worker.plane.fail(LOST)
    assert worker.errors == [LOST] * 2
    assert worker.held == 2


def test_an_answer_that_comes_a_second_time_frees_nothing_of_a_later_push() -> None:
    worker = Worker()
    worker.push()
    worker.sent()
    worker.plane.answered(answer(1, 2), ())
    worker.push()
    worker.sent()
    worker.plane.answered(answer(1, 2), ())
    assert worker.held == 1
    worker.plane.answered(answer(1, 2, round_=2), ())
    assert worker.held == 0
