"""What ``kvstore.run`` and its workers hand each other: files in a directory of the user alone.

The only place of the project that unpickles. What it reads was written by the same user: the
directory has mode 0700, and owner and mode are looked at before anything is read; nothing here
ever came over the network as a message. A parcel is one line of JSON, then bytes of pickle; it is
written under another name and renamed, so it is there whole or not at all. Used by the caller
(``cluster.py``) and by the workers (``worker.py``). Any thread may call.

What the launcher's output means to the process that started it.

Pure: lines in, lines to show out. Three things are not shown: the marks by which a worker says
that all lines of a call have come, the launcher's final block about a failure (which becomes the
text of an exception), and, once the caller ends the job, what launcher, scheduler and nodes say
about that. Used by
``background.py``; ``worker.py`` writes the marks, ``launch/job/report.py`` the block.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import stat
import sys
import tempfile
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from kvstore.launch.job.report import FAILURE_HEADING, GOES_ON

BELL = "bell"
"""A pipe into which a worker writes a byte when it has left a parcel."""

END = "end\n"
"""The order after which no call follows."""

INSTALL_CLOUDPICKLE = "pip install cloudpickle"
_MAX_HEADER_BYTES = 16 * 1024 * 1024
_PROTOCOL = 5


class NotSendable(Exception):
    """An object cannot be pickled; the text says what to do. Callers raise their own errors."""

    def __init__(self, message: str, *, needs_cloudpickle: bool = False) -> None:
        super().__init__(message)
        self.needs_cloudpickle = needs_cloudpickle


class NotReadable(Exception):
    """A parcel cannot be read here: whose it is, its Python, or a module that is missing."""


# -- the directory ------------------------------------------------------------------------


def make_directory(parent: str | os.PathLike[str] | None) -> Path:
    """A new directory of mode 0700 with a bell, below ``parent`` (None: that for temporary files).

    The caller owns and removes it. Raises OSError.
    """
    directory = Path(os.path.abspath(tempfile.mkdtemp(prefix="kvstore-run-", dir=parent)))
    try:
        os.mkfifo(directory / BELL, 0o600)
    except OSError:  # a file system without pipes: then parcels are looked for, see has_bell
        pass
    return directory


def has_bell(directory: Path) -> bool:
    """Return whether workers on this machine can ring."""
    return (directory / BELL).is_fifo()


def check_directory(directory: Path) -> None:
    """Raise :class:`NotReadable` unless the directory is this user's alone."""
    try:
        found = os.lstat(directory)
    except OSError as error:
        raise NotReadable(
            f"{directory} cannot be reached: {error.strerror}; all hosts of the job need it under "
            "this name: give kvstore.run a directory that they share (share_dir=...)"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise NotReadable(f"{directory} is not a directory")
    if found.st_uid != os.geteuid():
        raise NotReadable(
            f"{directory} belongs to user {found.st_uid}, and this process to {os.geteuid()}: "
            "functions are taken from the user's own directory only"
        )
    if found.st_mode & 0o077:
        raise NotReadable(f"others may enter {directory}: its mode must be 0700 (chmod 700)")


def call_path(directory: Path, call: int) -> Path:
    """Return where the function of a call lies."""
    return directory / f"call-{call}"


def answer_path(directory: Path, call: int, rank: int) -> Path:
    """Return where the worker ``rank`` leaves what it returned or raised."""
    return directory / f"answer-{call}-{rank}"


def orders_path(directory: Path, rank: int) -> Path:
    """The pipe by which a worker that stays hears the numbers of its calls."""
    return directory / f"orders-{rank}"


def ring(directory: Path) -> None:
    """Tell the caller that a parcel has come, if it listens on this machine."""
    try:
        descriptor = os.open(directory / BELL, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # there is no listener here: the caller is on another host and looks itself
        return
    try:
        os.write(descriptor, b"\0")
    except OSError:  # full: it has not heard the last ones yet, and will look for all
        pass
    finally:
        os.close(descriptor)


# -- parcels ------------------------------------------------------------------------------


def write(path: Path, header: Mapping[str, Any], body: bytes = b"") -> None:
    """Leave a parcel at ``path``, readable by its user only. Raises OSError."""
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
    """Header and body of a parcel; unpickle the body with :func:`load`.

    Raises :class:`NotReadable`, also where it is another user's, and FileNotFoundError.
    """
    check_directory(path.parent)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise NotReadable(f"{path} is not a file of this user")
        header = _header(path, file)
        return header, file.read()


def _header(path: Path, file: IO[bytes]) -> dict[str, Any]:
    line = file.readline(_MAX_HEADER_BYTES)
    try:
        header = json.loads(line)
    except ValueError as error:
        raise NotReadable(f"{path} is damaged: {error}") from error
    if not isinstance(header, dict):
        raise NotReadable(f"{path} is damaged: its first line is not an object")
    return header


# -- pickles ------------------------------------------------------------------------------


def dump(value: object, what: str) -> bytes:
    """``value`` as bytes for :func:`load` in another process; ``what`` names it in errors.

    With cloudpickle also lambdas, closures and what ``__main__`` or a notebook defines. Raises
    :class:`NotSendable`.
    """
    cloudpickle = _cloudpickle()
    file = io.BytesIO()
    pickler = (_PlainPickler if cloudpickle is None else cloudpickle.Pickler)(file, _PROTOCOL)
    try:
        pickler.dump(value)
    except NotSendable:
        raise
    except Exception as error:  # whatever a __reduce__ of the user raises
        if cloudpickle is None and isinstance(error, pickle.PicklingError | AttributeError):
            raise _needs_cloudpickle(what, str(error)) from error
        raise NotSendable(
            f"{what} cannot be pickled: {type(error).__name__}: {error}; open files, locks and "
            "stores cannot travel: make them in the function itself"
        ) from error
    return file.getvalue()


def load(body: bytes) -> Any:
    """What :func:`dump` was given. Raises whatever the classes in it raise, ImportError above all.

    ``body`` must be that of a parcel which :func:`read` has returned.
    """
    return pickle.loads(body)


def holds_code(body: bytes) -> bool:
    """Return whether it carries functions or classes themselves and not only their names."""
    return b"cloudpickle" in body


def python_version() -> list[int]:
    """Of this process; functions by value need the same on the other side."""
    return list(sys.version_info[:2])


class _PlainPickler(pickle.Pickler):
    """Refuses what the other process would not find: ``__main__`` there is another file."""

    def reducer_override(self, value: Any) -> Any:
        is_code = isinstance(value, type | types.FunctionType)
        if is_code and value.__module__ == "__main__":
            raise _needs_cloudpickle(value.__qualname__, "it is defined in __main__")
        return NotImplemented


def _needs_cloudpickle(what: str, why: str) -> NotSendable:
    return NotSendable(
        f"{what} cannot be handed to another process by plain pickle ({why}); install cloudpickle "
        f"({INSTALL_CLOUDPICKLE}), or put it into a module that the workers can import",
        needs_cloudpickle=True,
    )


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError:
        return None
    return cloudpickle


_MARK = "\x1fkvstore call "
_MARKED = re.compile(r"(?P<before>.*)\x1fkvstore call (?P<call>\d+)\Z", re.DOTALL)
_PREFIX = re.compile(r"\[(?P<role>worker|server|scheduler)(?: (?P<rank>\d+))?[^]]*\] ")
# What nodes say when others end: all of scheduler and servers, and the dated lines of workers.
_OF_THE_END = re.compile(
    r"\[(?:scheduler|server|worker \d+[^]]*\] \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] W[\w[\]]*: )"
)
_PROCESS = re.compile(r"process: +(?P<role>worker|server|scheduler)(?: (?P<rank>\d+))?\b")
_ENDED = re.compile(r"ended: +(?P<how>.*?), [0-9.]+ s after the start")
_LOG_HEADING = re.compile(r"the last (?:line|\d+ lines) of its log:|its log is empty")


def marker(call: int) -> str:
    """The line, or end of a line, that ends what a worker writes in a call."""
    return f"{_MARK}{call}"


@dataclass(frozen=True)
class Report:
    """The launcher's final block: who failed first and how; ``text`` is for people."""

    role: str
    rank: int
    how: str
    text: str


@dataclass
class LauncherOutput:
    """Sorts the lines of one launcher. ``said`` are the launcher's own, without their prefix."""

    said: list[str] = field(default_factory=list)
    block: list[str] = field(default_factory=list)
    marks: set[tuple[int, int, bool]] = field(default_factory=set)
    is_ending: bool = False
    _goes_on: bool = False

    def show(self, line: str, *, is_error: bool) -> str | None:
        """Return the line to show, or None. Lines come without their end."""
        if is_error and (self.block or line == FAILURE_HEADING):
            self.block.append(line)
            return None
        if is_error and not line:  # stands above the block, and nowhere else
            return None
        if self._is_of_the_launcher(line, is_error):
            self.said.append(line.removeprefix("[launcher] "))
            return None if self.is_ending else line
        if self.is_ending and _OF_THE_END.match(line):
            return None
        return self._without_mark(line, is_error)

    def has_all_of(self, call: int, ranks: int) -> bool:
        """Whether every worker has said, on both streams, that the call's lines are complete."""
        return all(
            (call, rank, is_error) in self.marks
            for rank in range(ranks)
            for is_error in (False, True)
        )

    @property
    def is_without_scheduler(self) -> bool:
        """Whether the launcher has said that the scheduler is lost and the job continues."""
        return any(GOES_ON in text for text in self.said)

    def _is_of_the_launcher(self, line: str, is_error: bool) -> bool:
        """Its messages begin with its name; what a cluster's program said follows, indented."""
        begins = line.startswith("[launcher] ")
        if not is_error:
            return begins
        self._goes_on = begins or (self._goes_on and line.startswith("  "))
        return self._goes_on

    def _without_mark(self, line: str, is_error: bool) -> str | None:
        found = _MARKED.match(line)
        prefix = _PREFIX.match(line)
        if found is None or prefix is None or prefix["rank"] is None:
            return line
        self.marks.add((int(found["call"]), int(prefix["rank"]), is_error))
        return None if found["before"] == prefix[0] else found["before"]

    def report(self, without: str) -> Report | None:
        """Return what the final block says, or None where there was none.

        ``without`` is a directory that will be gone when somebody reads it: lines that name it
        are left out.
        """
        return read_block([line for line in self.block if without not in line])


def read_block(lines: list[str]) -> Report | None:
    """The block of ``report.failure_block`` as data; None when it names no process."""
    process = next(filter(None, map(_PROCESS.match, lines)), None)
    ended = next(filter(None, map(_ENDED.match, lines)), None)
    if process is None or ended is None:
        return None
    begin = next((i for i, line in enumerate(lines) if _LOG_HEADING.match(line)), len(lines))
    kept = [line.partition(_MARK)[0] for line in lines[begin:]]
    text = "\n".join(line for line in kept if line.strip())
    return Report(process["role"], int(process["rank"] or 0), ended["how"], text)
