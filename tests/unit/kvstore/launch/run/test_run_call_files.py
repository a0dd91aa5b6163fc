"""The files by which ``kvstore.run`` and its workers hand functions and results over."""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ArgumentTypeError, MissingDependencyError
from kvstore.launch.run import call_files


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return call_files.make_directory(str(tmp_path))


def test_the_directory_and_its_files_are_for_their_user_alone(directory: Path) -> None:
    path = call_files.call_path(directory, 1)
    call_files.write(path, {"a": 1}, b"body")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert call_files.read(path) == ({"a": 1}, b"body")
    assert os.listdir(directory) == ["call-1"]


def test_a_directory_that_others_may_enter_is_not_read(directory: Path) -> None:
    path = call_files.call_path(directory, 1)
    call_files.write(path, {})
    directory.chmod(0o750)
    with pytest.raises(call_files.NotReadable, match=r"other users can access .*chmod 700"):
        call_files.read(path)


def test_a_directory_of_another_user_is_not_read(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(call_files.NotReadable, match="must belong to user"):
        call_files.check_directory(directory)


def test_a_directory_that_this_host_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(call_files.NotReadable, match=r"all hosts .* share \(share_dir="):
        call_files.check_directory(tmp_path / "elsewhere")


def test_a_link_is_not_followed(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "foreign").write_bytes(b"{}\n")
    call_files.call_path(directory, 1).symlink_to(tmp_path / "foreign")
    with pytest.raises(OSError):
        call_files.read(call_files.call_path(directory, 1))


def test_what_cannot_be_written_leaves_nothing(directory: Path) -> None:
    call_files.answer_path(directory, 1, 0).mkdir()
    with pytest.raises(OSError):
        call_files.write(call_files.answer_path(directory, 1, 0), {}, b"x")
    assert os.listdir(directory) == ["answer-1-0"]


# -- pickles ------------------------------------------------------------------------------


class Refusing:
    def __reduce__(self) -> Any:
        raise RuntimeError("I stay here")


def function() -> int:
    return 7


def test_with_cloudpickle_closures_travel() -> None:
    pytest.importorskip("cloudpickle")
    base = 3
    body = call_files.dump(lambda x: x + base, "the function")
    assert call_files.load(body)(4) == 7


@pytest.mark.parametrize("value", [threading.Lock(), Refusing()])
@pytest.mark.parametrize("has_cloudpickle", [True, False])
def test_what_cannot_travel_is_said_in_a_sentence(
    value: object, has_cloudpickle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_cloudpickle:
        monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ArgumentTypeError, match=r"cannot pickle the value: .* inside the function"):
        call_files.dump(value, "the value")


def test_without_cloudpickle_only_what_a_module_defines_travels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    assert call_files.load(call_files.dump(function, "the function")) is function
    with pytest.raises(MissingDependencyError, match=r"the function <lambda> .*pip install"):
        call_files.dump(lambda: 1, "the function <lambda>")
    monkeypatch.setattr(function, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "function", function, raising=False)
    with pytest.raises(MissingDependencyError, match=r"function .*it is defined in __main__"):
        call_files.dump([function], "the arguments")


def test_an_answer_is_one_line_of_json_and_its_body(directory: Path) -> None:
    path = call_files.answer_path(directory, 2, 5)
    answer = call_files.WorkerAnswer("error", b"\n\n", type="E", text="two\nlines", at_s=2.5)
    call_files.write_answer(path, answer)
    line, _, rest = path.read_bytes().partition(b"\n")
    assert (json.loads(line)["text"], rest) == ("two\nlines", b"\n\n")
    assert call_files.read_answer(path) == answer
    call_files.remove(directory, 2, 6)
    assert os.listdir(directory) == []
