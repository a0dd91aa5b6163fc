"""Keep glibc from returning freed memory to the kernel. No-op elsewhere.

It uses ``mallopt(3)`` and ``malloc_trim(3)``. Functions may be called from any thread. Read next:
``__init__.py`` and ``dense.py``, which call them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
#: Larger blocks are mapped, and unmapped when they are freed. Messages are smaller by default.
_LARGEST_KEPT_BYTES = 16 << 20
_MOST_KEPT_BYTES = 256 << 20
_RETURN_AFTER_S = 1.0


def keep_freed_memory(*, one_arena: bool = True) -> None:
    """Make malloc reuse the memory of received messages.

    By default it gives each message's pages back to the system, which then clears new pages for the
    next message. That takes a tenth of a server's time over TCP. Call this before starting threads.
    ``one_arena`` is for processes whose threads seldom call malloc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)
        # malloc_trim does not trim the tops of per-thread arenas.
        if one_arena:
            mallopt(_M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Return all free memory to the system. It takes milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class LateReturn:
    """Returns free memory to the system some time after the last request.

    It runs on a node's I/O thread.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        look_after_each_step: Callable[[Callable[[], bool]], None],
    ) -> None:
        """Use a node's clock and the ``look_after_each_step`` of its queue.

        It runs after the node's steps, not on a timer, since an ending node waits for its timers.
        """
        self._clock = clock
        self._look_after_each_step = look_after_each_step
        self._is_asked_for = False
        self._due = 0.0

    def ask(self) -> None:
        """Return free memory to the system soon: it is not needed again."""
        self._due = self._clock() + _RETURN_AFTER_S
        if not self._is_asked_for:
            self._is_asked_for = True
            self._look_after_each_step(self._look)

    def _look(self) -> bool:
        """Return the memory if it is time; return whether that was done."""
        if self._clock() < self._due:
            return False
        self._is_asked_for = False
        return_freed_memory()
        return True
