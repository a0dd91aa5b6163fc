"""Launch by ``slurm``: one ``srun`` starts servers and workers by task number.

Outside of an allocation srun asks for one, with a component for the servers and one for the
workers where they need different things. In a script of sbatch, or under salloc, it makes a step
in that allocation, and the scheduler runs where the script does. The allocation is read from the
variables of srun(1), "INPUT ENVIRONMENT VARIABLES", and sbatch(1), "OUTPUT ENVIRONMENT VARIABLES".
Facts: Slurm 22.05's srun(1), and https://slurm.schedmd.com/heterogeneous_jobs.html. Read next:
``launch/agents/cluster_job.py`` and ``slurm_queue.py``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.launch.agents.cluster import Cluster, Habits, find_program, quoted
from kvstore.launch.agents.cluster_job import agent_command, run_carried, servers_then_workers
from kvstore.launch.agents.wire import GREETING
from kvstore.launch.backends import slurm_queue
from kvstore.launch.job.lifecycle import Timing
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
    """Find the one around this process. Raises :class:`LaunchError` if it cannot be used."""
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
    """As :func:`kvstore.launch.job.run.run_job`."""
    for program in ("srun", "squeue", "scancel"):
        remedy = (
            "start the job where Slurm's commands are, mostly on a login node of the cluster, or "
            "load its module"
        )
        if find_program(program, options, environ, remedy) is None:
            break
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
            return "squeue does not answer"
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
    """Return what each task of ``role`` asks Slurm for."""
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
