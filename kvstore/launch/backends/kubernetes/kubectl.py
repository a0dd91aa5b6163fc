"""Calls ``kubectl``: one command at a time and waited for, or beside a loop.

The one place of the launcher that starts it. Every call names context and namespace, which are
looked up once: switching them elsewhere while a job runs does not affect it. No
secret is on a command line: manifests go to standard input. Main thread. Used by
``run.py``, ``check.py`` and ``follow.py``.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import IO

from kvstore.launch.backends.kubernetes.manifest import ROLE_LABEL
from kvstore.launch.job.child import die_with_launcher
from kvstore.launch.options import LaunchError

EXIT_NOT_FOUND = 127
REFUSAL = "Error from server (Forbidden)"
_READ_BYTES = 64 * 1024
_LONGEST_ERROR_BYTES = 64 * 1024
_END_S = 1.0


@dataclass(frozen=True)
class KubectlResult:
    """What an ended kubectl has written, and its status: negative for a signal."""

    status: int
    output: bytes
    error: str

    @property
    def is_good(self) -> bool:
        return self.status == 0

    @property
    def is_refusal(self) -> bool:
        """The cluster has answered, and does not allow it."""
        return not self.is_good and REFUSAL in self.error

    @property
    def sentence(self) -> str:
        """The last line of what it complained about."""
        lines = [line for line in self.error.splitlines() if line.strip()]
        if not lines:
            return f"kubectl ended with {self.status} and said nothing"
        return lines[-1].strip().removeprefix("error: ")


class Kubectl:
    """Where to reach the cluster: the same context and namespace in all calls."""

    def __init__(
        self,
        environ: Mapping[str, str],
        namespace: str | None = None,
        context: str | None = None,
        program: str = "kubectl",
    ) -> None:
        self.namespace = namespace
        self._environ = dict(environ)
        self._context = context
        self._program = program

    def argv(self, *words: str) -> list[str]:
        """The whole command."""
        where = []
        if self._context is not None:
            where.append(f"--context={self._context}")
        if self.namespace is not None:
            where.append(f"--namespace={self.namespace}")
        return [self._program, *where, *words]

    def call(self, *words: str, stdin: str = "", timeout_s: float = 20.0) -> KubectlResult:
        """Run it to its end. One that takes longer is ended; its answer says so."""
        process = self.start(*words, stdin=None)
        try:
            output, error = process.communicate(stdin.encode(), timeout_s)
        except subprocess.TimeoutExpired:
            kill(process)
            output, error = process.communicate()
            error += f"\nkubectl {words[0]}: no answer within {timeout_s:g} s\n".encode()
        return KubectlResult(process.returncode, output, error.decode(errors="replace"))

    def start(self, *words: str, stdin: str | None = "") -> subprocess.Popen[bytes]:
        """Start it and write ``stdin``, which must be small; None leaves writing to the caller.

        It dies with the launcher, and Ctrl-C in the terminal does not reach it. Raises
        :class:`LaunchError` when there is no kubectl.
        """
        try:
            process = subprocess.Popen(
                self.argv(*words),
                env=self._environ,
                stdin=subprocess.DEVNULL if stdin == "" else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                preexec_fn=die_with_launcher(),  # safe: the launcher has one thread
            )
        except OSError as error:
            raise LaunchError(
                f"cannot run kubectl: {error.strerror}; install it and put it on the PATH, or "
                "leave --apply out and give the output to a kubectl elsewhere",
                exit_code=EXIT_NOT_FOUND,
            ) from error
        if stdin and process.stdin is not None:
            try:
                process.stdin.write(stdin.encode())
                process.stdin.close()
            except BrokenPipeError:  # it has ended with an error, which its answer will say
                pass
        return process


def find_kubectl(environ: Mapping[str, str], namespace: str | None) -> Kubectl:
    """A :class:`Kubectl` that stays with the present context, and with a namespace.

    Within a pod there is no configuration and so no context: then both are kubectl's business.
    """
    answer = Kubectl(environ).call("config", "view", "--minify", "--output=json")
    try:
        found = json.loads(answer.output) if answer.is_good else {}
    except ValueError:
        found = {}
    context = found.get("current-context") or None
    if context is not None and namespace is None:
        (entry, *_) = found.get("contexts") or [{}]
        namespace = (entry.get("context") or {}).get("namespace") or "default"
    return Kubectl(environ, namespace, context)


def kubectl_here(namespace: str | None) -> Kubectl:
    """As :func:`find_kubectl`, with the environment of this process."""
    return find_kubectl(os.environ, namespace)


def scheduler_pod(kubectl: Kubectl, name: str | None) -> str:
    """The pod of the one job there is, or of the job ``name``. Raises :class:`LaunchError`."""
    chosen = f"{ROLE_LABEL}=scheduler"
    answer = kubectl.call(
        *("get", "pods", "-l", chosen, "--field-selector=status.phase=Running", "--output=json")
    )
    if not answer.is_good:
        raise LaunchError(f"cannot ask the cluster: {answer.sentence}", exit_code=1)
    pods = [item["metadata"] for item in json.loads(answer.output).get("items", ())]
    # The controller of Jobs names each pod's Job in a label.
    jobs = {str(pod["labels"]["job-name"]).removesuffix("-scheduler"): pod for pod in pods}
    found = [jobs[name]] if name in jobs else list(jobs.values()) if name is None else []
    if len(found) == 1:
        return str(found[0]["name"])
    there = ", ".join(sorted(jobs)) or "none"
    wanted = "one running job" if name is None else f"a running job {name!r}"
    raise LaunchError(
        f"expected {wanted} in namespace {kubectl.namespace or '(kubectl decides)'}, found: "
        f"{there}; name one of these, or another --namespace",
        exit_code=1 if not jobs else 2,
    )


class Command:
    """A kubectl that runs while a loop does other things; ``on_end`` gets its answer.

    The loop calls :meth:`read` when one of ``streams`` is readable, and :meth:`tick` now and
    then; the answer comes when both streams have ended.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        name: str,
        until_s: float,
        on_end: Callable[[KubectlResult], None],
    ) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self.has_ended = False
        self.streams: list[IO[bytes]] = [process.stdout, process.stderr]
        self._process = process
        self._name = name
        self._until_s = until_s
        self._on_end = on_end
        self._written: dict[int, bytearray] = {
            stream.fileno(): bytearray() for stream in self.streams
        }
        self._output, self._error = self._written.values()

    def read(self, stream: IO[bytes]) -> None:
        """Read once from a stream that is readable."""
        data = os.read(stream.fileno(), _READ_BYTES)
        if data:
            self._written[stream.fileno()] += data
            return
        self.streams.remove(stream)
        stream.close()
        if not self.streams:
            self._end()

    def tick(self, now_s: float) -> None:
        """End it when it has had its time."""
        if now_s >= self._until_s and not self.has_ended:
            kill(self._process)
            self._error += f"\nkubectl {self._name}: no answer\n".encode()
            self._until_s = float("inf")

    def close(self) -> None:
        """End it without an answer."""
        self.has_ended = True
        kill(self._process)
        end_process(self._process)
        for stream in self.streams:
            stream.close()

    def _end(self) -> None:
        self.has_ended = True
        status = end_process(self._process)
        error = bytes(self._error[-_LONGEST_ERROR_BYTES:]).decode(errors="replace")
        self._on_end(KubectlResult(status, bytes(self._output), error))


class Commands:
    """The kubectls that run beside a loop: one of each name at most, each with ``timeout_s``."""

    def __init__(self, kubectl: Kubectl, timeout_s: float) -> None:
        self._kubectl = kubectl
        self._timeout_s = timeout_s
        self._running: dict[str, Command] = {}
        self._begun_s: dict[str, float] = {}

    def begin(
        self, name: str, on_end: Callable[[KubectlResult], None], *words: str, stdin: str = ""
    ) -> None:
        """Start one; ``on_end`` gets its answer from within :meth:`Command.read`."""
        now_s = time.monotonic()
        process = self._kubectl.start(*words, stdin=stdin)
        self._running[name] = Command(process, words[0], now_s + self._timeout_s, on_end)
        self._begun_s[name] = now_s

    def runs(self, name: str) -> bool:
        return name in self._running

    def due_s(self, name: str, every_s: float) -> float:
        """Return when the next one of this name is to begin; infinite while one runs."""
        if name in self._running:
            return math.inf
        return self._begun_s.get(name, -math.inf) + every_s

    def hasten(self, name: str) -> None:
        """The next one is due at once."""
        self._begun_s.pop(name, None)

    def readers(self) -> dict[int, Callable[[], None]]:
        """Return what to call when a descriptor is readable."""
        return {
            stream.fileno(): partial(command.read, stream)
            for command in self._running.values()
            for stream in command.streams
        }

    def tick(self, now_s: float) -> None:
        """End those that have had their time, forget those that have ended."""
        for name, command in list(self._running.items()):
            command.tick(now_s)
            if command.has_ended:
                del self._running[name]

    def close(self) -> None:
        """End all of them without an answer."""
        for command in self._running.values():
            command.close()
        self._running.clear()


def end_process(process: subprocess.Popen[bytes]) -> int:
    """Its status; one that has closed its output and stays is killed."""
    if process.stdin is not None:
        process.stdin.close()
    give_up_at_s = time.monotonic() + _END_S
    while process.poll() is None and time.monotonic() < give_up_at_s:
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            pass
    if process.poll() is None:
        kill(process)
    return process.wait()


def kill(process: subprocess.Popen[bytes]) -> None:
    """With its group: programs that fetch credentials for it hold its output open as well."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:  # it has ended
        pass
