"""Which processes belong to a job: what two files of /proc say, without any process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvstore.launch.job.guardian import end_job, is_member, job_members

OURS = b"PATH=/bin\0PS_JOB_ID=4711\0"


def stat(
    state: str = "S",
    *,
    group: int = 7,
    session: int = 7,
    size: int = 4096,
    begin: int = 100,
    end: int = 200,
    name: str = "a) S 1 (b",
) -> bytes:
    """Return a line of proc(5) with 52 fields."""
    fields = ["0"] * 53
    fields[1:7] = ["12", f"({name})", state, "1", str(group), str(session)]
    fields[23], fields[50], fields[51] = str(size), str(begin), str(end)
    return " ".join(fields[1:]).encode() + b"\n"


@pytest.mark.parametrize(
    ("line", "environ", "expected"),
    [
        (stat(), OURS, True),
        (stat(), b"PATH=/bin\0", False),
        (stat("Z"), OURS, False),
        (stat("X", group=5), OURS, False),
        (stat(group=5), b"", True),
        (stat(session=5), b"PATH=/bin\0", True),
        (stat(begin=100, end=100), b"", False),  # started with no environment
        (stat(size=0, begin=0, end=0), b"", False),  # a thread of the kernel
    ],
    ids=[
        "its id",
        "no id",
        "zombie",
        "dead",
        "group",
        "session",
        "empty",
        "kernel",
    ],
)
def test_membership(line: bytes, environ: bytes, expected: bool) -> None:
    assert is_member(line, environ, lambda each: b"PS_JOB_ID=4711" in each, {5}) is expected


@pytest.mark.parametrize("line", [stat(begin=0, end=0), stat()], ids=["new", "old"])
def test_a_process_that_executes_a_new_program_is_asked_again(line: bytes) -> None:
    assert is_member(line, b"", lambda each: b"PS_JOB_ID=4711" in each, {5}) is None


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_each_process_is_found_from_the_moment_its_start_returns() -> None:
    for attempt in range(20):
        job_id = f"test-of-the-guardian-{attempt}"
        with subprocess.Popen(["sleep", "60"], env={"PS_JOB_ID": job_id}) as process:
            assert job_members(job_id, ()) == [process.pid]
            assert end_job(job_id, (), 0) == 1
