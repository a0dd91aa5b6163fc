"""Deletes a job when its launcher is gone without having done so itself.

A shell that waits at a pipe: the launcher holds the other end and nobody else does. A line means
that all is well; the end of the pipe without one, which ``kill -9`` brings about, means that the
job is to be deleted. It is in a session of its own, so that a closed terminal does not end it.
Main thread; used by ``kubernetes.py``.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvstore.launch.options import LaunchError

# A moment for what was under way; several tries, since the network may be down as well.
_SCRIPT = """
read -r all_is_well && exit 0
for pause in 1 5 10 20 40; do
    sleep "$pause"
    "$@" && exit 0
done
"""
_END_S = 2.0


@contextmanager
def guarded(command: Sequence[str], environ: Mapping[str, str]) -> Iterator[None]:
    """Run ``command`` when this process is killed within the block. Raises :class:`LaunchError`."""
    try:
        shell = subprocess.Popen(
            ["sh", "-c", _SCRIPT, "sh", *command],
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"cannot run sh: {error.strerror}", exit_code=1) from error
    try:
        yield
    finally:
        _dismiss(shell)


def _dismiss(shell: subprocess.Popen[bytes]) -> None:
    assert shell.stdin is not None
    try:
        shell.stdin.write(b"all is well\n")
        shell.stdin.close()
        shell.wait(_END_S)
    except (OSError, subprocess.TimeoutExpired):  # somebody has ended or stopped it
        shell.kill()
        shell.wait()
