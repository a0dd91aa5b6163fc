"""Print only the script's own frames of an error that ends a worker's script.

The error message says what happened; the frames inside ``kvstore`` and ``pslite`` do not help a
user. PS_VERBOSE=1 shows all frames. Nothing changes if other code, such as a notebook or a
debugger, already handles errors. Read next: ``stores/dist/node.py``.
"""

from __future__ import annotations

import os
import sys
from types import FrameType, TracebackType

import pslite
from pslite.errors import PSError

_OURS = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(str(pslite.__file__)))
_INTERNAL = tuple(os.path.join(directory, "") for directory in _OURS)


def shorten_tracebacks() -> None:
    """Hide the project's own frames in uncaught errors of this project."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if isinstance(error, PSError):
        traceback = without_internal_frames(traceback)
        chained: BaseException | None = error
        seen: set[int] = set()
        while chained is not None and id(chained) not in seen:  # ``raise error from error``
            seen.add(id(chained))
            chained.__traceback__ = without_internal_frames(chained.__traceback__)
            is_told = chained.__cause__ is None and not chained.__suppress_context__
            chained = chained.__context__ if is_told else chained.__cause__
    sys.__excepthook__(kind, error, traceback)


def call_of(frame: FrameType | None) -> str:
    """Return which of this project's calls a thread executes, and the script's line."""
    name = "a call"
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_INTERNAL):
            name = code.co_name
        elif name != "a call":
            return f"{name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
        frame = frame.f_back
    return name


def without_internal_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a new traceback without the frames of this project's files."""
    kept = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_INTERNAL):
            kept.append(traceback)
        traceback = traceback.tb_next
    chain: TracebackType | None = None
    for each in reversed(kept):
        chain = TracebackType(chain, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return chain
