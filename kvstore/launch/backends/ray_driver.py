"""The driver on Ray, and the agent that each of its tasks starts.

``python ray_driver.py DIRECTORY`` requests the room for all servers and workers together (a
placement group), and starts one task in each bundle. A task starts an agent, which connects to the
launcher's listener (:func:`main`), and waits for its end; Ray restarts the task according to its
policy. ``DIRECTORY`` contains the plan (``ray.py``) and the ticket; the driver writes to its file
:data:`STATE_NAME` why the job waits. The driver ends with the agents, or prints one sentence on
standard output. It is a child of the launcher, and the only program that imports Ray.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import Any, TextIO

if __name__ == "__main__" and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
    # When this file runs by its path, its directory comes first, and its modules could hide others.
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from kvstore.launch.agents.agent import LOADER, agent_program
from kvstore.launch.agents.join import TICKET_NAME, AgentTicket, NotEnlisted, enlist, fail
from kvstore.launch.agents.wire import GREETING
from kvstore.launch.backends.ray import (
    FATAL,
    LOG_NAME,
    PLAN_NAME,
    STATE_NAME,
    RayPlan,
    shortage,
    why_waiting,
)
from kvstore.launch.job.child import die_with_parent

AGENT_WORD = "kvstore-agent"
_ANSWER_S = 5.0
_TURN_S = 1.0  # a call of Ray delays a signal by at most this time
_LOOK_TURNS = 5  # turns between two looks at the cluster
_REMEDY = (
    "ship it (ray job submit --working-dir ., or --launcher-args='--working-dir .'), or have it "
    "in the image of the nodes"
)


class CannotRun(Exception):
    """There will be no agents; the text says why, for the user."""


def drive(directory: Path) -> int:
    """Start the agents of the job in ``directory``; return the exit code at the end."""
    plan = RayPlan.from_text((directory / PLAN_NAME).read_text(encoding="utf-8"))
    # Ray writes much to both outputs; the launcher reads it if this program ends without a
    # sentence.
    own_fd = os.dup(1)
    log_fd = os.open(directory / LOG_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    with os.fdopen(own_fd, "w", encoding="utf-8", buffering=1) as own:
        try:
            Driver(plan, directory, own).run()
        except CannotRun as error:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Ray's shutdown may take a while
            print(FATAL + " ".join(str(error).split()), file=own)
            return 1
    return 0


class Driver:
    """One run on Ray. Its methods raise :class:`CannotRun`.

    The launcher reads the lines that are written to ``own``.
    """

    def __init__(self, plan: RayPlan, directory: Path, own: TextIO) -> None:
        self._plan = plan
        self._directory = directory
        self._own = own
        self._is_own = False  # whether this program started the cluster and ends it
        self._names: dict[Any, str] = {}  # the members' names, by their tasks
        self._group: Any = None

    def run(self) -> None:
        self._connect()
        try:
            self._place()
            self._start()
            self._wait_for_all()
        except CannotRun:
            raise
        except Exception as error:
            raise CannotRun(f"Ray failed: {error}") from error

    def _connect(self) -> None:
        """Connect to the existing cluster, or start one on this machine."""
        named = self._plan.address or os.environ.get("RAY_ADDRESS")
        address = named or _started_here()
        self._is_own = address in (None, "local")
        # If Ray finds the cluster by itself, it finds the cluster's token too.
        how: dict[str, Any] = {"address": named} if named else {}
        if self._is_own:
            # As with --launcher local, processes share the cores if there are too few.
            wanted = sum(bundle["CPU"] for bundle in self._plan.bundles())
            cores = max(os.cpu_count() or 1, int(wanted))
            how = {"address": "local", "num_cpus": cores, "include_dashboard": False}
            if "RAY_AUTH_MODE" not in os.environ:  # Ray would leave a token in ~/.ray for ever
                os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        else:
            _look_for(str(address))
        if self._plan.runtime_env:
            how["runtime_env"] = dict(self._plan.runtime_env)
        where = "Ray on this machine" if self._is_own else f"Ray at {address}"
        self._say(f"starting {where}" if self._is_own else f"connecting to {where}")
        try:
            import ray

            ray.init(**how, log_to_driver=False, logging_level="ERROR")
        except Exception as error:
            raise CannotRun(
                f"{where} cannot be used: {error}; check the address (--address or RAY_ADDRESS) "
                "and the installed version of ray"
            ) from error

    def _place(self) -> None:
        """Wait until Ray has room for all processes."""
        from ray.util.placement_group import placement_group

        plan = self._plan
        self._group = placement_group(plan.bundles(), strategy=plan.strategy, name=plan.name)
        turns = 0
        while not self._group.wait(_TURN_S):
            if turns % _LOOK_TURNS == 0:
                self._look()
            turns += 1
        self._say("Ray has room for all and is starting them")

    def _look(self) -> None:
        """Write why there is no room; raise if there can never be room."""
        import ray

        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if self._is_own and (never := shortage(self._plan, nodes)) is not None:
            raise CannotRun(
                f"{never}; this cluster is only this machine: set RAY_ADDRESS to another one"
            )
        self._say(why_waiting(self._plan, nodes, ray.available_resources()))

    def _start(self) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        plan = self._plan
        ticket = (self._directory / TICKET_NAME).read_text(encoding="utf-8")
        there, shipped = (
            agent_program(where, plan.root or None, "backends.ray_driver", remedy=_REMEDY)
            for where in (plan.directory, ".")
        )
        programs = (shipped if "working_dir" in plan.runtime_env else there, shipped)
        policy = {} if plan.max_retries is None else {"max_retries": plan.max_retries}
        task: Any = ray.remote(nurse)
        for rank, (role, number) in enumerate(plan.members):
            needs = plan.resources[role]
            options = {
                "name": f"{plan.name}: {role} {number}",
                "num_cpus": needs["CPU"],
                "num_gpus": needs.get("GPU", 0),
                "memory": needs.get("memory"),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, rank),
                "retry_exceptions": True,
                **policy,
            }
            words = [plan.python, "-c", LOADER, AGENT_WORD, f"{role} {number}"]
            started = task.options(**options).remote(words, programs, plan.directory, rank, ticket)
            self._names[started] = f"{role} {number}"

    def _wait_for_all(self) -> None:
        import ray
        from ray.util.placement_group import placement_group_table

        running, turns = list(self._names), 0
        while running:
            ended, running = ray.wait(running, timeout=_TURN_S)
            for task in ended:
                self._conclude(task)
            turns += 1
            if turns % _LOOK_TURNS == 0 and running:
                # Ray places the bundle of a lost node again, and restarts its task.
                if placement_group_table(self._group)["state"] == "CREATED":
                    self._say("Ray is starting them")
                else:
                    self._look()

    def _conclude(self, task: Any) -> None:
        """Handle the end of an agent that Ray does not restart."""
        import ray

        name = self._names[task]
        try:
            host, code, said = ray.get(task)
        except Exception as error:
            raise CannotRun(
                f"Ray could not run {name}: {getattr(error, 'cause', error)}"
            ) from error
        if GREETING.decode() in said:  # the reason why there is no agent, which the launcher reads
            print(said, file=self._own)
        elif code:
            last = (said.strip() or "(none)").splitlines()[-1]
            raise CannotRun(
                f"the agent of {name} on {host} ended with exit code {code}; its last line of "
                f"output: {last}; check --python and the packages on that host"
            )

    def _say(self, state: str) -> None:
        new = self._directory / f"{STATE_NAME}.new"
        new.write_text(state, encoding="utf-8")
        os.replace(new, self._directory / STATE_NAME)


def nurse(
    words: list[str], programs: tuple[str, str], directory: str, rank: int, ticket: str
) -> tuple[str, int, str]:
    """Start an agent, wait for its end, and return its host, exit code and output.

    A Ray task runs this function. Ray copies it to other machines without this file, so it uses no
    name of this file or package. ``programs`` are two agent programs: for ``directory``, and for
    the directory that Ray has shipped. Raises RuntimeError if the agent was killed, so that Ray
    starts another.
    """
    import json
    import os
    import socket
    import subprocess
    import sys

    import ray

    host = socket.gethostname()
    if not ray.get_gpu_ids():  # Ray versions differ in whether they hide GPUs
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    is_shipped = bool(ray.get_runtime_context().runtime_env.get("working_dir"))
    program = programs[1] if is_shipped and not os.path.isdir(directory) else programs[0]
    try:
        agent = subprocess.Popen(
            [words[0] or sys.executable, *words[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        return host, 127, f"{words[0]}: {error.strerror}"
    lines = f"{json.dumps(program)}\n{json.dumps([os.getpid(), rank, ticket])}\n"
    said, _ = agent.communicate(lines.encode())
    if agent.returncode < 0:
        raise RuntimeError(f"its agent on {host} was killed by signal {-agent.returncode}")
    return host, agent.returncode, said[-4000:].decode(errors="replace")


def main() -> None:
    """Run an agent; its parameters are one line of JSON on standard input.

    They are the parent's process id, the rank and the ticket.

    Nodes that an autoscaler adds share no directory with the launcher, so the ticket is an argument
    of the task. The agent ends together with the Ray worker that started it.
    """
    try:
        parent, rank, text = json.loads(sys.stdin.buffer.readline())
        ticket = AgentTicket.from_text(text)
    except ValueError as error:
        fail(f"the ticket cannot be read: {error}")
    die_with_parent(parent)
    try:
        enlist(ticket, rank)
    except NotEnlisted as error:
        fail(
            f"{error}; launch the job on a machine that the nodes can reach, such as the head "
            "node: ray job submit -- kvstore-launch --launcher ray ..."
        )


def _started_here() -> str | None:
    """Return the address that ``ray start`` has recorded on this machine, or None.

    This is the file in which Ray itself looks (``get_default_system_temp_dir`` in its
    ``_common/utils.py``).
    """
    directory = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    path = Path(directory, "ray", "ray_current_cluster")
    try:
        if path.stat().st_uid not in (0, os.geteuid()):
            return None  # another user's Ray would get the job's key
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _look_for(address: str) -> None:
    """Check that the cluster's address answers; Ray's own error is late and vague."""
    if "://" in address:
        raise CannotRun(
            f"RAY_ADDRESS={address} is not the address of a cluster's head (HOST:PORT): run the "
            "launcher on a node of the cluster, as in ray job submit -- kvstore-launch "
            "--launcher ray ..."
        )
    host, _, port = address.rpartition(":")
    if address == "auto" or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except OSError as error:
        raise CannotRun(
            f"there is no Ray at {address} ({error.strerror or error}): set RAY_ADDRESS to "
            "another, or to local to start one on this machine"
        ) from error


if __name__ == "__main__":
    sys.exit(drive(Path(sys.argv[1])))
