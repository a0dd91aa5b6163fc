"""What a call hands to the data plane: which arrays are sent as they lie, and which are copied."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.arrays.keys import KeySpec
from kvstore.errors import UnknownKeyError
from kvstore.protocol.requests import KeyEntry
from kvstore.stores.arguments import KeyTable
from kvstore.stores.dist.plan import Bucket
from kvstore.stores.dist.transfer import DenseExchange, noting_versions
from pslite import Config
from pslite.errors import UsageError
from pslite.memory.heap import Heap
from pslite.plane import Piece, Transfer

CHUNK_BYTES = 4096
FLOAT = np.dtype(np.float32)
ELEMENTS = {"large": 2048, "a": 8, "b": 8, "c": 8}
"""``large`` has two parts that travel alone."""


class IOQueue:
    """Work for the I/O thread, which waits."""

    def __init__(self) -> None:
        self.commands: list[Callable[[], None]] = []

    def call(self, command: Callable[[], None]) -> None:
        self.commands.append(command)

    def call_later(self, delay_s: float, command: Callable[[], None]) -> None:
        self.commands.append(command)


class Node:
    """What an exchange asks of its node."""

    def __init__(self, *, shared: bool = False) -> None:
        self.config = Config(chunk_bytes=CHUNK_BYTES)
        self.io_queue = IOQueue()
        self.reporter = SimpleNamespace(progress=None)
        self.nearby = SimpleNamespace(
            is_on_one_machine=shared, may_share_with=lambda server: shared
        )

        def nothing(_: object) -> None:
            pass

        self.traffic = SimpleNamespace(add_owner=nothing, submit=self.submit, forget=nothing)
        self.sent: list[Transfer] = []
        self.heap = Heap(shared=shared)

    def submit(self, transfers: Sequence[Transfer]) -> None:
        self.sent += transfers

    def buffer(self, nbytes: int) -> np.ndarray[Any, Any]:
        return self.heap.buffer(nbytes)

    def shared_rows(
        self, pieces: Sequence[np.ndarray[Any, Any]]
    ) -> list[np.ndarray[Any, Any]] | None:
        return self.heap.rows(pieces)


def exchange_on(node: Node) -> DenseExchange:
    table = KeyTable()
    table.add({key: KeySpec((count,), FLOAT) for key, count in ELEMENTS.items()})
    made = DenseExchange(node, table, synchronous=False)  # type: ignore[arg-type]
    part = 1
    for key, count in ELEMENTS.items():
        servers = (0,) * -(-count * 4 // CHUNK_BYTES)
        made.add([KeyEntry(key, KeySpec((count,), FLOAT), part, CHUNK_BYTES, servers)])
        part += len(servers)
    return made


def keys(*names: str) -> Bucket:
    return Bucket(names, [KeySpec((ELEMENTS[name],), FLOAT) for name in names])


def memory(*names: str) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, 4 * ELEMENTS[name], np.uint8) for name in names]


def frames(transfer: Transfer) -> list[np.ndarray[Any, Any]]:
    return [np.frombuffer(frame, np.uint8) for frame in transfer.frames]


def is_sent_from(array: np.ndarray[Any, Any], node: Node) -> bool:
    sent = [frame for transfer in node.sent for frame in frames(transfer)]
    return any(np.shares_memory(array, frame) for frame in sent)


def test_neighbouring_parts_are_sent_as_they_lie_and_small_keys_are_gathered() -> None:
    node = Node()
    sources = memory("large", "a", "b")
    exchange_on(node).begin(keys("large", "a", "b"), sources, sources, 0, copy=False)
    assert [transfer.parts for transfer in node.sent] == [(1, 2), (3, 4)]
    assert [is_sent_from(source, node) for source in sources] == [True, False, False]
    sent = np.concatenate([frame for transfer in node.sent for frame in frames(transfer)])
    assert bytes(sent) == b"".join(map(bytes, sources))


@pytest.mark.parametrize("where", ["in another's source", "across its own source"])
def test_what_may_be_overwritten_meanwhile_is_copied(where: str) -> None:
    node = Node()
    names = ("large", "a")
    whole = np.zeros(3 * CHUNK_BYTES, np.uint8)
    sources = [whole[: 2 * CHUNK_BYTES], memory("a")[0]]
    targets = [memory("large")[0], whole[64:96]]
    if where == "across its own source":
        targets = [whole[CHUNK_BYTES:], memory("a")[0]]
    exchange_on(node).begin(keys(*names), sources, targets, 0, copy=False)
    assert not is_sent_from(whole, node)


def test_the_callers_array_goes_to_a_server_of_this_machine_only_where_it_can_be_read() -> None:
    for is_own in (True, False):
        node = Node(shared=True)
        large = node.buffer(8192) if is_own else np.empty(8192, np.uint8)
        exchange_on(node).begin(keys("large"), [large], None, 0, copy=False)
        for transfer in node.sent:
            transfer.make_frames()
        assert is_sent_from(large, node) == is_own


def test_values_that_lie_one_behind_the_other_are_one_frame_and_lie_still() -> None:
    node = Node(shared=True)
    names = ("large", "a", "b", "c")
    sizes = [4 * ELEMENTS[name] for name in names]
    whole = node.heap.buffer(8192 + 3 * 64, lasting=True)
    padded = [whole[:8192], *(whole[start : start + 32] for start in (8192, 8256, 8320))]
    tight = list(np.split(whole[: sum(sizes)], np.cumsum(sizes)[:-1]))
    for sources, is_own in ((tight, True), (padded, False)):
        node.sent.clear()
        exchange_on(node).begin(keys(*names), sources, None, 0, copy=False)
        (transfer,) = node.sent
        transfer.make_frames()
        assert len(transfer.frames) == 1
        assert is_sent_from(whole, node) == is_own


def test_much_is_copied_when_its_turn_comes_and_before_its_memory_may_be_overwritten() -> None:
    large, small = np.arange(8192, dtype=np.uint8), np.ones(32, np.uint8)
    other, overlapping = np.empty(8192, np.uint8), large[:32]
    for targets, later in (([large, small], True), ([other, overlapping], False)):
        node = Node(shared=True)
        exchange_on(node).begin(keys("large", "a"), [large, small], targets, 0, copy=False)
        assert [transfer.has_frames for transfer in node.sent] == [not later] * len(node.sent)
        for transfer in node.sent:
            transfer.make_frames()
        sent = np.concatenate([frame for transfer in node.sent for frame in frames(transfer)])
        assert bytes(sent) == bytes(large) + bytes(small)


def test_a_joined_push_frees_the_callers_arrays_at_once() -> None:
    for names in (("a",), ("a", "b"), ("large",)):
        node = Node()
        made = exchange_on(node)
        sources = memory(*names)
        expected = b"".join(map(bytes, sources))
        future = made.join(keys(*names), sources, None, 0)
        for source in sources:
            source[:] = 0
        for command in node.io_queue.commands:
            command()
        sent = [frame for transfer in node.sent for frame in frames(transfer)]
        assert bytes(np.concatenate(sent)) == expected
        for transfer in node.sent:
            transfer.done(None)
        assert future.done()
        assert future.error() is None


def test_calls_that_are_joined_carry_each_key_to_its_own_array() -> None:
    node = Node()
    made = exchange_on(node)
    names = ("c", "a", "b")
    sources, targets = memory(*names), [np.zeros(32, np.uint8) for _ in names]
    futures = [made.join(keys(name), [s], None, 0) for name, s in zip(names, sources, strict=True)]
    futures += [made.join(keys(name), None, [t], 0) for name, t in zip(names, targets, strict=True)]
    for command in node.io_queue.commands:
        command()
    (transfer,) = node.sent
    (frame,) = transfer.frames
    pieces = [Piece(frame, 32 * index, 32 * index + 32) for index in range(3)]
    assert transfer.parts == (5, 3, 4)
    transfer.deliver([0, 1, 2], pieces, [1, 1, 1])
    assert [bytes(target) for target in targets] == [bytes(source) for source in sources]
    assert all(future.done() for future in futures)


def test_calls_that_are_over_keep_no_values_and_no_arrays_of_the_caller() -> None:
    """A store remembers the last calls of each key, so as not to be too far ahead of others."""
    node = Node()
    made = exchange_on(node)
    for _ in range(2):  # the second time it is known to be a loop, and has staging
        before = len(node.sent)
        targets = [np.zeros(32, np.uint8) for _ in range(6)]
        alive = [weakref.ref(target) for target in targets]
        for name, target in zip("abcabc", targets, strict=True):
            made.join(keys(name), memory(name), None, 0)
            made.join(keys(name), None, [target], 0)
        made.send_joined()
        run(node)
        assert len(node.sent) > before
        assert before == 0 or node.heap.used_bytes > 0
        for transfer in node.sent[before:]:
            frame = np.zeros(sum(transfer.sizes), np.uint8).data
            count = len(transfer.parts)
            pieces = [Piece(frame, 32 * index, 32 * index + 32) for index in range(count)]
            transfer.deliver(range(count), pieces, [1] * count)
        del targets, target, transfer
        assert all(ref() is None for ref in alive)
    assert node.heap.used_bytes == 0
    assert made.unfinished() == []


def test_a_pull_right_behind_the_push_of_its_key_is_the_same_call() -> None:
    node = Node()
    made = exchange_on(node)
    target = np.zeros(32, np.uint8)
    push = made.join(keys("a"), memory("a"), None, 3)
    assert made.join(keys("a"), None, [target], 3) is push
    assert (made.counters["pushes"], made.counters["pulls"]) == (1, 1)
    assert made.unfinished() == [push, push]
    # Neither are: another pull of it, one of another priority, and one of another key.
    others = [
        made.join(keys("a"), None, [np.zeros(32, np.uint8)], 3),
        made.join(keys("b"), memory("b"), None, 0),
        made.join(keys("b"), None, [np.zeros(32, np.uint8)], 1),
        made.join(keys("c"), None, [np.zeros(32, np.uint8)], 1),
    ]
    assert len({id(future) for future in (push, *others)}) == 5
    made.send_joined()
    run(node)
    transfer = next(each for each in node.sent if 3 in each.parts)
    assert (transfer.push, transfer.pull) == (True, True)
    value = np.arange(32, dtype=np.uint8)
    index = transfer.parts.index(3)
    transfer.deliver([index], [Piece(value.data, 0, 32)], [1])
    assert bytes(target) == bytes(value)


def keys_sent(node: Node) -> list[int]:
    return [len(transfer.parts) for transfer in node.sent]


def run(node: Node) -> None:
    """What the I/O thread would do; commands may bring further ones."""
    for command in node.io_queue.commands:
        command()
    node.io_queue.commands.clear()


def test_calls_wait_for_each_other_until_somebody_waits_for_one_of_them() -> None:
    node = Node()
    made = exchange_on(node)
    made.join(keys("a"), memory("a"), None, 0)
    (look,) = node.io_queue.commands
    node.io_queue.commands.clear()
    look()  # it has come since the last look, so others may follow
    assert node.sent == []
    second = made.join(keys("b"), memory("b"), None, 0)
    assert second.flush is not None
    second.flush()
    run(node)
    assert keys_sent(node) == [2]
    run(node)
    assert keys_sent(node) == [2]


def test_a_batch_that_is_sent_before_the_io_thread_sees_it_needs_no_timer() -> None:
    node = Node()
    made = exchange_on(node)
    made.join(keys("a"), memory("a"), None, 0)
    made.send_joined()
    watch, take = node.io_queue.commands
    watch()
    assert node.io_queue.commands == [watch, take]
    take()
    assert keys_sent(node) == [1]


@pytest.mark.parametrize("is_queued", [True, False])
def test_an_interrupt_while_a_batch_is_sent_loses_and_doubles_no_call(
    is_queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node()
    made = exchange_on(node)
    made.join(keys("a"), memory("a"), None, 0)

    def interrupted(command: Callable[[], None]) -> None:
        if is_queued:
            node.io_queue.commands.append(command)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(node.io_queue, "call", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.send_joined()
    made.join(keys("b"), memory("b"), None, 0)
    made.send_joined()
    run(node)
    assert keys_sent(node) == [2]


def test_a_loop_that_is_run_again_sends_the_same_messages() -> None:
    node = Node()
    made = exchange_on(node)
    for _ in range(3):
        for _ in range(50):
            for name in ("a", "b", "c"):
                made.join(keys(name), memory(name), None, 0)
                made.join(keys(name), None, [np.zeros(32, np.uint8)], 0)
        made.send_joined()
        run(node)
    third = len(node.sent) // 3
    parts = [transfer.parts for transfer in node.sent]
    assert parts[:third] == parts[third : 2 * third] == parts[2 * third :]
    assert all(transfer.push and transfer.pull for transfer in node.sent)


def test_a_batch_that_never_stops_growing_goes_out_all_the_same() -> None:
    node = Node()
    made = exchange_on(node)
    made.join(keys("a"), memory("a"), None, 0)
    looks = 0
    while not node.sent:
        (look,) = node.io_queue.commands
        node.io_queue.commands.clear()
        look()
        looks += 1
        assert looks < 20
        if not node.sent:
            made.join(keys("a"), memory("a"), None, 0)
    assert looks > 1


def test_what_a_call_moves_is_counted() -> None:
    made = exchange_on(Node())
    made.begin(keys("large", "a"), memory("large", "a"), None, 0, copy=True)
    made.join(keys("b", "c"), None, memory("b", "c"), 0)
    assert dict(made.counters) == {
        "pushes": 1,
        "pulls": 1,
        "bytes_pushed": 8192 + 32,
        "bytes_pulled": 64,
    }
    assert len(made.unfinished(["b"])) == len(made.unfinished(["large"])) == 1


def test_a_key_that_is_gone_is_an_error_of_its_calls_alone() -> None:
    node = Node()
    made = exchange_on(node)
    both, other = made.buckets.of(("a", "b")), made.buckets.of(("c",))
    gone = made.join(both, memory("a", "b"), None, 0)
    stays = made.join(other, memory("c"), None, 0)
    made.remove(["a"])
    for command in node.io_queue.commands:
        command()
    assert "'a'" in str(gone.error())
    assert [transfer.parts for transfer in node.sent] == [(5,)]
    assert not stays.done()
    with pytest.raises(UnknownKeyError, match="'a' was deleted"):
        made.begin(both, None, memory("a", "b"), 0)


def test_calls_from_before_a_change_of_the_encoding_are_sent_and_later_ones_are_refused() -> None:
    node = Node()
    made = exchange_on(node)
    bucket = made.buckets.of(("a",))
    push = made.join(bucket, memory("a"), None, 0)
    with made.changing_coding():
        with pytest.raises(UsageError, match="set_gradient_compression"):
            made.join(bucket, memory("a"), None, 0)
        made.send_joined()
        run(node)
        (transfer,) = node.sent
        transfer.done(None)
        assert push.result(0) is None
        made.set_coding(None)
    assert made.buckets.of(("a",)) is not bucket
    made.begin(made.buckets.of(("a",)), None, memory("a"), 0)


def test_a_call_with_no_keys_is_over_at_once() -> None:
    made = exchange_on(Node())
    for call in (made.join(keys(), [], None, 0), made.begin(keys(), None, [], 0)):
        assert call.result(0) is None


def test_a_key_that_was_deleted_and_made_again_is_sent_to_its_new_parts() -> None:
    node = Node()
    made = exchange_on(node)
    stays = made.buckets.of(("c",))  # as a thread has it that was about to push
    for first_part in (3, 30):
        made.join(stays, memory("c"), None, 0)
        made.join(made.buckets.of(("a",)), memory("a"), None, 0)
        made.send_joined()
        run(node)
        assert [transfer.parts for transfer in node.sent] == [(5, first_part)]
        node.sent.clear()
        made.remove(["a"])
        made.add([KeyEntry("a", KeySpec((8,), FLOAT), 30, CHUNK_BYTES, (0,))])


def test_a_pull_that_a_thread_waits_for_joins_the_push_of_its_key_if_that_is_alone() -> None:
    node = Node()
    made = exchange_on(node)
    target = memory("a")
    push = made.join(keys("a"), memory("a"), None, 0)
    assert made.begin(keys("a"), None, target, 0) is push
    run(node)
    (transfer,) = node.sent
    assert (transfer.push, transfer.pull) == (True, True)
    assert (made.counters["pushes"], made.counters["pulls"]) == (1, 1)
    push.abandon()  # the waiting thread was interrupted
    before = bytes(target[0])
    transfer.deliver([0], [Piece(bytes(32), 0, 32)], [1])
    assert (push.done(), bytes(target[0])) == (True, before)


@pytest.mark.parametrize("case", ["another key", "another priority", "others wait", "versions"])
def test_other_pulls_that_a_thread_waits_for_are_sent_after_the_push(case: str) -> None:
    node = Node()
    made = exchange_on(node)
    push = made.join(keys("a"), memory("a"), None, 0)
    if case == "others wait":
        made.join(keys("c"), memory("c"), None, 0)
        push = made.join(keys("a"), memory("a"), None, 0)
    name = "b" if case == "another key" else "a"
    wrap = partial(noting_versions, {}) if case == "versions" else None
    priority = int(case == "another priority")
    pull = made.begin(keys(name), None, memory(name), priority, wrap=wrap)
    assert pull is not push
    run(node)
    assert [each.push for each in node.sent if each.pull] == [False]
