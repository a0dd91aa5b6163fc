"""Read and write the checkpoints of ``kv.steps``.

``kvstore-step-00000120`` is a checkpoint of the store (``directory.py``) after 120 steps. It also
has ``worker-RANK.safetensors`` for each worker with a state of its own: the arrays and the tree of
an object (``protocol/objects.py``). ``latest.json`` names the last complete one. It is replaced by
rename, after everything else was written; then the one before is removed, and nothing else. So a
training that is killed at any moment finds a complete checkpoint, the last or the one before.

Blocking file I/O, on the caller's thread. Read next: ``stores/steps.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays.torch import is_tensor, tensor_of
from kvstore.checkpoint.atomic import damaged, read_json, write_json
from kvstore.checkpoint.header import TensorSpec
from kvstore.checkpoint.safetensors import TensorReader, TensorWriter
from kvstore.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from kvstore.protocol.objects import pack_object, unpack_object
from pslite.errors import ProtocolError

LATEST = "latest.json"

_FORMAT = "kvstore steps"
_VERSION = 1
_TREE, _ARRAYS = "tree", "arrays"
_TENSOR = "torch.Tensor"
_BYTE = np.dtype(np.uint8)


class SavedSteps(NamedTuple):
    """How far a training had come when its last checkpoint was complete."""

    num_steps: int
    num_workers: int
    has_states: bool
    """Whether each worker has saved a state of its own."""


def path_after(directory: Path, num_steps: int) -> Path:
    """Return the checkpoint after ``num_steps`` steps."""
    return directory / f"kvstore-step-{num_steps:08}"


def make_directory(directory: Path) -> None:
    """Create a directory unless it is there. Raises ``CheckpointError``."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot create {directory}: {error.strerror}; choose a directory that you can write to"
        ) from error


def read_progress(directory: Path) -> SavedSteps | None:
    """Return the progress in ``directory``; None if no checkpoint was completed there.

    Raises ``CheckpointError`` if the file is damaged.
    """
    path = directory / LATEST
    try:
        found = read_json(path)
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    expected = {"format", "version", *SavedSteps._fields}
    if not isinstance(found, dict) or found.keys() != expected or found["format"] != _FORMAT:
        raise damaged(path, f"expected the names {', '.join(sorted(expected))}")
    if found["version"] != _VERSION:
        raise CheckpointError(
            f"{path} has version {found['version']}, expected {_VERSION}; use the version of this "
            "package that wrote it"
        )
    numbers = [found["num_steps"], found["num_workers"]]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise damaged(path, f"expected numbers of at least 0, found {numbers}")
    return SavedSteps(numbers[0], numbers[1], found["has_states"] is True)


def complete(directory: Path, progress: SavedSteps) -> None:
    """Make a checkpoint the last one, and remove the one before.

    Raises ``CheckpointError`` if a worker's state is missing.
    """
    latest = path_after(directory, progress.num_steps)
    ranks = range(progress.num_workers) if progress.has_states else ()
    missing = [rank for rank in ranks if not _state_path(latest, rank).exists()]
    if missing:
        names = ", ".join(map(str, missing))
        raise CheckpointError(
            f"{latest} must have the states of all workers, but those of worker {names} are "
            "missing; pass a state on all workers, and a directory that all their machines share"
        )
    earlier = read_progress(directory)
    write_json(directory / LATEST, {"format": _FORMAT, "version": _VERSION, **progress._asdict()})
    if earlier is not None and earlier.num_steps != progress.num_steps:
        import shutil  # not at the start of every process

        shutil.rmtree(path_after(directory, earlier.num_steps), ignore_errors=True)


def pack_state(state: Any) -> tuple[bytes, list[Any]]:
    """Return a worker's state as the tree and the arrays of ``pack_object``.

    Raises its errors, with the key if the state is a dict.
    """
    try:
        return pack_object(_with_marks(state))
    except (ArgumentTypeError, ArgumentValueError):
        for key, value in state.items() if isinstance(state, dict) else ():
            try:
                pack_object(_with_marks(value))
            except (ArgumentTypeError, ArgumentValueError) as error:
                raise type(error)(f"state[{key!r}] cannot be saved: {error}") from None
        raise


def state_to_bytes(state: object) -> bytes:
    """Return a worker's state, an object as for ``pack_object``, as one text of bytes."""
    tree, arrays = pack_state(state)
    return b"".join([len(tree).to_bytes(8, "little"), tree, *(bytes(each) for each in arrays)])


def state_from_bytes(data: bytes) -> Any:
    """Return what ``state_to_bytes`` got. Raises ``ProtocolError``."""
    stop = 8 + int.from_bytes(data[:8], "little")
    memory = np.frombuffer(data, np.uint8)[stop:].copy()
    return _without_marks(unpack_object(data[8:stop], memory))


def write_state(checkpoint: Path, rank: int, state: object) -> None:
    """Write the state of a worker, an object as for ``pack_object``.

    Raises ``CheckpointError``, or an error of ``pack_object``.
    """
    tree, arrays = pack_state(state)
    path = _state_path(checkpoint, rank)
    make_directory(checkpoint)
    num_bytes = sum(array.size for array in arrays)
    specs = {_TREE: TensorSpec((len(tree),), _BYTE), _ARRAYS: TensorSpec((num_bytes,), _BYTE)}
    with TensorWriter(path, specs, {"format": _FORMAT}) as file:
        file.write(_TREE, 0, np.frombuffer(tree, np.uint8))
        at = 0
        for array in arrays:
            file.write(_ARRAYS, at, array)
            at += array.size


def read_state(checkpoint: Path, rank: int) -> Any:
    """Return the state of a worker.

    PyTorch's tensors are tensors again, on the CPU; all other arrays are NumPy arrays. Raises
    ``CheckpointError``.
    """
    path = _state_path(checkpoint, rank)
    if not path.exists():
        raise CheckpointError(
            f"{path} is missing; pass a directory that the machines of all workers share"
        )
    with TensorReader(path) as file:
        if file.metadata.get("format") != _FORMAT or not {_TREE, _ARRAYS} <= {*file.names}:
            raise damaged(path, "it is not the state of a worker")
        tree, memory = file.read(_TREE), file.read(_ARRAYS)
    try:
        return _without_marks(unpack_object(tree.tobytes(), memory))
    except ProtocolError as error:
        raise damaged(path, str(error)) from error


def _with_marks(state: Any) -> Any:
    """Return the state with ``{"torch.Tensor": tensor}`` in place of each tensor."""
    if isinstance(state, dict):
        return {key: _with_marks(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return (list if isinstance(state, list) else tuple)(map(_with_marks, state))
    return {_TENSOR: state} if is_tensor(state) else state


def _without_marks(state: Any) -> Any:
    if isinstance(state, dict):
        if state.keys() == {_TENSOR}:
            return tensor_of(state[_TENSOR])
        return {key: _without_marks(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(_without_marks, state))
    return state


def _state_path(checkpoint: Path, rank: int) -> Path:
    return checkpoint / f"worker-{rank}.safetensors"
