"""What a server sends, and what it says instead of what it cannot send."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from pslite.config import Config
from pslite.errors import UsageError
from pslite.ids import Role, node_id
from pslite.node.data import Traffic
from pslite.plane import Send
from pslite.protocol.membership import Membership
from pslite.protocol.send_window import LOOK_S
from pslite.wire.base import Message
from pslite.wire.messages import Answer, PartsFailed, RoundWaits

LIMIT = 100


class Office:
    """A node whose van carries frames of ``LIMIT`` bytes."""

    def __init__(self) -> None:
        self.config = Config(round_window=2)
        self.role = Role.SERVER
        self.sent: list[tuple[int, Message]] = []
        self.warnings: list[str] = []
        self.log = SimpleNamespace(warn_seldom=lambda topic, text: self.warnings.append(text))
        self.membership = Membership(self.role)
        self.membership.uids = {FIRST.node: FIRST.uid, SECOND.node: SECOND.uid}
        self.links: Any = SimpleNamespace(has_room=lambda uid, now: True)
        self.sharing: Any = SimpleNamespace(reaches=lambda uid: False)
        self.clock = lambda: 0.0

    def send(self, node: int, message: Message, frames: Sequence[Any] = ()) -> None:
        if any(len(frame) > LIMIT for frame in frames):
            raise UsageError(f"a frame is over the limit of {LIMIT}")
        self.sent.append((node, message))


@pytest.mark.parametrize("pushed", [False, True])
def test_whoever_waits_for_an_answer_that_cannot_be_sent_gets_an_error(pushed: bool) -> None:
    office: Any = Office()
    large = Answer(pushed, (3, 4), (1, 2), (5, 5), (100, 1))
    small = Answer(pushed, (7,), (1,), (1,), (10,))
    Traffic(office).carry_out([Send(0, large, [bytes(101)]), Send(1, small, [bytes(10)])])
    (worker, failed), other = office.sent
    assert worker == node_id(Role.WORKER, 0)
    assert isinstance(failed, PartsFailed)
    assert (failed.pushed, failed.consumed) == (pushed, True)
    assert (failed.parts, failed.rounds) == ((3, 4), (1, 2))
    assert (failed.kind, failed.error) == ("UsageError", "a frame is over the limit of 100")
    assert other == (node_id(Role.WORKER, 1), small)
    assert [f"limit of {LIMIT}" in text for text in office.warnings] == [True]


def test_other_messages_that_cannot_be_sent_raise() -> None:
    office: Any = Office()
    with pytest.raises(UsageError):
        Traffic(office).carry_out([Send(0, RoundWaits(1, 1, (0,), 1.0), [bytes(101)])])


# -- answers that wait for room ------------------------------------------------------------


class Worker(NamedTuple):
    """A worker of the roster."""

    rank: int
    uid: str

    @property
    def node(self) -> int:
        return node_id(Role.WORKER, self.rank)


FIRST, SECOND = Worker(0, "W0"), Worker(1, "W1")


class Connections:
    """Which workers have room for one more message, and which read memory of the server."""

    def __init__(self, office: Office) -> None:
        self.room = Counter[str]()
        self.near = set[str]()
        office.links = self
        office.sharing = self
        send = office.send

        def send_and_fill(node: int, message: Message, frames: Sequence[Any] = ()) -> None:
            send(node, message, frames)
            self.room[office.membership.uids[node]] -= bool(frames)

        office.send = send_and_fill  # type: ignore[method-assign]

    def has_room(self, uid: str, now: float) -> bool:
        return self.room[uid] > 0

    def reaches(self, uid: str) -> bool:
        return uid in self.near


@pytest.fixture
def server() -> tuple[Any, Connections, Traffic]:
    office: Any = Office()
    connections = Connections(office)
    return office, connections, Traffic(office)


def value(part: int, *, priority: int = 0, worker: Worker = FIRST) -> Send:
    return Send(worker.rank, Answer(False, (part,), (1,), (1,), (10,)), [bytes(10)], priority)


def sent_parts(office: Any) -> list[int]:
    """The parts of what was sent since the last call."""
    parts = [message.parts[0] for _, message in office.sent]
    office.sent.clear()
    return parts


def test_values_wait_for_room_and_the_highest_priority_goes_first(server: Any) -> None:
    office, connections, traffic = server
    connections.room["W0"] = 1
    order = [(1, 0), (2, -3), (3, 5), (4, 0), (5, 5)]
    traffic.carry_out([value(part, priority=priority) for part, priority in order])
    assert (sent_parts(office), traffic.num_unsent) == ([1], 4)
    connections.room["W0"] = 2
    assert traffic.send_queued(1.0) == 1.0 + LOOK_S
    assert sent_parts(office) == [3, 5]
    connections.room["W0"] = 9
    assert traffic.send_queued(2.0) == math.inf
    assert (sent_parts(office), bool(traffic.unsent), traffic.everything_sent) == (
        [4, 2],
        False,
        True,
    )


def test_what_comes_later_does_not_overtake_what_waits(server: Any) -> None:
    office, connections, traffic = server
    traffic.carry_out([value(1)])
    connections.room["W0"] = 1
    traffic.carry_out([value(2)])
    assert sent_parts(office) == []
    traffic.send_queued(0.0)
    assert sent_parts(office) == [1]


def test_answers_without_values_and_those_of_other_workers_do_not_wait(server: Any) -> None:
    office, connections, traffic = server
    connections.room["W1"] = 1
    traffic.carry_out([value(1), Send(0, Answer(True, (2,), (1,), (1,), ()))])
    traffic.carry_out([value(3, worker=SECOND)])
    assert sent_parts(office) == [2, 3]


def test_a_worker_on_this_machine_reads_values_where_they_are(server: Any) -> None:
    office, connections, traffic = server
    connections.near.add("W0")
    traffic.carry_out([value(1), value(2)])
    assert sent_parts(office) == [1, 2]


def test_a_server_is_not_done_while_values_wait(server: Any) -> None:
    _, connections, traffic = server
    traffic.serve(SimpleNamespace(has_waiting=lambda rank: False, is_applying=False), None)
    traffic.carry_out([value(1)])
    assert (bool(traffic.unsent), traffic.everything_sent) == (True, False)
    assert (traffic.has_waiting(FIRST.node), traffic.has_waiting(SECOND.node)) == (True, False)
    connections.room["W0"] = 1
    traffic.send_queued(0.0)
    assert (traffic.has_waiting(FIRST.node), traffic.everything_sent) == (False, True)


def test_another_process_in_the_seat_does_not_get_values_for_the_lost_one(server: Any) -> None:
    office, connections, traffic = server
    traffic.carry_out([value(1)])
    office.membership.uids[FIRST.node] = "W0 again"
    connections.room.update({"W0": 9, "W0 again": 9})
    traffic.send_queued(0.0)
    assert (sent_parts(office), bool(traffic.unsent)) == ([], False)


def test_a_worker_that_is_gone_gets_nothing(server: Any) -> None:
    office, _, traffic = server
    del office.membership.uids[FIRST.node]
    traffic.carry_out([value(1)])
    assert (office.sent, bool(traffic.unsent)) == ([], False)
