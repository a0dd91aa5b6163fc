"""The questions of libzmq about who may come in (ZeroMQ RFC 27), and what is answered."""

from __future__ import annotations

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from pslite.van.zmq.authentication import DOMAIN, ENDPOINT, ZapHandler, answer

TOKEN = b"0123456789abcdef"
PLAIN = (b"PLAIN", b"pslite", TOKEN)
QUESTION = [b"1.0", b"7", DOMAIN, b"10.0.0.9", b"identity", b"PLAIN", b"pslite", TOKEN]


def changed(position: int, value: bytes) -> list[bytes]:
    question = list(QUESTION)
    question[position] = value
    return question


def test_who_presents_the_credentials_is_let_in() -> None:
    assert answer(QUESTION, PLAIN) == ([b"1.0", b"7", b"200", b"OK", b"node", b""], None)


@pytest.mark.parametrize(
    "question",
    [
        changed(7, TOKEN[:-1] + b"e"),
        changed(7, TOKEN[:-1]),
        changed(7, TOKEN + b"0"),
        changed(7, b""),
        changed(6, b"root"),
        changed(5, b"NULL"),
        changed(5, b"CURVE"),
        changed(5, b"plain"),
        QUESTION[:7],
        QUESTION[:6],
        [*QUESTION, b""],
    ],
)
def test_whoever_presents_anything_else_is_refused_and_named(question: list[bytes]) -> None:
    reply, refused = answer(question, PLAIN)
    assert reply is not None
    assert reply[:3] == [b"1.0", b"7", b"400"]
    assert refused == "10.0.0.9"


@pytest.mark.parametrize(
    "question", [changed(0, b"2.0"), changed(2, b"global"), changed(2, b""), QUESTION[:5]]
)
def test_what_is_no_question_of_ours_is_answered_as_such(question: list[bytes]) -> None:
    reply, refused = answer(question, PLAIN)
    assert reply is not None
    assert reply[:3] == [b"1.0", b"7", b"500"]
    assert refused is None


@pytest.mark.parametrize("question", [[], [b"1.0"], changed(1, b""), changed(1, b"x" * 256)])
def test_what_cannot_be_answered_is_ignored(question: list[bytes]) -> None:
    assert answer(question, PLAIN) == (None, None)


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_nothing_else_opens_the_door(frames: list[bytes]) -> None:
    reply, _ = answer(frames, PLAIN)
    assert reply is None or reply[2] in (b"400", b"500")


def test_the_door_answers_each_question_and_survives_what_is_none() -> None:
    with zmq.Context() as context:
        refused: list[str] = []
        door = ZapHandler(context.socket(zmq.ROUTER), PLAIN, refused.append)
        with context.socket(zmq.DEALER) as asking:
            asking.connect(ENDPOINT)
            for frames in (
                [b"", *QUESTION],
                [b"no delimiter", *QUESTION],
                [b"x"],
                [b""],
                [b"", b"1.0"],
                [b"", *changed(7, b"guess")],
            ):
                asking.send_multipart(frames)
            assert door.socket.poll(5000)
            while door.socket.poll(100):
                door.read(None, 2)
            replies = []
            while asking.poll(100):
                replies.append(asking.recv_multipart())
        door.close()
    assert [reply[3] for reply in replies] == [b"200", b"400"]
    assert refused == ["10.0.0.9"]
