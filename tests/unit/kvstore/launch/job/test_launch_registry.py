"""Notes of where jobs are: the user's own are found, and nothing that others could have written."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvstore.launch.job.registry import (
    PREFIX,
    FoundJob,
    new_key_file,
    note_job,
    running_jobs,
    write_key,
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def made(address: str, security: str = "plain") -> Path:
    key_file = new_key_file()
    write_key(key_file)
    note_job(key_file.parent, address, security)
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
    monkeypatch.setattr("kvstore.launch.job.registry._MAX_JOBS", 1)
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
    note_job(place / "nowhere", "127.0.0.1:1", "", "key")
    assert running_jobs() == []


def test_a_job_of_a_cluster_is_found_from_each_machine_that_shares_its_directory(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = place / ".kvstore" / "jobs" / "1f"
    directory.mkdir(parents=True, mode=0o700)
    note_job(directory, "10.0.0.7:9000", "curve", "the text of the key")
    monkeypatch.setattr("kvstore.launch.job.registry.machine_id", lambda: "another machine")
    assert running_jobs() == [FoundJob("10.0.0.7:9000", "curve", str(directory / "job.key"))]
    assert (directory / "job.key").read_text() == "the text of the key\n"
    assert (directory / "job.key").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("KVSTORE_JOB_DIR", str(place / "other"))
    assert running_jobs() == []
    monkeypatch.setenv("KVSTORE_JOB_DIR", str(directory.parent))
    assert len(running_jobs()) == 1


def test_a_job_with_two_notes_is_found_once(place: Path) -> None:
    directory = place / ".kvstore" / "jobs" / "1f"
    directory.mkdir(parents=True, mode=0o700)
    note_job(directory, "127.0.0.1:10", "curve", "key")
    key_file = made("127.0.0.1:10")
    assert [job.key_file for job in running_jobs()] == [str(key_file)]


def test_the_note_of_a_launcher_that_has_ended_is_passed_over() -> None:
    note = made("127.0.0.1:1").with_name("job.json")
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE, check=True
    )
    note.write_text(json.dumps(json.loads(note.read_text()) | {"pid": int(ended.stdout)}))
    assert running_jobs() == []


def test_a_user_without_a_home_has_no_jobs_on_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_JOB_DIR", "~nobody-of-this-name/jobs")
    made("127.0.0.1:1")
    assert [job.address for job in running_jobs()] == ["127.0.0.1:1"]
