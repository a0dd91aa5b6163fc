"""``docs/wire.md`` and the code say the same: messages, fields, types, versions, limits."""

from __future__ import annotations

import dataclasses
import enum
import re
import types
import typing
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from kvstore.protocol.requests import DIRECTORY_APP, STORE_APP, DirectoryCall, StoreCall
from pslite.collective.mailbox import WINDOW_BYTES
from pslite.collective.wire import (
    CALL,
    COLLECTIVE_APP,
    GIVE_UP,
    JOIN,
    KINDS,
    MAILBOX_APP,
    RECEIVE,
    SEND,
    WAIT,
)
from pslite.config import Config
from pslite.ids import NodeInfo
from pslite.memory.segment import HEADER_BYTES, NONCE_BYTES
from pslite.memory.sharing import MAX_SEGMENTS, MIN_SHARED_BYTES
from pslite.node.surveyor import MAX_REPORT_BYTES
from pslite.protocol.channel import RECEIVE_WINDOW
from pslite.protocol.collective import MAX_LONG_WAITS
from pslite.protocol.mailbox import BOX_BYTES
from pslite.protocol.surveys import ANSWER_S, FRESH_S, MAX_ASKERS
from pslite.van import base as van
from pslite.van.base import TOTAL_PER_FRAME
from pslite.van.cutting import MARK, PIECE_BYTES
from pslite.van.zmq.pipes import MAX_MESSAGE_BYTES, MAX_MESSAGE_FRAMES, MAX_PIPES
from pslite.wire.base import Ints, Message, Nodes, Texts
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
)
from pslite.wire.messages import ALL_MESSAGES, SENDERS, Accepted, Exchange
from pslite.wire.survey import (
    MAX_NAMED,
    MAX_TEXT,
    MAX_WAITS,
    Event,
    NodeReport,
    NodeStatus,
    Progressed,
    StandbyStatus,
    Survey,
    Wait,
)

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "wire.md").read_text()
TYPES: dict[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "float",
    str: "text",
    bytes: "bytes",
    Ints: "integers",
    Texts: "texts",
    Nodes: "nodes",
}
ENVELOPE_FIELDS = 10


def section(title: str) -> str:
    """The text below a heading, up to the next one of any level."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", TEXT, re.M | re.S)
    assert found is not None, f"docs/wire.md has no section {title!r}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of all tables in a text, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    heads = {i - 1 for i, row in enumerate(cells) if set("".join(row)) == {"-"}}
    return [row for i, row in enumerate(cells) if i not in heads and i - 1 not in heads]


def fields_of(kind: Any, names: typing.Iterable[str], first: int) -> list[list[str]]:
    hints = typing.get_type_hints(kind)
    return [[str(first + i), name, TYPES[hints[name]]] for i, name in enumerate(names)]


def messages() -> list[tuple[str, str]]:
    return [(str(number), kind.__name__) for number, kind in ALL_MESSAGES.items()]


# -- messages -----------------------------------------------------------------------------


def test_every_message_has_a_section_and_no_other_has_one() -> None:
    assert re.findall(r"^### (\d+) (\w+)$", TEXT, re.M) == messages()


def test_the_overview_lists_every_message_and_whether_it_is_numbered() -> None:
    table = [(row[0], row[1], row[3]) for row in rows(section("7 Messages"))]
    assert table == [
        (str(number), kind.__name__, "yes" if kind.RELIABLE else "no")
        for number, kind in ALL_MESSAGES.items()
    ]


def test_the_overview_says_which_roles_may_send_a_message() -> None:
    for _, name, ways, _ in rows(section("7 Messages")):
        # All that stands before an arrow: "server → worker, worker → server".
        senders = set(re.findall(r"\w+", ways.rpartition("→")[0])) - {"observer"}
        (kind,) = [kind for kind in ALL_MESSAGES.values() if kind.__name__ == name]
        assert SENDERS.get(kind, {"any"}) == senders, name


@pytest.mark.parametrize(("number", "kind"), ALL_MESSAGES.items(), ids=str)
def test_the_fields_of_a_message_are_those_of_its_table(number: int, kind: type[Message]) -> None:
    text = section(f"{number} {kind.__name__}")
    names = [field.name for field in dataclasses.fields(kind)]
    assert [row[:3] for row in rows(text)] == fields_of(kind, names, ENVELOPE_FIELDS)
    assert ("No fields." in text) == (not names)


@pytest.mark.parametrize(("number", "kind"), ALL_MESSAGES.items(), ids=str)
def test_lists_that_belong_together_are_named(number: int, kind: type[Message]) -> None:
    found = re.findall(r"^Parallel: (.*)\.$", section(f"{number} {kind.__name__}"), re.M)
    named = [tuple(re.findall(r"`(\w+)`", line)) for line in found]
    assert named == ([kind.PARALLEL] if kind.PARALLEL else [])


def test_the_collective_calls_are_those_of_the_app() -> None:
    text = section("19 Collective calls")
    assert re.findall(r"app (\d+)", text) == [str(COLLECTIVE_APP), str(MAILBOX_APP)]
    calls, kinds, letters = (
        [tuple(row[:2]) for row in group] for _, group in groupby(rows(text), len)
    )
    heads = {"CALL": CALL, "GIVE_UP": GIVE_UP, "JOIN": JOIN, "WAIT": WAIT}
    assert calls == [(f"{number}", name) for name, number in heads.items()]
    assert {kind for kind, _ in kinds} == KINDS
    assert letters == [(f"{SEND}", "SEND"), (f"{RECEIVE}", "RECEIVE")]
    assert f"keeps up to {BOX_BYTES} bytes" in text
    assert f"more than {WINDOW_BYTES} bytes" in text
    assert f"remembers them for {MAX_LONG_WAITS} calls" in text


# -- what surrounds them ------------------------------------------------------------------


def test_the_version_is_the_codecs() -> None:
    assert re.findall(r"^\*\*Version:\*\* (\d+)$", TEXT, re.M) == [str(VERSION)]
    assert f"of this document: {VERSION}" in section("5 The envelope")


def test_the_envelope_is_the_codecs() -> None:
    names = [field.name for field in dataclasses.fields(Envelope)][:-1]
    table = [row[:3] for row in rows(section("5 The envelope"))]
    assert table == [
        ["0", "version", "integer"],
        ["1", "number", "integer"],
        *fields_of(Envelope, names, 2),
    ]
    assert len(table) == ENVELOPE_FIELDS


def test_a_nodes_entry_is_the_rosters() -> None:
    table = [row[:3] for row in rows(section("4 Types"))]
    types = [row[0] for row in table if not row[0].isdigit()]
    assert [row for row in table if row[0].isdigit()] == fields_of(NodeInfo, NodeInfo._fields, 0)
    assert sorted(types) == sorted(TYPES.values())


def test_the_limits_are_the_codes() -> None:
    values = [re.findall(r"\d+", row[1])[0] for row in rows(section("9 Limits"))]
    limits = [
        MAX_HEADER_BYTES,
        MAX_FRAMES,
        TOTAL_PER_FRAME,
        MAX_INTEGERS,
        MAX_LISTED,
        MAX_JOB_BYTES,
        RECEIVE_WINDOW,
        PIECE_BYTES,
        Config().max_message_bytes,
    ]
    assert MAX_FRAMES == van.MAX_FRAMES
    assert values == [str(limit) for limit in limits]


def test_the_numbers_of_pieces_are_the_codes() -> None:
    text = section("3 Transmissions")
    assert f"more than {PIECE_BYTES} bytes" in text
    assert f"The mark is the byte `{MARK.hex()}`" in text


def test_the_calls_of_the_stores_are_the_codes() -> None:
    text = section("11 Apps of the stores")
    calls: list[enum.IntEnum] = [*DirectoryCall, *StoreCall]
    assert re.findall(r"app (\d+)", text) == [str(DIRECTORY_APP), str(STORE_APP)]
    assert [row[:2] for row in rows(text)] == [[str(call.value), call.name] for call in calls]


def test_the_numbers_of_shared_memory_are_the_codes() -> None:
    text = " ".join(section("15 Shared memory").split())
    for sentence in (
        f"first {NONCE_BYTES} bytes are a random **nonce**",
        f"buffers begin at byte {HEADER_BYTES}.",
        f"(here {MAX_SEGMENTS} of each peer)",
        f"frames of less than {MIN_SHARED_BYTES} bytes always travel as bytes",
    ):
        assert sentence in text


def test_the_numbers_of_pipes_are_the_codes() -> None:
    text = section("16 Pipes")
    for sentence in (
        f"(here at most {MAX_PIPES} pipes a node)",
        f"at most {MAX_MESSAGE_FRAMES} frames and {MAX_MESSAGE_BYTES} bytes",
    ):
        assert sentence in text


def test_the_values_of_a_status_are_the_codes() -> None:
    text = section("17 Observers")
    kinds = (Survey, Event, StandbyStatus, NodeStatus, NodeReport, Progressed, Wait)
    tables = re.findall(r"^An? (\w+):\n\n((?:\|.*\n)+)", text, re.M)
    assert [name for name, _ in tables] == [kind.__name__ for kind in kinds]
    for kind, (_, table) in zip(kinds, tables, strict=True):
        hints = typing.get_type_hints(kind)
        wanted = [[name, _type_of_status(hints[name])] for name in kind._fields]
        assert [row[:2] for row in rows(table)] == wanted


def _type_of_status(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        return f"list of {_type_of_status(typing.get_args(kind)[0])}"
    if isinstance(kind, types.UnionType):
        return f"{typing.get_args(kind)[0].__name__} or nil"
    return TYPES.get(kind) or str(kind.__name__)


def test_the_limits_of_a_status_are_the_codes() -> None:
    text = " ".join(section("17 Observers").split())
    for sentence in (
        f"or {ANSWER_S:g} seconds later",
        f"within {FRESH_S} seconds",
        f"At most {MAX_ASKERS} observers",
        f"at most {MAX_TEXT} characters",
        f"at most {MAX_REPORT_BYTES} bytes",
        f"the {MAX_WAITS} longest",
        f"the first {MAX_NAMED};",
    ):
        assert sentence in text


# -- the example --------------------------------------------------------------------------


def test_the_bytes_of_the_example_are_what_it_says() -> None:
    blocks = re.findall(r"```text\n(.*?)```", section("12 An example, byte for byte"), re.S)
    push = Envelope("j", 1, 7, 9, 5, 4, (6,), (), Exchange(True, True, (3,), (2,), (4,)))
    accepted = Envelope("j", 1, 9, 7, 0, 5, (), (), Accepted())
    assert [bytes.fromhex(block) for block in blocks] == [encode(push), encode(accepted)]
    assert [decode([bytes.fromhex(block)]) for block in blocks] == [push, accepted]
