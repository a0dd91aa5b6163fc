"""Every planted bug can still be planted: its place in the code stands once, its test exists."""

from __future__ import annotations

from tests.planted_bugs import BUGS, ROOT


def test_the_place_of_every_planted_bug_stands_once() -> None:
    places = {bug.name: (ROOT / bug.file).read_text().count(bug.right) for bug in BUGS}
    assert {name: count for name, count in places.items() if count != 1} == {}


def test_every_planted_bug_names_a_test_file_and_a_name_of_its_own() -> None:
    assert [bug.test for bug in BUGS if not (ROOT / bug.test.partition("::")[0]).exists()] == []
    assert len({bug.name for bug in BUGS}) == len(BUGS)
