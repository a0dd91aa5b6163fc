"""Values that come later: NDArrays with distributed stores, and calls that go out together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cluster import LIMIT_S
from workers import Workers

import kvstore as mx
from kvstore import KVStore
from pslite import Future
from pslite.errors import NodeLostError

KEYS = [f"{index:02d}" for index in range(40)]
SHAPES = [(index % 7, 1 + index % 5) for index in range(40)]


def values(seed: int) -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(seed)
    return [generator.normal(size=shape).astype(np.float32) for shape in SHAPES]


@pytest.fixture(params=["dist_sync", "dist_device_sync"])
def workers(request: pytest.FixtureRequest) -> Any:
    with Workers(request.param, 2, 2, chunk_bytes=64, credit_bytes=512) as workers:
        workers.run(lambda kv: kv.set_optimizer(mx.optimizer.create("sgd", momentum=0.9)))
        workers.run(lambda kv: kv.init(KEYS, values(0)))
        yield workers


def expected(rounds: int) -> list[np.ndarray[Any, Any]]:
    kv = mx.kvstore.create("local")
    kv.set_optimizer(mx.optimizer.create("sgd", momentum=0.9))
    kv.init(KEYS, values(0))
    for number in range(rounds):
        gradients = [values(10 * number + rank + 1) for rank in range(2)]
        kv.push(KEYS, [list(pair) for pair in zip(*gradients, strict=True)])
    found: list[np.ndarray[Any, Any]] = kv.pull(KEYS)
    return found


@pytest.mark.parametrize("how", ["push then pull", "pushpull", "all pushes first", "in place"])
def test_a_loop_over_keys_gives_the_same_bits_as_lists(workers: Workers, how: str) -> None:
    def script(kv: KVStore) -> list[Any]:
        weights = [mx.nd.zeros(shape) for shape in SHAPES]
        for number in range(4):
            gradients = [mx.nd.array(g) for g in values(10 * number + kv.rank + 1)]
            if how == "all pushes first":
                for index, key in enumerate(KEYS):
                    kv.push(key, gradients[index], priority=-index)
            for index, key in enumerate(KEYS):
                if how == "pushpull":
                    kv.pushpull(key, gradients[index], out=weights[index], priority=-index)
                elif how == "in place":
                    kv.pushpull(key, gradients[index], priority=-index)
                else:
                    if how == "push then pull":
                        kv.push(key, gradients[index], priority=-index)
                    kv.pull(key, out=weights[index], priority=-index)
                if how != "in place":
                    gradients[index][:] = 1e9  # the caller's again at once
            kv.wait()  # waitall would wait for the other worker of this process, too
        return [array.asnumpy() for array in (gradients if how == "in place" else weights)]

    wanted = expected(4)
    for found in workers.run(script):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_pull_returns_before_the_value_is_there_and_reading_waits_for_it() -> None:
    with Workers("dist_sync") as workers:
        workers.run(lambda kv: kv.init("w", np.zeros(3, np.float32)))
        first, second = workers.stores
        out = mx.nd.ones((3,))
        first.push("w", mx.nd.ones((3,)))
        first.pull("w", out=out)  # needs the other worker's push, and returns all the same
        second.push("w", mx.nd.ones((3,)) * 4)
        np.testing.assert_array_equal(out.asnumpy(), np.full(3, 5.0))


def test_writing_to_an_array_waits_for_the_pull_into_it() -> None:
    with Workers("dist_sync") as workers:

        def script(kv: KVStore) -> Any:
            kv.init("w", np.zeros(3, np.float32))
            out = mx.nd.zeros((3,))
            kv.push("w", mx.nd.ones((3,)))
            kv.pull("w", out=out)
            out += 1
            return out.asnumpy()

        for value in workers.run(script):
            np.testing.assert_array_equal(value, np.full(3, 3.0))


def test_several_arrays_and_other_dtypes_get_the_value_too(workers: Workers) -> None:
    def script(kv: KVStore) -> Any:
        outs = [mx.nd.zeros(SHAPES[9]), mx.nd.zeros(SHAPES[9], dtype="float64")]
        kv.pull(KEYS[9], out=outs)
        return [out.asnumpy() for out in outs]

    for one, other in workers.run(script):
        np.testing.assert_array_equal(one, values(0)[9])
        np.testing.assert_array_equal(other, values(0)[9].astype(np.float64))


def test_lazy_and_plain_arrays_of_one_call_are_all_there_when_it_returns(workers: Workers) -> None:
    def script(kv: KVStore) -> Any:
        lazy, plain = mx.nd.zeros(SHAPES[3]), np.zeros(SHAPES[3], np.float32)
        kv.pull(KEYS[3], out=[lazy, plain])
        return plain, lazy.asnumpy()

    for plain, lazy in workers.run(script):
        np.testing.assert_array_equal(plain, values(0)[3])
        np.testing.assert_array_equal(lazy, values(0)[3])


def test_a_value_that_never_comes_is_an_error_where_it_is_read() -> None:
    with Workers("dist_sync", 2, 1, lost_after_s=0.2) as workers:
        workers.run(lambda kv: kv.init("w", np.zeros(3, np.float32)))
        first, _ = workers.stores
        out = mx.nd.zeros((3,))
        first.push("w", mx.nd.ones((3,)))
        first.pull("w", out=out)
        assert workers.cluster is not None
        workers.cluster.kill(workers.cluster.workers[1])
        with pytest.raises(NodeLostError, match="worker 1"):
            out.asnumpy()


def test_calls_of_many_threads_are_joined_without_mixing_their_values(workers: Workers) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def script(kv: KVStore) -> None:
        def one(index: int) -> None:
            out = mx.nd.zeros(SHAPES[index])
            for number in range(6):
                kv.push(KEYS[index], np.full(SHAPES[index], 0, np.float32), priority=number % 3)
                kv.pull(KEYS[index], out=out)
                np.testing.assert_array_equal(out.asnumpy(), values(0)[index])

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(one, range(40)))

    workers.run(script)


def test_what_came_together_goes_out_in_one_message_to_each_server() -> None:
    with Workers("dist_sync", 1, 2) as workers:
        (kv,) = workers.stores
        assert workers.cluster is not None
        node = workers.cluster.workers[0]
        kv.init(KEYS, values(0))
        sent: list[int] = []
        submit = node.traffic.submit

        def counting(transfers: Any) -> None:
            sent.append(len(transfers))
            submit(transfers)

        node.traffic.submit = counting  # type: ignore[method-assign]
        outs = [mx.nd.zeros(shape) for shape in SHAPES]
        begun: Future[None] = Future()

        def on_the_thread_that_would_take_them() -> None:
            for key, out in zip(KEYS, outs, strict=True):
                kv.push_async(key, out)
                kv.pull_async(key, out)
            begun.set_result(None)

        node.call(on_the_thread_that_would_take_them)
        begun.result(LIMIT_S)
        mx.nd.waitall()
        assert sent == [2]


@pytest.mark.parametrize("then", ["stats", "barrier", "wait", "result"])
def test_what_was_pushed_goes_out_before_anything_else_is_asked_for(then: str) -> None:
    with Workers("dist_async", 1, 1) as workers:
        (kv,) = workers.stores
        kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
        kv.init("w", np.zeros(3, np.float32))
        assert workers.cluster is not None
        (node,) = workers.cluster.workers
        node.io_queue.call_later = lambda delay_s, command: None  # type: ignore[method-assign]
        pushed = kv.push_async("w", np.ones(3, np.float32))  # type: ignore[attr-defined]
        if then == "result":
            pushed.result(LIMIT_S)
        elif then == "wait":
            kv.wait("w")  # type: ignore[attr-defined]
        else:
            getattr(kv, then)()
        pushed.flush = None  # what waits for nobody is not flushed from here on
        pushed.result(LIMIT_S)


def test_what_was_pushed_right_before_a_process_ends_is_not_lost() -> None:
    with Workers("dist_async", 2, 1) as workers:
        first, second = workers.stores
        workers.run(lambda kv: kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0)))
        workers.run(lambda kv: kv.init("w", np.zeros(3, np.float32)))
        assert workers.cluster is not None
        first.push("w", np.ones(3, np.float32))
        workers.cluster.workers[0].close()
        np.testing.assert_array_equal(second.pull("w"), np.full(3, -1.0))
