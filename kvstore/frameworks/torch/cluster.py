"""From PyTorch's rendezvous to a node of a cluster, with servers if needed.

A process group begins with a store that all its ranks can read and write (usually a ``TCPStore``).
:func:`join` makes a worker's node from it, in one of two ways.

- **A job of ours** (DMLC_PS_ROOT_URI is set, as ``kvstore-launch`` does): it is the node of this
  process, which all stores of the process share and which exists until the interpreter ends.
- **Ranks of another launcher** (torchrun, ``mp.spawn``, mpiexec): rank 0 starts a scheduler, and
  the first rank of each machine a server (``kvstore/launch/colocated.py``). On several machines,
  servers run on threads of their ranks (``docs/decisions/0040-servers-beside-ranks.md``). The ranks
  exchange the scheduler's address and the job's key through the store. Destroying the group ends
  this cluster, and so does the end of the script.

The settings are those of ``pslite.config``, read once in each call. Runs on the thread that creates
the group, and waits. Read next: ``process_group.py``.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.util
import os
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.distributed import PrefixStore

from kvstore.launch.colocated import ColocatedServices
from kvstore.launch.environment import listen, network_id
from kvstore.launch.options import LaunchError
from kvstore.stores.dist.node import worker_node
from pslite import Config, Postoffice, Role, start
from pslite.errors import ConfigError, DeadlineError
from pslite.node.address import interface_address, machine_id
from pslite.node.log import try_to_stderr

LOOPBACK = "127.0.0.1"
_KEY_BYTES = 32


@dataclass(frozen=True)
class GroupCluster:
    """The node of this process, and the rank in the cluster of each rank of the group."""

    node: Postoffice
    ranks: tuple[int, ...]
    leave: Callable[[], None]
    """Makes this process leave the cluster. A job's node stays until its process ends."""
    store: Any = None
    """PyTorch's store, with a prefix for the keys of this cluster."""


@dataclass(frozen=True)
class ServicePlan:
    """Rank 0's plan for a cluster of the group's own, which it sends to the others."""

    host: str
    port: int
    job_id: str
    num_servers: int
    security: str
    #: For each rank, the servers that it runs.
    servers: list[list[int]]
    #: Whether servers run on threads of their ranks and not as child processes.
    on_threads: bool
    #: The job's key, or "" if every process has it in a file (PS_JOB_KEY_FILE).
    key: str


def join(store: Any, rank: int, size: int) -> GroupCluster:
    """Join the cluster of a group of ``size`` ranks; return when all have joined.

    Args:
        store: PyTorch's store that all ranks of the group share.
        rank: this process's rank in the group.
        size: the number of ranks.

    Raises:
        ConfigError: settings contradict each other or the group.
        DeadlineError: a rank did not come; the text says which.
    """
    # The store may outlive a group, as torchrun's does, so each rank numbers its joins.
    store = PrefixStore(f"kvstore/{store.add(f'kvstore/joined/{rank}', 1)}", store)
    config, unknown = Config.from_env()
    if config.root_uri:
        return _cluster_of_the_job(config, store, rank, size)
    for sentence in unknown:
        try_to_stderr(f"warning: {sentence}")
    return _own_cluster(config, store, rank, size)


# -- a job of ours ------------------------------------------------------------------------


def _cluster_of_the_job(config: Config, store: Any, rank: int, size: int) -> GroupCluster:
    if size > config.num_workers:
        raise ConfigError(
            f"this process group has {size} ranks and the job {config.num_workers} workers "
            "(DMLC_NUM_WORKER): each rank must be a worker of its own. Start as many workers as "
            "ranks (kvstore-launch -n), or unset the DMLC_* variables and start ranks by torchrun"
        )
    node = worker_node()
    _tell(store, f"worker/{rank}", json.dumps([config.job_id, node.rank]))
    told = [json.loads(text) for text in _hear_all(store, "worker", size)]
    jobs = {job for job, _ in told}
    ranks = tuple(worker for _, worker in told)
    if len(jobs) > 1 or len(set(ranks)) < size:
        raise ConfigError(
            "the ranks of this process group must be different workers of one job, got (PS_JOB_ID, "
            f"rank of the worker) {told}: start them by one kvstore-launch"
        )
    return GroupCluster(node, ranks, lambda: None, store)


# -- a cluster of the group's own -------------------------------------------------------------


def _own_cluster(config: Config, store: Any, rank: int, size: int) -> GroupCluster:
    place = [config.machine or machine_id(), network_id()]
    _tell(store, f"machine/{rank}", json.dumps(place))
    services = None
    with contextlib.ExitStack() as stack:
        listener = None
        if rank == 0:
            plan, listener = _decide(config, store, size)
            stack.enter_context(listener)
            _tell(store, "plan", json.dumps(asdict(plan)))
        else:
            plan = ServicePlan(**json.loads(_hear(store, "plan", 0)))
        servers = _servers_of(plan, config, rank, size)
        children, inside = ([], servers) if plan.on_threads else (servers, [])
        if listener is not None:
            children.insert(0, _scheduler_of(plan, config, size, listener))
        if servers or children:
            fds = [] if listener is None else [listener.fileno()]
            services = ColocatedServices(children, plan.key, fds, inside)
    try:
        node = start(_worker_config(plan, config, rank, size))
        for server in [] if services is None else services.nodes:
            node.sit_beside(server)
    except BaseException:
        if services is not None:
            services.kill()
        raise
    _leave_at_the_end_of_a_child(node, services)
    return GroupCluster(node, tuple(range(size)), node.close, store)


def _decide(config: Config, store: Any, size: int) -> tuple[ServicePlan, socket.socket]:
    """Make the plan on rank 0; return it and the scheduler's socket, for the caller."""
    places = [json.loads(text) for text in _hear_all(store, "machine", size)]
    machines = [machine for machine, _ in places]
    first_ranks = [machines.index(machine) for machine in dict.fromkeys(machines)]
    # Containers of one machine may share processes but not addresses.
    num_networks = len({network for _, network in places})
    is_one = len(first_ranks) == num_networks == 1
    host = LOOPBACK if is_one else _own_host(config, store)
    try:
        listener = listen(host, 0)
    except LaunchError as error:
        raise ConfigError(
            f"rank 0 must run the scheduler, which others reach at {host}: {error}. Set "
            "DMLC_NODE_HOST or DMLC_INTERFACE on rank 0 to an address of its own"
        ) from error
    num_servers = config.torch_servers or len(first_ranks)
    # On one machine, ranks exchange values without servers.
    on_threads = config.torch_servers == 0 and len(first_ranks) > 1
    servers: list[list[int]] = [[] for _ in range(size)]
    for server in range(num_servers):
        servers[first_ranks[server % len(first_ranks)]].append(server)
    key = "" if config.job_key_file else secrets.token_hex(_KEY_BYTES)
    # Torch's store is neither encrypted nor authenticated, so a key from it hides nothing.
    security = config.security or ("" if config.job_key_file else "plain")
    port = listener.getsockname()[1]
    job_id = secrets.token_hex(8)
    plan = ServicePlan(host, port, job_id, num_servers, security, servers, on_threads, key)
    return plan, listener


def _own_host(config: Config, store: Any) -> str:
    """Return rank 0's address for other machines: usually that of PyTorch's store."""
    if config.node_host:
        return config.node_host
    if config.interface:
        return interface_address(config.interface)
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", "") or socket.gethostname()


def _servers_of(plan: ServicePlan, config: Config, rank: int, size: int) -> list[dict[str, Any]]:
    """Return the settings of the servers that this rank starts."""
    common = _common(plan, config, size)
    return [
        asdict(replace(common, role=Role.SERVER.value, task_id=server))
        for server in plan.servers[rank]
    ]


def _scheduler_of(
    plan: ServicePlan, config: Config, size: int, listener: socket.socket
) -> dict[str, Any]:
    common = _common(plan, config, size)
    return asdict(replace(common, role=Role.SCHEDULER.value, listen_fd=listener.fileno()))


def _worker_config(plan: ServicePlan, config: Config, rank: int, size: int) -> Config:
    key_fd = None
    if plan.key:
        key_fd, written = os.pipe()
        os.write(written, plan.key.encode())
        os.close(written)
    return replace(
        _common(plan, config, size), role=Role.WORKER.value, task_id=rank, job_key_fd=key_fd
    )


def _common(plan: ServicePlan, config: Config, size: int) -> Config:
    """Return the settings of all nodes of this cluster.

    A PORT in the environment is for the servers of a job of ours, so it is dropped.
    """
    return replace(
        config,
        num_workers=size,
        num_servers=plan.num_servers,
        root_uri=plan.host,
        root_port=plan.port,
        job_id=plan.job_id,
        security=plan.security,
        bind_all=False,
        port=0,
        task_id=None,
        listen_fd=None,
    )


def _leave_at_the_end_of_a_child(node: Postoffice, services: ColocatedServices | None) -> None:
    """Leave at the end of a ``multiprocessing`` child, which runs no exit handlers.

    If an exception ends the child, it counts as lost, like a script.
    """
    if multiprocessing.parent_process() is None:
        return

    def leave() -> None:
        error = sys.exc_info()[1]
        failed = error is not None and getattr(error, "code", 1) not in (0, None)
        node.close(goodbye=not failed)
        if services is not None and failed:
            services.abandon()
        elif services is not None:
            services.wait()

    multiprocessing.util.Finalize(None, leave, exitpriority=0)


# -- what ranks tell each other through the store -----------------------------------------------


def _tell(store: Any, key: str, text: str) -> None:
    store.set(key, text)


def _hear(store: Any, key: str, rank: int) -> str:
    """Return the text of ``rank`` under ``key``; wait for the store's timeout at most."""
    try:
        return bytes(store.get(key)).decode()
    except RuntimeError as error:  # an error of the store, also a timeout
        raise DeadlineError(
            f"rank {rank} of the process group did not come: nothing under {key} in torch's store "
            f"within its timeout ({error}); look at what rank {rank} has written"
        ) from error


def _hear_all(store: Any, name: str, size: int) -> Sequence[str]:
    return [_hear(store, f"{name}/{rank}", rank) for rank in range(size)]
