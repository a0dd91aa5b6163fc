"""The command line of ``ssh``.

Pure: it builds the argument vector for a :class:`~kvstore.launch.backends.hosts.Host`. The
arguments must not contain a secret, because other users of both machines can read them. The options
are those of ``ssh(1)`` and ``ssh_config(5)``, OpenSSH 7.6 and later. ``ssh_errors.py`` explains
what ssh reports; ``rsync.py`` copies files through the same connection.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from kvstore.launch.backends.hosts import Host
from kvstore.launch.options import LaunchError

CONNECT_S = 10
_ALIVE_EVERY_S = 15
_ALIVE_COUNT = 4

# Without these, a lost connection or a question to the user would stall the job.
_OPTIONS = (
    f"ConnectTimeout={CONNECT_S}",
    f"ServerAliveInterval={_ALIVE_EVERY_S}",
    f"ServerAliveCountMax={_ALIVE_COUNT}",
    "ForwardX11=no",
    "ForwardAgent=no",
    "ClearAllForwardings=yes",
    "ControlMaster=no",  # a new master would hold our pipes open; an existing one is used
    "RemoteCommand=none",
    "LogLevel=INFO",  # quieter levels hide the reason of a refusal
)

# ssh's options by getopt's rules; the first string lists those that need a value.
_WITH_VALUE = "BDEFIJLOPQRSWbceilmopw"
_NOT_FOR_JOBS = frozenset("GNOQVWfnst")
_OPTION_WORD = re.compile(
    rf"-(?!-?\Z)(?P<letters>[^{_WITH_VALUE}]*(?P<option>[{_WITH_VALUE}]?))(?P<value>.*)\Z",
    re.DOTALL,
)

_BARE = re.compile(r"[A-Za-z0-9_@+:,./-]+\Z")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SPECIAL = re.compile(r"(['\\!])")
_MEANING = {"'": '"\'"', "\\": "\\\\", "!": "\\!"}


def ssh_argv(host: Host, launcher_args: Sequence[str], remote_words: Sequence[str]) -> list[str]:
    """Return the command that runs ``remote_words`` on ``host`` without a terminal.

    Raises :class:`LaunchError` (exit code 2) for invalid ``launcher_args``.
    """
    return [*ssh_options(host, launcher_args), "--", host.name, shell_line(remote_words)]


def ssh_options(host: Host, launcher_args: Sequence[str]) -> list[str]:
    """Return the ssh command up to, but without, the host.

    ssh uses the first value that it sees of an option. So passwords cannot be enabled again. A port
    or user from the hosts file, which is for one host, comes before ``launcher_args``, which are
    for all hosts. These come before our own choices and ssh's configuration.
    """
    check_launcher_args(launcher_args)
    words = ["ssh", "-o", "BatchMode=yes"]
    if host.port is not None:
        words += ["-p", str(host.port)]
    if host.user is not None:
        words += ["-l", host.user]
    words += launcher_args
    for option in _OPTIONS:
        words += ["-o", option]
    return [*words, "-T"]  # the last of -t and -T wins


def check_launcher_args(words: Sequence[str]) -> None:
    """Raise for ssh options that would break the launcher's command."""
    rest = iter(words)
    for word in rest:
        found = _OPTION_WORD.match(word)
        if found is None:
            raise LaunchError(
                f"--launcher-args must have only options of ssh, got '{word}', which ssh would "
                "use as the host"
            )
        for letter in found["letters"]:
            if letter in _NOT_FOR_JOBS:
                raise LaunchError(
                    f"--launcher-args must not have ssh's -{letter}, since the launcher needs "
                    "the remote command's input and output; remove it"
                )
        if found["option"] and not found["value"] and next(rest, None) is None:
            raise LaunchError(
                f"--launcher-args ends with {word}, which needs a value: add it, as in "
                "--launcher-args='-F my_config'"
            )


def shell_line(words: Sequence[str]) -> str:
    """Return one line that a login shell splits into ``words``, unchanged.

    sh, bash, zsh, csh and fish all read it in the same way. So some characters that
    :func:`shlex.join` would only put in quotes are escaped: ``!`` is history in csh, and a
    backslash is an escape in fish. Raises ValueError for control characters, such as line breaks:
    csh cannot quote them in a way that other shells share.
    """
    return " ".join(_quoted(word) for word in words)


def login(host: Host, launcher_args: Sequence[str] = ()) -> str:
    """Return the arguments of ``ssh`` for this host, with the user's options."""
    words = [] if host.port is None else ["-p", str(host.port)]
    if launcher_args and host.user is not None:
        words += ["-l", host.user]  # ssh uses the first user that it is given
    words += launcher_args
    is_told = host.user is None or launcher_args
    words.append(host.name if is_told else f"{host.user}@{host.name}")
    return shlex.join(words)


def _quoted(word: str) -> str:
    if _CONTROL.search(word):
        raise ValueError(f"{word!r} has control characters, which a login shell cannot pass on")
    if _BARE.match(word):
        return word
    parts = [part for part in _SPECIAL.split(word) if part]
    return "".join(_MEANING.get(part, f"'{part}'") for part in parts) or "''"
