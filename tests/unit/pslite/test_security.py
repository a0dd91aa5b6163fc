"""The key of a job: which files are taken for one, and what follows from it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from pslite.config import Config
from pslite.errors import ConfigError
from pslite.security import (
    MAX_KEY_BYTES,
    MIN_KEY_BYTES,
    Mechanism,
    Proofs,
    derive,
    mechanism_of,
    read_key,
)

KEY = b"sixteen bytes ok"
MakeKey = Callable[..., str]


@pytest.fixture
def make_key(tmp_path: Path) -> MakeKey:
    def make(content: bytes = KEY, mode: int = 0o600) -> str:
        path = tmp_path / "job.key"
        path.write_bytes(content)
        path.chmod(mode)
        return str(path)

    return make


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_key(Config(job_key_file=path))
    text = str(caught.value)
    assert KEY.decode() not in text
    return text


@pytest.mark.parametrize("path", ["job\0key", "job\ud800key"])
def test_text_that_names_no_file_is_refused_by_its_value(path: str) -> None:
    assert f"{path!r} is not the name of a key file" in refusal(path)


# -- reading ------------------------------------------------------------------------------


def test_without_a_setting_there_is_no_key() -> None:
    assert read_key(Config()) is None
    assert mechanism_of(Config()) is None


@pytest.mark.parametrize("content", [KEY, KEY + b"\n", b"\n \t" + KEY + b"\r\n"])
def test_white_space_around_a_key_does_not_count(make_key: MakeKey, content: bytes) -> None:
    assert read_key(Config(job_key_file=make_key(content))) == KEY


@pytest.mark.parametrize("size", [MIN_KEY_BYTES, MAX_KEY_BYTES])
def test_keys_at_the_limits_are_taken(make_key: MakeKey, size: int) -> None:
    assert read_key(Config(job_key_file=make_key(b"k" * size))) == b"k" * size


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "to 4096 bytes, got 0;"),
        (b"short\n", "to 4096 bytes, got 5;"),
        (b" " * 50, "to 4096 bytes, got 0;"),
        (b"k" * (MIN_KEY_BYTES - 1), "to 4096 bytes, got 15;"),
        (b"k" * (MAX_KEY_BYTES + 1), "to 4096 bytes, got more than 4096;"),
        (b"k" * 1_000_000, "to 4096 bytes, got more than 4096;"),
    ],
)
def test_a_key_of_another_length_is_refused_with_the_way_to_make_one(
    make_key: MakeKey, content: bytes, problem: str
) -> None:
    text = refusal(make_key(content))
    assert problem in text
    assert "`(umask 077; head -c 32 /dev/urandom | base64 > job.key)`, copy it" in text


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o777])
def test_a_key_that_others_may_read_or_change_is_refused(make_key: MakeKey, mode: int) -> None:
    path = make_key(mode=mode)
    text = refusal(path)
    assert f"mode {mode:04o}" in text
    assert f"chmod 600 {path}" in text


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_key_for_its_owner_only_is_taken(make_key: MakeKey, mode: int) -> None:
    assert read_key(Config(job_key_file=make_key(mode=mode))) == KEY


def test_a_key_of_another_user_is_refused(
    make_key: MakeKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_key()
    status = list(os.stat(path))
    status[stat.ST_UID] = os.geteuid() + 1
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result(status))
    assert f"belongs to user {os.geteuid() + 1}" in refusal(path)


def test_the_administrators_key_is_taken(
    make_key: MakeKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_key()
    status = list(os.stat(path))
    status[stat.ST_UID] = 0
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result(status))
    assert read_key(Config(job_key_file=path)) == KEY


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for path in (tmp_path, fifo):
        assert "is not a regular file" in refusal(str(path))
    assert "cannot be read: No such file" in refusal(str(tmp_path / "none"))


@pytest.mark.skipif(os.geteuid() == 0, reason="everything can be read by root")
def test_a_key_that_this_user_cannot_read_is_refused(make_key: MakeKey) -> None:
    assert "cannot be read: Permission denied" in refusal(make_key(mode=0o000))


def test_a_link_counts_as_what_it_points_to(make_key: MakeKey, tmp_path: Path) -> None:
    # Kubernetes puts secrets into directories in this way.
    link = tmp_path / "link"
    link.symlink_to(make_key())
    assert read_key(Config(job_key_file=str(link))) == KEY
    make_key(mode=0o644)
    assert "mode 0644" in refusal(str(link))


def test_a_key_comes_through_an_inherited_pipe_which_children_do_not_get() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, KEY + b"\n")
    os.close(write_end)
    os.set_inheritable(read_end, True)
    try:
        assert read_key(Config(job_key_fd=read_end, job_key_file="/not/looked/at")) == KEY
        assert not os.get_inheritable(read_end)
    finally:
        os.close(read_end)


def test_a_descriptor_of_a_file_can_be_read_twice(make_key: MakeKey) -> None:
    with open(make_key(), "rb") as file:
        config = Config(job_key_fd=file.fileno())
        assert [read_key(config), read_key(config)] == [KEY, KEY]


def test_a_descriptor_that_is_not_open_is_named() -> None:
    with pytest.raises(ConfigError, match=r"descriptor 10000 \(PS_JOB_KEY_FD\).*not open"):
        read_key(Config(job_key_fd=10_000))


# -- what follows from it -----------------------------------------------------------------


def test_the_derivation_is_the_one_of_the_wire_specification() -> None:
    short = hashlib.blake2b(KEY, person=b"pslite key 1").digest()
    for name in ("plain", "curve"):
        person = f"pslite {name}".encode()
        wanted = hashlib.blake2b(b"", digest_size=32, key=short, person=person).digest()
        assert derive(KEY, name) == Mechanism(name, wanted)


def test_every_bit_of_the_key_and_the_mechanism_change_everything() -> None:
    secrets = {derive(key, name).secret for key in (KEY, KEY + b"x") for name in ("plain", "curve")}
    assert len(secrets) == 4
    assert all(len(secret) == 32 and KEY not in secret for secret in secrets)


def test_a_long_key_counts_to_its_last_byte() -> None:
    assert derive(b"k" * 4095 + b"a", "plain") != derive(b"k" * 4095 + b"b", "plain")


def test_the_secret_is_in_no_text() -> None:
    mechanism = derive(KEY, "curve")
    assert repr(mechanism) == str(mechanism) == "Mechanism(name='curve')"


def test_where_there_is_a_key_connections_are_encrypted_unless_told_otherwise(
    make_key: MakeKey,
) -> None:
    path = make_key()
    assert mechanism_of(Config(job_key_file=path)) == derive(KEY, "curve")
    assert mechanism_of(Config(job_key_file=path, security="plain")) == derive(KEY, "plain")


def test_another_mechanism_is_refused() -> None:
    with pytest.raises(ConfigError, match="PS_SECURITY is 'gssapi'; it must be plain or curve"):
        derive(KEY, "gssapi")


# -- what the two ends show each other under PLAIN ----------------------------------------

SECRET = derive(KEY, "plain").secret


def test_two_that_know_the_key_prove_it_to_each_other() -> None:
    listener, visitor = Proofs(SECRET), Proofs(SECRET)
    answer = visitor.answer("S1", b"W1-1", listener.challenge("S1", b"W1-1"))
    assert answer is not None
    assert listener.accepts("S1", b"W1-1", answer)
    assert visitor.password("S1") == listener.password("S1")


def test_each_listener_has_a_password_of_its_own() -> None:
    proofs = Proofs(SECRET)
    assert len({proofs.password(uid) for uid in ("scheduler", "S1", "S2")}) == 3
    assert SECRET.hex().encode() not in proofs.password("S1")


def test_a_listener_that_does_not_know_the_key_gets_no_answer() -> None:
    visitor = Proofs(SECRET)
    thief = Proofs(derive(KEY + b"x", "plain").secret)
    right = Proofs(SECRET).challenge("S1", b"W1-1")
    for challenge in (
        thief.challenge("S1", b"W1-1"),
        Proofs(SECRET).challenge("S2", b"W1-1"),  # of another listener, to whom it was passed on
        Proofs(SECRET).challenge("S1", b"W1-2"),  # heard in another connection
        bytes(len(right)),
        right[:-1],
        right + b"\0",
        b"",
    ):
        assert visitor.answer("S1", b"W1-1", challenge) is None


def test_an_answer_is_taken_once_from_its_visitor_by_its_listener() -> None:
    listener, visitor = Proofs(SECRET), Proofs(SECRET)
    challenge = listener.challenge("S1", b"W1-1")
    answer = visitor.answer("S1", b"W1-1", challenge)
    assert answer is not None
    assert not listener.accepts("S1", b"W1-2", answer)
    assert not listener.accepts("S2", b"W1-1", answer)
    assert not Proofs(SECRET).accepts("S1", b"W1-1", answer)  # the node that came after it
    assert not listener.accepts("S1", b"W1-1", challenge[-len(answer) :])  # its own, sent back
    assert not listener.accepts("S1", b"W1-1", b"")
