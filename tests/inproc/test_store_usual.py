"""Arrays in all shapes of memory give the same values: those recognised at a glance and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from workers import Workers

import kvstore as mx
from kvstore import KVStore
from kvstore.errors import ArgumentTypeError, KeyTypeError, UnknownKeyError, ValueMismatchError
from kvstore.stores.dist.plan import Bucket

SHAPES = {"weight": (5, 40), "bias": (5,), "scale": (), "nothing": (0, 3), "large": (700,)}
KEYS = list(SHAPES)

Make = Callable[[np.ndarray[Any, Any]], Any]
WAYS: dict[str, Make] = {
    "plain": lambda array: array,
    "one for each device": lambda array: [array],
    "Fortran": lambda array: np.array(array, order="F"),
    "strided": lambda array: np.stack([array, array], axis=-1)[..., 0],
    "swapped": lambda array: array.astype(array.dtype.newbyteorder("S")),
    "unaligned": lambda array: _unaligned(array),
}


def _unaligned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
    memory[:] = np.frombuffer(array.tobytes(), np.uint8)
    return memory.view(array.dtype).reshape(array.shape)


def values(seed: int) -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(seed)
    return [np.asarray(generator.normal(size=s), np.float32) for s in SHAPES.values()]


@pytest.fixture
def workers() -> Any:
    with Workers("dist_sync", 2, 2, chunk_bytes=256, credit_bytes=1024) as workers:
        workers.run(lambda kv: kv.set_optimizer(mx.optimizer.create("sgd", momentum=0.9)))
        workers.run(lambda kv: kv.init(KEYS, values(0)))
        yield workers


def expected() -> list[np.ndarray[Any, Any]]:
    kv = mx.kvstore.create("local")
    kv.set_optimizer(mx.optimizer.create("sgd", momentum=0.9))
    kv.init(KEYS, values(0))
    for number in range(3):
        gradients = [values(10 * number + rank + 1) for rank in range(2)]
        kv.push(KEYS, [list(pair) for pair in zip(*gradients, strict=True)])
    found: list[np.ndarray[Any, Any]] = kv.pull(KEYS)
    return found


@pytest.mark.parametrize("pushed", WAYS)
@pytest.mark.parametrize("filled", ["plain", "swapped", "Fortran", "unaligned"])
def test_the_way_arrays_lie_in_memory_makes_no_difference(
    workers: Workers, pushed: str, filled: str
) -> None:
    def script(kv: KVStore) -> list[Any]:
        outs = [WAYS[filled](np.zeros(shape, np.float32)) for shape in SHAPES.values()]
        for number in range(3):
            arrays = values(10 * number + kv.rank + 1)
            gradients = [WAYS[pushed](array) for array in arrays]
            if number == 0:
                kv.pushpull(KEYS, gradients, out=outs)
            elif number == 1:
                kv.push(KEYS, gradients)
                for array in arrays:
                    array[...] = 1e9  # the caller's again at once
            else:
                for key, gradient, out in zip(KEYS, gradients, outs, strict=True):
                    kv.push(key, gradient)
                    kv.pull(key, out=out)
        kv.pull(KEYS, out=outs)
        return outs

    for found in workers.run(script):
        for one, other in zip(found, expected(), strict=True):
            np.testing.assert_array_equal(one, other)


def test_an_array_may_be_reshaped_or_replaced_between_calls(workers: Workers) -> None:
    def script(kv: KVStore) -> Any:
        outs = [np.zeros(shape, np.float32) for shape in SHAPES.values()]
        kv.pull(KEYS, out=outs)
        first = outs[0]
        first.resize(200, refcheck=False)
        with pytest.raises(ValueMismatchError, match=r"\(5, 40\).*\(200,\)"):
            kv.pull(KEYS, out=outs)
        outs[0] = np.zeros((5, 40), np.float32)
        first[:] = 7
        kv.pull(KEYS, out=outs)
        return outs[0], first

    for found, before in workers.run(script):
        np.testing.assert_array_equal(found, values(0)[0])
        assert (before == 7).all()


def test_nothing_refers_to_the_arrays_of_a_call_that_is_over(workers: Workers) -> None:
    import sys

    def script(kv: KVStore) -> Any:
        arrays = [np.zeros(shape, np.float32) for shape in SHAPES.values()]
        counts = [sys.getrefcount(array) for array in arrays]
        kv.pushpull(KEYS, arrays)
        kv.push(KEYS, arrays)
        kv.pull(KEYS, out=arrays)
        kv.wait()
        kv.barrier()  # by then the I/O thread has let go of the last answer
        return counts, [sys.getrefcount(array) for array in arrays]

    for before, after in workers.run(script):
        assert before == after


def test_a_key_that_is_deleted_and_made_anew_has_its_new_shape(workers: Workers) -> None:
    def script(kv: KVStore) -> Any:
        outs = [np.zeros(shape, np.float32) for shape in SHAPES.values()]
        kv.pull(KEYS, out=outs)
        kv.delete("bias")
        with pytest.raises(UnknownKeyError, match="'bias'"):
            kv.pull(KEYS, out=outs)
        kv.init("bias", np.full(9, 3, np.float64))
        with pytest.raises(ValueMismatchError, match="'bias'"):
            kv.pull(KEYS, out=outs)
        outs[1] = np.zeros(9)
        kv.pull(KEYS, out=outs)
        return outs[1]

    for found in workers.run(script):
        assert found.tolist() == [3] * 9


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        (["weight", "bias"], [np.zeros((5, 40), "f4"), np.zeros(5)], ValueMismatchError),
        (["weight", "bias"], [np.zeros((5, 40), "f4")], ValueMismatchError),
        (["weight", "bias"], np.zeros((2, 5, 40), "f4"), ValueMismatchError),
        (["bias", True], [np.zeros(5, "f4")] * 2, KeyTypeError),
        (["bias", "other"], [np.zeros(5, "f4")] * 2, UnknownKeyError),
        (["bias", "scale"], [np.zeros(5, "f4"), 1.0], ArgumentTypeError),
    ],
)
def test_a_call_with_one_wrong_argument_is_refused_as_by_the_checks(
    workers: Workers, key: Any, value: Any, error: type[Exception], monkeypatch: Any
) -> None:
    kv = workers.stores[0]

    def texts() -> list[str]:
        found = []
        for call in (kv.push, kv.pushpull, lambda k, v: kv.pull(k, out=v)):
            if call == kv.push or error is not ValueMismatchError or len(value) != 2:
                with pytest.raises(error) as raised:
                    call(key, value)
                found.append(str(raised.value))
        return found

    quick = texts()
    monkeypatch.setattr(Bucket, "fit", lambda *_, **__: False)
    assert texts() == quick
