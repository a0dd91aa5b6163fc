"""Misuse that the original is known for: a Python error at the caller, and the store goes on.

Each test cites what MXNet 1.9.1 does: the table of misuse in its reference, by file and line of
its sources. Nothing here aborts a server, hangs a job or changes a value in silence.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from combinations import covering
from misuse import KINDS, LARGE, PARTS, Misuse, Shared, grown, misused, ready
from workers import Workers

import kvstore
from kvstore import KVStore, RowSparseArray, optimizer
from kvstore.arrays.cpu.sums import Flat
from kvstore.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DuplicateKeyError,
    KeyTypeError,
    NotSupportedError,
    UnknownKeyError,
    UnknownTypeError,
    ValueMismatchError,
)
from pslite.errors import PSError, RemoteError

ONES = np.ones(LARGE)


@pytest.fixture
def workers(file_cluster: Shared) -> Iterator[Workers]:
    """One cluster for the whole file, with stores of its own for each test."""
    with file_cluster.lent() as workers:
        yield workers


# -- keys that are there, or not ----------------------------------------------------------

TWICE: dict[str, tuple[Misuse, str]] = {
    "the same key again": (lambda kv: kv.init("w", ONES), "'w' is already initialized"),
    "several values of one key": (lambda kv: kv.init("v", [ONES, ONES]), "several values"),
    "twice in one call": (lambda kv: kv.init(["v", "v"], [ONES, ONES]), "appears twice"),
    "twice and not adjacent": (
        lambda kv: kv.init(["v", "u", "v"], [ONES, ONES, ONES]),
        "'v' appears twice",
    ),
    "a new key beside a known one": (
        lambda kv: kv.init(["v", "w"], [ONES, ONES]),
        "'w' is already init",
    ),
    "a broadcast of a known key": (
        lambda kv: kv.broadcast("w", ONES, ONES.copy()),
        "'w' is already init",
    ),
}


@pytest.mark.parametrize("case", TWICE)
def test_a_key_is_initialised_once(workers: Workers, case: str) -> None:
    """'duplicate init of key k' locally, with earlier keys of the call staying registered.

    On dist only adjacent duplicates are found (KD:620-625). Here the call has no effect at all.
    """
    misuse, text = TWICE[case]
    misused(ready(workers), misuse, DuplicateKeyError, text)
    assert {tuple(kv.keys()) for kv in workers.stores} == {("w",)}


def test_an_int_key_is_initialised_once(workers: Workers) -> None:
    """On dist it is not detected: rank 0's second init is a push, and more workers hang (L13)."""
    ready(workers, key=3)
    again: Misuse = lambda kv: kv.init(3, ONES)  # noqa: E731
    misused(workers, again, DuplicateKeyError, "key 3 is already initialized", key=3)


UNKNOWN: dict[str, Misuse] = {
    "push": lambda kv: kv.push("zz", ONES),
    "push beside a known one": lambda kv: kv.push(["w", "zz"], [ONES, ONES]),
    "pull": lambda kv: kv.pull("zz"),
    "pull into": lambda kv: kv.pull(["w", "zz"], out=[np.empty(LARGE), np.empty(LARGE)]),
    "pushpull": lambda kv: kv.pushpull("zz", ONES.copy()),
    "wait": lambda kv: kv.wait("zz"),
    "info": lambda kv: kv.info("zz"),
    "delete": lambda kv: kv.delete(["w", "zz"]),
    "push_async": lambda kv: kv.push_async("zz", ONES),
    "pull_async": lambda kv: kv.pull_async("zz", ONES.copy()),
    "pushpull_async": lambda kv: kv.pushpull_async("zz", ONES.copy()),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_key_is_named(workers: Workers, case: str) -> None:
    """ "key zz doesn't exist. Did you init?"."""
    misused(ready(workers), UNKNOWN[case], UnknownKeyError, "'zz' .* call init")


@pytest.mark.parametrize("verb", ["push", "pull"])
def test_an_unknown_int_key_is_named_and_no_server_dies(workers: Workers, verb: str) -> None:
    """On dist a pull aborts the server and a push becomes an init (KS:758, L4, L13)."""
    ready(workers, key=3)
    misuse: Misuse = lambda kv: kv.push(78, ONES) if verb == "push" else kv.pull(78)  # noqa: E731
    misused(workers, misuse, UnknownKeyError, "key 78", key=3)
    assert workers.stores[0].keys() == [3]


@pytest.mark.parametrize("verb", ["init", "push", "pull"])
def test_a_store_of_str_keys_takes_no_int_keys(workers: Workers, verb: str) -> None:
    """'Mixed key types are not allowed' (KL:336-340)."""
    call: Misuse = {
        "init": lambda kv: kv.init(1, ONES),
        "push": lambda kv: kv.push(1, ONES),
        "pull": lambda kv: kv.pull(1),
    }[verb]
    misused(ready(workers), call, KeyTypeError, "all int or all str")


# -- values that do not fit ---------------------------------------------------------------

SIZES: dict[str, np.ndarray[Any, Any]] = {
    "longer": np.ones(LARGE + 1),
    "shorter": np.ones(12),
    "of one element": np.ones(1),
    "another shape": np.ones((LARGE, 1)),
    "another dtype": np.ones(LARGE, np.float32),
    "twice the elements of half the size": np.ones(2 * LARGE, np.float32),
}


@pytest.mark.parametrize(
    ("file_cluster", "case", "verb"),
    covering(KINDS, list(SIZES), ["push", "pushpull", "push_async", "with a good one"]),
    indirect=["file_cluster"],
)
def test_a_push_of_another_size_is_refused_at_once(workers: Workers, case: str, verb: str) -> None:
    """'The value size cannot be changed', raised at wait time; locally it replaces the value."""
    wrong = SIZES[case]
    misuse: Misuse = {
        "push": lambda kv: kv.push("w", wrong),
        "pushpull": lambda kv: kv.pushpull("w", wrong, out=ONES.copy()),
        "push_async": lambda kv: kv.push_async("w", wrong),
        "with a good one": lambda kv: kv.push("w", [ONES, wrong]),
    }[verb]
    misused(ready(workers), misuse, ValueMismatchError, r"\(300,\) of float64")


PUSHPULLS: dict[str, tuple[Misuse, str]] = {
    "more keys than outs": (
        lambda kv: kv.pushpull(["w", "w"], [ONES, ONES], out=[ONES.copy()]),
        "got 2 keys and 1 values",
    ),
    "more outs than keys": (
        lambda kv: kv.pushpull(["w"], [ONES], out=[ONES.copy(), ONES.copy()]),
        "got 1 keys and 2 values",
    ),
    "an out of another shape": (lambda kv: kv.pushpull("w", ONES, out=np.ones(4)), r"\(4,\)"),
    "no out at all": (lambda kv: kv.pushpull("w", ONES, out=[]), "at least one array"),
}


@pytest.mark.parametrize("case", PUSHPULLS)
def test_what_is_pushed_and_what_is_pulled_must_match(workers: Workers, case: str) -> None:
    """'List of push and pull keys are different', 'Mismatch in push and pull key'."""
    misuse, text = PUSHPULLS[case]
    misused(ready(workers), misuse, ValueMismatchError, text)


def test_an_output_of_another_dtype_is_cast(workers: Workers) -> None:
    """'Output buffer dtype is different' on dist; here pushpull casts as pull does."""
    out = np.empty(LARGE, np.float32)
    ready(workers)
    workers.run(lambda kv: kv.pushpull("w", ONES, out=np.empty(LARGE, np.float16)))
    workers.stores[0].pull("w", out=out)
    assert out[0] in (1.0, 2.0)
    with pytest.raises(
        ValueMismatchError, match="has dtype float64, and the array to fill has int16"
    ):
        workers.stores[0].pull("w", out=np.empty(LARGE, np.int16))


# -- compression --------------------------------------------------------------------------

COMPRESSIONS: dict[str, tuple[object, str]] = {
    "an unknown type": ({"type": "3bit"}, "unknown codec '3bit'; known:"),
    "no type": ({}, "'type' is missing"),
    "no dict": ("2bit", "compression must be a dictionary such as"),
    "threshold 0": ({"type": "2bit", "threshold": 0}, "threshold"),
    "a threshold that is no number": ({"type": "2bit", "threshold": "0,5"}, "threshold"),
    "a parameter of another codec": (
        {"type": "fp16", "threshold": 1},
        "does not have the parameter 'threshold'",
    ),
    "a ratio above 1": ({"type": "topk", "ratio": 2}, "ratio"),
    "feedback for values": ({"type": "fp16", "pull": {"type": "fp16", "feedback": True}}, "pull"),
}


@pytest.mark.parametrize("case", COMPRESSIONS)
def test_a_compression_that_cannot_be_is_an_error_that_says_what_can(
    workers: Workers, case: str
) -> None:
    """In the original they fail in many ways, some of them on the server (L19, L22)."""
    given, text = COMPRESSIONS[case]
    misuse: Misuse = lambda kv: kv.set_gradient_compression(given)  # type: ignore[arg-type] # noqa: E731
    misused(ready(workers), misuse, (ArgumentTypeError, ArgumentValueError), text)


def test_numbers_that_a_codec_cannot_carry_are_an_error_at_the_push(workers: Workers) -> None:
    ready(workers)
    workers.run(lambda kv: kv.set_gradient_compression({"type": "2bit"}))
    misuse: Misuse = lambda kv: kv.push("w", np.full(LARGE, np.nan))  # noqa: E731
    with pytest.raises(ArgumentValueError, match="NaN or infinity, which 2bit cannot encode"):
        misuse(workers.stores[0])
    workers.run(lambda kv: kv.set_gradient_compression(None))
    misused(workers, lambda kv: kv.push("x", ONES), UnknownKeyError, "x")


ROWS = RowSparseArray.zeros((LARGE,), "f8")
OTHER = RowSparseArray([0], np.ones((1, 2)), (LARGE, 2))
SPARSE: dict[str, tuple[Misuse, type[Exception], str]] = {
    "push of another shape": (lambda kv: kv.push("w", OTHER), ValueMismatchError, "shape"),
    "push of another dtype": (
        lambda kv: kv.push("w", RowSparseArray.zeros((LARGE,), "f4")),
        ValueMismatchError,
        "float64.*float32",
    ),
    "push of a list": (lambda kv: kv.push("w", [ROWS, OTHER]), ValueMismatchError, "shape"),
    "push_async": (lambda kv: kv.push_async("w", OTHER), ValueMismatchError, "shape"),
    "pull": (lambda kv: kv.pull("w", out=OTHER), ValueMismatchError, "shape"),
    "pushpull into it": (
        lambda kv: kv.pushpull("w", ONES, out=ROWS),
        NotSupportedError,
        "cannot fill a RowSparseArray",
    ),
    "pushpull_async in place": (
        lambda kv: kv.pushpull_async("w", ROWS),
        NotSupportedError,
        "cannot fill a RowSparseArray",
    ),
    "broadcast into it": (
        lambda kv: kv.broadcast("v", ROWS, ROWS),
        NotSupportedError,
        "cannot fill a RowSparseArray",
    ),
    "no ids": (lambda kv: kv.row_sparse_pull("w"), ArgumentValueError, "needs row_ids"),
    "ids out of range": (
        lambda kv: kv.row_sparse_pull("w", row_ids=[0, LARGE]),
        ArgumentValueError,
        "out of range",
    ),
    "negative ids": (
        lambda kv: kv.row_sparse_pull("w", row_ids=np.array([-1])),
        ArgumentValueError,
        "out of range",
    ),
    "float ids": (
        lambda kv: kv.row_sparse_pull("w", row_ids=np.array([0.5])),
        ArgumentTypeError,
        "whole numbers",
    ),
    "an array that does not fit the ids": (
        lambda kv: kv.row_sparse_pull("w", out=np.zeros(3), row_ids=[1, 2]),
        ValueMismatchError,
        r"ids of shape \(2,\) need",
    ),
    "more sets of ids than arrays": (
        lambda kv: kv.row_sparse_pull("w", out=[ROWS], row_ids=[np.arange(2), np.arange(3)]),
        ValueMismatchError,
        "got 2 lists",
    ),
    "rows of a key that is not there": (
        lambda kv: kv.row_sparse_pull("x", row_ids=[1]),
        UnknownKeyError,
        "'x'",
    ),
}


@pytest.mark.parametrize(("kind", "case"), covering(KINDS, list(SPARSE), together=1))
def test_misused_rows_are_an_error_at_the_call(kind: str, case: str) -> None:
    """On dist they abort servers, shift rows and corrupt memory in the original (L17)."""
    misuse, error, text = SPARSE[case]
    with Workers(kind, **PARTS) as workers:
        misused(ready(workers), misuse, error, text)


@pytest.mark.parametrize("ignore_sparse", [True, False])
def test_ignore_sparse_changes_nothing_for_dense_keys(
    workers: Workers, ignore_sparse: bool
) -> None:
    """False is refused by dist ("doesn't support ignore_sparse=False"); L26: True can skip."""
    ready(workers)
    out = np.full(LARGE, 7.0)
    workers.stores[0].pull("w", out=out, ignore_sparse=ignore_sparse)
    np.testing.assert_array_equal(out, np.zeros(LARGE))


def test_a_compressed_matrix_is_no_value(workers: Workers) -> None:
    """'Unexpected storage type detected during kvstore push', which is fatal, for csr arrays."""
    torch = pytest.importorskip("torch")
    csr = torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 3), check_invariants=True)
    misuse: Misuse = lambda kv: kv.push("w", csr)  # noqa: E731
    errors = (NotSupportedError, ValueMismatchError)  # taken by local, of another shape there
    misused(ready(workers), misuse, errors, "sparse|shape")


@pytest.mark.parametrize("name", ["nccl", "FooBar", "dist_anything", "dist_nccl", "device1"])
def test_a_type_that_is_none_is_an_error_that_lists_the_types(name: str) -> None:
    """Any name gives a store there: 'FooBar' a local one, 'mydevice' a device one (KC:66-77)."""
    with pytest.raises(UnknownTypeError, match=r"local, .*dist_sync") as caught:
        kvstore.create(name)
    assert repr(name) in str(caught.value)


def test_p3_is_accepted_and_an_optimizer_still_works() -> None:
    """DMLC_PS_VAN_TYPE=p3 takes the optimizer away and lets slots of keys collide (L18)."""
    with Workers("dist_sync", van_type="p3", **PARTS) as workers:
        ready(workers)
        assert workers.stores[0].is_capable("optimizer")
        # Decreasing int keys are what collided.
        others = workers.create()

        def script(kv: KVStore) -> Any:
            kv.init(5, np.full(LARGE, 5.0))
            kv.init(4, np.full(LARGE, 4.0))
            kv.push(4, ONES, priority=3)
            return kv.pull(5)[0], kv.pull(4)[0]

        assert workers.run(script, others) == [(5.0, 2.0)] * 2
        assert workers.run(grown)[0][0] == 2.0


def test_a_barrier_before_exit_can_be_asked_for_by_anybody(workers: Workers) -> None:
    """'barrier_before_exit takes effect only on worker nodes', which is fatal elsewhere."""
    ready(workers)
    workers.run(lambda kv: kv.set_barrier_before_exit(False))
    assert workers.run(grown)[0][0] == workers.stores[0].num_workers


# -- integers, and code that raises -------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int64, np.bool_])
@pytest.mark.parametrize("kind", ["local", "device", "dist_sync"])
def test_integers_and_bools_are_added_up(kind: str, dtype: Any) -> None:
    """'This operation only support floating point types': the server aborts (KS:754, L24)."""
    with Workers(kind, **PARTS) as workers:

        def script(kv: KVStore) -> Any:
            kv.init("i", np.zeros(LARGE, dtype))
            kv.push("i", np.ones(LARGE, dtype))
            return kv.pull("i")

        for value in workers.run(script):
            assert value.dtype == dtype
            np.testing.assert_array_equal(
                value, np.full(LARGE, workers.stores[0].num_workers, dtype)
            )


def push_and_pull(kv: KVStore, value: np.ndarray[Any, Any]) -> None:
    """With servers, it is the pull that raises."""
    kv.push("i", value)
    kv.pull("i")


@pytest.mark.parametrize("dtype", [np.int32, np.bool_])
def test_an_optimizer_does_not_touch_integers_and_says_so(workers: Workers, dtype: Any) -> None:
    """L24: the server aborts."""
    ready(workers)
    workers.run(lambda kv: kv.init("i", np.ones(LARGE, dtype)))

    def script(kv: KVStore) -> Any:
        with pytest.raises(ArgumentTypeError, match="float weights"):
            push_and_pull(kv, np.ones(LARGE, dtype))
        np.testing.assert_array_equal(kv.pull("i"), np.ones(LARGE, dtype))
        return grown(kv)

    for value in workers.run(script):
        assert value[0] == workers.stores[0].num_workers


@optimizer.register
@dataclasses.dataclass(frozen=True)
class Careless(optimizer.Optimizer):
    """Fails on gradients that are negative."""

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        if grad[0] < 0:
            raise ZeroDivisionError("a bug in an optimizer")
        weight += grad


def push_and_fail(kv: KVStore) -> None:
    """Push, and return once the error is known.

    A worker that got it before its next push would leave the round of the others open.
    """
    kv.push("w", -ONES)
    known = threading.Event()
    kv.pull_async("w").on_done(lambda _: known.set())
    assert known.wait(60)


@pytest.mark.parametrize("then", ["pull", "wait", "wait for keys", "pushpull"])
def test_what_an_optimizer_raises_comes_out_at_the_worker_once(workers: Workers, then: str) -> None:
    """It is printed as 'Exception ignored', the update skipped, and the push reports success.

    On servers the worker never learns of it (L8).
    """
    ready(workers)
    workers.run(lambda kv: kv.set_optimizer(Careless()))
    failing: Misuse = {
        "pull": lambda kv: (kv.push("w", -ONES), kv.pull("w")),
        "wait": lambda kv: (kv.push("w", -ONES), kv.wait()),
        "wait for keys": lambda kv: (kv.push("w", -ONES), kv.wait("w")),
        "pushpull": lambda kv: (push_and_fail(kv), kv.pushpull("w", np.zeros(LARGE))),
    }[then]
    is_local = workers.stores[0].num_workers == 1
    error = ZeroDivisionError if is_local else RemoteError

    def script(kv: KVStore) -> Any:
        with pytest.raises(error, match="a bug in an optimizer") as caught:
            failing(kv)
        if not is_local:
            assert "in update" in str(caught.value)
        kv.barrier()
        return grown(kv)

    for value in workers.run(script):
        np.testing.assert_array_equal(value, np.full(LARGE, workers.stores[0].num_workers))


@pytest.mark.parametrize("kind", ["local", "device"])
def test_what_an_updater_raises_comes_out_of_the_push(kind: str) -> None:
    """'Exception ignored on calling ctypes callback function', and the push succeeds (L8)."""
    kv = kvstore.create(kind)
    kv.init("w", np.zeros(LARGE))

    def updater(key: Any, received: Any, local: Any) -> None:
        local += received
        if received[0] < 0:
            raise KeyError("a bug in an updater")

    kv.set_updater(updater)
    with pytest.raises(KeyError, match="a bug in an updater"):
        kv.push("w", -ONES)
    kv.push("w", ONES)
    np.testing.assert_array_equal(kv.pull("w"), ONES)


def test_all_these_errors_are_one_kind_that_scripts_for_the_original_catch(
    workers: Workers,
) -> None:
    """MXNetError derives from RuntimeError; so does PSError."""
    ready(workers)
    with pytest.raises(RuntimeError) as caught:
        workers.stores[0].init("w", ONES)
    assert isinstance(caught.value, PSError)
