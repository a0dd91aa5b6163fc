"""A scheduler or a server of a job: what ``python -m kvstore.server`` does, for the launcher.

Run by its path, because ``-m kvstore.server`` imports the package and NumPy before any code of
ours runs, and an interrupt in that fifth of a second would end in a traceback. The launcher
passes interrupts on to all processes, so users would see many. Nothing imports this file.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def _end_quietly(number: int, frame: FrameType | None) -> None:
    """Nothing has been opened or started yet."""
    os._exit(128 + number)


if __name__ == "__main__":
    # An interrupt that whoever started the job has switched off stays switched off.
    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_interruptible:
        signal.signal(signal.SIGINT, _end_quietly)
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        sys.path[0] = os.getcwd()  # as for -m, so that --server-import finds what is there

    from kvstore.server import main

    if is_interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
