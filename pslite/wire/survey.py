"""The status of a running job: a ``Survey`` has a ``NodeStatus`` for each node.

Each node reports about itself (``NodeReport``, made in ``node/report.py``), the scheduler collects
the reports (``node/surveyor.py``), and the asker gets a ``Survey`` (``apps/observer.py``). This
module has the values and their wire form. It checks each field, because a report comes from another
process, and a survey is shown on a terminal. Pure; on any thread.
"""

from __future__ import annotations

import math
import types
import typing
from typing import Any, NamedTuple, Protocol, TypeVar

from pslite.errors import ProtocolError
from pslite.wire.codec import pack_value, unpack_value

MAX_TEXT = 400
"""The most characters of a text; a longer one is cut before it is sent."""
MAX_WAITS = 16
"""The most waits of one node; the longest are kept."""
MAX_NAMED = 32
"""The most missing nodes that a wait names."""
MAX_LISTED = 65_536
MAX_EVENTS = 20
"""The most events of a survey; the last ones are kept."""
LEAST_WAIT_S = 1.0
"""Shorter waits are normal, and are not listed."""

Value = TypeVar("Value")


class Wait(NamedTuple):
    """Something that a node waits for."""

    what: str
    """For example ``key 'w'`` or ``the barrier of all workers``."""
    round: int
    """The round of ``what``; 0 if it has no rounds."""
    missing: tuple[str, ...]
    """The nodes that are missing; empty if the node does not know them."""
    waited_s: float


class Progressed(NamedTuple):
    """The progress of a worker's training."""

    steps: int
    """Steps of a ``Trainer`` or of ``FeedForward.fit``; else the most pushes of any key."""
    samples: int
    """0 if the number of samples per step is unknown."""
    steps_per_s: float
    """Over the last ten seconds or steps, whichever is longer."""
    samples_per_s: float
    communication: float
    """The share of the same time, from 0 to 1, that the script waited in calls of stores."""
    since_step_s: float
    """Time since the last step; 0 before the first."""
    trained_s: float = 0.0
    """Time since the first step; 0 before it."""


class NodeReport(NamedTuple):
    """A node's report about itself."""

    version: str
    uptime_s: float
    sent_bytes: int
    """Bytes sent over the network (and pipes), including headers and repeats."""
    received_bytes: int
    shared_bytes: int
    """Bytes sent or received through shared memory."""
    requests: int
    """Unanswered requests: a worker's own, or those that wait at a server."""
    open_rounds: int
    """A server's rounds to which some workers have contributed and others have not."""
    pool_jobs: int
    """Jobs that wait for a server's threads, or run on them."""
    progress: Progressed | None
    """Only for workers with a store."""
    waits: tuple[Wait, ...]
    moved: int = -1
    """A number that changes with each message of the job; -1 if the node may act without one."""
    calls: tuple[str, ...] = ()
    """If a worker can act only after a message: the calls that its threads wait in."""


class NodeStatus(NamedTuple):
    """One node, as the scheduler sees it."""

    role: str
    rank: int
    """-1 until it is assigned."""
    host: str
    pid: int
    state: str
    """``waiting`` (for the others), ``running``, ``silent`` (no answer), ``left`` or ``lost``."""
    silent_s: float
    """The time since the scheduler last heard from it."""
    reason: str
    """Why it is lost."""
    report: NodeReport | None
    """None if it has not answered."""

    @property
    def name(self) -> str:
        """``worker 1``, ``scheduler``, or ``worker`` while it has no rank."""
        if self.role == "scheduler" or self.rank < 0:
            return self.role
        return f"{self.role} {self.rank}"


class Event(NamedTuple):
    """Something that has happened to the nodes of a job."""

    ago_s: float
    text: str
    """For example ``worker 1 (pid 4742 on vm) takes the place of ...``."""


class StandbyStatus(NamedTuple):
    """The standby of one server."""

    server: int
    """The server's rank."""
    state: str
    """``ready``, ``filling`` (the server sends it its state) or ``none``."""
    host: str
    """Empty without a standby."""
    pid: int
    """0 without a standby."""


class Survey(NamedTuple):
    """A whole job at one moment."""

    job: str
    version: str
    state: str
    """``gathering``, ``running`` or ``failed`` (some nodes are lost and the rest ends)."""
    num_workers: int
    num_servers: int
    waited_s: float
    """How long the job has been gathering; 0 afterwards."""
    missing: tuple[str, ...]
    """Who has not joined, for people: ``2 of 4 workers``."""
    nodes: tuple[NodeStatus, ...]
    """The scheduler, workers by rank, servers by rank."""
    events: tuple[Event, ...] = ()
    """The last losses, who has taken the places, and what is repeated; the oldest first."""
    standbys: tuple[StandbyStatus, ...] = ()
    """One for each server, by rank; empty in a job without PS_STANDBYS and while it gathers."""


class ProgressSource(Protocol):
    """A source of a worker's progress; called on the I/O thread."""

    def progressed(self) -> Progressed: ...

    def waits(self) -> list[Wait]: ...

    def stuck(self) -> tuple[int, list[str]] | None:
        """Return how many long waits have begun, and the calls of all waiting threads.

        These are waits without a time limit. Returns None if a thread may continue by itself.
        """

    def deadlocked(self, text: str) -> None:
        """End the long waits of all threads with a ``DeadlockError``."""


# -- on the wire ----------------------------------------------------------------------------


def packed(value: NodeReport | Survey) -> bytes:
    """Return the body of a message: arrays of the values in the order of their fields.

    Makes texts printable, and cuts texts and lists so that they do not exceed the limits.
    """
    return pack_value(_to_plain(value))


def unpacked(kind: type[Value], body: bytes) -> Value:
    """Return the value that ``packed`` encoded, or raise ``ProtocolError``."""
    value: Value = _read(kind, unpack_value(body))
    return value


def clean(text: str) -> str:
    """Return ``text`` in a form that can be shown on one line."""
    shown = "".join(char if char.isprintable() else "?" for char in text[: MAX_TEXT + 1])
    return shown if len(shown) <= MAX_TEXT else shown[: MAX_TEXT - 3] + "..."


def _to_plain(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, NodeReport):
        longest = sorted(value.waits, key=lambda wait: -wait.waited_s)[:MAX_WAITS]
        value = value._replace(waits=tuple(longest), calls=value.calls[:MAX_NAMED])
    elif isinstance(value, Wait) and len(value.missing) > MAX_NAMED:
        more = f"{len(value.missing) - MAX_NAMED} more"
        value = value._replace(missing=(*value.missing[:MAX_NAMED], more))
    return [_to_plain(each) for each in value] if isinstance(value, tuple) else value


_HINTS = {
    kind: tuple(typing.get_type_hints(kind).values())
    for kind in (Wait, Progressed, NodeReport, NodeStatus, Event, StandbyStatus, Survey)
}
_LONGEST = {
    Wait: MAX_WAITS,
    str: MAX_NAMED + 1,
    NodeStatus: MAX_LISTED,
    Event: MAX_EVENTS,
    StandbyStatus: MAX_LISTED,
}


def _read(kind: Any, plain: Any) -> Any:
    if kind in _HINTS:
        hints = _HINTS[kind]
        if type(plain) is not list or len(plain) != len(hints):
            raise ProtocolError(
                f"expected a {kind.__name__} as a list of {len(hints)} fields, got {plain!r:.60}"
            )
        return kind(*map(_read, hints, plain))
    if isinstance(kind, types.UnionType):
        inner, _ = typing.get_args(kind)
        return None if plain is None else _read(inner, plain)
    if typing.get_origin(kind) is tuple:
        inner, _ = typing.get_args(kind)
        limit = _LONGEST[inner]
        if type(plain) is not list or len(plain) > limit:
            raise ProtocolError(f"expected a list of at most {limit} entries, got {plain!r:.60}")
        return tuple(_read(inner, each) for each in plain)
    if type(plain) is not kind:
        raise ProtocolError(f"expected {kind.__name__} in a status, got {type(plain).__name__}")
    if kind is str:
        is_right = len(plain) <= MAX_TEXT and plain.isprintable()
    elif kind is float:
        is_right = 0.0 <= plain < math.inf
    else:
        is_right = -1 <= plain < 1 << 63
    if not is_right:
        raise ProtocolError(f"a status has an invalid value: {plain!r:.60}")
    return plain
