"""What is made of the answers of a cluster: pods, endings, obstacles, and lines of logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.launch.backends.kubernetes.follow import untimed
from kvstore.launch.backends.kubernetes.manifest import KubeJob
from kvstore.launch.backends.kubernetes.pods import (
    JobWatch,
    Object,
    Obstacle,
    Patience,
    Pod,
    PodExit,
    read_job_failures,
    read_pods,
    read_warnings,
    status_of_exit_code,
)
from kvstore.launch.job.places import Ended, Event, Located, Note
from kvstore.launch.plan import ProcessSpec

JOB = KubeJob("0123456789abcdef", "train-01234567", "key")
SPECS = [
    ProcessSpec("scheduler", 0, ("service",), {}),
    ProcessSpec("server", 0, ("service",), {}),
    ProcessSpec("worker", 0, ("train",), {}),
    ProcessSpec("worker", 1, ("train",), {}),
]
SCHEDULER, SERVER, WORKER_0, WORKER_1 = range(4)
PATIENCE = Patience(
    first_remark_s=5, remind_s=20, final_s=10, trouble_s=50, start_s=100, silent_s=200
)
JOB_NAMES = [f"train-01234567-{role}" for role in ("scheduler", "server", "worker")]


def pod(index: int, uid: str = "", **status: Any) -> dict[str, Any]:
    """As the API shows it; ``state`` is that of its container."""
    spec = SPECS[index]
    meta = {
        "name": f"{spec.role}-{spec.rank}",
        "uid": uid or f"uid-{index}",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"kvstore-job": JOB.job_id, "kvstore-role": spec.role},
        "annotations": {"batch.kubernetes.io/job-completion-index": str(spec.rank)},
    }
    if status.pop("leaving", False):
        meta["deletionTimestamp"] = "2026-01-01T00:00:30Z"
    if "state" in status:
        status["containerStatuses"] = [
            {"name": "sidecar", "state": {"running": {}}},
            {"name": spec.role, "state": status.pop("state")},
        ]
    return {"metadata": meta, "spec": {"nodeName": "n7"}, "status": status}


def running(index: int, **more: Any) -> dict[str, Any]:
    return pod(index, phase="Running", state={"running": {}}, **more)


def ended(index: int, code: int, at: str = "2026-01-01T00:01:00Z", **more: Any) -> dict[str, Any]:
    reason = more.pop("reason", "Completed" if code == 0 else "Error")
    terminated = {"exitCode": code, "reason": reason, "finishedAt": at}
    phase = "Succeeded" if code == 0 else "Failed"
    return pod(index, phase=phase, state={"terminated": terminated}, **more)


def waiting(index: int, reason: str, message: str = "") -> dict[str, Any]:
    wait = {"reason": reason, "message": message}
    return pod(index, phase="Pending", state={"waiting": wait})


def jobs(failed: str = "") -> list[dict[str, Any]]:
    found = []
    for role in ("scheduler", "server", "worker"):
        conditions = [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]
        labels = {"kvstore-job": JOB.job_id, "kvstore-role": role}
        meta = {"name": JOB.job_name(role), "uid": f"uid-{role}", "labels": labels}
        status = {"conditions": conditions} if role == failed else {}
        found.append({"metadata": meta, "status": status})
    return found


Sight = tuple[Sequence[Object], Sequence[Object], Sequence[Object]]


def sight(*items: dict[str, Any], job: str = "") -> Sight:
    """Jobs, pods and warnings."""
    return jobs(job), items, ()


def read(*items: dict[str, Any]) -> list[Pod]:
    return [found for _, found in read_pods(items, SPECS)]


def watch() -> JobWatch:
    return JobWatch(SPECS, JOB, PATIENCE, 0.0)


def ended_in(seen: JobWatch, shown: Sight, now_s: float) -> list[dict[int, int]]:
    found = seen.saw(*shown, now_s)
    return [dict(event.statuses) for event in found if isinstance(event, Ended)]


def said_in(seen: JobWatch, shown: Sight, now_s: float) -> list[str]:
    return notes(seen.saw(*shown, now_s))


def notes(events: list[Event]) -> list[str]:
    return [event.text for event in events if isinstance(event, Note)]


# -- reading ----------------------------------------------------------------------------------


def test_a_pod_is_known_by_its_role_and_its_index() -> None:
    found = read_pods([running(WORKER_1), running(SCHEDULER)], SPECS)
    assert {index: each.place for index, each in found} == {
        WORKER_1: "pod worker-1 on node n7",
        SCHEDULER: "pod scheduler-0 on node n7",
    }


@pytest.mark.parametrize("item", [{}, {"status": {}}, {"metadata": None}])
def test_an_answer_with_gaps_is_no_error(item: dict[str, Any]) -> None:
    assert read(item) == []
    assert read_job_failures([item]) == {}
    assert list(read_warnings([item])) == ["/"]


def test_a_pod_of_which_nothing_is_known_has_not_started() -> None:
    (found,) = read({**pod(WORKER_0), "spec": None, "status": None})
    assert not found.has_started
    assert (found.ending, found.obstacle, found.place) == (None, None, "pod worker-0")


def test_a_process_has_ended_when_its_own_container_has() -> None:
    (found,) = read(ended(WORKER_0, 7))
    assert found.ending == PodExit(7, "", "2026-01-01T00:01:00Z")


@pytest.mark.parametrize(("code", "status"), [(0, 0), (7, 7), (128, 128), (137, -9), (255, 255)])
def test_a_death_by_a_signal_is_reported_as_128_and_its_number(code: int, status: int) -> None:
    assert status_of_exit_code(code) == status


def test_memory_that_ran_out_is_named() -> None:
    (found,) = read(ended(WORKER_0, 137, reason="OOMKilled"))
    assert found.ending == PodExit(-9, "OOMKilled", "2026-01-01T00:01:00Z")


def test_a_pod_that_was_evicted_has_failed_without_an_exit_code() -> None:
    item = pod(WORKER_0, phase="Failed", reason="Evicted", message="low on\n memory")
    (found,) = read(item)
    assert found.ending == PodExit(1, "Evicted: low on memory")


def test_a_container_that_could_not_copy_the_key_is_named() -> None:
    terminated = {"exitCode": 127, "message": "no sh"}
    inits = [{"name": "key", "state": {"terminated": terminated}}]
    (found,) = read(pod(WORKER_0, phase="Failed", initContainerStatuses=inits))
    assert found.ending == PodExit(1, "its init container 'key' ended with 127: no sh")


def test_the_last_warning_about_an_object_counts() -> None:
    items = [event("second", "2026-02"), event("first", "2026-01")]
    assert read_warnings(items) == {"job/x": Obstacle("FailedCreate: second")}


def event(message: str, at: str = "2026-01", name: str = "x") -> dict[str, Any]:
    found = {"involvedObject": {"kind": "Job", "name": name}, "reason": "FailedCreate"}
    return {**found, "message": message, "lastTimestamp": at}


# -- endings ----------------------------------------------------------------------------------


def test_ends_between_two_looks_are_told_apart_by_the_clocks_of_the_nodes() -> None:
    seen = watch()
    later, earlier = "2026-01-01T00:00:09Z", "2026-01-01T00:00:08Z"
    shown = sight(ended(WORKER_0, 1, later), ended(WORKER_1, 7, earlier), ended(SERVER, 1, later))
    assert ended_in(seen, shown, 1) == [{WORKER_1: 7}, {SERVER: 1, WORKER_0: 1}]
    assert ended_in(seen, shown, 2) == []


def test_what_kubernetes_removes_after_a_failure_is_not_a_failure() -> None:
    seen = watch()
    seen.saw(*sight(ended(WORKER_1, 7), ended(WORKER_0, 143, leaving=True), job="worker"), 1)
    assert seen.ended_by_kubernetes == {WORKER_0}
    assert seen.endings[WORKER_1].status == 7


def test_a_pod_that_is_removed_for_no_fault_of_the_job_is_the_failure() -> None:
    seen = watch()
    seen.saw(*sight(running(WORKER_0), running(WORKER_1)), 0)
    target = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    target["message"] = "to make room"
    leaving = sight(running(WORKER_0), running(WORKER_1, leaving=True, conditions=[target]))
    said = said_in(seen, leaving, 1)
    assert said == ["worker 1 is being removed: PreemptionByScheduler: to make room"]
    seen.saw(*sight(running(WORKER_0), ended(WORKER_1, 143, leaving=True, conditions=[target])), 2)
    assert seen.endings[WORKER_1].status == -15
    assert seen.endings[WORKER_1].reason == "PreemptionByScheduler: to make room"
    assert seen.ended_by_kubernetes == set()


def test_where_a_pod_runs_is_told_once_it_has_started() -> None:
    seen = watch()
    assert Located(WORKER_0, "n7") not in seen.saw(*sight(waiting(WORKER_0, "")), 0)
    assert Located(WORKER_0, "n7") in seen.saw(*sight(running(WORKER_0)), 1)
    assert Located(WORKER_0, "n7") not in seen.saw(*sight(running(WORKER_0)), 2)


def test_after_a_failure_no_pod_is_awaited() -> None:
    seen = watch()
    seen.saw(*sight(ended(WORKER_0, 7), waiting(WORKER_1, "ErrImagePull", "not found")), 1)
    assert said_in(seen, sight(waiting(WORKER_1, "ErrImagePull", "not found")), 40) == []
    assert seen.gives_up(500) is None


def test_a_pod_that_is_gone_has_ended_and_one_that_was_never_seen_has_not() -> None:
    seen = watch()
    assert ended_in(seen, sight(running(WORKER_0)), 0) == []
    assert ended_in(seen, sight(), 1) == [{WORKER_0: -15}]
    assert seen.endings[WORKER_0].reason == "its pod was deleted"


def test_a_second_pod_for_a_process_that_ran_is_not_that_process() -> None:
    seen = watch()
    both = sight(running(WORKER_0, uid="second"), running(WORKER_0, uid="first"))
    seen.saw(*sight(running(WORKER_0, uid="first")), 0)
    assert ended_in(seen, both, 1) == []
    assert seen.pods[WORKER_0].uid == "first"
    assert ended_in(seen, sight(running(WORKER_0, uid="second")), 2) == [{WORKER_0: -15}]


def test_a_job_that_somebody_deletes_has_ended() -> None:
    seen = watch()
    everything = [running(index) for index in range(4)]
    seen.saw(*sight(*everything), 0)
    seen.saw([], [], [], 1)
    assert {each.reason for each in seen.endings.values()} == {"somebody deleted the job"}


def test_pods_that_are_gone_while_the_launcher_ends_the_job_have_ended() -> None:
    seen = watch()
    seen.saw(*sight(running(WORKER_0)), 0)
    seen.is_ending = True
    assert ended_in(seen, ([], [], []), 1) == [dict.fromkeys(range(4), -15)]


def test_a_job_that_failed_without_a_pod_has_ended() -> None:
    seen = watch()
    seen.saw(*sight(job="server"), 1)
    assert seen.endings[SERVER].reason.startswith("its Job failed: BackoffLimitExceeded")


# -- what keeps pods from starting ------------------------------------------------------------


def started_but(*items: dict[str, Any]) -> Sight:
    return sight(running(SCHEDULER), running(SERVER), running(WORKER_0), *items)


def test_an_image_that_does_not_exist_ends_the_wait_soon() -> None:
    seen = watch()
    seen.saw(*started_but(waiting(WORKER_1, "ErrImagePull", "x:1: not found")), 1)
    seen.saw(*started_but(waiting(WORKER_1, "ImagePullBackOff", "Back-off: x:1: not found")), 10)
    assert seen.gives_up(10) is None
    assert seen.gives_up(11) == (
        "worker 1 (pod worker-1 on node n7) cannot start: "
        "ImagePullBackOff: Back-off: x:1: not found"
    )


def test_a_registry_that_does_not_answer_is_waited_for_longer() -> None:
    seen = watch()
    seen.saw(*started_but(waiting(WORKER_1, "ErrImagePull", "i/o timeout")), 1)
    assert seen.gives_up(40) is None
    assert seen.gives_up(51) is not None


def test_an_obstacle_that_went_away_is_forgotten() -> None:
    seen = watch()
    seen.saw(*started_but(waiting(WORKER_1, "ErrImagePull", "not found")), 1)
    seen.saw(*started_but(waiting(WORKER_1, "ContainerCreating")), 2)
    seen.saw(*started_but(waiting(WORKER_1, "ErrImagePull", "not found")), 11)
    assert seen.gives_up(20) is None


def test_a_full_cluster_is_named_and_waited_for() -> None:
    seen = watch()
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    condition["message"] = "0/3 nodes are available"
    full = started_but(pod(WORKER_1, phase="Pending", conditions=[condition]))
    text = "waiting for worker 1 (Unschedulable: 0/3 nodes are available)"
    assert said_in(seen, full, 6) == [f"after 6 s, {text}"]
    assert said_in(seen, full, 7) == []
    assert said_in(seen, full, 26) == [f"after 26 s, {text}"]
    assert seen.gives_up(99) is None
    assert seen.gives_up(100) == (
        "not all pods have started within 100 s (PS_RENDEZVOUS_TIMEOUT): "
        "worker 1 (Unschedulable: 0/3 nodes are available)"
    )


def test_a_quota_that_forbids_the_pods_is_named() -> None:
    seen = watch()
    quota = event("is forbidden: exceeded quota: small", name="train-01234567-worker")
    short = (jobs(), [running(SCHEDULER), running(SERVER)], [quota])
    seen.saw(*short, 1)
    assert seen.gives_up(11) == (
        "worker 0 cannot start: FailedCreate: is forbidden: exceeded quota: small"
    )
    assert said_in(seen, short, 11) == [
        "after 11 s, waiting for worker 0, worker 1 "
        "(FailedCreate: is forbidden: exceeded quota: small)"
    ]


def test_that_all_have_started_is_said_once() -> None:
    seen = watch()
    assert said_in(seen, started_but(running(WORKER_1)), 1) == ["all 4 pods have started"]
    assert said_in(seen, started_but(running(WORKER_1)), 2) == []
    assert seen.gives_up(500) is None


# -- a cluster that does not answer -----------------------------------------------------------


def test_silence_is_said_at_once_and_then_now_and_then_and_so_is_its_end() -> None:
    seen = watch()
    seen.saw(*started_but(running(WORKER_1)), 10)
    assert notes(seen.no_answer("refused", 12)) == [
        "the cluster does not answer (refused); the job is left alone, trying again"
    ]
    assert seen.no_answer("refused", 14) == []
    shown = notes(seen.no_answer("refused", 40))
    assert shown == ["no answer from the cluster for 30 s (refused)"]
    said = said_in(seen, started_but(running(WORKER_1)), 50)
    assert said == ["the cluster answers again, after 40 s"]


def test_nothing_ends_because_of_silence_but_following_does_after_a_long_time() -> None:
    seen = watch()
    seen.saw(*started_but(running(WORKER_1)), 10)
    seen.no_answer("refused", 12)
    assert seen.lost_sight(209) is None
    assert seen.lost_sight(210) == "the cluster has not answered for 200 s"
    assert seen.endings == {}


# -- lines of logs ----------------------------------------------------------------------------


def test_times_are_taken_off_lines() -> None:
    data = b"2026-01-01T00:00:00.5Z one\n2026-01-01T00:00:00.50001Z  two \n2026-01-01T00:00:01Z "
    last = b"2026-01-01T00:00:01"
    assert untimed(data.split(b"\n"), b"", b"") == ([b"one", b" two ", b""], last)


def test_a_new_call_repeats_nothing_and_misses_nothing() -> None:
    data = (
        b"2026-01-01T00:00:00.1Z a\n2026-01-01T00:00:00.12Z b\n2026-01-01T00:00:00.121Z B\n"
        b"2026-01-01T00:00:00.3Z c\nno time"
    )
    known, last = b"2026-01-01T00:00:00.12", b"2026-01-01T00:00:00.3"
    assert untimed(data.split(b"\n"), known, known) == ([b"B", b"c", b"no time"], last)


def test_a_progress_bar_shows_its_last_state() -> None:
    lines, _ = untimed([b"2026-01-01T00:00:00Z 10%\r50%\r100%\r"], b"", b"")
    assert lines == [b"100%"]
