"""The page of errors names every class, and its sentences are those that users really see."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from docs_blocks import ROOT

import kvstore
import kvstore.errors
import pslite
import pslite.errors
from kvstore.arrays.dtypes import dtype_of
from kvstore.arrays.keys import KeySpec
from kvstore.checkpoint.directory import write_checkpoint
from kvstore.checkpoint.optimizer_states import Content, SavedPiece
from kvstore.launch.job.report import EndedProcess, failure_block
from kvstore.launch.job.restarts import Exit
from kvstore.launch.plan import ProcessSpec
from kvstore.launch.run.background import LauncherExit, LauncherOutput, first_cause
from kvstore.launch.run.call_files import WorkerAnswer, value_of
from kvstore.server import install
from kvstore.stores.dist.store import create_dist
from pslite.errors import PSError
from pslite.node.surveyor import explained
from pslite.protocol.collective import CallKey, CallMatcher, CollectiveCall, GroupKey, Refuse
from pslite.testing.inproc import InprocNetwork, InprocVan
from pslite.wire.survey import Wait

PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
CLASSES = {
    name: cls
    for module in (pslite.errors, kvstore.errors)
    for name, cls in inspect.getmembers(module, inspect.isclass)
    if issubclass(cls, PSError)
}
BASES = {"PSError", "PeerError"}
LIMIT_S = 20.0


def sections() -> dict[str, str]:
    """What the page says about each class."""
    found = re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return dict(found)


def sentences(name: str) -> list[str]:
    """The quotations in the section of a class, each in one line."""
    quoted = re.findall(r"(?:^> .*\n)+", sections()[name], re.MULTILINE)
    return [" ".join(re.sub(r"^> ", "", text, flags=re.MULTILINE).split()) for text in quoted]


@contextlib.contextmanager
def cluster() -> Iterator[tuple[list[kvstore.KVStore], list[pslite.Postoffice]]]:
    """Two workers' sides of a ``dist_sync`` store, in this process, and the servers."""
    network = InprocNetwork()

    def start(role: str, rank: int) -> pslite.Postoffice:
        config = pslite.Config(
            role=role,
            task_id=rank,
            num_workers=2,
            num_servers=1,
            root_uri="127.0.0.1",
            root_port=9091,
            lost_after_s=0.2,
        )
        return pslite.start(
            config,
            make_van=lambda uid: InprocVan(network, uid),
            prepare=None if role == "worker" else install,
            write=lambda line: None,
            wait=False,
        )

    nodes = [start("scheduler", 0), start("server", 0), start("worker", 0), start("worker", 1)]
    try:
        for node in nodes:
            node.ready.result(LIMIT_S)
        yield [create_dist("dist_sync", "dist_sync", node=node) for node in nodes[2:]], nodes[1:2]
    finally:
        for node in reversed(nodes):
            node.close(goodbye=False)


def two_optimizers() -> None:
    with cluster() as (workers, _):
        workers[0].set_optimizer(kvstore.optimizer.SGD(learning_rate=0.1))
        workers[1].set_optimizer(kvstore.optimizer.SGD(learning_rate=0.2))


def flipped_bit() -> None:
    kv = kvstore.create("local")
    kv.set_optimizer(kvstore.optimizer.create("adam"))
    kv.init("w", np.zeros(3, np.float32))
    kv.save_checkpoint("checkpoint")
    (states,) = Path("checkpoint").glob("states-*")
    content = states.read_bytes()
    states.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    kv.load_checkpoint("checkpoint")


def two_saves_at_once() -> None:
    contents = {"w": Content(KeySpec((3,), np.dtype("f4")), 1)}

    def meanwhile() -> Iterator[SavedPiece]:
        kvstore.create("local").save_checkpoint("checkpoint")
        yield SavedPiece("w", 0, np.zeros(3, np.float32), [], 0)

    write_checkpoint("checkpoint", contents, None, meanwhile())


def states_in_a_directory() -> None:
    kv = kvstore.create("local")
    kv.set_optimizer(SGD())
    kv.save_optimizer_states(".")


def lost_server() -> None:
    with cluster() as (workers, servers):
        servers[0].close(goodbye=False)
        workers[0].stats()


def failing_server_code() -> None:
    """As a server describes what its code raised, and a worker raises it."""
    try:
        _ = 1 / 0
    except ZeroDivisionError as error:
        kind, text = pslite.errors.describe(error)
    raise pslite.errors.rebuild(kind, text)


def closed() -> None:
    kv = kvstore.create("local")
    kv.close()
    kv.keys()


def with_w(act: Callable[[Any], object]) -> Callable[[], object]:
    """``act`` on a store that has the key w."""

    def run() -> None:
        kv = kvstore.create("local")
        kv.init("w", np.zeros(3, np.float32))
        act(kv)

    return run


def nearly_a_key() -> None:
    kv = kvstore.create("local")
    kv.init("weight", np.zeros(3, np.float32))
    kv.pull("wieght")


def killed_worker() -> None:
    lines = ["loading", "epoch 0"]
    spec = ProcessSpec("worker", 1, ("python",), {})
    ended = EndedProcess(spec, 4711, Exit(0, -9, 2.0, 1), lines)
    output = LauncherOutput()
    for line in failure_block([ended], [], "/logs", start_s=0.0).splitlines():
        output.show(line, is_error=True)
    raise first_cause({}, LauncherExit(137, output.report(without="/logs")))


def without_cupy() -> None:
    try:
        import cupy
    except ImportError:
        kvstore.gpu(0)
    else:
        pytest.skip(f"CuPy {cupy.__version__} is installed")


SGD = kvstore.optimizer.SGD


#: What leads to the sentences of each section, in their order.
def deadlock() -> None:
    """What the scheduler makes of two workers' calls and of a server's round."""
    calls = {
        0: ["pull (train.py:31) for the servers' answer for 'w'"],
        1: [
            "init (train.py:24) for worker 0 (or the lowest rank that is left) to call init for 'b'"
        ],
    }
    raise pslite.errors.DeadlockError(explained(calls, [Wait("key 'w'", 7, ("worker 1",), 11.0)]))


def different_calls() -> None:
    """What a server makes of the first calls of two workers."""
    matcher: CallMatcher[int] = CallMatcher()
    key, shapes = CallKey(GroupKey("", (0, 1), 0), "", 1), ((4,),)
    matcher.arrive(key, 0, CollectiveCall("all_reduce", "sum", "float32", shapes), 0, 0)
    (refusal,) = matcher.arrive(key, 1, CollectiveCall("broadcast", "", "float32", shapes, 0), 0, 1)
    assert isinstance(refusal, Refuse)
    raise refusal.error


MISTAKES: dict[str, list[Callable[[], object]]] = {
    "UsageError": [lambda: kvstore.protocol.commands.run_command(17, "")],
    "ConfigError": [
        lambda: pslite.Config.from_env({"PS_ROUND_WINDOW": "two"}),
        lambda: pslite.Config(role="worker", num_workers=2).checked_for_cluster(),
    ],
    "ProtocolError": [lambda: dtype_of("<q4")],
    "RemoteError": [failing_server_code],
    "NodeLostError": [lost_server],
    "MismatchError": [different_calls],
    "DeadlockError": [deadlock],
    "DeadlineError": [lambda: pslite.Future("the servers' answer for 'w'").result(0.01)],
    "ClosedError": [closed],
    "JobFailed": [lambda: kvstore.run(max, workers=1, servers=1, python="/no/python")],
    "WorkerFailed": [killed_worker, lambda: value_of(3, WorkerAnswer("value", b"no pickle"))],
    "UnknownTypeError": [lambda: kvstore.create("dist_snyc")],
    "KeyTypeError": [with_w(lambda kv: kv.pull(3)), with_w(lambda kv: kv.pull(1.5))],
    "UnknownKeyError": [with_w(lambda kv: kv.pull("v")), nearly_a_key],
    "DuplicateKeyError": [with_w(lambda kv: kv.init("w", np.zeros(3)))],
    "ArgumentTypeError": [with_w(lambda kv: kv.push("w", 3.0))],
    "ArgumentValueError": [with_w(lambda kv: kv.is_capable("sparse"))],
    "ValueMismatchError": [with_w(lambda kv: kv.push("w", np.zeros(3)))],
    "OptimizerNotSet": [with_w(lambda kv: kv.optimizer_params())],
    "OptimizerMismatch": [two_optimizers],
    "UnknownOptimizerError": [lambda: kvstore.optimizer.create("sdg")],
    "OptimizerParameterError": [
        lambda: SGD(learning_rate="fast"),  # type: ignore[arg-type]
        lambda: kvstore.optimizer.create("sgd", lr=0.1),
        lambda: kvstore.optimizer.create("adam", beta1=1),
    ],
    "CheckpointError": [
        lambda: kvstore.create("local").load_checkpoint("checkpoint"),
        lambda: kvstore.create("local").load_checkpoint("."),
        flipped_bit,
        two_saves_at_once,
        states_in_a_directory,
    ],
    "NotSupportedError": [
        lambda: kvstore.create("teststore").pushpull("w", kvstore.RowSparseArray.zeros((3, 2))),
        lambda: SGD().set_learning_rate(0.1),
    ],
    "MissingDependencyError": [without_cupy],
}


def test_a_range_is_promised_for_no_number_that_is_taken_without_one() -> None:
    assert SGD(learning_rate=-5.0, momentum=7.0, wd=-1.0).learning_rate == -5.0


def test_every_error_has_a_section_and_every_section_an_error() -> None:
    assert sorted(sections()) == sorted(CLASSES)
    assert sorted(MISTAKES) == sorted(CLASSES.keys() - BASES)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_section_says_what_to_do(name: str) -> None:
    assert "**What to do.**" in sections()[name]


@pytest.mark.parametrize("name", sorted(MISTAKES))
def test_the_sentences_are_those_of_the_errors(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = sentences(name)
    assert len(shown) == len(MISTAKES[name])
    for sentence, mistake in zip(shown, MISTAKES[name], strict=True):
        with pytest.raises(CLASSES[name]) as raised:
            mistake()
        assert type(raised.value) is CLASSES[name]
        pattern = ".*".join(map(re.escape, sentence.split("...")))
        text = " ".join(str(raised.value).split())
        assert re.fullmatch(pattern, text), f"the page: {sentence}\nthe error: {text}"
