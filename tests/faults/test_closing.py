"""What is pushed last, in simulated runs: it is applied whole, or the node that ends knows why."""

from __future__ import annotations

import math
from collections.abc import Generator
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvstore import optimizer
from kvstore.server import install
from kvstore.stores.dist.store import DistKVStore, create_dist
from pslite import WORKER_GROUP, Postoffice
from pslite.errors import DeadlineError, NodeLostError
from pslite.node.shutdown import CloseTimer, Unheard
from pslite.testing.simulator import Faults, Simulation
from tests.faults.invariants import stores_of
from tests.faults.returning import before_step

FAULTS = Faults(drop=0.03, duplicate=0.05, delay=0.2, reorder=0.1, cuts=2, cut_s=(0.1, 1.0))
#: Of many parts, on both servers.
COUNT = 200
Script = Generator[Any, Any, None]


def begun(node: Postoffice, kind: str, *keys: str) -> Generator[Any, Any, DistKVStore]:
    yield node.ready
    store = create_dist(kind, kind, node=node)
    if kind == "dist_async":
        yield store.set_optimizer_async(optimizer.create("sgd", learning_rate=1.0))
    for key in keys:
        yield store.init_async(key, np.zeros(COUNT))
    yield node.barrier(WORKER_GROUP)
    return store


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("seed", range(10))
def test_a_push_before_the_end_is_applied_whole_under_faults(seed: int, kind: str) -> None:
    simulation = Simulation(seed, 3, 2, FAULTS, prepare=install)
    seen: list[Any] = []
    ended: list[int] = []

    def script(node: Postoffice) -> Script:
        store = yield from begun(node, kind, "w")
        out = np.zeros(COUNT)
        if node.rank:
            store.push_async("w", -np.ones(COUNT))
            yield node.leave()
            assert node.unheard.take() is None
            ended.append(node.rank)
            return
        if kind == "dist_sync":
            store.push_async("w", -np.ones(COUNT))
        while kind == "dist_async" and len(ended) < 2:
            yield 0.1
        yield store.pull_async("w", out)
        seen.append(set(out.tolist()))
        yield node.leave()

    simulation.run(script)
    assert seen == [{-3.0 if kind == "dist_sync" else 2.0}]
    simulation.finish()


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_barrier_does_not_wait_for_a_worker_that_has_left(comes_first: bool) -> None:
    simulation = Simulation(1, 2, 1, prepare=install)
    seen: list[str] = []

    def leaves(node: Postoffice) -> Script:
        yield node.ready
        yield 5.0 if comes_first else 0.1
        yield node.leave()

    def waits(node: Postoffice) -> Script:
        yield node.ready
        yield 0.1 if comes_first else 5.0
        try:
            yield node.barrier(WORKER_GROUP)
        except NodeLostError as error:
            seen.append(str(error))
        yield node.leave()

    simulation.run(waits, leaves)
    (text,) = seen
    assert "worker 1" in text
    assert "has left the job" in text
    simulation.finish()


def test_a_worker_waits_for_the_others_in_its_last_round_after_it_has_said_goodbye() -> None:
    simulation = Simulation(1, 2, 2, prepare=install, close_timeout_s=1.0)
    ended: list[float] = []

    def leaves(node: Postoffice) -> Script:
        store = yield from begun(node, "dist_sync", "w")
        store.push_async("w", np.ones(COUNT))
        yield node.leave()
        assert node.unheard.take() is None
        ended.append(simulation.now)

    def dawdles(node: Postoffice) -> Script:
        store = yield from begun(node, "dist_sync", "w")
        yield 30.0
        out = np.zeros(COUNT)
        store.push_async("w", np.ones(COUNT))
        yield store.pull_async("w", out)
        assert set(out.tolist()) == {2.0}
        yield node.leave()

    simulation.run(dawdles, leaves)
    assert 30.0 <= ended[0] < 32.0
    lines = [line for line in simulation.lines if "still closing after" in line]
    assert "requests to server 0 (" in lines[0]
    assert "have not been answered" in lines[0]
    simulation.finish()


@pytest.mark.parametrize("seed", range(10))
def test_last_pushes_that_need_each_other_end_in_errors_that_name_both(seed: int) -> None:
    """Neither waits for the other's next round: it has said that there will be none."""
    simulation = Simulation(seed, 2, 2, FAULTS, prepare=install)
    seen: dict[int, Any] = {}

    def script(node: Postoffice) -> Script:
        store = yield from begun(node, "dist_sync", "v", "w")
        store.push_async("vw"[node.rank], np.ones(COUNT))
        yield node.leave()
        seen[node.rank] = node.unheard.take()

    simulation.run(script)
    for rank, error in seen.items():
        assert isinstance(error, NodeLostError)
        assert f"worker {1 - rank} " in str(error)
        assert "has left the job" in str(error)
    assert len(seen) == 2
    simulation.finish()


def test_an_answer_reaches_a_worker_that_has_said_goodbye_and_lost_its_connection_since() -> None:
    simulation = Simulation(3, 2, 1, prepare=install)
    ended: list[float] = []

    def leaves(node: Postoffice) -> Script:
        store = yield from begun(node, "dist_sync", "w")
        store.push_async("w", np.ones(COUNT))
        simulation.at(simulation.now + 5.0, lambda: simulation.cut(server, node, 12.0))
        yield node.leave()
        ended.append(simulation.now)

    def dawdles(node: Postoffice) -> Script:
        store = yield from begun(node, "dist_sync", "w")
        yield 8.0
        yield store.push_async("w", np.ones(COUNT))
        yield node.leave()

    server = simulation.servers[0]
    simulation.run(dawdles, leaves, limit_s=60.0)
    assert 8.0 < ended[0] < 20.0
    simulation.finish()


@pytest.mark.parametrize("has_left", [False, True])
def test_the_loss_of_another_worker_is_named_to_one_that_waits_for_its_last_answer(
    has_left: bool,
) -> None:
    """That one has said goodbye, and still hears of what happens."""
    simulation = Simulation(4, 2, 2, prepare=install)
    seen: list[Any] = []

    def waits(node: Postoffice) -> Script:
        store = yield from begun(node, "dist_sync", "w")
        store.push_async("w", np.ones(COUNT))
        yield node.leave()
        seen.append(node.unheard.take())

    def dies(node: Postoffice) -> Script:
        yield from begun(node, "dist_sync", "w")
        yield 5.0
        if has_left:
            yield node.leave()
        else:
            simulation.kill(node)

    simulation.run(waits, dies, limit_s=60.0)
    assert isinstance(seen[0], NodeLostError)
    assert (seen[0].role, seen[0].rank) == ("worker", 1)


def test_time_in_which_bytes_move_does_not_count_against_the_limit() -> None:
    """Each message takes most of the limit, and only some are under way at once."""
    slow = Faults(delay=1.0, delay_s=(0.6, 0.8))
    sizes = {"chunk_bytes": 2048, "credit_bytes": 4096}
    simulation = Simulation(
        5, 1, 1, slow, prepare=install, close_timeout_s=2.0, resend_timeout_s=5.0, **sizes
    )
    ended: list[float] = []

    def script(node: Postoffice) -> Script:
        store = yield from begun(node, "dist_async")
        yield store.init_async("w", np.zeros(10_000))
        began = simulation.now
        store.push_async("w", np.ones(10_000))
        yield node.leave()
        assert node.unheard.take() is None
        ended.append(simulation.now - began)

    simulation.run(script)
    assert ended[0] > 6.0
    lines = [line for line in simulation.lines if "still closing after" in line]
    assert "server 0 (" in lines[0]
    assert "has not accepted" in lines[0]
    assert "PS_CLOSE_TIMEOUT=2" in lines[0]
    simulation.finish()


@pytest.mark.parametrize("limit_s", [3.0, math.inf])
def test_what_is_not_accepted_in_time_is_an_error_and_the_others_see_a_loss(limit_s: float) -> None:
    simulation = Simulation(6, 2, 2, prepare=install, close_timeout_s=limit_s, lost_after_s=1000.0)
    seen: list[Any] = []
    until = 60.0

    def pushes(node: Postoffice) -> Script:
        store = yield from begun(node, "dist_async", "w")
        for server in simulation.servers:
            simulation.cut(server, node, until)
        store.push_async("w", np.ones(COUNT))
        yield node.leave()
        seen.extend([simulation.now, node.unheard.take()])

    def waits(node: Postoffice) -> Script:
        yield from begun(node, "dist_async", "w")
        while not seen:
            yield 0.1
        seen.append(node.membership.gone)
        seen.extend(server.membership.gone for server in simulation.servers)

    simulation.run(waits, pushes, limit_s=200.0)
    ended, error, *gone = seen
    if limit_s == math.inf:
        assert ended > until
        assert error is None
        return
    assert ended < 10.0
    assert isinstance(error, DeadlineError)
    assert "server 0 (" in str(error)
    assert "3 s (PS_CLOSE_TIMEOUT)" in str(error)
    assert gone == [{}, {}, {}]  # nobody has heard a goodbye


def test_a_server_that_has_lost_a_worker_gives_away_no_value_of_half_a_push() -> None:
    """The others may ask before they have heard of the loss."""
    simulation = Simulation(7, 1, 2, prepare=install)
    seen: list[str] = []
    lost = NodeLostError("worker 7 is lost: its process is gone", role="worker", rank=7)

    def script(node: Postoffice) -> Script:
        store = yield from begun(node, "dist_async", "w")
        for server in simulation.servers:
            server.call(lambda server=server: server.fail(lost))  # type: ignore[misc]
        yield 1.0
        for asked in (
            store.pull_async("w", np.zeros(COUNT)),
            store.push_async("w", np.ones(COUNT)),
            store._servers.stats(),
        ):
            try:
                yield asked
            except NodeLostError as error:
                seen.append(f"{error.role} {error.rank}: {error}")

    simulation.run(script)
    assert [text.startswith(f"worker 7: {lost}") for text in seen] == [True] * 3
    assert all("key 'w'" in text for text in seen[:2])


# -- the pure parts -----------------------------------------------------------------------


def test_patience_counts_only_time_in_which_nothing_that_is_owed_moves() -> None:
    patience = CloseTimer(100.0)
    assert not patience.is_over("5 left", 109.0, 10.0)
    assert not patience.is_over("4 left", 118.0, 10.0)
    assert not patience.is_over("4 left", 127.0, 10.0)
    assert patience.is_over("4 left", 128.0, 10.0)
    assert not patience.is_over("none owed", 500.0, math.inf)
    assert not patience.is_over("none owed", 900.0, math.inf)
    assert patience.is_over("none owed", 900.0, 60.0)


def test_patience_says_so_after_five_seconds_and_then_every_fifteen() -> None:
    patience = CloseTimer(0.0)
    lines = [patience.waited_s(float(now)) for now in range(40)]
    assert [line for line in lines if line is not None] == [5.0, 20.0, 35.0]


def test_a_push_whose_failure_its_caller_has_seen_is_not_reported_again() -> None:
    unheard = Unheard()
    seen, other = (unheard.push(lambda: "a push") for _ in range(2))
    seen.set_error(ValueError("refused"))
    with pytest.raises(ValueError, match="refused"):
        seen.result(0)
    assert unheard.take() is None
    error = ValueError("refused later")
    other.set_error(error)
    assert unheard.take() is error


def test_what_nobody_has_heard_of_is_taken_once_and_first_things_first() -> None:
    unheard = Unheard()
    first, second, third = (RuntimeError(str(number)) for number in range(3))
    for error in (first, second, second, third):
        unheard.note(error)
    unheard.heard(first)
    assert unheard.take() is second
    assert unheard.take() is None


# -- a server with a standby ----------------------------------------------------------------


def leaves_after_its_last_push(unheard: list[Any], node: Postoffice) -> Script:
    """Worker 1 is late, so worker 0 waits for the end of the round after its goodbye."""
    yield node.ready
    store: Any = create_dist("dist_sync", "dist_sync", node=node)
    yield store.init_async("w", np.zeros(40))
    yield 1.0 if node.rank else 0.0
    store.push_async("w", np.ones(40))
    yield node.leave()
    unheard.append(node.unheard.take())


@pytest.mark.parametrize("rejoin_s", [0.0, 60.0])
def test_a_worker_may_leave_after_its_last_push_while_its_server_is_lost(rejoin_s: float) -> None:
    """At any instant: the standby has the push, or gets it; the worker ends well."""
    expected = {2.0}

    def run(kill_at: int) -> tuple[int, Any]:
        simulation = Simulation(3, 2, 1, prepare=install, standbys=1, rejoin_timeout_s=rejoin_s)
        unheard: list[Any] = []
        if kill_at:
            before_step(simulation, kill_at, partial(simulation.kill_server, 0))
        simulation.run(partial(leaves_after_its_last_push, unheard), limit_s=60.0)
        assert unheard == [None, None], f"killed at step {kill_at}"
        num_steps, server = simulation.steps, simulation.servers[0]
        simulation.until(lambda: server.finished.done(), simulation.now + 30.0)
        if server.info is None:  # all have left: the standby does not take the seat
            return num_steps, expected
        parts = stores_of(server)._parts
        return num_steps, {weight for part in parts for weight in part.weight.tolist()}

    num_steps, _ = run(0)
    assert num_steps > 40
    for kill_at in range(20, num_steps):
        assert run(kill_at)[1] == expected, f"killed at step {kill_at}"
