"""The launcher's agent on another machine: it starts processes there.

Run by :data:`BOOTSTRAP`, whose first words to the launcher are a line of JSON; after that both
sides speak in frames (``wire.py``), over standard input and output. Everything it starts is
killed at once when the launcher is gone: its link has closed, or has been silent for a minute.
``launch/job/guardian.py`` does the same should the agent itself be killed. Runs on its process's
main thread. The other end is ``remote.py``.
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

# What another machine's Python is given to run: it reads the rest of the program, one line of
# JSON, from standard input, byte by byte, so that what follows is left for the agent.
LOADER = 'import json;exec(json.loads(open(0,"rb",0,closefd=False).readline()))'

# Standard library only: says in a greeting why no agent can be had here.
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

    ``directory`` is where the processes will run; ``root`` the checkout that this package is in,
    or None where it is installed. It is used on the other machine if it is there as well.
    ``join_answer`` is the name of a program in the same directory that is told why there is no
    agent, where no process reads what this one prints. ``remedy`` is what to do where there is no
    such directory. ``script`` is a file that ``agent`` looks for in it.
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
    """Serve the launcher at the other end of standard input and output, and end.

    ``script``: a file to look for, "" for none.
    """
    read_fd, write_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)  # nothing that runs here may take the launcher's words, or add to ours
    os.dup2(2, 1)
    os.close(null)
    # "client's address, its port, server's address, its port" (sshd(8), ENVIRONMENT)
    reached_from = os.environ.get("SSH_CONNECTION", "").split(" ")[0]
    greeting = {**machine(script), "reached_from": reached_from}
    os.write(write_fd, GREETING + json.dumps(greeting).encode() + b"\n")
    with SignalPipe() as signals:
        Agent(AgentLink(read_fd, write_fd, time.monotonic()), signals).serve()


def machine(script: str = "") -> dict[str, Any]:
    """Describe this machine to the launcher, and whether ``script`` exists on it."""
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
    """Return variables as if this Python's virtual environment were activated.

    A login without a terminal has not done that, and ``python`` would mean another.
    """
    if sys.prefix == sys.base_prefix:
        return dict(variables)
    programs = os.path.join(sys.prefix, "bin")
    path = [programs, variables.get("PATH", os.defpath)]
    return {**variables, "VIRTUAL_ENV": sys.prefix, "PATH": os.pathsep.join(path)}


def _as_here(spec: ProcessSpec, variables: Mapping[str, str]) -> ProcessSpec:
    """Return a command with this machine's Python and the path to this package."""
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
    """Serves the launcher at the other end of ``link``, which it owns.

    ``key`` is the job's, if the agent has it before the launcher says what to start.
    """

    def __init__(self, link: AgentLink, signals: SignalPipe, key: str = "") -> None:
        self._link = link
        self._key = key
        self._signals = signals
        self._place: LocalPlace | None = None
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
            if key.data is not None and not self._is_over:  # what else was ready is closed
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
        """Start the processes of a message; ``wire.py`` describes it."""
        agent_id, job_id = secrets.token_hex(8), found["job_id"]
        guardian = GuardianProcess(job_id, os.environ, agent_id)
        self._cleanup.callback(guardian.dismiss)
        self._place = LocalPlace(job_id, guardian, agent_id)
        self._cleanup.callback(self._place.close)
        here = with_environment_of_python(base_environment(os.environ))
        variables = {**here, **found["variables"], AGENT_ID_NAME: agent_id}
        if key := found["key"] or self._key:
            path = new_key_file()
            # Removed first at the end: a cluster may kill all here any moment.
            self._cleanup.callback(shutil.rmtree, path.parent, ignore_errors=True)
            guardian.remove_at_the_end(path.parent)
            write_key(path, key)
            variables["PS_JOB_KEY_FILE"] = str(path)
        mine = [
            (index, _as_here(ProcessSpec(role, rank, tuple(argv), environment), variables))
            for index, role, rank, argv, environment in found["processes"]
        ]
        self._tell(self._place.start(mine, variables))

    def _tell(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Output):
                self._credit -= cost(event)
            self._link.tell(event)


def cost(output: Output) -> int:
    """Return how much of the output credit ``output`` takes."""
    return sum(map(len, output.lines)) + len(output.lines)
