"""A Python that lacks what servers need is told so by the launcher, before it starts anything."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec

import pytest

from kvstore.launch.cli import main
from kvstore.launch.service import missing_packages


def without(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    def find(name: str) -> ModuleSpec | None:
        return None if name in missing else ModuleSpec(name, None)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def test_nothing_is_said_where_all_packages_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    assert missing_packages() is None


def test_what_is_missing_is_named_as_packages_are_with_the_python_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "zmq")
    assert main(["-n", "1", "true"]) == 2
    assert capsys.readouterr().err == (
        f"[launcher] pyzmq is not installed in {sys.executable}: pip install . in the checkout, "
        "or use .venv/bin/python, which make creates\n"
    )
