"""Optimizers that need whole keys, factors by key and schedules: the same bits as in one process.

The original cuts large keys for its servers, which then take norms of slices, and servers know
keys by numbers only, so factors by name do not reach them (L23; KS:751, KD:660-674, KP:704-712).
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from cluster import LIMIT_S
from combinations import covering
from workers import Workers

import kvstore
from kvstore import KVStore, lr_scheduler, optimizer
from kvstore.errors import NotSupportedError, UsageError, ValueMismatchError
from pslite.future import settled

PARTS: dict[str, Any] = {"chunk_bytes": 256, "credit_bytes": 1024}
SHAPES = {
    "fc1_weight": (40, 20),
    "fc1_bias": (40,),
    "fc2_weight": (9, 40),
    "fc2_bias": (9,),
    "bn_gamma": (7,),
    "bn_beta": (7,),
    "scale": (),
}
STEPS = 5

NEEDS_WHOLE_KEYS = {
    "lamb": optimizer.create("lamb", learning_rate=0.05, wd=0.01),
    "lars": optimizer.create("lars", learning_rate=0.5, momentum=0.9, wd=0.01),
    "lbsgd": optimizer.create("lbsgd", momentum=0.9, batch_scale=2, warmup_strategy="lars"),
    "sgld": optimizer.create("sgld", learning_rate=0.05, wd=0.01, lr_mult={"fc1_bias": 0.5}),
}
BY_ROW = {
    "groupadagrad": optimizer.create("groupadagrad", learning_rate=0.1),
    "groupadagrad with factors": optimizer.create(
        "groupadagrad", learning_rate=0.1, lr_mult={"fc1_weight": 0.5, "fc2_bias": 2.0}
    ),
}
BY_KEY = {
    "sgd": optimizer.create(
        "sgd",
        learning_rate=0.1,
        momentum=0.9,
        wd=0.05,
        lr_mult={"fc1_bias": 2.0, "fc2_bias": 2.0, "bn_gamma": 0.5},
        wd_mult={"fc1_bias": 0.0, "fc2_bias": 0.0, "bn_beta": 0.0},
    ),
    "adam with a schedule": optimizer.create(
        "adam",
        learning_rate=0.1,
        lr_mult={"fc1_weight": 0.1},
        lr_scheduler=lr_scheduler.FactorScheduler(step=2, factor=0.5),
    ),
    "sgd with a warm-up": optimizer.create(
        "sgd",
        learning_rate=0.4,
        wd_mult={"fc1_weight": 3.0},
        wd=0.01,
        lr_scheduler=lr_scheduler.MultiFactorScheduler(
            step=[3, 4], factor=0.1, warmup_steps=2, warmup_begin_lr=0.05
        ),
    ),
    "dcasgd": optimizer.create("dcasgd", learning_rate=0.1, momentum=0.5, lr_mult={"scale": 2.0}),
    "ftml": optimizer.create("ftml", learning_rate=0.1, wd=0.01, wd_mult={"fc1_bias": 0.0}),
    "lamb": optimizer.create(
        "lamb", learning_rate=0.05, wd=0.01, lr_mult={"scale": 3.0}, wd_mult={"fc2_bias": 0.0}
    ),
}


def first_values() -> list[Any]:
    numbers = np.random.default_rng(0)
    return [np.asarray(numbers.normal(size=shape), np.float32) for shape in SHAPES.values()]


def gradients(rank: int, step: int) -> list[Any]:
    numbers = np.random.default_rng((rank, step))
    return [np.asarray(numbers.normal(size=shape), np.float32) for shape in SHAPES.values()]


def trained_locally(chosen: optimizer.Optimizer, num_devices: int) -> list[bytes]:
    kv = kvstore.create("local")
    kv.set_optimizer(chosen)
    kv.init(list(SHAPES), first_values())
    bits = []
    for step in range(STEPS):
        of_ranks = [gradients(rank, step) for rank in range(num_devices)]
        kv.push(list(SHAPES), [list(values) for values in zip(*of_ranks, strict=True)])
        bits.append(b"".join(value.tobytes() for value in kv.pull(list(SHAPES))))
    return bits


@pytest.mark.parametrize(
    ("name", "num_servers", "one_by_one"),
    covering(
        [*NEEDS_WHOLE_KEYS, *BY_ROW, *(f"{name} by key" for name in BY_KEY)],
        [1, 2, 3],
        [False, True],
    ),
)
def test_every_key_has_the_bits_of_one_process_after_every_step(
    name: str, num_servers: int, one_by_one: bool
) -> None:
    by_key = {f"{name} by key": chosen for name, chosen in BY_KEY.items()}
    chosen = {**NEEDS_WHOLE_KEYS, **BY_ROW, **by_key}[name]

    def script(kv: KVStore) -> list[bytes]:
        kv.set_optimizer(chosen)
        kv.init(list(SHAPES), first_values())
        bits = []
        for step in range(STEPS):
            values = gradients(kv.rank, step)
            if one_by_one:
                for key, value in zip(SHAPES, values, strict=True):
                    kv.push(key, value)
            else:
                kv.push(list(SHAPES), values)
            bits.append(b"".join(value.tobytes() for value in kv.pull(list(SHAPES))))
        return bits

    with Workers("dist_sync", 2, num_servers, **PARTS) as workers:
        assert workers.run(script) == [trained_locally(chosen, 2)] * 2


def test_the_factors_matter() -> None:
    """Else the test above could not tell that they do not arrive."""
    for chosen in (*BY_KEY.values(), BY_ROW["groupadagrad with factors"]):
        plain = chosen.replace(lr_mult={}, wd_mult={})
        assert trained_locally(chosen, 2) != trained_locally(plain, 2)


def test_slices_would_give_other_values() -> None:
    """Nor that keys are cut: the norm of a slice is another one."""
    lamb = NEEDS_WHOLE_KEYS["lamb"]
    values = [np.linspace(-1, 2, 100, dtype=np.float32), np.linspace(3, 1, 100, dtype=np.float32)]
    kv = kvstore.create("local")
    kv.set_optimizer(lamb)
    kv.init(["whole", "half", "other"], [values[0], values[0][:50], values[0][50:]])
    kv.push(["whole", "half", "other"], [values[1], values[1][:50], values[1][50:]])
    whole, half, other = kv.pull(["whole", "half", "other"])
    assert not np.array_equal(whole, np.concatenate([half, other]))


@pytest.mark.parametrize("name", NEEDS_WHOLE_KEYS)
def test_keys_are_not_cut_when_the_optimizer_needs_them_whole(name: str) -> None:
    with Workers("dist_sync", 2, 3, **PARTS) as workers:

        def script(kv: KVStore) -> Any:
            kv.set_optimizer(NEEDS_WHOLE_KEYS[name])
            kv.init(list(SHAPES), first_values())
            servers_of = [
                [rank for rank, keys in kv.placement().items() if key in keys] for key in SHAPES
            ]
            assert [len(servers) for servers in servers_of] == [1] * len(SHAPES)
            return [kv.info(key).num_parts for key in SHAPES]

        assert workers.run(script) == [[1] * len(SHAPES)] * 2


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_keys_that_are_cut_already_are_named_on_every_worker(kind: str) -> None:
    sgd = optimizer.create("sgd", learning_rate=0.5)
    with Workers(kind, 3, 2, **PARTS) as workers:

        def script(kv: KVStore) -> Any:
            kv.set_optimizer(sgd)
            kv.init(["small", "large", "huge"], [np.ones(8), np.ones(33), np.ones(200)])
            with pytest.raises(UsageError, match="call set_optimizer before init") as caught:
                kv.set_optimizer(NEEDS_WHOLE_KEYS["lamb"])
            assert kv.current_optimizer() == sgd
            kv.push("large", np.ones(33))
            kv.wait()
            kv.barrier()
            assert kv.pull("large")[0] == -0.5
            return str(caught.value)

        for sentence in workers.run(script):
            assert "'small'" not in sentence
            assert "'huge'" in sentence or "'large'" in sentence


def test_small_keys_do_not_mind_when_the_optimizer_is_set() -> None:
    lamb = NEEDS_WHOLE_KEYS["lamb"]
    local = kvstore.create("local")
    for kv in (local,):
        kv.init(["a", "b"], [np.ones(8), np.ones(32)])
        kv.set_optimizer(lamb)
        kv.push(["a", "b"], [[np.ones(8)] * 2, [np.ones(32)] * 2])
    with Workers("dist_sync", 2, 2, **PARTS) as workers:

        def script(kv: KVStore) -> Any:
            kv.init(["a", "b"], [np.ones(8), np.ones(32)])
            kv.set_optimizer(lamb)
            kv.push(["a", "b"], [np.ones(8), np.ones(32)])
            return kv.pull(["a", "b"])

        for values in workers.run(script):
            for mine, theirs in zip(values, local.pull(["a", "b"]), strict=True):
                np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_whole_key_that_no_message_can_carry_is_refused_on_every_worker(slow: int) -> None:
    with Workers("dist_sync", 2, 2, max_message_bytes=100_000, **PARTS) as workers:
        asked = threading.Event()

        def script(kv: KVStore) -> str:
            # Only rank 0 says that it needs whole keys; the other one is told as well.
            if kv.rank == 0:
                kv.set_optimizer(NEEDS_WHOLE_KEYS["lamb"])
            kv.barrier()
            if kv.rank == slow:
                asked.wait(LIMIT_S)
            future = kv.init_async(["huge"], [np.ones(20_000)])  # type: ignore[attr-defined]
            if slow == 1:  # not before rank 0's has come to nothing
                future.describe = "the refusal"
                settled([future]).result(LIMIT_S)
            asked.set()
            with pytest.raises(ValueMismatchError, match="PS_MAX_MESSAGE_BYTES") as caught:
                kv.wait(future)
            return str(caught.value)

        for sentence in workers.run(script):
            assert "'huge' has 160000 bytes" in sentence
        assert workers.run(lambda kv: kv.init("w", np.ones(8))) == [None, None]
    with Workers("dist_sync", 1, 2, max_message_bytes=100_000, **PARTS) as workers:
        (kv,) = workers.stores
        kv.init("huge", np.ones(20_000))  # in parts it is no trouble
        assert kv.info("huge").num_parts == 625


def test_keys_that_are_cut_because_set_optimizer_was_not_waited_for_are_refused() -> None:
    with Workers("dist_sync", 2, 2, **PARTS) as workers:

        def script(kv: KVStore) -> Any:
            setting = kv.set_optimizer_async(NEEDS_WHOLE_KEYS["lamb"])  # type: ignore[attr-defined]
            making = kv.init_async("w", np.ones(100, np.float32))  # type: ignore[attr-defined]
            settled([setting, making]).result(LIMIT_S)
            # Which of the two is refused depends on which is first at the servers; none is when
            # the optimizer was set before init began.
            outcomes = [setting.error(), making.error()]
            if outcomes == [None, None]:
                assert kv.info("w").num_parts == 1
                return "needs whole keys, and got them"
            (error,) = [error for error in outcomes if error is not None]
            if making.error() is None:
                assert kv.info("w").num_parts == 2
                return str(error)
            kv.init("w", np.ones(100, np.float32))
            assert kv.info("w").num_parts == 1
            return str(error)

        for sentence in workers.run(script):
            assert "needs whole keys" in sentence


def test_numbers_of_a_schedule_and_factors_can_change_at_run_time() -> None:
    steps = [{}, {"lr": 0.2}, {"lr_mult": {"a": 0.25}}, {"wd": 0.5, "wd_mult": {"b": 0.0}}]

    def trained(kv: KVStore, push: Any) -> list[Any]:
        kv.set_optimizer(optimizer.create("sgd", learning_rate=0.1, momentum=0.5))
        kv.init(["a", "b"], [np.ones(3), np.ones(100)])
        seen = []
        for numbers in steps:
            kv.set_optimizer_params(**numbers)
            push(kv)
            seen += kv.pull(["a", "b"])
        return seen

    local = kvstore.create("local")
    expected = trained(
        local, lambda kv: kv.push(["a", "b"], [[np.ones(3)] * 2, [np.ones(100)] * 2])
    )
    with Workers("dist_sync", 2, 2, **PARTS) as workers:
        for seen in workers.run(
            lambda kv: trained(kv, lambda kv: kv.push(["a", "b"], [np.ones(3), np.ones(100)]))
        ):
            for mine, theirs in zip(seen, expected, strict=True):
                np.testing.assert_array_equal(mine, theirs)


def test_an_optimizer_that_is_code_is_refused_and_the_one_before_stays() -> None:
    class Script(optimizer.Optimizer):
        def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:  # type: ignore[override]
            raise AssertionError("not on servers")

    def script(kv: KVStore) -> None:
        kv.set_optimizer(BY_KEY["sgd"])
        with pytest.raises(
            NotSupportedError, match=r"Script extends mx.optimizer.Optimizer.*--server-import"
        ):
            kv.set_optimizer(Script())
        assert kv.current_optimizer() == BY_KEY["sgd"]

    with Workers("dist_sync", 2, 1) as workers:
        workers.run(script)
