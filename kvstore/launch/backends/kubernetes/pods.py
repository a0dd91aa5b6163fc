"""What a job's pods tell the launcher: who has started, who has ended and why, what is in the way.

Pure: what the cluster has answered and the time in; sentences, endings and decisions out. Answers
are objects as JSON, by the Kubernetes API reference (``core/v1`` Pod and Event, ``batch/v1``
Job); any of their fields may be missing. ``follow.py`` asks and acts.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvstore.launch.backends.kubernetes.manifest import (
    DEFAULT_RENDEZVOUS_S,
    INDEX_ANNOTATION,
    ROLE_LABEL,
    KubeJob,
)
from kvstore.launch.job.lifecycle import Timing
from kvstore.launch.plan import ProcessSpec

# A container waits for these in the usual course of things.
_USUAL_WAITS = ("", "ContainerCreating", "PodInitializing")
# What a registry or an admission says when asking again changes nothing.
_FINAL_WORDS = (
    "not found",
    "denied",
    "unauthorized",
    "forbidden",
    "manifest unknown",
    "does not exist",
    "no match for platform",
    "invalid",
)
_FINAL_REASONS = (
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CreateContainerError",
)
_ENDED_BY_SIGNALS = (-signal.SIGTERM, -signal.SIGKILL)
_LIFECYCLE = Timing(
    drain_s=30.0, service_s=30.0, failure_s=5.0, alone_s=3.0, step_s=20.0, killed_s=20.0
)
_LONGEST_MESSAGE = 500
_SHOWN_NAMES = 6

Object = Mapping[str, Any]
"""An object of the API, or a part of one."""


class Sight(NamedTuple):
    """What one look has shown: the job's own Jobs and pods, and the warnings about all objects."""

    jobs: Sequence[Object]
    pods: Sequence[Object]
    events: Sequence[Object] = ()


@dataclass(frozen=True)
class Patience:
    """How long each patience with a cluster lasts, in seconds.

    ``lifecycle`` is longer than on one machine: ends are seen at the next look only, and pods
    have ``terminationGracePeriodSeconds`` to end.
    """

    poll_s: float = 2.0  # between two looks at all pods
    silent_s: float = 1800.0  # without any answer, until the job is left alone
    first_remark_s: float = 10.0  # until pods that have not started are named
    remind_s: float = 60.0  # between two lines that name the same
    final_s: float = 10.0  # with an obstacle that will hardly go away
    trouble_s: float = 120.0  # with another one, such as a registry that does not answer
    start_s: float = float(DEFAULT_RENDEZVOUS_S)  # until all pods must have started
    last_output_s: float = 10.0  # for the rest of the logs, after the end
    delete_s: float = 60.0  # for the deletion of everything, at the end
    lifecycle: Timing = _LIFECYCLE


@dataclass(frozen=True)
class Obstacle:
    """Why a pod has not started. ``is_final``: waiting will hardly change it.

    ``is_trouble`` is false where the cluster only lacks room or time.
    """

    reason: str
    message: str
    is_trouble: bool = True

    @property
    def is_final(self) -> bool:
        text = self.message.lower()
        return self.is_trouble and (
            self.reason in _FINAL_REASONS or any(words in text for words in _FINAL_WORDS)
        )

    @property
    def sentence(self) -> str:
        return _joined(self.reason, self.message)


@dataclass(frozen=True)
class PodExit:
    """How a pod's process ended: ``status`` as in ``lifecycle.Exit``, and what is known of why.

    ``at`` is the time on the node's clock, as text that sorts; empty where it is not known.
    """

    status: int
    reason: str = ""
    at: str = ""


@dataclass(frozen=True)
class Pod:
    """One pod of the job. ``index`` is that of its process among all of the job.

    ``leaving`` says why Kubernetes is about to remove it; empty while it is not.
    """

    index: int
    name: str
    uid: str
    node: str
    created: str
    has_started: bool
    ending: PodExit | None
    obstacle: Obstacle | None
    leaving: str

    @property
    def place(self) -> str:
        return f"pod {self.name} on node {self.node}" if self.node else f"pod {self.name}"

    @property
    def is_removed(self) -> bool:
        """It has ended because Kubernetes removed it."""
        ending = self.ending
        return bool(self.leaving) and ending is not None and ending.status in _ENDED_BY_SIGNALS


# -- reading answers --------------------------------------------------------------------------


def read_pods(items: Iterable[Object], specs: Sequence[ProcessSpec]) -> list[Pod]:
    """The pods of the processes ``specs``, the oldest first."""
    indices = {(spec.role, str(spec.rank)): index for index, spec in enumerate(specs)}
    found = []
    for item in items:
        role = _text(item, "metadata", "labels", ROLE_LABEL)
        rank = _text(item, "metadata", "annotations", INDEX_ANNOTATION)
        if (role, rank) in indices:
            found.append(_pod(item, indices[role, rank], role))
    return sorted(found, key=lambda pod: (pod.created, pod.name))


def read_job_failures(items: Iterable[Object]) -> dict[str, str]:
    """Of Jobs that Kubernetes has declared failed: why, by role."""
    whys = {_text(item, "metadata", "labels", ROLE_LABEL): _why(item, "Failed") for item in items}
    return {role: why for role, why in whys.items() if why}


def read_warnings(events: Iterable[Object]) -> dict[str, Obstacle]:
    """The last warning about each object, by ``kind/name`` in small letters.

    Warnings about pods may be over long since; their states say what counts.
    """
    found = {}
    for event in sorted(
        events, key=lambda event: _text(event, "lastTimestamp") or _text(event, "eventTime")
    ):
        kind = _text(event, "involvedObject", "kind").lower()
        name = _text(event, "involvedObject", "name")
        is_of_job = kind == "job"
        found[f"{kind}/{name}"] = Obstacle(_text(event, "reason"), _message(event), is_of_job)
    return found


def status_of_exit_code(code: int) -> int:
    """Runtimes report a death by signal n as 128 + n; here it is -n."""
    try:
        return -signal.Signals(code - 128) if code > 128 else code
    except ValueError:
        return code


def _pod(item: Object, index: int, role: str) -> Pod:
    containers = _dig(item, "status", "containerStatuses") or ()
    state = next((each.get("state") or {} for each in containers if each.get("name") == role), {})
    leaving = ""
    if _text(item, "metadata", "deletionTimestamp"):
        leaving = _why(item, "DisruptionTarget") or "its pod was deleted"
    return Pod(
        index=index,
        name=_text(item, "metadata", "name"),
        uid=_text(item, "metadata", "uid"),
        node=_text(item, "spec", "nodeName"),
        created=_text(item, "metadata", "creationTimestamp"),
        has_started="running" in state or "terminated" in state,
        ending=_ending(item, state.get("terminated")),
        obstacle=_obstacle(item, state),
        leaving=leaving,
    )


def _ending(item: Object, terminated: Object | None) -> PodExit | None:
    pod_reason, phase = _text(item, "status", "reason"), _text(item, "status", "phase")
    if terminated is not None:
        reason = _text(terminated, "reason")
        reason = "" if reason in ("Completed", "Error") else reason
        status = status_of_exit_code(int(terminated.get("exitCode", 1)))
        why = _joined(pod_reason, reason, _message(terminated))
        return PodExit(status, why, _text(terminated, "finishedAt"))
    if phase == "Failed":
        # Evicted, refused by the node, or an init container failed: ours never said an exit code.
        why = _joined(pod_reason, _message(item.get("status")), *_init_failures(item))
        return PodExit(1, why or "its pod failed")
    return PodExit(0) if phase == "Succeeded" else None


def _init_failures(item: Object) -> list[str]:
    found = []
    for each in _dig(item, "status", "initContainerStatuses") or ():
        terminated = _dig(each, "state", "terminated") or {}
        if terminated.get("exitCode"):
            how = f"its init container '{each.get('name')}' ended with {terminated['exitCode']}"
            found.append(_joined(how, _message(terminated)))
    return found


def _obstacle(item: Object, state: Object) -> Obstacle | None:
    inits = _dig(item, "status", "initContainerStatuses") or ()
    for wait in (*(_dig(each, "state", "waiting") for each in inits), state.get("waiting")):
        if wait and _text(wait, "reason") not in _USUAL_WAITS:
            return Obstacle(_text(wait, "reason"), _message(wait))
    for condition in _dig(item, "status", "conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            reason = _text(condition, "reason") or "Unschedulable"
            return Obstacle(reason, _message(condition), is_trouble=False)
    return None


def _why(item: Object, condition_type: str) -> str:
    """The reason and the message of a condition that holds; empty when it does not."""
    for condition in _dig(item, "status", "conditions") or ():
        if condition.get("type") == condition_type and condition.get("status") == "True":
            return f"{_text(condition, 'reason')}: {_message(condition)}"
    return ""


def _message(part: Object | None) -> str:
    text = " ".join(_text(part, "message").split())
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]} ..."


def _joined(*parts: str) -> str:
    return ": ".join(part for part in parts if part)


def _text(part: Object | None, *names: str) -> str:
    return str(_dig(part, *names) or "")


def _dig(part: Any, *names: str) -> Any:
    for name in names:
        part = (part or {}).get(name)
    return part


# -- what follows from looking again and again ------------------------------------------------


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
        self.start_s = start_s
        self.verdict: str | None = None
        """What :meth:`gives_up` has said."""
        self._specs = specs
        self._job = job
        self._patience = patience
        self._answered_s = start_s
        self.had_jobs = False
        self._trouble_since_s: dict[int, float] = {}
        self._obstacles: dict[int, Obstacle] = {}
        self._remarked_s = start_s
        self._last_remark = ""
        self._said_started = False

    @property
    def is_starting(self) -> bool:
        """Not all processes have been seen to start."""
        return bool(self._unstarted())

    # -- what is seen -------------------------------------------------------------------------

    def saw(self, sight: Sight, now_s: float) -> tuple[list[str], list[dict[int, int]]]:
        """The cluster has answered; returns what is worth saying, and who has ended since.

        That is one mapping per moment, process to status: several ends between two looks are told
        apart by the nodes' clocks, in whole seconds.
        """
        sentences = []
        if not self.is_heard:
            silent_s = now_s - self._answered_s
            sentences.append(f"the cluster answers again, after {silent_s:.0f} s")
        self.is_heard, self._answered_s = True, now_s
        self.had_jobs = self.had_jobs or bool(sight.jobs)
        seen = self._own(read_pods(sight.pods, self._specs))
        for index, pod in seen.items():
            before = self.pods.get(index)
            if pod.leaving and not self.is_ending and not (before and before.leaving):
                sentences.append(f"{self._specs[index].name} is being removed: {pod.leaving}")
        self.pods.update(seen)
        ended = self._note_endings(seen, sight.jobs)
        self._note_obstacles(seen, read_warnings(sight.events), now_s)
        if not self._said_started and not self.is_starting and not self.is_ending:
            self._said_started = True
            sentences.append(f"all {len(self._specs)} pods have started")
        return sentences, ended

    def no_answer(self, why: str, now_s: float) -> list[str]:
        """A look has failed; returns what is worth saying."""
        if not self.is_heard and now_s - self._remarked_s < self._patience.remind_s:
            return []
        first, self.is_heard, self._remarked_s = self.is_heard, False, now_s
        if first:
            return [f"the cluster does not answer ({why}); the job is left alone, trying again"]
        return [f"no answer from the cluster for {now_s - self._answered_s:.0f} s ({why})"]

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

    def _own(self, pods: Sequence[Pod]) -> dict[int, Pod]:
        """The pod of each process: the one that has run as it, else the oldest.

        Kubernetes may make a second one for an index.
        """
        found: dict[int, Pod] = {}
        for pod in pods:
            known = self.pods.get(pod.index)
            if known is None or not known.has_started or known.uid == pod.uid:
                found.setdefault(pod.index, pod)
        return found

    def _note_endings(
        self, seen: Mapping[int, Pod], jobs: Sequence[Object]
    ) -> list[dict[int, int]]:
        fresh = {
            index: pod.ending
            for index, pod in seen.items()
            if pod.ending is not None and index not in self.endings
        }
        causes = [i for i, found in fresh.items() if found.status and not seen[i].is_removed]
        has_failed = bool(causes) or any(found.status for found in self.endings.values())
        for index, found in fresh.items():
            if seen[index].is_removed:
                # It ends by a signal, which alone says nothing.
                if not found.reason and not self.is_ending:
                    fresh[index] = replace(found, reason=seen[index].leaving)
                if has_failed:
                    self.ended_by_kubernetes.add(index)
        failures = read_job_failures(jobs)
        for index in range(len(self._specs)):
            if index not in self.endings and index not in seen:
                gone = self._gone(index, has_jobs=bool(jobs), failures=failures)
                if gone is not None:
                    fresh[index] = gone
                    if has_failed and not self.is_ending:
                        self.ended_by_kubernetes.add(index)
        self.endings.update(fresh)
        moments: dict[str, dict[int, int]] = {}
        for index, found in sorted(fresh.items(), key=lambda item: (item[1].at or "~", item[0])):
            moments.setdefault(found.at, {})[index] = found.status
        return list(moments.values())

    def _gone(self, index: int, *, has_jobs: bool, failures: Mapping[str, str]) -> PodExit | None:
        """How a process without a pod has ended; None: its pod is still to come."""
        pod, role = self.pods.get(index), self._specs[index].role
        if self.is_ending:
            return PodExit(-signal.SIGTERM)
        if pod is None and role in failures:
            return PodExit(1, f"its Job failed: {failures[role]}")
        if not has_jobs and self.had_jobs:
            return PodExit(-signal.SIGTERM, "somebody deleted the job")
        if pod is None:
            return None
        return PodExit(-signal.SIGTERM, pod.leaving or "its pod was deleted")

    def _note_obstacles(
        self, seen: Mapping[int, Pod], warnings: Mapping[str, Obstacle], now_s: float
    ) -> None:
        self._obstacles = {}
        for index in self._unstarted():
            pod = seen.get(index)
            if pod is None:
                job_name = self._job.job_name(self._specs[index].role)
                obstacle = warnings.get(f"job/{job_name}")
            else:
                obstacle = pod.obstacle or warnings.get(f"pod/{pod.name}")
            if obstacle is not None:
                self._obstacles[index] = obstacle
        # ErrImagePull and ImagePullBackOff take turns: it is one obstacle as long as there is one.
        before = self._trouble_since_s
        self._trouble_since_s = {
            index: before.get(index, now_s)
            for index, obstacle in self._obstacles.items()
            if obstacle.is_trouble
        }

    def _final_obstacle(self, now_s: float) -> str | None:
        for index, since_s in self._trouble_since_s.items():
            obstacle, pod = self._obstacles[index], self.pods.get(index)
            patience_s = self._patience.final_s if obstacle.is_final else self._patience.trouble_s
            if now_s - since_s >= patience_s:
                place = f" ({pod.place})" if pod is not None else ""
                return f"{self._specs[index].name}{place} cannot start: {obstacle.sentence}"
        return None

    def _unstarted(self) -> list[int]:
        return [
            index
            for index in range(len(self._specs))
            if index not in self.endings
            and not (index in self.pods and self.pods[index].has_started)
        ]

    def _waiting_text(self) -> str:
        """The processes that have not started, those with the same reason together."""
        reasons: dict[str, list[str]] = {}
        for index in self._unstarted():
            obstacle = self._obstacles.get(index)
            usual = "not ready yet" if index in self.pods else "no pod yet"
            reason = usual if obstacle is None else obstacle.sentence
            reasons.setdefault(reason, []).append(self._specs[index].name)
        return "; ".join(f"{_listed(names)} ({reason})" for reason, names in reasons.items())


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    rest = len(names) - _SHOWN_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown
