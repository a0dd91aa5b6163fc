"""The launcher's script in a checkout: its help, and a Python that lacks packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]


def test_the_script_of_a_checkout_finds_the_package_and_explains_itself(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "launch.py"), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0
    assert "kvstore-launch -n WORKERS" in done.stdout


@pytest.mark.parametrize("missing", [("msgpack",), ("numpy", "msgpack")])
def test_a_python_without_the_packages_is_told_once_before_anything_starts(
    tmp_path: Path, missing: tuple[str, ...]
) -> None:
    for package in {"numpy", "zmq", "msgpack"} - set(missing):
        (tmp_path / f"{package}.py").touch()
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / "tools" / "launch.py"), "-n", "1", "true"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    verb = "is" if len(missing) == 1 else "are"
    assert (done.returncode, done.stderr) == (
        2,
        f"[launcher] {', '.join(missing)} {verb} not installed in {sys.executable}: pip install . "
        "in the checkout, or use .venv/bin/python, which make creates\n",
    )
