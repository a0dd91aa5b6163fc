"""The command that starts a job's agents on other machines, as a place of its own.

``mpirun``, ``srun``, ``qsub`` and the like are children of the launcher. They start agents, which
come to the launcher's gate; each serves one process. What the command prints are notes for the
user, and the reason if it ends before all agents have come. Nothing of the job runs at this place
itself. Runs on the main thread. Read ``remote.py`` and ``gate.py`` first, ``carried.py`` next.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from kvstore.launch.agent import GREETING
from kvstore.launch.child import die_with_launcher
from kvstore.launch.gate import Gate
from kvstore.launch.guardian_process import GuardianProcess
from kvstore.launch.lines import LineSplitter
from kvstore.launch.link import Link
from kvstore.launch.places import Event, Finished, Note
from kvstore.launch.plan import ProcessSpec
from kvstore.launch.remote import AgentPlace

_READ_BYTES = 64 * 1024
_KEPT_LINES = 200
_ENDING_S = 5.0  # for the command to end by itself once no agent is left, and after SIGTERM
_ROSTER_S = (5.0, 10.0, 20.0, 40.0, 60.0)  # between one roster and the next

Explain = Callable[[Sequence[str], int], str]
"""What a command said and its exit code (negative for a signal), as a sentence."""


class Carrier:
    """``crew`` are the places of the agents by their rank.

    ``explain`` is asked when the command ends too early; ``fatal`` of each line that it prints
    before, and gives a sentence when no agent can come after such a line; ``state`` what the job
    waits for, in a few words or none. ``name`` is the command's for people.
    """

    label: str | None = None

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        crew: Sequence[AgentPlace],
        guardian: GuardianProcess,
        explain: Explain,
        fatal: Callable[[str], str | None],
        state: Callable[[], str],
        name: str = "",
    ) -> None:
        self._failure: str | None = None
        self._name = name or os.path.basename(argv[0])
        self._crew = crew
        self._explain = explain
        self._fatal = fatal
        self._state = state
        self._gate: Gate | None = None
        self._said: list[str] = []
        self._shown = 0  # of what it said, by a roster
        self._has_ended = False
        self._has_begun = False
        self._hung_up_s = time.monotonic()
        self._rosters = 0
        self._roster_s = self._hung_up_s + _ROSTER_S[0]
        self._process = subprocess.Popen(
            list(argv),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=die_with_launcher(),  # safe: the launcher has one thread
        )
        guardian.watch(self._process.pid)
        assert self._process.stdout and self._process.stderr
        self._streams = [_Stream(self, self._process.stdout), _Stream(self, self._process.stderr)]

    @property
    def failure(self) -> str | None:
        """Why there will not be a job: of the command's own, or of an agent."""
        found = [self._failure, *(place.failure for place in self._crew)]
        return next((text for text in found if text is not None), None)

    def serve(self, gate: Gate) -> None:
        """Let the agents in at ``gate``, which this place owns from now on."""
        self._gate = gate

    def awaited(self) -> list[str]:
        return [name for place in self._crew for name in place.awaited()]

    def admit(self, link: Link, greeting: Mapping[str, Any]) -> list[Event]:
        """An agent has greeted at the gate. A rank that is none, or taken, is sent away."""
        rank = greeting.get("rank")
        host = str(greeting.get("host"))
        if not isinstance(rank, int) or not 0 <= rank < len(self._crew):
            link.close()
            return [Note(f"{host}: an agent with the rank {rank} came, and there is no such rank")]
        place = self._crew[rank]
        if place.is_connected and not place.is_replaceable:
            link.close()
            return [Note(f"{host}: a second agent with the rank {rank} came and was sent away")]
        # The cluster starts another where it knows that the first is lost.
        events = place.leave("is replaced by another") if place.is_connected else []
        place.label = host
        place.greet(link, greeting)
        return events

    def start(
        self, specs: Sequence[tuple[int, ProcessSpec]], variables: Mapping[str, str]
    ) -> list[Event]:
        """All agents have come: nobody else is let in."""
        self._has_begun = True
        if self._gate is not None:
            self._gate.close()
        return []

    def send_signal(self, number: int) -> None:
        """The agents get it over their links."""

    def adjust(self, selector: selectors.BaseSelector, *, paused: bool) -> None:
        if self._gate is not None and not self._has_begun:
            self._gate.adjust(selector)
        watched = selector.get_map()
        for stream in self._streams:
            stream.selector = selector
            if paused and stream.fd in watched:
                selector.unregister(stream.fd)
            elif not paused and stream.fd not in watched:
                selector.register(stream.fd, selectors.EVENT_READ, stream)

    def heard(self, lines: Sequence[bytes]) -> list[Event]:
        """The command has printed something, or one of its agents before it could serve."""
        notes: list[Event] = []
        for line in lines:
            if GREETING in line:
                self._refuse(line)
                continue
            text = line.decode(errors="replace").rstrip()
            if not text.strip(" -="):
                continue  # an ornament
            if self._has_begun:
                notes.append(Note(f"{self._name}: {text}"))
                continue
            del self._said[_KEPT_LINES:]
            self._said.append(text)
            if self._failure is None:
                self._failure = self._fatal(text)
        return notes

    def sweep(self) -> list[Event]:
        if self._has_ended or (code := self._process.poll()) is None:
            return []
        self._has_ended = True
        if not self.awaited():
            return [Note(f"{self._name} ended with exit code {code}")] if code else []
        for stream in list(self._streams):
            stream.read_rest()
        if self._failure is None:
            self._failure = self._explain(self._said[self._shown :], code)
        return []

    def tick(self, now_s: float) -> tuple[list[Event], float | None]:
        patience_s = None if self._gate is None or self._has_begun else self._gate.tick(now_s)
        if self._has_begun or not self.awaited():
            return [], patience_s
        events: list[Event] = []
        if now_s >= self._roster_s:
            events += [Note(f"{self._name}: {text}") for text in self._said[self._shown :]]
            events.append(Note(self._roster()))
            self._shown = len(self._said)
            self._rosters += 1
            self._roster_s = now_s + _ROSTER_S[min(self._rosters, len(_ROSTER_S) - 1)]
        left_s = self._roster_s - now_s
        return events, left_s if patience_s is None else min(left_s, patience_s)

    def finish(self, leftover_s: float) -> list[Event]:
        return [Finished(0)]

    def hang_up(self) -> None:
        self._hung_up_s = time.monotonic()

    def close(self) -> None:
        """Agents whose links are closed end, and so does the command; it is given a moment."""
        if self._gate is not None:
            self._gate.close()
        if self._has_begun:
            self._wait(self._hung_up_s + _ENDING_S)
        self._signal(signal.SIGTERM)
        self._wait(time.monotonic() + _ENDING_S)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in list(self._streams):
            stream.close()

    def drop(self, stream: _Stream) -> None:
        """It has ended."""
        self._streams.remove(stream)

    def _refuse(self, line: bytes) -> None:
        """One that would have become an agent says why it cannot; the first reason counts."""
        try:
            found = json.loads(line[line.index(GREETING) + len(GREETING) :])
            reason = f"{found['host']}: {found['error']}"
        except (ValueError, KeyError, TypeError):
            reason = line.decode(errors="replace")
        if self._failure is None and not self._has_begun:
            self._failure = reason

    def _roster(self) -> str:
        here = [place for place in self._crew if place.is_connected]
        hosts = ", ".join(sorted({str(place.label) for place in here}))
        there = f" ({len(here)} of {len(self._crew)} are there, on {hosts})" if here else ""
        state = self._state()
        return f"waiting for {', '.join(self.awaited())}{there}" + (f": {state}" if state else "")

    def _wait(self, until_s: float) -> None:
        """For the command's end, reading what it prints, so that it can."""
        with selectors.PollSelector() as selector:
            for stream in self._streams:
                selector.register(stream.fd, selectors.EVENT_READ, stream)
            while self._process.poll() is None and (left_s := until_s - time.monotonic()) > 0:
                for key, _ in selector.select(min(left_s, 0.05)):
                    if not key.data.read()[1]:
                        selector.unregister(key.fd)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


class _Stream:
    """The command's standard output or error, as a source."""

    def __init__(self, carrier: Carrier, pipe: IO[bytes]) -> None:
        self.fd = pipe.fileno()
        self.selector: selectors.BaseSelector | None = None
        self._carrier = carrier
        self._pipe = pipe
        self._splitter = LineSplitter()
        os.set_blocking(self.fd, False)

    def handle(self, now_s: float) -> list[Event]:
        lines, is_open = self.read()
        if not is_open:
            self.close()
        return self._carrier.heard(lines)

    def read(self) -> tuple[list[bytes], bool]:
        """The lines that one read has completed, and whether there may be more."""
        try:
            data = os.read(self.fd, _READ_BYTES)
        except BlockingIOError:
            return [], True
        return (self._splitter.feed(data, 0.0), True) if data else (self._splitter.finish(), False)

    def read_rest(self) -> None:
        """What the command has left when it ended; others may hold the pipe open."""
        lines, _ = self.read()
        self._carrier.heard([*lines, *self._splitter.finish()])

    def close(self) -> None:
        if self.selector is not None and self.fd in self.selector.get_map():
            self.selector.unregister(self.fd)
        self._pipe.close()
        self._carrier.drop(self)
