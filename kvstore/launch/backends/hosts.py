"""The hosts file: which machines a job may use, and which process runs where.

Pure, except :func:`read_hosts`, which reads one file. A line is ``[user@]host[:port] [slots=N]
[user=NAME] [addr=ADDRESS]``; host and port are as in dmlc-core's ``tracker/dmlc_tracker/ssh.py``.
Errors name the file and the line. Names become part of ``ssh``'s command line, so only plain
characters are allowed. Read ``ssh_command.py`` next.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.launch.options import LaunchError

Placement = tuple[str, int, int]
"""Role, rank, and the host's index in the list of hosts."""

_HOST_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,253}[A-Za-z0-9_])?\.?\Z")
_USER_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.@+-]{0,254}\$?\Z")
_NUMBER = re.compile(r"[0-9]{1,9}\Z")
_LINE_FORM = "host[:port] [slots=N] [user=NAME] [addr=ADDRESS]"


@dataclass(frozen=True)
class Host:
    """A machine of the job. For a value of None, ssh's configuration applies.

    ``name`` may also be a name that only ssh's configuration knows. ``slots`` is the number of
    workers that may run on it. ``address`` is where the other processes of the job reach it.
    """

    name: str
    port: int | None = None
    user: str | None = None
    slots: int = 1
    address: str | None = None

    @property
    def label(self) -> str:
        """The name in messages, with the user and port of the hosts file."""
        user = "" if self.user is None else f"{self.user}@"
        if self.port is None:
            return f"{user}{self.name}"
        return f"{user}{bracketed(self.name)}:{self.port}"


class _Mistake(Exception):
    """An error in a line."""


def read_hosts(path: str) -> list[Host]:
    """Read the hosts of a file. Raises :class:`LaunchError` (exit code 2)."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise LaunchError(
            f"cannot read the hosts file '{path}': {why}; name one after -H, with a line for each "
            f"host, {_LINE_FORM}"
        ) from error
    return parse_hosts(text, path)


def parse_hosts(text: str, file_name: str) -> list[Host]:
    """Parse the hosts of a file, at least one, in the order of first appearance.

    If a host appears again (same name, port and user), its slots are added to the first. Raises
    :class:`LaunchError` (exit code 2).
    """
    found: dict[tuple[str, int | None, str | None], Host] = {}
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            host = _host(words)
            login = (host.name, host.port, host.user)
            found[login] = host if login not in found else _together(found[login], host)
        except _Mistake as mistake:
            raise LaunchError(f"{file_name}, line {number}: {mistake}") from None
    if not found:
        raise LaunchError(
            f"the hosts file '{file_name}' does not name a host; write a line for each, "
            f"{_LINE_FORM}"
        )
    return list(found.values())


def spread(
    hosts: Sequence[Host],
    num_servers: int,
    num_workers: int,
    file_name: str = "hosts",
    standbys: int = 0,
) -> list[Placement]:
    """Assign processes to hosts: servers by rank, standbys, then workers.

    Servers and workers are each dealt to the hosts in turn, from the first. A host gets as many
    workers as it has slots, and a second one only when each host has one. Servers need no slot.
    With ``standbys`` 1, each server has one, on the host after its own.
    Raises :class:`LaunchError` (exit code 2) if there are too few slots; its text names the file
    ``file_name``.
    """
    slots = sum(host.slots for host in hosts)
    if slots < num_workers:
        raise LaunchError(
            f"{num_workers} workers need {num_workers} slots, but {file_name} has "
            f"{_count(slots, 'slot')} on {_count(len(hosts), 'host')}; add hosts, or slots=N "
            "after a host"
        )
    servers = [("server", rank, rank % len(hosts)) for rank in range(num_servers)]
    servers += [("standby", rank, (host + 1) % len(hosts)) for _, rank, host in servers * standbys]
    workers: list[Placement] = []
    turn = 0
    while len(workers) < num_workers:
        free = [index for index, host in enumerate(hosts) if host.slots > turn]
        for index in free[: num_workers - len(workers)]:
            workers.append(("worker", len(workers), index))
        turn += 1
    return servers + workers


def bracketed(name: str) -> str:
    """Return a host as written before a colon; IPv6 addresses get brackets."""
    return f"[{name}]" if ":" in name else name


def _host(words: Sequence[str]) -> Host:
    user, at, place = words[0].rpartition("@")
    name, port = _name_and_port(place)
    host = Host(name, port, _user(user) if at else None)
    seen = {"user"} if at else set()
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in ("slots", "user", "addr"):
            raise _Mistake(f"cannot understand '{word}'; expected {_LINE_FORM}")
        if key in seen:
            raise _Mistake(f"{key} is given twice; remove one")
        seen.add(key)
        if key == "slots":
            host = replace(host, slots=_number("slots", value, 1, 10**6))
        elif key == "user":
            host = replace(host, user=_user(value))
        else:
            host = replace(host, address=_address(value))
    return host


def _name_and_port(place: str) -> tuple[str, int | None]:
    if place.startswith("["):
        name, closed, rest = place[1:].partition("]")
        if not (closed and _is_ipv6(name) and (not rest or rest.startswith(":"))):
            raise _Mistake(
                "expected an IPv6 address, and a port if any, as in [2001:db8::7]:22, got "
                f"'{place}'"
            )
        return name, _port(rest[1:]) if rest else None
    if place.count(":") > 1:
        raise _Mistake(
            f"'{place}' has several colons; put an IPv6 address in brackets, as in [::1]"
        )
    name, colon, port = place.partition(":")
    return _plain_name(name), _port(port) if colon else None


def _plain_name(name: str) -> str:
    if name.startswith("-"):
        raise _Mistake(f"a host's name must not begin with '-', got '{name}'")
    if not _HOST_NAME.match(name):
        raise _Mistake(
            f"a host's name may have only letters, digits, dots, '-' and '_', got '{name}'"
        )
    return name


def _address(value: str) -> str:
    address = value.removeprefix("[").removesuffix("]") if value.startswith("[") else value
    if _is_ipv6(address):
        return address
    if not _HOST_NAME.match(value):
        raise _Mistake(f"addr must be an address or a host's name, got '{value}'")
    return value


def _is_ipv6(text: str) -> bool:
    address, percent, zone = text.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return not percent or _HOST_NAME.match(zone) is not None


def _user(name: str) -> str:
    if not _USER_NAME.match(name):
        raise _Mistake(
            f"'{name}' is not a valid user name; it must start with a letter, digit, '.' or '_'"
        )
    return name


def _port(text: str) -> int:
    return _number("the port", text, 1, 65535)


def _number(what: str, text: str, least: int, most: int) -> int:
    if not _NUMBER.match(text) or not least <= int(text) <= most:
        raise _Mistake(f"{what} must be a number from {least} to {most}, got '{text}'")
    return int(text)


def _together(first: Host, second: Host) -> Host:
    if None not in (first.address, second.address) and first.address != second.address:
        raise _Mistake(
            f"{second.name} has addr={second.address}, but addr={first.address} in an earlier "
            "line; use one address for each host"
        )
    address = second.address if first.address is None else first.address
    return replace(first, slots=first.slots + second.slots, address=address)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
