"""The errors of the runtime, as one tree of classes.

::

    PSError                     anything this project raises on purpose
    ├── UsageError              you misused it: the call, its arguments or the settings
    │   ├── ConfigError         a setting is missing, malformed or contradicts another
    │   ├── MismatchError       ranks of a group make different calls; the text names two
    │   └── DeadlockError       workers wait for each other; the text names the call of each
    ├── PeerError               a peer misbehaved
    │   ├── ProtocolError       it sent something that the wire format does not allow
    │   └── RemoteError         its code raised; the text carries its traceback
    ├── NodeLostError           a peer is lost, or it left while it was still needed
    ├── DeadlineError           time is up; the text names who has not answered
    └── ClosedError             the node was closed while (or before) the call ran

Any other exception is a bug in this project. This file must not import other modules of the
project, so that every layer can raise these errors.
"""

from __future__ import annotations

import reprlib
import traceback


class PSError(RuntimeError):
    """Base of all errors raised on purpose by ``pslite`` and ``kvstore``."""


class UsageError(PSError):
    """The call, its arguments or its order were wrong; nothing was sent."""


class ConfigError(UsageError, ValueError):
    """A setting is missing, malformed or contradicts another one."""


class MismatchError(UsageError):
    """Ranks of a group make different collective calls; each call raises this."""


class DeadlockError(UsageError):
    """All workers wait for each other in calls that cannot end; each call raises this.

    The text names the call of every worker. Messages that were sent before stay in flight.
    """


class PeerError(PSError):
    """A peer violated the protocol."""


class ProtocolError(PeerError):
    """Bytes arrived that the wire format (``docs/wire.md``) does not allow."""


class RemoteError(PeerError):
    """Code on a peer raised an exception; ``kind`` is the name of its class."""

    def __init__(self, message: str, *, kind: str = "", where: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.where = where


class NodeLostError(PSError):
    """A node that was still needed is lost. ``role`` and ``rank`` name it."""

    def __init__(self, message: str, *, role: str = "", rank: int = -1) -> None:
        super().__init__(message)
        self.role = role
        self.rank = rank


class DeadlineError(PSError, TimeoutError):
    """A call timed out. The message names the nodes that have not answered."""


class ClosedError(PSError):
    """The node was closed while the call was waiting, or before it was made."""


def unexpected(expected: str, found: object) -> ProtocolError:
    """Return an error about invalid data from a peer: expected, found, what to do."""
    return ProtocolError(
        f"expected {expected}, got {found!r:.100}; run the same version of kvstore on all nodes"
    )


def describe(error: BaseException) -> tuple[str, str]:
    """Return an error as it is sent: the name of its class, and its text.

    The text of an error that is not a ``PSError`` includes its traceback, so that the asker can
    find its cause.
    """
    if isinstance(error, PSError):
        text = str(error)
    else:  # not str(error), which may raise an exception too
        text = "".join(traceback.format_exception(error)).rstrip()
    # Python reads file names that are not UTF-8 as lone surrogates, which cannot be encoded.
    return type(error).__name__, text.encode("utf-8", "backslashreplace").decode()


def check_unicode(what: str, text: str, error: type[UsageError] = UsageError) -> str:
    """Return ``text``; raise ``error`` if it holds a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as found:
        raise error(
            f"{what} must be valid Unicode, got {reprlib.repr(text)}; remove the lone surrogate "
            f"{text[found.start]!r} at position {found.start}"
        ) from None
    return text


def as_failure(error: BaseException) -> Exception:
    """Return ``error`` itself, or a ``RuntimeError`` if it is not an ``Exception``.

    If a user's code raises ``SystemExit`` or ``KeyboardInterrupt`` on a thread of a node, the
    result is a ``RuntimeError`` with that exception as its cause.
    """
    if isinstance(error, Exception):
        return error
    failure = RuntimeError(f"a thread of this node ended with {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def told(error: BaseException | None) -> tuple[str, str, str, int]:
    """Return an error as the fields of a message: kind, text, and the lost node.

    The lost node is a role and a rank; ``""`` and -1 if the error is not about a lost node.
    """
    kind, text = ("", "") if error is None else describe(error)
    lost = (error.role, error.rank) if isinstance(error, NodeLostError) else ("", -1)
    return kind, text, *lost


def rebuild(kind: str, message: str, *, role: str = "", rank: int = -1) -> PSError:
    """Recreate an exception from the error that a peer reported.

    ``kind`` is the name of the exception's class on the peer. If that class belongs to this tree,
    the result has the same class. Otherwise (user or library code raised it) the result is a
    ``RemoteError``.
    """
    if kind == NodeLostError.__name__:
        return NodeLostError(message, role=role, rank=rank)
    known = _subclasses(PSError).get(kind)
    if known is not None and known is not RemoteError:
        return known(message)
    return RemoteError(message, kind=kind)


def _subclasses(base: type[PSError]) -> dict[str, type[PSError]]:
    found = {base.__name__: base}
    for child in base.__subclasses__():
        found.update(_subclasses(child))
    return found
