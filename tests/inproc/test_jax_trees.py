"""Trees of JAX arrays in a store: kvstore.jax."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from workers import Workers

jax = pytest.importorskip("jax")

import kvstore.jax as kvj  # noqa: E402

import kvstore  # noqa: E402
from kvstore.errors import ArgumentTypeError, ArgumentValueError  # noqa: E402
from pslite.errors import MismatchError  # noqa: E402

jnp = jax.numpy
Tree = Any


@pytest.fixture
def two() -> Iterator[Workers]:
    with Workers("dist_sync", num_workers=2, num_servers=2) as workers:
        yield workers


def tree_of(number: float) -> Tree:
    """Leaves of several dtypes, of which two take turns, and one that is empty."""
    return {
        "dense": {"kernel": jnp.full((3, 4), number), "bias": jnp.full(5, number, jnp.bfloat16)},
        "rest": [jnp.full((), number), jnp.zeros((0, 2)), jnp.full(2, int(number))],
    }


def equal(found: Tree, wanted: Tree) -> bool:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert isinstance(one, jax.Array)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    return True


class Sgd:
    """Optax's protocol, and a count as its state."""

    @staticmethod
    def init(params: Tree) -> Any:
        return jnp.zeros((), int)

    @staticmethod
    def update(grads: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        return jax.tree.map(lambda g: -0.5 * g, grads), state + 1


def test_every_leaf_is_named_by_its_path() -> None:
    assert kvj.names_of(tree_of(1.0), "net/") == [
        *("net/dense/bias", "net/dense/kernel", "net/rest/0", "net/rest/1", "net/rest/2")
    ]
    with pytest.raises(ArgumentValueError, match="got several of 'a/b'; rename them"):
        kvj.names_of({"a": {"b": 1.0}, "a/b": 2.0})


def test_a_tree_is_pushed_and_pulled_under_keys(two: Workers) -> None:
    def script(kv: Any) -> bool:
        kvj.init_tree(kv, tree_of(7.0 + kv.rank), "a/")
        assert equal(kvj.pull_tree(kv, tree_of(0.0), "a/"), tree_of(7.0))
        kvj.push_tree(kv, tree_of(kv.rank + 1.0), "a/")
        assert equal(kvj.pull_tree(kv, tree_of(0.0), "a/"), tree_of(3.0))
        return equal(kvj.pushpull_tree(kv, tree_of(2.0), "a/"), tree_of(4.0))

    assert two.run(script) == [True, True]


@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "jit"])
def test_a_tree_is_averaged_over_all_workers(two: Workers, is_traced: bool) -> None:
    def script(kv: Any) -> bool:
        reduce = lambda tree: kvj.all_reduce(kv, tree)  # noqa: E731
        found = (jax.jit(reduce) if is_traced else reduce)(tree_of(1.0 + 2 * kv.rank))
        total = kvj.all_reduce(kv, {"a": jnp.ones(3)}, "sum")
        return equal(found, tree_of(2.0)) and equal(total, {"a": jnp.full(3, 2.0)})

    assert two.run(script) == [True, True]


def test_large_leaves_go_through_a_jitted_step(two: Workers) -> None:
    """Twice, in the order of the calls; a callback that waited for JAX itself would hang here."""

    def script(kv: Any) -> bool:
        @jax.jit
        def step(grads: Tree) -> tuple[Tree, Tree]:
            first = kvj.all_reduce(kv, grads * 2)
            return first, kvj.all_reduce(kv, first + grads, "max")

        first, second = step(jnp.full(300_000, kv.rank + 1.0))
        return equal(first, jnp.full(300_000, 3.0)) and equal(second, jnp.full(300_000, 5.0))

    assert two.run(script) == [True, True]


def test_calls_in_a_jitted_function_keep_their_order(two: Workers) -> None:
    """None needs what another gives; without an order JAX may swap them, and seldom does."""

    def script(kv: Any) -> list[str]:
        called: list[str] = []

        class Store:
            num_workers = 2

            @staticmethod
            def all_reduce(value: Any, op: str, *, out: Any) -> Any:
                called.append(op)
                return kv.all_reduce(value, op, out=out)

        @jax.jit
        def step(x: Tree) -> Tree:
            found = [kvj.all_reduce(Store, x, op) for op in ("sum", "max", "min")]
            return found[2]

        assert str(jax.make_jaxpr(step)(jnp.ones(3))).count("ordered=True") == 3
        jax.block_until_ready(step(jnp.ones(3)))
        return called

    assert two.run(script) == [["sum", "max", "min"]] * 2


@pytest.mark.parametrize("is_traced", [False, True], ids=["eager", "jit"])
def test_a_transformation_updates_by_the_average_of_all_gradients(
    two: Workers, is_traced: bool
) -> None:
    def script(kv: Any) -> bool:
        tx = kvj.distributed(Sgd, kv)
        params = kvj.broadcast(kv, {"w": jnp.full(4, 9.0 + kv.rank)})
        update = jax.jit(tx.update) if is_traced else tx.update
        state = tx.init(params)
        for step in range(3):
            grads = {"w": jnp.full(4, 2.0 * kv.rank + step)}  # on the average 1 + step
            updates, state = update(grads, state, params)
            params = jax.tree.map(jnp.add, params, updates)
        assert int(state) == 3
        return equal(params, {"w": jnp.full(4, 9.0 - 0.5 * (1 + 2 + 3))})

    assert two.run(script) == [True, True]


def test_optax_takes_the_transformation(two: Workers) -> None:
    optax = pytest.importorskip("optax")

    def script(kv: Any) -> bool:
        tx = optax.chain(kvj.distributed(optax.clip(1.5), kv), optax.sgd(1.0))
        params = {"w": jnp.zeros(2)}
        updates, _ = jax.jit(tx.update)({"w": jnp.array([1.0, 4.0 * kv.rank])}, tx.init(params))
        return equal(optax.apply_updates(params, updates), {"w": jnp.array([-1.0, -1.5])})

    assert two.run(script) == [True, True]


def test_workers_whose_trees_differ_all_hear_of_it(two: Workers) -> None:
    def script(kv: Any) -> str:
        with pytest.raises(MismatchError) as caught:
            kvj.all_reduce(kv, [jnp.ones(3 + kv.rank)])
        return str(caught.value)

    for text in two.run(script):
        assert "shape (3,)" in text and "shape (4,)" in text


def test_a_tree_of_another_form_than_the_roots_is_refused(two: Workers) -> None:
    def script(kv: Any) -> str:
        trees = [{"w": jnp.ones(3)}, {"w": jnp.ones(3 + kv.rank)}, {"wv"[kv.rank]: jnp.ones(3)}]
        assert equal(kvj.broadcast(kv, trees[0], root=1), trees[0])
        texts = []
        for tree in trees[1:]:
            try:
                kvj.broadcast(kv, tree)
            except ArgumentValueError as error:
                texts.append(str(error))
        return "\n".join(texts)

    assert two.run(script) == [
        "",
        "expected the leaf w as on worker 0, float32(3,), got float32(4,)\n"
        "expected a tree with the leaves of worker 0, ['w'], got ['v']",
    ]


def test_a_store_of_one_process_needs_no_other() -> None:
    kv = kvstore.create("local")
    tree = tree_of(3.0)
    assert kvj.all_reduce(kv, tree) is kvj.broadcast(kv, tree) is tree
    kv.set_optimizer(kvstore.optimizer.create("sgd", learning_rate=0.5))
    kvj.init_tree(kv, {"w": jnp.ones(2)})
    assert equal(kvj.pushpull_tree(kv, {"w": jnp.ones(2)}), {"w": jnp.full(2, 0.5)})


def test_what_is_no_transformation_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"such as optax.sgd\(0.1\), got 0.1"):
        kvj.distributed(0.1, kvstore.create("local"))
