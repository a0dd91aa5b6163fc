"""Follows the pods of a job to their end: what they print, how they end, why they do not start.

The shell around ``launch/job/lifecycle.py`` for Kubernetes: one loop on the main thread over one
kubectl that looks at all pods every few seconds, one that follows the log of each pod, and the
signals that reach the launcher. Ends pods by deleting the job's Jobs, never otherwise. A cluster
that does not answer is asked again, for a long time: a job is not ended because it cannot be seen.
Read ``state.py`` and ``watch.py`` first.
"""

from __future__ import annotations

import json
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

from kvstore.launch.backends.kubernetes.kubectl import Commands, Kubectl, KubectlResult
from kvstore.launch.backends.kubernetes.logs import JOINED_LINE, PodLog
from kvstore.launch.backends.kubernetes.manifest import SCHEDULER_PORT, KubeJob, adopted, to_yaml
from kvstore.launch.backends.kubernetes.state import Pod, Sight, read_sight, read_warnings
from kvstore.launch.backends.kubernetes.watch import JobWatch, Patience
from kvstore.launch.job.child import Console
from kvstore.launch.job.lifecycle import Effect, Lifecycle, Phase, Say, SendSignal
from kvstore.launch.job.report import EndedProcess, complete_line
from kvstore.launch.job.signals import ENDING, SignalPipe
from kvstore.launch.options import LaunchError
from kvstore.launch.plan import ProcessSpec

_LONGEST_WAIT_S = 0.5
_ADOPTIONS = 3


@dataclass(frozen=True)
class Followed:
    """How it ended. ``lost_sight``: the cluster was silent for too long; the job may run on."""

    specs: Sequence[ProcessSpec]
    ended: Sequence[EndedProcess]
    lifecycle: Lifecycle
    start_s: float
    obstacle: str | None
    lost_sight: str | None


class Follower:
    """Follows one job that has been applied; its maker closes it."""

    def __init__(
        self,
        kubectl: Kubectl,
        job: KubeJob,
        specs: Sequence[ProcessSpec],
        log_dir: Path,
        patience: Patience,
        signals: SignalPipe,
        *,
        show_status: bool = True,
    ) -> None:
        self._kubectl = kubectl
        self._job = job
        self._specs = specs
        self._log_dir = log_dir
        self._patience = patience
        self._signals = signals
        now_s = time.monotonic()
        self._lifecycle = Lifecycle(specs, patience.lifecycle)
        # That all have joined is heard late, or never where no log can be read: servers get their
        # time to end in any case.
        self._lifecycle.joined(now_s, is_certain=False)
        self._is_complete = False
        self._says_complete = show_status
        self._watch = JobWatch(specs, job, patience, now_s)
        self._logs: dict[int, PodLog] = {}
        self._commands = Commands(kubectl, 2 * patience.request_s)
        self._output = Console(1)
        self._errors = Console(2)
        self._adoptions_left = _ADOPTIONS
        self._delete_words: tuple[str, ...] | None = None

    def close(self) -> None:
        """End every kubectl that still runs."""
        self._commands.close()
        for log in self._logs.values():
            log.close()

    def say(self, text: str) -> None:
        """A line of the launcher's own, on standard error."""
        self._errors.write(f"[launcher] {text}\n".encode(errors="replace"))

    def follow(self) -> Followed:
        """Serve the job until all of its pods have ended, or the cluster has been silent too long.

        The output of the pods has been written then; nothing has been deleted after a success.
        """
        lost_sight = None
        while self._lifecycle.phase is not Phase.ENDED:
            self._serve()
            now_s = time.monotonic()
            self._carry_out(self._lifecycle.tick(now_s))
            self._begin_commands(now_s)
            if self._lifecycle.phase is not Phase.STOPPING:
                lost_sight = self._watch.lost_sight(now_s)
            if lost_sight is not None:
                break
        if lost_sight is None:
            self._read_last_output()
        self._write_last_output()
        return Followed(
            self._specs,
            self._ended(),
            self._lifecycle,
            self._watch.start_s,
            self._watch.verdict,
            lost_sight,
        )

    # -- the loop -----------------------------------------------------------------------------

    def _serve(self) -> None:
        """Wait for something to happen, not for long, and handle it: signals first."""
        readers = self._commands.readers()
        poll = select.poll()
        poll.register(self._signals.fd, select.POLLIN)
        full = self._output.full or self._errors.full
        for log in self._logs.values() if not full else ():
            for stream in log.streams:
                readers[stream.fileno()] = partial(self._read_log, log, stream)
        for console in (self._output, self._errors):
            if console.waiting:
                readers[console.fd] = console.write_pending
                poll.register(console.fd, select.POLLOUT)
        for fd in readers:
            if fd not in (self._output.fd, self._errors.fd):
                poll.register(fd, select.POLLIN)
        ready = poll.poll(self._wait_s() * 1000)
        self._handle_signals()
        for fd, _ in ready:
            if fd in readers:
                readers[fd]()

    def _wait_s(self) -> float:
        now_s = time.monotonic()
        until_s = [now_s + _LONGEST_WAIT_S]
        if self._lifecycle.phase is not Phase.ENDED:
            until_s.append(self._commands.due_s("look", self._patience.poll_s))
        if self._lifecycle.deadline_s is not None:
            until_s.append(self._lifecycle.deadline_s)
        return max(0.0, min(until_s) - now_s)

    def _handle_signals(self) -> None:
        for number in self._signals.arrived():
            if number in ENDING:
                self.say(f"got {number.name}: ending the job")
                self._carry_out(self._lifecycle.signalled(number, time.monotonic()))

    def _read_log(self, log: PodLog, stream: IO[bytes]) -> None:
        if stream.closed:
            return
        lines = log.read(stream, time.monotonic())
        if log.spec.role == "scheduler" and JOINED_LINE in lines:
            lines.remove(JOINED_LINE)
            self._is_complete = True
        self._output.write(log.record(lines))
        self._say_complete()
        if (complaint := log.take_complaint()) is not None:
            self.say(f"no log of {log.spec.name}: {complaint}")

    def _say_complete(self) -> None:
        """Say that all have joined, when that was heard and all pods have been seen."""
        watch = self._watch
        is_due = self._is_complete and self._says_complete
        if not is_due or watch.is_starting or watch.is_ending:
            return
        self._says_complete = False
        nodes = dict.fromkeys(pod.node for index, pod in sorted(watch.pods.items()) if index)
        address = f"{self._job.job_name('scheduler')}:{SCHEDULER_PORT}"
        self.say(complete_line(self._specs, nodes, address, str(self._log_dir)))

    def _begin_commands(self, now_s: float) -> None:
        """Start what is due; at most one command of a kind runs at a time."""
        commands, patience = self._commands, self._patience
        commands.tick(now_s)
        if self._lifecycle.phase is Phase.ENDED:
            return
        if now_s >= commands.due_s("look", patience.poll_s):
            commands.begin("look", self._looked, *self._get("pods,jobs", "-l", self._job.selector))
        if self._delete_words and now_s >= commands.due_s("delete", patience.poll_s):
            words = self._delete_words
            commands.begin("delete", partial(self._deleted, words), *words)
        if self._watch.is_starting and now_s >= commands.due_s("events", patience.events_s):
            words = self._get("events", "--field-selector=type=Warning")
            commands.begin("events", self._heard, *words)
        for log in self._logs.values():
            log.tick(now_s, patience.poll_s)

    def _get(self, what: str, *words: str) -> tuple[str, ...]:
        timeout = f"--request-timeout={self._patience.request_s:g}s"
        return ("get", what, *words, "--output=json", timeout)

    # -- answers ------------------------------------------------------------------------------

    def _looked(self, answer: KubectlResult) -> None:
        now_s = time.monotonic()
        document = _parsed(answer)
        if document is None:
            if answer.is_refusal and not self._watch.has_answered:
                raise LaunchError(f"cannot follow the job: {answer.sentence}", exit_code=1)
            self._say_all(self._watch.no_answer(answer.sentence, now_s))
            return
        sight = read_sight(document, self._job.job_id, self._specs)
        self._say_all(self._watch.saw(sight, now_s))
        for pod in self._watch.pods.values():
            self._follow_log(pod)
        self._say_complete()
        self._adopt(sight)
        for statuses in self._watch.take_endings():
            for index in statuses:
                if index in self._logs:
                    self._logs[index].container_has_ended()
            self._carry_out(self._lifecycle.exited(statuses, now_s))
        self._consider_obstacle(now_s)

    def _heard(self, answer: KubectlResult) -> None:
        document = _parsed(answer)
        if document is not None:
            self._watch.heard(read_warnings(document))

    def _deleted(self, words: tuple[str, ...], answer: KubectlResult) -> None:
        if answer.is_good and self._delete_words == words:
            self._delete_words = None
        elif answer.is_good:  # meanwhile more was asked for
            self._commands.hasten("delete")
        elif self._watch.is_heard:  # else the looks have said so
            self.say(f"cannot delete the job yet: {answer.sentence}")

    def _adopt(self, sight: Sight) -> None:
        uid = sight.jobs.get("scheduler")
        is_due = self._adoptions_left > 0 and not self._commands.runs("adopt")
        if not uid or not is_due or self._lifecycle.phase is not Phase.RUNNING:
            return
        self._adoptions_left -= 1
        text = to_yaml(adopted(self._job, uid))
        self._commands.begin("adopt", self._has_adopted, "apply", "--filename=-", stdin=text)

    def _has_adopted(self, answer: KubectlResult) -> None:
        if answer.is_good:
            self._adoptions_left = 0

    def _follow_log(self, pod: Pod) -> None:
        if pod.index in self._logs or not pod.has_started:
            return
        spec = self._specs[pod.index]
        path = self._log_dir / f"{spec.name.replace(' ', '-')}.log"
        try:
            file = open(path, "wb", buffering=0)  # noqa: SIM115 - the log owns it
        except OSError as error:
            self.say(f"there will be no log file of {spec.name}: {path}: {error.strerror}")
            file = None
        self._logs[pod.index] = PodLog(self._kubectl, spec, pod.name, pod.node, file)

    def _consider_obstacle(self, now_s: float) -> None:
        if self._lifecycle.phase is not Phase.RUNNING:
            return
        self._say_all(self._watch.remarks(now_s))
        if self._watch.gives_up(now_s) is not None:
            self._carry_out(self._lifecycle.cannot_start(now_s))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        """The first signal is the deletion of the Jobs here; any further one hurries the pods."""
        for effect in effects:
            if isinstance(effect, Say):
                self.say(effect.text.replace("even after SIGKILL", "although they are deleted"))
            if not isinstance(effect, SendSignal):
                continue
            how = ("pods", "--grace-period=1") if self._watch.is_ending else ("jobs,pods",)
            self._watch.is_ending = True
            where = ("-l", self._job.selector, "--wait=false", "--ignore-not-found")
            timeout = f"--request-timeout={self._patience.request_s:g}s"
            self._delete_words = ("delete", *how, *where, timeout)
            self._commands.hasten("look")
            self._commands.hasten("delete")

    def _say_all(self, sentences: Sequence[str]) -> None:
        for sentence in sentences:
            self.say(sentence)

    # -- the end ------------------------------------------------------------------------------

    def _read_last_output(self) -> None:
        """Logs of ended containers come to their end; if not, they are not waited for for ever."""
        until_s = time.monotonic() + self._patience.last_output_s
        for log in self._logs.values():
            log.container_has_ended()
        while time.monotonic() < until_s and not all(log.is_whole for log in self._logs.values()):
            for log in self._logs.values():
                log.tick(time.monotonic(), self._patience.poll_s / 4)
            self._serve()

    def _write_last_output(self) -> None:
        """Wait for a slow reader, but not after a signal."""
        for console in (self._output, self._errors):
            while console.waiting:
                console.write_pending(self._patience.last_output_s)
                if set(self._signals.arrived()) & set(ENDING) or self._lifecycle.interrupted_by:
                    return

    def _ended(self) -> list[EndedProcess]:
        found = []
        for index, each in sorted(self._lifecycle.exits.items()):
            ending, pod = self._watch.endings.get(index), self._watch.pods.get(index)
            log = self._logs.get(index)
            lines = [line.decode(errors="replace") for line in log.last_lines] if log else []
            stopped = each.stopped or index in self._watch.ended_by_kubernetes
            found.append(
                EndedProcess(
                    self._specs[index],
                    0,
                    replace(each, stopped=stopped),
                    lines,
                    place=pod.place if pod is not None else "no pod",
                    reason=ending.reason if ending is not None else "",
                )
            )
        return found


def _parsed(answer: KubectlResult) -> dict[str, object] | None:
    if not answer.is_good:
        return None
    try:
        document = json.loads(answer.output)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None
