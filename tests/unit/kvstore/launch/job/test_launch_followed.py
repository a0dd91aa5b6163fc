"""Servers with standbys: whose end fails the job, and whose does not."""

from __future__ import annotations

import signal

import pytest

from kvstore.launch.job.lifecycle import Lifecycle, Phase
from kvstore.launch.job.restarts import Again, Exit, Timing
from kvstore.launch.plan import ProcessSpec

SCHEDULER, SERVER_0, SERVER_1, STANDBY_0, STANDBY_1, WORKER_0, WORKER_1 = range(7)
TIMING = Timing(drain_s=10, service_s=8, failure_s=5, alone_s=2, worker_restart_s=0.25)


def job(restarts: int = 0, *, joined: bool = True) -> Lifecycle:
    roles = ("scheduler", "server", "server", "standby", "standby", "worker", "worker")
    ranks = (0, 0, 1, 0, 1, 0, 1)
    specs = [ProcessSpec(*name, ("x",), {}) for name in zip(roles, ranks, strict=True)]
    life = Lifecycle(specs, TIMING, restarts)
    if joined:
        life.joined(0.0)
    return life


def replaced(life: Lifecycle) -> Lifecycle:
    """Server 1 was killed, and its standby has its place."""
    life.exited({SERVER_1: -9}, 1.0)
    life.returned(1, "server")
    return life


def end(life: Lifecycle) -> None:
    """All others end with 0: the workers first, then the service."""
    life.exited({WORKER_0: 0, WORKER_1: 0}, 20.0)
    assert (life.phase, life.deadline_s) == (Phase.DRAINING, 30.0)
    rest = {index: 0 for index in range(7) if index not in life.exits}
    life.exited(rest, 21.0)
    assert life.phase is Phase.ENDED


# -- a server that is replaced -------------------------------------------------------------


@pytest.mark.parametrize("status", [-9, 1])
def test_a_server_whose_standby_runs_is_awaited_and_then_replaced(status: int) -> None:
    life = job()
    assert life.exited({SERVER_1: status}, 1.0) == [Exit(SERVER_1, status, 1.0, 1)]
    assert (life.phase, life.failed, life.due_s) == (Phase.RUNNING, False, None)
    assert life.excused == set()
    life.returned(1, "server")
    assert (life.excused, life.standbys.num_seated) == ({SERVER_1}, 1)
    end(life)
    assert (life.failed, life.drain_expired) == (False, False)
    assert life.excused >= {SERVER_1, STANDBY_0}
    assert STANDBY_1 not in life.excused


def test_a_place_may_be_taken_before_the_end_of_the_server_is_seen() -> None:
    life = job()
    life.returned(1, "server")
    assert life.exited({SERVER_1: 1}, 1.0) == [Exit(SERVER_1, 1, 1.0, 1)]
    assert (life.phase, life.failed, life.standbys.num_seated) == (Phase.RUNNING, False, 1)
    end(life)
    assert not life.failed


def test_both_servers_may_be_replaced() -> None:
    life = job()
    assert len(life.exited({SERVER_0: -9, SERVER_1: -9}, 1.0)) == 2
    life.returned(0, "server")
    life.returned(1, "server")
    end(life)
    assert (life.failed, life.standbys.num_seated) == (False, 2)


@pytest.mark.parametrize("role", ["worker", "server"])
def test_only_the_place_of_this_server_ends_the_wait(role: str) -> None:
    life = job()
    life.exited({SERVER_1: -9}, 1.0)
    life.returned(1 if role == "worker" else 0, role)
    assert life.standbys.awaited == {SERVER_1}
    assert SERVER_1 not in life.excused


def test_workers_and_servers_that_end_together_are_both_replaced() -> None:
    life = job(restarts=1)
    assert life.exited({SERVER_1: -9, WORKER_1: -9}, 1.0) == [Exit(SERVER_1, -9, 1.0, 1)]
    assert life.tick(1.25) == [Again(Exit(WORKER_1, -9, 1.0, 1), 1)]
    life.returned(1)
    life.returned(1, "server")
    end(life)
    assert (life.failed, life.num_returned, life.standbys.num_seated) == (False, 1, 1)


# -- a server that is not ------------------------------------------------------------------


def assert_fails(life: Lifecycle, statuses: dict[int, int]) -> None:
    assert life.exited(statuses, 10.0) == []
    assert (life.phase, life.failed) == (Phase.FAILING, True)
    assert life.excused.isdisjoint(statuses)


def test_before_all_have_joined_the_ends_of_both_are_failures() -> None:
    assert_fails(job(joined=False), {SERVER_1: -9})
    assert_fails(job(joined=False), {STANDBY_1: 1})


def test_a_server_and_its_standby_that_end_together_are_failures() -> None:
    assert_fails(job(), {SERVER_1: -9, STANDBY_1: -9})


@pytest.mark.parametrize("status", [0, 1, -9])
def test_a_standby_that_ends_before_it_has_the_place_is_a_failure(status: int) -> None:
    life = job()
    life.exited({SERVER_1: -9}, 1.0)
    assert_fails(life, {STANDBY_1: status})
    assert life.exits[SERVER_1] == Exit(SERVER_1, -9, 1.0, 1)


@pytest.mark.parametrize("status", [0, -9])
def test_a_server_without_its_standby_fails_the_job(status: int) -> None:
    life = job()
    life.exited({STANDBY_1: status}, 1.0)
    assert (life.phase, life.failed, life.deadline_s) == (Phase.RUNNING, False, None)
    assert_fails(life, {SERVER_1: -9})


def test_a_standby_in_the_place_of_its_server_is_a_server() -> None:
    assert_fails(replaced(job()), {STANDBY_1: -9})
    life = replaced(job())
    life.exited({STANDBY_1: 0}, 10.0)
    assert (life.phase, life.deadline_s) == (Phase.RUNNING, 18.0)


@pytest.mark.parametrize("status", [0, 1, -9])
def test_a_server_that_waits_for_its_successor_needs_the_scheduler(status: int) -> None:
    life = job()
    life.exited({SERVER_1: -9}, 1.0)
    assert_fails(life, {SCHEDULER: status})


@pytest.mark.parametrize("status", [0, -9])
def test_without_a_scheduler_no_standby_gets_a_place(status: int) -> None:
    life = job()
    life.exited({SCHEDULER: status}, 1.0)
    assert_fails(life, {SERVER_1: -9})


def test_after_the_workers_a_server_that_fails_is_a_failure() -> None:
    life = job()
    life.exited({WORKER_0: 0, WORKER_1: 0}, 1.0)
    assert_fails(life, {SERVER_1: 1})


def test_a_job_that_fails_for_another_reason_ends_while_a_server_is_awaited() -> None:
    life = job()
    life.exited({SERVER_1: -9}, 1.0)
    assert_fails(life, {WORKER_1: 3})
    assert life.deadline_s == 15.0
    assert life.tick(15.0) == [signal.SIGTERM]


# -- a standby that ends -------------------------------------------------------------------


def test_a_standby_that_fails_is_told_and_the_job_goes_on() -> None:
    life = job()
    assert life.exited({STANDBY_1: -9}, 1.0) == [Exit(STANDBY_1, -9, 1.0, 1)]
    assert (life.phase, life.failed, life.due_s) == (Phase.RUNNING, False, None)
    end(life)
    assert (life.failed, STANDBY_1 in life.excused) == (False, True)


def test_a_standby_that_is_let_go_is_not_told() -> None:
    life = job()
    assert life.exited({STANDBY_1: 0}, 1.0) == []
    assert (life.phase, life.due_s) == (Phase.RUNNING, None)
    end(life)
    assert not life.failed


@pytest.mark.parametrize("status", [0, 1])
@pytest.mark.parametrize("order", [(SERVER_1, STANDBY_1), (STANDBY_1, SERVER_1)])
def test_at_the_end_of_the_job_both_end_in_any_order(order: tuple[int, int], status: int) -> None:
    life = job()
    life.exited({WORKER_0: 0, WORKER_1: 0, SCHEDULER: 0, SERVER_0: 0, STANDBY_0: 0}, 1.0)
    for index in order:
        assert life.exited({index: status if index == STANDBY_1 else 0}, 2.0) == []
    assert (life.phase, life.failed) == (Phase.ENDED, False)


def test_a_standby_that_ends_after_its_server_while_workers_run_is_not_told() -> None:
    life = job()
    assert life.exited({SERVER_1: 0, STANDBY_1: 1}, 1.0) == []
    assert life.deadline_s == 9.0, "the server has ended too early"


def test_what_the_launcher_ends_is_not_excused() -> None:
    life = job()
    life.signalled(signal.SIGINT, 1.0)
    life.exited(dict.fromkeys(range(7), -2), 1.5)
    assert (life.phase, life.failed, life.excused) == (Phase.ENDED, False, set())
