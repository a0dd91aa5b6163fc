"""Whose messages are taken in: before the roster so much, afterwards those of members."""

from __future__ import annotations

import pytest

from pslite import gate as gate_module
from pslite.gate import EARLY, UNLISTED, Gate
from pslite.ids import NodeInfo
from pslite.links import Delivery
from pslite.wire.messages import Beat, Exchange, Leave, Register, Request, StatusQuestion

REQUEST = Request(1, 0, 1, 1, b"")
NODE = NodeInfo("worker", 0, "W1", 1, "", "h", "m", 1)


def delivery(nbytes: int) -> Delivery:
    return Delivery("W1", 1, 1, REQUEST, [bytes(nbytes)])


def test_before_the_roster_so_many_messages_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "MAX_EARLY", 2)
    gate = Gate(takes_registrations=True)
    for _ in range(2):
        assert gate.objection("W1", REQUEST, []) is None
        gate.keep(delivery(0))
    assert gate.objection("W1", REQUEST, []) == EARLY
    assert gate.objection("W1", Leave(), []) is None
    assert gate.complete(frozenset({"W1"})) == [delivery(0)] * 2
    assert gate.complete(frozenset({"W1"})) == []


def test_before_the_roster_so_many_bytes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "MAX_EARLY_BYTES", 100)
    gate = Gate(takes_registrations=True)
    gate.keep(delivery(60))
    assert gate.objection("W1", REQUEST, [bytes(41)]) == EARLY
    assert gate.objection("W1", REQUEST, [memoryview(bytes(40)).cast("d")]) is None


def test_after_the_roster_only_members_are_heard_late_registrations_and_observers() -> None:
    gate = Gate(takes_registrations=True)
    gate.complete(frozenset({"W1"}))
    for message in (REQUEST, Leave(), Beat(), Exchange(True, False, (), (), ())):
        assert gate.objection("W1", message, []) is None
        assert gate.objection("W2", message, []) == UNLISTED
    assert gate.objection("W2", Register((NODE,), 1, 1, "1"), []) is None
    assert gate.objection("O1", StatusQuestion(1, "1"), []) is None
    gate.keep(delivery(10))
    assert gate.complete(frozenset()) == []


def test_registrations_and_observers_are_heard_by_the_scheduler_only() -> None:
    gate = Gate(takes_registrations=False)
    gate.complete(frozenset({"W1"}))
    assert gate.objection("W2", Register((NODE,), 1, 1, "1"), []) == UNLISTED
    assert gate.objection("O1", StatusQuestion(1, "1"), []) == UNLISTED
