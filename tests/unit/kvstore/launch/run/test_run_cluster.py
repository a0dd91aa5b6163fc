"""``LocalCluster`` and its job, with a launcher whose workers do what a test says."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from kvstore.errors import JobFailed
from kvstore.launch.run import LocalCluster, call_files
from kvstore.launch.run.background import LauncherOutput, Line
from kvstore.launch.run.call_files import MARK, WorkerAnswer
from pslite.errors import ClosedError, DeadlineError

LIMIT_S = 20.0


class FakeLauncher:
    """In the place of a launcher with one worker, which has joined."""

    made: list[FakeLauncher] = []

    def __init__(
        self, arguments: Sequence[str], additions: Mapping[str, str], directory: Path
    ) -> None:
        self.output = LauncherOutput()
        self.directory = directory
        self.status = 143
        self._news: queue.Queue[str | None] = queue.Queue()
        self.made.append(self)
        self.answer(0, None)

    def answer(self, call: int, value: object) -> None:
        self.leave(call, value)
        self.announce(call)

    def leave(self, call: int, value: object) -> None:
        path = call_files.answer_path(self.directory, call, 0)
        call_files.write_answer(path, WorkerAnswer("value", pickle.dumps(value)))

    def announce(self, call: int) -> None:
        self._news.put(f"[worker 0] {MARK}{call}")

    def orders(self) -> str:
        """What its worker has been told since the last time."""
        path = call_files.orders_path(self.directory, 0)
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as pipe:
            return (pipe.read(1000) or b"").decode()

    def read(self, timeout_s: float | None) -> list[Line] | None:
        try:
            line = self._news.get(timeout=timeout_s)
        except queue.Empty:
            return []
        if line is None:
            return None
        for is_error in (False, True):
            assert self.output.show(line, is_error=is_error) is None
        return []

    def signal(self, number: signal.Signals) -> None:
        self._news.put(None)

    def end(self, status: int) -> None:
        """The job ends by itself."""
        self.status = status
        self._news.put(None)

    def close(self) -> int:
        return self.status


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.setattr("kvstore.launch.run.job.BackgroundLauncher", FakeLauncher)
    monkeypatch.setattr(FakeLauncher, "made", [])
    cluster = LocalCluster(1, 1)
    yield cluster
    FakeLauncher.made[0].end(0)
    cluster.close(timeout_s=0)
    assert not FakeLauncher.made[0].directory.exists()


@pytest.fixture
def launcher(cluster: LocalCluster) -> FakeLauncher:
    return FakeLauncher.made[0]


def until(condition: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_close_with_a_timeout_ends_calls_under_way_and_says_so(
    cluster: LocalCluster, launcher: FakeLauncher, capsys: pytest.CaptureFixture[str]
) -> None:
    call = cluster.submit(abs, (1,))
    cluster.close(timeout_s=0.05)
    assert not launcher.directory.exists()
    assert capsys.readouterr().err == (
        "[launcher] closing the cluster: after 0.05 s worker 0 had not returned; ending the job\n"
    )
    with pytest.raises(ClosedError, match="closing it took longer than its timeout_s"):
        call.result()
    with pytest.raises(ClosedError, match="closing it took longer"):
        cluster.submit(abs, (1,))


def test_a_cluster_and_its_calls_show_how_far_they_are(cluster: LocalCluster) -> None:
    call = cluster.submit(abs, (1,))
    assert repr(cluster) == "<LocalCluster of 1 workers and 1 servers, 1 calls under way>"
    assert repr(call) == "<Call 1 of a LocalCluster: under way>"
    cluster.close(timeout_s=0)
    assert "servers, ended: closing it took longer than its timeout_s>" in repr(cluster)
    assert repr(call) == "<Call 1 of a LocalCluster: failed, ClosedError>"


def test_close_without_a_timeout_says_for_whom_it_waits(
    cluster: LocalCluster,
    launcher: FakeLauncher,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.launch.run.SAY_S", 0.05)
    call = cluster.submit(abs, (-1,))

    def work() -> None:
        time.sleep(0.3)
        launcher.answer(1, 1)
        until(lambda: call_files.END in launcher.orders())
        launcher.end(0)

    worker = threading.Thread(target=work)
    worker.start()
    cluster.close()
    worker.join()
    assert call.result() == [1]
    assert capsys.readouterr().err == (
        "[launcher] closing the cluster: after 0.05 s worker 0 had not returned; waiting on\n"
    )


def test_an_exception_that_leaves_a_with_block_ends_calls_under_way(
    cluster: LocalCluster, launcher: FakeLauncher
) -> None:
    with pytest.raises(DeadlineError, match=r"after 0\.05 s worker 0 had not returned"), cluster:
        cluster.submit(abs, (1,)).result(timeout_s=0.05)
    assert not launcher.directory.exists()


def test_a_call_is_ordered_when_the_one_before_it_is_over(
    cluster: LocalCluster, launcher: FakeLauncher
) -> None:
    first, second = cluster.submit(abs, (1,)), cluster.submit(abs, (2,))
    assert launcher.orders() == "1\n"
    with pytest.raises(DeadlineError, match=r"after 0\.05 s a call before this one had not"):
        second.result(timeout_s=0.05)
    launcher.answer(1, "first")
    until(first.done)
    assert launcher.orders() == "2\n"
    launcher.answer(2, "second")
    assert (second.result(LIMIT_S), first.result()) == (["second"], ["first"])
    assert sorted(os.listdir(launcher.directory)) == ["orders-0"]


def test_an_answer_that_a_shared_file_system_shows_late_is_looked_for_again(
    cluster: LocalCluster, launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.launch.run.job.LOOK_S", 0.01)
    call = cluster.submit(abs, (1,))
    launcher.announce(1)
    with pytest.raises(DeadlineError):
        call.result(timeout_s=0.05)
    launcher.leave(1, "late")
    assert call.result(LIMIT_S) == ["late"]


@pytest.mark.parametrize("is_under_way", [True, False])
def test_a_job_that_ends_by_itself_fails_one_call_and_refuses_the_others(
    cluster: LocalCluster, launcher: FakeLauncher, is_under_way: bool
) -> None:
    calls = [cluster.submit(abs, (1,)) for _ in range(2)] if is_under_way else []
    launcher.end(137)
    until(lambda: not launcher.directory.exists())
    with pytest.raises(JobFailed, match="its launcher ended with exit code 137"):
        (calls or [cluster.submit(abs, (1,))])[0].result()
    for call in calls[1:]:
        with pytest.raises(ClosedError, match="before this call had returned: a call failed: "):
            call.result()
    with pytest.raises(ClosedError, match="this cluster has ended: a call failed: the job ended"):
        cluster.submit(abs, (1,))
