"""The allocation of Slurm's that a launcher finds itself in, and what it asks srun there.

Pure: the environment of a script of sbatch, or of salloc's shell, in; facts and another
environment out. The variables are those of srun(1), "INPUT ENVIRONMENT VARIABLES", and sbatch(1),
"OUTPUT ENVIRONMENT VARIABLES". Used by ``slurm.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.launch.options import LaunchError, LaunchOptions

# Options of srun that sbatch hands on. They say how the script's tasks are laid out, and ours
# are others, whose options are all given.
_LAYOUT = (
    "SLURM_CPUS_PER_GPU",
    "SLURM_CPUS_PER_TASK",
    "SLURM_CPU_BIND",
    "SLURM_DISTRIBUTION",
    "SLURM_DIST_PLANESIZE",
    "SLURM_EXACT",
    "SLURM_EXCLUSIVE",
    "SLURM_GPUS",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GPU_BIND",
    "SLURM_HINT",
    "SLURM_MEM_PER_GPU",
    "SLURM_NNODES",
    "SLURM_NPROCS",
    "SLURM_NTASKS",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_NTASKS_PER_SOCKET",
    "SLURM_NTASKS_PER_TRES",
    "SLURM_THREADS_PER_CORE",
    "SLURM_TRES_BIND",
    "SLURM_TRES_PER_TASK",
    "SRUN_CPUS_PER_TASK",
)
# What srun says is for the launcher, which would wait for it in vain.
_REDIRECTION = (
    "SLURM_LABELIO",
    "SLURM_STDERRMODE",
    "SLURM_STDINMODE",
    "SLURM_STDOUTMODE",
)
# srun reads options of a component with this behind their names, the older word included.
_OF_A_COMPONENT = re.compile(r"_(HET|PACK)_GROUP_\d+\Z")
_PARTS = 2  # of a heterogeneous allocation: for servers, for workers


@dataclass(frozen=True)
class Allocation:
    """``nodes`` is how many each component has, None where nothing says it."""

    job_id: str
    nodes: tuple[int | None, ...]
    gpus_per_task: int = 0


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The one around this process, if any. Raises :class:`LaunchError` for one of no use."""
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job_id:
        return None
    gpus = re.search(r"(\d+)\Z", environ.get("SLURM_GPUS_PER_TASK", ""))
    parts = _number(environ.get("SLURM_HET_SIZE")) or 1
    if parts == 1:
        nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES")
        return Allocation(job_id, (_number(nodes),), int(gpus[1]) if gpus else 0)
    if parts != _PARTS:
        raise LaunchError(
            f"the allocation {job_id} has {parts} components: the launcher can use one, or two, "
            "of which the first is for the servers and the second for the workers",
            exit_code=2,
        )
    counts = [environ.get(f"SLURM_JOB_NUM_NODES_HET_GROUP_{group}") for group in range(parts)]
    each = re.search(r"(\d+)\Z", environ.get("SLURM_GPUS_PER_TASK_HET_GROUP_1", ""))
    return Allocation(job_id, tuple(map(_number, counts)), int(each[1]) if each else 0)


def refuse_copies(environ: Mapping[str, str]) -> None:
    """Raise :class:`LaunchError` where srun has started this launcher more than once."""
    copies = _number(environ.get("SLURM_STEP_NUM_TASKS")) or 1
    if "SLURM_STEP_ID" in environ and copies > 1 and "DMLC_ROLE" not in environ:
        raise LaunchError(
            f"this is one of {copies} launchers that srun has started: write the launcher's "
            "command without srun in front, which it calls itself",
            exit_code=2,
        )


def refuse_others_job(launcher_args: Sequence[str]) -> None:
    """Raise :class:`LaunchError` where srun would make a step in a job that is not this one's.

    Agents that lose their launcher give back the allocation that they are in.
    """
    if any(word.split("=")[0] == "--jobid" for word in launcher_args):
        raise LaunchError(
            "--jobid in --launcher-args names an allocation that is there already: start this in "
            "it (SLURM_JOB_ID), by salloc or in a script of sbatch",
            exit_code=2,
        )


def check_meaning(options: LaunchOptions, within: Allocation) -> None:
    """Raise :class:`LaunchError` for what has been decided when the allocation was made."""
    places = options.places
    for option, value in (
        ("--queue", places.queue),
        ("--server-cores", places.server_cores),
        ("--worker-memory", places.worker_memory_mb),
        ("--server-memory", places.server_memory_mb),
    ):
        if value is not None:
            raise LaunchError(
                f"{option} has no meaning in the allocation {within.job_id}, which this runs in: "
                "ask sbatch or salloc for what the job needs",
                exit_code=2,
            )


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """For an srun in an allocation."""
    return {
        name: value
        for name, value in without_redirection(environ).items()
        if _OF_A_COMPONENT.sub("", name) not in _LAYOUT
    }


def without_redirection(environ: Mapping[str, str]) -> dict[str, str]:
    """For any srun."""
    return {name: value for name, value in environ.items() if name not in _REDIRECTION}


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
