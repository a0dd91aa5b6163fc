"""What the launchers make of a text: a command line, a hosts file, what another program said.

``tests/reference/launch_texts.json`` has for each of :data:`GROUPS` texts and what has to come of
them. A new case is a text there with ``null`` behind it; ``record_launch_texts.py`` beside that
file writes what comes of all of them now, for you to read in the difference.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvstore.launch.agents.cluster import Cluster
from kvstore.launch.agents.join import AgentTicket
from kvstore.launch.backends import mpi, ray, sge, slurm, yarn
from kvstore.launch.backends.hosts import Host, parse_hosts
from kvstore.launch.backends.rsync import sync_refusal
from kvstore.launch.backends.ssh_command import ssh_argv
from kvstore.launch.backends.ssh_errors import refusal
from kvstore.launch.options import LaunchError, LaunchOptions, parse_arguments

RECORDED = Path(__file__).resolve().parents[2] / "reference" / "launch_texts.json"
DIRECTORY = Path("/shared/4f")
HOST = Host("node1", port=2222, user="ann")
GIB = 1 << 30
NODE = {"CPU": 8.0, "memory": 16.0 * GIB, "node:10.0.0.1": 1.0}
GPU_NODE = {**NODE, "CPU": 4.0, "GPU": 4.0}


def refused(act: Callable[[], object]) -> object:
    """What comes of ``act``, or the exit code and the text of its refusal."""
    try:
        return act()
    except LaunchError as error:
        return f"({error.exit_code}) {error}"


def read(text: str, before: str = "") -> tuple[LaunchOptions, dict[str, str]]:
    """Options and variables of a line such as ``NAME=VALUE -n 2``, which needs no command."""
    words, environ = shlex.split(text), {}
    while words and re.match(r"[A-Z_0-9]+=", words[0]):
        name, _, environ[name] = words.pop(0).partition("=")
    return parse_arguments([*shlex.split(before), *words, "train"]), environ


def command_line(text: str) -> object:
    return refused(lambda: parse_arguments(shlex.split(text)).command)


def hosts(text: str) -> object:
    return refused(lambda: [_given(asdict(host)) for host in parse_hosts(text, "hosts")])


def ssh_command(text: str) -> object:
    return refused(lambda: shlex.join(ssh_argv(HOST, shlex.split(text), ["true"])))


def ssh_ended(text: str) -> object:
    """``text`` is the exit code and the lines of standard error."""
    code, *lines = text.split("\n")
    return refusal(HOST, lines, None if code == "None" else int(code), "/py")


def rsync_ended(text: str) -> object:
    code, *lines = text.split("\n")
    return sync_refusal(HOST, "/x", lines, int(code))


def slurm_command(text: str) -> object:
    def act() -> object:
        options, environ = read(text, "-n 4 -s 2 --launcher slurm --python /py")
        slurm.refuse_copies(environ)
        within = slurm.allocation(environ)
        if within is None:
            return _submitted(slurm.SlurmJob(options, environ))
        return _submitted(slurm.SlurmStep(options, environ, within))

    return refused(act)


def srun_ended(text: str) -> object:
    return _ended(slurm.SlurmJob(*read("-n 1")), text)


def squeue(text: str) -> object:
    return slurm.described(text, str(DIRECTORY))


def sge_command(text: str) -> object:
    def act() -> object:
        return _submitted(sge.ArrayJob(*read(text, "-n 2 -s 1 --launcher sge --python /py")))

    return refused(act)


def qsub_said(text: str) -> object:
    """The end of the job that a line of qsub's tells of, or how the job is taken out."""
    job = sge.ArrayJob(*read("-n 1 -s 1"))
    return job.cancel(text) or job.fatal(text)


def qsub_ended(text: str) -> object:
    return _ended(sge.ArrayJob(*read("-n 1 --launcher sge --worker-gpus 2")), text)


def qstat(text: str) -> object:
    return sge.states(text, "10")


def yarn_command(text: str) -> object:
    def act() -> object:
        options, environ = read(text, "-n 1 -s 1 --launcher yarn")
        job = yarn.YarnApplication(options, environ)
        jar = yarn.own_jar(options.places.launcher_args) or "/ds.jar"
        argv = yarn.client_argv(options.places, jar, "NAME", len(job.members))
        return {"argv": shlex.join(argv), "cores": job.worker_cores}

    return refused(act)


def yarn_said(text: str) -> object:
    """What people see of the client's lines, what the launcher knows then, and at the end."""
    job = yarn.YarnApplication(*read("-n 1"))
    news = [line for line in text.splitlines() if job.is_news(line)]
    return {"news": news, "state": job.poll(), "ended": job.explain(news, 1)}


def ray_plan(text: str) -> object:
    """What is asked of Ray, and what two nodes of which little is free lack."""

    def act() -> object:
        options, _ = read(text, "-n 2 -s 1 --launcher ray")
        plan = ray.RayPlan.from_text(ray.make_plan(options, "/here", None).to_text())
        nodes = [NODE, GPU_NODE]
        return _given(asdict(plan) | {"members": (), "resources": {}}) | {
            "bundles": plan.bundles(),
            "shortage": ray.shortage(plan, nodes),
            "waiting": ray.why_waiting(plan, nodes, {"CPU": 9.0, "GPU": 1.0}),
        }

    return refused(act)


def mpi_version(text: str) -> object:
    return refused(lambda: mpi.family_of(text).hosts_option)


def mpi_command(text: str) -> object:
    """``text`` is the options, after ``--mpich`` for MPICH, and then the file of hosts."""

    def act() -> object:
        words, _, listed = text.partition("\n")
        family = mpi.MPICH if words.startswith("--mpich") else mpi.OPEN_MPI
        options, environ = read(words.removeprefix("--mpich"), "--launcher mpi --python /py")
        found = mpi.as_mpirun_has_them(parse_hosts(listed, "hosts")) if listed else []
        job = mpi.MpiJob(options, environ, family, found)
        return {
            "argv": shlex.join(job.submit(DIRECTORY)),
            "environment": job.environ,
            "hosts": job.texts(AgentTicket([], 0, "")),
            "members": " ".join(f"{role}-{rank}" for role, rank in job.members),
        }

    return refused(act)


def mpirun_said(text: str) -> object:
    listed = parse_hosts("one\ntwo slots=2\nb", "hosts")
    job = mpi.MpiJob(*read("-n 1 --launcher mpi"), mpi.OPEN_MPI, listed)
    return job.fatal(text) or _ended(job, text)


def _submitted(job: Cluster) -> dict[str, Any]:
    return {
        "argv": shlex.join(job.submit(DIRECTORY)),
        "environment": job.environ,
        "cores": job.worker_cores,
        "gpus": job.worker_gpus,
    }


def _ended(job: Cluster, text: str) -> str:
    """``text`` is what the command said, and ``-9`` at its end that it was killed."""
    code = -9 if text.endswith("-9") else 1
    return job.explain(text.removesuffix("-9").splitlines(), code)


def _given(found: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is empty."""
    return {name: value for name, value in found.items() if value not in (None, "", {}, ())}


GROUPS: dict[str, Callable[[str], object]] = {
    "the launcher's command line": command_line,
    "a hosts file": hosts,
    "ssh: the command for --launcher-args": ssh_command,
    "ssh: an exit code and what was said": ssh_ended,
    "rsync: an exit code and what was said": rsync_ended,
    "slurm: the command for an environment and options": slurm_command,
    "slurm: what srun said before it ended": srun_ended,
    "slurm: rows of squeue": squeue,
    "sge: the command for options": sge_command,
    "sge: a line of qsub": qsub_said,
    "sge: what qsub said before it ended": qsub_ended,
    "sge: rows of qstat -g d": qstat,
    "sge: what qalter -w p prints": sge.obstacles,
    "sge: what qstat -g c prints": sge.slot_total,
    "yarn: the command for options": yarn_command,
    "yarn: the log of the client": yarn_said,
    "yarn: diagnostics": yarn.short,
    "ray: the plan for options": ray_plan,
    "mpi: what mpirun --version prints": mpi_version,
    "mpi: the command for options and hosts": mpi_command,
    "mpi: what mpirun said before it ended": mpirun_said,
}


def recorded() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


def found_now(group: str, text: str) -> Any:
    """What comes of ``text`` now, as JSON would give it back."""
    return json.loads(json.dumps(GROUPS[group](text)))
