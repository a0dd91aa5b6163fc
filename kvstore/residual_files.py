"""What compression still owes, in files beside those of values and optimizer states.

Each worker has residuals of its own, so each writes a file of its own, with one array for each
key and device. A job that goes on from saved states adds what is in it to its next pushes; without
the file (another number of workers, another machine) it owes nothing, which costs one round of
what a codec leaves out. Blocking file I/O, on the caller's thread. Read next:
``compression/residuals.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from kvstore.atomicfile import checked_path
from kvstore.compression import Compression, Residual, Residuals
from kvstore.dtypes import accumulation_dtype
from kvstore.errors import CheckpointError
from kvstore.keys import Key, KeySpec
from kvstore.saving import FilePath
from kvstore.tensorfile import TensorReader, TensorWriter


def path_in_checkpoint(directory: FilePath, rank: int) -> Path:
    """The file of a worker in a checkpoint."""
    return checked_path(directory) / f"residuals-{rank}.safetensors"


def path_beside_states(fname: FilePath, rank: int) -> Path:
    """The file of a worker that belongs to a file of optimizer states."""
    return Path(f"{checked_path(fname)}.residuals-{rank}")


class Owing(Protocol):
    """What compresses a store's values, and owes what it has left out."""

    def save(self, path: Path) -> None:
        """Write what is owed."""

    def load(self, path: Path) -> None:
        """Owe what is in this file, and nothing else."""


def save_owed(coding: Owing | None, path: Path) -> None:
    """Write what is owed; without compression no file of an earlier save stays.

    Raises ``CheckpointError``.
    """
    if coding is None:
        path.unlink(missing_ok=True)
    else:
        coding.save(path)


def load_owed(coding: Owing | None, path: Path) -> None:
    """Owe what is in this file, with compression. Raises ``CheckpointError``."""
    if coding is not None:
        coding.load(path)


def save_residuals(
    path: Path, compression: Compression, residuals: Residuals, num_workers: int
) -> None:
    """Write them, for a job of so many workers; removes a file of before where there are none.

    Raises ``CheckpointError``.
    """
    found = residuals.export()
    if not found:
        path.unlink(missing_ok=True)
        return
    is_int = all(isinstance(each.key, int) for each in found)
    metadata = _metadata(compression, num_workers, "int" if is_int else "str")
    specs = {_name(each): KeySpec(each.values.shape, each.values.dtype) for each in found}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path.parent} cannot be made: {error}") from error
    with TensorWriter(path, specs, metadata) as file:
        for each in found:
            file.write(_name(each), 0, each.values)


def remove_beyond(path_of: Callable[[int], Path], num_workers: int) -> None:
    """Remove the files of ranks that are no more, left behind by a job of more workers."""
    rank = num_workers
    while path_of(rank).exists():
        path_of(rank).unlink(missing_ok=True)
        rank += 1


def load_residuals(
    path: Path,
    compression: Compression,
    residuals: Residuals,
    specs: Mapping[Key, KeySpec],
    num_workers: int,
) -> None:
    """Take over what a file has for these keys; nothing is owed where there is no such file.

    What another compression or another number of workers has lost is left out as well. Raises
    ``CheckpointError``, and then nothing has changed.
    """
    found: list[Residual] = []
    if path.exists():
        with TensorReader(path) as file:
            key_type = file.metadata.get("key_type")
            if key_type is None:
                raise CheckpointError(
                    f"{path} is no file of residuals: its metadata have no key_type; remove it to "
                    "go on without what was owed"
                )
            if file.metadata == _metadata(compression, num_workers, key_type):
                found = [
                    each for name in file.names if _fits(each := _read(file, path, name), specs)
                ]
    residuals.restore(found)


def _metadata(compression: Compression, num_workers: int, key_type: str) -> dict[str, str]:
    return {
        "key_type": key_type,
        "compression": json.dumps(compression.plain()),
        "num_workers": str(num_workers),
    }


def _fits(residual: Residual, specs: Mapping[Key, KeySpec]) -> bool:
    spec = specs.get(residual.key)
    return (
        spec is not None
        and len(residual.values) == spec.num_elements
        and residual.values.dtype == accumulation_dtype(spec.dtype)
    )


def _name(residual: Residual) -> str:
    return f"{residual.sender}/{residual.key}"


def _read(file: TensorReader, path: Path, name: str) -> Residual:
    sender, _, key = name.partition("/")
    spec = file.spec(name)
    is_int = file.metadata.get("key_type") == "int"
    if not sender.isdecimal() or spec.dtype not in (np.float32, np.float64) or len(spec.shape) != 1:
        raise CheckpointError(f"{path} is no file of residuals: {name!r} is none")
    try:
        return Residual(int(key) if is_int else key, int(sender), file.read(name))
    except ValueError as error:
        raise CheckpointError(f"{path} has a malformed key: {error}") from error
