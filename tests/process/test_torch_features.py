"""What PyTorch builds on a process group works on this backend as on gloo: two ranks on the CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from job import MakeJob, needs_proc
from torch_jobs import start_ranks

pytestmark = [
    pytest.mark.process,
    needs_proc,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch"),
]

LIMIT_S = 270.0


def lines_of_ranks(
    make_job: MakeJob, folder: Path, features: str, *backends: str
) -> list[list[str]]:
    """What each rank prints that tries features; ``features`` is code that gives them."""
    job = make_job(2)
    ranks = start_ranks(
        job,
        f"""
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from torch_ddp_features import run
{features}
run(features, {backends}, Path({str(folder)!r}))
""",
    )
    assert job.wait_all(LIMIT_S) == [0, 0], job.output()
    # PyTorch writes warnings, too.
    return [[line for line in rank.lines if line.startswith(backends)] for rank in ranks]


def test_ddp_joins_uneven_inputs_and_finds_unused_parameters(
    make_job: MakeJob, tmp_path: Path
) -> None:
    names = ["ddp_join", "ddp_unused_parameters"]
    features = (
        f"from torch_ddp_features import DDP; features = {{name: DDP[name] for name in {names}}}"
    )
    lines = lines_of_ranks(make_job, tmp_path, features, "kvstore")
    assert lines == [[f"kvstore {name}" for name in names]] * 2


@pytest.mark.slow(reason="all that PyTorch builds on a group, with two backends")
def test_what_pytorch_builds_on_a_group_works_as_with_gloo_and_as_in_one_process(
    make_job: MakeJob, tmp_path: Path
) -> None:
    features = "from torch_features import FEATURES as features"
    lines = lines_of_ranks(make_job, tmp_path, features, "kvstore", "gloo")
    assert len(lines[0]) == 35  # 18 features, of which gloo lacks one
    assert lines[0] == lines[1]
