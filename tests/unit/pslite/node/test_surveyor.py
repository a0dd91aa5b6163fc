"""The values of a status and their form on the wire: what is sent is read, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from pslite.errors import ProtocolError
from pslite.node.surveyor import body_of
from pslite.wire.codec import MAX_JOB_BYTES, Envelope, encode, pack_value, unpack_value
from pslite.wire.messages import StatusSurvey
from pslite.wire.survey import (
    MAX_NAMED,
    MAX_TEXT,
    MAX_WAITS,
    Event,
    NodeReport,
    NodeStatus,
    Progressed,
    StandbyStatus,
    Survey,
    Wait,
    packed,
    unpacked,
)

WAIT = Wait("key 'w'", 7, ("worker 1",), 12.5)
PROGRESS = Progressed(10, 320, 1.5, 48.0, 0.25, 0.5, 9.5)
REPORT = NodeReport("1.0", 3.5, 1, 2, 3, 4, 5, 6, PROGRESS, (WAIT,))
NODE = NodeStatus("worker", 1, "host", 4711, "running", 0.5, "", REPORT)
SILENT = NodeStatus("server", 0, "host", 4712, "silent", 9.0, "", None)
EVENT = Event(3.5, "worker 1 (pid 4711 on host) is lost")
STANDBYS = (StandbyStatus(0, "filling", "host", 4713), StandbyStatus(1, "none", "", 0))
SURVEY = Survey("job", "1.0", "running", 2, 1, 0.0, (), (NODE, SILENT), (EVENT,), STANDBYS)


def test_a_survey_comes_back_as_it_was_sent() -> None:
    assert unpacked(Survey, packed(SURVEY)) == SURVEY


def test_a_report_comes_back_as_it_was_sent_also_without_progress() -> None:
    assert unpacked(NodeReport, packed(REPORT)) == REPORT
    server = REPORT._replace(progress=None, waits=())
    assert unpacked(NodeReport, packed(server)) == server


def plain(value: Any) -> Any:
    """As on the wire."""
    return unpack_value(packed(value))


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        "text",
        {"version": "1.0"},
        plain(REPORT)[:-1],
        [*plain(REPORT), 1],
        plain(REPORT._replace(uptime_s=float("inf"))),
        plain(REPORT._replace(uptime_s=-1.0)),
        plain(REPORT._replace(uptime_s=3)),
        plain(REPORT._replace(requests=True)),
        plain(REPORT._replace(requests=-2)),
        plain(REPORT._replace(requests=1 << 63)),
        plain(REPORT._replace(progress=())),
        [*plain(REPORT)[:-1], [plain(WAIT)] * (MAX_WAITS + 1)],
        [*plain(REPORT)[:-1], [["x", 0, ["w"] * (MAX_NAMED + 2), 1.0]]],
        ["1" * (MAX_TEXT + 1), *plain(REPORT)[1:]],
        ["\x1b[2J", *plain(REPORT)[1:]],
        ["a\nb", *plain(REPORT)[1:]],
    ],
)
def test_what_is_no_report_is_refused(wrong: Any) -> None:
    with pytest.raises(ProtocolError):
        unpacked(NodeReport, pack_value(wrong))


def test_nothing_that_is_sent_breaks_a_limit() -> None:
    waits = tuple(Wait("a\x1b" * MAX_TEXT, 0, ("w",) * 1000, float(n)) for n in range(100))
    found = unpacked(NodeReport, packed(REPORT._replace(waits=waits)))
    assert [wait.waited_s for wait in found.waits] == [float(n) for n in range(99, 83, -1)]
    assert len(found.waits) == MAX_WAITS
    assert found.waits[0].missing == (*("w",) * MAX_NAMED, "968 more")
    assert found.waits[0].what.startswith("a?a?") and len(found.waits[0].what) == MAX_TEXT


def test_nodes_have_the_names_that_people_use() -> None:
    assert [node.name for node in (NODE, SILENT)] == ["worker 1", "server 0"]
    assert NODE._replace(rank=-1).name == "worker"
    assert NODE._replace(role="scheduler", rank=0).name == "scheduler"


def test_nodes_with_too_much_to_say_together_fit_into_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait = Wait("x" * MAX_TEXT, 1, ("n" * MAX_TEXT,) * MAX_NAMED, 1.0)
    report = NodeReport("1", 1.0, 1, 1, 1, 1, 1, 1, None, (wait,) * MAX_WAITS)
    node = NodeStatus("worker", 0, "h", 1, "running", 0.0, "", report)
    survey = Survey("j", "1", "running", 90, 1, 0.0, (), (node,) * 90)
    short = body_of(survey)
    encode(Envelope("j" * MAX_JOB_BYTES, 0, 1, 0, 0, 0, (), (), StatusSurvey(1, short)))
    found = unpacked(Survey, short)
    assert {node.report for node in found.nodes} == {report._replace(waits=())}
    monkeypatch.setattr("pslite.node.surveyor.MAX_SURVEY_BYTES", len(short) - 1)
    found = unpacked(Survey, body_of(survey))
    assert [node.report for node in found.nodes] == [None] * 90
