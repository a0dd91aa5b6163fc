"""Run the work on a server's parts, each part on one pool thread.

The work on the parts of one lane is done in order, so that no thread reads a value that is being
updated. Requests arrive on the I/O thread. Read next: ``dense.py`` and ``rows.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from pslite import Incoming


class LaneNumbers:
    """Chooses the lanes of new parts. Runs on the I/O thread."""

    def __init__(self, most_bytes: int) -> None:
        """``most_bytes`` limits the total size of the small parts that share a lane."""
        self._most_bytes = most_bytes
        self._lane = 0
        self._lane_bytes = 0

    def shared(self, nbytes: int) -> int:
        """Return a lane for a part of this size; small parts share one."""
        if self._lane_bytes + nbytes > self._most_bytes:
            self._lane += 1
            self._lane_bytes = 0
        self._lane_bytes += nbytes
        return self._lane

    def own(self) -> int:
        """Return a new lane that no other part shares."""
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
        """``submit(lane, work)`` runs ``work`` after all earlier work of that lane."""
        self._submit = submit

    def run(
        self,
        incoming: Incoming,
        parts: Sequence[P],
        work: Callable[[P], None],
        answer: Callable[[], None],
    ) -> None:
        """Do ``work`` for each part on its lane, then ``answer`` on the last lane.

        If either raises, ``incoming`` is answered with the error.
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
            except BaseException as error:  # also answer with an optimizer's SystemExit
                incoming.fail(error)

        if not lanes:
            answer()
        for lane, mine in lanes.items():
            self._submit(lane, partial(run, mine))
