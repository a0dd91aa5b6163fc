"""What the launchers say is what is recorded, word for word: see ``launch_texts.py``."""

from __future__ import annotations

import pytest
from launch_texts import GROUPS, found_now, recorded


def test_every_group_has_texts() -> None:
    assert set(recorded()) == set(GROUPS)


@pytest.mark.parametrize("group", GROUPS)
def test_the_words_are_those_that_are_recorded(group: str) -> None:
    texts = recorded()[group]
    assert {text: found_now(group, text) for text in texts} == texts
