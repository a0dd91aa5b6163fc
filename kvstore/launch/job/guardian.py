"""Clean up after a job, even if the launcher is killed.

Standard library only, and no import of this project. It runs as ``python -I -S guardian.py`` beside
the launcher (:class:`GuardianProcess`), and reads a pipe whose other end only the launcher holds.
The launcher writes a line of JSON for each process group that it starts, for the directory of the
job's key, and for a command that removes the job from a cluster. Its last line says that it has
ended and removed everything itself. If the pipe ends without this line, the launcher was killed
(``kill -9``, out of memory). Then the guardian kills all processes of the job at once, runs the
commands, removes the key, and repeats failed commands a few times.

A process belongs to the job if it is in one of those groups (or sessions), or if its initial
environment contains the job's id; so a grandchild with a session of its own is found as well. A
grandchild with both a session and an environment of its own is not found.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

AGENT_ID_NAME = "KVSTORE_AGENT_ID"
_AGENT = AGENT_ID_NAME.encode() + b"="
KILL_ROUNDS = 50
ROUND_S = 0.05
_EXEC_S = 2.0  # for processes that are just executing a new program, on a busy machine
_EXEC_ROUND_S = 0.001
REMOVE_ROUNDS = 20
_CANCEL_S = 30.0
_CANCEL_PAUSES_S = (2.0, 10.0, 30.0)  # the cluster may be busy, or the network down
_DONE_WAIT_S = 5.0
_DONE = "done"


class GuardianProcess:
    """A running guardian of the job ``job_id``, or of what one of its agents started.

    It must outlive the launcher and must not belong to the job. So it gets its own session, no
    access to the user's output, and an environment without a job's id (otherwise the guardian of an
    enclosing job would kill it too early). Close it with :meth:`dismiss`.
    """

    def __init__(
        self, job_id: str, environ: Mapping[str, str], agent_id: str | None = None
    ) -> None:
        script = os.path.realpath(__file__)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script, job_id, *([agent_id] if agent_id else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in environ.items() if name != "PS_JOB_ID"},
            cwd="/",
            start_new_session=True,
            bufsize=0,
        )

    def watch(self, group: int) -> None:
        """Tell the guardian about a process group that has just started."""
        self._tell("watch", group)

    def remove_at_the_end(self, directory: str | os.PathLike[str]) -> None:
        """Remove ``directory``, even one created later, if the launcher is killed."""
        self._tell("remove", os.fspath(directory))

    def cancel_at_the_end(self, argv: Sequence[str]) -> None:
        """Run the command ``argv`` if the launcher is killed."""
        self._tell("cancel", *argv)

    def dismiss(self) -> None:
        """Tell the guardian that everything has ended, and wait for its end."""
        self._tell(_DONE)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_DONE_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tell(self, *words: str | int) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # the guardian was killed; the children's death signal remains
            self._process.stdin.write(json.dumps(words).encode() + b"\n")


def end_job(
    job_id: str, groups: Collection[int], grace_s: float, agent_id: str | None = None
) -> int:
    """Send SIGTERM to the job, then SIGKILL after ``grace_s``; return the count.

    The count is the number of processes found in all. ``grace_s`` 0 kills at once. No signal
    reports the end of a grandchild, so this checks every 50 ms until all have ended. ``agent_id``
    is that of :func:`job_members`.
    """
    members = job_members(job_id, groups, agent_id)
    found = set(members)
    if found and grace_s > 0:
        _signal_all(members, signal.SIGTERM)
        deadline_s = time.monotonic() + grace_s
        while members and time.monotonic() < deadline_s:
            time.sleep(ROUND_S)
            members = job_members(job_id, groups, agent_id)
            found.update(members)
    for _ in range(KILL_ROUNDS):  # a process may fork while we look
        if not members:
            break
        _signal_all(members, signal.SIGKILL)
        time.sleep(ROUND_S)
        members = job_members(job_id, groups, agent_id)
        found.update(members)
    return len(found)


def job_members(job_id: str, groups: Collection[int], agent_id: str | None = None) -> list[int]:
    """Return the ids of the job's living processes, except this one.

    Several agents of one job may run on a machine. With an ``agent_id``, only the processes that
    this agent has started are returned; with "", only those that no agent has started; with None,
    all.
    """

    def belongs(environment: Collection[bytes]) -> bool:
        if b"PS_JOB_ID=" + job_id.encode() not in environment:
            return False
        agents = [one[len(_AGENT) :] for one in environment if one.startswith(_AGENT)] or [b""]
        return agent_id is None or agent_id.encode() in agents

    members = []
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    deadline_s = time.monotonic() + _EXEC_S
    while pids:
        answers = {pid: _belongs(pid, belongs, groups) for pid in pids if pid != os.getpid()}
        members += [pid for pid, answer in answers.items() if answer]
        pids = [pid for pid, answer in answers.items() if answer is None]
        if not pids or time.monotonic() > deadline_s:
            break
        time.sleep(_EXEC_ROUND_S)
    return members


def _belongs(
    pid: int, belongs: Callable[[Collection[bytes]], bool], groups: Collection[int]
) -> bool | None:
    environ = b"of another user"
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
        with suppress(PermissionError), open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read()
    except OSError:  # the process has ended, or the kernel hides it
        return False
    return is_member(stat, environ, belongs, groups)


def is_member(
    stat: bytes,
    environ: bytes,
    belongs: Callable[[Collection[bytes]], bool],
    groups: Collection[int],
) -> bool | None:
    """Tell from two files of /proc/PID whether the process belongs to the job.

    Returns None if that is not known yet: ask again. While a process starts a new program, its
    environment may have been read as empty although it is not. Threads of the kernel have no
    memory, so their empty environment is right. Source: proc(5), fs/exec.c of
    Linux.
    """
    # After the command's name, which may contain any character; proc(5) counts from 1, with
    # two fields before.
    fields = stat.rpartition(b")")[2].split()
    state, group, session, size, begin, end = (fields[at - 3] for at in (3, 5, 6, 23, 50, 51))
    if state in (b"Z", b"X"):
        return False
    if int(group) in groups or int(session) in groups:
        return True
    if not environ and size != b"0" and (end == b"0" or begin != end):
        return None
    return belongs(environ.split(b"\0"))


def _signal_all(members: Collection[int], number: int) -> None:
    for member in members:
        with suppress(OSError):
            os.kill(member, number)


def succeeds(
    argv: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None
) -> bool:
    """Run a command silently, out of reach of Ctrl-C; return whether it succeeded."""
    null = subprocess.DEVNULL
    try:
        done = subprocess.run(
            argv,
            env=environ,
            stdin=null,
            stdout=null,
            stderr=null,
            timeout=timeout_s,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def remove_tree(directory: str | os.PathLike[str]) -> None:
    """Remove a directory tree, even while processes of the job still write to it."""
    for _ in range(REMOVE_ROUNDS):
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.lexists(directory):
            return
        time.sleep(ROUND_S)


def main(job_id: str, agent_id: str | None = None) -> None:
    """Read the launcher's pipe on standard input to its end; then clean up if needed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    groups: set[int] = set()
    directories: list[str] = []
    commands: list[list[str]] = []
    for line in sys.stdin:
        kind, *words = json.loads(line)
        if kind == _DONE:
            return
        if kind == "watch":
            groups.update(words)
        elif kind == "remove":
            directories += words
        else:
            commands.append(words)
    if agent_id is not None:  # a cluster may kill all processes here at any moment, even this one
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)
    end_job(job_id, groups, 0, agent_id)
    failing = [argv for argv in commands if not succeeds(argv, _CANCEL_S)]
    for directory in directories:  # remove the key even if the cluster does not answer
        remove_tree(directory)
    for pause_s in _CANCEL_PAUSES_S:
        if not failing:
            return
        time.sleep(pause_s)
        failing = [argv for argv in failing if not succeeds(argv, _CANCEL_S)]


if __name__ == "__main__":
    main(*sys.argv[1:])
