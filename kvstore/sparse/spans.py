"""Work on many rows, dealt out to the cores of the machine.

Rows that lie here and there in a table cost the wait for memory, which several cores do at the same
time; and where a server has one part of a table, nobody else has work meanwhile. Which thread
does which rows changes no bit. Read next: ``update.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvstore.cores import shared

_LEAST_ELEMENTS = 1 << 18
"""Numbers that are worth another thread."""

_EACH = 2
"""Spans for a thread: one that is disturbed leaves some to the others."""


def over_cores(num_rows: int, width: int, work: Callable[[int, int, int], None]) -> None:
    """Call ``work(number, start, stop)`` for spans that cover all rows, at the same time.

    Numbers are those of the spans, from 0 on. Returns when all are done; raises what the first
    has raised.
    """
    cores = shared()
    step = max(-(-num_rows // (_EACH * cores.num_threads)), _LEAST_ELEMENTS // max(width, 1), 1)
    tasks = [
        partial(work, number, start, min(start + step, num_rows))
        for number, start in enumerate(range(0, num_rows, step))
    ]
    failure = cores.run(tasks)
    if failure is not None:
        raise failure.error
