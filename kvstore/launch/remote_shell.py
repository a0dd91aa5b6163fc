"""How ``ssh`` and ``rsync`` are called, and what their complaints mean. Pure.

The options are those of OpenSSH's ssh_config(5); ssh takes the first value that it sees for
one, so the user's come first, and only BatchMode stands before them: nobody could answer a
question. Read ``ssh.py`` next.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from kvstore.launch.hosts import Host

_BATCH = ("-T", "-o", "BatchMode=yes")
_DEFAULTS = (
    *("-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=15"),
    *("-o", "ServerAliveCountMax=4"),
    *("-o", "ForwardX11=no"),
    *("-o", "ForwardAgent=no"),
    *("-o", "ClearAllForwardings=yes"),
)

# A part of what ssh says in small letters, and what it means for the host {name}.
_MEANINGS = (
    (
        "permission denied",
        "{name} lets nobody in without a password: put your key there (ssh-copy-id {name})",
    ),
    (
        "host key verification failed",
        "the key of {name} is not known, or has changed: log in once by hand (ssh {name})",
    ),
    ("could not resolve hostname", "{name} is unknown: there is no host of this name"),
    ("connection refused", "{name} refuses connections: no ssh server listens there"),
    ("timed out", "{name} does not answer: the connection timed out"),
    ("no route to host", "there is no route to {name}"),
    ("network is unreachable", "there is no route to {name}"),
)
_NOT_FOUND = (126, 127)


def ssh_argv(host: Host, launcher_args: Sequence[str], remote: Sequence[str]) -> list[str]:
    """The command that runs ``remote`` on ``host``, quoted for any of the usual shells there."""
    return [
        *_ssh_words(host, launcher_args),
        *(() if host.user is None else ("-l", host.user)),
        *("--", host.name),
        shlex.join(remote),
    ]


def rsync_argv(
    host: Host, source: str, destination: str, launcher_args: Sequence[str]
) -> list[str]:
    """The command that copies what is in ``source`` to ``destination`` on ``host``.

    As dmlc-core's tracker copies, without the history of a git checkout; nothing is deleted.
    ``--mkpath`` is rsync's since 3.2.3.
    """
    name = f"[{host.name}]" if ":" in host.name else host.name
    user = "" if host.user is None else f"{host.user}@"
    return [
        *("rsync", "-az", "--mkpath", "--exclude=/.git/", "-e"),
        shlex.join(_ssh_words(host, launcher_args)),
        *("--", f"{source.rstrip('/')}/", f"{user}{name}:{destination.rstrip('/')}/"),
    ]


def refusal(host: Host, complaints: Sequence[str], exit_code: int | None, python: str) -> str:
    """Why there is no agent on ``host``, in one sentence; ``complaints`` are ssh's lines."""
    lines = [line.strip() for line in complaints if line.strip()]
    if exit_code in _NOT_FOUND:
        return f"there is no {python} on {host.name}: name its Python with --python"
    text = "\n".join(lines).lower()
    for part, meaning in _MEANINGS:
        if part in text:
            return meaning.format(name=host.name)
    if lines:
        return f"{host.name} cannot be reached: {lines[-1]}"
    code = "" if exit_code is None else f" (exit code {exit_code})"
    return f"{host.name} closed the connection without a word{code}"


def _ssh_words(host: Host, launcher_args: Sequence[str]) -> list[str]:
    port = () if host.port is None else ("-p", str(host.port))
    return ["ssh", *_BATCH, *port, *launcher_args, *_DEFAULTS]
