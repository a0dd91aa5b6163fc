"""The YAML writer: its exact text, and that nothing in it can be read as something else."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.launch.backends.kubernetes.manifest import to_yaml


def body(value: Any) -> str:
    """What stands behind ``x:``."""
    return to_yaml([{"x": value}]).removeprefix("---\nx:").removesuffix("\n").lstrip(" ")


def test_parts_stand_below_their_names() -> None:
    document = {
        "kind": "Job",
        "spec": {"count": 2, "immutable": True, "args": ["a", "b c"], "none": {}, "no": []},
        "list": [{"name": "x", "in": {"y": 1}}, [1, 2]],
    }
    assert to_yaml([document, {"a": 1}]) == (
        "---\n"
        "kind: Job\n"
        "spec:\n"
        "  count: 2\n"
        "  immutable: true\n"
        "  args:\n"
        "  - a\n"
        '  - "b c"\n'
        "  none: {}\n"
        '  "no": []\n'
        "list:\n"
        "- name: x\n"
        "  in:\n"
        '    "y": 1\n'
        "-\n"
        "  - 1\n"
        "  - 2\n"
        "---\n"
        "a: 1\n"
    )


@pytest.mark.parametrize(
    "text",
    ["", "yes", "Off", "null", "~", "1e3", "0x10", "012", "2026-01-01", "-", "- a", "a: b", "#a",
     "*a", "&a", "!a", "{a", "[a", " a", "a ", "1", ".5", "'", "@a", "%a", "|", "?", "---"],
)  # fmt: skip
def test_text_that_means_something_else_without_quotes_has_them(text: str) -> None:
    assert body(text) == f'"{text}"'


def test_text_of_every_kind_of_character_stays_on_one_line() -> None:
    text = 'a "b" \\ \n\r\t\x00\x7f\x85\u2028\ufeff é 漢 😀 $(X)'
    assert body(text) == ('"a \\"b\\" \\\\ \\n\\r\\t\\x00\\x7f\\x85\\u2028\\ufeff é 漢 😀 $(X)"')


def test_bytes_that_were_no_text_are_refused() -> None:
    with pytest.raises(ValueError, match="not UTF-8"):
        to_yaml([{"x": b"\xff".decode(errors="surrogateescape")}])


def test_other_kinds_of_values_are_refused() -> None:
    with pytest.raises(TypeError, match="float"):
        to_yaml([{"x": 1.5}])
