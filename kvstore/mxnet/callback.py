"""Callbacks at the end of a batch or epoch: speed, metrics, a bar, checkpoints.

Every callback takes one object with MXNet's attributes ``epoch``, ``nbatch`` and
``eval_metric`` (``kvstore.model.Progress`` and MXNet's ``BatchEndParam`` have them). Callbacks run
on the thread that called ``fit``. Lines are written by loggers of ``logging``, so call
``logging.basicConfig(level=logging.INFO)`` to see them. Read next: ``mxnet/metric/base.py``.

Source of names and meaning: ``python/mxnet/callback.py`` of the original.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO, cast

from numpy.typing import NDArray

from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.mxnet.metric import EvalMetric

if TYPE_CHECKING:
    from kvstore.mxnet.fit.network import Progress

__all__ = [
    "BatchEndParam",
    "Checkpoint",
    "LogValidationMetricsCallback",
    "ProgressBar",
    "Speedometer",
    "do_checkpoint",
    "log_train_metric",
    "module_checkpoint",
]

_logger = logging.getLogger(__name__)


class BatchEndParam(NamedTuple):
    """The argument of batch callbacks, as in MXNet."""

    epoch: int
    nbatch: int
    eval_metric: EvalMetric | None = None
    locals: Mapping[str, Any] | None = None


class _BatchEnd(Protocol):
    """The attributes that these callbacks read."""

    @property
    def epoch(self) -> int: ...

    @property
    def nbatch(self) -> int: ...

    @property
    def eval_metric(self) -> EvalMetric | None: ...


class Speedometer:
    """Logs samples per second and metrics after every ``frequent`` batches.

    ``batch_size`` is the number of samples in a batch of this worker. With ``auto_reset`` the
    metrics count since the last line, otherwise since the start of the epoch.
    """

    def __init__(
        self,
        batch_size: int,
        frequent: int = 50,
        auto_reset: bool = True,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._batch_size = _at_least_one("batch_size", batch_size)
        self._frequent = _at_least_one("frequent", frequent)
        self._auto_reset = auto_reset
        self._clock = clock
        self._last_nbatch = sys.maxsize
        self._last_s = 0.0

    def __call__(self, param: _BatchEnd) -> None:
        is_new_epoch = param.nbatch <= self._last_nbatch
        if not is_new_epoch and param.nbatch % self._frequent != 0:
            return
        now_s = self._clock()
        if not is_new_epoch:
            self._log(param, now_s - self._last_s)
        self._last_nbatch, self._last_s = param.nbatch, now_s

    def _log(self, param: _BatchEnd, seconds: float) -> None:
        samples = (param.nbatch - self._last_nbatch) * self._batch_size
        _logger.info(
            "Epoch[%d] Batch [%d-%d]\tSpeed: %.2f samples/sec%s",
            param.epoch,
            self._last_nbatch,
            param.nbatch,
            samples / max(seconds, 1e-9),
            "".join(f"\t{name}={value:f}" for name, value in _values(param)),
        )
        if self._auto_reset and param.eval_metric is not None:
            param.eval_metric.reset_local()


class ProgressBar:
    """Draws a progress bar of the epoch, ``length`` characters wide.

    ``total`` is the number of batches of an epoch. The bar is redrawn only when it changes.
    """

    def __init__(self, total: int, length: int = 80, *, stream: TextIO | None = None) -> None:
        self._total = _at_least_one("total", total)
        self._length = int(_at_least_one("length", length))
        self._stream = stream
        self._drawn = ""

    def __call__(self, param: _BatchEnd) -> None:
        share = min(param.nbatch / self._total, 1.0)
        done = round(self._length * share)
        bar = f"[{'=' * done}{'-' * (self._length - done)}] {math.ceil(100 * share)}%"
        if bar != self._drawn:
            stream = self._stream or sys.stderr
            stream.write(f"\r{bar}" + ("\n" if share == 1.0 else ""))
            stream.flush()
        self._drawn = bar


class LogValidationMetricsCallback:
    """Logs the metrics of the evaluation: an ``eval_end_callback``."""

    def __call__(self, param: _BatchEnd) -> None:
        for name, value in _values(param):
            _logger.info("Epoch[%d] Validation-%s=%f", param.epoch, name, value)


def log_train_metric(period: int, auto_reset: bool = False) -> Callable[[_BatchEnd], None]:
    """Return a ``batch_end_callback`` that logs metrics every ``period`` batches."""
    _at_least_one("period", period)

    def log(param: _BatchEnd) -> None:
        if param.nbatch % period != 0:
            return
        for name, value in _values(param):
            _logger.info("Iter[%d] Batch[%d] Train-%s=%f", param.epoch, param.nbatch, name, value)
        if auto_reset and param.eval_metric is not None:
            param.eval_metric.reset_local()

    return log


class Checkpoint:
    """Saves the model every ``period`` epochs: an ``epoch_end_callback``.

    A fit calls ``end_epoch``, which saves the parameters and the optimizer's states, so a fit after
    ``FeedForward.load`` gives the same result as an uninterrupted one; rank 0 writes. If it is
    called with MXNet's arguments, it saves the given parameters.
    """

    def __init__(self, prefix: str | Path, period: int = 1) -> None:
        self.prefix = prefix
        self.period = int(_at_least_one("period", period))

    def __call__(
        self,
        iter_no: int,
        sym: Any,
        arg: Mapping[str, NDArray[Any]],
        aux: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        if self._is_due(iter_no):
            from kvstore.mxnet.fit.files import save_checkpoint

            save_checkpoint(self.prefix, iter_no + 1, sym, arg, aux)

    def end_epoch(self, progress: Progress, save: Callable[[str | Path, int], None]) -> None:
        """Handle the end of an epoch; ``save(prefix, epoch)`` belongs to the fit."""
        if self._is_due(progress.epoch):
            save(self.prefix, progress.epoch + 1)

    def _is_due(self, epoch: int) -> bool:
        return (epoch + 1) % self.period == 0


def do_checkpoint(prefix: str | Path, period: int = 1) -> Checkpoint:
    """Return a ``Checkpoint``, which saves to ``PREFIX-0001.params`` and so on."""
    return Checkpoint(prefix, period)


def module_checkpoint(
    mod: Any, prefix: str | Path, period: int = 1, save_optimizer_states: bool = False
) -> Callable[..., None]:
    """Return an ``epoch_end_callback`` that saves ``mod`` every ``period`` epochs.

    ``mod`` has MXNet's ``save_checkpoint(prefix, epoch, save_optimizer_states)``, or it is a
    ``FeedForward``, whose ``save(prefix, epoch)`` always writes the states. Raises
    ``ArgumentTypeError`` for an object with neither method.
    """
    _at_least_one("period", period)
    save = getattr(mod, "save_checkpoint", None)
    if save is None and not callable(getattr(mod, "save", None)):
        raise ArgumentTypeError(
            f"mod must have a method save_checkpoint or save, got {type(mod).__name__}"
        )

    def checkpoint(iter_no: int, sym: Any = None, arg: Any = None, aux: Any = None) -> None:
        if (iter_no + 1) % period:
            return
        if save is None:
            mod.save(prefix, iter_no + 1)
        else:
            save(prefix, iter_no + 1, save_optimizer_states)

    return checkpoint


def _values(param: _BatchEnd) -> list[tuple[str, float]]:
    return [] if param.eval_metric is None else param.eval_metric.get_name_value()


def _at_least_one(name: str, number: Any) -> float:
    if isinstance(number, bool) or not isinstance(number, Real):
        raise ArgumentTypeError(f"{name} must be a number, got {number!r}")
    found = cast(float, number)
    if not found >= 1:
        raise ArgumentValueError(f"{name} must be at least 1, got {number}")
    return found
