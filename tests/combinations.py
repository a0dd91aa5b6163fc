"""Some combinations of a test's parameters run always, and the others are slow."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def covering(*parameters: Sequence[Any], together: int = 2) -> list[Any]:
    """Return all combinations of the parameters, most of them marked slow.

    Any ``together`` values of different parameters occur in one of those that are left: with 2,
    each pair of values, and with 1, each value. The next one left is always the one in which most
    of them are new (Cohen et al., "The AETG System", IEEE Transactions on Software Engineering
    23(7), 1997), and of several the one whose values occur least so far.
    """
    if len(parameters) <= together:
        raise ValueError(
            f"expected more than {together} parameters, found {len(parameters)}: all combinations"
            " are needed; give a smaller number as together="
        )
    chosen = [*itertools.product(*(range(len(values)) for values in parameters))]
    parts = {each: {*itertools.combinations(enumerate(each), together)} for each in chosen}
    missing: set[Any] = set().union(*parts.values())
    uses: collections.Counter[tuple[int, int]] = collections.Counter()
    left = set()

    def gain(each: tuple[int, ...]) -> tuple[int, int]:
        return len(parts[each] & missing), -sum(uses[value] for value in enumerate(each))

    while missing:
        most = max(chosen, key=gain)
        left.add(most)
        missing -= parts[most]
        uses.update(enumerate(most))
    what = "each value" if together == 1 else f"each {together} values"
    slow = pytest.mark.slow(reason=f"{what} of these parameters run always")
    return [
        pytest.param(
            *(values[position] for values, position in zip(parameters, each, strict=True)),
            marks=() if each in left else slow,
        )
        for each in chosen
    ]
