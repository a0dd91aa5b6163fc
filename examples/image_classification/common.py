"""Flags that the training scripts share, and what they mean: devices, optimizer, metrics.

Named as in MXNet's image-classification examples (example/image-classification/common/fit.py);
flags of these examples that make no sense here accept only their default. Nothing here trains or
prints. Read next: ``train_mnist.py``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kvstore.training import is_synchronous, rescale_grad

import kvstore as mx
from kvstore import initializer
from pslite.errors import UsageError

INITIALIZERS = ("default", "xavier", "msra", "orthogonal", "normal", "uniform", "one", "zero")

NOT_HERE = {
    "--monitor": (0, "networks show their loss and metrics only: use --disp-batches"),
    "--test-io": (0, "the digits lie in memory, so there is no reading to measure"),
    "--macrobatch-size": (0, "the sum of several batches is a larger --batch-size"),
    "--profile-worker-suffix": ("", "profile a worker with a profiler for Python"),
    "--profile-server-suffix": ("", "profile a server with a profiler for Python"),
}
"""Flags of the original with the one value that they take here, and what to do instead."""


class Refused(argparse.Action):
    """A flag that accepts only its default; any other value ends the script with one sentence."""

    def __init__(self, option_strings: list[str], dest: str, instead: str, **more: Any) -> None:
        super().__init__(option_strings, dest, help=argparse.SUPPRESS, **more)
        self._instead = instead

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if str(values) != str(self.default):
            parser.error(f"{option_string} {values} is not possible here: {self._instead}")


def add_fit_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the flags; ``parser.set_defaults`` changes their defaults."""
    add = parser.add_argument
    add("--gpus", default="", help="GPUs to use, such as 0,2; empty for the CPU")
    add("--cpus", type=int, default=1, help="CPU devices, when no GPU is named")
    add("--kv-store", default="local", help="type of the key-value store")
    add("--batch-size", type=positive, default=128, help="samples per worker and step")
    add(
        "--num-epochs",
        type=positive,
        default=8,
        help="the number of epochs after which training stops",
    )
    add("--optimizer", default="sgd", help="name of the optimizer")
    add("--lr", type=float, default=0.1, help="learning rate")
    add("--lr-factor", type=float, default=0.1, help="what it is multiplied by at each step")
    add(
        "--lr-step-epochs",
        default="",
        help="epochs at which it is, such as 10,20; or pow2 or cosine, to fall to 0 at the end",
    )
    add("--warmup-epochs", type=int, default=0, help="epochs until the rate is reached")
    add("--warmup-strategy", choices=("linear", "constant"), default="linear", help="how it rises")
    add("--mom", type=float, default=0.9, help="momentum, where there is one")
    add("--wd", type=float, default=1e-4, help="weight decay")
    add("--initializer", choices=INITIALIZERS, default="default", help="of the first weights")
    add("--dtype", choices=("float16", "float32", "float64"), default="float32", help="of weights")
    add("--seed", type=int, default=0, help="of first weights and order of samples")
    add("--disp-batches", type=positive, default=20, help="batches from one line to the next")
    add("--top-k", type=int, default=0, help="also show how often the label is among the best K")
    add("--loss", choices=("", "ce"), default="", help="also show the cross-entropy")
    add("--model-prefix", default="", help="save the model as PREFIX-<epoch>.params and .states")
    add("--save-period", type=positive, default=1, help="epochs from one to the next")
    add("--load-epoch", type=positive, help="go on after this epoch of --model-prefix")
    add("--gc-type", default="none", help="gradient compression, where the store has it")
    add("--gc-threshold", type=float, default=0.5, help="its threshold")
    for flag, (default, instead) in NOT_HERE.items():
        add(flag, action=Refused, default=default, instead=instead)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the flags, and refuses contradictory ones."""
    args = parser.parse_args(argv)
    if args.load_epoch and not args.model_prefix:
        parser.error("--load-epoch needs the --model-prefix under which the epoch was saved")
    return args


def check_prefix(args: argparse.Namespace, rank: int) -> None:
    """Fails now instead of after an epoch if rank 0 cannot save the model."""
    folder = Path(args.model_prefix).parent
    if args.model_prefix and rank == 0 and not folder.is_dir():
        raise UsageError(
            f"--model-prefix {args.model_prefix}: there is no folder {folder}; create it first"
        )


def positive(text: str) -> int:
    """A number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def devices(gpus: str, num_cpus: int) -> list[mx.Context]:
    """The GPUs in a list such as ``0,2``; if it is empty, that many CPU contexts."""
    if not gpus:
        if num_cpus < 1:
            raise UsageError(f"--cpus must be at least 1, got {num_cpus}")
        return [mx.cpu(index) for index in range(num_cpus)]
    try:
        numbers = [int(number) for number in gpus.split(",")]
    except ValueError as error:
        raise UsageError(f"--gpus takes numbers such as 0,2; got {gpus!r}") from error
    return [mx.gpu(number) for number in numbers]


def count_batches(args: argparse.Namespace, kv: mx.KVStore, num_samples: int) -> int:
    """The number of batches of each worker when all share the samples."""
    per_step: int = args.batch_size * kv.num_workers
    return math.ceil(num_samples / per_step)


def make_optimizer(
    args: argparse.Namespace, kv: mx.KVStore, batches_per_epoch: int
) -> mx.optimizer.Optimizer:
    """The store's optimizer. Gradients are sums over samples, and ``rescale_grad`` turns them into
    means over all samples of one update."""
    numbers: dict[str, Any] = {
        "learning_rate": args.lr,
        "momentum": args.mom,
        "wd": args.wd,
        "rescale_grad": rescale_grad(kv.type, args.batch_size, kv.num_workers),
    }
    known = mx.optimizer.create(args.optimizer).params()
    return mx.optimizer.create(
        args.optimizer,
        lr_scheduler=schedule_of(args, kv, batches_per_epoch),
        **{name: number for name, number in numbers.items() if name in known},
    )


def schedule_of(
    args: argparse.Namespace, kv: mx.KVStore, batches_per_epoch: int
) -> mx.lr_scheduler.LRScheduler | None:
    """The schedule of the learning rate, in updates of a key; None for a constant rate.

    Without rounds, each worker's batch is a separate update. The counts of updates are saved with
    the model, so epochs count from the first one even when training resumes.
    """
    updates = batches_per_epoch * (1 if is_synchronous(kv.type) else kv.num_workers)
    last = args.num_epochs * updates
    warmup: dict[str, Any] = {
        "warmup_steps": args.warmup_epochs * updates,
        "warmup_mode": args.warmup_strategy,
    }
    text = args.lr_step_epochs.strip()
    if text == "cosine":
        return mx.lr_scheduler.CosineScheduler(max_update=last, **warmup)
    try:
        power = float(text[3:] or 2) if text.startswith("pow") else None
        steps = [] if power else [int(epoch) * updates for epoch in text.split(",") if epoch]
    except ValueError as error:
        raise UsageError(
            f"--lr-step-epochs takes epochs such as 10,20, pow2 or cosine; got {text!r}"
        ) from error
    if power:
        return mx.lr_scheduler.PolyScheduler(max_update=last, pwr=power, **warmup)
    if steps and args.lr_factor < 1.0:
        return mx.lr_scheduler.MultiFactorScheduler(
            step=tuple(steps), factor=args.lr_factor, **warmup
        )
    return mx.lr_scheduler.FactorScheduler(step=1, **warmup) if args.warmup_epochs else None


def compress(args: argparse.Namespace, kv: mx.KVStore) -> None:
    """Turns gradient compression on if a flag asks for it."""
    if args.gc_type != "none":
        kv.set_gradient_compression({"type": args.gc_type, "threshold": args.gc_threshold})


def make_initializer(args: argparse.Namespace) -> Any:
    """The initializer of the weights; None leaves this to the network."""
    if args.initializer == "default":
        return None
    if args.initializer == "xavier":
        return initializer.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2.0)
    return initializer.create(args.initializer)


def make_metrics(args: argparse.Namespace) -> list[Any]:
    """The metrics to show besides the loss."""
    metrics: list[Any] = ["acc"]
    if args.top_k > 0:
        metrics.append(mx.metric.create("top_k_accuracy", top_k=args.top_k))
    if args.loss:
        metrics.append(args.loss)
    return metrics


class Cast:
    """A network with initial weights of another dtype; it then computes in that dtype."""

    def __init__(self, network: Any, dtype: str) -> None:
        self._network = network
        self._dtype = np.dtype(dtype)
        self.loss_and_gradients = network.loss_and_gradients
        self.predict = network.predict

    def init_params(
        self, input_shape: tuple[int, ...], rng: np.random.Generator
    ) -> dict[str, np.ndarray[Any, Any]]:
        params = self._network.init_params(input_shape, rng)
        return {name: value.astype(self._dtype) for name, value in params.items()}
