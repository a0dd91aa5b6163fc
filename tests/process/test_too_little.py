"""What real processes do where the machine gives too little: room for lines, open files, memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
from job import PATIENCE_S, ROOT, MakeJob, needs_proc

pytestmark = [pytest.mark.process, needs_proc]

SERVE = "import sys\nfrom kvstore.server import main\nsys.exit(main(()))\n"
ROUND = """
kv = mx.kvstore.create("dist_sync")
kv.init("w", vector(0, 0))
kv.push("w", vector(1, 2))
assert kv.pull("w").tolist() == [1, 2]
print("right", flush=True)
"""
FULL_DISK = "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n"
UNREAD_PIPE = "reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 2)\n"
CLOSED = "os.close(2)\n"


slow = pytest.mark.slow(reason="a full disk runs always")


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(FULL_DISK, id="full disk"),
        pytest.param(UNREAD_PIPE, id="unread pipe", marks=slow),
        pytest.param(CLOSED, id="closed", marks=slow),
    ],
)
def test_a_job_whose_lines_nobody_can_write_does_its_work(make_job: MakeJob, spoil: str) -> None:
    """Level 2 writes a line for each message; a name that nobody knows is a warning before."""
    job = make_job(1, 1, PS_VERBOSE="2", PS_UNKNOWN_NAME="1")
    for role in "scheduler", "server":
        job.start(role, 0, ("-c", "import os\n" + spoil + SERVE))
    worker = job.worker(0, spoil + ROUND)
    assert job.wait_all() == [0, 0, 0], job.output()
    assert worker.lines[-1] == "right"


def test_what_the_launcher_cannot_say_does_not_change_its_exit_code() -> None:
    with open("/dev/full", "wb", buffering=0) as full:
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools" / "launch.py"), "-n", "1", "-s", "1", "--nonsense"],
            stderr=full,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 2


FEW_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))
"""


@pytest.mark.parametrize("role", ["scheduler", "server", "worker"])
def test_a_node_that_may_open_too_few_files_says_which_limit_to_raise(
    make_job: MakeJob, role: str
) -> None:
    job = make_job(1, 1)
    few = FEW_FILES.replace("SOFT", "12").replace("HARD", "12")
    if role == "worker":
        node = job.worker(0, few + ROUND)
    else:
        node = job.start(role, 0, ("-c", few + SERVE))
    assert node.wait() == 1
    assert "RLIMIT_NOFILE is 12; raise the limit with `ulimit -n" in node.lines[-1]


def test_servers_and_the_scheduler_raise_their_own_soft_limit(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    for role in "scheduler", "server":
        few = FEW_FILES.replace("SOFT", "12").replace("HARD", "512")
        job.start(role, 0, ("-c", few + SERVE))
    worker = job.worker(0, ROUND)
    assert job.wait_all() == [0, 0, 0], job.output()
    assert worker.lines[-1] == "right"


@pytest.mark.parametrize("role", ["scheduler", "server", "worker"])
def test_a_size_that_no_message_can_have_is_named_at_once(make_job: MakeJob, role: str) -> None:
    job = make_job(1, 1, PS_MAX_MESSAGE_BYTES=str(2**63))
    node = job.worker(0, ROUND) if role == "worker" else job.start(role, 0, ("-c", SERVE))
    assert node.wait() == (1 if role == "worker" else 2)
    assert f"PS_MAX_MESSAGE_BYTES is {2**63}; it must be at most" in node.lines[-1]


def test_times_without_end_are_waited_for_like_long_ones(make_job: MakeJob) -> None:
    names = ("CLOSE_TIMEOUT", "LOST_AFTER", "STALL_REPORT", "HEARTBEAT_TIMEOUT", "ROSTER_INTERVAL")
    job = make_job(1, 1, **{f"PS_{name}": "inf" for name in names}, PS_RENDEZVOUS_TIMEOUT="1e308")
    job.service()
    worker = job.worker(0, ROUND)
    assert job.wait_all() == [0, 0, 0], job.output()
    assert worker.lines[-1] == "right"
