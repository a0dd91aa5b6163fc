"""Shows how a fit comes along: a bar that grows in place on a terminal, plain lines elsewhere.

Made to be handed to ``FeedForward.fit`` as its two callbacks, which run on the thread that
called it. Writes to one text stream and keeps nothing but what stands on the current line.
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


class ProgressPrinter:
    """``on_batch`` and ``on_epoch`` for the worker ``rank``.

    Only rank 0 draws a bar, and only on a terminal; otherwise a line is printed every
    ``disp_batches`` batches, and one at the end of each epoch in both cases.
    """

    def __init__(self, stream: TextIO, rank: int, num_epochs: int, disp_batches: int) -> None:
        self._stream = stream
        self._num_epochs = num_epochs
        self._disp_batches = disp_batches
        self._draws_bar = rank == 0 and stream.isatty()
        self._on_line = 0
        self._drawn_at_s = 0.0

    def on_batch(self, progress: Progress) -> None:
        if self._draws_bar:
            self._draw(progress)
        elif progress.nbatch % self._disp_batches == 0 and progress.nbatch < progress.num_batches:
            batch = f"batch {progress.nbatch}/{progress.num_batches}"
            self._print(f"{self._epoch(progress)} {batch}: {numbers_of(progress)}")

    def on_epoch(self, progress: Progress) -> None:
        self._erase()
        self._print(f"{self._epoch(progress)}: {numbers_of(progress)}")

    def leave_line(self) -> None:
        """Go to a fresh line when a bar stands on this one, before something else is printed."""
        if self._on_line:
            self._print("")
            self._on_line = 0

    def _draw(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s - self._drawn_at_s < REDRAW_EVERY_S:
            return
        self._drawn_at_s = now_s
        done = BAR_WIDTH * progress.nbatch // progress.num_batches
        bar = "#" * done + "-" * (BAR_WIDTH - done)
        line = f"{self._epoch(progress)} [{bar}] {numbers_of(progress)}"
        # A line that wraps could not be drawn over, so it ends before the last column.
        line = line[: shutil.get_terminal_size().columns - 1]
        self._stream.write("\r" + line.ljust(self._on_line))
        self._stream.flush()
        self._on_line = len(line)

    def _erase(self) -> None:
        if self._on_line:
            self._stream.write("\r" + " " * self._on_line + "\r")
            self._on_line = 0

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
    """The metrics besides accuracy, which is shown anyway."""
    return "".join(f", {name} {value:.4f}" for name, value in metrics if name != "accuracy")
