"""What only a network of its own can show: a kernel's settings, and ports that are used up.

Each test runs a script in a network namespace, which needs root (as containers of continuous
integration have it); elsewhere they are skipped.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys

import pytest
from job import ROOT, clean_environment

LIMIT_S = 45.0


def reason_to_skip() -> str:
    if os.geteuid() != 0:
        return "needs root, for a network namespace"
    for program in ("unshare", "ip"):
        if shutil.which(program) is None:
            return f"needs the program {program}"
    made = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return "" if made.returncode == 0 else "this system makes no network namespaces for root"


REASON = reason_to_skip()
pytestmark = [pytest.mark.process, pytest.mark.skipif(bool(REASON), reason=REASON)]


def run_alone(script: str, *arguments: str, limit_s: float = LIMIT_S) -> str:
    """Run Python code in a network of its own, which has a loopback only; returns its output."""
    command = 'ip link set lo up && exec "$@"'
    words = ["unshare", "--net", "sh", "-c", command, "sh", sys.executable, "-c", script]
    process = subprocess.Popen(
        [*words, *arguments],
        cwd=ROOT,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        # The launcher is in this group, and ends its job when it is asked to.
        os.killpg(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=10)
        raise AssertionError(f"not done after {limit_s:g} s: {output}") from None
    assert process.returncode == 0, output
    return output


# A listener whose queue is full answers no SYN, as a network that loses packets.
RECONNECT = """
import socket, time
from pathlib import Path
from pslite.van.base import Connected
from pslite.van.zmq.van import ZmqVan

setting = Path("/proc/sys/net/ipv4/tcp_syn_linear_timeouts")
if setting.exists():
    setting.write_text("0")
full = socket.create_server(("127.0.0.1", 0), backlog=0)
port = full.getsockname()[1]
filling = []
for _ in range(4):
    filling.append(socket.socket())
    filling[-1].setblocking(False)
    filling[-1].connect_ex(("127.0.0.1", port))
client, server = ZmqVan("client"), ZmqVan("server")
began_at = time.monotonic()
client.connect("server", f"tcp://127.0.0.1:{port}")
while time.monotonic() < began_at + 3.1:
    assert client.poll(0.05) == []
for each in filling:
    each.close()
full.listen(128)  # from here on SYNs are answered
server.bind("127.0.0.1", port, listen_fd=full.detach())
events = []
while Connected("server") not in events:
    assert time.monotonic() < began_at + 20
    events += client.poll(0.01)
    server.poll(0)
print(time.monotonic() - began_at)
client.close(), server.close()
"""


def test_packets_lost_for_seconds_do_not_outlast_the_patience_of_a_node() -> None:
    """On a kernel that repeats a SYN after 1, 3 and 7 s; PS_LOST_AFTER is 5 s."""
    assert float(run_alone(RECONNECT)) < 5.0  # with one attempt of 5 s: not before


# Two local ports for all connections to this listener, and both are taken.
USED_UP = """
import socket
from pathlib import Path
import pslite
from pslite.config import Config
from pslite.errors import DeadlineError

Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("40000 40001")
taken = socket.create_server(("127.0.0.1", 30000))
held = [socket.create_connection(("127.0.0.1", 30000)) for _ in range(2)]
settings = dict(num_workers=1, num_servers=1, root_uri="127.0.0.1", root_port=30000)
try:
    pslite.start(Config(role="worker", rendezvous_timeout_s=2.0, **settings))
except DeadlineError as error:
    print(error)
"""


def test_a_machine_without_a_free_port_is_told_as_the_cause() -> None:
    told = run_alone(USED_UP)
    assert "cannot reach the scheduler within 2 s (PS_RENDEZVOUS_TIMEOUT)" in told
    assert "no local port left to connect to 127.0.0.1:30000 (EADDRNOTAVAIL)" in told
    assert "net.ipv4.ip_local_port_range" in told


# One worker and one server, between which 30 Mbit/s pass: 24 MB of rows take more than six seconds,
# and a connection on which nothing arrives is given up after five.
SLOW_JOB = """
import os, subprocess, sys
subprocess.run(["ip", "link", "set", "lo", "mtu", "1500"], check=True)
shape = ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", "30mbit"]
subprocess.run([*shape, "burst", "20kb", "latency", "300ms"], check=True)
worker = '''
import time
import numpy as np
import kvstore as mx
kv = mx.kvstore.create("dist_sync")
shape = (100_000, 60)
kv.init("rows", mx.RowSparseArray.zeros(shape))
kv.push("rows", mx.RowSparseArray(np.arange(shape[0]), np.ones(shape, np.float32), shape))
print("sum", kv.row_sparse_pull("rows", row_ids=[99_999]).values.sum(), flush=True)
time.sleep(1)  # what is said at the end comes behind it
kv.close()
'''
launcher = [sys.executable, "tools/launch.py", "--launcher", "local", "-n", "1", "-s", "1"]
settings = {**os.environ, "PS_SHM": "0", "PS_VERBOSE": "1"}
subprocess.run([*launcher, sys.executable, "-c", worker], check=True, env=settings)
"""


@pytest.mark.skipif(shutil.which("tc") is None, reason="needs the program tc")
def test_values_that_take_longer_than_a_heartbeat_go_through_a_slow_link_at_once() -> None:
    told = run_alone(SLOW_JOB)
    assert "sum 60.0" in told
    # The launcher may pass on a line of another process, which ends after the worker, earlier.
    before = told.partition("sum 60.0")[0].splitlines()
    assert not [line for line in before if line.startswith("[worker 0]") and "is gone" in line]


# Two networks with a cable between them, which stand for two machines: two workers in each, the
# scheduler and the only server in the first. The first argument is what the workers run.
TWO_MACHINES = """
import os, subprocess, sys, tempfile
from kvstore.launch.environment import listen

worker = sys.argv[1]
other = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep 200"], stdout=-1)
other.stdout.readline()
there = ["nsenter", "-t", str(other.pid), "-n"]
ip = lambda words, before=(): subprocess.run([*before, "ip", *words.split()], check=True)
ip(f"link add cable type veth peer name cable netns {other.pid}")
for address, before in (("10.9.8.1", ()), ("10.9.8.2", there)):
    ip("link set lo up", before)
    ip(f"addr add {address}/24 dev cable", before)
    ip("link set cable up", before)
listener = listen("10.9.8.1", 0)
key = tempfile.NamedTemporaryFile("w")
key.write("0123456789abcdef" * 4)
key.flush()
settings = {
    **os.environ,
    "DMLC_PS_ROOT_URI": "10.9.8.1",
    "DMLC_PS_ROOT_PORT": str(listener.getsockname()[1]),
    "DMLC_NUM_WORKER": "4",
    "DMLC_NUM_SERVER": "1",
    "PS_JOB_KEY_FILE": key.name,
    "PS_SECURITY": "plain",
    "OMP_NUM_THREADS": "1",
    "MASTER_ADDR": "10.9.8.1",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "4",
    **dict(pair.split("=") for pair in sys.argv[2:]),
}

def start(role, rank, machine, *command, **options):
    own = {**settings, "DMLC_ROLE": role, "DMLC_TASK_ID": str(rank), "PS_MACHINE": "ab"[machine]}
    own["DMLC_NODE_HOST"] = ("10.9.8.1", "10.9.8.2")[machine]
    if role == "scheduler":
        own["PS_LISTEN_FD"] = str(listener.fileno())
    if role == "worker":
        own["RANK"] = str(rank)
    return subprocess.Popen([*(there if machine else ()), *command], env=own, **options)

service = [sys.executable, "-m", "kvstore.server"]
started = [
    start("scheduler", 0, 0, *service, pass_fds=[listener.fileno()]),
    *(start("server", r, r % 2, *service) for r in range(int(settings["DMLC_NUM_SERVER"]))),
]
started += [start("worker", rank, rank // 2, sys.executable, "-c", worker) for rank in range(4)]
codes = [process.wait() for process in started]
other.kill()
other.wait()
assert not any(codes), codes
"""

# What passes through the cable is counted.
COUNT = """
def passed():
    with open("/proc/net/dev") as table:
        numbers = next(line for line in table if "cable" in line).split(":")[1].split()
    return int(numbers[0]), int(numbers[8])
def report(before, gradients, nbytes):
    moved = [(b - a) / (gradients * nbytes) for a, b in zip(before, passed())]
    print("gradients through the cable:", *(f"{each:.3f}" for each in moved), flush=True)
"""

COMMUNICATOR = (
    COUNT
    + """
import numpy as np, kvstore as mx
from pslite import Communicator
kv = mx.kvstore.create("dist_sync")
group = Communicator(kv.node)
gradient = np.full(2_000_000, 1.0 + kv.rank, np.float32)
for _ in range(2):
    group.all_reduce(gradient).result(30)
    group.barrier().result(30)
before = passed()
kv.barrier()
for _ in range(5):
    total = group.all_reduce(gradient).result(30)
kv.barrier()
if kv.rank == 0:
    report(before, 5, gradient.nbytes)
assert set(total.tolist()) == {10.0}
kv.close()
"""
)


def through_the_cable(worker: str, *settings: str, limit_s: float = LIMIT_S) -> list[float]:
    told = run_alone(TWO_MACHINES, worker, *settings, limit_s=limit_s)
    line = told.partition("gradients through the cable: ")[2].splitlines()[0]
    return [float(number) for number in line.split()]


needs_nsenter = pytest.mark.skipif(
    shutil.which("nsenter") is None, reason="needs the program nsenter"
)


@needs_nsenter
@pytest.mark.slow(reason="test_collective_machines.py counts the bytes of each machine always")
def test_four_ranks_on_two_machines_send_one_gradient_a_machine() -> None:
    for moved in through_the_cable(COMMUNICATOR):
        assert 1.0 < moved < 1.03
    for moved in through_the_cable(COMMUNICATOR, "PS_SUM_ON_MACHINES=0"):
        assert 2.0 < moved < 2.06


STORE = (
    COUNT
    + """
import numpy as np, kvstore as mx
kv = mx.kvstore.create("dist_sync")
kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=-1.0))
gradient = np.full(2_000_000, 1.0 + kv.rank, np.float32)
weight = np.zeros_like(gradient)
kv.init("w", weight)
for step in range(7):
    if step == 2:
        kv.barrier()
        before = passed()
        kv.barrier()
    kv.pushpull("w", gradient, out=weight)
    assert set(weight.tolist()) == {10.0 * (step + 1)}
kv.barrier()
if kv.rank == 0:
    report(before, 5, gradient.nbytes)
kv.close()
"""
)


@needs_nsenter
@pytest.mark.slow(reason="test_store_relays.py looks at who sends what always")
def test_a_store_sends_one_gradient_a_machine() -> None:
    for moved in through_the_cable(STORE, "DMLC_NUM_SERVER=2"):
        assert 1.0 < moved < 1.03
    for moved in through_the_cable(STORE, "DMLC_NUM_SERVER=2", "KVSTORE_HIERARCHICAL=off"):
        assert 2.0 < moved < 2.06


HOROVOD = (
    COUNT
    + """
import random, numpy as np, kvstore.horovod as hvd
hvd.init()
gradient = np.full(2_000_000, 1.0 + hvd.rank(), np.float32)
def added_up():
    parts = list(enumerate(np.split(gradient, 4)))
    random.Random(hvd.rank()).shuffle(parts)  # ready in an order of its own
    handles = {part: hvd.allreduce_async(each, name=f"{part}", op=hvd.Sum) for part, each in parts}
    return np.concatenate([handles[part]() for part in range(4)])
for _ in range(2):
    added_up()
    hvd.barrier()
before = passed()
hvd.barrier()
for _ in range(5):
    total = added_up()
hvd.barrier()
if hvd.rank() == 0:
    report(before, 5, gradient.nbytes)
assert set(total.tolist()) == {10.0}
hvd.shutdown()
"""
)


@needs_nsenter
@pytest.mark.slow(reason="test_collective_machines.py counts the bytes of each machine always")
def test_calls_of_horovod_in_any_order_send_one_gradient_a_machine() -> None:
    for moved in through_the_cable(HOROVOD):
        assert 1.0 < moved < 1.05


DDP = (
    COUNT
    + """
import torch, torch.distributed as dist
import kvstore.torch
torch.set_num_threads(1)
dist.init_process_group("kvstore")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1000, 2000))
x = torch.full((1, 1000), 1.0 + dist.get_rank())
def backward(times):
    for _ in range(times):
        net.zero_grad()
        net(x).sum().backward()
    dist.barrier()
backward(2)
before = passed()
dist.barrier()
backward(5)
if dist.get_rank() == 0:
    report(before, 5, sum(each.grad.nbytes for each in net.parameters()))
assert set(net.module.weight.grad.flatten().tolist()) == {2.5}
dist.destroy_process_group()
"""
)


@needs_nsenter
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
@pytest.mark.slow(reason="four ranks import PyTorch; the ranks of a Communicator take the same way")
@pytest.mark.timeout(190)
def test_ddp_with_four_ranks_on_two_machines_sends_one_gradient_a_machine() -> None:
    for moved in through_the_cable(DDP, limit_s=180):
        assert 1.0 < moved < 1.1
