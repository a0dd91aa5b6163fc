"""Writes plain data as YAML: block style, nothing that YAML 1.1 and 1.2 read differently.

Pure: mappings, sequences, text, whole numbers and truth values in, text out. There is no reader
and nothing else of YAML (tags, anchors, long text over several lines). Used by ``kubernetes.py``
for what ``kube_manifest.py`` makes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# What may stand without quotes: it begins with a letter, so it is no number and no date.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*\Z")
_WORDS_WITH_A_MEANING = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def to_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """All ``documents`` one after the other, each behind a line ``---``.

    Raises ValueError for text that is not Unicode (bytes that were no UTF-8), TypeError for
    other kinds of values.
    """
    lines: list[str] = []
    for document in documents:
        lines.append("---")
        lines.extend(_mapping(document, ""))
    return "\n".join(lines) + "\n"


def _mapping(values: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in values.items():
        yield from _entry(f"{indent}{_text(name)}:", value, indent)


def _entry(heading: str, value: Any, indent: str) -> Iterator[str]:
    """``heading`` with the value behind it, or below it where it has parts."""
    if isinstance(value, Mapping) and value:
        yield heading
        yield from _mapping(value, indent + "  ")
    elif isinstance(value, (list, tuple)) and value:
        yield heading
        yield from _sequence(value, indent)
    else:
        yield f"{heading} {_scalar(value)}"


def _sequence(values: Sequence[Any], indent: str) -> Iterator[str]:
    for value in values:
        if isinstance(value, Mapping) and value:
            first, *rest = _mapping(value, indent + "  ")
            yield f"{indent}- {first.removeprefix(indent + '  ')}"
            yield from rest
        elif isinstance(value, (list, tuple)) and value:
            yield f"{indent}-"
            yield from _sequence(value, indent + "  ")
        else:
            yield f"{indent}- {_scalar(value)}"


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (Mapping, list, tuple)):
        return "{}" if isinstance(value, Mapping) else "[]"
    raise TypeError(f"{type(value).__name__} has no form in YAML here")


def _text(text: str) -> str:
    if _PLAIN.match(text) and text.lower() not in _WORDS_WITH_A_MEANING:
        return text
    return f'"{"".join(map(_character, text))}"'


def _character(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        raise ValueError("text that is not UTF-8 cannot be written as YAML")
    if character.isprintable():
        return character
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
