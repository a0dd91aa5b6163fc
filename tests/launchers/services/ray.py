"""A Ray cluster of two nodes: its head on this machine, and one host (hosts.py) that has joined.

It takes the Ray of the Python that runs the tests.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
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
        cluster = Ray(address, _environment(directory, address), network)
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
def growing_ray_cluster(directory: Path) -> Iterator[Ray]:
    """A head with one processor, and Ray's autoscaler, which adds up to two nodes of 4 to it.

    It starts them here: Ray brings a provider of nodes for tests, which reads this configuration.
    """
    with ExitStack() as stack:
        network = stack.enter_context(network_of_hosts(directory, ()))
        (port,) = free_ports(1)
        address = f"{network.address}:{port}"
        cluster = Ray(address, _environment(directory, address), network)
        stack.callback(kill_all, lambda: processes_naming(directory))
        configuration = directory / "autoscaler.json"
        configuration.write_text(json.dumps(_autoscaling(address)))
        head = [f"--port={port}", f"--node-ip-address={network.address}", "--head"]
        head += ["--include-dashboard=false", f"--autoscaling-config={configuration}"]
        environment = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
        started = stack.enter_context(
            _node(cluster, directory, "head", head, [], cpus=1, gpus=0, more=environment)
        )
        started.wait_until("answer", lambda: answers(port, network.address), READY_S)
        yield cluster


def _autoscaling(address: str) -> dict[str, object]:
    """What `ray start --autoscaling-config` needs at the least (ray/autoscaler/ray-schema.json)."""
    lists = ["initialization_commands", "setup_commands", "rsync_exclude", "rsync_filter"]
    lists += ["head_setup_commands", "head_start_ray_commands", "cluster_synced_files"]
    lists += ["worker_setup_commands", "worker_start_ray_commands"]
    node: dict[str, object] = {"node_config": {}, "min_workers": 0}
    resources = {"CPU": 4, "object_store_memory": OBJECT_STORE_BYTES}
    return {
        "cluster_name": "growing",
        "max_workers": 2,
        "upscaling_speed": 10,
        "idle_timeout_minutes": 5,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "disable_node_updaters": True,
        },
        "auth": {"ssh_user": "nobody"},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in lists},
        "available_node_types": {
            "ray.head.default": {**node, "resources": {"CPU": 1}, "max_workers": 0},
            "ray.worker.cpu": {**node, "resources": resources, "max_workers": 2},
        },
        "head_node_type": "ray.head.default",
    }


def _environment(directory: Path, address: str) -> dict[str, str]:
    return {
        "RAY_ADDRESS": address,
        "RAY_TMPDIR": str(directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Or it would depend on a token in ~/.ray, and only some of Ray's commands look for one.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }


@contextmanager
def _node(
    cluster: Ray,
    directory: Path,
    name: str,
    options: list[str],
    enter: list[str],
    *,
    cpus: int = CPUS,
    gpus: int = GPUS,
    more: Mapping[str, str] | None = None,
) -> Iterator[Daemon]:
    words = [*enter, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
    words += [f"--num-cpus={cpus}", f"--num-gpus={gpus}"]
    words += [f"--object-store-memory={OBJECT_STORE_BYTES}"]
    words += ["--dashboard-agent-listen-port=0", "--disable-usage-stats"]
    environment = {**os.environ, **cluster.environment, **(more or {})}
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
