"""A Ray cluster of two nodes: its head on this machine, and one host (hosts.py) that has joined.

It takes the Ray of the Python that runs the tests.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from services.daemon import Daemon, ServiceError, answers, command, free_ports, kill_all, needed
from services.hosts import Network, network_of_hosts
from services.sweeper import processes_naming

CPUS = 8  # of each node
GPUS = 2  # of each node, by what Ray believes
OBJECT_STORE_BYTES = 100_000_000
READY_S = 90.0
RUN_S = 90.0


@dataclass(frozen=True)
class Ray:
    """A cluster that takes jobs. ``environment`` lets ``ray.init()`` find it."""

    address: str  # HOST:PORT
    environment: dict[str, str]
    network: Network

    def run_python(self, program: str) -> str:
        """What a Python program printed that was run as a driver, and that must succeed."""
        environment = {**os.environ, **self.environment}
        return command(sys.executable, "-c", program, env=environment, timeout_s=RUN_S)


@contextmanager
def ray_cluster(directory: Path) -> Iterator[Ray]:
    """The cluster while the block runs; ``directory`` gets its session and logs."""
    needed("/usr/sbin/ip")
    if find_spec("ray") is None:
        raise ServiceError(f"{sys.executable} has no Ray: run tests/launchers/install")
    with ExitStack() as stack:
        network = stack.enter_context(network_of_hosts(directory, ("kv-ray2",)))
        (port,) = free_ports(1)
        address = f"{network.address}:{port}"
        environment = {
            "RAY_ADDRESS": address,
            "RAY_TMPDIR": str(directory),
            "RAY_USAGE_STATS_ENABLED": "0",
            # Or it would depend on a token in ~/.ray, and only some of Ray's commands look for one.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        cluster = Ray(address, environment, network)
        # Workers leave their node's session, and a node that is killed leaves them to notice.
        stack.callback(kill_all, lambda: processes_naming(directory))
        head = [f"--port={port}", f"--node-ip-address={network.address}", "--head"]
        head += ["--include-dashboard=false", f"--temp-dir={directory}"]
        started = stack.enter_context(_node(cluster, directory, "head", head, []))
        started.wait_until("answer", lambda: answers(port, network.address), READY_S)
        (host,) = network.hosts
        joined = [f"--address={address}", f"--node-ip-address={host.addresses[0]}"]
        stack.enter_context(_node(cluster, directory, host.name, joined, host.enter))
        started.wait_until("second node", lambda: _nodes(cluster) == 2, READY_S)
        yield cluster


@contextmanager
def _node(
    cluster: Ray, directory: Path, name: str, options: list[str], enter: list[str]
) -> Iterator[Daemon]:
    words = [*enter, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
    words += [f"--num-cpus={CPUS}", f"--num-gpus={GPUS}"]
    words += [f"--object-store-memory={OBJECT_STORE_BYTES}"]
    words += ["--dashboard-agent-listen-port=0", "--disable-usage-stats"]
    environment = {**os.environ, **cluster.environment}
    del environment["RAY_ADDRESS"]
    node = Daemon(f"ray start ({name})", words, directory / f"{name}.log", environment)
    try:
        yield node
    finally:
        node.stop()


def _nodes(cluster: Ray) -> int:
    """How many nodes the head counts as alive."""
    words = [sys.executable, "-m", "ray.scripts.scripts", "status", f"--address={cluster.address}"]
    environment = {**os.environ, **cluster.environment}
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=30, check=False
    )
    return done.stdout.count(" node_")
