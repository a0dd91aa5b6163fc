"""A service that a test needs, as a process of ours: started, watched, waited for, stopped.

Whatever is started here dies with the process that started it, also when that one is killed; for
what that has started in turn there is sweeper.py.
Nothing waits without a deadline, and an error shows the end of the service's own log.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

READY_S = 30.0
STOP_S = 5.0
COMMAND_S = 30.0
_TAIL_LINES = 25


class ServiceError(Exception):
    """A service that is known to start has not started, or has ended: a failure, not a skip."""


class Daemon:
    """``command``, which must stay in the foreground; its output goes to the file ``log``."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                # Ctrl-C ends the tests first, which then stop their services in order.
                start_new_session=True,
            )
        self.pid = self._process.pid

    def wait_until(
        self, what: str, happened: Callable[[], bool], deadline_s: float = READY_S
    ) -> None:
        """Return once ``happened()``; raise ServiceError at the deadline or when it has ended."""
        give_up_at = time.monotonic() + deadline_s
        while not happened():
            code = self._process.poll()
            if code is not None:
                raise ServiceError(f"{self.name} ended with code {code}; {tail(self.log)}")
            if time.monotonic() > give_up_at:
                raise ServiceError(
                    f"{self.name}: no {what} within {deadline_s:g} s; {tail(self.log)}"
                )
            time.sleep(0.05)

    def stop(self, grace_s: float = STOP_S) -> None:
        """Ask it to end, and kill it and its session's processes after ``grace_s`` seconds."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait(STOP_S)


def wait_for(what: str, happened: Callable[[], bool], deadline_s: float = READY_S) -> None:
    """Return once ``happened()``; raise ServiceError at the deadline."""
    give_up_at = time.monotonic() + deadline_s
    while not happened():
        if time.monotonic() > give_up_at:
            raise ServiceError(f"no {what} within {deadline_s:g} s")
        time.sleep(0.05)


def tail(log: Path) -> str:
    """The last lines of a log, for an error's text."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError as error:
        return f"its log cannot be read: {error}"
    return f"its log {log.name} ends with:\n" + "\n".join(f"  | {line}" for line in lines)


def command(
    *words: str | Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float = COMMAND_S,
    text: str | None = None,
) -> str:
    """Run a command that must succeed, with ``text`` as its input; what it printed."""
    done = subprocess.run(
        [str(word) for word in words],
        input=text if text is not None else "",
        capture_output=True,
        text=True,
        env=env,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise ServiceError(
            f"{' '.join(map(str, words))} ended with code {done.returncode}:\n"
            f"{done.stdout}{done.stderr}"
        )
    return done.stdout


def free_ports(count: int) -> list[int]:
    """TCP ports of this machine that nothing uses now, each a different one.

    They are from below those that the system gives to clients, which cannot take them meanwhile.
    """
    sockets: list[socket.socket] = []
    try:
        while len(sockets) < count:
            one = socket.socket()
            try:
                one.bind(("127.0.0.1", 20_000 + secrets.randbelow(12_000)))
            except OSError:  # it is in use
                one.close()
            else:
                sockets.append(one)
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def answers(port: int, host: str = "127.0.0.1") -> bool:
    """Whether something accepts connections there."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def process_ids() -> list[int]:
    """Of everything that runs on this machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def network_namespace(pid: int) -> str:
    """The name of a process's network namespace, or nothing when it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def kill_all(pids: Callable[[], Iterable[int]], deadline_s: float = STOP_S) -> None:
    """Kill what ``pids()`` lists until it lists nothing more."""
    give_up_at = time.monotonic() + deadline_s
    while found := list(pids()):
        if time.monotonic() > give_up_at:
            raise ServiceError(f"processes that do not end: {found}")
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.02)


def needed(*programs: str) -> None:
    """Raise ServiceError unless all of these files are here."""
    missing = [program for program in programs if not Path(program).exists()]
    if missing or os.geteuid() != 0:
        why = f"{', '.join(missing)} is missing" if missing else "starting services needs root"
        raise ServiceError(f"{why}: run tests/launchers/install, and the tests, as root")
