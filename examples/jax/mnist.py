"""Train a small JAX network on digits; workers average their gradients through the store.

    python tools/launch.py -n 2 -s 1 --launcher local python examples/jax/mnist.py
    python examples/jax/mnist.py --kv-store local             # alone

The whole step is jitted, with the exchange in it. The transformation is SGD with momentum in ten
lines; ``optax.sgd(0.05, momentum=0.9)`` would work too. With ``--on-servers``, workers push
gradients, servers update, and workers get weights back.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "image_classification"))
if __name__ == "__main__" and importlib.util.find_spec("jax") is None:
    sys.exit("mnist: JAX is missing; install it: pip install jax")

import jax
import jax.numpy as jnp
import kvstore.jax
import mnist
import numpy as np

import kvstore

Tree = Any


class Momentum(NamedTuple):
    """SGD with momentum, in the form of Optax."""

    learning_rate: float
    decay: float

    def init(self, params: Tree) -> Tree:
        """The initial state of each parameter: zeros."""
        return jax.tree.map(jnp.zeros_like, params)

    def update(self, grads: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        """The changes to add to the parameters, and the new state."""
        state = jax.tree.map(lambda kept, grad: self.decay * kept + grad, state, grads)
        return jax.tree.map(lambda kept: -self.learning_rate * kept, state), state


def network(seed: int) -> Tree:
    """Two convolutions and two dense layers."""
    shapes = {
        "conv1": (5, 5, 1, 16),
        "conv2": (5, 5, 16, 32),
        "dense1": (512, 128),
        "dense2": (128, 10),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: {
            "w": jax.random.normal(key, shape) * (2 / np.prod(shape[:-1])) ** 0.5,
            "b": jnp.zeros(shape[-1]),
        }
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def scores(params: Tree, images: jax.Array) -> jax.Array:
    """The network's answers, ten numbers for each image; images have one channel at their end."""
    found = images
    for name in ("conv1", "conv2"):
        found = jax.lax.conv_general_dilated(
            found, params[name]["w"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        found = jax.nn.relu(found + params[name]["b"])
        found = jax.lax.reduce_window(
            found, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )
    found = found.reshape(len(found), -1)
    found = jax.nn.relu(found @ params["dense1"]["w"] + params["dense1"]["b"])
    return found @ params["dense2"]["w"] + params["dense2"]["b"]


def loss(params: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy of a batch."""
    chosen = jax.nn.log_softmax(scores(params, images))[jnp.arange(len(labels)), labels]
    return -chosen.mean()


def main() -> None:
    """Train on this worker's share of the digits and test on all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kv-store", default="dist_sync")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--on-servers", action="store_true", help="have servers update the weights")
    flags = parser.parse_args()
    kv = kvstore.create(flags.kv_store)
    training, test = mnist.load()
    images, labels = np.moveaxis(training.images, 1, 3), training.labels
    params = kvstore.jax.broadcast(kv, network(seed=kv.rank))  # all workers get those of worker 0
    gradient = jax.value_and_grad(loss)
    tx = kvstore.jax.distributed(Momentum(0.05, 0.9), kv)
    state = tx.init(params)

    @jax.jit
    def averaged(params: Tree, state: Tree, *batch: jax.Array) -> tuple[Tree, Tree, jax.Array]:
        value, grads = gradient(params, *batch)
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state, value

    if flags.on_servers:
        scale = 1 / kv.num_workers  # servers add gradients; we want the average
        sgd = kvstore.optimizer.create("sgd", learning_rate=0.05, momentum=0.9, rescale_grad=scale)
        kv.set_optimizer(sgd)
        kvstore.jax.init_tree(kv, params)
        compiled = jax.jit(gradient)
    order = np.random.default_rng(0)  # the same on all workers, which take turns in it
    size = flags.batch_size * kv.num_workers
    for epoch in range(flags.epochs):
        shuffled = order.permutation(len(labels))
        for begin in range(0, len(labels) - size + 1, size):
            mine = shuffled[begin : begin + size][kv.rank :: kv.num_workers]
            if flags.on_servers:
                value, grads = compiled(params, images[mine], labels[mine])
                params = kvstore.jax.pushpull_tree(kv, grads)
            else:
                params, state, value = averaged(params, state, images[mine], labels[mine])
        if kv.rank == 0:
            print(f"epoch {epoch + 1}: last loss {value:.4f}", flush=True)
    answers = jax.jit(scores)(params, np.moveaxis(test.images, 1, 3)).argmax(1)
    share = float((answers == test.labels).mean())
    print(f"test accuracy {share:.4f} on worker {kv.rank} of {kv.num_workers}", flush=True)


if __name__ == "__main__":
    main()
