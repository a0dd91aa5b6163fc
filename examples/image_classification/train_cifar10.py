"""Trains a residual network on CIFAR-10 with PyTorch, on one machine or on many.

One process, then two workers and one server on this machine::

    python examples/image_classification/train_cifar10.py --network resnext --num-layers 110 \\
        --batch-size 128 --kv-store device --data-dir cifar-10-batches-bin
    python tools/launch.py -n 2 -s 1 --launcher local \\
        python examples/image_classification/train_cifar10.py --kv-store dist_device_sync ...

The flags are those of MXNet's ``example/image-classification/train_cifar10.py`` where both have
them. Without the files, ``--benchmark 1`` generates images. Every worker gets all images and
visits its share of them; each has the same number of batches. The store keeps the weights and runs
SGD. Each device keeps its own statistics of batch norms, and those of rank 0's first device are
evaluated and saved. Read next: ``torch_training.py``.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if __name__ == "__main__":
    # Find the repository without installing it, from any current folder.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    if importlib.util.find_spec("torch") is None:
        sys.exit("train_cifar10: PyTorch is missing; install it: pip install torch")

import argparse
import platform
import time
from typing import Any

import cifar
import common
import numpy as np
import torch_resnet
import torch_training
from kvstore.training import shard, split_input_slice
from progress import Bar
from torch_training import Replica, Trainer

import kvstore as mx
from kvstore.mxnet.fit.files import states_path
from pslite.errors import PSError, UsageError

OF_NUMPY_NETWORKS = ("initializer", "dtype", "top_k", "loss")
"""Shared flags that accept only their default, because these networks are PyTorch's."""


def main(argv: list[str] | None = None) -> int:
    """Runs the script and returns its exit code."""
    args = parse(argv)
    try:
        train(args)
    except PSError as error:
        print(f"train_cifar10: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train_cifar10: interrupted", file=sys.stderr)
        return 130
    return 0


def train(args: argparse.Namespace) -> None:
    """Trains until ``--num-epochs`` epochs are done; rank 0 evaluates and saves."""
    training, test = images_of(args)
    network = torch_resnet.create(args.network, args.num_layers, args.num_group, args.seed)
    if args.load_epoch:
        torch_training.load_network(network, args.model_prefix, args.load_epoch)
    devices = torch_training.devices(args.gpus, args.cpus)
    parts = split_input_slice(args.batch_size, [1.0] * len(devices))
    replicas = [Replica(network, device, part) for device, part in zip(devices, parts, strict=True)]
    with mx.kvstore.create(args.kv_store) as store, Trainer(store, replicas) as trainer:
        common.check_prefix(args, store.rank)
        common.compress(args, store)
        num_batches = common.count_batches(args, store, len(training.labels))
        num_batches = min(num_batches, args.num_batches or num_batches)
        agreed = {
            "images": len(training.labels),
            "images per batch": args.batch_size,
            "batches per epoch": num_batches,
            "epochs": args.num_epochs,
            "epochs that are loaded": args.load_epoch or 0,
        }
        workers_here = torch_training.compare_workers(store, platform.node(), agreed)
        torch_training.use_threads(args.num_threads, workers_here * args.cpus)
        if store.rank == 0:
            count = torch_resnet.num_parameters(network)
            print(f"{args.network}-{args.num_layers}: {count:,} parameters", flush=True)
        Loop(args, store, trainer, num_batches, training, test).run()


class Loop:
    """Runs the epochs of one worker and prints their results."""

    def __init__(
        self,
        args: argparse.Namespace,
        store: mx.KVStore,
        trainer: Trainer,
        num_batches: int,
        training: cifar.Images,
        test: cifar.Images,
    ) -> None:
        self.args = args
        self.store = store
        self.trainer = trainer
        self.num_batches = num_batches
        self.training = training
        self.test = test

    def run(self) -> None:
        args = self.args
        self.trainer.start(self.optimizer())
        begin = args.load_epoch or 0
        if begin:
            self.store.load_optimizer_states(states_path(args.model_prefix, begin))
        for epoch in range(begin, args.num_epochs):
            self.run_epoch(epoch)
            self.trainer.catch_up(wait=epoch + 1 == args.num_epochs)
            if self.store.rank == 0:
                self.end_epoch(epoch)

    def optimizer(self) -> mx.optimizer.Optimizer:
        """The store's optimizer; batch norms and biases do not decay."""
        optimizer = common.make_optimizer(self.args, self.store, self.num_batches)
        return optimizer.replace(wd_mult=torch_resnet.decay_factors(self.trainer.first.network))

    def run_epoch(self, epoch: int) -> None:
        """Visits this worker's share of the images once, newly augmented."""
        args, rank = self.args, self.store.rank
        rows = shard(
            len(self.training.labels),
            rank,
            self.store.num_workers,
            batch_size=args.batch_size,
            seed=args.seed,
            epoch=epoch,
        )[: self.num_batches]
        rng = np.random.default_rng((args.seed, epoch, rank))
        shown = f"epoch {epoch + 1}/{args.num_epochs}"
        bar = Bar(sys.stdout, is_wanted=rank == 0)
        meter = Meter(shown, len(rows), args.disp_batches, bar)
        try:
            for row in rows:
                varied = cifar.augment(self.training.pixels[row], rng)
                loss, right = self.trainer.step(cifar.normalised(varied), self.training.labels[row])
                meter.count(len(row), loss, right)
            meter.end()
        finally:
            bar.leave_line()

    def end_epoch(self, epoch: int) -> None:
        """Evaluate, and save if there is a prefix."""
        args, done = self.args, epoch + 1
        first = self.trainer.first
        batches = torch_training.in_batches(self.test_batch, len(self.test.labels))
        accuracy = first.accuracy(batches)
        print(f"epoch {done}/{args.num_epochs}: test accuracy: {accuracy:.4f}", flush=True)
        if args.model_prefix and done % args.save_period == 0:
            # Save the states first, so that there is never a network without them.
            self.store.save_optimizer_states(states_path(args.model_prefix, done))
            path = torch_training.save_network(first.network, args.model_prefix, done)
            print(f"saved {path}", flush=True)

    def test_batch(self, part: slice) -> tuple[Any, Any]:
        return cifar.normalised(self.test.pixels[part]), self.test.labels[part]


class Meter:
    """This worker's speed, loss and accuracy: a line every few batches, and at the end.

    On a terminal, rank 0 shows a bar from the start instead of these lines, except the last.
    """

    def __init__(self, epoch: str, num_batches: int, disp_batches: int, bar: Bar) -> None:
        self._epoch = epoch
        self._num_batches = num_batches
        self._disp_batches = disp_batches
        self._bar = bar
        self._began_s = self._shown_s = time.perf_counter()
        self._seen = self._seen_at_show = self._batches = self._right = 0
        self._loss = 0.0
        bar.draw(epoch, 0.0, f"batch 1/{num_batches} under way")

    def count(self, images: int, loss: float, right: int) -> None:
        self._seen += images
        self._batches += 1
        self._loss += loss
        self._right += right
        begin = f"{self._epoch} batch {self._batches}/{self._num_batches}"
        now_s = time.perf_counter()
        if self._bar.is_drawn:
            speed = self._seen / max(now_s - self._began_s, 1e-9)
            self._bar.draw(begin, self._batches / self._num_batches, self._numbers(speed))
        elif self._batches % self._disp_batches == 0 and self._batches < self._num_batches:
            speed = (self._seen - self._seen_at_show) / max(now_s - self._shown_s, 1e-9)
            print(f"{begin}: {self._numbers(speed)}", flush=True)
            self._shown_s, self._seen_at_show = now_s, self._seen

    def end(self) -> None:
        self._bar.erase()
        speed = self._seen / max(time.perf_counter() - self._began_s, 1e-9)
        print(f"{self._epoch}: {self._numbers(speed)}", flush=True)

    def _numbers(self, images_per_s: float) -> str:
        return (
            f"{images_per_s:,.1f} img/s, loss {self._loss / self._seen:.4f}, "
            f"accuracy {self._right / self._seen:.4f}"
        )


def images_of(args: argparse.Namespace) -> tuple[cifar.Images, cifar.Images]:
    """The training and test images, from files or generated."""
    if args.benchmark:
        number = args.num_examples
        test = cifar.synthetic(max(1, number // 5), args.seed + 1)
        return cifar.synthetic(number, args.seed), test
    if args.data_dir is None:
        raise UsageError(
            f"--data-dir is missing. --benchmark 1 needs no data, it makes images up. Else get "
            f"{cifar.WHERE}: {cifar.GET}, and give --data-dir {cifar.FOLDER_IN_ARCHIVE}"
        )
    return cifar.load(args.data_dir)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a residual network on CIFAR-10 with PyTorch and a key-value store.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--network", choices=sorted(torch_resnet.NETWORKS), default="resnet", help="the network")
    add("--num-layers", type=int, default=110, help="its depth: 6n + 2; resnext also 9n + 2")
    add("--num-group", type=int, default=32, help="groups of resnext's convolutions, if it has any")
    add("--num-threads", type=int, default=0, help="PyTorch's threads; 0: this worker's cores")
    add("--num-batches", type=int, default=0, help="how many batches an epoch has; 0: all")
    add("--data-dir", type=Path, help="folder with the six files of the binary version")
    add("--benchmark", type=int, default=0, choices=(0, 1), help="1: images that are made up")
    add("--num-examples", type=int, default=5000, help="how many images --benchmark makes up")
    common.add_fit_args(parser)
    parser.set_defaults(kv_store="device", num_epochs=300, lr=0.05, lr_step_epochs="200,250")
    args = common.parse(parser, argv)
    for name in OF_NUMPY_NETWORKS:
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} is not possible with networks of PyTorch")
    if min(args.seed, args.num_batches, args.num_threads) < 0:
        parser.error("--seed, --num-batches and --num-threads must be at least 0")
    return args


if __name__ == "__main__":
    sys.exit(main())
