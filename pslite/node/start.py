"""The start of a node: from settings to a running ``Postoffice``.

Programs call ``start``; the simulator shares only ``make_node``. Importing this module does not
start anything.

A script may end right after a push. So when the interpreter ends, an exit handler on the main
thread waits until the worker's pushes are applied and says goodbye. If a push was not applied, the
process logs it and exits with code 120 (``docs/decisions/0025-the-last-push.md``). Read next:
``shutdown.py``.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from pslite.config import Config
from pslite.errors import ConfigError, DeadlineError, as_failure, describe
from pslite.ids import NodeInfo, Role
from pslite.node.address import advertised_host, machine_id
from pslite.node.control import SCHEDULER
from pslite.node.log import Log, Write
from pslite.node.member import MemberControl
from pslite.node.pool import Pool, ThreadPool
from pslite.node.postoffice import Postoffice
from pslite.resource_limits import check_files, check_threads, shortage_told
from pslite.security import mechanism_of
from pslite.van.base import Van
from pslite.van.zmq.addresses import (
    LOOK_AGAIN_S,
    HostAddresses,
    HostResolver,
    format_address,
    resolve,
    without_key,
)
from pslite.version import __version__

#: Two threads of libzmq, and the I/O thread.
_OWN_THREADS = 3


def start(
    config: Config | None = None,
    *,
    make_van: Callable[[str], Van] | None = None,
    prepare: Callable[[Postoffice], None] | None = None,
    write: Write | None = None,
    wait: bool = True,
) -> Postoffice:
    """Start a node and, with ``wait``, return once its cluster is complete.

    If a worker's node is still open when the interpreter ends, it is closed then.

    Args:
        config: the settings; by default from the environment.
        make_van: makes the transport from the node's name; by default ZeroMQ.
        prepare: called with the node before it joins, to add apps that must exist first.
        write: writes a log line; by default as described in ``log.py``.
        wait: False returns without waiting for the cluster; ``node.ready`` completes later.

    Raises:
        ConfigError: a setting is missing or wrong, the port is in use, or the job's key differs.
        DeadlineError: the cluster was not complete in time (the text names the missing nodes), or
            the scheduler's name could not be resolved in time. Servers and workers wait for that
            here, even with ``wait=False``.
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
    if make_van is None:
        _check_room(config, log)
        config, make_van = _over_tcp(config, log)
    with shortage_told():
        node = _begun(config, make_van(uid), incarnation, log, prepare)
    if node.role is Role.WORKER:
        leave_at_exit(node)
    if wait:
        try:
            node.ready.result()
        except BaseException:
            node.close(goodbye=False)
            raise
    return node


def _check_room(config: Config, log: Log) -> None:
    """Check that this process can open the files and start the threads of a node."""
    role = Role(config.role)
    warning = check_files(role, config.num_workers, config.num_servers)
    if warning is not None:
        log.warn(warning)
    check_threads(_OWN_THREADS + (config.pool_threads if role is Role.SERVER else 0))


def _begun(
    config: Config,
    van: Van,
    incarnation: int,
    log: Log,
    prepare: Callable[[Postoffice], None] | None,
) -> Postoffice:
    """Make a node and start it; close the van if that fails."""
    pool = None
    try:
        if config.role == Role.SERVER.value:
            pool = ThreadPool(config.pool_threads, van.uid)
        node = make_node(config, van, incarnation=incarnation, log=log, pool=pool)
        if pool is not None:
            pool.on_failure = partial(_pool_failed, node)
        if prepare is not None:
            prepare(node)
        node.start_thread()
    except BaseException:
        van.close()
        if pool is not None:
            pool.close()
        raise
    return node


def _pool_failed(node: Postoffice, error: BaseException) -> None:
    """End the node: work of the pool raised, so a request will not be answered."""
    node.log.error(f"a task of the thread pool failed: {describe(error)[1]}")
    node.io_queue.call(lambda: node.fail(as_failure(error)))


def make_node(
    config: Config,
    van: Van,
    *,
    incarnation: int,
    log: Log,
    pool: Pool | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Postoffice:
    """Make a node that does not run yet: call its ``begin`` and then ``step``."""
    role = Role(config.role)
    host = config.root_uri if role is Role.SCHEDULER else advertised_host(config)
    port = 0
    if role is not Role.WORKER:
        port = _bind(config, role, van, host)
    log.info(1, f"Bind to role={role.value}, ip={host}, port={port}, is_recovery=0")
    rank = 0 if role is Role.SCHEDULER else -1 if config.task_id is None else config.task_id
    address = format_address(host, port) if port else ""
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
        from pslite.node.scheduler import SchedulerControl  # others start faster without it

        log.name = f"{role.letter}[1]"
        node.control = SchedulerControl(node, info, __version__, node.on_deadlock)
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
    """Return the name of a node's van; the scheduler's name is always the same."""
    return SCHEDULER if role is Role.SCHEDULER else f"{role.letter}{incarnation:016x}"


def _over_tcp(config: Config, log: Log) -> tuple[Config, Callable[[str], Van]]:
    """Return settings with this node's address, and a function that makes its van.

    It resolves the scheduler's name once, because the I/O thread must not wait for a name server.
    """
    from pslite.van.faulty import FaultPlan, FaultyVan
    from pslite.van.zmq.van import ZmqVan

    mechanism = mechanism_of(config)
    hosts: dict[str, HostAddresses] = {}
    if config.role != Role.SCHEDULER.value:
        scheduler = wait_for_address(config, log)
        hosts[config.root_uri] = scheduler
        host = advertised_host(config, scheduler.addresses[0])
        if mechanism is None and not scheduler.endpoint(config.root_port).is_local:
            raise _beyond_this_machine(config)
        config = replace(config, node_host=host)
    elif mechanism is None:
        _check_is_here(config)

    def make(uid: str) -> Van:
        van: Van = ZmqVan(
            uid,
            mechanism=mechanism,
            hosts=hosts,
            max_message_bytes=config.max_message_bytes,
            stranger_bytes=config.stranger_bytes,
            warn=log.warn,
        )
        if config.drop_percent > 0:
            seed, drop = secrets.randbits(32), config.drop_percent / 100.0
            van = FaultyVan(van, FaultPlan(), seed, time.monotonic, drop_received=drop)
        return van

    return config, make


def wait_for_address(config: Config, log: Log) -> HostAddresses:
    """Wait until the scheduler's name can be resolved; return its addresses.

    Raises:
        DeadlineError: it cannot be resolved within PS_RENDEZVOUS_TIMEOUT.
    """
    name, limit_s = config.root_uri, config.rendezvous_timeout_s
    news = threading.Event()
    place = HostResolver(name, news.set)
    began_at = now = time.monotonic()
    say_at = now + config.roster_interval_s
    while place.known is None:
        place.look(now)
        news.wait(min(LOOK_AGAIN_S, max(0.0, began_at + limit_s - now)))
        if not place.is_looking:
            news.clear()
        now = time.monotonic()
        problem = "no name server answers" if place.problem is None else str(place.problem)
        if place.known is None and now - began_at >= limit_s:
            raise DeadlineError(
                f"cannot resolve the scheduler's name within {limit_s:g} s "
                f"(PS_RENDEZVOUS_TIMEOUT): DMLC_PS_ROOT_URI={name}: {problem}; correct the name, "
                "or use an address"
            )
        if place.known is None and now >= say_at:
            say_at = now + config.roster_interval_s
            log.info(0, f"resolving {name!r} for {now - began_at:.0f} s: {problem}")
    return place.known


def _check_is_here(config: Config) -> None:
    """Check that a job without a key stays on one machine."""
    try:
        endpoint = resolve(config.root_uri, config.root_port)
    except OSError:
        return  # the van raises an error when it tries to listen there
    if not endpoint.is_local:
        raise _beyond_this_machine(config)


def _beyond_this_machine(config: Config) -> ConfigError:
    where = f"{config.root_uri}:{config.root_port}"
    return ConfigError(f"the scheduler is at {where}: {without_key(config.root_uri)}")


def leave_at_exit(node: Postoffice) -> None:
    """Register an exit handler that closes this node, unless it is closed by then."""
    atexit.register(_leave, weakref.ref(node))


def _leave(known: weakref.ref[Postoffice]) -> None:
    """Close the node; say goodbye unless an exception has ended the script.

    Without a goodbye, the others see a lost worker, which ends the job. The interpreter stores an
    uncaught exception in ``sys.last_value``. In an interactive session, it does not mean that the
    session has failed.
    """
    node = known()
    if node is None:
        return
    is_interactive = hasattr(sys, "ps1")
    failed = getattr(sys, "last_value", None) is not None and not is_interactive
    try:
        node.close(goodbye=not failed)
    except Exception as error:
        node.log.error(f"a push could not be applied: {type(error).__name__}: {error}")
        _end_with_failure()


def _end_with_failure() -> None:
    """Make the interpreter end with code 120, from an exit handler.

    An exception in a handler does not change the code, and ``os._exit`` would skip other handlers
    and lose unwritten file data. But the interpreter exits with code 120 if it cannot flush its
    standard streams after all handlers (Python's documentation of ``sys.exit``). If the stream is
    standard error, it prints no message about that.
    """
    sys.stderr = _Unflushable(sys.stderr)


class _Unflushable:
    """A wrapper of ``stream`` that the interpreter cannot flush."""

    def __init__(self, stream: object) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()  # type: ignore[attr-defined]
        try:
            sys._getframe(1)
        except ValueError:  # the caller is the interpreter itself, not Python code
            raise OSError("a push was not applied") from None
