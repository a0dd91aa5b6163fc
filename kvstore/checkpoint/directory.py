"""Checkpoint directories: all values and optimizer states of a store.

``values-NAME.safetensors`` has an array ``KEY`` for each key, of a row-sparse one the rows that
are there; ``states-NAME.safetensors`` is a states file (``optimizer_states.py``);
``manifest.json`` names
both, with their sizes and the digests of their headers, which have the checksums of all values
(version 1 had no digests). It is written last, by rename. Each save writes files of new names and
removes the old ones after the manifest, so a save that is interrupted leaves the checkpoint before
it as it was, and a reader beside it finds the one or the other.

One save at a time writes into a directory: it holds the file ``.saving``, which is locked
(flock(2)) and lists the files that may have to be removed. A save that is killed leaves it, and
the next one does what is listed. No other file is ever removed, whatever its name. Blocking file
I/O, on the caller's thread. Read next: ``optimizer_states.py``.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.arrays.keys import Key, KeySpec
from kvstore.checkpoint.atomic import (
    ABANDONED_AFTER_S,
    checked_path,
    machine_name,
    read_json,
    remove_abandoned,
    write_json,
)
from kvstore.checkpoint.optimizer_states import (
    Content,
    FilePath,
    SavedPiece,
    SavedStates,
    StatesWriter,
    key_type_of,
    stored_spec,
)
from kvstore.checkpoint.safetensors import TensorReader, TensorWriter
from kvstore.errors import CheckpointError
from kvstore.optimizer.base import Optimizer

MANIFEST = "manifest.json"
CLAIM = ".saving"

_FORMAT = "kvstore checkpoint"
_VERSION = 2
_WITHOUT_DIGESTS = 1
"""A version that is read as well."""
_MAX_MANIFEST_BYTES = 1 << 20
_KINDS = ("values", "states")
_OWN_NAME = re.compile(r"(values|states)-[0-9a-f]{8}\.safetensors")
_MOST_RETRIES = 1000
"""A reader starts anew when another checkpoint came meanwhile; each time is some milliseconds."""


# -- writing ------------------------------------------------------------------------------


def write_checkpoint(
    directory: FilePath,
    contents: Mapping[Key, Content],
    optimizer: Optimizer | None,
    pieces: Iterable[SavedPiece],
) -> None:
    """Write a checkpoint into ``directory``, which is made if it is not there.

    Raises ``CheckpointError``, also while another save writes there.
    """
    directory = checked_path(directory)
    specs = {str(key): content.stored for key, content in contents.items()}
    if "__metadata__" in specs:
        raise CheckpointError(
            "the key '__metadata__' cannot be saved: the file format uses the name"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise CheckpointError(
            f"{directory}: it is a regular file, expected a directory or an unused name"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"cannot create the checkpoint directory {directory}: {error.strerror}; name one that "
            "you may write to"
        ) from error
    name = secrets.token_hex(4)
    files = {kind: f"{kind}-{name}.safetensors" for kind in _KINDS}
    with _claimed(directory, files.values()), ExitStack() as stack:
        metadata = {"key_type": key_type_of(contents)}
        values = stack.enter_context(TensorWriter(directory / files["values"], specs, metadata))
        states = StatesWriter(directory / files["states"], contents, optimizer, dump=True)
        stack.enter_context(states.file)
        for piece in pieces:
            if piece.values is not None:
                values.write(str(piece.key), piece.start, piece.values)
            states.add(piece)
        stack.close()
        manifest = {
            "format": _FORMAT,
            "version": _VERSION,
            "files": files,
            "sizes": {kind: (directory / file).stat().st_size for kind, file in files.items()},
            "digests": {"values": values.digest, "states": states.file.digest},
        }
        write_json(directory / MANIFEST, manifest)


@contextmanager
def _claimed(directory: Path, files: Iterable[str]) -> Iterator[None]:
    """Be the only save in the directory, which makes these ``files``.

    At the end, good or bad, those of them and of the checkpoint before are removed that the
    manifest does not name.
    """
    path = directory / CLAIM
    with ExitStack() as stack:
        try:
            claim, is_locked = _claim(path)
            stack.enter_context(claim)
            files = {*files, *(_named_by_manifest(directory) or ())}
            last, last_time = _holder(claim.read(_MAX_MANIFEST_BYTES)), _time_of(claim)
            claim.seek(0)
            claim.truncate()
            mine = {"host": socket.gethostname(), "pid": os.getpid(), "machine": machine_name()}
            claim.write(json.dumps({**mine, "files": sorted(files)}).encode())
            now = _time_of(claim)
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}") from error
        is_old = now - last_time > ABANDONED_AFTER_S
        if is_locked and (is_old or last.get("machine") == machine_name()):
            _sweep(directory, _files_in(last))
        remove_abandoned(directory, lambda name: _OWN_NAME.fullmatch(name) is not None, now)
        try:
            yield
        finally:
            if _sweep(directory, files):
                with suppress(OSError):
                    path.unlink()


def _claim(path: Path) -> tuple[FileIO, bool]:
    """The file ``path``, made if it is not there, and whether it is locked. Raises ``OSError``.

    Raises ``CheckpointError`` where another save has it.
    """
    while True:
        file = FileIO(path, "r+b", opener=_open_claim)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            with file:
                raise _taken(path, _holder(file.read(_MAX_MANIFEST_BYTES))) from None
        except OSError:
            return file, False  # a file system without locks
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                return file, True
        file.close()  # the save before removed it, before it was locked here


def _time_of(file: FileIO) -> float:
    return os.fstat(file.fileno()).st_mtime


def _open_claim(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _taken(path: Path, holder: dict[str, Any]) -> CheckpointError:
    process = "another process"
    if "pid" in holder:
        process = f"process {holder['pid']} on {holder.get('host')}"
    return CheckpointError(
        f"{path.parent} is being written by {process}: let one save at a time write there, or save "
        "into another directory"
    )


def _holder(content: bytes | None) -> dict[str, Any]:
    """What a claim says; empty for one that is being written."""
    try:
        holder = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return holder if type(holder) is dict else {}


def _files_in(holder: dict[str, Any]) -> list[str]:
    files = holder.get("files")
    return [name for name in files if type(name) is str] if type(files) is list else []


def _sweep(directory: Path, names: Iterable[str]) -> bool:
    """Remove files of these names but those that the manifest names; whether that was done."""
    named = _named_by_manifest(directory)
    if named is None:
        return False
    for name in set(names) - set(named):
        if _OWN_NAME.fullmatch(name):
            with suppress(OSError):
                (directory / name).unlink(missing_ok=True)
    return True


def _named_by_manifest(directory: Path) -> list[str] | None:
    """The files of the checkpoint that is there; None where the manifest cannot be read."""
    if not (directory / MANIFEST).exists():
        return []
    try:
        return [*_read_manifest(directory).files.values()]
    except CheckpointError:
        return None


# -- reading ------------------------------------------------------------------------------


class CheckpointReader(AbstractContextManager["CheckpointReader"]):
    """A checkpoint that is open for reading. Raises ``CheckpointError``.

    ``specs`` are shape and dtype of each key, ``states`` the states file.
    """

    def __init__(self, directory: FilePath) -> None:
        directory = checked_path(directory)
        manifest = _read_manifest(directory)
        for _ in range(_MOST_RETRIES):
            try:
                self._open(_files_of(directory, manifest), manifest.digests)
            except CheckpointError:
                # Another save may have put its files in the place of these.
                last, manifest = manifest, _read_manifest(directory)
                if manifest == last:
                    raise
            else:
                return
        raise CheckpointError(f"saves replaced {directory} faster than it could be read; try again")

    def _open(self, paths: Mapping[str, Path], digests: Mapping[str, Any] | None) -> None:
        with ExitStack() as stack:
            self._values = stack.enter_context(TensorReader(paths["values"]))
            states = SavedStates(paths["states"], takes_rows=True)
            self.states = stack.enter_context(states)
            found = {"values": self._values.digest, "states": states.digest}
            wanted = found if digests is None else digests
            for kind in _KINDS:
                if wanted.get(kind) != found[kind]:
                    raise CheckpointError(
                        f"{paths[kind]} is not the file that {MANIFEST} was written for: it is of "
                        "another save, or damaged; take an earlier checkpoint"
                    )
            is_int = self._values.metadata.get("key_type") == "int"
            key_spec = cache(KeySpec._make)  # one object for all keys of a shape and dtype
            try:
                self.specs: dict[Key, KeySpec] = {
                    (int(name) if is_int else name): key_spec(self._values.spec(name))
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
        """Whether these keys are in it, with these shapes and dtypes, and the values undamaged.

        All of them are read for that, so that a store is not changed by half.
        """
        for key, content in contents.items():
            spec = content.spec
            found = self.specs.get(key)
            if found != spec:
                has = "not in it" if found is None else f"{found.shape} of {found.dtype} in it"
                raise CheckpointError(
                    f"key {key!r} of the store is {spec.shape} of {spec.dtype}, and {has}"
                )
            self.states.check_kind(key, content)
        self._values.verify()

    def read(self, key: Key, start: int, stop: int, optimizer: Optimizer | None) -> SavedPiece:
        """Some elements of a key."""
        states, count = self.states.read(key, start, stop, optimizer)
        return SavedPiece(key, start, self._values.read(str(key), start, stop), states, count)

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class _Manifest(NamedTuple):
    """What the manifest of a checkpoint says of its two files, by their kinds."""

    files: dict[str, str]
    """Their names; they lie beside it."""
    sizes: dict[str, Any]
    digests: dict[str, Any] | None
    """None for a version without any."""


def _read_manifest(directory: Path) -> _Manifest:
    path = directory / MANIFEST
    if directory.is_dir() and not path.exists():
        raise CheckpointError(
            f"{directory} is not a checkpoint: it has no {MANIFEST}, which a save writes last; "
            "name the directory that was given to save_checkpoint"
        )
    found = read_json(path, _MAX_MANIFEST_BYTES)
    wrong = CheckpointError(f"{path} is not the manifest of a checkpoint")
    if type(found) is not dict or found.get("format") != _FORMAT:
        raise wrong
    version = found.get("version")
    if type(version) is not int or version not in (_WITHOUT_DIGESTS, _VERSION):
        raise CheckpointError(
            f"{path} has version {version!r}; this program reads versions {_WITHOUT_DIGESTS} and "
            f"{_VERSION}"
        )
    members = ("files", "sizes", "digests") if version == _VERSION else ("files", "sizes")
    if any(type(found.get(name)) is not dict for name in members):
        raise wrong
    files = {kind: found["files"].get(kind) for kind in _KINDS}
    for kind, name in files.items():
        if type(name) is not str or Path(name).name != name or not name.startswith(kind):
            raise wrong
    return _Manifest(files, found["sizes"], found["digests"] if version == _VERSION else None)


def _files_of(directory: Path, manifest: _Manifest) -> dict[str, Path]:
    """The two files that the manifest names, if they are there with the sizes that it has."""
    paths = {}
    for kind, name in manifest.files.items():
        path, expected = directory / name, manifest.sizes.get(kind)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{path} is missing ({error.strerror}), though {MANIFEST} names it; take an "
                "earlier checkpoint, or a copy of the file"
            ) from error
        if size != expected:
            raise CheckpointError(
                f"{path} is damaged: it has {size} bytes, expected {expected}; take an earlier "
                "checkpoint, or a copy of the file"
            )
        paths[kind] = path
    return paths
