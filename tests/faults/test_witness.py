"""Two thousand clusters under faults, each checked pull by pull (``witness.py``).

A failing seed repeats with ``python -m tests.faults.witness SEED 1``.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults import witness

SEEDS = 2000
BLOCK = 50


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_nothing_is_lost_or_doubled_or_hangs_whatever_the_network_does(first: int) -> None:
    for seed in range(first, first + BLOCK):
        try:
            witness.run(seed)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_a_run_repeats_from_its_seed_alone() -> None:
    first, seen_first = witness.run(77)
    second, seen_second = witness.run(77)

    assert (first.now, first.steps, first.counts()) == (second.now, second.steps, second.counts())
    for entry, pulls in seen_first.seen.items():
        for number, value in pulls.items():
            assert (value == seen_second.seen[entry][number]).all()


def test_every_kind_of_fault_really_happens() -> None:
    total: Counter[str] = Counter()
    for seed in range(30):
        simulation, _ = witness.run(seed)
        total.update({kind: count > 0 for kind, count in simulation.counts().items()})

    assert min(total[kind] for kind in ("dropped", "duplicated", "delayed", "reordered")) >= 10
    assert total["cut"] >= 5


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (1, 3), (2, 1), (3, 2), (8, 3)])
def test_other_sizes_of_clusters_keep_the_same_promises(workers: int, servers: int) -> None:
    for seed in range(6):
        witness.run(seed, workers, servers)
