"""The fixture of jobs with real processes: whatever a test starts is gone when it ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from job import Job, MakeJob


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Children inherit an ignored SIGINT, as a shell's background jobs have; tests send it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[MakeJob]:
    """``make_job(num_workers, num_servers, PS_...="...")``, as often as the test wants."""
    jobs: list[Job] = []

    def make(num_workers: int = 2, num_servers: int = 1, **settings: str) -> Job:
        directory = tmp_path / f"job{len(jobs)}"
        directory.mkdir()
        job = Job(directory, num_workers, num_servers, settings)
        jobs.append(job)
        return job

    yield make
    left = [thing for job in jobs for thing in job.end()]
    if left:
        written = "\n".join(job.output() for job in jobs)
        pytest.fail(f"the test left behind: {', '.join(left)}\n{written}", pytrace=False)
