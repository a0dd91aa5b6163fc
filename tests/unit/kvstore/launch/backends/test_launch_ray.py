"""What the launcher ``ray`` asks of Ray, and the words for what Ray cannot give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.launch.backends.ray import _JobDirectory, make_plan, why_no_job
from kvstore.launch.backends.ray_demand import (
    FATAL,
    LOG_NAME,
    STATE_NAME,
    RayPlan,
    shortage,
    why_waiting,
)
from kvstore.launch.backends.ray_driver import _started_here
from kvstore.launch.options import LaunchError, parse_arguments

GIB = 1 << 30
RUNNING = "10.0.0.1:6379"
NODE = {"CPU": 8.0, "memory": 16.0 * GIB, "node:10.0.0.1": 1.0}
GPU_NODE = {**NODE, "CPU": 4.0, "GPU": 4.0}


def plan_of(*words: str) -> RayPlan:
    options = parse_arguments(["--launcher", "ray", *words, "python", "train.py"])
    return make_plan(options, "/here", None)


def test_a_plan_comes_back_from_its_text() -> None:
    plan = plan_of("-n", "2", "-s", "1", "--launcher-args=--max-retries 0 --working-dir .")
    found = RayPlan.from_text(plan.to_text())
    assert found.bundles() == plan.bundles()
    assert found.max_retries == 0
    assert found.runtime_env == {"working_dir": "."}


def test_servers_come_first_and_each_has_its_bundle() -> None:
    asked = ["--server-cores", "2", "--worker-gpus", "1", "--worker-memory", "2g"]
    plan = plan_of("-n", "2", "-s", "1", *asked, "--jobname", "mine")
    worker = {"CPU": 1, "GPU": 1, "memory": 2 * GIB}
    assert plan.bundles() == [{"CPU": 2}, worker, worker]
    assert plan.name == "mine"
    assert plan.strategy == "SPREAD"


def test_ray_decides_about_restarts_unless_told() -> None:
    assert plan_of("-n", "1").max_retries is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--launcher-args=--no-such"], "--launcher-args for ray: unrecognized arguments"),
        (["--launcher-args=--strategy MIDDLE"], "invalid choice: 'MIDDLE'"),
        (["--launcher-args=--max-retries x"], "invalid int value: 'x'"),
        (["--launcher-args=--runtime-env-json '{'"], "--runtime-env-json is not JSON"),
        (["--launcher-args=--runtime-env-json 3"], "has to be an object"),
        (["--queue", "long"], "ray does not use it"),
    ],
)
def test_options_that_make_no_sense_are_a_sentence(words: Sequence[str], sentence: str) -> None:
    with pytest.raises(LaunchError) as found:
        plan_of("-n", "1", *words)
    assert sentence in str(found.value)
    assert found.value.exit_code == 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--worker-gpus", "8"],
            "no node of the Ray cluster has 8 GPUs, which a worker needs (the most on one: 4 GPUs)",
        ),
        (
            ["--server-memory", "32g"],
            "no node of the Ray cluster has 32.0 GiB of memory, which a server needs "
            "(the most on one: 16.0 GiB of memory)",
        ),
        (
            ["--worker-gpus", "1", "--worker-cores", "8"],
            "no node of the Ray cluster has 8 CPUs and 1 GPU together, which a worker needs",
        ),
        (
            ["--worker-cores", "6"],
            "the job needs 13 CPUs, and the Ray cluster has 12 CPUs (on 2 nodes)",
        ),
    ],
)
def test_what_no_node_or_not_all_nodes_have_is_named(words: Sequence[str], sentence: str) -> None:
    plan = plan_of("-n", "2", "-s", "1", *words)
    assert shortage(plan, [NODE, GPU_NODE]) == sentence
    assert why_waiting(plan, [NODE, GPU_NODE], {}) == sentence


def test_what_others_use_is_named() -> None:
    plan = plan_of("-n", "2", "-s", "2", "--worker-gpus", "1")
    assert shortage(plan, [NODE, GPU_NODE]) is None
    assert why_waiting(plan, [NODE, GPU_NODE], {"CPU": 9.0, "GPU": 1.0}) == (
        "the job needs 2 GPUs, and free are 1 GPU of the Ray cluster's 4 GPUs"
    )
    assert why_waiting(plan, [NODE, GPU_NODE], {"CPU": 9.0, "GPU": 4.0}) == (
        "Ray is placing the processes"
    )


def test_a_cluster_without_nodes_is_a_shortage() -> None:
    assert "no node of the Ray cluster has 1 CPU" in str(shortage(plan_of("-n", "1"), []))


def test_the_drivers_own_line_says_why_there_is_no_job() -> None:
    sentence = "there is no Ray at 10.0.0.1:6379"
    assert why_no_job(FATAL + sentence) == sentence
    assert why_no_job(sentence) is None


def test_a_driver_that_cannot_be_run_is_explained_by_its_last_line() -> None:
    assert _JobDirectory().explain(["Traceback ...", "ImportError: no"], 1) == "ImportError: no"


def test_a_driver_that_ends_without_a_word_is_explained_by_its_log(tmp_path: Path) -> None:
    directory = _JobDirectory()
    assert directory.state() == ""
    assert str(tmp_path) in directory.command(tmp_path)
    (tmp_path / LOG_NAME).write_text("a check failed\n\n")
    (tmp_path / STATE_NAME).write_text("connecting to Ray at 10.0.0.1:6379")
    assert directory.state() == "connecting to Ray at 10.0.0.1:6379"
    assert directory.explain([], -6).endswith(
        "ended (killed by signal 6) before all processes had started; it said:\n  a check failed"
    )


@pytest.mark.parametrize(
    ("running", "variables"),
    [
        ("temporary", {"TMPDIR": "temporary"}),
        ("own", {"RAY_TMPDIR": "own", "TMPDIR": "temporary"}),
        ("temporary", {"RAY_TMPDIR": "", "TMPDIR": "temporary"}),
    ],
)
def test_a_running_cluster_is_looked_for_where_ray_leaves_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: str, variables: dict[str, str]
) -> None:
    (tmp_path / running / "ray").mkdir(parents=True)
    (tmp_path / running / "ray" / "ray_current_cluster").write_text(f"{RUNNING}\n")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    for name, directory in variables.items():
        monkeypatch.setenv(name, str(tmp_path / directory) if directory else "")
    assert _started_here() == RUNNING
