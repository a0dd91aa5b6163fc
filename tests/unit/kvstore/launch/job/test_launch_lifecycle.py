"""The rules by which a job ends, without any process. Times are in seconds."""

from __future__ import annotations

import signal

import pytest

from kvstore.launch.job.lifecycle import Lifecycle, Phase
from kvstore.launch.job.restarts import Timing
from kvstore.launch.plan import ProcessSpec

SCHEDULER, SERVER, WORKER_0, WORKER_1 = range(4)
INT, TERM, KILL = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGKILL,
)


def job(*, joined: bool = True) -> Lifecycle:
    names = [("scheduler", 0), ("server", 0), ("worker", 0), ("worker", 1)]
    specs = [ProcessSpec(role, rank, ("x",), {}) for role, rank in names]
    life = Lifecycle(
        specs,
        Timing(
            drain_s=10, service_s=8, failure_s=5, alone_s=2, step_s=3, killed_s=10, leftover_s=1
        ),
    )
    if joined:
        life.joined(0.0)
    return life


def state(life: Lifecycle) -> tuple[Phase, float | None]:
    return life.phase, life.deadline_s


def test_a_job_whose_processes_all_end_with_0_succeeds() -> None:
    life = job()
    life.exited({WORKER_1: 0}, 1.0)
    assert state(life) == (Phase.RUNNING, None)
    life.exited({WORKER_0: 0}, 2.0)
    assert state(life) == (Phase.DRAINING, 12.0)
    life.exited({SCHEDULER: 0, SERVER: 0}, 3.0)
    assert (life.phase, life.failed, life.drain_expired) == (Phase.ENDED, False, False)


def test_servers_that_stay_after_the_workers_are_ended_with_a_warning_but_without_failure() -> None:
    life = job()
    life.exited({WORKER_0: 0, WORKER_1: 0, SCHEDULER: 0}, 1.0)
    assert life.tick(10.9) == []
    warning, step = life.tick(11.0)
    assert isinstance(warning, str)
    assert "server 0 did not end within 10 s" in warning
    assert step == TERM
    life.exited({SERVER: -15}, 11.1)
    assert (life.phase, life.failed, life.drain_expired) == (Phase.ENDED, False, True)


def test_after_the_first_failure_the_others_get_time_and_are_then_ended() -> None:
    life = job()
    life.exited({WORKER_1: 7}, 1.0)
    assert (life.phase, life.failed) == (Phase.FAILING, True)
    life.exited({SERVER: 1}, 2.0)
    assert life.tick(5.9) == []
    assert life.tick(6.0) == [TERM]
    assert life.tick(8.9) == []
    assert life.tick(9.0) == [KILL]
    life.exited({SCHEDULER: -9, WORKER_0: -9}, 9.1)
    assert life.phase is Phase.ENDED
    assert [life.exits[index].stopped for index in range(4)] == [True, False, True, False]


def test_after_a_failure_the_service_is_ended_soon_when_no_worker_is_left() -> None:
    life = job()
    life.exited({WORKER_1: 1}, 1.0)
    assert life.deadline_s == 6.0
    life.exited({WORKER_0: 1}, 1.5)
    assert state(life) == (Phase.FAILING, 3.5)
    assert life.tick(3.5) == [TERM]
    life = job()
    life.exited({SERVER: -9}, 1.0)
    assert life.deadline_s == 6.0  # the workers may say more about it
    life.exited({WORKER_0: 0, WORKER_1: 0}, 5.5)
    assert life.deadline_s == 6.0  # no later than before


def test_workers_that_ended_with_0_and_never_joined_are_a_failure() -> None:
    life = job(joined=False)
    life.exited({WORKER_0: 0, WORKER_1: 0}, 1.0)
    assert state(life) == (Phase.DRAINING, 3.0)
    assert life.tick(3.0) == [TERM]
    assert (life.failed, life.unjoined, life.drain_expired) == (True, True, False)
    life.exited({SCHEDULER: -15, SERVER: -15}, 3.1)
    assert life.phase is Phase.ENDED


def test_that_all_have_joined_may_be_heard_after_the_last_worker_has_ended() -> None:
    life = job(joined=False)
    life.exited({WORKER_0: 0, WORKER_1: 0}, 1.0)
    life.joined(1.5)
    assert state(life) == (Phase.DRAINING, 11.5)


def test_a_scheduler_that_ended_with_0_has_seen_all_join() -> None:
    for first, then in (
        ({SCHEDULER: 0, WORKER_0: 0, WORKER_1: 0}, {}),
        ({WORKER_0: 0, WORKER_1: 0}, {SCHEDULER: 0}),
    ):
        life = job(joined=False)
        life.exited(first, 1.0)
        if then:
            life.exited(then, 1.0)
        assert state(life) == (Phase.DRAINING, 11.0)


def test_a_server_that_fails_after_the_workers_succeeded_is_a_failure() -> None:
    life = job()
    life.exited({WORKER_0: 0, WORKER_1: 0}, 1.0)
    life.exited({SERVER: 1}, 2.0)
    assert (life.phase, life.failed) == (Phase.FAILING, True)
    life.exited({SCHEDULER: 0}, 2.5)
    assert life.phase is Phase.ENDED


def test_the_service_may_end_as_a_whole_before_the_workers_exit() -> None:
    life = job()
    life.exited({SERVER: 0}, 1.0)
    life.exited({SCHEDULER: 0}, 2.0)
    assert life.deadline_s is None
    life.exited({WORKER_0: 0}, 500.0)
    life.exited({WORKER_1: 0}, 501.0)
    assert (life.phase, life.failed) == (Phase.ENDED, False)


def test_a_server_that_ends_alone_with_0_under_the_workers_is_a_failure() -> None:
    life = job()
    life.exited({SERVER: 0}, 1.0)
    life.exited({WORKER_0: 0}, 2.0)
    assert life.deadline_s == 9.0
    assert life.tick(9.0) == [TERM]
    life.exited({WORKER_1: -15, SCHEDULER: -15}, 9.1)
    assert (life.phase, life.failed) == (Phase.ENDED, True)


@pytest.mark.parametrize("has_joined", [True, False])
@pytest.mark.parametrize("status", [-9, 1])
def test_a_scheduler_that_is_lost_ends_the_job(has_joined: bool, status: int) -> None:
    life = job(joined=has_joined)
    assert life.exited({SCHEDULER: status}, 1.0) == []
    assert state(life) == (Phase.FAILING, 6.0)
    assert life.tick(6.0) == [TERM]
    assert life.failed


def test_a_scheduler_that_is_killed_after_the_workers_have_ended_is_a_failure() -> None:
    life = job()
    assert life.exited({SCHEDULER: -9, WORKER_0: 0, WORKER_1: 0}, 1.0) == []
    assert state(life) == (Phase.FAILING, 3.0)
    assert life.tick(3.0) == [TERM]


def test_a_scheduler_that_ends_with_an_error_may_be_about_to_be_followed_by_others() -> None:
    life = job()
    assert life.exited({SCHEDULER: 1}, 1.0) == []
    assert state(life) == (Phase.FAILING, 6.0)
    life.exited({SERVER: 1}, 2.0)
    assert life.tick(6.0) == [TERM]


def test_ctrl_c_is_passed_on_and_made_stronger_step_by_step() -> None:
    life = job()
    assert life.signalled(signal.SIGINT, 1.0) == [INT]
    assert life.tick(3.9) == []
    assert life.tick(4.0) == [TERM]
    assert life.tick(7.0) == [KILL]
    life.exited(dict.fromkeys(range(4), -9), 7.1)
    assert (life.phase, life.failed) == (Phase.ENDED, False)
    assert life.interrupted_by is signal.SIGINT


def test_a_second_ctrl_c_does_not_wait_for_the_next_step() -> None:
    life = job()
    assert life.signalled(signal.SIGINT, 1.0) == [INT]
    assert life.signalled(signal.SIGINT, 1.5) == [TERM]
    assert life.signalled(signal.SIGTERM, 1.6) == [KILL]
    assert life.signalled(signal.SIGINT, 1.7) == []
    assert life.interrupted_by is signal.SIGINT


def test_a_process_that_survives_sigkill_is_named_and_does_not_hold_the_launcher() -> None:
    life = job()
    life.signalled(signal.SIGTERM, 0.0)
    assert life.tick(3.0) == [KILL]
    life.exited({SCHEDULER: -9, SERVER: -9, WORKER_0: -9}, 3.1)
    (said,) = life.tick(13.0)
    assert isinstance(said, str)
    assert said == "warning: worker 1 did not end even after SIGKILL"
    assert life.phase is Phase.ENDED


def test_a_signal_during_the_patience_after_a_failure_ends_the_job_at_once() -> None:
    life = job()
    life.exited({WORKER_0: 1}, 1.0)
    assert life.signalled(signal.SIGTERM, 2.0) == [TERM]
    assert life.failed
    assert life.interrupted_by is signal.SIGTERM


def test_when_a_process_cannot_be_started_the_others_are_ended() -> None:
    life = job()
    assert life.cannot_start(0.0) == [TERM]
    life.exited(dict.fromkeys(range(4), -15), 0.1)
    assert (life.phase, life.failed) == (Phase.ENDED, False)
    nothing_started = Lifecycle([], Timing())
    assert nothing_started.cannot_start(0.0) == []
    assert nothing_started.phase is Phase.ENDED
