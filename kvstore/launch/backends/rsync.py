"""Copy a directory to the hosts before the job starts (``--sync-dst-dir``).

One ``rsync`` runs for each host, a few at a time, over ssh with the same options as the job's own
connections. As in dmlc-core's ``tracker/dmlc_tracker/ssh.py``, it is ``rsync -az``: files that
exist only on the hosts are kept. ``.git`` is not copied. Main thread only; the caller waits. The
options are those of ``rsync(1)``, 3.0 and later on both sides.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import IO

from kvstore.launch.backends.hosts import Host, bracketed
from kvstore.launch.backends.ssh_command import login, shell_line, ssh_options
from kvstore.launch.backends.ssh_errors import known_refusal, no_program
from kvstore.launch.job.child import die_with_launcher
from kvstore.launch.job.signals import ENDING, SignalPipe
from kvstore.launch.options import LaunchError

_AT_ONCE = 8
_STALLED_S = 300  # the longest time without a byte in either direction
_TELL_EVERY_S = 10.0
_LOOK_EVERY_S = 0.05
_LONGEST_ERROR_BYTES = 64 * 1024
_GOOD = (0, 24)  # 24: files vanished during the copy, as logs do

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NO_RSYNC = re.compile(
    r"\brsync: (command )?not found\.?\Z|(unknown command|command not found):? rsync\b",
    re.IGNORECASE,
)
_SUMMARY = re.compile(r"rsync error: |rsync: connection unexpectedly closed|\(see the rsync man")


def copy_to_hosts(
    hosts: Sequence[Host],
    source: str,
    destination: str,
    launcher_args: Sequence[str],
    say: Callable[[str], None],
) -> None:
    """Copy the contents of ``source`` to ``destination`` on all hosts.

    ``say`` gets a line for each host at the start and at the end, and one every 10 s in between.
    The first failure ends the other copies and raises :class:`LaunchError` (exit code 1). So does
    Ctrl-C or another signal (exit code 128 and the signal's number).
    """
    waiting, running = list(hosts), dict[subprocess.Popen[bytes], tuple[Host, IO[bytes], float]]()
    begun_s = told_s = time.monotonic()
    with SignalPipe() as signals, ExitStack() as cleanup:
        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                host = waiting.pop(0)
                argv = rsync_argv(host, source, destination, launcher_args)
                say(f"copying {source} to {place(host, destination)}")
                errors: IO[bytes] = cleanup.enter_context(tempfile.TemporaryFile())
                process = _started(argv, errors)
                cleanup.callback(_end, process)
                running[process] = host, errors, time.monotonic()
            _pause(signals)
            now_s = time.monotonic()
            for process in [process for process in running if process.poll() is not None]:
                host, errors, since_s = running.pop(process)
                if process.returncode not in _GOOD:
                    args = (_last_lines(errors), process.returncode, launcher_args)
                    raise LaunchError(sync_refusal(host, destination, *args), exit_code=1)
                say(f"copied to {host.label} in {now_s - since_s:.1f} s")
            if now_s - told_s >= _TELL_EVERY_S:
                told_s = now_s
                left = [*(host for host, _, _ in running.values()), *waiting]
                names = ", ".join(host.label for host in left)
                say(f"still copying after {now_s - begun_s:.0f} s: {names}")


def _started(argv: Sequence[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
            preexec_fn=die_with_launcher(),  # safe: the launcher has one thread
        )
    except OSError as error:
        raise LaunchError(no_program("rsync", error), exit_code=127) from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill rsync if it still runs, and the ssh that it has started."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_lines(errors: IO[bytes]) -> list[str]:
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - _LONGEST_ERROR_BYTES))
    return errors.read().decode(errors="replace").splitlines()


def _pause(signals: SignalPipe) -> None:
    """Wait a moment or until a signal arrives. Raises :class:`LaunchError`."""
    select.select([signals.fd], [], [], _LOOK_EVERY_S)
    for number in signals.arrived():
        if number in ENDING:
            raise LaunchError(
                f"interrupted by {number.name} while copying; files that were already copied "
                "stay on the hosts",
                exit_code=128 + number,
            )


def rsync_argv(
    host: Host, source: str, destination: str, launcher_args: Sequence[str]
) -> list[str]:
    """Return the command that copies ``source`` into ``destination``, made if missing.

    ``destination`` is relative to the home directory on the host unless it begins with ``/``.
    Raises :class:`LaunchError` (exit code 2) if it cannot be a directory's name.
    """
    directory = _directory(destination)
    make = shell_line(["mkdir", "-p", "--", directory])
    return [
        "rsync",
        "-azs",  # s: no remote shell interprets the names
        f"--timeout={_STALLED_S}",
        "--exclude=.git",
        "-e",
        " ".join(_rsync_quoted(word) for word in ssh_options(host, launcher_args)),
        f"--rsync-path={make}; rsync",  # --mkpath would need rsync 3.2.3 on both sides
        "--",
        f"{source.rstrip('/')}/",
        f"{bracketed(host.name)}:{directory}",
    ]


def place(host: Host, destination: str) -> str:
    """Return the destination on ``host`` for messages."""
    user = "" if host.user is None else f"{host.user}@"
    return f"{user}{bracketed(host.name)}:{destination}"


def sync_refusal(
    host: Host,
    destination: str,
    stderr_lines: Sequence[str],
    exit_code: int,
    launcher_args: Sequence[str] = (),
) -> str:
    """Return a sentence on why a copy failed, with what ssh or rsync said."""
    lines = [_CONTROL.sub("", line).strip() for line in stderr_lines]
    lines = [line for line in lines if line]
    where = place(host, destination)
    if any("is your shell clean" in line for line in lines):
        return (
            f"cannot copy to {where}: a start-up file of the shell there prints text, which "
            f"disturbs rsync; see what 'ssh {login(host, launcher_args)} true' prints, and "
            "silence it"
        )
    if exit_code == 127 or any(_NO_RSYNC.search(line) for line in lines):
        return f"cannot copy to {where}: {host.label} has no rsync; install it there"
    ssh_says = known_refusal(host, lines, launcher_args)
    if ssh_says is not None:
        return f"cannot copy to {where}: {ssh_says}"
    telling = [line for line in lines if not _SUMMARY.match(line)] or lines
    if not telling:
        return f"cannot copy to {where}: rsync ended with exit code {exit_code} and printed nothing"
    return (
        f"cannot copy to {where}: {telling[-1]}; check that the directory is writable and has room"
    )


def _directory(destination: str) -> str:
    """Return a directory in rsync's form, without a leading ``~/``."""
    if not destination or _CONTROL.search(destination):
        raise LaunchError(f"--sync-dst-dir must be a directory on the hosts, got {destination!a}")
    if destination == "~":
        return "."
    return destination[2:].lstrip("/") or "." if destination.startswith("~/") else destination


def _rsync_quoted(word: str) -> str:
    """Quote a word for ``-e``, which rsync splits at spaces."""
    if word and not any(letter in " '\"" for letter in word):
        return word
    return "'" + word.replace("'", "''") + "'"
