"""Workers that wait for each other end with an error that names their calls; others wait on."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cluster import LIMIT_S
from workers import Workers

from kvstore import optimizer
from kvstore.stores.base import KVStore
from kvstore.stores.dist.progress import StoreProgress
from pslite.errors import DeadlineError, DeadlockError
from pslite.protocol.deadlocks import DeadlockDetector

FAST = {"stall_report_s": 0.1, "heartbeat_interval_s": 0.02}
ONE, TWO = np.ones(2), np.zeros(2)
Script = Callable[[KVStore], Any]


def started(num_workers: int = 2, **config: Any) -> Workers:
    """Workers whose waits are long after a moment."""
    return Workers("dist_sync", num_workers, 2, **{**FAST, **config})


def progress_of(kv: KVStore) -> StoreProgress:
    progress = kv._progress  # type: ignore[attr-defined]
    assert isinstance(progress, StoreProgress)
    return progress


def alone(workers: Workers) -> None:
    """Have each worker count its own thread only, of all that this process has."""
    for kv in workers.stores:
        progress_of(kv).others_may_act = lambda waiting: False


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the scheduler concludes each time that it has asked all nodes."""
    seen = DeadlockDetector.seen
    concluded: list[bool] = []

    def note(self: DeadlockDetector, *arguments: Any) -> bool:
        concluded.append(seen(self, *arguments))
        return concluded[-1]

    monkeypatch.setattr(DeadlockDetector, "seen", note)
    return concluded


def errors_of(workers: Workers, *scripts: Script) -> list[DeadlockError]:
    """What ends each worker's script."""

    def run(kv: KVStore) -> DeadlockError:
        with pytest.raises(DeadlockError) as raised:
            scripts[kv.rank](kv)
        return raised.value

    return workers.run(run)


def delete(kv: KVStore) -> None:
    kv.delete("v")


def push_and_pull(kv: KVStore) -> None:
    kv.push("v", ONE)
    kv.pull("v")


def pushpull(kv: KVStore) -> None:
    kv.pushpull("v", ONE.copy(), out=TWO.copy())


def init(kv: KVStore) -> None:
    kv.init("b", ONE)


def barrier(kv: KVStore) -> None:
    kv.barrier()


def set_optimizer(kv: KVStore) -> None:
    kv.set_optimizer(optimizer.SGD())


def load(kv: KVStore) -> None:
    kv.load_checkpoint("a directory")


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (push_and_pull, init, ["worker 0 waits in pull", "worker 1 waits in init", "'b'"]),
        (pushpull, init, ["worker 0 waits in pushpull", "round 1 of key 'v' waits for worker 1"]),
        (barrier, init, ["worker 0 waits in barrier", "barrier of all workers waits for worker 1"]),
        (delete, init, ["worker 0 waits in delete", "worker 1 waits in init"]),
        (barrier, delete, ["worker 0 waits in barrier", "worker 1 waits in delete"]),
        (load, set_optimizer, ["in load_checkpoint", "in set_optimizer"]),
        (barrier, pushpull, ["worker 0 waits in barrier", "round 1 of key 'v' waits for worker 0"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_workers_that_wait_for_each_other_end_with_the_calls_of_both(
    first: Script, second: Script, words: list[str]
) -> None:
    with started() as workers:
        alone(workers)
        workers.run(lambda kv: kv.init("v", np.zeros(2)))
        texts = {str(error) for error in errors_of(workers, first, second)}
        assert len(texts) == 1
        (text,) = texts
        for part in words:
            assert part in text
        assert re.search(r"\(test_deadlocks\.py:\d+\) for ", text)
        go_on(workers, {0: first, 1: second})


def go_on(workers: Workers, ended: dict[int, Script]) -> None:
    """After a deadlock in which these calls of each rank ended, the job works."""
    for rank, script in ended.items():
        other = workers.stores[1 - rank]
        if script in (push_and_pull, pushpull):
            other.push("v", ONE)  # rounds that lack somebody are open still
        elif script in (barrier, delete, load):
            # What ended for one has ended for all, also for those who come late.
            with pytest.raises(DeadlockError):
                script(other)
    workers.run(lambda kv: kv.wait())
    workers.run(lambda kv: kv.init(["b", "c"], [ONE, ONE]))
    workers.run(lambda kv: kv.barrier())
    workers.run(lambda kv: kv.delete("c"))
    workers.run(lambda kv: kv.set_optimizer(optimizer.SGD(learning_rate=2.0)))


def test_of_several_workers_those_in_the_same_call_are_named_together() -> None:
    with started(4) as workers:
        alone(workers)
        scripts = [barrier, init, barrier, init]
        text = str(errors_of(workers, *scripts)[3])
        assert re.search(r"worker 0, 2 wait in barrier \(.*\) for the barrier", text)
        assert re.search(r"; worker 1, 3 wait in init \(.*\) for worker 0", text)


def wait_for(condition: Callable[[], bool]) -> bool:
    """Whether it becomes true within the time that tests have."""
    pause = threading.Event()
    return any(condition() or pause.wait(0.02) for _ in range(int(LIMIT_S / 0.02)))


def after_looks(looks: list[bool], count: int) -> threading.Event:
    """Set once the scheduler has concluded so often, or after a while."""
    reached = threading.Event()

    def watch() -> None:
        wait_for(lambda: len(looks) >= count)
        reached.set()

    threading.Thread(target=watch, daemon=True).start()
    return reached


def test_a_limit_for_all_waits_does_not_hide_it() -> None:
    with started(stall_report_s=60.0, stall_timeout_s=8.0) as workers:
        alone(workers)
        errors_of(workers, barrier, init)


def test_a_worker_that_computes_is_waited_for(looks: list[bool]) -> None:
    """It never says that it waits, so nobody is even asked."""
    with started() as workers:
        alone(workers)
        paused = threading.Event()

        def run(kv: KVStore) -> None:
            if kv.rank == 1:
                paused.wait(1.5)
            kv.barrier()

        workers.run(run)
        assert looks == []


def test_a_worker_with_another_thread_is_waited_for(looks: list[bool]) -> None:
    with started() as workers:
        alone(workers)
        busy = progress_of(workers.stores[0])
        busy.others_may_act = lambda waiting: True
        enough = after_looks(looks, 3)

        def run(kv: KVStore) -> None:
            if kv.rank == 1:
                init(kv)
                barrier(kv)
                return
            other = threading.Thread(target=lambda: (enough.wait(LIMIT_S), init(kv)))
            other.start()
            barrier(kv)
            other.join()

        workers.run(run)
        assert len(looks) >= 3
        assert not any(looks)


def test_a_caller_with_a_limit_may_go_on_after_it(looks: list[bool]) -> None:
    with started() as workers:
        alone(workers)

        def run(kv: KVStore) -> None:
            if kv.rank == 1:
                init(kv)
                return
            # It does not speak up, since its waits end by themselves: have everybody asked anyway.
            kv._node.report_long_wait()  # type: ignore[attr-defined]
            while not enough.is_set():
                with pytest.raises(DeadlineError):
                    kv.wait(held, timeout=0.5)
            init(kv)

        workers.run(lambda kv: kv.init("v", np.zeros(2)))
        held = workers.stores[0].pushpull_async("v", ONE.copy(), out=TWO.copy())
        enough = after_looks(looks, 1)
        workers.run(run)
        assert looks == [False]
        workers.stores[1].push("v", ONE)


def test_a_wait_that_another_worker_will_end_is_not_ended(looks: list[bool]) -> None:
    """Worker 2 computes between its calls, and all others wait for it."""
    with started(3) as workers:
        alone(workers)
        paused = threading.Event()

        def run(kv: KVStore) -> None:
            for call in (barrier, init, pushpull):
                if kv.rank == 2:
                    paused.wait(0.6)
                call(kv)

        workers.run(lambda kv: kv.init("v", np.zeros(2)))
        workers.run(run)
        assert not any(looks)


def test_a_store_that_some_have_closed_can_be_closed_by_the_others_afterwards() -> None:
    with started() as workers:
        alone(workers)
        others = workers.create()
        workers.run(lambda kv: kv.init("w", ONE), others)
        others[0].close()
        errors_of(workers, barrier, init)
        others[1].close()

        def is_freed() -> bool:
            servers = workers.stores[0].stats()["servers"]
            return sum(each["parts"] for each in servers.values()) == 0

        assert wait_for(is_freed)


def test_what_a_node_reports_changes_with_each_message() -> None:
    with started() as workers:
        alone(workers)
        assert workers.cluster is not None
        server = workers.cluster.servers[0]
        workers.run(lambda kv: kv.init("v", np.zeros(2)))

        def counted() -> int:
            counts: list[int] = []

            def look() -> None:
                counts.append(server.reporter.report(server.clock()).moved)

            wait_for(lambda: (server.io_queue.perform(look).result(LIMIT_S), counts[-1] >= 0)[1])
            return counts[-1]

        before = counted()
        assert before == counted() >= 0
        workers.stores[0].stats()
        assert counted() > before
