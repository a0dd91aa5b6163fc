"""Half of a product of parameters runs always, and the other half is slow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

SLOW = pytest.mark.slow(reason="each two of these parameters run together always")


def halved(*parameters: Sequence[Any]) -> list[Any]:
    """All combinations, every other one marked slow.

    Those left have an even sum of positions. So where each parameter has two values or more, and
    there are three parameters or more, each two values of different parameters are left together.
    """
    if len(parameters) < 3 or min(map(len, parameters)) < 2:
        raise ValueError(f"expected three parameters of two values or more, got {parameters}")
    found = []
    for chosen in itertools.product(*map(enumerate, parameters)):
        is_left = sum(position for position, _ in chosen) % 2 == 0
        values = [value for _, value in chosen]
        found.append(pytest.param(*values, marks=() if is_left else SLOW))
    return found
