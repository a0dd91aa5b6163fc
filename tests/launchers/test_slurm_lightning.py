"""PyTorch Lightning on Slurm: ranks that srun starts, and ranks that our launcher starts there."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from common import ROOT, SENTENCE_S, Launcher
from services.daemon import wait_for
from services.slurm import Slurm

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("lightning") is None or importlib.util.find_spec("torch") is None,
        reason="needs PyTorch and Lightning",
    ),
    pytest.mark.timeout(300),
]

EXAMPLE = str(ROOT / "examples" / "lightning" / "mnist.py")
RESULT = r"test accuracy (0\.\d+) on 2 ranks by kvstore"
# The hosts of these tests are one kernel's: nodes of a real cluster need not be told their names.
SCRIPT = f"""#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
export OMP_NUM_THREADS=1
srun bash -c 'PS_MACHINE=$(hostname) exec "$@"' train \\
    {sys.executable} {EXAMPLE} --num-nodes 2 --devices 1 --folder checkpoints --strategy STRATEGY
"""


@pytest.fixture
def launcher(slurm: Slurm, tmp_path: Path) -> Iterator[Launcher]:
    yield Launcher(
        own=["--launcher", "slurm"],
        hosts=slurm.nodes,
        processes=lambda: [*slurm.processes(), *slurm.jobs()],
        environment={**slurm.environment, "KVSTORE_JOB_DIR": str(tmp_path / "jobs")},
    )
    slurm.run("scancel", "--quiet", "--user=root")


def accuracy(text: str) -> float:
    """What rank 0 has printed at the end, and nobody else."""
    [found] = re.findall(RESULT, text)
    return float(found)


@pytest.mark.parametrize(("strategy", "replaced"), [("kvstore", ""), ("ddp", "gloo")])
def test_a_script_of_sbatch_trains_with_ranks_that_srun_starts(
    slurm: Slurm, launcher: Launcher, tmp_path: Path, strategy: str, replaced: str
) -> None:
    """Lightning reads Slurm's variables; the group starts a scheduler and a server on each host.

    Plain ``ddp`` uses gloo, in whose place KVSTORE_TORCH_REPLACES puts our backend.
    """
    script, output = tmp_path / "train.sh", tmp_path / "output"
    script.write_text(SCRIPT.replace("STRATEGY", strategy))
    exported = f"ALL,PYTHONPATH={ROOT},KVSTORE_TORCH_REPLACES={replaced}"
    words = ["--parsable", "--wait", f"--output={output}", f"--chdir={tmp_path}"]
    try:
        slurm.run("sbatch", *words, f"--export={exported}", str(script), timeout_s=200)
    finally:
        said = output.read_text() if output.exists() else ""
        print(said)
    assert "GLOBAL_RANK: 1, MEMBER: 2/2" in said
    assert accuracy(said) >= 0.97
    assert [path.suffix for path in (tmp_path / "checkpoints").iterdir()] == [".ckpt"]
    wait_for("end of the job's processes", launcher.nothing_runs, SENTENCE_S)


def test_our_launcher_starts_the_ranks_on_slurm(launcher: Launcher, tmp_path: Path) -> None:
    """Slurm's variables are there, too, and speak of agents: those of the launcher win."""
    done = launcher.run(
        *("-n", "2", "-s", "1", "--env", "OMP_NUM_THREADS=1", sys.executable, EXAMPLE),
        *("--epochs", "1", "--folder", "checkpoints"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert accuracy(done.stdout) > 0.9
    assert launcher.nothing_runs()
