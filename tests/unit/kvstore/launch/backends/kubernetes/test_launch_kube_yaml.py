"""The text of manifests: JSON that is YAML, whatever the texts in it hold."""

from __future__ import annotations

import json

import pytest
import yaml

from kvstore.launch.backends.kubernetes.manifest import to_yaml


def test_each_document_stands_behind_a_line_of_its_own() -> None:
    assert to_yaml([{"a": 1}, {"b": [True]}]) == (
        '---\n{\n  "a": 1\n}\n---\n{\n  "b": [\n    true\n  ]\n}\n'
    )


@pytest.mark.parametrize(
    "text",
    ["", "yes", "null", "~", "1e3", "12345678e12345678", "012", "2026-01-01", "---", "\n---\n",
     'a "b" \\ \n\r\t\x00\x7f\x85\u2028\ufeff\uffff é 漢 😀 \U000e0001 $(X)'],
)  # fmt: skip
def test_yaml_and_json_read_every_text_back(text: str) -> None:
    written = to_yaml([{"x": text}])
    assert list(yaml.safe_load_all(written)) == [{"x": text}]
    assert json.loads(written.removeprefix("---")) == {"x": text}


def test_bytes_that_were_no_text_are_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        to_yaml([{"x": b"\xff".decode(errors="surrogateescape")}])
