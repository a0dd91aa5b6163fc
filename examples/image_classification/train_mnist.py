"""Trains LeNet or a perceptron on MNIST digits, on one machine or on many with the same script.

One process::

    python examples/image_classification/train_mnist.py

Two workers and one server on this machine::

    python tools/launch.py -n 2 -s 1 --launcher local \\
        python examples/image_classification/train_mnist.py --kv-store dist_sync

The flags are those of MXNet's image-classification examples where both have them
(example/image-classification/common/fit.py). Every worker passes all digits, and ``fit`` divides
them. The last line is ``test accuracy: ...``. Read next: ``kvstore/mxnet/model.py``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Find the repository without installing it, from any current folder.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    # Such small matrix products are faster on one thread; several devices and workers make better
    # use of the cores. NumPy reads this when it is loaded, so set it first.
    for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(variable, "1")

import argparse

import common
import mnist
from lenet import LeNet
from mlp import MLP
from plotting import History
from progress import ProgressPrinter

import kvstore as mx
from pslite.errors import PSError

NETWORKS = {"lenet": LeNet, "mlp": MLP}


def main(argv: list[str] | None = None) -> int:
    """Runs the script and returns its exit code."""
    args = parse(argv)
    try:
        train(args)
    except PSError as error:
        print(f"train_mnist: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("train_mnist: interrupted", file=sys.stderr)
        return 130
    return 0


def train(args: argparse.Namespace) -> None:
    """Trains, then prints the accuracy of the final weights on the test digits."""
    contexts = common.devices(args.gpus, args.cpus)
    training_digits, test_digits = mnist.load(args.data_dir)
    history = History(args.plot)
    with mx.kvstore.create(args.kv_store) as store:
        common.check_prefix(args, store.rank)
        common.compress(args, store)
        printer = ProgressPrinter(sys.stdout, store.rank, args.num_epochs, args.disp_batches)
        at_epoch_end: list[Any] = [printer.on_epoch, history.add]
        if args.model_prefix:
            at_epoch_end.append(mx.callback.do_checkpoint(args.model_prefix, args.save_period))
        model = make_model(args, store, contexts, len(training_digits.labels))
        try:
            model.fit(
                training_digits.images.astype(args.dtype, copy=False),
                training_digits.labels,
                (test_digits.images.astype(args.dtype, copy=False), test_digits.labels),
                common.make_metrics(args),
                kvstore=store,
                batch_end_callback=printer.on_batch,
                epoch_end_callback=at_epoch_end,
                checkpoint=args.checkpoint,
            )
        finally:
            printer.leave_line()
        if store.rank == 0:
            history.draw()
        accuracy = model.score(test_digits.images.astype(args.dtype), test_digits.labels)
        report(store, accuracy)


def make_model(
    args: argparse.Namespace, store: mx.KVStore, contexts: list[mx.Context], num_samples: int
) -> mx.model.FeedForward:
    """A new model, or the saved one that training continues."""
    num_batches = common.count_batches(args, store, num_samples)
    network = common.Cast(NETWORKS[args.network](), args.dtype)
    arguments: dict[str, Any] = {
        "ctx": contexts,
        "num_epoch": args.num_epochs,
        "optimizer": common.make_optimizer(args, store, num_batches),
        "initializer": common.make_initializer(args),
        "numpy_batch_size": args.batch_size,
        "seed": args.seed,
    }
    if args.load_epoch:
        return mx.model.FeedForward.load(
            args.model_prefix, args.load_epoch, symbol=network, **arguments
        )
    return mx.model.FeedForward(network, **arguments)


def report(store: mx.KVStore, accuracy: float) -> None:
    """Every worker prints its result; rank 0 prints last."""
    line = f"test accuracy: {accuracy:.4f}"
    if store.rank != 0:
        print(line, flush=True)
    store.barrier()
    if store.rank == 0:
        print(line, flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line. The defaults also suit ``dist_async`` with two or three workers, where
    stale gradients make a momentum of 0.9 or twice the learning rate diverge."""
    parser = argparse.ArgumentParser(
        description="Train on MNIST digits with a key-value store.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--network", choices=sorted(NETWORKS), default="lenet", help="the network")
    parser.add_argument(
        "--data-dir", type=Path, default=mnist.EMBEDDED, help="folder with the four MNIST files"
    )
    parser.add_argument(
        "--plot", type=Path, help="draw loss and accuracy by epoch into this file (PNG, SVG, PDF)"
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="save the progress into this folder after each epoch, and go on from there",
    )
    common.add_fit_args(parser)
    parser.set_defaults(batch_size=32, lr=0.05, mom=0.5, disp_batches=50)
    return common.parse(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
