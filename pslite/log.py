"""Lines for people, on stderr, in the shape that users of ps-lite recognise.

Level 1 (PS_VERBOSE=1) shows connections, level 2 every message as well; warnings and errors
always appear. A ``Log`` belongs to one node, so two clusters in one process do not mix.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pslite.ids import NodeInfo, Role
from pslite.wire.messages import Message

Write = Callable[[str], None]

_QUIET_S = 10.0
_MAX_TOPICS = 256


def to_stderr(line: str) -> None:
    """Write one whole line at once, so that lines of several processes do not mix."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def label(node: NodeInfo) -> str:
    """``S[8]``: a node as the lines of ps-lite name it."""
    return f"{Role(node.role).letter}[{node.node_id}]"


class Log:
    """Writes a node's lines. ``name`` changes once the node knows its rank."""

    def __init__(self, name: str, level: int, write: Write = to_stderr) -> None:
        self.name = name
        self.level = level
        self._write = write
        self._labels: dict[str, str] = {}
        #: Topic -> when a warning on it may appear again, and how many were left out.
        self._quiet: dict[str, tuple[float, int]] = {}

    def learn(self, roster: Iterable[NodeInfo]) -> None:
        """From here on, messages show these nodes by their labels, not by their vans' names."""
        self._labels.update((node.uid, label(node)) for node in roster)

    def info(self, level: int, text: str) -> None:
        """A line that appears from ``level`` on (0: always)."""
        if level <= self.level:
            self._line(text)

    def warn(self, text: str) -> None:
        """Something is wrong and the job goes on."""
        self._line(f"warning: {text}")

    def warn_seldom(self, topic: str, text: str) -> None:
        """The same, but for one topic once in a while: peers must not be able to fill a log."""
        now = time.monotonic()
        if topic not in self._quiet and len(self._quiet) >= _MAX_TOPICS:
            topic = ""
        until, left_out = self._quiet.get(topic, (now, 0))
        if now < until:
            self._quiet[topic] = until, left_out + 1
            return
        self._quiet[topic] = now + _QUIET_S, 0
        self.warn(f"{text} (and {left_out} more like it)" if left_out else text)

    def error(self, text: str) -> None:
        """Something is wrong and this node cannot go on."""
        self._line(f"error: {text}")

    def trace(self, direction: str, peer: str, message: Message, frames: Sequence[Any]) -> None:
        """One message, as PS_VERBOSE=2 shows it."""
        sizes = "".join(f" data_size={len(frame)}" for frame in frames)
        body = f" Body:{sizes}" if sizes else ""
        self._line(f"{direction} {self._labels.get(peer, peer)}. Meta: {_short(message)}{body}")

    def _line(self, text: str) -> None:
        now = time.strftime("%H:%M:%S")
        self._write(f"[{now}] {self.name}: {text}")


def _short(message: Message) -> str:
    text = repr(message)
    return text if len(text) <= 400 else text[:397] + "..."
