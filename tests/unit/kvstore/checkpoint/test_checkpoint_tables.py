"""Exports of growing tables: whole and by changes, into any number of shares, damaged or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import KVStore, Table, create, optimizer
from kvstore.checkpoint.safetensors import TensorReader, TensorWriter
from kvstore.checkpoint.tables import ShareRows, TableFile, TableFiles
from kvstore.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from kvstore.sparse.sums import Contribution
from kvstore.sparse.tables.ids import shares_of
from kvstore.sparse.tables.settings import checked_settings
from kvstore.sparse.tables.shard import TableShare

ADAM = optimizer.create("adam", learning_rate=0.1)
DIM = 3


@pytest.fixture
def kv() -> Iterator[KVStore]:
    with create("local") as store:
        yield store


def trained(kv: KVStore, name: str = "t", **options: Any) -> Table:
    table = kv.create_table(name, DIM, optimizer=ADAM, **options)
    for start in (0, 20):
        ids = np.arange(start, start + 30)
        table.push(ids, np.ones((30, DIM), np.float32))
    return table


def gradients(number: int) -> np.ndarray[Any, Any]:
    return np.full((number, DIM), 0.5, np.float32)


def rows_of(table: Table) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for ids, rows in table.rows(7):
        found.update(zip(ids.tolist(), rows.tolist(), strict=True))
    return found


# -- whole exports ------------------------------------------------------------------------


def test_a_table_goes_on_from_an_export_as_the_one_that_wrote_it(
    kv: KVStore, tmp_path: Path
) -> None:
    first = trained(kv, capacity=60)
    first.export(tmp_path / "all")
    second = kv.create_table("u", DIM, optimizer=ADAM, capacity=60)
    second.pull([1000, 2000])
    second.load(tmp_path / "all")
    assert rows_of(second) == rows_of(first)
    ids = np.concatenate([np.arange(10), np.arange(5)])
    for table in (first, second):
        table.push(ids, gradients(15))
    # The first to go are those that were touched before the export.
    for table in (first, second):
        table.set_optimizer(ADAM.replace(lr=0.01))
        table.push(np.arange(100, 110), np.zeros((10, DIM), np.float32))
    kept = [id_ for id_ in first.ids().tolist() if id_ < 100]
    assert second.ids().tolist() == first.ids().tolist()
    assert second.pull(kept).tobytes() == first.pull(kept).tobytes()


def test_an_export_without_states_begins_them_afresh(kv: KVStore, tmp_path: Path) -> None:
    table = trained(kv)
    table.export(tmp_path / "small", states=False)
    table.export(tmp_path / "large")
    assert (tmp_path / "small").stat().st_size < (tmp_path / "large").stat().st_size
    other = kv.create_table("u", DIM, optimizer="adagrad")
    other.load(tmp_path / "small")
    assert rows_of(other) == rows_of(table)
    other.push([1], gradients(1))
    plain = kv.create_table("v", DIM)  # without an optimizer, states do not matter
    plain.load(tmp_path / "large")
    assert rows_of(plain) == rows_of(table)


@pytest.mark.parametrize("num_shares", [1, 2, 5])
def test_an_export_is_taken_by_any_number_of_shares(
    kv: KVStore, tmp_path: Path, num_shares: int
) -> None:
    table = trained(kv)
    table.export(tmp_path / "all")
    found: dict[int, list[float]] = {}
    settings = checked_settings(
        "t", DIM, init=0, capacity=None, ttl=None, admit_after=1, dtype="f4", seed=0
    )
    for number in range(num_shares):
        share = TableShare(settings, ADAM, number, num_shares)
        TableFiles(ShareRows(share), settings).load(tmp_path / "all", ADAM)
        ids, places = share.held()
        assert (shares_of(ids, num_shares) == number).all()
        assert (share.rows.count, share.ages.time) == (2, 2)
        found.update(zip(ids.tolist(), share.rows.values[places].tolist(), strict=True))
    assert found == rows_of(table)


def test_a_smaller_table_keeps_the_rows_that_were_touched_last(kv: KVStore, tmp_path: Path) -> None:
    table = trained(kv)
    table.pull([3])
    table.export(tmp_path / "all")
    small = kv.create_table("u", DIM, optimizer=ADAM, capacity=5)
    small.load(tmp_path / "all")
    assert small.ids().tolist() == [3, 46, 47, 48, 49]
    assert small.pull([3]).tolist() == table.pull([3]).tolist()


def test_a_loaded_table_knows_which_rows_were_touched_last_by_deltas_too(
    kv: KVStore, tmp_path: Path
) -> None:
    table, other = (kv.create_table(name, 1, capacity=3) for name in ("t", "u"))
    table.pull([1, 2, 3])
    mark = table.export(tmp_path / "all")
    other.load(tmp_path / "all")
    other.pull([1])
    other.pull([4])
    assert other.ids().tolist() == [1, 3, 4]
    other.load(tmp_path / "all")
    table.pull([1])  # changes no row
    table.export_delta(mark, tmp_path / "delta")
    other.load(tmp_path / "delta")
    other.pull([4])
    assert other.ids().tolist() == [1, 3, 4]


def test_rows_come_sorted_and_in_pieces_and_those_that_go_meanwhile_are_left_out(
    kv: KVStore,
) -> None:
    table = kv.create_table("t", 1, init=0, capacity=4)
    table.push([5, -3, 9, 2], np.array([[5], [-3], [9], [2]], np.float32))
    pieces = table.rows(2)
    first_ids, first_rows = next(pieces)
    assert (first_ids.tolist(), first_rows.tolist()) == ([-3, 2], [[-3], [2]])
    table.pull([5, 100])
    table.pull([101, 102])
    assert [ids.tolist() for ids, _ in pieces] == [[5]]
    with pytest.raises(ArgumentValueError, match="block_rows"):
        table.rows(0)


def test_an_empty_table_can_be_exported_and_loaded(kv: KVStore, tmp_path: Path) -> None:
    mark = kv.create_table("t", DIM, optimizer=ADAM).export(tmp_path / "all")
    table = trained(kv, "u")
    table.load(tmp_path / "all")
    assert (table.size, mark, list(table.rows())) == (0, 1, [])


# -- deltas -------------------------------------------------------------------------------


def test_a_delta_has_the_rows_that_changed_and_lets_go_of_those_that_went(
    kv: KVStore, tmp_path: Path
) -> None:
    table, other = trained(kv, capacity=50), kv.create_table("u", DIM)
    mark = table.export(tmp_path / "all")
    other.load(tmp_path / "all")
    table.push([1, 2], gradients(2))
    table.pull([1000, 3])  # 1000 is new, and one goes
    assert table.export_delta(mark, tmp_path / "delta", states=False) == mark + 1
    with TensorReader(tmp_path / "delta") as file:
        assert file.tensor("ids").tolist() == [1, 2, 1000]
        assert len(file.tensor("kept")) == 47
        assert "states/mean" not in file.names
    other.load(tmp_path / "delta")
    assert rows_of(other) == rows_of(table)
    assert table.export_delta(mark + 1, tmp_path / "nothing") == mark + 2
    with TensorReader(tmp_path / "nothing") as file:
        assert len(file.tensor("ids")) == 0


def test_a_delta_is_refused_by_a_table_that_does_not_stand_where_it_begins(
    kv: KVStore, tmp_path: Path
) -> None:
    table, other = trained(kv), kv.create_table("u", DIM)
    marks = [table.export(tmp_path / "all")]
    for number in range(3):
        table.push([number], gradients(1))
        marks.append(table.export_delta(marks[-1], tmp_path / f"{number}"))
    with pytest.raises(CheckpointError, match="first load the full export that it starts from"):
        other.load(tmp_path / "0")
    other.load(tmp_path / "all")
    with pytest.raises(CheckpointError, match="mark 2 to 3, and the table was loaded up to mark 1"):
        other.load(tmp_path / "1")
    for number in range(3):
        other.load(tmp_path / f"{number}")
    with pytest.raises(CheckpointError, match="up to mark 4"):
        other.load(tmp_path / "0")
    assert rows_of(other) == rows_of(table)


def test_a_delta_of_another_table_with_the_same_marks_is_refused(
    kv: KVStore, tmp_path: Path
) -> None:
    def run(store: KVStore, name: str) -> Table:
        table = trained(store)
        mark = table.export(tmp_path / name)
        table.push([1], gradients(1))
        table.export_delta(mark, tmp_path / f"{name}'s delta")
        return table

    first = run(kv, "one")
    with create("local") as other_run:
        run(other_run, "two")
    follower = kv.create_table("u", DIM)
    follower.load(tmp_path / "one")
    before = rows_of(follower)
    with pytest.raises(CheckpointError, match="of another table, or of another run, than"):
        follower.load(tmp_path / "two's delta")
    assert rows_of(follower) == before
    follower.load(tmp_path / "one's delta")
    assert rows_of(follower) == rows_of(first)


def test_a_table_that_resumed_goes_on_with_the_deltas_of_the_first_run_up_to_there(
    kv: KVStore, tmp_path: Path
) -> None:
    first, resumed = trained(kv), kv.create_table("r", DIM, optimizer=ADAM)
    at_export, ahead = kv.create_table("u", DIM), kv.create_table("v", DIM)
    mark = first.export(tmp_path / "all")
    first.push([1], gradients(1))
    first.export_delta(mark, tmp_path / "lost")
    for table in (at_export, ahead, resumed):
        table.load(tmp_path / "all")
    ahead.load(tmp_path / "lost")
    resumed.push([2], gradients(1))
    assert resumed.export_delta(mark, tmp_path / "delta") == mark + 1
    at_export.load(tmp_path / "delta")
    assert rows_of(at_export) == rows_of(resumed)
    with pytest.raises(CheckpointError, match="another run, than the export with mark 2"):
        ahead.load(tmp_path / "delta")


def test_a_file_of_an_earlier_version_is_loaded_whole_and_its_deltas_are_refused(
    kv: KVStore, tmp_path: Path
) -> None:
    table, follower = trained(kv), kv.create_table("u", DIM, optimizer=ADAM)
    mark = table.export(tmp_path / "all")
    table.export_delta(mark, tmp_path / "delta")
    for name in ("all", "delta"):
        rewritten(tmp_path / name, {}, {"lineage": None})
    follower.load(tmp_path / "all")
    assert rows_of(follower) == rows_of(table)
    with pytest.raises(CheckpointError, match="does not say of which table"):
        follower.load(tmp_path / "delta")
    follower.export(tmp_path / "again")
    table.load(tmp_path / "again")
    assert rows_of(follower) == rows_of(table)


def test_no_delta_fits_a_table_whose_load_failed_half_way(
    kv: KVStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, follower = trained(kv), kv.create_table("u", DIM)
    mark = table.export(tmp_path / "all")
    table.push([1], gradients(1))
    table.export_delta(mark, tmp_path / "delta")
    follower.load(tmp_path / "all")
    with monkeypatch.context() as patch:
        patch.setattr(TableFile, "rows", failing)
        with pytest.raises(CheckpointError, match="disk"):
            follower.load(tmp_path / "all")
    assert follower.size == 0
    with pytest.raises(CheckpointError, match="first load the full export that it starts from"):
        follower.load(tmp_path / "delta")
    follower.load(tmp_path / "all")
    follower.load(tmp_path / "delta")
    assert rows_of(follower) == rows_of(table)


def failing(*_: object) -> Any:
    raise CheckpointError("the disk fails")


@pytest.mark.parametrize("mark", [-1, 2, 1.0, None, True])
def test_a_mark_that_no_export_returned_is_refused(kv: KVStore, tmp_path: Path, mark: Any) -> None:
    table = trained(kv)
    table.export(tmp_path / "all")
    with pytest.raises(ArgumentValueError, match="not a mark of table 't'"):
        table.export_delta(mark, tmp_path / "delta")
    assert not (tmp_path / "delta").exists()


def test_marks_go_on_after_a_load(kv: KVStore, tmp_path: Path) -> None:
    table = trained(kv)
    mark = table.export(tmp_path / "all")
    again = kv.create_table("u", DIM, optimizer=ADAM)
    again.load(tmp_path / "all")
    again.push([4], gradients(1))
    again.export_delta(mark, tmp_path / "delta")
    table.load(tmp_path / "all")
    table.load(tmp_path / "delta")
    assert rows_of(table) == rows_of(again)


@pytest.mark.parametrize("path", [None, 5, b"all"])
def test_what_is_no_path_is_refused(kv: KVStore, path: Any) -> None:
    table = kv.create_table("t", 2)
    for call in (table.export, table.load, lambda path: table.export_delta(0, path)):
        with pytest.raises(ArgumentTypeError, match="a file name must be a str"):
            call(path)


def test_after_an_export_that_cannot_be_written_deltas_have_all_changes(
    kv: KVStore, tmp_path: Path
) -> None:
    table, other = trained(kv), kv.create_table("u", DIM)
    mark = table.export(tmp_path / "all")
    other.load(tmp_path / "all")
    table.push([1], gradients(1))
    with pytest.raises(CheckpointError):
        table.export_delta(mark, tmp_path / "missing" / "delta")
    table.push([2], gradients(1))
    assert table.export_delta(mark, tmp_path / "delta", states=False) > mark
    other.load(tmp_path / "delta")
    assert rows_of(other) == rows_of(table)


# -- files that do not fit ----------------------------------------------------------------


def test_a_file_that_does_not_fit_leaves_the_table_as_it_was(kv: KVStore, tmp_path: Path) -> None:
    trained(kv).export(tmp_path / "all")
    others = [
        (kv.create_table("wide", DIM + 1, optimizer=ADAM), "rows are 3 of float32"),
        (kv.create_table("fine", DIM, optimizer=ADAM, dtype="f8"), "those of the table 3 of"),
        (kv.create_table("grad", DIM, optimizer="adagrad"), "states of adam, and .* is adagrad"),
    ]
    for table, words in others:
        table.pull([1, 2])
        before = rows_of(table)
        with pytest.raises(CheckpointError, match=words):
            table.load(tmp_path / "all")
        assert rows_of(table) == before


def rewritten(path: Path, change: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
    """Write an export again with other arrays and metadata (None: without)."""
    with TensorReader(path) as file:
        arrays = {name: file.tensor(name) for name in file.names}
        found = json.loads(file.metadata["table"])
    arrays = {name: array for name, array in {**arrays, **change}.items() if array is not None}
    specs = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    found = {name: each for name, each in {**found, **(metadata or {})}.items() if each is not None}
    with TensorWriter(path, specs, {"table": json.dumps(found)}) as out:
        for name, array in arrays.items():
            out.write(name, 0, array.reshape(-1))


IDS = np.arange(50)


@pytest.mark.parametrize(
    ("change", "metadata"),
    [
        ({"ids": IDS[::-1].copy()}, {}),
        ({"ids": np.zeros(50, np.int64)}, {}),
        ({"ids": IDS.astype(np.int32)}, {}),
        ({"ids": IDS[:40]}, {}),
        ({"ids": None}, {}),
        ({"touched": None}, {}),
        ({"touched": np.full(50, -1)}, {}),
        ({"touched": np.full(50, 2**62)}, {}),
        ({"values": np.zeros((49, DIM), np.float32)}, {}),
        ({"values": np.zeros(50 * DIM, np.float32)}, {}),
        ({"states/mean": None}, {}),
        ({"states/mean": np.zeros((50, DIM))}, {}),
        ({"states/mean": np.zeros((50, DIM + 1), np.float32)}, {}),
        ({}, {"mark": -1}),
        ({}, {"mark": 2**31}),
        ({}, {"time": "1"}),
        ({}, {"time": 2**60}),
        ({}, {"count": None}),
        ({}, {"since": True}),
        ({}, {"is_delta": 1}),
        ({}, {"is_delta": True}),
        ({}, {"optimizer": 3}),
        ({}, {"lineage": "id"}),
        ({}, {"lineage": [["id", 1, 2]]}),
        ({}, {"lineage": [["", 1]]}),
        ({}, {"lineage": [["id" * 40, 1]]}),
        ({}, {"lineage": [["id", True]]}),
        ({}, {"lineage": [["id", 2]]}),
        ({}, {"lineage": [["id", 1], ["other", 1]]}),
    ],
    ids=lambda value: "-".join(map(str, value)),
)
def test_a_damaged_file_is_refused_and_leaves_the_table_as_it_was(
    kv: KVStore, tmp_path: Path, change: dict[str, Any], metadata: dict[str, Any]
) -> None:
    table = trained(kv)
    path = tmp_path / "all"
    table.export(path)
    names = optimizer.create("adam").state_names()
    change = {name.replace("mean", names[0]): array for name, array in change.items()}
    rewritten(path, change, metadata)
    before = rows_of(table)
    with pytest.raises(CheckpointError):
        table.load(path)
    assert rows_of(table) == before


def test_a_file_whose_last_row_is_damaged_leaves_the_table_as_it_was(
    kv: KVStore, tmp_path: Path
) -> None:
    table = kv.create_table("wide", 256, init=0)
    ids = np.arange(2000)  # far more than one block of the file
    table.push(ids, np.ones((2000, 256), np.float32))
    path = tmp_path / "all"
    table.export(path)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    table.push(ids, np.full((2000, 256), 2, np.float32))
    with pytest.raises(CheckpointError, match="damaged"):
        table.load(path)
    assert len(table) == 2000
    assert (table.pull(ids) == 2).all()


def test_a_delta_whose_rows_are_both_changed_and_unchanged_is_refused(
    kv: KVStore, tmp_path: Path
) -> None:
    table, path = trained(kv), tmp_path / "delta"
    mark = table.export(tmp_path / "all")
    table.load(tmp_path / "all")
    table.push([7], gradients(1))
    table.export_delta(mark, path)
    with TensorReader(path) as file:
        kept, touched = file.tensor("kept"), file.tensor("kept_touched")
    rewritten(path, {"kept": np.sort(np.append(kept, 7)), "kept_touched": np.append(touched, 0)})
    before = rows_of(table)
    with pytest.raises(CheckpointError, match="both changed and unchanged"):
        table.load(path)
    assert rows_of(table) == before


def test_other_files_are_no_exports(kv: KVStore, tmp_path: Path) -> None:
    table = trained(kv)
    kv.init("w", np.ones(3, np.float32))
    (tmp_path / "text").write_text("hello")
    with TensorWriter(tmp_path / "tensors", {"ids": ((0,), np.dtype("i8"))}):
        pass
    for name in ("text", "tensors", "missing"):
        with pytest.raises(CheckpointError):
            table.load(tmp_path / name)
    assert table.size == 50


def test_shares_write_files_that_have_what_each_of_them_holds(tmp_path: Path) -> None:
    settings = checked_settings(
        "t", DIM, init=0.5, capacity=None, ttl=None, admit_after=1, dtype="f4", seed=0
    )
    share = TableShare(settings, None, 1, 2)
    ids = np.arange(40)
    mine = ids[shares_of(ids, 2) == 1]
    share.push([Contribution(mine, gradients(len(mine)))])
    TableFiles(ShareRows(share), settings).export(tmp_path / "share", None, None)
    other = TableShare(settings, None, 1, 2)
    TableFiles(ShareRows(other), settings).load(tmp_path / "share", None)
    assert other.held()[0].tolist() == mine.tolist()
