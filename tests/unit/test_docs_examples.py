"""What the documentation shows runs, prints what it says, and names what exists.

In README.md and docs/*.md a comment before a code block says what to do with it:
``<!-- runs -->`` before Python runs it by itself; ``<!-- file: NAME -->`` saves it under that name,
for the consoles below it; ``<!-- runs -->`` before a console runs its commands and compares what
they print, line by line in any order (processes of a job print as they come).
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from pslite.config import ACCEPTED_NAMES, Config

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
PAGE_NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

BLOCK = re.compile(
    r"^(?:<!-- (?P<what>runs|file: (?P<file>[\w.]+)) -->\n)?"
    r"```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COMMANDS = {
    "python": [sys.executable],
    "kvstore-launch": [sys.executable, str(ROOT / "tools" / "launch.py")],
}


class Block(NamedTuple):
    """A code block of a page."""

    language: str
    what: str
    file: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(m["language"], m["what"] or "", m["file"] or "", m["text"]) for m in found]


def runnable(page: Path) -> list[Block]:
    """The blocks that a comment says something about."""
    return [block for block in blocks(page) if block.what]


def run(command: list[str], folder: Path) -> str:
    """Standard output of a command that must succeed."""
    hidden = ("DMLC_", "PS_", "PYTEST_")
    environment = {name: text for name, text in os.environ.items() if not name.startswith(hidden)}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


def dialogue(console: str) -> list[tuple[list[str], list[str]]]:
    """The commands of a console, and the lines that each prints."""
    parts = re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]
    return [(shlex.split(part.splitlines()[0]), part.splitlines()[1:]) for part in parts]


@pytest.mark.process
@pytest.mark.parametrize("name", [name for name in PAGE_NAMES if runnable(ROOT / name)])
def test_code_that_is_shown_as_running_runs_and_prints_what_it_says(
    name: str, tmp_path: Path
) -> None:
    for block in runnable(ROOT / name):
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            run([sys.executable, "-W", "error", "-c", block.text], tmp_path)
        else:
            for (program, *arguments), expected in dialogue(block.text):
                arguments = [sys.executable if text == "python" else text for text in arguments]
                printed = run([*COMMANDS[program], *arguments], tmp_path)
                assert sorted(printed.splitlines()) == sorted(expected)


def test_no_python_of_the_readme_escapes_the_test_above() -> None:
    shown = [block for block in blocks(ROOT / "README.md") if block.language == "python"]
    assert shown
    assert all(block.what for block in shown)


@pytest.mark.parametrize("name", PAGE_NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def anchors(page: Path) -> set[str]:
    """The names under which a page's headings can be linked, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGE_NAMES)
def test_files_settings_and_make_targets_that_are_named_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    folders = "kvstore|pslite|tests|docs|examples|tools|benchmarks"
    files = set(re.findall(rf"(?<![\w./-])((?:{folders})/[\w./-]*\w\.(?:py|md|svg))\b", text))
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []
    modules = set(re.findall(r"python -m ((?:kvstore|pslite|tests)[\w.]*)", text))
    missing = [m for m in sorted(modules) if not (ROOT / f"{m.replace('.', '/')}.py").exists()]
    assert missing == []
    known = {field.metadata["name"] for field in Config.__dataclass_fields__.values()}
    settings = set(re.findall(r"`\$?((?:PS|DMLC)_[A-Z_]*[A-Z])", text))
    of_the_launcher = {"DMLC_JOB_CLUSTER"}
    assert settings - known - ACCEPTED_NAMES - of_the_launcher == set()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"`make ([a-z-]+)", text))
    targets |= set(re.findall(r"^\$ make ([a-z-]+)", text, re.MULTILINE))
    assert [t for t in sorted(targets) if not re.search(rf"^{t}:", makefile, re.MULTILINE)] == []


@pytest.mark.parametrize("name", [name for name in PAGE_NAMES if name.startswith("docs")])
def test_functions_that_are_named_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    owners = members()
    named = re.findall(r"`(?:\w+\.)*(\w+)\.(\w+)(?:\([\w, ]*\))?`", text)
    wrong = []
    for owner, member in named:
        is_ours = owner in owners or owner[0].isupper()
        if is_ours and member not in owners.get(owner, ()):
            wrong.append(f"{owner}.{member}")
    assert wrong == []


def members() -> dict[str, set[str]]:
    """What each class and module of the two packages defines, by the owner's last name."""
    found: dict[str, set[str]] = {}
    for file in [*(ROOT / "kvstore").rglob("*.py"), *(ROOT / "pslite").rglob("*.py")]:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found.setdefault(file.stem, {"py"}).update(names_of(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(names_of(node))
    return found


def names_of(owner: ast.Module | ast.ClassDef) -> set[str]:
    """Functions, classes, fields and what ``self`` gets in the body of a class or module."""
    names = set()
    for node in ast.walk(owner):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def test_the_page_of_settings_is_what_its_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_settings", ROOT / "docs/make_settings.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert written == script.page(), "run `make docs`"
