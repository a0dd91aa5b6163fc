"""When a failed worker is started again, and what counts if it is not. Times are in seconds."""

from __future__ import annotations

import signal

import pytest

from kvstore.launch.job.lifecycle import Lifecycle, Phase
from kvstore.launch.job.restarts import Again, Exit, Timing
from kvstore.launch.plan import ProcessSpec

SCHEDULER, SERVER, WORKER_0, WORKER_1 = range(4)
TIMING = Timing(
    failure_s=5,
    alone_s=2,
    step_s=3,
    killed_s=10,
    worker_restart_s=0.25,
    restart_s=1,
    longest_restart_s=5,
)


def job(restarts: int = 3, *, joined: bool = True) -> Lifecycle:
    names = [("scheduler", 0), ("server", 0), ("worker", 0), ("worker", 1)]
    life = Lifecycle([ProcessSpec(*name, ("x",), {}) for name in names], TIMING, restarts)
    if joined:
        life.joined(0.0)
    return life


def fail_and_start(life: Lifecycle, now_s: float, status: int = -9) -> float:
    """Worker 1 fails and is started again; return how long that took."""
    assert life.exited({WORKER_1: status}, now_s) == []
    assert life.due_s is not None
    due_s = life.due_s
    (effect,) = life.tick(due_s)
    assert isinstance(effect, Again)
    assert effect.found.index == WORKER_1
    return due_s - now_s


def assert_fails(life: Lifecycle, statuses: dict[int, int], *, is_final: bool = False) -> None:
    """The end of these processes is a failure of the job, and starts nothing."""
    assert life.exited(statuses, 10.0, is_final=is_final) == []
    assert life.phase is Phase.FAILING
    assert life.failed
    assert set(statuses) <= set(life.exits)
    assert life.setbacks == {}
    assert life.due_s == life.deadline_s
    assert life.tick(11.5) == []


# -- a worker that is started again --------------------------------------------------------


@pytest.mark.parametrize("status", [-9, 1])
def test_a_worker_that_fails_is_started_again_after_a_moment_and_once(status: int) -> None:
    life = job()
    assert life.exited({WORKER_1: status}, 10.0) == []
    assert (life.phase, life.failed, life.exits) == (Phase.RUNNING, False, {})
    assert life.due_s == 10.25
    assert life.tick(10.2) == []
    assert life.tick(10.25) == [Again(Exit(WORKER_1, status, 10.0, 1), 1)]
    assert life.due_s is None
    assert life.tick(100.0) == []


def test_each_further_pause_of_a_worker_is_twice_as_long_up_to_the_longest() -> None:
    life = job(restarts=7)
    found = [fail_and_start(life, 10.0 * number) for number in range(1, 7)]
    assert found == [0.25, 1.0, 2.0, 4.0, 5.0, 5.0]
    life.exited({WORKER_0: -9}, 70.0)
    assert life.due_s == 70.25, "the other worker had not failed"


def test_a_place_that_it_got_does_not_make_its_next_pause_shorter() -> None:
    life = job()
    fail_and_start(life, 1.0)
    life.returned(1)
    assert fail_and_start(life, 61.0) == 1.0, "it has run for less than a minute"


def test_after_a_worker_has_run_for_a_minute_its_pauses_begin_again() -> None:
    life = job(restarts=5)
    found = [fail_and_start(life, now_s) for now_s in (1.0, 2.0, 63.0, 64.0, 65.0)]
    assert found == [0.25, 1.0, 0.25, 1.0, 2.0], "it was started at 3.0"
    assert (life.restarts.num_left, life.restarts.num_used) == (0, 5), "all count"


def test_two_that_fail_together_are_both_started_again() -> None:
    life = job(restarts=2)
    assert life.exited({WORKER_0: -9, WORKER_1: 7}, 10.0) == []
    assert life.tick(10.25) == [
        Again(Exit(WORKER_0, -9, 10.0, 1), 1),
        Again(Exit(WORKER_1, 7, 10.0, 1), 1),
    ]
    told = [life.restarts.count(index) for index in (WORKER_0, WORKER_1)]
    assert told == ["1 of 2 restarts", "2 of 2 restarts"]


def test_of_two_that_wait_the_first_one_due_starts_first() -> None:
    life = job()
    fail_and_start(life, 1.0)
    life.exited({WORKER_1: -9}, 10.0)
    life.exited({WORKER_0: -9}, 10.5)
    assert life.due_s == 10.75
    assert life.tick(10.75) == [Again(Exit(WORKER_0, -9, 10.5, 3), 1)]
    assert life.due_s == 11.0
    assert life.tick(11.0) == [Again(Exit(WORKER_1, -9, 10.0, 2), 2)]


def test_the_next_tick_is_for_a_start_or_a_deadline_whatever_is_first() -> None:
    life = job()
    life.deadline_s = 20.0
    assert life.due_s == 20.0
    life.exited({WORKER_1: -9}, 10.0)
    assert life.due_s == 10.25
    life.deadline_s = 10.1
    assert life.due_s == 10.1


# -- a worker that is not ------------------------------------------------------------------


def test_without_restarts_none_is_started_again() -> None:
    assert_fails(job(restarts=0), {WORKER_1: -9})


def test_before_all_have_joined_none_is_started_again() -> None:
    assert_fails(job(joined=False), {WORKER_1: -9})


def test_after_the_last_restart_none_is_started_again() -> None:
    life = job(restarts=1)
    fail_and_start(life, 1.0)
    life.returned(1)
    used_up = "worker 0 cannot be started again: all restarts are used (1 of 1)"
    assert life.exited({WORKER_0: -9}, 10.0) == [used_up]
    assert (life.phase, life.failed, life.setbacks) == (Phase.FAILING, True, {})


def test_then_the_others_do_not_wait_for_it() -> None:
    life = job(restarts=1)
    fail_and_start(life, 1.0)
    life.returned(1)
    life.exited({WORKER_0: 1}, 10.0)
    assert life.tick(11.9) == []
    assert life.tick(12.0) == [signal.SIGTERM]


def test_while_the_place_of_another_is_vacant_the_job_may_still_start_again_as_a_whole() -> None:
    life = job(restarts=1)
    fail_and_start(life, 1.0)
    assert life.exited({WORKER_0: -9}, 10.0) == [], "not all restarts are used"
    assert life.due_s == 12.0


def test_in_the_last_attempt_of_a_job_the_others_notice_it_themselves() -> None:
    names = [("scheduler", 0), ("server", 0), ("worker", 0), ("worker", 1)]
    specs = [ProcessSpec(*name, ("x",), {}) for name in names]
    life = Lifecycle(specs, TIMING, restarts=0, num_used=2)
    life.joined(0.0)
    used_up = "worker 0 cannot be started again: all restarts are used (2 of 2)"
    assert life.exited({WORKER_0: -9}, 10.0) == [used_up]
    assert life.due_s == 15.0


def test_two_that_fail_together_need_two_restarts() -> None:
    assert_fails(job(restarts=1), {WORKER_0: -9, WORKER_1: -9})


@pytest.mark.parametrize(("index", "status"), [(SERVER, 1), (SERVER, -9), (SCHEDULER, 1)])
def test_servers_and_the_scheduler_are_not_started_again(index: int, status: int) -> None:
    assert_fails(job(), {index: status})


@pytest.mark.parametrize("other", [SERVER, SCHEDULER])
def test_a_worker_that_fails_together_with_the_service_is_not_started_again(other: int) -> None:
    assert_fails(job(), {other: -9, WORKER_1: -9})


def test_without_a_scheduler_that_gives_places_none_is_started_again() -> None:
    life = job()
    life.exited({SCHEDULER: 0}, 1.0)
    assert life.phase is Phase.RUNNING
    assert_fails(life, {WORKER_1: -9})


def test_where_its_place_cannot_start_it_the_end_is_final() -> None:
    assert_fails(job(), {WORKER_1: 255}, is_final=True)


def test_a_worker_that_fails_after_another_failure_is_not_started_again() -> None:
    life = job()
    life.exited({SERVER: 1}, 9.0)
    assert_fails(life, {WORKER_1: -9})


def test_a_worker_that_fails_while_the_job_is_ended_is_not_started_again() -> None:
    life = job()
    life.signalled(signal.SIGINT, 9.0)
    life.exited({WORKER_1: -9}, 10.0)
    assert (life.phase, life.setbacks) == (Phase.STOPPING, {})
    assert life.exits[WORKER_1] == Exit(WORKER_1, -9, 10.0, 1, stopped=True)
    assert life.tick(11.0) == []


def test_a_worker_that_ends_with_0_is_not_started_again_and_another_one_is() -> None:
    life = job()
    life.exited({WORKER_0: 0, WORKER_1: -9}, 10.0)
    assert list(life.exits) == [WORKER_0]
    assert life.tick(10.25) == [Again(Exit(WORKER_1, -9, 10.0, 1), 1)]
    life.returned(1)
    life.exited({WORKER_1: 0}, 20.0)
    assert (life.phase, life.due_s) == (Phase.DRAINING, 30.0)
    life.exited({SCHEDULER: 0, SERVER: 0}, 21.0)
    assert (life.phase, life.failed, life.num_returned) == (Phase.ENDED, False, 1)


# -- a start that is given up --------------------------------------------------------------


def test_a_job_that_fails_meanwhile_counts_the_end_of_a_worker_that_was_to_start() -> None:
    life = job()
    life.exited({WORKER_1: -9}, 10.0)
    life.exited({SERVER: 1}, 10.1)
    assert (life.phase, life.failed) == (Phase.FAILING, True)
    assert life.exits[WORKER_1] == Exit(WORKER_1, -9, 10.0, 1)
    assert life.setbacks == {}
    assert life.due_s == life.deadline_s == 15.1
    assert life.tick(10.25) == []
    life.exited({SCHEDULER: 1}, 11.0)
    life.exited({WORKER_0: 1}, 11.1)
    assert (life.phase, life.due_s) == (Phase.ENDED, None)


def test_a_second_start_that_is_given_up_leaves_the_first_end_beside_the_second() -> None:
    life = job()
    fail_and_start(life, 1.0)
    life.exited({WORKER_1: 3}, 10.0)
    life.exited({SERVER: 1}, 10.1)
    assert life.exits[WORKER_1] == Exit(WORKER_1, 3, 10.0, 2)
    assert life.setbacks == {WORKER_1: Exit(WORKER_1, -9, 1.0, 1)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_meanwhile_gives_up_the_start(number: signal.Signals) -> None:
    life = job()
    life.exited({WORKER_1: -9}, 10.0)
    assert life.signalled(number, 10.1) == [number]
    assert life.exits == {WORKER_1: Exit(WORKER_1, -9, 10.0, 1)}
    assert life.setbacks == {}
    assert life.due_s == 13.1
    assert life.tick(10.25) == []
    life.exited(dict.fromkeys((SCHEDULER, SERVER, WORKER_0), -int(number)), 10.3)
    assert (life.phase, life.failed, life.interrupted_by) == (Phase.ENDED, False, number)


def test_a_program_that_cannot_be_started_gives_up_the_start_of_another() -> None:
    life = job()
    life.exited({WORKER_1: -9}, 10.0)
    assert life.cannot_start(10.1, [WORKER_0]) == [signal.SIGTERM]
    assert life.exits[WORKER_1] == Exit(WORKER_1, -9, 10.0, 1)
    assert life.tick(10.25) == []
    life.exited({SCHEDULER: -15, SERVER: -15}, 10.3)
    assert life.phase is Phase.ENDED


# -- a worker that has its place again, or not ---------------------------------------------


def test_a_place_makes_the_end_forgotten_and_counts() -> None:
    life = job()
    fail_and_start(life, 1.0)
    assert life.setbacks == {WORKER_1: Exit(WORKER_1, -9, 1.0, 1)}
    life.returned(1)
    assert (life.setbacks, life.num_returned) == ({}, 1)
    fail_and_start(life, 10.0, status=3)
    assert life.setbacks == {WORKER_1: Exit(WORKER_1, 3, 10.0, 2)}
    life.returned(1)
    assert (life.setbacks, life.num_returned) == ({}, 2)


@pytest.mark.parametrize("rank", [0, 2])
def test_the_place_of_another_changes_nothing(rank: int) -> None:
    life = job()
    fail_and_start(life, 1.0)
    life.returned(rank)
    assert (set(life.setbacks), life.num_returned) == ({WORKER_1}, 0)


def test_until_it_has_its_place_its_first_end_is_kept_and_its_last_one_is_told() -> None:
    life = job()
    fail_and_start(life, 1.0)
    life.exited({WORKER_1: 1}, 2.0)
    assert life.tick(3.0) == [Again(Exit(WORKER_1, 1, 2.0, 2), 2)]
    assert life.setbacks == {WORKER_1: Exit(WORKER_1, -9, 1.0, 1)}
    life.exited({WORKER_1: 1, SCHEDULER: 1}, 10.0)
    assert life.phase is Phase.FAILING
    assert life.exits[WORKER_1] == Exit(WORKER_1, 1, 10.0, 3)
    assert life.setbacks == {WORKER_1: Exit(WORKER_1, -9, 1.0, 1)}
    life.exited({SERVER: 1, WORKER_0: 1}, 10.5)
    assert (life.phase, life.failed) == (Phase.ENDED, True)


@pytest.mark.parametrize("status", [0, 1, -9])
def test_a_scheduler_that_ends_before_a_worker_has_its_place_fails_the_job(status: int) -> None:
    life = job()
    fail_and_start(life, 1.0)
    life.exited({SCHEDULER: status}, 2.0)
    assert (life.phase, life.failed) == (Phase.FAILING, True)
    assert life.setbacks == {WORKER_1: Exit(WORKER_1, -9, 1.0, 1)}


def test_a_scheduler_may_end_after_a_worker_has_its_place() -> None:
    life = job()
    fail_and_start(life, 1.0)
    life.returned(1)
    life.exited({SCHEDULER: 0, SERVER: 0}, 2.0)
    assert (life.phase, life.failed) == (Phase.RUNNING, False)


def heard_late() -> Lifecycle:
    """Worker 1 had its place and has ended once more; the scheduler's line comes after that."""
    life = job()
    fail_and_start(life, 1.0)
    life.exited({WORKER_1: 3}, 2.0)
    life.returned(1)
    return life


def test_a_place_that_is_heard_of_after_the_next_end_counts_and_that_end_is_kept() -> None:
    life = heard_late()
    assert life.num_returned == 1
    assert life.setbacks == {WORKER_1: Exit(WORKER_1, 3, 2.0, 2)}
    assert life.tick(3.0) == [Again(Exit(WORKER_1, 3, 2.0, 2), 2)]


def test_then_the_next_start_can_still_be_given_up() -> None:
    life = heard_late()
    assert life.signalled(signal.SIGINT, 2.1) == [signal.SIGINT]
    assert life.exits == {WORKER_1: Exit(WORKER_1, 3, 2.0, 2)}
    assert life.setbacks == {}


def test_all_others_may_end_at_once_while_a_worker_is_to_start() -> None:
    life = job()
    life.exited({WORKER_1: -9}, 10.0)
    life.exited({SCHEDULER: 1, SERVER: 1, WORKER_0: 1}, 10.1)
    assert (life.phase, life.failed, len(life.exits)) == (Phase.ENDED, True, 4)


def test_a_worker_whose_program_is_gone_does_not_hold_up_the_end() -> None:
    life = job()
    fail_and_start(life, 1.0)
    life.cannot_start(2.0, [WORKER_1])
    life.exited({SCHEDULER: -15, SERVER: -15, WORKER_0: -15}, 2.1)
    assert life.phase is Phase.ENDED


def test_a_server_that_ends_alone_together_with_a_worker_that_returns() -> None:
    life = job()
    life.exited({SERVER: 0, WORKER_1: -9}, 10.0)
    assert life.deadline_s == 10.0 + TIMING.service_s
