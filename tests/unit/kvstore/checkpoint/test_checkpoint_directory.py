"""Saves into one directory: what they remove, two of them at once, and a reader beside them."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import optimizer
from kvstore.arrays.keys import KeySpec
from kvstore.checkpoint import directory as checkpoint
from kvstore.checkpoint.directory import CLAIM, MANIFEST, CheckpointReader, write_checkpoint
from kvstore.checkpoint.optimizer_states import Content, SavedPiece
from kvstore.errors import CheckpointError
from kvstore.mxnet.model import load_checkpoint, save_checkpoint
from kvstore.stores.base import KVStore

CONTENTS = {"w": Content(KeySpec((3,), np.dtype("f4")), 1)}


def pieces(value: float) -> Iterator[SavedPiece]:
    yield SavedPiece("w", 0, np.full(3, value, np.float32), [], 0)


def save(directory: Path, value: float = 1.0) -> None:
    write_checkpoint(directory, CONTENTS, None, pieces(value))


def value_in(directory: Path) -> float:
    with CheckpointReader(directory) as saved:
        values = saved.read("w", 0, 3, None).values
        assert values is not None and values.min() == values.max()
        return float(values.max())


def kinds(directory: Path) -> list[str]:
    """The names of files up to their numbers."""
    return sorted(path.name.partition("-")[0] for path in directory.iterdir())


WHOLE = [MANIFEST, "states", "values"]


class Killed(BaseException):
    """A process that ends here: nothing that follows has an effect."""


# -- what is removed ----------------------------------------------------------------------


def test_only_files_of_the_checkpoint_before_are_removed(tmp_path: Path) -> None:
    save(tmp_path)
    (values,) = tmp_path.glob("values-*")
    own = ["values-best.safetensors", "states-1.safetensors", "values-0123abcd.safetensors"]
    for name in own:
        (tmp_path / name).write_bytes(values.read_bytes())
    save(tmp_path, 2.0)
    assert not values.exists()
    assert [name for name in own if not (tmp_path / name).exists()] == []
    assert value_in(tmp_path) == 2.0


def test_a_manifest_that_cannot_be_read_has_no_files_removed(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    save(tmp_path, 2.0)
    assert kinds(tmp_path) == sorted([*WHOLE, "states", "values"])
    assert value_in(tmp_path) == 2.0


def test_a_save_that_fails_leaves_the_checkpoint_before_it_and_no_file(tmp_path: Path) -> None:
    save(tmp_path)

    def failing() -> Iterator[SavedPiece]:
        yield from pieces(2.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, CONTENTS, None, failing())
    assert kinds(tmp_path) == WHOLE
    assert value_in(tmp_path) == 1.0


def test_a_save_whose_manifest_cannot_be_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise CheckpointError("cannot write: No space left on device")

    save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_json", full)
        with pytest.raises(CheckpointError, match="No space"):
            save(tmp_path, 2.0)
    assert kinds(tmp_path) == WHOLE
    assert value_in(tmp_path) == 1.0


@pytest.mark.parametrize("machine", ["this", "another", "another, a day ago"])
def test_the_next_save_removes_what_one_left_that_was_killed_before_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_json", _kill)
        patch.setattr(checkpoint, "_sweep", lambda *_: False)  # nor what the end would do
        with pytest.raises(Killed):
            save(tmp_path, 2.0)
    assert kinds(tmp_path) == sorted([CLAIM, *WHOLE, "states", "values"])
    assert value_in(tmp_path) == 1.0
    claim = tmp_path / CLAIM
    if machine != "this":
        claim.write_text(json.dumps({**json.loads(claim.read_text()), "machine": "00000000"}))
    if "day" in machine:
        now = claim.stat().st_mtime
        os.utime(claim, (now, now - 25 * 3600))
    save(tmp_path, 3.0)
    left = [] if machine != "another" else ["states", "values"]
    assert kinds(tmp_path) == sorted([*WHOLE, *left])
    assert value_in(tmp_path) == 3.0


def _kill(*_: Any) -> None:
    raise Killed


def test_files_that_a_killed_save_had_begun_are_removed(tmp_path: Path) -> None:
    save(tmp_path)
    name = f"values-0123abcd.safetensors.tmp-{checkpoint.machine_name()}-0123abcd"
    other = f"values-best.safetensors.tmp-{checkpoint.machine_name()}-0123abcd"
    (tmp_path / name).write_text("half")
    (tmp_path / other).write_text("another's")
    save(tmp_path)
    assert sorted(path.name[:11] for path in tmp_path.iterdir() if ".tmp-" in path.name) == [
        "values-best"
    ]


@pytest.mark.parametrize("claim", [b"", b"{", b"[]", b'{"files": 3, "pid": 1}', b"[" * 100_000])
def test_a_claim_that_makes_no_sense_hinders_nobody(tmp_path: Path, claim: bytes) -> None:
    (tmp_path / CLAIM).write_bytes(claim)
    save(tmp_path)
    assert kinds(tmp_path) == WHOLE


def test_a_claim_cannot_have_other_files_removed(tmp_path: Path) -> None:
    machine = checkpoint.machine_name()
    outside = tmp_path / "values-0123abcd.safetensors"
    outside.write_text("mine")
    names = ["../values-0123abcd.safetensors", str(outside), "note.txt", MANIFEST, 7]
    directory = tmp_path / "saved"
    save(directory)
    (directory / "note.txt").write_text("mine")
    (directory / CLAIM).write_text(json.dumps({"machine": machine, "files": names}))
    save(directory)
    assert outside.exists() and kinds(directory) == sorted([*WHOLE, "note.txt"])


# -- two at once --------------------------------------------------------------------------


def test_of_two_saves_into_one_directory_the_second_is_refused_by_name(tmp_path: Path) -> None:
    begun, refused = threading.Event(), threading.Event()

    def slow() -> Iterator[SavedPiece]:
        begun.set()
        assert refused.wait(30)
        yield from pieces(2.0)

    first = threading.Thread(
        target=lambda: write_checkpoint(tmp_path, CONTENTS, None, slow()), daemon=True
    )
    first.start()
    assert begun.wait(30)
    with pytest.raises(
        CheckpointError, match=f"process {os.getpid()} on .* is already saving into"
    ):
        save(tmp_path, 3.0)
    refused.set()
    first.join(30)
    assert kinds(tmp_path) == WHOLE
    assert value_in(tmp_path) == 2.0


def test_a_claim_that_was_removed_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, removed = fcntl.flock, []

    def late(file: Any, operation: int) -> None:
        if not removed:
            removed.append(file.name)
            os.unlink(file.name)  # as the save before does at its end
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    save(tmp_path)
    assert removed == [tmp_path / CLAIM] and kinds(tmp_path) == WHOLE


def test_without_locks_a_save_touches_nothing_that_may_be_another_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)

    def meanwhile() -> Iterator[SavedPiece]:
        save(tmp_path, 3.0)
        yield from pieces(2.0)

    write_checkpoint(tmp_path, CONTENTS, None, meanwhile())
    assert value_in(tmp_path) == 2.0


def test_a_directory_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / CLAIM).symlink_to("elsewhere")
    with pytest.raises(CheckpointError, match=r"cannot write .*\.saving: Too many levels"):
        save(tmp_path)


# -- a reader beside a writer -------------------------------------------------------------


def test_a_reader_takes_the_checkpoint_that_came_while_it_opened_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1.0)
    files_of = checkpoint._files_of
    coming = [2.0, 3.0, 4.0]

    def overtaken(directory: Path, manifest: Any) -> dict[str, Path]:
        if coming:
            save(tmp_path, coming.pop(0))
        return files_of(directory, manifest)

    monkeypatch.setattr(checkpoint, "_files_of", overtaken)
    assert value_in(tmp_path) == 4.0


def test_a_reader_keeps_the_checkpoint_that_it_has_opened(tmp_path: Path) -> None:
    save(tmp_path, 1.0)
    with CheckpointReader(tmp_path) as saved:
        save(tmp_path, 2.0)
        values = saved.read("w", 0, 3, None).values
    assert values is not None and values.tolist() == [1.0, 1.0, 1.0]


def test_a_file_that_is_missing_for_good_is_an_error(tmp_path: Path) -> None:
    save(tmp_path)
    (values,) = tmp_path.glob("values-*")
    values.unlink()
    with pytest.raises(CheckpointError, match=r"values-.* cannot be read \(No such file.*earlier"):
        CheckpointReader(tmp_path)


def test_a_file_of_another_size_is_an_error_with_both_sizes(tmp_path: Path) -> None:
    save(tmp_path)
    (values,) = tmp_path.glob("values-*")
    size = values.stat().st_size
    os.truncate(values, size - 1)
    with pytest.raises(CheckpointError, match=f"has {size - 1} bytes, expected {size}; load an"):
        CheckpointReader(tmp_path)


def test_a_directory_without_a_manifest_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a complete checkpoint: manifest\.json"):
        CheckpointReader(tmp_path)
    with pytest.raises(CheckpointError, match=r"No such file"):
        CheckpointReader(tmp_path / "elsewhere")


def test_a_store_that_loads_in_a_loop_beside_one_that_saves_always_finds_a_checkpoint(
    tmp_path: Path,
) -> None:
    def store() -> KVStore:
        kv = kvstore.create("local")
        kv.init("w", np.zeros(3, np.float32))
        return kv

    writer, reader = store(), store()
    writer.save_checkpoint(tmp_path)
    is_over = threading.Event()

    def save_on() -> None:
        while not is_over.is_set():
            writer.save_checkpoint(tmp_path)

    thread = threading.Thread(target=save_on, daemon=True)
    thread.start()
    try:
        for _ in range(100):
            reader.load_checkpoint(tmp_path)
    finally:
        is_over.set()
        thread.join(30)


# -- damage -------------------------------------------------------------------------------


def trained(value: float) -> KVStore:
    kv = kvstore.create("local")
    kv.set_optimizer(optimizer.create("sgd", learning_rate=0.5, momentum=0.5))
    kv.init(["a", "b"], [np.full(4, value, np.float32), np.full((2, 2), value, np.float16)])
    kv.push(["a", "b"], [np.full(4, value, np.float32), np.full((2, 2), value, np.float16)])
    return kv


def state_of(kv: KVStore) -> list[Any]:
    """What a later push would show, too."""
    keys = kv.keys()
    before = [np.asarray(value).tolist() for value in kv.pull(keys)] if keys else []
    return [keys, before]


def loads(directory: Path, expected: list[Any]) -> bool:
    """Whether the checkpoint loads, and then exactly; a store that refuses it is as it was."""
    kv = kvstore.create("local")
    try:
        kv.load_checkpoint(directory)
    except CheckpointError:
        assert state_of(kv) == [[], []]
        return False
    assert state_of(kv) == expected
    kv.push("a", np.zeros(4, np.float32))
    assert kv.pull("a").tolist() == [0.25] * 4
    return True


@pytest.mark.parametrize(("kind", "step"), [("values", 11), ("states", 37), ("manifest", 7)])
def test_a_flipped_bit_of_a_checkpoint_is_found_or_means_the_same(
    tmp_path: Path, kind: str, step: int
) -> None:
    """A sample of all bits, which has each of the eight of a byte."""
    kv = trained(1.0)
    expected = state_of(kv)
    kv.save_checkpoint(tmp_path)
    (path,) = tmp_path.glob(f"{kind}*")
    content = path.read_bytes()
    for bit in range(0, 8 * len(content), step):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        # The manifest is text: its spaces and line ends may be others.
        is_space = kind == "manifest" and content[bit // 8] in b" \n"
        assert not loads(tmp_path, expected) or is_space
    path.write_bytes(content)
    assert loads(tmp_path, expected)


@pytest.mark.parametrize("kind", ["values", "states", "manifest"])
def test_every_cut_of_a_checkpoint_is_found(tmp_path: Path, kind: str) -> None:
    kv = trained(1.0)
    expected = state_of(kv)
    kv.save_checkpoint(tmp_path)
    (path,) = tmp_path.glob(f"{kind}*")
    content = path.read_bytes()
    for length in range(0, len(content) - 1, 5):  # the last byte of the manifest ends its line
        path.write_bytes(content[:length])
        assert not loads(tmp_path, expected)
    path.write_bytes(content + b"\0")
    assert not loads(tmp_path, expected)


@pytest.mark.parametrize("kind", ["values", "states"])
def test_a_file_of_another_save_is_refused(tmp_path: Path, kind: str) -> None:
    for name, value in [("one", 1.0), ("other", 2.0)]:
        trained(value).save_checkpoint(tmp_path / name)
    (ours,), (theirs,) = ((tmp_path / name).glob(f"{kind}-*") for name in ("one", "other"))
    assert ours.stat().st_size == theirs.stat().st_size
    ours.write_bytes(theirs.read_bytes())
    with pytest.raises(CheckpointError, match=rf"{kind}-.* does not match manifest\.json"):
        kvstore.create("local").load_checkpoint(tmp_path / "one")


def test_a_damaged_value_is_named_with_its_place_and_the_store_stays_as_it_was(
    tmp_path: Path,
) -> None:
    trained(1.0).save_checkpoint(tmp_path)
    (values,) = tmp_path.glob("values-*")
    content = bytearray(values.read_bytes())
    content[-1] ^= 128
    values.write_bytes(content)
    kv = trained(2.0)
    before = state_of(kv)
    at = len(content) - 24
    with pytest.raises(
        CheckpointError, match=f"values-.* wrong checksum of bytes {at} to {at + 24};"
    ):
        kv.load_checkpoint(tmp_path)
    assert state_of(kv) == before


def test_damaged_states_leave_the_store_as_it_was(tmp_path: Path) -> None:
    trained(1.0).save_optimizer_states(tmp_path / "states")
    content = bytearray((tmp_path / "states").read_bytes())
    content[-1] ^= 128
    (tmp_path / "states").write_bytes(content)
    kv = trained(2.0)
    with pytest.raises(CheckpointError, match="states is damaged: wrong checksum of bytes"):
        kv.load_optimizer_states(tmp_path / "states")
    kv.push("a", np.zeros(4, np.float32))
    assert kv.pull("a").tolist() == [0.5] * 4


# -- the other kinds of files -------------------------------------------------------------


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 128
    path.write_bytes(content)


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "m", 1, None, {"w": np.ones(3, np.float32)})
    damage(tmp_path / "m-0001.params")
    with pytest.raises(
        CheckpointError, match=r"m-0001\.params is damaged: wrong checksum of bytes"
    ):
        load_checkpoint(tmp_path / "m", 1)


def test_a_damaged_export_leaves_the_table_as_it_was(tmp_path: Path) -> None:
    table, serving = (kvstore.create("local").create_table("t", 2, init=0.5) for _ in range(2))
    table.push([1, 2], np.ones((2, 2), np.float32))
    table.export(tmp_path / "all")
    damage(tmp_path / "all")
    serving.push([7], np.ones((1, 2), np.float32))
    with pytest.raises(CheckpointError, match="all is damaged: wrong checksum of bytes"):
        serving.load(tmp_path / "all")
    assert serving.ids().tolist() == [7]


def test_what_was_owed_is_refused_when_it_is_damaged(tmp_path: Path) -> None:
    kv = kvstore.create("local")
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.init("w", np.zeros(3, np.float32))
    kv.push("w", np.full(3, 0.1, np.float32))
    kv.save_checkpoint(tmp_path)
    damage(tmp_path / "residuals-0.safetensors")
    with pytest.raises(
        CheckpointError, match=r"residuals-0\.safetensors is damaged: wrong checksum of bytes"
    ):
        kv.load_checkpoint(tmp_path)
