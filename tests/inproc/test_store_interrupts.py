"""What befalls a store in the middle of a call: its node ends, its key is deleted, Ctrl-C.

Whatever it is: whoever waits is told, and nobody else is disturbed.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import LIMIT_S
from workers import Workers

import kvstore
import kvstore.server.app
import kvstore.server.directory
from kvstore.errors import CheckpointError, UnknownKeyError
from kvstore.mxnet import nd
from kvstore.server.app import ServerStores
from kvstore.server.directory import Directory
from kvstore.stores.base import KVStore
from kvstore.stores.dist.node import Waiter
from pslite.errors import ClosedError, PSError, RemoteError, UsageError


def ones(length: int = 4) -> np.ndarray[Any, Any]:
    return np.ones(length, np.float32)


def in_time(action: Any) -> None:
    """Run ``action`` on a thread of its own, so that a call that hangs fails the test."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "the call hangs"
    if errors:
        raise errors[0]


def test_small_calls_after_the_end_of_the_node_are_errors_and_do_not_hang() -> None:
    workers = Workers("dist_sync", 1, 1)
    with workers:
        kv = workers.stores[0]
        kv.init("w", ones())
        out = nd.zeros((4,))
        assert workers.cluster is not None
        workers.cluster.kill(workers.cluster.workers[0])

        def use() -> None:
            kv.push("w", ones())  # type: ignore[attr-defined]
            with pytest.raises(ClosedError):
                kv.pull("w")
            kv.pull("w", out=out)
            with pytest.raises(ClosedError):
                out.asnumpy()

        in_time(use)
        workers.has_failed = True


def test_a_call_whose_key_another_thread_deletes_ends_in_an_error_and_the_node_goes_on() -> None:
    with Workers("dist_sync", 1, 1) as workers:
        kv: Any = workers.stores[0]
        kv.init(["gone", "stays"], [ones(), ones()])
        exchange = kv._exchange
        held = threading.Event()
        kv.node.call(lambda: held.wait(LIMIT_S) and None)  # what comes now is taken later
        out = nd.zeros((4,))
        kv.pull("gone", out=out)
        kept = kv.pull_async("stays")
        exchange.remove(["gone"])
        held.set()
        with pytest.raises(UnknownKeyError, match="'gone' was deleted"):
            out.asnumpy()
        assert kept.result(LIMIT_S).tolist() == [1, 1, 1, 1]
        assert kv.pull("stays").tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupted_delete_ends_for_all_and_can_be_made_again(
    monkeypatch: pytest.MonkeyPatch, interrupted: int
) -> None:
    """Rank 0 would have to carry it out; an interrupt while it waits for rank 1 is told there."""
    with Workers("dist_sync") as workers:
        workers.run(lambda kv: kv.init("w", ones()))
        is_interrupted = threading.Event()
        waited = Waiter._wait

        def wait(waiter: Any, future: Any, *limits: Any, **how: Any) -> Any:
            if waiter._node.rank == interrupted and "to call delete" in future.what:
                is_interrupted.set()
                raise KeyboardInterrupt
            return waited(waiter, future, *limits, **how)

        def script(kv: KVStore) -> BaseException | None:
            if kv.rank != interrupted:
                is_interrupted.wait(LIMIT_S)
            try:
                kv.delete("w")
            except BaseException as error:
                return error
            return None

        with monkeypatch.context() as patched:
            patched.setattr(Waiter, "_wait", wait)
            outcomes = workers.run(script)
        assert isinstance(outcomes[interrupted], KeyboardInterrupt)
        if interrupted == 0:
            assert isinstance(outcomes[1], RemoteError)
            assert "KeyboardInterrupt" in str(outcomes[1])
            assert workers.run(lambda kv: kv.delete("w") or kv.keys()) == [[], []]  # type: ignore[func-returns-value]
        else:
            assert outcomes[0] is None


def test_a_forked_child_is_refused_at_once_whatever_waits_in_the_parent() -> None:
    with Workers("dist_sync", 1, 1) as workers:
        kv: Any = workers.stores[0]
        kv.init("w", ones())
        held = threading.Event()
        kv.node.call(lambda: held.wait(LIMIT_S) and None)
        kv.push("w", ones())  # waits to be taken, also in the child's copy of the store
        refused = 0

        def use(call: Any) -> None:
            nonlocal refused
            try:
                call()
            except UsageError:
                refused += 1

        node = kv.node
        node.io_queue.is_forked = True  # as a child sees it
        try:
            for call in (
                lambda: kv.push("w", ones()),
                lambda: kv.pull("w", out=nd.zeros((4,))),
                lambda: kv.pull("w"),
                lambda: kv.wait(),
            ):
                in_time(lambda call=call: use(call))
        finally:
            node.io_queue.is_forked = False
            held.set()
        assert refused == 4
        assert kv.pull("w").tolist() == [1, 1, 1, 1]
        assert isinstance(UsageError("x"), PSError)


def test_a_store_that_all_have_closed_leaves_nothing_behind_on_any_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when it is closed while its keys are still being made."""
    made: list[Any] = []
    monkeypatch.setattr(kvstore.server.app, "ServerStores", _keeping(made, ServerStores))
    monkeypatch.setattr(kvstore.server.directory, "Directory", _keeping(made, Directory))
    with Workers("dist_sync") as workers:

        def script(kv: KVStore) -> None:
            kv.set_optimizer(kvstore.optimizer.create("sgd", learning_rate=0.1))
            kv.init_async(["a", "b"], [ones(), ones()])  # type: ignore[attr-defined]
            kv.close()

        for _ in range(3):
            workers.run(script, workers.create())
        wait_until(lambda: not any(each._stores for each in made))
        assert len(made) == 3
        assert all(not each._parts for each in made if hasattr(each, "_parts"))


def _keeping(made: list[Any], kind: Any) -> Any:
    def keep(*arguments: Any, **options: Any) -> Any:
        made.append(kind(*arguments, **options))
        return made[-1]

    return keep


def wait_until(condition: Any) -> None:
    """Until it holds; fails after a while."""
    give_up_at = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_after_a_load_that_fails_half_way_optimizers_are_still_compared_call_by_call(
    tmp_path: Path,
) -> None:
    """Loading sets the optimizer of the file: a call that only rank 0 has made."""
    flags = np.array([True, False, True])
    with Workers("local") as workers:
        kv = workers.stores[0]
        kv.set_optimizer(kvstore.optimizer.create("sgd", learning_rate=0.5))
        kv.init("flags", flags)
        kv.save_checkpoint(tmp_path)
    (path,) = tmp_path.glob("values-*")
    data = path.read_bytes()
    path.write_bytes(data[:-3] + b"\1\7\1")  # no bool: found when the values are read

    with Workers("dist_sync") as workers:

        def script(kv: KVStore) -> float:
            kv.init("flags", flags)
            with pytest.raises(CheckpointError):
                kv.load_checkpoint(tmp_path)
            optimizer = kvstore.optimizer.create("sgd", learning_rate=0.25)
            if kv.rank == 1:  # the first to call
                asked = kv.set_optimizer_async(optimizer)  # type: ignore[attr-defined]
                kv.barrier()
                asked.result(LIMIT_S)
            else:
                kv.barrier()
                kv.set_optimizer(optimizer)
            return float(kv.optimizer_params()["learning_rate"])

        assert workers.run(script) == [0.25, 0.25]
