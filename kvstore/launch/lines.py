"""Cuts what a process writes into lines.

Pure: bytes and the time in, whole lines out. Output of several processes shares one terminal,
so only whole lines may be printed. Progress bars rewrite one line with carriage returns for
hours; their latest state is shown as a line of its own now and then. Used by
``supervisor.py``.
"""

from __future__ import annotations

BAR_INTERVAL_S = 1.0
LONGEST_LINE_BYTES = 64 * 1024


class LineSplitter:
    """Collects bytes of one stream and gives back complete lines, without their ends."""

    def __init__(self) -> None:
        self._rest = b""
        self._bar_shown_at_s = float("-inf")

    def feed(self, data: bytes, now_s: float) -> list[bytes]:
        """Take what was read; return the lines that it completes, as a terminal would show them."""
        *complete, self._rest = (self._rest + data).split(b"\n")
        lines = [_visible(line) for line in complete]
        if b"\r" in self._rest:
            lines.extend(self._bar_state(now_s))
        if len(self._rest) > LONGEST_LINE_BYTES:
            lines.append(_visible(self._rest))
            self._rest = b""
        return lines

    def finish(self) -> list[bytes]:
        """The stream has ended: return the unfinished line, if there is one."""
        rest, self._rest = self._rest, b""
        return [_visible(rest)] if rest.strip(b"\r") else []

    def _bar_state(self, now_s: float) -> list[bytes]:
        """What stands before the last carriage return is complete and about to be overwritten."""
        finished, _, unfinished = self._rest.rpartition(b"\r")
        if unfinished:
            self._rest = unfinished
        elif b"\r" in finished:
            self._rest = finished.rpartition(b"\r")[2] + b"\r"
        else:
            # A lone final return may be the first half of a "\r\n" that was read in two pieces.
            return []
        shown = _visible(finished)
        if not shown or now_s - self._bar_shown_at_s < BAR_INTERVAL_S:
            return []
        self._bar_shown_at_s = now_s
        return [shown]


def _visible(line: bytes) -> bytes:
    """The text after the last carriage return, a closing one not counted."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
