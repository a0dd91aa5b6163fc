"""What ``kubectl get -o json`` says about a job's pods, in the terms of the launcher.

Pure: parsed JSON in, :class:`Pod` objects and sentences out. Fields and reasons are those of
the Kubernetes API reference (``core/v1`` Pod and Event, ``batch/v1`` Job); any of them may be
missing. Read ``follow.py`` next, which asks and acts.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.launch.backends.kubernetes.manifest import INDEX_ANNOTATION, JOB_LABEL, ROLE_LABEL
from kvstore.launch.plan import ProcessSpec

_JOB = "job"
# A container waits for these in the usual course of things.
_USUAL_WAITS = frozenset({"", "ContainerCreating", "PodInitializing"})
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
_FINAL_REASONS = frozenset(
    {"InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError", "CreateContainerError"}
)
_LONGEST_MESSAGE = 500


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
        return f"{self.reason}: {self.message}" if self.message else self.reason


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
    """One pod of the job. ``index`` is that of its process among all of the job."""

    index: int
    name: str
    uid: str
    node: str = ""
    created: str = ""
    has_started: bool = False
    ending: PodExit | None = None
    obstacle: Obstacle | None = None
    leaving: str = ""
    """Why Kubernetes is about to remove it; empty while it is not."""

    @property
    def place(self) -> str:
        return f"pod {self.name} on node {self.node}" if self.node else f"pod {self.name}"


@dataclass(frozen=True)
class Sight:
    """Everything that one look has shown. ``jobs``: uid of the Job of each role that is there."""

    pods: Sequence[Pod]
    jobs: Mapping[str, str]
    failures: Mapping[str, str]
    """Of Jobs that Kubernetes has declared failed: why, by role."""


def read_sight(document: Mapping[str, Any], job_id: str, specs: Sequence[ProcessSpec]) -> Sight:
    """The answer of ``kubectl get pods,jobs -o json``. Objects of other jobs are left out."""
    indices = {(spec.role, spec.rank): index for index, spec in enumerate(specs)}
    pods, jobs, failures = [], {}, {}
    for item in _items(document):
        labels = _dig(item, "metadata", "labels") or {}
        if labels.get(JOB_LABEL) != job_id:
            continue
        role = str(labels.get(ROLE_LABEL, ""))
        if item.get("kind") == "Job":
            jobs[role] = _text(item, "metadata", "uid")
            if why := _job_failure(item):
                failures[role] = why
        elif item.get("kind") == "Pod":
            rank = _text(item, "metadata", "annotations", INDEX_ANNOTATION)
            index = indices.get((role, int(rank))) if rank.isdecimal() else None
            if index is not None:
                pods.append(_pod(item, index, role))
    return Sight(pods, jobs, failures)


def read_warnings(document: Mapping[str, Any]) -> dict[str, Obstacle]:
    """The last warning about each object, by ``kind/name`` in small letters.

    Warnings about pods may be over long since; their states say what counts.
    """
    events = sorted(
        _items(document),
        key=lambda event: _text(event, "lastTimestamp") or _text(event, "eventTime"),
    )
    found = {}
    for event in events:
        about = event.get("involvedObject") or {}
        if event.get("type") == "Warning":
            name = f"{about.get('kind', '')}/{about.get('name', '')}".lower()
            is_of_job = about.get("kind") == "Job"
            found[name] = Obstacle(_text(event, "reason"), _message(event), is_of_job)
    return found


def one_per_process(pods: Sequence[Pod], known: Mapping[int, str]) -> dict[int, Pod]:
    """The pod of each process: the one that is ``known`` by its uid, else the oldest.

    Kubernetes may make a second one for an index; the first that was seen is the job's.
    """
    found: dict[int, Pod] = {}
    for pod in sorted(pods, key=lambda pod: (pod.created, pod.name)):
        if pod.uid == known.get(pod.index) or pod.index not in found:
            found[pod.index] = pod
    return found


def obstacle_of(
    pod: Pod | None, job_name: str, warnings: Mapping[str, Obstacle]
) -> Obstacle | None:
    """Why a process has not started, as far as anybody says; ``pod`` None: it has no pod yet."""
    if pod is None:
        return warnings.get(f"{_JOB}/{job_name}")
    if pod.has_started or pod.ending is not None:
        return None
    return pod.obstacle or warnings.get(f"pod/{pod.name}")


def status_of_exit_code(code: int) -> int:
    """Runtimes report a death by signal n as 128 + n; here it is -n."""
    try:
        return -signal.Signals(code - 128) if code > 128 else code
    except ValueError:
        return code


def _pod(item: Mapping[str, Any], index: int, role: str) -> Pod:
    status = item.get("status") or {}
    own = _container(status, "containerStatuses", role)
    state = own.get("state") or {}
    return Pod(
        index=index,
        name=_text(item, "metadata", "name"),
        uid=_text(item, "metadata", "uid"),
        node=_text(item, "spec", "nodeName"),
        created=_text(item, "metadata", "creationTimestamp"),
        has_started="running" in state or "terminated" in state,
        ending=_ending(status, state.get("terminated")),
        obstacle=_obstacle(status, state),
        leaving=_leaving(item),
    )


def _ending(status: Mapping[str, Any], terminated: Mapping[str, Any] | None) -> PodExit | None:
    pod_reason = _text(status, "reason")
    if terminated is not None:
        code = terminated.get("exitCode")
        reason = _text(terminated, "reason")
        parts = [
            pod_reason,
            "" if reason in ("Completed", "Error") else reason,
            _message(terminated),
        ]
        why = ": ".join(part for part in parts if part)
        number = status_of_exit_code(code if isinstance(code, int) else 1)
        return PodExit(number, why, _text(terminated, "finishedAt"))
    if status.get("phase") == "Failed":
        # Evicted, refused by the node, or an init container failed: ours never said an exit code.
        parts = [pod_reason, _message(status), *_init_failures(status)]
        return PodExit(1, ": ".join(part for part in parts if part) or "its pod failed")
    if status.get("phase") == "Succeeded":
        return PodExit(0)
    return None


def _init_failures(status: Mapping[str, Any]) -> Iterator[str]:
    for each in status.get("initContainerStatuses") or ():
        code = _dig(each, "state", "terminated", "exitCode")
        if code:
            message = _message(_dig(each, "state", "terminated"))
            yield f"its init container '{each.get('name')}' ended with {code}" + (
                f": {message}" if message else ""
            )


def _obstacle(status: Mapping[str, Any], state: Mapping[str, Any]) -> Obstacle | None:
    waits = [_dig(each, "state", "waiting") for each in status.get("initContainerStatuses") or ()]
    for wait in (*waits, state.get("waiting")):
        if wait and _text(wait, "reason") not in _USUAL_WAITS:
            return Obstacle(_text(wait, "reason"), _message(wait))
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            reason = _text(condition, "reason") or "Unschedulable"
            return Obstacle(reason, _message(condition), is_trouble=False)
    return None


def _leaving(item: Mapping[str, Any]) -> str:
    if not _text(item, "metadata", "deletionTimestamp"):
        return ""
    for condition in _dig(item, "status", "conditions") or ():
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return f"{_text(condition, 'reason')}: {_message(condition)}"
    return "its pod was deleted"


def _job_failure(item: Mapping[str, Any]) -> str:
    for condition in _dig(item, "status", "conditions") or ():
        if condition.get("type") == "Failed" and condition.get("status") == "True":
            return f"{_text(condition, 'reason')}: {_message(condition)}"
    return ""


def _container(status: Mapping[str, Any], kind: str, name: str) -> Mapping[str, Any]:
    for each in status.get(kind) or ():
        if each.get("name") == name:
            found: Mapping[str, Any] = each
            return found
    return {}


def _items(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [item for item in document.get("items") or () if isinstance(item, dict)]


def _message(part: Mapping[str, Any] | None) -> str:
    text = " ".join(_text(part or {}, "message").split())
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]} ..."


def _text(part: Mapping[str, Any], *names: str) -> str:
    found = _dig(part, *names)
    return found if isinstance(found, str) else ""


def _dig(part: Any, *names: str) -> Any:
    for name in names:
        if not isinstance(part, Mapping):
            return None
        part = part.get(name)
    return part
