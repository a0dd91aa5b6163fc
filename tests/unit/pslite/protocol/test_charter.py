"""What the scheduler after a lost one must know: nothing of it changes in a journal."""

from __future__ import annotations

import pytest

from pslite.ids import NodeInfo
from pslite.protocol.charter import Charter, FailedBarrier, GoneRow, SeatRow, charter_from
from pslite.wire.codec import pack_value, unpack_value


def process(number: int, rank: int = 0, role: str = "worker") -> NodeInfo:
    """A process; ``number`` tells it from others."""
    return NodeInfo(role, rank, f"{role}{number}", 100 + number, "", "alpha", "k", 4000 + number)


EMPTY = Charter((), (), 1, (), (), ())
FULL = Charter(
    roster=(process(0), process(1, 1), process(2, 0, "server")),
    attempts=(0, 3, 1),
    epoch=7,
    gone=(
        GoneRow(9, True, "", ((4, 2), (6, 1))),
        GoneRow(11, False, "its process is gone", ()),
    ),
    seats=(
        SeatRow(9, process(0), 0, "VACANT", True, 2, "killed", None, None, False),
        SeatRow(8, process(2, 0, "server"), 1, "TAKEN", False, 0, "", process(5), None, False),
        SeatRow(10, process(3, 1, "server"), 0, "TAKEN", False, 1, "", None, process(6), True),
    ),
    failed_barriers=(FailedBarrier(4, 3, "DeadlineError", "timed out", (9, 11)),),
)


@pytest.mark.parametrize("charter", [EMPTY, FULL], ids=["empty", "full"])
def test_a_charter_comes_back_from_a_journal_as_it_was(charter: Charter) -> None:
    found = charter_from(unpack_value(pack_value(charter.plain())))
    assert found == charter
    assert hash(found) == hash(charter)  # also inside, no tuple has become a list
    for row, before in zip(found.seats, charter.seats, strict=True):
        nodes = (row.node, row.standby, row.filling)
        assert all(each is None or isinstance(each, NodeInfo) for each in nodes), before
