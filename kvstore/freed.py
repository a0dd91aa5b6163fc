"""What malloc does with freed memory, for processes that receive a lot; without glibc nothing.

``mallopt(3)`` and ``malloc_trim(3)``. Any thread may call. Read next: ``server.py`` and
``server_stores.py``, which do.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
#: Blocks beyond this are the system's, and go back to it: no message is that large by default.
_LARGEST_KEPT_BYTES = 16 << 20
_MOST_KEPT_BYTES = 256 << 20


def keep_freed_memory() -> None:
    """Have malloc use the memory of received messages again.

    It would give each message's pages back to the system, which clears as many for the next
    message: a tenth of a server's time over TCP. Before threads are started.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)
        # Of the arenas that threads have for themselves, malloc_trim leaves the tops as they are.
        mallopt(_M_ARENA_MAX, 1)


def return_freed_memory() -> None:
    """Give back to the system what is free now. Takes milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
