"""Run the work on a server's parts, each part on one pool thread.

Parts of one lane are worked on one after the other, so that no thread reads a value that is being
updated. Requests arrive on the I/O thread. Read next: ``dense.py`` and ``rows.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from pslite import Incoming


class LaneNumbers:
    """Which lanes new parts get. On the I/O thread."""

    def __init__(self, most_bytes: int) -> None:
        """``most_bytes`` is how much small parts may have that share a lane."""
        self._most_bytes = most_bytes
        self._lane = 0
        self._lane_bytes = 0

    def shared(self, nbytes: int) -> int:
        """Return a lane for this many bytes; small ones share it for joint updates."""
        if self._lane_bytes + nbytes > self._most_bytes:
            self._lane += 1
            self._lane_bytes = 0
        self._lane_bytes += nbytes
        return self._lane

    def own(self) -> int:
        """Return a lane that nothing shares."""
        self._lane += 2
        self._lane_bytes = 0
        return self._lane - 1


class OnLane(Protocol):
    """A part of any kind."""

    @property
    def lane(self) -> int:
        """The number of the pool thread that works on it."""


P = TypeVar("P", bound=OnLane)


class Lanes:
    """Hands work to the threads of a pool."""

    def __init__(self, submit: Callable[[int, Callable[[], None]], None]) -> None:
        """``submit(lane, work)`` has work done after all that the lane was given before."""
        self._submit = submit

    def run(
        self,
        incoming: Incoming,
        parts: Sequence[P],
        work: Callable[[P], None],
        answer: Callable[[], None],
    ) -> None:
        """Do ``work`` for each part on its lane, then ``answer`` on the last lane.

        What either raises is the answer to ``incoming``.
        """
        lanes: dict[int, list[P]] = {}
        for part in parts:
            lanes.setdefault(part.lane, []).append(part)
        lock = threading.Lock()  # guards `left`: lanes end on different threads
        left = len(lanes)

        def run(mine: list[P]) -> None:
            nonlocal left
            try:
                for part in mine:
                    work(part)
                with lock:
                    left -= 1
                    is_last = left == 0
                if is_last:
                    answer()
            except BaseException as error:  # an optimizer's SystemExit, too, is an answer
                incoming.fail(error)

        if not lanes:
            answer()
        for lane, mine in lanes.items():
            self._submit(lane, partial(run, mine))
