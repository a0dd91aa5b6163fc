"""The file of hosts, and which process goes to which of them.

Pure but for :func:`read_hosts`. A line is ``[user@]host[:port] [slots=N] [user=NAME]
[addr=ADDRESS]``; ``#`` begins a comment. Read ``ssh.py`` next.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.launch.options import LaunchError

# What ssh, rsync and mpirun take as a name; none may look like an option.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.%-]*\Z")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?\Z")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]*\Z")
_MAX_SLOTS = 65536


@dataclass(frozen=True)
class Host:
    """``slots`` is the number of workers it takes, ``address`` what others reach it by."""

    name: str
    port: int | None = None
    user: str | None = None
    slots: int = 1
    address: str | None = None


def read_hosts(path: str) -> list[Host]:
    """The hosts of a file. Raises :class:`LaunchError` (exit code 2) saying what is wrong."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise LaunchError(
            f"the file of hosts {path} cannot be read: {error.strerror}", exit_code=2
        ) from error
    except UnicodeDecodeError as error:
        raise LaunchError(f"the file of hosts {path} is no text", exit_code=2) from error
    return parse_hosts(text, path)


def parse_hosts(text: str, path: str) -> list[Host]:
    """As :func:`read_hosts`. A host that is named again gets the slots of both lines."""
    found: dict[tuple[str, int | None, str | None], Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _host(words)
        except ValueError as error:
            raise LaunchError(f"{path}, line {number}: {error}", exit_code=2) from error
        key = (host.name, host.port, host.user)
        if key in found:
            host = replace(found[key], slots=found[key].slots + host.slots)
        found[key] = host
    if not found:
        raise LaunchError(f"the file of hosts {path} names no host", exit_code=2)
    return list(found.values())


def spread(hosts: Sequence[Host], num_servers: int, num_workers: int) -> list[tuple[str, int, int]]:
    """(role, rank, position in ``hosts``) of all servers and workers.

    Workers go round the hosts that have a slot left, servers round all of them. Raises
    :class:`LaunchError` (exit code 2) when there are fewer slots than workers.
    """
    slots = sum(host.slots for host in hosts)
    if slots < num_workers:
        raise LaunchError(
            f"there are {slots} slots on {len(hosts)} host(s), and {num_workers} workers were "
            "asked for: add hosts, or slots=N behind a host that takes more than one worker",
            exit_code=2,
        )
    turns = max(host.slots for host in hosts)
    order = [
        index for turn in range(turns) for index, host in enumerate(hosts) if host.slots > turn
    ]
    return [
        *(("server", rank, rank % len(hosts)) for rank in range(num_servers)),
        *(("worker", rank, order[rank]) for rank in range(num_workers)),
    ]


def _host(words: Sequence[str]) -> Host:
    user, _, place = words[0].rpartition("@")
    name, port = _name_and_port(place)
    host = Host(name, port, user or None)
    for word in words[1:]:
        key, separator, value = word.partition("=")
        if key == "slots" and value.isdecimal() and 0 < int(value) <= _MAX_SLOTS:
            host = replace(host, slots=int(value))
        elif key == "user" and value:
            host = replace(host, user=value)
        elif key == "addr" and (_NAME.match(value) or _IPV6.match(value)):
            host = replace(host, address=value)
        else:
            raise ValueError(
                f"'{word}' is none of slots=NUMBER, user=NAME and addr=ADDRESS"
                if separator
                else f"'{word}' is too much: one host on each line"
            )
    if host.user is not None and not _USER.match(host.user):
        raise ValueError(f"'{host.user}' is not the name of a user")
    return host


def _name_and_port(place: str) -> tuple[str, int | None]:
    name, port = place, ""
    if place.startswith("["):
        name, bracket, rest = place[1:].partition("]")
        if not bracket or not _IPV6.match(name) or (rest and not rest.startswith(":")):
            raise ValueError(f"'{place}' is not a host")
        port = rest[1:]
    elif place.count(":") == 1:
        name, _, port = place.partition(":")
    if not (_NAME.match(name) or (":" in name and _IPV6.match(name))):
        raise ValueError(f"'{place}' is not a host")
    if port and not (port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"'{port}' is not a port number")
    return name, int(port) if port else None
