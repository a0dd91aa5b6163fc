"""The dtypes of the keys whose states are in a file: a line of its metadata.

The arrays of states do not tell them: a float16 and a bfloat16 key have the same ones, and those
of a float32 key are among theirs. Older files lack the line; of those, what the arrays tell is
checked. Nothing read is believed before it was checked. No I/O of its own. Read next:
``kvstore/saving.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvstore.errors import CheckpointError
from kvstore.keys import Key
from kvstore.optimizer.states import has_master
from kvstore.tensorfile import TensorReader

_DTYPES = "dtypes"
"""The name in the metadata: JSON, the name of each key's dtype."""


def dtypes_text(dtypes: Mapping[Key, np.dtype[Any]]) -> dict[str, str]:
    """The line for the metadata."""
    return {_DTYPES: json.dumps({str(key): dtype.name for key, dtype in dtypes.items()})}


def read_dtypes(file: TensorReader, path: object) -> dict[str, str]:
    """The names of the dtypes, by the names of keys. Raises ``CheckpointError``."""
    try:
        found: Any = json.loads(file.metadata.get(_DTYPES, "{}"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has malformed dtypes of keys: {error}") from error
    if type(found) is not dict or any(type(name) is not str for name in found.values()):
        raise CheckpointError(f"{path} has malformed dtypes of keys: they are no names by key")
    return found


def check_dtype(
    path: object,
    key: Key,
    dtype: np.dtype[Any],
    saved: Mapping[str, str],
    *,
    has_saved_master: bool,
) -> None:
    """Raise ``CheckpointError`` unless the states of a key are those of a key of ``dtype``."""
    found = saved.get(str(key), dtype.name)
    if str(key) not in saved and has_saved_master and not has_master(dtype):
        found = "float16 or bfloat16"
    if found != dtype.name:
        raise CheckpointError(
            f"key {key!r} was {found} when {path} was written and is {dtype.name} here: make it "
            "with that dtype before its states are loaded"
        )
