"""JAX: pytrees of arrays in a store, and gradients averaged over all workers.

::

    import kvstore, kvstore.jax

    kv = kvstore.create("dist_sync")
    params = kvstore.jax.broadcast(kv, params)            # worker 0's values
    tx = kvstore.jax.distributed(optax.adam(1e-3), kv)    # or any (init, update)
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)      # also within jax.jit

Its public name is ``kvstore.jax``. All workers make the same calls in the same order. A traced call
becomes an ordered ``io_callback``, so calls keep their order within jitted functions. Before you
call the store outside them, wait until they are done (``jax.block_until_ready``). A store's own
calls take single JAX arrays without this module (``kvstore/arrays/jax.py``). Optax is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from kvstore.errors import ArgumentTypeError, ArgumentValueError

try:
    import jax
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ModuleNotFoundError(
        "kvstore.jax needs JAX, which is not installed here: pip install jax, or as "
        "https://docs.jax.dev/en/latest/installation.html says for GPUs",
        name="jax",
    ) from None

import jax.experimental
import jax.numpy as jnp
from jax import tree_util

Tree = Any
"""A pytree of arrays: dicts, lists, tuples and registered classes of them."""
Host = np.ndarray[Any, Any]

__all__ = [
    "DistributedTransformation",
    "all_reduce",
    "broadcast",
    "distributed",
    "init_tree",
    "names_of",
    "pull_tree",
    "push_tree",
    "pushpull_tree",
]


class DistributedTransformation(NamedTuple):
    """A gradient transformation in Optax's form, as :func:`distributed` makes it."""

    init: Callable[[Tree], Any]
    update: Callable[..., tuple[Tree, Any]]


# -- gradients ---------------------------------------------------------------------------------


def distributed(tx: Any, kv: Any, op: str = "average") -> DistributedTransformation:
    """Return ``tx`` as a transformation that first combines all workers' gradients.

    Args:
        tx: an Optax transformation, or any pair of functions ``init(params)`` and
            ``update(grads, state, params)``. Each worker keeps its own copy of the state.
        kv: a store; in a job, a ``dist_sync`` one.
        op: ``average`` or another operation of ``kv.all_reduce``.

    The transformation can be used within ``jax.jit``. Raises ``ArgumentTypeError`` for a ``tx``
    without the two functions.
    """
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise ArgumentTypeError(
            "expected a gradient transformation with init(params) and update(grads, state, "
            f"params), such as optax.sgd(0.1), got {tx!r}"
        )

    def update(grads: Tree, state: Any, params: Tree = None, **more: Any) -> tuple[Tree, Any]:
        found: tuple[Tree, Any] = tx.update(all_reduce(kv, grads, op), state, params, **more)
        return found

    return DistributedTransformation(tx.init, update)


def all_reduce(kv: Any, tree: Tree, op: str = "average") -> Tree:
    """Combine all workers' trees, leaf by leaf in rank order; all get the result.

    Leaves keep shape and dtype. The leaves of one dtype are sent together, in one call of the
    store. Within ``jax.jit``, this is an ordered callback. Raises ``MismatchError`` on all workers
    if their trees differ; within ``jit``, JAX wraps it in an error of its own.
    """
    leaves, structure = tree_util.tree_flatten(tree)
    if not leaves or _is_alone(kv):
        return tree
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        shapes = [jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]
        found = jax.experimental.io_callback(
            lambda *traced: _all_reduce(kv, traced, op), shapes, *leaves, ordered=True
        )
    else:
        found = [*map(_like, _all_reduce(kv, leaves, op), leaves)]
    return tree_util.tree_unflatten(structure, found)


def _all_reduce(kv: Any, leaves: Sequence[Any], op: str) -> list[Host]:
    """Combine the leaves, with one call for each dtype, by first appearance."""
    hosts = [np.asarray(leaf) for leaf in leaves]
    found: list[Host | None] = [None] * len(hosts)
    for dtype in dict.fromkeys(host.dtype for host in hosts):
        chosen = [number for number, host in enumerate(hosts) if host.dtype == dtype]
        joined = np.concatenate([hosts[number].reshape(-1) for number in chosen])
        kv.all_reduce(joined, op, out=joined)
        ends = np.cumsum([hosts[number].size for number in chosen])
        for number, part in zip(chosen, np.split(joined, ends[:-1]), strict=True):
            found[number] = part.reshape(hosts[number].shape)
    return cast("list[Host]", found)


def broadcast(kv: Any, tree: Tree, root: int = 0) -> Tree:
    """Return the tree of worker ``root`` on all workers, such as initial weights.

    All workers must have a tree of this structure. Raises ``ArgumentValueError`` if the root's
    leaves have other names, shapes or dtypes.
    """
    if _is_alone(kv):
        return tree
    names, leaves = names_of(tree), tree_util.tree_leaves(tree)
    sent = dict(zip(names, map(np.asarray, leaves), strict=True)) if kv.rank == root else None
    got = kv.broadcast_object(sent, root)
    if [*got] != names:
        raise ArgumentValueError(
            f"expected a tree with the leaves of worker {root}, {[*got]}, got {names}"
        )
    for name, leaf in zip(names, leaves, strict=True):
        there, here = got[name], np.asarray(leaf)
        if (there.shape, there.dtype) != (here.shape, here.dtype):
            raise ArgumentValueError(
                f"expected the leaf {name} as on worker {root}, {there.dtype}{there.shape}, got "
                f"{here.dtype}{here.shape}"
            )
    return _tree(tree, [got[name] for name in names])


def _is_alone(kv: Any) -> bool:
    """Return whether this is the only worker: local stores have no collective calls."""
    return bool(kv.num_workers == 1)


# -- trees under keys --------------------------------------------------------------------------


def names_of(tree: Tree, prefix: str = "") -> list[str]:
    """Return the key of each leaf, in order: ``prefix`` and its path (``a/b``).

    Raises ``ArgumentValueError`` for two leaves with the same name.
    """
    paths = [path for path, _ in tree_util.tree_flatten_with_path(tree)[0]]
    names = [prefix + "/".join(map(_name, path)) for path in paths]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise ArgumentValueError(
            f"expected leaves of different names, got several of {', '.join(map(repr, twice))}; "
            "rename them, since each is a key of the store"
        )
    return names


def init_tree(kv: Any, tree: Tree, prefix: str = "") -> None:
    """Create a key for each leaf, with a copy of worker 0's leaf as its value."""
    kv.init(names_of(tree, prefix), tree_util.tree_leaves(tree))


def push_tree(kv: Any, tree: Tree, prefix: str = "", priority: int = 0) -> None:
    """Push each leaf to its key, as ``kv.push`` does."""
    kv.push(names_of(tree, prefix), tree_util.tree_leaves(tree), priority)


def pull_tree(kv: Any, like: Tree, prefix: str = "", priority: int = 0) -> Tree:
    """Pull the keys of ``like``; return a tree like it with new JAX arrays.

    ``like`` gives names, shapes, dtypes and devices; its values are not used.
    """
    out = _room(like)
    kv.pull(names_of(like, prefix), out, priority)
    return _tree(like, out)


def pushpull_tree(kv: Any, tree: Tree, prefix: str = "", priority: int = 0) -> Tree:
    """Push each leaf; return the new values: sums, or weights updated by servers."""
    out = _room(tree)
    kv.pushpull(names_of(tree, prefix), tree_util.tree_leaves(tree), out, priority)
    return _tree(tree, out)


def _name(entry: Any) -> str:
    """Return the name of one step of a path: a dict's key, an index, or an attribute."""
    for kind in ("key", "idx", "name"):
        if hasattr(entry, kind):
            return str(getattr(entry, kind))
    return str(entry)


def _room(like: Tree) -> list[Host]:
    return [np.empty(jnp.shape(x), jnp.result_type(x)) for x in tree_util.tree_leaves(like)]


def _tree(like: Tree, values: Sequence[Host]) -> Tree:
    leaves, structure = tree_util.tree_flatten(like)
    return tree_util.tree_unflatten(structure, [*map(_like, values, leaves)])


def _like(value: Host, leaf: Any) -> jax.Array:
    """Return ``value`` as a JAX array on the devices of ``leaf``."""
    return jax.device_put(value, leaf.sharding if isinstance(leaf, jax.Array) else None)
