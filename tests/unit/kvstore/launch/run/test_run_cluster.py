"""What ``LocalCluster`` does before a worker is asked. No process is started."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.launch.run.cluster import LocalCluster
from kvstore.launch.run.job import CallOutcome
from pslite.errors import ClosedError, DeadlineError, UsageError


class FakeJob:
    """Workers that never answer."""

    goes_on = True

    def __init__(self, *arguments: Any) -> None:
        self.ordered: list[int] = []
        self.is_ended = False

    def start(self) -> None: ...

    def end(self) -> None:
        self.is_ended = True

    def gather(
        self, call: int, timeout_s: float | None, began_s: float | None = None
    ) -> CallOutcome:
        if call == 0:  # they have joined
            return CallOutcome([])
        assert timeout_s is not None, "it would wait without end"
        raise DeadlineError(f"after {timeout_s:g} s worker 0 had not returned")

    def leave_call(self, call: int, body: bytes) -> None: ...

    def is_answered(self, call: int) -> bool:
        return False

    def order(self, call: int) -> None:
        self.ordered.append(call)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> LocalCluster:
    monkeypatch.setattr("kvstore.launch.run.cluster.RunningJob", FakeJob)
    return LocalCluster(1, 1)


def test_close_with_a_timeout_ends_calls_under_way_and_says_so(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    job: Any = cluster._job
    call = cluster.submit(abs, (1,))
    cluster.close(timeout_s=5)
    assert job.is_ended
    assert capsys.readouterr().err == (
        "[launcher] closing the cluster: after 5 s worker 0 had not returned; ending the job\n"
    )
    with pytest.raises(ClosedError, match="closing it took longer than its timeout_s"):
        call.result()
    with pytest.raises(ClosedError, match="closing it took longer"):
        cluster.submit(abs, (1,))


def test_a_cluster_and_its_calls_show_how_far_they_are(cluster: LocalCluster) -> None:
    call = cluster.submit(abs, (1,))
    assert repr(cluster) == "<LocalCluster of 1 workers and 1 servers, 1 calls under way>"
    assert repr(call) == "<Call 1 of a LocalCluster: under way>"
    cluster.close(timeout_s=5)
    assert "servers, ended: closing it took longer than its timeout_s>" in repr(cluster)
    assert repr(call) == "<Call 1 of a LocalCluster: failed, ClosedError>"


def test_close_without_a_timeout_says_for_whom_it_waits(
    cluster: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.submit(abs, (1,))
    with pytest.raises(AssertionError, match="it would wait without end"):
        cluster.close()
    assert capsys.readouterr().err == (
        "[launcher] closing the cluster: after 10 s worker 0 had not returned; waiting on\n"
    )


def test_an_exception_that_leaves_a_with_block_ends_calls_under_way(cluster: LocalCluster) -> None:
    job: Any = cluster._job
    with pytest.raises(DeadlineError), cluster:
        cluster.submit(abs, (1,)).result(timeout_s=1)
    assert job.is_ended


def test_a_call_too_many_reaches_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.launch.run.cluster.RunningJob", FakeJob)
    monkeypatch.setattr("kvstore.launch.run.cluster.MOST_CALLS", 2)
    cluster = LocalCluster(2, 1)
    job: Any = cluster._job
    for _ in range(2):
        cluster.submit(abs, (1,))
    with pytest.raises(UsageError, match="2 calls are waiting already"):
        cluster.submit(abs, (1,))
    assert job.ordered == [1, 2]
