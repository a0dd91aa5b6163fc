"""The conversations of a node: what is acknowledged, repeated, counted and dropped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pslite.errors import PSError
from pslite.ids import NodeInfo
from pslite.memory.heap import Heap
from pslite.memory.sharing import Sharing
from pslite.node.links import MAX_STRANGERS, REPEATED, TELL_AFTER_S, TELL_BYTES, Delivery, Links
from pslite.protocol.send_window import FIRST_BYTES
from pslite.van.base import Buffer, InTransit, Received, Van, VanEvent
from pslite.wire.base import Message
from pslite.wire.codec import VERSION, Envelope, decode, encode, pack_value
from pslite.wire.messages import Accepted, Beat, Leave, Refused, Register, Request, StatusQuestion

CREDIT_BYTES = 64 << 20


class Wire(Van):
    """A van that only remembers what was sent."""

    def __init__(self, uid: str) -> None:
        self.uid = uid
        self.sent: list[tuple[str, list[bytes]]] = []
        self.on_the_way = 0
        self.is_connected = True

    def in_transit(self, peer: str) -> InTransit:
        return InTransit(self.on_the_way, self.on_the_way if self.is_connected else None)

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        self.sent.append((peer, [bytes(frame) for frame in frames]))

    def bind(self, host: str, port: int, *, listen_fd: int | None = None) -> int:
        raise NotImplementedError

    def connect(self, peer: str, address: str) -> None:
        raise NotImplementedError

    def disconnect(self, peer: str) -> None:
        raise NotImplementedError

    def poll(self, timeout_s: float | None) -> list[VanEvent]:
        raise NotImplementedError

    def wake(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Node:
    """Links over a ``Wire``."""

    def __init__(self, uid: str, incarnation: int, job: str = "job") -> None:
        self.wire = Wire(uid)
        self.traced: list[tuple[str, str, Message]] = []
        self.links = Links(
            self.wire,
            Sharing(Heap(shared=False)),
            job=job,
            incarnation=incarnation,
            resend_timeout_s=1.0,
            credit_bytes=CREDIT_BYTES,
            trace=lambda way, peer, message, _: self.traced.append((way, peer, message)),
        )

    def say(self, peer: Node, message: Message, *frames: Any, now: float = 0.0) -> None:
        self.links.send(peer.wire.uid, message, frames, 1, now)

    def transmissions(self) -> list[list[bytes]]:
        """What was sent since the last call."""
        sent, self.wire.sent = self.wire.sent, []
        return [frames for _, frames in sent]

    def messages(self) -> list[Message]:
        return [decode(frames).message for frames in self.transmissions()]

    def hear(self, peer: Node, frames: Sequence[bytes]) -> Delivery | None:
        return self.links.receive(Received(peer.wire.uid, list(frames)), 0.0)


def pass_on(sender: Node, receiver: Node) -> list[Message]:
    """Let everything arrive that was sent; returns what the receiver's owner is given."""
    deliveries = [receiver.hear(sender, frames) for frames in sender.transmissions()]
    return [delivery.message for delivery in deliveries if delivery is not None]


@pytest.fixture
def pair() -> tuple[Node, Node]:
    return Node("alice", 101), Node("bob", 202)


REQUEST = Request(7, 0, 1, 2, b"body")
LARGE = bytes(10_000)


# -- delivery -----------------------------------------------------------------------------


def test_a_message_arrives_with_its_sender_its_epoch_and_its_payload(
    pair: tuple[Node, Node],
) -> None:
    alice, bob = pair
    alice.links.send("bob", REQUEST, (b"one", b"two"), 5, 0.0)
    (frames,) = alice.transmissions()
    assert bob.hear(alice, frames) == Delivery("alice", 101, 5, REQUEST, [b"one", b"two"])


def test_a_transmission_that_comes_twice_is_delivered_once(pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.say(bob, REQUEST)
    (frames,) = alice.transmissions()
    deliveries = [bob.hear(alice, frames) for _ in range(3)]
    assert [delivery is not None for delivery in deliveries] == [True, False, False]
    assert bob.links.dropped[REPEATED] == 2


def test_what_is_not_accepted_in_time_is_sent_again(pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.say(bob, REQUEST, b"payload")
    (lost,) = alice.transmissions()
    due = alice.links.flush(1, 0.0)
    alice.links.flush(1, 0.9)
    too_early = alice.transmissions()
    alice.links.flush(1, 1.0)
    assert (due, too_early, pass_on(alice, bob)) == (1.0, [], [REQUEST])
    assert lost[1:] == [b"payload"]


def test_an_acceptance_frees_what_was_kept(pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.say(bob, REQUEST, LARGE)
    under_way = (alice.links.unaccepted_bytes("bob"), alice.links.unaccepted())
    pass_on(alice, bob)
    bob.links.flush(1, 0.0, at_once=True)
    pass_on(bob, alice)
    assert under_way == (10_000, {"bob": (1, 10_000)})
    assert (alice.links.unaccepted_bytes("bob"), alice.links.unaccepted()) == (0, {})
    assert (alice.links.everything_accepted(), alice.links.flush(1, 0.0)) == (True, math.inf)


def test_there_is_room_for_a_message_while_little_waits_and_credits_are_left(
    pair: tuple[Node, Node],
) -> None:
    alice, bob = pair
    room = [alice.links.has_room("bob", 0.0)]
    alice.say(bob, REQUEST, bytes(CREDIT_BYTES - 1))
    for alice.wire.on_the_way in (FIRST_BYTES - 1, FIRST_BYTES):
        room.append(alice.links.has_room("bob", 0.0))
    alice.wire.on_the_way = 0
    alice.say(bob, REQUEST, LARGE)
    room.append(alice.links.has_room("bob", 0.0))
    pass_on(alice, bob)
    bob.links.flush(1, 0.0, at_once=True)
    pass_on(bob, alice)
    alice.wire.on_the_way = CREDIT_BYTES  # a wrong number: all is accepted
    room.append(alice.links.has_room("bob", 0.0))
    assert room == [True, True, False, False, True]


def test_without_a_connection_what_is_not_accepted_waits(pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.wire.is_connected = False
    alice.say(bob, REQUEST, bytes(FIRST_BYTES - 1))
    room = [alice.links.has_room("bob", 0.0)]
    alice.say(bob, REQUEST, LARGE)
    room.append(alice.links.has_room("bob", 0.0))
    assert room == [True, False]


def test_at_the_end_only_acceptances_are_sent(pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.say(bob, REQUEST)
    alice.transmissions()
    alice.links.flush(1, 100.0, at_once=True)
    assert alice.transmissions() == []


def test_an_answer_carries_the_acceptance_so_none_is_sent_beside_it(
    pair: tuple[Node, Node],
) -> None:
    alice, bob = pair
    alice.say(bob, REQUEST)
    pass_on(alice, bob)
    bob.say(alice, Leave())
    bob.links.flush(1, 0.0, at_once=True)
    assert pass_on(bob, alice) == [Leave()]
    assert alice.links.everything_accepted()


def test_an_acceptance_waits_a_moment_for_a_message_that_carries_it(
    pair: tuple[Node, Node],
) -> None:
    alice, bob = pair
    alice.say(bob, REQUEST)
    pass_on(alice, bob)
    assert bob.links.flush(1, 10.0) == 10.0 + TELL_AFTER_S
    assert bob.transmissions() == []
    assert bob.links.flush(1, 10.0 + TELL_AFTER_S) == math.inf
    pass_on(bob, alice)
    assert alice.links.everything_accepted()


def test_an_acceptance_of_much_is_told_at_once(pair: tuple[Node, Node]) -> None:
    """The sender's credits depend on it."""
    alice, bob = pair
    alice.say(bob, REQUEST, bytes(TELL_BYTES))
    pass_on(alice, bob)
    bob.links.flush(1, 10.0)
    pass_on(bob, alice)
    assert alice.links.unaccepted_bytes("bob") == 0
    alice.say(bob, REQUEST)
    pass_on(alice, bob)
    bob.links.flush(1, 10.0)
    assert bob.transmissions() == []


def test_signs_of_life_are_neither_numbered_nor_accepted_nor_delivered(
    pair: tuple[Node, Node],
) -> None:
    alice, bob = pair
    alice.say(bob, Beat())
    delivered = pass_on(alice, bob)
    bob.links.flush(1, 0.0, at_once=True)
    assert (delivered, bob.transmissions(), alice.links.flush(1, 0.0)) == ([], [], math.inf)


def test_a_reconnection_sends_everything_under_way_at_once(pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.say(bob, REQUEST)
    alice.transmissions()
    alice.links.reconnected("bob", 0.1)
    alice.links.reconnected("carol", 0.1)
    assert pass_on(alice, bob) == [REQUEST]


def test_small_payloads_do_not_count_as_under_way(pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.say(bob, REQUEST, bytes(100))
    assert alice.links.unaccepted_bytes("bob") == 0
    assert alice.links.unaccepted_bytes("carol") == 0


def test_payloads_of_wider_elements_count_in_bytes(pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.say(bob, REQUEST, np.zeros((100, 50), np.float32).data)
    assert alice.links.unaccepted_bytes("bob") == 100 * 50 * 4


def test_bytes_are_counted_as_often_as_they_travel_headers_too(pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.say(bob, REQUEST, LARGE)
    alice.links.flush(1, 9.0)
    transmissions = alice.transmissions()
    travelled = sum(len(frame) for frames in transmissions for frame in frames)
    assert len(transmissions) == 2
    assert travelled > 2 * len(LARGE)
    assert alice.links.byte_counts() == {"bob": (travelled, 0)}
    for frames in transmissions:
        bob.hear(alice, frames)
    assert bob.links.byte_counts() == {"alice": (0, travelled)}
    bob.hear(alice, [b"nothing that alice says", LARGE])
    assert bob.links.byte_counts() == {"alice": (0, travelled)}


def test_everything_accepted_can_be_asked_of_some_peers(pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.say(bob, REQUEST)
    states = [alice.links.everything_accepted(peers) for peers in (None, ["bob"], ["carol"], [])]
    assert states == [False, False, True, True]


def test_verbose_lines_show_every_message_in_its_direction(pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.say(bob, REQUEST)
    pass_on(alice, bob)
    assert (alice.traced, bob.traced) == ([("=>", "bob", REQUEST)], [("<=", "alice", REQUEST)])


def test_a_message_of_more_frames_than_a_peer_takes_is_refused_at_the_sender(
    pair: tuple[Node, Node],
) -> None:
    # Unrefused, it would be dropped there and sent again here, for ever.
    alice, bob = pair
    with pytest.raises(PSError):
        alice.say(bob, REQUEST, *([b"x"] * 65_536))
    assert alice.links.everything_accepted()


def test_a_message_that_cannot_be_encoded_leaves_no_trace(pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.say(bob, Leave())
    pass_on(alice, bob)
    with pytest.raises(PSError):
        bob.say(alice, Request(7, 0, 1, 2, bytes(16 << 20)))
    bob.links.flush(1, 0.0, at_once=True)
    acknowledged = bob.messages()
    bob.say(alice, REQUEST)
    assert (acknowledged, pass_on(bob, alice)) == ([Accepted()], [REQUEST])
    assert bob.links.flush(1, 0.0) == 1.0


# -- what is dropped ----------------------------------------------------------------------


@pytest.mark.parametrize("frames", [[b""], [b"GET / HTTP/1.1"], [b"\xc1" * 40, b"x"]])
def test_a_strangers_bytes_cost_a_counter_and_no_exception(
    pair: tuple[Node, Node], frames: list[bytes]
) -> None:
    _, bob = pair
    stranger = Node("stranger", 999)
    assert bob.hear(stranger, frames) is None
    assert list(bob.links.dropped.values()) == [1]
    assert bob.transmissions() == []


def test_another_version_is_dropped_by_name(pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    header = bytearray(encode(Envelope("job", 0, 101, 0, 1, 0, (), (), Beat())))
    header[1] = VERSION + 1
    assert bob.hear(alice, [bytes(header)]) is None
    assert dict(bob.links.dropped) == {"not a valid message of this protocol": 1}
    assert bob.links.last_malformed == (
        f"expected protocol version {VERSION}, got {VERSION + 1}; install the same version on all "
        "machines"
    )


def test_a_message_of_another_job_is_refused_and_its_sender_told_why() -> None:
    ours, theirs = Node("scheduler", 1, job="ours"), Node("worker", 2, job="theirs")
    theirs.say(ours, REQUEST)
    delivered = pass_on(theirs, ours)
    (refusal,) = pass_on(ours, theirs)
    assert (delivered, dict(ours.links.dropped)) == ([], {"another job": 1})
    assert isinstance(refusal, Refused)
    assert "this node does not belong to the job 'theirs'" in refusal.error


def test_a_refusal_does_not_tell_the_id_of_the_job() -> None:
    ours, theirs = Node("scheduler", 1, job="our secret"), Node("worker", 2, job="theirs")
    theirs.say(ours, REQUEST)
    pass_on(theirs, ours)
    (refusal,) = ours.transmissions()
    assert isinstance(decode(refusal).message, Refused)
    assert b"our secret" not in b"".join(refusal)


def test_a_node_without_a_job_id_takes_a_refusal_that_has_none() -> None:
    ours, nameless = Node("scheduler", 1, job="ours"), Node("worker", 2, job="")
    nameless.say(ours, REQUEST)
    pass_on(nameless, ours)
    assert [type(message) for message in pass_on(ours, nameless)] == [Refused]


def test_two_jobs_that_meet_do_not_refuse_each_others_refusals() -> None:
    ours, theirs = Node("scheduler", 1, job="ours"), Node("worker", 2, job="theirs")
    theirs.say(ours, REQUEST)
    pass_on(theirs, ours)
    pass_on(ours, theirs)
    assert (ours.transmissions(), theirs.transmissions()) == ([], [])


def test_a_refusal_of_another_job_opens_no_conversation_under_that_name() -> None:
    worker = Node("worker", 2, job="ours")
    theirs, ours = Node("scheduler", 1, job="theirs"), Node("scheduler", 3, job="ours")
    worker.say(theirs, REQUEST)
    pass_on(worker, theirs)
    refused = pass_on(theirs, worker)
    ours.say(worker, Leave())
    assert ([type(message) for message in refused], pass_on(ours, worker)) == ([Refused], [Leave()])


def test_a_message_for_the_process_that_was_here_before_is_dropped(
    pair: tuple[Node, Node],
) -> None:
    alice, bob = pair
    alice.say(bob, Leave())
    pass_on(alice, bob)
    bob.say(alice, REQUEST)
    (frames,) = bob.transmissions()
    restarted = Node("alice", 102)
    assert restarted.hear(bob, frames) is None
    assert dict(restarted.links.dropped) == {"addressed to an earlier process of this name": 1}


def test_another_process_under_a_known_name_is_not_listened_to(pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.say(bob, Leave())
    first = pass_on(alice, bob)
    restarted = Node("alice", 102)
    restarted.say(bob, REQUEST)
    assert (first, pass_on(restarted, bob)) == ([Leave()], [])
    assert dict(bob.links.dropped) == {"sent by another process with a known name": 1}


def test_a_node_that_was_declared_lost_is_neither_heard_nor_written_to(
    pair: tuple[Node, Node],
) -> None:
    alice, bob = pair
    alice.say(bob, REQUEST, LARGE)
    (frames,) = alice.transmissions()
    bob.say(alice, REQUEST)
    pass_on(bob, alice)
    alice.links.shut("bob")
    alice.say(bob, REQUEST)
    alice.links.flush(1, 100.0)
    bob.hear(alice, frames)
    bob.say(alice, Leave())
    alice.links.flush(1, 100.0, at_once=True)
    assert (alice.transmissions(), pass_on(bob, alice)) == ([], [])
    assert (alice.links.unaccepted_bytes("bob"), alice.links.everything_accepted()) == (0, True)
    assert dict(alice.links.dropped) == {"from a node that was declared lost": 1}


def test_to_a_node_that_said_goodbye_nothing_is_sent_again_but_it_may_still_repeat(
    pair: tuple[Node, Node],
) -> None:
    alice, bob = pair
    alice.say(bob, REQUEST, LARGE)
    alice.transmissions()
    bob.say(alice, Leave())
    (goodbye,) = bob.transmissions()
    alice.hear(bob, goodbye)
    alice.links.release("bob")
    alice.links.release("carol")
    alice.links.flush(1, 0.0, at_once=True)
    lost_acceptance = alice.messages()
    alice.links.flush(1, 100.0)
    alice.say(bob, REQUEST)
    assert (lost_acceptance, alice.transmissions()) == ([Accepted()], [])
    assert alice.links.everything_accepted()
    assert alice.hear(bob, goodbye) is None
    alice.links.flush(1, 0.0, at_once=True)
    pass_on(alice, bob)
    assert bob.links.everything_accepted()


# -- strangers ----------------------------------------------------------------------------


def test_conversations_with_strangers_are_kept_for_so_many_and_the_oldest_makes_room(
    pair: tuple[Node, Node],
) -> None:
    alice, bob = pair
    friend = Node("friend", 1)
    bob.links.know("friend")
    friend.say(bob, REQUEST)
    pass_on(friend, bob)
    bob.say(alice, REQUEST)  # whom we write to is no stranger
    alice.say(bob, REQUEST)
    pass_on(alice, bob)
    for number in range(MAX_STRANGERS + 100):
        stranger = Node(f"stranger{number}", 1000 + number)
        stranger.say(bob, REQUEST)
        assert pass_on(stranger, bob) == [REQUEST]
    assert len(bob.links._peers) == MAX_STRANGERS + 2
    assert {"friend", "alice"} < set(bob.links._peers)
    assert "stranger99" not in bob.links._peers
    assert "stranger100" in bob.links._peers
    bob.links.flush(1, 0.0, at_once=True)
    assert len(bob.transmissions()) <= MAX_STRANGERS + 3


def test_reasons_are_few_whatever_is_sent(pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    for number in range(1000):
        alice.hear(bob, [msgpack_version(number)])
    assert dict(alice.links.dropped) == {"not a valid message of this protocol": 1000}
    alice.hear(bob, [b"x" * 10_000_000])
    assert len(alice.links.last_malformed) <= 200


def msgpack_version(number: int) -> bytes:
    """A header of a version that only this test has."""
    return pack_value([VERSION + 1 + number, 1, "job", 1, 1, 0, 0, 0, b""])


def test_what_is_objected_to_is_neither_delivered_nor_accepted_and_may_come_again(
    pair: tuple[Node, Node],
) -> None:
    alice, _ = pair
    objections = ["too early", None]
    bob = Node("bob", 202)
    bob.links = Links(
        bob.wire,
        Sharing(Heap(shared=False)),
        job="job",
        incarnation=202,
        resend_timeout_s=1.0,
        objection=lambda *_: objections.pop(0),
    )
    alice.say(bob, REQUEST)
    (frames,) = alice.transmissions()
    assert bob.hear(alice, frames) is None
    assert (dict(bob.links.dropped), bob.links._peers) == ({"too early": 1}, {})
    bob.links.flush(1, 0.0, at_once=True)
    assert bob.transmissions() == []
    alice.links.flush(1, 10.0)
    assert pass_on(alice, bob) == [REQUEST]


@pytest.mark.parametrize("job", ["", "job"])
@pytest.mark.parametrize("sequence", [0, 5])
def test_an_observers_question_is_delivered_and_begins_no_conversation(
    job: str, sequence: int
) -> None:
    node = Node("scheduler", 7)
    question = StatusQuestion(3, "1.0")
    envelope = Envelope(job, 0, 99, 0, sequence, 0, (), (), question)
    assert node.links.receive(Received("O1", [encode(envelope)]), 0.0) == Delivery(
        "O1", 99, 0, question, ()
    )
    assert node.links.byte_counts() == {}
    assert node.links.flush(1, 0.0) == math.inf
    assert node.wire.sent == []


def test_an_observer_of_another_job_is_refused_by_its_id() -> None:
    node = Node("scheduler", 7)
    envelope = Envelope("another", 0, 99, 0, 0, 0, (), (), StatusQuestion(3, "1.0"))
    assert node.links.receive(Received("O1", [encode(envelope)]), 0.0) is None
    [(peer, [header])] = node.wire.sent
    assert peer == "O1"
    assert isinstance(decode([header]).message, Refused)


def test_no_other_message_may_come_without_the_jobs_id() -> None:
    node = Node("scheduler", 7)
    envelope = Envelope("", 0, 99, 0, 0, 0, (), (), Beat())
    assert node.links.receive(Received("O1", [encode(envelope)]), 0.0) is None


def test_a_message_is_sent_again_when_it_has_left_and_not_while_a_slow_link_carries_it() -> None:
    node = Node("a", 1)
    payload = bytes(10_000)
    for _ in range(2):
        node.links.send("b", Request(1, 0, 1, 0, b""), (payload,), 0, 0.0)
    node.wire.on_the_way = sum(map(len, node.wire.sent[1][1]))
    node.links.flush(1, 1.0)
    assert len(node.wire.sent) == 3  # the first one has left
    node.wire.on_the_way = 20_200
    node.links.flush(1, 2.0)
    assert len(node.wire.sent) == 3
    node.wire.on_the_way = 0
    node.links.flush(1, 4.0)
    assert len(node.wire.sent) == 5


def test_what_waits_for_a_connection_is_not_sent_twice_when_it_is_there() -> None:
    node = Node("a", 1)
    node.links.send("b", Request(1, 0, 1, 0, b"lost with the old one"), (), 0, 0.0)
    lost = len(node.wire.sent[0][1][0])
    node.links.send("b", Request(1, 0, 2, 0, b"waits for the new one"), (), 0, 0.1)
    node.wire.on_the_way = lost
    node.links.reconnected("b", 0.2)
    assert [frames[0].count(b"lost") for _, frames in node.wire.sent] == [1, 0, 1]


def test_to_a_peer_that_begins_anew_all_is_sent_again_also_what_is_on_the_way(
    pair: tuple[Node, Node],
) -> None:
    alice, bob = pair
    alice.say(bob, REQUEST)
    alice.wire.on_the_way = 1 << 20
    alice.transmissions()
    alice.links.reconnected("bob", 0.1)
    assert alice.wire.sent == []
    alice.links.send_again("bob", 0.2)
    alice.links.send_again("carol", 0.2)
    assert pass_on(alice, bob) == [REQUEST]


# -- a channel that begins anew ------------------------------------------------------------

REGISTER = Register(
    (NodeInfo("worker", 0, "alice", 101, "", "alpha", "k", 4000),), 1, 1, "1.0", False, 0
)


def test_after_a_loss_only_the_new_channel_counts_on_both_sides(pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.say(bob, REQUEST)
    pass_on(alice, bob)
    alice.say(bob, Leave())  # on its way when the connection is lost
    bob.say(alice, Leave())
    (late,), (late_answer,) = alice.transmissions(), bob.transmissions()
    alice.links.reopen("bob")
    assert alice.links.everything_accepted()
    alice.say(bob, REGISTER)
    assert pass_on(alice, bob) == [REGISTER]
    assert bob.hear(alice, late) is None
    assert alice.hear(bob, late_answer) is None
    assert bob.links.dropped["addressed to an earlier process of this name"] == 0
    assert bob.links.dropped["sent by another process with a known name"] == 1
    assert alice.links.dropped["addressed to an earlier process of this name"] == 1
    bob.say(alice, REQUEST)
    alice.say(bob, REQUEST)
    assert (pass_on(bob, alice), pass_on(alice, bob)) == ([REQUEST], [REQUEST])


def test_nothing_of_the_earlier_channel_is_sent_again(pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    for one, other in (pair, pair[::-1]):
        one.say(other, Leave())
        pass_on(one, other)
    for one, other in (pair, pair[::-1]):
        one.say(other, REQUEST, LARGE)
        one.transmissions()
    alice.links.reopen("bob")
    alice.say(bob, REGISTER)
    assert pass_on(alice, bob) == [REGISTER]
    assert (alice.links.unaccepted_bytes("bob"), bob.links.unaccepted_bytes("alice")) == (0, 0)
    for node in pair:
        node.transmissions()
        node.links.flush(1, 100.0)
    assert alice.messages() == [REGISTER]
    assert bob.messages() == []


def test_a_registration_of_an_earlier_channel_begins_no_new_one(pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.say(bob, REGISTER)
    (late,) = alice.transmissions()
    for _ in range(2):
        alice.links.reopen("bob")
        alice.say(bob, REGISTER)
        assert pass_on(alice, bob) == [REGISTER]
    entry = bob.links._peers["alice"]
    assert bob.hear(alice, late) is None
    assert bob.links._peers["alice"] is entry
    alice.say(bob, REQUEST)
    assert pass_on(alice, bob) == [REQUEST]


def test_a_registration_that_comes_again_does_not_begin_a_third_channel(
    pair: tuple[Node, Node],
) -> None:
    alice, bob = pair
    alice.say(bob, REQUEST)
    pass_on(alice, bob)
    alice.links.reopen("bob")
    alice.say(bob, REGISTER)
    (frames,) = alice.transmissions()
    assert bob.hear(alice, frames) is not None
    entry = bob.links._peers["alice"]
    assert bob.hear(alice, frames) is None
    assert (bob.links._peers["alice"] is entry, bob.links.dropped[REPEATED]) == (True, 1)


def test_no_other_message_begins_a_new_channel(pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.say(bob, REQUEST)
    pass_on(alice, bob)
    alice.links.reopen("bob")
    alice.say(bob, REQUEST)
    assert pass_on(alice, bob) == []
    alice.say(bob, REGISTER)
    assert pass_on(alice, bob) == [REGISTER]
    alice.links.flush(1, 100.0)
    assert pass_on(alice, bob) == [REQUEST]  # of the new channel, which is there now


def test_a_node_is_told_that_another_process_has_the_name_of_a_peer(
    pair: tuple[Node, Node],
) -> None:
    alice, bob = pair
    replaced: list[str] = []
    bob.links.on_replaced = replaced.append
    alice.say(bob, Leave())
    pass_on(alice, bob)
    assert replaced == []
    restarted = Node("alice", 102)
    restarted.links.send_unnumbered("bob", Beat())
    assert (pass_on(restarted, bob), replaced) == ([], ["alice"])


def test_a_channel_with_a_peer_of_which_nothing_is_known_can_begin_anew(
    pair: tuple[Node, Node],
) -> None:
    alice, bob = pair
    alice.links.reopen("bob")
    alice.say(bob, REGISTER)
    assert pass_on(alice, bob) == [REGISTER]
