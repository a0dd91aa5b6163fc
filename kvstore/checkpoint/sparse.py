"""Row-sparse keys in files: their names, shapes and row ids.

Values and states of such a key are saved for the rows that are there only, sorted by id; the ids
are an array of the states file (``row-ids/KEY``, which no state can be called), the shapes a line
of its metadata. Nothing read is believed before it was checked. No I/O of its own. Read next:
``kvstore/checkpoint/values.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvstore.arrays.keys import Key, KeySpec
from kvstore.checkpoint.safetensors import TensorReader
from kvstore.errors import CheckpointError
from kvstore.sparse.ids import Ids, check_num_rows, is_increasing

SHAPES = "row_sparse"
"""The name in the metadata: JSON, the shape of each row-sparse key."""

_IDS = "row-ids/{}"


def stored_spec(spec: KeySpec, num_rows: int) -> KeySpec:
    """Shape and dtype of the rows of a key."""
    return KeySpec((num_rows, *spec.shape[1:]), spec.dtype)


def ids_name(key: Key) -> str:
    """The name of the array of ids."""
    return _IDS.format(key)


def shapes_text(shapes: Mapping[Key, tuple[int, ...]]) -> dict[str, str]:
    """The line for the metadata; nothing where there are no such keys."""
    return (
        {SHAPES: json.dumps({str(key): shape for key, shape in shapes.items()})} if shapes else {}
    )


def read_shapes(file: TensorReader, path: object) -> dict[str, tuple[int, ...]]:
    """The shapes of the row-sparse keys, by name. Raises ``CheckpointError``."""
    try:
        found: Any = json.loads(file.metadata.get(SHAPES, "{}"))
        shapes = {name: tuple(map(_checked_size, shape)) for name, shape in found.items()}
        for shape in shapes.values():
            check_num_rows(shape[0])
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise CheckpointError(f"{path} has malformed shapes of row-sparse keys: {error}") from error
    return shapes


def read_ids(file: TensorReader, path: object, name: str, shape: tuple[int, ...]) -> Ids:
    """The ids of a key's rows, sorted and in range. Raises ``CheckpointError``."""
    if ids_name(name) not in file:
        raise CheckpointError(f"{path} has no {ids_name(name)}, which row-sparse keys have")
    spec = file.spec(ids_name(name))
    if len(spec.shape) == 1 and spec.dtype == np.int64:
        ids: Ids = file.read(ids_name(name))
        if not len(ids) or (ids[0] >= 0 and int(ids[-1]) < shape[0] and is_increasing(ids)):
            return ids
    raise CheckpointError(f"{ids_name(name)} in {path} are not sorted ids below {shape[0]}")


def _checked_size(size: object) -> int:
    if type(size) is not int or size < 0:
        raise ValueError(f"expected a size, got {size!r}")
    return size
