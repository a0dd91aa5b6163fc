#!/usr/bin/env python3
"""Count the lines of the product by kind, and say which of the limits on files do not hold.

``python tools/count_lines.py [ROOT]`` prints a table of ``kvstore`` and ``pslite``: files, lines,
and how many of these are code, docstring, comment or blank. Empty files are not counted.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

PACKAGES = ("kvstore", "pslite")
KINDS = ("code", "docstring", "comment", "blank")
LEAST_LINES, MOST_LINES = 60, 500
_NOT_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def kinds_of(text: str) -> Counter[str]:
    """How many lines of a module are of which kind; a line with code and a comment is code."""
    kinds = dict.fromkeys(range(1, len(text.splitlines()) + 1), "blank")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and kinds[token.start[0]] == "blank":
            kinds[token.start[0]] = "comment"
        elif token.type not in _NOT_CODE:
            kinds.update(dict.fromkeys(range(token.start[0], token.end[0] + 1), "code"))
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            kinds.update(dict.fromkeys(range(node.lineno, node.end_lineno + 1), "docstring"))
    return Counter(kinds.values())


def count(files: Iterable[Path]) -> dict[Path, Counter[str]]:
    """The lines of each file that is not empty."""
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    return {path: kinds_of(text) for path, text in texts.items() if text.strip()}


def rows(root: Path) -> tuple[list[tuple[str, ...]], dict[Path, int]]:
    """The table, and the number of lines by file."""
    table, lengths, whole = [("", "files", "lines", *KINDS)], {}, Counter[str]()
    for package in PACKAGES:
        found = count(sorted((root / package).rglob("*.py")))
        lengths |= {path.relative_to(root): kinds.total() for path, kinds in found.items()}
        kinds = sum(found.values(), Counter[str]())
        whole += kinds
        table.append(_row(package, len(found), kinds))
    return [*table, _row("together", len(lengths), whole)], lengths


def _row(name: str, files: int, kinds: Counter[str]) -> tuple[str, ...]:
    numbers = (files, kinds.total(), *(kinds[kind] for kind in KINDS))
    return (name, *(f"{number:,}" for number in numbers))


def main(root: Path) -> None:
    table, lengths = rows(root)
    for name, *numbers in table:
        print(f"{name:10}" + "".join(f"{number:>11}" for number in numbers))
    short = sum(lines < LEAST_LINES for lines in lengths.values())
    print(f"\nfiles of fewer than {LEAST_LINES} lines: {short}")
    for path, lines in lengths.items():
        if lines > MOST_LINES:
            print(f"{path} has {lines} lines, more than {MOST_LINES}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parents[1])
