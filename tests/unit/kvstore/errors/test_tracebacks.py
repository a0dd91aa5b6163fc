"""An error of ours that ends a script is shown with the script's frames."""

from __future__ import annotations

import sys
import traceback

import numpy as np
import pytest

import kvstore as mx
from kvstore.errors import tracebacks
from pslite.errors import PSError


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    tracebacks.shorten_tracebacks()


def misuse(kv: mx.KVStore) -> None:
    kv.pull("nothing of this name")


@pytest.mark.usefixtures("hook")
def test_frames_of_ours_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PSError) as caught:
        misuse(mx.create("local"))
    before = traceback.extract_tb(caught.value.__traceback__)
    assert any("/kvstore/" in frame.filename for frame in before if frame.filename != __file__)
    sys.excepthook(caught.type, caught.value, caught.value.__traceback__)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    files = [line for line in lines if line.startswith("  File ")]
    assert len(files) == 2
    assert all(__file__ in line for line in files)
    assert lines[-1].startswith("kvstore.errors.UnknownKeyError: ")


@pytest.mark.usefixtures("hook")
def test_other_errors_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 // int(np.zeros(1)[0])
    sys.excepthook(caught.type, caught.value, caught.value.__traceback__)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_what_another_has_done_to_errors_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(*args: object) -> None:
        """A debugger's."""

    monkeypatch.setattr(sys, "excepthook", mine)
    tracebacks.shorten_tracebacks()
    assert sys.excepthook is mine


@pytest.mark.usefixtures("hook")
@pytest.mark.timeout(20)
def test_an_error_that_is_its_own_cause_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    error = PSError("in a circle")
    error.__cause__ = error
    sys.excepthook(PSError, error, None)
    assert "in a circle" in capsys.readouterr().err
