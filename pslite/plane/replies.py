"""``Replies``: collect the answers to workers after one event into few messages.

Pure; used by ``server.py`` on the I/O thread.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import NamedTuple

from pslite.errors import told
from pslite.plane.interface import Buffer, Formed, Send, ServerApp
from pslite.wire.base import Ints
from pslite.wire.messages import Answer, PartsFailed

#: The most parts in one answer; each may need its own frame.
_MAX_PARTS = 4096


class Source(enum.IntEnum):
    """Which values an answer has."""

    NONE = 0
    CURRENT = 1
    COPY = 2
    """A copy of the current values, as a round may change them before they are sent."""
    BEFORE_LAST = 3
    """The values before the last round."""


class Value(NamedTuple):
    """Parts with the same answer."""

    parts: Ints
    sizes: Ints
    round: int
    version: int
    wanted: Formed | None = None
    """The request of a pull in the app's own form; None for a plain value."""
    before_last: bool = False
    """Whether that pull gets the values before the last round."""
    priority: int = 0


class Replies:
    """Collects the answers of one event, so that each worker gets few messages."""

    def __init__(self) -> None:
        #: (rank, pushed, which values) -> the parts to answer.
        self.answers: dict[tuple[int, bool, Source], list[Value]] = {}
        #: Rank -> pulls in the app's own forms.
        self.formed: dict[int, list[Value]] = {}
        #: (rank, pushed, consumed, id of the error) -> the error and [(part, round)]
        self.failures: dict[
            tuple[int, bool, bool, int], tuple[BaseException, list[tuple[int, int]]]
        ] = {}

    def answer(self, rank: int, pushed: bool, source: Source, entry: Value) -> None:
        """Add parts to answer; ``source`` says which values to send with it."""
        self.answers.setdefault((rank, pushed, source), []).append(entry)

    def fail(
        self,
        rank: int,
        pushed: bool,
        consumed: bool,
        error: BaseException,
        parts: Ints,
        round_: int,
    ) -> None:
        """Add failed parts; ``consumed`` says that their round number is used up."""
        key = (rank, pushed, consumed, id(error))
        entries = self.failures.setdefault(key, (error, []))[1]
        entries += [(part, round_) for part in parts]

    def sends(self, app: ServerApp, message_bytes: int) -> Iterator[Send]:
        """Make messages to workers, each of at most ``message_bytes`` or of one entry."""
        # Failures first: after a failed push, a worker gets the error before the pulled value.
        for (rank, pushed, consumed, _), (error, failures) in self.failures.items():
            for start in range(0, len(failures), _MAX_PARTS):
                parts, rounds = zip(*failures[start : start + _MAX_PARTS], strict=True)
                yield Send(rank, _failure(pushed, consumed, parts, rounds, error))
        for (rank, pushed, source), entries in self.answers.items():
            yield from _answers(app, message_bytes, rank, pushed, source, entries)
        for rank, entries in self.formed.items():
            yield from _answers(app, message_bytes, rank, False, Source.CURRENT, entries)


def _answers(
    app: ServerApp,
    message_bytes: int,
    rank: int,
    pushed: bool,
    source: Source,
    entries: Sequence[Value],
) -> Iterator[Send]:
    """Answer one worker, in messages of at most ``message_bytes``."""
    group: list[Value] = []
    frames: list[Buffer] = []
    nbytes = count = 0
    for entry in entries:
        made: list[Buffer] = []
        if entry.wanted is not None:
            try:
                is_before = entry.before_last
                made = [app.answer(entry.parts[0], entry.wanted, before_last=is_before)]
            except Exception as error:
                yield Send(rank, _failure(False, True, entry.parts, (entry.round,), error))
                continue
            entry = entry._replace(sizes=(memoryview(made[0]).nbytes,))
        size = sum(entry.sizes) if source else 0
        if group and (nbytes + size > message_bytes or count + len(entry.parts) > _MAX_PARTS):
            yield _answer(app, rank, pushed, source, group, frames)
            group, frames, nbytes, count = [], [], 0, 0
        group.append(entry)
        frames += made
        nbytes += size
        count += len(entry.parts)
    if group:
        yield _answer(app, rank, pushed, source, group, frames)


def _answer(
    app: ServerApp,
    rank: int,
    pushed: bool,
    source: Source,
    entries: Sequence[Value],
    frames: list[Buffer],
) -> Send:
    """Make one message; ``frames`` hold answers in the app's own forms, if any."""
    if len(entries) == 1:
        parts, sizes, round_, version, *_ = entries[0]
        rounds, versions = (round_,) * len(parts), (version,) * len(parts)
    else:
        parts = tuple(chain.from_iterable(entry.parts for entry in entries))
        sizes = tuple(chain.from_iterable(entry.sizes for entry in entries))
        rounds = _repeated(entries, [entry.round for entry in entries])
        versions = _repeated(entries, [entry.version for entry in entries])
    if source is Source.NONE:
        return Send(rank, Answer(pushed, parts, rounds, versions, ()))
    if source in (Source.COPY, Source.BEFORE_LAST):
        frames = app.read_again(parts, before_last=source is Source.BEFORE_LAST)
    answer = Answer(pushed, parts, rounds, versions, sizes)
    priority = max(entry.priority for entry in entries)
    return Send(rank, answer, frames or app.read(parts), priority)


def _repeated(entries: Sequence[Value], numbers: Sequence[int]) -> Ints:
    """Repeat each number for each part of its entry."""
    pairs = zip(entries, numbers, strict=True)
    return tuple(chain.from_iterable(repeat(number, len(entry.parts)) for entry, number in pairs))


def _failure(
    pushed: bool, consumed: bool, parts: Ints, rounds: Ints, error: BaseException
) -> PartsFailed:
    return PartsFailed(pushed, consumed, parts, rounds, *told(error))
