"""What launchers whose processes run on other machines have in common.

Which of this machine's variables those processes get, what a process's plan looks like there, and
the address that the scheduler serves on. Used by ``ssh.py`` and ``carried.py``.
"""

from __future__ import annotations

import ipaddress
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvstore.launch.here import checkout_root, network_id
from kvstore.launch.jobrun import scheduler_address
from kvstore.launch.options import OF_ONE_MACHINE, LaunchError, LaunchOptions
from kvstore.launch.plan import THREAD_COUNT_NAMES, ProcessSpec
from kvstore.launch.rehearsal import Row
from pslite.address import interface_address
from pslite.errors import ConfigError

# What of the launcher's environment the hosts get, but for OF_ONE_MACHINE.
_FORWARDED_PREFIXES = ("DMLC_", "PS_", "KVSTORE_", "MXNET_KVSTORE_")
_FORWARDED = (*THREAD_COUNT_NAMES, "KMP_AFFINITY", "LD_LIBRARY_PATH", "PYTHONPATH")


def forwarded_variables(options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """What all processes elsewhere get besides what their machine gives them."""
    found = {
        name: value
        for name, value in environ.items()
        if (name.startswith(_FORWARDED_PREFIXES) or name in _FORWARDED)
        and name not in OF_ONE_MACHINE
    }
    for name in options.forwarded_names:
        if name in environ:
            found[name] = environ[name]
    return found


def for_elsewhere(spec: ProcessSpec) -> ProcessSpec:
    """Without what names a file of this machine; the agent adds its own."""
    environment = dict(spec.environment)
    environment.pop("PS_JOB_KEY_FILE", None)
    path = environment.pop("PYTHONPATH", "").split(os.pathsep)
    if given := os.pathsep.join(one for one in path if one and one != checkout_root()):
        environment["PYTHONPATH"] = given
    return replace(spec, environment=environment)


def with_variables(spec: ProcessSpec, more: Mapping[str, str]) -> ProcessSpec:
    """``more`` does not replace what the user has set."""
    return replace(spec, environment={**more, **spec.environment})


def wished_address(environ: Mapping[str, str]) -> tuple[str | None, int]:
    """Where the user wants the scheduler: as exported, else DMLC_INTERFACE's address, else None.

    And the port, 0 for any. Raises :class:`LaunchError`.
    """
    host, port = scheduler_address(environ)
    if host != "127.0.0.1":
        return host, port
    if environ.get("DMLC_INTERFACE"):
        try:
            return interface_address(environ["DMLC_INTERFACE"]), port
        except ConfigError as error:
            raise LaunchError(str(error), exit_code=1) from error
    return None, port


def common_address(seen: Sequence[str]) -> str:
    """Of the addresses by which others reached this machine the most usual that all can use."""
    for address, _ in Counter(seen).most_common():
        if not is_loopback(address):
            return address
    return seen[0] if seen else "127.0.0.1"


def seen_from_away(greetings: Sequence[Mapping[str, Any]]) -> list[str]:
    """By which addresses agents reached this machine; those that are on it can use any of them."""
    here = network_id()
    away = [one for one in greetings if one.get("network") != here]
    return [str(one.get("reached_from")) for one in away or greetings]


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def agent_row(label: str, found: Mapping[str, Any]) -> Row:
    """What an agent says of its machine. That it greets proves login, Python and version."""
    away_s = float(found.get("time_s", 0.0)) - time.time()
    parts = [
        f"{found.get('host')}: Python {found.get('python')}, kvstore {found.get('version')}",
        f"in {found.get('directory')}",
        f"{len(found.get('cores', ()))} processors",
        f"{found.get('gpus')} GPUs",
        f"{found.get('shared_mb')} MiB of shared memory free",
        "a free port" if found.get("has_free_port") else "NO FREE PORT",
        f"clock {away_s:+.0f} s",
        f"reached from {found.get('reached_from') or 'this machine'}",
    ]
    return Row(label, ", ".join(parts), bool(found.get("has_free_port")))


def core_count(greetings: Sequence[Mapping[str, Any]]) -> int:
    """The processors of all agents together; those on one machine may share some."""
    found: dict[str, set[int]] = {}
    for greeting in greetings:
        found.setdefault(str(greeting.get("machine")), set()).update(greeting.get("cores", ()))
    return max(1, sum(map(len, found.values())))
