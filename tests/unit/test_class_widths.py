"""No class of the product has many attributes of its own, but those that are listed, with why.

Counted are the names that a class assigns on ``self``, in any of its methods.
"""

from __future__ import annotations

import ast
from pathlib import Path

from import_graph import parsed

ROOT = Path(__file__).resolve().parents[2]
MOST = 14
#: Class -> how many attributes it has, and why. The numbers may only become smaller.
WIDE = {
    "FeedForward": (16, "MXNet's class, whose attributes scripts read"),
    "Postoffice": (24, "holds every part of a node, each of which gets an Office"),
    "Links": (17, "three counters that tests and reports read, and five settings"),
    "Transfer": (16, "one request of a worker, made for each push and pull: no second object"),
    "Simulation": (21, "a whole cluster with its clock, standbys, faults, launcher and scripts"),
    "Link": (21, "the state of one connection, from its first attempt to its end"),
    "Listener": (16, "reads one socket and its monitor, with the limits of both"),
    "ZmqVan": (23, "owns all sockets of a node, and nine settings"),
    "TableShare": (17, "one array for each thing that is known of a row"),
    "Carrier": (16, "the command of the launcher and all its agents in one loop"),
    "Supervisor": (17, "the processes of one job, their places, signals and records"),
}


def attributes(cls: ast.ClassDef) -> set[str]:
    """The names that are assigned on ``self``."""
    return {
        node.attr
        for method in cls.body
        if isinstance(method, ast.FunctionDef)
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def classes() -> list[ast.ClassDef]:
    return [
        node
        for package in ("pslite", "kvstore")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(parsed(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]


def test_only_the_listed_classes_are_wide_and_they_do_not_grow() -> None:
    numbers = [(cls.name, len(attributes(cls))) for cls in classes()]
    found = {name: number for name, number in numbers if number > MOST}
    assert found == {name: number for name, (number, _) in WIDE.items()}, (
        f"expected at most {MOST} attributes, or the listed number: split the class, or, where it "
        "has become smaller, correct the list"
    )


def test_attributes_are_counted_once_and_those_of_other_objects_are_not() -> None:
    tree = ast.parse(
        "class A:\n"
        "    def __init__(self, b):\n"
        "        self.a, self.b = 1, b\n"
        "        self.c: int = 2\n"
        "        b.d = 3\n"
        "        self.b.e = 4\n"
        "    def f(self):\n"
        "        self.a += 1\n"
        "        with open('x') as self.g:\n"
        "            return self.h\n"
    )
    [cls] = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assert attributes(cls) == {"a", "b", "c", "g"}
