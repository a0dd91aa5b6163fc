"""Explanations of why ``ssh`` or its remote command failed, and what to do. Pure.

Each explanation is one sentence, made from ssh's error output and exit code. ``ssh_command.py``
builds the command itself, and ``ssh.py`` notices that it failed. It is not tried again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvstore.launch.backends.hosts import Host
from kvstore.launch.backends.ssh_command import CONNECT_S, login

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def refusal(
    host: Host,
    stderr_lines: Sequence[str],
    exit_code: int | None,
    python: str,
    launcher_args: Sequence[str] = (),
) -> str:
    """Return why ssh or the remote command failed, and what to do.

    ``stderr_lines`` are the last lines of standard error. ``exit_code`` is 255 for an error of ssh
    itself, and None if the command has not ended. ``python`` is the program that was to run.
    """
    lines = [_CONTROL.sub("", line).strip() for line in stderr_lines]
    lines = [line for line in lines if line]
    if exit_code not in (None, 255):
        known = _command_refusal(host, lines, exit_code, python)
    else:
        known = known_refusal(host, lines, launcher_args)
    return known or _unknown_refusal(host, lines, exit_code, launcher_args)


def known_refusal(
    host: Host, lines: Sequence[str], launcher_args: Sequence[str] = ()
) -> str | None:
    """Return a sentence if ssh's output has a known remedy, or None."""
    for pattern, sentence in _REFUSALS:
        for line in reversed(lines):
            if pattern.search(line):
                advice = sentence.replace("LOGIN", login(host, launcher_args))
                return f"{host.label} {advice} ({line})"
    return None


def no_program(name: str, error: OSError) -> str:
    """Return the error for an ``ssh`` or ``rsync`` that cannot start on this machine."""
    package = {"ssh": "openssh-client"}.get(name, name)
    return (
        f"cannot run {name}: {error.strerror}; install it (Debian: apt install {package}) and put "
        "it on the PATH"
    )


def _command_refusal(
    host: Host, lines: Sequence[str], exit_code: int | None, python: str
) -> str | None:
    """Return a sentence for a remote command that ended with ``exit_code``, or None."""
    for line in reversed(lines):
        if _NO_MODULE.search(line):
            return (
                f"the Python on {host.label} does not find this package: install it there, or "
                f"name another Python with --python ({line})"
            )
    missing = [line for line in lines if _NOT_RUN.search(line)]
    if exit_code in (126, 127) or missing:
        said = f" ({(missing or lines)[-1]})" if lines else ""
        return (
            f"{host.label} has no {python}, or you may not run it: name one that "
            f"is on all hosts with --python{said}"
        )
    return None


def _unknown_refusal(
    host: Host, lines: Sequence[str], exit_code: int | None, launcher_args: Sequence[str]
) -> str:
    said = f": {lines[-1]}" if lines else " and printed nothing"
    if exit_code is None:
        how = "closed its output"
    elif exit_code < 0:
        how = f"ended with signal {-exit_code}"
    else:
        how = f"ended with exit code {exit_code}"
    by_hand = f"ssh -o BatchMode=yes {login(host, launcher_args)} true"
    return f"ssh to {host.label} {how}{said}; try by hand: {by_hand}"


_NO_MODULE = re.compile(r"No module named '?kvstore\b")
# csh prints this and ends with 1 where other shells end with 127 and 126.
_NOT_RUN = re.compile(r": (Command not found|Permission denied)\.\Z")

# OpenSSH's messages (ssh.c, sshconnect.c, sshconnect2.c, readconf.c), the most specific first: ssh
# prints the line about a changed key and then the general line about verification. The result of
# login() replaces LOGIN.
_REFUSALS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), sentence)
    for pattern, sentence in (
        (
            r"Bad configuration option|[Bb]ad owner or permissions on|Can't open user config"
            r"|\bterminating, \d+ bad configuration|unknown option -- |illegal option"
            r"|Bad port '|no argument after keyword|unsupported option",
            "was not contacted, because ssh rejects its options or its configuration: correct them",
        ),
        (
            r"REMOTE HOST IDENTIFICATION HAS CHANGED|[Hh]ost key for .* has changed",
            "shows another host key than the one that this machine knows: if the host was "
            "reinstalled, remove the old key with ssh-keygen -R and run 'ssh LOGIN' once",
        ),
        (
            r"Host key verification failed|No .* host key is known for",
            "is not known to this machine: run 'ssh LOGIN' once, compare the key that it shows, "
            "and answer yes; ssh then keeps it",
        ),
        (
            r"Could not resolve hostname|Name or service not known",
            "does not resolve: correct the name in the hosts file",
        ),
        (
            r"bad permissions|Permissions \d+ for .* are too open",
            "was not shown your key, because others may read its file: run chmod 600 on it",
        ),
        (
            r"Permission denied \(|Too many authentication failures"
            r"|No supported authentication methods",
            "asks for a password, or accepts none of your keys: set one up with "
            "'ssh-copy-id LOGIN', and check that 'ssh LOGIN true' asks no question",
        ),
        (
            r"Connection refused",
            "refuses the connection: start sshd there, or correct the port in the hosts file",
        ),
        (
            r"Timeout, server .* not responding|Read from remote host|Connection to \S+ closed"
            r"|[Bb]roken pipe",
            "was lost while the job ran: check whether it is up and its network works",
        ),
        (
            r"timed out",
            f"did not answer within {CONNECT_S} s: check that it is up, and that no firewall is "
            "in between",
        ),
        (
            r"No route to host|Network is unreachable",
            "cannot be reached: check that it is up and that there is a route to it",
        ),
        (
            r"exchange_identification|Connection (closed|reset) by|banner exchange"
            r"|Exceeded MaxStartups",
            "closed the connection before the login: its sshd may accept too few at once "
            "(MaxStartups), or reject this machine",
        ),
        (
            r"Unable to negotiate",
            "has an sshd that shares no encryption method with ssh here: update the older one",
        ),
    )
)
