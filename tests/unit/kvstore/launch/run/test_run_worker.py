"""What a worker of ``kvstore.run`` makes of a call, and of its errors."""

from __future__ import annotations

import pickle
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvstore.launch.run import call_files, worker
from kvstore.launch.run.call_files import WorkerAnswer
from pslite.errors import NodeLostError


def fail(error: BaseException) -> None:
    raise error


def packed(function: Any, *args: Any) -> bytes:
    return call_files.dump((function, args, {}), "the function")


def call(directory: Path, body: bytes, **header: Any) -> WorkerAnswer:
    """The answer to a call that was left there."""
    usual = {"python": call_files.python_version(), "by_value": False, "path": []}
    call_files.write(call_files.call_path(directory, 1), {**usual, **header}, body)
    return worker.make_call(directory, 1)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(worker, "worker_node", lambda: None)  # there is no job to join
    return call_files.make_directory(str(tmp_path))


def test_what_a_function_returns_is_the_answer(directory: Path) -> None:
    answer = call(directory, packed(divmod, 7, 2))
    assert not answer.failed
    assert pickle.loads(answer.body) == (3, 1)


def test_an_exception_comes_with_its_traceback_from_the_function_on(directory: Path) -> None:
    answer = call(directory, packed(fail, ValueError("x")))
    assert (answer.kind, answer.type) == ("error", "ValueError")
    assert not answer.blames_another
    assert repr(pickle.loads(answer.body)) == "ValueError('x')"
    lines = answer.text.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: x"
    assert "in fail" in lines[1]


def test_an_exception_about_a_lost_node_blames_another_also_as_a_cause(directory: Path) -> None:
    lost = NodeLostError("worker 1 is lost", role="worker", rank=1)
    later = ValueError("y")
    later.__cause__ = lost
    assert worker.error_answer(lost).blames_another
    assert worker.error_answer(later).blames_another


def test_an_exit_travels_as_text_only(directory: Path) -> None:
    answer = call(directory, packed(sys.exit, 3))
    assert (answer.type, answer.body) == ("SystemExit", b"")


def test_a_result_that_cannot_travel_is_refused_with_words(directory: Path) -> None:
    answer = call(directory, packed(threading.Lock))
    assert answer.kind == "refusal"
    assert "cannot send back the function's result: cannot pickle a value of type lock" in (
        answer.text
    )


def test_a_function_by_value_needs_the_caller_s_python(directory: Path) -> None:
    body = packed(divmod, 7, 2)
    assert not call(directory, body, python=[3, 2]).failed
    answer = call(directory, body, python=[3, 2], by_value=True)
    assert "but the caller has 3.2; functions of a notebook need the same" in answer.text


def test_a_module_that_is_missing_is_named(directory: Path) -> None:
    answer = call(directory, b"\x80\x04cno_such_module\nNothing\n.")
    assert "needs the module no_such_module, which is not here: install it for" in (answer.text)


def test_modules_are_found_where_the_caller_has_them(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "only_the_caller_has_it.py").write_text("def answer():\n    return 42\n")
    path = [str(tmp_path), str(tmp_path / "not there")]
    answer = call(directory, b"(conly_the_caller_has_it\nanswer\n)}t.", path=path)
    assert pickle.loads(answer.body) == 42
    assert sys.path[0] == str(tmp_path)
    assert path[1] not in sys.path


@pytest.mark.parametrize("mode", ["once", "serve"])
def test_a_worker_that_cannot_see_the_directory_says_so_and_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
) -> None:
    monkeypatch.setenv("DMLC_TASK_ID", "0")
    assert worker.main([str(tmp_path / "elsewhere"), mode]) == 1
    said = capsys.readouterr().err
    assert "all hosts of the job need it at this path" in said
    assert "share_dir=" in said
    assert said.count("\n") == 1
