"""A process that has imported the packages, and forks the processes that tests start by hand.

To import NumPy and both packages takes a quarter of a second of a processor, and the tests of jobs
start several hundred processes. A fork of one that has imported them has nothing to import. It is
as good as a new process: a session and an output of its own, the environment, the directory and the
``sys.argv`` that were asked for, and an end by the interpreter's own means. ``/proc`` shows its
environment, too. Processes that the launcher starts are always new ones.

``python prefork.py DESCRIPTOR [MODULE ...]`` is that process, which imports the modules, too;
``forker.py`` starts and asks it.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any

IMPORTED = (
    "kvstore.kvstore",
    "kvstore.mxnet.gluon",
    "kvstore.server.__main__",
    "kvstore.stores.dist.store",
    "pslite.errors",
)
LARGEST = 100_000
"""How many bytes a request has at most."""


class Forks:
    """Forks when it is asked to, and says who has ended. One thread, which waits for both."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._ended, wakes = socket.socketpair()
        for end in self._ended, wakes:
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        self._wakes = wakes

    def serve(self) -> dict[str, Any] | None:
        """Return in each forked process, with what it is to do, and None at the end of all."""
        with selectors.DefaultSelector() as selector:
            for source in self._control, self._ended:
                selector.register(source, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._ended in ready:
                    self._ended.recv(4096)
                    self._report()
                if self._control in ready:
                    packet = self._control.recv(LARGEST)
                    if not packet:
                        return None
                    request: dict[str, Any] = json.loads(packet)
                    pid = os.fork()
                    if pid == 0:
                        break
                    self._say({"started": pid})
        self._leave()
        return request

    def _report(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})

    def _say(self, what: dict[str, int]) -> None:
        self._control.sendall(json.dumps(what).encode())

    def _leave(self) -> None:
        """In a forked process: keep nothing of all this."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for mine in self._control, self._ended, self._wakes:
            mine.close()


def become(request: dict[str, Any]) -> None:
    """Make this process the one that was asked for, but for its code."""
    os.setsid()
    os.chdir(request["directory"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
    for wanted, descriptor in (nothing, 0), (output, 1), (output, 2):
        os.dup2(wanted, descriptor)
    os.close(nothing)
    os.close(output)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    # Each line in one write: otherwise a line of the log falls between the arguments of print.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    os.environ.clear()
    os.environ.update(request["environment"])
    show_environment(request["environment"])


def show_environment(environment: dict[str, str]) -> None:
    """Write it where ``/proc/PID/environ`` is read from: the memory that the process began with."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, stop = int(fields[47]), int(fields[48])
    text = b"".join(os.fsencode(f"{name}={value}\0") for name, value in environment.items())
    if len(text) > stop - start:
        raise ValueError(f"expected an environment of {stop - start} bytes, got {len(text)}")
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(text.ljust(stop - start, b"\0"))


def run(arguments: list[str]) -> None:
    """Run ``-c CODE ...`` or ``-m MODULE ...``, as the interpreter does."""
    option, what, *rest = arguments
    sys.argv = [option, *rest]
    sys.path[0] = "" if option == "-c" else os.getcwd()
    if option == "-m":
        sys.modules.pop(f"{what}.__main__", None)  # runpy warns of a module that it did not run
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(what, "<string>", "exec"), main.__dict__)


def main() -> None:
    for name in *IMPORTED, *sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    request = Forks(socket.socket(fileno=int(sys.argv[1]))).serve()
    if request is not None:
        become(request)
        run(request["arguments"])


if __name__ == "__main__":
    main()
