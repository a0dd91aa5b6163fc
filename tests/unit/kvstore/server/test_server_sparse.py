"""A server's row-sparse parts: rounds, pulls, requests, and whatever a worker may send wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from store_requests import Asked

from kvstore import optimizer
from kvstore.errors import NotSupportedError, OptimizerNotSet, ValueMismatchError
from kvstore.optimizer.serialize import to_plain
from kvstore.protocol.requests import (
    PartEntry,
    RowPartEntry,
    StoreCall,
    pack,
    pack_parts,
    pack_row_part,
    unpack,
)
from kvstore.server.app import ServerStores
from kvstore.sparse.payload import (
    ROWS_FORM,
    RowPayloadKind,
    payload_bytes,
    read_payload,
    write_payload,
)
from pslite.config import Config
from pslite.errors import ProtocolError, UsageError, rebuild
from pslite.plane import Relays
from pslite.wire.messages import Answer, Exchange, PartsFailed

STORE, ROWS, DENSE = 1, 10, 20
NUM_ROWS, WIDTH = 6, 2


class Server:
    """One server of two workers, with a row-sparse part and a part of a dense key."""

    def __init__(
        self,
        *,
        num_rows: int = NUM_ROWS,
        synchronous: bool = True,
        max_message_bytes: int = 1 << 20,
    ) -> None:
        config = Config(
            num_workers=2,
            round_window=2,
            chunk_bytes=1024,
            max_message_bytes=max_message_bytes,
        )
        node: Any = SimpleNamespace(
            config=config,
            traffic=SimpleNamespace(
                serve=lambda plane, handle: None,
                replicate=lambda incoming, handle, *, alone: handle(incoming),
                primary=None,
                add_owner=lambda owner: None,
                carry_out=lambda effects: None,
            ),
            info=SimpleNamespace(node_id=8),
            membership=SimpleNamespace(title=lambda node: "server 0", relays=Relays()),
            pool=SimpleNamespace(submit=lambda lane, work: work()),
            buffer=lambda nbytes: np.empty(nbytes, np.uint8),
            clock=lambda: 0.0,
            io_queue=SimpleNamespace(look_after_each_step=lambda look: None),
        )
        self.stores = ServerStores(node)
        self.plane = self.stores._plane
        self.entry = RowPartEntry(ROWS, "table", True, num_rows, WIDTH, np.dtype("f4"))
        self.init(self.entry, [1, 4], synchronous=synchronous)
        dense = PartEntry(DENSE, "dense", False, 7, np.dtype("f4"))  # begins within a row
        frames = [np.arange(7, dtype="f4").tobytes()]
        self.ask(StoreCall.INIT, STORE, synchronous, pack_parts([dense]), [-1], [1], frames=frames)

    def init(self, entry: RowPartEntry, ids: Sequence[int], *, synchronous: bool = True) -> Asked:
        asked = self.create(entry, synchronous=synchronous)
        if asked.error is None and unpack(asked.body, bool)[0]:
            ones = np.ones((len(ids), WIDTH), entry.dtype).tobytes()
            self.ask(StoreCall.WRITE_ROWS, entry.part, frames=[ids_frame(*ids), ones])
            self.ask(StoreCall.END_ROWS, entry.part, -1, [])
        return asked

    def create(self, entry: RowPartEntry, *, synchronous: bool = True) -> Asked:
        body = STORE, synchronous, False, pack_row_part(entry)
        return self.ask(StoreCall.INIT_ROWS, *body)

    def listed(self, *after: int, most: int = 9) -> tuple[int, list[int]]:
        """The number of updates, and ids of the rows that are there."""
        asked = self.ask(StoreCall.HELD_ROWS, ROWS, list(after), most)
        (frame,) = asked.frames
        return unpack(asked.body, int)[0], np.frombuffer(frame, "<i8").tolist()

    def copies(self, *ids: int, part: int = ROWS) -> list[bytes]:
        """Values and states of rows."""
        flags, *copies = self.ask(StoreCall.READ_ROWS, part, True, frames=[ids_frame(*ids)]).frames
        assert flags == b"\1" * len(ids)
        return copies

    def ask(self, call: int, *fields: Any, frames: Sequence[Any] = ()) -> Asked:
        asked = Asked(0, call, pack(*fields), frames)
        try:
            self.stores.handle(asked.incoming)
        except Exception as error:  # as ``customer.py`` does
            asked.incoming.fail(error)
        return asked

    def set_optimizer(self, chosen: optimizer.Optimizer) -> Asked:
        return self.ask(StoreCall.SET_OPTIMIZER, STORE, True, False, to_plain(chosen))

    def exchange(self, rank: int, message: Exchange, frame: bytes) -> list[Any]:
        """What a worker's message leads to, work included."""
        sends = []
        effects = self.plane.exchange(rank, self.plane.epoch, message, [frame])
        while effects:
            effect: Any = effects.pop(0)
            if hasattr(effect, "jobs"):
                effects += self.plane.finished(effect.jobs, self.stores.apply(effect.jobs))
            else:
                sends.append(effect)
        return sends

    def push(self, rank: int, round_: int, payload: bytes, part: int = ROWS) -> list[Any]:
        sizes = (len(payload),)
        return self.exchange(
            rank, Exchange(True, False, (part,), (round_,), sizes, ROWS_FORM), payload
        )

    def pull(self, payload: bytes, part: int = ROWS, after: int = 0) -> Any:
        """The answer's frame; raises what the server answers."""
        sizes = (len(payload),)
        message = Exchange(False, True, (part,), (after,), sizes, ROWS_FORM)
        (send,) = self.exchange(0, message, payload)
        if isinstance(send.message, PartsFailed):
            raise rebuild(send.message.kind, send.message.error)
        return np.frombuffer(send.frames[0], np.uint8)

    def held(self) -> dict[int, list[float]]:
        """The rows that are there."""
        whole = payload(RowPayloadKind.HELD, [], b"", num_rows=self.entry.num_rows)
        found = read_payload(self.pull(whole, after=0))
        ids = range(found.num_rows) if found.kind is RowPayloadKind.ALL else found.ids.tolist()
        values = found.values.view("f4").reshape(-1, WIDTH).tolist()
        return dict(zip(ids, values, strict=True))


def payload(
    kind: RowPayloadKind,
    ids: Sequence[int],
    values: bytes,
    *,
    width: int = WIDTH,
    offset: int = 0,
    num_rows: int | None = None,
) -> bytes:
    memory = np.empty(payload_bytes(len(ids), 8, len(values)), np.uint8)
    count = len(ids) if num_rows is None else num_rows
    place = write_payload(memory, kind, count, width, offset, np.array(ids, np.int64), 8)
    place[:] = np.frombuffer(values, np.uint8)
    return memory.tobytes()


def rows(ids: Sequence[int], *values: float) -> bytes:
    """Rows of equal numbers, ``values`` in turn."""
    numbers = [values[index % len(values)] for index in range(len(ids))]
    return payload(RowPayloadKind.ROWS, ids, np.repeat(numbers, WIDTH).astype("f4").tobytes())


def wanted(ids: Sequence[int]) -> bytes:
    return payload(RowPayloadKind.WANTED, ids, b"")


# -- rounds and pulls ---------------------------------------------------------------------


def test_a_round_of_rows_replaces_or_updates() -> None:
    server = Server()
    assert server.held() == {1: [1, 1], 4: [1, 1]}
    assert server.push(1, 1, rows([0, 5], 2.0, 3.0)) == []
    answers = server.push(0, 1, rows([5], 10.0))
    assert [type(send.message) for send in answers] == [Answer, Answer]
    assert server.held() == {0: [2, 2], 5: [13, 13]}
    server.set_optimizer(optimizer.create("test"))
    server.push(0, 2, rows([1, 5], 1.0))
    server.push(1, 2, rows([]))
    assert server.held() == {0: [2, 2], 1: [1, 1], 5: [14, 14]}


def test_all_rows_may_come_and_go_without_their_ids() -> None:
    server = Server()
    values = np.arange(12, dtype="f4")
    server.push(0, 1, payload(RowPayloadKind.ALL, [], values.tobytes(), num_rows=NUM_ROWS))
    server.push(1, 1, rows([2], 100.0))
    found = read_payload(server.pull(payload(RowPayloadKind.HELD, [], b"", num_rows=NUM_ROWS)))
    values[4:6] += 100
    assert (found.kind, found.values.view("f4").tolist()) == (RowPayloadKind.ALL, values.tolist())
    part = read_payload(server.pull(payload(RowPayloadKind.HELD, [], b"", num_rows=2, offset=3)))
    assert (part.kind, part.ids.tolist()) == (RowPayloadKind.ROWS, [3, 4])


def test_rows_that_are_not_there_are_zero() -> None:
    found = Server().pull(wanted([0, 1, 4])).view("f4")
    assert found.tolist() == [0, 0, 1, 1, 1, 1]
    assert len(Server().pull(wanted([]))) == 0


def test_rows_of_a_dense_part_have_the_numbers_that_lie_in_it() -> None:
    server = Server()
    found = server.pull(payload(RowPayloadKind.WANTED, [0, 2], b"", width=3, offset=2), DENSE).view(
        "f4"
    )
    assert found.tolist() == [0, 4, 5, 6]
    ones = np.ones(4, "f4").tobytes()
    server.push(0, 1, payload(RowPayloadKind.ROWS, [0, 2], ones, width=3, offset=2), DENSE)
    plain = np.full(7, 10, "f4").tobytes()
    server.exchange(1, Exchange(True, False, (DENSE,), (1,), (28,)), plain)
    (send,) = server.exchange(0, Exchange(False, True, (DENSE,), (1,), ()), b"")
    assert np.frombuffer(send.frames[0], "f4").tolist() == [11, 10, 10, 10, 11, 11, 11]


@pytest.mark.parametrize(
    ("part", "sent"),
    [
        (ROWS, wanted(range(5))),
        (DENSE, payload(RowPayloadKind.WANTED, [0, 1, 2], b"", width=3, offset=2)),
    ],
    ids=["row-sparse", "dense"],
)
def test_an_answer_that_no_message_can_hold_is_an_error(part: int, sent: bytes) -> None:
    server = Server(max_message_bytes=24)
    with pytest.raises(ValueMismatchError, match=r"over PS_MAX_MESSAGE_BYTES \(24\)"):
        server.pull(sent, part)


def test_an_asynchronous_push_without_an_optimizer_is_its_error() -> None:
    server = Server(synchronous=False)
    for part, sent in (
        (ROWS, rows([1], 1.0)),
        (DENSE, payload(RowPayloadKind.ROWS, [1], np.ones(3, "f4").tobytes(), width=3, offset=2)),
    ):
        (send,) = server.push(0, 1, sent, part)
        assert (send.message.kind, send.message.consumed) == (OptimizerNotSet.__name__, True)


def test_an_update_that_raises_leaves_the_rows_and_the_count() -> None:
    server = Server(num_rows=2**40)
    server.ask(StoreCall.DELETE, STORE, [DENSE])  # LARS needs whole keys
    server.set_optimizer(optimizer.create("lars", learning_rate=0.1))
    server.push(0, 1, rows([1], 1.0))
    (send, _) = server.push(1, 1, rows([1], 1.0))
    assert send.message.kind == NotSupportedError.__name__
    assert server.held() == {1: [1, 1], 4: [1, 1]}
    assert server.listed()[0] == 0


def test_states_and_counts_are_taken_over_by_an_optimizer_of_the_same_class() -> None:
    server = Server()
    for round_, numbers in enumerate([{}, {"learning_rate": 0.5}], 1):
        server.set_optimizer(optimizer.create("sgd", momentum=0.5, **numbers))
        for rank in range(2):
            server.push(rank, round_, rows([1], 1.0))
    assert server.listed()[0] == 2
    server.set_optimizer(optimizer.create("adam"))
    for rank in range(2):
        server.push(rank, 3, rows([1], 1.0))
    assert server.listed()[0] == 1


VALUES = np.zeros(4, "f4").tobytes()
MALFORMED: dict[str, tuple[int, bytes]] = {
    "nothing": (ROWS, b""),
    "noise": (ROWS, bytes(range(40))),
    "ids out of range": (ROWS, rows([1, NUM_ROWS], 1.0)),
    "negative ids": (ROWS, rows([-1, 0], 1.0)),
    "repeated ids": (ROWS, rows([4, 4], 1.0)),
    "falling ids": (ROWS, rows([4, 3], 1.0)),
    "too few values": (ROWS, payload(RowPayloadKind.ROWS, [1, 2], VALUES[:-4])),
    "too many values": (ROWS, payload(RowPayloadKind.ROWS, [1], VALUES)),
    "rows of another width": (ROWS, payload(RowPayloadKind.ROWS, [1], VALUES[:12], width=3)),
    "an offset": (ROWS, payload(RowPayloadKind.ROWS, [1, 2], VALUES, offset=1)),
    "all rows of another part": (ROWS, payload(RowPayloadKind.ALL, [], VALUES, num_rows=2)),
    "what is wanted": (ROWS, wanted([1])),
    "all rows of a dense key": (DENSE, payload(RowPayloadKind.ALL, [], VALUES, num_rows=2)),
    "a dense row out of range": (
        DENSE,
        payload(RowPayloadKind.ROWS, [3], VALUES[:12], width=3, offset=2),
    ),
    "a dense row with too many values": (
        DENSE,
        payload(RowPayloadKind.ROWS, [0], VALUES[:8], width=3, offset=2),
    ),
    "dense rows of nothing": (DENSE, payload(RowPayloadKind.ROWS, [], b"", width=0)),
    "an offset behind the first row": (
        DENSE,
        payload(RowPayloadKind.ROWS, [], b"", width=3, offset=3),
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_push_is_its_senders_error_and_no_contribution(case: str) -> None:
    server = Server()
    part, sent = MALFORMED[case]
    (send,) = server.push(0, 1, sent, part)
    assert (send.peer, send.message.kind, send.message.consumed) == (
        0,
        ProtocolError.__name__,
        False,
    )
    server.push(1, 1, rows([0], 2.0))
    server.push(0, 1, rows([0], 3.0))
    assert server.held() == {0: [5, 5]}


MALFORMED_PULLS: dict[str, tuple[int, bytes]] = {
    "nothing": (ROWS, b""),
    "ids out of range": (ROWS, wanted([NUM_ROWS])),
    "falling ids": (ROWS, wanted([2, 1])),
    "falling ids of a dense key": (DENSE, payload(RowPayloadKind.WANTED, [1, 0], b"", width=3)),
    "a look": (ROWS, payload(RowPayloadKind.LOOK, [1], b"")),
    "values": (ROWS, payload(RowPayloadKind.WANTED, [1], b"1234")),
    "rows": (ROWS, rows([1], 1.0)),
    "more rows than there are": (ROWS, payload(RowPayloadKind.HELD, [], b"", num_rows=4, offset=3)),
    "all rows of a dense key": (DENSE, payload(RowPayloadKind.HELD, [], b"", num_rows=1)),
    "a dense row out of range": (
        DENSE,
        payload(RowPayloadKind.WANTED, [3], b"", width=3, offset=2),
    ),
    "a part that is not there": (99, wanted([1])),
}


@pytest.mark.parametrize("case", MALFORMED_PULLS)
def test_a_malformed_pull_is_an_error(case: str) -> None:
    part, sent = MALFORMED_PULLS[case]
    with pytest.raises((ProtocolError, UsageError)):
        Server().pull(sent, part)


def test_a_form_that_nobody_knows_is_an_error() -> None:
    sent = rows([1], 1.0)
    message = Exchange(True, False, (ROWS,), (1,), (len(sent),), 9)
    (send,) = Server().exchange(0, message, sent)
    assert "form 9" in send.message.error


def test_workers_that_see_other_rows_of_a_dense_part_get_an_error() -> None:
    server = Server()
    ones = np.ones(3, "f4").tobytes()
    server.push(0, 1, payload(RowPayloadKind.ROWS, [1], ones, width=3, offset=2), DENSE)
    sends = server.push(1, 1, payload(RowPayloadKind.ROWS, [1], ones, width=3, offset=0), DENSE)
    assert {send.message.kind for send in sends} == {ProtocolError.__name__}


# -- requests -----------------------------------------------------------------------------


def ids_frame(*ids: int) -> bytes:
    return np.array(ids, "<i8").tobytes()


def floats(*values: float) -> bytes:
    return np.array(values, "f4").tobytes()


def test_a_part_that_is_there_stays_when_another_rank_creates_it_again() -> None:
    server = Server()
    assert server.init(server.entry, [0]).error is None
    assert server.held() == {1: [1, 1], 4: [1, 1]}


def test_a_part_whose_worker_was_lost_half_way_gets_all_rows_of_the_next() -> None:
    server = Server()
    entry = server.entry._replace(part=11)
    server.create(entry)
    server.ask(StoreCall.WRITE_ROWS, 11, frames=[ids_frame(0), floats(9, 9)])
    server.init(entry, [2, 3])
    (ids,) = server.ask(StoreCall.HELD_ROWS, 11, [], 9).frames
    assert ids == ids_frame(2, 3)


def test_rows_are_read_with_states_and_written_again() -> None:
    server = Server()
    server.set_optimizer(optimizer.create("sgd", learning_rate=1.0, momentum=0.5))
    for rank in range(2):
        server.push(rank, 1, rows([1, 2], 1.0))
    assert server.listed() == (1, [1, 2, 4])
    assert server.copies(1, 4) == [floats(-1, -1, 1, 1), floats(-2, -2, 0, 0)]

    def write(*ids: int) -> Asked:
        frames = [ids_frame(*ids), floats(*[7] * 2 * len(ids)), floats(*[5] * 2 * len(ids))]
        return server.ask(StoreCall.WRITE_ROWS, ROWS, frames=frames)

    assert server.ask(StoreCall.BEGIN_ROWS, ROWS, [True]).error is None
    assert write(0).error is None
    assert write(3).error is None
    assert server.ask(StoreCall.END_ROWS, ROWS, 4, []).error is None
    assert server.held() == {0: [7, 7], 3: [7, 7]}
    assert server.copies(0, 3)[1] == floats(5, 5, 5, 5)
    assert server.listed()[0] == 4
    server.ask(StoreCall.BEGIN_ROWS, ROWS, [False])
    only_states = [ids_frame(3), floats(1, 1)]
    assert server.ask(StoreCall.WRITE_ROWS, ROWS, frames=only_states).error is None
    server.ask(StoreCall.END_ROWS, ROWS, 6, [])
    assert server.copies(0, 3) == [floats(7, 7, 7, 7), floats(0, 0, 1, 1)]


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_rows_of_halves_that_come_without_masters_get_them(name: str) -> None:
    server = Server()
    half = server.entry._replace(part=11, key="half", num_rows=2**40, dtype=np.dtype("f2"))
    assert server.init(half, []).error is None
    server.set_optimizer(optimizer.create(name))

    def values(count: int, number: float) -> bytes:
        return np.full(WIDTH * count, number, "f2").tobytes()

    num_states = {"sgd": 0, "adam": 2}[name]
    server.ask(StoreCall.BEGIN_ROWS, 11, [True])
    for ids, number in (((3,), 1.5), ((5, 2**39), 2.5)):
        states = [floats(*[0.0] * WIDTH * len(ids))] * num_states
        frames = [ids_frame(*ids), values(len(ids), number), *states]
        asked = server.ask(StoreCall.WRITE_ROWS, 11, frames=frames)
        assert asked.error is None
    assert server.ask(StoreCall.END_ROWS, 11, 0, []).error is None
    found, *states, master = server.copies(3, 5, 2**39, part=11)
    assert found == values(1, 1.5) + values(2, 2.5)
    assert master == floats(1.5, 1.5, 2.5, 2.5, 2.5, 2.5)
    assert [np.frombuffer(state, "f4").tolist() for state in states] == [[0] * 6] * num_states


def test_the_rows_that_are_there_are_listed_some_at_a_time() -> None:
    server = Server()
    server.set_optimizer(optimizer.create("test"))
    for rank in range(2):
        server.push(rank, 1, rows([0, 2], 1.0))
    for after, ids in (([], [0, 1]), ([1], [2, 4]), ([2], [4]), ([4], [])):
        assert server.listed(*after, most=2) == (1, ids)


def test_a_key_that_is_cut_and_an_optimizer_for_whole_keys_exclude_each_other() -> None:
    server = Server()
    cut = server.entry._replace(part=11, key="cut", is_whole=False)
    lamb = optimizer.create("lamb")
    assert server.init(cut, [1]).error is None
    assert "'dense'" in str(server.set_optimizer(lamb).error) or "'cut'" in str(
        server.set_optimizer(lamb).error
    )
    server.ask(StoreCall.DELETE, STORE, [11, DENSE])
    assert server.set_optimizer(lamb).error is None
    assert "whole keys" in str(server.init(cut._replace(part=12), [1]).error)


def test_statistics_and_names_know_row_sparse_parts() -> None:
    server = Server()
    (stats,) = unpack(server.ask(StoreCall.STATS).body, dict)
    assert (stats["parts"], stats["value_bytes"]) == (2, 2 * 8 + 28)
    assert server.stores.name_of(ROWS) == "key 'table'"
    server.ask(StoreCall.DELETE, STORE, [ROWS])
    assert server.stores.name_of(ROWS) is None


WRONG: dict[str, tuple[int, tuple[Any, ...], list[bytes]]] = {
    "a malformed part": (StoreCall.INIT_ROWS, (STORE, True, False, [30]), []),
    "a part that is not there": (StoreCall.HELD_ROWS, (99, [], 9), []),
    "a dense part": (StoreCall.HELD_ROWS, (DENSE, [], 9), []),
    "a part of no table": (StoreCall.TABLE_STATS, (ROWS,), []),
    "a list of no rows": (StoreCall.HELD_ROWS, (ROWS, [], 0), []),
    "ids out of range": (StoreCall.READ_ROWS, (ROWS, True), [ids_frame(NUM_ROWS)]),
    "negative ids": (StoreCall.READ_ROWS, (ROWS, True), [ids_frame(-1)]),
    "ids that fall": (StoreCall.READ_ROWS, (ROWS, True), [ids_frame(2, 1)]),
    "half an id": (StoreCall.READ_ROWS, (ROWS, True), [b"1234"]),
    "no ids": (StoreCall.READ_ROWS, (ROWS, True), []),
    "a beginning without a word": (StoreCall.BEGIN_ROWS, (ROWS, []), []),
    "a beginning with rows": (StoreCall.BEGIN_ROWS, (ROWS, [True]), [ids_frame(1)]),
    "rows that nobody announced": (StoreCall.WRITE_ROWS, (ROWS,), [ids_frame(1), floats(1, 1)]),
    "an end that nobody announced": (StoreCall.END_ROWS, (ROWS, 1, []), []),
    "a negative count": (StoreCall.END_ROWS, (ROWS, -2, []), []),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_is_an_error_and_changes_nothing(case: str) -> None:
    server = Server()
    call, fields, frames = WRONG[case]
    asked = server.ask(call, *fields, frames=frames)
    assert isinstance(asked.error, (ProtocolError, UsageError, ValueMismatchError))
    assert server.held() == {1: [1, 1], 4: [1, 1]}


WRONG_ROWS: dict[str, list[bytes]] = {
    "no frames": [],
    "too few values": [ids_frame(1), floats(1)],
    "too many arrays": [ids_frame(1), floats(1, 1), floats(1, 1)],
    "ids out of range": [ids_frame(NUM_ROWS), floats(1, 1)],
}


@pytest.mark.parametrize("case", WRONG_ROWS)
def test_wrong_rows_of_a_file_are_an_error(case: str) -> None:
    server = Server()
    server.ask(StoreCall.BEGIN_ROWS, ROWS, [True])
    asked = server.ask(StoreCall.WRITE_ROWS, ROWS, frames=WRONG_ROWS[case])
    assert isinstance(asked.error, (ProtocolError, ValueMismatchError))
    assert server.listed() == (0, [])
