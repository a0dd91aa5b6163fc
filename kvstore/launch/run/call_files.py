"""The files that ``kvstore.run`` and its workers exchange, in a private directory.

Only this module of the project unpickles. It reads only files of the same user: the directory has
mode 0700, owner and mode are checked before reading, and nothing here came over the network as a
message. A call file is one line of JSON, followed by bytes of pickle. It is written under another
name and then renamed, so it is always complete. Used by the caller (``job.py``) and by the workers
(``worker.py``). Any thread may call.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import stat
import sys
import sysconfig
import tempfile
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    MissingDependencyError,
    WorkerFailed,
)
from pslite.errors import UsageError

END = "end"
"""The order that tells workers to end."""

MARK = "\x1fkvstore call "
"""The start of the line that a worker writes on both of its streams when it has written its answer
to a call. It tells the caller that the answer and all lines of the call are there."""

_PROTOCOL = 5


class NotReadable(Exception):
    """A call file cannot be read: wrong owner or Python, or a missing module."""


@dataclass(frozen=True)
class WorkerAnswer:
    """The answer of one worker to one call.

    ``kind`` is ``value``, ``error`` or ``refusal``. ``body`` is the pickle of the value or error,
    or empty if the error cannot be pickled. ``text`` is the traceback of an error, or the reason of
    a refusal. ``type`` is the name of the error's class, and ``at_s`` the time of day.
    ``blames_another`` is true if the worker failed because another process is lost.
    """

    kind: str
    body: bytes = b""
    type: str = ""
    text: str = ""
    at_s: float = 0.0
    blames_another: bool = False

    @property
    def failed(self) -> bool:
        return self.kind != "value"


# -- the directory ------------------------------------------------------------------------


def make_directory(parent: str | None) -> Path:
    """Create a directory of mode 0700 in ``parent``; None: the temporary directory.

    The caller owns and removes it. Raises ``ArgumentValueError``.
    """
    try:
        return Path(os.path.abspath(tempfile.mkdtemp(prefix="kvstore-run-", dir=parent)))
    except OSError as error:
        raise ArgumentValueError(
            f"cannot create the job's directory in {error.filename}: {error.strerror}; pass a "
            "writable directory (share_dir=...)"
        ) from error


def check_directory(directory: Path) -> None:
    """Raise :class:`NotReadable` unless only this user can access the directory."""
    try:
        found = os.lstat(directory)
    except OSError as error:
        raise NotReadable(
            f"cannot read {directory}: {error.strerror}; all hosts of the job need it at this "
            "path: pass kvstore.run a directory that they share (share_dir=...)"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise NotReadable(f"{directory} is not a directory")
    if found.st_uid != os.geteuid():
        raise NotReadable(
            f"{directory} must belong to user {os.geteuid()}, who runs this process, but it "
            f"belongs to user {found.st_uid}"
        )
    if found.st_mode & 0o077:
        raise NotReadable(f"other users can access {directory}; run chmod 700 {directory}")


def call_path(directory: Path, call: int) -> Path:
    """Return the path of a call's function."""
    return directory / f"call-{call}"


def answer_path(directory: Path, call: int, rank: int) -> Path:
    """Return the path of the answer of worker ``rank``."""
    return directory / f"answer-{call}-{rank}"


def orders_path(directory: Path, rank: int) -> Path:
    """Return the path of the pipe for sending call numbers to a worker."""
    return directory / f"orders-{rank}"


# -- call files ---------------------------------------------------------------------------


def write(path: Path, header: Mapping[str, Any], body: bytes = b"") -> None:
    """Write a call file to ``path``, readable by this user only. Raises OSError."""
    own = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(json.dumps(dict(header)).encode() + b"\n")
            file.write(body)
        os.replace(own, path)
    except OSError:
        own.unlink(missing_ok=True)
        raise


def read(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return header and body of a call file; unpickle the body with :func:`load`.

    Raises OSError, or :class:`NotReadable`, for example if the file belongs to another user.
    """
    check_directory(path.parent)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise NotReadable(f"{path} must be a regular file of user {os.geteuid()}")
        return json.loads(file.readline()), file.read()


def write_call(directory: Path, call: int, body: bytes) -> None:
    """Write a packed function to the directory. Raises ``UsageError``."""
    header = {
        "python": python_version(),
        "by_value": b"cloudpickle" in body,
        "path": own_path(sys.path, os.getcwd()),
    }
    try:
        write(call_path(directory, call), header, body)
    except OSError as error:
        raise UsageError(
            f"cannot write the function to {directory}: {error.strerror}; choose another "
            "directory (share_dir=..., or TMPDIR)"
        ) from error


def python_version() -> list[int]:
    """Return this Python's version; functions pickled by value need the same one."""
    return list(sys.version_info[:2])


def own_path(path: Sequence[str], here: str) -> list[str]:
    """Return the caller's own module directories, without those of libraries."""
    library = os.path.realpath(sysconfig.get_path("stdlib"))

    def is_library(entry: str) -> bool:
        found = os.path.realpath(entry)
        return (
            f"{found}/".startswith(f"{library}/")
            or not {"site-packages", "dist-packages"}.isdisjoint(found.split("/"))
            or re.search(r"/python\d+\.zip$", found) is not None
        )

    entries = [os.path.join(here, entry).rstrip("/") or "/" for entry in path]
    return [entry for entry in entries if not is_library(entry)]


def write_answer(path: Path, answer: WorkerAnswer) -> None:
    header = asdict(answer)
    write(path, header, header.pop("body"))


def read_answer(path: Path) -> WorkerAnswer:
    header, body = read(path)
    return WorkerAnswer(**header, body=body)


def remove(directory: Path, call: int, workers: int) -> None:
    """Remove the files of a call and its answers."""
    call_path(directory, call).unlink(missing_ok=True)
    for rank in range(workers):
        answer_path(directory, call, rank).unlink(missing_ok=True)


# -- pickles ------------------------------------------------------------------------------


def dump(value: object, what: str) -> bytes:
    """Pickle ``value`` for :func:`load`; ``what`` names it in errors.

    With cloudpickle, it may be a lambda, a closure, or defined in ``__main__`` or a notebook.
    Raises ``MissingDependencyError`` if cloudpickle would help, else ``ArgumentTypeError``.
    """
    try:
        import cloudpickle
    except ImportError:
        cloudpickle = None
    file = io.BytesIO()
    make = _PlainPickler if cloudpickle is None else _with_file_names(cloudpickle.Pickler)
    try:
        make(file, _PROTOCOL).dump(value)
    except MissingDependencyError:
        raise
    except Exception as error:  # whatever a __reduce__ of the user raises
        if cloudpickle is None and isinstance(error, pickle.PicklingError | AttributeError):
            raise _needs_cloudpickle(what, str(error)) from error
        raise ArgumentTypeError(
            f"cannot pickle {what}: {type(error).__name__}: {error}; create open files, locks "
            "and stores inside the function"
        ) from error
    return file.getvalue()


def load(body: bytes) -> Any:
    """Unpickle the output of :func:`dump`. Raises the errors of the value's classes.

    ``body`` must come from a call file that :func:`read` has returned.
    """
    return pickle.loads(body)


class _PlainPickler(pickle.Pickler):
    """A pickler that refuses functions and classes of ``__main__``.

    The other process cannot find them, since its ``__main__`` is another file.
    """

    def reducer_override(self, value: Any) -> Any:
        is_code = isinstance(value, type | types.FunctionType)
        if is_code and value.__module__ == "__main__":
            raise _needs_cloudpickle(value.__qualname__, "it is defined in __main__")
        return NotImplemented


def _with_file_names(pickler: Any) -> Any:
    """Return a subclass of cloudpickle's pickler that keeps the file names of code.

    Since version 3.1.3 it leaves them out; tracebacks would then lack the lines of the source.
    """

    class Pickler(pickler):  # type: ignore[misc]  # its type is Any
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, types.CodeType):
                make, fields = self.dispatch_table[types.CodeType](value)
                return _make_code, (make, fields, value.co_filename)
            return super().reducer_override(value)

    return Pickler


def _make_code(make: Any, fields: tuple[Any, ...], file_name: str) -> types.CodeType:
    code: types.CodeType = make(*fields).replace(co_filename=file_name)
    return code


def _needs_cloudpickle(what: str, why: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"plain pickle cannot pass {what} to another process ({why}); install cloudpickle (pip "
        "install cloudpickle), or move it into a module that the workers can import"
    )


# -- answers ------------------------------------------------------------------------------


def value_of(rank: int, answer: WorkerAnswer) -> Any:
    """Return the worker's result. Raises ``WorkerFailed`` if it is unreadable."""
    try:
        return load(answer.body)
    except Exception as error:  # whatever the classes in it raise
        raise WorkerFailed(
            f"cannot read the result of worker {rank}: {type(error).__name__}: {error}",
            role="worker",
            rank=rank,
        ) from error


def error_of(rank: int, failures: Mapping[int, WorkerAnswer]) -> Exception:
    """Return a worker's exception, with its traceback there as the cause."""
    answer = failures[rank]
    if answer.kind == "refusal":
        return WorkerFailed(f"worker {rank}: {answer.text}", role="worker", rank=rank)
    others = [str(one) for one in sorted(failures) if failures[one].type == answer.type]
    others.remove(str(rank))
    same = f", as did worker{'s' * (len(others) > 1)} {', '.join(others)}" if others else ""
    told = WorkerFailed(
        f"worker {rank} raised {answer.type}{same}; its traceback there:\n{answer.text}",
        role="worker",
        rank=rank,
    )
    try:
        raised = load(answer.body) if answer.body else None
    except Exception:  # its module is not here: use the text
        return told
    if not isinstance(raised, Exception):
        return told
    raised.__cause__ = told
    return raised
