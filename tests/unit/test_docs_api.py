"""Every public call has an example in the documentation that runs in the tests.

An example is a mention in a Python block that ``docs_blocks.py`` runs: ``kv.push(...)`` for a
method of the stores, ``mx.nd.zeros`` for a name of a module.
"""

from __future__ import annotations

import ast
import importlib
import re

import pytest
from docs_blocks import PAGES, ROOT, runnable

import kvstore
import kvstore.optimizer
import pslite
from kvstore.mxnet.model import FeedForward

#: Names of modules, and how a script refers to the module.
MODULES = {
    "kvstore": "mx",
    "kvstore.gluon": "mx.gluon",
    "kvstore.lr_scheduler": "mx.lr_scheduler",
    "kvstore.nd": "mx.nd",
    "kvstore.optimizer": "mx.optimizer",
    "pslite": "pslite",
}
PRIVATE = ["_barrier", "_send_command_to_servers", "_set_updater"]
MIGRATION = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")


def dotted(node: ast.AST) -> str:
    """``mx.nd.zeros`` for such an expression, else an empty text or its tail."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def mentions(code: str) -> set[str]:
    """Everything dotted in some Python code, and its beginnings."""
    return {dotted(node) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute)}


EXAMPLES = set().union(
    *(
        mentions(block.text)
        for page in PAGES
        for block in runnable(page)
        if block.language == "python"
    )
)


def public_names(module: str) -> list[str]:
    return list(importlib.import_module(module).__all__)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_of_a_module_has_an_example(module: str) -> None:
    prefix = MODULES[module]
    assert [n for n in public_names(module) if f"{prefix}.{n}" not in EXAMPLES] == []


def test_every_call_of_a_store_has_an_example() -> None:
    names = [name for name in dir(kvstore.KVStore) if not name.startswith("_")] + PRIVATE
    found = {
        name
        for name in names
        for owner in ("kv", "mx.KVStoreBase", "again")
        if f"{owner}.{name}" in EXAMPLES
    }
    assert sorted(set(names) - found) == []


def test_every_call_of_feedforward_has_an_example() -> None:
    names = [name for name in dir(FeedForward) if not name.startswith("_")]
    used = {
        name.rpartition(".")[2] for name in EXAMPLES if name.startswith(("model.", "mx.model."))
    }
    assert sorted(set(names) - used) == []


def test_every_name_of_the_original_that_the_page_of_migration_lists_is_there() -> None:
    table = MIGRATION[MIGRATION.index("## Calls") : MIGRATION.index("## Types of stores")]
    rows = re.findall(r"^\| (.+?) \| (same|better|different|not there) \|", table, re.MULTILINE)
    assert len(rows) > 15
    listed = {name for call, _ in rows for name in re.findall(r"`kv\.(\w+)", call)}
    assert {"init", "push", "pull", "pushpull", "_set_updater"} <= listed
    assert [name for name in sorted(listed) if not hasattr(kvstore.KVStore, name)] == []


def test_the_page_of_migration_lists_every_type_of_store() -> None:
    from kvstore.kvstore import _PLUG_INS, STORE_TYPES

    table = MIGRATION[MIGRATION.index("## Types of stores") : MIGRATION.index("## Optimizers,")]
    named = set(re.findall(r"`(\w+)`", re.sub(r"^\| `nccl.*$", "", table, flags=re.MULTILINE)))
    assert named == {*STORE_TYPES, *_PLUG_INS}


def test_an_example_would_be_missed() -> None:
    assert mentions("mx.nd.zeros(3)\nkv.push('w', x.y)") == {
        "mx.nd.zeros",
        "mx.nd",
        "kv.push",
        "x.y",
    }
    assert "mx.nd.nothing" not in EXAMPLES
    assert pslite.__all__
