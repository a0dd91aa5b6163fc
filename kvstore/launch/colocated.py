"""Run scheduler and servers beside workers started elsewhere.

torchrun, ``mp.spawn`` and mpiexec start only workers. So the worker of rank 0 starts the scheduler,
and the first worker of each machine starts a server (``kvstore/frameworks/torch/cluster.py``
decides which). They are child processes, or servers on threads of the worker's process. A child
reads its settings and the job's key from one line of JSON on its standard input, so that none of
them are in an environment or on a command line.

A child outlives a killed worker by PS_LOST_AFTER (the time after which a disconnected node is lost)
plus ``GRACE_S``. So it can still tell the others which worker is lost, which is more useful than
the loss of a server. A worker that succeeds waits for its children, since other workers may still
need them. Ctrl-C reaches the whole process group, but children ignore it: a worker may use the job
once more, for example to save.

Imports only the standard library at first: a child must set its environment before it imports
NumPy.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from kvstore.launch.environment import checkout_root
from kvstore.launch.plan import THREAD_COUNT_NAMES

if TYPE_CHECKING:
    from pslite import Config, Postoffice

GRACE_S = 3.0
"""How many seconds a child continues after its worker is lost."""
_LONGEST_S = 60.0
_SAY_AFTER_S = 10.0
_PR_SET_PDEATHSIG = 1
_MAIN = (
    "import sys; sys.path[:0] = sys.argv[1:]; "
    "from kvstore.launch.colocated import main; sys.exit(main())"
)


class ColocatedServices:
    """The scheduler and servers that run as children or on threads of this process.

    A separate thread starts them and waits for them: Linux ends the children together with the
    thread that started them, and the caller's thread may end before the process does.
    """

    def __init__(
        self,
        settings: Sequence[Mapping[str, Any]],
        key: str,
        inherited_fds: Sequence[int] = (),
        inside: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Start one child for each of ``settings``, the fields of a ``Config``.

        Children whose settings contain ``listen_fd`` inherit ``inherited_fds``. Servers with the
        settings ``inside`` run on threads of this process. Raises ``OSError``, and the errors of
        ``pslite.start`` for these servers.
        """
        self._processes: list[subprocess.Popen[bytes]] = []
        #: The nodes of the servers on threads, in the order of ``inside``.
        self.nodes: list[Postoffice] = []
        self._errors: list[BaseException] = []
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run,
            args=([*settings], key, tuple(inherited_fds), [*inside], started),
            name="kvstore-colocated",
            daemon=True,
        )
        atexit.register(self.wait)  # before the node's handler is registered, so it runs later
        self._thread.start()
        started.wait()
        if self._errors:
            self.kill()
            raise self._errors[0]

    @property
    def pids(self) -> list[int]:
        """The children's process ids."""
        return [process.pid for process in self._processes]

    def _run(
        self,
        settings: Sequence[Mapping[str, Any]],
        key: str,
        fds: tuple[int, ...],
        inside: Sequence[Mapping[str, Any]],
        started: threading.Event,
    ) -> None:
        try:
            for each in settings:
                self._processes.append(_start(each, key, fds))
            for each in inside:
                self.nodes.append(_start_inside(each, key))
        except BaseException as error:
            self._errors.append(error)
        finally:
            started.set()
        for node in self.nodes:
            _end_with_its_job(node)
        for process in self._processes:
            process.wait()

    def kill(self) -> None:
        """End all of them at once, because their cluster never became complete."""
        self.abandon()
        for process in self._processes:
            process.kill()
        for node in self.nodes:
            node.close(goodbye=False)
        self._thread.join()

    def abandon(self) -> None:
        """Do not wait at exit: this process failed, and the others must learn it at once."""
        atexit.unregister(self.wait)

    def wait(self) -> None:
        """Wait until all children have ended; called when a script exits successfully.

        After an exception, return at once: the process ends, and the others learn that it is lost.
        """
        if getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1"):
            return
        say_at = time.monotonic() + _SAY_AFTER_S
        while self._thread.is_alive():
            self._thread.join(1.0)
            if time.monotonic() >= say_at and self._thread.is_alive():
                say_at = float("inf")
                print(
                    f"process {os.getpid()} is done and stays until all workers are: they still "
                    "need the servers that it started",
                    file=sys.stderr,
                    flush=True,
                )


def _start(settings: Mapping[str, Any], key: str, fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    root = checkout_root()
    told = {"settings": dict(settings), "key": key, "parent": os.getpid()}
    process = subprocess.Popen(
        [sys.executable, "-c", _MAIN, *([] if root is None else [root])],
        stdin=subprocess.PIPE,
        pass_fds=fds if settings.get("listen_fd") is not None else (),
    )
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(json.dumps(told).encode() + b"\n")
    return process


def _start_inside(settings: Mapping[str, Any], key: str) -> Postoffice:
    from kvstore.server import install
    from kvstore.server.malloc import keep_freed_memory
    from pslite import start

    keep_freed_memory(one_arena=False)
    return start(_config(settings, key), prepare=install, wait=False)


def _end_with_its_job(node: Postoffice) -> None:
    """End a server once no worker needs it; the workers know its error, if any."""
    from pslite.errors import PSError

    with contextlib.suppress(PSError):
        node.finished.result()
    with contextlib.suppress(PSError):
        node.close()


def _config(settings: Mapping[str, Any], key: str) -> Config:
    from pslite import Config

    key_fd = None
    if key:
        key_fd, written = os.pipe()
        os.write(written, key.encode())
        os.close(written)
    return Config(**{**settings, "job_key_fd": key_fd})


# -- in the child -------------------------------------------------------------------------


def main() -> int:
    """Run the scheduler or server that standard input describes; return its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told = json.loads(sys.stdin.buffer.readline())
    grace_s = GRACE_S + min(told["settings"]["lost_after_s"], _LONGEST_S)

    def end_soon(number: int, frame: FrameType | None) -> None:
        """End the process after a grace period: the worker is gone, or a signal arrived."""
        timer = threading.Timer(grace_s, os._exit, (128 + number,))
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGTERM, end_soon)
    _be_told_of_the_end_of(told["parent"])
    os.environ.update(dict.fromkeys(THREAD_COUNT_NAMES, "1"))  # the pool's threads do the work
    from kvstore.server import serve

    return serve(_config(told["settings"], told["key"]))


def _be_told_of_the_end_of(parent: int) -> None:
    """On Linux, make the kernel send SIGTERM to this process when ``parent`` ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the line above
            os.kill(os.getpid(), signal.SIGTERM)
