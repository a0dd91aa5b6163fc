"""PyTorch Lightning with our backend and with our strategy, on its own ranks and our launcher's.

`make test-slow` installs Lightning; on Slurm it is tried in ``tests/launchers``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from job import MARK, ROOT, Job, MakeJob, Process, clean_environment, needs_proc

pytestmark = [
    pytest.mark.process,
    needs_proc,
    pytest.mark.timeout(480),
    pytest.mark.slow(reason="each of its processes imports Lightning for seconds"),
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None or importlib.util.find_spec("lightning") is None,
        reason="needs PyTorch and Lightning",
    ),
]

LIMIT_S = 400.0
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
print(f"by {dist.get_backend()}\\n", end="", flush=True)  # in one write, beside the other's
"""


def run(job: Job, *words: str, **settings: str) -> Process:
    """A script to its good end, in the job's directory; what hangs says where."""
    always = {MARK: job.mark, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    environment = {**clean_environment(), **always, **settings}
    process = job._start("lightning", [sys.executable, *words], environment)
    try:
        assert process.wait(LIMIT_S) == 0, process.text
    except AssertionError:
        for pid in job.left():
            os.kill(pid, signal.SIGABRT)
        job.end()
        raise AssertionError(process.text) from None
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
    process = run(make_job(2), EXAMPLE, "--epochs", "2", "--folder", str(tmp_path / "checkpoints"))
    [found] = re.findall(r"test accuracy (0\.\d+) on 2 ranks by kvstore", process.text)
    assert float(found) >= 0.96
    [checkpoint] = (tmp_path / "checkpoints").iterdir()
    assert checkpoint.suffix == ".ckpt"


def test_workers_of_our_launcher_are_lightnings_ranks(make_job: MakeJob, tmp_path: Path) -> None:
    """It starts none beside them, and they use the job's servers."""
    launcher = [str(ROOT / "tools" / "launch.py"), "-n", "2", "-s", "1", "--launcher", "local"]
    words = [sys.executable, EXAMPLE, "--epochs", "1", "--folder", str(tmp_path / "checkpoints")]
    process = run(make_job(2), *launcher, *words)
    assert re.search(r"\[worker 0\] test accuracy 0\.9\d+ on 2 ranks by kvstore", process.text)
    assert "all have joined: 2 workers and 1 server" in process.text


STRATEGY = """
import pathlib, torch, lightning
import kvstore.torch as kvt
from kvstore.errors import ArgumentTypeError, NotSupportedError
from kvstore.lightning import KVStoreStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
optimizers = {
    "servers": lambda model: kvt.ServerOptimizer(model, optimizer="adam", lr=0.05),
    "averaged": lambda model: kvt.DistributedOptimizer(alone["averaged"](model.parameters())),
    "alone": lambda model: alone["averaged"](model.parameters()),
}
alone = {
    "servers": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    "averaged": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}

def loss_of(line, x):
    return (line(x) - x.sum(1, keepdim=True)).square().mean()

class Model(lightning.LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.batches = kind, []
        self.line = torch.nn.Linear(3, 1)
        self.register_buffer("mark", torch.rand(1))
    def on_fit_start(self):
        self.begin = {name: each.clone() for name, each in self.line.state_dict().items()}
    def training_step(self, batch, index):
        [x] = batch
        self.batches.append(self.all_gather(x).flatten(0, 1))  # those of both workers
        self.log("mean", x.mean(), sync_dist=True, on_epoch=True, on_step=False)
        self.log("most", x.max(), sync_dist=True, reduce_fx="max", on_epoch=True, on_step=False)
        return loss_of(self.line, x)
    def configure_optimizers(self):
        return optimizers[self.kind](self)

class Files(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options)
        written.append(path)

written = []
data = torch.arange(48.0).reshape(16, 3) / 48

def fit(kind, ckpt_path=None, **options):
    strategy = KVStoreStrategy(checkpoint_io=Files())
    torch.manual_seed(strategy.global_rank)  # weights of its own: rank 0's count
    trainer = lightning.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=4, logger=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )
    model = Model(kind)
    trainer.fit(model, DataLoader(TensorDataset(data), 4), ckpt_path=ckpt_path)
    return trainer, model

def replayed(model, joined):
    # One process's weights, after steps on the batches of both workers together.
    line = torch.nn.Linear(3, 1)
    line.load_state_dict(model.begin)
    optimizer = alone[model.kind](line.parameters())
    for start in range(0, len(model.batches), joined):
        optimizer.zero_grad()
        loss_of(line, torch.cat(model.batches[start : start + joined])).backward()
        optimizer.step()
    return line.weight

def close(one, other):
    return (one - other).abs().max().item() < 1e-5

# an optimizer on the servers
trainer, model = fit("servers", callbacks=[ModelCheckpoint("steps", save_top_k=-1, save_last=True)])
strategy, rank = trainer.strategy, trainer.global_rank
assert (trainer.world_size, trainer.is_global_zero, rank) == (2, rank == 0, strategy.kv.rank)
assert len(model.batches) == 8 and all(len(each) == 8 for each in model.batches)
assert sorted(torch.cat(model.batches[:2])[:, 0].tolist()) == data[:, 0].tolist()
assert close(model.line.weight, replayed(model, 1)), model.line.weight
everywhere = model.all_gather(torch.cat([model.line.weight[0].detach(), model.mark]))
assert torch.equal(everywhere[0], everywhere[1]), everywhere
assert close(trainer.callback_metrics["mean"], data.mean())
assert trainer.callback_metrics["most"] == data.max()
assert (strategy.broadcast(rank), strategy.broadcast(rank, 1), strategy.reduce("x")) == (0, 1, "x")
decide = strategy.reduce_boolean_decision
assert (decide(rank == 0), decide(rank == 0, all=False), decide(True)) == (False, True, True)
assert strategy.all_gather(torch.tensor(rank, dtype=torch.bfloat16)).tolist() == [0, 1]
for options in {"group": 3}, {"sync_grads": True}:
    try:
        strategy.all_gather(data, **options)
        raise SystemExit("nothing was refused")
    except NotSupportedError as error:
        assert "DDPStrategy" in str(error)

# rank 0 has written the checkpoints, and what goes on from one has the states of the servers
files = sorted(each.name for each in pathlib.Path("steps").iterdir())
assert files == [*(f"epoch={n}-step={2 * n + 2}.ckpt" for n in range(4)), "last.ckpt"], files
assert bool(written) == (rank == 0)
_, resumed = fit("servers", "steps/epoch=1-step=4.ckpt", enable_checkpointing=False)
assert len(resumed.batches) == 4 and close(resumed.line.weight, model.line.weight)

# steps with the gradients of two batches of each worker
for kind in alone:
    _, model = fit(kind, enable_checkpointing=False, accumulate_grad_batches=2)
    assert len(model.batches) == 8 and close(model.line.weight, replayed(model, 2)), kind
try:
    fit("alone", enable_checkpointing=False)
except ArgumentTypeError as error:
    print("the end:", error, flush=True)
"""


def test_a_strategy_trains_with_the_optimizer_on_the_servers(make_job: MakeJob) -> None:
    """The workers' weights are equal, and those of one process on the batches of both."""
    job = make_job(2)
    script = job.directory / "script.py"
    script.write_text(STRATEGY)
    launcher = [str(ROOT / "tools" / "launch.py"), "-n", "2", "-s", "2", "--launcher", "local"]
    process = run(job, *launcher, sys.executable, str(script))
    said = r"\[worker (\d)\] the end: configure_optimizers must return .*, got a SGD"
    assert sorted(re.findall(said, process.text)) == ["0", "1"], process.text
