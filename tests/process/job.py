"""Jobs of real processes and real sockets, which a test starts by hand or by the launcher.

A ``Job`` knows the variables of one job on a free port of this machine's loopback, starts its
processes one by one, keeps what they write, and finds whatever they leave: each carries the
job's mark in its environment, and so do its children. Make one by the fixture ``make_job``
(``conftest.py``), which ends what still runs and fails the test that left it.
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from forker import Forked, Forker

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
MARK = "PROCESS_TEST_MARK"
PATIENCE_S = 30.0
"""How long a test waits for what should take a moment: the machine may be busy.

Half of PS_RENDEZVOUS_TIMEOUT, and far less than ``NEVER_OVER``: nobody waits those out unseen.
"""
NEVER_OVER = {"PS_CLOSE_TIMEOUT": "300"}
"""Settings of all jobs here that do not set them: what ends at once does not wait for these."""
GRACE_S = 2.0

SERVICE = ("-m", "kvstore.server")

WORKER = """
import os, sys, time
import numpy as np
import kvstore as mx
from pslite.errors import PSError
def vector(*numbers):
    return np.array(numbers, np.float32)
def wait_for_file(path):
    while not os.path.exists(path):
        time.sleep(0.01)
"""
"""What a worker's code begins with."""

TRAIN = """
kv = mx.kvstore.create("dist_sync")
kv.init("w", vector(0, 0))
print("rank", kv.rank, flush=True)
step = 0
while not os.path.exists(f"stop{kv.rank}"):
    step += 1
    kv.push("w", vector(step, 1))
    assert kv.pull("w").tolist() == [2 * step, 2]
    kv.barrier()
    if kv.rank == 0 and os.path.exists("stop"):
        open("stop1", "w"), open("stop0", "w")
    kv.barrier()
    time.sleep(0.002)
print("rounds are right", flush=True)
"""
"""Two workers that train, round by round checked, until there is a file named ``stop``.

They leave the processors a moment for the test whose background they are.
"""

SHORT = {"PS_RENDEZVOUS_TIMEOUT": "3", "PS_ROSTER_INTERVAL": "0.5"}
"""Settings for jobs that never become complete."""

CAN_FORK = Path("/proc/self/mem").exists() and "COVERAGE_PROCESS_CONFIG" not in os.environ
"""Whether this system shows what ``prefork.py`` needs; it does not measure coverage."""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""What processes of PyTorch need in order to be forks: its threads would not be in a fork."""

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looks for processes and sockets in /proc"
)


def environment_of(pid: int) -> set[bytes]:
    """``NAME=text`` of each variable that a process began with; none where it has ended."""
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def reserved_port() -> socket.socket:
    """A socket bound to a port on which nobody listens, from below those that clients get.

    It never listens. While it is open, no other test can reserve its port, but a process that sets
    SO_REUSEADDR can listen there, as libzmq and the launcher do.
    """
    while True:
        holder = socket.socket()
        try:
            holder.bind((HOST, 20_000 + secrets.randbelow(12_000)))
        except OSError:
            holder.close()
            continue
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return holder


def free_port() -> int:
    """The port of a ``reserved_port`` that stays reserved until this process ends."""
    _RESERVED.append(reserved_port())
    port: int = _RESERVED[-1].getsockname()[1]
    return port


_RESERVED: list[socket.socket] = []


_AT_FIRST = dict(os.environ)
"""What libraries add is left out: PyTorch sets a variable when it has made its first optimizer."""


def clean_environment() -> dict[str, str]:
    """This process's environment at first, without any settings of the project."""
    prefixes = ("DMLC_", "PS_", "KVSTORE_", "MXNET_")
    environment = {name: text for name, text in _AT_FIRST.items() if not name.startswith(prefixes)}
    environment.update(PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="1", OPENBLAS_NUM_THREADS="1")
    return environment


@cache
def forker() -> Forker:
    """The one of this process, which ends with it."""
    return _closed_at_exit(Forker(clean_environment()))


@cache
def torch_forker() -> Forker:
    """The one that has imported PyTorch, too, and what its optimizers import when they are made.

    That takes three seconds of a processor, each time that a new process does it.
    """
    environment = {**clean_environment(), **ONE_THREAD}
    return _closed_at_exit(Forker(environment, ("torch._dynamo", "kvstore.torch")))


def _forker_of(command: Sequence[str], environment: Mapping[str, str]) -> Forker | None:
    """Whose fork would be the same as a new process; None where that is nobody's."""
    if command[1] not in ("-c", "-m"):
        return None
    needs_torch = "import torch" in command[2] and ONE_THREAD.items() <= environment.items()
    found = torch_forker() if needs_torch else forker()
    return found if found.can_start(command, environment) else None


def _closed_at_exit(made: Forker) -> Forker:
    atexit.register(made.close)
    return made


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"waited {timeout_s:g} s for: {what}"
        time.sleep(0.01)


@dataclass
class Process:
    """A started process. Its standard output and error go to one file, in their order."""

    name: str
    popen: subprocess.Popen[bytes] | Forked
    output: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def text(self) -> str:
        """All that it has written so far."""
        return self.output.read_text()

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit code, negative for a signal."""
        try:
            return self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs: {self.text}") from None

    def wait_for(self, pattern: str, timeout_s: float = PATIENCE_S) -> re.Match[str]:
        """The first match of ``pattern`` in what it writes."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            ended = self.popen.poll() is not None
            found = re.search(pattern, self.text)
            if found is not None:
                return found
            late = time.monotonic() >= give_up_at
            assert not ended and not late, f"{self.name} did not write {pattern!r}: {self.text}"
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)


@dataclass
class Job:
    """One job. ``settings`` are variables for all of its processes."""

    directory: Path
    num_workers: int = 2
    num_servers: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    processes: list[Process] = field(default_factory=list)
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    forks: bool = CAN_FORK
    """Whether processes may be forks of one that has imported the packages (``prefork.py``)."""
    _uses_port: bool = False

    def environment(self, role: str, task_id: int | None) -> dict[str, str]:
        """What a process of this job finds in its environment."""
        rank = {} if task_id is None else {"DMLC_TASK_ID": str(task_id)}
        self._uses_port = True
        return {
            **clean_environment(),
            "DMLC_ROLE": role,
            "DMLC_PS_ROOT_URI": HOST,
            "DMLC_PS_ROOT_PORT": str(self.port),
            "DMLC_NUM_WORKER": str(self.num_workers),
            "DMLC_NUM_SERVER": str(self.num_servers),
            "PS_JOB_ID": f"job-{self.mark}",
            MARK: self.mark,
            **rank,
            **NEVER_OVER,
            **self.settings,
        }

    def start(
        self,
        role: str,
        task_id: int | None,
        arguments: Sequence[str],
        settings: Mapping[str, str | None] | None = None,
    ) -> Process:
        """Start Python with ``arguments``. A setting that is None is taken away."""
        environment: dict[str, str | None] = {**self.environment(role, task_id), **(settings or {})}
        name = role if task_id is None else f"{role} {task_id}"
        return self._start(
            name,
            [sys.executable, *arguments],
            {variable: text for variable, text in environment.items() if text is not None},
        )

    def scheduler(self, settings: Mapping[str, str | None] | None = None) -> Process:
        return self.start("scheduler", None, SERVICE, settings)

    def server(
        self, task_id: int | None = 0, settings: Mapping[str, str | None] | None = None
    ) -> Process:
        return self.start("server", task_id, SERVICE, settings)

    def worker(
        self,
        task_id: int | None,
        code: str,
        settings: Mapping[str, str | None] | None = None,
        arguments: Sequence[str] = (),
    ) -> Process:
        """A worker that runs ``code`` after the imports that most workers need."""
        return self.start("worker", task_id, ("-c", WORKER + code, *arguments), settings)

    def service(self) -> tuple[Process, list[Process]]:
        """The scheduler and all servers."""
        return self.scheduler(), [self.server(rank) for rank in range(self.num_servers)]

    def workers(self, code: str) -> list[Process]:
        """All workers, with the same code; their rank is in DMLC_TASK_ID."""
        return [self.worker(rank, code) for rank in range(self.num_workers)]

    def whole(self, code: str) -> str:
        """Run a whole job by hand; return the lines of its workers as the launcher shows them.

        Each process that a launcher starts imports all for itself, and these are forks.
        """
        scheduler, servers = self.service()
        workers = self.workers(code)
        processes = [*workers, *servers, scheduler]
        assert [each.wait() for each in processes] == [0] * len(processes), self.output()
        return "".join(
            f"[worker {rank}] {line}\n"
            for rank, worker in enumerate(workers)
            for line in worker.lines
        )

    def launch(self, code: str, *options: str) -> Process:
        """The launcher, which starts a job of its own whose workers run ``code``."""
        arguments = [
            *(sys.executable, str(ROOT / "tools" / "launch.py"), "--launcher", "local"),
            *("-n", str(self.num_workers), "-s", str(self.num_servers), *options),
            *(sys.executable, "-c", WORKER + code),
        ]
        environment = {**clean_environment(), MARK: self.mark, **NEVER_OVER, **self.settings}
        return self._start("launcher", arguments, {**environment, "TMPDIR": str(self.directory)})

    def _start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Process:
        output = self.directory / f"{len(self.processes)}-{name.replace(' ', '-')}.txt"
        popen: subprocess.Popen[bytes] | Forked
        with output.open("wb") as file:
            forks = _forker_of(command, environment) if self.forks else None
            if forks is not None:
                popen = forks.start(command, environment, self.directory, output)
            else:
                popen = subprocess.Popen(
                    command,
                    env=environment,
                    cwd=self.directory,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        process = Process(name, popen, output)
        self.processes.append(process)
        return process

    def allow(self, name: str) -> None:
        """Let the processes go on that wait for the file ``name``."""
        (self.directory / name).touch()

    def wait_all(self, timeout_s: float = PATIENCE_S) -> list[int]:
        """The exit codes of all processes, in the order of their start."""
        give_up_at = time.monotonic() + timeout_s
        return [process.wait(max(0.0, give_up_at - time.monotonic())) for process in self.processes]

    def output(self) -> str:
        """Everything that all processes have written, for the text of a failed assertion."""
        return "\n".join(f"--- {process.name}\n{process.text}" for process in self.processes)

    def launched(self, role: str, rank: int = 0) -> int:
        """The process id of a scheduler, server or worker that the launcher has started."""
        wanted = {f"DMLC_ROLE={role}".encode(), f"DMLC_TASK_ID={rank}".encode()}
        found = [pid for pid in self.left() if wanted <= environment_of(pid)]
        assert len(found) == 1
        return found[0]

    # -- what is left ------------------------------------------------------------------

    def left(self) -> list[int]:
        """Living processes that carry the mark, grandchildren and guardians too."""
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and self._is_ours(entry)
        ]

    def _is_ours(self, entry: Path) -> bool:
        try:
            if entry.joinpath("stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return False
        except OSError:  # it has ended meanwhile
            return False
        return f"{MARK}={self.mark}".encode() in environment_of(int(entry.name))

    def end(self) -> list[str]:
        """Kill what still runs; returns what should not have been there.

        What is on its way out has two seconds to vanish.
        """
        give_up_at = time.monotonic() + GRACE_S
        while self.left() and time.monotonic() < give_up_at:
            time.sleep(0.02)
        left = [f"process {pid}" for pid in self.left()]
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.popen.wait()
        listening = {port for _, port, _ in listening_sockets()}
        if self._uses_port and self.port in listening:  # the launcher chooses one of its own
            left.append(f"a socket that listens on port {self.port}")
        return left


def listening_sockets() -> Iterator[tuple[str, int, str]]:
    """(address in hexadecimal, port, inode) of all TCP sockets that listen on this machine."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not os.path.exists(table):
            continue
        for row in Path(table).read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A":
                address, _, port = fields[1].partition(":")
                yield address, int(port, 16), fields[9]


def listening_addresses(pid: int) -> list[tuple[str, int]]:
    """(IPv4 address, port) of the sockets on which a process listens."""
    held = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held.add(os.readlink(descriptor))
        except OSError:
            continue
    return [
        (socket.inet_ntoa(bytes.fromhex(address)[::-1]), port)
        for address, port, inode in listening_sockets()
        if f"socket:[{inode}]" in held
    ]


def assert_no_traceback(*processes: Process) -> None:
    """What these processes had to say, they have said in sentences."""
    for process in processes:
        assert "Traceback" not in process.text, process.text


MakeJob = Callable[..., Job]
"""The type of the fixture ``make_job``: (num_workers, num_servers, settings by name) -> Job."""
