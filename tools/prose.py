"""Find phrases that are not plain English, and docstrings with a long first line.

    python tools/prose.py            # FILE:LINE: phrase, and exit code 1 if there is one

It reads Markdown without its code, and comments and strings of Python. An engineer says "is not a
number" and "nothing was found": subject, verb, object. The first line of a docstring is one short
sentence on what the code does.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PARTS = ("README.md", "docs", "examples", "benchmarks", "kvstore", "pslite")

#: Only the pages of these are read; how benchmarks are written matters to fewer readers.
PAGES_ONLY = {"benchmarks"}

#: "There is no file" and "is no longer" are what everybody says, so they are not found.
_PHRASES = (
    r"(?<![Tt]here )\bis no\b(?! (?:longer|more|less)\b)",
    r"(?<![Tt]here )\b(?:is|are) none\b",
    r"\bcomes? to nothing\b",
    r"\b[Ww]hoever\b",
    r"\bof no use\b",
    r"\b[Ss]o many\b",
    r"\b[Nn]obody\b",
    r"\bgoes? without\b",
    r"\bthe like\b",
    r"\bfrom [01] on\b",
)
PHRASE = re.compile("|".join(_PHRASES))

#: The docstrings of these are checked for their length.
SUMMARIZED = ("kvstore", "pslite")
#: Not yet: its docstrings are older than the check.
UNSUMMARIZED = "kvstore/frameworks/horovod"
MAX_SUMMARY = 80

_FENCED = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"`[^`\n]+`")
_WORDS = {"STRING", "COMMENT", "FSTRING_MIDDLE"}
#: What may stand between two words of a phrase.
_BETWEEN = re.compile(r"(?:\s|#|[rbf]{0,2}[\"'])+", re.IGNORECASE)
#: Where the statements within a statement are.
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def words_of_markdown(text: str) -> str:
    """Blank out the code of a page, so that each word stays on its line."""
    return _QUOTED.sub(_blanked, _FENCED.sub(_blanked, text))


def _blanked(found: re.Match[str]) -> str:
    """Replace everything but line ends by blanks."""
    return re.sub(r"[^\n]", " ", found[0])


def words_of_python(text: str) -> str:
    """Blank out everything but comments and strings, so that each word stays on its line."""
    lines = [re.sub(r"[^\n]", " ", line) for line in text.splitlines(keepends=True)]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] not in _WORDS:
            continue
        (line, column), word = token.start, re.sub(r"^#|[\"']", " ", token.string)
        for number, part in enumerate(word.splitlines(keepends=True), start=line - 1):
            kept = part.rstrip("\n")
            lines[number] = lines[number][:column] + kept + lines[number][column + len(kept) :]
            column = 0
    return "".join(lines)


def phrases(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the phrases of a file that are not plain English, each with its line."""
    text = file.read_text(encoding="utf-8")
    if not PHRASE.search(_BETWEEN.sub(" ", text)):  # as in most files; the rest takes long
        return
    words = words_of_python(text) if file.suffix == ".py" else words_of_markdown(text)
    # A phrase may go on in the next line, so blanks of any kind count as one.
    spoken, line = "", 1
    lines: list[int] = []
    for part in re.findall(r"\s+|\S+", words):
        shown = part if part.strip() else "\n" if part.count("\n") > 1 else " "
        spoken += shown
        lines += [line] * len(shown)
        line += part.count("\n")
    for found in PHRASE.finditer(spoken):
        yield lines[found.start()], found[0]


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a module or statement, and all statements within."""
    yield node
    for block in _BLOCKS:
        for inner in getattr(node, block, ()):
            yield from _statements(inner)


def long_summaries(text: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings whose first sentence is not one short line, each with its line."""
    for node in _statements(ast.parse(text)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        summary, _, _ = (ast.get_docstring(node) or "").partition("\n\n")
        if len(summary) > MAX_SUMMARY or "\n" in summary:
            yield node.body[0].lineno, summary.splitlines()[0]


def is_summarized(file: Path) -> bool:
    """Return whether the first lines of a file's docstrings have to be short."""
    place = file.relative_to(ROOT).as_posix()
    return (
        file.suffix == ".py" and place.startswith(SUMMARIZED) and not place.startswith(UNSUMMARIZED)
    )


def files(part: str) -> list[Path]:
    """Return the pages and modules of a part of the checkout."""
    place = ROOT / part
    if place.is_file():
        return [place]
    found = [file for file in place.rglob("*.md") if "_build" not in file.parts]
    return sorted(found if part in PAGES_ONLY else [*found, *place.rglob("*.py")])


def main() -> int:
    """Print every phrase with its place; the exit code says whether there was one."""
    every = [file for part in PARTS for file in files(part)]
    found = [
        f"{file.relative_to(ROOT)}:{line}: {phrase}: say it in plain English"
        for file in every
        for line, phrase in phrases(file)
    ]
    found += [
        f"{file.relative_to(ROOT)}:{line}: {summary}: begin the docstring with one line of at "
        f"most {MAX_SUMMARY} characters, then an empty line"
        for file in filter(is_summarized, every)
        for line, summary in long_summaries(file.read_text(encoding="utf-8"))
    ]
    for line in found:
        print(line)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
