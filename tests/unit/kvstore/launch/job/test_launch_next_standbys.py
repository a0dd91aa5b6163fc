"""When another standby is started, for which server, and when that is over. Times: seconds."""

from __future__ import annotations

import signal

import pytest

from kvstore.launch.job.lifecycle import Effect, Lifecycle, Phase
from kvstore.launch.job.restarts import Again, Exit, Timing
from kvstore.launch.plan import ProcessSpec

SCHEDULER, SERVER_0, SERVER_1, STANDBY_0, STANDBY_1, WORKER_0, WORKER_1 = range(7)
TIMING = Timing(
    drain_s=10,
    service_s=8,
    failure_s=5,
    alone_s=2,
    worker_restart_s=0.25,
    restart_s=1,
    longest_restart_s=30,
)
LEFT_ALONE = "server 1 is left without a standby: 3 in a row have ended before they had its state"


def job(restarts: int = 5) -> Lifecycle:
    roles = ("scheduler", "server", "server", "standby", "standby", "worker", "worker")
    ranks = (0, 0, 1, 0, 1, 0, 1)
    specs = [ProcessSpec(*name, ("x",), {}) for name in zip(roles, ranks, strict=True)]
    life = Lifecycle(specs, TIMING, restarts)
    life.joined(0.0)
    return life


def start(life: Lifecycle) -> list[Effect]:
    """Wait until the next process is started."""
    assert life.due_s is not None
    return life.tick(life.due_s)


def takes_over(life: Lifecycle, server: int = SERVER_1, now_s: float = 1.0) -> Exit:
    """Server 1 is killed, and its standby takes its place."""
    (found,) = life.exited({server: -9}, now_s)
    life.returned(1, "server")
    assert isinstance(found, Exit)
    return found


def end(life: Lifecycle) -> None:
    """All others end with 0: the workers first, then the service."""
    life.exited({WORKER_0: 0, WORKER_1: 0}, 100.0)
    life.exited({index: 0 for index in range(7) if index not in life.exits}, 101.0)
    assert (life.phase, life.failed, life.drain_expired) == (Phase.ENDED, False, False)


# -- a standby that is lost ----------------------------------------------------------------


@pytest.mark.parametrize("status", [-9, 1])
def test_a_lost_standby_is_started_again_after_a_moment_and_once(status: int) -> None:
    life = job()
    found = Exit(STANDBY_1, status, 1.0, 1)
    assert life.exited({STANDBY_1: status}, 1.0) == [found]
    assert (life.due_s, life.restarts.num_left) == (1.25, 4)
    assert life.tick(1.25) == [Again(found, 1, SERVER_1)]
    assert (life.due_s, life.setbacks) == (None, {})
    life.returned(1, "standby")
    end(life)
    assert (life.num_restarts, life.num_returned, life.standbys.remarks) == (1, 0, [])


def test_a_standby_that_its_server_lets_go_is_not_started_again() -> None:
    life = job()
    assert life.exited({STANDBY_1: 0}, 1.0) == []
    assert life.due_s is None
    end(life)
    assert life.num_restarts == 0


def test_a_new_standby_that_its_server_lets_go_is_not_started_again() -> None:
    life = job()
    life.exited({STANDBY_1: -9}, 1.0)
    start(life)
    assert life.exited({STANDBY_1: 0}, 2.0) == []
    assert life.due_s is None
    end(life)


def test_without_restarts_or_after_the_last_one_none_is_started() -> None:
    life = job(restarts=0)
    assert life.exited({STANDBY_1: -9}, 1.0) == [Exit(STANDBY_1, -9, 1.0, 1)]
    assert life.due_s is None
    life = job(restarts=1)
    life.exited({STANDBY_0: -9, STANDBY_1: -9}, 1.0)
    assert len(start(life)) == 1
    assert life.due_s is None
    end(life)


def test_each_further_pause_of_a_standby_is_twice_as_long_unless_it_ran_for_a_minute() -> None:
    life = job(restarts=9)
    pauses = []
    for now_s in (10.0, 20.0, 30.0, 40.0, 104.0, 105.0):
        life.exited({STANDBY_1: -9}, now_s)
        assert life.due_s is not None
        pauses.append(life.due_s - now_s)
        start(life)
        life.returned(1, "standby")
    assert pauses == [0.25, 1.0, 2.0, 4.0, 0.25, 1.0]


def test_workers_and_standbys_share_the_restarts() -> None:
    life = job(restarts=2)
    life.exited({STANDBY_1: -9, WORKER_0: -9}, 1.0)
    assert [again.server for again in start(life) if isinstance(again, Again)] == [None, SERVER_1]
    assert (life.restarts.num_used, life.restarts.num_all) == (2, 2)
    life.exited({WORKER_1: -9}, 2.0)
    assert life.phase is Phase.FAILING


# -- a standby that has taken a place ------------------------------------------------------


def test_the_process_of_a_replaced_server_is_started_as_the_next_standby() -> None:
    life = job()
    found = takes_over(life)
    assert life.due_s == 1.25
    assert SERVER_1 not in life.exits, "the job must wait for it at its end"
    assert life.tick(1.25) == [Again(found, 1, server=STANDBY_1)]
    assert SERVER_1 not in life.excused
    life.returned(1, "standby")
    end(life)
    assert (life.standbys.num_seated, life.num_restarts) == (1, 1)


def test_it_is_started_also_if_its_end_is_seen_after_its_place_was_taken() -> None:
    life = job()
    life.returned(1, "server")
    assert life.due_s is None, "the old process still runs"
    found = Exit(SERVER_1, 1, 1.0, 1)
    assert life.exited({SERVER_1: 1}, 1.0) == [found]
    assert life.tick(1.25) == [Again(found, 1, server=STANDBY_1)]


def test_a_place_passes_on_again_and_again() -> None:
    life = job()
    for server, standby in [(SERVER_1, STANDBY_1), (STANDBY_1, SERVER_1), (SERVER_1, STANDBY_1)]:
        found = takes_over(life, server, 10.0)
        assert start(life) == [Again(found, (life.num_restarts + 1) // 2, server=standby)]
        life.returned(1, "standby")
    end(life)
    assert (life.standbys.num_seated, life.num_restarts) == (3, 3)


@pytest.mark.parametrize("is_started", [False, True])
def test_a_server_that_ends_before_its_new_standby_is_filled_fails_the_job(
    is_started: bool,
) -> None:
    life = job()
    takes_over(life)
    if is_started:
        start(life)
    assert life.exited({STANDBY_1: -9}, 2.0) == []
    assert (life.phase, life.failed) == (Phase.FAILING, True)
    assert life.exits[STANDBY_1] == Exit(STANDBY_1, -9, 2.0, 2)
    assert (SERVER_1 in life.exits) == (not is_started)
    assert life.tick(6.9) == []


@pytest.mark.parametrize(("rank", "role"), [(0, "standby"), (1, "worker")])
def test_only_news_of_this_standby_counts(rank: int, role: str) -> None:
    life = job()
    takes_over(life)
    start(life)
    life.returned(rank, role)
    life.exited({STANDBY_1: -9}, 2.0)
    assert life.phase is Phase.FAILING


def test_a_standby_that_ends_before_the_news_of_its_state_cannot_take_the_place() -> None:
    life = job()
    takes_over(life)
    start(life)
    life.exited({SERVER_1: -9}, 2.0)
    life.returned(1, "standby")
    life.exited({STANDBY_1: -9}, 2.1)
    assert life.phase is Phase.FAILING


# -- three in vain -------------------------------------------------------------------------


def test_after_three_standbys_that_were_not_filled_the_server_is_left_alone() -> None:
    life = job(restarts=9)
    takes_over(life)
    for number in range(1, 4):
        (again,) = start(life)
        assert isinstance(again, Again) and again.number == number
        effects = life.exited({SERVER_1: 1}, 10.0 * number)
        last = [LEFT_ALONE] if number == 3 else []
        assert effects == [Exit(SERVER_1, 1, 10.0 * number, number + 1), *last]
    assert (life.due_s, life.standbys.remarks, life.restarts.num_left) == (None, [LEFT_ALONE], 6)
    life.exited({STANDBY_0: -9}, 50.0)
    assert life.due_s == 50.25, "the other server gets another one"
    end(life)


def test_a_standby_that_was_filled_begins_a_new_count() -> None:
    life = job(restarts=9)
    for number in range(6):
        life.exited({STANDBY_1: -9}, 100.0 * number)
        start(life)
        if number % 2:
            life.returned(1, "standby")
    assert (life.standbys.remarks, life.num_restarts) == ([], 6)


# -- a start that is given up --------------------------------------------------------------


def test_without_a_scheduler_a_planned_standby_is_given_up() -> None:
    life = job()
    life.exited({STANDBY_1: -9}, 1.0)
    life.exited({SCHEDULER: 0}, 1.1)
    assert (life.phase, life.restarts.due) == (Phase.RUNNING, {})
    assert life.exits[STANDBY_1] == Exit(STANDBY_1, -9, 1.0, 1)
    life.exited({STANDBY_0: 1}, 1.2)
    assert life.restarts.due == {}


def test_a_signal_or_the_last_worker_gives_up_a_planned_standby() -> None:
    life = job()
    life.exited({STANDBY_1: -9}, 1.0)
    assert life.signalled(signal.SIGINT, 1.1) == [signal.SIGINT]
    assert (life.restarts.due, STANDBY_1 in life.exits) == ({}, True)
    life = job()
    life.exited({STANDBY_1: -9}, 1.0)
    end(life)
    assert life.num_restarts == 0


def test_a_standby_that_comes_when_the_service_has_ended_does_not_hold_up_the_end() -> None:
    life = job()
    life.exited({STANDBY_1: -9}, 1.0)
    start(life)
    life.exited(dict.fromkeys((SCHEDULER, SERVER_0, SERVER_1, STANDBY_0), 0), 2.0)
    assert (life.phase, life.due_s) == (Phase.RUNNING, None), "the workers still run"
    life.exited({WORKER_0: 0, WORKER_1: 0}, 50.0)
    assert (life.phase, life.due_s) == (Phase.DRAINING, 52.0)
    assert life.tick(52.0) == [signal.SIGTERM]
    life.exited({STANDBY_1: -15}, 52.1)
    assert (life.phase, life.failed, life.drain_expired) == (Phase.ENDED, False, False)
