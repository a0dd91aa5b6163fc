"""Misuse that every user makes some day: an error at the caller, never a hang or a wrong value."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cluster import LIMIT_S
from combinations import covering
from misuse import KINDS, LARGE, PARTS, Misuse, Shared, grown, misused, ready
from workers import Workers

import kvstore
from kvstore import KVStore, RowSparseArray, optimizer
from kvstore.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CheckpointError,
    KeyTypeError,
    OptimizerMismatch,
    OptimizerNotSet,
    OptimizerParameterError,
    UnknownKeyError,
    UnknownOptimizerError,
    UnknownTypeError,
    ValueMismatchError,
)
from kvstore.protocol.requests import DIRECTORY_APP, DirectoryCall
from kvstore.server import dense
from pslite import Incoming
from pslite.errors import ClosedError, DeadlineError, RemoteError, UsageError
from pslite.ids import rank_of

ONES = np.ones(LARGE)
DIST = ["dist_sync", "dist_async"]


@pytest.fixture
def workers(file_cluster: Shared) -> Iterator[Workers]:
    """One cluster for the whole file, with stores of its own for each test."""
    with file_cluster.lent() as workers:
        yield ready(workers)


def read_only() -> np.ndarray[Any, Any]:
    array = np.ones(LARGE)
    array.setflags(write=False)
    return array


def objects() -> np.ndarray[Any, Any]:
    return np.array([None] * LARGE)


class Network:
    """What looks like a module of PyTorch."""

    def named_parameters(self) -> list[tuple[str, np.ndarray[Any, Any]]]:
        return [("v", ONES)]


class Descent:
    """What looks like an optimizer of PyTorch."""

    param_groups: list[Any] = []


NOT_CUT = (
    ValueMismatchError,
    "has dtype float64, and the array to fill has (int32|uint8|bool|int64), which",
)

MISUSES: dict[str, tuple[Misuse, type[Exception], str]] = {
    # values that are none
    "None": (lambda kv: kv.push("w", None), ArgumentTypeError, "NoneType"),
    "None in a list": (lambda kv: kv.push("w", [ONES, None]), ArgumentTypeError, "NoneType"),
    "a list of numbers": (lambda kv: kv.push("w", [1.0] * LARGE), ArgumentTypeError, "float"),
    "a number": (lambda kv: kv.push("w", 1.0), ArgumentTypeError, "got float"),
    "a NumPy number": (lambda kv: kv.init("v", np.float32(1)), ArgumentTypeError, "float32"),
    "a text": (lambda kv: kv.push("w", "ones"), ArgumentTypeError, "got str"),
    "objects": (lambda kv: kv.push("w", objects()), ArgumentTypeError, "object"),
    "texts": (lambda kv: kv.init("v", np.array(["a"])), ArgumentTypeError, "a store cannot hold"),
    "a generator": (lambda kv: kv.push("w", (x for x in [ONES])), ArgumentTypeError, "generator"),
    "a masked array": (
        lambda kv: kv.push("w", np.ma.masked_array(ONES, ONES > 0)),
        ArgumentTypeError,
        "mask",
    ),
    "a module": (lambda kv: kv.init("v", Network()), ArgumentTypeError, "named_parameters"),
    "an optimizer of another library": (
        lambda kv: kv.set_optimizer(Descent()),
        ArgumentTypeError,
        "got Descent of PyTorch",
    ),
    "no value": (lambda kv: kv.push("w", []), ValueMismatchError, "at least one array"),
    # lists that do not match
    "more keys": (lambda kv: kv.push(["w", "w"], [ONES]), ValueMismatchError, "2 keys"),
    "more values": (lambda kv: kv.push(["w"], [ONES, ONES]), ValueMismatchError, "1 keys"),
    "one array for a list": (lambda kv: kv.push(["w"], ONES), ValueMismatchError, "list of 1 keys"),
    "a dict of values": (
        lambda kv: kv.push(["w"], {"w": ONES}),
        ValueMismatchError,
        "got dict",
    ),
    # arrays to fill
    "a read-only out": (lambda kv: kv.pull("w", out=read_only()), ValueMismatchError, "read-only"),
    "pushpull in a read-only array": (
        lambda kv: kv.pushpull("w", read_only()),
        ValueMismatchError,
        "read-only",
    ),
    "an out of another shape": (
        lambda kv: kv.pull("w", out=np.ones(3)),
        ValueMismatchError,
        r"\(300,\).*\(3,\)",
    ),
    "integers for floats": (lambda kv: kv.pull("w", out=np.ones(300, "i4")), *NOT_CUT),
    "lazy bytes for floats": (
        lambda kv: kv.pull("w", out=[kvstore.nd.zeros(300), kvstore.nd.zeros(300, dtype="u1")]),
        *NOT_CUT,
    ),
    "bool for floats, in a pull that goes on": (
        lambda kv: kv.pull_async("w", np.ones(300, "?")),
        *NOT_CUT,
    ),
    "integers for the floats of a pushpull": (
        lambda kv: kv.pushpull("w", ONES, np.ones(300, "i8")),
        *NOT_CUT,
    ),
    "integers for the floats of a broadcast": (
        lambda kv: kv.broadcast("v", ONES, np.ones(300, "i8")),
        *NOT_CUT,
    ),
    "integers for rows of floats": (
        lambda kv: kv.row_sparse_pull("w", np.ones(2, "i4"), row_ids=[1, 2]),
        *NOT_CUT,
    ),
    "integers for rows of floats by their ids": (
        lambda kv: kv.row_sparse_pull("w", RowSparseArray.zeros((300,), "i4"), row_ids=[1, 2]),
        *NOT_CUT,
    ),
    "an out that is a list": (lambda kv: kv.pull("w", out=[0.0] * 3), ArgumentTypeError, "float"),
    "an out of objects": (lambda kv: kv.pull("w", out=objects()), ArgumentTypeError, "object"),
    "a broadcast into another shape": (
        lambda kv: kv.broadcast("v", ONES, np.ones(4)),
        ValueMismatchError,
        r"\(4,\)",
    ),
    # keys
    "a float key": (lambda kv: kv.push(1.0, ONES), KeyTypeError, "got float"),
    "a bool key": (lambda kv: kv.push(True, ONES), KeyTypeError, "got bool"),
    "a bytes key": (lambda kv: kv.init(b"v", ONES), KeyTypeError, "got bytes"),
    "None as a key": (lambda kv: kv.pull(None), KeyTypeError, "NoneType"),
    "keys of both kinds": (lambda kv: kv.push(["w", 1], [ONES, ONES]), KeyTypeError, "all int or"),
    "nested keys": (lambda kv: kv.pull([["w"]]), KeyTypeError, "got list"),
    "an int that is too large": (lambda kv: kv.init(2**63, ONES), KeyTypeError, "64 bits"),
    "lone surrogate": (lambda kv: kv.init("v\udc80", ONES), KeyTypeError, "Unicode"),
    "info of a list": (lambda kv: kv.info(["w"]), KeyTypeError, "got list"),
    "info of a bool": (lambda kv: kv.info(True), KeyTypeError, "got bool"),
    "wait for a float": (lambda kv: kv.wait(1.5), KeyTypeError, "got float"),
    # other arguments
    "a priority in words": (
        lambda kv: kv.push("w", ONES, priority="high"),
        ArgumentTypeError,
        "priority must be an int",
    ),
    "no priority": (lambda kv: kv.pull("w", priority=None), ArgumentTypeError, "priority"),
    "half a priority": (
        lambda kv: kv.pushpull("w", ONES.copy(), priority=0.5),
        ArgumentTypeError,
        "priority",
    ),
    "a priority of an async pull": (
        lambda kv: kv.pull_async("w", ONES.copy(), priority="1"),
        ArgumentTypeError,
        "priority",
    ),
    "a priority of an async push": (
        lambda kv: kv.push_async("w", ONES, priority=[1]),
        ArgumentTypeError,
        "priority",
    ),
    "a priority of an async pushpull": (
        lambda kv: kv.pushpull_async("w", ONES.copy(), priority=1.0),
        ArgumentTypeError,
        "priority",
    ),
    "a priority of a broadcast": (
        lambda kv: kv.broadcast("v", ONES, ONES.copy(), priority="1"),
        ArgumentTypeError,
        "priority",
    ),
    "an optimizer's name": (lambda kv: kv.set_optimizer("sgd"), ArgumentTypeError, "got str"),
    "no optimizer": (lambda kv: kv.set_optimizer(None), ArgumentTypeError, "NoneType"),
    "a number that it lacks": (
        lambda kv: kv.set_optimizer_params(momentum_of_inertia=1),
        OptimizerParameterError,
        "momentum_of_inertia",
    ),
    "a number that is none": (
        lambda kv: kv.set_optimizer_params(lr=float("nan")),
        OptimizerParameterError,
        "finite",
    ),
    "a checkpoint in a number": (lambda kv: kv.save_checkpoint(3), ArgumentTypeError, "got 3"),
    "a checkpoint from nowhere": (
        lambda kv: kv.load_checkpoint(None),
        ArgumentTypeError,
        "a file name must be a str or a pathlib.Path, got None",
    ),
    "states in bytes": (
        lambda kv: kv.save_optimizer_states(b"states"),
        ArgumentTypeError,
        "got b'states'",
    ),
    "states from a number": (
        lambda kv: kv.load_optimizer_states(3.5),
        ArgumentTypeError,
        "got 3.5",
    ),
    "half a sample": (lambda kv: kv.shard(2.5), ArgumentTypeError, "num_samples must be an int"),
    "a seed in words": (lambda kv: kv.shard(9, seed="a"), ArgumentTypeError, "seed must be an int"),
    "half an epoch": (lambda kv: kv.shard(9, epoch=0.5), ArgumentTypeError, "epoch must be an int"),
    "an array of half a number": (
        lambda kv: kv.empty(2.5),
        ArgumentTypeError,
        "a shape must be an int",
    ),
    "an array of no dtype": (lambda kv: kv.zeros(3, "nope"), ArgumentTypeError, "is not a dtype"),
    "files without a name": (lambda kv: kv.save_checkpoint(""), CheckpointError, "got ''"),
    "a checkpoint without a name": (
        lambda kv: kv.load_checkpoint(""),
        CheckpointError,
        "a file name must be non-empty text.*got ''",
    ),
    "states without a name": (
        lambda kv: kv.save_optimizer_states(""),
        CheckpointError,
        "a file name must be non-empty text.*got ''",
    ),
    "states from a file without a name": (
        lambda kv: kv.load_optimizer_states(""),
        CheckpointError,
        "a file name must be non-empty text.*got ''",
    ),
    "NUL in a checkpoint's name": (
        lambda kv: kv.save_checkpoint("a\0b"),
        CheckpointError,
        "a file name must be non-empty text",
    ),
    "a checkpoint from a name with NUL": (
        lambda kv: kv.load_checkpoint("a\0b"),
        CheckpointError,
        "a file name must be non-empty text",
    ),
    "NUL in the name of states": (
        lambda kv: kv.save_optimizer_states("a\0b"),
        CheckpointError,
        "a file name must be non-empty text",
    ),
    "states from a name with NUL": (
        lambda kv: kv.load_optimizer_states("a\0b"),
        CheckpointError,
        "a file name must be non-empty text",
    ),
    "a barrier without time": (
        lambda kv: kv.barrier(timeout=0),
        ArgumentValueError,
        "timeout must be greater than 0 seconds, got 0",
    ),
    "a barrier until yesterday": (
        lambda kv: kv.barrier(timeout=-1.5),
        ArgumentValueError,
        r"greater than 0 seconds, got -1\.5",
    ),
    "a barrier of NaN seconds": (
        lambda kv: kv.barrier(timeout=float("nan")),
        ArgumentValueError,
        "greater than 0 seconds, got nan",
    ),
    "a barrier with a time in words": (
        lambda kv: kv.barrier(timeout="30"),
        ArgumentTypeError,
        "timeout must be a number of seconds or None, got '30'",
    ),
    "a barrier that is to be limited": (
        lambda kv: kv.barrier(timeout=True),
        ArgumentTypeError,
        "got True",
    ),
    "a wait without time": (
        lambda kv: kv.wait(timeout=0),
        ArgumentValueError,
        "timeout must be greater than 0 seconds, got 0",
    ),
    "a wait for a key until yesterday": (
        lambda kv: kv.wait("w", timeout=-1),
        ArgumentValueError,
        "greater than 0 seconds, got -1",
    ),
    "a wait with a time in words": (
        lambda kv: kv.wait("w", timeout="30"),
        ArgumentTypeError,
        "timeout must be a number of seconds or None, got '30'",
    ),
    "one argument of an optimizer too many": (
        lambda kv: kv.set_optimizer(optimizer.SGD(*range(20))),
        OptimizerParameterError,
        "SGD takes 2 positional arguments .*, got 20; pass the others by name",
    ),
    "an argument of an optimizer twice": (
        lambda kv: kv.set_optimizer(optimizer.SGD(0.9, momentum=0.5)),
        OptimizerParameterError,
        "SGD got momentum both by position and by name",
    ),
    "a command in words": (
        lambda kv: kv.send_command_to_servers("stop", ""),
        ArgumentTypeError,
        "head",
    ),
    "a negative command": (lambda kv: kv.send_command_to_servers(-1), ArgumentTypeError, "head"),
    "a huge command": (lambda kv: kv.send_command_to_servers(2**70), ArgumentTypeError, "head"),
    "lone surrogate in a command": (
        lambda kv: kv.send_command_to_servers(1, "v\udc80"),
        ArgumentValueError,
        "a command's body must be valid Unicode",
    ),
    "lone surrogate in a key of a factor": (
        lambda kv: kv.set_optimizer(optimizer.SGD(lr_mult={"v\udc80": 0.5})),
        OptimizerParameterError,
        "a key in lr_mult of SGD must be valid Unicode, got .*; remove the lone surrogate",
    ),
    "lone surrogate in a setting of an optimizer": (
        lambda kv: kv.set_optimizer(optimizer.LBSGD(warmup_strategy="\udc80")),
        OptimizerParameterError,
        "warmup_strategy of LBSGD must be valid Unicode",
    ),
    "lone surrogate in a key of a compression": (
        lambda kv: kv.set_gradient_compression({"type": "2bit", "exclude": ["\udc80"]}),
        ArgumentValueError,
        "a key of the compression parameter 'exclude' must be valid Unicode",
    ),
    "a command without a text": (
        lambda kv: kv._send_command_to_servers(1, None),  # type: ignore[arg-type]
        ArgumentTypeError,
        "str",
    ),
}


@pytest.mark.parametrize(
    ("file_cluster", "case"), covering(KINDS, list(MISUSES), together=1), indirect=["file_cluster"]
)
def test_a_call_that_makes_no_sense_is_refused_and_has_no_effect(
    workers: Workers, case: str
) -> None:
    misuse, error, text = MISUSES[case]
    misused(workers, misuse, error, text)
    assert workers.stores[0].keys() == ["w"]
    assert workers.stores[0].current_optimizer() == optimizer.create("test")


def test_bool_and_numpy_priorities_are_numbers(workers: Workers) -> None:
    def script(kv: KVStore) -> Any:
        kv.push("w", ONES, priority=np.int64(3))
        kv.pull("w", priority=True)
        return grown(kv)

    assert workers.run(script)[0][0] == 2 * workers.stores[0].num_workers


# -- waiting ------------------------------------------------------------------------------


def test_a_wait_that_times_out_names_what_it_waits_for_and_the_value_still_comes() -> None:
    with Workers("dist_sync", **PARTS) as workers:
        first, second = ready(workers).stores
        pushed = first.push_async("w", ONES)
        with pytest.raises(DeadlineError, match=r"0\.05 s waiting for the servers' answer for 'w'"):
            pushed.result(0.05)
        second.push("w", ONES)
        assert pushed.result(LIMIT_S) is None
        assert first.pull("w")[0] == 2.0


def test_the_error_of_a_push_is_raised_once(workers: Workers) -> None:
    """Not by ``wait`` and then again by the call that follows."""

    def script(kv: KVStore) -> Any:
        kv.init("i", np.ones(3, np.int32))
        seen = []
        for wait in (lambda: kv.wait(), lambda: kv.wait("i"), lambda: kv.pull("i")):
            try:
                kv.push("i", np.ones(3, np.int32))
                wait()
            except ArgumentTypeError:
                seen.append(1)
            kv.keys()
            kv.barrier()
        return len(seen)

    assert set(workers.run(script)) == {3}


def test_an_error_of_one_push_is_none_of_another_that_travels_with_it() -> None:
    """Calls that wait for the I/O thread at the same time share messages."""
    with Workers("dist_sync", 1, 1) as workers:
        (kv,) = workers.stores
        kv.set_optimizer(optimizer.create("test"))
        kv.init(["i", "f", "j"], [np.zeros(3, np.int32), np.zeros(3), np.zeros(3, np.int8)])
        assert workers.cluster is not None
        all_called = threading.Event()
        workers.cluster.workers[0].call(lambda: all_called.wait(LIMIT_S))
        bad = kv.push_async("i", np.ones(3, np.int32))
        good = kv.push_async("f", np.ones(3))
        both = kv.push_async(["f", "j"], [np.ones(3), np.ones(3, np.int8)])
        all_called.set()
        assert kv.wait(good) is None
        with pytest.raises(ArgumentTypeError, match="got int32"):
            kv.wait(bad)
        with pytest.raises(ArgumentTypeError, match="got int8"):
            kv.wait(both)
        assert kv.pull("f")[0] == 2.0


WAITING: dict[str, Misuse] = {
    "pull": lambda kv: kv.pull("w"),
    "pull into": lambda kv: kv.pull("w", out=ONES.copy()),
    "pushpull": lambda kv: kv.pushpull("w", ONES.copy()),
    "init": lambda kv: kv.init("v", ONES),
    "broadcast": lambda kv: kv.broadcast("v", ONES, ONES.copy()),
    "set_optimizer": lambda kv: kv.set_optimizer(optimizer.create("sgd")),
    "set_optimizer_params": lambda kv: kv.set_optimizer_params(lr=5.0),
    "delete": lambda kv: kv.delete("w"),
    "barrier": lambda kv: kv.barrier(),
    "stats": lambda kv: kv.stats(),
    "load_checkpoint": lambda kv: kv.load_checkpoint("nowhere"),
    "command": lambda kv: kv.send_command_to_servers(1, ""),
}


@pytest.mark.parametrize("kind", DIST)
@pytest.mark.parametrize("case", WAITING)
def test_a_callback_on_the_io_thread_that_would_wait_is_refused_before_any_effect(
    kind: str, case: str
) -> None:
    with Workers(kind, **PARTS) as workers:
        ready(workers)
        caught: list[BaseException] = []
        over = threading.Event()

        def callback(kv: KVStore) -> None:
            try:
                WAITING[case](kv)
            except BaseException as error:
                caught.append(error)
            over.set()

        def script(kv: KVStore) -> Any:
            if kv.rank == 0:
                # The other worker's round is open: the callback runs when the answer arrives.
                pushed = kv.push_async("w", ONES)
                pushed.on_done(lambda _: callback(kv))
            else:
                kv.push("w", ONES)
            kv.wait()
            assert over.wait(LIMIT_S)
            kv.barrier()
            return grown(kv)

        for value in workers.run(script):
            np.testing.assert_array_equal(value, np.full(LARGE, 4.0))
        (error,) = caught
        assert isinstance(error, UsageError)
        assert "must not wait" in str(error)
        assert workers.stores[0].keys() == ["w"]
        assert workers.stores[0].current_optimizer() == optimizer.create("test")


CLOSED: dict[str, Misuse] = {
    **{name: call for name, call in WAITING.items() if name != "command"},
    "push": lambda kv: kv.push("w", ONES),
    "push_async": lambda kv: kv.push_async("w", ONES),
    "pull_async": lambda kv: kv.pull_async("w"),
    "pushpull_async": lambda kv: kv.pushpull_async("w", ONES.copy()),
    "wait": lambda kv: kv.wait(),
    "wait for keys": lambda kv: kv.wait("w"),
    "keys": lambda kv: kv.keys(),
    "in": lambda kv: "w" in kv,
    "info": lambda kv: kv.info("w"),
    "current_optimizer": lambda kv: kv.current_optimizer(),
    "save_checkpoint": lambda kv: kv.save_checkpoint("nowhere"),
    "save_optimizer_states": lambda kv: kv.save_optimizer_states("nowhere"),
}


@pytest.mark.parametrize(
    ("kind", "case"),
    covering(KINDS, [case for case in CLOSED if case != "load_checkpoint"], together=1),
)
def test_a_closed_store_says_so_and_others_go_on(kind: str, case: str) -> None:
    with Workers(kind, **PARTS) as workers:
        ready(workers)
        others = workers.create()
        for kv in others:
            kv.close()
            kv.close()
            with pytest.raises(ClosedError, match="closed; call"):
                CLOSED[case](kv)
        assert workers.run(grown)[0][0] == workers.stores[0].num_workers


# -- workers that disagree ----------------------------------------------------------------


@pytest.mark.parametrize("kind", DIST)
@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("wrong", [np.ones(4), np.ones(LARGE, np.float32), np.ones((LARGE, 1))])
def test_the_worker_with_another_shape_is_told_both_and_can_mend_it(
    kind: str, slow: int, wrong: np.ndarray[Any, Any]
) -> None:
    with Workers(kind, **PARTS) as workers:
        ready(workers)
        fast_is_through = threading.Event()

        def script(kv: KVStore) -> Any:
            if kv.rank == slow:
                # In the other order the fast one waits for rank 0, so it cannot be waited for.
                fast_is_through.wait(0.1 if slow == 0 else LIMIT_S)
            if kv.rank == 1:
                with pytest.raises(ValueMismatchError, match=r"\(300,\) of float64.*value has"):
                    kv.init(["u", "v"], [ONES, wrong])
                assert kv.keys() == ["w"]
                kv.init(["u", "v"], [ONES, ONES])
            else:
                kv.init(["u", "v"], [ONES, np.zeros(LARGE)])
                fast_is_through.set()
            return grown(kv, "v")

        for value in workers.run(script):
            np.testing.assert_array_equal(value, np.full(LARGE, 2.0))


def test_the_worker_with_the_other_kind_of_keys_is_told() -> None:
    with Workers("dist_sync", **PARTS) as workers:

        def script(kv: KVStore) -> Any:
            if kv.rank == 1:
                with pytest.raises(KeyTypeError, match="another worker has 'w', this call names 3"):
                    kv.init(3, ONES)
            kv.init("w", np.zeros(LARGE))
            return grown(kv)

        assert [value[0] for value in workers.run(script)] == [2.0, 2.0]


def test_the_worker_with_another_type_of_store_is_told_both_types() -> None:
    with Workers("dist_sync", 2, 1, **PARTS) as workers:
        assert workers.cluster is not None
        nodes = workers.cluster.workers
        sync = kvstore.create("dist_sync", node=nodes[0])
        other = kvstore.create("dist_async", node=nodes[1])
        # Rank 1 comes later, so the job's type is rank 0's.
        workers.run(lambda kv: kv.init("w", ONES) if kv.rank == 0 else None, [sync, other])
        with pytest.raises(UnknownTypeError, match="'sync' on another worker and 'async'"):
            other.init("w", ONES)


@pytest.mark.parametrize("kind", DIST)
@pytest.mark.parametrize("bad", ["unregistered", "needs whole keys"])
@pytest.mark.parametrize("by", ["all", "rank 0", "rank 1"])
def test_an_optimizer_that_is_refused_leaves_the_one_before_and_later_ones_work(
    kind: str, bad: str, by: str
) -> None:
    """The numbers of the calls must not get out of step: a worker would wait for ever."""

    @dataclasses.dataclass(frozen=True)
    class Unregistered(optimizer.Optimizer):
        pass

    wrong = Unregistered() if bad == "unregistered" else optimizer.create("lamb")
    errors = (UnknownOptimizerError, UsageError, OptimizerMismatch)
    better = optimizer.create("test", rescale_grad=2.0)
    with Workers(kind, **PARTS) as workers:
        ready(workers)

        def script(kv: KVStore) -> Any:
            # A different optimizer of rank 1 alone waits for rank 0's next, and is then refused.
            if by == "all" or (by == "rank 0" and kv.rank == 0):
                with pytest.raises(errors):
                    kv.set_optimizer(wrong)
            if by == "all":
                assert kv.current_optimizer() == optimizer.create("test")
                kv.barrier()  # before the other one sets another
            if by == "rank 1" and kv.rank == 1:
                with pytest.raises(errors):
                    kv.set_optimizer(wrong)
            kv.set_optimizer(better)
            kv.barrier()
            assert kv.current_optimizer() == better
            return grown(kv)

        for value in workers.run(script):
            np.testing.assert_array_equal(value, np.full(LARGE, 4.0))


def test_either_all_servers_take_an_optimizer_or_none() -> None:
    """Only some servers have parts of keys that are cut: the others must not change alone."""
    with Workers("dist_sync", 2, 2, **PARTS) as workers:

        def script(kv: KVStore) -> Any:
            kv.init(["cut", "x"], [np.zeros(34), np.zeros(32)])
            kv.delete("x")
            kv.init(["a", "b", "c"], [np.zeros(32)] * 3)
            servers = [rank for rank, keys in kv.placement().items() if "cut" in keys]
            with pytest.raises(
                UsageError, match="needs whole keys, but init split 'cut' into parts"
            ):
                kv.set_optimizer(optimizer.create("lamb"))
            with pytest.raises(OptimizerNotSet):
                kv.current_optimizer()
            kv.delete("cut")
            kv.set_optimizer(optimizer.create("lamb"))
            return servers, kv.current_optimizer()

        for _, used in workers.run(script):
            assert used == optimizer.create("lamb")


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_workers_that_do_different_things_together_all_hear_of_it(num_workers: int) -> None:
    """Also those that come when the others know already."""
    with Workers("dist_sync", num_workers, 1) as workers:
        come: list[threading.Event] = [threading.Event() for _ in range(num_workers)]

        def script(kv: KVStore) -> str:
            kv.init(["a", "b"], [np.ones(3), np.ones(3)])
            kv.barrier()
            if kv.rank >= 2:
                come[kv.rank - 1].wait(LIMIT_S)
            with pytest.raises(UsageError, match="same order") as caught:
                kv.delete("ab"[kv.rank % 2])
            come[kv.rank].set()
            kv.barrier()
            kv.delete(["a", "b"])
            return str(caught.value)

        for sentence in workers.run(script):
            assert "delete(['a'])" in sentence
            assert "delete(['b'])" in sentence
            first, second = sentence.split(", but ")
            assert first.split()[:2] != second.split()[:2]


@pytest.mark.parametrize("kind", DIST)
def test_values_that_servers_cannot_take_are_an_error_on_all_workers(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait for rank 0's ``init``; the key can be made anew afterwards."""
    made = dense.Arena

    class TooSmall(made):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, lane: Any, entries: Any, *rest: Any) -> None:
            if entries[0].key == "v":
                raise MemoryError("the server is full")
            super().__init__(store, lane, entries, *rest)

    with Workers(kind, **PARTS) as workers:
        ready(workers)
        monkeypatch.setattr(dense, "Arena", TooSmall)

        def script(kv: KVStore) -> None:
            # Rank 1 first, so that it waits.
            if kv.rank == 0:
                asked.wait(LIMIT_S)
                with pytest.raises(RemoteError, match="the server is full"):
                    kv.init(["u", "v"], [ONES, ONES])
            else:
                with pytest.raises(RemoteError, match="the server is full"):
                    kv.init(["u", "v"], [ONES, ONES])
            assert kv.keys() == ["w"]

        def again(kv: KVStore) -> Any:
            kv.init(["u", "v"], [np.zeros(3, np.float32), np.zeros(LARGE)])
            assert kv.info("v").generation == 1
            return grown(kv, "v")

        asked = threading.Event()
        assert workers.cluster is not None
        handlers = workers.cluster.scheduler.customers._handlers
        directory = handlers[DIRECTORY_APP]

        def noting(incoming: Incoming) -> None:
            directory(incoming)
            if rank_of(incoming.sender) == 1 and incoming.head == DirectoryCall.DECLARE:
                asked.set()

        monkeypatch.setitem(handlers, DIRECTORY_APP, noting)
        workers.run(script)
        monkeypatch.undo()
        for value in workers.run(again):
            np.testing.assert_array_equal(value, np.full(LARGE, 2.0))


def test_loading_gives_every_worker_the_optimizer_of_the_file(tmp_path: Any) -> None:
    """Else their next ``set_optimizer_params`` would start from different numbers."""
    source = kvstore.create("local")
    source.set_optimizer(optimizer.create("sgd", learning_rate=0.5, momentum=0.9))
    source.init("w", np.zeros(LARGE))
    source.save_checkpoint(tmp_path)
    with Workers("dist_sync", 3, 2, **PARTS) as workers:

        def script(kv: KVStore) -> Any:
            kv.set_optimizer(optimizer.create("sgd", learning_rate=0.1))
            kv.load_checkpoint(tmp_path)
            kv.set_optimizer_params(wd=0.125)
            return kv.current_optimizer()

        expected = optimizer.create("sgd", learning_rate=0.5, momentum=0.9, wd=0.125)
        assert workers.run(script) == [expected] * 3


def test_threads_of_one_worker_may_call_at_the_same_time(workers: Workers) -> None:
    """Not a misuse; beside all the others, the one that is none."""

    def script(kv: KVStore) -> Any:
        with ThreadPoolExecutor(4) as threads:
            keys = [f"k{n}" for n in range(8)]
            kv.init(keys, [np.zeros(LARGE)] * 8)
            for _ in range(3):
                list(threads.map(lambda key: kv.push(key, ONES), keys))
        kv.wait()
        kv.barrier()
        return [float(value[0]) for value in kv.pull(keys)]

    assert workers.run(script)[0] == [3.0 * workers.stores[0].num_workers] * 8


def test_a_push_to_a_key_that_another_worker_deletes_is_settled_or_refused() -> None:
    with Workers("dist_async", **PARTS) as workers:
        ready(workers)

        def script(kv: KVStore) -> None:
            kv.push("w", ONES)
            kv.delete("w")
            with pytest.raises(UnknownKeyError):
                kv.push("w", ONES)
            kv.init("w", np.zeros(LARGE))

        workers.run(script)
        assert workers.run(grown)[0][0] == 2.0
