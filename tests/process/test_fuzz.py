"""A running job under fire: nobody dies, nothing grows, and no bit is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz_sockets import fuzz
from job import needs_proc

pytestmark = [pytest.mark.process, needs_proc]

COUNT = 1500
MOST_KIB = 8 * 1024
"""More than 100,000 things may cost (``python -m tests.fuzz_sockets 100000``): in so short a run
one allocation that happens to come late weighs as much as a leak would, which does so each time."""


HEARD = ("not a valid message of this protocol", "that the roster does not list", "another job")
NOT_HEARD = ("it does not know the job key",)


@pytest.mark.parametrize(
    ("seed", "security", "dropped"),
    [
        (1, "curve", HEARD),
        pytest.param(
            *(2, "plain", NOT_HEARD), marks=pytest.mark.slow(reason="the job with keys runs always")
        ),
    ],
)
def test_a_job_at_which_anything_is_thrown_goes_on_as_if_nothing_had_been(
    tmp_path: Path, seed: int, security: str, dropped: tuple[str, ...]
) -> None:
    outcome = fuzz(tmp_path, COUNT, seed, security)
    assert outcome.thrown == COUNT
    assert outcome.died == []
    assert outcome.ended_well, outcome.output
    grown_kib = outcome.grown_kib
    if max(grown_kib.values()) >= MOST_KIB:
        again = tmp_path / "again"
        again.mkdir()
        grown_kib = fuzz(again, COUNT, seed, security).grown_kib
    assert max(grown_kib.values()) < MOST_KIB, (outcome.grown_kib, grown_kib)
    # It has arrived: what the nodes dropped is most of what was thrown with the key.
    for reason in dropped:
        assert reason in outcome.output
