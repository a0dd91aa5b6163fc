"""Commands: what may be registered, what is run, and what comes back."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.errors import ArgumentTypeError
from kvstore.protocol import commands
from kvstore.protocol.commands import check_command, register_command, run_command
from pslite.errors import UsageError


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_commands", {})


def test_a_registered_function_gets_the_text_and_its_answer_comes_back() -> None:
    @register_command(7)
    def turn_round(body: str) -> str:
        return body[::-1]

    assert run_command(7, "abc") == "cba"
    assert turn_round("ab") == "ba"  # the decorator leaves it as it is


def test_a_function_that_returns_nothing_answers_an_empty_text() -> None:
    register_command(0)(lambda body: None)
    assert run_command(0, "anything") == ""


def test_an_answer_that_is_no_text_is_an_error_that_says_so() -> None:
    register_command(3)(lambda body: 17)  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match="command 3 must return a str or None, got int"):
        run_command(3, "")


def test_what_a_function_raises_goes_through() -> None:
    @register_command(3)
    def broken(body: str) -> str:
        raise KeyError(body)

    with pytest.raises(KeyError, match="gone"):
        run_command(3, "gone")


@pytest.mark.parametrize("registered", [(), (2, 10, 9)])
def test_an_unknown_command_is_an_error_that_lists_the_known_ones(
    registered: tuple[int, ...],
) -> None:
    for head in registered:
        register_command(head)(str.upper)
    known = "2, 9, 10" if registered else "none"
    with pytest.raises(
        UsageError, match=rf"has no command 4 \(registered: {known}\).*--server-imp"
    ):
        run_command(4, "")


def test_a_number_is_taken_once() -> None:
    register_command(1)(str.upper)
    with pytest.raises(
        ArgumentTypeError, match=r"command 1 is already registered by .*upper; choose another"
    ):
        register_command(1)(str.lower)
    assert run_command(1, "a") == "A"


def test_a_module_that_is_loaded_anew_registers_its_own_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import kvstore\n@kvstore.register_command(5)\ndef answer(body):\n    return 'old'\n"
    file = tmp_path / "commands_of_a_test.py"
    file.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = importlib.import_module("commands_of_a_test")
    file.write_text(source.replace("old", "another"))
    importlib.reload(module)
    assert run_command(5, "") == "another"
    del sys.modules["commands_of_a_test"]


@pytest.mark.parametrize("head", [-1, 1.0, "1", None, True])
def test_a_head_is_a_number_from_0_on(head: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="head must be an int of at least 0"):
        register_command(head)
    with pytest.raises(ArgumentTypeError, match="head must be an int of at least 0"):
        check_command(head, "")


def test_any_callable_will_do_and_nothing_else() -> None:
    register_command(1)(functools.partial(str.replace, "a-b", "-"))
    assert run_command(1, "+") == "a+b"
    with pytest.raises(ArgumentTypeError, match="a command must be a function, got 3"):
        register_command(2)(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("body", [None, b"bytes", 3])
def test_a_body_is_a_text(body: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="body must be a str"):
        check_command(1, body)


def test_what_can_be_sent_passes() -> None:
    for head in (0, np.int64(3), 2**63 - 1):
        check_command(head, "")
    with pytest.raises(ArgumentTypeError):
        check_command(2**63, "")


def test_a_store_in_one_process_has_no_servers_to_ask() -> None:
    assert kvstore.create("local").send_command_to_servers(9, "anything") == []
    with pytest.raises(ArgumentTypeError):
        kvstore.create("local").send_command_to_servers("stop", "anything")  # type: ignore[arg-type]
