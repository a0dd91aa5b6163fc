"""The directory when calls fail: nobody waits for a call that has come to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from test_directory import FASTER, FLOAT, SGD, SMALL, STORE, Job, kind_of

from kvstore import optimizer as optimizers
from kvstore.optimizer.serialize import to_plain
from kvstore.protocol.requests import DirectoryCall
from kvstore.server.directory import Directory
from kvstore.stores.base import KeySpec
from pslite.future import Future

OTHER = to_plain(optimizers.create("sgd", learning_rate=7.0))


def could_not_create(job: Job, *keys: str) -> None:
    fields = (STORE, list(keys), "MemoryError", "the server is full")
    job.ask(0, DirectoryCall.INITIALISED, *fields).result(0)


def could_not_set(job: Job, optimizer: Any) -> None:
    job.set_optimizer(optimizer, "UsageError", "a key is cut").result(0)


def outcomes(futures: Sequence[Future[Any]]) -> list[str]:
    """For each: "waits", "done" or the name of its error."""
    return [
        ("done" if future.error() is None else kind_of(future)) if future.done() else "waits"
        for future in futures
    ]


# -- init ---------------------------------------------------------------------------------


def test_ranks_that_wait_for_values_hear_that_these_could_not_be_stored() -> None:
    job = Job(3)
    job.declare(0, ("w", SMALL), ("v", SMALL))
    waiting = [job.declare(1, ("w", SMALL)), job.declare(2, ("u", SMALL))]
    could_not_create(job, "w", "v")
    assert outcomes(waiting) == ["RemoteError", "waits"]
    assert "the server is full" in str(waiting[0].error())


def test_keys_that_came_to_nothing_can_be_made_anew_in_another_shape() -> None:
    job = Job(2, num_servers=1)
    job.declare(0, ("w", KeySpec((400,), FLOAT)))
    could_not_create(job, "w")
    decides, (entry,) = job.declare(0, ("w", SMALL)).result(0)
    assert (decides, entry.spec, entry.generation) == (True, SMALL, 1)
    assert entry.first_part == 101  # numbers of parts are never used twice
    job.initialised(0, "w")
    assert outcomes([job.declare(1, ("w", SMALL))]) == ["done"]


@pytest.mark.parametrize("early", [True, False])
def test_a_whole_key_that_no_message_can_carry_is_refused_to_all_ranks(early: bool) -> None:
    job = Job(3)
    job.directory = Directory(2, 16, lambda: job.live, max_message_bytes=100_000)
    job._scheduler._handlers.clear()
    job._scheduler.add(1_000_001, job.directory.handle)
    huge = ("huge", KeySpec((20_000,), FLOAT))
    others = [job.declare(1, huge), job.declare(2, ("w", SMALL))] if early else []
    first = job.declare(0, huge, scope="key")
    if not early:  # they need not know that rank 0 wants whole keys
        others = [job.declare(1, huge), job.declare(2, ("w", SMALL))]
    assert outcomes([first, *others]) == ["ValueMismatchError", "ValueMismatchError", "waits"]
    assert outcomes([job.declare(0, huge), job.declare(1, huge)]) == ["done", "waits"]


def test_more_parts_than_there_may_be_are_refused_to_all_ranks() -> None:
    job = Job(2)
    huge = ("huge", KeySpec((1 << 30,), np.dtype(np.int8)))
    waiting = job.declare(1, huge)
    assert outcomes([waiting]) == ["ValueMismatchError"]
    assert outcomes([job.declare(0, huge)]) == ["ValueMismatchError"]


# -- set_optimizer ------------------------------------------------------------------------


def test_a_failed_call_of_the_deciding_rank_alone_does_not_count_for_others() -> None:
    job = Job(2)
    could_not_set(job, OTHER)
    waiting = job.same_optimizer(1, 1, SGD)
    assert outcomes([waiting]) == ["waits"]
    job.set_optimizer(SGD)
    assert outcomes([waiting]) == ["done"]
    # And the numbers are in step from now on: SGD was the deciding rank's second call.
    following = job.same_optimizer(1, 2, FASTER)
    assert outcomes([following]) == ["waits"]
    job.set_optimizer(FASTER)
    assert outcomes([following]) == ["done"]


def test_all_ranks_whose_call_failed_are_told_and_go_on() -> None:
    job = Job(3)
    early = job.same_optimizer(1, 1, OTHER)
    could_not_set(job, OTHER)
    late = job.same_optimizer(2, 1, OTHER)
    assert outcomes([early, late]) == ["UsageError", "UsageError"]
    following = [job.same_optimizer(rank, 2, SGD) for rank in (1, 2)]
    job.set_optimizer(SGD)
    assert outcomes(following) == ["done", "done"]


def test_a_rank_that_was_refused_may_call_the_same_again_and_is_in_step() -> None:
    job = Job(2)
    job.set_optimizer(SGD)
    assert outcomes([job.same_optimizer(1, 1, OTHER)]) == ["OptimizerMismatch"]
    assert outcomes([job.same_optimizer(1, 2, SGD)]) == ["done"]
    following = job.same_optimizer(1, 3, FASTER)
    assert outcomes([following]) == ["waits"]
    job.set_optimizer(FASTER)
    assert outcomes([following]) == ["done"]


def test_a_rank_that_was_refused_may_go_on_with_the_next_call() -> None:
    job = Job(2)
    job.set_optimizer(SGD)
    assert outcomes([job.same_optimizer(1, 1, OTHER)]) == ["OptimizerMismatch"]
    following = job.same_optimizer(1, 2, FASTER)
    assert outcomes([following]) == ["waits"]
    job.set_optimizer(FASTER)
    assert outcomes([following]) == ["done"]
    last = job.same_optimizer(1, 3, SGD)
    assert outcomes([last]) == ["waits"]
    job.set_optimizer(SGD)
    assert outcomes([last]) == ["done"]


def test_an_optimizer_that_was_set_in_a_meeting_that_failed_is_counted_for_all_ranks() -> None:
    job = Job(2)
    arrived = [job.together(rank, 1, "load_checkpoint") for rank in (0, 1)]
    job.set_optimizer(SGD)
    fields = (STORE, 1, [], "", "CheckpointError", "the values are damaged")
    job.ask(0, DirectoryCall.DONE_TOGETHER, *fields).result(0)
    assert outcomes(arrived) == ["done", "CheckpointError"]
    following = job.same_optimizer(1, 1, FASTER)
    assert outcomes([following]) == ["waits"]
    job.set_optimizer(FASTER)
    assert outcomes([following]) == ["done"]


def test_a_rank_may_be_refused_again_and_again() -> None:
    job = Job(2)
    for optimizer, call in ((SGD, 1), (FASTER, 2), (SGD, 3)):
        waiting = job.same_optimizer(1, call, OTHER)
        job.set_optimizer(optimizer)
        assert outcomes([waiting]) == ["OptimizerMismatch"]
    assert outcomes([job.same_optimizer(1, 4, SGD)]) == ["done"]
