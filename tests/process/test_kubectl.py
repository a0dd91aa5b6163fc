"""Calls of kubectl: each has a deadline, and all go to one place. A script stands in for it."""

from __future__ import annotations

import select
import sys
import time
from pathlib import Path

import pytest

from kvstore.launch.kubectl import Answer, Commands, Kubectl, find_kubectl
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
    answers: list[Answer] = []
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
    assert Answer(1, b"", error).sentence == sentence
