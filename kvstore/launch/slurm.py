"""The launcher ``slurm``: one ``srun`` starts the servers and the workers, by their task numbers.

Outside of an allocation srun asks for one, with a component for the servers and one for the
workers where they need different things. In a script of sbatch, or under salloc, it makes a step
in that allocation (``slurm_allocation.py``), and the scheduler runs where the script does. Facts:
Slurm 22.05's srun(1), and https://slurm.schedmd.com/heterogeneous_jobs.html. Read ``carried.py``
and ``slurm_queue.py`` next.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvstore.launch import slurm_queue
from kvstore.launch.agent import GREETING
from kvstore.launch.carried import agent_command, run_carried, servers_then_workers
from kvstore.launch.clusters import Cluster, Habits, quoted
from kvstore.launch.lifecycle import Timing
from kvstore.launch.options import LaunchError, LaunchOptions
from kvstore.launch.slurm_allocation import (
    Allocation,
    allocation,
    check_meaning,
    refuse_copies,
    refuse_others_job,
    step_environment,
    without_redirection,
)

_STEP_S = 300.0  # for a step in an allocation that is there already
_SHOWN_LINES = 20
_LAST_LINES = 5
_FAIL_CODE = "code 3"  # of an agent that says itself why it cannot serve (enlist.py)
_AGENT_ENDED = re.compile(r"srun: error: (\S+): tasks? [\d,-]+: (.*)")
_KNOWN = (
    (
        r"revoked|Force Terminated|already completing or completed",
        "it was cancelled (scancel) before all processes had started",
    ),
    (
        r"Invalid partition name",
        "there is no such partition: sinfo lists those that --queue can name",
    ),
    (
        r"node configuration is not available|More processors requested|CPU count per node",
        "no node of it can give what was asked for (--worker-cores, --worker-memory, "
        "--worker-gpus and the like; sinfo -o '%n %c %m %G' lists what nodes have)",
    ),
    (r"Unable to contact slurm controller", "its controller does not answer: try sinfo"),
    (r"Invalid job id", "the allocation of SLURM_JOB_ID is over: unset SLURM_JOB_ID"),
)


def run(
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    timing: Timing,
) -> int:
    """As :func:`kvstore.launch.jobrun.run_job`."""
    for program in ("srun", "squeue", "scancel"):
        if shutil.which(program, path=environ.get("PATH")) is None:
            raise LaunchError(
                f"there is no program {program!r} here: start the job where Slurm's commands are, "
                "mostly on a login node of the cluster, or load its module",
                exit_code=1,
            )
    refuse_copies(environ)
    within = allocation(environ)
    if within is None:
        return run_carried(options, environ, service_command, timing, own_job(options, environ))
    check_meaning(options, within)
    cluster = step(options, within, environ)
    return run_carried(options, environ, service_command, timing, cluster)


def own_job(options: LaunchOptions, environ: Mapping[str, str]) -> Cluster:
    """A job of Slurm's, which may have to wait in its queue."""
    refuse_others_job(options.places.launcher_args)
    environment = without_redirection(environ)
    queued = _QueuedJob(options, environment)
    return Cluster(
        members=servers_then_workers(options),
        command=queued.command,
        environment=environment,
        rank_names=("SLURM_PROCID",),
        explain=explain,
        fatal=AgentsEnd().fatal,
        state=queued.state,
        # The allocation stays when srun is killed, where slurm.conf has no InactiveLimit.
        cancel=queued.cancel,
        habits=Habits(clears_up=True),
        if_lost=("scancel", "--quiet", "$SLURM_JOB_ID"),
    )


def step(options: LaunchOptions, within: Allocation, environ: Mapping[str, str]) -> Cluster:
    """A step in an allocation, which is the user's and stays."""
    wanted_gpus = options.places.worker_gpus
    return Cluster(
        members=servers_then_workers(options),
        command=lambda directory: step_argv(options, within, directory),
        environment=step_environment(environ),
        rank_names=("SLURM_PROCID",),
        explain=explain,
        fatal=AgentsEnd().fatal,
        connect_s=_STEP_S,
        worker_gpus=within.gpus_per_task if wanted_gpus is None else wanted_gpus,
    )


class _QueuedJob:
    """The job that srun asks for, as the queue has it: by the directory of its agents."""

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        self._options = options
        self._environ = environ
        self._directory = ""

    def command(self, directory: Path) -> list[str]:
        self._directory = str(directory)
        return job_argv(self._options, directory)

    def cancel(self, line: str) -> list[str]:
        script = str(Path(slurm_queue.__file__).resolve())
        return [sys.executable, "-I", "-S", script, self._directory]

    def state(self) -> str:
        try:
            found = slurm_queue.look(self._directory, self._environ)
        except (OSError, subprocess.SubprocessError):
            return "squeue gives no answer"
        return slurm_queue.describe(found)


def job_argv(options: LaunchOptions, directory: Path) -> list[str]:
    """srun's command outside of an allocation; it finds the job by the working directory."""
    queue = [] if options.places.queue is None else [f"--partition={options.places.queue}"]
    where = [f"--chdir={directory}"]
    servers, workers = needs(options, "server"), needs(options, "worker")
    if servers == workers:
        parts = [(options.num_servers + options.num_workers, servers)]
    else:
        parts = [(options.num_servers, servers), (options.num_workers, workers)]
    return _srun(
        options,
        directory,
        [([*queue, *needed], [f"--ntasks={count}", *where]) for count, needed in parts],
    )


def step_argv(options: LaunchOptions, within: Allocation, directory: Path) -> list[str]:
    """srun's command in an allocation, whose processors all processes of a node share.

    In a heterogeneous one the servers are in the first component and the workers in the second.
    """
    counts = [options.num_servers, options.num_workers]
    if len(within.nodes) == 1:
        counts = [sum(counts)]
    parts = []
    for group, (count, nodes) in enumerate(zip(counts, within.nodes, strict=True)):
        chosen = [f"--het-group={group}"] if len(counts) > 1 else []
        spread = [] if nodes is None else [f"--nodes={min(nodes, count)}"]
        needed = [f"--ntasks={count}", "--overlap", "--overcommit"]
        parts.append(([*spread], [*chosen, *needed]))
    return _srun(options, directory, parts)


def needs(options: LaunchOptions, role: str) -> list[str]:
    """What each task of ``role`` asks Slurm for."""
    places = options.places
    is_worker = role == "worker"
    cores = places.worker_cores if is_worker else places.server_cores
    memory_mb = places.worker_memory_mb if is_worker else places.server_memory_mb
    words = [] if cores is None else [f"--cpus-per-task={cores}"]
    if memory_mb is not None:
        words.append(f"--mem-per-cpu={-(-memory_mb // (cores or 1))}M")
    if is_worker and places.worker_gpus:
        words.append(f"--gpus-per-task={places.worker_gpus}")
    return words


def _srun(
    options: LaunchOptions, directory: Path, parts: Sequence[tuple[list[str], list[str]]]
) -> list[str]:
    """The components, each with its options: before the user's own, which win, and after."""
    argv = ["srun"]
    for number, (first, last) in enumerate(parts):
        if number:
            argv.append(":")
        argv += [
            f"--job-name={options.places.jobname or 'kvstore'}",
            # A worker on each node before the second one on any.
            "--distribution=cyclic",
            *first,
            *options.places.launcher_args,
            *last,
            "--mpi=none",
            # An agent's reason is heard by srun.
            "--output=all",
            "--error=all",
            # The launcher ends the job, and knows why.
            "--kill-on-bad-exit=0",
            "--wait=0",
            *agent_command(options, directory),
        ]
    return argv


class AgentsEnd:
    """Hears of agents that end before they have come, from what srun says line by line."""

    def __init__(self) -> None:
        self._said: list[str] = []

    def fatal(self, line: str) -> str | None:
        found = _AGENT_ENDED.match(line)
        if found is None:
            del self._said[_SHOWN_LINES - 1 :]
            self._said.append(line)
            return None
        if found[2].endswith(_FAIL_CODE):
            return None
        return f"{found[1]}: the agent could not start ({found[2]}){_quoted(self._said)}"


def explain(lines: Sequence[str], code: int) -> str:
    """``srun`` has ended before all agents had come."""
    for line in reversed(lines[-_LAST_LINES:]):  # what it said while it waited has passed
        for pattern, meaning in _KNOWN:
            if re.search(pattern, line):
                return f"Slurm does not run the job: {meaning}"
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"srun ended ({how}) before all processes had started{_quoted(lines)}"


def _quoted(lines: Sequence[str]) -> str:
    said = quoted([line for line in lines if GREETING.decode() not in line])
    return f"; it said:{said}" if said else ""
