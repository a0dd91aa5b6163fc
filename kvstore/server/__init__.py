"""Run a server or scheduler: ``python -m kvstore.server``, by DMLC_ROLE.

``install`` adds the parts that stores need to a node: the directory of keys to the scheduler, the
stores themselves to a server. Importing this module has no side effects. Read next: ``app.py``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kvstore.protocol.requests import DIRECTORY_APP, STORE_APP
from kvstore.server.malloc import keep_freed_memory
from kvstore.server.shares import describe, server_shares
from pslite import CollectiveServer, Config, Future, Postoffice, Role, start
from pslite.errors import ConfigError, PSError
from pslite.ids import NodeInfo
from pslite.node.log import try_to_stderr
from pslite.resource_limits import allow_files
from pslite.version import __version__

#: The launcher's option sets this variable; a server sees only the variable.
_SOURCE = "--server-import or KVSTORE_SERVER_IMPORT"


def install(node: Postoffice, import_errors: Sequence[str] = ()) -> None:
    """Add the parts that stores need to a scheduler or server node, before it runs.

    ``import_errors`` say which modules could not be imported; a worker sees them when it needs such
    a module. Each role imports only the code that it runs, so that a job starts sooner.
    """
    if node.role is Role.SERVER:
        from kvstore.server.app import OneForAll, ServerStores
        from kvstore.server.collective import add_up

        stores = ServerStores(node, import_errors)
        node.customers.add(STORE_APP, OneForAll(node, stores.handle).handle)
        CollectiveServer(node, add_up)
    elif node.role is Role.SCHEDULER:
        from kvstore.server.directory import Directory

        live_ranks: Callable[[], Sequence[int]] = lambda: node.membership.live(Role.WORKER)  # noqa: E731
        config = node.config
        directory = Directory(
            config.num_servers,
            config.chunk_bytes,
            live_ranks,
            config.max_message_bytes,
            lambda: _shares(node),
        )
        node.customers.add(DIRECTORY_APP, directory.handle, waits_for_others=True, kept=directory)
        node.watch.on_departure.append(directory.departed)
        node.on_deadlock.append(directory.deadlocked)

        def seated(member: NodeInfo) -> None:
            if member.role == Role.WORKER.value:
                directory.returned(member.rank)

        node.control.on_seated.append(seated)


def _shares(node: Postoffice) -> Sequence[float] | None:
    """Return each server's share of all bytes, or None for equal shares.

    The roster must be known.
    """
    if node.config.placement == "equal":
        return None
    machines: dict[str, list[str]] = {role.value: [] for role in Role}
    for member in node.membership.roster:  # each role's nodes by rank
        machines[member.role].append(member.machine)
    shares = server_shares(machines[Role.WORKER.value], machines[Role.SERVER.value])
    node.log.info(1, f"placement: {describe(shares)}")
    return shares


def import_modules(names: str, source: str = _SOURCE) -> list[str]:
    """Import the modules of KVSTORE_SERVER_IMPORT; return tracebacks of failures.

    ``names`` are modules, or paths of files that end in ``.py``, separated by commas. ``source``
    is the setting that named them, for the error text.
    """
    errors = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        try:
            _import(name)
        except (Exception, SystemExit):  # a script that ends itself must not end the server
            errors.append(f"importing {name} ({source}) failed:\n{traceback.format_exc()}")
    return errors


def import_failures(names: str, source: str) -> list[str]:
    """Import modules as ``import_modules`` does; return one line for each failure.

    The launcher uses it.
    """
    texts = [error.strip().splitlines() for error in import_modules(names, source)]
    return [f"{lines[0]} {lines[-1]}" for lines in texts]


def _import(name: str) -> None:
    if not name.endswith(".py"):
        importlib.import_module(name)
        return
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


def serve(config: Config, *, joined_fd: int = -1) -> int:
    """Run a scheduler or a server until its job is over; returns the exit code.

    If ``joined_fd`` is given, a line is written to it when the cluster is complete, whenever a
    process has taken the place of a lost one (of a standby, when it has the server's state).
    """
    try:
        config.checked_for_cluster()
        allow_files(Role(config.role), config.num_workers, config.num_servers)
    except ConfigError as wrong:
        try_to_stderr(str(wrong))
        return 2
    # A pool thread that holds the interpreter keeps the I/O thread waiting this long.
    sys.setswitchinterval(0.001)
    keep_freed_memory()
    try:
        return _serve_until_the_end(config, joined_fd)
    except KeyboardInterrupt:
        return 130
    except PSError as error:
        return _failed(error)


def _failed(error: PSError) -> int:
    try_to_stderr(f"{type(error).__name__}: {error}")
    return 1


def _serve_until_the_end(config: Config, joined_fd: int) -> int:
    errors = import_modules(config.server_import)
    for error in errors:
        try_to_stderr(error)

    def prepare(node: Postoffice) -> None:
        install(node, errors)
        if joined_fd >= 0:
            tell_of_places(node, partial(_tell, joined_fd))

    node = start(config, prepare=prepare, wait=False)
    goodbye, exit_code = True, 0
    try:
        node.finished.result()
    except PSError as error:
        # Report the exit code first: the launcher may end this process while it informs its peers.
        exit_code = _failed(error)
    except KeyboardInterrupt:
        # A node that still needs this one has lost it. After a goodbye, the next node that ends
        # would be blamed instead.
        goodbye = False
        raise
    finally:
        node.close(goodbye=goodbye)
    return exit_code


def tell_of_places(node: Postoffice, tell: Callable[[str], None]) -> None:
    """Tell the launcher of each process that has the place of a lost one."""

    def seated(member: NodeInfo) -> None:
        attempt = node.membership.attempts.get(member.node_id, 0)
        tell(f"{member.role} {member.rank} has its place again: {attempt}")

    def joined(ready: Future[NodeInfo]) -> None:
        if not ready.error():
            tell("all have joined")
            for member in node.membership.roster:
                if node.membership.attempts.get(member.node_id, 0):
                    seated(member)

    node.ready.on_done(joined)
    node.control.on_seated.append(seated)
    node.control.on_filled.append(lambda server: tell(f"standby {server.rank} has its place again"))


def _tell(joined_fd: int, line: str) -> None:
    try:
        os.write(joined_fd, line.encode() + b"\n")
    except OSError:  # the reader is gone
        pass


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvstore.server",
        description="Run the scheduler or a server of a job until the job is over. Which of them, "
        "and where, is set by environment variables; kvstore-launch sets them.",
        epilog="DMLC_ROLE is scheduler or server; DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT are the "
        "scheduler's address; DMLC_NUM_WORKER and DMLC_NUM_SERVER count the job's processes. "
        "KVSTORE_SERVER_IMPORT names modules to import, separated by commas.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    return parser


def main(arguments: Sequence[str] | None = None, *, joined_fd: int = -1) -> int:
    """Run ``python -m kvstore.server``: a scheduler or a server, by DMLC_ROLE.

    ``arguments`` are the command line without the program's name (default: this process's).
    """
    _parser().parse_args(arguments)
    try:
        config, unknown = Config.from_env()
        for sentence in unknown:
            try_to_stderr(f"warning: {sentence}")
        if config.role == Role.WORKER.value:
            raise ConfigError(
                "kvstore.server needs DMLC_ROLE=server or DMLC_ROLE=scheduler, got 'worker' "
                "(the default)"
            )
    except ConfigError as error:
        try_to_stderr(str(error))
        return 2
    return serve(config, joined_fd=joined_fd)
