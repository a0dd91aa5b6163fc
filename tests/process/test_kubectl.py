"""Calls of kubectl: each has a deadline, and all go to one place. A script stands in for it."""

from __future__ import annotations

import json
import select
import sys
import time
from pathlib import Path

import pytest

from kvstore import status
from kvstore.launch.backends.kubernetes.kubectl import (
    Commands,
    Kubectl,
    KubectlResult,
    find_kubectl,
    scheduler_pod,
)
from kvstore.launch.options import LaunchError

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher's processes die with it"),
]

PATH = "/usr/bin:/bin"


def environment(directory: Path, script: str) -> dict[str, str]:
    """One in which ``kubectl`` is this shell script."""
    program = directory / "kubectl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{directory}:{PATH}"}


def test_a_call_that_hangs_ends_and_so_does_what_it_had_started(tmp_path: Path) -> None:
    """Programs that fetch credentials hold its output open."""
    kubectl = Kubectl(environment(tmp_path, "sleep 60 & sleep 60"))
    began_s = time.monotonic()
    answer = kubectl.call("get", "pods", timeout_s=0.3)
    assert time.monotonic() - began_s < 10
    assert answer.sentence == "kubectl get: no answer within 0.3 s"


def test_a_call_beside_a_loop_that_hangs_ends_with_an_answer(tmp_path: Path) -> None:
    commands = Commands(Kubectl(environment(tmp_path, "sleep 60 & sleep 60")), 0.3)
    answers: list[KubectlResult] = []
    commands.begin("look", answers.append, "get", "pods")
    until_s = time.monotonic() + 10
    while not answers and time.monotonic() < until_s:
        readers = commands.readers()
        ready, _, _ = select.select(list(readers), [], [], 0.05)
        for fd in ready:
            readers[fd]()
        commands.tick(time.monotonic())
    commands.close()
    assert [answer.sentence for answer in answers] == ["kubectl get: no answer"]
    assert not commands.runs("look")


def test_the_next_command_is_due_some_time_after_the_last_began(tmp_path: Path) -> None:
    commands = Commands(Kubectl(environment(tmp_path, "sleep 60")), 5)
    assert commands.due_s("look", 10) < time.monotonic()
    commands.begin("look", print, "get")
    assert commands.due_s("look", 10) == float("inf")
    commands.close()
    assert 5 < commands.due_s("look", 10) - time.monotonic() <= 10
    commands.hasten("look")
    assert commands.due_s("look", 10) < time.monotonic()


def test_what_is_written_to_a_call_arrives(tmp_path: Path) -> None:
    kubectl = Kubectl(environment(tmp_path, "cat"))
    assert kubectl.call("apply", stdin="é\n").output == "é\n".encode()


def test_context_and_namespace_are_looked_up_once_and_named_in_every_call(tmp_path: Path) -> None:
    config = '{"current-context": "c", "contexts": [{"context": {"namespace": "n"}}]}'
    environ = environment(tmp_path, f"echo '{config}'")
    assert find_kubectl(environ, None).argv("get") == [
        "kubectl", "--context=c", "--namespace=n", "get",
    ]  # fmt: skip
    assert find_kubectl(environ, "mine").argv("get")[2] == "--namespace=mine"


def test_a_context_without_a_namespace_means_the_one_called_default(tmp_path: Path) -> None:
    environ = environment(tmp_path, """echo '{"current-context": "c", "contexts": null}'""")
    assert find_kubectl(environ, None).argv() == [
        "kubectl", "--context=c", "--namespace=default",
    ]  # fmt: skip


def test_within_a_pod_there_is_no_context(tmp_path: Path) -> None:
    environ = environment(tmp_path, "echo 'error: current-context must exist' >&2; exit 1")
    assert find_kubectl(environ, None).argv("get") == ["kubectl", "get"]


def test_a_missing_kubectl_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot run kubectl: No such file") as caught:
        find_kubectl({"PATH": str(tmp_path)}, None)
    assert caught.value.exit_code == 127


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        ("error: one\n", "one"),
        ("E1122 noise\nThe connection was refused\n\n", "The connection was refused"),
        ("", "kubectl ended with 1 and said nothing"),
    ],
)
def test_the_last_line_of_a_complaint_says_most(error: str, sentence: str) -> None:
    assert KubectlResult(1, b"", error).sentence == sentence


def pods_of(*jobs: str) -> str:
    items = [
        {"metadata": {"name": f"{job}-scheduler-x7", "labels": {"job-name": f"{job}-scheduler"}}}
        for job in jobs
    ]
    return json.dumps({"items": items})


def test_the_schedulers_pod_of_the_only_job_or_of_the_one_that_is_named(tmp_path: Path) -> None:
    one = Kubectl(environment(tmp_path, f"echo '{pods_of('lenet-1f')}'"))
    assert scheduler_pod(one, None) == "lenet-1f-scheduler-x7"
    two = Kubectl(environment(tmp_path, f"echo '{pods_of('a-1', 'b-2')}'"), "team")
    assert scheduler_pod(two, "b-2") == "b-2-scheduler-x7"
    with pytest.raises(LaunchError, match="one running job in namespace team, found: a-1, b-2;"):
        scheduler_pod(two, None)
    with pytest.raises(LaunchError, match="a running job 'c' in namespace team, found: a-1, b-2;"):
        scheduler_pod(two, "c")
    none = Kubectl(environment(tmp_path, f"echo '{pods_of()}'"))
    with pytest.raises(LaunchError, match="found: none;"):
        scheduler_pod(none, None)
    away = Kubectl(environment(tmp_path, "echo 'error: no route to host' >&2; exit 1"))
    with pytest.raises(LaunchError, match="cannot ask the cluster: no route to host"):
        scheduler_pod(away, None)


def test_status_runs_in_the_schedulers_pod_and_ends_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = f"""case "$*" in
        config*) exit 1 ;;
        *"get pods"*) echo '{pods_of("lenet-1f")}' ;;
        *) echo "$@"; exit 1 ;;
    esac"""
    for name, value in environment(tmp_path, script).items():
        monkeypatch.setenv(name, value)
    code = status.main(["--kubernetes", "--namespace", "team", "--json", "--watch", "5"])
    assert code == 1
    assert capfd.readouterr().out.splitlines() == [
        "--namespace=team exec lenet-1f-scheduler-x7 -- python -m kvstore.status --json --watch=5"
    ]
