"""PyTorch Lightning with our backend: ranks that it starts itself, and those of our launcher.

`make test-slow` installs Lightning; on Slurm it is tried in ``tests/launchers``.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from job import MARK, ROOT, Job, MakeJob, Process, clean_environment, needs_proc

pytestmark = [
    pytest.mark.process,
    needs_proc,
    pytest.mark.timeout(240),
    pytest.mark.slow(reason="each of its processes imports Lightning for seconds"),
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None or importlib.util.find_spec("lightning") is None,
        reason="needs PyTorch and Lightning",
    ),
]

LIMIT_S = 200.0
EXAMPLE = str(ROOT / "examples" / "lightning" / "mnist.py")

SCRIPT = """
import torch, lightning
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
        self.seen = []
    def training_step(self, batch, index):
        [x] = batch
        self.seen += x.flatten().tolist()
        self.log("mean", x.mean(), sync_dist=True, on_epoch=True, on_step=False)
        return (self.line(x) - 2 * x).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = lightning.Trainer(
    accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, STRATEGY,
)
model = Model()
torch.nn.init.constant_(model.line.weight, float(trainer.global_rank))  # DDP takes rank 0's
trainer.fit(model, DataLoader(TensorDataset(torch.arange(8.0)[:, None] / 8), 2, shuffle=True))
gathered = [None, None]
told = (model.seen, model.line.weight.item(), trainer.callback_metrics["mean"].item())
dist.all_gather_object(gathered, told)
(seen, weight, mean), (others, same, mean_there) = gathered
assert sorted(seen + others) == [number / 8 for number in range(8)], gathered
assert weight == same != 0 and mean == mean_there == 3.5 / 8, gathered
assert trainer.strategy.broadcast(trainer.global_rank) == 0
print("by", dist.get_backend(), flush=True)
"""


def run(job: Job, *words: str, **settings: str) -> Process:
    """A script to its good end, in the job's directory."""
    environment = {**clean_environment(), MARK: job.mark, "OMP_NUM_THREADS": "1", **settings}
    process = job._start("lightning", [sys.executable, *words], environment)
    assert process.wait(LIMIT_S) == 0, process.text
    return process


@pytest.mark.parametrize(
    ("strategy", "replaced"),
    [("DDPStrategy(process_group_backend='kvstore')", ""), ("'ddp'", "gloo")],
    ids=["named", "replaced"],
)
def test_ranks_that_lightning_starts_share_data_gradients_and_what_is_logged(
    make_job: MakeJob, strategy: str, replaced: str
) -> None:
    """Nothing of ours is imported by the script: the entry point is enough."""
    job = make_job(2)
    script = job.directory / "script.py"
    script.write_text(SCRIPT.replace("STRATEGY", f"strategy={strategy}"))
    process = run(job, str(script), KVSTORE_TORCH_REPLACES=replaced)
    assert process.text.count("by kvstore") == 2, process.text


def test_the_example_reads_digits_and_leaves_a_checkpoint(
    make_job: MakeJob, tmp_path: Path
) -> None:
    process = run(make_job(2), EXAMPLE, "--folder", str(tmp_path / "checkpoints"))
    [found] = re.findall(r"test accuracy (0\.\d+) on 2 ranks by kvstore", process.text)
    assert float(found) >= 0.97
    [checkpoint] = (tmp_path / "checkpoints").iterdir()
    assert checkpoint.suffix == ".ckpt"


def test_workers_of_our_launcher_are_lightnings_ranks(make_job: MakeJob, tmp_path: Path) -> None:
    """It starts none beside them, and they use the job's servers."""
    launcher = [str(ROOT / "tools" / "launch.py"), "-n", "2", "-s", "1", "--launcher", "local"]
    words = [sys.executable, EXAMPLE, "--epochs", "1", "--folder", str(tmp_path / "checkpoints")]
    process = run(make_job(2), *launcher, *words)
    assert re.search(r"\[worker 0\] test accuracy 0\.9\d+ on 2 ranks by kvstore", process.text)
    assert "all have joined: 2 workers and 1 server" in process.text


ON_SERVERS = """
import torch, lightning
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader, TensorDataset
import kvstore.torch as kvt

kv = kvt.init()

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        [x] = batch
        return (self.line(x) - x.sum(1, keepdim=True)).square().mean()
    def configure_optimizers(self):
        return kvt.ServerOptimizer(self, kv, "adam", lr=0.1)

torch.manual_seed(kv.rank)  # weights and data of its own
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, plugins=[LightningEnvironment()], max_epochs=20, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
model = Model()
trainer.fit(model, DataLoader(TensorDataset(torch.rand(64, 2)), 8))
weights = model.line.weight.flatten().tolist()
print("close", max(abs(weight - 1) for weight in weights) < 0.1, weights, flush=True)
"""


def test_an_optimizer_on_the_servers_is_one_of_lightnings(make_job: MakeJob) -> None:
    """Each worker's Trainer is alone; what joins them is the optimizer."""
    job = make_job(2)
    script = job.directory / "script.py"
    script.write_text(ON_SERVERS)
    launcher = [str(ROOT / "tools" / "launch.py"), "-n", "2", "-s", "1", "--launcher", "local"]
    process = run(job, *launcher, sys.executable, str(script))
    found = re.findall(r"\[worker (\d)\] close True (\[.*\])", process.text)
    assert sorted(rank for rank, _ in found) == ["0", "1"], process.text
    assert found[0][1] == found[1][1], process.text
