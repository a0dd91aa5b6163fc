"""Follows the pods of a job to their end: what they print, how they end, why they do not start.

The shell around ``launch/job/lifecycle.py`` for Kubernetes. The main thread decides, prints and
keeps what is known; it waits for the signals that reach the launcher and for the threads beside it,
each of which waits for the cluster: one for a question that is open, one for the log of each pod.
Ends pods by deleting the job's Jobs, never otherwise. A cluster that does not answer is asked
again, for a long time: a job is not ended because it cannot be seen. Read ``pods.py`` first.
"""

from __future__ import annotations

import calendar
import math
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvstore.launch.backends.kubernetes.cluster import ClusterError, KubeCluster, LogStream
from kvstore.launch.backends.kubernetes.manifest import SCHEDULER_PORT, KubeJob
from kvstore.launch.backends.kubernetes.pods import JobWatch, Object, Patience, Pod, Sight
from kvstore.launch.job.child import Console, LineSplitter
from kvstore.launch.job.lifecycle import Effect, Exit, Lifecycle, Phase, Say, SendSignal
from kvstore.launch.job.report import EndedProcess, JobReport, ProcessRecord, complete_line
from kvstore.launch.job.signals import ENDING, SignalPipe
from kvstore.launch.options import LaunchError
from kvstore.launch.plan import ProcessSpec

JOINED_LINE = b"all have joined"
"""What a scheduler with ``--joined-fd`` writes."""
_LONGEST_WAIT_S = 0.5
_LONGEST_LINE_BYTES = 1 << 20
# After the container's end: a log that cannot be read so often is gone.
_LAST_TRIES = 5
# How much of a log is read again, beside its age: clocks of nodes differ.
_OVERLAP_S = 300


class HelperThreads:
    """Threads that wait for the cluster, and what they have for the main thread.

    That waits until ``fd`` is readable.
    """

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)
        self.is_over = threading.Event()
        """Set when they are to end."""
        self.may_read = threading.Event()
        """Not set while the terminal is paused: then logs are not read on."""
        self._threads: list[threading.Thread] = []
        self._answers: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def start(self, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread; what it raises, :meth:`take` raises."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.put(partial(_throw, error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._threads.append(thread)

    def put(self, answer: Callable[[], None]) -> None:
        """Have the main thread call ``answer``."""
        self._answers.put(answer)
        with suppress(BlockingIOError):  # it is awake
            os.write(self._write_fd, b".")

    def take(self) -> None:
        """Call what the threads have put."""
        with suppress(BlockingIOError):
            os.read(self.fd, 4096)
        while not self._answers.empty():
            self._answers.get()()

    def end(self) -> None:
        """Have them end and wait for it; no call takes longer than its timeout.

        The client has parts in Rust: a call that is open when the interpreter ends would abort it.
        """
        self.may_read.set()
        for thread in self._threads:
            thread.join()
        os.close(self.fd)
        os.close(self._write_fd)


def _throw(error: BaseException) -> None:
    raise error


class TimedLines:
    """Pure: bytes of a log with timestamps in; lines without times out, each once."""

    def __init__(self) -> None:
        self._last = b""
        self._rest = b""
        self._before = b""
        self._splitter = LineSplitter()

    def age_s(self, now_s: float) -> int | None:
        """Return how old the last line is at most; None where all is to be read."""
        if not self._last:
            return None
        last = time.strptime(self._last[:19].decode(), "%Y-%m-%dT%H:%M:%S")
        age_s = int(now_s) - calendar.timegm(last) + _OVERLAP_S
        return age_s if age_s > 0 else None

    def begin(self) -> None:
        """A new call: what it repeats is dropped."""
        self._rest = b""
        self._before = self._last

    def feed(self, data: bytes, now_s: float) -> list[bytes]:
        """Take what was read; return the lines that it completes."""
        *complete, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE_BYTES:
            complete.append(self._rest)
            self._rest = b""
        return [shown for line in complete for shown in self._line(line, now_s)]

    def finish(self, now_s: float) -> list[bytes]:
        """The log is whole; a program may have ended within a line."""
        rest, self._rest = self._rest, b""
        return (self._line(rest, now_s) if rest else []) + self._splitter.finish()

    def _line(self, line: bytes, now_s: float) -> list[bytes]:
        stamp, _, text = line.partition(b" ")
        if not _is_time(stamp):
            return self._splitter.feed(line + b"\n", now_s)
        if self._before and _sortable(stamp) <= _sortable(self._before):
            return []
        self._last = stamp
        return self._splitter.feed(text + b"\n", now_s)


def _is_time(word: bytes) -> bool:
    """As in ``2026-01-31T23:59:59.123456789Z``."""
    return len(word) >= 20 and word[4:5] == b"-" and word[10:11] == b"T" and word[:4].isdigit()


def _sortable(stamp: bytes) -> tuple[bytes, bytes]:
    """Zeros at the end of the fraction are left out in the text."""
    return stamp[:19], stamp[19:].strip(b".Z").ljust(9, b"0")


class PodLog:
    """The log of one pod: what a thread reads of it, and what is shown and kept.

    A call that follows a log ends whenever somebody on the way hangs up, and may then have missed
    lines. So lines are asked for with their times, a new call begins before the last one ended,
    and the log is whole only when a call that began after the end of the container has ended well.
    Standard output and error of a container are one stream there.
    """

    def __init__(
        self, cluster: KubeCluster, pod: Pod, record: ProcessRecord, pause_s: float
    ) -> None:
        self.record = record
        self.is_whole = False
        self.has_ended = threading.Event()
        """Set when the container has ended."""
        self._cluster = cluster
        self._pod = pod.name
        self._pause_s = pause_s
        self._stream: LogStream | None = None
        self._is_closed = False

    def read(self, put: Callable[[list[bytes], str | None], None]) -> None:
        """Read it to its end, in a thread; ``put`` takes lines, and why they cannot be read."""
        lines, tries_left = TimedLines(), _LAST_TRIES
        while not self._is_closed:
            is_last, refusal = self.has_ended.is_set(), None
            lines.begin()
            try:
                since_s = lines.age_s(time.time())
                self._stream = self._cluster.log(self._pod, self.record.spec.role, since_s)
                for data in () if self._is_closed else self._stream:
                    put(lines.feed(data, time.monotonic()), None)
                is_good = True
            except ClusterError as error:
                is_good = error.is_not_found  # there is no more of it
                refusal = str(error) if error.is_refusal else None
            tries_left -= is_last and not is_good
            is_over = is_last and (is_good or not tries_left)
            put(lines.finish(time.monotonic()) if is_over else [], refusal)
            if is_over:
                self.is_whole = True
                return
            if is_last:
                time.sleep(self._pause_s / 4)
            else:
                self.has_ended.wait(self._pause_s)

    def close(self) -> None:
        """Have the thread that reads it end soon."""
        self._is_closed = True
        self.has_ended.set()
        if self._stream is not None:
            self._stream.close()


class Follower:
    """Follows one job that has been created."""

    def __init__(
        self,
        cluster: KubeCluster,
        job: KubeJob,
        specs: Sequence[ProcessSpec],
        log_dir: Path,
        patience: Patience,
        signals: SignalPipe,
    ) -> None:
        self._cluster = cluster
        self._job = job
        self._specs = specs
        self._log_dir = log_dir
        self._patience = patience
        self._signals = signals
        now_s = time.monotonic()
        self.watch = JobWatch(specs, job, patience, now_s)
        self._lifecycle = Lifecycle(specs, patience.lifecycle)
        # That all have joined is heard late, or never where no log can be read: servers get their
        # time to end in any case.
        self._lifecycle.joined(now_s, is_certain=False)
        self._is_complete = False
        self._says_complete = False
        self._logs: dict[int, PodLog] = {}
        self._threads = HelperThreads()
        self._look_now = threading.Event()
        self._output = Console(1)
        self._errors = Console(2)

    def say(self, text: str) -> None:
        """A line of the launcher's own, on standard error."""
        self._errors.write(f"[launcher] {text}\n".encode(errors="replace"))

    def follow(self, *, show_status: bool = True) -> JobReport | str:
        """Serve the job until all of its pods have ended; or return why it cannot be seen.

        The output of the pods has been written then; nothing has been deleted after a success.
        """
        self.say(f"job {self._job.name}: {len(self._specs)} pods, label {self._job.selector}")
        self._says_complete = show_status
        self._threads.start(self._look)
        try:
            lost_sight = None
            while self._lifecycle.phase is not Phase.ENDED and lost_sight is None:
                self._serve()
                now_s = time.monotonic()
                self._carry_out(self._lifecycle.tick(now_s))
                if self._lifecycle.phase is not Phase.STOPPING:
                    lost_sight = self.watch.lost_sight(now_s)
            if lost_sight is None:
                self._read_last_output()
            self._write_last_output()
            return lost_sight or self._report()
        finally:
            self._threads.is_over.set()
            self._look_now.set()
            for log in self._logs.values():
                log.close()
            self._threads.end()

    # -- the main thread's loop ---------------------------------------------------------------

    def _serve(self) -> None:
        """Wait for something to happen, not for long, and handle it: signals first."""
        consoles = [each for each in (self._output, self._errors) if each.waiting]
        poll = select.poll()
        poll.register(self._signals.fd, select.POLLIN)
        poll.register(self._threads.fd, select.POLLIN)
        for console in consoles:
            poll.register(console.fd, select.POLLOUT)
        until_s = self._lifecycle.deadline_s or math.inf
        poll.poll(max(0.0, min(_LONGEST_WAIT_S, until_s - time.monotonic())) * 1000)
        for number in self._signals.arrived():
            if number in ENDING:
                self.say(f"got {number.name}: ending the job")
                self._carry_out(self._lifecycle.signalled(number, time.monotonic()))
        for console in consoles:
            console.write_pending()
        if not self._output.full:
            self._threads.may_read.set()
        self._threads.take()

    def _looked(self, answer: Sight | ClusterError) -> None:
        now_s = time.monotonic()
        if isinstance(answer, ClusterError):
            if answer.is_refusal and not self.watch.had_jobs:
                raise LaunchError(f"cannot follow the job: {answer}", exit_code=1)
            self._say_all(self.watch.no_answer(str(answer), now_s))
            return
        sentences, ended = self.watch.saw(answer, now_s)
        self._say_all(sentences)
        for pod in self.watch.pods.values():
            if pod.has_started and pod.index not in self._logs:
                self._follow_log(pod)
        self._say_complete()
        for statuses in ended:
            for index in self._logs.keys() & statuses.keys():
                self._logs[index].has_ended.set()
            self._carry_out(self._lifecycle.exited(statuses, now_s))
        if self._lifecycle.phase is Phase.RUNNING:
            self._say_all(self.watch.remarks(now_s))
            if self.watch.gives_up(now_s) is not None:
                self._carry_out(self._lifecycle.cannot_start(now_s))

    def _follow_log(self, pod: Pod) -> None:
        record = ProcessRecord(self._specs[pod.index], pod.node, self._log_dir)
        log = self._logs[pod.index] = PodLog(self._cluster, pod, record, self._patience.poll_s)

        def put(lines: list[bytes], refusal: str | None) -> None:
            self._threads.may_read.wait()
            self._threads.put(partial(self._show, record, lines, refusal))

        self._threads.start(partial(log.read, put))

    def _show(self, record: ProcessRecord, lines: list[bytes], refusal: str | None) -> None:
        if record.spec.role == "scheduler" and JOINED_LINE in lines:
            lines.remove(JOINED_LINE)
            self._is_complete = True
            self._say_complete()
        try:
            self._output.write(record.record(lines))
            if self._output.full:
                self._threads.may_read.clear()
        except OSError as error:
            record.stop_logging()
            self.say(f"the log of {record.spec.name} ends here: {error.strerror}")
        if refusal is not None and record.why is None:
            record.why = refusal
            self.say(f"no log of {record.spec.name}: {refusal}")

    def _say_complete(self) -> None:
        """Say that all have joined, when that was heard and all pods have been seen."""
        watch = self.watch
        is_due = self._is_complete and self._says_complete
        if not is_due or watch.is_starting or watch.is_ending:
            return
        self._says_complete = False
        nodes = dict.fromkeys(pod.node for index, pod in sorted(watch.pods.items()) if index)
        address = f"{self._job.job_name('scheduler')}:{SCHEDULER_PORT}"
        self.say(complete_line(self._specs, nodes, address, str(self._log_dir)))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        """The first signal is the deletion of the Jobs here; any further one hurries the pods."""
        for effect in effects:
            if isinstance(effect, Say):
                self.say(effect.text.replace("even after SIGKILL", "although they are deleted"))
            if isinstance(effect, SendSignal):
                kinds, grace_s = (("pod",), 1) if self.watch.is_ending else (("job",), None)
                self.watch.is_ending = True
                self._threads.start(partial(self._delete, kinds, grace_s))

    def _say_all(self, sentences: Sequence[str]) -> None:
        for sentence in sentences:
            self.say(sentence)

    # -- other threads ------------------------------------------------------------------------

    def _look(self) -> None:
        """Look at the Jobs and then at their pods, again and again."""
        while not self._threads.is_over.is_set():
            self._threads.put(partial(self._looked, self._sight()))
            self._look_now.wait(self._patience.poll_s)
            self._look_now.clear()

    def _sight(self) -> Sight | ClusterError:
        ask, selector = self._cluster.objects, self._job.selector
        events: Sequence[Object] = ()
        try:
            jobs = ask("job", label_selector=selector)
            pods = ask("pod", label_selector=selector)
        except ClusterError as error:
            return error
        if self.watch.is_starting:
            with suppress(ClusterError):  # without them reasons are missing, and nothing else
                events = ask("event", field_selector="type=Warning")
        return Sight(jobs, pods, events)

    def _delete(self, kinds: Sequence[str], grace_s: int | None) -> None:
        while not self._threads.is_over.is_set():
            try:
                self._cluster.delete(self._job.selector, kinds, grace_s)
                self._look_now.set()
                return
            except ClusterError as error:
                self._threads.put(partial(self._could_not_delete, error))
                self._threads.is_over.wait(self._patience.poll_s)

    def _could_not_delete(self, error: ClusterError) -> None:
        if self.watch.is_heard:  # else the looks have said so
            self.say(f"cannot delete the job yet: {error}")

    # -- the end ------------------------------------------------------------------------------

    def _read_last_output(self) -> None:
        """Logs of ended containers come to their end; if not, they are not waited for for ever."""
        until_s = time.monotonic() + self._patience.last_output_s
        for log in self._logs.values():
            log.has_ended.set()
        while time.monotonic() < until_s and not all(log.is_whole for log in self._logs.values()):
            self._serve()
        self._threads.take()

    def _write_last_output(self) -> None:
        """Wait for a slow reader, but not after a signal."""
        for console in (self._output, self._errors):
            while console.waiting:
                console.write_pending(self._patience.last_output_s)
                if set(self._signals.arrived()) & set(ENDING) or self._lifecycle.interrupted_by:
                    return

    def _report(self) -> JobReport:
        exits = sorted(self._lifecycle.exits.items())
        ended = [self._ended(each) for _, each in exits]
        return JobReport(self._lifecycle, self._specs, ended, self.watch.start_s)

    def _ended(self, found: Exit) -> EndedProcess:
        index = found.index
        ending, pod = self.watch.endings.get(index), self.watch.pods.get(index)
        lines = self._logs[index].record.last_lines if index in self._logs else ()
        stopped = found.stopped or index in self.watch.ended_by_kubernetes
        return EndedProcess(
            self._specs[index],
            0,
            replace(found, stopped=stopped),
            [line.decode(errors="replace") for line in lines],
            place=pod.place if pod is not None else "no pod",
            reason=ending.reason if ending is not None else "",
        )
