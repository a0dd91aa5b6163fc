"""Every planted bug can still be planted: its place in the code stands once, its test exists."""

from __future__ import annotations

import re

from tests.planted_bugs import BUGS, ROOT


def test_the_place_of_every_planted_bug_stands_once() -> None:
    places = {bug.name: (ROOT / bug.file).read_text().count(bug.right) for bug in BUGS}
    assert {name: count for name, count in places.items() if count != 1} == {}


def test_every_planted_bug_names_a_test_file_and_a_name_of_its_own() -> None:
    assert [bug.test for bug in BUGS if not has_test(bug.test)] == []
    assert len({bug.name for bug in BUGS}) == len(BUGS)


def has_test(name: str) -> bool:
    """Whether a test of this name, such as ``file.py::Class::test[1-2]``, is there."""
    path, *parts = name.partition("[")[0].split("::")
    if not (ROOT / path).is_file():
        return (ROOT / path).is_dir() and not parts
    text = (ROOT / path).read_text()
    return all(re.search(rf"^ *(def|class) {part}\b", text, re.M) for part in parts)
