"""Which frames travel as descriptors, and what a receiver makes of descriptors."""

from __future__ import annotations

import os
import weakref
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pslite.errors import ProtocolError
from pslite.memory import sharing as module
from pslite.memory.heap import Heap
from pslite.memory.segment import HEADER_BYTES
from pslite.memory.sharing import MIN_SHARED_BYTES, PATIENCE_S, Sharing
from pslite.wire.messages import SegmentOffer, SegmentTaken

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd here")

MIB = 1 << 20


class Node:
    """One end. It knows the other by the name ``peer``, as a real one knows a uid."""

    def __init__(self, **heap: Any) -> None:
        self.heap = Heap(shared=True, **heap)
        self.sharing = Sharing(self.heap)

    def frame(self, nbytes: int, mark: int = 1) -> memoryview:
        buffer = self.heap.buffer(nbytes)
        buffer[:] = mark
        return buffer.data


def agree(sender: Node, receiver: Node) -> list[SegmentTaken]:
    """The receiver maps what the sender has to offer; both live in this process."""
    answers = []
    for offer in list(sender.sharing.offers("peer", 0.0)):
        answers.append(receiver.sharing.map("peer", os.getpid(), offer))
        sender.sharing.taken("peer", answers[-1])
    return answers


def across(sender: Node, receiver: Node, frames: list[Any]) -> list[bytes]:
    """The frames as the receiver sees them."""
    rest, shared = sender.sharing.describe("peer", frames)
    travelled = [bytes(frame) for frame in rest]
    return [bytes(f) for f in receiver.sharing.resolve("peer", shared, travelled)]


# -- descriptors --------------------------------------------------------------------------


def test_frames_in_taken_memory_travel_as_descriptors_and_the_rest_as_bytes() -> None:
    sender, receiver = Node(), Node()
    large, small, own = sender.frame(5000, 1), sender.frame(10, 2), b"o" * 5000
    agree(sender, receiver)

    rest, shared = sender.sharing.describe("peer", [own, large, small])

    assert rest == [own, small]
    assert shared == (1, 1, HEADER_BYTES, 5000)
    assert across(sender, receiver, [own, large, small]) == [own, b"\1" * 5000, b"\2" * 10]


@given(st.lists(st.sampled_from(["shared", "small", "own", "view"]), max_size=9))
def test_whatever_the_order_of_the_frames_they_arrive_as_they_were(kinds: list[str]) -> None:
    sender, receiver = Node(), Node()
    frames: list[Any] = []
    for mark, kind in enumerate(kinds):
        if kind == "own":
            frames.append(bytes([mark]) * 3000)
        elif kind == "view":
            frames.append(sender.frame(9000, mark)[100:4000])
        else:
            frames.append(sender.frame(3000 if kind == "shared" else 30, mark))
    agree(sender, receiver)
    sent, shared = sender.sharing.describe("peer", frames)
    assert len(shared) == 4 * sum(kind in ("shared", "view") for kind in kinds)
    assert len(sent) == sum(kind not in ("shared", "view") for kind in kinds)
    assert across(sender, receiver, frames) == [bytes(frame) for frame in frames]
    sender.sharing.close()
    receiver.sharing.close()


def test_the_receiver_reads_the_senders_memory_itself_and_cannot_write_it() -> None:
    sender, receiver = Node(), Node()
    buffer = sender.heap.buffer(5000)
    agree(sender, receiver)
    _, shared = sender.sharing.describe("peer", [buffer.data])
    (frame,) = receiver.sharing.resolve("peer", shared, [])
    buffer[:] = 9
    assert bytes(frame) == b"\t" * 5000
    assert frame.readonly


def test_until_a_segment_is_taken_its_frames_travel_as_bytes() -> None:
    sender, receiver = Node(), Node()
    frame = sender.frame(5000)
    assert sender.sharing.describe("peer", [frame]) == ([frame], ())
    assert not sender.sharing.reaches("peer")
    assert sender.sharing.may_reach("peer")
    offers = list(sender.sharing.offers("peer", 0.0))
    assert sender.sharing.describe("peer", [frame]) == ([frame], ())
    sender.sharing.taken("peer", SegmentTaken(1, False, "no"))
    assert sender.sharing.describe("peer", [frame]) == ([frame], ())
    assert not sender.sharing.reaches("peer")
    assert not sender.sharing.may_reach("peer")
    sender.sharing.taken("peer", receiver.sharing.map("peer", os.getpid(), offers[0]))
    assert sender.sharing.describe("peer", [frame])[0] == []
    assert sender.sharing.reaches("peer")
    assert sender.sharing.may_reach("peer")
    assert sender.sharing.describe("another", [frame])[1] == ()


def test_a_later_segment_is_used_when_it_is_taken_and_not_before() -> None:
    sender, receiver = Node(), Node()
    first = sender.frame(5000)
    agree(sender, receiver)
    second = sender.frame(2 * MIB, 2)

    rest, shared = sender.sharing.describe("peer", [second, first])

    assert rest == [second]
    assert shared == (1, 1, HEADER_BYTES, 5000)
    assert agree(sender, receiver) == [SegmentTaken(2, True, "")]
    assert across(sender, receiver, [second, first]) == [b"\2" * 2 * MIB, b"\1" * 5000]


def test_each_peer_is_offered_each_segment_once() -> None:
    sender = Node()
    sender.frame(10)
    assert [offer.segment for offer in sender.sharing.offers("one", 0.0)] == [1]
    assert list(sender.sharing.offers("one", 0.0)) == []
    kept = sender.frame(2 * MIB)
    assert [offer.segment for offer in sender.sharing.offers("one", 0.0)] == [2]
    assert [offer.segment for offer in sender.sharing.offers("two", 0.0)] == [1, 2]
    assert kept.nbytes == 2 * MIB


@pytest.mark.parametrize("nbytes", [MIN_SHARED_BYTES - 1, MIN_SHARED_BYTES])
def test_small_frames_are_not_worth_a_descriptor(nbytes: int) -> None:
    sender, receiver = Node(), Node()
    frame = sender.frame(nbytes)
    agree(sender, receiver)
    assert (sender.sharing.place_of(frame) is None) == (nbytes < MIN_SHARED_BYTES)


def test_other_memory_has_no_place() -> None:
    node = Node()
    buffer = node.heap.buffer(5000)
    assert node.sharing.place_of(buffer.data) == (1, HEADER_BYTES)
    assert node.sharing.place_of(buffer.view(np.float64).data) == (1, HEADER_BYTES)
    assert node.sharing.place_of(bytes(5000)) is None
    assert node.sharing.place_of(memoryview(bytes(5000))) is None
    assert node.sharing.place_of(buffer) is None  # an array; what travels are memoryviews
    # Strided: the van refuses it with a sentence, as it does any other.
    assert node.sharing.place_of(buffer[::2].data) is None


# -- agreeing -----------------------------------------------------------------------------


def offer_of(node: Node) -> SegmentOffer:
    node.frame(10)
    (offer,) = node.sharing.offers("peer", 0.0)
    return offer


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fd": 999}, "FileNotFoundError: "),
        ({"nonce": b""}, "OSError: "),
        ({"nbytes": 0}, "OSError: "),
        ({"nbytes": 2**63 - 1}, "OSError: "),
    ],
)
def test_what_cannot_be_mapped_is_answered_with_a_reason(
    change: dict[str, Any], reason: str
) -> None:
    sender, receiver = Node(), Node()
    offer = offer_of(sender)
    fields = {"segment": 1, "fd": offer.fd, "nbytes": offer.nbytes, "nonce": offer.nonce}
    answer = receiver.sharing.map("peer", os.getpid(), SegmentOffer(**{**fields, **change}))
    assert not answer.taken
    assert answer.segment == 1
    assert answer.reason.startswith(reason)
    with pytest.raises(ProtocolError, match="not mapped"):
        receiver.sharing.resolve("peer", (0, 1, HEADER_BYTES, 10), [])


def test_a_peer_can_make_a_node_map_so_many_segments_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_SEGMENTS", 3)
    sender, receiver = Node(), Node()
    offer = offer_of(sender)
    answers = [
        receiver.sharing.map(
            "peer", os.getpid(), SegmentOffer(number, offer.fd, offer.nbytes, offer.nonce)
        )
        for number in range(1, 6)
    ]
    assert [answer.taken for answer in answers] == [True, True, True, False, False]
    assert answers[-1].reason == "3 segments are mapped already"


def test_a_peer_that_is_forgotten_gets_bytes_and_what_was_read_from_it_stays() -> None:
    sender, receiver = Node(), Node()
    frame = sender.frame(5000)
    agree(sender, receiver)
    _, shared = sender.sharing.describe("peer", [frame])
    (kept,) = receiver.sharing.resolve("peer", shared, [])

    receiver.sharing.forget("peer")
    sender.sharing.forget("peer")

    assert not sender.sharing.reaches("peer")
    assert sender.sharing.describe("peer", [frame]) == ([frame], ())
    with pytest.raises(ProtocolError, match="not mapped"):
        receiver.sharing.resolve("peer", shared, [])
    assert bytes(kept) == b"\1" * 5000
    receiver.sharing.forget("nobody")


def test_another_thread_unmaps_the_memory_of_a_peer_that_is_forgotten() -> None:
    """A standby that takes a place would otherwise wait until its server's memory is free."""
    sender, receiver = Node(), Node()
    sender.frame(5000)
    agree(sender, receiver)
    (window,) = receiver.sharing._windows["peer"].values()
    unmapped_by = SimpleQueue[str]()
    weakref.finalize(window.memory.obj, lambda: unmapped_by.put(current_thread().name))
    del window

    receiver.sharing.forget("peer")

    assert unmapped_by.get(timeout=30) == "unmap"


def test_a_process_that_can_start_no_thread_unmaps_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have as many as it may have, or the interpreter is ending."""
    sender, receiver = Node(), Node()
    sender.frame(5000)
    agree(sender, receiver)
    (window,) = receiver.sharing._windows["peer"].values()
    unmapped = weakref.ref(window.memory.obj)
    del window

    def fail(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", fail)
    receiver.sharing.forget("peer")

    assert unmapped() is None


def test_at_the_end_everything_is_forgotten_and_memory_in_use_stays() -> None:
    sender, receiver = Node(), Node()
    frame = sender.frame(5000)
    agree(sender, receiver)
    sender.sharing.close()
    receiver.sharing.close()
    assert not sender.sharing.reaches("peer")
    assert list(sender.sharing.offers("peer", 0.0)) == []
    assert bytes(frame) == b"\1" * 5000


# -- malformed descriptors ----------------------------------------------------------------

numbers = st.one_of(
    st.integers(-3, 6), st.sampled_from([4096, 5000, MIB - 1, MIB, MIB + 1, -(2**63), 2**63 - 1])
)


@given(st.lists(numbers, max_size=12), st.integers(0, 3))
def test_malformed_descriptors_are_protocol_errors_and_nothing_else(
    shared: list[int], num_frames: int
) -> None:
    frames = [bytes([index]) for index in range(num_frames)]
    try:
        resolved = receiver_of_one_segment().resolve("peer", tuple(shared), frames)
    except ProtocolError:
        return
    assert len(resolved) == num_frames + len(shared) // 4
    for at in range(0, len(shared), 4):
        index, segment, offset, nbytes = shared[at : at + 4]
        assert segment == 1
        assert offset >= 0
        assert offset + nbytes <= MIB
        assert len(resolved[index]) == nbytes
    indices = shared[::4]
    rest = [frame for index, frame in enumerate(resolved) if index not in indices]
    assert rest == frames


_kept: list[Node] = []


def receiver_of_one_segment() -> Sharing:
    if not _kept:
        _kept.extend((Node(), Node()))
        _kept[0].frame(10)
        agree(*_kept)
    return _kept[1].sharing


@pytest.fixture(autouse=True)
def _closed() -> Any:
    yield
    for node in _kept:
        node.sharing.close()
    _kept.clear()


@pytest.mark.parametrize(
    ("shared", "sentence"),
    [
        ((0, 1, 4096), "4 numbers"),
        ((0, 2, 4096, 10), "not mapped"),
        ((0, 1, MIB - 9, 10), "not mapped"),
        ((0, 1, -1, 10), "not mapped"),
        ((0, 1, 4096, -1), "not mapped"),
        ((0, 1, 2**63 - 1, 2**63 - 1), "not mapped"),
        ((1, 1, 4096, 10), "out of order"),
        ((-1, 1, 4096, 10), "out of order"),
        ((0, 1, 4096, 10, 0, 1, 4096, 10), "out of order"),
        ((0, 1, 4096, 10, 2, 1, 4096, 10), "out of order"),
    ],
)
def test_each_rule_of_descriptors_has_its_sentence(shared: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        receiver_of_one_segment().resolve("peer", shared, [])


def test_a_descriptor_of_somebody_elses_memory_is_refused() -> None:
    """A peer can only name what it offered itself."""
    receiver = receiver_of_one_segment()
    assert len(receiver.resolve("peer", (0, 1, 4096, 10), [])) == 1
    with pytest.raises(ProtocolError, match="not mapped"):
        receiver.resolve("another", (0, 1, 4096, 10), [])


def test_values_wait_for_a_peer_that_is_asked_to_map_memory_but_not_for_long() -> None:
    sender = Node()
    sender.heap.buffer(4096)
    (offer,) = sender.sharing.offers("peer", 10.0)
    assert sender.sharing.awaits("peer", 10.0)
    assert not sender.sharing.awaits("another", 10.0)
    assert not sender.sharing.awaits("peer", 10.0 + PATIENCE_S)
    sender.sharing.taken("peer", SegmentTaken(offer.segment, False, "no"))
    assert not sender.sharing.awaits("peer", 10.0)
