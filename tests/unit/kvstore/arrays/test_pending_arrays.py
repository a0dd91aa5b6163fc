"""``waitall``, and what calls under way keep alive. The store is played by a future."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from nd_helpers import Call, begin

from kvstore.arrays import pending
from kvstore.mxnet import nd
from pslite.errors import RemoteError
from pslite.future import Future, failed


@pytest.fixture(autouse=True)
def nothing_is_left_under_way() -> Iterator[None]:
    yield
    assert not pending._unfinished
    gc.collect()
    assert not list(pending._failed)


# -- all of them --------------------------------------------------------------------------


def test_waitall_waits_for_reads_and_writes_also_of_freed_arrays() -> None:
    a, b = nd.zeros(1), nd.zeros(1)
    calls = [Call(a), Call(nd.zeros(2))]
    reading: Future[None] = Future()
    begin(reading, reads=[b], wait=lambda future: future.set_result(None))
    nd.waitall()
    assert [call.waits for call in calls] == [1, 1]
    assert reading.done()
    nd.waitall()
    assert [call.waits for call in calls] == [1, 1]


def test_waitall_waits_for_all_before_it_raises_and_counts_the_errors() -> None:
    arrays = [nd.zeros(1) for _ in range(3)]
    calls = [Call(array) for array in arrays]
    for call in calls[:2]:
        call.future.set_error(RemoteError("boom"))
    with pytest.raises(RemoteError, match=r"an array, and those of 1 more calls,.*boom"):
        nd.waitall()
    assert calls[2].waits == 1
    nd.waitall()
    for array in arrays[:2]:
        with pytest.raises(RemoteError, match="boom"):
            array.asnumpy()
    nd.waitall()


def test_waitall_keeps_quiet_about_what_an_array_told_and_about_what_is_gone() -> None:
    a = nd.zeros(1)
    begin(failed(RemoteError("boom")), writes=[a])
    begin(failed(RemoteError("unread")), writes=[nd.zeros(1)])
    with pytest.raises(RemoteError, match="boom"):
        a.asnumpy()
    gc.collect()
    nd.waitall()


def test_an_interrupted_waitall_leaves_the_rest_under_way() -> None:
    a, b = nd.zeros(1), nd.zeros(1)
    first, second = Call(a), Call(b)
    first.future.describe = "the first"

    def wait(_: Future[Any]) -> None:
        raise KeyboardInterrupt

    interrupted: Future[None] = Future()
    begin(interrupted, writes=[nd.zeros(1)], wait=wait)
    with pytest.raises(KeyboardInterrupt):
        nd.waitall()
    interrupted.set_result(None)
    nd.waitall()
    assert (first.waits, second.waits) == (1, 1)


# -- memory and threads -------------------------------------------------------------------


def test_a_late_answer_for_a_freed_array_finds_its_memory() -> None:
    a = nd.zeros(1000)
    freed = weakref.ref(a)
    call = Call(a)
    del a
    gc.collect()
    assert freed() is None
    call.arrive()
    assert call.memories[0].tolist() == [5] * 1000


def test_a_call_that_has_ended_is_kept_by_nobody() -> None:
    a = nd.zeros(1)
    for _ in range(100):
        begin(Future(), reads=[a])
        future = next(iter(pending._unfinished))._work[0]  # type: ignore[index]
        future.set_result(None)
    assert len(a._uses.reads) == 1
    call = Call(a)
    call.arrive()
    gone = weakref.ref(call)
    del call, future
    gc.collect()
    assert gone() is None


def test_many_arrays_of_one_call_are_one_entry() -> None:
    arrays = [nd.zeros(2) for _ in range(50)]
    call = Call(*arrays)
    assert len(pending._unfinished) == 1
    nd.waitall()
    assert call.waits == 1
    assert all(array.asnumpy().tolist() == [5, 5] for array in arrays)


def test_threads_that_read_and_begin_calls_at_once_see_whole_values() -> None:
    arrays = [nd.zeros(64) for _ in range(8)]
    wrong: list[object] = []
    stop = threading.Event()
    ready: list[Call] = []
    work = threading.Semaphore(0)

    def complete() -> None:  # the node's I/O thread
        while True:
            work.acquire()
            if not ready:
                return
            ready.pop(0).arrive()

    def read() -> None:
        try:
            while not stop.is_set():
                for array in arrays:
                    # A view's length never changes; what is read may be of any round.
                    array[:32].asnumpy()
                    nd.waitall()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=each) for each in (complete, read, read)]
    for thread in threads:
        thread.start()
    for round_number in range(1, 30):
        for array in arrays:
            ready.append(Call(array, value=round_number, wait=Future.result))
            work.release()
        for array in arrays:
            if set(array.asnumpy().tolist()) != {round_number}:
                wrong.append(array)
    stop.set()
    work.release()
    for thread in threads:
        thread.join()
    assert wrong == []
