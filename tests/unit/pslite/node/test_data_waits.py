"""What a server says of the rounds that wait: together what waits for the same workers."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from pslite.config import Config
from pslite.ids import Role
from pslite.node.customer import Incoming
from pslite.node.data import Traffic
from pslite.node.pool import InlinePool
from pslite.plane import OpenRound
from pslite.plane.interface import Run
from pslite.protocol.membership import Membership
from pslite.wire.survey import Wait


class Stores:
    def name_of(self, part: int) -> str | None:
        return "key 'w'" if part < 5 else None

    def send_joined(self) -> None:
        raise AssertionError("nothing is to be sent")


def handle(incoming: Incoming) -> None:
    raise AssertionError("nothing is to be repeated")


def waits(open_rounds: list[OpenRound], now: float) -> tuple[int, list[Wait]]:
    office: Any = SimpleNamespace(
        config=Config(round_window=2), role=Role.SERVER, membership=Membership(Role.SERVER)
    )
    traffic, stores = Traffic(office), Stores()
    traffic.add_owner(stores)
    plane: Any = SimpleNamespace(open_rounds=lambda: open_rounds)
    traffic.serve(plane, handle)
    return traffic.open_rounds(now)


def test_parts_that_wait_for_the_same_workers_are_one_wait() -> None:
    assert waits(
        [
            OpenRound((1, 2), 3, (0,), 5.0),
            OpenRound((7,), 3, (0,), 4.0),
            OpenRound((8,), 3, (0, 1), 2.0),
        ],
        now=10.0,
    ) == (
        4,
        [
            Wait("key 'w' and 2 other parts", 3, ("worker 0",), 6.0),
            Wait("part 8", 3, ("worker 0", "worker 1"), 8.0),
        ],
    )


def test_two_parts_are_one_and_another() -> None:
    _, [wait] = waits([OpenRound((1, 2), 3, (0,), 5.0)], now=10.0)
    assert wait.what == "key 'w' and 1 other part"


def test_what_has_just_begun_is_counted_and_not_listed() -> None:
    assert waits([OpenRound((1,), 3, (0,), 9.5), OpenRound((2,), 1, (1,), None)], 10.0) == (2, [])


def test_a_server_without_rounds_has_nothing_to_say() -> None:
    assert waits([], 10.0) == (0, [])


def test_lanes_that_come_and_go_are_not_remembered() -> None:
    """Each table and row-sparse key has a lane of its own; a job may make a million."""
    now = itertools.accumulate(itertools.cycle([*[0.001] * 99, 1.0]))
    office: Any = SimpleNamespace(
        config=Config(round_window=2),
        role=Role.SERVER,
        pool=InlinePool(),
        clock=lambda: next(now),
    )
    traffic = Traffic(office)
    app: Any = SimpleNamespace(apply=lambda jobs: [None])
    plane: Any = SimpleNamespace(app=app, finished=lambda jobs, outcomes: [])
    traffic.serve(plane, handle)
    job: Any = SimpleNamespace(sizes=(8,), batch=SimpleNamespace(payloads=[b""]))
    for lane in range(100_000):
        traffic.carry_out([Run(lane, [job])])
    assert len(traffic._slow_jobs) <= 4096
