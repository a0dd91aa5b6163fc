"""Finds or makes the virtual environment in which MXNet's last wheel runs.

MXNet 1.9.1 needs NumPy before 1.24 (``np.bool``), which exists for Python up to 3.11.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = ("numpy==1.23.5", "mxnet==1.9.1")
PYTHONS = ("python3.11", "python3.10")
PROBE = "import mxnet, numpy; assert mxnet.__version__ == '1.9.1'; mxnet.nd.ones((1,)).asnumpy()"
HOW = "give one with --mxnet-python, in which 'pip install numpy==1.23.5 mxnet==1.9.1' has run"


def find_or_make(given: str | None, directory: Path) -> tuple[str | None, str]:
    """(interpreter with MXNet, "") or (None, why there is none and what to do)."""
    python = given or str(directory / "bin" / "python")
    fault = _fault(python)
    if fault is None:
        return python, ""
    if given is not None:
        return None, f"MXNet cannot be used with {given}: {fault}"
    base = _base()
    if base is None:
        return None, f"MXNet needs Python 3.10 or 3.11, and there is neither; {HOW}"
    print(f"making {directory} with {', '.join(PACKAGES)} (once)", flush=True)
    shutil.rmtree(directory, ignore_errors=True)
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *PACKAGES]
    for command in [base, "-m", "venv", str(directory)], install:
        fault = _error_of(command)
        if fault is not None:
            shutil.rmtree(directory, ignore_errors=True)
            return None, f"MXNet cannot be installed: {fault}; {HOW}"
    fault = _fault(python)
    return (python, "") if fault is None else (None, f"MXNet does not run: {fault}")


def _base() -> str | None:
    """An interpreter that MXNet's wheel works with."""
    if sys.version_info[:2] in ((3, 10), (3, 11)):
        return getattr(sys, "_base_executable", sys.executable)
    for name in PYTHONS:
        path = shutil.which(name)
        if path is not None and _error_of([path, "-c", "import venv, ensurepip"]) is None:
            return path
    return None


def _fault(python: str) -> str | None:
    return _error_of([python, "-c", PROBE])


def _error_of(command: list[str]) -> str | None:
    """None for a success, else the last line of what the command printed."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if run.returncode == 0:
        return None
    lines = (run.stderr or run.stdout).strip().splitlines()
    return lines[-1] if lines else f"exit code {run.returncode}"
