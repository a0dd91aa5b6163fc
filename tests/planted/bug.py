"""What a planted bug is, and the tests that many of them name."""

from __future__ import annotations

from typing import NamedTuple

WITNESS = "tests/faults/test_witness.py"
SEEDS = f"{WITNESS}::test_nothing_is_lost_or_doubled_or_hangs_whatever_the_network_does[0]"


class Bug(NamedTuple):
    """One mistake: in ``file``, ``right`` is replaced by ``wrong``; ``test`` must see it."""

    name: str
    file: str
    right: str
    wrong: str
    test: str
