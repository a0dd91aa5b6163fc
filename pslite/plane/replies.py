"""``Replies``: collect the answers to workers after one event into few messages.

Pure; used by ``server.py`` on the I/O thread.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    FORMED = 4
    """Values in the app's own form."""


class Value(NamedTuple):
    """Parts with the same answer."""

    parts: Ints
    sizes: Ints
    round: int
    version: int
    priority: int = 0


@dataclass(slots=True, eq=False, repr=False)
class _OpenAnswer:
    """An answer to one worker that is being put together."""

    values: list[Value] = field(default_factory=list)
    nbytes: int = 0
    num_parts: int = 0
    frames: list[Buffer] = field(default_factory=list)
    """The values in the app's own form; others are read when the message is made."""


class Replies:
    """Collects the answers of one event, so that each worker gets few messages."""

    def __init__(self, app: ServerApp, message_bytes: int) -> None:
        self._app = app
        self._message_bytes = message_bytes
        #: (rank, pushed, which values) -> the messages with these.
        self._answers: dict[tuple[int, bool, Source], list[_OpenAnswer]] = {}
        #: (rank, pushed, consumed, id of the error) -> the error and [(part, round)]
        self._failures: dict[
            tuple[int, bool, bool, int], tuple[BaseException, list[tuple[int, int]]]
        ] = {}

    def answer(
        self, rank: int, pushed: bool, source: Source, value: Value, frames: Sequence[Buffer] = ()
    ) -> None:
        """Add parts to answer; ``source`` says which values to send with it."""
        messages = self._answers.setdefault((rank, pushed, source), [])
        message = messages[-1] if messages else None
        nbytes, num_parts = sum(value.sizes) if source else 0, len(value.parts)
        if (
            message is None
            or message.nbytes + nbytes > self._message_bytes
            or message.num_parts + num_parts > _MAX_PARTS
        ):
            message = _OpenAnswer()
            messages.append(message)
        message.values.append(value)
        message.nbytes += nbytes
        message.num_parts += num_parts
        message.frames += frames

    def answer_formed(self, rank: int, value: Value, wanted: Formed, *, before_last: bool) -> None:
        """Answer the pull ``wanted`` of one part, in the app's own form."""
        try:
            frame = self._app.answer(value.parts[0], wanted, before_last=before_last)
        except Exception as error:
            self.fail(rank, False, True, error, value.parts, value.round)
            return
        value = value._replace(sizes=(memoryview(frame).nbytes,))
        self.answer(rank, False, Source.FORMED, value, [frame])

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
        entries = self._failures.setdefault(key, (error, []))[1]
        entries += [(part, round_) for part in parts]

    def take(self) -> list[Send]:
        """Return the messages to workers and forget them."""
        failures, self._failures = self._failures, {}
        answers, self._answers = self._answers, {}
        sends: list[Send] = []
        # Failures first: after a failed push, a worker gets the error before the pulled value.
        for (rank, pushed, consumed, _), (error, failed) in failures.items():
            for start in range(0, len(failed), _MAX_PARTS):
                parts, rounds = zip(*failed[start : start + _MAX_PARTS], strict=True)
                refusal = PartsFailed(pushed, consumed, parts, rounds, *told(error))
                sends.append(Send(rank, refusal))
        for (rank, pushed, source), messages in answers.items():
            sends += [self._send(rank, pushed, source, message) for message in messages]
        return sends

    def _send(self, rank: int, pushed: bool, source: Source, message: _OpenAnswer) -> Send:
        values = message.values
        parts, sizes, round_, version, _ = values[0]
        rounds, versions = (round_,) * len(parts), (version,) * len(parts)
        if len(values) > 1:
            parts = tuple(chain.from_iterable(value.parts for value in values))
            sizes = tuple(chain.from_iterable(value.sizes for value in values))
            rounds = _repeated(values, [value.round for value in values])
            versions = _repeated(values, [value.version for value in values])
        if source is Source.NONE:
            return Send(rank, Answer(pushed, parts, rounds, versions, ()))
        frames: Sequence[Buffer] = message.frames
        if source is Source.CURRENT:
            frames = self._app.read(parts)
        elif source is not Source.FORMED:
            frames = self._app.read_again(parts, before_last=source is Source.BEFORE_LAST)
        priority = max(value.priority for value in values)
        return Send(rank, Answer(pushed, parts, rounds, versions, sizes), frames, priority)


def _repeated(values: Sequence[Value], numbers: Sequence[int]) -> Ints:
    """Repeat each number for each part of its value."""
    pairs = zip(values, numbers, strict=True)
    return tuple(chain.from_iterable(repeat(number, len(value.parts)) for value, number in pairs))
