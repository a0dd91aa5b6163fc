"""What ``LocalCluster`` does before a worker is asked. No process is started."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.running_cluster import LocalCluster
from kvstore.running_job import Outcome
from pslite.errors import UsageError


class FakeJob:
    """Workers that never answer."""

    goes_on = True

    def __init__(self, *arguments: Any) -> None:
        self.ordered: list[int] = []

    def start(self) -> None: ...

    def end(self) -> None: ...

    def gather(self, *arguments: Any) -> Outcome:
        return Outcome([])

    def leave_call(self, call: int, body: bytes) -> None: ...

    def order(self, call: int) -> None:
        self.ordered.append(call)


def test_a_call_too_many_reaches_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.running_cluster.RunningJob", FakeJob)
    monkeypatch.setattr("kvstore.running_cluster.MOST_CALLS", 2)
    cluster = LocalCluster(2, 1)
    job: Any = cluster._job
    for _ in range(2):
        cluster.submit(abs, (1,))
    with pytest.raises(UsageError, match="2 calls wait already"):
        cluster.submit(abs, (1,))
    assert job.ordered == [1, 2]
