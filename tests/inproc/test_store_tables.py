"""Growing tables of distributed stores: what they hold, and what their users meet."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cluster import LIMIT_S
from workers import Workers

import kvstore as mx
from kvstore import KVStore, optimizer
from kvstore.checkpoint.tables import TableFile
from kvstore.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CheckpointError,
    DuplicateKeyError,
    NotSupportedError,
    UsageError,
    ValueMismatchError,
)
from kvstore.protocol.requests import StoreCall
from kvstore.server.tables import TablePart
from kvstore.sparse.tables.settings import settings_to_plain
from kvstore.stores.dist.tables import DistTable, _statistics_in
from pslite.errors import ClosedError, ProtocolError, RemoteError
from pslite.node.data import Traffic

KINDS = ["dist_sync", "dist_device_sync", "dist_async"]
CLUSTERS = [(1, 1), (2, 2), (2, 5)]
SGD = optimizer.create("sgd", learning_rate=1.0)
IDS = np.random.default_rng(3).integers(0, 2**64, 40, np.uint64)


@pytest.fixture(params=["dist_sync", "dist_async"])
def shared(request: pytest.FixtureRequest) -> Iterator[Workers]:
    with Workers(request.param, 2, 2) as workers:
        yield workers


@pytest.fixture
def tables(shared: Workers) -> Iterator[list[DistTable]]:
    """One table of both workers, on a cluster that has to live on."""

    def make(kv: KVStore) -> Any:
        return kv.create_table("t", 2, init=0.5, optimizer=SGD)

    def close(kv: KVStore) -> None:
        table = made[kv.rank]
        table.close()

    made: list[Any] = shared.run(make)
    yield made
    shared.run(close)


def trained(kv: KVStore, dtype: str, chosen: str | None) -> tuple[Any, Any]:
    table = kv.create_table("user", 3, optimizer=chosen, dtype=dtype, seed=5)
    random = np.random.default_rng(kv.rank)
    for _ in range(5):
        places = random.integers(0, len(IDS), 20)
        table.pull(IDS[places])
        table.push(IDS[places], random.normal(size=(20, 3)).astype(dtype))
    kv.barrier()
    return table.ids(), table.pull(IDS, touch=False)


@pytest.mark.parametrize("chosen", [None, "adam"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_one_worker_gets_the_bits_of_a_local_table(dtype: str, chosen: str | None) -> None:
    with mx.create("local") as kv:
        expected_ids, expected = trained(kv, dtype, chosen)
    for kind, num_servers in (("dist_sync", 1), ("dist_async", 2), ("dist_sync", 5)):
        with Workers(kind, 1, num_servers) as workers:
            ((ids, rows),) = workers.run(lambda kv: trained(kv, dtype, chosen))
        np.testing.assert_array_equal(ids, expected_ids)
        np.testing.assert_array_equal(rows, expected)


def test_two_workers_get_the_same_bits_with_any_number_of_servers() -> None:
    found = []
    for num_servers in (1, 2, 5):
        with Workers("dist_sync", 2, num_servers) as workers:
            found.append(workers.run(lambda kv: trained(kv, "float32", "adagrad")))
    for (ids, rows), (others_ids, others) in found:
        np.testing.assert_array_equal(ids, found[0][0][0])
        np.testing.assert_array_equal(ids, others_ids)
        assert rows.tobytes() == others.tobytes() == found[0][0][1].tobytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_workers", "num_servers"), CLUSTERS)
def test_pulls_see_their_own_pushes_and_those_of_the_round(
    kind: str, num_workers: int, num_servers: int
) -> None:
    def script(kv: KVStore) -> None:
        table = kv.create_table("t", 2, init=0, optimizer=SGD)
        for step in range(1, 6):
            table.push(IDS, np.full((40, 2), -1, np.float32))
            rows = table.pull(IDS)
            if kind == "dist_async":
                assert (step <= rows).all()
                assert (rows <= step + 5 * (num_workers - 1)).all()
            else:
                assert (rows == step * num_workers).all()
            if kind != "dist_async":
                kv.barrier()

    with Workers(kind, num_workers, num_servers) as workers:
        workers.run(script)


def test_a_worker_without_ids_takes_part_in_the_round(shared: Workers, tables: Any) -> None:
    def script(kv: KVStore) -> Any:
        table = tables[kv.rank]
        mine = IDS[:3] if kv.rank else IDS[:0]
        table.push(mine, np.ones((len(mine), 2), np.float32))
        rows = table.pull(IDS[:3])
        kv.barrier()
        return rows, table.statistics().pushes, table.pull(IDS[:3])

    is_sync = shared.kind == "dist_sync"
    for rows, pushes, after in shared.run(script):
        assert (after == -0.5).all()
        assert pushes == (1 if is_sync else 2)
        if is_sync:
            assert (rows == -0.5).all()


def test_contributions_of_a_round_are_added_in_rank_order() -> None:
    values = np.float32([1e8, 1.0, -1e8])

    def script(kv: KVStore) -> Any:
        table = kv.create_table("t", 1, init=0)
        table.push([7], values[kv.rank : kv.rank + 1, None])
        return table.pull([7])

    with Workers("dist_sync", 3, 2) as workers:
        assert {float(found[0, 0]) for found in workers.run(script)} == {
            float((values[0] + values[1]) + values[2])
        }


def test_statistics_and_sizes_are_those_of_all_servers() -> None:
    def script(kv: KVStore) -> Any:
        table = kv.create_table("t", 2, init=0, optimizer=SGD, capacity=11, admit_after=2, ttl=3)
        for _ in range(2):
            table.pull([1, 2, 2, 3])
        table.push([1, 9], np.ones((2, 2), np.float32))
        return table.statistics(), table.size, len(table)

    with Workers("dist_sync", 1, 2) as workers:
        ((seen, size, length),) = workers.run(script)
    assert size == length == seen.rows == 3
    assert (seen.capacity, seen.pushes, seen.waiting) == (11, 1, 0)
    assert (seen.pulled, seen.hits, seen.made, seen.refused, seen.dropped) == (6, 0, 3, 4, 1)
    assert seen.nbytes <= seen.limit_bytes


def test_a_capacity_is_split_evenly_and_kept() -> None:
    def script(kv: Any) -> Any:
        table = kv.create_table("t", 2, capacity=12)
        for start in range(0, 40, 4):
            table.pull(IDS[start : start + 4])
        replies = table._pages.ask_each(StoreCall.TABLE_STATS).result(20)
        return table.statistics(), [_statistics_in(reply.body).capacity for reply in replies]

    with Workers("dist_sync", 1, 5) as workers:
        ((seen, shares),) = workers.run(script)
    assert sorted(shares) == [2, 2, 2, 3, 3]
    assert seen.rows <= 12
    assert seen.evicted == seen.made - seen.rows > 0


def test_rows_come_in_the_shape_of_the_ids_and_into_any_array(tables: Any) -> None:
    table = tables[0]
    first = table.pull(np.array([[5, 6], [5, 7]]))
    assert first.shape == (2, 2, 2)
    assert first.dtype == np.float32
    for out in (np.zeros((3, 2)), np.zeros((3, 2), np.float32), np.zeros((2, 3), np.float32).T):
        assert table.pull([5, 6, 5], out=out) is None
        assert (out == 0.5).all()
    out = np.zeros((2, 2), np.float32)
    table.pull([8, 9], out=out, touch=False)
    assert (out == 0.5).all()
    assert table.pull(5).shape == (2,)
    assert table.pull([]).shape == (0, 2)
    assert table.ids().tolist() == [5, 6, 7]


def test_all_rows_come_sorted_by_id(tables: Any) -> None:
    tables[0].pull(IDS)
    ids = np.sort(IDS.view(np.int64))
    for pieces in (list(tables[1].rows(7)), list(tables[0].rows())):
        np.testing.assert_array_equal(np.concatenate([piece for piece, _ in pieces]), ids)
        assert all((rows == 0.5).all() and len(rows) == len(piece) for piece, rows in pieces)
    np.testing.assert_array_equal(tables[0]._files.home.held(3).ids, ids)


def test_the_optimizer_of_a_table_changes_on_all_servers(shared: Workers, tables: Any) -> None:
    def script(kv: KVStore) -> Any:
        table = tables[kv.rank]
        table.set_optimizer(optimizer.create("sgd", learning_rate=0.25))
        if kv.rank == 0 or kv.type == "dist_sync":
            mine = IDS if kv.rank == 0 else IDS[:0]
            table.push(mine, np.ones((len(mine), 2), np.float32))
        kv.wait()
        kv.barrier()
        return table.optimizer.learning_rate, table.pull(IDS)

    for rate, rows in shared.run(script):
        assert rate == 0.25
        assert (rows == 0.25).all()


# -- files --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_servers", [1, 2, 5])
def test_an_export_is_that_of_a_local_table(num_servers: int, tmp_path: Any) -> None:
    def script(kv: KVStore) -> Any:
        folder = tmp_path / kv.type
        folder.mkdir()
        table = kv.create_table("user", 2, optimizer="adam", dtype="float16")
        for ids in (IDS[:20], IDS[10:]):
            table.pull(ids)
            table.push(ids, np.ones((len(ids), 2), np.float16))
        marks = [table.export(folder / "all")]
        table.push(IDS[5:9], np.ones((4, 2), np.float16))
        table.pull([77])
        marks.append(table.export_delta(marks[0], folder / "changes"))
        marks.append(table.export_delta(marks[1], folder / "none", states=False))
        return marks

    with Workers("dist_sync", 1, num_servers) as workers:
        (marks,) = workers.run(script)
    with mx.create("local") as kv:
        assert script(kv) == marks == [1, 2, 3]
    with mx.create("local") as kv:
        follower = kv.create_table("user", 2, optimizer="adam", dtype="float16")
        for name in ("all", "changes", "none"):
            with (
                TableFile(tmp_path / "local" / name) as expected,
                TableFile(tmp_path / "dist_sync" / name) as found,
            ):
                for field in ("ids", "kept", "since", "mark", "time", "count", "optimizer"):
                    np.testing.assert_array_equal(getattr(found, field), getattr(expected, field))
                for array in expected._file.names:
                    if not array.endswith("touched"):
                        want, got = expected._file.read(array), found._file.read(array)
                        assert want.tobytes() == got.tobytes()
            follower.load(tmp_path / "dist_sync" / name)
        assert follower.size == 41


def test_all_workers_get_the_mark_of_an_export(shared: Workers, tmp_path: Any) -> None:
    def script(kv: KVStore) -> Any:
        table = kv.create_table("user", 2)
        table.pull(IDS)
        mark = table.export(tmp_path / "all")
        with pytest.raises(ArgumentValueError, match="is not a mark of table 'user'"):
            table.export_delta(mark + 1, tmp_path / "changes")
        return mark

    assert shared.run(script) == [1, 1]
    with mx.create("local") as kv:
        table = kv.create_table("user", 2)
        table.load(tmp_path / "all")
        np.testing.assert_array_equal(table.ids(), np.sort(IDS.view(np.int64)))


@pytest.mark.parametrize("num_servers", [1, 2, 5])
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_a_table_that_loads_an_export_goes_on_as_the_one_that_wrote_it(
    kind: str, num_servers: int, tmp_path: Any
) -> None:
    """Whatever the number of servers; and so does one that follows by deltas."""

    def write(kv: KVStore) -> Any:
        table = kv.create_table("user", 2, optimizer="adam")
        table.push(IDS[:30], np.ones((30, 2), np.float32))
        mark = table.export(tmp_path / "all")
        table.push(IDS[10:], np.ones((30, 2), np.float32))
        table.export_delta(mark, tmp_path / "changes")
        return go_on(table)

    def go_on(table: Any) -> Any:
        table.push(IDS[5:15], np.ones((10, 2), np.float32))
        return table.pull(IDS), table.statistics().pushes, table.size

    def follow(kv: KVStore) -> Any:
        table = kv.create_table("user", 2, optimizer="adam")
        table.pull([1, 2, 3])
        with pytest.raises(CheckpointError, match="load the full export"):
            table.load(tmp_path / "changes")
        table.load(tmp_path / "all")
        table.load(tmp_path / "changes")
        assert table.ids().tolist() == np.sort(IDS.view(np.int64)).tolist()

    with Workers("dist_sync", 1, 2) as workers:
        (expected,) = workers.run(write)
    with Workers(kind, 1, num_servers) as workers:
        workers.run(follow)
        table = workers.stores[0]._tables._tables["user"]  # type: ignore[attr-defined]
        rows, pushes, size = workers.run(lambda _: go_on(table))[0]
    np.testing.assert_array_equal(rows, expected[0])
    assert (pushes, size) == expected[1:]


def test_all_workers_load_and_see_an_error_of_a_file(
    shared: Workers, tables: Any, tmp_path: Any
) -> None:
    with mx.create("local") as kv:
        local = kv.create_table("t", 2)
        local.pull(IDS)
        local.export(tmp_path / "all", states=False)
        kv.create_table("wide", 3).export(tmp_path / "wide")

    def script(kv: KVStore) -> Any:
        table = tables[kv.rank]
        for name, text in (("wide", "rows are 3 of float32"), ("nothing", "cannot read")):
            with pytest.raises(CheckpointError, match=text):
                table.load(tmp_path / name)
        table.load(tmp_path / "all")
        return table.size

    assert shared.run(script) == [40, 40]


@pytest.mark.parametrize(("dim", "num_rows"), [(1, 20_000), (10_000, 1)])
def test_a_file_that_no_message_holds_is_refused_and_leaves_the_table_as_it_was(
    dim: int, num_rows: int, tmp_path: Any
) -> None:
    """Too many ids for one server, or too wide a row with its states."""

    def make(kv: KVStore) -> Any:
        return kv.create_table("t", dim, init=0.5, optimizer="adam")

    with mx.create("local") as kv:
        local = make(kv)
        local.pull(np.arange(num_rows))
        local.export(tmp_path / "large")

    def script(kv: KVStore) -> None:
        table = make(kv)
        table.pull([1, 2, 3])
        with pytest.raises(CheckpointError, match=r"over PS_MAX_MESSAGE_BYTES \(65536\)"):
            table.load(tmp_path / "large")
        assert table.ids().tolist() == [1, 2, 3]

    with Workers("dist_sync", 1, 2, max_message_bytes=65536, chunk_bytes=4096) as workers:
        workers.run(script)


@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_delta_only_fits_the_export_of_its_own_table_and_no_half_of_it(
    num_servers: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(table: Any, folder: Any) -> Any:
        folder.mkdir()
        table.pull(IDS)
        mark = table.export(folder / "all")
        table.push([7], np.ones((1, 2), np.float32))
        table.export_delta(mark, folder / "delta")
        return table.pull([7])

    def fail(*_: object) -> Any:
        raise CheckpointError("the disk fails")

    def script(kv: KVStore) -> None:
        rows = export(kv.create_table("t", 2), tmp_path / "mine")
        follower = kv.create_table("u", 2)
        follower.load(tmp_path / "mine" / "all")
        with pytest.raises(CheckpointError, match="of another table, or of another run, than"):
            follower.load(tmp_path / "other" / "delta")
        with monkeypatch.context() as patch:
            patch.setattr(TableFile, "rows", fail)
            with pytest.raises(CheckpointError, match="disk"):
                follower.load(tmp_path / "mine" / "all")
        with pytest.raises(CheckpointError, match="first load the full export that it starts from"):
            follower.load(tmp_path / "mine" / "delta")
        follower.load(tmp_path / "mine" / "all")
        follower.load(tmp_path / "mine" / "delta")
        assert (follower.pull([7]) == rows).all()

    with mx.create("local") as kv:
        export(kv.create_table("t", 2), tmp_path / "other")
    with Workers("dist_sync", 1, num_servers) as workers:
        workers.run(script)


def test_numbers_of_64_bits_travel() -> None:
    seed, ttl = 2**64 - 1, 2**63

    def script(kv: KVStore) -> Any:
        table = kv.create_table("t", 2, seed=seed, ttl=ttl, init="normal", dtype="float64")
        return table.pull(IDS)

    with mx.create("local") as kv:
        expected = script(kv)
    with Workers("dist_async", 1, 2) as workers:
        np.testing.assert_array_equal(workers.run(script)[0], expected)


def test_rows_beyond_the_capacity_are_left_out_when_an_export_is_loaded(tmp_path: Any) -> None:
    def script(kv: KVStore) -> Any:
        with mx.create("local") as local:
            table = local.create_table("t", 2)
            table.pull(IDS)
            table.export(tmp_path / "all")
        small = kv.create_table("t", 2, capacity=10)
        small.load(tmp_path / "all")
        return small.statistics()

    with Workers("dist_sync", 1, 2) as workers:
        ((seen),) = workers.run(script)
    assert seen.rows == 10
    assert seen.nbytes <= seen.limit_bytes


def test_an_export_that_cannot_be_written_is_an_error_of_all_workers(
    shared: Workers, tables: Any, tmp_path: Any
) -> None:
    def script(kv: KVStore) -> Any:
        with pytest.raises(CheckpointError):
            tables[kv.rank].export(tmp_path / "nowhere" / "all")
        return tables[kv.rank].export(tmp_path / "all")

    assert shared.run(script) == [2, 2]


# -- what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dim": 3}, "create_table\\('u', [23],.* but worker . called create_table\\('u', [23],"),
        ({"capacity": 7}, "capacity=None"),
        ({"seed": 7}, "seed=7"),
        ({"optimizer": "adam"}, "adam"),
        ({"init": 0.25}, "constant\\(0.25\\)"),
        ({"name": "v"}, "create_table\\('v'"),
    ],
)
def test_workers_that_create_different_tables_are_told(
    shared: Workers, arguments: Any, text: str
) -> None:
    def script(kv: KVStore) -> str:
        plain = {"name": "u", "dim": 2}
        try:
            kv.create_table(**plain | (arguments if kv.rank else {}))
        except UsageError as error:
            return str(error)
        return "no error"

    for error in shared.run(script):
        assert re.search(text, error) and "in the same order" in error
    shared.run(lambda kv: kv.create_table("u", 2).close())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda table, path: table.export(path), "export of table 't' to 'file-[01]' \\(since"),
        (lambda table, path: table.export_delta(1, path), "to 'file-[01]' \\(since mark 1,"),
        (lambda table, path: table.load(path), "load of table 't' from 'file-[01]'"),
    ],
)
def test_workers_that_name_different_files_are_told(
    shared: Workers, tables: Any, tmp_path: Any, call: Callable[[Any, Any], Any], text: str
) -> None:
    def script(kv: KVStore) -> None:
        table = tables[kv.rank]
        table.export(tmp_path / "all")
        with pytest.raises(UsageError, match=f"{text}.* but worker . called .*{text}"):
            call(table, tmp_path / f"file-{kv.rank}")

    shared.run(script)
    assert [path.name for path in tmp_path.iterdir()] == ["all"]


def test_other_hosts_may_have_the_directory_of_an_export_elsewhere(
    shared: Workers, tables: Any, tmp_path: Any
) -> None:
    """The lowest rank's path counts; the others' directories need not be there."""

    def script(kv: KVStore) -> Any:
        path = str(tmp_path / "all") if kv.rank == 0 else "/nowhere/all"
        tables[kv.rank].pull([5])
        tables[kv.rank].export(path)
        tables[kv.rank].load(path)
        return tables[kv.rank].size

    assert shared.run(script) == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["all"]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda table: table.export(None), ArgumentTypeError),
        (lambda table: table.load(b"all"), ArgumentTypeError),
        (lambda table: table.pull([1.5]), ArgumentTypeError),
        (lambda table: table.pull([2**64]), ArgumentValueError),
        (lambda table: table.pull([1], out=np.zeros((2, 2))), ValueMismatchError),
        (lambda table: table.push([1, 2], np.zeros((1, 2), np.float32)), ValueMismatchError),
        (lambda table: table.push([1], np.zeros((1, 2))), ValueMismatchError),
        (lambda table: table.set_optimizer(None), ArgumentTypeError),
        (lambda table: table.set_optimizer("lars"), NotSupportedError),
        (lambda table: table.rows(0), ArgumentValueError),
    ],
)
def test_wrong_arguments_change_nothing(
    tables: Any, call: Callable[[Any], Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        call(tables[0])
    assert tables[0].statistics().pulled == tables[0].size == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"name": ""}, ArgumentTypeError),
        ({"dim": 0}, ArgumentValueError),
        ({"dtype": "int32"}, ArgumentTypeError),
        ({"capacity": 1}, ArgumentValueError),
        ({"ttl": 2**70}, ArgumentValueError),
        ({"name": "\ud800"}, ArgumentValueError),
        ({"dim": 2**40}, ArgumentValueError),
        ({"dtype": None}, ArgumentTypeError),
        ({"dtype": np.longdouble}, ArgumentTypeError),
        ({"init": float("inf")}, ArgumentValueError),
        ({"optimizer": "lamb"}, NotSupportedError),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_sent(
    shared: Workers, arguments: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        shared.stores[0].create_table(**{"name": "u", "dim": 2, **arguments})


def test_a_push_or_a_row_that_no_message_holds_is_refused_whole() -> None:
    def script(kv: KVStore) -> None:
        table = kv.create_table("t", 500, init=0, optimizer=SGD)
        with pytest.raises(ArgumentValueError, match="16384 float32 numbers does not fit"):
            kv.create_table("wide", 16384)
        with pytest.raises(ValueMismatchError, match="over PS_MAX_MESSAGE_BYTES"):
            table.push(IDS, np.ones((40, 500), np.float32))
        table.push(IDS[:10], np.ones((10, 500), np.float32))
        assert (table.pull(IDS[:20])[:10] == -1).all()
        assert table.statistics().pushes == 1

    with Workers("dist_sync", 1, 1, max_message_bytes=65536, chunk_bytes=4096) as workers:
        workers.run(script)


def header(
    num_rows: int = 0, id_bytes: int = 0, *, kind: int = 1, width: int = 2, offset: int = 0
) -> bytes:
    return struct.pack("<BBHIQQQ", kind, id_bytes, 0, 0, num_rows, width, offset)


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (b"short", "a header of 32 bytes before rows"),
        (header(kind=9), "a kind of row payload from 1 to"),
        (header(1), "a header that fits its rows"),
        (header(width=3), "rows of 2 numbers, got 3"),
        (header(offset=1), "got an offset"),
        (header(9, 8), "bytes for 9 ids, got 32"),
        (header(1, 8) + bytes(16), "wrong size: 0 bytes"),
        (header(kind=3), "got a pull"),
    ],
)
def test_servers_refuse_payloads_that_make_no_sense(
    shared: Workers, tables: Any, payload: bytes, text: str
) -> None:
    table = tables[0]

    def write(memory: Any) -> None:
        memory[:] = np.frombuffer(payload, np.uint8)

    target = table._home.targets[0]
    item: Any = SimpleNamespace(
        target=target, nbytes=len(payload), write=write, answer_bytes=0, receive=None
    )
    sent = table._owner.rows.begin(table._keys, [item], 0, None)
    with pytest.raises(ProtocolError, match=text):
        sent.result(20)
    assert (tables[1].pull(IDS) == 0.5).all()


def longs(*numbers: int) -> bytes:
    return np.array(numbers, "<i8").tobytes()


WRONG: dict[str, tuple[StoreCall, tuple[Any, ...], list[bytes]]] = {
    "held after two": (StoreCall.HELD_ROWS, ([1, 2], 5), []),
    "held after text": (StoreCall.HELD_ROWS, (["a"], 5), []),
    "held after no id": (StoreCall.HELD_ROWS, ([2**63], 5), []),
    "read half an id": (StoreCall.READ_ROWS, (False,), [b"1234"]),
    "read nothing": (StoreCall.READ_ROWS, (False,), []),
    "large mark": (StoreCall.MARK_TABLE, (2**40, []), []),
    "optimizer of a number": (StoreCall.TABLE_OPTIMIZER, (False, [1, {}]), []),
    "load too few": (StoreCall.BEGIN_ROWS, ([False, 1],), [longs(1)]),
    "load unsorted": (StoreCall.BEGIN_ROWS, ([False, 1],), [longs(2, 1), longs(0, 0), b"", b""]),
    "load late": (StoreCall.BEGIN_ROWS, ([False, 1],), [longs(1), longs(2**62 + 2**30), b"", b""]),
    "load negative": (StoreCall.BEGIN_ROWS, ([True, -1],), [b""] * 4),
    "load of a key": (StoreCall.BEGIN_ROWS, ([True],), []),
    "mark of no lineage": (StoreCall.MARK_TABLE, (1, ["id"]), []),
    "mark of no id": (StoreCall.MARK_TABLE, (1, ["", []]), []),
    "end at no time": (StoreCall.END_ROWS, (0, [-1, []]), []),
    "end at no mark": (StoreCall.END_ROWS, (0, [1, [["id", -1]]]), []),
    "end at two": (StoreCall.END_ROWS, (0, [1, [["id", 2], ["other", 2]]]), []),
    "rows without": (StoreCall.WRITE_ROWS, (), [longs(1), longs(1)]),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_servers_refuse_requests_that_make_no_sense(tables: Any, name: str) -> None:
    table = tables[0]
    table.pull(IDS)
    call, fields, frames = WRONG[name]
    asked = table._pages.ask_each(call, *fields, frames=[frames] * len(table.parts))
    with pytest.raises(ProtocolError):
        asked.result(20)
    assert table.size == len(IDS)


def test_rows_that_are_loaded_have_to_fit(tables: Any) -> None:
    table = tables[0]
    ask, number = table._pages.ask_each, len(table.parts)

    def load(*frames: bytes) -> None:
        ask(StoreCall.WRITE_ROWS, frames=[frames] * number).result(20)

    with pytest.raises(UsageError, match="the table 't' is not being loaded"):
        load(longs(7), longs(0), bytes(8))
    begin = [[longs(7), longs(0), b"", b""]] * number
    ask(StoreCall.BEGIN_ROWS, [False, 1], frames=begin).result(20)
    for wrong in ([bytes(7)], [bytes(16)], [bytes(8), bytes(8)]):
        with pytest.raises(ValueMismatchError, match="must be arrays of"):
            load(longs(7), longs(0), *wrong)
    load(longs(7), longs(0), np.float32([3, 4]).tobytes())
    ask(StoreCall.END_ROWS, -1, [5, []]).result(20)
    assert table.pull([7], touch=False).tolist() == [[3, 4]]


@pytest.mark.parametrize(
    "wrong",
    [
        {3: "huge"},
        {4: "1"},
        {1: 0},
        {2: "<i4"},
        {5: -1},
        {0: ""},
        {8: None},
    ],
    ids=str,
)
def test_servers_refuse_settings_that_make_no_sense(tables: Any, wrong: dict[int, Any]) -> None:
    servers = tables[0]._owner.servers
    plain = settings_to_plain(tables[0]._settings)
    plain = [wrong.get(at, value) for at, value in enumerate(plain)]
    with pytest.raises(ProtocolError):
        servers.make_table([2**41, 2**41 + 1], plain, []).result(20)
    assert tables[0].pull([5]).tolist() == [[0.5, 0.5]]


def test_a_push_of_a_worker_that_has_closed_and_left_counts_and_is_not_called_failed() -> None:
    def create(kv: KVStore) -> Any:
        return kv.create_table("t", 2, init=0, optimizer=SGD)

    with Workers("dist_sync", 2, 2) as workers:
        tables = workers.run(create)
        assert workers.cluster is not None
        tables[0].push(IDS, np.ones((40, 2), np.float32))
        with ThreadPoolExecutor(1) as threads:  # it stays until the other's part is there, too
            closed = threads.submit(workers.stores[0].close)
            tables[1].push(IDS, np.ones((40, 2), np.float32))
            closed.result(LIMIT_S)
        workers.cluster.workers[0].close()
        assert (tables[1].pull(IDS) == -2).all()
        assert [line for line in workers.cluster.lines if "failed" in line] == []


def test_a_worker_that_leaves_hears_of_a_push_that_failed_after_it_was_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def apply(*_: object) -> None:
        time.sleep(0.2)
        raise ValueError("no memory is left")

    monkeypatch.setattr(TablePart, "apply", apply)
    monkeypatch.setattr(Traffic, "_is_quick", lambda *_: False)  # on the pool's thread
    with Workers("dist_async", 1, 1) as workers:
        assert workers.cluster is not None
        (kv,) = workers.stores
        kv.create_table("t", 2).push([1], np.ones((1, 2), np.float32))
        with pytest.raises(RemoteError, match="no memory is left"):
            kv.close()
        workers.cluster.workers[0].close()


def test_names_are_taken_until_a_table_is_closed(shared: Workers) -> None:
    def script(kv: KVStore) -> None:
        table = kv.create_table("user", 2)
        with pytest.raises(DuplicateKeyError):
            kv.create_table("user", 2)
        table.pull([1])
        kv.barrier()
        table.close()
        table.close()
        with pytest.raises(ClosedError, match="table 'user' is closed"):
            table.pull([1])
        again = kv.create_table("user", 3, init=2)
        assert again.size == 0
        assert repr(again) == "<table 'user': rows of 3 float32 on 2 servers>"
        again.close()
        assert repr(again) == "<table 'user': closed of 3 float32 on 2 servers>"

    shared.run(script)
    for counts in shared.stores[0].stats()["servers"].values():
        assert counts["parts"] == counts["value_bytes"] == counts["state_bytes"] == 0


def test_a_closed_store_leaves_no_tables_on_the_servers() -> None:
    with Workers("dist_sync", 2, 2) as workers:
        first = workers.stores

        def script(kv: KVStore) -> Any:
            table = kv.create_table("t", 2, optimizer="adam")
            table.push([1, 2], np.ones((2, 2), np.float32))
            table.pull([1])
            return table

        made = workers.run(script, first)
        other = workers.create()
        for kv in first:
            kv.close()
        workers.run(lambda kv: kv.barrier(), other)
        for _ in range(200):
            servers = other[0].stats()["servers"].values()
            if not any(counts["parts"] for counts in servers):
                break
        assert not any(counts["parts"] or counts["state_bytes"] for counts in servers)
        for table in made:
            with pytest.raises(ClosedError):
                table.pull([1])
            table.close()


def test_a_checkpoint_says_that_it_leaves_tables_out(tables: Any, tmp_path: Any) -> None:
    kv = tables[0]._owner.store.check.__self__
    with pytest.warns(UserWarning, match=r"growing tables t;") as found:
        kv.save_checkpoint(tmp_path)
    assert found[0].filename == __file__
