"""Notes of where jobs are: the user's own are found, and nothing that others could have written."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from kvstore.launch.jobs import PREFIX, FoundJob, note_job, running_jobs
from kvstore.launch.key import new_key_file, write_key


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def made(address: str, security: str = "plain") -> Path:
    key_file = new_key_file()
    write_key(key_file)
    note_job(key_file, address, security)
    return key_file


def test_jobs_are_found_by_their_addresses() -> None:
    later, first = made("127.0.0.1:20", "curve"), made("127.0.0.1:10")
    assert running_jobs() == [
        FoundJob("127.0.0.1:10", "plain", str(first)),
        FoundJob("127.0.0.1:20", "curve", str(later)),
    ]


def test_what_others_could_have_written_is_not_looked_at(place: Path) -> None:
    made("127.0.0.1:1").parent.chmod(0o755)
    real = made("127.0.0.1:2").parent
    hidden = real.rename(place / "elsewhere")
    (place / f"{PREFIX}link").symlink_to(hidden)
    assert running_jobs() == []


def test_directories_of_others_hide_no_job(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.launch.jobs._MAX_JOBS", 1)
    (place / f"{PREFIX}!").mkdir(mode=0o755)
    made("127.0.0.1:1")
    assert [job.address for job in running_jobs()] == ["127.0.0.1:1"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"address": "a"}', "\xff", "x" * 10_000])
def test_a_note_that_is_none_is_passed_over(text: str) -> None:
    made("127.0.0.1:1").with_name("job.json").write_text(text, encoding="latin-1")
    assert running_jobs() == []


def test_a_job_without_a_note_is_passed_over() -> None:
    write_key(new_key_file())
    assert running_jobs() == []


def test_a_note_that_cannot_be_written_stops_no_job(place: Path) -> None:
    note_job(place / "nowhere" / "job.key", "127.0.0.1:1", "")
    assert running_jobs() == []
