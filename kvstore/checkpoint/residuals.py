"""Save and load compression residuals (error feedback).

Each worker has its own residuals and writes them to its own file, with one array for each key and
device. A job that resumes from saved states adds them to its next pushes. Without the file (another
number of workers, another machine) it starts without residuals and loses the part of one round that
the codec left out. Blocking file I/O, on the caller's thread. Read next:
``compression/residuals.py``.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.arrays.keys import Key, KeySpec
from kvstore.checkpoint.atomic import checked_path
from kvstore.checkpoint.optimizer_states import FilePath
from kvstore.checkpoint.safetensors import TensorReader, TensorWriter
from kvstore.compression import Compression, Residual, Residuals
from kvstore.errors import CheckpointError


def path_in_checkpoint(directory: FilePath, rank: int) -> Path:
    """Return the file of a worker in a checkpoint."""
    return checked_path(directory) / f"residuals-{rank}.safetensors"


def path_beside_states(fname: FilePath, rank: int) -> Path:
    """Return the file of a worker that belongs to a file of optimizer states."""
    return Path(f"{checked_path(fname)}.residuals-{rank}")


class StoreCompression(ABC):
    """The compression of one store on one worker, with its residuals."""

    def __init__(self, compression: Compression, num_workers: int = 1) -> None:
        self.compression = compression
        self.num_workers = num_workers
        self.residuals = Residuals()
        # Guards the residuals and their arrays: two threads may push the same key.
        self.lock = threading.Lock()

    @abstractmethod
    def specs(self) -> Mapping[Key, KeySpec]:
        """Return the current keys with their specs."""

    def metadata(self, key_type: str) -> dict[str, str]:
        """Return the settings that must be the same when the residuals are loaded."""
        return {
            "key_type": key_type,
            "compression": json.dumps(self.compression.plain()),
            "num_workers": str(self.num_workers),
        }

    def restore_residuals(self, saved: Iterable[Residual]) -> None:
        """Load the residuals that fit the current keys in size and dtype; drop all others."""
        wanted = {
            key: (spec.num_elements, accumulation_dtype(spec.dtype))
            for key, spec in self.specs().items()
        }
        with self.lock:
            self.residuals.restore(
                each
                for each in saved
                if wanted.get(each.key) == (len(each.values), each.values.dtype)
            )


def save_residuals(coding: StoreCompression | None, path: Path) -> None:
    """Write the residuals; without any, remove the file of an earlier save.

    Raises ``CheckpointError``.
    """
    found: list[Residual] = []
    if coding is not None:
        with coding.lock:
            found = coding.residuals.export()
    if coding is None or not found:
        _remove(path)
        return
    is_int = all(isinstance(each.key, int) for each in found)
    metadata = coding.metadata("int" if is_int else "str")
    specs = {_name(each): KeySpec(each.values.shape, each.values.dtype) for each in found}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot create {path.parent}: {error}") from error
    with TensorWriter(path, specs, metadata) as file:
        for each in found:
            file.write(_name(each), 0, each.values)


def remove_beyond(path_of: Callable[[int], Path], num_workers: int) -> None:
    """Remove the files that a larger job left: those of ranks from ``num_workers`` on."""
    rank = num_workers
    while path_of(rank).exists():
        _remove(path_of(rank))
        rank += 1


def _remove(path: Path) -> None:
    """Remove a file if it is a file of residuals."""
    if not path.exists():
        return
    try:
        with TensorReader(path) as file:
            is_ours = {"key_type", "compression", "num_workers"} <= file.metadata.keys()
    except CheckpointError:
        return
    if is_ours:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot remove {path}: {error.strerror}") from error


def read_residuals(coding: StoreCompression | None, path: Path) -> Callable[[], None]:
    """Read and check the file; return a function that loads it into the store.

    Nothing changes before that call, so a damaged file does no harm. Without compression the file
    is not read. Raises ``CheckpointError``.
    """
    if coding is None:
        return lambda: None
    return partial(coding.restore_residuals, _read_all(coding, path))


def _read_all(coding: StoreCompression, path: Path) -> list[Residual]:
    """Read a file; return nothing if it is missing or does not match the job.

    It does not match if its compression or number of workers differs.
    """
    if not path.exists():
        return []
    with TensorReader(path) as file:
        key_type = file.metadata.get("key_type")
        if key_type is None:
            raise CheckpointError(
                f"{path} is not a file of residuals: its metadata do not have key_type; remove "
                "the file to continue without it"
            )
        if file.metadata != coding.metadata(key_type):
            return []
        return [_read(file, path, name) for name in file.names]


def _name(residual: Residual) -> str:
    return f"{residual.sender}/{residual.key}"


def _read(file: TensorReader, path: Path, name: str) -> Residual:
    sender, _, key = name.partition("/")
    spec = file.spec(name)
    is_int = file.metadata.get("key_type") == "int"
    if not sender.isdecimal() or spec.dtype not in (np.float32, np.float64) or len(spec.shape) != 1:
        raise CheckpointError(f"{path} is not a file of residuals: unexpected entry {name!r}")
    try:
        return Residual(int(key) if is_int else key, int(sender), file.read(name))
    except ValueError as error:
        raise CheckpointError(
            f"{path} must have integer keys: {error}; load an earlier checkpoint"
        ) from error
