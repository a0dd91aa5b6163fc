"""Frames and messages: every message survives the journey, and no bytes do any harm."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc
import typing
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pslite.errors import ProtocolError, PSError, UsageError
from pslite.ids import NodeInfo
from pslite.wire.base import Ints, Message, Natural, Naturals, Nodes, Texts
from pslite.wire.codec import (
    MAX_FRAMES,
    MAX_HEADER_BYTES,
    MAX_INTEGERS,
    MAX_JOB_BYTES,
    MAX_LISTED,
    VERSION,
    Envelope,
    decode,
    encode,
    pack_value,
    unpack_value,
)
from pslite.wire.messages import (
    ALL_MESSAGES,
    Accepted,
    BarrierEnter,
    Beat,
    Leave,
    Register,
    Request,
    Roster,
    RoundWaits,
    Waiting,
)
from pslite.wire.recovery import StepRepeated

ENVELOPE_FIELDS = 10
WORDS = st.integers(-(2**63), 2**63 - 1)
COUNTS = st.integers(0, 2**63 - 1)
TEXTS = st.text(max_size=8)
#: Printable, made so and not filtered: hypothesis objects to filters that refuse much.
NAMES = st.text(
    st.characters(exclude_categories=["C", "Z"], include_characters=" "), max_size=8
).filter(str.isprintable)
NODES = st.builds(
    NodeInfo,
    st.sampled_from(["scheduler", "server", "worker"]),
    st.integers(-1, 2**31),
    NAMES,
    COUNTS,
    NAMES,
    NAMES,
    NAMES,
    COUNTS,
)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: WORDS,
    float: st.floats(0, allow_nan=False, allow_infinity=False),
    str: TEXTS,
    bytes: st.binary(max_size=16),
    Ints: st.lists(WORDS, max_size=5).map(tuple),
    Texts: st.lists(TEXTS, max_size=3).map(tuple),
    Nodes: st.lists(NODES, max_size=2).map(tuple),
}


COUNTED = {int: COUNTS, Ints: st.lists(COUNTS, max_size=5).map(tuple)}
KINDS = {kind: number for number, kind in ALL_MESSAGES.items()}
#: A node on the wire.
ENTRY = ["worker", 0, "u", 1, "", "h", "m", 1]


def naturals(kind: type[Message]) -> list[str]:
    """The fields whose numbers are never negative."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return [name for name, hint in hints.items() if hint in (Natural, Naturals)]


def any_of(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Messages of this type with any values that its fields may have."""
    hints = typing.get_type_hints(kind)
    fields = {
        field.name: (COUNTED if field.name in naturals(kind) else VALUES)[hints[field.name]]
        for field in dataclasses.fields(kind)
    }
    return st.builds(kind, **fields).map(_even)


def _even(message: Message) -> Message:
    """The message with its parallel lists cut to the shortest."""
    lists = {name: getattr(message, name) for name in message.PARALLEL}
    length = min(map(len, lists.values()), default=0)
    return dataclasses.replace(message, **{name: value[:length] for name, value in lists.items()})


MESSAGES = st.one_of([any_of(kind) for kind in KINDS])
ENVELOPES = st.builds(
    Envelope,
    TEXTS,
    COUNTS,
    COUNTS,
    COUNTS,
    COUNTS,
    COUNTS,
    st.lists(WORDS, max_size=4).map(tuple),
    st.lists(WORDS, max_size=4).map(tuple),
    MESSAGES,
)


def surround(message: Message) -> Envelope:
    return Envelope("job", 1, 2, 3, 4, 5, (), (), message)


def header(message: Message = Leave()) -> list[Any]:  # noqa: B008 - a frozen value
    """The header of a message as plain data, to be spoilt."""
    fields = msgpack.unpackb(encode(surround(message)))
    assert isinstance(fields, list)
    return fields


# -- there and back -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=12)
@given(data=st.data())
def test_every_message_survives_the_journey(kind: type[Message], data: st.DataObject) -> None:
    envelope = dataclasses.replace(surround(Beat()), message=data.draw(any_of(kind)))
    assert decode([encode(envelope)]) == envelope


@settings(max_examples=25)
@given(ENVELOPES)
def test_every_envelope_survives_the_journey(envelope: Envelope) -> None:
    assert decode([memoryview(encode(envelope)), b"payload"]) == envelope


def test_numbers_of_messages_begin_with_one_and_have_no_gaps() -> None:
    assert list(ALL_MESSAGES) == list(range(1, 1 + len(ALL_MESSAGES)))


def test_ids_above_eight_bits_are_not_cut() -> None:
    # Defect f of ps-lite: sender and receiver were packed into 8 bits each.
    message = Request(app=2**40, customer=70_000, request_id=2**62, head=300, body=b"")
    envelope = Envelope("job", 2**40, 2**62 - 1, 2**61 + 1, 2**40 + 1, 2**40, (2**41,), (), message)
    assert decode([encode(envelope)]) == envelope


def test_lists_of_integers_travel_as_little_endian_words() -> None:
    envelope = dataclasses.replace(surround(Accepted()), accepted_also=(1, -2, 2**40))
    assert msgpack.unpackb(encode(envelope))[8] == struct.pack("<3q", 1, -2, 2**40)


# -- what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, 0),
        (0, VERSION + 1),
        (0, "1"),
        (1, 0),
        (1, 999),
        (1, "7"),
        (1, [7]),
        (2, 7),
        (2, b"job"),
        (3, -1),
        (3, 1.5),
        (4, None),
        (4, True),
        (5, "x"),
        (6, -4),
        (7, [1]),
        (8, b"1234567"),
        (8, "12345678"),
        (8, [1]),
    ],
)
def test_an_envelope_with_one_wrong_field_is_refused(position: int, value: Any) -> None:
    spoilt = header()
    spoilt[position] = value
    with pytest.raises(ProtocolError):
        decode([msgpack.packb(spoilt)])


@pytest.mark.parametrize(("position", "value"), [(0, True), (0, 1.0), (8, None), (8, 0), (8, [])])
def test_a_field_that_only_compares_like_the_right_one_is_refused(
    position: int, value: Any
) -> None:
    spoilt = header()
    spoilt[position] = value
    with pytest.raises(ProtocolError):
        decode([msgpack.packb(spoilt)])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=12)
@given(data=st.data())
def test_a_message_with_one_field_of_another_type_is_refused(
    kind: type[Message], data: st.DataObject
) -> None:
    spoilt = header(data.draw(any_of(kind)))
    if len(spoilt) == ENVELOPE_FIELDS:
        spoilt.append(None)
    else:
        position = data.draw(st.integers(ENVELOPE_FIELDS, len(spoilt) - 1))
        others = (None, True, 7, 1.5, "text", b"1234567", [1], [["worker"]], {"a": 1})
        same = (type(spoilt[position]),)
        value = data.draw(st.sampled_from([other for other in others if type(other) not in same]))
        spoilt[position] = value
    with pytest.raises(ProtocolError):
        decode([msgpack.packb(spoilt)])


@pytest.mark.parametrize("change", [-1, 1])
@given(data=st.data())
def test_a_field_too_few_or_too_many_is_refused(change: int, data: st.DataObject) -> None:
    spoilt = header(data.draw(MESSAGES))
    spoilt = spoilt[:-1] if change < 0 else [*spoilt, 0]
    with pytest.raises(ProtocolError):
        decode([msgpack.packb(spoilt)])


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in KINDS for name in kind.PARALLEL],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_lists_that_belong_together_must_be_of_one_length(kind: type[Message], name: str) -> None:
    # Else whoever walks them side by side would stumble far from here.
    names = [field.name for field in dataclasses.fields(kind)]
    hints = typing.get_type_hints(kind)
    empty = {Ints: b"", Texts: [], Nodes: [], bool: False, int: 0, str: ""}
    one = {Ints: bytes(8), Texts: ["x"], Nodes: [ENTRY]}
    fields = [one[hints[n]] if n == name else empty[hints[n]] for n in names]
    spoilt = [*header()[:ENVELOPE_FIELDS], *fields]
    spoilt[1] = KINDS[kind]
    with pytest.raises(ProtocolError, match="different lengths"):
        decode([msgpack.packb(spoilt)])


@pytest.mark.parametrize(
    "entry",
    [
        ["boss", 0, "u", 1, "", "h", "m", 1],
        ["worker", "0", "u", 1, "", "h", "m", 1],
        ["worker", 0, "u", True, "", "h", "m", 1],
        ["worker", 0, "u", 1, "", "h", "m"],
        ["worker", 0, "u", 1, "", "h", "m", 1, 1],
        ["worker", -2, "u", 1, "", "h", "m", 1],
        ["worker", 0, "u", -1, "", "h", "m", 1],
        ["worker", 0, "u", 1, "", "h", "m", -1],
        ["worker", 0, "u" * 513, 1, "", "h", "m", 1],
        ["worker", 0, "u", 1, "", "line\nline", "m", 1],
        ["worker", 0, "u", 1, "", "\x1b[31mred", "m", 1],
        {"role": "worker"},
    ],
)
def test_a_malformed_node_is_refused(entry: Any) -> None:
    spoilt = header(Register((), 1, 1, "1"))
    spoilt[ENVELOPE_FIELDS] = [entry]
    with pytest.raises(ProtocolError):
        decode([msgpack.packb(spoilt)])


@pytest.mark.parametrize(
    "frames",
    [[], [b""], [b"\xc1"], [b"\x90"], [b"\x80"], [b"\x07"], [encode(surround(Beat()))[:-1]]],
)
def test_a_transmission_that_is_none_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(frames)


def test_limits_hold_at_the_border() -> None:
    good = encode(surround(Beat()))
    assert decode([good] + [b""] * (MAX_FRAMES - 1)).message == Beat()
    with pytest.raises(ProtocolError, match="frames"):
        decode([good] + [b""] * MAX_FRAMES)
    head = b"\xc6" + struct.pack(">I", MAX_HEADER_BYTES - 5)
    assert len(unpack_value(head.ljust(MAX_HEADER_BYTES, b"x"))) == MAX_HEADER_BYTES - 5
    with pytest.raises(ProtocolError, match="must have at most"):
        unpack_value(bytes(MAX_HEADER_BYTES + 1))


@given(st.binary(max_size=200))
@example(b"\xd9\xff")
@example(b"\x81\x90\x00")
@example(b"\xc7\x03\xff123")
@example(b"\xa1\xff")
@example(b"\x91" * 5000)
def test_any_bytes_end_in_a_message_or_in_a_protocol_error(data: bytes) -> None:
    try:
        decode([data])
    except ProtocolError:
        pass


@given(
    ENVELOPES,
    st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=4),
    st.integers(0),
)
def test_mutated_messages_end_in_a_message_or_in_a_protocol_error(
    envelope: Envelope, changes: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(encode(envelope))
    for position, value in changes:
        data[position % len(data)] = value
    try:
        decode([bytes(data[: length % len(data) + 1])])
    except ProtocolError:
        pass


# -- sizes are claims ---------------------------------------------------------------------


def peak_bytes(data: bytes) -> int:
    """Memory that refusing ``data`` takes at its highest."""
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            unpack_value(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "kind", [b"\xdd", b"\xdf", b"\xc6", b"\xdb"], ids=["array", "map", "bytes", "text"]
)
def test_a_claimed_size_allocates_nothing(kind: bytes) -> None:
    assert peak_bytes(kind + b"\xff\xff\xff\xff") < 100_000


@pytest.mark.parametrize("elements", [30_000, 60_000])
def test_nested_claims_allocate_no_more_than_a_few_times_the_message(elements: int) -> None:
    # Each level claims about as many elements as the message has bytes, and none of them comes.
    claim = b"\xdd" + struct.pack(">I", elements)
    data = (claim * 900).ljust(60_000, b"\xc0")
    assert peak_bytes(data) < 100 * len(data)


@pytest.mark.parametrize("kind", [b"\xdc\x00", b"\xdd\x00\x00\x00", b"\xde\x00"])
def test_a_claim_of_more_elements_than_there_are_bytes_is_refused_where_it_stands(
    kind: bytes,
) -> None:
    text = pack_value("\u071c" * 9)
    count = 1 + len(text) // (2 if kind[:1] == b"\xde" else 1)
    with pytest.raises(ProtocolError, match=r"expected plain data as msgpack, .*OutOfData"):
        unpack_value(kind + bytes([count]) + text)


# -- what a sender must not do ------------------------------------------------------------


def test_a_header_that_every_receiver_would_drop_is_refused_at_the_sender() -> None:
    # Unrefused it would be sent again and again, and never be accepted.
    message = Request(1, 0, 1, 1, bytes(MAX_HEADER_BYTES))
    with pytest.raises(PSError):
        encode(surround(message))


# -- plain data ---------------------------------------------------------------------------

PLAIN = st.recursive(
    st.none() | st.booleans() | WORDS | st.floats(allow_nan=False) | TEXTS | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS | WORDS, inner, max_size=3),
    max_leaves=10,
)


@given(PLAIN, st.sampled_from(["a", "\u0627"]))
def test_plain_data_survives_the_journey(value: Any, letter: str) -> None:
    # The second letter looks like a mark of msgpack.
    assert unpack_value(pack_value([value, letter])) == [value, letter]


@pytest.mark.parametrize(
    "value",
    [
        list(range(70_000)),
        {key: key for key in range(70_000)},
        [list(range(20))] * 20,
        ["x" * size for size in (31, 32, 255, 256, 65_535, 65_536)],
        [bytes(size) for size in (255, 256, 65_535, 65_536)],
        [-(2**63), -(2**31), -(2**15), -128, -32, -1, 127, 128, 2**16, 2**32, 2**64 - 1, 0.5],
        {"a": {"b": [None, True, False, {}, [], ""]}},
    ],
    ids=["array", "map", "nested", "texts", "bytes", "numbers", "small"],
)
def test_plain_data_of_every_size_survives_the_journey(value: Any) -> None:
    assert unpack_value(pack_value([value, "\u0627"])) == [value, "\u0627"]


def test_whether_data_is_too_deep_does_not_depend_on_the_letters_in_it() -> None:
    def is_allowed(depth: int, text: str) -> bool:
        data = b"\x91" * depth + pack_value(text)
        try:
            unpack_value(data)
        except ProtocolError:
            return False
        return True

    latin, arabic = ([is_allowed(depth, text) for depth in range(40)] for text in ("a", "\u0627"))
    assert latin == arabic


@pytest.mark.parametrize(
    "data", [b"\xd4\x05\x00", b"\xd6\xff\x00\x00\x00\x00"], ids=["extension", "timestamp"]
)
def test_plain_data_holds_no_objects(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_value(data)


# -- numbers in their range ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in KINDS for name in naturals(kind)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_negative_number_that_counts_or_names_something_is_refused(
    kind: type[Message], name: str
) -> None:
    names = [field.name for field in dataclasses.fields(kind)]
    hints = typing.get_type_hints(kind)
    good: dict[Any, Any] = {
        Ints: struct.pack("<q", 1),
        Texts: ["x"],
        bool: False,
        int: 0,
        str: "",
        float: 0.0,
        bytes: b"",
        Nodes: [ENTRY],
    }
    fields = [good[hints[n]] for n in names]
    whole = [*header()[:ENVELOPE_FIELDS], *fields]
    whole[1] = KINDS[kind]
    decode([msgpack.packb(whole)])
    whole[ENVELOPE_FIELDS + names.index(name)] = (
        struct.pack("<q", -1) if hints[name] == Ints else -1
    )
    with pytest.raises(ProtocolError, match="at least 0"):
        decode([msgpack.packb(whole)])


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), -float("inf")])
def test_a_time_that_is_none_is_refused_on_both_sides(value: float) -> None:
    with pytest.raises(UsageError, match=r"BarrierEnter\.timeout_s must be a finite number"):
        encode(surround(BarrierEnter(4, 1, value)))
    spoilt = header(BarrierEnter(4, 1, 0.0))
    spoilt[-1] = value
    with pytest.raises(ProtocolError, match="expected a time in seconds"):
        decode([msgpack.packb(spoilt)])


def test_a_repeated_step_is_named_with_its_loop_unless_that_is_the_first() -> None:
    assert [StepRepeated(3, loop).title for loop in (1, 2)] == ["step 3", "step 3 of loop 2"]


def test_what_no_receiver_would_accept_is_not_sent() -> None:
    with pytest.raises(UsageError, match=r"BarrierEnter\.group must be .* from 0, got -1"):
        encode(surround(BarrierEnter(-1, 1, 0.0)))


def test_lists_have_limits_of_their_own() -> None:
    spoilt = header(RoundWaits(1, 1, (), 0.0))
    spoilt[ENVELOPE_FIELDS + 2] = bytes(8 * MAX_INTEGERS)
    assert decode([msgpack.packb(spoilt)]).message == RoundWaits(1, 1, (0,) * MAX_INTEGERS, 0.0)
    spoilt[ENVELOPE_FIELDS + 2] = bytes(8 * MAX_INTEGERS + 8)
    with pytest.raises(ProtocolError, match="integers"):
        decode([msgpack.packb(spoilt)])
    many = header(Waiting((), (), 0.0))
    many[ENVELOPE_FIELDS] = [""] * (MAX_LISTED + 1)
    with pytest.raises(ProtocolError, match="texts"):
        decode([msgpack.packb(many)])
    nodes = header(Roster(1, (), ()))
    nodes[ENVELOPE_FIELDS + 1] = [[]] * (MAX_LISTED + 1)
    with pytest.raises(ProtocolError, match="list of at most"):
        decode([msgpack.packb(nodes)])
    job = header()
    job[2] = "j" * (MAX_JOB_BYTES + 1)
    with pytest.raises(ProtocolError, match="job id"):
        decode([msgpack.packb(job)])
