"""Save and load a store's optimizer states.

A store is saved and loaded in pieces (a key, or a part of a key), so it can be larger than the
memory. A states file has named arrays (``safetensors.py``): ``STATE/KEY`` for each state of each
key, and ``count/KEY`` with a row (first element, updates) for each piece. For a row-sparse key it
has the stored rows, sorted by id, their ids (``row-ids/KEY``, which cannot be the name of a state),
and the key's shape in an entry of the metadata. Another entry has the dtypes of the keys, because
the arrays are the same for float16 and bfloat16 keys; older files lack it, and then only the arrays
are checked. Everything read is checked, and nothing is pickled. File I/O blocks the caller's
thread. Read next: ``directory.py``, which adds the values.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvstore.arrays.cpu.sums import Flat
from kvstore.arrays.keys import Key, KeySpec
from kvstore.checkpoint.atomic import checked_path, damaged
from kvstore.checkpoint.safetensors import TensorReader, TensorWriter
from kvstore.errors import CheckpointError, OptimizerNotSet
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.serialize import from_plain, to_plain
from kvstore.optimizer.states import MASTER, has_master, state_dtypes, state_names
from kvstore.sparse.array import RowSparseArray
from kvstore.sparse.ids import Ids, check_num_rows, is_increasing
from pslite.errors import PSError

FilePath: TypeAlias = str | os.PathLike[str]
HostValue: TypeAlias = np.ndarray[Any, Any] | RowSparseArray

_INT64 = np.dtype(np.int64)
_IDS = "row-ids/{}"
_DTYPES = "dtypes"
"""The name in the metadata: JSON, the name of each key's dtype."""
_SHAPES = "row_sparse"
"""The name in the metadata: JSON, the shape of each row-sparse key."""


def stored_spec(spec: KeySpec, num_rows: int) -> KeySpec:
    """Return the spec of an array with ``num_rows`` rows of a key."""
    return KeySpec((num_rows, *spec.shape[1:]), spec.dtype)


class Content(NamedTuple):
    """The data of one key that a store saves."""

    spec: KeySpec
    num_pieces: int
    rows: Ids | None = None
    """The sorted ids of a row-sparse key's stored rows, which its pieces have; None if dense."""

    @property
    def stored(self) -> KeySpec:
        """The shape and dtype of the written array."""
        return self.spec if self.rows is None else stored_spec(self.spec, len(self.rows))


class SavedPiece(NamedTuple):
    """Elements [start, start + len(values)) of a key, and their optimizer states."""

    key: Key
    start: int
    values: Flat | None
    """The values; None in a file of states only."""
    states: list[Flat]
    """Flat arrays for the same elements, in the order of ``optimizer.states.state_names``; without
    the master weights, if the file that was read lacks them."""
    num_updates: int
    """The number of updates so far."""


def _state_dtypes_of(
    contents: Mapping[Key, Content], optimizer: Optimizer | None
) -> dict[np.dtype[Any], list[np.dtype[Any]]]:
    """Return ``state_dtypes`` for each dtype of these keys."""
    dtypes = {content.spec.dtype for content in contents.values()}
    return {dtype: state_dtypes(optimizer, dtype) for dtype in dtypes}


# -- writing ------------------------------------------------------------------------------


class StatesWriter:
    """Writes pieces to one states file, in a ``with`` block of ``file``."""

    def __init__(
        self, path: Path, contents: Mapping[Key, Content], optimizer: Optimizer | None, dump: bool
    ) -> None:
        self._names = _names_of(contents, optimizer)
        self._num_written = dict.fromkeys(contents, 0)
        metadata = {"key_type": key_type_of(contents)}
        dtypes = {str(key): _name(each.spec.dtype) for key, each in contents.items()}
        metadata[_DTYPES] = json.dumps(dtypes)
        if optimizer is not None:
            metadata["optimizer_name"] = optimizer.name
            if dump:
                metadata["optimizer"] = json.dumps(to_plain(optimizer))
        rows = {key: each.rows for key, each in contents.items() if each.rows is not None}
        self._rows = rows
        if rows:
            metadata[_SHAPES] = json.dumps({str(key): contents[key].spec.shape for key in rows})
        arrays: dict[str, KeySpec] = {}
        dtypes_of = _state_dtypes_of(contents, optimizer)
        # In the order in which they will be written, as far as that is known.
        for key, content in contents.items():
            of_states = dtypes_of[content.spec.dtype]
            for name, dtype in zip(self._names[key], of_states, strict=True):
                arrays[f"{name}/{key}"] = KeySpec(content.stored.shape, dtype)
            arrays[f"count/{key}"] = KeySpec((content.num_pieces, 2), _INT64)
        for key, ids in rows.items():
            arrays[_IDS.format(key)] = KeySpec(ids.shape, _INT64)
        self.file = TensorWriter(path, arrays, metadata)

    def add(self, piece: SavedPiece) -> None:
        for name, state in zip(self._names[piece.key], piece.states, strict=True):
            self.file.write(f"{name}/{piece.key}", piece.start, state)
        row = self._num_written[piece.key]
        if row == 0 and piece.key in self._rows:
            self.file.write(_IDS.format(piece.key), 0, self._rows[piece.key])
        self._num_written[piece.key] = row + 1
        counted = np.array([piece.start, piece.num_updates], _INT64)
        self.file.write(f"count/{piece.key}", 2 * row, counted)


def _names_of(
    contents: Mapping[Key, Content], optimizer: Optimizer | None
) -> dict[Key, tuple[str, ...]]:
    """Return the names of each key's states in files; ``count`` is reserved there."""
    if optimizer is None:
        return dict.fromkeys(contents, ())
    dtypes = {content.spec.dtype for content in contents.values()}
    names_of = {dtype: state_names(optimizer, dtype) for dtype in dtypes}
    for names in (optimizer.state_names(), *names_of.values()):
        wrong = [name for name in names if not name.isidentifier() or name == "count"]
        if wrong or len(set(names)) != len(names):
            raise CheckpointError(
                f"cannot save the states of the optimizer {optimizer.name}: state_names() must "
                f"return different identifiers other than 'count' (and {MASTER!r} for float16 "
                f"and bfloat16 keys), got {optimizer.state_names()!r}"
            )
    return {key: names_of[content.spec.dtype] for key, content in contents.items()}


def write_states(
    path: FilePath,
    contents: Mapping[Key, Content],
    optimizer: Optimizer | None,
    pieces: Iterable[SavedPiece],
    *,
    dump_optimizer: bool,
) -> None:
    """Write a states file. Raises ``OptimizerNotSet``, ``CheckpointError``."""
    if optimizer is None:
        raise OptimizerNotSet(
            "there are no optimizer states to save, since no optimizer is set; call set_optimizer "
            "first"
        )
    writer = StatesWriter(checked_path(path), contents, optimizer, dump_optimizer)
    with writer.file:
        for piece in pieces:
            writer.add(piece)


def key_type_of(keys: Iterable[Key]) -> str:
    return "int" if all(isinstance(key, int) for key in keys) else "str"


# -- reading ------------------------------------------------------------------------------


class SavedStates(AbstractContextManager["SavedStates"]):
    """A states file that is open for reading. Raises ``CheckpointError``.

    It also raises for states of row-sparse keys, unless ``takes_rows``. ``specs`` has the shape and
    dtype of each key whose values can be read, too: in a states file of none.
    """

    def __init__(self, path: FilePath, *, takes_rows: bool = False) -> None:
        self.path = checked_path(path)
        self.specs: dict[Key, KeySpec] = {}
        self._file = TensorReader(path)
        try:
            self.optimizer: Optimizer | None = self._read("optimizer", "optimizer", _optimizer_of)
            """The optimizer, if the file includes it."""
            self._dtypes: dict[str, str] = self._read(_DTYPES, "dtypes of keys", _dtypes_of)
            self.row_shapes: dict[str, tuple[int, ...]] = self._read(
                _SHAPES, "shapes of row-sparse keys", _shapes_of
            )
            if self.row_shapes and not takes_rows:
                raise CheckpointError(
                    f"{path} has row-sparse keys ({', '.join(self.row_shapes)}), which only a "
                    "store can load"
                )
        except BaseException:
            self._file.close()
            raise
        self.optimizer_name = self._file.metadata.get("optimizer_name", "")
        """The registered name of the optimizer that made the states; "" for none."""
        self._counts: tuple[Key, list[list[int]]] | None = None

    def _read(self, name: str, what: str, made_of: Callable[[Any], Any]) -> Any:
        """Parse the metadata's JSON entry ``name`` and apply ``made_of`` to it (or None)."""
        try:
            return made_of(json.loads(self._file.metadata.get(name, "null")))
        except (PSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise CheckpointError(f"cannot load the {what} from {self.path}: {error}") from error

    def check(self, contents: Mapping[Key, Content], optimizer: Optimizer | None) -> None:
        """Check that the states are undamaged and fit ``optimizer`` and all keys.

        It reads all of them, so that a later error cannot leave a store half changed.
        """
        self._check_fit(contents, optimizer)
        self._file.verify()

    def _check_fit(self, contents: Mapping[Key, Content], optimizer: Optimizer | None) -> None:
        if optimizer is None:
            if self.optimizer_name:
                raise OptimizerNotSet(
                    f"{self.path} has states of the optimizer {self.optimizer_name}; call "
                    "set_optimizer first"
                )
            return
        if optimizer.name != self.optimizer_name:
            raise CheckpointError(
                f"{self.path} has states of the optimizer {self.optimizer_name or 'none'}, but "
                f"the store uses {optimizer.name}; set the same optimizer before you load"
            )
        dtypes_of = _state_dtypes_of(contents, optimizer)
        for key, content in contents.items():
            names = self._names_of(key, optimizer)
            has_saved_master = len(names) > len(optimizer.state_names())
            self._check_dtype(key, content.spec.dtype, has_saved_master=has_saved_master)
            spec = self._stored_spec(key, content)
            # The last dtype may be of master weights that the file lacks.
            dtypes = dtypes_of[content.spec.dtype]
            for name, dtype in zip(names, dtypes, strict=False):
                self._check_array(f"{name}/{key}", KeySpec(spec.shape, dtype))
            if f"count/{key}" not in self._file:
                raise CheckpointError(
                    f"{self.path} does not have key {key!r}; load a file of this model"
                )

    @property
    def digest(self) -> str:
        """A digest of the contents, which differs for different files."""
        return self._file.digest

    def rows_of(self, key: Key) -> Ids:
        """Return the ids of a row-sparse key's stored rows, sorted and in range.

        Raises ``CheckpointError``.
        """
        name, num_rows = _IDS.format(key), self.row_shapes[str(key)][0]
        spec = self._file.spec(name)
        if len(spec.shape) == 1 and spec.dtype == np.int64:
            ids: Ids = self._file.read(name)
            if not len(ids) or (ids[0] >= 0 and int(ids[-1]) < num_rows and is_increasing(ids)):
                return ids
        found = f"{spec.dtype} of shape {spec.shape}"
        raise damaged(self.path, f"{name} must be increasing ids below {num_rows}, found {found}")

    def check_kind(self, key: Key, content: Content) -> None:
        """Check that a key is dense or row-sparse in both the file and the store."""
        shape = self.row_shapes.get(str(key))
        if (content.rows is None) != (shape is None):
            kinds = ("dense", "row-sparse") if shape is None else ("row-sparse", "dense")
            raise CheckpointError(
                f"key {key!r} is {kinds[0]} in {self.path}, but {kinds[1]} in this store; "
                "init it as the file has it"
            )

    def _check_dtype(self, key: Key, dtype: np.dtype[Any], *, has_saved_master: bool) -> None:
        """Raise ``CheckpointError`` unless the states belong to a key of ``dtype``."""
        found = self._dtypes.get(str(key), _name(dtype))
        if str(key) not in self._dtypes and has_saved_master and not has_master(dtype):
            found = "float16 or bfloat16"
        if found != _name(dtype):
            raise CheckpointError(
                f"key {key!r} has dtype {found} in {self.path}, {dtype.name} in this store; "
                f"initialize it with dtype {found} before you load its states"
            )

    def _stored_spec(self, key: Key, content: Content) -> KeySpec:
        self.check_kind(key, content)
        shape = self.row_shapes.get(str(key))
        if shape is None:
            return content.spec
        if shape != content.spec.shape:
            raise CheckpointError(
                f"key {key!r} has shape {shape} in {self.path}, but {content.spec.shape} in this "
                "store; load states of the same model"
            )
        return stored_spec(content.spec, len(self.rows_of(key)))

    def _check_array(self, name: str, wanted: KeySpec) -> None:
        if name not in self._file:
            raise CheckpointError(
                f"{self.path} does not have {name}: it was saved with other parameters of the "
                "optimizer; set the same parameters before you load"
            )
        found = self._file.spec(name)
        if (found.shape, found.dtype) != tuple(wanted):
            raise CheckpointError(
                f"{name} in {self.path} has shape {found.shape} of {found.dtype}, expected "
                f"{wanted.shape} of {wanted.dtype}"
            )

    def missing(self, keys: Container[Key]) -> dict[Key, HostValue]:
        """Return zeros for the keys that the file has values of and ``keys`` lacks."""
        return {
            key: (RowSparseArray.zeros if str(key) in self.row_shapes else np.zeros)(*spec)
            for key, spec in self.specs.items()
            if key not in keys
        }

    def read(self, key: Key, start: int, stop: int, optimizer: Optimizer | None) -> SavedPiece:
        """Return some elements of a key that ``check`` has passed."""
        names = self._names_of(key, optimizer)
        states = [self._file.read(f"{name}/{key}", start, stop) for name in names]
        counts = self._counts_of(key)
        # Each saved piece has its own count; a piece with other borders gets its first element's.
        reached = bisect.bisect_right(counts, start, key=itemgetter(0))
        return SavedPiece(key, start, None, states, counts[reached - 1][1] if reached else 0)

    def _names_of(self, key: Key, optimizer: Optimizer | None) -> tuple[str, ...]:
        """Return the names of a key's states to read, with master weights if it has them."""
        names = () if optimizer is None else optimizer.state_names()
        has_master = optimizer is not None and f"{MASTER}/{key}" in self._file
        return (*names, MASTER) if has_master and MASTER not in names else names

    def _counts_of(self, key: Key) -> list[list[int]]:
        """Return a key's rows (first element, updates), sorted; cache them."""
        if self._counts is None or self._counts[0] != key:
            rows: list[list[int]] = self._file.read(f"count/{key}").reshape(-1, 2).tolist()
            self._counts = key, rows if len(rows) == 1 else sorted(rows)
        return self._counts[1]

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _optimizer_of(data: Any) -> Optimizer | None:
    return None if data is None else from_plain(data)


def _dtypes_of(data: Any) -> dict[str, str]:
    if data is None:
        return {}
    if type(data) is not dict or any(type(name) is not str for name in data.values()):
        raise ValueError(f"expected dtype names by key, got {data!r}")
    return data


def _shapes_of(data: Any) -> dict[str, tuple[int, ...]]:
    if data is None:
        return {}
    if type(data) is not dict:
        raise ValueError(f"expected shapes by key, got {data!r}")
    shapes = {name: tuple(shape) for name, shape in data.items()}
    for shape in shapes.values():
        if any(type(size) is not int or size < 0 for size in shape):
            raise ValueError(f"expected a shape, got {shape!r}")
        check_num_rows(shape[0])
    return shapes


@cache
def _name(dtype: np.dtype[Any]) -> str:
    return str(dtype.name)  # cached, since NumPy takes some microseconds to compute it
