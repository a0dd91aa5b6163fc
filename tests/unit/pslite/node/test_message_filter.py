"""Whose messages are taken in: before the roster so much, afterwards those of members."""

from __future__ import annotations

import pytest

from pslite.ids import NodeInfo
from pslite.node import message_filter as gate_module
from pslite.node.links import Delivery
from pslite.node.message_filter import EARLY, OUT_OF_ROLE, UNLISTED, Admission
from pslite.wire.messages import (
    ALL_MESSAGES,
    SENDERS,
    BarrierLeave,
    Beat,
    Exchange,
    Leave,
    Register,
    Request,
    StatusQuestion,
)

REQUEST = Request(1, 0, 1, 1, b"")
NODE = NodeInfo("worker", 0, "W1", 1, "", "h", "m", 1)


def delivery(nbytes: int) -> Delivery:
    return Delivery("W1", 1, 1, REQUEST, [bytes(nbytes)])


def test_before_the_roster_so_many_messages_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "MAX_EARLY", 2)
    gate = Admission(takes_registrations=True)
    for _ in range(2):
        assert gate.objection("W1", REQUEST, []) is None
        gate.keep(delivery(0))
    assert gate.objection("W1", REQUEST, []) == EARLY
    assert gate.objection("W1", Leave(), []) is None
    assert gate.complete({"W1": "worker"}) == [delivery(0)] * 2
    assert gate.complete({"W1": "worker"}) == []


def test_before_the_roster_so_many_bytes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "MAX_EARLY_BYTES", 100)
    gate = Admission(takes_registrations=True)
    gate.keep(delivery(60))
    assert gate.objection("W1", REQUEST, [bytes(41)]) == EARLY
    assert gate.objection("W1", REQUEST, [memoryview(bytes(40)).cast("d")]) is None


def test_after_the_roster_only_members_are_heard_late_registrations_and_observers() -> None:
    gate = Admission(takes_registrations=True)
    gate.complete({"W1": "worker"})
    for message in (REQUEST, Leave(), Beat(), Exchange(True, False, (), (), ())):
        assert gate.objection("W1", message, []) is None
        assert gate.objection("W2", message, []) == UNLISTED
    assert gate.objection("W2", Register((NODE,), 1, 1, "1"), []) is None
    assert gate.objection("O1", StatusQuestion(1, "1"), []) is None
    gate.keep(delivery(10))
    assert gate.complete({}) == []


def test_registrations_and_observers_are_heard_by_the_scheduler_only() -> None:
    gate = Admission(takes_registrations=False)
    gate.complete({"W1": "worker"})
    assert gate.objection("W2", Register((NODE,), 1, 1, "1"), []) == UNLISTED
    assert gate.objection("O1", StatusQuestion(1, "1"), []) == UNLISTED


def test_a_member_says_only_what_is_for_its_role() -> None:
    gate = Admission(takes_registrations=False)
    roles = {"H": "scheduler", "S1": "server", "W1": "worker"}
    gate.complete(roles)
    for kind in ALL_MESSAGES.values():
        message = object.__new__(kind)
        for uid, role in roles.items():
            may = role in SENDERS.get(kind, roles.values())
            assert gate.objection(uid, message, []) == (None if may else OUT_OF_ROLE)


def test_what_came_early_and_was_not_for_its_sender_to_say_is_dropped_at_the_roster() -> None:
    gate = Admission(takes_registrations=False)
    early = [
        Delivery("W1", 1, 1, message, [])
        for message in (Exchange(True, False, (), (), ()), BarrierLeave(4, 1, "", ""))
    ]
    for each in early:
        gate.keep(each)
    assert gate.complete({"W1": "worker"}) == early[:1]
