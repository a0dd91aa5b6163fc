"""The command that starts a job's agents on other machines, as a place of its own.

``mpirun``, ``srun``, ``qsub`` and the like are children of the launcher. They start agents, which
come to the launcher's gate; each serves one process. What the command prints are notes for the
user, and the reason if it ends before all agents have come. Nothing of the job runs at this place
itself. Runs on the main thread. Read ``remote.py`` and ``gate.py`` first, ``cluster_job.py`` next.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from kvstore.launch.agents.cluster import Cluster, quoted
from kvstore.launch.agents.remote import AgentPlace
from kvstore.launch.agents.ticket import DIRECTORY_NAME, PROGRAM_NAME
from kvstore.launch.agents.wire import GREETING, AgentLink
from kvstore.launch.job.child import die_with_launcher
from kvstore.launch.job.guardian import GuardianProcess, succeeds
from kvstore.launch.job.places import Event, Finished, LineStream, Note, Place
from kvstore.launch.plan import ProcessSpec

_KEPT_LINES = 200  # the last of them
_ENDING_S = 5.0  # for the command to end by itself once no agent is left, and after SIGTERM
_SHOWN_NAMES = 8
_NO_PROGRAM = re.compile(rf"can't open file '([^']*{re.escape(PROGRAM_NAME)})'")
_CANCEL_S = 30.0
_TROUBLE_S = 1.0  # between one look for it and the next
_ROSTER_S = (5.0, 10.0, 20.0, 40.0, 60.0)  # between one roster and the next


class Carrier(Place):
    """Runs ``argv``, a command of ``cluster``; ``workers`` are its agents' places by their rank."""

    def __init__(
        self,
        cluster: Cluster,
        argv: Sequence[str],
        workers: Sequence[AgentPlace],
        guardian: GuardianProcess,
    ) -> None:
        self._cluster = cluster
        self._workers = workers
        self._guardian = guardian
        self._failure: str | None = None
        self._cancellation: Sequence[str] | None = None
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)  # before all agents had come
        self._unshown: deque[str] = deque(maxlen=_KEPT_LINES)
        self._has_begun = False
        self._is_over = False
        self._hung_up_s = time.monotonic()
        self._rosters = 0
        self._roster_s = self._hung_up_s + _ROSTER_S[0]
        self._trouble_s = self._hung_up_s + _TROUBLE_S
        self._last_came_s = self._hung_up_s
        self._learn_to_cancel("")
        self._process, pipes = _started(argv, cluster.environ, cluster.has_terminal)
        self._streams = [LineStream(pipe, self.heard) for pipe in pipes]
        guardian.watch(self._process.pid)

    @property
    def failure(self) -> str | None:
        """Why there will not be a job: of the command's own, or of an agent."""
        found = [self._failure, *(place.failure for place in self._workers)]
        return next((text for text in found if text is not None), None)

    def awaited(self) -> list[str]:
        return [name for place in self._workers for name in place.awaited()]

    def admit(self, link: AgentLink, greeting: Mapping[str, Any]) -> list[Event]:
        """Take an agent that greeted at the gate. An unknown or taken rank is sent away.

        Or there is no agent, and it says why.
        """
        rank = greeting.get("rank")
        host = str(greeting.get("host"))
        if "error" in greeting:
            link.close()
            self._fail(f"{host}: {greeting['error']}")
            return []
        if self._cluster.only_wishes and not self._is_free(rank):
            rank = next((one for one in range(len(self._workers)) if self._is_free(one)), rank)
        if not isinstance(rank, int) or not 0 <= rank < len(self._workers):
            link.close()
            return [Note(f"{host}: an agent with the rank {rank} came, and there is no such rank")]
        place = self._workers[rank]
        if place.is_connected and not place.is_replaceable:
            link.close()
            return [Note(f"{host}: a second agent with the rank {rank} came and was sent away")]
        # The cluster starts another where it knows that the first is lost.
        events = place.leave("is replaced by another") if place.is_connected else []
        place.label = host
        place.greet(link, greeting)
        self._last_came_s = time.monotonic()
        return events

    def _is_free(self, rank: object) -> bool:
        if not isinstance(rank, int) or not 0 <= rank < len(self._workers):
            return False
        return not self._workers[rank].is_connected

    def start(
        self, specs: Sequence[tuple[int, ProcessSpec]], variables: Mapping[str, str]
    ) -> list[Event]:
        self._has_begun = True
        return []

    def adjust(self, selector: selectors.BaseSelector, *, paused: bool) -> None:
        for stream in self._streams:
            stream.adjust(selector, paused=paused)

    def heard(self, lines: Sequence[bytes]) -> list[Event]:
        """The command has printed something, or one of its agents before it could serve."""
        notes: list[Event] = []
        for line in lines:
            if GREETING in line:
                self._fail(refusal(line))  # the first reason counts
                continue
            text = line.decode(errors="replace").rstrip()
            if not text.strip(" -="):
                continue  # an ornament
            self._learn_to_cancel(text)
            if not self._cluster.is_news(text) or self._is_over:
                continue  # the end of agents is not a failure
            if self._has_begun:
                notes.append(self._note(text))
                continue
            self._said.append(text)
            if self._failure is None:
                self._failure = _not_shared(text) or self._cluster.fatal(text)
            if self._failure is None:  # which is said by itself
                self._unshown.append(text)
        return notes

    def sweep(self) -> list[Event]:
        if self._process.returncode is not None or (code := self._process.poll()) is None:
            return []
        self._end_group()
        if not self.awaited():
            is_news = code != 0 and not self._is_over
            return [Note(f"{self._cluster.program} ended with exit code {code}")] if is_news else []
        for stream in self._streams:
            stream.read_rest()
        if self._failure is None:
            self._failure = self._cluster.explain(list(self._said), code)
        return []

    def tick(self, now_s: float) -> tuple[list[Event], float | None]:
        if self._has_begun or not self.awaited():
            return [], None
        if now_s >= self._trouble_s and self._failure is None:
            self._failure = self._cluster.trouble()
            self._trouble_s = now_s + _TROUBLE_S
        due_s = [self._trouble_s]
        if (connect_s := self._cluster.connect_s) is not None:
            due_s.append(self._last_came_s + connect_s)
            if now_s >= due_s[-1]:
                self._give_up(connect_s)
        events: list[Event] = []
        if now_s >= self._roster_s:
            events += [self._note(text) for text in self._unshown]
            events.append(Note(self._roster()))
            self._unshown.clear()
            self._rosters += 1
            self._roster_s = now_s + _ROSTER_S[min(self._rosters, len(_ROSTER_S) - 1)]
        return events, max(0.0, min(self._roster_s, *due_s) - now_s)

    def finish(self, leftover_s: float) -> list[Event]:
        self._is_over = True
        return [Finished(0)]

    def hang_up(self) -> None:
        self._hung_up_s = time.monotonic()

    def close(self) -> None:
        """Agents whose links are closed end, and so does the command; it is given a moment.

        If it has not ended well by then, or the job has not begun, that is taken out of the
        cluster.
        """
        if self._has_begun:
            self._wait(self._hung_up_s + self._cluster.ending_s)
        self._wait(time.monotonic() + _ENDING_S, self._cluster.is_submitting)
        was_killed = (self._process.poll() or 0) < 0
        if not self._cluster.clears_up:
            self._take_out()
        self._signal(signal.SIGTERM)
        self._wait(time.monotonic() + _ENDING_S)
        if self._cluster.clears_up and (was_killed or self._process.poll() is None):
            self._take_out()  # it could not
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in self._streams:
            stream.close()

    def _fail(self, reason: str) -> None:
        if self._failure is None and not self._has_begun:
            self._failure = reason

    def _note(self, text: str) -> Note:
        """With the command's name in front, once."""
        prefix = f"{self._cluster.program}: "
        return Note(text if text.startswith(prefix) else prefix + text)

    def _roster(self) -> str:
        here = [place for place in self._workers if place.is_connected]
        hosts = _some(sorted({str(place.label) for place in here}))
        there = f" ({len(here)} of {len(self._workers)} are there, on {hosts})" if here else ""
        state = self._cluster.poll()
        return f"waiting for {_some(self.awaited())}{there}" + (f": {state}" if state else "")

    def _give_up(self, after_s: float) -> None:
        said = quoted(self._said)
        state = self._cluster.poll()
        self._fail(
            f"no answer from {_some(self.awaited())} within {after_s:g} s"
            + (f": {state}" if state else "")
            + (f"; {self._cluster.program} said:{said}" if said else "")
        )

    def _wait(self, until_s: float, is_to_go_on: Callable[[], bool] = lambda: True) -> None:
        """For the command's end, reading what it prints, so that it can."""
        with selectors.PollSelector() as selector:
            for stream in self._streams:
                stream.adjust(selector, paused=False)
            while is_to_go_on() and self._process.poll() is None:
                if (left_s := until_s - time.monotonic()) <= 0:
                    return
                for key, _ in selector.select(min(left_s, 0.05)):
                    key.data(0.0)

    def _learn_to_cancel(self, line: str) -> None:
        if self._cancellation is None and (command := self._cluster.cancel(line)):
            self._cancellation = command
            self._guardian.cancel_at_the_end(command)

    def _take_out(self) -> None:
        has_done_well = self._has_begun and self._process.poll() == 0
        if self._cancellation is None or has_done_well:
            return
        # Where it fails, what the command does when it is ended has to do.
        succeeds(self._cancellation, _CANCEL_S, self._cluster.environ)
        self._wait(time.monotonic() + _ENDING_S)

    def _end_group(self) -> None:
        """What the command has left behind, at once: its number may soon be another's."""
        try:
            os.killpg(self._process.pid, signal.SIGTERM)
        except OSError:
            pass

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


def _some(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def _not_shared(line: str) -> str | None:
    """A sentence if ``line`` is Python's, which a host was told to give a program it has not."""
    found = _NO_PROGRAM.search(line)
    if found is None:
        return None
    return (
        f"a host does not find {found[1]}: set {DIRECTORY_NAME} to a directory that all hosts "
        f"share ({line})"
    )


def refusal(line: bytes) -> str:
    """A sentence of the line by which a program says that it cannot become an agent, and why."""
    try:
        found = json.loads(line[line.index(GREETING) + len(GREETING) :])
        return f"{found['host']}: {found['error']}"
    except (ValueError, KeyError, TypeError):
        return line.decode(errors="replace")


def _started(
    argv: Sequence[str], environment: Mapping[str, str], has_terminal: bool
) -> tuple[subprocess.Popen[bytes], list[IO[bytes]]]:
    """The command, and what it prints and complains of. Raises OSError."""
    ours, theirs = os.openpty() if has_terminal else (-1, subprocess.PIPE)
    try:
        process = subprocess.Popen(
            list(argv),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=die_with_launcher(),  # safe: the launcher has one thread
        )
    except OSError:
        if has_terminal:
            os.close(ours)
        raise
    finally:
        if has_terminal:
            os.close(theirs)
    output = os.fdopen(ours, "rb", 0) if has_terminal else process.stdout
    assert output is not None and process.stderr is not None
    return process, [output, process.stderr]
