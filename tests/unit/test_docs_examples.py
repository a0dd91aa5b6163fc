"""What the documentation shows runs, prints what it says, and names what exists.

What the comments above code blocks mean, and how blocks are run: ``docs_blocks.py``.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from pathlib import Path

import pytest
from docs_blocks import BLOCK, PAGE_NAMES, PAGES, ROOT, blocks, run_page, runnable
from import_graph import parsed

import kvstore
from pslite.config import ACCEPTED_NAMES, Config

#: On these pages nothing that looks like a command or a script escapes the tests.
WHOLLY_RUN = [
    "README.md",
    "docs/api.md",
    "docs/errors.md",
    "docs/faq.md",
    "docs/from-lightning.md",
    "docs/migration.md",
    "docs/tutorial.md",
    *(name for name in PAGE_NAMES if name.startswith("docs/semantics/")),
]


#: These start several jobs and take most of the time of all pages. README.md, the page of every
#: error and those that are quick run always.
LONG_PAGES = {
    "docs/api.md",
    "docs/faq.md",
    "docs/from-horovod.md",
    "docs/from-jax.md",
    "docs/from-lightning.md",
    "docs/from-python.md",
    "docs/from-pytorch.md",
    "docs/migration.md",
    "docs/recovery.md",
    "docs/semantics/dist_async.md",
    "docs/semantics/dist_sync.md",
    "docs/sparse.md",
    "docs/trainer.md",
    "docs/training.md",
    "docs/tutorial.md",
}
slow = pytest.mark.slow(reason="the page starts several jobs; what it calls, the tests call, too")
#: What `make test` may lack.
NEEDED = {"docs/from-lightning.md": "lightning"}


@pytest.mark.process
@pytest.mark.timeout(240)  # a page may start a dozen jobs; each command has a limit of its own
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[slow] if name in LONG_PAGES else [])
        for name in PAGE_NAMES
        if runnable(ROOT / name)
    ],
)
def test_code_that_is_shown_as_running_runs_and_prints_what_it_says(
    name: str, tmp_path: Path
) -> None:
    if name in NEEDED and importlib.util.find_spec(NEEDED[name]) is None:
        pytest.skip(f"needs {NEEDED[name]}")
    run_page(ROOT / name, tmp_path)


@pytest.mark.parametrize("name", WHOLLY_RUN)
def test_no_code_of_the_pages_for_users_escapes_the_test_above(name: str) -> None:
    shown = [block for block in blocks(ROOT / name) if block.language in ("python", "console")]
    escaped = [block.text for block in shown if not block.what]
    if name == "README.md":  # make, and what needs several terminals
        escaped = [block.text for block in shown if not block.what and block.language == "python"]
    assert escaped == []


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        text = BLOCK.sub("", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", path):
                continue
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page}: {target}")
    assert broken == []


def test_a_link_that_shows_a_file_leads_to_that_file() -> None:
    wrong = []
    for page in PAGES:
        text = BLOCK.sub("", page.read_text(encoding="utf-8"))
        links = re.findall(r"\[`?([\w/.\\-]+\.(?:py|md))`?\]\(([^)\s#]+)", text)
        wrong += [
            f"{page}: {shown} leads to {target}"
            for shown, target in links
            if not f"/{target}".endswith(f"/{shown}".replace("\\", ""))
        ]
    assert wrong == []


@functools.cache
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
    places = {module: ROOT / module.replace(".", "/") for module in sorted(modules)}
    runs = [module for module, place in places.items() if (place / "__main__.py").exists()]
    missing = [m for m, place in places.items() if not place.with_suffix(".py").exists()]
    assert set(missing) <= set(runs)
    known = {field.metadata["name"] for field in Config.__dataclass_fields__.values()}
    settings = set(re.findall(r"`\$?((?:PS|DMLC)_[A-Z_]*[A-Z])", text))
    of_the_launcher = {"DMLC_JOB_CLUSTER", "DMLC_NUM_ATTEMPT"}
    assert settings - known - ACCEPTED_NAMES - of_the_launcher == set()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"`make ([a-z-]+)", text))
    targets |= set(re.findall(r"^\$ make ([a-z-]+)", text, re.MULTILINE))
    assert [t for t in sorted(targets) if not re.search(rf"^{t}:", makefile, re.MULTILINE)] == []


#: Array libraries, after which files of ours are named, too.
LIBRARIES = {"cupy", "dist", "jax", "numpy", "torch"}  # dist: torch.distributed


def test_functions_that_are_named_exist() -> None:
    owners = members()
    wrong = []
    for name in PAGE_NAMES:
        if not name.startswith("docs"):
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        # One table names what is not there; test_hints.py holds it to the code.
        text = re.sub(r"^## Names that are not there\n.*?(?=^## )", "", text, flags=re.M | re.S)
        named = re.findall(r"`(?:\w+\.)*(\w+)\.(\w+)(?:\([\w, ]*\))?`", text)
        for owner, member in named:
            is_ours = (owner in owners or owner[0].isupper()) and owner not in LIBRARIES
            if is_ours and member not in owners.get(owner, ()):
                wrong.append(f"{name}: {owner}.{member}")
    assert wrong == []


def members() -> dict[str, set[str]]:
    """What each class and module of the two packages defines, by the owner's last name."""
    found: dict[str, set[str]] = {}
    for file in [*(ROOT / "kvstore").rglob("*.py"), *(ROOT / "pslite").rglob("*.py")]:
        tree = parsed(file.read_text(encoding="utf-8"))
        owner = file.parent.name if file.stem == "__init__" else file.stem
        found.setdefault(owner, {"py"}).update(names_of(tree))
        found.setdefault(file.parent.name, {"py"}).add(file.stem)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(names_of(node))
    found["kvstore"].update(kvstore.__all__)  # some are imported when they are first used
    found["kvstore"].add("checksums")  # a key in the metadata of files
    found["node"].update(found["Postoffice"])  # what pages call a node is one
    found["job"].update({"sh", "key"})  # files of a user's
    return found


def names_of(owner: ast.Module | ast.ClassDef) -> set[str]:
    """Functions, classes, fields, imports and what ``self`` gets in a class or module."""
    names: set[str] = set()
    for node in ast.walk(owner):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def test_the_page_of_settings_is_what_its_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("make_settings", ROOT / "docs/make_settings.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert written == script.page(), "run `make settings`"
