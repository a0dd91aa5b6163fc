"""LeNet on digits with PyTorch Lightning; ranks exchange gradients through our servers.

    python examples/lightning/mnist.py                        # Lightning starts 2 ranks
    kvstore-launch -n 2 -s 1 python examples/lightning/mnist.py
    srun --ntasks-per-node 1 --nodes 2 python examples/lightning/mnist.py --devices 1 --num-nodes 2

Only ``process_group_backend="kvstore"`` is specific to this project. Lightning gives each rank
its share of the digits (DistributedSampler), averages logged values, and writes the checkpoint on
rank 0. ``--strategy ddp`` with KVSTORE_TORCH_REPLACES=gloo does not need even that.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "image_classification"))
if __name__ == "__main__" and importlib.util.find_spec("lightning") is None:
    sys.exit("mnist: Lightning is missing; install it: pip install lightning")

import lightning
import mnist
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset


class LeNet(lightning.LightningModule):
    """LeNet; each rank starts with its own weights, and DDP copies those of rank 0."""

    def __init__(self, learning_rate: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 20, 5), nn.Tanh(), nn.MaxPool2d(2)),
            *(nn.Conv2d(20, 50, 5), nn.Tanh(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(800, 500), nn.Tanh(), nn.Linear(500, 10)),
        )

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """The loss of one of this rank's batches."""
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def validation_step(self, batch: Any, index: int) -> None:
        """Count right answers; ``sync_dist`` averages over all ranks, through the servers."""
        images, labels = batch
        right = (self.net(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD on every rank; DDP has already averaged the gradients."""
        return torch.optim.SGD(self.parameters(), lr=self.hparams["learning_rate"], momentum=0.9)


def dataset(digits: mnist.Digits) -> Dataset[Any]:
    """The digits as tensors."""
    return TensorDataset(torch.from_numpy(digits.images), torch.from_numpy(digits.labels))


def main() -> None:
    """Train, write the best weights, and test them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["kvstore", "ddp"], default="kvstore")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--devices", type=int, help="ranks on each host")
    parser.add_argument("--num-nodes", type=int, help="hosts")
    parser.add_argument("--folder", default="lightning-mnist", help="where checkpoints go")
    flags = parser.parse_args()
    # Lightning must be told the number of ranks: kvstore-launch and torchrun set these variables.
    devices = flags.devices or int(os.environ.get("LOCAL_WORLD_SIZE", 2))
    num_nodes = flags.num_nodes or max(1, int(os.environ.get("WORLD_SIZE", 1)) // devices)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // devices))
    strategy: str | Strategy = "ddp"
    if flags.strategy == "kvstore":
        strategy = DDPStrategy(process_group_backend="kvstore")
    lightning.seed_everything(7, verbose=False)
    training, test = map(dataset, mnist.load())
    checkpoint = ModelCheckpoint(flags.folder, monitor="accuracy", mode="max")
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        num_nodes=num_nodes,
        max_epochs=flags.epochs,
        callbacks=[checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        LeNet(),
        DataLoader(training, flags.batch_size, shuffle=True),
        DataLoader(test, 250),
    )
    backend = torch.distributed.get_backend() if trainer.world_size > 1 else "no backend"
    model = LeNet.load_from_checkpoint(checkpoint.best_model_path)
    [found] = trainer.validate(model, DataLoader(test, 250), verbose=False)
    if trainer.is_global_zero:
        print(
            f"test accuracy {found['accuracy']:.4f} on {trainer.world_size} ranks by {backend}",
            flush=True,
        )


if __name__ == "__main__":
    main()
