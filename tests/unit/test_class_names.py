"""Names in the product's source: each class has its own, and docstrings name files that exist."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from import_graph import parsed

ROOT = Path(__file__).resolve().parents[2]
FILE = re.compile(r"``([\w./]*\w\.py)``")
ORIGINALS = ("python/mxnet/", "tracker/dmlc_tracker/", "ndarray/", "_common/")
"""Where files of MXNet, dmlc-core and Ray lie, which sources are cited from."""


def sources() -> dict[str, str]:
    """The product's files by their path from the root."""
    files = [path for name in ("kvstore", "pslite") for path in (ROOT / name).rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


def classes_of_one_name(files: Mapping[str, str]) -> dict[str, list[str]]:
    """The names that several classes have, private ones and inner ones too, and where they are."""
    places = defaultdict(list)
    for path, text in files.items():
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_two_classes_have_one_name() -> None:
    assert classes_of_one_name(sources()) == {}


def test_a_second_class_of_a_name_is_found() -> None:
    files = {path: text for path, text in sources().items() if "class Postoffice" in text}
    files["kvstore/planted.py"] = "def make():\n    class Postoffice: ...\n"
    found = classes_of_one_name(files)
    assert list(found) == ["Postoffice"]
    assert found["Postoffice"][-1] == "kvstore/planted.py:2"


def wrong_references(path: Path) -> list[str]:
    """Files that a docstring of a module names and that do not exist, or are the module itself.

    A name counts from the module's directory, one above it, the package, or the root; a file of the
    originals is cited by its path there.
    """
    near = (path.parent, path.parent.parent, ROOT, ROOT / "kvstore", ROOT / "pslite")
    wrong = []
    for node in ast.walk(parsed(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for name in FILE.findall(ast.get_docstring(node) or ""):
                found = [place / name for place in near if (place / name).exists()]
                found += [one for one in path.parent.rglob(name) if "/" not in name]
                is_itself = isinstance(node, ast.Module) and found[:1] == [path]
                if is_itself or not (found or name.startswith(ORIGINALS)):
                    wrong.append(f"{path}: {name}")
    return wrong


def test_docstrings_name_files_that_exist_and_are_others() -> None:
    assert [name for path in sources() for name in wrong_references(ROOT / path)] == []


def test_a_file_that_is_gone_or_is_the_module_itself_is_found(tmp_path: Path) -> None:
    module = tmp_path / "here.py"
    module.write_text('"""Read ``gone.py``, ``here.py``, ``pslite/errors.py``."""\n')
    assert wrong_references(module) == [f"{module}: gone.py", f"{module}: here.py"]
