"""What files may be replaced, what killed saves leave, and paths that name no file."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import optimizer
from kvstore.checkpoint import atomic
from kvstore.checkpoint.atomic import Replacement, read_json
from kvstore.errors import ArgumentTypeError, CheckpointError
from kvstore.stores.base import KVStore

HOUR_S = 3600


def put(path: Path, text: str) -> None:
    file = Replacement(path)
    try:
        file.write(0, text.encode())
        file.commit()
    finally:
        file.discard()


def killed(path: Path, text: str = "half") -> Path:
    """What a process leaves that is killed while it writes ``path``."""
    before = set(path.parent.iterdir())
    file = Replacement(path)
    file.write(0, text.encode())
    file._file.close()
    (left,) = set(path.parent.iterdir()) - before
    return left


# -- what may be replaced -----------------------------------------------------------------


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    device = tmp_path / "null"
    try:
        os.mknod(device, 0o20666, os.makedev(1, 3))
    except PermissionError:
        device = Path("/dev/null")  # users that cannot make one
    with pytest.raises(CheckpointError, match=r"is a device; choose"):
        Replacement(device)
    assert device.is_char_device()


def test_a_pipe_a_socket_and_a_directory_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind("socket")
    for name, kind in [("pipe", "a pipe"), ("socket", "a socket"), ("folder", "a directory")]:
        with pytest.raises(CheckpointError, match=f"write .*{name}: it exists and is {kind}"):
            Replacement(tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe", "socket"]


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("old")
    (tmp_path / "link").symlink_to("there/file")
    (tmp_path / "new").symlink_to("there/new")
    put(tmp_path / "link", "new")
    put(tmp_path / "new", "first")
    assert (tmp_path / "link").readlink() == Path("there/file")
    assert (tmp_path / "there" / "file").read_text() == "new"
    assert (tmp_path / "there" / "new").read_text() == "first"
    assert sorted(os.listdir(tmp_path)) == ["link", "new", "there"]
    assert sorted(os.listdir(tmp_path / "there")) == ["file", "new"]


def test_a_link_to_a_device_or_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/null")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(CheckpointError, match=r"link: it exists and is a device"):
        Replacement(tmp_path / "link")
    with pytest.raises(CheckpointError, match=r"cannot write .*loop: Too many levels"):
        Replacement(tmp_path / "loop")


def test_a_pipe_is_not_waited_for_when_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(
        CheckpointError, match=r"cannot read .*pipe: expected a regular file, found a pipe"
    ):
        read_json(tmp_path / "pipe")
    kv = kvstore.create("local")
    with pytest.raises(
        CheckpointError, match=r"cannot read .*pipe: expected a regular file, found a pipe"
    ):
        kv.load_optimizer_states(tmp_path / "pipe")


def test_a_save_that_fails_leaves_the_file_of_before_and_no_other(tmp_path: Path) -> None:
    put(tmp_path / "file", "old")
    file = Replacement(tmp_path / "file")
    file.write(0, b"half")
    assert len(os.listdir(tmp_path)) == 2
    file.discard()
    file.discard()
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "old"


# -- what killed saves leave --------------------------------------------------------------


def test_the_next_save_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    for _ in range(3):
        killed(tmp_path / "f")
    other = killed(tmp_path / "other")
    put(tmp_path / "f", "whole")
    assert sorted(os.listdir(tmp_path)) == ["f", other.name]


def test_files_that_are_being_written_stay(tmp_path: Path) -> None:
    running = Replacement(tmp_path / "f")
    running.write(0, b"mine")
    put(tmp_path / "f", "another's")
    running.commit()
    running.discard()
    assert (tmp_path / "f").read_text() == "mine"
    assert os.listdir(tmp_path) == ["f"]


def test_files_of_another_machine_go_once_they_were_not_written_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "machine_id", lambda: "another kernel/pid:[1]")
        left = killed(tmp_path / "f")
    put(tmp_path / "f", "whole")
    assert left.exists()
    now = (tmp_path / "f").stat().st_mtime
    os.utime(left, (now, now - 23 * HOUR_S))
    put(tmp_path / "f", "whole")
    assert left.exists()
    os.utime(left, (now, now - 25 * HOUR_S))
    put(tmp_path / "f", "whole")
    assert os.listdir(tmp_path) == ["f"]


def test_a_file_of_another_machine_that_is_locked_stays_however_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "machine_id", lambda: "another kernel")
        left = killed(tmp_path / "f")
    os.utime(left, (0, 0))
    with open(left) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        put(tmp_path / "f", "whole")
        assert left.exists()


def test_where_there_are_no_locks_only_what_is_old_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    left = killed(tmp_path / "f")
    put(tmp_path / "f", "whole")
    assert left.exists()
    os.utime(left, (0, 0))
    put(tmp_path / "f", "whole")
    assert os.listdir(tmp_path) == ["f"]


def test_files_with_similar_names_are_left_alone(tmp_path: Path) -> None:
    names = ["f.tmp-", "f.tmp-12", "f.tmp-0123abcd", "f.tmp-0123abcd-0123abcd.bak", "f.tmp"]
    for name in names:
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (0, 0))
    put(tmp_path / "f", "whole")
    assert sorted(os.listdir(tmp_path)) == sorted(["f", *names])


def test_a_file_that_was_removed_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, taken = fcntl.flock, []

    def late(file: Any, operation: int) -> None:
        if not taken:
            taken.append(file.name)
            os.unlink(file.name)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    put(tmp_path / "f", "whole")
    assert taken and os.listdir(tmp_path) == ["f"]


# -- names --------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["save_checkpoint", "save_optimizer_states"])
@pytest.mark.parametrize("path", ["", "a\0b", "\ud800"])
def test_a_text_that_names_no_file_is_refused_with_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    kv = stored()
    for name in (call, call.replace("save", "load")):
        with pytest.raises(CheckpointError) as caught:
            getattr(kv, name)(path)
        assert str(caught.value).startswith("a file name must be non-empty")
        assert str(caught.value).endswith(f", got {path!r}")
    with pytest.raises(ArgumentTypeError, match="got b'a'"):
        getattr(kv, call)(b"a")
    assert os.listdir(tmp_path) == []


def stored() -> KVStore:
    kv = kvstore.create("local")
    kv.set_optimizer(optimizer.create("sgd"))
    kv.init("w", np.zeros(3))
    return kv


def test_states_in_a_directory_and_a_checkpoint_in_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=r"folder: it exists and is a directory"):
        stored().save_optimizer_states(tmp_path / "folder")
    with pytest.raises(CheckpointError, match=r"file must be a directory"):
        stored().save_checkpoint(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"folder: .*directory"):
        stored().load_optimizer_states(tmp_path / "folder")
    assert (tmp_path / "file").read_text() == "mine"
    assert os.listdir(tmp_path / "folder") == []
