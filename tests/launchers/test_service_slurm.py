"""The cluster of the slurm launcher's tests does what it is there for, before it uses it."""

from __future__ import annotations

from services.slurm import Slurm


def test_srun_runs_one_process_on_each_host(slurm: Slurm) -> None:
    said = slurm.run("srun", "--nodes=2", "--ntasks=2", "hostname")

    assert sorted(said.split()) == list(slurm.nodes)


def test_a_heterogeneous_job_gives_gpus_to_one_component_only(slurm: Slurm) -> None:
    script = 'echo "$SLURM_HET_GROUP_ID $SLURM_PROCID ${CUDA_VISIBLE_DEVICES:-none}"'

    said = slurm.run(
        *("srun", "--ntasks=1", "sh", "-c", script, ":"),
        *("--ntasks=2", "--gres=gpu:2", "sh", "-c", script),
    )

    assert sorted(said.splitlines()) == [" 0 none", " 1 0,1", " 2 0,1"]


def test_several_jobs_share_a_host_and_leave_nothing(slurm: Slurm) -> None:
    submitted = [
        slurm.run("sbatch", "--wait", "--output=/dev/null", "--wrap", "true") for _ in range(2)
    ]

    assert all(line.startswith("Submitted batch job") for line in submitted)
    assert slurm.jobs() == []
    assert slurm.processes() == {}
