"""Scripts as guides to PyTorch have them, which name ``mpi`` or ``gloo``: they run as they stand.

PyTorch replaces the backend by ours when it is imported (KVSTORE_TORCH_REPLACES), so this needs
the entry point of an installation. Real mpiruns: ``tests/launchers/test_mpi.py``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys

import pytest
from job import MARK, Job, MakeJob, Process, clean_environment, free_port, needs_proc
from torch_jobs import start_torchrun
from torch_scripts import ADDED, DDP_MAIN, SEND, SENT, SUM

pytestmark = [
    pytest.mark.process,
    needs_proc,
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch"),
    pytest.mark.skipif(
        "kvstore" not in importlib.metadata.entry_points(group="torch.backends").names,
        reason="needs kvstore installed by pip, for its entry point",
    ),
]

LIMIT_S = 120.0
REPLACED = {
    "KVSTORE_TORCH_REPLACES": "gloo,mpi",
    "OMP_NUM_THREADS": "1",
    "PS_ROSTER_INTERVAL": "60",  # the machine may be busy
}


def start_as_mpiexec_does(job: Job, name: str, command: str) -> Process:
    """Run ``command`` in a shell for each of 3 ranks, in a shell in the place of mpiexec."""
    (job.directory / "send.py").write_text(SEND)
    (job.directory / "sum.py").write_text(SUM)
    size = "OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_SIZE=3"
    rank = f"(export OMPI_COMM_WORLD_RANK=$rank {size}; exec sh -c '{command}')"
    environment = {**clean_environment(), **REPLACED, MARK: job.mark, "TMPDIR": str(job.directory)}
    loop = f"for rank in 0 1 2; do {rank} & done; wait"
    return job._start(name, ["sh", "-c", loop], environment)


@pytest.mark.slow(reason="the ranks import PyTorch; test_torch_mpi.py has what mpiexec tells")
def test_scripts_for_mpi_meet_by_what_mpiexec_tells_each_rank(make_job: MakeJob) -> None:
    """One process for each rank runs both: the second group meets anew."""
    job = make_job(3)
    (job.directory / "both.py").write_text(
        """
import runpy, torch.distributed as dist
runpy.run_path("send.py", run_name="__main__")
dist.destroy_process_group()
runpy.run_path("sum.py", run_name="__main__")
"""
    )
    ranks = start_as_mpiexec_does(job, "ranks", f"{sys.executable} both.py")
    assert ranks.wait(LIMIT_S) == 0, ranks.text
    assert sorted(ranks.lines) == sorted(SENT + ADDED)
    assert not list(job.directory.glob("kvmpi-*/*"))


@pytest.mark.slow(
    reason="12 processes import PyTorch; how jobs stay apart, test_torch_mpi.py tries"
)
def test_jobs_at_a_time_and_scripts_in_a_row_do_not_meet(make_job: MakeJob) -> None:
    job = make_job(3)
    in_a_row = f"{sys.executable} send.py; {sys.executable} sum.py"
    jobs = [start_as_mpiexec_does(job, name, in_a_row) for name in ("one", "other")]
    for ranks in jobs:
        assert ranks.wait(LIMIT_S) == 0, ranks.text
        assert sorted(ranks.lines) == sorted(SENT + ADDED)
    assert not list(job.directory.glob("kvmpi-*/*"))


@pytest.mark.slow(reason="the rank comes from RANK here, which test_torch_mpi.py has, too")
@pytest.mark.parametrize(("script", "told"), [(SEND, SENT), (SUM, ADDED)], ids=["send", "sum"])
def test_scripts_for_mpi_run_by_our_launcher(
    make_job: MakeJob, script: str, told: list[str]
) -> None:
    job = make_job(3, 1)
    options = [word for name, value in REPLACED.items() for word in ("--env", f"{name}={value}")]
    launcher = job.launch(script, *options)
    assert launcher.wait(LIMIT_S) == 0, launcher.text
    for rank in range(3):
        assert f"[worker {rank}] {told[rank]}" in launcher.text


def of_ddp(process: Process) -> set[str]:
    """What each rank has said at the end of DDP_MAIN: the same weights."""
    assert process.wait(LIMIT_S) == 0, process.text
    ends = re.findall(r"rank (\d) of 2 on kvstore: weights (\S+), samples (\d+)", process.text)
    assert sorted(rank for rank, _, _ in ends) == ["0", "1"], process.text
    assert {count for _, _, count in ends} == {"48"}
    return {weights for _, weights, _ in ends}


@pytest.mark.slow(reason="each way of starting imports PyTorch in three processes")
def test_ddp_of_a_guide_trains_by_spawn_and_by_torchrun_to_the_same_bits(make_job: MakeJob) -> None:
    job = make_job(2)
    (job.directory / "main.py").write_text(DDP_MAIN.replace("12355", str(free_port())))
    environment = {**clean_environment(), **REPLACED, MARK: job.mark}
    spawned = of_ddp(job._start("spawn", [sys.executable, "main.py"], environment))
    assert spawned == of_ddp(start_torchrun(job, "main.py", **REPLACED))
    assert len(spawned) == 1
