"""``Log``: the log lines of a node, in the format of ps-lite.

Level 1 (PS_VERBOSE=1) shows connections, level 2 every message as well; warnings and errors
always appear. A ``Log`` belongs to one node, so two clusters in one process do not mix. Lines go
to the logger ``pslite`` of Python's ``logging`` where the application has given that or the root
logger a handler, and to stderr with date and time where it has not.

Nothing here ends a node: a line that cannot be written (a full disk, a pipe without a reader
more, a closed descriptor) is counted, and the next line that can be written tells how many are
missing and why.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pslite.ids import NodeInfo, Role
from pslite.wire.messages import Message

Write = Callable[[str], None]

_LOGGER = logging.getLogger("pslite")
_PREFIXES = {logging.WARNING: "warning: ", logging.ERROR: "error: "}
_QUIET_S = 10.0
_MAX_TOPICS = 256


def to_stderr(line: str) -> None:
    """Write one whole line at once, so that lines of several processes do not mix.

    Raises ``OSError`` or ``ValueError`` where standard error takes nothing.
    """
    if sys.stderr is None:
        raise OSError("it is closed")
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def try_to_stderr(line: str) -> bool:
    """Write a line said outside of a node; return whether that worked."""
    try:
        to_stderr(line)
    except Exception:  # also what somebody's replacement of sys.stderr raises
        return False
    return True


def label(node: NodeInfo) -> str:
    """Return a node's name as in the lines of ps-lite: ``S[8]``."""
    return f"{Role(node.role).letter}[{node.node_id}]"


class Log:
    """Writes a node's lines. ``name`` changes once the node knows its rank."""

    def __init__(self, name: str, level: int, write: Write | None = None) -> None:
        self.name = name
        self.level = level
        self._write = write
        self._labels: dict[str, str] = {}
        #: Lines that could not be written since the last one that could.
        self._num_lost = 0
        self._why_lost = ""
        #: Topic -> when a warning on it may appear again, and how many were left out.
        self._quiet: dict[str, tuple[float, int]] = {}

    def learn(self, roster: Iterable[NodeInfo]) -> None:
        """Show these nodes by their labels, not by their vans' names, from here on."""
        self._labels.update((node.uid, label(node)) for node in roster)

    def info(self, level: int, text: str) -> None:
        """Write a line that appears from ``level`` on (0: always)."""
        if level <= self.level:
            self._line(text, logging.INFO)

    def warn(self, text: str) -> None:
        """Report a problem that the job survives."""
        self._line(text, logging.WARNING)

    def warn_seldom(self, topic: str, text: str) -> None:
        """Warn of one topic once in a while, so that peers cannot fill a log."""
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
        """Log an error after which this node cannot continue."""
        self._line(text, logging.ERROR)

    def trace(self, direction: str, peer: str, message: Message, frames: Sequence[Any]) -> None:
        """Show one message, as PS_VERBOSE=2 does."""
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
        except Exception as error:  # a line less is better than a node less
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
