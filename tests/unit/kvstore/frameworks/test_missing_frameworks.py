"""Without PyTorch, JAX or Lightning, whatever needs one says what to install."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
FRAMEWORKS = ["lightning", "optax", "jax", "torch"]  # what needs another stands before it
DOORS = [
    ("kvstore.torch", "torch", "PyTorch"),
    ("kvstore.horovod.torch", "torch", "PyTorch"),
    ("kvstore.jax", "jax", "JAX"),
    ("kvstore.lightning", "torch", "PyTorch"),
    ("kvstore.lightning", "lightning", "Lightning"),
]


def without(framework: str, code: str, *arguments: str) -> str:
    """Standard error of an interpreter that cannot import ``framework``; it must exit with 1."""
    code = f"import sys; sys.modules[{framework!r}] = None; {code}"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    return done.stderr


def imported_by(file: Path) -> set[str]:
    """The first names of all modules that a script imports when it starts."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found.update(each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


def scripts() -> Iterator[tuple[str, str]]:
    """Each example that can be started, with the framework that it or a neighbour imports."""
    for file in sorted((ROOT / "examples").rglob("*.py")):
        if 'if __name__ == "__main__":\n' in file.read_text(encoding="utf-8"):
            imported = imported_by(file)
            for name in sorted(imported):
                neighbour = file.parent / f"{name}.py"
                imported |= imported_by(neighbour) if neighbour.exists() else set()
            for framework in [each for each in FRAMEWORKS if each in imported][:1]:
                yield str(file.relative_to(ROOT)), framework


SCRIPTS = [*scripts()]


@pytest.mark.parametrize(("door", "framework", "name"), DOORS)
def test_a_module_for_a_framework_that_is_missing_says_what_to_install(
    door: str, framework: str, name: str
) -> None:
    last = without(framework, f"import {door}").splitlines()[-1]
    said = f"kvstore\\S* needs {name}, which is not installed here: pip install {framework}\\b"
    assert re.match(f"ModuleNotFoundError: {said}", last)


def test_ranks_of_torchrun_without_pytorch_are_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, text)
    last = without("torch", "import kvstore.horovod; kvstore.horovod.init()").splitlines()[-1]
    assert last.endswith("start them by kvstore-launch, or pip install torch")


@pytest.mark.parametrize(("script", "framework"), SCRIPTS)
def test_an_example_whose_framework_is_missing_says_what_to_install(
    script: str, framework: str
) -> None:
    code = (
        "import os, runpy; sys.path[0] = os.path.dirname(sys.argv[1]); "
        "runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    [line] = without(framework, code, script).splitlines()
    name = {"torch": "PyTorch", "jax": "JAX", "lightning": "Lightning"}[framework]
    assert line.endswith(f"{name} is missing; install it: pip install {framework}")


def test_all_scripts_with_a_framework_are_found() -> None:
    names = {Path(script).stem for script, _ in SCRIPTS}
    assert names == {
        *("train_cifar10", "ptdist", "ddp_mnist", "train_dist", "sync_sgd_pytorch"),
        *("server_optimizer", "mnist"),
    }
