"""What a worker's node does when the interpreter ends: it leaves the cluster.

A script may end right after a push. So the node stays until what it pushed is applied and says
goodbye; where a push was not applied, the process ends with a line that says so and with code 120
(``docs/decisions/0025-the-last-push.md``). Runs on the main thread, in an exit handler. Read
next: ``shutdown.py``.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pslite.node.postoffice import Postoffice


def leave_at_exit(node: Postoffice) -> None:
    """Have the interpreter's end close this node, unless it is closed by then."""
    atexit.register(_leave, weakref.ref(node))


def _leave(known: weakref.ref[Postoffice]) -> None:
    """Say goodbye, unless an exception has ended the script.

    Without one the others see a lost worker, which ends the job, instead of a worker that has
    got all it wanted. The interpreter leaves an uncaught exception in ``sys.last_value``; in
    an interactive session that says nothing about its end.
    """
    node = known()
    if node is None:
        return
    is_interactive = hasattr(sys, "ps1")
    failed = getattr(sys, "last_value", None) is not None and not is_interactive
    try:
        node.close(goodbye=not failed)
    except Exception as error:
        node.log.error(f"a push was not applied: {type(error).__name__}: {error}")
        _end_with_failure()


def _end_with_failure() -> None:
    """Have the interpreter, which is at its exit handlers, end with a code that is not 0.

    What a handler raises changes nothing, and ``os._exit`` would skip the handlers of others and
    lose what files have not written yet. But the code becomes 120 when the interpreter cannot
    flush its standard streams, which it does after all handlers (Python's documentation of
    ``sys.exit``); of standard error it does not say so besides.
    """
    sys.stderr = _Unflushable(sys.stderr)


class _Unflushable:
    """A stream that does all that ``stream`` does, and that the interpreter cannot flush."""

    def __init__(self, stream: object) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()  # type: ignore[attr-defined]
        try:
            sys._getframe(1)
        except ValueError:  # no line of Python has called this
            raise OSError("a push was not applied") from None
