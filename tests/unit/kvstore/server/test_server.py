"""What the process of a server or scheduler says, and when, in the order of its end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvstore import server
from pslite.config import Config
from pslite.errors import DeadlineError, NodeLostError
from pslite.future import Future

CONFIG = Config(
    role="server", num_workers=1, num_servers=1, root_uri="127.0.0.1", root_port=9091, task_id=0
)


@pytest.fixture(autouse=True)
def _this_process_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(server, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(server, "allow_files", lambda *_: None)
    interval_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval_s)


def node_that_fails(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    on_close: Exception | None = None,
) -> list[str]:
    """Returns what stands on standard error when the node begins to leave."""
    finished: Future[None] = Future("the end of the job")
    finished.set_error(NodeLostError("worker 0 is lost", role="worker", rank=0))
    seen: list[str] = []

    def close(*, goodbye: bool) -> None:
        seen.append(capsys.readouterr().err)
        if on_close is not None:
            raise on_close

    node = SimpleNamespace(finished=finished, close=close)
    monkeypatch.setattr(server, "start", lambda *_, **__: node)
    return seen


def test_a_server_says_why_it_fails_before_it_stays_to_tell_its_peers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher ends the service soon after the last worker."""
    seen = node_that_fails(monkeypatch, capsys)
    assert server.serve(CONFIG) == 1
    assert seen == ["NodeLostError: worker 0 is lost\n"]
    assert capsys.readouterr().err == ""


def test_what_fails_at_the_end_is_said_after_the_cause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = node_that_fails(monkeypatch, capsys, DeadlineError("nothing moved"))
    assert server.serve(CONFIG) == 1
    assert seen == ["NodeLostError: worker 0 is lost\n"]
    assert capsys.readouterr().err == "DeadlineError: nothing moved\n"
