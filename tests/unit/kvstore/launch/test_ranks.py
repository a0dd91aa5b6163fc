"""The rank of a process by the variables of what has started it."""

from __future__ import annotations

import pytest

from kvstore.launch.ranks import rank_of_process
from pslite.errors import ConfigError


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, (0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4", "PMI_RANK": "0", "PMI_SIZE": "1"}, (2, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "3"}, (0, 3)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (0, 1)),
    ],
    ids=["alone", "torchrun", "Open MPI", "MPICH", "a batch script"],
)
def test_the_rank_is_that_of_the_nearest_launcher(
    environ: dict[str, str], wanted: tuple[int, int]
) -> None:
    found = rank_of_process(environ)
    assert (found.rank, found.size) == wanted


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("-1", "2"), ("x", "2"), ("0", "0")])
def test_numbers_that_contradict_each_other_are_named(rank: str, size: str) -> None:
    with pytest.raises(ConfigError, match=rf"got '{rank}' and '{size}'"):
        rank_of_process({"RANK": rank, "WORLD_SIZE": size})


def test_ranks_that_cannot_meet_are_told_what_to_set() -> None:
    pytest.importorskip("torch")
    from kvstore.frameworks.torch.rendezvous import meeting_store

    place = rank_of_process({"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "h"})
    with pytest.raises(ConfigError, match=r"rank 7 of 9 does not know .* set MASTER_PORT in all"):
        meeting_store(place, "x")
