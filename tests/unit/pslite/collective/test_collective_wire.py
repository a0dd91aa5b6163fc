"""The bodies of collective calls: what is packed comes back, what is malformed is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pslite.collective.sums import BFLOAT16, DTYPES, reduce_in_order
from pslite.collective.wire import (
    ArrayLayout,
    CallRequest,
    LetterHead,
    pack_call,
    pack_give_up,
    pack_join,
    pack_layouts,
    pack_letter,
    server_of,
    unpack_call,
    unpack_give_up,
    unpack_join,
    unpack_layouts,
    unpack_letter,
)
from pslite.errors import ProtocolError
from pslite.protocol.collective import (
    READY,
    Absence,
    CallKey,
    CollectiveCall,
    GroupKey,
    LeadersStep,
)
from pslite.protocol.mailbox import ANYBODY, Address
from pslite.wire.codec import pack_value, unpack_value

KEY = CallKey(GroupKey("g", (2, 0), 1), "grad", 7)
EVERYBODY = CallKey(GroupKey("", (0, 1, 2), 0), "", 1)
CALL = CollectiveCall("all_reduce", "premul_sum", "float32", ((3, 4),), -1, 0.5)


@pytest.mark.parametrize("key", [KEY, EVERYBODY])
@pytest.mark.parametrize(
    "call", [CALL, CollectiveCall("barrier"), CollectiveCall("broadcast", "", "bool", ((),), 1)]
)
def test_a_call_comes_back_as_it_was(key: CallKey, call: CollectiveCall) -> None:
    request = CallRequest(key, call, 5)
    assert unpack_call(pack_call(request, 3), 3) == request
    assert unpack_give_up(pack_give_up(key, "UsageError", "why", 3), 3) == (
        key,
        "UsageError",
        "why",
    )


def test_a_first_chunk_brings_its_arrays_in_words() -> None:
    call = CollectiveCall("all_to_all", dtype="int8")
    layout = ArrayLayout("int8", ((3,), (0, 2)))
    request = CallRequest(KEY, call, 0, layout)
    assert unpack_call(pack_call(request, 3), 3) == request
    for wrong in (request._replace(chunk=1), request._replace(layout=None)):
        with pytest.raises(ProtocolError, match="came with the arrays"):
            unpack_call(pack_call(wrong, 3), 3)
    with pytest.raises(ProtocolError, match="came with the arrays"):
        unpack_call(pack_call(CallRequest(KEY, CALL, 0, layout), 3), 3)
    others = [layout, ArrayLayout("", ())]
    assert unpack_layouts(pack_layouts(others), 2) == others
    assert [each.lengths for each in others] == [[3, 0], []]


def test_only_a_step_may_ask_whether_all_are_ready() -> None:
    request = CallRequest(KEY, CALL, 0, step=LeadersStep((2, 0), READY))
    assert unpack_call(pack_call(request, 3), 3) == request
    with pytest.raises(ProtocolError, match="unknown call: 'ready'"):
        unpack_call(pack_call(CallRequest(KEY, READY, 0), 3), 3)


@pytest.mark.parametrize(
    "layouts", [5, [], [["int8", [[1]]], ["int8", [[-1]]]], [["", [[1]]], ["x", []]], [[], []]]
)
def test_malformed_arrays_in_words_are_refused(layouts: Any) -> None:
    with pytest.raises(ProtocolError):
        unpack_layouts(pack_value(layouts), 2)


def test_the_servers_have_their_turn_and_all_ranks_agree_on_it() -> None:
    assert [server_of(KEY, chunk, 3, 4) for chunk in range(8)] == [3, 0, 1, 2, 3, 0, 1, 2]
    assert server_of(KEY._replace(number=8), 0, 3, 4) == 0


WRONG: list[tuple[tuple[int, ...], Any]] = [
    ((), 5),
    ((0,), None),
    ((0, 0), 4),
    ((0, 0), "x" * 600),
    ((0, 1), [0, 0]),
    ((0, 1), [0, 3]),
    ((0, 1), [0, -1]),
    ((0, 1), [True]),
    ((0, 2), -1),
    ((0, 4), 1.5),
    ((1,), [1, 2]),
    ((1, 0), "explode"),
    ((1, 1), "mean"),
    ((1, 2), "object"),
    ((1, 4), 2),
    ((1, 4), -2),
    ((1, 5), "1"),
    ((1, 5), float("nan")),
    ((2,), {}),
    ((2,), [[-2]]),
    ((2,), [[1] * 65]),
    ((3,), -1),
    ((3,), None),
]


@pytest.mark.parametrize(("place", "value"), WRONG)
def test_a_body_with_one_wrong_field_is_refused(place: tuple[int, ...], value: Any) -> None:
    body = unpack_value(pack_call(CallRequest(KEY, CALL, 0), 3))
    if not place:
        body = value
    else:
        *way, last = place
        inner = body
        for index in way:
            inner = inner[index]
        inner[last] = value
    with pytest.raises(ProtocolError):
        unpack_call(pack_value(body), 3)


def test_a_join_comes_back_as_it_was() -> None:
    absence = Absence(1 << 40, {"": (1 << 40) + 7, "grad": (1 << 40) + 2}, 2 << 40)
    body = pack_join(KEY.group, absence, 3)
    assert unpack_join(body, 3) == (KEY.group, absence)
    key, begin, last, end = unpack_value(body)
    for wrong in ([key, -1, last, end], [key, begin, [[1, 1]], end], [key, begin, last], 5):
        with pytest.raises(ProtocolError):
            unpack_join(pack_value(wrong), 3)


LETTER = LetterHead(Address(KEY.group, 0, 2, -5, 3, 1), ArrayLayout("int8", ((4,),)), 256)


@pytest.mark.parametrize("source", [0, 2, ANYBODY])
def test_a_letters_head_comes_back_as_it_was(source: int) -> None:
    head = LETTER._replace(address=LETTER.address._replace(source=source))
    assert unpack_letter(pack_letter(head, 3), 3) == head


@pytest.mark.parametrize(
    ("place", "value"),
    [((0,), []), ((1, 0), 1), ((1, 0), -2), ((1, 1), -1), ((1, 2), 1.0), ((1, 3), -1), ((3,), 0)],
)
def test_a_letters_head_with_one_wrong_field_is_refused(place: tuple[int, ...], value: Any) -> None:
    body = unpack_value(pack_letter(LETTER, 3))
    inner = body
    for index in place[:-1]:
        inner = inner[index]
    inner[place[-1]] = value
    with pytest.raises(ProtocolError):
        unpack_letter(pack_value(body), 3)


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for unpack in (unpack_call, unpack_give_up, unpack_letter):
        with pytest.raises(ProtocolError):
            unpack(data, 3)


@given(st.lists(st.floats(width=32), min_size=2, max_size=5), st.sampled_from(["sum", "max"]))
def test_bfloat16_is_rounded_as_the_package_for_it_does(numbers: list[float], op: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = np.dtype(ml_dtypes.bfloat16)
    arrays = [np.array([number], np.float32).astype(kind) for number in numbers]
    out = np.empty(1, DTYPES[BFLOAT16])
    reduce_in_order(op, BFLOAT16, None, [array.view(np.uint16) for array in arrays], out)
    wanted = arrays[0].astype(np.float32)
    with np.errstate(all="ignore"):
        for array in arrays[1:]:
            wanted = (np.add if op == "sum" else np.maximum)(wanted, array.astype(np.float32))
        found = out.view(kind).astype(np.float32)
        np.testing.assert_array_equal(found, wanted.astype(kind).astype(np.float32))


def test_sums_over_several_blocks_are_those_of_one() -> None:
    arrays = [np.arange(200_000, dtype=np.float32) * factor for factor in (1, 3, 5)]
    out = np.empty(200_000, np.float32)
    reduce_in_order("average", "float32", None, arrays, out)
    np.testing.assert_array_equal(out, (arrays[0] + arrays[1] + arrays[2]) / np.float32(3))


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint8", "uint64"])
def test_averages_of_integers_are_cut_off_towards_zero(dtype: str) -> None:
    signs = (-1, 1) if dtype.startswith("i") else (1,)
    arrays = [np.array([sign * number for sign in signs], dtype) for number in (2, 3, 3)]
    out = np.empty(len(signs), dtype)
    reduce_in_order("average", dtype, None, arrays, out)
    assert out.tolist() == [sign * 2 for sign in signs]
    reduce_in_order("average", dtype, None, arrays, out, num_ranks=300)  # more than an int8 holds
    assert out.tolist() == [0 for _ in signs]
