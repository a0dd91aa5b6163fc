"""Removes what services have left when the tests were killed and could not stop them.

A process of its own that waits for the end of its standard input, which it shares with nobody but
the process of the tests. That one has stopped everything itself if it came to its end; then the
directory is gone, and nothing is left to do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from services.daemon import command, kill_all, network_namespace, process_ids

END_S = 30.0
# What hosts.py writes into the directory of a service: a name a line.
NAMESPACES = "namespaces"
BRIDGES = "bridges"


@contextmanager
def swept(directory: Path) -> Iterator[None]:
    """Whatever becomes of this process, nothing of the services in ``directory`` outlives it."""
    sweeper = subprocess.Popen(
        [sys.executable, __file__, str(directory)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        sweeper.communicate(timeout=END_S)


def sweep(directory: Path) -> None:
    """Kill what the services of this directory have started, and remove it."""
    namespaces = _names(directory, NAMESPACES)
    kill_all(lambda: [pid for pid in process_ids() if network_namespace(pid) in namespaces])
    kill_all(lambda: processes_naming(directory))
    for bridge in _names(directory, BRIDGES):
        command("ip", "link", "delete", bridge)
    shutil.rmtree(directory)


def processes_naming(directory: Path) -> list[int]:
    """All processes that were started with this directory in their environment."""
    mark, found = os.fsencode(directory), []
    for pid in process_ids():
        try:
            if mark in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:  # it has just ended
            pass
    return found


def _names(directory: Path, kind: str) -> set[str]:
    files = directory.glob(f"*/{kind}")
    return {name for file in files for name in file.read_text().splitlines()}


def main() -> None:
    directory = Path(sys.argv[1])
    sys.stdin.read()
    if directory.exists():
        sweep(directory)


if __name__ == "__main__":
    main()
