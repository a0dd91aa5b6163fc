"""Read the job's key, and derive the keys of connections from it.

Every job has one key, a secret that only its nodes have. Only ``read_key`` reads it, from a small
file, on the thread that starts the node. The key itself is never sent or logged, and is not part
of any ``repr``. Nodes send only tokens derived from it by BLAKE2b (RFC 7693). Each mechanism
derives its own tokens, so an attacker who reads a token under PLAIN cannot use it under CURVE.
``Proofs`` makes the proofs that two nodes send each other under PLAIN. ``docs/security.md`` says
which attacks this prevents. ``van/zmq/authentication.py`` sets the options of ZeroMQ and checks
the peers that connect. This module opens no socket.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import secrets
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
    """The security mechanism of a job's connections, the same on all nodes."""

    name: str
    """``plain`` (authentication) or ``curve`` (authentication and encryption)."""
    secret: bytes = field(repr=False)
    """32 bytes that only holders of the job's key can know."""


def derive(key: bytes, name: str) -> Mechanism:
    """Derive the secret of the mechanism ``name`` from the job's key.

    Raises:
        ConfigError: the mechanism is unknown, or the key is too short or too long.
    """
    if name not in SECURITY_NAMES:
        raise ConfigError(f"PS_SECURITY is {name!r}; it must be {' or '.join(SECURITY_NAMES)}")
    check_length(len(key), "the job key")
    # BLAKE2b accepts keys of at most 64 bytes, so a longer key is hashed first.
    short = hashlib.blake2b(key, digest_size=64, person=b"pslite key 1").digest()
    secret = hashlib.blake2b(b"", digest_size=32, key=short, person=f"pslite {name}".encode())
    return Mechanism(name, secret.digest())


class Proofs:
    """The proofs of the two ends of a connection under PLAIN (wire.md, section 13).

    Under PLAIN alone, a node would send its password to any listener. So each listener has its own
    password, which no other listener accepts. Then both ends prove that they know the secret, the
    listener first. A proof is a BLAKE2b hash of the connection's name, which is never used again,
    and the listener's fresh random number, with the secret as the key. So nothing that is sent can
    be used a second time, or with another listener.
    """

    NUMBER_BYTES = 16
    PROOF_BYTES = 32
    CHALLENGE_BYTES = NUMBER_BYTES + PROOF_BYTES

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        # A listener derives its numbers from this, so it need not store them.
        self._numbers = secrets.token_bytes(32)

    def password(self, listener: str) -> bytes:
        """Return the password that a node sends to the listener with this uid."""
        return self._prove(b"pslite door", listener.encode()).hex().encode()

    def challenge(self, listener: str, connection: bytes) -> bytes:
        """Return the listener's first message on a connection: its number and proof."""
        number = hashlib.blake2b(connection, digest_size=self.NUMBER_BYTES, key=self._numbers)
        return number.digest() + self._listens(listener, connection, number.digest())

    def answer(self, listener: str, connection: bytes, challenge: bytes) -> bytes | None:
        """Return the connecting node's proof; None if ``challenge`` is not the listener's."""
        number = challenge[: self.NUMBER_BYTES]
        expected = number + self._listens(listener, connection, number)
        if len(challenge) != self.CHALLENGE_BYTES or not hmac.compare_digest(challenge, expected):
            return None
        return self._visits(listener, connection, number)

    def accepts(self, listener: str, connection: bytes, answer: bytes) -> bool:
        """Return whether ``answer`` is correct for this listener's challenge."""
        number = self.challenge(listener, connection)[: self.NUMBER_BYTES]
        return hmac.compare_digest(answer, self._visits(listener, connection, number))

    def _listens(self, listener: str, connection: bytes, number: bytes) -> bytes:
        return self._prove(b"pslite listens", listener.encode() + b"\0" + number + connection)

    def _visits(self, listener: str, connection: bytes, number: bytes) -> bytes:
        return self._prove(b"pslite visits", listener.encode() + b"\0" + number + connection)

    def _prove(self, purpose: bytes, text: bytes) -> bytes:
        made = hashlib.blake2b(text, digest_size=self.PROOF_BYTES, key=self._secret, person=purpose)
        return made.digest()


def mechanism_of(config: Config) -> Mechanism | None:
    """Return the mechanism that the settings select, or ``None`` without a key.

    Raises:
        ConfigError: the key cannot be used.
    """
    key = read_key(config)
    return None if key is None else derive(key, config.security or "curve")


def read_key(config: Config) -> bytes | None:
    """Read the job's key from PS_JOB_KEY_FD or PS_JOB_KEY_FILE; ``None`` if not set.

    White space around the key is removed, because editors add a newline.

    Raises:
        ConfigError: the key cannot be read, other users can read it, or it is too short or too
            long.
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
    """Raise :class:`ConfigError` if a key may not have this many bytes."""
    if not MIN_KEY_BYTES <= num_bytes <= MAX_KEY_BYTES:
        raise ConfigError(
            f"{what} must have {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, got "
            f"{'more than ' if num_bytes > MAX_KEY_BYTES else ''}{min(num_bytes, MAX_KEY_BYTES)}; "
            f"{HOW_TO_MAKE_A_KEY}"
        )


def _read_file(path: str, what: str) -> bytes:
    try:
        # O_NONBLOCK: opening a named pipe must not wait; it is rejected below.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}; {HOW_TO_MAKE_A_KEY}") from None
    except ValueError as error:  # a NUL or surrogates, which file names cannot have
        raise ConfigError(f"{path!r} is not the name of a key file: {error}") from None
    try:
        _check_file(os.fstat(descriptor), path, what)
        return _read(descriptor, what)
    finally:
        os.close(descriptor)


def _check_file(status: os.stat_result, path: str, what: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(
            f"{what} is not a regular file; set PS_JOB_KEY_FILE to the job's key file, or "
            f"{HOW_TO_MAKE_A_KEY}"
        )
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{what} must belong to you, but it belongs to user {status.st_uid}; run chown "
            f"{os.geteuid()} {path}"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"other users can read or change {what} (mode {stat.S_IMODE(status.st_mode):04o}); "
            f"run chmod 600 {path}, and make a new key if others may have read this one"
        )


def _read_descriptor(descriptor: int, what: str) -> bytes:
    try:
        # Programs that this process starts must not inherit the descriptor.
        os.set_inheritable(descriptor, False)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.lseek(descriptor, 0, os.SEEK_SET)
    except OSError as error:
        problem = "it is not open in this process" if error.errno == errno.EBADF else str(error)
        raise ConfigError(f"{what} cannot be read: {problem}") from None
    return _read(descriptor, what)


def _read(descriptor: int, what: str) -> bytes:
    """Read to the end, or until there are too many bytes for a key."""
    text = b""
    try:
        while len(text) <= 2 * MAX_KEY_BYTES and (more := os.read(descriptor, MAX_KEY_BYTES)):
            text += more
    except OSError as error:
        raise ConfigError(f"{what} cannot be read: {error.strerror}") from None
    return text
