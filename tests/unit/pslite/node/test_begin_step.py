"""The begin of a step: earlier pushes arrive, the counts are noted, then later requests go."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from plane_helpers import Asked, applied, ask, counts, mail, pushed

from pslite.config import Config
from pslite.errors import NodeLostError, UsageError
from pslite.future import Future
from pslite.ids import NodeInfo, Role
from pslite.node.data import Traffic

ONE = counts(1)
LOST = NodeLostError("server 0 is lost", role="server", rank=0)
ROSTER = tuple(
    NodeInfo(role, 0, f"{role}0", number, "", "alpha", "k", number)
    for number, role in enumerate(("scheduler", "worker", "server"), 1)
)


class Worker:
    """A worker's traffic; messages are accepted when a test says so."""

    def __init__(self) -> None:
        self.commands: list[Callable[[], None]] = []
        self.looks: list[Callable[[], bool]] = []
        self.accepted = True
        self.asked_about: list[list[str]] = []
        queue = SimpleNamespace(call=self.commands.append, look_after_each_step=self.looks.append)
        self.office: Any = SimpleNamespace(
            config=Config(round_window=0),
            error=None,
            io_queue=queue,
            links=SimpleNamespace(everything_accepted=self._everything_accepted),
            membership=SimpleNamespace(roster=ROSTER, role=Role.WORKER),
        )
        self.traffic = Traffic(self.office)
        #: The counts that were noted, and whether they are kept.
        self.noted: list[dict[int, int] | None] = []
        self.kept: Future[None] = Future()

    def _everything_accepted(self, peers: list[str]) -> bool:
        self.asked_about.append(list(peers))
        return self.accepted

    def push(self, part: int = 1) -> Asked:
        asked = ask(part, push=[ONE])
        self.traffic.submit([asked.transfer])
        return asked

    def begin(self) -> Future[None]:
        def note(counts: dict[int, int] | None) -> Future[Any]:
            self.noted.append(counts)
            return self.kept

        begun = self.traffic.begin_step(note)
        while self.commands:
            self.commands.pop(0)()
        return begun

    def step(self) -> None:
        """One step of the I/O thread, as in ``io_queue``."""
        self.looks[:] = [look for look in self.looks if not look()]

    def mail(self) -> list[Any]:
        return [send.message for send in mail(self.traffic.worker)]


def test_a_step_begins_at_once_if_nothing_is_in_flight_and_waits_for_the_note() -> None:
    worker = Worker()
    begun = worker.begin()
    assert (worker.noted, worker.looks, begun.done()) == ([{}], [], False)
    worker.push()
    assert worker.mail() == []
    worker.kept.set_result(None)
    assert (begun.result(0), worker.mail()) == (None, [pushed(1, 1)])


def test_the_begin_is_of_the_io_thread() -> None:
    worker = Worker()
    worker.traffic.begin_step(lambda _: worker.kept)
    worker.push()  # before the I/O thread has begun the step
    assert worker.mail() == [pushed(1, 1)]


def test_earlier_pushes_leave_first_and_later_ones_wait() -> None:
    worker = Worker()
    worker.push()
    worker.push()  # it waits for the first one
    begun = worker.begin()
    worker.push()
    for _ in range(2):
        worker.step()
        assert worker.noted == []
        worker.mail()
        worker.traffic.worker.answered(applied(1, 1), [])
    assert worker.mail() == []
    worker.step()
    assert (worker.noted, begun.done(), worker.looks) == ([{1: 2}], False, [])
    worker.kept.set_result(None)
    worker.traffic.worker.answered(applied(1, 2), [])
    assert (begun.done(), worker.mail()) == (True, [pushed(1, 3)])


def test_a_step_begins_when_the_servers_have_accepted_all() -> None:
    worker = Worker()
    worker.accepted = False
    begun = worker.begin()
    worker.step()
    assert (worker.noted, len(worker.looks)) == ([], 1)
    worker.accepted = True
    worker.step()
    worker.kept.set_result(None)
    assert (worker.noted, worker.looks, begun.done()) == ([{}], [], True)
    assert {tuple(peers) for peers in worker.asked_about} == {("server0",)}


def test_requests_that_stores_hold_back_belong_to_the_step_before() -> None:
    worker = Worker()

    class Store:
        def name_of(self, part: int) -> str | None:
            return None

        def send_joined(self) -> None:
            worker.commands.append(worker.push)  # type: ignore[arg-type]

    store = Store()
    worker.traffic.add_owner(store)
    worker.begin()
    assert worker.mail() == [pushed(1, 1)]
    worker.step()
    assert worker.noted == [{1: 1}]


def test_requests_go_on_although_the_note_was_not_kept() -> None:
    worker = Worker()
    begun = worker.begin()
    worker.push()
    worker.kept.set_error(UsageError("no"))
    assert (str(begun.error()), worker.mail()) == ("no", [pushed(1, 1)])


def test_steps_follow_one_another() -> None:
    worker = Worker()
    worker.kept.set_result(None)
    for round_ in (1, 2):
        assert worker.begin().done()
        worker.push()
        assert worker.mail() == [pushed(1, round_)]
        worker.traffic.worker.answered(applied(1, round_), [])
    assert worker.noted == [{}, {1: 1}]


def test_what_arrives_after_the_end_of_the_node_is_not_noted() -> None:
    worker = Worker()
    worker.accepted = False
    worker.begin()
    worker.office.error = LOST
    worker.accepted = True
    worker.step()
    assert (worker.looks, worker.noted) == ([], [])


@pytest.mark.parametrize("is_noted", [False, True])
def test_the_end_of_the_node_ends_a_step_that_begins(is_noted: bool) -> None:
    worker = Worker()
    worker.accepted = is_noted
    begun = worker.begin()
    asked = worker.push()
    worker.office.error = LOST
    worker.traffic.fail(LOST)
    assert (begun.error(), asked.endings) == (LOST, [LOST])
    worker.step()
    assert (worker.looks, len(worker.noted)) == ([], int(is_noted))
    if is_noted:
        worker.kept.set_error(LOST)
    assert (begun.error(), worker.mail()) == (LOST, [])


def test_no_step_begins_on_a_node_that_has_failed() -> None:
    worker = Worker()
    worker.office.error = LOST
    assert worker.begin().error() is LOST
    assert (worker.noted, worker.looks) == ([], [])


def test_a_failure_after_the_begin_is_not_one_of_the_step() -> None:
    worker = Worker()
    worker.kept.set_result(None)
    begun = worker.begin()
    worker.traffic.fail(LOST)
    assert (begun.error(), begun.result(0)) == (None, None)
