"""The state of a job's pods: started, ended (and why), or obstructed.

This module is pure: the cluster's answers and the time are its input, events of
``launch/job/places.py`` and decisions its output. Answers are JSON objects of the Kubernetes API
reference (``core/v1`` Pod and Event, ``batch/v1`` Job); any of their fields may be missing.
``follow.py`` calls the cluster and acts.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.launch.backends.kubernetes.manifest import (
    DEFAULT_RENDEZVOUS_S,
    INDEX_ANNOTATION,
    RENDEZVOUS_NAME,
    ROLE_LABEL,
    KubeJob,
)
from kvstore.launch.job.places import Ended, Event, Located, Note
from kvstore.launch.job.report import some_of
from kvstore.launch.job.restarts import Timing
from kvstore.launch.plan import ProcessSpec

# The normal reasons for which a container waits.
_USUAL_WAITS = ("", "ContainerCreating", "PodInitializing")
# Words of a registry or an admission controller, and reasons, after which a retry is useless.
_FINAL = (
    *("not found", "denied", "unauthorized", "forbidden", "manifest unknown", "does not exist"),
    *("no match for platform", "invalid"),
    *("errimageneverpull", "createcontainerconfigerror", "createcontainererror"),
)
_LIFECYCLE = Timing(
    drain_s=30.0, service_s=30.0, failure_s=5.0, alone_s=3.0, step_s=20.0, killed_s=20.0
)
_SAYS_NOTHING = ("Completed", "Error")  # these reasons for a container's end explain nothing
_DELETED = "its pod was deleted"
_LONGEST_MESSAGE = 500

Object = Mapping[str, Any]
"""An object of the API, or a part of one."""
Objects = Sequence[Object]


@dataclass(frozen=True)
class Patience:
    """How long to wait for a cluster in each situation, in seconds.

    The times of ``lifecycle`` are longer than on one machine: an end is noticed only at the next
    poll, and pods have ``terminationGracePeriodSeconds`` to end.
    """

    poll_s: float = 2.0  # between two polls of all pods
    silent_s: float = 1800.0  # without an answer, until the launcher leaves the job alone
    first_remark_s: float = 10.0  # until pods that have not started are named
    remind_s: float = 60.0  # between two equal messages
    final_s: float = 10.0  # for an obstacle that will probably not disappear
    trouble_s: float = 120.0  # for another trouble, such as a registry that does not answer
    start_s: float = float(DEFAULT_RENDEZVOUS_S)  # until all pods must have started
    last_output_s: float = 10.0  # for the rest of the logs, after the end
    delete_s: float = 60.0  # for the deletion of everything, at the end
    lifecycle: Timing = _LIFECYCLE


class Obstacle(NamedTuple):
    """Why a pod has not started.

    ``is_trouble``: something is wrong, and waiting may not help. If False, the cluster only lacks
    room or time.
    """

    sentence: str
    is_trouble: bool = True

    @property
    def is_final(self) -> bool:
        """Whether the obstacle will probably not disappear."""
        return self.is_trouble and any(words in self.sentence.lower() for words in _FINAL)


class PodExit(NamedTuple):
    """The end of a pod's process; ``status`` is that of ``lifecycle.Exit``.

    ``at`` is the time on the node's clock, as text that sorts, or "" if unknown. ``is_removal`` is
    true if Kubernetes ended the process by removing its pod.
    """

    status: int
    reason: str = ""
    at: str = ""
    is_removal: bool = False


class Pod(NamedTuple):
    """One pod; ``leaving`` is why Kubernetes is removing it, or ""."""

    name: str
    uid: str
    node: str
    has_started: bool
    ending: PodExit | None
    obstacle: Obstacle | None
    leaving: str

    @property
    def place(self) -> str:
        return f"pod {self.name} on node {self.node}" if self.node else f"pod {self.name}"


# -- reading answers --------------------------------------------------------------------------


def read_pods(items: Iterable[Object], specs: Sequence[ProcessSpec]) -> list[tuple[int, Pod]]:
    """Return the pods of ``specs`` with their processes' indices, the oldest first."""
    indices = {(spec.role, str(spec.rank)): index for index, spec in enumerate(specs)}
    found = []
    for item in sorted(items, key=lambda item: _text(item, "metadata", "creationTimestamp")):
        role = _text(item, "metadata", "labels", ROLE_LABEL)
        rank = _text(item, "metadata", "annotations", INDEX_ANNOTATION)
        if (role, rank) in indices:
            found.append((indices[role, rank], _pod(item, role)))
    return found


def read_job_failures(items: Iterable[Object]) -> dict[str, str]:
    """Return why Kubernetes has declared Jobs failed, by role."""
    whys = {_text(item, "metadata", "labels", ROLE_LABEL): _why(item, "Failed") for item in items}
    return {role: why for role, why in whys.items() if why}


def read_warnings(events: Iterable[Object]) -> dict[str, Obstacle]:
    """Return the last warning about each object, by ``kind/name`` in lower case.

    Warnings about pods may be out of date, so they are not trouble: the pods' states decide.
    """
    found = {}
    for event in sorted(
        events, key=lambda event: _text(event, "lastTimestamp") or _text(event, "eventTime")
    ):
        kind = _text(event, "involvedObject", "kind").lower()
        name = _text(event, "involvedObject", "name")
        found[f"{kind}/{name}"] = Obstacle(_sentence(event), is_trouble=kind == "job")
    return found


def status_of_exit_code(code: int) -> int:
    """Return the status for an exit code; 128 + n, a death by signal n, gives -n."""
    try:
        return -signal.Signals(code - 128) if code > 128 else code
    except ValueError:
        return code


def _pod(item: Object, role: str) -> Pod:
    inits, own = (
        {
            _text(each, "name"): _dig(each, "state") or {}
            for each in _dig(item, "status", name) or ()
        }
        for name in ("initContainerStatuses", "containerStatuses")
    )
    state = own.get(role, {})
    leaving = ""
    if _text(item, "metadata", "deletionTimestamp"):
        leaving = _why(item, "DisruptionTarget") or _DELETED
    return Pod(
        name=_text(item, "metadata", "name"),
        uid=_text(item, "metadata", "uid"),
        node=_text(item, "spec", "nodeName"),
        has_started="running" in state or "terminated" in state,
        ending=_ending(item, inits, state.get("terminated"), leaving),
        obstacle=_obstacle(item, [*inits.values(), state]),
        leaving=leaving,
    )


def _ending(
    item: Object, inits: Mapping[str, Object], terminated: Object | None, leaving: str
) -> PodExit | None:
    phase, pod_reason = _text(item, "status", "phase"), _text(item, "status", "reason")
    if terminated is not None:
        status = status_of_exit_code(int(terminated.get("exitCode", 1)))
        # A removed process ends by a signal, which alone explains nothing.
        is_removal = bool(leaving) and status in (-signal.SIGTERM, -signal.SIGKILL)
        why = _joined(pod_reason, _sentence(terminated)) or (leaving if is_removal else "")
        return PodExit(status, why, _text(terminated, "finishedAt"), is_removal)
    if phase == "Failed":
        # Evicted, refused by the node, or an init container failed: our container has no exit code.
        failed = (
            _joined(f"its init container '{name}' ended with {code}", _sentence(ended))
            for name, state in inits.items()
            if (code := (ended := state.get("terminated") or {}).get("exitCode"))
        )
        return PodExit(1, _joined(_sentence(item.get("status")), *failed) or "its pod failed")
    return PodExit(0) if phase == "Succeeded" else None


def _obstacle(item: Object, states: Iterable[Object]) -> Obstacle | None:
    for waiting in (state.get("waiting") for state in states):
        if _text(waiting, "reason") not in _USUAL_WAITS:
            return Obstacle(_sentence(waiting))
    unscheduled = _why(item, "PodScheduled", "False")
    return Obstacle(unscheduled, is_trouble=False) if unscheduled else None


def _why(item: Object, condition_type: str, status: str = "True") -> str:
    """Return the reason and message of a condition with this status, or ""."""
    for condition in _dig(item, "status", "conditions") or ():
        if condition.get("type") == condition_type and condition.get("status") == status:
            return _sentence(condition) or condition_type
    return ""


def _sentence(part: Object | None) -> str:
    """Return the reason, unless it explains nothing, and the message."""
    reason, text = _text(part, "reason"), " ".join(_text(part, "message").split())
    if len(text) > _LONGEST_MESSAGE:
        text = f"{text[:_LONGEST_MESSAGE]} ..."
    return _joined("" if reason in _SAYS_NOTHING else reason, text)


def _joined(*parts: str) -> str:
    return ": ".join(part for part in parts if part)


def _text(part: Object | None, *names: str) -> str:
    return str(_dig(part, *names) or "")


def _dig(part: Any, *names: str) -> Any:
    for name in names:
        part = (part or {}).get(name)
    return part


# -- what successive polls show ----------------------------------------------------------------


class JobWatch:
    """The state of one job in successive polls; times are of a monotonic clock."""

    def __init__(
        self, specs: Sequence[ProcessSpec], job: KubeJob, patience: Patience, start_s: float
    ) -> None:
        self.pods: dict[int, Pod] = {}
        self.endings: dict[int, PodExit] = {}
        self.ended_by_kubernetes: set[int] = set()
        """Processes that ended because Kubernetes removed their pods after another process's
        failure."""
        self.is_ending = False
        """Whether the launcher has begun to delete pods: from now on, missing pods have ended."""
        self.is_heard = True
        self.had_jobs = False
        self._specs = specs
        self._job = job
        self._patience = patience
        self._start_s = self._answered_s = self._remarked_s = start_s
        self._obstacles: dict[int, tuple[Obstacle, float]] = {}  # and since when
        self._last_remark = ""

    @property
    def is_starting(self) -> bool:
        """Whether some processes have not started yet."""
        return bool(self._unstarted())

    def saw(self, jobs: Objects, pods: Objects, warnings: Objects, now_s: float) -> list[Event]:
        """Handle the cluster's answer; return the notes and the processes that ended.

        ``jobs`` and ``pods`` are the job's own; ``warnings`` may be about any object.
        """
        events: list[Event] = []
        if not self.is_heard:
            silent_s = now_s - self._answered_s
            events.append(Note(f"the cluster answers again, after {silent_s:.0f} s"))
        self.is_heard, self._answered_s = True, now_s
        self.had_jobs = self.had_jobs or bool(jobs)
        was_starting = self.is_starting
        seen: dict[int, Pod] = {}
        for index, pod in read_pods(pods, self._specs):
            before = self.pods.get(index)
            # Kubernetes may make a second pod for a process: use the one that has run, else the
            # oldest.
            if index in seen or (before and before.has_started and before.uid != pod.uid):
                continue
            seen[index] = pod
            if pod.has_started and not (before and before.has_started):
                events.append(Located(index, pod.node))
            if pod.leaving and not self.is_ending and not (before and before.leaving):
                name = self._specs[index].name
                events.append(Note(f"{name} is being removed: {pod.leaving}"))
        self.pods.update(seen)
        events += self._note_endings(seen, jobs)
        self._note_obstacles(seen, read_warnings(warnings), now_s)
        if was_starting and not self.is_starting and not self.is_ending:
            events.append(Note(f"all {len(self._specs)} pods have started"))
        return [*events, *self._remarks(now_s)]

    def no_answer(self, why: str, now_s: float) -> list[Event]:
        """Handle a failed poll; return a note if one is due."""
        if not self.is_heard and now_s - self._remarked_s < self._patience.remind_s:
            return []
        first, self.is_heard, self._remarked_s = self.is_heard, False, now_s
        if first:
            why = f"the cluster does not answer ({why}); the job is left alone, trying again"
        else:
            why = f"no answer from the cluster for {now_s - self._answered_s:.0f} s ({why})"
        return [Note(why)]

    def lost_sight(self, now_s: float) -> str | None:
        """Return why the launcher stops following: a silent cluster. None to continue."""
        silent_s = now_s - self._answered_s
        if self.is_heard or self.is_ending or silent_s < self._patience.silent_s:
            return None
        return f"the cluster has not answered for {silent_s:.0f} s"

    def gives_up(self, now_s: float) -> str | None:
        """Return why the job cannot start if waiting is useless, else None."""
        if not self._is_awaited():
            return None
        for index, (obstacle, since_s) in self._obstacles.items():
            patience_s = self._patience.final_s if obstacle.is_final else self._patience.trouble_s
            if obstacle.is_trouble and now_s - since_s >= patience_s:
                place = f" ({self.pods[index].place})" if index in self.pods else ""
                return f"{self._specs[index].name}{place} cannot start: {obstacle.sentence}"
        if now_s - self._start_s < self._patience.start_s:
            return None
        within = f"{self._patience.start_s:g} s ({RENDEZVOUS_NAME})"
        return f"not all pods have started within {within}: {self._waiting_text()}"

    # -- inner parts --------------------------------------------------------------------------

    def _note_endings(self, seen: Mapping[int, Pod], jobs: Objects) -> list[Event]:
        """Record the ended processes; return an event for each time on the nodes' clocks.

        So several ends between two polls keep their order.
        """
        failures = read_job_failures(jobs)
        fresh: dict[int, PodExit] = {}
        for index in range(len(self._specs)):
            if index not in self.endings:
                ending = seen[index].ending if index in seen else self._gone(index, jobs, failures)
                if ending is not None:
                    fresh[index] = ending
        known = [*self.endings.values(), *(one for one in fresh.values() if not one.is_removal)]
        if any(one.status for one in known):
            self.ended_by_kubernetes |= {index for index, one in fresh.items() if one.is_removal}
        self.endings.update(fresh)
        moments: dict[str, dict[int, int]] = {}
        for index, one in sorted(fresh.items(), key=lambda item: (item[1].at or "~", item[0])):
            moments.setdefault(one.at, {})[index] = one.status
        return [Ended(statuses) for statuses in moments.values()]

    def _gone(self, index: int, jobs: Objects, failures: Mapping[str, str]) -> PodExit | None:
        """Return how a process without a pod ended; None if its pod is still awaited."""
        pod, role, status = self.pods.get(index), self._specs[index].role, -signal.SIGTERM
        if self.is_ending:
            reason = ""
        elif pod is None and role in failures:
            status, reason = 1, f"its Job failed: {failures[role]}"
        elif not jobs and self.had_jobs:
            reason = "somebody deleted the job"
        elif pod is not None:
            reason = pod.leaving or _DELETED
        else:
            return None
        return PodExit(status, reason, is_removal=True)

    def _note_obstacles(
        self, seen: Mapping[int, Pod], warnings: Mapping[str, Obstacle], now_s: float
    ) -> None:
        before, self._obstacles = self._obstacles, {}
        for index in self._unstarted():
            if pod := seen.get(index):
                obstacle = pod.obstacle or warnings.get(f"pod/{pod.name}")
            else:
                obstacle = warnings.get(f"job/{self._job.job_name(self._specs[index].role)}")
            if obstacle is not None:
                # ErrImagePull and ImagePullBackOff alternate, so a changed trouble keeps its first
                # time.
                known, since_s = before.get(index, (obstacle, now_s))
                self._obstacles[index] = (obstacle, since_s if known.is_trouble else now_s)

    def _remarks(self, now_s: float) -> list[Event]:
        """Return a note on pods that have not started, if it is new or due again."""
        age_s = now_s - self._start_s
        if not self._is_awaited() or age_s < self._patience.first_remark_s:
            return []
        text = self._waiting_text()
        if text == self._last_remark and now_s - self._remarked_s < self._patience.remind_s:
            return []
        self._last_remark, self._remarked_s = text, now_s
        return [Note(f"after {age_s:.0f} s, waiting for {text}")]

    def _is_awaited(self) -> bool:
        """Return whether some pods have not started and the job still needs them."""
        ended = self.endings
        is_over = self.is_ending or any(one.status for one in ended.values())
        workers = (index for index, spec in enumerate(self._specs) if spec.role == "worker")
        return self.is_starting and not is_over and any(index not in ended for index in workers)

    def _unstarted(self) -> list[int]:
        return [
            index
            for index in range(len(self._specs))
            if index not in self.endings
            and not (index in self.pods and self.pods[index].has_started)
        ]

    def _waiting_text(self) -> str:
        """Return the processes that have not started, grouped by reason."""
        reasons: dict[str, list[str]] = {}
        for index in self._unstarted():
            usual = "not ready yet" if index in self.pods else "no pod yet"
            obstacle, _ = self._obstacles.get(index, (Obstacle(usual), 0.0))
            reasons.setdefault(obstacle.sentence, []).append(self._specs[index].name)
        return "; ".join(f"{some_of(names)} ({reason})" for reason, names in reasons.items())
