"""What a server sends, and what it says instead of what it cannot send."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pslite.config import Config
from pslite.errors import UsageError
from pslite.ids import Role, node_id
from pslite.node.data import Traffic
from pslite.plane import Send
from pslite.protocol.membership import Membership
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
