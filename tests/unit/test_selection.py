"""What ``make test`` leaves out, ``make test-slow`` runs: each test is in exactly one of them."""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

TESTS = """
import pytest

def test_fast():
    pass

@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow(reason="large"))])
def test_of_both_kinds(size):
    pass

@pytest.mark.slow(reason="a reason")
def test_slow():
    pass
"""


def arguments(target: str) -> list[str]:
    """What the recipe of a target gives to pytest, with the variables of the Makefile."""
    found = re.search(rf"^{target}:.*\n\t\$\(RUN\) -m pytest (.*)$", MAKEFILE, re.MULTILINE)
    assert found, f"expected one call of pytest in the recipe of {target}"
    text = found[1]
    while names := re.findall(r"\$\((\w+)\)", text):
        for name in names:
            value = re.search(rf"^{name} [:?]?=(.*)$", MAKEFILE, re.MULTILINE)
            assert value, f"expected a value of {name} in the Makefile"
            text = text.replace(f"$({name})", value[1].strip())
    return shlex.split(text)


def selection(target: str) -> list[str]:
    words = arguments(target)
    return words[words.index("-m") : words.index("-m") + 2]


def collect(folder: Path, tests: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Collect some tests under this project's configuration."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "test_some.py").write_text(tests, encoding="utf-8")
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"),
            *(*options, "test_some.py"),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def collected(folder: Path, *options: str) -> set[str]:
    found = collect(folder, TESTS, "-o", "addopts=", *options)
    return {line for line in found.stdout.splitlines() if "::" in line}


def test_fast_and_slow_tests_together_are_all_and_none_is_both(tmp_path: Path) -> None:
    fast, slow = (collected(tmp_path, *selection(name)) for name in ("test-fast", "test-slow"))
    assert fast == {"test_some.py::test_fast", "test_some.py::test_of_both_kinds[1]"}
    assert slow == {"test_some.py::test_slow", "test_some.py::test_of_both_kinds[2]"}


def test_both_targets_look_at_the_same_files() -> None:
    fast, slow = arguments("test-fast"), arguments("test-slow")
    assert [word for word in fast if word != "not slow"] == [
        word for word in slow if word != "slow"
    ]
    assert fast.index("not slow") == slow.index("slow")
    assert [word for word in fast if word.startswith("--ignore")] == [
        "--ignore=tests/gpu",
        "--ignore=tests/launchers",
    ]


def test_no_folder_of_tests_is_left_out_for_its_name(pytestconfig: pytest.Config) -> None:
    """The default of pytest leaves out every folder named ``dist`` or ``build``."""
    left_out = pytestconfig.getini("norecursedirs")
    folders = {file.parent for file in (ROOT / "tests").rglob("test_*.py")}
    names = {part for folder in folders for part in folder.relative_to(ROOT).parts}
    assert "dist" in names
    assert [name for name in names for each in left_out if fnmatch.fnmatch(name, each)] == []


@pytest.mark.parametrize("folder", ["gpu", "launchers"])
def test_no_test_is_slow_where_test_slow_does_not_look(folder: str) -> None:
    files = (ROOT / "tests" / folder).rglob("*.py")
    assert [file for file in files if "mark.slow" in file.read_text(encoding="utf-8")] == []


def test_make_test_all_and_continuous_integration_run_both() -> None:
    recipe = re.search(r"^test-all:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe
    assert "for part in test test-slow;" in recipe[1]
    checks = re.search(r"^CHECKS := (.*)$", MAKEFILE, re.MULTILINE)
    assert checks
    assert "test-fast" in checks[1].split()
    steps = re.findall(r"make (?:\w+=\S+ )*(test\S*)$", (ROOT / ".ci" / "run").read_text(), re.M)
    assert {"test", "test-slow"} <= set(steps)


def test_a_slow_test_without_a_reason_is_refused(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    found = collect(tmp_path, TESTS.replace('(reason="a reason")', ""))
    assert found.returncode == 4
    assert "expected pytest.mark.slow(reason=" in found.stdout + found.stderr
    assert "test_some.py::test_slow" in found.stdout + found.stderr


def test_no_two_files_of_tests_have_one_name() -> None:
    """They are modules of one session; pytest collects only the first of two namesakes."""
    files = [*(ROOT / "tests").rglob("test_*.py")]
    names = [file.name for file in files if not {"gpu", "launchers"} & {*file.parts}]
    assert sorted({name for name in names if names.count(name) > 1}) == []
