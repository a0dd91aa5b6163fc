"""Several TCP connections between a worker and a server (PS_CONNECTIONS), in real processes."""

from __future__ import annotations

import pytest
from job import MakeJob, assert_no_traceback, needs_proc

pytestmark = [pytest.mark.process, needs_proc]

LIMIT_S = 40.0
"""Each job moves 400 MB, under CURVE in two seconds of a whole core."""

TRAIN = """
import socket

def connections():
    # Those of this process to servers: (its descriptor, the server's port).
    server = next(node for node in kv.node.membership.neighbours() if node.role == "server")
    port, found = int(server.address.rpartition(":")[2]), []
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as end:
                if end.family == socket.AF_INET and end.getpeername()[1] == port:
                    found.append(int(name))
        except OSError:  # one that has gone meanwhile, or that listens
            pass
    return found

kv = mx.kvstore.create("dist_sync")
kv.init("w", np.zeros(3_000_000, np.float32))
gradient = np.empty(3_000_000, np.float32)
most = 0
for step in range(1, 13):
    gradient.fill(step + kv.rank)
    kv.pushpull("w", gradient)
    assert (gradient == 2 * step + 1).all(), step
    most = max(most, len(connections()))
    if step % 4 == 0 and kv.rank == 1 and os.environ.get("CUT"):
        victim = connections()[-1]
        with socket.socket(fileno=os.dup(victim)) as end:
            end.shutdown(socket.SHUT_RDWR)
print("at most", most, "connections", flush=True)
kv.close()
"""


@pytest.mark.parametrize(
    "security",
    [
        pytest.param("plain", marks=pytest.mark.slow(reason="the other mechanism runs always")),
        "curve",
    ],
)
@pytest.mark.slow(reason="a job that loses one of several connections runs always")
def test_large_values_go_by_as_many_connections_as_are_set(
    make_job: MakeJob, security: str
) -> None:
    job = make_job(2, 1)
    job.settings = {"PS_SHM": "0", "PS_CONNECTIONS": "4", "PS_SECURITY": security}
    launcher = job.launch(TRAIN)
    assert launcher.wait(LIMIT_S) == 0, launcher.text
    assert launcher.text.count("at most 4 connections") == 2
    assert_no_traceback(launcher)


def test_a_lost_connection_of_several_costs_no_value(make_job: MakeJob) -> None:
    job = make_job(2, 1)
    job.settings = {"PS_SHM": "0", "PS_CONNECTIONS": "4", "CUT": "1"}
    job.service()
    workers = job.workers(TRAIN)
    assert set(job.wait_all(LIMIT_S)) == {0}, job.output()
    assert all("at most 4 connections" in worker.text for worker in workers)
    assert_no_traceback(*workers)


def test_on_one_machine_with_shared_memory_one_connection_is_enough(make_job: MakeJob) -> None:
    job = make_job(2, 1)
    job.settings = {"PS_CONNECTIONS": "4"}
    job.service()
    workers = job.workers(TRAIN)
    assert set(job.wait_all(LIMIT_S)) == {0}, job.output()
    assert all("at most 1 connections" in worker.text for worker in workers)
