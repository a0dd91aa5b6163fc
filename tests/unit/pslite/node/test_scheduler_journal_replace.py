"""A journal is replaced by a shorter one: all of it or nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pslite.node.scheduler_journal import APPS, CHARTER, REQUEST, SchedulerJournal

OPEN_IT = """
import sys
from pslite.node.scheduler_journal import SchedulerJournal
try:
    SchedulerJournal(sys.argv[1])
except Exception as error:
    print(error)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "journal")


def found(path: str) -> list[Any]:
    journal = SchedulerJournal(path)
    records = journal.found
    journal.close()
    return records


def test_the_next_process_finds_the_new_records_and_later_ones(path: str) -> None:
    journal = SchedulerJournal(path)
    for number in range(100):
        journal.append(REQUEST, [number])
    before = journal.nbytes
    journal.replace([(CHARTER, ["c"]), (APPS, [1, 2])])
    assert journal.nbytes == os.stat(path).st_size < before
    journal.append(REQUEST, ["later"])
    assert journal.nbytes == os.stat(path).st_size
    journal.close()
    assert found(path) == [(CHARTER, ["c"]), (APPS, [1, 2]), (REQUEST, ["later"])]
    assert os.listdir(os.path.dirname(path)) == ["journal"]


def test_what_a_lost_process_has_left_half_written_does_no_harm(path: str) -> None:
    Path(f"{path}.new").write_bytes(b"half")
    journal = SchedulerJournal(path)
    journal.replace([(CHARTER, [])])
    journal.close()
    assert found(path) == [(CHARTER, [])]


def test_if_it_cannot_be_replaced_the_old_one_goes_on(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = SchedulerJournal(path)
    journal.append(REQUEST, [1])

    def refuse(source: str, target: str) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(OSError, match="no"):
            journal.replace([(CHARTER, [])])
    journal.append(REQUEST, [2])
    journal.close()
    assert found(path) == [(REQUEST, [1]), (REQUEST, [2])]


def test_no_other_process_can_have_the_new_file_either(path: str) -> None:
    journal = SchedulerJournal(path)
    journal.replace([(CHARTER, [])])
    command = [sys.executable, "-c", OPEN_IT, path]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"another scheduler has PS_SCHEDULER_JOURNAL={path}" in text
    journal.close()
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""
