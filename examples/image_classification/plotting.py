"""Plots loss and accuracy of each epoch with matplotlib (the extra ``plot``).

Keeps a few numbers for each epoch; imports matplotlib only if there is something to draw. Called on
the training thread. Read next: ``train_mnist.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvstore.model import Progress

from kvstore.errors import MissingDependencyError
from pslite.errors import UsageError


class History:
    """Collects the results of epochs, and draws them into ``path`` if there is one."""

    def __init__(self, path: Path | None) -> None:
        self.epochs: list[Progress] = []
        self._path = path
        if path is not None:
            check_path(path)  # fail now rather than after the training

    def add(self, progress: Progress) -> None:
        self.epochs.append(progress)

    def draw(self) -> None:
        """Writes the figure; does nothing without a path. Raises ``UsageError``."""
        if self._path is None:
            return
        pyplot = import_pyplot()
        numbers = [progress.epoch + 1 for progress in self.epochs]
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
        left.plot(numbers, [progress.loss for progress in self.epochs], "o-")
        left.set(xlabel="epoch", ylabel="training loss", ylim=(0, None))
        right.plot(numbers, [progress.accuracy for progress in self.epochs], "o-", label="training")
        tested = [(at.epoch + 1, at.eval_accuracy) for at in self.epochs if at.eval_accuracy]
        if tested:
            right.plot(*zip(*tested, strict=True), "s-", label="test")
        right.set(xlabel="epoch", ylabel="accuracy")
        right.legend()
        for axes in (left, right):
            axes.xaxis.get_major_locator().set_params(integer=True)
        try:
            figure.savefig(self._path, dpi=120)
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot draw into {self._path}: {error}") from error
        finally:
            pyplot.close(figure)


def check_path(path: Path) -> None:
    """Raises ``UsageError`` unless matplotlib can draw into a file of this name."""
    canvas = import_pyplot().matplotlib.backend_bases.FigureCanvasBase
    formats = sorted(canvas.get_supported_filetypes())
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise UsageError(f"cannot draw into {path}: its end must be one of .{', .'.join(formats)}")
    if not path.parent.is_dir():
        raise UsageError(f"cannot draw into {path}: there is no folder {path.parent}")


def import_pyplot() -> Any:
    """matplotlib, drawing into files. Raises ``MissingDependencyError``."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingDependencyError(
            f"--plot needs matplotlib: pip install matplotlib (importing it failed: {error})"
        ) from error
    return pyplot
