"""The launcher ``ray``: tasks of a Ray cluster start the servers and the workers.

The program that uses Ray is a child of the launcher (``ray_driver.py``), because Ray has threads
and the launcher must have only one; this file never imports Ray. The launcher passes a
:class:`RayPlan` to that program. It requests all resources of a job at once. So an autoscaler sees
them all, and no job holds half of its resources while it waits for the other half. Read
``launch/agents/cluster.py`` first.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from kvstore.launch.agents.cluster import Cluster, ended, servers_then_workers, without
from kvstore.launch.agents.cluster_job import run_on
from kvstore.launch.agents.join import AgentTicket
from kvstore.launch.environment import checkout_root
from kvstore.launch.options import LaunchError, LaunchOptions

_DRIVER = Path(__file__).with_name("ray_driver.py")
_STRATEGIES = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
_SHOWN_LINES = 20

Resources = Mapping[str, float]
"""Amounts by Ray's names: "CPU", "GPU", "memory" (bytes)."""

# Files in the job's directory: the launcher's plan, the driver's state for users, Ray's output.
PLAN_NAME = "plan.json"
STATE_NAME = "state"
LOG_NAME = "ray.log"

FATAL = "ray: "
"""The start of the driver's last line; the rest says why the driver gives up."""

_SHOWN = {"CPU": "CPUs", "GPU": "GPUs"}
_GIB = 1 << 30


@dataclass(frozen=True)
class RayPlan:
    """The processes to start; ``members`` are roles with ranks, in the agents' order.

    ``resources`` are those of one process of each role. ``directory`` is the launcher's working
    directory, and ``root`` its checkout of this package, or "" if the package is installed. If
    ``python`` and ``address`` are "" and ``max_retries`` is None, Ray chooses them.
    """

    members: Sequence[tuple[str, int]]
    resources: Mapping[str, Resources]
    name: str
    directory: str
    root: str
    strategy: str = "SPREAD"
    python: str = ""
    address: str = ""
    max_retries: int | None = None
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def to_text(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_text(cls, text: str) -> RayPlan:
        return cls(**json.loads(text))

    def bundles(self) -> list[dict[str, float]]:
        """Return the resources of each member, in their order."""
        return [dict(self.resources[role]) for role, _ in self.members]


def resources_of(cores: int, gpus: int, memory_mb: int | None) -> dict[str, float]:
    found: dict[str, float] = {"CPU": cores}
    if gpus:
        found["GPU"] = gpus
    if memory_mb:
        found["memory"] = memory_mb << 20
    return found


def shortage(plan: RayPlan, nodes: Sequence[Resources]) -> str | None:
    """Return a sentence if the ``nodes``, even idle, have no room for all processes."""
    for role in dict.fromkeys(role for role, _ in plan.members):
        wanted = plan.resources[role]
        if any(_fits(wanted, node) for node in nodes):
            continue
        for name, count in wanted.items():
            most = max((node.get(name, 0.0) for node in nodes), default=0.0)
            if most < count:
                return (
                    f"no node of the Ray cluster has {_amount(name, count)}, which a {role} needs "
                    f"(the most on one: {_amount(name, most)})"
                )
        needs = " and ".join(_amount(name, count) for name, count in wanted.items())
        return f"no node of the Ray cluster has {needs} together, which a {role} needs"
    for name, count in _total(plan.bundles()).items():
        total = _total(nodes).get(name, 0.0)
        if total < count:
            return (
                f"the job needs {_amount(name, count)}, and the Ray cluster has "
                f"{_amount(name, total)} (on {len(nodes)} node{'s' if len(nodes) > 1 else ''})"
            )
    return None


def why_waiting(plan: RayPlan, nodes: Sequence[Resources], free: Resources) -> str:
    """Return why the job waits for Ray; ``free`` are the free resources of all nodes."""
    if (reason := shortage(plan, nodes)) is not None:
        return reason
    for name, count in _total(plan.bundles()).items():
        left = free.get(name, 0.0)
        if left < count:
            return (
                f"the job needs {_amount(name, count)}, but only {_amount(name, left)} of the "
                f"Ray cluster's {_amount(name, _total(nodes)[name])} are free"
            )
    return "Ray is placing the processes"


def _total(bundles: Sequence[Resources]) -> dict[str, float]:
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in names}


def _fits(wanted: Resources, node: Resources) -> bool:
    return all(node.get(name, 0.0) >= count for name, count in wanted.items())


def _amount(name: str, count: float) -> str:
    if name == "memory":
        return f"{count / _GIB:.1f} GiB of memory"
    shown = _SHOWN.get(name, name)
    return f"{count:g} {shown.removesuffix('s') if count == 1 else shown}"


def make_plan(options: LaunchOptions, directory: str, root: str | None) -> RayPlan:
    """Return the request to Ray. Raises :class:`LaunchError` (exit code 2)."""
    places = options.places
    given = parse_launcher_args(places.launcher_args)
    server = resources_of(places.server_cores or 1, 0, places.server_memory_mb)
    shipped = {} if given.working_dir is None else {"working_dir": given.working_dir}
    return RayPlan(
        members=servers_then_workers(options),
        resources={
            "server": server,
            "standby": server,
            "worker": resources_of(
                places.worker_cores or 1, places.worker_gpus or 0, places.worker_memory_mb
            ),
        },
        name=places.jobname or "kvstore",
        directory=directory,
        root=root or "",
        strategy=given.strategy,
        python=options.python or "",
        address=given.address,
        max_retries=given.max_retries,
        runtime_env={**given.runtime_env_json, **shipped},
    )


class _RayArgsParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"--launcher-args for ray: {message}")


def parse_launcher_args(words: Sequence[str]) -> argparse.Namespace:
    """Parse options with the names of ``ray job submit`` and of Ray's tasks.

    Raises :class:`LaunchError` (exit code 2).
    """
    parser = _RayArgsParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser.add_argument("--address", default="")
    parser.add_argument("--working-dir")
    parser.add_argument("--runtime-env-json", type=_runtime_env, default={})
    parser.add_argument("--strategy", choices=_STRATEGIES, default=_STRATEGIES[0])
    parser.add_argument("--max-retries", type=int)
    return parser.parse_args(list(words))


def _runtime_env(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise LaunchError(f"--runtime-env-json is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise LaunchError("--runtime-env-json must be a JSON object: {...}")
    return found


class RayJob(Cluster):
    """The driver's request, and its output in the job's directory."""

    program = "ray"
    replaces = True

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        self.plan = make_plan(options, os.getcwd(), checkout_root())
        super().__init__(options, {"RAY_USAGE_STATS_ENABLED": "0", **environ})
        # A worker gets threads for the cores that Ray gives it, not for all cores of its node.
        self.worker_cores = int(self.plan.resources["worker"]["CPU"])
        self._directory: Path | None = None

    def submit(self, directory: Path) -> list[str]:
        self._directory = directory
        return [sys.executable, str(_DRIVER), str(directory)]

    def texts(self, ticket: AgentTicket) -> dict[str, str]:
        return {PLAN_NAME: self.plan.to_text()}

    def poll(self) -> str:
        return self._read(STATE_NAME).strip()

    def fatal(self, line: str) -> str | None:
        return line.removeprefix(FATAL) if line.startswith(FATAL) else None

    def explain(self, lines: Sequence[str], code: int) -> str:
        """Return why the driver ended before all agents connected, if it did not say so."""
        if code > 0 and lines:  # Python could not run the driver
            return lines[-1]
        said = [line for line in self._read(LOG_NAME).splitlines() if line.strip()]
        return ended("the program that speaks with Ray", said[-_SHOWN_LINES:], code)

    def _read(self, name: str) -> str:
        try:
            return (
                ""
                if self._directory is None
                else (self._directory / name).read_text(errors="replace")
            )
        except OSError:
            return ""


def cluster_of(options: LaunchOptions, environ: Mapping[str, str]) -> RayJob:
    """Return the cluster of the installed Ray. Raises :class:`LaunchError`."""
    if importlib.util.find_spec("ray") is None:
        sentence = f"Ray is not installed in {sys.executable}: pip install 'ray>=2.9'"
        without(sentence, options, exit_code=2)
    return RayJob(options, environ)


run = partial(run_on, cluster_of)
