"""The launcher's agent on another machine: it starts processes there.

The program of :func:`agent_program` runs it. First it sends the launcher one line of JSON; after
that both sides exchange frames (``wire.py``) over standard input and output. When the link to the
launcher closes, or is silent for a minute, the agent kills everything that it started. If the agent
itself is killed, ``launch/job/guardian.py`` does the same. Runs on its process's main thread. The
other end is ``remote.py``.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvstore.launch.agents.wire import (
    CREDIT,
    CREDIT_BYTES,
    FINISH,
    GREETING,
    SIGNAL,
    START,
    AgentLink,
    LinkLost,
)
from kvstore.launch.environment import (
    available_cores,
    checkout_root,
    gpu_count,
    network_id,
    visible_gpus,
)
from kvstore.launch.job.guardian import AGENT_ID_NAME, GuardianProcess
from kvstore.launch.job.places import CannotStart, Event, Finished, LocalPlace, Note, Output
from kvstore.launch.job.registry import new_key_file, write_key
from kvstore.launch.job.signals import ENDING, SignalPipe
from kvstore.launch.options import LaunchError
from kvstore.launch.plan import ProcessSpec, base_environment
from pslite.node.address import machine_id
from pslite.version import __version__

_GOODBYE_S = 5.0

# The Python command on the other machine: it reads the rest of the program, one line of JSON, from
# standard input, unbuffered, so that what follows is left for the agent.
LOADER = 'import json;exec(json.loads(open(0,"rb",0,closefd=False).readline()))'

# Standard library only: if the agent cannot run here, its greeting says why.
_PROGRAM = """
import json, os, socket, sys
def fail(text):
    found = {{"error": text, "host": socket.gethostname()}}
    os.write(1, {greeting!r} + json.dumps(found).encode() + b"\\n")
    if {join_answer!r}:
        path = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), {join_answer!r})
        os.execv(sys.executable, [sys.executable, path, text])
    sys.exit(3)
if sys.version_info < (3, 10):
    fail("Python " + sys.version.split()[0] + " is too old: 3.10 or later is needed (--python)")
directory, root = {directory!r}, {root!r}
try:
    os.chdir(os.path.expanduser(directory))
except OSError as error:
    fail("there is no directory " + directory + " (" + error.strerror + "): " + {remedy!r})
for path in (root, os.getcwd()):
    if path and os.path.isdir(os.path.join(path, "kvstore", "launch")):
        sys.path.insert(0, path)
        break
try:
    from kvstore.launch.{module} import main
    from pslite.version import __version__ as version
except ImportError as error:
    fail("kvstore cannot be imported by " + sys.executable + " (" + str(error) + "): install this "
        "package there, or name another Python with --python")
if version != {version!r}:
    fail("kvstore " + version + " is installed, and here it is " + {version!r} + ": install the "
        "same version on all hosts, or name another Python with --python")
main({script})
"""


def agent_program(
    directory: str,
    root: str | None,
    module: str = "agents.agent",
    join_answer: str = "",
    remedy: str = "--sync-dst-dir copies this one there",
    script: str = "",
) -> str:
    """Return the Python program that runs ``main`` of ``module`` as an agent.

    ``directory`` is the working directory of the processes. ``root`` is the checkout that contains
    this package, or None if the package is installed; the other machine uses it if it exists there
    as well. ``join_answer`` is for machines where no process reads what this program prints: it
    names a program in the same directory that sends the launcher the reason why there is no agent.
    ``remedy`` tells users what to do if ``directory`` does not exist. The agent reports whether the
    file ``script`` exists in the directory.
    """
    return _PROGRAM.format(
        greeting=GREETING,
        directory=directory,
        root=root or "",
        version=__version__,
        module=module,
        remedy=remedy,
        join_answer=join_answer,
        script=repr(script) if script else "",
    )


def bootstrap(directory: str, root: str | None, script: str = "") -> bytes:
    """Return the line that :data:`LOADER` reads; see :func:`agent_program`."""
    return json.dumps(agent_program(directory, root, script=script)).encode() + b"\n"


def main(script: str = "") -> None:
    """Serve the launcher over standard input and output until the job ends.

    ``script`` is a file whose existence the agent reports; "" means none.
    """
    read_fd, write_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)  # no process here may read the launcher's frames, or write between ours
    os.dup2(2, 1)
    os.close(null)
    # "client's address, its port, server's address, its port" (sshd(8), ENVIRONMENT)
    reached_from = os.environ.get("SSH_CONNECTION", "").split(" ")[0]
    greeting = {**machine(script), "reached_from": reached_from}
    os.write(write_fd, GREETING + json.dumps(greeting).encode() + b"\n")
    with SignalPipe() as signals:
        Agent(AgentLink(read_fd, write_fd, time.monotonic()), signals).serve()


def machine(script: str = "") -> dict[str, Any]:
    """Describe this machine for the launcher, and whether ``script`` is missing on it."""
    return {
        "version": __version__,
        "host": socket.gethostname(),
        "machine": machine_id(),
        "network": network_id(),
        "pid": os.getpid(),
        "python": sys.version.split()[0],
        "directory": os.getcwd(),
        "cores": available_cores(),
        "gpus": gpu_count(),
        "gpu_names": visible_gpus(os.environ),
        "shared_mb": shutil.disk_usage("/dev/shm").free >> 20 if os.path.isdir("/dev/shm") else 0,
        "has_free_port": _has_free_port(),
        "missing_script": script if script and not os.path.exists(script) else "",
        "time_s": time.time(),
    }


def _has_free_port() -> bool:
    try:
        with socket.create_server(("", 0)):
            return True
    except OSError:
        return False


def with_environment_of_python(variables: Mapping[str, str]) -> dict[str, str]:
    """Return ``variables`` as if this Python's virtual environment were activated.

    A login without a terminal has not activated it, and ``python`` would be another one.
    """
    if sys.prefix == sys.base_prefix:
        return dict(variables)
    programs = os.path.join(sys.prefix, "bin")
    path = [programs, variables.get("PATH", os.defpath)]
    return {**variables, "VIRTUAL_ENV": sys.prefix, "PATH": os.pathsep.join(path)}


def _as_here(spec: ProcessSpec, variables: Mapping[str, str]) -> ProcessSpec:
    """Return the process with this machine's Python and the path to this package."""
    argv, environment = spec.argv, dict(spec.environment)
    is_worker = spec.role == "worker"
    if not is_worker:
        argv = (sys.executable, str(Path(__file__).parents[1] / "service.py"))
    root = checkout_root()
    if root is not None:
        given = environment.get("PYTHONPATH", variables.get("PYTHONPATH", ""))
        paths = [given, root] if is_worker else [root, given]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return replace(spec, argv=argv, environment=environment)


class Agent:
    """Serves the launcher at the other end of ``link``, and owns the link.

    ``key`` is the job's key, if the agent knows it before the launcher sends START.
    """

    def __init__(self, link: AgentLink, signals: SignalPipe, key: str = "") -> None:
        self._link = link
        self._key = key
        self._signals = signals
        self._place: LocalPlace | None = None
        self._variables: dict[str, str] = {}
        self._cleanup = ExitStack()
        self._credit = CREDIT_BYTES
        self._is_over = False

    def serve(self) -> bool:
        """Serve until the launcher or a signal ends it; return whether the link was lost."""
        try:
            while not self._is_over:
                self._turn()
            self._link.say_goodbye(_GOODBYE_S)
            return False
        except LinkLost:
            return True
        finally:
            self._cleanup.close()
            self._link.close()

    def _turn(self) -> None:
        patience_s = self._link.tick(time.monotonic())
        with selectors.PollSelector() as selector:
            selector.register(self._signals.fd, selectors.EVENT_READ)
            self._link.adjust(selector, self._read)
            if self._place is not None:
                self._place.adjust(selector, paused=self._credit <= 0)
            ready = selector.select(patience_s)
        arrived = self._signals.arrived()
        for number in set(arrived) & set(ENDING):
            self._link.tell(Note(f"the agent got {number.name}: it ends what runs there"))
            self._is_over = True
            return
        if signal.SIGCHLD in arrived and self._place is not None:
            self._tell(self._place.sweep())
        for key, _ in ready:
            if key.data is not None and not self._is_over:  # after the end, the others are closed
                self._tell(key.data(time.monotonic()))

    def _read(self, now_s: float) -> list[Event]:
        for kind, content in self._link.receive(now_s):
            if kind == START:
                try:
                    self._start(content)
                except (OSError, LaunchError) as error:  # no process for the guardian, no room
                    for index, *_ in content["processes"][:1]:
                        self._link.tell(CannotStart(index, 0, str(error)))
            elif kind == CREDIT:
                self._credit += content
            elif kind == SIGNAL and self._place is not None:
                self._place.send_signal(content)
            elif kind == FINISH:
                self._tell([Finished(0)] if self._place is None else self._place.finish(content))
                self._is_over = True
        return []

    def _start(self, found: Mapping[str, Any]) -> None:
        """Start the processes of a START message; ``wire.py`` describes it.

        After the first one, the others start single processes again.
        """
        is_first = self._place is None
        place = self._place or self._prepare(found)
        mine = [
            (index, _as_here(ProcessSpec(role, rank, tuple(argv), environment), self._variables))
            for index, role, rank, argv, environment in found["processes"]
        ]
        if is_first:
            self._tell(place.start(mine, self._variables))
        else:
            for index, spec in mine:
                self._tell(place.start_again(index, spec))

    def _prepare(self, found: Mapping[str, Any]) -> LocalPlace:
        """Make the place of all processes here, and their environment."""
        agent_id, job_id = secrets.token_hex(8), found["job_id"]
        guardian = GuardianProcess(job_id, os.environ, agent_id)
        self._cleanup.callback(guardian.dismiss)
        self._place = LocalPlace(job_id, guardian, agent_id)
        self._cleanup.callback(self._place.close)
        here = with_environment_of_python(base_environment(os.environ))
        variables = {**here, **found["variables"], AGENT_ID_NAME: agent_id}
        if key := found["key"] or self._key:
            path = new_key_file()
            # Removed first at the end, since a cluster may kill all processes here at any moment.
            self._cleanup.callback(shutil.rmtree, path.parent, ignore_errors=True)
            guardian.remove_at_the_end(path.parent)
            write_key(path, key)
            variables["PS_JOB_KEY_FILE"] = str(path)
        self._variables = variables
        return self._place

    def _tell(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Output):
                self._credit -= cost(event)
            self._link.tell(event)


def cost(output: Output) -> int:
    """Return how much of the output credit ``output`` takes."""
    return sum(map(len, output.lines)) + len(output.lines)
