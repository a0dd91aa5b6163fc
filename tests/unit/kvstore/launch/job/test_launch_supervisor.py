"""The supervisor without processes: what it hears of the members, and whom it starts again."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.launch.job.lifecycle import Phase
from kvstore.launch.job.places import (
    CannotStart,
    Ended,
    Event,
    IndexedSpecs,
    Joined,
    Output,
    Place,
    Returned,
    SchedulerLines,
    Started,
)
from kvstore.launch.job.restarts import Timing
from kvstore.launch.job.supervisor import Supervisor
from kvstore.launch.plan import JOURNAL_NAME, ProcessSpec


@pytest.fixture
def ends() -> Iterator[tuple[SchedulerLines, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(5.0)
        yield SchedulerLines(here), there


def after(lines: SchedulerLines, scheduler: socket.socket, data: bytes) -> list[Event] | None:
    """The events of these bytes, which arrive at once."""
    scheduler.sendall(data)
    return lines.read()


def test_that_all_have_joined_and_who_returns_are_lines(
    ends: tuple[SchedulerLines, socket.socket],
) -> None:
    assert after(*ends, b"all have joined\n") == [Joined()]
    assert after(*ends, b"worker 1 has its place again\n") == [Returned(1)]
    both = b"worker 0 has its place again\nworker 12 has its place again\n"
    assert after(*ends, both) == [Returned(0), Returned(12)]
    for role in ("server", "standby"):
        line = f"{role} 1 has its place again\n"
        assert after(*ends, line.encode()) == [Returned(1, role)]
    for role, attempt in ("worker", 1), ("server", 12), ("scheduler", 2):
        line = f"{role} 0 has its place again: {attempt}\n"
        assert after(*ends, line.encode()) == [Returned(0, role, attempt)]


def test_a_line_counts_when_it_is_complete_whatever_the_pieces(
    ends: tuple[SchedulerLines, socket.socket],
) -> None:
    assert after(*ends, b"all have") == []
    assert after(*ends, b" joined\nworker 1") == [Joined()]
    assert after(*ends, b"2 has its place again") == []
    assert after(*ends, b"\nworker 3 has its place again\nw") == [Returned(12), Returned(3)]
    assert after(*ends, b"orker 4 has its place again\n") == [Returned(4)]


@pytest.mark.parametrize("line", [b"", b"scheduler has its place again", b"worker x is there"])
def test_other_lines_are_no_events(ends: tuple[SchedulerLines, socket.socket], line: bytes) -> None:
    assert after(*ends, line + b"\nworker 2 has its place again\n") == [Returned(2)]


def test_after_the_scheduler_has_ended_there_are_no_more_lines(
    ends: tuple[SchedulerLines, socket.socket],
) -> None:
    lines, scheduler = ends
    assert after(lines, scheduler, b"all have joined\nworker 1 has") == [Joined()]
    scheduler.close()
    assert lines.read() is None


# -- workers that are started again --------------------------------------------------------

WORKER = 1
SPECS = [
    ProcessSpec(role, 0, ("x",), {"DMLC_NUM_ATTEMPT": "0", "ROLE": role})
    for role in ("scheduler", "worker")
]

AGAIN = "starting it again"


class Stage(Place):
    """Starts nothing, and gives each process the next number from 100."""

    can_start_again = True

    def __init__(self) -> None:
        self.num_started = 0
        self.again: list[tuple[int, Mapping[str, str]]] = []

    def start(self, specs: IndexedSpecs, variables: Mapping[str, str]) -> list[Event]:
        first = 100 + self.num_started
        self.num_started += len(specs)
        return [Started(index, pid) for pid, (index, _) in enumerate(specs, first)]

    def start_again(self, index: int, spec: ProcessSpec) -> list[Event]:
        self.again.append((index, spec.environment))
        return self.start([(index, spec)], {})


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def supervisor(tmp_path: Path, stage: Stage) -> Iterator[Supervisor]:
    """The supervisor of a job of a scheduler and a worker that have joined."""
    supervisor = Supervisor("0123", {}, tmp_path, Timing())
    supervisor.add_place(stage)
    supervisor.start([(spec, stage) for spec in SPECS], {}, restarts=2)
    supervisor._take_in([Joined()])
    yield supervisor
    for record in supervisor._records:
        record.stop_logging()


def after_the_pause(supervisor: Supervisor) -> None:
    job = supervisor._lifecycle
    assert job is not None and job.due_s is not None
    supervisor._carry_out(job.tick(job.due_s))


def test_a_worker_is_started_again_with_its_variables_and_the_next_attempt(
    supervisor: Supervisor, stage: Stage, capfd: pytest.CaptureFixture[str]
) -> None:
    supervisor._take_in([Ended({WORKER: -9})])
    after_the_pause(supervisor)
    supervisor._take_in([Ended({WORKER: 3})])
    after_the_pause(supervisor)
    assert stage.again == [
        (WORKER, {"DMLC_NUM_ATTEMPT": str(attempt), "ROLE": "worker"}) for attempt in (1, 2)
    ]
    assert capfd.readouterr().err.splitlines() == [
        f"[launcher] worker 0 (pid 101) ended with signal SIGKILL: {AGAIN} (1 of 2 restarts)",
        f"[launcher] worker 0 (pid 102) ended with exit code 3: {AGAIN} (2 of 2 restarts)",
    ]


def test_its_first_process_is_kept_for_the_report_until_another_has_its_place(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    supervisor._take_in([Output(WORKER, True, [b"first"]), Ended({WORKER: -9})])
    after_the_pause(supervisor)
    supervisor._take_in([Output(WORKER, True, [b"second"]), Ended({WORKER: 3})])
    after_the_pause(supervisor)
    first = supervisor._records[WORKER].setback
    assert first is not None
    assert (first.pid, first.exit.status, first.last_lines) == (101, -9, ["first"])
    assert (tmp_path / "worker-0.log").read_text() == "first\nsecond\n"
    assert supervisor._lifecycle is not None
    supervisor._take_in([Returned(0)])
    assert (supervisor._lifecycle.setbacks, supervisor._lifecycle.num_returned) == ({}, 1)


@pytest.mark.parametrize("why", [None, "node1 was lost"])
def test_where_its_place_cannot_start_it_or_is_gone_its_end_is_final(
    supervisor: Supervisor, stage: Stage, why: str | None
) -> None:
    stage.can_start_again = why is not None
    supervisor._take_in([Ended({WORKER: 255}, why)])
    assert supervisor._lifecycle is not None
    assert supervisor._lifecycle.phase is Phase.FAILING
    assert supervisor._lifecycle.exits[WORKER].status == 255
    assert stage.again == []


# -- schedulers that are started again -----------------------------------------------------

SCHEDULER = 0


def test_another_scheduler_is_told_once_and_the_status_waits_for_it(
    tmp_path: Path, stage: Stage, capfd: pytest.CaptureFixture[str]
) -> None:
    supervisor = Supervisor("0123", {}, tmp_path, Timing())
    supervisor.add_place(stage)
    specs = [
        replace(SPECS[SCHEDULER], environment={JOURNAL_NAME: "journal", "DMLC_NUM_ATTEMPT": "0"}),
        SPECS[WORKER],
    ]
    supervisor.terminal.show_status({}, "all are there")
    supervisor.start([(spec, stage) for spec in specs], {}, restarts=2)
    supervisor._take_in([Joined()])
    assert supervisor.terminal.due_s is not None
    for attempt in (1, 2):
        supervisor._take_in([Ended({SCHEDULER: -9})])
        after_the_pause(supervisor)
        assert supervisor.terminal.due_s is None
        supervisor._take_in([Joined(), Returned(0, "scheduler", attempt)])
        assert supervisor.terminal.due_s is not None
        supervisor._take_in([Returned(0, "scheduler", attempt)])
    assert stage.again == [
        (SCHEDULER, {JOURNAL_NAME: "journal", "DMLC_NUM_ATTEMPT": str(attempt)})
        for attempt in (1, 2)
    ]
    assert capfd.readouterr().err.splitlines() == [
        "[launcher] all are there",
        f"[launcher] scheduler (pid 100) ended with signal SIGKILL: {AGAIN} (1 of 2 restarts)",
        "[launcher] another scheduler goes on in place of the lost one",
        f"[launcher] scheduler (pid 102) ended with signal SIGKILL: {AGAIN} (2 of 2 restarts)",
        "[launcher] another scheduler goes on in place of the lost one",
    ]
    for record in supervisor._records:
        record.stop_logging()


# -- standbys that are started again -------------------------------------------------------

SERVER, STANDBY = 1, 2


class Host(Stage):
    """A place on a host of this name."""

    def __init__(self, label: str | None) -> None:
        super().__init__()
        self.label = label


def with_standby(tmp_path: Path, *hosts: Host) -> Iterator[Supervisor]:
    """The supervisor of a job with a scheduler, a server, its standby and a worker."""
    supervisor = Supervisor("0123", {}, tmp_path, Timing())
    for host in hosts:
        supervisor.add_place(host)
    roles = ("scheduler", "server", "standby", "worker")
    specs = [ProcessSpec(role, 0, (role,), {"ROLE": role}) for role in roles]
    supervisor.start(list(zip(specs, hosts, strict=True)), {}, restarts=4, num_used=1)
    supervisor._take_in([Joined()])
    yield supervisor
    for record in supervisor._records:
        record.stop_logging()


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> list[Host]:
    """Where the scheduler, the server, the standby and the worker run."""
    return [Host(label) for label in getattr(request, "param", (None, "a", "b", "c"))]


@pytest.fixture
def pair(tmp_path: Path, hosts: list[Host]) -> Iterator[Supervisor]:
    yield from with_standby(tmp_path, *hosts)


def take_over(pair: Supervisor) -> None:
    pair._take_in([Ended({SERVER: -9}), Returned(0, "server")])
    after_the_pause(pair)


def test_the_process_of_a_server_becomes_the_next_standby_and_names_and_logs_follow(
    pair: Supervisor, hosts: list[Host], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pair._take_in([Output(SERVER, True, [b"1"]), Output(STANDBY, True, [b"2"])])
    take_over(pair)
    assert hosts[1].again == [(SERVER, {"DMLC_NUM_ATTEMPT": "1", "ROLE": "standby"})]
    pair._take_in([Output(SERVER, True, [b"3"]), Output(STANDBY, True, [b"4"])])
    pair.terminal.write_last(pair._signals, is_interrupted=False)
    assert (tmp_path / "server-0.log").read_text() == "1\n4\n"
    assert (tmp_path / "standby-0.log").read_text() == "2\n3\n"
    assert capfd.readouterr().err.splitlines() == [
        "[server 0@a] 1",
        "[standby 0@b] 2",
        "[launcher] server 0 (pid 100 on a) ended with signal SIGKILL: waiting for standby 0 to "
        "take its place",
        "[launcher] starting a standby of server 0 again on a (2 of 5 restarts)",
        "[standby 0@a] 3",
        "[server 0@b] 4",
    ]


def test_a_lost_standby_is_started_again_with_its_variables(
    pair: Supervisor, hosts: list[Host]
) -> None:
    pair._take_in([Ended({STANDBY: 1})])
    after_the_pause(pair)
    pair._take_in([Ended({STANDBY: 1})])
    after_the_pause(pair)
    assert hosts[2].again == [
        (STANDBY, {"DMLC_NUM_ATTEMPT": str(attempt), "ROLE": "standby"}) for attempt in (1, 2)
    ]


@pytest.mark.parametrize(
    ("hosts", "lost", "where"),
    [
        ((None, "a", "b", "c"), [1], 3),  # the host of the lost server is lost, too
        ((None, "a", "b", "b"), [1], 2),  # only the host of the new server is left
        ((None, "a", "b", "b"), [], 1),
        ((None, "a", "a", "b"), [], 3),
        ((None, "a", "a", "a"), [], 1),
        ((None, None, None, None), [], 1),
        ((None, "a", "b", "c"), [1, 2, 3], 1),  # it says that it cannot
    ],
    indirect=["hosts"],
)
def test_a_standby_is_on_another_host_than_its_server_if_there_is_one(
    pair: Supervisor, hosts: list[Host], lost: list[int], where: int
) -> None:
    for index in lost:
        hosts[index].can_start_again = False
    take_over(pair)
    assert [number for number, host in enumerate(hosts) if host.again] == [where]
    assert pair._records[SERVER].label == hosts[where].label


def test_a_standby_that_cannot_be_started_leaves_its_server_alone(
    pair: Supervisor, capfd: pytest.CaptureFixture[str]
) -> None:
    take_over(pair)
    pair._take_in([CannotStart(SERVER, 12, "Cannot allocate memory")])
    job = pair._lifecycle
    assert job is not None
    assert (job.phase, job.failed, job.due_s is not None) == (Phase.RUNNING, False, True)
    assert capfd.readouterr().err.splitlines()[-1] == (
        "[launcher] standby 0 (pid 101 on a) ended with exit code 126 (it cannot be started: "
        "Cannot allocate memory): server 0 goes on without it"
    )
