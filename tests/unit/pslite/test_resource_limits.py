"""What a process may run out of is said before a node starts, with what to raise."""

from __future__ import annotations

import errno
import itertools
import resource
import threading

import pytest

from pslite import resource_limits
from pslite.errors import ConfigError
from pslite.ids import Role
from pslite.resource_limits import (
    allow_files,
    check_files,
    check_threads,
    files_needed,
    shortage_told,
)


class Limits:
    """The limit of open files of an imagined process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.soft, self.hard, self.num_open = 1024, 4096, 5
        monkeypatch.setattr(resource, "getrlimit", lambda which: (self.soft, self.hard))
        monkeypatch.setattr(resource, "setrlimit", self._set)
        monkeypatch.setattr(resource_limits, "_num_open", lambda: self.num_open)

    def _set(self, which: int, limits: tuple[int, int]) -> None:
        self.soft, self.hard = limits


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    return Limits(monkeypatch)


def test_more_peers_need_more_files_and_connecting_costs_more_than_accepting() -> None:
    workers = [files_needed(Role.WORKER, 1, servers).least for servers in (1, 2, 3)]
    servers = [files_needed(Role.SERVER, workers, 9).least for workers in (1, 2, 3)]
    assert [b - a for a, b in itertools.pairwise(workers)] == [4, 4]
    assert [b - a for a, b in itertools.pairwise(servers)] == [1, 1]


def test_a_worker_of_128_servers_is_warned_at_1024_files_and_told_what_to_raise(
    limits: Limits,
) -> None:
    assert check_files(Role.WORKER, 2, 100) is None
    warning = check_files(Role.WORKER, 2, 128)
    assert warning is not None
    wanted = 5 + files_needed(Role.WORKER, 2, 128).usual
    assert f"RLIMIT_NOFILE is 1024; raise the limit with `ulimit -n {wanted}`" in warning
    assert "hard limit" not in warning


def test_what_cannot_work_is_an_error_with_the_hard_limit_too(limits: Limits) -> None:
    limits.soft, limits.hard = 20, 64
    with pytest.raises(
        ConfigError, match=r"may open only 15 more: RLIMIT_NOFILE is 20.*limit is 64"
    ):
        check_files(Role.SERVER, 2, 1)


def test_a_process_of_ours_raises_its_soft_limit_and_no_further_than_needed(
    limits: Limits,
) -> None:
    allow_files(Role.SERVER, 2, 1)
    assert limits.soft == 1024
    allow_files(Role.SERVER, 200, 1)
    assert limits.soft == 5 + files_needed(Role.SERVER, 200, 1).usual
    allow_files(Role.SERVER, 20_000, 1)
    assert (limits.soft, limits.hard) == (4096, 4096)


def test_no_limit_is_enough(limits: Limits) -> None:
    limits.soft = limits.hard = resource.RLIM_INFINITY
    allow_files(Role.SERVER, 2, 1)
    assert check_files(Role.SERVER, 10**6, 1) is None
    assert limits.soft == resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(errno.EMFILE, "x"), "RLIMIT_NOFILE is .*ulimit -n"),
        (OSError(errno.ENOMEM, "x"), "ulimit -v"),
        (MemoryError(), "ulimit -v"),
    ],
    ids=repr,
)
def test_what_the_system_refuses_is_an_error_of_ours(error: Exception, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice) as raised, shortage_told():
        raise error
    assert raised.value.__cause__ is error


def test_another_error_stays_what_it_is() -> None:
    with pytest.raises(PermissionError), shortage_told():
        raise PermissionError(errno.EACCES, "x")


def test_threads_that_cannot_be_had_are_an_error_and_those_that_can_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = threading.active_count()
    check_threads(3)
    assert threading.active_count() == before
    start, left = threading.Thread.start, iter([1, 1])

    def limited(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(
        ConfigError, match=r"needs 3 threads, but only 2 could be started.*ulimit -u"
    ):
        check_threads(3)
    assert threading.active_count() == before
