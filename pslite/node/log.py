"""``Log``: the log lines of a node, in the format of ps-lite.

Level 1 (PS_VERBOSE=1) shows connections, level 2 also every message; warnings and errors always
appear. A ``Log`` belongs to one node, so lines of two clusters in one process do not mix. If the
application has added a handler to Python's logger ``pslite`` or to the root logger, lines go
there; otherwise they go to stderr with date and time.

A failed write never ends a node. If a line cannot be written (a full disk, a pipe without a
reader, a closed descriptor), it is counted, and the next line that can be written says how many
are missing and why.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pslite.ids import NodeInfo, Role
from pslite.wire.base import Message

Write = Callable[[str], None]

_LOGGER = logging.getLogger("pslite")
_PREFIXES = {logging.WARNING: "warning: ", logging.ERROR: "error: "}
_QUIET_S = 10.0
_MAX_TOPICS = 256


def to_stderr(line: str) -> None:
    """Write one whole line at once, so that lines of several processes do not mix.

    Raises ``OSError`` or ``ValueError`` if standard error cannot be written.
    """
    if sys.stderr is None:
        raise OSError("it is closed")
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def try_to_stderr(line: str) -> bool:
    """Write a line that does not belong to a node; return whether that worked."""
    try:
        to_stderr(line)
    except Exception:  # an object that replaces sys.stderr may raise any exception
        return False
    return True


def label(node: NodeInfo) -> str:
    """Return a node's name as in ps-lite's log lines, such as ``S[8]``."""
    return f"{Role(node.role).letter}[{node.node_id}]"


class Log:
    """Writes a node's log lines. ``name`` changes once the node knows its rank."""

    def __init__(self, name: str, level: int, write: Write | None = None) -> None:
        self.name = name
        self.level = level
        self._write = write
        self._labels: dict[str, str] = {}
        #: The number of lines that could not be written since the last written line.
        self._num_lost = 0
        self._why_lost = ""
        #: Topic -> when its next warning may appear, and how many were left out.
        self._quiet: dict[str, tuple[float, int]] = {}

    def learn(self, roster: Iterable[NodeInfo]) -> None:
        """Use labels instead of van names for these nodes from now on."""
        self._labels.update((node.uid, label(node)) for node in roster)

    def info(self, level: int, text: str) -> None:
        """Write a line if PS_VERBOSE is at least ``level`` (0: always)."""
        if level <= self.level:
            self._line(text, logging.INFO)

    def warn(self, text: str) -> None:
        """Write a warning: a problem that does not end the job."""
        self._line(text, logging.WARNING)

    def warn_seldom(self, topic: str, text: str) -> None:
        """Warn about a topic at most once in ten seconds, so that peers cannot fill a log."""
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
        """Write an error."""
        self._line(text, logging.ERROR)

    def trace(self, direction: str, peer: str, message: Message, frames: Sequence[Any]) -> None:
        """Write a line about one message, for PS_VERBOSE=2."""
        sizes = "".join(f" data_size={len(frame)}" for frame in frames)
        body = f" Body:{sizes}" if sizes else ""
        self._line(
            f"{direction} {self._labels.get(peer, peer)}. Meta: {_short(message)}{body}",
            logging.DEBUG,
        )

    def _line(self, text: str, level: int) -> None:
        try:
            if self._num_lost:
                lost = f"lines missing here: {self._num_lost} {self._why_lost}"
                self._put(lost, logging.WARNING)
                self._num_lost = 0
            self._put(text, level)
        except Exception as error:  # losing a line is better than losing the node
            self._num_lost += 1
            self._why_lost = f"could not be written ({error})"

    def _put(self, text: str, level: int) -> None:
        if self._write is None and _LOGGER.hasHandlers():
            _LOGGER.log(level, "%s: %s", self.name, text)
            return
        head = f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {self.name}: "
        (self._write or to_stderr)(f"{head}{_PREFIXES.get(level, '')}{text}")


def _short(message: Message) -> str:
    text = repr(message)
    return text if len(text) <= 400 else text[:397] + "..."
