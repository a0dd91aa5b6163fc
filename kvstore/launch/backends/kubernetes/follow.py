"""Follow the pods of a job: their output, their ends, and why they do not start.

:class:`JobPlace` is the place of a Kubernetes job's processes, for the supervisor
(``launch/job/supervisor.py``). Threads wait for the cluster: one polls the pods and deletes them,
and one for each pod reads its log. Their results reach the main thread as events. Pods are ended
only by deleting the job's Jobs. If the cluster does not answer, calls are repeated for a long time:
a job is not ended only because it cannot be seen. Read ``pods.py`` first.
"""

from __future__ import annotations

import os
import queue
import re
import select
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvstore.launch.backends.kubernetes.cluster import ClusterError, KubeCluster, LogStream
from kvstore.launch.backends.kubernetes.manifest import SCHEDULER_PORT, KubeJob
from kvstore.launch.backends.kubernetes.pods import (
    JobWatch,
    Objects,
    Patience,
    read_pods,
)
from kvstore.launch.job.child import visible
from kvstore.launch.job.places import Event, Finished, IndexedSpecs, Joined, Note, Output, Place
from kvstore.launch.job.report import EndedProcess, complete_line, say
from kvstore.launch.job.signals import ENDING, SignalPipe
from kvstore.launch.options import LaunchError
from kvstore.launch.plan import ProcessSpec

EVERYTHING = "jobs,pods,services,secrets"
_JOINED_LINE = b"all have joined"  # printed by a scheduler whose PS_JOINED_FD is its output
_RETRY_S = 2.0
# After the container's end, a log that fails this many times is lost.
_LAST_TRIES = 5
_TIME = re.compile(rb"\d{4}-\d\d-\d\dT\S{9,}\Z")  # such as 2026-01-31T23:59:59.123456789Z


class PodLog:
    """The log of one pod, which a thread reads to its end.

    A call that follows a log ends whenever a program on the way closes the connection, and may then
    have missed lines. So lines are requested with their times, and a new call reads from the
    beginning and drops the known lines. The log is complete only after a successful call that began
    after the end of the container. Standard output and error of a container are one stream in this
    log.
    """

    def __init__(self, ask: Callable[[], LogStream], pause_s: float) -> None:
        self.is_whole = False
        self.has_ended = threading.Event()
        """Set when the container has ended."""
        self._ask = ask
        self._pause_s = pause_s
        self._stream: LogStream | None = None
        self._is_closed = False

    def read(self, put: Callable[[list[bytes], str], None]) -> None:
        """Read the log to its end; ``put`` gets lines, and why the log is unreadable."""
        last, tries_left = b"", _LAST_TRIES
        while not self._is_closed and not self.is_whole:
            is_last, is_good, refusal = self.has_ended.is_set(), True, ""
            known, rest = last, b""
            try:
                self._stream = self._ask()
                for data in () if self._is_closed else self._stream:
                    *lines, rest = (rest + data).split(b"\n")
                    shown, last = untimed(lines, known, last)
                    put(shown, "")
            except ClusterError as error:
                is_good = error.is_not_found  # the log has no more lines
                refusal = str(error) if error.is_refusal else ""
            tries_left -= is_last and not is_good
            self.is_whole = is_last and (is_good or not tries_left)
            # A program may have ended in the middle of a line.
            put(untimed([rest], known, last)[0] if self.is_whole and rest else [], refusal)
            self.has_ended.wait(self._pause_s) if not is_last else time.sleep(self._pause_s / 4)

    def close(self) -> None:
        """Make the thread that reads the log end soon."""
        self._is_closed = True
        self.has_ended.set()
        if self._stream is not None:
            self._stream.close()


def untimed(lines: Iterable[bytes], known: bytes, last: bytes) -> tuple[list[bytes], bytes]:
    """Return the lines later than ``known`` without their times, and the last time."""
    shown = []
    for line in lines:
        time_text, _, text = line.partition(b" ")
        if not _TIME.match(time_text):
            shown.append(visible(line))
        elif (stamp := time_text.rstrip(b"Z")) > known:
            last = stamp
            shown.append(visible(text))
    return shown, last


class JobPlace(Place):
    """The place of all processes of a job; closing it deletes the job.

    It does not delete a job after losing contact with the cluster.

    ``shown_logs`` is the logs' directory for the line that all have joined; None omits the line.
    """

    def __init__(
        self,
        cluster: KubeCluster,
        job: KubeJob,
        specs: Sequence[ProcessSpec],
        patience: Patience,
        shown_logs: Path | None,
    ) -> None:
        self.is_left_alone = False
        self._cluster = cluster
        self._job = job
        self._specs = specs
        self._patience = patience
        self._shown_logs = shown_logs
        self._is_created = False
        self._watch = JobWatch(specs, job, patience, time.monotonic())
        self._logs: dict[int, PodLog] = {}
        self._finished_by_s: float | None = None
        self._signals = self._deleted = 0
        self._threads = _Threads(1 + len(specs))
        self._look_now = threading.Event()

    def create(self, documents: Sequence[Mapping[str, Any]]) -> None:
        """Create all objects. Raises :class:`LaunchError` with the cluster's reason.

        The scheduler's Job is created first and owns the Secret and Services, which are deleted
        with it: Jobs are removed some time after their end (``ttlSecondsAfterFinished``), other
        objects never.
        """
        jobs = [each for each in documents if each["kind"] == "Job"]
        owned = [each for each in documents if each["kind"] != "Job"]
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": self._job.job_name("scheduler")}
        warnings: list[str] = []
        try:
            self._cluster.version()  # if this fails, nothing has been created
            self._is_created = True
            for each in (jobs[0], *owned, *jobs[1:]):
                if each in owned:
                    each["metadata"]["ownerReferences"] = [owner]
                uid, said = self._cluster.create(each)
                owner.setdefault("uid", uid)
                warnings += said
        except ClusterError as error:
            if "uid" not in owner and error.status is not None:  # the first object was refused
                self._is_created = False
            raise LaunchError(f"cannot create the job: {error}", exit_code=1) from error
        for warning in dict.fromkeys(warnings):  # such as about a pod security standard
            say(f"the cluster warns: {warning}")

    # -- the main thread: the interface for the supervisor ------------------------------------

    def start(self, specs: IndexedSpecs, variables: Mapping[str, str]) -> list[Event]:
        self._threads.start(self._look)
        shown = f"job {self._job.name}: {len(specs)} pods, label {self._job.selector}"
        # The report that all have joined comes late, or never if no log can be read. So servers get
        # their time to end in any case.
        return [Note(shown), Joined()]

    def send_signal(self, number: int) -> None:
        """Delete the Jobs at the first signal; at later signals, end the pods at once."""
        self._watch.is_ending = True
        self._signals += 1
        self._look_now.set()

    def adjust(self, selector: selectors.BaseSelector, *, paused: bool) -> None:
        selector.register(self._threads.woken_fd, selectors.EVENT_READ, self._threads.take)
        (self._threads.may_read.clear if paused else self._threads.may_read.set)()

    def tick(self, now_s: float) -> tuple[list[Event], float | None]:
        if self._finished_by_s is None:
            return [], None
        is_read = all(log.is_whole for log in self._logs.values())
        if not is_read and now_s < self._finished_by_s:
            return [], self._finished_by_s - now_s
        self._finished_by_s = None
        return [*self._threads.take(now_s), Finished(0)], None

    def finish(self, leftover_s: float) -> list[Event]:
        """Wait, for a limited time, for the ends of the logs."""
        self._finished_by_s = time.monotonic() + self._patience.last_output_s
        for log in self._logs.values():
            log.has_ended.set()
        return []

    def hang_up(self) -> None:
        self._threads.is_over.set()
        self._look_now.set()
        for log in list(self._logs.values()):
            log.close()

    def close(self) -> None:
        """Delete all objects with the job's label, and retry for a while."""
        self._threads.end()
        until_s = time.monotonic() + self._patience.delete_s
        with SignalPipe() as signals:
            while self._is_created and not self.is_left_alone:
                try:
                    self._cluster.delete(self._job.selector)
                    return
                except ClusterError as error:
                    if time.monotonic() >= until_s or set(signals.arrived()) & set(ENDING):
                        say(f"could not delete the job: {error}; do it by '{self._by_hand()}'")
                        return
                select.select([signals.fd], [], [], _RETRY_S)

    def explained(self, ended: EndedProcess) -> EndedProcess:
        """Return the record with the facts on the process's pod and on its end."""
        index = ended.exit.index
        pod, ending = self._watch.pods.get(index), self._watch.endings.get(index)
        stopped = ended.exit.stopped or index in self._watch.ended_by_kubernetes
        return replace(
            ended,
            exit=replace(ended.exit, stopped=stopped),
            place="no pod" if pod is None else pod.place,
            reason="" if ending is None else ending.reason,
        )

    def _by_hand(self) -> str:
        return self._cluster.kubectl("delete", EVERYTHING, "-l", self._job.selector)

    # -- other threads ------------------------------------------------------------------------

    def _look(self) -> None:
        """Poll the Jobs and their pods until the place closes; delete them on request."""
        while not self._threads.is_over.is_set():
            self._delete()
            self._look_once()
            self._look_now.wait(self._patience.poll_s)
            self._look_now.clear()

    def _look_once(self) -> None:
        """Poll once. Raises :class:`LaunchError` if the job is lost or cannot start."""
        found, ask, selector = self._watch, self._cluster.objects, self._job.selector
        warnings: Objects = ()
        try:
            jobs = ask("job", label_selector=selector)
            pods = ask("pod", label_selector=selector)
        except ClusterError as error:
            if error.is_refusal and not found.had_jobs:
                raise LaunchError(f"cannot follow the job: {error}", exit_code=1) from error
            self._threads.tell(self._not_seen(str(error), time.monotonic()))
            return
        if found.is_starting:
            with suppress(ClusterError):  # only reasons are missing then
                warnings = ask("event", field_selector="type=Warning")
        self._threads.tell(found.saw(jobs, pods, warnings, time.monotonic()))
        for index, pod in found.pods.items():
            if pod.has_started and index not in self._logs:
                self._follow_log(index, pod.name)
        for index in self._logs.keys() & found.endings.keys():
            self._logs[index].has_ended.set()
        if (why := found.gives_up(time.monotonic())) is not None:
            raise LaunchError(f"the job was not started: {why}", exit_code=1)

    def _not_seen(self, why: str, now_s: float) -> list[Event]:
        lost = self._watch.lost_sight(now_s)
        if lost is None:
            return self._watch.no_answer(why, now_s)
        self.is_left_alone = True
        look = self._cluster.kubectl("get", "pods", "-l", self._job.selector)
        raise LaunchError(
            f"{lost}; the job was left alone and may still run: inspect it with '{look}', end it "
            f"with '{self._by_hand()}'",
            exit_code=1,
        )

    def _follow_log(self, index: int, pod: str) -> None:
        spec, said = self._specs[index], set[str]()

        def put(lines: list[bytes], refusal: str) -> None:
            self._threads.may_read.wait()
            events: list[Event] = [Output(index, False, lines)]
            if spec.role == "scheduler" and _JOINED_LINE in lines:
                lines.remove(_JOINED_LINE)
                events += self._complete()
            if refusal and not said:
                said.add(refusal)
                events.append(Note(f"no log of {spec.name}: {refusal}"))
            self._threads.tell(events)

        ask = partial(self._cluster.log, pod, spec.role)
        self._logs[index] = log = PodLog(ask, self._patience.poll_s)
        self._threads.start(partial(log.read, put))

    def _complete(self) -> list[Event]:
        """Return the line that all have joined, with the pods' current nodes."""
        if self._shown_logs is None:
            return []
        pods = dict(self._watch.pods)
        with suppress(ClusterError):
            items = self._cluster.objects("pod", label_selector=self._job.selector)
            pods |= read_pods(items, self._specs)
        nodes = dict.fromkeys(pod.node for _, pod in sorted(pods.items())[1:])
        address = f"{self._job.job_name('scheduler')}:{SCHEDULER_PORT}"
        return [Note(complete_line(self._specs, nodes, address, str(self._shown_logs)))]

    def _delete(self) -> None:
        """Delete the Jobs, then hurry the pods; an error is retried at the next poll."""
        while self._deleted < self._signals:
            kinds, grace_s = (("pod",), 1) if self._deleted else (("job",), None)
            try:
                self._cluster.delete(self._job.selector, kinds, grace_s)
            except ClusterError as error:
                if self._watch.is_heard:  # otherwise the polls have reported it
                    self._threads.tell([Note(f"cannot delete the job yet: {error}")])
                return
            self._deleted += 1


class _Threads:
    """Threads that wait for the cluster, and their events for the main thread.

    Parts of the client are in Rust, and an open call would abort them at the interpreter's end. So
    :meth:`end` waits for the threads.
    """

    def __init__(self, most: int) -> None:
        self.is_over = threading.Event()
        """Set when the threads must end."""
        self.may_read = threading.Event()
        """Cleared while the terminal is paused, so that no more logs are read."""
        self.woken_fd, self._wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._told: queue.SimpleQueue[Sequence[Event] | BaseException] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(most)

    def start(self, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread; :meth:`take` raises its error."""
        self._pool.submit(work).add_done_callback(self._done)

    def _done(self, work: Future[None]) -> None:
        if (error := work.exception()) is not None:
            self.tell(error)

    def tell(self, found: Sequence[Event] | BaseException) -> None:
        self._told.put(found)
        with suppress(BlockingIOError):  # the pipe is full, so the main thread will wake up
            os.write(self._wake_fd, b".")

    def take(self, now_s: float) -> list[Event]:
        """Return the events of all threads; raise a thread's error."""
        with suppress(BlockingIOError):
            os.read(self.woken_fd, 4096)
        events: list[Event] = []
        while not self._told.empty():
            found = self._told.get()
            if isinstance(found, BaseException):
                raise found
            events += found
        return events

    def end(self) -> None:
        self.may_read.set()
        self._pool.shutdown()
        os.close(self.woken_fd)
        os.close(self._wake_fd)
