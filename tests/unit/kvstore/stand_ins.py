"""Programs that take the place of a cluster's commands."""

from __future__ import annotations

from pathlib import Path


def program(directory: Path, name: str, script: str) -> Path:
    """Make ``directory``/``name``, which the shell runs."""
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path
