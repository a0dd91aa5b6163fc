"""Work on a server's parts, each on its own pool thread: what requests of apps need done there.

Parts of one lane are worked on one after the other, so that nobody reads a value that is being
updated. Requests arrive on the I/O thread. Read next: ``server_stores.py`` and ``row_stores.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from pslite import Incoming


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
        """Do ``work`` for each part on its lane's thread, then ``answer`` on the last of them.

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
            except Exception as error:
                incoming.fail(error)

        if not lanes:
            answer()
        for lane, mine in lanes.items():
            self._submit(lane, partial(run, mine))
