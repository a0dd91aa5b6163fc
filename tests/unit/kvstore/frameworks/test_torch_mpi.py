"""Ranks that mpiexec or srun starts: what they are told, and how those of one host meet."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pslite.errors import ConfigError, DeadlineError

pytest.importorskip("torch")

import kvstore_torch_autoload as autoload
from kvstore.frameworks.torch import mpi

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
}
SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "1"}


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize(
    ("environ", "is_one_host"),
    [
        (OPEN_MPI, True),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, False),
        ({"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALNRANKS": "3"}, True),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, False),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "3"}, False),
        (SLURM, True),
        ({**SLURM, "SLURM_STEP_NUM_NODES": "3"}, False),
        ({**SLURM, **OPEN_MPI, "SLURM_PROCID": "0"}, True),
    ],
)
def test_rank_and_size_are_those_of_mpiexec_or_srun(
    environ: dict[str, str], is_one_host: bool
) -> None:
    found = mpi.rank_of(environ)
    assert found is not None
    assert (found.rank, found.size, found.is_one_host) == (1, 3, is_one_host)
    assert found.name in autoload.RANKS_OF_MPI


def test_a_batch_script_is_not_a_rank_of_srun() -> None:
    assert mpi.rank_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None


@pytest.mark.parametrize(("rank", "size"), [("3", "3"), ("-1", "2"), ("one", "2")])
def test_ranks_that_cannot_be_are_refused(rank: str, size: str) -> None:
    with pytest.raises(ConfigError, match="expected PMI_RANK and PMI_SIZE as mpiexec sets them"):
        mpi.rank_of({"PMI_RANK": rank, "PMI_SIZE": size})


@pytest.mark.parametrize("is_mpi", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {"store": object(), "rank": 0, "world_size": 2},
        {"init_method": "tcp://host:1", "rank": 0, "world_size": 2},
    ],
)
def test_a_script_that_says_where_to_meet_is_left_alone(
    given: dict[str, Any], is_mpi: bool
) -> None:
    assert mpi.with_mpi(given, is_mpi, OPEN_MPI) == given


def test_only_mpi_ignores_the_rank_of_the_script() -> None:
    """As PyTorch's own does: guides pass 0 and 0."""
    given = {"rank": 0, "world_size": 0}
    torchrun = {**OPEN_MPI, "RANK": "5", "WORLD_SIZE": "6"}
    assert mpi.with_mpi(given, False, OPEN_MPI) == given
    assert mpi.with_mpi(given, True, torchrun) == {}


def test_without_mpiexec_mpi_says_how_to_start_the_script() -> None:
    with pytest.raises(ConfigError, match="Start it by mpiexec -n N python SCRIPT"):
        mpi.with_mpi({"backend": "kvstore", "rank": 0, "world_size": 0}, True, {})
    assert mpi.with_mpi({"rank": 1, "world_size": 2}, True, {}) == {"rank": 1, "world_size": 2}
    assert mpi.with_mpi({}, False, {}) == {}


def test_ranks_on_several_hosts_need_an_address() -> None:
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(ConfigError, match=r"3 ranks .* on several hosts.*-x MASTER_ADDR=HOST"):
        mpi.with_mpi({}, True, several)
    address = {"MASTER_ADDR": "one", "MASTER_PORT": "29500"}
    assert mpi.with_mpi({}, True, {**several, **address}) == {"rank": 1, "world_size": 3}


def meet(rank: int, size: int, starter: str, limit_s: float = 20.0) -> Any:
    told = mpi.MpiRank(rank, size, True, "PMI_RANK")
    return mpi._meet(told, starter, timedelta(seconds=limit_s))


def all_meet(size: int, starter: str, word: str) -> list[bytes]:
    """What each of ``size`` ranks reads in its store after rank 0 has written ``word``."""
    read: dict[int, bytes] = {}

    def run(rank: int) -> None:
        store = meet(rank, size, starter)
        if rank == 0:
            store.set("word", word)
        read[rank] = store.get("word")

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for rank in reversed(ranks):
        rank.start()
    for rank in ranks:
        rank.join()
    return [read[rank] for rank in range(size)]


def starter() -> str:
    found = mpi._process(os.getpid())
    assert found is not None
    return found


def test_ranks_of_one_host_meet_again_and_again_and_apart_from_other_jobs() -> None:
    """The second time, what the first has left in its store is not found."""
    other = f"{starter()}-other"
    found: dict[str, list[bytes]] = {}
    beside = threading.Thread(target=lambda: found.update(other=all_meet(2, other, "other")))
    beside.start()
    assert all_meet(3, starter(), "first") == [b"first"] * 3
    assert all_meet(3, starter(), "second") == [b"second"] * 3
    beside.join()
    assert found == {"other": [b"other"] * 2}
    directory = mpi._private_directory()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert [path for path in directory.iterdir() if path.name.startswith("job-")] == []


def test_a_note_of_a_rank_0_that_has_ended_is_not_followed() -> None:
    """It is overwritten by the next rank 0; files of jobs that have ended are removed."""
    directory = mpi._private_directory()
    stale = directory / "store-1-1-0123456789abcdef"
    stale.write_text("old")
    (directory / f"job-{starter()}").write_text(stale.name)
    (directory / "job-1-1").write_text(stale.name)
    assert all_meet(2, starter(), "new") == [b"new"] * 2
    assert not stale.exists()
    assert not (directory / "job-1-1").exists()


@pytest.mark.parametrize(("rank", "missing"), [(0, "1, 2"), (1, "0")])
def test_a_wait_for_ranks_names_those_who_are_missing(rank: int, missing: str) -> None:
    with pytest.raises(DeadlineError, match=rf"not yet here: {missing}\. Each rank must call"):
        meet(rank, 3, starter(), limit_s=0.1)
    assert not list(mpi._private_directory().glob("job-*"))


def test_a_directory_that_others_can_open_is_refused() -> None:
    mpi._private_directory().chmod(0o777)
    with pytest.raises(ConfigError, match=r"expected .* that this user alone can open"):
        meet(0, 1, starter())


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    directory = mpi._private_directory()
    directory.rename(tmp_path / "elsewhere")
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="remove it, or set TMPDIR"):
        meet(0, 1, starter())


@pytest.mark.slow(reason="it starts shells and interpreters; tests/launchers has mpiexec itself")
def test_the_process_that_started_all_ranks_is_found_above_wrappers() -> None:
    """Those have the rank in their environment, too."""
    code = "from kvstore.frameworks.torch import mpi; print(mpi._starter('PMI_RANK'))"
    told = subprocess.run(
        ["sh", "-c", f'{sys.executable} -c "{code}"; true'],
        env={**os.environ, "PMI_RANK": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == starter()
