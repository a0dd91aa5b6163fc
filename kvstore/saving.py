"""Values and optimizer states of a store in files, and back.

What a store holds passes through here in pieces (a key, or a part of one), so a store that is
larger than the memory can be saved. Two kinds of files of named arrays (``tensorfile.py``):

* states: an array ``STATE/KEY`` for each state of each key, and ``count/KEY`` with a row
  (first element, updates) for each piece; what ``save_optimizer_states`` writes.
* values: an array ``KEY`` for each key.

Of a row-sparse key both have the rows that are there (``sparse/files.py``).

A checkpoint is a directory with one of each and ``manifest.json``, which names them and is
written last, by rename. Each save writes files of new names and removes the old ones after
the manifest, so a save that is interrupted leaves the checkpoint before it as it was.
Blocking file I/O, on the caller's thread. Never pickle. Read next: ``tensorfile.py``.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvstore.aggregate import Flat
from kvstore.atomicfile import checked_path
from kvstore.errors import CheckpointError, OptimizerNotSet
from kvstore.keys import Key, KeySpec
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.plain import from_plain, to_plain
from kvstore.optimizer.states import MASTER, create_state, state_names
from kvstore.saved_dtypes import check_dtype, dtypes_text, read_dtypes
from kvstore.sparse.files import ids_name, read_ids, read_shapes, shapes_text, stored_spec
from kvstore.sparse.ids import Ids
from kvstore.tensorfile import TensorReader, TensorWriter, read_json, write_json
from pslite.errors import PSError

FilePath: TypeAlias = str | os.PathLike[str]

MANIFEST = "manifest.json"
_FORMAT = "kvstore checkpoint"
_VERSION = 1
_MAX_MANIFEST_BYTES = 1 << 20
_INT64 = np.dtype(np.int64)


class Content(NamedTuple):
    """What a store will hand over of one key."""

    spec: KeySpec
    num_pieces: int
    rows: Ids | None = None
    """Of a row-sparse key: the sorted ids of the rows that are there. Its pieces have these."""

    @property
    def stored(self) -> KeySpec:
        """Shape and dtype of what is written."""
        return self.spec if self.rows is None else stored_spec(self.spec, len(self.rows))


class Piece(NamedTuple):
    """Elements [start, start + len(values)) of a key, and what the optimizer keeps for them."""

    key: Key
    start: int
    values: Flat | None
    """None where only the states are meant."""
    states: list[Flat]
    """Flat, as long as ``values``, in the order of ``optimizer.states.state_names``. Read from a
    file that has no masters, they end before the master."""
    num_updates: int
    """So many so far."""


def state_dtypes(optimizer: Optimizer | None, dtype: np.dtype[Any]) -> list[np.dtype[Any]]:
    """The dtypes of the states that an optimizer keeps for values of ``dtype``."""
    if optimizer is None:
        return []
    return [array.dtype for array in create_state(optimizer, np.zeros(1, dtype))]


# -- writing ------------------------------------------------------------------------------


class _StatesWriter:
    """Puts pieces into one states file."""

    def __init__(
        self, path: Path, contents: Mapping[Key, Content], optimizer: Optimizer | None, dump: bool
    ) -> None:
        self._names = _names_of(contents, optimizer)
        self._num_written = dict.fromkeys(contents, 0)
        metadata = {"key_type": _key_type(contents)}
        metadata |= dtypes_text({key: each.spec.dtype for key, each in contents.items()})
        if optimizer is not None:
            metadata["optimizer_name"] = optimizer.name
            if dump:
                metadata["optimizer"] = json.dumps(to_plain(optimizer))
        rows = {key: each.rows for key, each in contents.items() if each.rows is not None}
        metadata |= shapes_text({key: contents[key].spec.shape for key in rows})
        arrays: dict[str, KeySpec] = {}
        for key, content in contents.items():
            arrays[f"count/{key}"] = KeySpec((content.num_pieces, 2), _INT64)
            dtypes = state_dtypes(optimizer, content.spec.dtype)
            for name, dtype in zip(self._names[key], dtypes, strict=True):
                arrays[f"{name}/{key}"] = KeySpec(content.stored.shape, dtype)
        for key, ids in rows.items():
            arrays[ids_name(key)] = KeySpec(ids.shape, _INT64)
        self.file = TensorWriter(path, arrays, metadata)
        for key, ids in rows.items():
            self.file.write(ids_name(key), 0, ids)

    def add(self, piece: Piece) -> None:
        for name, state in zip(self._names[piece.key], piece.states, strict=True):
            self.file.write(f"{name}/{piece.key}", piece.start, state)
        row = self._num_written[piece.key]
        self._num_written[piece.key] = row + 1
        counted = np.array([piece.start, piece.num_updates], _INT64)
        self.file.write(f"count/{piece.key}", 2 * row, counted)


def _names_of(
    contents: Mapping[Key, Content], optimizer: Optimizer | None
) -> dict[Key, tuple[str, ...]]:
    """The names of each key's states, which become names in files; ``count`` is taken there."""
    if optimizer is None:
        return dict.fromkeys(contents, ())
    dtypes = {content.spec.dtype for content in contents.values()}
    names_of = {dtype: state_names(optimizer, dtype) for dtype in dtypes}
    for names in (optimizer.state_names(), *names_of.values()):
        wrong = [name for name in names if not name.isidentifier() or name == "count"]
        if wrong or len(set(names)) != len(names):
            raise CheckpointError(
                f"the states of the optimizer {optimizer.name} cannot be saved: state_names() "
                f"gives {optimizer.state_names()!r}; they must be different identifiers other than "
                f"'count', and for float16 and bfloat16 keys other than {MASTER!r}"
            )
    return {key: names_of[content.spec.dtype] for key, content in contents.items()}


def write_states(
    path: FilePath,
    contents: Mapping[Key, Content],
    optimizer: Optimizer | None,
    pieces: Iterable[Piece],
    *,
    dump_optimizer: bool,
) -> None:
    """Write a states file. Raises ``OptimizerNotSet``, ``CheckpointError``."""
    if optimizer is None:
        raise OptimizerNotSet("there are no optimizer states to save: no optimizer is set")
    writer = _StatesWriter(checked_path(path), contents, optimizer, dump_optimizer)
    with writer.file:
        for piece in pieces:
            writer.add(piece)


def write_checkpoint(
    directory: FilePath,
    contents: Mapping[Key, Content],
    optimizer: Optimizer | None,
    pieces: Iterable[Piece],
) -> None:
    """Write a checkpoint into ``directory``, which is made if it is not there."""
    directory = checked_path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be made: {error}") from error
    name = secrets.token_hex(4)
    files = {"values": f"values-{name}.safetensors", "states": f"states-{name}.safetensors"}
    specs = {str(key): content.stored for key, content in contents.items()}
    if "__metadata__" in specs:
        raise CheckpointError(
            "the key '__metadata__' cannot be saved: the file format uses the name"
        )
    metadata = {"key_type": _key_type(contents)}
    with ExitStack() as stack:
        values = stack.enter_context(TensorWriter(directory / files["values"], specs, metadata))
        states = _StatesWriter(directory / files["states"], contents, optimizer, dump=True)
        stack.enter_context(states.file)
        for piece in pieces:
            if piece.values is not None:
                values.write(str(piece.key), piece.start, piece.values)
            states.add(piece)
    sizes = {kind: (directory / file).stat().st_size for kind, file in files.items()}
    manifest = {"format": _FORMAT, "version": _VERSION, "files": files, "sizes": sizes}
    write_json(directory / MANIFEST, manifest)
    for pattern in ("values-*.safetensors", "states-*.safetensors"):
        for path in directory.glob(pattern):
            if path.name not in files.values():
                path.unlink(missing_ok=True)


def _key_type(keys: Iterable[Key]) -> str:
    return "int" if all(isinstance(key, int) for key in keys) else "str"


# -- reading ------------------------------------------------------------------------------


class SavedStates:
    """A states file that is open for reading. Raises ``CheckpointError``.

    Without ``takes_rows``, also for a file with states of row-sparse keys.
    """

    def __init__(self, path: FilePath, *, takes_rows: bool = False) -> None:
        self.path = checked_path(path)
        self._file = TensorReader(path)
        try:
            self.optimizer = self._read_optimizer()
            self._dtypes = read_dtypes(self._file, path)
            self.row_shapes = read_shapes(self._file, path)
            if self.row_shapes and not takes_rows:
                raise CheckpointError(
                    f"{path} has row-sparse keys ({', '.join(self.row_shapes)}), which only "
                    "stores take; load it there"
                )
        except BaseException:
            self._file.close()
            raise
        self.optimizer_name = self._file.metadata.get("optimizer_name", "")
        """The registered name of the optimizer whose states these are; "" for none."""
        self._counts: tuple[Key, np.ndarray[Any, np.dtype[np.int64]]] | None = None

    def _read_optimizer(self) -> Optimizer | None:
        """The optimizer itself, where the file holds it."""
        text = self._file.metadata.get("optimizer")
        if text is None:
            return None
        try:
            return from_plain(json.loads(text))
        except (PSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"the optimizer in {self.path} is of no use: {error}") from error

    def check(self, contents: Mapping[Key, Content], optimizer: Optimizer | None) -> None:
        """Whether these are the states that ``optimizer`` keeps for all of these keys."""
        if optimizer is None:
            if self.optimizer_name:
                raise OptimizerNotSet(
                    f"{self.path} has states of the optimizer {self.optimizer_name}: set it first"
                )
            return
        if optimizer.name != self.optimizer_name:
            raise CheckpointError(
                f"{self.path} has states of the optimizer {self.optimizer_name or 'none'}, the "
                f"store uses {optimizer.name}"
            )
        for key, content in contents.items():
            names = self._names_of(key, optimizer)
            has_saved_master = len(names) > len(optimizer.state_names())
            check_dtype(
                self.path,
                key,
                content.spec.dtype,
                self._dtypes,
                has_saved_master=has_saved_master,
            )
            spec = self._stored_spec(key, content)
            # The last dtype may be that of a master which the file lacks.
            dtypes = state_dtypes(optimizer, spec.dtype)
            for name, dtype in zip(names, dtypes, strict=False):
                self._check_array(f"{name}/{key}", KeySpec(spec.shape, dtype))
            if f"count/{key}" not in self._file.names:
                raise CheckpointError(f"{self.path} has nothing of key {key!r}")

    def rows_of(self, key: Key) -> Ids:
        """The rows of a row-sparse key, sorted. Raises ``CheckpointError``."""
        return read_ids(self._file, self.path, str(key), self.row_shapes[str(key)])

    def check_kind(self, key: Key, content: Content) -> None:
        """Whether a key is row-sparse here and there, or dense."""
        shape = self.row_shapes.get(str(key))
        if (content.rows is None) != (shape is None):
            kinds = ("dense", "row-sparse") if shape is None else ("row-sparse", "dense")
            raise CheckpointError(f"key {key!r} is {kinds[0]} in {self.path}, {kinds[1]} here")

    def _stored_spec(self, key: Key, content: Content) -> KeySpec:
        self.check_kind(key, content)
        shape = self.row_shapes.get(str(key))
        if shape is None:
            return content.spec
        if shape != content.spec.shape:
            raise CheckpointError(
                f"key {key!r} has shape {shape} in {self.path}, {content.spec.shape} here"
            )
        return stored_spec(content.spec, len(self.rows_of(key)))

    def _check_array(self, name: str, wanted: KeySpec) -> None:
        if name not in self._file.names:
            raise CheckpointError(
                f"{self.path} has no {name}: the optimizer kept other states when it was written"
            )
        found = self._file.spec(name)
        if (found.shape, found.dtype) != tuple(wanted):
            raise CheckpointError(
                f"{name} in {self.path} has shape {found.shape} of {found.dtype}, the store needs "
                f"{wanted.shape} of {wanted.dtype}"
            )

    def read(
        self, key: Key, start: int, stop: int, optimizer: Optimizer | None
    ) -> tuple[list[Flat], int]:
        """States and update count of some elements of a key that ``check`` has passed."""
        names = self._names_of(key, optimizer)
        states = [self._file.read(f"{name}/{key}", start, stop) for name in names]
        counts = self._counts_of(key)
        # Pieces cut as they were have their own count; else that of the first element.
        reached = int(np.searchsorted(counts[:, 0], start, side="right"))
        return states, int(counts[reached - 1, 1]) if reached else 0

    def _names_of(self, key: Key, optimizer: Optimizer | None) -> tuple[str, ...]:
        """The states of a key that are wanted: with the master if there is one."""
        names = () if optimizer is None else optimizer.state_names()
        has_master = optimizer is not None and f"{MASTER}/{key}" in self._file.names
        return (*names, MASTER) if has_master and MASTER not in names else names

    def _counts_of(self, key: Key) -> np.ndarray[Any, np.dtype[np.int64]]:
        """A key's rows (first element, updates), sorted; kept for its next piece."""
        if self._counts is None or self._counts[0] != key:
            counts = self._file.read(f"count/{key}").reshape(-1, 2)
            self._counts = key, counts[np.argsort(counts[:, 0], kind="stable")]
        return self._counts[1]

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()

    def __enter__(self) -> SavedStates:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Checkpoint:
    """A checkpoint that is open for reading. Raises ``CheckpointError``.

    ``specs`` are shape and dtype of each key, ``states`` the states file.
    """

    def __init__(self, directory: FilePath) -> None:
        directory = checked_path(directory)
        manifest = read_json(directory / MANIFEST, _MAX_MANIFEST_BYTES)
        paths = _files_of(directory, manifest)
        with ExitStack() as stack:
            self._values = stack.enter_context(TensorReader(paths["values"]))
            states = SavedStates(paths["states"], takes_rows=True)
            self.states = stack.enter_context(states)
            is_int = self._values.metadata.get("key_type") == "int"
            try:
                self.specs: dict[Key, KeySpec] = {
                    (int(name) if is_int else name): KeySpec(*self._values.spec(name))
                    for name in self._values.names
                }
            except ValueError as error:
                raise CheckpointError(f"{paths['values']} has a malformed key: {error}") from error
            self._take_whole_shapes()
            self._stack = stack.pop_all()

    def is_row_sparse(self, key: Key) -> bool:
        """Whether the key was row-sparse."""
        return str(key) in self.states.row_shapes

    def _take_whole_shapes(self) -> None:
        """Let ``specs`` speak of all rows, where the file has some."""
        for key, spec in self.specs.items():
            shape = self.states.row_shapes.get(str(key))
            if shape is None:
                continue
            whole = KeySpec(shape, spec.dtype)
            if spec != stored_spec(whole, len(self.states.rows_of(key))):
                raise CheckpointError(
                    f"key {key!r} has values of shape {spec.shape} in {self.states.path.parent}, "
                    "which do not fit the ids of its rows"
                )
            self.specs[key] = whole

    def check(self, contents: Mapping[Key, Content]) -> None:
        """Whether these keys are in it, with these shapes and dtypes."""
        for key, content in contents.items():
            spec = content.spec
            found = self.specs.get(key)
            if found != spec:
                has = "not in it" if found is None else f"{found.shape} of {found.dtype} in it"
                raise CheckpointError(
                    f"key {key!r} of the store is {spec.shape} of {spec.dtype}, and {has}"
                )
            self.states.check_kind(key, content)

    def read(self, key: Key, start: int, stop: int, optimizer: Optimizer | None) -> Piece:
        """Some elements of a key."""
        states, count = self.states.read(key, start, stop, optimizer)
        return Piece(key, start, self._values.read(str(key), start, stop), states, count)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _files_of(directory: Path, manifest: Any) -> dict[str, Path]:
    """The two files that the manifest names, which must lie beside it."""
    wrong = CheckpointError(f"{directory / MANIFEST} is not the manifest of a checkpoint")
    if type(manifest) is not dict or manifest.get("format") != _FORMAT:
        raise wrong
    if manifest.get("version") != _VERSION:
        raise CheckpointError(
            f"{directory / MANIFEST} has version {manifest.get('version')!r}; this program reads "
            f"version {_VERSION}"
        )
    files, sizes = manifest.get("files"), manifest.get("sizes")
    if type(files) is not dict or type(sizes) is not dict:
        raise wrong
    paths = {}
    for kind in ("values", "states"):
        name = files.get(kind)
        if type(name) is not str or Path(name).name != name or not name.startswith(kind):
            raise wrong
        paths[kind] = directory / name
        try:
            size = paths[kind].stat().st_size
        except OSError as error:
            raise CheckpointError(f"{paths[kind]} is missing: {error}") from error
        if size != sizes.get(kind):
            raise CheckpointError(f"{paths[kind]} has {size} bytes, not {sizes.get(kind)}")
    return paths
