"""Read modules and their imports from their source, and find circles among them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def parsed(text: str) -> ast.Module:
    """The syntax tree of a module, parsed once for all tests; it must not be changed."""
    return ast.parse(text)


def name_of(path: Path) -> str:
    """``pslite/van/base.py`` -> ``pslite.van.base``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def source_of(module: str) -> Path:
    """``pslite.van.base`` -> ``pslite/van/base.py``."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports_of(nodes: Iterable[ast.AST]) -> set[str]:
    """Modules that are imported; ``from a import b`` is ``a.b``, whatever ``b`` is."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the arrows"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def module_of(imported: str, known: Iterable[str]) -> str:
    """``pslite.ids.Role`` -> ``pslite.ids``; empty for what is not one of these."""
    if imported in known:
        return imported
    parent = imported.rpartition(".")[0]
    return parent if parent in known else ""


def circles(graph: Mapping[str, set[str]]) -> set[str]:
    """The modules from which arrows lead back to themselves."""

    def reaches(start: str) -> bool:
        seen: set[str] = set()
        ahead = list(graph[start])
        while ahead:
            name = ahead.pop()
            if name not in seen:
                seen.add(name)
                ahead += graph[name]
        return start in seen

    return {name for name in graph if reaches(name)}
