"""What a server keeps of a worker's step: its bytes, and what is wrong with those of others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.requests import pack, unpack
from kvstore.stores.dist.kept_steps import KeptStep, packed, unpacked
from pslite.errors import ProtocolError, UsageError

NUMBER = st.integers(0, 5)


def kept(**changes: Any) -> KeptStep:
    return KeptStep(1, 7, {}, {}, {}, b"")._replace(**changes)


def runs_of(step: KeptStep) -> list[Any]:
    runs: list[Any] = unpack(packed(step), int, int, list, list, list)[2]
    return runs


@given(
    st.builds(
        KeptStep,
        NUMBER,
        NUMBER,
        st.dictionaries(st.integers(0, 40), NUMBER),
        st.dictionaries(NUMBER, NUMBER),
        st.dictionaries(NUMBER, st.tuples(NUMBER, NUMBER)),
        st.binary(max_size=8),
    )
)
def test_what_is_kept_comes_back(step: KeptStep) -> None:
    assert unpacked(packed(step), [step.state]) == step


def test_neighbouring_parts_with_as_many_pushes_are_one_run() -> None:
    step = kept(counts=dict.fromkeys(range(5, 100_005), 3))
    assert runs_of(step) == [[5, 100_000, 3]]
    assert unpacked(packed(step), []) == step


@pytest.mark.parametrize(
    ("counts", "runs"),
    [
        ({}, []),
        ({0: 1}, [[0, 1, 1]]),
        ({1: 2, 2: 2, 4: 2}, [[1, 2, 2], [4, 1, 2]]),  # part 3 is missing
        ({1: 2, 2: 3, 3: 3}, [[1, 1, 2], [2, 2, 3]]),
        ({3: 1, 1: 1, 2: 1}, [[1, 3, 1]]),  # in any order
    ],
)
def test_runs_end_at_gaps_and_at_other_counts(counts: dict[int, int], runs: list[Any]) -> None:
    assert runs_of(kept(counts=counts)) == runs
    assert unpacked(packed(kept(counts=counts)), []).counts == counts


def test_the_state_is_not_in_the_body_and_may_come_in_several_frames() -> None:
    step = kept(state=b"weights", counts={1: 2})
    assert packed(step) == packed(step._replace(state=b""))
    assert unpacked(packed(step), [memoryview(b"wei"), bytearray(b"ghts")]) == step
    assert unpacked(packed(step), []).state == b""


def test_nothing_kept_is_said_to_the_user_with_what_to_do() -> None:
    with pytest.raises(UsageError, match="start the whole job again, from its last checkpoint"):
        unpacked(b"", [])


def fields(**changes: Any) -> bytes:
    made = {"loop": 1, "step": 2, "runs": [[1, 2, 3]], "barriers": [[4, 1]], "calls": [[1, 2, 3]]}
    return pack(*{**made, **changes}.values())


def test_the_fields_of_the_malformed_bodies_below_are_right_otherwise() -> None:
    assert unpacked(fields(), []) == KeptStep(1, 2, {1: 3, 2: 3}, {4: 1}, {1: (2, 3)}, b"")


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1",
        b"nonsense",
        pack(),
        pack(1, 2, [], []),
        pack(1, 2, [], [], [], []),
        fields(loop="1"),
        fields(step=None),
        fields(runs=7),
        fields(barriers={4: 1}),
        fields(calls=b""),
        fields(runs=[7]),
        fields(runs=[[1, 2]]),
        fields(runs=[[1, 2, 3, 4]]),
        fields(runs=[[1, 2, -3]]),
        fields(runs=[[-1, 2, 3]]),
        fields(runs=[[1, 2, 3.0]]),
        fields(runs=[[1, 2, True]]),
        fields(runs=[[1, 2, 3], [4, "x", 6]]),
        fields(barriers=[[4]]),
        fields(barriers=[[4, -1]]),
        fields(barriers=[[4, 1, 1]]),
        fields(calls=[[1, 2]]),
        fields(calls=[[1, 2, "3"]]),
        fields(calls=[{1: 2}]),
    ],
)
def test_a_malformed_body_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpacked(body, [])
