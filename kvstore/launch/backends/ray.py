"""The launcher ``ray``: tasks of a Ray cluster start the servers and the workers.

The program that speaks with Ray is a child of the launcher (``ray_driver.py``), because Ray has
threads and the launcher has none; this file never imports it. All that a job needs is asked for
at once, so that an autoscaler sees it and no half of a job holds what the other half waits for.
Read ``launch/agents/cluster_job.py`` and ``ray_demand.py`` next.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from kvstore.launch.agents.cluster import Cluster, Habits, without
from kvstore.launch.agents.cluster_job import run_carried, servers_then_workers
from kvstore.launch.backends.ray_demand import (
    FATAL,
    LOG_NAME,
    PLAN_NAME,
    STATE_NAME,
    RayPlan,
    resources_of,
)
from kvstore.launch.environment import checkout_root
from kvstore.launch.job.lifecycle import Timing
from kvstore.launch.options import LaunchError, LaunchOptions

_DRIVER = Path(__file__).with_name("ray_driver.py")
_STRATEGIES = ("SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK")
_SHOWN_LINES = 20


def run(
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    timing: Timing,
) -> int:
    """As :func:`kvstore.launch.job.run.run_job`."""
    if importlib.util.find_spec("ray") is None:
        sentence = f"Ray is not installed in {sys.executable}: pip install 'ray>=2.9'"
        without(sentence, options, exit_code=2)
    plan = make_plan(options, os.getcwd(), checkout_root())
    # Threads for the processors that Ray gives a worker, and not for all of its node.
    cores = int(plan.resources["worker"]["CPU"])
    options = replace(options, places=replace(options.places, worker_cores=cores))
    directory = _JobDirectory()
    cluster = Cluster(
        members=plan.members,
        command=directory.command,
        environment={"RAY_USAGE_STATS_ENABLED": "0", **environ},
        rank_names=(),
        explain=directory.explain,
        fatal=why_no_job,
        files={PLAN_NAME: plan.to_text()},
        state=directory.state,
        habits=Habits(name="ray"),
        replaces=True,
    )
    return run_carried(options, environ, service_command, timing, cluster)


def make_plan(options: LaunchOptions, directory: str, root: str | None) -> RayPlan:
    """Return what Ray is asked for. Raises :class:`LaunchError` (exit code 2)."""
    places = options.places
    given = parse_launcher_args(places.launcher_args)
    return RayPlan(
        members=servers_then_workers(options),
        resources={
            "server": resources_of(places.server_cores or 1, 0, places.server_memory_mb),
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
        runtime_env=_runtime_env(given),
    )


class _RayArgsParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"--launcher-args for ray: {message}", exit_code=2)


def parse_launcher_args(words: Sequence[str]) -> argparse.Namespace:
    """Options under the names that ``ray job submit`` has for them, and a task's own.

    Raises :class:`LaunchError` (exit code 2).
    """
    parser = _RayArgsParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    parser.add_argument("--address", default="")
    parser.add_argument("--working-dir")
    parser.add_argument("--runtime-env-json", default="{}")
    parser.add_argument("--strategy", choices=_STRATEGIES, default=_STRATEGIES[0])
    parser.add_argument("--max-retries", type=int)
    return parser.parse_args(list(words))


def _runtime_env(given: argparse.Namespace) -> dict[str, Any]:
    try:
        found = json.loads(given.runtime_env_json)
    except ValueError as error:
        raise LaunchError(f"--runtime-env-json is not JSON: {error}", exit_code=2) from error
    if not isinstance(found, dict):
        raise LaunchError("--runtime-env-json has to be an object: {...}", exit_code=2)
    if given.working_dir is not None:
        found["working_dir"] = given.working_dir
    return found


def why_no_job(line: str) -> str | None:
    """Return what a line of the driver says, if that is why there will be no agents."""
    return line.removeprefix(FATAL) if line.startswith(FATAL) else None


class _JobDirectory:
    """What the driver leaves in the job's directory, once that has been made."""

    def __init__(self) -> None:
        self._path: Path | None = None

    def command(self, directory: Path) -> list[str]:
        self._path = directory
        return [sys.executable, str(_DRIVER), str(directory)]

    def state(self) -> str:
        """Return what the driver waits for."""
        return self._read(STATE_NAME).strip()

    def explain(self, lines: Sequence[str], code: int) -> str:
        """The driver has ended before all agents had come, and has not said why."""
        if code > 0 and lines:  # Python could not even run it
            return lines[-1]
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        said = [line for line in self._read(LOG_NAME).splitlines() if line.strip()]
        shown = "".join(f"\n  {line.rstrip()}" for line in said[-_SHOWN_LINES:])
        return f"the program that speaks with Ray ended ({how}) before all processes had " + (
            f"started; it said:{shown}" if shown else "started"
        )

    def _read(self, name: str) -> str:
        try:
            return "" if self._path is None else (self._path / name).read_text(errors="replace")
        except OSError:
            return ""
