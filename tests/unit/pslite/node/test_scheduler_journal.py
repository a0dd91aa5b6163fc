"""The file from which another scheduler goes on: what comes back, and who may have it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pslite.errors import ConfigError
from pslite.node.scheduler_journal import CHARTER, DEADLOCK, REQUEST, TERM, SchedulerJournal

RECORDS: list[tuple[bytes, Any]] = [
    (CHARTER, [1, "two", b"three", [None, True]]),
    (REQUEST, [9, "W9", 1, 0, 5, 2, b"x" * 5000]),
    (DEADLOCK, "all wait"),
    (TERM, None),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def written(path: Path, records: list[tuple[bytes, Any]]) -> int:
    """Append records as a process does that then dies; return the bytes of the file."""
    journal = SchedulerJournal(str(path))
    for kind, plain in records:
        journal.append(kind, plain)
    journal.close()
    return path.stat().st_size


def found_in(path: Path) -> list[tuple[bytes, Any]]:
    """What the next process finds."""
    journal = SchedulerJournal(str(path))
    found = journal.found
    journal.close()
    return found


def test_all_records_come_back_in_their_order(path: Path) -> None:
    written(path, RECORDS)
    assert found_in(path) == RECORDS


def test_a_record_is_in_the_file_when_append_returns(path: Path) -> None:
    journal = SchedulerJournal(str(path))
    journal.append(*RECORDS[0])
    size = path.stat().st_size
    journal.close()
    assert size == path.stat().st_size > 0


def test_records_of_the_next_process_come_after_those_of_the_first(path: Path) -> None:
    written(path, RECORDS[:2])
    written(path, RECORDS[2:])
    assert found_in(path) == RECORDS


@pytest.mark.parametrize("missing", [1, 4999, 5010])
def test_a_record_that_was_not_written_to_its_end_is_removed(path: Path, missing: int) -> None:
    size = written(path, RECORDS[:1])
    longer = written(path, RECORDS[1:2])
    with path.open("r+b") as file:
        file.truncate(longer - missing)
    assert found_in(path) == RECORDS[:1]
    assert path.stat().st_size == size


def test_a_record_after_a_torn_one_is_read(path: Path) -> None:
    written(path, RECORDS[:2])
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 7)
    written(path, RECORDS[2:3])
    assert found_in(path) == [RECORDS[0], RECORDS[2]]


def test_what_follows_a_record_with_wrong_bytes_is_not_believed(path: Path) -> None:
    size = written(path, RECORDS[:1])
    written(path, RECORDS[1:])
    with path.open("r+b") as file:
        file.seek(size + 100)
        file.write(b"?")
    assert found_in(path) == RECORDS[:1]
    assert path.stat().st_size == size


def test_a_journal_that_was_emptied_has_nothing_for_the_next_process(path: Path) -> None:
    written(path, RECORDS)
    journal = SchedulerJournal(str(path))
    journal.empty()
    journal.close()
    assert (found_in(path), path.stat().st_size) == ([], 0)


def test_another_process_cannot_have_the_file_meanwhile(path: Path) -> None:
    """In a process of its own: a process does not lock itself out."""
    program = (
        "import sys\n"
        "from pslite.node.scheduler_journal import SchedulerJournal\n"
        "try:\n"
        "    SchedulerJournal(sys.argv[1])\n"
        "except Exception as error:\n"
        "    sys.exit(f'{type(error).__name__}: {error}')\n"
    )

    def other_process() -> str:
        command = [sys.executable, "-c", program, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    journal = SchedulerJournal(str(path))
    journal.append(*RECORDS[0])
    refused = other_process()
    assert refused.startswith("ConfigError: another scheduler has ")
    assert f"PS_SCHEDULER_JOURNAL={path}" in refused
    journal.append(*RECORDS[1])
    journal.close()
    assert other_process() == ""
    assert found_in(path) == RECORDS[:2]


def in_no_folder(path: Path) -> Path:
    return path / "of" / "no" / "folder"


def folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize("make", [in_no_folder, folder])
def test_a_file_that_cannot_be_opened_is_named(path: Path, make: Callable[[Path], Path]) -> None:
    where = make(path)
    with pytest.raises(ConfigError, match="cannot open PS_SCHEDULER_JOURNAL=") as caught:
        SchedulerJournal(str(where))
    assert str(where) in str(caught.value)


def test_a_failed_write_is_the_callers_and_leaves_whole_records(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = SchedulerJournal(str(path))
    journal.append(*RECORDS[0])
    write, num_calls = os.write, 0

    def full_after_ten_bytes(file: int, data: bytes) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[:10])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_after_ten_bytes)
        with pytest.raises(OSError, match="No space left"):
            journal.append(*RECORDS[1])
    journal.close()
    assert found_in(path) == RECORDS[:1]


def test_a_write_of_a_part_goes_on_with_the_rest(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:777]))
        written(path, RECORDS)
    assert found_in(path) == RECORDS
