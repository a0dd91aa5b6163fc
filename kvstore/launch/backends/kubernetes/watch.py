"""What the launcher makes of looking at a job's pods again and again.

Pure: what each look has shown and the time in; sentences, endings and decisions out. Nothing is
asked of the cluster here and nothing deleted. ``follow.py`` feeds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.launch.backends.kubernetes.manifest import DEFAULT_RENDEZVOUS_S, KubeJob
from kvstore.launch.backends.kubernetes.state import (
    Obstacle,
    Pod,
    PodExit,
    Sight,
    obstacle_of,
    one_per_process,
)
from kvstore.launch.job.lifecycle import Timing
from kvstore.launch.plan import ProcessSpec

_GONE_LOOKS = 2
_ENDED_BY_SIGNALS = (-15, -9)
_SHOWN_NAMES = 6
_LIFECYCLE = Timing(
    drain_s=30.0, service_s=30.0, failure_s=5.0, alone_s=3.0, step_s=20.0, killed_s=20.0
)


@dataclass(frozen=True)
class Patience:
    """How long each patience with a cluster lasts, in seconds.

    ``lifecycle`` is longer than on one machine: ends are seen at the next look only, and pods
    have ``terminationGracePeriodSeconds`` to end.
    """

    poll_s: float = 2.0  # between two looks at all pods
    events_s: float = 5.0  # between two looks at warnings, until all pods have started
    request_s: float = 15.0  # for one answer of the cluster
    silent_s: float = 1800.0  # without any answer, until the job is left alone
    first_remark_s: float = 10.0  # until pods that have not started are named
    remind_s: float = 60.0  # between two lines that name the same
    final_s: float = 10.0  # with an obstacle that will hardly go away
    trouble_s: float = 120.0  # with another one, such as a registry that does not answer
    start_s: float = float(DEFAULT_RENDEZVOUS_S)  # until all pods must have started
    last_output_s: float = 10.0  # for the rest of the logs, after the end
    delete_s: float = 60.0  # for the deletion of everything, at the end
    lifecycle: Timing = _LIFECYCLE


class JobWatch:
    """Follows what is seen of one job. Times are seconds of a monotonic clock."""

    def __init__(
        self, specs: Sequence[ProcessSpec], job: KubeJob, patience: Patience, start_s: float
    ) -> None:
        self.pods: dict[int, Pod] = {}
        self.endings: dict[int, PodExit] = {}
        self.ended_by_kubernetes: set[int] = set()
        """Processes that ended because Kubernetes removed their pods after another's failure."""
        self.is_ending = False
        """The launcher has begun to delete pods: from now on those that are gone have ended."""
        self.is_heard = True
        self.has_answered = False
        self._specs = specs
        self._job = job
        self._patience = patience
        self.start_s = start_s
        self.verdict: str | None = None
        """What :meth:`gives_up` has said."""
        self._answered_s = start_s
        self._taken: set[int] = set()
        self._gone: dict[int, int] = {}
        self._warnings: Mapping[str, Obstacle] = {}
        self._has_seen_jobs = False
        self._trouble_since_s: dict[int, float] = {}
        self._obstacles: dict[int, Obstacle] = {}
        self._remarked_s = start_s
        self._last_remark = ""
        self._said_started = False

    @property
    def is_starting(self) -> bool:
        """Not all processes have been seen to start."""
        return any(
            index not in self.endings and not self._has_started(index)
            for index in range(len(self._specs))
        )

    # -- what is seen -------------------------------------------------------------------------

    def saw(self, sight: Sight, now_s: float) -> list[str]:
        """The cluster has answered; returns what is worth saying."""
        sentences = []
        if not self.is_heard:
            silent_s = now_s - self._answered_s
            sentences.append(f"the cluster answers again, after {silent_s:.0f} s")
        self.is_heard = self.has_answered = True
        self._answered_s = now_s
        known = {index: pod.uid for index, pod in self.pods.items()}
        seen = {
            index: pod
            for index, pod in one_per_process(sight.pods, known).items()
            if pod.uid == known.get(index) or not self._has_started(index)
        }
        for index, pod in seen.items():
            before = self.pods.get(index)
            if pod.leaving and not self.is_ending and not (before and before.leaving):
                sentences.append(f"{self._specs[index].name} is being removed: {pod.leaving}")
        self.pods.update(seen)
        self._note_endings(seen, sight)
        self._note_obstacles(seen, now_s)
        self._has_seen_jobs = self._has_seen_jobs or bool(sight.jobs)
        if not self._said_started and not self.is_starting and not self.is_ending:
            self._said_started = True
            sentences.append(f"all {len(self._specs)} pods have started")
        return sentences

    def no_answer(self, why: str, now_s: float) -> list[str]:
        """A look has failed; returns what is worth saying."""
        if not self.is_heard and now_s - self._remarked_s < self._patience.remind_s:
            return []
        first, self.is_heard, self._remarked_s = self.is_heard, False, now_s
        if first:
            return [f"the cluster does not answer ({why}); the job is left alone, trying again"]
        return [f"no answer from the cluster for {now_s - self._answered_s:.0f} s ({why})"]

    def heard(self, warnings: Mapping[str, Obstacle]) -> None:
        """Warnings of the cluster, by ``kind/name``."""
        self._warnings = warnings

    def take_endings(self) -> list[dict[int, int]]:
        """Ends that have not been taken yet: one mapping per moment, process to status.

        Several ends between two looks are told apart by the nodes' clocks, in whole seconds.
        """
        new = {index: found for index, found in self.endings.items() if index not in self._taken}
        self._taken.update(new)
        moments: dict[str, dict[int, int]] = {}
        for index, found in sorted(new.items(), key=lambda item: (item[1].at or "~", item[0])):
            moments.setdefault(found.at, {})[index] = found.status
        return list(moments.values())

    # -- what follows -------------------------------------------------------------------------

    def lost_sight(self, now_s: float) -> str | None:
        """Return why following ends, when the cluster has been silent for too long."""
        silent_s = now_s - self._answered_s
        if self.is_heard or silent_s < self._patience.silent_s:
            return None
        return f"the cluster has not answered for {silent_s:.0f} s"

    def remarks(self, now_s: float) -> list[str]:
        """Which pods have not started and why, when that is new or long ago."""
        if not self.is_starting or now_s - self.start_s < self._patience.first_remark_s:
            return []
        text = self._waiting_text()
        if text == self._last_remark and now_s - self._remarked_s < self._patience.remind_s:
            return []
        self._last_remark, self._remarked_s = text, now_s
        return [f"after {now_s - self.start_s:.0f} s, waiting for {text}"]

    def gives_up(self, now_s: float) -> str | None:
        """Return why the job cannot start, when waiting has become pointless."""
        self.verdict = self._final_obstacle(now_s)
        is_late = now_s - self.start_s >= self._patience.start_s
        if self.verdict is None and is_late and self.is_starting:
            self.verdict = (
                f"not all pods have started within {self._patience.start_s:g} s "
                f"(PS_RENDEZVOUS_TIMEOUT): {self._waiting_text()}"
            )
        return self.verdict

    # -- inner parts --------------------------------------------------------------------------

    def _final_obstacle(self, now_s: float) -> str | None:
        for index, since_s in self._trouble_since_s.items():
            obstacle = self._obstacles[index]
            patience_s = self._patience.final_s if obstacle.is_final else self._patience.trouble_s
            if now_s - since_s >= patience_s:
                return f"{self._name(index)} cannot start: {obstacle.sentence}"
        return None

    def _note_endings(self, seen: Mapping[int, Pod], sight: Sight) -> None:
        failed_before = any(found.status != 0 for found in self.endings.values())
        fresh = {
            index: pod.ending
            for index, pod in seen.items()
            if pod.ending is not None and index not in self.endings
        }
        causes = [
            index
            for index, found in fresh.items()
            if found.status != 0 and not self._is_removal(seen[index], found)
        ]
        for index, found in fresh.items():
            self.endings[index] = self._with_cause(found, seen[index])
            if self._is_removal(seen[index], found) and (failed_before or causes):
                self.ended_by_kubernetes.add(index)
        for index in range(len(self._specs)):
            if index in self.endings or index in seen:
                self._gone.pop(index, None)
            else:
                self._note_absent(index, sight, failed_before or bool(causes))

    def _note_absent(self, index: int, sight: Sight, has_failed: bool) -> None:
        """It has no pod: not yet, or not any more. One look alone may have missed it."""
        pod, role = self.pods.get(index), self._specs[index].role
        has_jobs = bool(sight.jobs)
        if pod is None and not self.is_ending:
            if role in sight.failures:
                self._is_over(
                    index, PodExit(1, f"its Job failed: {sight.failures[role]}"), has_failed
                )
                return
            if has_jobs or not self._has_seen_jobs:
                return
        self._gone[index] = self._gone.get(index, 0) + 1
        if self._gone[index] < _GONE_LOOKS:
            return
        if self.is_ending:
            self.endings[index] = PodExit(-15)
            return
        why = (pod.leaving if pod else "") or "its pod was deleted"
        if not has_jobs:
            why = "somebody deleted the job"
        self._is_over(index, PodExit(-15, why), has_failed)

    def _is_over(self, index: int, ending: PodExit, has_failed: bool) -> None:
        self.endings[index] = ending
        if has_failed:
            self.ended_by_kubernetes.add(index)

    def _is_removal(self, pod: Pod, ending: PodExit) -> bool:
        return bool(pod.leaving) and ending.status in _ENDED_BY_SIGNALS

    def _with_cause(self, ending: PodExit, pod: Pod) -> PodExit:
        """A pod that Kubernetes removes ends by a signal, which alone says nothing."""
        if self.is_ending or ending.reason or not self._is_removal(pod, ending):
            return ending
        return PodExit(ending.status, pod.leaving, ending.at)

    def _note_obstacles(self, seen: Mapping[int, Pod], now_s: float) -> None:
        found: dict[int, Obstacle] = {}
        for index, spec in enumerate(self._specs):
            if index in self.endings or self._has_started(index):
                continue
            job_name = self._job.job_name(spec.role)
            obstacle = obstacle_of(seen.get(index), job_name, self._warnings)
            if obstacle is not None:
                found[index] = obstacle
        # ErrImagePull and ImagePullBackOff take turns: it is one obstacle as long as there is one.
        before = self._trouble_since_s
        self._trouble_since_s = {
            index: before.get(index, now_s)
            for index, obstacle in found.items()
            if obstacle.is_trouble
        }
        self._obstacles = found

    def _has_started(self, index: int) -> bool:
        pod = self.pods.get(index)
        return pod is not None and pod.has_started

    def _waiting_text(self) -> str:
        """The processes that have not started, those with the same reason together."""
        reasons: dict[str, list[str]] = {}
        for index, spec in enumerate(self._specs):
            if index in self.endings or self._has_started(index):
                continue
            obstacle = self._obstacles.get(index)
            if obstacle is not None:
                reason = obstacle.sentence
            else:
                reason = "not ready yet" if index in self.pods else "no pod yet"
            reasons.setdefault(reason, []).append(spec.name)
        return "; ".join(f"{_listed(names)} ({reason})" for reason, names in reasons.items())

    def _name(self, index: int) -> str:
        pod = self.pods.get(index)
        name = self._specs[index].name
        return f"{name} ({pod.place})" if pod is not None else name


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    rest = len(names) - _SHOWN_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown
