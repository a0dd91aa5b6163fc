"""What the driver says to the launcher; what Ray is asked for is in ``launch_texts.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.launch.backends.ray import (
    FATAL,
    LOG_NAME,
    STATE_NAME,
    RayJob,
    make_plan,
    shortage,
)
from kvstore.launch.backends.ray_driver import _started_here
from kvstore.launch.options import LaunchError, parse_arguments

OPTIONS = parse_arguments(["--launcher", "ray", "-n", "1", "python", "train.py"])
RUNNING = "10.0.0.1:6379"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--strategy MIDDLE", "invalid choice: 'MIDDLE'"),
        ("--runtime-env-json '{'", "--runtime-env-json is not JSON"),
    ],
)
def test_words_of_python_that_differ_between_its_versions(words: str, sentence: str) -> None:
    options = parse_arguments(["--launcher", "ray", f"--launcher-args={words}", "-n", "1", "x"])
    with pytest.raises(LaunchError) as found:
        make_plan(options, "/here", None)
    assert sentence in str(found.value)
    assert found.value.exit_code == 2


def test_a_cluster_without_nodes_is_a_shortage() -> None:
    plan = make_plan(OPTIONS, "/here", None)
    assert "no node of the Ray cluster has 1 CPU" in str(shortage(plan, []))


def test_the_drivers_own_line_says_why_there_is_no_job() -> None:
    sentence = "there is no Ray at 10.0.0.1:6379"
    job = RayJob(OPTIONS, {})
    assert job.fatal(FATAL + sentence) == sentence
    assert job.fatal(sentence) is None


def test_a_driver_that_cannot_be_run_is_explained_by_its_last_line() -> None:
    said = ["Traceback ...", "ImportError: no"]
    assert RayJob(OPTIONS, {}).explain(said, 1) == "ImportError: no"


def test_a_driver_that_ends_without_a_word_is_explained_by_its_log(tmp_path: Path) -> None:
    job = RayJob(OPTIONS, {})
    assert job.poll() == ""
    assert str(tmp_path) in job.submit(tmp_path)
    (tmp_path / LOG_NAME).write_text("a check failed\n\n")
    (tmp_path / STATE_NAME).write_text("connecting to Ray at 10.0.0.1:6379")
    assert job.poll() == "connecting to Ray at 10.0.0.1:6379"
    assert job.explain([], -6).endswith(
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
