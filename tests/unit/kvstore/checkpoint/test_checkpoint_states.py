"""Values and states in files: what is written comes back, and what does not fit is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import optimizer
from kvstore.arrays.keys import KeySpec
from kvstore.checkpoint.directory import MANIFEST, CheckpointReader, write_checkpoint
from kvstore.checkpoint.optimizer_states import Content, SavedPiece, SavedStates, write_states
from kvstore.checkpoint.safetensors import TensorReader, TensorWriter
from kvstore.errors import CheckpointError, OptimizerNotSet
from kvstore.optimizer.states import state_dtypes
from kvstore.sparse.array import RowSparseArray

MOMENTUM = optimizer.create("sgd", learning_rate=0.5, momentum=0.5)
ADAM = optimizer.create("adam")
FLOAT = np.dtype(np.float32)

CONTENTS = {"w": Content(KeySpec((2, 3), FLOAT), 2), "b": Content(KeySpec((), FLOAT), 1)}


def pieces(count: int = 5) -> Iterable[SavedPiece]:
    """``w`` in two pieces, the second first; ``b`` in one."""
    yield SavedPiece("w", 4, np.array([4, 5], FLOAT), [np.array([40, 50], FLOAT)], count + 1)
    yield SavedPiece("b", 0, np.array([9], FLOAT), [np.array([90], FLOAT)], 1)
    yield SavedPiece("w", 0, np.arange(4, dtype=FLOAT), [np.arange(0, 40, 10, dtype=FLOAT)], count)


def saved(path: Path, *, dump: bool = False) -> Path:
    write_states(path, CONTENTS, MOMENTUM, pieces(), dump_optimizer=dump)
    return path


def flat(states: Iterable[Any]) -> list[list[float]]:
    return [np.asarray(state).tolist() for state in states]


# -- states -------------------------------------------------------------------------------


def test_states_come_back_piece_by_piece_with_their_own_counts(tmp_path: Path) -> None:
    with SavedStates(saved(tmp_path / "s")) as states:
        states.check(CONTENTS, MOMENTUM)
        for start, stop, expected, count in [
            (0, 4, [0.0, 10.0, 20.0, 30.0], 5),
            (4, 6, [40.0, 50.0], 6),
            (3, 5, [30.0, 40.0], 5),  # cut in another way: the count of its first element
            (0, 6, [0.0, 10.0, 20.0, 30.0, 40.0, 50.0], 5),
        ]:
            _, _, _, found, num_updates = states.read("w", start, stop, MOMENTUM)
            assert (flat(found), num_updates) == ([expected], count)
        assert (flat(states.read("b", 0, 1, MOMENTUM).states), states.optimizer) == ([[90.0]], None)


def test_the_optimizer_is_in_the_file_when_that_was_asked_for(tmp_path: Path) -> None:
    with SavedStates(saved(tmp_path / "s", dump=True)) as states:
        assert states.optimizer == MOMENTUM
        assert states.optimizer_name == "sgd"


def test_without_an_optimizer_there_are_no_states_to_write(tmp_path: Path) -> None:
    with pytest.raises(OptimizerNotSet):
        write_states(tmp_path / "s", CONTENTS, None, [], dump_optimizer=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("contents", "chosen", "text"),
    [
        (CONTENTS, ADAM, "states of the optimizer sgd, but the store uses adam"),
        ({"w": Content(KeySpec((3, 2), FLOAT), 1)}, MOMENTUM, r"\(2, 3\).*\(3, 2\)"),
        ({"w": Content(KeySpec((2, 3), np.dtype("f8")), 1)}, MOMENTUM, "float64"),
        ({"v": Content(KeySpec((2, 3), FLOAT), 1)}, MOMENTUM, "mom/v"),
        ({"v": Content(KeySpec((2,), FLOAT), 1)}, MOMENTUM.replace(momentum=0.0), "key 'v'"),
    ],
)
def test_states_of_something_else_are_refused(
    tmp_path: Path, contents: Any, chosen: Any, text: str
) -> None:
    with SavedStates(saved(tmp_path / "s")) as states, pytest.raises(CheckpointError, match=text):
        states.check(contents, chosen)


def test_states_need_the_optimizer_that_made_them(tmp_path: Path) -> None:
    with SavedStates(saved(tmp_path / "s")) as states, pytest.raises(OptimizerNotSet, match="sgd"):
        states.check(CONTENTS, None)


def test_fewer_states_than_the_file_has_are_enough(tmp_path: Path) -> None:
    """The same optimizer with momentum 0 keeps none."""
    plain = MOMENTUM.replace(momentum=0.0)
    with SavedStates(saved(tmp_path / "s")) as states:
        states.check(CONTENTS, plain)
        assert states.read("w", 0, 6, plain) == ("w", 0, None, [], 5)


@pytest.mark.parametrize(
    "text", ["{", "[]", '["unknown", {}]', '["sgd", {"speed": 1}]', "[" * 100_000, "17"]
)
def test_an_optimizer_that_makes_no_sense_is_refused_and_the_file_closed(
    tmp_path: Path, text: str
) -> None:
    with TensorWriter(tmp_path / "s", {}, {"optimizer": text, "key_type": "str"}):
        pass
    with pytest.raises(CheckpointError, match=r"cannot load the optimizer from "):
        SavedStates(tmp_path / "s")


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"\x80\x04K\x01.")  # a pickle
    for path in (tmp_path / "s", tmp_path / "missing", tmp_path):
        with pytest.raises(CheckpointError):
            SavedStates(path)


def test_an_interrupted_write_leaves_no_file(tmp_path: Path) -> None:
    def half() -> Iterable[SavedPiece]:
        yield next(iter(pieces()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_states(tmp_path / "s", CONTENTS, MOMENTUM, half(), dump_optimizer=False)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("chosen", "dtype", "expected"),
    [
        (None, "f4", []),
        (MOMENTUM, "f4", ["f4"]),
        (MOMENTUM, "f2", ["f4", "f4"]),
        (ADAM, "f8", ["f8", "f8"]),
    ],
)
def test_states_have_the_dtype_in_which_updates_are_made(
    chosen: Any, dtype: str, expected: list[str]
) -> None:
    assert state_dtypes(chosen, np.dtype(dtype)) == [np.dtype(name) for name in expected]


# -- checkpoints --------------------------------------------------------------------------


def test_a_checkpoint_has_values_states_counts_and_the_optimizer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "new" / "folder", CONTENTS, MOMENTUM, pieces())
    with CheckpointReader(tmp_path / "new" / "folder") as checkpoint:
        checkpoint.check(CONTENTS, MOMENTUM)
        assert checkpoint.optimizer == MOMENTUM
        piece = checkpoint.read("w", 1, 5, MOMENTUM)
        assert (piece.key, piece.start, piece.num_updates) == ("w", 1, 5)
        assert np.asarray(piece.values).tolist() == [1.0, 2.0, 3.0, 4.0]
        assert flat(piece.states) == [[10.0, 20.0, 30.0, 40.0]]


@pytest.mark.parametrize("keys", [(1, -7, 2**63 - 1), ("1", "-7", "a/b \u00e9"), ()])
def test_keys_keep_their_kind(tmp_path: Path, keys: tuple[Any, ...]) -> None:
    contents = {key: Content(KeySpec((1,), FLOAT), 1) for key in keys}
    write_checkpoint(
        tmp_path, contents, None, [SavedPiece(key, 0, np.ones(1, FLOAT), [], 0) for key in keys]
    )
    with CheckpointReader(tmp_path) as checkpoint:
        assert list(checkpoint.specs) == sorted(keys, key=list(checkpoint.specs).index)
        assert set(checkpoint.specs) == set(keys)
        assert {type(key) for key in checkpoint.specs} == {type(key) for key in keys}


@pytest.mark.parametrize("text", ["(2, 3) of float32 in it", "not in it"])
def test_a_checkpoint_of_other_keys_is_refused(tmp_path: Path, text: str) -> None:
    write_checkpoint(tmp_path, CONTENTS, MOMENTUM, pieces())
    key = "w" if "in it" in text and "not" not in text else "v"
    with CheckpointReader(tmp_path) as checkpoint, pytest.raises(CheckpointError) as caught:
        checkpoint.check({key: Content(KeySpec((6,), FLOAT), 1)}, MOMENTUM)
    assert text in str(caught.value)


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot create"):
        write_checkpoint(tmp_path / "file" / "in", CONTENTS, MOMENTUM, pieces())


def test_two_checkpoints_in_turn_leave_the_files_of_the_last(tmp_path: Path) -> None:
    for count in (5, 8):
        write_checkpoint(tmp_path, CONTENTS, MOMENTUM, pieces(count))
    assert len(list(tmp_path.iterdir())) == 3
    with CheckpointReader(tmp_path) as checkpoint:
        assert checkpoint.read("w", 0, 1, MOMENTUM).num_updates == 8


@pytest.mark.parametrize(
    "change",
    [
        {"format": "another"},
        {"version": 3},
        {"version": True},
        {"digests": None},
        {"digests": {}},
        {"files": None},
        {"files": {"values": "values-1"}},
        {"files": {"values": "../values-1", "states": "states-1"}},
        {"files": {"values": "/etc/passwd", "states": "states-1"}},
        {"files": {"values": 7, "states": 8}},
        {"sizes": {}},
    ],
)
def test_a_manifest_that_was_tampered_with_is_refused(tmp_path: Path, change: Any) -> None:
    write_checkpoint(tmp_path, CONTENTS, MOMENTUM, pieces())
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps({**manifest, **change}))
    with pytest.raises(CheckpointError):
        CheckpointReader(tmp_path)


@optimizer.register
@dataclasses.dataclass(frozen=True)
class BadlyNamed(optimizer.Optimizer):
    """Its states would overwrite what else is in a file."""

    names: str = "count"

    def state_names(self) -> tuple[str, ...]:
        return tuple(self.names.split(","))


@pytest.mark.parametrize("names", ["count", "a/b", "m,m", ""])
def test_states_whose_names_would_clash_are_refused(tmp_path: Path, names: str) -> None:
    kv = kvstore.create("local")
    kv.set_optimizer(BadlyNamed(names=names))
    kv.init("w", np.zeros(3))
    with pytest.raises(CheckpointError, match="state_names"):
        kv.save_optimizer_states(tmp_path / "states")
    assert list(tmp_path.iterdir()) == []


def test_a_key_whose_name_the_format_uses_is_refused_by_name(tmp_path: Path) -> None:
    kv = kvstore.create("local")
    kv.init("__metadata__", np.zeros(3))
    with pytest.raises(CheckpointError, match="the file format reserves"):
        kv.save_checkpoint(tmp_path)


# -- row-sparse keys ----------------------------------------------------------------------

ROWS = np.array([1, 5])
ROW_CONTENTS = {"w": Content(KeySpec((2**40, 3), FLOAT), 1, ROWS)}


def saved_rows(directory: Path) -> None:
    values = np.arange(6, dtype=FLOAT)
    write_checkpoint(
        directory, ROW_CONTENTS, MOMENTUM, [SavedPiece("w", 0, values, [values + 10], 4)]
    )


def test_of_a_row_sparse_key_the_rows_are_saved_with_their_ids(tmp_path: Path) -> None:
    saved_rows(tmp_path)
    with CheckpointReader(tmp_path) as checkpoint:
        checkpoint.check(ROW_CONTENTS, MOMENTUM)
        assert checkpoint.specs == {"w": KeySpec((2**40, 3), FLOAT)}
        assert isinstance(checkpoint.missing([])["w"], RowSparseArray)
        assert checkpoint.rows_of("w").tolist() == [1, 5]
        piece = checkpoint.read("w", 0, 6, MOMENTUM)
        assert (piece.values.tolist(), piece.num_updates) == ([0, 1, 2, 3, 4, 5], 4)  # type: ignore[union-attr]
        assert piece.states[0].tolist() == [10, 11, 12, 13, 14, 15]


def test_who_takes_no_row_sparse_keys_is_told_which_there_are(tmp_path: Path) -> None:
    saved_rows(tmp_path)
    (states,) = tmp_path.glob("states-*")
    with pytest.raises(CheckpointError, match=r"row-sparse keys \(w\).*only a store can load"):
        SavedStates(states)


@pytest.mark.parametrize(
    ("ids", "shapes", "text"),
    [
        ([5, 1], '{"w": [10, 3]}', "must be increasing ids below"),
        ([1, 1], '{"w": [10, 3]}', "must be increasing ids below"),
        ([-1, 1], '{"w": [10, 3]}', "must be increasing ids below"),
        ([1, 10], '{"w": [10, 3]}', "must be increasing ids below"),
        ([1, 2, 3], '{"w": [10, 3]}', "do not fit"),
        ([1, 2], '{"w": [10, 4]}', "do not fit"),
        ([1, 2], '{"w": [10.5, 3]}', "cannot load the shapes"),
        ([1, 2], '{"w": []}', "cannot load the shapes"),
        ([1, 2], '{"w": 3}', "cannot load the shapes"),
        ([1, 2], f'{{"w": [{2**64}, 3]}}', "cannot load the shapes"),
        ([1, 2], "[1]", "cannot load the shapes"),
        ([1, 2], "{", "cannot load the shapes"),
        (None, '{"w": [10, 3]}', "the array .row-ids/w"),
    ],
)
def test_ids_and_shapes_in_a_file_are_checked(
    tmp_path: Path, ids: list[int] | None, shapes: str, text: str
) -> None:
    saved_rows(tmp_path)
    (path,) = tmp_path.glob("states-*")
    arrays = {"mom/w": np.zeros((2, 3), FLOAT), "count/w": np.zeros((1, 2), np.int64)}
    if ids is not None:
        arrays["row-ids/w"] = np.array(ids)
    specs = {name: (array.shape, array.dtype) for name, array in arrays.items()}
    with TensorWriter(path, specs, {"optimizer_name": "sgd", "row_sparse": shapes}) as file:
        for name, array in arrays.items():
            file.write(name, 0, array.reshape(-1))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["sizes"]["states"] = path.stat().st_size
    with TensorReader(path) as written:
        manifest["digests"]["states"] = written.digest
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=text):
        CheckpointReader(tmp_path)


# -- many keys ----------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["load_checkpoint", "load_optimizer_states"])
def test_the_names_in_a_file_are_not_listed_anew_for_each_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    keys = [f"key{number}" for number in range(50)]
    kv = kvstore.create("local")
    kv.set_optimizer(ADAM)
    kv.init(keys, [np.ones(2, np.float32)] * len(keys))
    path = tmp_path / "saved"
    (kv.save_checkpoint if call == "load_checkpoint" else kv.save_optimizer_states)(path)
    listed = 0

    def names(reader: TensorReader) -> tuple[str, ...]:
        nonlocal listed
        listed += 1
        return tuple(reader._entries)

    monkeypatch.setattr(TensorReader, "names", property(names))
    getattr(kv, call)(path)
    assert listed <= 1
