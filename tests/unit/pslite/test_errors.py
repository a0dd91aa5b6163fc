"""One tree of errors, the same on both ends of a connection."""

from __future__ import annotations

import inspect
import re

import pytest

from kvstore.errors import OptimizerNotSet
from pslite import errors
from pslite.errors import NodeLostError, RemoteError, describe, rebuild


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    drawn: dict[str, str] = {}
    above: list[str] = []
    for bars, name in re.findall(r"^    ([ │├└─]*)(\w+(?:Error|PSError))\b", errors.__doc__, re.M):
        depth = len(bars) // 4
        del above[depth:]
        drawn[name] = above[-1] if above else "RuntimeError"
        above.append(name)
    classes = [
        each
        for _, each in inspect.getmembers(errors, inspect.isclass)
        if each.__module__ == errors.__name__
    ]
    assert drawn == {each.__name__: each.__bases__[0].__name__ for each in classes}


@pytest.mark.parametrize(
    ("error", "builtin"),
    [(errors.ConfigError, ValueError), (errors.DeadlineError, TimeoutError)],
)
def test_what_python_has_a_name_for_can_be_caught_under_it(
    error: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(error, builtin)


def test_an_error_of_ours_travels_as_its_sentence() -> None:
    assert describe(NodeLostError("server 1 is lost")) == ("NodeLostError", "server 1 is lost")


def test_any_other_error_travels_with_its_traceback() -> None:
    numbers: dict[str, float] = {}
    try:
        numbers["momentum"]
    except KeyError as error:
        kind, text = describe(error)
    assert kind == "KeyError"
    assert text.startswith("Traceback")
    assert text.endswith("KeyError: 'momentum'")


def test_an_error_whose_text_cannot_be_made_travels_all_the_same() -> None:
    class Untold(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert describe(Untold())[0] == "Untold"


def test_what_would_end_a_thread_in_silence_becomes_an_error_with_its_cause() -> None:
    ending = SystemExit(0)
    assert isinstance(errors.as_failure(ending), RuntimeError)
    assert errors.as_failure(ending).__cause__ is ending
    assert errors.as_failure(error := KeyError(1)) is error


def test_text_that_is_no_unicode_is_made_readable() -> None:
    assert describe(errors.UsageError("no file w-\udcff")) == ("UsageError", "no file w-\\udcff")


@pytest.mark.parametrize(
    "kind", ["PSError", "UsageError", "ConfigError", "PeerError", "ProtocolError", "DeadlineError"]
)
def test_an_error_of_the_tree_comes_back_as_itself(kind: str) -> None:
    error = rebuild(kind, "what happened")
    assert (type(error).__name__, str(error)) == (kind, "what happened")


def test_an_error_of_the_stores_comes_back_as_itself() -> None:
    assert type(rebuild("OptimizerNotSet", "call set_optimizer")) is OptimizerNotSet


def test_a_lost_node_is_still_named_after_the_journey() -> None:
    error = rebuild("NodeLostError", "server 1 is lost", role="server", rank=1)
    assert isinstance(error, NodeLostError)
    assert (str(error), error.role, error.rank) == ("server 1 is lost", "server", 1)


@pytest.mark.parametrize("kind", ["KeyError", "OSError", "SystemExit", "RemoteError", "", "?"])
def test_anything_else_comes_back_as_a_remote_error_that_says_what_it_was(kind: str) -> None:
    error = rebuild(kind, "traceback")
    assert isinstance(error, RemoteError)
    assert (error.kind, str(error), error.where) == (kind, "traceback", "")
