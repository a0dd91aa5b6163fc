"""Checkpoint directories: all values and optimizer states of a store.

``values-NAME.safetensors`` has an array ``KEY`` for each key, with the stored rows if it is
row-sparse. ``states-NAME.safetensors`` is a states file (``optimizer_states.py``).
``manifest.json`` has the names and sizes of both, and the digests of their headers, which include
the checksums of all values (version 1 had no digests). It is written last, by rename. Each save
writes files with new names and removes the old ones after it has written the manifest, so an
interrupted save leaves the earlier checkpoint unchanged, and a concurrent reader finds one or the
other.

Only one save at a time writes into a directory: it has the file ``.saving``, which is locked
(flock(2)) and lists the files that may have to be removed. A killed save leaves this file, and the
next save removes the listed files. No other file is ever removed. Blocking file I/O, on the
caller's thread. Read next: ``optimizer_states.py``.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.arrays.keys import Key, KeySpec
from kvstore.checkpoint.atomic import (
    ABANDONED_AFTER_S,
    checked_path,
    damaged,
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
"""The earlier version, which can be read, too."""
_MAX_MANIFEST_BYTES = 1 << 20
_KINDS = ("values", "states")
_OWN_NAME = re.compile(r"(values|states)-[0-9a-f]{8}\.safetensors")
_MOST_RETRIES = 1000
"""A reader restarts if a new checkpoint was saved meanwhile; each try takes some milliseconds."""


# -- writing ------------------------------------------------------------------------------


def write_checkpoint(
    directory: FilePath,
    contents: Mapping[Key, Content],
    optimizer: Optimizer | None,
    pieces: Iterable[SavedPiece],
) -> None:
    """Write a checkpoint into ``directory``, which is created if it does not exist.

    Raises ``CheckpointError``, also while another save writes there.
    """
    directory = checked_path(directory)
    specs = {str(key): content.stored for key, content in contents.items()}
    if "__metadata__" in specs:
        raise CheckpointError(
            "cannot save the key '__metadata__', which the file format reserves; use another key"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise CheckpointError(
            f"{directory} must be a directory or a new name, but it is a file; choose another name"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"cannot create the checkpoint directory {directory}: {error.strerror}; choose a "
            "directory that you can write to"
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
    """Claim the directory for one save, which writes these ``files``.

    At the end, even after an error, those of these files and of the earlier checkpoint's are
    removed that are not in the manifest.
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
    """Open and lock the claim file; return it, and whether it could be locked.

    Raises ``CheckpointError`` if another save has it, and ``OSError``.
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
        file.close()  # the earlier save removed it before it was locked here


def _time_of(file: FileIO) -> float:
    return os.fstat(file.fileno()).st_mtime


def _open_claim(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _taken(path: Path, holder: dict[str, Any]) -> CheckpointError:
    process = "another process"
    if "pid" in holder:
        process = f"process {holder['pid']} on {holder.get('host')}"
    return CheckpointError(
        f"{process} is already saving into {path.parent}; wait for it, or save into another "
        "directory"
    )


def _holder(content: bytes | None) -> dict[str, Any]:
    """Return the contents of a claim; empty while it is being written."""
    try:
        holder = json.loads(content or b"{}")
    except (ValueError, RecursionError):
        return {}
    return holder if type(holder) is dict else {}


def _files_in(holder: dict[str, Any]) -> list[str]:
    files = holder.get("files")
    return [name for name in files if type(name) is str] if type(files) is list else []


def _sweep(directory: Path, names: Iterable[str]) -> bool:
    """Remove files that the manifest does not name; return False if it is damaged."""
    named = _named_by_manifest(directory)
    if named is None:
        return False
    for name in set(names) - set(named):
        if _OWN_NAME.fullmatch(name):
            with suppress(OSError):
                (directory / name).unlink(missing_ok=True)
    return True


def _named_by_manifest(directory: Path) -> list[str] | None:
    """Return the files in the checkpoint's manifest, or None if unreadable."""
    if not (directory / MANIFEST).exists():
        return []
    try:
        return [*_read_manifest(directory).files.values()]
    except CheckpointError:
        return None


# -- reading ------------------------------------------------------------------------------


class CheckpointReader(SavedStates):
    """A checkpoint that is open for reading. Raises ``CheckpointError``."""

    def __init__(self, directory: FilePath) -> None:
        directory = checked_path(directory)
        manifest = _read_manifest(directory)
        for _ in range(_MOST_RETRIES):
            try:
                self._open(_files_of(directory, manifest), manifest.digests)
            except CheckpointError:
                # Another save may have replaced the files meanwhile.
                last, manifest = manifest, _read_manifest(directory)
                if manifest == last:
                    raise
            else:
                return
        raise CheckpointError(f"other saves replaced {directory} while it was read; try again")

    def _open(self, paths: Mapping[str, Path], digests: Mapping[str, Any] | None) -> None:
        with ExitStack() as stack:
            self._values = stack.enter_context(TensorReader(paths["values"]))
            super().__init__(paths["states"], takes_rows=True)
            stack.callback(super().close)
            found = {"values": self._values.digest, "states": self.digest}
            wanted = found if digests is None else digests
            for kind in _KINDS:
                if wanted.get(kind) != found[kind]:
                    raise CheckpointError(
                        f"{paths[kind]} does not match {MANIFEST}: it is from another save, or "
                        "damaged; load an earlier checkpoint"
                    )
            is_int = self._values.metadata.get("key_type") == "int"
            key_spec = cache(KeySpec._make)  # one object for all keys of a shape and dtype
            try:
                self.specs = {
                    (int(name) if is_int else name): key_spec(self._values.spec(name))
                    for name in self._values.names
                }
            except ValueError as error:
                raise CheckpointError(
                    f"{paths['values']} must have integer keys: {error}; load an earlier checkpoint"
                ) from error
            self._take_whole_shapes()
            stack.pop_all()

    def _take_whole_shapes(self) -> None:
        """Replace the shapes of stored rows in ``specs`` by the shapes of whole keys."""
        for key, spec in self.specs.items():
            shape = self.row_shapes.get(str(key))
            if shape is None:
                continue
            whole = KeySpec(shape, spec.dtype)
            if spec != stored_spec(whole, len(self.rows_of(key))):
                raise CheckpointError(
                    f"key {key!r} has values of shape {spec.shape} in {self.path.parent}, "
                    "which do not fit the ids of its rows"
                )
            self.specs[key] = whole

    def check(self, contents: Mapping[Key, Content], optimizer: Optimizer | None) -> None:
        """Check that the checkpoint has these keys' values and states, undamaged."""
        for key, content in contents.items():
            spec = content.spec
            found = self.specs.get(key)
            if found != spec:
                has = "not in it" if found is None else f"{found.shape} of {found.dtype} in it"
                raise CheckpointError(
                    f"key {key!r} of the store is {spec.shape} of {spec.dtype}, and {has}; load it "
                    "into a store with the same keys"
                )
            self.check_kind(key, content)
        self._values.verify()
        super().check(contents, optimizer)

    def read(self, key: Key, start: int, stop: int, optimizer: Optimizer | None) -> SavedPiece:
        """Return some elements of a key, with their values."""
        piece = super().read(key, start, stop, optimizer)
        return piece._replace(values=self._values.read(str(key), start, stop))

    def close(self) -> None:
        """Close both files; idempotent."""
        super().close()
        self._values.close()


class _Manifest(NamedTuple):
    """The contents of a manifest: names, sizes and digests of the two files."""

    files: dict[str, str]
    """The names of the files, which are in the manifest's directory."""
    sizes: dict[str, Any]
    digests: dict[str, Any] | None
    """The digests of the files; None in version 1."""


def _read_manifest(directory: Path) -> _Manifest:
    path = directory / MANIFEST
    if directory.is_dir() and not path.exists():
        raise CheckpointError(
            f"{directory} is not a complete checkpoint: {MANIFEST} is missing; pass the "
            "directory that you passed to save_checkpoint"
        )
    found = read_json(path, _MAX_MANIFEST_BYTES)
    wrong = CheckpointError(f"{path} is not a checkpoint's manifest")
    if type(found) is not dict or found.get("format") != _FORMAT:
        raise wrong
    version = found.get("version")
    if type(version) is not int or version not in (_WITHOUT_DIGESTS, _VERSION):
        raise CheckpointError(
            f"{path} has format version {version!r}, expected {_WITHOUT_DIGESTS} or {_VERSION}; "
            "load it with the version of this package that saved it"
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
    """Return the manifest's two files, if they exist with the recorded sizes."""
    paths = {}
    for kind, name in manifest.files.items():
        path, expected = directory / name, manifest.sizes.get(kind)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{path}, which {MANIFEST} lists, cannot be read ({error.strerror}); load an "
                "earlier checkpoint, or restore the file"
            ) from error
        if size != expected:
            raise damaged(path, f"it has {size} bytes, expected {expected}")
        paths[kind] = path
    return paths
