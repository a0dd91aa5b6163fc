"""Making nodes: from settings to a running ``Postoffice``.

``start`` is what programs call; ``make_node`` is the part that it shares with the simulator.
Importing this module starts nothing.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable

from pslite.address import advertised_host, machine_id, tcp_address
from pslite.config import Config
from pslite.control import SCHEDULER, MemberControl
from pslite.errors import ConfigError
from pslite.ids import NodeInfo, Role
from pslite.log import Log, Write, to_stderr
from pslite.pool import Pool, ThreadPool
from pslite.postoffice import Postoffice
from pslite.scheduler import SchedulerControl
from pslite.security import mechanism_of
from pslite.van.addresses import resolve, without_key
from pslite.van.base import Van
from pslite.version import __version__


def start(
    config: Config | None = None,
    *,
    make_van: Callable[[str], Van] | None = None,
    prepare: Callable[[Postoffice], None] | None = None,
    write: Write = to_stderr,
    wait: bool = True,
) -> Postoffice:
    """Start a node and, with ``wait``, return once its cluster is complete.

    Args:
        config: the settings; by default those of the environment.
        make_van: makes the transport from the node's name; by default ZeroMQ.
        prepare: called with the node before it joins, to add apps that must be there first.
        write: where lines for people go.
        wait: False returns at once; ``node.ready`` completes later.

    Raises:
        ConfigError: a setting is missing or wrong, the port is busy, or the job's key is another.
        DeadlineError: the cluster was not complete in time; the text says who is missing.
    """
    unknown: list[str] = []
    if config is None:
        config, unknown = Config.from_env()
    config.checked_for_cluster()
    incarnation = secrets.randbits(62) | 1
    uid = node_uid(Role(config.role), incarnation)
    log = Log(uid, config.verbose, write)
    for sentence in unknown:
        log.warn(sentence)
    van = make_van(uid) if make_van is not None else _zmq_van(uid, config)
    pool = None
    try:
        pool = ThreadPool(config.pool_threads, uid) if config.role == Role.SERVER.value else None
        node = make_node(config, van, incarnation=incarnation, log=log, pool=pool)
    except BaseException:
        van.close()
        if pool is not None:
            pool.close()
        raise
    if prepare is not None:
        prepare(node)
    node.start_thread()
    if wait:
        try:
            node.ready.result()
        except BaseException:
            node.close(goodbye=False)
            raise
    return node


def make_node(
    config: Config,
    van: Van,
    *,
    incarnation: int,
    log: Log,
    pool: Pool | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Postoffice:
    """A node on a van that nobody drives yet: call its ``begin`` and then ``step``."""
    role = Role(config.role)
    host = config.root_uri if role is Role.SCHEDULER else advertised_host(config)
    port = 0
    if role is not Role.WORKER:
        port = _bind(config, role, van, host)
    log.info(1, f"Bind to role={role.value}, ip={host}, port={port}, is_recovery=0")
    rank = 0 if role is Role.SCHEDULER else -1 if config.task_id is None else config.task_id
    address = tcp_address(host, port) if port else ""
    info = NodeInfo(
        role.value,
        rank,
        van.uid,
        incarnation,
        address,
        socket.gethostname(),
        config.machine or machine_id(),
        os.getpid(),
    )
    node = Postoffice(config, van, incarnation=incarnation, log=log, clock=clock, pool=pool)
    if role is Role.SCHEDULER:
        log.name = f"{role.letter}[1]"
        node.control = SchedulerControl(node, info, __version__)
    else:
        node.control = MemberControl(node, info, __version__)
    return node


def _bind(config: Config, role: Role, van: Van, host: str) -> int:
    if role is Role.SERVER:
        return van.bind(host, config.port)
    bind_host = "0.0.0.0" if config.bind_all else host
    try:
        return van.bind(bind_host, config.root_port, listen_fd=config.listen_fd)
    except ConfigError as error:
        raise ConfigError(
            f"the scheduler cannot listen at DMLC_PS_ROOT_URI={host}, "
            f"DMLC_PS_ROOT_PORT={config.root_port}: {error}"
        ) from None


def node_uid(role: Role, incarnation: int) -> str:
    """The name of a node's van: the scheduler's is known to all before they meet it."""
    return SCHEDULER if role is Role.SCHEDULER else f"{role.letter}{incarnation:016x}"


def _zmq_van(uid: str, config: Config) -> Van:
    from pslite.van.faulty import FaultPlan, FaultyVan
    from pslite.van.zmq_van import ZmqVan

    mechanism = mechanism_of(config)
    if mechanism is None:
        _check_scheduler_is_here(config)
    van: Van = ZmqVan(uid, mechanism=mechanism, max_message_bytes=config.max_message_bytes)
    if config.drop_percent > 0:
        seed = secrets.randbits(32)
        plan = FaultPlan()
        van = FaultyVan(van, plan, seed, time.monotonic, drop_received=config.drop_percent / 100.0)
    return van


def _check_scheduler_is_here(config: Config) -> None:
    """Without a key a job stays on one machine; said before anything else goes wrong."""
    try:
        endpoint = resolve(config.root_uri, config.root_port, 0)
    except OSError:
        return  # the name may get its address later; the van looks again then
    if not endpoint.is_local:
        where = f"{config.root_uri}:{config.root_port}"
        raise ConfigError(f"the scheduler is at {where}: {without_key(config.root_uri)}")
