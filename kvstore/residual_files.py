"""What compression still owes, in files beside those of values and optimizer states.

Each worker has residuals of its own, so each writes a file of its own, with one array for each
key and device. A job that goes on from saved states adds what is in it to its next pushes; without
the file (another number of workers, another machine) it owes nothing, which costs one round of
what a codec leaves out. Blocking file I/O, on the caller's thread. Read next:
``compression/residuals.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvstore.compression import Compression, Residual, Residuals
from kvstore.errors import CheckpointError
from kvstore.keys import Key, KeySpec
from kvstore.saving import FilePath
from kvstore.tensorfile import TensorReader, TensorWriter


def path_in_checkpoint(directory: FilePath, rank: int) -> Path:
    """The file of a worker in a checkpoint."""
    return Path(directory) / f"residuals-{rank}.safetensors"


def path_beside_states(fname: FilePath, rank: int) -> Path:
    """The file of a worker that belongs to a file of optimizer states."""
    return Path(f"{fname}.residuals-{rank}")


def save_residuals(path: Path, compression: Compression, residuals: Residuals) -> None:
    """Write them; removes a file of before where there are none. Raises ``CheckpointError``."""
    found = residuals.export()
    if not found:
        path.unlink(missing_ok=True)
        return
    is_int = all(isinstance(each.key, int) for each in found)
    metadata = {
        "key_type": "int" if is_int else "str",
        "compression": json.dumps(compression.plain()),
    }
    specs = {_name(each): KeySpec(each.values.shape, each.values.dtype) for each in found}
    path.parent.mkdir(parents=True, exist_ok=True)
    with TensorWriter(path, specs, metadata) as file:
        for each in found:
            file.write(_name(each), 0, each.values)


def load_residuals(
    path: Path,
    compression: Compression,
    residuals: Residuals,
    specs: Mapping[Key, KeySpec],
) -> None:
    """Take over what a file has for these keys; nothing is owed where there is no such file.

    What another compression has lost is left out as well. Raises ``CheckpointError``, and then
    nothing has changed.
    """
    found: list[Residual] = []
    if path.exists():
        with TensorReader(path) as file:
            if file.metadata.get("compression") == json.dumps(compression.plain()):
                found = [
                    each
                    for name in file.names
                    if (each := _read(file, path, name)).key in specs
                    and len(each.values) == specs[each.key].num_elements
                ]
    residuals.restore(found)


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
