"""When a killed scheduler is started again, and how the job ends if it is not."""

from __future__ import annotations

import signal

import pytest

from kvstore.launch.job.lifecycle import Effect, Lifecycle, Phase
from kvstore.launch.job.restarts import Again, Exit, Timing
from kvstore.launch.plan import JOURNAL_NAME, ProcessSpec

SCHEDULER, SERVER, WORKER_0, WORKER_1, STANDBY = range(5)
TIMING = Timing(
    drain_s=10,
    service_s=8,
    failure_s=5,
    alone_s=2,
    step_s=3,
    killed_s=10,
    worker_restart_s=0.25,
    restart_s=1,
)
TERM = signal.SIGTERM
NONE_LEFT = "scheduler cannot be started again: all restarts are used ({0} of {0})"


def job(
    restarts: int = 3, *, joined: bool = True, journal: bool = True, standby: bool = False
) -> Lifecycle:
    names = [("scheduler", 0), ("server", 0), ("worker", 0), ("worker", 1), ("standby", 0)]
    environment = {JOURNAL_NAME: "journal"} if journal else {}
    specs = [
        ProcessSpec(role, rank, ("x",), environment if role == "scheduler" else {})
        for role, rank in names[: 5 if standby else 4]
    ]
    life = Lifecycle(specs, TIMING, restarts)
    if joined:
        life.joined(0.0)
    return life


def lose_and_start(life: Lifecycle, now_s: float) -> float:
    """The scheduler is killed and started again; return how long that took."""
    assert life.exited({SCHEDULER: -9}, now_s) == []
    assert life.due_s is not None
    due_s = life.due_s
    (effect,) = life.tick(due_s)
    assert isinstance(effect, Again)
    assert effect.found == Exit(SCHEDULER, -9, now_s, effect.found.sweep)
    return due_s - now_s


def starts(effects: list[Effect]) -> list[int]:
    return [effect.found.index for effect in effects if isinstance(effect, Again)]


# -- whether it is started again -----------------------------------------------------------


@pytest.mark.parametrize("status", [-9, -11, -15])
def test_a_scheduler_that_a_signal_has_killed_is_started_again_after_a_moment(status: int) -> None:
    life = job()
    assert life.exited({SCHEDULER: status}, 10.0) == []
    assert (life.phase, life.failed, life.exits, life.due_s) == (Phase.RUNNING, False, {}, 10.25)
    assert life.tick(10.25) == [Again(Exit(SCHEDULER, status, 10.0, 1), 1)]
    assert (life.num_schedulers, life.num_restarts) == (0, 0)
    life.returned(0, "scheduler", 1)
    assert (life.num_schedulers, life.num_restarts, life.setbacks) == (1, 1, {})
    life.exited({WORKER_0: 0, WORKER_1: 0}, 20.0)
    life.exited({SCHEDULER: 0, SERVER: 0}, 21.0)
    assert (life.phase, life.failed, life.drain_expired) == (Phase.ENDED, False, False)


FAILS = [
    # restarts, joined, journal, status, what is said
    (3, True, True, 1, []),  # its own error is the failure of the job
    (3, True, True, 130, []),  # it was told to end
    (3, False, False, -9, []),  # there is no journal
    (0, False, True, -9, []),
    (0, True, True, -9, []),
]


@pytest.mark.parametrize(("restarts", "joined", "journal", "status", "said"), FAILS)
def test_where_it_is_not_started_again_the_job_fails_within_seconds(
    restarts: int, joined: bool, journal: bool, status: int, said: list[str]
) -> None:
    life = job(restarts, joined=joined, journal=journal)
    assert life.exited({SCHEDULER: status}, 10.0) == said
    assert (life.phase, life.failed, life.deadline_s) == (Phase.FAILING, True, 15.0)
    assert life.tick(12.0) == []
    assert life.tick(15.0) == [TERM]
    life.exited(dict.fromkeys((SERVER, WORKER_0, WORKER_1), -15), 15.1)
    assert (life.phase, life.failed, life.setbacks) == (Phase.ENDED, True, {})
    assert life.exits[SCHEDULER] == Exit(SCHEDULER, status, 10.0, 1)


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_scheduler_may_be_killed_before_all_have_joined(attempt: int) -> None:
    """The next one does not know of it (0) if it was killed before it could write anything."""
    life = job(joined=False)
    life.returned(0, "scheduler", 0)
    assert lose_and_start(life, 10.0) == 0.25
    life.returned(0, "scheduler", attempt)
    assert (life.phase, life.num_schedulers, life.setbacks) == (Phase.RUNNING, 1, {})
    life.joined(20.0)
    life.exited({WORKER_0: 0, WORKER_1: 0}, 30.0)
    life.exited({SCHEDULER: 0, SERVER: 0}, 31.0)
    assert (life.phase, life.failed, life.drain_expired) == (Phase.ENDED, False, False)


def test_a_worker_that_fails_before_all_have_joined_is_the_cause_then() -> None:
    life = job(joined=False)
    lose_and_start(life, 10.0)
    life.returned(0, "scheduler", 1)
    assert life.exited({WORKER_0: 1}, 11.0) == []
    assert (life.phase, life.failed, life.setbacks) == (Phase.FAILING, True, {})


def test_a_scheduler_that_no_worker_will_join_is_not_started_again() -> None:
    life = job(joined=False)
    life.exited({WORKER_0: 0, WORKER_1: 0}, 10.0)
    assert life.exited({SCHEDULER: -9}, 10.1) == []
    assert (life.phase, life.restarts.due, life.restarts.num_left) == (Phase.FAILING, {}, 3)


def test_where_its_place_cannot_start_it_the_job_fails() -> None:
    life = job()
    assert life.exited({SCHEDULER: -9}, 10.0, is_final=True) == []
    assert (life.phase, life.failed, life.due_s) == (Phase.FAILING, True, 15.0)


def test_a_scheduler_is_killed_until_no_restart_is_left() -> None:
    life = job(restarts=2)
    assert lose_and_start(life, 10.0) == 0.25
    life.returned(0, "scheduler", 1)
    assert lose_and_start(life, 20.0) == 1.0
    life.returned(0, "scheduler", 2)
    assert life.num_schedulers == 2
    assert life.exited({SCHEDULER: -9}, 30.0) == [NONE_LEFT.format(2)]
    assert life.tick(32.0) == [TERM], "nobody waits for the next one"


def test_a_scheduler_that_is_killed_before_it_goes_on_counts_once() -> None:
    life = job()
    lose_and_start(life, 10.0)
    lose_and_start(life, 11.0)
    assert life.setbacks == {SCHEDULER: Exit(SCHEDULER, -9, 10.0, 1)}
    life.returned(0, "scheduler", 2)
    assert (life.num_schedulers, life.setbacks) == (1, {})


def test_a_scheduler_that_cannot_go_on_leaves_the_first_end_as_the_cause() -> None:
    life = job()
    lose_and_start(life, 10.0)
    assert life.exited({SCHEDULER: 1}, 11.0) == []
    assert (life.phase, life.failed, life.deadline_s) == (Phase.FAILING, True, 16.0)
    assert life.setbacks == {SCHEDULER: Exit(SCHEDULER, -9, 10.0, 1)}
    assert life.tick(16.0) == [TERM]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("is_before", [True, False])
def test_a_job_that_a_user_ends_starts_no_scheduler(
    number: signal.Signals, is_before: bool
) -> None:
    life = job()
    if is_before:
        assert life.signalled(number, 10.0) == [number]
    life.exited({SCHEDULER: -int(number)}, 10.0)
    if not is_before:
        assert life.signalled(number, 10.1) == [number]
    assert life.exits[SCHEDULER] == Exit(SCHEDULER, -int(number), 10.0, 1, stopped=is_before)
    assert life.tick(10.5) == []
    life.exited(dict.fromkeys((SERVER, WORKER_0, WORKER_1), -int(number)), 10.6)
    assert (life.phase, life.failed, life.setbacks) == (Phase.ENDED, False, {})


# -- with others ---------------------------------------------------------------------------


TOGETHER = [
    # restarts, with a standby, who ends as well, who is started again, phase
    (3, False, {WORKER_1: -9}, [SCHEDULER, WORKER_1], Phase.RUNNING),
    (3, False, {WORKER_1: 0}, [SCHEDULER], Phase.RUNNING),
    (1, False, {WORKER_1: -9}, [], Phase.FAILING),
    (3, False, {SERVER: -9}, [], Phase.FAILING),
    (3, True, {SERVER: -9}, [SCHEDULER], Phase.RUNNING),
    (3, True, {STANDBY: -9}, [SCHEDULER, STANDBY], Phase.RUNNING),
    (1, True, {STANDBY: -9}, [SCHEDULER], Phase.RUNNING),
    (3, True, {SERVER: -9, STANDBY: -9}, [], Phase.FAILING),
]


@pytest.mark.parametrize(("restarts", "standby", "others", "again", "phase"), TOGETHER)
def test_others_that_are_killed_with_the_scheduler_are_replaced_as_without_that(
    restarts: int, standby: bool, others: dict[int, int], again: list[int], phase: Phase
) -> None:
    life = job(restarts, standby=standby)
    life.exited({SCHEDULER: -9, **others}, 10.0)
    assert (life.phase, life.failed) == (phase, phase is Phase.FAILING)
    assert sorted(starts(life.tick(10.25))) == again
    assert (SCHEDULER in life.exits) == (phase is Phase.FAILING)


def test_a_worker_may_be_killed_while_there_is_no_scheduler() -> None:
    life = job()
    life.exited({SCHEDULER: -9}, 10.0)
    assert life.exited({WORKER_1: -9}, 10.1) == []
    assert starts(life.tick(10.25)) == [SCHEDULER]
    assert starts(life.tick(10.35)) == [WORKER_1]
    life.returned(0, "scheduler", 1)
    life.returned(1, "worker", 1)
    assert (life.num_restarts, life.setbacks, life.failed) == (2, {}, False)


def test_a_server_that_was_killed_before_the_scheduler_is_replaced_by_its_standby() -> None:
    life = job(standby=True)
    assert life.exited({SERVER: -9}, 10.0) == [Exit(SERVER, -9, 10.0, 1)]
    lose_and_start(life, 10.1)
    life.returned(0, "scheduler", 1)
    life.returned(0, "server", 1)
    assert (life.phase, life.failed, life.standbys.num_seated) == (Phase.RUNNING, False, 1)


# -- what the scheduler tells, and the next one repeats ------------------------------------


HEARD = [
    # what the schedulers tell of a worker that was started again twice: (rank, attempt)
    ([(1, 1), (1, 2)], 2),
    ([(1, 1), (1, 1), (1, 2), (1, 1), (1, 2)], 2),  # a scheduler repeats what another one told
    ([(0, 1), (1, 2)], 1),  # the line of the first return was lost with the scheduler
    ([], 0),
]


@pytest.mark.parametrize(("heard", "num_returned"), HEARD)
def test_a_place_counts_once_however_often_it_is_told(
    heard: list[tuple[int, int]], num_returned: int
) -> None:
    life = job()
    for number in (1, 2):
        life.exited({WORKER_1: -9}, 10.0 * number)
        life.tick(10.0 * number + 5)
        for rank, attempt in heard:
            if attempt == number:
                life.returned(rank, "worker", attempt)
    for rank, attempt in heard:
        life.returned(rank, "worker", attempt)
    assert life.num_returned == num_returned
    assert (WORKER_1 in life.setbacks) == (not heard)


def test_a_repeated_line_does_not_give_a_lost_worker_its_place() -> None:
    life = job()
    life.exited({WORKER_1: -9}, 10.0)
    life.tick(10.25)
    life.returned(1, "worker", 1)
    life.exited({WORKER_1: -9}, 20.0)
    lose_and_start(life, 20.0)
    life.returned(1, "worker", 1)
    assert life.setbacks[WORKER_1] == Exit(WORKER_1, -9, 20.0, 2)
    assert starts(life.tick(21.0)) == [WORKER_1]
    life.returned(1, "worker", 2)
    assert WORKER_1 not in life.setbacks


# -- the end of the job --------------------------------------------------------------------


@pytest.mark.parametrize("is_told", [True, False])
def test_a_scheduler_that_is_killed_while_the_servers_end_is_started_again(is_told: bool) -> None:
    life = job()
    life.exited({WORKER_0: 0, WORKER_1: 0}, 10.0)
    assert life.exited({SCHEDULER: -9}, 11.0) == []
    assert (life.phase, life.failed, life.due_s) == (Phase.DRAINING, False, 11.25)
    assert starts(life.tick(11.25)) == [SCHEDULER]
    if is_told:
        life.returned(0, "scheduler", 1)
    life.exited({SCHEDULER: 0}, 12.0)
    life.exited({SERVER: 0}, 12.1)
    assert (life.phase, life.failed, life.num_schedulers) == (Phase.ENDED, False, int(is_told))


def test_none_is_started_if_the_others_end_first() -> None:
    for first in (SERVER, WORKER_1):
        life = job()
        life.exited({WORKER_0: 0, SERVER + WORKER_1 - first: 0}, 10.0)
        life.exited({SCHEDULER: -9}, 11.0)
        life.exited({first: 0}, 11.1)
        assert (life.phase, life.failed, life.due_s) == (Phase.ENDED, False, None)
        assert life.exits[SCHEDULER] == Exit(SCHEDULER, -9, 11.0, 2)
        assert life.setbacks == {}


def test_a_scheduler_that_comes_when_all_others_have_ended_is_ended_without_a_warning() -> None:
    life = job()
    life.exited({WORKER_0: 0, WORKER_1: 0}, 10.0)
    lose_and_start(life, 11.0)
    life.exited({SERVER: 0}, 11.3)
    life.joined(11.5)  # it says so again
    life.returned(0, "scheduler", 1)
    assert life.deadline_s == 13.3
    assert life.tick(13.3) == [TERM]
    life.exited({SCHEDULER: -15}, 13.4)
    assert (life.phase, life.failed, life.drain_expired) == (Phase.ENDED, False, False)


def test_a_scheduler_that_comes_when_the_servers_have_ended_lets_the_workers_run() -> None:
    life = job()
    lose_and_start(life, 11.0)
    life.exited({SERVER: 0}, 11.3)
    assert (life.phase, life.deadline_s) == (Phase.RUNNING, None)
    life.exited({WORKER_0: 0, WORKER_1: 0}, 500.0)
    assert (life.phase, life.deadline_s) == (Phase.DRAINING, 502.0)


def test_a_server_that_fails_while_the_scheduler_is_away_is_the_cause() -> None:
    life = job()
    life.exited({WORKER_0: 0, WORKER_1: 0}, 10.0)
    life.exited({SCHEDULER: -9}, 11.0)
    life.exited({SERVER: 1}, 11.1)
    assert (life.phase, life.failed, life.setbacks) == (Phase.ENDED, True, {})


def test_without_a_restart_a_scheduler_that_is_killed_at_the_end_is_a_failure() -> None:
    life = job(restarts=0)
    life.exited({WORKER_0: 0, WORKER_1: 0}, 10.0)
    assert life.exited({SCHEDULER: -9}, 11.0) == []
    assert (life.phase, life.failed, life.deadline_s) == (Phase.FAILING, True, 13.0)
