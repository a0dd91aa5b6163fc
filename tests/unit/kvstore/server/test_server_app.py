"""A server's stores as one worker after the other asks them, without a network.

Requests arrive as they do on the I/O thread; the pool runs its work at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from store_requests import Asked

from kvstore import optimizer
from kvstore.errors import UnknownOptimizerError, ValueMismatchError
from kvstore.optimizer.serialize import from_plain, to_plain
from kvstore.protocol import commands
from kvstore.protocol.requests import PartEntry, StoreCall, pack, pack_parts, unpack
from kvstore.server.app import GOODBYE_S, OneForAll, ServerStores
from pslite.config import Config
from pslite.errors import ProtocolError, RemoteError, UsageError
from pslite.node.io_queue import Timers
from pslite.plane import Relays
from pslite.wire.messages import Exchange

STORE = 1
FLOAT = np.dtype(np.float32)
MOMENTUM = optimizer.create("sgd", learning_rate=0.5, momentum=0.5)
LAMB = optimizer.create("lamb")


class Server:
    """One server of two workers."""

    def __init__(self, import_errors: Sequence[str] = ()) -> None:
        config = Config(
            num_workers=2,
            round_window=2,
            chunk_bytes=1024,
            max_message_bytes=1 << 20,
        )
        self._traffic = SimpleNamespace(
            serve=lambda plane, handle: None,
            replicate=lambda incoming, handle, *, alone: handle(incoming),
            primary=None,
            add_owner=lambda owner: None,
            carry_out=lambda effects: None,
        )
        node: Any = SimpleNamespace(
            config=config,
            traffic=self._traffic,
            info=SimpleNamespace(node_id=8),
            membership=SimpleNamespace(title=lambda node: "server 0", relays=Relays()),
            pool=SimpleNamespace(submit=lambda lane, work: work()),
            buffer=lambda nbytes: np.empty(nbytes, np.uint8),
            clock=lambda: 0.0,
            io_queue=SimpleNamespace(look_after_each_step=lambda look: None),
        )
        self.stores = ServerStores(node, import_errors)

    def ask(self, call: int, *fields: Any, frames: Sequence[Any] = (), rank: int = 0) -> Asked:
        asked = Asked(rank, call, pack(*fields), frames)
        try:
            self.stores.handle(asked.incoming)
        except Exception as error:  # as ``customer.py`` does
            asked.incoming.fail(error)
        return asked

    def init(self, *parts: PartEntry, value: float = 1.0, synchronous: bool = True) -> Asked:
        frames = [np.full(part.num_elements, value).astype(part.dtype).tobytes() for part in parts]
        fields = STORE, synchronous, pack_parts(parts), [-1] * len(parts), [len(parts)]
        return self.ask(StoreCall.INIT, *fields, frames=frames)

    def set_optimizer(self, chosen: Any, *, only_check: bool = False) -> Asked:
        plain = to_plain(chosen) if isinstance(chosen, optimizer.Optimizer) else chosen
        return self.ask(StoreCall.SET_OPTIMIZER, STORE, True, only_check, plain)

    def optimizer(self) -> list[Any]:
        (found,) = unpack(self.ask(StoreCall.OPTIMIZER, STORE).body, list)
        return [from_plain(plain) for plain in found]

    def read(self, *numbers: int) -> tuple[list[int], list[list[float]]]:
        """Counts, and all arrays as float32."""
        asked = self.ask(StoreCall.READ, list(numbers))
        (counts,) = unpack(asked.body, list)
        return counts, [np.frombuffer(frame, np.float32).tolist() for frame in asked.frames]

    def write(self, numbers: Any, counts: Any, has_values: bool, *arrays: Any) -> Asked:
        frames = [np.asarray(array, np.float32).tobytes() for array in arrays]
        return self.ask(StoreCall.WRITE, numbers, counts, has_values, frames=frames)

    def push(self, part: int, round_: int, *values: np.ndarray[Any, Any]) -> None:
        """One round of a part, from all workers."""
        plane = self.stores._plane
        for rank, value in enumerate(values):
            message = Exchange(True, False, (part,), (round_,), (value.nbytes,))
            for effect in plane.exchange(rank, plane.epoch, message, [value.tobytes()]):
                jobs = getattr(effect, "jobs", None)
                if jobs is not None:
                    plane.finished(jobs, self.stores.apply(jobs))

    def stats(self) -> dict[str, int]:
        (found,) = unpack(self.ask(StoreCall.STATS).body, dict)
        result: dict[str, int] = found
        return result


def part(number: int, size: int = 4, key: str = "w", dtype: Any = FLOAT, whole: bool = True) -> Any:
    return PartEntry(number, key, whole, size, np.dtype(dtype))


# -- parts --------------------------------------------------------------------------------


def test_parts_have_the_values_that_they_were_created_with() -> None:
    server = Server()
    assert server.init(part(1), part(2, 3), value=5.0).body == b""
    assert server.read(2, 1) == ([0, 0], [[5.0] * 3, [5.0] * 4])
    assert server.stats()["value_bytes"] == 28


def test_keys_of_two_messages_are_updated_as_one_when_they_always_come_together() -> None:
    server = Server()
    size = 900  # 3,600 bytes; a message has 4,096 here
    server.init(part(1, size))
    server.init(part(2, size))
    plane = server.stores._plane
    values = np.ones(2 * size, np.float32).tobytes()
    for round_ in range(1, 6):
        message = Exchange(True, False, (1, 2), (round_,) * 2, (4 * size,) * 2)
        jobs = []
        for rank in range(2):
            for effect in plane.exchange(rank, plane.epoch, message, [values]):
                jobs += getattr(effect, "jobs", [])
        plane.finished(jobs, server.stores.apply(jobs))
    assert [job.parts for job in jobs] == [(1, 2)]
    assert server.read(1, 2)[1] == [[2.0] * size] * 2


def test_parts_that_are_there_already_keep_their_values() -> None:
    """A rank that stands in for one that left half-way sends all of them again."""
    server = Server()
    server.init(part(1), value=5.0)
    assert server.init(part(1), part(2), value=7.0).body == b""
    assert server.read(1, 2)[1] == [[5.0] * 4, [7.0] * 4]


def test_a_message_of_which_all_parts_are_there_is_answered_too() -> None:
    server = Server()
    server.init(part(1), part(2), value=5.0)
    assert server.init(part(1), part(2), value=7.0).body == b""
    assert server.read(1, 2)[1] == [[5.0] * 4] * 2


@pytest.mark.parametrize("cuts", [[], [1], [1, 2], [0, 2], [-1, 3], [1.0, 1], ["2"], [[2]]])
def test_cuts_that_do_not_fit_the_parts_create_nothing(cuts: list[Any]) -> None:
    server = Server()
    fields = STORE, True, pack_parts([part(1), part(2)]), [-1, -1], cuts
    asked = server.ask(StoreCall.INIT, *fields, frames=[bytes(32)])
    assert isinstance(asked.error, ProtocolError)
    assert server.stats()["parts"] == 0


def test_an_empty_part_is_one_too() -> None:
    server = Server()
    server.init(part(1, 0), part(2, 2))
    assert server.read(1, 2) == ([0, 0], [[], [1.0, 1.0]])


@pytest.mark.parametrize(
    "frames", [[], [b"123"], [bytes(16), bytes(16)], [bytes(17)]], ids=["none", "3", "more", "17"]
)
def test_values_that_do_not_fit_their_parts_create_nothing(frames: list[bytes]) -> None:
    server = Server()
    asked = server.ask(StoreCall.INIT, STORE, True, pack_parts([part(1)]), [-1], [1], frames=frames)
    assert isinstance(asked.error, ProtocolError)
    assert server.stats()["parts"] == 0
    assert server.init(part(1)).error is None


def test_parts_of_several_dtypes_may_come_together() -> None:
    server = Server()
    parts = [part(1), part(2, 3, dtype=np.int64), part(3, 2, dtype=np.int64), part(4)]
    assert server.init(*parts).error is None
    assert server.stats() == {
        "parts": 4,
        "value_bytes": 16 + 24 + 16 + 16,
        "relayed_bytes": 0,
        "state_bytes": 0,
        "rounds": 0,
        "waiting_contributions": 0,
        "has_standby": False,
    }


@pytest.mark.parametrize("is_in_sync", [False, True])
def test_a_server_says_whether_a_standby_could_take_its_place(is_in_sync: bool) -> None:
    server = Server()
    server._traffic.primary = SimpleNamespace(is_in_sync=is_in_sync)
    assert server.stats()["has_standby"] is is_in_sync


def test_a_deleted_part_is_gone_and_deleting_it_twice_is_no_error() -> None:
    """Another rank may have deleted half of them before it left."""
    server = Server()
    server.init(part(1), part(2))
    for _ in range(2):
        assert server.ask(StoreCall.DELETE, STORE, [1]).body == b""
    assert server.ask(StoreCall.DELETE, STORE, [77]).body == b""
    assert isinstance(server.ask(StoreCall.READ, [1]).error, UsageError)
    assert server.read(2)[1] == [[1.0] * 4]
    assert server.stats()["parts"] == 1
    assert server.init(part(1), value=9.0).error is None
    assert server.read(1)[1] == [[9.0] * 4]


# -- values and states --------------------------------------------------------------------


def test_states_are_read_and_written_behind_the_values() -> None:
    server = Server()
    server.init(part(1, 2), part(2, 2))
    server.set_optimizer(MOMENTUM)
    assert server.read(1) == ([0], [[1.0, 1.0], [0.0, 0.0]])
    assert server.write([1], [3], True, [2.0, 4.0], [1.0, 2.0]).body == b""
    assert server.read(1, 2) == ([3, 0], [[2.0, 4.0], [1.0, 2.0], [1.0, 1.0], [0.0, 0.0]])
    assert server.write([1], [5], False, [8.0, 8.0]).body == b""
    assert server.read(1) == ([5], [[2.0, 4.0], [8.0, 8.0]])


def test_what_was_written_is_what_the_next_round_starts_from() -> None:
    server = Server()
    server.init(part(1, 2))
    server.set_optimizer(MOMENTUM)
    server.write([1], [3], True, [2.0, 4.0], [1.0, 2.0])
    server.push(1, 1, np.ones(2, np.float32), np.ones(2, np.float32))
    # mom = 0.5 * mom - 0.5 * 2, weight += mom
    assert server.read(1) == ([4], [[1.5, 4.0], [-0.5, 0.0]])


@pytest.mark.parametrize(
    ("numbers", "counts", "arrays"),
    [
        ([1], [0], [[1.0, 1.0]]),  # the state is missing
        ([1], [0], [[1.0, 1.0], [1.0], []]),
        ([1], [0], [[1.0], [1.0, 1.0]]),
        ([1], [0], [[1.0] * 3, [1.0, 1.0]]),
        ([1], [0], []),
    ],
)
def test_values_of_a_wrong_size_are_refused_and_change_nothing(
    numbers: Any, counts: Any, arrays: Any
) -> None:
    server = Server()
    server.init(part(1, 2))
    server.set_optimizer(MOMENTUM)
    asked = server.write(numbers, counts, True, *arrays)
    assert isinstance(asked.error, ValueMismatchError)
    assert "the values and states for key 'w' must be" in str(asked.error)
    assert server.read(1) == ([0], [[1.0, 1.0], [0.0, 0.0]])


@pytest.mark.parametrize("counts", [[], [-1], [1.0], ["1"], [True], [1, 1]])
def test_counts_that_make_no_sense_are_refused(counts: Any) -> None:
    server = Server()
    server.init(part(1, 2))
    assert isinstance(server.write([1], counts, True, [5.0, 5.0]).error, ProtocolError)
    assert server.read(1) == ([0], [[1.0, 1.0]])


@pytest.mark.parametrize("number", [2, -1, "1", 1.0, None, [1]])
def test_parts_that_nobody_knows_are_named(number: Any) -> None:
    server = Server()
    server.init(part(1, 2))
    for asked in (
        server.ask(StoreCall.READ, [1, number]),
        server.write([1, number], [0, 0], True, [5.0, 5.0], [5.0, 5.0]),
    ):
        assert isinstance(asked.error, UsageError)
        assert f"does not have part {number!r}" in str(asked.error)
    assert server.read(1) == ([0], [[1.0, 1.0]])


def test_reading_and_writing_nothing_is_answered() -> None:
    server = Server()
    assert server.read() == ([], [])
    assert server.write([], [], True).body == b""


# -- optimizers ---------------------------------------------------------------------------


def test_an_optimizer_is_set_and_read_back() -> None:
    server = Server()
    assert server.optimizer() == []
    assert server.set_optimizer(MOMENTUM).body == b""
    assert server.optimizer() == [MOMENTUM]


def test_a_question_whether_it_could_be_set_changes_nothing() -> None:
    server = Server()
    server.set_optimizer(MOMENTUM)
    assert server.set_optimizer(LAMB, only_check=True).error is None
    assert server.optimizer() == [MOMENTUM]


@pytest.mark.parametrize("only_check", [True, False])
def test_an_optimizer_for_whole_keys_is_refused_while_there_are_cut_ones(only_check: bool) -> None:
    server = Server()
    server.init(part(1, whole=False), part(2, key="v"), part(3, whole=False))
    for deleted in (1, 3):
        asked = server.set_optimizer(LAMB, only_check=only_check)
        assert isinstance(asked.error, UsageError)
        assert "lamb needs whole keys, but init split 'w' into parts" in str(asked.error)
        server.ask(StoreCall.DELETE, STORE, [deleted])
    assert server.optimizer() == []
    assert server.set_optimizer(LAMB).error is None


def test_keys_that_are_cut_within_rows_are_refused_by_what_sees_rows() -> None:
    server = Server()
    rows = optimizer.create("groupadagrad")
    fitting = part(1, 8, whole=False)._replace(width=4)
    torn = part(2, 6, "v", whole=False)._replace(width=4)
    whole = part(3, 6, "u")._replace(width=6)
    assert server.init(fitting, torn, whole).error is None
    asked = server.set_optimizer(rows)
    assert isinstance(asked.error, UsageError)
    assert "groupadagrad needs whole rows, but init split 'v' into parts" in str(asked.error)
    server.ask(StoreCall.DELETE, STORE, [2])
    assert server.set_optimizer(rows).error is None
    assert "'v' is split into parts" in str(server.init(torn._replace(part=4)).error)
    server.push(1, 1, *[np.arange(8, dtype=np.float32)] * 2)
    pushed = np.arange(0, 16, 2).reshape(2, 4)
    means = (pushed**2).mean(axis=1, keepdims=True)
    expected = 1 - 0.01 * pushed / np.sqrt(means + 1e-5)
    _, (value, history) = server.read(1)
    np.testing.assert_allclose(value, expected.reshape(-1), rtol=1e-6)
    assert history == [14.0] * 4 + [126.0] * 4


def test_cut_keys_are_refused_while_the_optimizer_needs_whole_ones() -> None:
    server = Server()
    server.set_optimizer(LAMB)
    asked = server.init(part(1, whole=False))
    assert isinstance(asked.error, UsageError)
    assert "lamb needs whole keys, but 'w' is split" in str(asked.error)
    assert server.stats()["parts"] == 0
    assert server.init(part(1, whole=True)).error is None


@pytest.mark.parametrize("plain", [[], ["sgd"], [1, {}], ["sgd", []], ["sgd", {"wd": {}}]])
def test_what_is_no_optimizer_is_a_protocol_error(plain: Any) -> None:
    server = Server()
    assert isinstance(server.set_optimizer(plain).error, ProtocolError)
    assert server.optimizer() == []


def test_an_unknown_optimizer_is_told_with_what_could_not_be_imported() -> None:
    asked = Server().set_optimizer(["mine", {}])
    assert isinstance(asked.error, UnknownOptimizerError)
    assert "--server-import" in str(asked.error)
    asked = Server(["importing mine failed: no such file"]).set_optimizer(["mine", {}])
    assert isinstance(asked.error, UnknownOptimizerError)
    assert str(asked.error).startswith("server 0: no optimizer is named 'mine'")
    assert str(asked.error).endswith("\nimporting mine failed: no such file")


# -- the rest -----------------------------------------------------------------------------


def test_a_command_is_run_and_its_error_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_commands", {3: str.upper, 4: lambda body: 1 / 0})
    server = Server()
    assert unpack(server.ask(StoreCall.COMMAND, 3, "abc").body, str) == ["ABC"]
    error = server.ask(StoreCall.COMMAND, 4, "").error
    assert isinstance(error, RemoteError)
    assert error.kind == "ZeroDivisionError"
    assert isinstance(server.ask(StoreCall.COMMAND, 5, "").error, UsageError)


#: STATS and KEPT_STEP have no body. A server keeps that of KEEP_STEP unread; only workers use it.
UNREAD = {StoreCall.STATS, StoreCall.KEEP_STEP, StoreCall.KEPT_STEP}


@pytest.mark.parametrize("call", list(StoreCall))
@pytest.mark.parametrize("fields", [("nonsense",), (1, 2, 3, 4, 5, 6), (None,) * 3])
def test_bodies_that_make_no_sense_are_protocol_errors(call: StoreCall, fields: Any) -> None:
    server = Server()
    server.init(part(1))
    asked = server.ask(call, *fields)
    assert call in UNREAD or isinstance(asked.error, ProtocolError)
    assert server.read(1)[1] == [[1.0] * 4]


def test_what_a_worker_keeps_of_its_step_is_for_another_process_of_this_worker_only() -> None:
    server = Server()

    def kept(rank: int) -> tuple[bytes, list[Any]]:
        asked = server.ask(StoreCall.KEPT_STEP, rank=rank)
        return asked.body, list(asked.frames)

    assert kept(0) == (b"", [])
    server.ask(StoreCall.KEEP_STEP, 1, 7, "counts", frames=[memoryview(b"state")], rank=0)
    assert kept(0) == (pack(1, 7, "counts"), [b"state"])
    assert kept(1) == (b"", [])
    assert server.ask(StoreCall.KEEP_STEP, 1, 8, "others", rank=0).body == b""
    assert kept(0) == kept(0) == (pack(1, 8, "others"), [])


def test_a_call_that_no_server_knows_is_an_error() -> None:
    assert isinstance(Server().ask(99).error, ProtocolError)


@pytest.mark.parametrize(("live", "refused"), [((1,), False), ((), False), ((0, 1), True)])
def test_what_the_lowest_rank_asked_is_done_although_it_has_left_since(
    live: tuple[int, ...], refused: bool
) -> None:
    """Worker 1 asks while the goodbye of worker 0 is still on its way to this server."""
    ranks, timers, handled = [0, 1], Timers(), []
    node: Any = SimpleNamespace(
        membership=SimpleNamespace(live=lambda role: tuple(ranks)),
        io_queue=SimpleNamespace(call_later=lambda delay_s, look: timers.add(delay_s, look)),
        error=None,
    )
    asked = Asked(1, StoreCall.CLOSE)
    OneForAll(node, handled.append).handle(asked.incoming)
    assert not handled
    ranks[:] = live
    timers.run(GOODBYE_S)
    assert (handled == []) == refused
    assert isinstance(asked.error, UsageError) == refused
