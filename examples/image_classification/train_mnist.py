"""Trains LeNet or a perceptron on MNIST digits, on one machine or on many with the same script.

One process::

    python examples/image_classification/train_mnist.py

Two workers and one server on this machine::

    python tools/launch.py -n 2 -s 1 --launcher local \\
        python examples/image_classification/train_mnist.py --kv-store dist_sync

The flags are those of MXNet's image-classification examples where both have them
(example/image-classification/common/fit.py). Every worker is given all digits; ``fit`` deals
them out. The last line is ``test accuracy: ...``. Read next: ``kvstore/model.py``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The repository is found without being installed, whatever the current folder.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    # Products as small as these are faster on one thread each, and the cores are better used by
    # several devices and workers. NumPy reads this when it is loaded, so it comes before that.
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(variable, "1")

import argparse

import mnist
from lenet import LeNet
from mlp import MLP
from progress import ProgressPrinter

import kvstore as mx
from pslite.errors import PSError, UsageError

NETWORKS = {"lenet": LeNet, "mlp": MLP}

WITH_MOMENTUM = ("sgd", "nag")
"""Optimizers that take ``--mom``; the others have no such number."""


def main(argv: list[str] | None = None) -> int:
    """Runs the script and returns its exit code."""
    options = parse(argv)
    try:
        train(options)
    except PSError as error:
        print(f"train_mnist: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train_mnist: interrupted", file=sys.stderr)
        return 130
    return 0


def train(options: argparse.Namespace) -> None:
    """Trains, then prints the share of the test digits that the final weights get right."""
    contexts = devices(options.gpus, options.cpus)
    training_digits, test_digits = mnist.load(options.data_dir)
    with mx.kvstore.create(options.kv_store) as store:
        printer = ProgressPrinter(sys.stdout, store.rank, options.num_epochs, options.disp_batches)
        model = mx.model.FeedForward(
            symbol=NETWORKS[options.network](),
            ctx=contexts,
            num_epoch=options.num_epochs,
            optimizer=options.optimizer,
            numpy_batch_size=options.batch_size,
            seed=options.seed,
            **optimizer_numbers(options),
        )
        try:
            model.fit(
                training_digits.images,
                training_digits.labels,
                eval_data=(test_digits.images, test_digits.labels),
                kvstore=store,
                batch_end_callback=printer.on_batch,
                epoch_end_callback=printer.on_epoch,
            )
        finally:
            printer.leave_line()
        report(store, model.score(test_digits.images, test_digits.labels))


def report(store: mx.KVStore, accuracy: float) -> None:
    """Every worker prints its result, rank 0 after all others, so that its line is the last."""
    line = f"test accuracy: {accuracy:.4f}"
    if store.rank != 0:
        print(line, flush=True)
    store.barrier()
    if store.rank == 0:
        print(line, flush=True)


def devices(gpus: str, num_cpus: int) -> list[mx.Context]:
    """The GPUs named in a list such as ``0,2``, or that many CPU contexts when it is empty."""
    if not gpus:
        if num_cpus < 1:
            raise UsageError(f"--cpus must be at least 1, got {num_cpus}")
        return [mx.cpu(index) for index in range(num_cpus)]
    try:
        numbers = [int(number) for number in gpus.split(",")]
    except ValueError as error:
        raise UsageError(f"--gpus takes numbers such as 0,2; got {gpus!r}") from error
    return [mx.gpu(number) for number in numbers]


def optimizer_numbers(options: argparse.Namespace) -> dict[str, Any]:
    """What the optimizer is created with."""
    numbers = {"learning_rate": options.lr, "wd": options.wd}
    if options.optimizer in WITH_MOMENTUM:
        numbers["momentum"] = options.mom
    return numbers


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line. The defaults also suit ``dist_async`` with two or three workers, where
    stale gradients make a momentum of 0.9 or twice the learning rate diverge."""
    parser = argparse.ArgumentParser(
        description="Train on MNIST digits with a key-value store.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--network", choices=sorted(NETWORKS), default="lenet", help="the network")
    parser.add_argument("--gpus", default="", help="GPUs to use, such as 0,2; empty for the CPU")
    parser.add_argument("--cpus", type=int, default=1, help="CPU devices, when no GPU is named")
    parser.add_argument("--kv-store", default="local", help="type of the key-value store")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per worker and step")
    parser.add_argument("--num-epochs", type=int, default=8, help="passes over the digits")
    parser.add_argument("--optimizer", default="sgd", help="name of the optimizer")
    parser.add_argument(
        "--lr", type=float, default=0.05, help="learning rate; less for many asynchronous workers"
    )
    parser.add_argument("--mom", type=float, default=0.5, help="momentum, where there is one")
    parser.add_argument("--wd", type=float, default=1e-4, help="weight decay")
    parser.add_argument(
        "--data-dir", type=Path, default=mnist.EMBEDDED, help="folder with the four MNIST files"
    )
    parser.add_argument("--seed", type=int, default=0, help="of first weights and order of digits")
    parser.add_argument(
        "--disp-batches", type=int, default=50, help="batches from one line to the next"
    )
    options = parser.parse_args(argv)
    if options.disp_batches < 1:
        parser.error("--disp-batches must be at least 1")
    if options.num_epochs < 1:
        parser.error("--num-epochs must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
