"""Waits that have a limit end with who is missing, and what they waited for goes on."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from workers import Workers

from kvstore.stores.base import KVStore
from pslite.errors import DeadlineError

LIMIT = {"stall_timeout_s": 0.6, "heartbeat_interval_s": 0.02}


def test_a_round_that_lacks_a_worker_ends_with_its_name_and_can_be_waited_for_again() -> None:
    with Workers("dist_sync", 2, 1, **LIMIT) as workers:
        first, late = workers.stores
        workers.run(lambda kv: kv.init("w", np.zeros(2)))
        first.push("w", np.ones(2))
        out = np.zeros(2)
        with pytest.raises(DeadlineError) as raised:
            first.pull("w", out=out)
        text = str(raised.value)
        assert text.startswith("timed out after 0.6 s (PS_STALL_TIMEOUT) waiting for ")
        assert "'w'" in text
        assert "worker 1" in text
        assert text.endswith("; the call is still in progress, and kv.wait() waits for it again")
        late.push("w", np.ones(2))
        first.wait()
        assert first.pull("w").tolist() == [2, 2]


def test_a_barrier_ends_for_all_with_the_names_of_those_who_have_not_come() -> None:
    with Workers("dist_sync", 3, 1, **LIMIT) as workers:
        sentence = "^the barrier of the workers timed out: worker 2 \\(pid "

        def wait(kv: KVStore) -> None:
            if kv.rank < 2:
                with pytest.raises(DeadlineError, match=sentence):
                    kv.barrier()

        workers.run(wait)
        with pytest.raises(DeadlineError, match=sentence):
            workers.stores[2].barrier()
        workers.run(lambda kv: kv.barrier())


def test_a_barrier_may_have_a_limit_of_its_own() -> None:
    with (
        Workers("dist_sync", 2, 1, heartbeat_interval_s=0.02) as workers,
        pytest.raises(DeadlineError, match="timed out: worker 1 \\(pid "),
    ):
        workers.stores[0].barrier(timeout=0.2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda kv: kv.init("w", np.zeros(2)), "init"),
        (lambda kv: kv.delete("v"), "delete"),
        (lambda kv: kv.load_checkpoint("directory"), "load_checkpoint"),
    ],
    ids=["init", "delete", "load_checkpoint"],
)
def test_a_call_that_all_make_together_ends_where_one_does_not(
    call: Callable[[KVStore], None], words: str
) -> None:
    with Workers("dist_sync", 2, 1, **LIMIT) as workers:
        workers.run(lambda kv: kv.init("v", np.zeros(2)))
        with pytest.raises(
            DeadlineError, match=r"^timed out after 0\.6 s \(PS_STALL_TIMEOUT\)"
        ) as raised:
            call(workers.stores[1])
        assert words in str(raised.value)


def test_one_limit_holds_for_all_that_is_waited_for() -> None:
    with Workers("dist_sync", 2, 1, heartbeat_interval_s=0.02) as workers:
        kv = workers.stores[0]
        workers.run(lambda kv: kv.init(["v", "w"], [np.zeros(2), np.zeros(2)]))
        futures = [kv.pushpull_async(key, np.ones(2), out=np.zeros(2)) for key in ("v", "w")]
        began = time.monotonic()
        for what in (futures, futures[1], ["v", "w"], None):
            with pytest.raises(DeadlineError, match=r"^timed out after 0\.1 s waiting for "):
                kv.wait(what, timeout=0.1)
        assert time.monotonic() - began < 10
        workers.stores[1].pushpull(["v", "w"], [np.ones(2)] * 2, out=[np.zeros(2)] * 2)
        kv.wait(timeout=10)


def test_without_a_limit_a_wait_is_reported_early() -> None:
    with Workers("dist_sync", 2, 1, stall_report_s=0.05, heartbeat_interval_s=0.02) as workers:
        assert workers.cluster is not None
        workers.run(lambda kv: kv.init("w", np.zeros(2)))
        future = workers.stores[0].pushpull_async("w", np.ones(2), out=np.zeros(2))
        with pytest.raises(DeadlineError):
            workers.stores[0].wait(future, timeout=1.0)
        workers.stores[1].push("w", np.ones(2))
        said = [line for line in workers.cluster.lines if "still waiting after" in line]
    lines = [line for line in said if "answer for 'w'" in line]  # not those of a slow ``init``
    # After 0.05 s, then 0.1, 0.2, 0.4 and 0.8: a long wait does not fill a log.
    assert 1 <= len(lines) <= 5
