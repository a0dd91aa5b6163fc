"""Whether this Python has the packages that servers need.

Standard library only, and no import of this project: ``tools/launch.py`` runs it by its path
before the package is imported, which needs NumPy itself. Runs on the main thread. Read
``launch/job/checks.py`` next.
"""

from __future__ import annotations

import importlib.util
import sys

# What is imported, and the package that it comes from.
_PACKAGES = {"numpy": "numpy", "zmq": "pyzmq", "msgpack": "msgpack"}


def missing_packages() -> str | None:
    """A sentence about what is not installed here and what to do, or None if nothing is."""
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
