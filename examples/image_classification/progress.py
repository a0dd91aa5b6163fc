"""Shows the progress of a fit: a growing bar on a terminal, plain lines elsewhere.

Pass the two methods of ``ProgressPrinter`` to ``FeedForward.fit`` as callbacks; they run on the
caller's thread. It writes to one text stream and remembers only the current line.
Read next: ``train_mnist.py``.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from typing import TextIO

from kvstore.model import Progress

BAR_WIDTH = 20
REDRAW_EVERY_S = 0.1


class Bar:
    """A bar that redraws itself in place; only for terminals."""

    def __init__(self, stream: TextIO, *, is_wanted: bool = True) -> None:
        self.is_drawn = is_wanted and stream.isatty()
        self._stream = stream
        self._on_line = 0
        self._drawn_at_s = 0.0

    def draw(self, begin: str, share: float, end: str) -> None:
        """Show this share as done, from 0 to 1; redraws no faster than the eye can follow."""
        now_s = time.monotonic()
        if not self.is_drawn or now_s - self._drawn_at_s < REDRAW_EVERY_S:
            return
        self._drawn_at_s = now_s
        done = int(BAR_WIDTH * share)
        line = f"{begin} [{'#' * done}{'-' * (BAR_WIDTH - done)}] {end}"
        # A line that wraps could not be drawn over, so it ends before the last column.
        line = line[: shutil.get_terminal_size().columns - 1]
        self._stream.write("\r" + line.ljust(self._on_line))
        self._stream.flush()
        self._on_line = len(line)

    def erase(self) -> None:
        """Replace the bar by an empty line; the next one is drawn at once."""
        if self._on_line:
            self._stream.write("\r" + " " * self._on_line + "\r")
            self._on_line = 0
        self._drawn_at_s = 0.0

    def leave_line(self) -> None:
        """Move to a new line below the bar."""
        if self._on_line:
            print(file=self._stream, flush=True)
            self._on_line = 0


class ProgressPrinter:
    """``on_batch`` and ``on_epoch`` for the worker ``rank``.

    Only rank 0 draws a bar, and only on a terminal; otherwise a line is printed every
    ``disp_batches`` batches, and one at the end of each epoch in both cases.
    """

    def __init__(self, stream: TextIO, rank: int, num_epochs: int, disp_batches: int) -> None:
        self._stream = stream
        self._num_epochs = num_epochs
        self._disp_batches = disp_batches
        self._bar = Bar(stream, is_wanted=rank == 0)

    def on_batch(self, progress: Progress) -> None:
        if self._bar.is_drawn:
            share = progress.nbatch / progress.num_batches
            self._bar.draw(self._epoch(progress), share, numbers_of(progress))
        elif progress.nbatch % self._disp_batches == 0 and progress.nbatch < progress.num_batches:
            batch = f"batch {progress.nbatch}/{progress.num_batches}"
            self._print(f"{self._epoch(progress)} {batch}: {numbers_of(progress)}")

    def on_epoch(self, progress: Progress) -> None:
        self._bar.erase()
        self._print(f"{self._epoch(progress)}: {numbers_of(progress)}")

    def leave_line(self) -> None:
        """Move to a new line if this one has a bar, before anything else is printed."""
        self._bar.leave_line()

    def _epoch(self, progress: Progress) -> str:
        return f"epoch {progress.epoch + 1}/{self._num_epochs}"

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def numbers_of(progress: Progress) -> str:
    """Speed, loss and accuracy of this worker in words."""
    text = (
        f"{progress.samples_per_s:,.0f} samples/s, loss {progress.loss:.4f}, "
        f"accuracy {progress.accuracy:.4f}"
    )
    if progress.eval_metric is not None:
        text += more_of(progress.eval_metric.get_global_name_value())
    if progress.eval_accuracy is not None:
        text += f", on test digits {progress.eval_accuracy:.4f}{more_of(progress.validation)}"
    return text


def more_of(metrics: Iterable[tuple[str, float]]) -> str:
    """The metrics except accuracy, which is shown anyway."""
    return "".join(f", {name} {value:.4f}" for name, value in metrics if name != "accuracy")
