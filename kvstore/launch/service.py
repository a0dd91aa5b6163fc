"""A scheduler or server process, the same as ``python -m kvstore.server``.

The launcher runs this file by its path. ``-m kvstore.server`` would import the package and NumPy
before any code of ours runs, and an interrupt in that fifth of a second would print a traceback.
The launcher passes interrupts on to all processes, so users would see many tracebacks. With
``--check-imports``, the file only imports the servers' modules (``launch/job/checks.py``). A
scheduler in a pod prints on its standard output when all nodes have joined: there ``PS_JOINED_FD``
is 1.

Standard library only, and no import of this project before it serves: ``tools/launch.py`` also runs
this file, to call :func:`missing_packages` before it imports anything that needs them.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

# Each module that is imported, and the package that contains it.
_PACKAGES = {"numpy": "numpy", "zmq": "pyzmq", "msgpack": "msgpack"}


def missing_packages() -> str | None:
    """Return a sentence about missing packages and how to install them, or None."""
    import importlib.util

    missing = [
        package for module, package in _PACKAGES.items() if importlib.util.find_spec(module) is None
    ]
    if not missing:
        return None
    verb = "is" if len(missing) == 1 else "are"
    return (
        f"{', '.join(missing)} {verb} not installed in {sys.executable}: pip install . in the "
        "checkout, or use .venv/bin/python, which make creates"
    )


def _end_quietly(number: int, frame: FrameType | None) -> None:
    """End without a traceback: this process has not opened or started anything yet."""
    os._exit(128 + number)


def _check_imports(names: str, source: str) -> None:
    """Exit with 0, or print a line and exit with 3; do not wait for modules' threads."""
    from kvstore.server import import_failures

    failures = import_failures(names, source)
    for failure in failures[:1]:
        print(failure, file=sys.stderr, flush=True)
    os._exit(3 if failures else 0)


if __name__ == "__main__":
    # An interrupt that the caller ignores stays ignored.
    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_interruptible:
        signal.signal(signal.SIGINT, _end_quietly)
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        sys.path[0] = os.getcwd()  # as with -m, so that --server-import finds modules there
    if sys.argv[1:2] == ["--check-imports"]:
        _check_imports(*sys.argv[2:4])

    from kvstore.server import main

    # Only this process may hold the pipe; processes that a user's module starts must not inherit
    # it.
    joined_fd = int(os.environ.pop("PS_JOINED_FD", "-1"))
    if joined_fd > 2:
        os.set_inheritable(joined_fd, False)
    if is_interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main((), joined_fd=joined_fd))
