"""``kv.steps``: a training loop that goes on where the last run ended.

After every n-th step all workers meet, and save the number of steps, the weights, the optimizer's
states, and what each worker has for itself. A job that is started again, by ``kvstore-launch
--restarts`` or by hand, loads it and begins with the next step. Runs on the caller's thread. Read
next: ``checkpoint/steps.py`` for the files.
"""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from kvstore.checkpoint.atomic import checked_path
from kvstore.checkpoint.steps import (
    SavedSteps,
    complete,
    path_after,
    read_progress,
    read_state,
    remove_unfinished,
    write_state,
)
from kvstore.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from kvstore.stores.plugin import Path

_logger = logging.getLogger(__name__)


class SavesSteps(Protocol):
    """The parts of ``KVStore`` that are used here; see there."""

    @property
    def rank(self) -> int: ...
    @property
    def num_workers(self) -> int: ...
    def wait(self) -> Any: ...
    def barrier(self) -> None: ...
    def broadcast_object(self, value: object) -> Any: ...
    def save_checkpoint(self, directory: Path) -> None: ...
    def load_checkpoint(self, directory: Path) -> None: ...


class Steps(Iterator[int]):
    """The steps of a training that are not done yet; see ``KVStore.steps``."""

    first: int
    """The number of the first step: 0, or where the last run had saved its progress."""

    def __init__(
        self, store: SavesSteps, stop: int, state: Any, checkpoint: Path | None, every: int
    ) -> None:
        for name, number in (("stop", stop), ("every", every)):
            if isinstance(number, bool) or not isinstance(number, int | np.integer):
                raise ArgumentTypeError(f"{name} must be an int, got {number!r}")
            if number < 0:
                raise ArgumentValueError(f"{name} must be at least 0, got {number}")
        _check_state(state)
        if (checkpoint is None) != (every == 0):
            raise ArgumentValueError(
                "checkpoint and every belong together: pass a directory and the number of steps "
                f"after which to save, got checkpoint={checkpoint!r} and every={every}"
            )
        self._store = store
        self._stop = int(stop)
        self._state = state
        self._every = int(every)
        self._directory = None if checkpoint is None else checked_path(checkpoint)
        self.first = 0 if self._directory is None else self._restore(self._directory)
        self._num_done = self.first
        self._is_within = False

    def __next__(self) -> int:
        if self._is_within:
            self._is_within = False
            self._num_done += 1
            is_last = self._num_done == self._stop
            if self._directory and (is_last or self._num_done % self._every == 0):
                self._save(self._directory)
        if self._num_done >= self._stop:
            raise StopIteration
        self._is_within = True
        return self._num_done

    def _save(self, directory: pathlib.Path) -> None:
        """Save the progress. All workers call this after the same step."""
        store, target = self._store, path_after(directory, self._num_done)
        if self._state is not None:
            write_state(target, store.rank, _captured(self._state))
        store.wait()
        store.barrier()  # no worker's push is missing in what the lowest rank saves now
        store.save_checkpoint(target)
        store.barrier()  # and none is added; all files are complete
        if store.rank == 0:
            progress = SavedSteps(self._num_done, store.num_workers, self._state is not None)
            complete(directory, progress)

    def _restore(self, directory: pathlib.Path) -> int:
        """Load the last progress; return the number of steps that are done."""
        store = self._store
        found = None
        if store.rank == 0:
            found = read_progress(directory)
            remove_unfinished(directory, found)
        if store.num_workers > 1:  # others may not see yet what was written on another machine
            found = store.broadcast_object(found and tuple(found))
        if found is None:
            return 0
        progress = SavedSteps(*found)
        self._check(directory, progress)
        latest = path_after(directory, progress.num_steps)
        state = None if self._state is None else read_state(latest, store.rank)
        store.load_checkpoint(latest)
        if self._state is not None:
            _put(self._state, state)
        if store.rank == 0:
            of = f"{progress.num_steps} of {self._stop}"
            _logger.info("going on after step %s, with the checkpoint %s", of, latest)
        return progress.num_steps

    def _check(self, directory: pathlib.Path, progress: SavedSteps) -> None:
        store = self._store
        if progress.num_steps > self._stop:
            raise ArgumentValueError(
                f"{directory} has the progress of {progress.num_steps} steps, but stop is "
                f"{self._stop}; pass a larger stop, or another directory"
            )
        if self._state is None:
            return
        if not progress.has_states:
            raise CheckpointError(
                f"{directory} was saved without the states of workers; pass state=None, or "
                "another directory"
            )
        if progress.num_workers != store.num_workers:
            raise CheckpointError(
                f"{directory} has the states of {progress.num_workers} workers, this job has "
                f"{store.num_workers}; start as many workers, or pass another directory"
            )


def _check_state(state: Any) -> None:
    if state is not None and not isinstance(state, dict) and not _keeps_its_state(state):
        raise ArgumentTypeError(
            "state must be a dict, or an object with state_dict and load_state_dict, got "
            f"{type(state).__name__}"
        )


def _captured(state: Any) -> Any:
    """Return a worker's state as a plain object."""
    if isinstance(state, dict):
        return {key: _captured_value(value) for key, value in state.items()}
    return state.state_dict()


def _captured_value(value: Any) -> Any:
    if _keeps_its_state(value):
        return value.state_dict()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.get_state() if _is_generator(value) else value


def _put(state: Any, saved: Any) -> None:
    """Give a worker its state back; fill arrays of a dict in place if they fit."""
    if not isinstance(state, dict):
        state.load_state_dict(saved)
        return
    for key in state.keys() - saved.keys():
        del state[key]
    for key, value in saved.items():
        old: Any = state.get(key)
        if _keeps_its_state(old):
            old.load_state_dict(value)
        elif isinstance(old, np.random.Generator):
            old.bit_generator.state = value
        elif _is_generator(old):
            old.set_state(value)
        elif _fits(old, value):
            old[...] = value
        else:
            state[key] = value


def _keeps_its_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _is_generator(value: Any) -> bool:
    """Return whether it has the methods of ``torch.Generator`` and ``RandomState``."""
    return hasattr(value, "get_state") and hasattr(value, "set_state")


def _fits(old: Any, new: Any) -> bool:
    if type(old) is not type(new) or not hasattr(new, "shape"):
        return False
    is_writable = not isinstance(old, np.ndarray) or old.flags.writeable
    return bool(is_writable and old.shape == new.shape and old.dtype == new.dtype)
