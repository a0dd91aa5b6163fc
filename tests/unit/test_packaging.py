"""What an installation is told: metadata, commands, and what to do where something is missing."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.__main__ import main as command
from kvstore.arrays.cpu import kernels
from kvstore.bench import __main__ as bench
from kvstore.launch.cli import main as launch

ROOT = Path(__file__).resolve().parents[2]
METADATA = importlib.metadata.metadata("kvstore-pslite")


def test_the_metadata_has_summary_license_addresses_and_the_readme() -> None:
    assert METADATA["Summary"] == "A parameter server in Python with the API of MXNet's KVStore"
    assert METADATA["License-Expression"] == "Apache-2.0"
    addresses = METADATA.get_all("Project-URL") or []
    assert all(re.fullmatch(r"[^,]+, https://\S+", address) for address in addresses)
    assert len(addresses) >= 2
    assert METADATA["Requires-Python"] == ">=3.10"


def test_what_pytorch_brings_includes_its_bfloat16() -> None:
    needed = METADATA.get_all("Requires-Dist") or []
    of_torch = [each for each in needed if re.search("extra == ['\"]torch['\"]", each)]
    assert sorted(re.split("[^a-z_]", each)[0] for each in of_torch) == ["ml_dtypes", "torch"]


def test_commands_are_installed() -> None:
    commands = importlib.metadata.entry_points(group="console_scripts")
    assert commands["kvstore-launch"].load() is launch
    assert commands["kvstore"].load() is command


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        (["--version"], 0, f"kvstore {kvstore.__version__}\n"),
        (["--help"], 0, "usage: kvstore COMMAND [ARGUMENT ...]\n"),
        ([], 2, "usage: kvstore COMMAND [ARGUMENT ...]\n"),
        (["staus"], 2, "kvstore: there is no command 'staus'; did you mean 'status'?\n"),
        (["launch", "-n", "0", "true"], 2, "[launcher] --num-workers must be at least 1, got 0\n"),
        (["status", "host"], 2, "kvstore status: "),
    ],
)
def test_one_command_has_all_others_as_subcommands(
    arguments: list[str], code: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(arguments) == code
    out, err = capsys.readouterr()
    assert (out + err).startswith(printed)


@pytest.mark.parametrize("name", ["launch", "status", "bench", "server"])
def test_each_subcommand_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_no_text_tells_to_install_this_distribution_from_an_index() -> None:
    """It is on none: texts name the libraries that are missing, or the checkout."""
    files = subprocess.run(
        ["git", "ls-files", "*.py", "*.md", "Makefile"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    if not files:
        pytest.skip("this is not a git checkout")
    index = re.compile(r"pip install\s+(-\S+\s+)*['\"]?kvstore-pslite|kvstore-pslite" + r"\[")
    found = [
        name
        for name in files
        if (ROOT / name).is_file() and index.search((ROOT / name).read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "kvstore.arrays.cpu._kernels", None)
    monkeypatch.delattr("kvstore.arrays.cpu._kernels", raising=False)
    kernels.native.cache_clear()
    monkeypatch.setattr(bench, "_run_jobs", lambda *args, **kwargs: 0)
    yield
    kernels.native.cache_clear()


@pytest.mark.usefixtures("without_kernels")
def test_a_missing_compiled_part_is_said_with_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence = kernels.why_missing()
    assert sentence.startswith("the compiled kernels are missing (")
    assert "install a C compiler, then run pip install" in sentence
    assert bench.main([]) == 0
    assert capsys.readouterr().err.splitlines().count(f"note: {sentence}") == 1
    assert launch(["-n", "1", "--check", sys.executable, "-V"]) == 0
    assert f"compiled kernels     {sentence}" in capsys.readouterr().out
    monkeypatch.setenv("KVSTORE_NATIVE", "0")
    assert kernels.why_missing().startswith("KVSTORE_NATIVE=0 switches the compiled kernels off")


def test_a_compiled_part_of_another_version_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kvstore.arrays.cpu._kernels")
    assert kernels.why_missing() == ""
    monkeypatch.setattr(kernels, "INTERFACE", kernels.INTERFACE + 1)
    expected = kernels.INTERFACE
    assert kernels.why_missing().startswith(
        f"the compiled kernels have version {expected - 1}, expected {expected}, so NumPy"
    )
