"""What workers of a store exchange without keys: kv.all_reduce and its sisters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from workers import Workers

import kvstore
from kvstore.errors import ArgumentTypeError, NotSupportedError, ValueMismatchError
from pslite.errors import ClosedError, MismatchError, UsageError

Array = np.ndarray[Any, Any]
LIBRARIES = ["numpy", "torch", "jax"]


def one_call(kv: Any) -> None:
    kv.all_reduce(np.ones(1))


def warm_up(kv: Any) -> None:
    kv.all_gather(np.zeros(1))  # of any size, which always needs the group's thread


@pytest.fixture(scope="module", params=["dist_sync", "dist_async", "dist_device_sync"])
def three(request: pytest.FixtureRequest) -> Iterator[Workers]:
    with Workers(request.param, num_workers=3, num_servers=2, chunk_bytes=256) as workers:
        workers.run(warm_up)  # the memory and the threads of the group are not a test's
        yield workers


def made(library: str, array: Array) -> Any:
    """The values as an array of a library."""
    if library == "torch":
        return pytest.importorskip("torch").from_numpy(array.copy())
    if library == "jax":
        return pytest.importorskip("jax.numpy").asarray(array)
    return array


@pytest.mark.parametrize("library", LIBRARIES)
def test_arrays_of_every_library_are_reduced_and_gathered(three: Workers, library: str) -> None:
    own = np.arange(500, dtype=np.float32)

    def script(kv: Any) -> tuple[Array, list[Array], Array]:
        value = made(library, own * (kv.rank + 1))
        parts = [made(library, own[:5] + kv.rank) for _ in range(3)]
        return (
            kv.all_reduce(value),
            kv.all_gather(made(library, own[: kv.rank])),
            kv.reduce_scatter(parts, "max"),
        )

    for total, gathered, part in three.run(script):
        np.testing.assert_array_equal(total, own * 6)
        assert [len(each) for each in gathered] == [0, 1, 2]
        np.testing.assert_array_equal(part, own[:5] + 2)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_results_go_to_the_callers_array(three: Workers, library: str) -> None:
    def script(kv: Any) -> list[Array]:
        value = made(library, np.full((4, 3), kv.rank + 1.0))
        assert kv.all_reduce(value, out=value) is value
        strided = made(library, np.zeros((8, 3), np.float32))
        kv.all_reduce(value, "max", out=strided[::2])
        own = made(library, np.zeros(2))
        kv.reduce_scatter([made(library, np.ones(2))] * 3, out=own)
        return [np.asarray(each) for each in (value, strided, own)]

    for value, strided, own in three.run(script):
        assert set(value.ravel().tolist()) == {6.0}
        assert strided[:, 0].tolist() == [6.0, 0.0] * 4
        assert own.tolist() == [3.0, 3.0]


def test_tensors_can_be_resized_after_the_calls_of_a_store() -> None:
    torch = pytest.importorskip("torch")

    def script(kv: Any) -> list[int]:
        initial, pushed, pulled, both, reduced = tensors = [torch.ones(3) for _ in range(5)]
        kv.init("key", initial)
        kv.push("key", pushed)
        kv.pull("key", out=pulled)
        kv.pushpull("key", both)
        kv.all_reduce(reduced, out=reduced)
        return [each.resize_(100).numel() for each in tensors]

    with Workers("dist_sync", num_workers=2, num_servers=1) as workers:
        assert workers.run(script) == [[100] * 5] * 2


def test_an_object_arrives_on_all_workers(three: Workers) -> None:
    state = {"step": 3, "betas": (0.9, 0.999), "rows": np.arange(1000.0), 7: [None, b"x", True]}

    def script(kv: Any) -> list[Any]:
        return [kv.broadcast_object(state if kv.rank == r else None, r) for r in (0, 2)]

    for found in three.run(script):
        for each in found:
            np.testing.assert_array_equal(each.pop("rows"), np.arange(1000.0))
            assert each == {"step": 3, "betas": (0.9, 0.999), 7: [None, b"x", True]}
            each["rows"] = np.arange(1000.0)


def test_an_object_that_is_not_plain_is_an_error_on_all_workers(three: Workers) -> None:
    def script(kv: Any) -> str:
        with pytest.raises(UsageError) as caught:
            kv.broadcast_object({"a": kv}, 1)
        kv.all_reduce(np.ones(1))
        return str(caught.value)

    first, root, last = three.run(script)
    assert root.startswith("an object may hold")
    assert first == last == f"worker 1 could not send its object: {root}"


def test_messages_go_from_worker_to_worker(three: Workers) -> None:
    def script(kv: Any) -> list[tuple[int, float]]:
        for to in range(3):
            kv.send(np.full(300, 10.0 * kv.rank + to), to, tag=4)
        got = [kv.recv(source, tag=4) for source in range(3)]
        return [(each.source, float(each.array[299])) for each in got]

    found = three.run(script)
    assert found == [[(s, 10.0 * s + rank) for s in range(3)] for rank in range(3)]


def test_bfloat16_keeps_its_dtype(three: Workers) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    value = np.array([1.5, 2.0], ml_dtypes.bfloat16)

    def script(kv: Any) -> list[Array]:
        kv.send(value, kv.rank)
        return [kv.all_reduce(value), kv.recv(kv.rank).array, kv.broadcast_object(value)]

    for total, received, sent in three.run(script):
        assert total.dtype == received.dtype == sent.dtype == value.dtype
        np.testing.assert_array_equal(total.astype(np.float32), [4.5, 6.0])
        np.testing.assert_array_equal(received, value)


def test_stores_do_not_take_each_others_calls(three: Workers) -> None:
    others = three.create()

    def script(kv: Any) -> list[float]:
        both = [(kv, 1.0), (others[kv.rank], 10.0)]
        return [float(each.all_reduce(np.array([value]))[0]) for each, value in both]

    three.run(one_call)  # now the two stores have made different numbers of calls
    assert three.run(script) == [[3.0, 30.0]] * 3
    three.run(lambda kv: others[kv.rank].close())


def test_different_calls_are_an_error_on_all_workers(three: Workers) -> None:
    def script(kv: Any) -> str:
        with pytest.raises(MismatchError) as caught:
            kv.all_reduce(np.ones(3 + (kv.rank == 1)))
        kv.all_reduce(np.ones(1))
        return str(caught.value)

    for text in three.run(script):
        assert "rank 1 calls all_reduce(sum, float64, shape (4,))" in text


def test_what_is_not_an_array_is_refused_at_the_caller(three: Workers) -> None:
    kv: Any = three.stores[0]
    for call in (kv.all_reduce, kv.all_gather, lambda value: kv.send(value, 0)):
        with pytest.raises(ArgumentTypeError):
            call([1.0])
    with pytest.raises(ValueMismatchError, match=r"shape \(3,\) of the result, got \(4,\)"):
        kv.all_reduce(np.ones(3), out=np.ones(4))


def everything(kv: Any) -> list[Any]:
    """What a script exchanges that does not know how many workers it has."""
    own = np.arange(4, dtype=np.float16) + kv.rank
    kept = np.zeros((4, 2))
    kv.all_reduce(np.ones((4, 2)), "average", out=kept[::-1])
    kv.barrier()
    return [
        kv.allreduce(own),
        kv.all_reduce(own, "premul_sum", factor=1 / 3),
        kept,
        *kv.allgather(own[: kv.rank + 1]),
        kv.reduce_scatter([own] * kv.num_workers, "max"),
        kv.broadcast_object({"lr": 0.1, "at": (1, own)} if kv.rank == 0 else None)["at"][1],
        kv.wait(kv.push_async("w", own)),
    ]


@pytest.mark.parametrize("kind", ["local", "device", "dist_sync"])
def test_a_script_runs_on_one_worker_as_on_several(kind: str) -> None:
    with Workers(kind) as workers:
        size = len(workers.stores)
        assert size == (2 if kind == "dist_sync" else 1)
        workers.run(lambda kv: kv.init("w", np.zeros(4, np.float16)))
        for rank, found in enumerate(workers.run(everything)):
            assert found.pop() is None
            total, scaled, ones, *gathered, largest, sent = found
            values = np.arange(4, dtype=np.float16)
            np.testing.assert_array_equal(total, size * values + sum(range(size)))
            third = np.float32(1 / 3)
            thirds = [(values + each).astype(np.float32) * third for each in range(size)]
            np.testing.assert_array_equal(scaled, np.sum(thirds, axis=0).astype(np.float16))
            assert ones.tolist() == [[1.0, 1.0]] * 4
            assert [len(each) for each in gathered] == [*range(1, size + 1)], rank
            np.testing.assert_array_equal(largest, values + size - 1)
            np.testing.assert_array_equal(sent, values)


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "bfloat16", "float64", "complex64"])
def test_a_local_store_gives_the_bits_of_a_job_of_one_worker(dtype: str) -> None:
    kind = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    value = np.array([0.0, 1.5, -2.0, 3.1, 7.7]).astype(kind)
    calls = [
        (op, None) for op in ("sum", "average", "product", "min", "max", "band", "bor", "bxor")
    ]

    def script(kv: Any) -> list[tuple[str, bytes | str]]:
        found: list[tuple[str, bytes | str]] = []
        for op, factor in [*calls, ("premul_sum", 0.3), ("premul_sum", None), ("sum", 2.0)]:
            try:
                result = kv.all_reduce(value, op, factor=factor)
                assert result.dtype == kind
                assert not np.shares_memory(result, value)
                found.append((op, result.tobytes()))
            except UsageError as error:
                found.append((op, str(error)))
        return found

    with Workers("local") as alone, Workers("dist_sync", num_workers=1) as job:
        assert alone.run(script) == job.run(script)


def test_what_one_worker_cannot_exchange_is_refused_with_the_reason() -> None:
    kv: Any = kvstore.create("local")
    for call in (lambda: kv.send(np.ones(1), 0), lambda: kv.recv(), lambda: kv.recv(0)):
        with pytest.raises(NotSupportedError, match="a local or device store has one worker"):
            call()
    with pytest.raises(UsageError, match=r"root must be 0, .* got 1"):
        kv.broadcast_object(3, root=1)
    with pytest.raises(UsageError, match=r"expected 1 array .* got 2"):
        kv.reduce_scatter([np.ones(1)] * 2)
    with pytest.raises(UsageError, match="an object may hold"):
        kv.broadcast_object(kv)
    kv.close()
    for call in (lambda: kv.all_reduce(np.ones(1)), lambda: kv.broadcast_object(3)):
        with pytest.raises(ClosedError):
            call()
