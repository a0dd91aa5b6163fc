"""Starts processes as forks of one that has imported the packages (``prefork.py``)."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PREFORK = Path(__file__).with_name("prefork.py")
OF_A_PROCESS = (
    *("PS_", "DMLC_", "KVSTORE_", "MXNET_", "PROCESS_TEST_MARK", "TMPDIR", "PYTEST_"),
    # What tells a process of PyTorch where it belongs.
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
"""Variables that are read after all imports, so that forks may differ in them."""
AT_IMPORT = ("KVSTORE_TORCH_REPLACES",)
"""The exceptions: ``import torch`` reads them."""
ROOM = {"PREFORK_ROOM": "." * 16_384}
"""A variable that makes room for the environments of forks, where ``/proc`` shows them."""


class Forker:
    """The process that forks, which is started for its first fork and ends with this process."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = ()) -> None:
        self._environment = dict(environment)
        #: By process id; the system may give that of an ended process to a later one.
        self._running: dict[int, Forked] = {}
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(PREFORK), str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(
                command,
                env={**environment, **ROOM},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._started: list[int] = []

    def can_start(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Whether a fork would be the same as a new process."""

        def at_start(variables: Mapping[str, str]) -> dict[str, str]:
            return {
                name: text
                for name, text in variables.items()
                if name in AT_IMPORT or not name.startswith(OF_A_PROCESS)
            }

        return (
            command[0] == sys.executable
            and command[1] in ("-c", "-m")
            and at_start(environment) == at_start(self._environment)
        )

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        output: Path,
    ) -> Forked:
        """Start ``command``, one for which ``can_start`` holds. Its output is appended."""
        request = {
            "arguments": command[1:],
            "environment": environment,
            "directory": str(directory),
            "output": str(output),
        }
        with self._lock:
            self._control.sendall(json.dumps(request).encode())
            while not self._started:
                self._hear()
            pid = self._started.pop()
            forked = self._running[pid] = Forked(self, pid)
            return forked

    def close(self) -> None:
        """Let the process end that forks."""
        self._control.close()
        self._process.wait()

    def listen(self, forked: Forked, timeout_s: float) -> None:
        """Set the exit code of a fork that has ended. Waits for news for as long as that."""
        with self._lock:
            while forked.code is None and select.select([self._control], [], [], timeout_s)[0]:
                timeout_s = 0.0
                self._hear()

    def _hear(self) -> None:
        packet = self._control.recv(1_000)
        if not packet:
            raise RuntimeError(f"{PREFORK.name} has ended with {self._process.wait()}")
        answer = json.loads(packet)
        if "started" in answer:
            self._started.append(answer["started"])
        else:
            self._running.pop(answer["ended"]).code = answer["code"]


class Forked:
    """A process of a ``Forker``, with the calls of ``subprocess.Popen`` that tests use."""

    def __init__(self, forker: Forker, pid: int) -> None:
        self.pid = pid
        self._forker = forker
        self.code: int | None = None
        """The exit code; None while it runs, as far as is known."""

    def poll(self) -> int | None:
        return self._look(0.0)

    def _look(self, timeout_s: float) -> int | None:
        if self.code is None:
            self._forker.listen(self, timeout_s)
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        give_up_at = None if timeout is None else time.monotonic() + timeout
        while (code := self._look(0.05)) is None:
            if give_up_at is not None and time.monotonic() >= give_up_at:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.Signals(number))
