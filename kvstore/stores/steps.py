"""``kv.steps``: a training loop that goes on where the last run ended.

After every n-th step all workers meet, and save the number of steps, the weights, the optimizer's
states, and what each worker has for itself. A job that is started again, by ``kvstore-launch
--restarts`` or by hand, loads it and begins with the next step. Runs on the caller's thread. Read
next: ``checkpoint/steps.py`` for the files.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from kvstore.arrays import adapter_for
from kvstore.checkpoint.atomic import checked_path
from kvstore.checkpoint.steps import (
    SavedSteps,
    complete,
    make_directory,
    pack_state,
    path_after,
    read_progress,
    read_state,
    state_from_bytes,
    state_to_bytes,
    write_state,
)
from kvstore.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CheckpointError,
    NotSupportedError,
)
from kvstore.stores.plugin import Path
from pslite.errors import PSError
from pslite.future import Future


class StepKeeper(Protocol):
    """Keeps what another process needs to repeat a step (``dist/kept_steps.py``)."""

    @property
    def found(self) -> Future[Any]:
        """Completes with the step that this process has to repeat, or None."""

    @property
    def keeping(self) -> Future[None]:
        """Completes when the step that was begun last is kept."""

    def begin_loop(self) -> int: ...
    def end_step(self) -> None: ...
    def keep(self, loop: int, step: int, state: bytes) -> Future[None]: ...
    def repeat(self, kept: Any) -> None: ...
    def has_repeated(self) -> None: ...


class SavesSteps(Protocol):
    """The parts of ``KVStore`` that are used here; see there."""

    _refuses_steps: str
    _keeper: StepKeeper | None

    @property
    def rank(self) -> int: ...
    @property
    def num_workers(self) -> int: ...
    def wait(self) -> Any: ...
    def barrier(self) -> None: ...
    def save_checkpoint(self, directory: Path) -> None: ...
    def load_checkpoint(self, directory: Path) -> None: ...
    def _wait(self, future: Future[Any]) -> Any: ...
    def _learn_keys(self) -> None: ...
    def _log_progress(self, text: str) -> None: ...
    def _agree(self, name: str, prepare: Callable[[], Any], act: Callable[[], str]) -> Any: ...


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
        if (checkpoint is None) != (every == 0):
            raise ArgumentValueError(
                "checkpoint and every belong together: pass a directory and the number of steps "
                f"after which to save, got checkpoint={checkpoint!r} and every={every}"
            )
        if checkpoint is not None and store._refuses_steps:
            raise NotSupportedError(store._refuses_steps)
        self._store = store
        self._stop = int(stop)
        self._state = None if state is None else WorkerState(state)
        self._every = int(every)
        self._directory = None if checkpoint is None else checked_path(checkpoint)
        self._keeper = store._keeper
        self._loop = 0 if self._keeper is None else self._keeper.begin_loop()
        #: The step that this process repeats in place of a lost one, until it has begun.
        self._repeated = None if self._keeper is None else store._wait(self._keeper.found)
        if self._repeated is not None and self._loop > self._repeated.loop:
            self._repeated = None
        self.first = self._first_step()
        self._num_done = self.first
        self._is_within = False

    def __iter__(self) -> Steps:
        self._is_within = False  # a step that was left by break is done again
        return self

    def __next__(self) -> int:
        if self._is_within:
            self._is_within = False
            self._num_done += 1
            if self._keeper is not None:
                self._keeper.end_step()
                self._keeper.has_repeated()
            is_last = self._num_done == self._stop
            if self._directory and (is_last or self._num_done % self._every == 0):
                self._save(self._directory)
        if self._keeper is not None:
            self._keep(self._keeper)
        if self._num_done >= self._stop:
            if self._keeper is not None:
                self._keeper.end_step()
            raise StopIteration
        self._is_within = True
        return self._num_done

    def _first_step(self) -> int:
        if self._repeated is not None:
            if self._loop < self._repeated.loop:  # the lost process had done this loop
                return self._stop
            if self._state is not None and self._repeated.state:
                self._state.load_state_dict(state_from_bytes(self._repeated.state))
            return int(self._repeated.step)
        if self._directory is not None:
            return self._restore(self._directory)
        if self._state is not None:
            pack_state(self._state.state_dict())  # errors do not depend on settings
        return 0

    def _keep(self, keeper: StepKeeper) -> None:
        """Keep what the next step begins with, or begin the one that was kept."""
        if self._repeated is None:
            state = b"" if self._state is None else state_to_bytes(self._state.state_dict())
            self._store._wait(keeper.keeping)
            keeper.keep(self._loop, self._num_done, state)
        elif self._loop == self._repeated.loop:
            self._store._learn_keys()
            keeper.repeat(self._repeated)
            self._repeated = None

    def _save(self, directory: pathlib.Path) -> None:
        """Save the progress. All workers call this after the same step."""
        store, target = self._store, path_after(directory, self._num_done)
        if self._state is not None:
            write_state(target, store.rank, self._state.state_dict())
        store.wait()
        store.barrier()  # no worker's push is missing in what the lowest rank saves
        store.save_checkpoint(target)
        store.barrier()  # and none is added; all files are complete
        if store.rank == 0:
            progress = SavedSteps(self._num_done, store.num_workers, self._state is not None)
            complete(directory, progress)

    def _restore(self, directory: pathlib.Path) -> int:
        """Load the last progress; return the number of steps that are done.

        Until all workers know that all can go on, none changes anything.
        """
        store = self._store
        has_state = self._state is not None
        call = f"steps({self._stop}, every={self._every}, with {'a' if has_state else 'no'} state)"
        # Others may not see yet what was written on another machine.
        _, text = store._agree(
            call, lambda: None, lambda: json.dumps(_named_error(store, read_progress)(directory))
        )
        found = json.loads(text)
        progress = SavedSteps(*(found or (0, 0, False)))
        latest = path_after(directory, progress.num_steps)
        read = _named_error(store, self._read)
        state, _ = store._agree(f"steps, from {latest}", lambda: read(directory, progress), str)
        if found is None:
            if store.rank == 0:
                store._log_progress(f"nothing is saved in {directory} yet: beginning with step 0")
            return 0
        store.load_checkpoint(latest)
        if self._state is not None:
            self._state.load_state_dict(state)
        if store.rank == 0:
            text = f"going on with step {progress.num_steps} of {self._stop}"
            if progress.num_steps == self._stop:
                text = f"all {self._stop} steps were done already"
            store._log_progress(f"{text}, from {latest}")
        return progress.num_steps

    def _read(self, directory: pathlib.Path, progress: SavedSteps) -> Any:
        """Return this worker's state. Raises what would be an error later, if possible."""
        make_directory(directory)
        if self._state is not None:
            pack_state(self._state.state_dict())
        if not progress.num_workers:  # nothing was saved
            return None
        if progress.num_steps > self._stop:
            raise CheckpointError(
                f"{directory} has the progress of {progress.num_steps} steps, but stop is "
                f"{self._stop} (a batch is a step of a fit); pass a larger stop, or another "
                "directory"
            )
        if self._state is None:
            return None
        if not progress.has_states:
            raise CheckpointError(
                f"{directory} was saved without the states of workers; pass state=None, or "
                "another directory"
            )
        if progress.num_workers != self._store.num_workers:
            raise CheckpointError(
                f"{directory} has the states of {progress.num_workers} workers, this job has "
                f"{self._store.num_workers}; start as many workers, or pass another directory"
            )
        return read_state(path_after(directory, progress.num_steps), self._store.rank)


def _named_error(store: SavesSteps, read: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does what ``read`` does; its errors name the worker."""

    def tried(*arguments: Any) -> Any:
        try:
            return read(*arguments)
        except (PSError, OSError) as error:
            who = f"worker {store.rank}: " if store.num_workers > 1 else ""
            raise CheckpointError(f"{who}{error}") from error

    return tried


class WorkerState:
    """What a script passes as ``state``, as one object with a ``state_dict``."""

    def __init__(self, state: Any) -> None:
        if not isinstance(state, dict) and not _keeps_its_state(state):
            raise ArgumentTypeError(
                "state must be a dict, or an object with state_dict and load_state_dict, got "
                f"{type(state).__name__}"
            )
        self._state = state

    def state_dict(self) -> Any:
        """Return the state as a plain object."""
        if isinstance(self._state, dict):
            return {key: _captured(value) for key, value in self._state.items()}
        return self._state.state_dict()

    def load_state_dict(self, saved: Any) -> None:
        """Give the script its state back; fill arrays of a dict in place if they fit.

        Raises ``CheckpointError``, which names the key.
        """
        if not isinstance(self._state, dict):
            self._state.load_state_dict(saved)
            return
        for key, value in saved.items():
            try:
                if not _put_into(self._state.get(key), value):
                    self._state[key] = value
            except (ValueError, TypeError, RuntimeError, KeyError) as error:
                raise CheckpointError(
                    f"state[{key!r}] does not take what was saved for it: {error}; pass a state "
                    "like the one that was saved, or another directory"
                ) from error


def _captured(value: Any) -> Any:
    if _keeps_its_state(value):
        return value.state_dict()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.get_state() if _is_generator(value) else value


def _put_into(old: Any, saved: Any) -> bool:
    """Put a saved value into an object that the script has; return whether it can."""
    if _keeps_its_state(old):
        old.load_state_dict(saved)
    elif isinstance(old, np.random.Generator):
        old.bit_generator.state = saved
    elif _is_generator(old):
        old.set_state(saved)
    elif _fits(old, saved):
        adapter_for(old).assign(saved, old)
    else:
        return False
    return True


def _keeps_its_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _is_generator(value: Any) -> bool:
    """Return whether it has the methods of ``torch.Generator`` and ``RandomState``."""
    return hasattr(value, "get_state") and hasattr(value, "set_state")


def _fits(old: Any, new: Any) -> bool:
    """Return whether both are arrays, of any library, of one shape and dtype."""
    try:
        mine, its = adapter_for(old), adapter_for(new)
    except ArgumentTypeError:
        return False
    is_same = mine.shape(old) == its.shape(new) and mine.dtype(old) == its.dtype(new)
    return is_same and mine.why_read_only(old) is None
