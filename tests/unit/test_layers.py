"""The layers of ``kvstore``: arrows between packages point down, and there is no circle.

Every import counts, also those within functions and below ``if TYPE_CHECKING:``, which are arrows
for the reader. A package is the first two names of a module (``kvstore.stores``); all of
``pslite`` is one, whose own layers are in ``test_import_arrows.py``.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict

import pytest
from import_graph import ROOT, circles, imports_of, module_of, name_of, parsed, source_of

#: From top to bottom; packages of one layer do not import each other.
LAYERS = (
    ("kvstore", "kvstore.__main__"),
    ("kvstore.bench",),
    ("kvstore.frameworks",),
    ("kvstore.mxnet", "kvstore.status"),
    ("kvstore.launch",),
    ("kvstore.kvstore",),
    ("kvstore.stores", "kvstore.server"),
    ("kvstore.checkpoint",),
    ("kvstore.protocol",),
    ("kvstore.sparse", "kvstore.compression"),
    ("kvstore.optimizer",),
    ("kvstore.arrays",),
    ("kvstore.errors",),
    ("pslite",),
)
RANKS = {package: rank for rank, layer in enumerate(LAYERS) for package in layer}

#: (module, what it imports) of arrows that point up, each with its reason.
ALLOWED = {
    ("kvstore.arrays.initializer", "kvstore.mxnet.nd"): (
        "an initializer written MXNet's way fills an mx.nd array, which is made when it is called"
    ),
    ("kvstore.optimizer.scripted", "kvstore.mxnet.nd.ndarray"): (
        "an optimizer written MXNet's way is called with mx.nd arrays, made when it is called"
    ),
}

#: The most names at the top of kvstore, beside __init__.py and py.typed.
MOST_AT_THE_TOP = 16


@functools.cache
def modules() -> frozenset[str]:
    """All modules of both packages."""
    tops = (ROOT / "kvstore", ROOT / "pslite")
    return frozenset(name_of(path) for top in tops for path in top.rglob("*.py"))


@functools.cache
def arrows() -> set[tuple[str, str]]:
    """(module, module that it imports), both of this project."""
    return {
        (name, module_of(each, modules()))
        for name in modules()
        for each in imports_of(ast.walk(parsed(source_of(name).read_text())))
        if module_of(each, modules())
    }


def package_of(module: str) -> str:
    """The layer's name that a module belongs to."""
    first, *rest = module.split(".")
    return ".".join([first, *rest[:1]]) if first == "kvstore" else first


def directory_of(module: str) -> str:
    """The directory of a module: ``kvstore.stores.dist`` of ``kvstore.stores.dist.plan``."""
    return ".".join(source_of(module).parent.relative_to(ROOT).parts)


def wrong_arrows(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those that do not point down from one package to another."""
    return {
        (module, imported)
        for module, imported in pairs
        if package_of(module) != package_of(imported)
        and RANKS[package_of(module)] >= RANKS[package_of(imported)]
    }


def test_every_package_has_a_layer() -> None:
    assert {package_of(module) for module in modules()} == set(RANKS)


def test_arrows_point_down() -> None:
    wrong = wrong_arrows(arrows())
    assert sorted(wrong - set(ALLOWED)) == []
    assert sorted(set(ALLOWED) - wrong) == [], "these arrows are gone: take them off the list"


@pytest.mark.parametrize("package", ["kvstore.arrays", "kvstore.mxnet", "kvstore.launch"])
def test_there_is_no_circle_between_the_directories_of_a_package(package: str) -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for module, imported in arrows():
        one, other = directory_of(module), directory_of(imported)
        if one != other and one.startswith(f"{package}.") and other.startswith(f"{package}."):
            graph[one].add(other)
            graph[other].update()
    assert graph
    assert circles(graph) == set()


def test_the_local_and_the_distributed_stores_do_not_import_each_other() -> None:
    both = {"kvstore.stores.local", "kvstore.stores.dist"}
    wrong = {
        (module, imported)
        for module, imported in arrows()
        if {directory_of(module), directory_of(imported)} == both
    }
    assert wrong == set()


def test_the_top_of_the_package_can_be_seen_at_a_glance() -> None:
    names = {package_of(module) for module in modules()} - {"kvstore", "pslite"}
    assert len(names) <= MOST_AT_THE_TOP


def test_arrows_up_and_sideways_are_found() -> None:
    down = ("kvstore.stores.base", "kvstore.arrays.keys")
    within = ("kvstore.stores.base", "kvstore.stores.lazy")
    up = ("kvstore.arrays.keys", "kvstore.optimizer.base")
    sideways = ("kvstore.server.app", "kvstore.stores.dist.plan")
    top = ("kvstore.errors.tracebacks", "kvstore")
    assert wrong_arrows({down, within, up, sideways, top}) == {up, sideways, top}
