"""The launcher ``slurm``: one ``srun`` starts servers and workers by task number.

Outside of an allocation, srun requests one, with separate components for the servers and the
workers if they need different resources. In a script of sbatch, or under salloc, srun makes a step
in that allocation, and the scheduler runs where the script runs. The allocation is read from the
variables of srun(1), "INPUT ENVIRONMENT VARIABLES", and sbatch(1), "OUTPUT ENVIRONMENT VARIABLES".
Facts: srun(1), squeue(1) and scancel(1) of Slurm 22.05, and
https://slurm.schedmd.com/heterogeneous_jobs.html. Read ``launch/agents/cluster.py`` first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvstore.launch.agents.cluster import Cluster, are_here, ask, it_said
from kvstore.launch.agents.cluster_job import run_on
from kvstore.launch.options import LaunchError, LaunchOptions

# Variables with which sbatch passes on srun's options. They describe the layout of the script's
# tasks; ours have another layout, and give all their options. Those of a component have a suffix.
_LAYOUT = re.compile(
    r"""
    (SRUN_CPUS_PER_TASK | SLURM_(
        CPUS_PER_(GPU|TASK) | CPU_BIND | DISTRIBUTION | DIST_PLANESIZE | EXACT | EXCLUSIVE
        | GPUS(_PER_(NODE|SOCKET|TASK))? | GPU_BIND | HINT | MEM_PER_GPU | NNODES | NPROCS
        | NTASKS(_PER_(CORE|GPU|NODE|SOCKET|TRES))? | THREADS_PER_CORE | TRES_BIND | TRES_PER_TASK
    ))
    (_(HET|PACK)_GROUP_\d+)?\Z
    """,
    re.VERBOSE,
)
# The launcher reads srun's output; with these variables it would wait for it in vain.
_REDIRECTION = ("SLURM_LABELIO", "SLURM_STDERRMODE", "SLURM_STDINMODE", "SLURM_STDOUTMODE")
# Variables with a user's options for squeue and scancel, such as to ask first.
_WISHES = ("SQUEUE_", "SCANCEL_")
_PARTS = 2  # the components of a heterogeneous allocation: servers, workers

_STEP_S = 300.0  # for a step in an existing allocation
_ANSWER_S = 5.0
_SHOWN_LINES = 20
_LAST_LINES = 5
_FAIL_CODE = "code 3"  # of an agent that has reported why it cannot serve (join.py)
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
        "no node of the partition satisfies the request (--worker-cores, --worker-memory, "
        "--worker-gpus, ...); see the nodes' resources with sinfo -o '%n %c %m %G'",
    ),
    (r"Unable to contact slurm controller", "its controller does not answer: try sinfo"),
    (r"Invalid job id", "the allocation of SLURM_JOB_ID is over: unset SLURM_JOB_ID"),
)
# Reasons for which a job would wait for ever (squeue(1), "JOB REASON CODES").
_NEVER = frozenset({"BadConstraints", "PartitionConfig"})

# Cancels the job of the directory "$1" a moment after the launcher's end, so that agents remove the
# key before Slurm ends them. A request that was on its way when srun was killed may become a job a
# little later. Succeeds if Slurm has answered.
_CANCEL = """\
answered=1
for pause_s in 0.5 1 2 4; do
    sleep $pause_s
    listed=$(timeout 5 squeue --noheader --user="$(id -u)" --format='%A %Z') || continue
    answered=0
    jobs=$(echo "$listed" | while read -r job directory; do
        [ "$directory" != "$1" ] || echo "$job"
    done)
    if [ "$jobs" ]; then seen=1; timeout 5 scancel --quiet $jobs; elif [ "$seen" ]; then break; fi
done
exit $answered
"""


@dataclass(frozen=True)
class Allocation:
    """One allocation; ``nodes`` is each component's number of nodes, None if unknown."""

    job_id: str
    nodes: tuple[int | None, ...]
    gpus_per_task: int = 0


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of this process, or None. Raises :class:`LaunchError`."""
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job_id:
        return None
    parts = _number(environ.get("SLURM_HET_SIZE")) or 1
    if parts > _PARTS:
        raise LaunchError(
            f"the allocation {job_id} has {parts} components, but the launcher can use only one, "
            "or two (the first for servers, the second for workers)"
        )
    ends = [""] if parts == 1 else [f"_HET_GROUP_{group}" for group in range(parts)]
    counts = [
        environ.get(f"SLURM_JOB_NUM_NODES{end}") or environ.get(f"SLURM_NNODES{end}")
        for end in ends
    ]
    gpus = re.search(r"\d+\Z", environ.get(f"SLURM_GPUS_PER_TASK{ends[-1]}", ""))
    return Allocation(job_id, tuple(map(_number, counts)), int(gpus[0]) if gpus else 0)


def refuse_copies(environ: Mapping[str, str]) -> None:
    """Raise :class:`LaunchError` if srun has started several copies of this launcher."""
    copies = _number(environ.get("SLURM_STEP_NUM_TASKS")) or 1
    if "SLURM_STEP_ID" in environ and copies > 1 and "DMLC_ROLE" not in environ:
        raise LaunchError(
            f"srun started {copies} launchers; run the launcher without srun, which it calls by "
            "itself"
        )


def _server_count(options: LaunchOptions) -> int:
    """Return the number of servers and standbys, which have the same resources."""
    return options.num_servers * (1 + options.standbys)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


class _Srun(Cluster):
    """The tasks that one srun starts."""

    program = "srun"
    rank_names = ("SLURM_PROCID",)

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        kept = {name: value for name, value in environ.items() if name not in _REDIRECTION}
        super().__init__(options, kept)
        self._said: list[str] = []

    def fatal(self, line: str) -> str | None:
        found = _AGENT_ENDED.match(line)
        if found is None:
            del self._said[_SHOWN_LINES - 1 :]
            self._said.append(line)
            return None
        if found[2].endswith(_FAIL_CODE):
            return None
        return f"{found[1]}: the agent could not start ({found[2]}){it_said(self._said)}"

    def refusal(self, lines: Sequence[str]) -> str | None:
        for line in reversed(lines[-_LAST_LINES:]):  # earlier lines are about the wait
            for pattern, meaning in _KNOWN:
                if re.search(pattern, line):
                    return f"Slurm does not run the job: {meaning}"
        return None

    def srun(self, directory: Path, parts: Sequence[tuple[list[str], list[str]]]) -> list[str]:
        """Return srun's command for ``parts``, the options of each component.

        In each part, the first list comes before the user's own options, which override it; the
        second list comes after them.
        """
        argv = ["srun"]
        for number, (first, last) in enumerate(parts):
            if number:
                argv.append(":")
            argv += [
                f"--job-name={self.places.jobname or 'kvstore'}",
                # One task on each node before a second task on any.
                "--distribution=cyclic",
                *first,
                *self.places.launcher_args,
                *last,
                "--mpi=none",
                # srun prints why an agent cannot serve.
                "--output=all",
                "--error=all",
                # The launcher ends the job, and reports the cause.
                "--kill-on-bad-exit=0",
                "--wait=0",
                *self.agent(directory),
            ]
        return argv


class SlurmJob(_Srun):
    """A job of Slurm that may wait; squeue shows its directory.

    So the job is found and cancelled even if srun was killed before it printed the job's number.
    """

    # Without InactiveLimit in slurm.conf, the allocation stays when srun is killed.
    clears_up = True
    if_lost = ("scancel", "--quiet", "$SLURM_JOB_ID")

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        super().__init__(options, environ)
        self._directory = ""
        # Agents that lose their launcher cancel the allocation in which they run.
        if any(word.split("=")[0] == "--jobid" for word in self.places.launcher_args):
            raise LaunchError(
                "--jobid in --launcher-args is not supported; run the launcher inside the "
                "allocation (SLURM_JOB_ID), with salloc or in an sbatch script"
            )

    def submit(self, directory: Path) -> list[str]:
        self._directory = str(directory)
        queue = [] if self.places.queue is None else [f"--partition={self.places.queue}"]
        counts = {"server": _server_count(self.options), "worker": self.options.num_workers}
        needs = {role: self._needs(role) for role in counts}
        parts = [(counts[role], needs[role]) for role in counts]
        if needs["server"] == needs["worker"]:
            parts = [(sum(counts.values()), needs["worker"])]
        where = f"--chdir={directory}"
        return self.srun(
            directory,
            [([*queue, *needed], [f"--ntasks={count}", where]) for count, needed in parts],
        )

    def _needs(self, role: str) -> list[str]:
        """Return srun's options for the resources of each task of ``role``."""
        places = self.places
        is_worker = role == "worker"
        cores = places.worker_cores if is_worker else places.server_cores
        memory_mb = places.worker_memory_mb if is_worker else places.server_memory_mb
        words = [] if cores is None else [f"--cpus-per-task={cores}"]
        if memory_mb is not None:
            words.append(f"--mem-per-cpu={-(-memory_mb // (cores or 1))}M")
        if is_worker and places.worker_gpus:
            words.append(f"--gpus-per-task={places.worker_gpus}")
        return words

    def poll(self) -> str:
        environ = {
            name: value for name, value in self.environ.items() if not name.startswith(_WISHES)
        }
        words = ["squeue", "--noheader", f"--user={os.getuid()}", "--format=%A|%T|%r|%N|%Z"]
        listed, code = ask(words, environ, _ANSWER_S)
        return "squeue does not answer" if code else described(listed, self._directory)

    def cancel(self, line: str) -> list[str]:
        wishes = [name for name in self.environ if name.startswith(_WISHES)]
        unset = [word for name in wishes for word in ("-u", name)]
        return ["env", *unset, "sh", "-c", _CANCEL, "cancel", self._directory]


def described(listed: str, directory: str) -> str:
    """Return why the jobs of ``directory`` wait, from squeue's rows; "" for no job.

    A heterogeneous job has a row for each component.
    """
    words = []
    for row in (line.split("|", 4) for line in listed.splitlines()):
        if row[4:] != [directory]:
            continue
        job_id, state, reason, nodes = row[:4]
        why = f" ({reason})" if reason not in ("", "None") else ""
        if reason in _NEVER:
            why = f" ({reason}: no node of its partition satisfies the request)"
        where = f" on {nodes}" if nodes else ""
        words.append(f"Slurm's job {job_id} is {state}{why}{where}")
    return ", ".join(words)


class SlurmStep(_Srun):
    """A step in the user's allocation, which the launcher does not end.

    All processes of a node share its cores. In a heterogeneous allocation, the servers run in the
    first component and the workers in the second.
    """

    connect_s = _STEP_S

    def __init__(
        self, options: LaunchOptions, environ: Mapping[str, str], within: Allocation
    ) -> None:
        kept = {name: value for name, value in environ.items() if not _LAYOUT.match(name)}
        super().__init__(options, kept)
        self._nodes = within.nodes
        wanted = self.places.worker_gpus
        self.worker_gpus = within.gpus_per_task if wanted is None else wanted
        # These options were fixed when the allocation was made.
        for option in ("queue", "server_cores", "worker_memory_mb", "server_memory_mb"):
            if getattr(self.places, option) is not None:
                name = option.removesuffix("_mb").replace("_", "-")
                raise LaunchError(
                    f"--{name} cannot be used inside the Slurm allocation {within.job_id}; "
                    "remove it, and pass it to sbatch or salloc"
                )

    def submit(self, directory: Path) -> list[str]:
        counts = [_server_count(self.options), self.options.num_workers]
        if len(self._nodes) == 1:
            counts = [sum(counts)]
        parts = []
        for group, (count, nodes) in enumerate(zip(counts, self._nodes, strict=True)):
            chosen = [f"--het-group={group}"] if len(counts) > 1 else []
            spread = [] if nodes is None else [f"--nodes={min(nodes, count)}"]
            parts.append((spread, [*chosen, f"--ntasks={count}", "--overlap", "--overcommit"]))
        return self.srun(directory, parts)


def cluster_of(options: LaunchOptions, environ: Mapping[str, str]) -> Cluster:
    """Return a step in this allocation, or a new job. Raises :class:`LaunchError`."""
    remedy = (
        "start the job where Slurm's commands are, mostly on a login node of the cluster, or load "
        "its module"
    )
    are_here(("srun", "squeue", "scancel"), options, environ, remedy)
    refuse_copies(environ)
    within = allocation(environ)
    return SlurmJob(options, environ) if within is None else SlurmStep(options, environ, within)


run = partial(run_on, cluster_of)
