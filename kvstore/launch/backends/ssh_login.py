"""The command line of ``ssh``, and explanations of its failures.

Pure: it builds the argument vector for a :class:`~kvstore.launch.backends.hosts.Host`, and one
sentence from ssh's error output. The arguments must not contain a secret, because other users of
both machines can read them. The options are those of ``ssh(1)`` and ``ssh_config(5)``, OpenSSH 7.6
and later. Read ``rsync.py`` next, which copies files through the same connection.
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

# OpenSSH's messages (ssh.c, sshconnect.c, sshconnect2.c, readconf.c), the most specific first:
# after the line on a changed key comes the general line on verification. LOGIN is replaced by the
# result of login().
_REFUSALS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), sentence)
    for pattern, sentence in (
        (
            r"Bad configuration option|[Bb]ad owner or permissions on|Can't open user config"
            r"|\bterminating, \d+ bad configuration|unknown option -- |illegal option"
            r"|Bad port '|no argument after keyword|unsupported option",
            "was not called, because ssh rejects its options or its configuration: correct them",
        ),
        (
            r"REMOTE HOST IDENTIFICATION HAS CHANGED|[Hh]ost key for .* has changed",
            "shows another host key than the one that this machine knows: if the host was "
            "installed anew, forget the old key with ssh-keygen -R and run 'ssh LOGIN' once",
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
            "asks for a password, or takes none of your keys: set one up with "
            "'ssh-copy-id LOGIN', and see that 'ssh LOGIN true' asks nothing",
        ),
        (
            r"Connection refused",
            "refuses the connection: start sshd there, or correct the port in the hosts file",
        ),
        (
            r"Timeout, server .* not responding|Read from remote host|Connection to \S+ closed"
            r"|[Bb]roken pipe",
            "was lost while the job ran: see whether it is up and its network well",
        ),
        (
            r"timed out",
            f"did not answer within {CONNECT_S} s: see that it is up, and that no firewall is "
            "in between",
        ),
        (
            r"No route to host|Network is unreachable",
            "cannot be reached: see that it is up and that a route leads there",
        ),
        (
            r"exchange_identification|Connection (closed|reset) by|banner exchange"
            r"|Exceeded MaxStartups",
            "broke the connection off before the login: its sshd may take too few at once "
            "(MaxStartups), or deny this machine",
        ),
        (
            r"Unable to negotiate",
            "has an sshd that shares no method of encryption with ssh here: update the older one",
        ),
    )
)
