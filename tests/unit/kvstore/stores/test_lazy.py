"""Arrays whose values are still on their way. The store is played by a future and a wait."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from nd_helpers import Call, begin

from kvstore import cpu
from kvstore.arrays import adapter_for, pending
from kvstore.mxnet import nd
from kvstore.mxnet.nd import NDArray
from pslite.errors import DeadlineError, NodeLostError, PSError, RemoteError
from pslite.future import Future, completed, failed


@pytest.fixture(autouse=True)
def nothing_is_left_under_way() -> Iterator[None]:
    yield
    assert not pending._unfinished
    gc.collect()
    assert not list(pending._failed)


READS: dict[str, Callable[[NDArray], Any]] = {
    "asnumpy": NDArray.asnumpy,
    "repr": repr,
    "float": lambda a: float(a[0]),
    "bool": lambda a: bool(a[0]),
    "array": np.asarray,
    "arithmetic": lambda a: 1 + a,
    "ufunc": np.exp,
    "comparison": lambda a: a == 1,
    "sum": NDArray.sum,
    "clip": lambda a: a.clip(0, 1),
    "argmax": NDArray.argmax,
    "dot": lambda a: nd.ones(3).dot(a),
    "copy": NDArray.copy,
    "copyto": lambda a: a.copyto(nd.zeros(3)),
    "as_in_context": lambda a: a.as_in_context(cpu(1)),
    "astype": lambda a: a.astype("float64"),
    "array_of": nd.array,
    "stack": lambda a: nd.stack(nd.ones(3), a),
    "choice": lambda a: a[[0, 1]],
    "as a choice": lambda a: nd.arange(9)[a],
    "as a value": lambda a: nd.zeros(3).__setitem__(slice(None), a),
    "transpose": lambda a: a.T,
    "broadcast": lambda a: a.broadcast_to((2, 3)),
    "iteration": lambda a: [float(element) for element in a],
    "wait_to_read": NDArray.wait_to_read,
    "waitall": lambda a: nd.waitall(),
    "to_host": lambda a: adapter_for(a).to_host(a),
    "sum_in_order": lambda a: adapter_for(a).sum_in_order([a, a], cpu(), a.dtype),
}
WRITES: dict[str, Callable[[NDArray], Any]] = {
    "set": lambda a: a.__setitem__(0, 1),
    "in place": lambda a: a.__iadd__(1),
    "out": lambda a: np.exp(nd.ones(3), out=a),
    "at": lambda a: np.add.at(a, [0], 1),
    "copyto": lambda a: nd.ones(3).copyto(a),
    "wait_to_write": NDArray.wait_to_write,
    "memory": lambda a: adapter_for(a).memory(a),
    "from_host": lambda a: adapter_for(a).from_host(np.ones(3), a),
    "assign": lambda a: adapter_for(a).assign(np.ones(3), a),
}
ACCESSES = READS | WRITES


# -- waiting ------------------------------------------------------------------------------


@pytest.mark.parametrize("access", ACCESSES.values(), ids=ACCESSES.keys())
def test_every_access_to_the_values_waits_for_them(access: Callable[[NDArray], Any]) -> None:
    a = nd.zeros(3)
    call = Call(a)
    access(a)
    assert call.waits == 1
    access(a)
    assert call.waits == 1


def test_the_values_that_arrived_are_the_ones_that_are_read() -> None:
    a = nd.zeros(3)
    Call(a, value=7)
    assert a.asnumpy().tolist() == [7, 7, 7]
    Call(a, value=8)
    a += 1
    assert a.asnumpy().tolist() == [9, 9, 9]


def test_shape_dtype_device_and_views_are_had_without_waiting() -> None:
    a = nd.zeros((2, 3))
    call = Call(a)
    adapter = adapter_for(a)
    assert (a.shape, a.size, a.ndim, len(a), a.dtype, a.context) == ((2, 3), 6, 2, 2, "f4", cpu())
    assert (adapter.shape(a), adapter.dtype(a), adapter.context(a)) == ((2, 3), "f4", cpu())
    assert adapter.why_read_only(a) is None
    row, flat = a[0], a.reshape(-1)
    assert call.waits == 0
    assert flat.asnumpy().tolist() == [5] * 6
    Call(a, value=6)
    assert row.asnumpy().tolist() == [6, 6, 6]


def test_an_array_waits_for_a_call_that_writes_into_a_view_of_it() -> None:
    a = nd.zeros((2, 2))
    call = Call(a[1])
    assert a.asnumpy().tolist() == [[0, 0], [5, 5]]
    assert call.waits == 1


def test_views_that_are_written_by_one_call_wait_once() -> None:
    a = nd.zeros((2, 2))
    call = Call(a[0], a[1])
    assert a.asnumpy().tolist() == [[5, 5], [5, 5]]
    assert call.waits == 1


def test_a_second_call_into_an_array_begins_after_the_first() -> None:
    a = nd.zeros(1)
    first = Call(a, value=1)
    second = Call(a, value=2)
    assert first.waits == 1
    assert a.asscalar() == 2
    assert second.waits == 1


@pytest.mark.parametrize("name", WRITES)
def test_a_write_waits_for_a_call_that_still_sends_from_the_array(name: str) -> None:
    a = nd.zeros(3)
    future: Future[None] = Future()
    seen = []

    def wait(waited: Future[Any]) -> None:
        seen.append(a._array.tolist())
        waited.set_result(None)

    begin(future, reads=[a], wait=wait)
    assert a.asnumpy().tolist() == [0, 0, 0]
    assert seen == []
    WRITES[name](a)
    assert seen == [[0, 0, 0]]


def test_what_has_ended_is_not_waited_for() -> None:
    a = nd.ones(2)
    call = Call(a)
    call.arrive()
    assert a.asnumpy().tolist() == [5, 5]
    begin(completed(None), writes=[a])
    a += 1
    assert call.waits == 0


def test_without_a_wait_of_the_store_the_futures_own_is_used() -> None:
    a = nd.zeros(2)
    future: Future[None] = Future()
    begin(future, writes=[a])

    def arrive() -> None:
        a._array[:] = 3
        future.set_result(None)

    late = threading.Timer(0.05, arrive)
    late.start()
    assert a.asnumpy().tolist() == [3, 3]
    late.join()


def test_an_interrupted_wait_leaves_the_call_under_way() -> None:
    a = nd.zeros(1)
    future: Future[None] = Future()
    interrupts = iter([KeyboardInterrupt(), DeadlineError("not yet")])

    def wait(waited: Future[Any]) -> None:
        for interrupt in interrupts:
            raise interrupt
        a._array[:] = 4
        waited.set_result(None)

    begin(future, writes=[a], wait=wait)
    with pytest.raises(KeyboardInterrupt):
        a.asnumpy()
    with pytest.raises(DeadlineError, match=r"^not yet$"):
        a += 1
    assert a.asscalar() == 4


def test_an_interrupt_that_comes_with_the_answer_is_not_lost() -> None:
    a = nd.zeros(1)
    future: Future[None] = Future()

    def wait(waited: Future[Any]) -> None:
        waited.set_result(None)
        raise KeyboardInterrupt

    begin(future, writes=[a], wait=wait)
    with pytest.raises(KeyboardInterrupt):
        a.asnumpy()
    assert a.asscalar() == 0


def test_with_nothing_pending_no_lock_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "_lock", None)
    a = nd.ones(2)
    a += 1
    assert a.asnumpy().tolist() == [2, 2]


# -- errors -------------------------------------------------------------------------------


@pytest.mark.parametrize("access", ACCESSES.values(), ids=ACCESSES.keys())
def test_any_access_raises_the_error_once_and_then_goes_through(
    access: Callable[[NDArray], Any],
) -> None:
    a = nd.zeros(3)
    call = Call(a)
    call.future.set_error(NodeLostError("server 1 is lost", role="server", rank=1))
    with pytest.raises(NodeLostError) as raised:
        access(a)
    assert str(raised.value) == (
        "an array did not get the new values (waiting for the servers' answer for 'w'): "
        "server 1 is lost"
    )
    assert (raised.value.role, raised.value.rank) == ("server", 1)
    assert raised.value.__cause__ is call.future.error()
    if access is READS["waitall"]:  # told of a call; the array itself still has no values
        with pytest.raises(NodeLostError):
            a.wait_to_read()
    access(a)
    nd.waitall()


@pytest.mark.parametrize(
    ("error", "members"),
    [
        (RemoteError("boom", kind="ValueError", where="server 0"), {"kind": "ValueError"}),
        (NodeLostError("boom", role="server", rank=2), {"role": "server", "rank": 2}),
        (DeadlineError("boom"), {}),
    ],
)
def test_an_error_keeps_its_class_and_what_it_carries(
    error: PSError, members: dict[str, Any]
) -> None:
    a = nd.zeros(1)
    begin(failed(error), writes=[a])
    with pytest.raises(type(error), match=r"an array did not get the new values.*: boom") as raised:
        a.wait_to_read()
    assert {name: getattr(raised.value, name) for name in members} == members
    assert str(error) == "boom"
    a.wait_to_read()


class RolledBack(PSError):
    """An error whose constructor takes no text."""

    def __init__(self, step: int, *, why: str) -> None:
        super().__init__(f"back to step {step}: {why}")


@pytest.mark.parametrize("error", [ZeroDivisionError("ours"), RolledBack(3, why="a crash")])
def test_a_bug_and_what_cannot_be_copied_come_out_as_they_are(error: Exception) -> None:
    a = nd.zeros(1)
    begin(failed(error), writes=[a])
    with pytest.raises(type(error)) as raised:
        a.asnumpy()
    assert raised.value is error
    a.asnumpy()


def test_an_error_that_comes_during_the_wait_is_raised_once() -> None:
    a = nd.zeros(1)
    future: Future[None] = Future("an answer")

    def wait(waited: Future[Any]) -> None:
        waited.set_error(RemoteError("boom"))
        waited.result()

    begin(future, writes=[a], wait=wait)
    with pytest.raises(RemoteError, match="an array did not get"):
        a.asnumpy()
    assert a.asscalar() == 0


def test_each_array_of_a_failed_call_raises_the_error() -> None:
    a, b = nd.zeros(1), nd.zeros(1)
    call = Call(a, b)
    call.future.set_error(RemoteError("boom"))
    for array in (a, b):
        with pytest.raises(RemoteError, match="boom"):
            array.asnumpy()
        array.asnumpy()


def test_the_error_of_a_call_that_only_reads_is_not_the_arrays() -> None:
    a, b = nd.zeros(1), nd.zeros(1)
    begin(failed(RemoteError("boom")), reads=[a])
    nd.waitall()
    a += 1
    begin(failed(RemoteError("boom")), reads=[a], writes=[b])
    a += 1
    with pytest.raises(RemoteError, match="boom"):
        b.asnumpy()


def test_a_new_call_does_not_hide_the_error_of_the_last_one() -> None:
    a = nd.zeros(1)
    begin(failed(RemoteError("boom")), writes=[a])
    begin(Future(), writes=[a], wait=lambda future: future.set_result(None))
    with pytest.raises(RemoteError, match="boom"):
        a.asnumpy()
    a.asnumpy()
