"""The key of a job: reading it, and what a connection's two ends derive from it. A leaf.

Every job has one key, a secret that all of its nodes hold and nobody else. ``read_key`` is the
only place that reads it; it never travels, is never written to a log and is in no ``repr``.
What travels is derived from it by BLAKE2b (RFC 7693), differently for each mechanism, so that
a token overheard under PLAIN opens nothing under CURVE. Opens no socket; reads one small file
on the thread that starts the node. ``docs/security.md`` says what all this protects from; the
options of ZeroMQ are set in ``van/zmq_sockets.py``, and ``van/zmq_zap.py`` checks who knocks.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from dataclasses import dataclass, field

from pslite.config import SECURITY_NAMES, Config
from pslite.errors import ConfigError

MIN_KEY_BYTES = 16
MAX_KEY_BYTES = 4096

HOW_TO_MAKE_A_KEY = (
    "make a key by `(umask 077; head -c 32 /dev/urandom | base64 > job.key)`, copy it to every "
    "host of the job and set PS_JOB_KEY_FILE to its path in every process"
)
WHAT_TO_COMPARE = (
    "compare the job key (PS_JOB_KEY_FILE) and PS_SECURITY: both must be the same on all nodes"
)


@dataclass(frozen=True)
class Mechanism:
    """How the connections of a job are secured: the same on all of its nodes."""

    name: str
    """``plain`` (authentication) or ``curve`` (authentication and encryption)."""
    secret: bytes = field(repr=False)
    """32 bytes that only holders of the job's key can know."""


def derive(key: bytes, name: str) -> Mechanism:
    """What ``key`` means for the mechanism ``name``.

    Raises:
        ConfigError: there is no such mechanism, or the key's length is out of bounds.
    """
    if name not in SECURITY_NAMES:
        raise ConfigError(f"PS_SECURITY is {name!r}; it must be {' or '.join(SECURITY_NAMES)}")
    check_length(len(key), "the job key")
    # BLAKE2b takes keys of 64 bytes at most; a longer one is condensed first.
    short = hashlib.blake2b(key, digest_size=64, person=b"pslite key 1").digest()
    secret = hashlib.blake2b(b"", digest_size=32, key=short, person=f"pslite {name}".encode())
    return Mechanism(name, secret.digest())


def mechanism_of(config: Config) -> Mechanism | None:
    """The mechanism that a node's settings ask for; ``None`` for a node without a key.

    Raises:
        ConfigError: the key cannot be used, or one is asked for and there is none.
    """
    key = read_key(config)
    return None if key is None else derive(key, config.security or "curve")


def read_key(config: Config) -> bytes | None:
    """The job's key, from PS_JOB_KEY_FD or PS_JOB_KEY_FILE; ``None`` where neither is set.

    White space around it does not count, so that a line end of an editor does no harm.

    Raises:
        ConfigError: it cannot be read, others could read it, or its length is out of bounds.
    """
    if config.job_key_fd is not None:
        what = f"the job key at descriptor {config.job_key_fd} (PS_JOB_KEY_FD)"
        text = _read_descriptor(config.job_key_fd, what)
    elif config.job_key_file:
        what = f"the job key {config.job_key_file} (PS_JOB_KEY_FILE)"
        text = _read_file(config.job_key_file, what)
    else:
        return None
    key = text.strip()
    check_length(len(key), what)
    return key


def check_length(num_bytes: int, what: str) -> None:
    """Raise :class:`ConfigError` unless a key may have so many bytes."""
    if not MIN_KEY_BYTES <= num_bytes <= MAX_KEY_BYTES:
        raise ConfigError(
            f"{what} has {'more than ' if num_bytes > MAX_KEY_BYTES else ''}"
            f"{min(num_bytes, MAX_KEY_BYTES)} bytes; it must have {MIN_KEY_BYTES} to "
            f"{MAX_KEY_BYTES}: {HOW_TO_MAKE_A_KEY}"
        )


def _read_file(path: str, what: str) -> bytes:
    try:
        # O_NONBLOCK: a named pipe must be refused, not waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}; {HOW_TO_MAKE_A_KEY}") from None
    try:
        _check_file(os.fstat(descriptor), path, what)
        return _read(descriptor, what)
    finally:
        os.close(descriptor)


def _check_file(status: os.stat_result, path: str, what: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{what} is no regular file; {HOW_TO_MAKE_A_KEY}")
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{what} belongs to user {status.st_uid}, who could change it; "
            f"it must be yours: chown {os.geteuid()} {path}"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"{what} can be read or changed by others (its mode is "
            f"{stat.S_IMODE(status.st_mode):04o}): chmod 600 {path}, and make a new key if others "
            "may have seen this one"
        )


def _read_descriptor(descriptor: int, what: str) -> bytes:
    try:
        # Programs that this process starts are not meant to inherit it as well.
        os.set_inheritable(descriptor, False)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.lseek(descriptor, 0, os.SEEK_SET)
    except OSError as error:
        problem = "it is not open in this process" if error.errno == errno.EBADF else str(error)
        raise ConfigError(f"{what} cannot be read: {problem}") from None
    return _read(descriptor, what)


def _read(descriptor: int, what: str) -> bytes:
    """Everything up to the end, or a little more than any key may have."""
    text = b""
    try:
        while len(text) <= 2 * MAX_KEY_BYTES and (more := os.read(descriptor, MAX_KEY_BYTES)):
            text += more
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}") from None
    return text
